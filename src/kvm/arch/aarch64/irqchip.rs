//! KVM's interrupt controller in one of two versions, and its saved state ([`super::gic`]). A GICv3
//! also has an ITS ([`super::its`]) if devices send messages.

use std::sync::{Arc, Mutex, OnceLock};

use kvm_bindings::{
    KVM_ARM_IRQ_TYPE_SHIFT, KVM_ARM_IRQ_TYPE_SPI, KVM_DEV_ARM_VGIC_CTRL_INIT, KVM_DEV_ARM_VGIC_GRP_ADDR,
    KVM_DEV_ARM_VGIC_GRP_CTRL, KVM_DEV_ARM_VGIC_GRP_NR_IRQS, KVM_DEV_ARM_VGIC_SAVE_PENDING_TABLES,
    KVM_VGIC_V2_ADDR_TYPE_CPU, KVM_VGIC_V2_ADDR_TYPE_DIST, KVM_VGIC_V3_ADDR_TYPE_DIST,
    KVM_VGIC_V3_ADDR_TYPE_REDIST, kvm_create_device, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2,
    kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3,
};
use kvm_ioctls::{DeviceFd, VmFd};
use serde::{Deserialize, Serialize};

use super::gic;
use super::its::{self, Its};
use super::layout;
use super::routing::{FIRST_SHARED, SHARED};
use crate::arch::gsi::Gsis;
use vellum_sys::kvm_device;

pub use super::gic::{Error, Mode};

/// State in vCPUs on which the controller's state depends: none on Arm.
pub type HeldVectors = ();

/// The interrupt controller of a machine. vCPUs are created after it, and then it is
/// [completed](Irqchip::complete).
pub struct Irqchip {
    vm: Arc<VmFd>,
    gsis: Arc<Gsis>,
    mode: Mode,
    device: DeviceFd,
    cpus: OnceLock<u64>,
    its: OnceLock<Its>,
    /// The ITS state that [`Irqchip::commit`] restores.
    arrived: Mutex<Option<its::State>>,
}

/// The state that a migration carries.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    mode: Mode,
    /// Attribute group, attribute, value.
    registers: Vec<(u32, u64, u64)>,
    /// The ITS's state, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    its: Option<its::State>,
}

impl Irqchip {
    /// Creates the controller.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn new(vm: &Arc<VmFd>, mode: Mode) -> Result<Self, Error> {
        let type_ = match mode {
            Mode::Gicv3 => kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3,
            Mode::Gicv2 => kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2,
        };
        let mut request = kvm_create_device { type_, ..Default::default() };
        let device =
            vm.create_device(&mut request).map_err(|e| Error::Ioctl("KVM_CREATE_DEVICE of a GIC", e))?;
        let places = match mode {
            Mode::Gicv3 => [
                (KVM_VGIC_V3_ADDR_TYPE_DIST, layout::GIC_DISTRIBUTOR),
                (KVM_VGIC_V3_ADDR_TYPE_REDIST, layout::GIC_REDISTRIBUTORS),
            ],
            Mode::Gicv2 => [
                (KVM_VGIC_V2_ADDR_TYPE_DIST, layout::GIC_DISTRIBUTOR),
                (KVM_VGIC_V2_ADDR_TYPE_CPU, layout::GIC_CPU),
            ],
        };
        for (what, address) in places {
            kvm_device::set(&device, KVM_DEV_ARM_VGIC_GRP_ADDR, what.into(), address)
                .map_err(|e| Error::Ioctl("the address of the GIC", e))?;
        }
        kvm_device::set(&device, KVM_DEV_ARM_VGIC_GRP_NR_IRQS, 0, (FIRST_SHARED + SHARED).into())
            .map_err(|e| Error::Ioctl("the number of interrupts", e))?;
        Ok(Self {
            vm: vm.clone(),
            gsis: Arc::new(Gsis::new(vm.clone(), mode == Mode::Gicv3)),
            mode,
            device,
            cpus: OnceLock::new(),
            its: OnceLock::new(),
            arrived: Mutex::new(None),
        })
    }

    /// Completes the controller, when all vCPUs exist and all messages have numbers. From now on
    /// events can be [connected](Gsis::connect).
    ///
    /// # Errors
    /// KVM refuses: this version does not support that many vCPUs.
    pub fn complete(&self, cpus: usize) -> Result<(), Error> {
        kvm_device::tell(&self.device, KVM_DEV_ARM_VGIC_GRP_CTRL, KVM_DEV_ARM_VGIC_CTRL_INIT.into())
            .map_err(|e| Error::Ioctl("KVM_DEV_ARM_VGIC_CTRL_INIT", e))?;
        self.cpus.get_or_init(|| cpus as u64);
        if !self.gsis.routes().messages.is_empty() {
            let its = Its::new(&self.vm)?;
            self.its.get_or_init(|| its);
        }
        Ok(())
    }

    /// The address range of registers emulated in userspace: none, KVM emulates all.
    pub fn registers(&self) -> Option<(u64, u64)> {
        None
    }

    /// Never called: there are no such registers.
    pub fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    /// Never called: there are no such registers.
    pub fn write(&self, _offset: u64, _data: &[u8]) {}

    /// The machine's interrupt numbers.
    pub fn gsis(&self) -> &Arc<Gsis> {
        &self.gsis
    }

    /// Drives the line of interrupt `gsi`, which must not be [connected](Gsis::connect) to an
    /// event.
    pub fn set_line(&self, gsi: u32, asserted: bool) {
        if gsi < SHARED {
            let line = KVM_ARM_IRQ_TYPE_SPI << KVM_ARM_IRQ_TYPE_SHIFT | (FIRST_SHARED + gsi);
            // This fails only for a line that does not exist.
            let _ = self.vm.set_irq_line(line, asserted);
        }
    }

    /// Does nothing: KVM handles ends of interrupts.
    pub fn eoi(&self, _vector: u8) {}

    fn plan(&self) -> Vec<gic::Register> {
        gic::registers(self.mode, self.cpus.get().copied().unwrap_or(0))
    }

    /// Saves the state for [`Irqchip::restore`]. KVM also writes a part to guest memory.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn save(&self, _held: &HeldVectors) -> Result<State, Error> {
        let its = self.its.get().map(Its::save).transpose()?;
        if its.is_some() {
            let pending = KVM_DEV_ARM_VGIC_SAVE_PENDING_TABLES.into();
            kvm_device::tell(&self.device, KVM_DEV_ARM_VGIC_GRP_CTRL, pending).map_err(Error::Tables)?;
        }
        let mut registers = Vec::new();
        for gic::Register { group, attr, width, optional, .. } in self.plan() {
            match kvm_device::get(&self.device, group, attr, width) {
                Ok(value) => registers.push((group, attr, value)),
                Err(_) if optional => {}
                Err(error) => return Err(Error::Register { group, attr, error }),
            }
        }
        Ok(State { mode: self.mode, registers, its })
    }

    /// Restores what [`Irqchip::save`] returned, except for the ITS, which [`Irqchip::commit`]
    /// restores.
    ///
    /// # Errors
    /// KVM refuses, or the state is of the other version or of a machine with other vCPUs.
    pub fn restore(&self, state: State) -> Result<(), Error> {
        if state.mode != self.mode {
            return Err(Error::OtherMode);
        }
        let mut saved = state.registers.into_iter().peekable();
        for gic::Register { group, attr, clear, optional, .. } in self.plan() {
            let Some((.., value)) = saved.next_if(|(g, a, _)| (*g, *a) == (group, attr)) else {
                if optional {
                    continue;
                }
                return Err(Error::Implausible("registers missing, or in another order"));
            };
            let refused = |error| Error::Register { group, attr, error };
            if let Some(clear) = clear {
                kvm_device::set(&self.device, group, clear, u32::MAX.into()).map_err(refused)?;
            }
            kvm_device::set(&self.device, group, attr, value).map_err(refused)?;
        }
        if saved.next().is_some() {
            return Err(Error::Implausible("registers that this machine lacks"));
        }
        match (self.its.get(), state.its) {
            (Some(_), Some(state)) => {
                *self.arrived.lock().expect("the lock is not poisoned") = Some(state);
                Ok(())
            }
            (None, None) => Ok(()),
            (Some(_), None) => Err(Error::Implausible("no translation service, which this machine has")),
            (None, Some(_)) => Err(Error::Implausible("a translation service, which this machine lacks")),
        }
    }

    /// Restores the ITS. That makes KVM write guest memory: it clears pending LPIs in the tables
    /// there. Returns whether device messages sent since [`Irqchip::restore`] are lost, because the
    /// ITS did not know them yet.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn commit(&self) -> Result<bool, Error> {
        let arrived = self.arrived.lock().expect("the lock is not poisoned").take();
        match (self.its.get(), arrived) {
            (Some(its), Some(state)) => its.restore(&state).map(|()| true),
            _ => Ok(false),
        }
    }
}
