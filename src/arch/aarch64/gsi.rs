//! Interrupts by number: who has which GSI. Nobody else picks a number.
//!
//! GSI n is the shared peripheral interrupt n, which is INTID 32 + n: KVM routes them so by itself. All are edge triggered.

use std::sync::{Arc, Mutex, MutexGuard};

use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use super::layout::{GENERATION_GSI, SERIAL_GSI};
use crate::fault::{Blame, Fault};

/// How many shared peripheral interrupts a machine has.
pub const SHARED: u32 = 64;
/// The INTID of the first of them: below are those that each vCPU has of its own.
pub const FIRST_SHARED: u32 = 32;

/// Those that no device of the board has.
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
    /// Its number, as the device tree names it.
    pub fn number(&self) -> u32 {
        self.0
    }
}

/// All interrupts of a machine.
pub struct Gsis {
    vm: Arc<VmFd>,
    /// Which have a device, a bit each.
    taken: Mutex<u64>,
}

impl Gsis {
    /// None has a device yet.
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self { vm, taken: Mutex::new(0) }
    }

    /// The interrupt of this number, for a device that has it on every board.
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

    /// A number for a message of a device's own: there is none, since this board has no bus whose devices send any.
    ///
    /// # Errors
    /// Always.
    pub fn message(&self) -> Result<Gsi, Error> {
        Err(Error::None)
    }

    /// Has a signal of `gsi`, which is a [message's](Gsis::message), write `data` to `address`.
    pub fn route(&self, _gsi: &Gsi, _address: u64, _data: u32) {}

    /// Lets each signal of `event` be one edge of `gsi`. KVM takes it when the controller is complete.
    ///
    /// # Errors
    /// Where KVM refuses.
    pub fn connect(&self, gsi: &Gsi, event: &EventFd) -> Result<(), Error> {
        self.vm.register_irqfd(event, gsi.0).map_err(Error::Irqfd)
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.taken.lock().expect("nobody panics with it")
    }
}

fn take(taken: &mut u64, number: u32) -> Option<Gsi> {
    if number >= SHARED || *taken & 1 << number != 0 {
        return None;
    }
    *taken |= 1 << number;
    Some(Gsi(number))
}
