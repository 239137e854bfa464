//! The pins of a PC's I/O APIC, the messages of its devices, and KVM's routes for both
//! ([`crate::arch::gsi`]).
//!
//! GSIs 0 to 23 are the pins. With the userspace I/O APIC, its redirection entries are their
//! routes.

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, kvm_irq_routing_entry, kvm_irq_routing_irqchip, kvm_irq_routing_msi,
};

use super::ioapic::{Msi, PINS, Routes};

/// The pins without a fixed PC device: the upper ones first, then those of ISA.
pub const FREE: [u32; 13] = [16, 17, 18, 19, 20, 21, 22, 23, 5, 6, 7, 10, 11];

/// The first GSI that is no pin.
pub const FIRST_MESSAGE: u32 = PINS as u32;

/// The routes of the pins: the userspace I/O APIC's messages, or `None` for KVM's chips.
#[derive(Default)]
pub struct Pins(pub Option<Routes>);

impl Pins {
    /// The routes for KVM.
    pub fn entries(&self) -> Vec<kvm_irq_routing_entry> {
        match &self.0 {
            Some(pins) => {
                (0u32..).zip(pins).filter_map(|(gsi, msi)| Some(msi.as_ref()?.entry(gsi))).collect()
            }
            None => default_routes(),
        }
    }
}

/// KVM's default routes for its own chips (arch/x86/kvm/irq_comm.c, `default_routing`): each pin to
/// that of the I/O APIC, and ISA pins also to the 8259s.
fn default_routes() -> Vec<kvm_irq_routing_entry> {
    let chip = |gsi, irqchip, pin| {
        let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
        entry.u.irqchip = kvm_irq_routing_irqchip { irqchip, pin };
        entry
    };
    let legacy = |gsi: u32| {
        let pic = if gsi < 8 { KVM_IRQCHIP_PIC_MASTER } else { KVM_IRQCHIP_PIC_SLAVE };
        (gsi < 16).then(|| chip(gsi, pic, gsi % 8))
    };
    let both = |gsi| std::iter::once(chip(gsi, KVM_IRQCHIP_IOAPIC, gsi)).chain(legacy(gsi));
    (0..FIRST_MESSAGE).flat_map(both).collect()
}

/// A device's message.
pub type Message = Msi;

impl Message {
    /// The message of a device's write; `None` if no local APIC is at `address`. The sender does
    /// not matter.
    pub fn written(_sender: u16, address: u64, data: u32) -> Option<Self> {
        Self::at(address, data)
    }

    /// The route for KVM that makes `gsi` send the message.
    pub fn entry(&self, gsi: u32) -> kvm_irq_routing_entry {
        let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
        entry.u.msi = kvm_irq_routing_msi { address_lo: self.address, data: self.data, ..Default::default() };
        entry
    }
}

#[cfg(test)]
mod tests {
    use super::super::ioapic::MSI_BASE;
    use super::*;
    use crate::arch::gsi;

    #[test]
    fn messages_are_routed_beside_the_pins() {
        let msi = |data| Some(Msi { address: MSI_BASE, data });
        let mut pins = [None; PINS];
        pins[4] = msi(0x31);
        let messages = vec![None, msi(0x32)];
        let numbers = |routes: &gsi::Routes| -> Vec<(u32, u32)> {
            routes.entries().iter().map(|entry| (entry.gsi, entry.type_)).collect()
        };
        let split = gsi::Routes { pins: Pins(Some(pins)), messages: messages.clone() };
        assert_eq!(numbers(&split), [(4, KVM_IRQ_ROUTING_MSI), (25, KVM_IRQ_ROUTING_MSI)]);
        let kernel = numbers(&gsi::Routes { pins: Pins::default(), messages });
        let chips = kernel.iter().filter(|(_, kind)| *kind == KVM_IRQ_ROUTING_IRQCHIP).count();
        assert_eq!((chips, kernel.last()), (24 + 16, Some(&(25, KVM_IRQ_ROUTING_MSI))));
    }

    #[test]
    fn a_message_beside_the_local_apics_is_none() {
        assert_eq!(Msi::at(0xfee0_1000, 0x31), Some(Msi { address: 0xfee0_1000, data: 0x31 }));
        assert!(
            [0, 0xfed0_0000, 0xfef0_0000, 0x1_fee0_0000].into_iter().all(|at| Msi::at(at, 0x31).is_none())
        );
    }
}
