//! The shared peripheral interrupts of an Arm board, the messages of its devices, and KVM's routes
//! for both ([`crate::arch::gsi`]).
//!
//! GSI n is shared peripheral interrupt n, which is INTID 32 + n; KVM routes them so by default.
//! All are edge-triggered. A GICv3 takes messages through its ITS.

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_MSI_VALID_DEVID, kvm_irq_routing_entry,
    kvm_irq_routing_irqchip, kvm_irq_routing_msi, kvm_irq_routing_msi__bindgen_ty_1,
};

use super::layout::{GENERATION_GSI, SERIAL_GSI};

/// The number of shared peripheral interrupts of a machine.
pub const SHARED: u32 = 64;
/// The INTID of the first. Lower ones are private to each vCPU.
pub const FIRST_SHARED: u32 = 32;

/// The first GSI that is no shared interrupt.
pub const FIRST_MESSAGE: u32 = SHARED;

/// The interrupts without a fixed board device.
pub const FREE: [u32; 32] = {
    let mut free = [0; 32];
    let (mut at, mut number) = (0, 0);
    while at < free.len() {
        if number != SERIAL_GSI && number != GENERATION_GSI {
            free[at] = number;
            at += 1;
        }
        number += 1;
    }
    free
};

/// The routes of the shared interrupts, which never change.
#[derive(Default)]
pub struct Pins;

impl Pins {
    /// The routes for KVM: its defaults (`kvm_vgic_setup_default_irq_routing`,
    /// arch/arm64/kvm/vgic/vgic-irqfd.c).
    pub fn entries(&self) -> Vec<kvm_irq_routing_entry> {
        let route = |gsi| {
            let mut entry =
                kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
            entry.u.irqchip = kvm_irq_routing_irqchip { irqchip: 0, pin: gsi };
            entry
        };
        (0..SHARED).map(route).collect()
    }
}

/// A device's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The device ID, as the ITS knows it.
    sender: u32,
    address: u64,
    data: u32,
}

impl Message {
    /// The message of a device's write. Messages unknown to the ITS are lost, as on hardware.
    pub fn written(sender: u16, address: u64, data: u32) -> Option<Self> {
        Some(Self { sender: sender.into(), address, data })
    }

    /// The route for KVM that makes `gsi` send the message.
    pub fn entry(&self, gsi: u32) -> kvm_irq_routing_entry {
        let Self { sender, address, data } = *self;
        let (flags, type_) = (KVM_MSI_VALID_DEVID, KVM_IRQ_ROUTING_MSI);
        let mut entry = kvm_irq_routing_entry { gsi, type_, flags, ..Default::default() };
        entry.u.msi = kvm_irq_routing_msi {
            address_lo: address as u32,
            address_hi: (address >> 32) as u32,
            data,
            __bindgen_anon_1: kvm_irq_routing_msi__bindgen_ty_1 { devid: sender },
        };
        entry
    }
}
