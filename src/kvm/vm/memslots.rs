//! The memslots that KVM knows.
//!
//! KVM stores host addresses, not mappings. [`Memslots`] holds the slots that KVM has, and thereby
//! their mappings, until KVM no longer uses them: a slot is replaced or deleted, or the VM and its
//! vCPUs are gone. Therefore everything that lets KVM use a VM's memory holds its `Memslots`: the
//! [`Vm`](super::Vm), each [`Processor`](super::Processor), each dirty tracker.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;

use super::{Error, ioctl};
use crate::memory::Slot;
use vellum_sys::dirty as sys;

/// The memslots of one VM.
#[derive(Debug)]
pub struct Memslots {
    // First, so that it is dropped before the mappings.
    fd: Arc<VmFd>,
    /// The slots as KVM was last told, by their numbers.
    table: Mutex<BTreeMap<u32, Slot>>,
}

impl Memslots {
    pub(super) fn new(fd: Arc<VmFd>) -> Self {
        Self { fd, table: Mutex::default() }
    }

    /// Held during each call to KVM, so the table matches what KVM knows.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Slot>> {
        // Nothing panics between a call and the update of its entry.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds or moves a slot, or changes its flags.
    ///
    /// # Errors
    /// KVM refuses. It then keeps its previous state.
    pub fn set(&self, slot: &Slot, flags: u32) -> Result<(), Error> {
        self.tell(&mut self.lock(), slot, flags)
    }

    /// Changes the flags of slot `id`.
    ///
    /// # Errors
    /// The slot does not exist, or KVM refuses.
    pub(crate) fn set_flags(&self, id: u32, flags: u32) -> Result<(), Error> {
        let mut table = self.lock();
        let slot = table.get(&id).ok_or(Error::NoSlot(id))?.clone();
        self.tell(&mut table, &slot, flags)
    }

    fn tell(&self, table: &mut BTreeMap<u32, Slot>, slot: &Slot, flags: u32) -> Result<(), Error> {
        let region = kvm_userspace_memory_region {
            slot: slot.id(),
            flags,
            guest_phys_addr: slot.gpa(),
            memory_size: slot.bytes(),
            userspace_addr: slot.hva(),
        };
        // SAFETY: the slot is part of a mapping that it keeps alive (`Slot::new`). The table keeps
        // the slot until KVM no longer uses it. Guest memory is accessed only through atomics and
        // vm-memory's volatile accesses.
        ioctl("KVM_SET_USER_MEMORY_REGION", unsafe { self.fd.set_user_memory_region(region) })?;
        table.insert(slot.id(), slot.clone());
        Ok(())
    }

    /// Deletes slot `id`, and thereby its dirty log.
    ///
    /// # Errors
    /// The slot does not exist, or KVM refuses.
    pub fn delete(&self, id: u32) -> Result<(), Error> {
        let mut table = self.lock();
        if !table.contains_key(&id) {
            return Err(Error::NoSlot(id));
        }
        let region = kvm_userspace_memory_region { slot: id, ..Default::default() };
        // SAFETY: with size 0 KVM takes no memory; it releases the slot.
        ioctl("KVM_SET_USER_MEMORY_REGION", unsafe { self.fd.set_user_memory_region(region) })?;
        table.remove(&id);
        Ok(())
    }

    /// Slot `id` as KVM has it.
    pub fn get(&self, id: u32) -> Option<Slot> {
        self.lock().get(&id).cloned()
    }

    /// Copies the dirty bitmap of slot `id` into the words that `bitmap` returns for the current
    /// slot. Without manual protection KVM also clears the bitmap and protects its pages. At least
    /// [`Slot::bitmap_words`] words are needed.
    ///
    /// # Errors
    /// The slot does not exist, there are too few words, or KVM refuses.
    pub fn dirty_log<'a>(&self, id: u32, bitmap: impl FnOnce(&Slot) -> &'a mut [u64]) -> io::Result<()> {
        let table = self.lock();
        let slot = table.get(&id).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
        let words = bitmap(slot);
        if words.len() < slot.bitmap_words() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the bitmap is smaller than the memslot's",
            ));
        }
        // SAFETY: `words` has a bit for each page of the slot. KVM has the same slot while the
        // table is locked.
        unsafe { sys::get_log(&self.fd, id, words) }
    }
}
