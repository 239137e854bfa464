//! The interrupt translation service (Arm IHI 0069, chapter 5): by it a GICv3 takes the messages that devices on a PCI bus send, as LPIs.
//! It is KVM's (Documentation/virt/kvm/devices/arm-vgic-its.rst).
//!
//! Its tables, and which LPIs are pending, lie in guest memory. KVM keeps them elsewhere while the machine runs, and writes them there when
//! it is saved. No vCPU writes them, so that a dirty ring has nothing of it: they are in the bitmap beside the ring.

use kvm_bindings::{
    KVM_DEV_ARM_ITS_RESTORE_TABLES, KVM_DEV_ARM_ITS_SAVE_TABLES, KVM_DEV_ARM_VGIC_CTRL_INIT,
    KVM_DEV_ARM_VGIC_GRP_ADDR, KVM_DEV_ARM_VGIC_GRP_CTRL, KVM_DEV_ARM_VGIC_GRP_ITS_REGS,
    KVM_VGIC_ITS_ADDR_TYPE, kvm_create_device, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_ITS,
};
use kvm_ioctls::{DeviceFd, VmFd};
use serde::{Deserialize, Serialize};

use super::irqchip::Error;
use super::layout;
use vellum_sys::kvm_device::{self, Width};

/// The registers that outlive a migration, in the order in which they are restored, but for [`CTLR`]: the revision of the tables' layout;
/// the queue of commands, of which the reader's place is reset by its base; the tables' places, of which KVM has those of devices and of
/// collections.
const REGISTERS: [u64; 6] = [IIDR, 0x80, 0x90, 0x88, 0x100, 0x108];
/// Which layout the tables have.
const IIDR: u64 = 0x4;
/// Whether it is enabled: the last that is restored.
const CTLR: u64 = 0x0;

/// The service of a machine.
pub struct Its(DeviceFd);

/// What of it outlives a migration, beside what KVM writes to guest memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Those of [`REGISTERS`].
    registers: [u64; REGISTERS.len()],
    ctlr: u64,
}

impl Its {
    /// Makes it, for a machine with a GICv3.
    ///
    /// # Errors
    /// Where KVM refuses.
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

    /// Has KVM write its tables to guest memory, and returns the rest.
    ///
    /// # Errors
    /// Where KVM refuses: the guest has named places for the tables that are not in its memory.
    pub fn save(&self) -> Result<State, Error> {
        self.tell(KVM_DEV_ARM_ITS_SAVE_TABLES)?;
        let mut registers = [0; REGISTERS.len()];
        for (offset, value) in REGISTERS.into_iter().zip(&mut registers) {
            *value = self.get(offset)?;
        }
        Ok(State { registers, ctlr: self.get(CTLR)? })
    }

    /// Takes over what [`Its::save`] gave, of which KVM reads the tables in guest memory, where it clears what is pending; after the
    /// rest of the controller.
    ///
    /// # Errors
    /// Where KVM refuses.
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
