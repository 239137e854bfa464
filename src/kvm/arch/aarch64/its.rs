//! KVM's interrupt translation service, the ITS (Arm IHI 0069, chapter 5;
//! Documentation/virt/kvm/devices/arm-vgic-its.rst). Through it a GICv3 takes the messages of PCI
//! devices as LPIs.
//!
//! Its tables and pending LPIs belong in guest memory. KVM keeps them elsewhere while the machine
//! runs, and writes them there on save. No vCPU writes them, so they are not in a dirty ring but in
//! its backup bitmap.

use kvm_bindings::{
    KVM_DEV_ARM_ITS_RESTORE_TABLES, KVM_DEV_ARM_ITS_SAVE_TABLES, KVM_DEV_ARM_VGIC_CTRL_INIT,
    KVM_DEV_ARM_VGIC_GRP_ADDR, KVM_DEV_ARM_VGIC_GRP_CTRL, KVM_DEV_ARM_VGIC_GRP_ITS_REGS,
    KVM_VGIC_ITS_ADDR_TYPE, kvm_create_device, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_ITS,
};
use kvm_ioctls::{DeviceFd, VmFd};
use serde::{Deserialize, Serialize};

use super::gic::Error;
use super::layout;
use vellum_sys::kvm_device::{self, Width};

/// The registers that a migration carries, in the order of restoring, except [`CTLR`]: the revision
/// of the table layout; the command queue, whose base resets the read pointer; the bases of KVM's
/// two tables, for devices and collections.
const REGISTERS: [u64; 6] = [IIDR, 0x80, 0x90, 0x88, 0x100, 0x108];
/// The revision of the table layout.
const IIDR: u64 = 0x4;
/// The enable bit. It is restored last.
const CTLR: u64 = 0x0;

/// The ITS of a machine.
pub struct Its(DeviceFd);

/// The state that a migration carries, besides the tables in guest memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// The values of [`REGISTERS`].
    registers: [u64; REGISTERS.len()],
    ctlr: u64,
}

impl Its {
    /// Creates the ITS of a machine with a GICv3.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn new(vm: &VmFd) -> Result<Self, Error> {
        let type_ = kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_ITS;
        let mut request = kvm_create_device { type_, ..Default::default() };
        let refused = |what| move |error| Error::Ioctl(what, error);
        let device = vm.create_device(&mut request).map_err(refused("KVM_CREATE_DEVICE of an ITS"))?;
        kvm_device::set(
            &device,
            KVM_DEV_ARM_VGIC_GRP_ADDR,
            KVM_VGIC_ITS_ADDR_TYPE.into(),
            layout::GIC_TRANSLATION,
        )
        .map_err(refused("the address of the ITS"))?;
        kvm_device::tell(&device, KVM_DEV_ARM_VGIC_GRP_CTRL, KVM_DEV_ARM_VGIC_CTRL_INIT.into())
            .map_err(refused("KVM_DEV_ARM_VGIC_CTRL_INIT of the ITS"))?;
        Ok(Self(device))
    }

    /// Makes KVM write its tables to guest memory, and returns the rest.
    ///
    /// # Errors
    /// KVM refuses: the guest has placed the tables outside its memory.
    pub fn save(&self) -> Result<State, Error> {
        self.tell(KVM_DEV_ARM_ITS_SAVE_TABLES)?;
        let mut registers = [0; REGISTERS.len()];
        for (offset, value) in REGISTERS.into_iter().zip(&mut registers) {
            *value = self.get(offset)?;
        }
        Ok(State { registers, ctlr: self.get(CTLR)? })
    }

    /// Restores what [`Its::save`] returned, after the rest of the controller. KVM reads the tables
    /// from guest memory, and clears pending bits there.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn restore(&self, state: &State) -> Result<(), Error> {
        for (offset, value) in REGISTERS.into_iter().zip(state.registers) {
            self.set(offset, value)?;
        }
        self.tell(KVM_DEV_ARM_ITS_RESTORE_TABLES)?;
        self.set(CTLR, state.ctlr)
    }

    fn tell(&self, what: u32) -> Result<(), Error> {
        let told = kvm_device::tell(&self.0, KVM_DEV_ARM_VGIC_GRP_CTRL, what.into());
        told.map_err(Error::Tables)
    }

    fn get(&self, offset: u64) -> Result<u64, Error> {
        let group = KVM_DEV_ARM_VGIC_GRP_ITS_REGS;
        let value = kvm_device::get(&self.0, group, offset, Width::Double);
        value.map_err(|error| Error::Register { group, attr: offset, error })
    }

    fn set(&self, offset: u64, value: u64) -> Result<(), Error> {
        let group = KVM_DEV_ARM_VGIC_GRP_ITS_REGS;
        let set = kvm_device::set(&self.0, group, offset, value);
        set.map_err(|error| Error::Register { group, attr: offset, error })
    }
}
