//! Guest memory: what is asked for ([`MemoryConfig`]), and what was mapped ([`Memory`]).
//!
//! One mapping backs all RAM, aligned so that guest-physical and host-virtual addresses are congruent modulo the
//! backing's page size; without that KVM could map no huge page. Memslots ([`Slot`]) are cut from it, around the gap of
//! [`plan::Space`]. Telling KVM about them is `vm/memslots.rs`'s work.

use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub mod plan;
mod slot;
pub mod write_log;

pub use slot::Slot;

use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, mmap::MmapRegionBuilder};

use self::plan::Space;
use crate::fault::{Blame, Fault, Field};
use crate::host::hugepages;
use crate::memory::write_log::WriteLog;
use crate::sys::mmap::{self, Mapping, PAGE_SIZE, Source};

/// Guest memory as devices and loaders see it.
pub type GuestMemory = GuestMemoryMmap<WriteLog>;

/// What backs guest memory on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Private anonymous pages, never huge.
    Anonymous,
    /// Private anonymous pages with `MADV_HUGEPAGE`.
    Thp,
    /// Pages of this many bytes from the host's pool.
    Hugetlb(u64),
    /// The same, through a shared memfd.
    SharedHugetlb(u64),
    /// Shared anonymous memory.
    Shmem,
    /// A memfd: shared memory that another process or userfaultfd can be handed.
    Memfd,
}

impl Backing {
    /// The page size that its mapping promises, in bytes.
    pub fn page_size(self) -> u64 {
        match self {
            Self::Hugetlb(size) | Self::SharedHugetlb(size) => size,
            _ => PAGE_SIZE,
        }
    }

    /// The page size at which KVM can map it at best.
    pub fn best_mapping(self) -> u64 {
        if self == Self::Thp { 2 << 20 } else { self.page_size() }
    }

    /// The alignment in guest-physical and host-virtual space that lets KVM use the best mapping.
    fn alignment(self) -> u64 {
        self.best_mapping().max(2 << 20)
    }
}

impl fmt::Display for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous => f.write_str("anonymous"),
            Self::Thp => f.write_str("thp"),
            Self::Hugetlb(size) => write!(f, "hugetlb-{}", short_size(*size)),
            Self::SharedHugetlb(size) => write!(f, "shared-hugetlb-{}", short_size(*size)),
            Self::Shmem => f.write_str("shmem"),
            Self::Memfd => f.write_str("memfd"),
        }
    }
}

/// `2m`, `1g`, `64k`: the largest unit that divides.
pub fn short_size(bytes: u64) -> String {
    let units = [(40, "t"), (30, "g"), (20, "m"), (10, "k")];
    units
        .iter()
        .find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift))
        .map_or_else(|| bytes.to_string(), |(shift, unit)| format!("{}{unit}", bytes >> shift))
}

/// What the user asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryConfig {
    /// Bytes of RAM.
    pub size: u64,
    /// What backs it.
    pub backing: Backing,
    /// Whether every page is there before the guest starts.
    pub prealloc: bool,
    /// Whether it is locked (`mlock2`; what is not preallocated is locked as it is touched).
    pub lock: bool,
    /// Into how many memslots RAM is cut, on each side of the gap evenly by size.
    pub slots: u32,
}

impl MemoryConfig {
    /// `size` bytes, all else as on an unadorned command line.
    pub fn new(size: u64) -> Self {
        Self { size, backing: Backing::Anonymous, prealloc: false, lock: false, slots: 1 }
    }
}

/// Why guest memory cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not a multiple of the page size.
    #[error("{size} bytes is no multiple of the {} pages of backing={backing}; the next size up is {}",
        short_size(backing.page_size()), short_size(size.next_multiple_of(backing.page_size())))]
    Unaligned {
        /// What was asked.
        size: u64,
        /// With which backing.
        backing: Backing,
    },
    /// Zero, or less than a guest can live in.
    #[error("{} is too small: the least is {}", short_size(*size), short_size(*least))]
    TooSmall {
        /// What was asked.
        size: u64,
        /// What would work.
        least: u64,
    },
    /// Beyond the guest-physical address space.
    #[error("{} is more than a guest can address: the most is {}", short_size(*size), short_size(*most))]
    TooLarge {
        /// What was asked.
        size: u64,
        /// What would work.
        most: u64,
    },
    /// More slots than pages, or than KVM has.
    #[error("{0} is out of range: from 1 to {1} would work here")]
    Slots(u32, u64),
    /// What no memslot can be.
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
    /// The host has no such huge pages at all, or no memory to map.
    #[error("{} cannot be mapped with backing={backing}: {source}; {}", short_size(*size), remedy(*backing))]
    Map {
        /// What was asked.
        size: u64,
        /// With which backing.
        backing: Backing,
        /// What the kernel said.
        source: io::Error,
    },
    /// Preallocation hit the end of the host's memory.
    #[error("{0}; ask for less, free memory on the host, or leave it off")]
    Populate(#[source] io::Error),
    /// `mlock2` failed.
    #[error("{0}; raise the limit (ulimit -l unlimited, or LimitMEMLOCK=), or leave it off")]
    Lock(#[source] io::Error),
}

impl Fault for Error {
    fn blame(&self) -> Blame {
        match self {
            Self::Unaligned { .. } | Self::TooSmall { .. } | Self::TooLarge { .. } | Self::Map { .. } => {
                Blame::user(Field::Memory)
            }
            Self::Slots(..) => Blame::user(Field::Slots),
            // Whoever asks for such a slot is this program.
            Self::Slot { .. } => Blame::HOST,
            Self::Shortage(_, shortage) => shortage.blame(),
            Self::Populate(_) => Blame::host(Field::Prealloc),
            Self::Lock(_) => Blame::user(Field::Lock),
        }
    }
}

fn remedy(backing: Backing) -> &'static str {
    match backing {
        Backing::Hugetlb(_) | Backing::SharedHugetlb(_) => {
            "`vellum doctor` lists the huge page sizes that this host has"
        }
        _ => "ask for less, or raise the address space limit (ulimit -v)",
    }
}

/// The least RAM of a guest, in bytes.
pub const LEAST: u64 = 1 << 20;

/// Mapped guest RAM.
#[derive(Clone, Debug)]
pub struct Memory {
    /// What was asked for.
    pub config: MemoryConfig,
    /// All of it, in one piece.
    pub mapping: Arc<Mapping>,
    /// The file behind a shared backing, for userfaultfd's minor faults and for handing to another process.
    pub file: Option<Arc<std::fs::File>>,
    /// The same by guest-physical address.
    pub guest: GuestMemory,
    slots: Vec<Slot>,
}

impl Memory {
    /// Checks `config` and maps it, as RAM at `space`. Nothing is left behind on failure, and nothing is populated yet.
    pub fn map(space: Space, config: MemoryConfig) -> Result<Self, Error> {
        let MemoryConfig { size, backing, .. } = config;
        let page = backing.page_size();
        if size < LEAST.max(page) {
            return Err(Error::TooSmall { size, least: LEAST.max(page) });
        }
        let most = space.most();
        if size > most {
            return Err(Error::TooLarge { size, most });
        }
        if !size.is_multiple_of(page) {
            return Err(Error::Unaligned { size, backing });
        }
        let slots = cut(space, config)?;
        if let Backing::Hugetlb(page) | Backing::SharedHugetlb(page) = backing {
            hugepages::check(page, size).map_err(|shortage| Error::Shortage(backing, shortage))?;
        }
        let (mapping, file) = map(config).map_err(|source| Error::Map { size, backing, source })?;
        let mapping = Arc::new(mapping);
        let regions = space.parts(size).scan(0, |offset, (gpa, len)| {
            let at = *offset;
            *offset += len;
            Some((at, gpa, len))
        });
        let regions = regions
            .map(|(offset, gpa, len)| region(&mapping, offset, gpa, len))
            .collect::<io::Result<Vec<_>>>()
            .and_then(|regions| GuestMemoryMmap::from_regions(regions).map_err(io::Error::other))
            .map_err(|source| Error::Map { size, backing, source })?;
        let slots = (0..)
            .zip(slots)
            .map(|(id, (gpa, offset, len))| Slot::new(id, gpa, &mapping, offset..offset + len))
            .collect::<Result<_, _>>()?;
        if config.lock {
            mapping.lock(true).map_err(Error::Lock)?;
        }
        Ok(Self { config, mapping, file: file.map(Arc::new), guest: regions, slots })
    }

    /// Faults all of it in, on as many threads as there are CPUs; `progress` hears of bytes done, from any thread.
    pub fn populate(&self, progress: impl Fn(u64) + Sync) -> Result<(), Error> {
        // Large enough to keep the system call cheap, small enough to share out and to show progress.
        let chunk = self.config.backing.page_size().max(32 << 20);
        let chunks = self.mapping.len().div_ceil(chunk);
        let next = AtomicU64::new(0);
        let work = || -> io::Result<()> {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= chunks {
                    return Ok(());
                }
                let offset = index * chunk;
                let len = chunk.min(self.mapping.len() - offset);
                self.mapping.populate(offset, len).inspect_err(|_| next.store(chunks, Ordering::Relaxed))?;
                progress(len);
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get).min(chunks as usize);
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mine = work();
            others
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .fold(mine, Result::and)
        })
        .map_err(Error::Populate)
    }

    /// The memslots that it is cut into, ids from 0.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Cuts the memslots at these offsets into the mapping as well; ids are counted anew. Before a VM has them.
    ///
    /// # Errors
    /// Where an offset is not a multiple of the page size.
    pub fn cut_at(&mut self, offsets: &[u64]) -> Result<(), Error> {
        let mut slots = Vec::new();
        for slot in &self.slots {
            let Range { start, end } = slot.range();
            let mut cuts: Vec<u64> = offsets.iter().copied().filter(|at| *at > start && *at < end).collect();
            cuts.extend([start, end]);
            cuts.sort_unstable();
            cuts.dedup();
            for part in cuts.windows(2) {
                let gpa = slot.gpa() + (part[0] - start);
                slots.push(Slot::new(slots.len() as u32, gpa, &self.mapping, part[0]..part[1])?);
            }
        }
        self.slots = slots;
        Ok(())
    }

    /// Moves the memslots so that RAM starts at guest-physical `gpa` and has no gap. Before a VM has them.
    ///
    /// # Errors
    /// Where `gpa` is not a multiple of the page size, or RAM would wrap around.
    pub fn start_at(&mut self, gpa: u64) -> Result<(), Error> {
        let moved = |slot: &Slot| slot.at(slot.id(), gpa.saturating_add(slot.offset()));
        self.slots = self.slots.iter().map(moved).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// The offset into the mapping of a guest-physical address in RAM.
    pub fn offset_of(&self, gpa: u64) -> Option<u64> {
        let slot = self.slots.iter().find(|slot| gpa >= slot.gpa() && gpa - slot.gpa() < slot.bytes())?;
        Some(slot.offset() + (gpa - slot.gpa()))
    }

    /// The guest-physical address of an offset into the mapping.
    pub fn gpa_of(&self, offset: u64) -> Option<u64> {
        let slot = self.slots.iter().find(|slot| slot.range().contains(&offset))?;
        Some(slot.gpa() + (offset - slot.offset()))
    }
}

/// The memslots `(gpa, offset, len)` of `config`.
fn cut(space: Space, config: MemoryConfig) -> Result<Vec<(u64, u64, u64)>, Error> {
    let page = config.backing.best_mapping();
    let pages = config.size / page;
    let out_of_range = Error::Slots(config.slots, pages.max(1));
    if config.slots == 0 || u64::from(config.slots) > pages.max(1) {
        return Err(out_of_range);
    }
    let each = pages.div_ceil(u64::from(config.slots)).max(1) * page;
    let mut slots = Vec::new();
    let mut offset = 0;
    for (mut gpa, mut len) in space.parts(config.size) {
        while len > 0 {
            let part = each.min(len);
            slots.push((gpa, offset, part));
            (gpa, offset, len) = (gpa + part, offset + part, len - part);
        }
    }
    Ok(slots)
}

fn map(config: MemoryConfig) -> io::Result<(Mapping, Option<std::fs::File>)> {
    let MemoryConfig { size, backing, .. } = config;
    let align = backing.alignment();
    let (mapping, file) = match backing {
        Backing::Anonymous | Backing::Thp => (Mapping::new(size, align, Source::Anonymous)?, None),
        Backing::Hugetlb(page) => (Mapping::new(size, align, Source::Huge { log2: page.ilog2() })?, None),
        Backing::SharedHugetlb(page) => shared(size, align, Some(page.ilog2()))?,
        Backing::Shmem => (Mapping::new(size, align, Source::SharedAnonymous)?, None),
        Backing::Memfd => shared(size, align, None)?,
    };
    match backing {
        Backing::Thp => mapping.advise(libc::MADV_HUGEPAGE)?,
        // A host with THP set to `always` would otherwise give what was not asked for. A kernel without THP
        // refuses the advice, and needs none.
        Backing::Anonymous | Backing::Shmem | Backing::Memfd => {
            let _ = mapping.advise(libc::MADV_NOHUGEPAGE);
        }
        Backing::Hugetlb(_) | Backing::SharedHugetlb(_) => {}
    }
    // A core dump of the VMM must not hold the guest's secrets, nor be as large as its memory.
    mapping.advise(libc::MADV_DONTDUMP)?;
    Ok((mapping, file))
}

fn shared(size: u64, align: u64, huge_log2: Option<u32>) -> io::Result<(Mapping, Option<std::fs::File>)> {
    let file = mmap::memfd(c"vellum-guest", size, huge_log2)?;
    Ok((Mapping::new(size, align, Source::Shared(&file))?, Some(file)))
}

/// The `vm-memory` region for `[offset, offset + len)` of `mapping`; its bitmap keeps the mapping alive.
fn region(mapping: &Arc<Mapping>, offset: u64, gpa: u64, len: u64) -> io::Result<GuestRegionMmap<WriteLog>> {
    if offset.checked_add(len).is_none_or(|end| end > mapping.len()) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let log = WriteLog::new(mapping.clone(), len)?;
    let builder = MmapRegionBuilder::new_with_bitmap(len as usize, log)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_NORESERVE);
    // SAFETY: the range lies inside the mapping (checked above), which the region's bitmap keeps mapped.
    let builder = unsafe { builder.with_raw_mmap_pointer(mapping.as_ptr().add(offset as usize)) };
    let region = builder.build().map_err(io::Error::other)?;
    GuestRegionMmap::new(region, GuestAddress(gpa))
        .ok_or_else(|| io::Error::other("a region wraps around the guest-physical address space"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const SPACE: Space = Space(&[0..3 * GIB, 4 * GIB..1 << 40]);

    /// Address space alone: nothing is touched.
    fn memory(size: u64, slots: u32) -> Result<Memory, Error> {
        Memory::map(SPACE, MemoryConfig { slots, ..MemoryConfig::new(size) })
    }

    fn laid(memory: &Memory) -> Vec<(u32, u64, Range<u64>)> {
        memory.slots().iter().map(|slot| (slot.id(), slot.gpa(), slot.range())).collect()
    }

    #[test]
    fn slots_cover_memory_around_the_gap() {
        let one = memory(4 * GIB, 1).unwrap();
        assert_eq!(laid(&one), [(0, 0, 0..3 * GIB), (1, 4 * GIB, 3 * GIB..4 * GIB)]);
        assert_eq!(
            (one.offset_of(4 * GIB + 8), one.gpa_of(3 * GIB + 8)),
            (Some(3 * GIB + 8), Some(4 * GIB + 8))
        );
        assert_eq!((one.offset_of(3 * GIB), one.offset_of(5 * GIB), one.gpa_of(4 * GIB)), (None, None, None));
        for slots in [1, 2, 3, 7, 100] {
            let memory = memory(4 * GIB, slots).unwrap();
            let all = laid(&memory);
            // The gap adds one at most.
            assert!(all.len() as u32 >= slots && all.len() as u32 <= slots + 1, "{slots}: {}", all.len());
            assert!(all.iter().zip(0..).all(|((id, ..), nth)| *id == nth));
            assert!(all.windows(2).all(|two| two[0].2.end == two[1].2.start));
            assert_eq!((all[0].2.start, all[all.len() - 1].2.end), (0, 4 * GIB));
        }
    }

    #[test]
    fn slots_are_cut_and_placed_anew() {
        let mut memory = memory(4 * GIB, 1).unwrap();
        memory.cut_at(&[GIB, 0, GIB, 3 * GIB, 4 * GIB, 9 * GIB]).unwrap();
        let cut = [(0, 0, 0..GIB), (1, GIB, GIB..3 * GIB), (2, 4 * GIB, 3 * GIB..4 * GIB)];
        assert_eq!(laid(&memory), cut);
        assert!(memory.cut_at(&[GIB + 8]).is_err());
        memory.start_at(8 * GIB).unwrap();
        let gpas: Vec<u64> = memory.slots().iter().map(Slot::gpa).collect();
        assert_eq!(gpas, [8 * GIB, 9 * GIB, 11 * GIB]);
        assert!(memory.start_at(u64::MAX - GIB + 1).is_err() && memory.start_at(8).is_err());
        // What is refused changes nothing.
        assert_eq!(memory.slots()[0].gpa(), 8 * GIB);
    }

    #[test]
    fn what_no_guest_can_have_is_refused() {
        assert!(matches!(memory(0, 1), Err(Error::TooSmall { .. })));
        assert!(matches!(memory(LEAST + 1, 1), Err(Error::Unaligned { .. })));
        assert!(matches!(memory(1 << 41, 1), Err(Error::TooLarge { .. })));
        assert!(matches!(memory(LEAST, 0), Err(Error::Slots(0, 256))));
        assert!(matches!(memory(LEAST, 257), Err(Error::Slots(257, 256))));
        assert_eq!(memory(LEAST, 256).unwrap().slots().len(), 256);
    }

    #[test]
    fn sizes_are_printed_in_the_largest_unit_that_divides() {
        let sizes = [0, 1, 1023, 1024, 1536 << 10, 2 << 20, GIB, 3 << 40];
        assert_eq!(sizes.map(short_size), ["0", "1", "1023", "1k", "1536k", "2m", "1g", "3t"]);
    }
}
