//! Assigns interrupt numbers (GSIs) to devices. No other module does.
//!
//! GSI n is shared peripheral interrupt n, which is INTID 32 + n; KVM routes them so by default.
//! All are edge-triggered. Higher GSIs are for devices that send messages (MSI-X). A GICv3 takes
//! these through its ITS. KVM takes all routes at once, so each update also repeats the routes of
//! shared interrupts.

use std::sync::{Arc, Mutex, MutexGuard};

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_MSI_VALID_DEVID, KvmIrqRouting, kvm_irq_routing_entry,
    kvm_irq_routing_irqchip, kvm_irq_routing_msi, kvm_irq_routing_msi__bindgen_ty_1,
};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use super::layout::{GENERATION_GSI, SERIAL_GSI};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// The number of shared peripheral interrupts of a machine.
pub const SHARED: u32 = 64;
/// The INTID of the first. Lower ones are private to each vCPU.
pub const FIRST_SHARED: u32 = 32;

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
    /// The controller has no ITS.
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
    /// The number, as in the device tree.
    pub fn number(&self) -> u32 {
        self.0
    }
}

/// KVM_MAX_IRQ_ROUTES (include/linux/kvm_host.h).
const MAX_ROUTES: usize = 4096;

/// All interrupts of a machine.
pub struct Gsis {
    vm: Arc<VmFd>,
    /// The assigned shared interrupts, a bit each.
    taken: Mutex<u64>,
    /// The message of each GSI from [`SHARED`] on; `None` before it is set.
    messages: Mutex<Vec<Option<Message>>>,
    takes_messages: bool,
}

/// A device's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Message {
    /// The device ID, as the ITS knows it.
    sender: u32,
    address: u64,
    data: u32,
}

impl Gsis {
    /// No interrupt is assigned yet. `takes_messages` says whether the controller can have an ITS.
    pub fn new(vm: Arc<VmFd>, takes_messages: bool) -> Self {
        Self { vm, taken: Mutex::new(0), messages: Mutex::new(Vec::new()), takes_messages }
    }

    /// Assigns this interrupt number, for a fixed board device.
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

    /// Assigns a GSI for a device's own message. [`Gsis::route`] tells KVM the message.
    ///
    /// # Errors
    /// The controller takes no messages, or there are too many.
    pub fn message(&self) -> Result<Gsi, Error> {
        if !self.takes_messages {
            return Err(Error::NoMessages);
        }
        let messages = &mut self.messages();
        let number = SHARED as usize + messages.len();
        if number >= MAX_ROUTES {
            return Err(Error::NoMessage);
        }
        messages.push(None);
        Ok(Gsi(number as u32))
    }

    /// Whether any device sends messages.
    pub fn has_messages(&self) -> bool {
        !self.messages().is_empty()
    }

    /// Makes a signal of `gsi`, a [message's](Gsis::message), write `data` to `address` with the
    /// device ID `sender`. Messages unknown to the ITS are lost, as on hardware.
    pub fn route(&self, gsi: &Gsi, sender: u16, address: u64, data: u32) {
        let message = Some(Message { sender: sender.into(), address, data });
        let mut messages = self.messages();
        let place = gsi.0.checked_sub(SHARED).and_then(|at| messages.get_mut(at as usize));
        if place.is_none_or(|place| std::mem::replace(place, message) == message) {
            return;
        }
        let routing = KvmIrqRouting::from_entries(&entries(&messages)).expect("no more than KVM takes");
        if let Err(error) = self.vm.set_gsi_routing(&routing) {
            // A guest's writes cannot make this fail, but lack of memory can. Routes then stay as
            // they were.
            tracing::error!(%error, "KVM_SET_GSI_ROUTING");
        }
    }

    /// Makes each signal of `event` an edge of `gsi`. The controller must be complete.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn connect(&self, gsi: &Gsi, event: &EventFd) -> Result<(), Error> {
        self.vm.register_irqfd(event, gsi.0).map_err(Error::Irqfd)
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.taken.lock().expect("the lock is not poisoned")
    }

    fn messages(&self) -> MutexGuard<'_, Vec<Option<Message>>> {
        self.messages.lock().expect("the lock is not poisoned")
    }
}

/// All routes for KVM: its defaults (`kvm_vgic_setup_default_irq_routing`,
/// arch/arm64/kvm/vgic/vgic-irqfd.c), and the known messages.
fn entries(messages: &[Option<Message>]) -> Vec<kvm_irq_routing_entry> {
    let shared = (0..SHARED).map(|gsi| {
        let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
        entry.u.irqchip = kvm_irq_routing_irqchip { irqchip: 0, pin: gsi };
        entry
    });
    let sent = (SHARED..).zip(messages).filter_map(|(gsi, message)| {
        let Message { sender, address, data } = (*message)?;
        let (flags, type_) = (KVM_MSI_VALID_DEVID, KVM_IRQ_ROUTING_MSI);
        let mut entry = kvm_irq_routing_entry { gsi, type_, flags, ..Default::default() };
        entry.u.msi = kvm_irq_routing_msi {
            address_lo: address as u32,
            address_hi: (address >> 32) as u32,
            data,
            __bindgen_anon_1: kvm_irq_routing_msi__bindgen_ty_1 { devid: sender },
        };
        Some(entry)
    });
    shared.chain(sent).collect()
}

fn take(taken: &mut u64, number: u32) -> Option<Gsi> {
    if number >= SHARED || *taken & 1 << number != 0 {
        return None;
    }
    *taken |= 1 << number;
    Some(Gsi(number))
}
