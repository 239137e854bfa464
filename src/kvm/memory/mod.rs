//! Guest memory: its configuration ([`MemoryConfig`]) and the mapped memory ([`Memory`]).
//!
//! One mapping backs all RAM. It is aligned so that guest physical and host virtual addresses are
//! congruent modulo the backing's page size. Otherwise KVM could not map huge pages. Memslots
//! ([`Slot`]) are cut from the mapping, around the gap of [`plan::Space`]. `vm/memslots.rs`
//! registers them with KVM.

use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

mod error;
mod forked;
mod handed;
pub mod plan;
pub mod slices;
mod slot;
mod touched;
pub(crate) mod write_log;

pub use error::Error;
pub use forked::NewBase;
use forked::Shared;
pub use slot::Slot;

use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, mmap::MmapRegionBuilder};

use self::plan::Space;
use crate::memory::write_log::WriteLog;
use vellum_host::{hugepages, topology};
use vellum_sys::mmap::{self, Mapping, Source, host_page};

/// Guest memory for devices and loaders.
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
    /// Pages of this many bytes from the host's pool, through a shared memfd.
    SharedHugetlb(u64),
    /// Shared anonymous memory.
    Shmem,
    /// A memfd: shared memory that can be passed to another process or to userfaultfd.
    Memfd,
}

impl Backing {
    /// The page size that its mapping guarantees, in bytes.
    pub fn page_size(self) -> u64 {
        match self {
            Self::Hugetlb(size) | Self::SharedHugetlb(size) => size,
            _ => host_page(),
        }
    }

    /// The largest page size at which KVM may map it.
    pub fn best_mapping(self) -> u64 {
        // The range that one last-level page table maps: it has entries of 8 bytes.
        if self == Self::Thp { host_page() * (host_page() / 8) } else { self.page_size() }
    }

    /// The alignment of guest physical and host virtual addresses that allows the best mapping.
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

/// `2m`, `1g`, `64k`: in the largest unit that divides the number.
pub fn short_size(bytes: u64) -> String {
    let units = [(40, "t"), (30, "g"), (20, "m"), (10, "k")];
    units
        .iter()
        .find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift))
        .map_or_else(|| bytes.to_string(), |(shift, unit)| format!("{}{unit}", bytes >> shift))
}

/// The user's memory configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryConfig {
    /// Bytes of RAM.
    pub size: u64,
    /// What backs it.
    pub backing: Backing,
    /// Whether every page is populated before the guest starts.
    pub prealloc: bool,
    /// Whether it is locked (`mlock2`). Pages that are not preallocated are locked when they are
    /// touched.
    pub lock: bool,
    /// The number of memslots. RAM is divided evenly by size on each side of the gap.
    pub slots: u32,
    /// The chunk size in bytes in which KVM eagerly splits block mappings for dirty logging, if
    /// configurable (Arm).
    pub eager_split: Option<u64>,
}

impl MemoryConfig {
    /// `size` bytes, with the command line's defaults for everything else.
    pub fn new(size: u64) -> Self {
        Self { size, backing: Backing::Anonymous, prealloc: false, lock: false, slots: 1, eager_split: None }
    }
}

/// The minimum RAM of a guest, in bytes.
pub const MIN_SIZE: u64 = 1 << 20;

/// Mapped guest RAM.
#[derive(Clone, Debug)]
pub struct Memory {
    /// Its configuration.
    pub config: MemoryConfig,
    /// All of RAM, in one mapping.
    pub mapping: Arc<Mapping>,
    /// The file of a shared backing, and how much of the mapping has parted from it.
    shared: Arc<Shared>,
    /// RAM by guest physical address.
    pub guest: GuestMemory,
    /// The ranges of the mapping that map files, or that are fetched from them on demand.
    pub shown: Arc<OnceLock<Vec<Range<u64>>>>,
    slots: Vec<Slot>,
}

/// How much host memory this process can have. Read while the files that contain it can be opened.
#[derive(Debug)]
pub struct Room {
    memory: topology::HostMemory,
    /// Free huge pages of the backing's size, if it uses a pool.
    huge: Option<u64>,
}

impl Room {
    /// The memory available to `backing`.
    pub fn read(backing: Backing) -> Self {
        let huge = match backing {
            Backing::Hugetlb(page) | Backing::SharedHugetlb(page) => Some(hugepages::free(page)),
            _ => None,
        };
        Self { memory: topology::memory(), huge }
    }
}

impl Memory {
    /// Checks `config` and maps RAM at `space`. Does not populate it. A failure leaves nothing
    /// behind.
    pub fn map(space: Space, config: MemoryConfig) -> Result<Self, Error> {
        if let Backing::Hugetlb(page) | Backing::SharedHugetlb(page) = config.backing
            && config.size.is_multiple_of(page)
        {
            let checked = hugepages::check(page, config.size);
            checked.map_err(|shortage| Error::Shortage(config.backing, shortage))?;
        }
        Self::map_within(&Room { memory: topology::memory(), huge: None }, space, config)
    }

    /// The same when files can no longer be opened. `room` was read before.
    pub fn map_within(room: &Room, space: Space, config: MemoryConfig) -> Result<Self, Error> {
        let MemoryConfig { size, backing, .. } = config;
        let page = backing.page_size();
        if size < MIN_SIZE.max(page) {
            return Err(Error::TooSmall { size, least: MIN_SIZE.max(page) });
        }
        let most = space.most();
        if size > most {
            return Err(Error::TooLarge { size, most });
        }
        if !size.is_multiple_of(page) {
            return Err(Error::Unaligned { size, backing });
        }
        cut(space, config)?;
        if let Some(free) = room.huge.filter(|free| *free < size / page) {
            let source = io::Error::other(format!("{free} of {} pages are free", size / page));
            return Err(Error::Map { size, backing, source });
        }
        error::afford(config, &room.memory)?;
        let (mapping, file) = map(config).map_err(|source| Error::Map { size, backing, source })?;
        Self::lay(space, config, mapping, file)
    }

    /// RAM at `space` in `mapping`.
    fn lay(
        space: Space,
        config: MemoryConfig,
        mapping: Mapping,
        file: Option<std::fs::File>,
    ) -> Result<Self, Error> {
        let MemoryConfig { size, backing, .. } = config;
        let slots = cut(space, config)?;
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
        let (shared, shown) = (Arc::new(Shared::new(file)), Arc::default());
        Ok(Self { config, mapping, shared, guest: regions, shown, slots })
    }

    /// Faults in all of it, on as many threads as there are CPUs. Calls `go_on` with the bytes
    /// done, from any thread. If that returns false, populating ends early, and the result is
    /// false.
    pub fn populate(&self, go_on: impl Fn(u64) -> bool + Sync) -> Result<bool, Error> {
        self.populate_on(std::thread::available_parallelism().map_or(1, NonZeroUsize::get), go_on)
    }

    /// The same on this thread only.
    pub fn populate_here(&self, go_on: impl Fn(u64) -> bool + Sync) -> Result<bool, Error> {
        self.populate_on(1, go_on)
    }

    fn populate_on(&self, threads: usize, go_on: impl Fn(u64) -> bool + Sync) -> Result<bool, Error> {
        // Large enough to make the system call cheap, small enough to divide the work and to show
        // progress.
        let chunk = self.config.backing.page_size().max(32 << 20);
        let chunks = self.mapping.len().div_ceil(chunk);
        let (next, stopped) = (AtomicU64::new(0), AtomicBool::new(false));
        let work = || -> io::Result<()> {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= chunks {
                    return Ok(());
                }
                let offset = index * chunk;
                let len = chunk.min(self.mapping.len() - offset);
                self.mapping.populate(offset, len).inspect_err(|_| next.store(chunks, Ordering::Relaxed))?;
                if !go_on(len) {
                    stopped.store(true, Ordering::Relaxed);
                    next.store(chunks, Ordering::Relaxed);
                }
            }
        };
        let threads = threads.min(chunks as usize);
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mine = work();
            others
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .fold(mine, Result::and)
        })
        .map_err(Error::Populate)?;
        Ok(!stopped.into_inner())
    }

    /// Its memslots, with ids from 0.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Also cuts the memslots at these offsets into the mapping and renumbers them. Call this
    /// before a VM has them.
    ///
    /// # Errors
    /// An offset is not a multiple of the page size.
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

    /// Moves RAM to the guest physical address `gpa`, without a gap. Call this before a VM or a
    /// device has it.
    ///
    /// # Errors
    /// `gpa` is not a multiple of the page size, or RAM would wrap around.
    pub fn start_at(&mut self, gpa: u64) -> Result<(), Error> {
        let MemoryConfig { size, backing, .. } = self.config;
        let moved = |slot: &Slot| slot.at(slot.id(), gpa.saturating_add(slot.offset()));
        let slots = self.slots.iter().map(moved).collect::<Result<_, _>>()?;
        let whole = region(&self.mapping, 0, gpa, size);
        let guest = whole.and_then(|one| GuestMemory::from_regions(vec![one]).map_err(io::Error::other));
        self.guest = guest.map_err(|source| Error::Map { size, backing, source })?;
        self.slots = slots;
        Ok(())
    }

    /// The offset into the mapping of a guest physical address in RAM.
    pub fn offset_of(&self, gpa: u64) -> Option<u64> {
        let slot = self.slots.iter().find(|slot| gpa >= slot.gpa() && gpa - slot.gpa() < slot.bytes())?;
        Some(slot.offset() + (gpa - slot.gpa()))
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
    // KVM_MEM_MAX_NR_PAGES (include/linux/kvm_host.h).
    let most = ((1 << 31) - 1) * host_page() / page;
    let least = pages.div_ceil(most);
    if u64::from(config.slots) < least {
        return Err(Error::LargeSlot(config.slots, least));
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
    advise(&mapping, backing)?;
    Ok((mapping, file))
}

/// Advises the kernel on the use of memory with this backing.
fn advise(mapping: &Mapping, backing: Backing) -> io::Result<()> {
    match backing {
        Backing::Thp => mapping.advise(libc::MADV_HUGEPAGE)?,
        // Prevents huge pages on a host with THP set to `always`. A kernel without THP refuses the
        // advice, and does not need it.
        Backing::Anonymous | Backing::Shmem | Backing::Memfd => {
            let _ = mapping.advise(libc::MADV_NOHUGEPAGE);
        }
        Backing::Hugetlb(_) | Backing::SharedHugetlb(_) => {}
    }
    // A core dump of the VMM must not contain the guest's secrets, nor be as large as its memory.
    mapping.advise(libc::MADV_DONTDUMP)
}

fn shared(size: u64, align: u64, huge_log2: Option<u32>) -> io::Result<(Mapping, Option<std::fs::File>)> {
    // Another process may receive it. The seals guarantee that process the file's size.
    let file = mmap::freezable_memfd(c"vellum-guest", size, huge_log2)?;
    Ok((Mapping::new(size, align, Source::Shared(&file))?, Some(file)))
}

/// The `vm-memory` region for `[offset, offset + len)` of `mapping`. Its bitmap keeps the mapping
/// alive.
fn region(mapping: &Arc<Mapping>, offset: u64, gpa: u64, len: u64) -> io::Result<GuestRegionMmap<WriteLog>> {
    if offset.checked_add(len).is_none_or(|end| end > mapping.len()) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let log = WriteLog::new(mapping.clone(), len)?;
    let builder = MmapRegionBuilder::new_with_bitmap(len as usize, log)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_NORESERVE);
    // SAFETY: the range lies inside the mapping (checked above), which the region's bitmap keeps
    // mapped.
    let builder = unsafe { builder.with_raw_mmap_pointer(mapping.as_ptr().add(offset as usize)) };
    let region = builder.build().map_err(io::Error::other)?;
    GuestRegionMmap::new(region, GuestAddress(gpa))
        .ok_or_else(|| io::Error::other("a region wraps around the guest-physical address space"))
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use super::*;
    use vellum_sys::mmap::PAGE_SIZE;

    const GIB: u64 = 1 << 30;
    const SPACE: Space = Space(&[0..3 * GIB, 4 * GIB..1 << 40]);

    /// Only address space: no page is touched.
    fn memory(size: u64, slots: u32) -> Result<Memory, Error> {
        Memory::map(SPACE, MemoryConfig { slots, ..MemoryConfig::new(size) })
    }

    fn laid(memory: &Memory) -> Vec<(u32, u64, Range<u64>)> {
        memory.slots().iter().map(|slot| (slot.id(), slot.gpa(), slot.range())).collect()
    }

    /// The pool cannot give as many huge pages as it may ever have and one more. Private and shared
    /// memory are both refused when they are mapped, and not when the guest touches them.
    #[test]
    fn huge_pages_that_the_pool_lacks_are_missed_when_memory_is_mapped() {
        const PAGE: u64 = 2 << 20;
        let pool = std::path::Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB");
        let number = |name| std::fs::read_to_string(pool.join(name)).ok()?.trim().parse::<u64>().ok();
        let Some((has, more)) = number("nr_hugepages").zip(number("nr_overcommit_hugepages")) else {
            eprintln!("needs a kernel with a pool of huge pages of 2 MiB");
            return;
        };
        for backing in [Backing::Hugetlb(PAGE), Backing::SharedHugetlb(PAGE)] {
            let config = MemoryConfig { backing, ..MemoryConfig::new((has + more + 1) * PAGE) };
            assert!(map(config).is_err(), "{backing}: {has} huge pages, {more} more at most");
        }
    }

    #[test]
    fn slots_cover_memory_around_the_gap() {
        let one = memory(4 * GIB, 1).unwrap();
        assert_eq!(laid(&one), [(0, 0, 0..3 * GIB), (1, 4 * GIB, 3 * GIB..4 * GIB)]);
        assert_eq!(one.offset_of(4 * GIB + 8), Some(3 * GIB + 8));
        assert_eq!((one.offset_of(3 * GIB), one.offset_of(5 * GIB)), (None, None));
        for slots in [1, 2, 3, 7, 100] {
            let memory = memory(4 * GIB, slots).unwrap();
            let all = laid(&memory);
            // The gap adds at most one.
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
        // Devices and loaders see it there too.
        memory.guest.write_obj(7u64, GuestAddress(11 * GIB + 8)).unwrap();
        assert_eq!(memory.mapping.words()[(3 * GIB + 8) as usize / 8].load(Ordering::Relaxed), 7);
        assert!(memory.guest.write_obj(7u64, GuestAddress(8)).is_err());
        assert!(memory.start_at(u64::MAX - GIB + 1).is_err() && memory.start_at(8).is_err());
        // A failure changes nothing.
        assert_eq!(memory.slots()[0].gpa(), 8 * GIB);
    }

    #[test]
    fn memslots_stay_below_what_kvm_takes() {
        const WIDE: Space = Space(&[0..1 << 31, 1 << 31..1 << 45]);
        let cut = |size, slots| cut(WIDE, MemoryConfig { slots, ..MemoryConfig::new(size) });
        assert!(matches!(cut(20 << 40, 1), Err(Error::LargeSlot(1, 3))));
        assert!(matches!(cut(8 << 40, 1), Err(Error::LargeSlot(1, 2))));
        assert!(cut(20 << 40, 3).unwrap().iter().all(|(_, _, len)| len / PAGE_SIZE < 1 << 31));
        assert!(cut((8 << 40) - PAGE_SIZE, 1).is_ok());
    }

    /// A chunk has 32 MiB. Only chunks that other threads had begun are populated too.
    #[test]
    fn populating_ends_when_it_is_told_to() {
        let memory = memory(4 * GIB, 1).unwrap();
        let done = AtomicU64::new(0);
        let whole = memory.populate(|bytes| {
            done.fetch_add(bytes, Ordering::Relaxed);
            false
        });
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get) as u64;
        assert!(!whole.unwrap());
        assert!((1..=threads).contains(&(done.into_inner() / (32 << 20))));
    }

    #[test]
    fn what_no_guest_can_have_is_refused() {
        assert!(matches!(memory(0, 1), Err(Error::TooSmall { .. })));
        assert!(matches!(memory(MIN_SIZE + 1, 1), Err(Error::Unaligned { .. })));
        assert!(matches!(memory(1 << 41, 1), Err(Error::TooLarge { .. })));
        assert!(matches!(memory(MIN_SIZE, 0), Err(Error::Slots(0, 256))));
        assert!(matches!(memory(MIN_SIZE, 257), Err(Error::Slots(257, 256))));
        assert_eq!(memory(MIN_SIZE, 256).unwrap().slots().len(), 256);
    }

    #[test]
    fn sizes_are_printed_in_the_largest_unit_that_divides() {
        let sizes = [0, 1, 1023, 1024, 1536 << 10, 2 << 20, GIB, 3 << 40];
        assert_eq!(sizes.map(short_size), ["0", "1", "1023", "1k", "1536k", "2m", "1g", "3t"]);
    }
}
