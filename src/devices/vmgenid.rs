//! The Virtual Machine Generation ID (Microsoft's specification of that name; QEMU's docs/specs/vmgenid): 16 random bytes in guest memory that
//! are replaced whenever the guest goes on from a state that others may go on from too. A guest that draws random numbers must draw
//! others than they do: Linux mixes the bytes into its generator and reseeds it (drivers/virt/vmgenid.c).
//!
//! The tables say where the bytes are ([`vellum_kvm::arch::acpi`]), and an interrupt, that of the generic event device, says that they are new.
//! There are no registers, and nothing to save: what is in guest memory moves with that, and a description says where it is.

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
/// What its address is a multiple of.
const ALIGNMENT: u64 = 8;

/// Why there is no ID.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The description of a machine has it where it cannot be.
    #[error(
        "a VM generation ID at {0:#x}, which must be a multiple of 8 within RAM; the description of the machine is damaged"
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
    /// The ID at guest-physical address `at` of `memory`, as it is there.
    ///
    /// # Errors
    /// Where it cannot be there.
    pub fn new(memory: Arc<GuestMemory>, at: u64) -> Result<Self, Error> {
        let start = GuestAddress(at);
        if !at.is_multiple_of(ALIGNMENT) || !memory.check_range(start, BYTES) {
            return Err(Error::Place(at));
        }
        let renewed = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(Error::Host)?;
        Ok(Self { memory, at: start, renewed })
    }

    /// What is signalled when the ID has been replaced.
    pub fn renewed(&self) -> &EventFd {
        &self.renewed
    }

    /// Its guest-physical address.
    pub fn at(&self) -> u64 {
        self.at.0
    }

    /// Writes an ID that nobody else has, for a guest that has not run yet.
    ///
    /// # Errors
    /// Where the host has no random numbers.
    pub fn draw(&self) -> Result<(), Error> {
        let mut id = [0; BYTES];
        random::fill(&mut id).map_err(Error::Host)?;
        // The log of what the VMM writes has it too.
        self.memory.write_slice(&id, self.at).map_err(|error| Error::Host(io::Error::other(error)))
    }

    /// Replaces the ID, and tells the guest.
    ///
    /// # Errors
    /// As [`Self::draw`].
    pub fn renew(&self) -> Result<(), Error> {
        if !plant::is(Mistake::VmGenIdUnchanged) {
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
