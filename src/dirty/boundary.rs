//! A directed test for one bug of KVM on x86, which the oracle meets by luck.
//!
//! With initially-all-set, huge pages are protected only when a part of them is cleared, by
//! `kvm_arch_mmu_enable_log_dirty_pt_masked` (arch/x86/kvm/mmu/mmu.c, since Linux 5.14). To learn whether the 64 pages in
//! hand cross into another huge page it rounds both ends up to 2 MiB; a range that ends on the first page of the next one
//! then seems to stay in the first. The next one stays writable, and the write that follows is in no collection. That
//! takes a memslot whose first page is no multiple of 64, for otherwise no 64 pages end there. Where
//! `kvm.eager_page_split` is on, kernels that split up to the last page and not up to the one before it are spared.
//!
//! The test lays memslots so, clears just those 64 pages, has the guest write them, and looks.

use std::fmt;

use super::{Error, Method, tracker};
use crate::arch::workload::GuestPage;
use crate::sys::mmap::PAGE_SIZE;
use crate::vm;
use crate::vm::counters::Counters;
use crate::vm::memory::{Backing, Memory, MemoryConfig, Slot};
use crate::workload::guest::{Guest, GuestConfig};
use crate::workload::{WriteConfig, run};

/// What was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Boundary {
    /// The page was logged.
    Kept,
    /// The first page of the huge page was not, and only that.
    Lost,
    /// Others were lost, by their gfns: another fault than this one.
    Others(Vec<u64>),
    /// Nothing can be said, and why.
    Untested(&'static str),
}

impl fmt::Display for Boundary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kept => f.write_str("pages at the edges of huge ones are logged"),
            Self::Lost => f.write_str(
                "this kernel loses the first page of a huge one where a clear ends on it, with initially-all-set",
            ),
            Self::Others(gfns) => write!(f, "this kernel loses the pages {gfns:x?} with initially-all-set"),
            Self::Untested(why) => write!(f, "not tested: {why}"),
        }
    }
}

/// Three blocks of 2 MiB: the first is cut by the memslots, the edge is between the others.
const BLOCK: u64 = 512;
const EDGE: u64 = 2 * BLOCK;
const PAGES: u64 = 3 * BLOCK;

/// Runs the test: some milliseconds, 6 MiB of transparent huge pages.
pub fn test() -> Result<Boundary, run::Error> {
    let kvm = vm::open()?;
    let probe = crate::host::kvm::create_vm(&kvm).map_err(vm::Error::from)?;
    if Method::InitiallySet.check(&probe).is_err() {
        return Ok(Boundary::Untested("this KVM has no initially-all-set log"));
    }
    drop(probe);
    let mut memory =
        Memory::map(MemoryConfig { backing: Backing::Thp, ..MemoryConfig::new(PAGES * PAGE_SIZE) })?;
    let hva = memory.mapping.as_ptr() as u64;
    let slot = |id, pages: std::ops::Range<u64>| {
        let offset = pages.start * PAGE_SIZE;
        let len = (pages.end - pages.start) * PAGE_SIZE;
        Slot { id, gpa: offset, len, offset, hva: hva + offset }
    };
    memory.slots = vec![slot(0, 0..1), slot(1, 1..PAGES)];
    let logged = memory.slots[1];
    // Large pages in the guest too, lest a KVM that shadows them map small ones.
    let config = GuestConfig { page: GuestPage::Large, ..GuestConfig::new(1) };
    let guest = Guest::build(&kvm, memory, config)?;
    // A pass over all pages each time.
    guest.program(&WriteConfig { passes: 0, lockstep: true, latency: false, ..WriteConfig::default() })?;
    let write = || {
        guest.resume();
        guest.wait_all_rung()
    };
    write()?;
    let counters = Counters::open(&guest.vm.fd, &guest.vcpus).ok();
    let large = counters.and_then(|counters| counters.read().ok()?.get("pages_2m").copied());
    let failed = |error: Error| vm::Error::from(Box::new(error));
    let mut tracker = tracker(Method::InitiallySet, &guest.vm, &guest.vcpus, Some(64)).map_err(failed)?;
    tracker.track(logged);
    tracker.enable(&guest.vm, true).map_err(failed)?;
    tracker.get().map_err(failed)?;
    // The 64 pages that end on the edge; gfn 1 is the slot's first.
    let word = ((EDGE - 1) / 64) as usize;
    let words = &mut tracker.logs_mut()[0].words;
    words.iter_mut().enumerate().filter(|(index, _)| *index != word).for_each(|(_, bits)| *bits = 0);
    tracker.clear().map_err(failed)?;
    write()?;
    tracker.get().map_err(failed)?;
    let bits = tracker.logs()[0].words[word];
    let lost: Vec<u64> =
        (0..64).filter(|bit| bits >> bit & 1 == 0).map(|bit| word as u64 * 64 + bit + 1).collect();
    Ok(match (lost.as_slice(), large) {
        ([EDGE], _) => Boundary::Lost,
        ([], Some(1..)) => Boundary::Kept,
        ([], Some(0)) => Boundary::Untested("KVM mapped no huge page"),
        ([], None) => Boundary::Untested("this KVM does not say whether it mapped huge pages"),
        _ => Boundary::Others(lost),
    })
}
