//! The directed part of the oracle. One chunk of the log is cleared, or a ring is reset. The guest
//! then writes to the first and the last page of that chunk, and both must be in the log.
//!
//! If a huge page is still mapped as one when a chunk is cleared, KVM must write-protect it. If the
//! chunk reaches into the next huge page, KVM must protect both. In a memslot whose first gfn is
//! one past a multiple of 64, one chunk ends on the first page of each huge page. A random test
//! hardly ever writes that page at the right moment.
//!
//! Three faults are known with KVM_DIRTY_LOG_INITIALLY_SET:
//!
//! - `kvm_arch_mmu_enable_log_dirty_pt_masked` (arch/x86/kvm/mmu/mmu.c) of Linux 5.14 and later
//!   rounds both ends of the chunk up to 2 MiB to check whether it crosses a boundary. It misses
//!   such a chunk. The page is lost, unless `kvm.eager_page_split` has already split the next huge
//!   page.
//! - The flag may be revoked between enabling the log and clearing it. KVM left pages writable
//!   because the first clear would protect them. They then stay writable.
//! - Another thread may set the flag while the log is being enabled, between KVM's two checks of
//!   it. Then no bits are set and nothing is protected, so no write is logged.
//!
//! A dirty ring has no bits that could start set, but KVM accepts KVM_DIRTY_LOG_INITIALLY_SET with
//! it. The test sets it and expects each page in the ring. (Linux 6.12 and 6.18 then protect
//! nothing when the log is enabled, so pages that were mapped never get into a ring.)
//!
//! A ring reset that a signal interrupts must have protected each page whose entry it consumed.
//! Linux 6.17 and later forget up to 64 of them. These stay writable, and when the guest writes to
//! all pages again they are in no ring.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use kvm_bindings::{KVM_DIRTY_LOG_INITIALLY_SET, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE};

use super::soak::Error;
use vellum_guests::Guest;
use vellum_guests::guest::GuestConfig;
use vellum_guests::program::touch_code;
use vellum_guests::touch::Plan;
use vellum_host::Facts;
use vellum_kvm::dirty::{self, DirtyTracker, Method};
use vellum_kvm::memory::{Backing, Memory, MemoryConfig, short_size};
use vellum_kvm::vm;
use vellum_kvm::vm::Vm;
use vellum_kvm::vm::counters::Counters;
use vellum_kvm::vm::ring::DirtyRing;
use vellum_report::{Answer, Case, Premise, Report, Status};
use vellum_sandbox::{self as sandbox, Mode};
use vellum_sys::dirty as sys;
use vellum_sys::mmap::{PAGE_SIZE, host_page};
use vellum_sys::signal;

/// The pages of the shortest clear.
const CHUNK: u64 = 64;

/// A result names so many lost pages.
const NAMED: usize = 16;

/// The entries of a dirty ring: a few times what one chunk adds.
const RING_ENTRIES: u32 = 4096;

/// How often a log is enabled while another thread sets and revokes INITIALLY_SET. A round proves
/// nothing if the mode did not change between KVM's two checks. On two emulated CPUs, one in four
/// rounds loses pages with Linux 5.10 and 6.12. On a single one that counts instructions, 5.10 lost
/// none, because the other thread never ran between the checks.
const RACES: u64 = 200;

/// The largest memslot when resets are interrupted. All its pages fit into a ring, whose last 576
/// entries KVM reserves.
pub const MAX_INTERRUPTED: u64 = (RING_ENTRIES as u64 - 1024) * PAGE_SIZE;

/// The resets that a signal must interrupt, and the most attempts. Linux before 6.17 never
/// interrupts one.
const CUT_SHORT: u64 = 8;
const RESETS: u64 = 64;

/// What happens to INITIALLY_SET or to a ring's reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mind {
    /// INITIALLY_SET stays.
    Kept,
    /// INITIALLY_SET is revoked after the log is enabled.
    Revoked,
    /// Another thread sets and revokes INITIALLY_SET while the log is being enabled. Then all pages
    /// are written.
    Raced,
    /// INITIALLY_SET stays, and signals interrupt resets of the ring.
    Interrupted,
}

/// The parameters.
#[derive(Clone, Debug)]
pub struct Config {
    /// Manual protection with or without INITIALLY_SET, or a ring with it.
    pub method: Method,
    /// The backing of memory.
    pub backing: Backing,
    /// The size of the memslot.
    pub size: u64,
    /// Its guest-physical address. Host addresses are congruent modulo 2 MiB.
    pub base: u64,
    /// What happens to INITIALLY_SET.
    pub mind: Mind,
    /// Whether to confine the vCPU thread.
    pub sandbox: Mode,
}

/// The behaviour of this host's KVM with initially-all-set if a clear ends on the first page of a
/// huge page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EdgeVerdict {
    /// KVM logs the page.
    Kept,
    /// KVM loses the page, and only such pages.
    Lost,
    /// KVM loses other pages, with these gfns: another fault.
    Others(Vec<u64>),
    /// No verdict, and why.
    Untested(&'static str),
}

impl fmt::Display for EdgeVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kept => f.write_str("pages at the edges of huge pages are logged"),
            Self::Lost => f.write_str(
                "this kernel loses the first page of a huge page if a clear ends on it, with initially-all-set",
            ),
            Self::Others(gfns) => write!(f, "this kernel loses the pages {gfns:x?} with initially-all-set"),
            Self::Untested(why) => write!(f, "not tested: {why}"),
        }
    }
}

/// Tests this host's KVM. Takes some milliseconds and 6 MiB of transparent huge pages.
pub fn probe() -> Result<EdgeVerdict, Error> {
    let vm = vellum_host::kvm::create_vm(&vm::open()?).map_err(vm::Error::from)?;
    if Method::InitiallySet.check(&vm).is_err() {
        return Ok(EdgeVerdict::Untested("this KVM has no initially-all-set log"));
    }
    drop(vm);
    if host_page() != PAGE_SIZE {
        return Ok(EdgeVerdict::Untested("this host's pages are larger than 4 KiB"));
    }
    let (size, base) = (6 << 20, PAGE_SIZE);
    let config = Config {
        method: Method::InitiallySet,
        backing: Backing::Thp,
        size,
        base,
        mind: Mind::Kept,
        // Called by commands that have a sandbox of their own.
        sandbox: Mode::Off,
    };
    let seen = look(&config)?;
    let gfns: Vec<u64> = seen.lost.iter().map(|page| base / PAGE_SIZE + page).collect();
    Ok(match seen.huge {
        _ if !gfns.is_empty() && gfns.iter().all(|gfn| gfn.is_multiple_of(512)) => EdgeVerdict::Lost,
        _ if !gfns.is_empty() => EdgeVerdict::Others(gfns),
        Some(1..) => EdgeVerdict::Kept,
        Some(0) => EdgeVerdict::Untested("KVM mapped no huge pages"),
        None => EdgeVerdict::Untested("this KVM does not count mapped huge pages"),
    })
}

/// The number of pages that this host's KVM loses if a signal interrupts a reset of a dirty ring.
/// `None` if it has no ring. Takes some milliseconds.
pub fn probe_reset() -> Result<Option<usize>, Error> {
    let vm = vellum_host::kvm::create_vm(&vm::open()?).map_err(vm::Error::from)?;
    if vm::ring::check(&vm, RING_ENTRIES).is_err() || host_page() != PAGE_SIZE {
        return Ok(None);
    }
    drop(vm);
    let config = Config {
        method: Method::Ring,
        backing: Backing::Memfd,
        size: 2 << 20,
        base: PAGE_SIZE,
        mind: Mind::Interrupted,
        sandbox: Mode::Off,
    };
    Ok(Some(look(&config)?.lost.len()))
}

/// Runs the test. The result has the number of lost pages. Also returns them, relative to the start
/// of the memslot.
pub fn run(config: &Config) -> Result<(Report, Vec<u64>), Error> {
    let seen = look(config)?;
    Ok((report(config, &seen), seen.lost))
}

/// The results of one test.
struct Examined {
    /// The pages of the memslot.
    pages: u64,
    /// Pages written while logging.
    written: u64,
    /// Huge pages mapped by KVM when the log was enabled, if this kernel counts them.
    huge: Option<u64>,
    /// Pages that were written but are not in the log, relative to the start of the memslot.
    lost: Vec<u64>,
    /// Races that lost a page.
    lossy: u64,
    /// Resets that a signal interrupted.
    cut_short: u64,
}

fn look(config: &Config) -> Result<Examined, Error> {
    let kvm = vm::open()?;
    let ring = config.method == Method::Ring;
    if ring {
        let probe = vellum_host::kvm::create_vm(&kvm).map_err(vm::Error::from)?;
        vm::ring::check(&probe, RING_ENTRIES).map_err(vm::Error::from)?;
    }
    let (first, bytes) = super::ram(config.base, config.size, config.backing);
    let mut memory = Memory::map(
        vellum_kvm::arch::layout::RAM,
        MemoryConfig { backing: config.backing, ..MemoryConfig::new(bytes) },
    )?;
    memory.start_at(first)?;
    memory.cut_at(&[config.base - first])?;
    let tested = memory.slots().last().expect("memory has a memslot").clone();
    let enter = sandbox::each_vcpu(config.sandbox);
    let dirty_ring = ring.then_some(RING_ENTRIES);
    let mut guest = Guest::build(
        &kvm,
        memory,
        GuestConfig { code: touch_code(), enter, dirty_ring, ..GuestConfig::new(1) },
    )?;
    let vm = guest.vm.fd.clone();
    let manual_protect = |flags| {
        let call = "KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2";
        sys::set_manual_protect(&vm, flags).map_err(|source| dirty::Error::Ioctl { call, source })
    };
    if ring && config.mind != Mind::Interrupted {
        manual_protect(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET)?;
    }
    let (vm, quiesced) = guest.quiesced()?;
    let rings = vm.dirty_ring.clone();
    let mut tracker = dirty::tracker(config.method, vm, &quiesced, Some(CHUNK))?;
    tracker.track(tested.id())?;

    let pages = tested.pages();
    let write = |first: u64, count: u64| -> Result<(), Error> {
        let plan = Plan {
            start: tested.offset() + first * PAGE_SIZE,
            ..Plan::every(PAGE_SIZE, count * PAGE_SIZE, true)
        };
        plan.program(&guest, 0);
        guest.resume();
        Ok(guest.wait_all_rung()?)
    };
    write(0, pages)?;
    let now = Counters::open(&guest.vm.fd, &guest.vcpus).ok().and_then(|counters| counters.read().ok());
    // Linux 5.10 counts large pages of all sizes together, and those of its TDP MMU not at all.
    let huge = now.and_then(|now| now.get("pages_2m").or(now.get("largepages").filter(|&&n| n > 0)).copied());
    let (mut lossy, mut cut_short) = (0, 0);
    let (written, lost) = match config.mind {
        Mind::Raced => races(tracker.as_mut(), pages, write, manual_protect, &mut lossy)?,
        Mind::Interrupted => {
            tracker.enable(true)?;
            let rings = rings.expect("only rings are reset");
            interrupted(tracker.as_mut(), &rings, pages, write, &mut cut_short)?
        }
        mind => {
            tracker.enable(true)?;
            if mind == Mind::Revoked {
                manual_protect(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE)?;
            }
            chunks(&guest.vm, tracker.as_mut(), tested.id(), pages, write)?
        }
    };
    Ok(Examined { pages, written, huge, lost, lossy, cut_short })
}

/// Clears chunk by chunk, or resets the ring, and writes to both ends of each chunk. Returns the
/// pages written and those lost.
fn chunks(
    vm: &Vm,
    tracker: &mut dyn DirtyTracker,
    slot: u32,
    pages: u64,
    write: impl Fn(u64, u64) -> Result<(), Error>,
) -> Result<(u64, Vec<u64>), Error> {
    let mut lost = Vec::new();
    let mut written = 0;
    for first in (0..pages).step_by(CHUNK as usize) {
        if signal::is_pending() {
            break;
        }
        let last = (first + CHUNK).min(pages) - 1;
        let part = (last + 1 - first) as u32;
        if tracker.method() == Method::Ring {
            tracker.collect()?;
        } else {
            tracker.get()?;
            let words = &tracker.logs()[0].words[(first / CHUNK) as usize..=(last / CHUNK) as usize];
            let call = "KVM_CLEAR_DIRTY_LOG";
            sys::clear_log(&vm.fd, slot, first, part, words).map_err(|source| dirty::Error::Slot {
                call,
                slot,
                source,
            })?;
        }
        for page in [last, first] {
            write(page, 1)?;
            written += 1;
        }
        tracker.get()?;
        lost.extend([first, last].into_iter().filter(|&page| !is_set(tracker, page)));
    }
    lost.dedup();
    Ok((written, lost))
}

/// Enables the log while another thread changes the mode, and writes to every page. Returns the
/// pages written and those lost in any round. `lossy` counts the rounds with losses.
fn races(
    tracker: &mut dyn DirtyTracker,
    pages: u64,
    write: impl Fn(u64, u64) -> Result<(), Error>,
    manual_protect: impl Fn(u32) -> Result<(), dirty::Error> + Sync,
    lossy: &mut u64,
) -> Result<(u64, Vec<u64>), Error> {
    let mut lost = BTreeSet::new();
    let mut races = 0;
    while races < RACES && !signal::is_pending() {
        races += 1;
        let (begun, over) = (Barrier::new(2), AtomicBool::new(false));
        let change = || {
            begun.wait();
            while !over.load(Ordering::Relaxed) {
                manual_protect(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET)?;
                manual_protect(KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE)?;
            }
            Ok::<(), dirty::Error>(())
        };
        thread::scope(|scope| {
            let changes = scope.spawn(change);
            begun.wait();
            let enabled = tracker.enable(true);
            over.store(true, Ordering::Relaxed);
            let changed = changes.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            enabled.and(changed)
        })?;
        write(0, pages)?;
        tracker.get()?;
        let now: Vec<u64> = (0..pages).filter(|&page| !is_set(tracker, page)).collect();
        *lossy += u64::from(!now.is_empty());
        lost.extend(now);
        tracker.enable(false)?;
    }
    Ok((races * pages, lost.into_iter().collect()))
}

/// Interrupts resets with signals, and writes to every page after each. Returns the pages written
/// and those in no ring. `cut_short` counts the interrupted resets. It stops at the first loss,
/// because an unprotected page is never logged again.
fn interrupted(
    tracker: &mut dyn DirtyTracker,
    rings: &DirtyRing,
    pages: u64,
    write: impl Fn(u64, u64) -> Result<(), Error>,
    cut_short: &mut u64,
) -> Result<(u64, Vec<u64>), Error> {
    let call = "KVM_RESET_DIRTY_RINGS";
    write(0, pages)?;
    tracker.get()?;
    let start = Instant::now();
    tracker.clear()?;
    let whole = start.elapsed();
    let mut written = pages;
    for reset in 0..RESETS {
        write(0, pages)?;
        written += pages;
        tracker.get()?;
        let lost: Vec<u64> = (0..pages).filter(|&page| !is_set(tracker, page)).collect();
        if !lost.is_empty() || *cut_short == CUT_SHORT || signal::is_pending() {
            return Ok((written, lost));
        }
        // The delay grows with each reset, then starts over.
        let delay = whole * (reset as u32 % 16 + 1) / 17;
        let done = rings.reset_interrupted(delay).map_err(|source| dirty::Error::Ioctl { call, source })?;
        *cut_short += u64::from(done > 0 && done < pages);
        tracker.clear()?;
    }
    write(0, pages)?;
    tracker.get()?;
    Ok((written + pages, (0..pages).filter(|&page| !is_set(tracker, page)).collect()))
}

/// Whether the last collection has `page`.
fn is_set(tracker: &dyn DirtyTracker, page: u64) -> bool {
    tracker.logs()[0].words[(page / 64) as usize] >> (page % 64) & 1 != 0
}

fn report(config: &Config, seen: &Examined) -> Report {
    let Examined { pages, written, huge, lost, lossy, cut_short } = seen;
    let mut report = Report::new("test dirty-edges", Facts::collect(config.sandbox.of_vcpus()));
    report.ask("tracker", config.method.name());
    report.ask("backing", config.backing.to_string());
    report.ask("memory", short_size(config.size));
    report.ask("slot_base", format!("{:#x}", config.base));
    report.ask("revoke", config.mind == Mind::Revoked);
    report.ask("race", config.mind == Mind::Raced);
    report.ask("interrupt", config.mind == Mind::Interrupted);
    report.figure("pages", "pages", *pages as f64);
    match config.mind {
        Mind::Raced => {
            report.figure("races", "", RACES as f64);
            report.figure("races_that_lost_a_page", "", *lossy as f64);
        }
        Mind::Interrupted => report.figure("resets_ended_by_a_signal", "", *cut_short as f64),
        _ => report.figure("chunks", "", pages.div_ceil(CHUNK) as f64),
    }
    report.figure("written", "pages", *written as f64);
    report.figure("lost", "pages", lost.len() as f64);
    if let Some(huge) = huge {
        report.figure("pages_2m_when_the_log_was_switched_on", "pages", *huge as f64);
    }
    if let Some(signal) = signal::last() {
        let of = match config.mind {
            Mind::Raced => RACES * pages,
            Mind::Interrupted => (RESETS + 2) * pages,
            _ => 2 * pages.div_ceil(CHUNK),
        };
        report.cut_short =
            Some(format!("ended by signal {signal}: {written} of {of} writes were made and checked"));
    }
    if *huge == Some(0) && config.backing.best_mapping() >= 2 << 20 {
        let backing = config.backing.to_string();
        report.fail(None, Premise::NoHugePage { backing, small: None });
    }
    let alone = thread::available_parallelism().map_or(1, usize::from) < 2;
    if config.mind == Mind::Raced && alone && lost.is_empty() {
        report.fail(None, Premise::OneCpu);
    }
    let name = |page: &u64| {
        format!("page {page} of the memslot, gfn {:#x}, was lost", config.base / PAGE_SIZE + page)
    };
    report.notes.extend(lost.iter().take(NAMED).map(name));
    if lost.len() > NAMED {
        report.notes.push(format!("{} more pages were lost", lost.len() - NAMED));
    }
    report.answer(answer(config, seen));
    let name = case_name(config);
    report.cases.push(match lost.len() {
        0 => Case { name, ..report.as_case() },
        lost => Case::new(name, Status::Fail)
            .because(format!("{lost} of {written} written pages are not in the log")),
    });
    report
}

/// Each variant is a case of its own, as in `initially-set/revoke/thp`, for readers that follow a
/// case by its name from kernel to kernel.
fn case_name(config: &Config) -> String {
    let variant = match config.mind {
        Mind::Kept => "",
        Mind::Revoked => "/revoke",
        Mind::Raced => "/race",
        Mind::Interrupted => "/interrupt",
    };
    format!("{}{variant}/{}", config.method.name(), config.backing)
}

/// The first lines of the result.
fn answer(config: &Config, seen: &Examined) -> Answer {
    let (lost, written) = (seen.lost.len(), seen.written);
    let is_mixed = config.method == Method::Ring && config.mind == Mind::Kept;
    let method = if is_mixed { "ring with initially-set" } else { config.method.name() };
    let place = match config.mind {
        Mind::Kept if is_mixed => "that were mapped before the log was on",
        Mind::Kept => "at huge-page edges",
        Mind::Revoked => "after initially-set was revoked",
        Mind::Raced => "when initially-set is revoked while the log is switched on",
        Mind::Interrupted => "when a signal ends a reset",
    };
    if lost == 0 && config.mind == Mind::Interrupted && seen.cut_short == 0 {
        let none = "this kernel ended no reset early, so there was nothing to lose";
        return Answer::of_test(format!("dirty-edges: {method}, {written} pages written; {none}"));
    }
    if lost == 0 {
        return Answer::of_test(format!("dirty-edges: {method}, {written} pages written {place}, 0 lost"));
    }
    let answer = Answer::of_test(format!("{method} loses pages {place}: {lost} of {written}"));
    match config.method {
        Method::InitiallySet => {
            answer.next("use manual-protect; kernel-patches/FAULTS.md has the known cases and their fixes")
        }
        _ if is_mixed => {
            answer.next("use a ring without initially-set, as Vellum does; kernel-patches/FAULTS.md has more")
        }
        _ => answer.next("kernel-patches/FAULTS.md has the known cases and their fixes"),
    }
}
