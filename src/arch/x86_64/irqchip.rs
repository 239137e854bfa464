//! The interrupt controller, in one of two forms, and its saved state.
//!
//! *Split* (the default): KVM has the local APICs, [`crate::arch::ioapic`] is the I/O APIC, and there is no 8259 and
//! no PIT: making a VM is milliseconds faster, and less of the host's kernel faces the guest. *Kernel*: KVM has all
//! of it, with a PIT, for guests that know nothing newer.

use std::sync::Arc;

use kvm_bindings::{
    KVM_CAP_SPLIT_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KVM_PIT_SPEAKER_DUMMY, KvmIrqRouting, kvm_enable_cap, kvm_irq_routing_entry,
    kvm_irq_routing_msi, kvm_irqchip, kvm_msi, kvm_pit_config, kvm_pit_state2,
};
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use crate::arch::ioapic::{self, Ioapic, Msi, PINS, Routes};
use crate::fault::{Blame, Fault, Field};

/// Which form, as `--irqchip` names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Local APICs in KVM, the I/O APIC here, no 8259, no PIT.
    #[default]
    Split,
    /// Everything in KVM, with a PIT.
    Kernel,
}

/// The interrupt controller of a machine. vCPUs are made after it.
pub enum Irqchip {
    /// See [`Mode::Split`]. The I/O APIC belongs on the memory bus.
    Split(Arc<Ioapic>),
    /// See [`Mode::Kernel`].
    Kernel,
}

/// What of it outlives a migration.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum State {
    /// Of [`Irqchip::Split`].
    Split(ioapic::State),
    /// Of [`Irqchip::Kernel`]: both 8259s, the I/O APIC, the PIT.
    Kernel(Box<([kvm_irqchip; 3], kvm_pit_state2)>),
}

/// Why KVM refuses an interrupt controller.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An ioctl failed.
    #[error("{0}: {1}; try the other kind")]
    Ioctl(&'static str, #[source] kvm_ioctls::Error),
    /// The state is of the other form.
    #[error("the saved machine has the other interrupt controller; use the same")]
    OtherMode,
}

impl Fault for Error {
    fn blame(&self) -> Blame {
        match self {
            Self::Ioctl(..) => Blame::host(Field::Irqchip),
            Self::OtherMode => Blame::user(Field::Irqchip),
        }
    }
}

const KERNEL_CHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

impl Irqchip {
    /// Makes it.
    ///
    /// # Errors
    /// Where KVM refuses.
    pub fn new(vm: &Arc<VmFd>, mode: Mode) -> Result<Self, Error> {
        match mode {
            Mode::Split => {
                let mut cap = kvm_enable_cap { cap: KVM_CAP_SPLIT_IRQCHIP, ..Default::default() };
                cap.args[0] = PINS as u64;
                vm.enable_cap(&cap).map_err(|e| Error::Ioctl("KVM_CAP_SPLIT_IRQCHIP", e))?;
                let (routes_vm, signal_vm) = (vm.clone(), vm.clone());
                let kvm = ioapic::Kvm {
                    set_routes: Box::new(move |routes| set_routes(&routes_vm, routes)),
                    signal: Box::new(move |msi| signal(&signal_vm, msi)),
                };
                Ok(Self::Split(Arc::new(Ioapic::new(kvm))))
            }
            Mode::Kernel => {
                vm.create_irq_chip().map_err(|e| Error::Ioctl("KVM_CREATE_IRQCHIP", e))?;
                // The speaker's port belongs to the PIT; nobody listens.
                let config = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
                vm.create_pit2(config).map_err(|e| Error::Ioctl("KVM_CREATE_PIT2", e))?;
                Ok(Self::Kernel)
            }
        }
    }

    /// Connects `event` to interrupt `gsi`: each signal is one edge.
    ///
    /// # Errors
    /// Where KVM refuses.
    pub fn connect(&self, vm: &VmFd, event: &EventFd, gsi: u32) -> Result<(), Error> {
        vm.register_irqfd(event, gsi).map_err(|e| Error::Ioctl("KVM_IRQFD", e))
    }

    /// Drives the line of interrupt `gsi`, one that no event is [connected](Irqchip::connect) to.
    pub fn set_line(&self, vm: &VmFd, gsi: u32, asserted: bool) {
        match self {
            Self::Split(ioapic) if (gsi as usize) < PINS => ioapic.set_line(gsi as usize, asserted),
            Self::Split(_) => {}
            // It fails for a line that there is not.
            Self::Kernel => drop(vm.set_irq_line(gsi, asserted)),
        }
    }

    /// A guest has ended a level-triggered interrupt: `KVM_EXIT_IOAPIC_EOI`.
    pub fn eoi(&self, vector: u8) {
        if let Self::Split(ioapic) = self {
            ioapic.eoi(vector);
        }
    }

    /// What [`Irqchip::restore`] needs.
    ///
    /// # Errors
    /// Where KVM refuses.
    pub fn save(&self, vm: &VmFd) -> Result<State, Error> {
        match self {
            Self::Split(ioapic) => Ok(State::Split(ioapic.save())),
            Self::Kernel => {
                let mut chips = KERNEL_CHIPS.map(|chip_id| kvm_irqchip { chip_id, ..Default::default() });
                for chip in &mut chips {
                    vm.get_irqchip(chip).map_err(|e| Error::Ioctl("KVM_GET_IRQCHIP", e))?;
                }
                let pit = vm.get_pit2().map_err(|e| Error::Ioctl("KVM_GET_PIT2", e))?;
                Ok(State::Kernel(Box::new((chips, pit))))
            }
        }
    }

    /// Takes over what [`Irqchip::save`] gave.
    ///
    /// # Errors
    /// Where KVM refuses, or the state is of the other form.
    pub fn restore(&self, vm: &VmFd, state: State) -> Result<(), Error> {
        match (self, state) {
            (Self::Split(ioapic), State::Split(state)) => {
                ioapic.restore(state);
                Ok(())
            }
            (Self::Kernel, State::Kernel(state)) => {
                let (chips, pit) = *state;
                for chip in &chips {
                    vm.set_irqchip(chip).map_err(|e| Error::Ioctl("KVM_SET_IRQCHIP", e))?;
                }
                vm.set_pit2(&pit).map_err(|e| Error::Ioctl("KVM_SET_PIT2", e))
            }
            _ => Err(Error::OtherMode),
        }
    }
}

fn set_routes(vm: &VmFd, routes: &Routes) {
    let entries: Vec<_> = (0u32..)
        .zip(routes)
        .filter_map(|(gsi, route)| route.map(|msi| (gsi, msi)))
        .map(|(gsi, msi)| {
            let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
            entry.u.msi =
                kvm_irq_routing_msi { address_lo: msi.address, data: msi.data, ..Default::default() };
            entry
        })
        .collect();
    let routing = KvmIrqRouting::from_entries(&entries).expect("24 entries fit");
    if let Err(error) = vm.set_gsi_routing(&routing) {
        // What a guest writes cannot make this fail; running out of memory can. Its interrupts stay as they were.
        tracing::error!(%error, "KVM_SET_GSI_ROUTING");
    }
}

fn signal(vm: &VmFd, msi: Msi) {
    let msi = kvm_msi { address_lo: msi.address, data: msi.data, ..Default::default() };
    // A message that no local APIC takes is lost, as on a bus.
    let _ = vm.signal_msi(msi);
}
