//! Assigns interrupt numbers (GSIs) to devices, and sets the message of each. No other module
//! assigns numbers or sets routes.
//!
//! GSIs 0 to 23 are the pins of the I/O APIC. With the userspace I/O APIC, its redirection entries
//! are their routes. GSIs from 24 on are for devices that send messages (MSI-X). KVM takes all
//! routes at once, so the routes of pins and messages are kept together.

use std::sync::{Arc, Mutex, MutexGuard};

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry, kvm_irq_routing_irqchip,
    kvm_irq_routing_msi, kvm_msi,
};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use super::ioapic::{Msi, PINS, Routes};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin};

/// The pins without a fixed PC device: the upper ones first, then those of ISA.
pub const FREE: [u32; 13] = [16, 17, 18, 19, 20, 21, 22, 23, 5, 6, 7, 10, 11];

/// Why an interrupt cannot be assigned.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Two devices want the same interrupt.
    #[error("interrupt {0} already has a device; this is a bug in the machine's address map")]
    Taken(u32),
    /// Too many devices.
    #[error("all {} interrupts for devices are taken", FREE.len())]
    None,
    /// More messages than KVM has routes.
    #[error("all {MAX_ROUTES} interrupt numbers are taken")]
    NoMessage,
    /// KVM refuses the connection.
    #[error("KVM_IRQFD: {0}")]
    Irqfd(#[source] kvm_ioctls::Error),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::None | Self::NoMessage => ErrorOrigin::USER,
            Self::Taken(_) | Self::Irqfd(_) => ErrorOrigin::HOST,
        }
    }
}

/// An interrupt assigned to one device.
#[derive(Debug, PartialEq, Eq)]
pub struct Gsi(u32);

impl Gsi {
    /// The number, as in ACPI.
    pub fn number(&self) -> u32 {
        self.0
    }
}

/// KVM_MAX_IRQ_ROUTES (include/linux/kvm_host.h).
const MAX_ROUTES: usize = 4096;

/// All interrupts of a machine.
pub struct Gsis {
    vm: Arc<VmFd>,
    /// The assigned pins, a bit each.
    taken: Mutex<u32>,
    routes: Mutex<Messages>,
}

/// The message of each GSI.
struct Messages {
    /// The pins' messages, with the userspace I/O APIC. Otherwise the pins are routed to KVM's
    /// chips.
    pins: Option<Routes>,
    /// The messages from number [`PINS`] on; `None` before it is set.
    others: Vec<Option<Msi>>,
}

impl Gsis {
    /// No interrupt is assigned yet.
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self { vm, taken: Mutex::new(0), routes: Mutex::new(Messages { pins: None, others: Vec::new() }) }
    }

    /// Assigns a GSI for a device's own message. [`Gsis::route`] tells KVM the message.
    ///
    /// # Errors
    /// There are too many.
    pub fn message(&self) -> Result<Gsi, Error> {
        let others = &mut self.routes().others;
        if PINS + others.len() >= MAX_ROUTES {
            return Err(Error::NoMessage);
        }
        others.push(None);
        Ok(Gsi((PINS + others.len() - 1) as u32))
    }

    /// Makes a signal of `gsi`, a [message's](Gsis::message), write `data` to `address`. Nothing is
    /// sent if no local APIC is at that address. The sender does not matter.
    pub fn route(&self, gsi: &Gsi, _sender: u16, address: u64, data: u32) {
        let message = Msi::at(address, data);
        let mut routes = self.routes();
        let other = (gsi.0 as usize).checked_sub(PINS).and_then(|at| routes.others.get_mut(at));
        if other.is_some_and(|other| std::mem::replace(other, message) != message) {
            self.set(&routes);
        }
    }

    /// Assigns this interrupt number, for a fixed PC device.
    ///
    /// # Errors
    /// Another device has it.
    pub fn claim(&self, number: u32) -> Result<Gsi, Error> {
        take(&mut self.lock(), number).ok_or(Error::Taken(number))
    }

    /// Assigns a free interrupt.
    ///
    /// # Errors
    /// All are taken.
    pub fn pick(&self) -> Result<Gsi, Error> {
        let mut taken = self.lock();
        FREE.into_iter().find_map(|number| take(&mut taken, number)).ok_or(Error::None)
    }

    /// Makes each signal of `event` an edge of `gsi`.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn connect(&self, gsi: &Gsi, event: &EventFd) -> Result<(), Error> {
        self.vm.register_irqfd(event, gsi.0).map_err(Error::Irqfd)
    }

    /// Sets the messages of the pins: `KVM_SET_GSI_ROUTING`, which replaces all routes.
    pub fn route_pins(&self, pins: &Routes) {
        let mut routes = self.routes();
        routes.pins = Some(*pins);
        self.set(&routes);
    }

    fn set(&self, routes: &Messages) {
        let routing = KvmIrqRouting::from_entries(&routes.entries()).expect("no more than KVM takes");
        if let Err(error) = self.vm.set_gsi_routing(&routing) {
            // A guest's writes cannot make this fail, but lack of memory can. Routes then stay as
            // they were.
            tracing::error!(%error, "KVM_SET_GSI_ROUTING");
        }
    }

    /// Sends a message now: `KVM_SIGNAL_MSI`.
    pub fn signal(&self, msi: Msi) {
        let msi = kvm_msi { address_lo: msi.address, data: msi.data, ..Default::default() };
        // A message that no local APIC takes is lost, as on hardware.
        let _ = self.vm.signal_msi(msi);
    }

    fn lock(&self) -> MutexGuard<'_, u32> {
        self.taken.lock().expect("the lock is not poisoned")
    }

    fn routes(&self) -> MutexGuard<'_, Messages> {
        self.routes.lock().expect("the lock is not poisoned")
    }
}

impl Messages {
    /// All routes for KVM.
    fn entries(&self) -> Vec<kvm_irq_routing_entry> {
        let send = |(gsi, msi): (u32, &Option<Msi>)| {
            let msi = (*msi)?;
            let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
            entry.u.msi =
                kvm_irq_routing_msi { address_lo: msi.address, data: msi.data, ..Default::default() };
            Some(entry)
        };
        let mut entries = match &self.pins {
            Some(pins) => (0u32..).zip(pins).filter_map(send).collect(),
            None => default_routes(),
        };
        entries.extend((PINS as u32..).zip(&self.others).filter_map(send));
        entries
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
    (0..PINS as u32).flat_map(both).collect()
}

fn take(taken: &mut u32, number: u32) -> Option<Gsi> {
    if number as usize >= PINS || *taken & 1 << number != 0 {
        return None;
    }
    *taken |= 1 << number;
    Some(Gsi(number))
}

#[cfg(test)]
mod tests {
    use super::super::ioapic::MSI_BASE;
    use super::*;

    #[test]
    fn messages_are_routed_beside_the_pins() {
        let msi = |data| Some(Msi { address: MSI_BASE, data });
        let mut pins = [None; PINS];
        pins[4] = msi(0x31);
        let others = vec![None, msi(0x32)];
        let numbers = |routes: &Messages| -> Vec<(u32, u32)> {
            routes.entries().iter().map(|entry| (entry.gsi, entry.type_)).collect()
        };
        let split = Messages { pins: Some(pins), others: others.clone() };
        assert_eq!(numbers(&split), [(4, KVM_IRQ_ROUTING_MSI), (25, KVM_IRQ_ROUTING_MSI)]);
        let kernel = numbers(&Messages { pins: None, others });
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

    #[test]
    fn an_interrupt_has_one_device() {
        let mut taken = 0;
        let com1 = take(&mut taken, super::super::ports::COM1_GSI).unwrap();
        assert_eq!(com1.number(), 4);
        assert_eq!(take(&mut taken, 4), None);
        assert_eq!(take(&mut taken, PINS as u32), None);
        let picked: Vec<_> = FREE.into_iter().filter_map(|number| take(&mut taken, number)).collect();
        assert_eq!(picked.len(), FREE.len(), "a pin is free for all and the serial port's");
        assert!(FREE.into_iter().all(|number| take(&mut taken, number).is_none()));
    }
}
