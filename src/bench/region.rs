//! The memory of a benchmark: checks against the host, and allocation.

use std::ops::Range;

use super::Error;
use vellum_guests::guest;
use vellum_host::{hugepages, topology};
use vellum_kvm::arch::layout;
use vellum_kvm::memory::{self, Backing, Memory, MemoryConfig, short_size};
use vellum_kvm::vm;
use vellum_sys::diagnose::Field;
use vellum_sys::signal;

/// Memory and the vCPUs that access it.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// Its size in bytes, per vCPU unless the benchmark says otherwise.
    pub bytes: u64,
    /// Its backing.
    pub backing: Backing,
    /// The number of vCPUs.
    pub vcpus: usize,
}

impl Region {
    /// Checks that the size is a multiple of `page`.
    pub(super) fn check(&self, page: u64) -> Result<(), Error> {
        if self.bytes > 0 && self.bytes.is_multiple_of(page) {
            return Ok(());
        }
        let [bytes, page, next] =
            [self.bytes, page, self.bytes.max(1).next_multiple_of(page)].map(short_size);
        let why =
            format!("{bytes} is not a multiple of the {page} pages of {}; {next} would work", self.backing);
        Err(Error::Asked(Field::Memory, why))
    }

    /// The total size: one part per vCPU, or one part that all share.
    pub fn total(&self, shared: bool) -> u64 {
        self.bytes.saturating_mul(if shared { 1 } else { self.vcpus as u64 })
    }

    /// The total size, if this host has that much memory and supports that many vCPUs.
    pub(super) fn affordable(&self, shared: bool) -> Result<u64, Error> {
        let most = vm::open()?.get_max_vcpus();
        if self.vcpus > most {
            let why = format!("{}: this KVM has at most {most} vCPUs", self.vcpus);
            return Err(Error::Asked(Field::Cpus, why));
        }
        let total = self.total(shared);
        check_memory(total, self.backing)?;
        Ok(total)
    }
}

/// Checks that RAM can start at an address.
pub(super) fn check_offset(offset: u64, bytes: u64, backing: Backing) -> Result<(), Error> {
    let align = backing.best_mapping().max(2 << 20);
    let end = offset.saturating_add(bytes);
    let has_room = |range: &Range<u64>| range.start <= offset && end <= range.end;
    let ranges = layout::RAM.0;
    if offset.is_multiple_of(align) && ranges.iter().any(has_room) {
        return Ok(());
    }
    let names: Vec<_> =
        ranges.iter().map(|range| format!("{:#x} to {:#x}", range.start, range.end)).collect();
    let would = ranges.iter().map(|range| range.start).next_back().unwrap_or(layout::RAM_START);
    let why = format!(
        "{offset:#x}: memory must start at a multiple of {} and lie within {}; {would:#x} would work",
        short_size(align),
        names.join(" or "),
    );
    Err(Error::Asked(Field::GuestAddress, why))
}

/// Moves the start of RAM to `offset` in the guest's physical address space, if given.
pub(super) fn place(memory: &mut Memory, offset: Option<u64>) -> Result<(), Error> {
    Ok(offset.map_or(Ok(()), |offset| memory.start_at(offset))?)
}

/// Memory that is already populated, so that no figure includes the host's first touch.
pub(super) fn populated(config: MemoryConfig) -> Result<Memory, Error> {
    let memory = Memory::map(layout::RAM, MemoryConfig { prealloc: true, ..config })?;
    if !memory.populate(|_| !signal::is_pending())?
        && let Some(signal) = signal::take()
    {
        return Err(guest::Error::Interrupted(signal).into());
    }
    Ok(memory)
}

/// Checks the size against the limits of machines and of this host before anything is mapped.
pub(super) fn check_memory(bytes: u64, backing: Backing) -> Result<(), Error> {
    let asked = |why: String| Err(Error::Asked(Field::Memory, why));
    if bytes < memory::MIN_SIZE {
        let [all, least] = [bytes, memory::MIN_SIZE].map(short_size);
        return asked(format!("{all} in all; a machine needs at least {least}"));
    }
    if let Backing::Hugetlb(page) | Backing::SharedHugetlb(page) = backing {
        return hugepages::check(page, bytes)
            .map_err(|shortage| memory::Error::Shortage(backing, shortage).into());
    }
    let available = topology::memory().available;
    // Page tables of KVM and the host take a few hundredths.
    let bytes = bytes.saturating_add(bytes / 64);
    if available > 0 && bytes > available {
        let [needed, available] = [bytes.next_multiple_of(1 << 20), available >> 20 << 20].map(short_size);
        return asked(format!(
            "this needs {needed} of memory, but {available} is available: use fewer vCPUs or less memory per vCPU"
        ));
    }
    Ok(())
}
