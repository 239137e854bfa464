//! The Virtual Machine Generation ID (Microsoft's specification of that name; QEMU's
//! docs/specs/vmgenid): 16 random bytes in guest memory. They are replaced whenever the guest
//! continues from a state from which other guests may continue too. Such guests must draw different
//! random numbers: Linux mixes the bytes into its generator and reseeds it
//! (drivers/virt/vmgenid.c).
//!
//! The ACPI tables give the address of the bytes (`vellum_kvm::arch::acpi`). An interrupt of the
//! generic event device reports new bytes. There are no registers and no state to save: the bytes
//! move with guest memory, and the machine's description holds their address.

use std::io;
use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use vellum_kvm::memory::GuestMemory;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin};
use vellum_sys::plant::{self, Mistake};
use vellum_sys::random;

/// Bytes of an ID.
pub const BYTES: usize = 16;
/// The alignment of the ID's address.
const ALIGNMENT: u64 = 8;

/// Why there is no ID.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address in a machine's description is not possible.
    #[error(
        "the VM generation ID is at {0:#x}; it must be 8-byte aligned and within RAM; the machine's description is damaged"
    )]
    Place(u64),
    /// The host refuses a descriptor or random numbers.
    #[error("the VM generation ID: {0}")]
    Host(#[source] io::Error),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Place(_) => ErrorOrigin::USER,
            Self::Host(_) => ErrorOrigin::HOST,
        }
    }
}

/// The ID of one machine.
pub struct VmGenId {
    memory: Arc<GuestMemory>,
    at: GuestAddress,
    renewed: EventFd,
}

impl VmGenId {
    /// The ID at guest-physical address `at` of `memory`. Its bytes do not change.
    ///
    /// # Errors
    /// The address is misaligned or outside RAM.
    pub fn new(memory: Arc<GuestMemory>, at: u64) -> Result<Self, Error> {
        let start = GuestAddress(at);
        if !at.is_multiple_of(ALIGNMENT) || !memory.check_range(start, BYTES) {
            return Err(Error::Place(at));
        }
        let renewed = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(Error::Host)?;
        Ok(Self { memory, at: start, renewed })
    }

    /// The eventfd that is signalled when the ID has been replaced.
    pub fn renewed(&self) -> &EventFd {
        &self.renewed
    }

    /// The ID's guest-physical address.
    pub fn at(&self) -> u64 {
        self.at.0
    }

    /// Writes a fresh random ID, for a guest that has not run yet.
    ///
    /// # Errors
    /// The host has no random numbers.
    pub fn draw(&self) -> Result<(), Error> {
        let mut id = [0; BYTES];
        random::fill(&mut id).map_err(Error::Host)?;
        // This write also goes through the log of VMM writes, so migration sees it.
        self.memory.write_slice(&id, self.at).map_err(|error| Error::Host(io::Error::other(error)))
    }

    /// Replaces the ID, and signals the guest.
    ///
    /// # Errors
    /// As [`Self::draw`].
    pub fn renew(&self) -> Result<(), Error> {
        if plant::is(Mistake::VmGenIdAlike) {
            let host = |error| Error::Host(io::Error::other(error));
            let before: [u8; BYTES] = self.memory.read_obj(self.at).map_err(host)?;
            self.memory.write_slice(&before.map(|byte| !byte), self.at).map_err(host)?;
        } else if !plant::is(Mistake::VmGenIdUnchanged) {
            self.draw()?;
        }
        self.renewed.write(1).map_err(Error::Host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vellum_kvm::arch::layout;
    use vellum_kvm::memory::{Memory, MemoryConfig};

    #[test]
    fn an_id_lies_in_ram_and_is_another_each_time() {
        let memory = Memory::map(layout::RAM, MemoryConfig::new(2 << 20)).unwrap();
        let memory = Arc::new(memory.guest);
        for at in [layout::VMGENID + 4, (2 << 20) - 8, 1 << 40, u64::MAX - 7] {
            assert!(matches!(VmGenId::new(memory.clone(), at), Err(Error::Place(_))), "{at:#x}");
        }
        let id = VmGenId::new(memory.clone(), layout::VMGENID).unwrap();
        let read = || memory.read_obj::<[u8; BYTES]>(GuestAddress(layout::VMGENID)).unwrap();
        assert_eq!(read(), [0; BYTES]);
        id.draw().unwrap();
        let first = read();
        assert!(id.renewed().read().is_err(), "a guest that has not run is told");
        id.renew().unwrap();
        assert!(first != [0; BYTES] && read() != first && id.renewed().read().is_ok());
    }
}
