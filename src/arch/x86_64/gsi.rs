//! Interrupts by number: who has which GSI, and which message each sends. Nobody else picks a number or sets routes.
//!
//! GSIs 0 to 23 are the pins of the I/O APIC, whose redirection entries are their routes while it is here and not in KVM.
//! Numbers from 24 on are free for devices that send messages by themselves (MSI-X).

use std::sync::{Arc, Mutex, MutexGuard};

use kvm_bindings::{KVM_IRQ_ROUTING_MSI, KvmIrqRouting, kvm_irq_routing_entry, kvm_irq_routing_msi, kvm_msi};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use super::ioapic::{Msi, PINS, Routes};
use crate::fault::{Blame, Fault};

/// Pins that no device of a PC has: the upper ones first, then those that were ISA's.
pub const FREE: [u32; 13] = [16, 17, 18, 19, 20, 21, 22, 23, 5, 6, 7, 10, 11];

/// Why there is no interrupt.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Two devices want the same.
    #[error("interrupt {0} has a device already; this is a fault of the machine's address map")]
    Taken(u32),
    /// Too many devices.
    #[error("all {} interrupts for devices are taken", FREE.len())]
    None,
    /// KVM.
    #[error("KVM_IRQFD: {0}")]
    Irqfd(#[source] kvm_ioctls::Error),
}

impl Fault for Error {
    fn blame(&self) -> Blame {
        match self {
            Self::None => Blame::USER,
            Self::Taken(_) | Self::Irqfd(_) => Blame::HOST,
        }
    }
}

/// An interrupt that somebody has, and nobody else.
#[derive(Debug, PartialEq, Eq)]
pub struct Gsi(u32);

impl Gsi {
    /// Its number, as ACPI names it.
    pub fn number(&self) -> u32 {
        self.0
    }
}

/// All interrupts of a machine.
pub struct Gsis {
    vm: Arc<VmFd>,
    /// Which pins have a device, a bit each.
    taken: Mutex<u32>,
}

impl Gsis {
    /// None has a device yet.
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self { vm, taken: Mutex::new(0) }
    }

    /// The interrupt of this number, for a device that has it on every PC.
    ///
    /// # Errors
    /// Where another has it.
    pub fn claim(&self, number: u32) -> Result<Gsi, Error> {
        take(&mut self.lock(), number).ok_or(Error::Taken(number))
    }

    /// One that is free.
    ///
    /// # Errors
    /// Where none is.
    pub fn pick(&self) -> Result<Gsi, Error> {
        let mut taken = self.lock();
        FREE.into_iter().find_map(|number| take(&mut taken, number)).ok_or(Error::None)
    }

    /// Lets each signal of `event` be one edge of `gsi`.
    ///
    /// # Errors
    /// Where KVM refuses.
    pub fn connect(&self, gsi: &Gsi, event: &EventFd) -> Result<(), Error> {
        self.vm.register_irqfd(event, gsi.0).map_err(Error::Irqfd)
    }

    /// Makes these messages those of the pins: `KVM_SET_GSI_ROUTING`, which replaces all routes.
    pub fn route_pins(&self, pins: &Routes) {
        let entries: Vec<_> = (0u32..)
            .zip(pins)
            .filter_map(|(gsi, route)| route.map(|msi| (gsi, msi)))
            .map(|(gsi, msi)| {
                let mut entry =
                    kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
                entry.u.msi =
                    kvm_irq_routing_msi { address_lo: msi.address, data: msi.data, ..Default::default() };
                entry
            })
            .collect();
        let routing = KvmIrqRouting::from_entries(&entries).expect("24 entries fit");
        if let Err(error) = self.vm.set_gsi_routing(&routing) {
            // What a guest writes cannot make this fail; running out of memory can. Its interrupts stay as they were.
            tracing::error!(%error, "KVM_SET_GSI_ROUTING");
        }
    }

    /// Sends a message now: `KVM_SIGNAL_MSI`.
    pub fn signal(&self, msi: Msi) {
        let msi = kvm_msi { address_lo: msi.address, data: msi.data, ..Default::default() };
        // A message that no local APIC takes is lost, as on a bus.
        let _ = self.vm.signal_msi(msi);
    }

    fn lock(&self) -> MutexGuard<'_, u32> {
        self.taken.lock().expect("nobody panics with it")
    }
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
    use super::*;

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
