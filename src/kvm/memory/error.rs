//! Errors of guest memory, and the check whether this host has enough of it.

use std::io;
use std::path::PathBuf;

use super::{Backing, MemoryConfig, short_size};
use vellum_host::{hugepages, topology};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::mmap::host_page;

/// Why guest memory cannot be mapped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not a multiple of the page size.
    #[error("{size} bytes is no multiple of the {} pages of backing={backing}; the next size up is {}",
        short_size(backing.page_size()), short_size(size.next_multiple_of(backing.page_size())))]
    Unaligned {
        /// The requested size in bytes.
        size: u64,
        /// The requested backing.
        backing: Backing,
    },
    /// Zero, or too small for any guest.
    #[error("{} is too small: the least is {}", short_size(*size), short_size(*least))]
    TooSmall {
        /// The requested size in bytes.
        size: u64,
        /// The minimum in bytes.
        least: u64,
    },
    /// Larger than the guest physical address space.
    #[error("{} is more than a guest can address: the most is {}", short_size(*size), short_size(*most))]
    TooLarge {
        /// The requested size in bytes.
        size: u64,
        /// The maximum in bytes.
        most: u64,
    },
    /// More than is available, although all of it is to be populated or locked.
    #[error("{} is more than the {} that {}; ask for less memory{}, or leave it off",
        short_size(*size), short_size(available >> 20 << 20), whose(limited_by), raise(limited_by))]
    Unavailable {
        /// The requested size in bytes.
        size: u64,
        /// Bytes that this process can have.
        available: u64,
        /// The file of the control group's limit, if that is the reason.
        limited_by: Option<PathBuf>,
        /// The argument that requires all of it: [`Field::Prealloc`] or [`Field::Lock`].
        field: Field,
    },
    /// Memslots with more pages than KVM allows.
    #[error("{0} is too few: KVM takes no memslot of 8t, so {1} would work here")]
    LargeSlot(u32, u64),
    /// More slots than pages, or none.
    #[error("{0} is out of range: from 1 to {1} would work here")]
    Slots(u32, u64),
    /// An invalid memslot.
    #[error("memslot {id}: {what}")]
    Slot {
        /// Its number.
        id: u32,
        /// What is wrong with it.
        what: &'static str,
    },
    /// Not enough huge pages.
    #[error("{0}: {1}")]
    Shortage(Backing, #[source] hugepages::Shortage),
    /// The host has no huge pages of this size, or no memory to map.
    #[error("{} cannot be mapped with backing={backing}: {source}; {}", short_size(*size), remedy(*backing))]
    Map {
        /// The requested size in bytes.
        size: u64,
        /// The requested backing.
        backing: Backing,
        /// The kernel's error.
        source: io::Error,
    },
    /// The file that another process has handed over cannot be this machine's memory.
    #[error("the memory that was handed over {0}")]
    Handed(String),
    /// The host ran out of memory while it was being populated.
    #[error("{0}; ask for less, free memory on the host, or leave it off")]
    Populate(#[source] io::Error),
    /// The user interrupted populating.
    #[error("interrupted by signal {0} while memory was populated")]
    Interrupted(i32),
    /// `mlock2` failed.
    #[error("{0}; raise the limit (ulimit -l unlimited, or LimitMEMLOCK=), or leave it off")]
    Lock(#[source] io::Error),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Unaligned { .. } | Self::TooSmall { .. } | Self::TooLarge { .. } | Self::Map { .. } => {
                ErrorOrigin::user(Field::Memory)
            }
            Self::Slots(..) | Self::LargeSlot(..) => ErrorOrigin::user(Field::Slots),
            Self::Unavailable { field, .. } => ErrorOrigin::user(*field),
            // This program itself has requested such a slot.
            Self::Slot { .. } | Self::Handed(_) => ErrorOrigin::HOST,
            // Nothing is wrong, and nothing needs to be fixed.
            Self::Interrupted(_) => ErrorOrigin::HOST,
            Self::Shortage(_, shortage) => shortage.origin(),
            Self::Populate(_) => ErrorOrigin::host(Field::Prealloc),
            Self::Lock(_) => ErrorOrigin::user(Field::Lock),
        }
    }
}

fn whose(limited_by: &Option<PathBuf>) -> String {
    match limited_by {
        Some(file) => format!("the control group has left ({})", file.display()),
        None => "this host has available".into(),
    }
}

fn raise(limited_by: &Option<PathBuf>) -> &'static str {
    if limited_by.is_some() { " or raise the group's limit" } else { "" }
}

/// Checks that memory which is populated or locked from the start is available. If it is not, the
/// OOM killer would end the process later. Memory that is touched page by page may be larger than
/// the host's. A guest that touches all of it is killed, so a warning is logged. Huge pages are
/// counted separately ([`hugepages::check`]).
pub(super) fn afford(config: MemoryConfig, host: &topology::HostMemory) -> Result<(), Error> {
    let (available, limited_by) = (host.available, host.limited_by.clone());
    let size = config.size;
    if available == 0 || size <= available || config.backing.page_size() > host_page() {
        return Ok(());
    }
    let field = match config {
        MemoryConfig { prealloc: true, .. } => Field::Prealloc,
        MemoryConfig { lock: true, .. } => Field::Lock,
        _ => {
            tracing::warn!(
                "{} of guest memory is more than the {} that {}: a guest that touches it all will be killed",
                short_size(size),
                short_size(available >> 20 << 20),
                whose(&limited_by)
            );
            return Ok(());
        }
    };
    Err(Error::Unavailable { size, available, limited_by, field })
}

fn remedy(backing: Backing) -> &'static str {
    match backing {
        Backing::Hugetlb(_) | Backing::SharedHugetlb(_) => {
            "`vellum doctor` lists the huge page sizes that this host has"
        }
        _ => "ask for less, or raise the address space limit (ulimit -v)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn memory_that_must_be_there_is_refused_beyond_what_is_left() {
        let host = |limited_by: Option<&str>| topology::HostMemory {
            total: 8 * GIB,
            available: GIB + 5,
            limited_by: limited_by.map(PathBuf::from),
        };
        let of = |size, prealloc, lock| MemoryConfig { prealloc, lock, ..MemoryConfig::new(size) };
        let refused = |config, limited_by| afford(config, &host(limited_by)).unwrap_err();
        let error = refused(of(2 * GIB, true, true), None);
        assert_eq!(error.origin(), ErrorOrigin::user(Field::Prealloc));
        let said =
            "2g is more than the 1g that this host has available; ask for less memory, or leave it off";
        assert_eq!(error.to_string(), said);
        let error = refused(of(2 * GIB, false, true), Some("/cg/memory.max"));
        assert_eq!(error.origin(), ErrorOrigin::user(Field::Lock));
        assert!(
            error.to_string().contains("has left (/cg/memory.max); ask for less memory or raise"),
            "{error}"
        );
        // Accepted: memory that fits, memory that is touched page by page, huge pages, and hosts
        // without an estimate.
        let huge = MemoryConfig { backing: Backing::Hugetlb(2 << 20), ..of(2 * GIB, true, true) };
        for config in [of(GIB, true, true), of(2 * GIB, false, false), huge] {
            assert!(afford(config, &host(None)).is_ok(), "{config:?}");
        }
        let unknown = topology::HostMemory { available: 0, ..host(None) };
        assert!(afford(of(2 * GIB, true, false), &unknown).is_ok());
    }
}
