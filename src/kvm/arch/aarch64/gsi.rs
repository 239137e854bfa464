//! Interrupts by number: who has which GSI. Nobody else picks a number.
//!
//! GSI n is the shared peripheral interrupt n, which is INTID 32 + n: KVM routes them so by itself. All are edge triggered. Numbers behind
//! those are for devices that send messages by themselves (MSI-X), which a GICv3 takes by its translation service. KVM takes all routes at
//! once, so that those of the shared interrupts are told again with those of messages.

use std::sync::{Arc, Mutex, MutexGuard};

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_MSI_VALID_DEVID, KvmIrqRouting, kvm_irq_routing_entry,
    kvm_irq_routing_irqchip, kvm_irq_routing_msi, kvm_irq_routing_msi__bindgen_ty_1,
};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::EventFd;

use super::layout::{GENERATION_GSI, SERIAL_GSI};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

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
    /// More messages than KVM has routes for.
    #[error("all {MAX_ROUTES} numbers of interrupts are taken")]
    NoMessage,
    /// A controller without a translation service.
    #[error(
        "a GICv2 takes no messages, which devices on a PCI bus send; use gicv3, or devices that are reached by mmio"
    )]
    NoMessages,
    /// KVM.
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

/// An interrupt that somebody has, and nobody else.
#[derive(Debug, PartialEq, Eq)]
pub struct Gsi(u32);

impl Gsi {
    /// Its number, as the device tree names it.
    pub fn number(&self) -> u32 {
        self.0
    }
}

/// KVM_MAX_IRQ_ROUTES (include/linux/kvm_host.h), and as many numbers.
const MAX_ROUTES: usize = 4096;

/// All interrupts of a machine.
pub struct Gsis {
    vm: Arc<VmFd>,
    /// Which have a device, a bit each.
    taken: Mutex<u64>,
    /// What each number from [`SHARED`] on sends; `None` while nothing is known of it.
    messages: Mutex<Vec<Option<Message>>>,
    takes_messages: bool,
}

/// A message of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Message {
    /// Who sends it, as the translation service knows devices.
    sender: u32,
    address: u64,
    data: u32,
}

impl Gsis {
    /// None has a device yet. `takes_messages`: whether the controller can have a translation service.
    pub fn new(vm: Arc<VmFd>, takes_messages: bool) -> Self {
        Self { vm, taken: Mutex::new(0), messages: Mutex::new(Vec::new()), takes_messages }
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

    /// A number for a message of a device's own, which [`Gsis::route`] tells KVM.
    ///
    /// # Errors
    /// Where the controller takes none, or there are too many.
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

    /// Whether a device sends messages.
    pub fn has_messages(&self) -> bool {
        !self.messages().is_empty()
    }

    /// Has a signal of `gsi`, which is a [message's](Gsis::message), write `data` to `address`, on behalf of `sender`; what the translation
    /// service does not know is lost, as on a bus.
    pub fn route(&self, gsi: &Gsi, sender: u16, address: u64, data: u32) {
        let message = Some(Message { sender: sender.into(), address, data });
        let mut messages = self.messages();
        let place = gsi.0.checked_sub(SHARED).and_then(|at| messages.get_mut(at as usize));
        if place.is_none_or(|place| std::mem::replace(place, message) == message) {
            return;
        }
        let routing = KvmIrqRouting::from_entries(&entries(&messages)).expect("no more than KVM takes");
        if let Err(error) = self.vm.set_gsi_routing(&routing) {
            // What a guest writes cannot make this fail; running out of memory can. Its interrupts stay as they were.
            tracing::error!(%error, "KVM_SET_GSI_ROUTING");
        }
    }

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

    fn messages(&self) -> MutexGuard<'_, Vec<Option<Message>>> {
        self.messages.lock().expect("nobody panics with it")
    }
}

/// All routes, as KVM takes them: what it routes by itself (`kvm_vgic_setup_default_irq_routing`, arch/arm64/kvm/vgic/vgic-irqfd.c), and
/// the messages that are known.
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
