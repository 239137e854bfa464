//! The interrupt controller in one of two forms, and its saved state.
//!
//! *Split* (the default): KVM has the local APICs, and [`crate::arch::ioapic`] is the I/O APIC.
//! There is no 8259 and no PIT, so less of the host's kernel is exposed to the guest. *Kernel*: KVM
//! has everything, including a PIT, for guests that need the old devices.

use std::sync::Arc;

use kvm_bindings::{
    KVM_CAP_SPLIT_IRQCHIP, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE,
    KVM_PIT_SPEAKER_DUMMY, kvm_enable_cap, kvm_irqchip, kvm_msi, kvm_pit_config, kvm_pit_state2,
};
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};

use crate::arch::gsi::Gsis;
use crate::arch::ioapic::{self, Ioapic, Msi, PINS, Vectors};
use crate::arch::layout;
use crate::arch::routing::Pins;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// The form, as `--irqchip` names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Local APICs in KVM, the I/O APIC here, no 8259, no PIT.
    #[default]
    Split,
    /// Everything in KVM, with a PIT.
    Kernel,
}

impl Mode {
    /// The default.
    pub fn of_host() -> Self {
        Self::default()
    }

    /// Whether devices can interrupt by messages (MSI): the local APICs of both take them.
    pub fn takes_messages(self) -> bool {
        true
    }
}

/// State in vCPUs on which the controller's state depends: the vectors in their local APICs.
pub type HeldVectors = Vectors;

/// The interrupt controller of a machine. vCPUs are created after it.
pub struct Irqchip {
    vm: Arc<VmFd>,
    gsis: Arc<Gsis>,
    /// See [`Mode::Split`].
    ioapic: Option<Arc<Ioapic>>,
}

/// The state that a migration carries.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum State {
    /// Of [`Mode::Split`].
    Split(ioapic::State),
    /// Of [`Mode::Kernel`]: both 8259s, the I/O APIC, the PIT.
    Kernel(Box<([kvm_irqchip; 3], kvm_pit_state2)>),
}

/// Why KVM refuses an interrupt controller.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An ioctl failed.
    #[error("{0}: {1}; try the other kind")]
    Ioctl(&'static str, #[source] kvm_ioctls::Error),
    /// The state is of the other form.
    #[error("the saved machine has the other interrupt controller; start with that one")]
    OtherMode,
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Ioctl(..) => ErrorOrigin::host(Field::Irqchip),
            Self::OtherMode => ErrorOrigin::user(Field::Irqchip),
        }
    }
}

const KERNEL_CHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

impl Gsis {
    /// Sets the messages of the pins.
    fn route_pins(&self, pins: Pins) {
        let mut routes = self.routes();
        routes.pins = pins;
        self.set(&routes);
    }
}

/// Sends a message now: `KVM_SIGNAL_MSI`.
fn signal(vm: &VmFd, msi: Msi) {
    // A message that no local APIC takes is lost, as on hardware.
    let _ = vm.signal_msi(kvm_msi { address_lo: msi.address, data: msi.data, ..Default::default() });
}

impl Irqchip {
    /// Creates the controller.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn new(vm: &Arc<VmFd>, mode: Mode) -> Result<Self, Error> {
        // Intel hosts need it for guests in real mode, and refuse to run without it.
        vm.set_tss_address(layout::KVM_TSS as usize).map_err(|e| Error::Ioctl("KVM_SET_TSS_ADDR", e))?;
        let gsis = Arc::new(Gsis::new(vm.clone(), true));
        let ioapic = match mode {
            Mode::Split => {
                let mut cap = kvm_enable_cap { cap: KVM_CAP_SPLIT_IRQCHIP, ..Default::default() };
                cap.args[0] = PINS as u64;
                vm.enable_cap(&cap).map_err(|e| Error::Ioctl("KVM_CAP_SPLIT_IRQCHIP", e))?;
                let (gsis, vm) = (gsis.clone(), vm.clone());
                let kvm = ioapic::Kvm {
                    set_routes: Box::new(move |pins| gsis.route_pins(Pins(Some(*pins)))),
                    signal: Box::new(move |msi| signal(&vm, msi)),
                };
                Some(Arc::new(Ioapic::new(kvm)))
            }
            Mode::Kernel => {
                vm.create_irq_chip().map_err(|e| Error::Ioctl("KVM_CREATE_IRQCHIP", e))?;
                // The speaker's port belongs to the PIT. It is emulated without sound.
                let config = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
                vm.create_pit2(config).map_err(|e| Error::Ioctl("KVM_CREATE_PIT2", e))?;
                None
            }
        };
        Ok(Self { vm: vm.clone(), gsis, ioapic })
    }

    /// All vCPUs have been created. From now on events can be [connected](Gsis::connect).
    ///
    /// # Errors
    /// Never: local APICs come with their vCPUs.
    pub fn complete(&self, _cpus: usize) -> Result<(), Error> {
        Ok(())
    }

    /// The memory range of registers emulated here, for the memory bus: first address and size.
    pub fn registers(&self) -> Option<(u64, u64)> {
        self.ioapic.as_ref().map(|_| (ioapic::BASE, ioapic::SIZE))
    }

    /// Handles a read of one of these registers.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        if let Some(ioapic) = &self.ioapic {
            ioapic.read(offset, data);
        }
    }

    /// Handles a write to one of these registers.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if let Some(ioapic) = &self.ioapic {
            ioapic.write(offset, data);
        }
    }

    /// The machine's interrupt numbers.
    pub fn gsis(&self) -> &Arc<Gsis> {
        &self.gsis
    }

    /// The I/O APIC, unless KVM has it.
    pub fn ioapic(&self) -> Option<&Arc<Ioapic>> {
        self.ioapic.as_ref()
    }

    /// Drives the line of interrupt `gsi`, which must not be [connected](Gsis::connect) to an
    /// event.
    pub fn set_line(&self, gsi: u32, asserted: bool) {
        match &self.ioapic {
            Some(ioapic) if (gsi as usize) < PINS => ioapic.set_line(gsi as usize, asserted),
            Some(_) => {}
            // This fails only for a line that does not exist.
            None => drop(self.vm.set_irq_line(gsi, asserted)),
        }
    }

    /// A guest has ended a level-triggered interrupt: `KVM_EXIT_IOAPIC_EOI`.
    pub fn eoi(&self, vector: u8) {
        if let Some(ioapic) = &self.ioapic {
            ioapic.eoi(vector);
        }
    }

    /// Saves the state for [`Irqchip::restore`]. `held`: see [`Ioapic::save`].
    ///
    /// # Errors
    /// KVM refuses.
    pub fn save(&self, held: &HeldVectors) -> Result<State, Error> {
        if let Some(ioapic) = &self.ioapic {
            return Ok(State::Split(ioapic.save(held)));
        }
        let mut chips = KERNEL_CHIPS.map(|chip_id| kvm_irqchip { chip_id, ..Default::default() });
        for chip in &mut chips {
            self.vm.get_irqchip(chip).map_err(|e| Error::Ioctl("KVM_GET_IRQCHIP", e))?;
        }
        let pit = self.vm.get_pit2().map_err(|e| Error::Ioctl("KVM_GET_PIT2", e))?;
        Ok(State::Kernel(Box::new((chips, pit))))
    }

    /// Restores what [`Irqchip::save`] returned.
    ///
    /// # Errors
    /// KVM refuses, or the state is of the other form.
    pub fn restore(&self, state: State) -> Result<(), Error> {
        match (&self.ioapic, state) {
            (Some(ioapic), State::Split(state)) => {
                ioapic.restore(state);
                Ok(())
            }
            (None, State::Kernel(state)) => {
                let (chips, pit) = *state;
                for chip in &chips {
                    self.vm.set_irqchip(chip).map_err(|e| Error::Ioctl("KVM_SET_IRQCHIP", e))?;
                }
                self.vm.set_pit2(&pit).map_err(|e| Error::Ioctl("KVM_SET_PIT2", e))
            }
            _ => Err(Error::OtherMode),
        }
    }

    /// Does nothing: no state makes KVM write to guest memory, and no message was lost.
    ///
    /// # Errors
    /// Never.
    pub fn commit(&self) -> Result<bool, Error> {
        Ok(false)
    }
}
