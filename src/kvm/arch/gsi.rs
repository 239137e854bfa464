//! Assigns interrupt numbers (GSIs) to devices, and sets the message of each. No other module
//! assigns numbers or sets routes.
//!
//! The lowest GSIs are pins of the interrupt controller. Those from [`FIRST_MESSAGE`] on are for
//! devices that send messages (MSI-X). KVM takes all routes at once, so each update also repeats
//! the routes of the pins. The architecture's `routing` has its pins and the form of its messages.

use std::sync::{Arc, Mutex, MutexGuard};

use kvm_bindings::{KvmIrqRouting, kvm_irq_routing_entry};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use super::routing::{FIRST_MESSAGE, Message, Pins};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

pub use super::routing::FREE;

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
    /// The controller takes no messages: a GICv2 has no ITS.
    #[error("a GICv2 does not support MSI, which PCI devices need; use gicv3, or the mmio transport")]
    NoMessages,
    /// KVM refuses the connection.
    #[error("KVM_IRQFD: {0}")]
    Irqfd(#[source] kvm_ioctls::Error),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::None | Self::NoMessage => ErrorOrigin::USER,
            Self::NoMessages => ErrorOrigin::user(Field::Irqchip),
            Self::Taken(_) | Self::Irqfd(_) => ErrorOrigin::HOST,
        }
    }
}

/// An interrupt assigned to one device.
#[derive(Debug, PartialEq, Eq)]
pub struct Gsi(u32);

impl Gsi {
    /// The number, as in ACPI or the device tree.
    pub fn number(&self) -> u32 {
        self.0
    }
}

/// KVM_MAX_IRQ_ROUTES (include/linux/kvm_host.h).
const MAX_ROUTES: usize = 4096;

/// All interrupts of a machine.
pub struct Gsis {
    vm: Arc<VmFd>,
    takes_messages: bool,
    /// The assigned pins, a bit each.
    taken: Mutex<u64>,
    routes: Mutex<Routes>,
}

/// What KVM is told of each GSI.
#[derive(Default)]
pub(super) struct Routes {
    /// The routes of the pins.
    pub pins: Pins,
    /// The messages from [`FIRST_MESSAGE`] on; `None` before one is set.
    pub messages: Vec<Option<Message>>,
}

impl Gsis {
    /// No interrupt is assigned yet. `takes_messages` says whether the controller can take messages
    /// of devices.
    pub fn new(vm: Arc<VmFd>, takes_messages: bool) -> Self {
        Self { vm, takes_messages, taken: Mutex::new(0), routes: Mutex::default() }
    }

    /// Assigns this interrupt number, for a fixed board device.
    ///
    /// # Errors
    /// Another device has it.
    pub fn claim(&self, number: u32) -> Result<Gsi, Error> {
        take(&mut self.taken(), number).ok_or(Error::Taken(number))
    }

    /// Assigns a free interrupt.
    ///
    /// # Errors
    /// All are taken.
    pub fn pick(&self) -> Result<Gsi, Error> {
        let mut taken = self.taken();
        FREE.into_iter().find_map(|number| take(&mut taken, number)).ok_or(Error::None)
    }

    /// Assigns a GSI for a device's own message. [`Gsis::route`] tells KVM the message.
    ///
    /// # Errors
    /// The controller takes no messages, or there are too many.
    pub fn message(&self) -> Result<Gsi, Error> {
        if !self.takes_messages {
            return Err(Error::NoMessages);
        }
        let messages = &mut self.routes().messages;
        let number = FIRST_MESSAGE as usize + messages.len();
        if number >= MAX_ROUTES {
            return Err(Error::NoMessage);
        }
        messages.push(None);
        Ok(Gsi(number as u32))
    }

    /// Makes a signal of `gsi`, a [message's](Gsis::message), write `data` to `address`, in the
    /// name of the device `sender`. A message that no controller takes is lost, as on hardware.
    pub fn route(&self, gsi: &Gsi, sender: u16, address: u64, data: u32) {
        let message = Message::written(sender, address, data);
        let mut routes = self.routes();
        let place = gsi.0.checked_sub(FIRST_MESSAGE).and_then(|at| routes.messages.get_mut(at as usize));
        if place.is_some_and(|place| std::mem::replace(place, message) != message) {
            self.set(&routes);
        }
    }

    /// Makes each signal of `event` an edge of `gsi`. The controller must be complete.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn connect(&self, gsi: &Gsi, event: &EventFd) -> Result<(), Error> {
        self.vm.register_irqfd(event, gsi.0).map_err(Error::Irqfd)
    }

    /// Sets the routes: `KVM_SET_GSI_ROUTING`, which replaces all.
    pub(super) fn set(&self, routes: &Routes) {
        let routing = KvmIrqRouting::from_entries(&routes.entries()).expect("no more than KVM takes");
        if let Err(error) = self.vm.set_gsi_routing(&routing) {
            // A guest's writes cannot make this fail, but lack of memory can. Routes then stay as
            // they were.
            tracing::error!(%error, "KVM_SET_GSI_ROUTING");
        }
    }

    pub(super) fn routes(&self) -> MutexGuard<'_, Routes> {
        self.routes.lock().expect("the lock is not poisoned")
    }

    fn taken(&self) -> MutexGuard<'_, u64> {
        self.taken.lock().expect("the lock is not poisoned")
    }
}

impl Routes {
    /// All routes for KVM.
    pub fn entries(&self) -> Vec<kvm_irq_routing_entry> {
        let messages = (FIRST_MESSAGE..).zip(&self.messages);
        let sent = messages.filter_map(|(gsi, message)| Some(message.as_ref()?.entry(gsi)));
        self.pins.entries().into_iter().chain(sent).collect()
    }
}

fn take(taken: &mut u64, number: u32) -> Option<Gsi> {
    if number >= FIRST_MESSAGE || *taken & 1 << number != 0 {
        return None;
    }
    *taken |= 1 << number;
    Some(Gsi(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupt_has_one_device() {
        let mut taken = 0;
        let fixed = (0..FIRST_MESSAGE).find(|number| !FREE.contains(number)).expect("the serial port's");
        assert_eq!(take(&mut taken, fixed).unwrap().number(), fixed);
        assert_eq!(take(&mut taken, fixed), None);
        assert_eq!(take(&mut taken, FIRST_MESSAGE), None);
        let picked: Vec<_> = FREE.into_iter().filter_map(|number| take(&mut taken, number)).collect();
        assert_eq!(picked.len(), FREE.len(), "a pin is free for all and a fixed device's");
        assert!(FREE.into_iter().all(|number| take(&mut taken, number).is_none()));
    }
}
