//! `access-tracking`: the guest's cost when the host clears accessed bits to find idle pages.
//!
//! The stages of the KVM selftest access_tracking_perf_test. The guest populates memory, writes and
//! reads it. Idle page tracking marks it idle, with a thread for each vCPU's region. The guest
//! writes it, it is marked again, and the guest reads it. Marking goes through KVM's MMU notifier.
//! The next accesses set the bits again, in hardware or with a fault each.

use std::thread;
use std::time::Instant;

use super::{Common, Counted, Error, Region, huge_premise, of_rounds};
use vellum_guests::Guest;
use vellum_guests::guest::GuestConfig;
use vellum_guests::program::touch_code;
use vellum_guests::touch::Plan;
use vellum_kvm::memory::{Backing, Memory, MemoryConfig};
use vellum_kvm::vm;
use vellum_report::{Premise, Report};
use vellum_sys::diagnose::Field;
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::page_idle::PageIdle;

/// The parameters.
#[derive(Clone, Debug)]
pub struct Config {
    /// The common parameters.
    pub common: Common,
    /// The memory of each vCPU.
    pub region: Region,
    /// Whether all vCPUs access the same region.
    pub overlap: bool,
}

/// The duration of each stage of one round in seconds, in order.
struct Stages {
    populate: f64,
    write_populated: f64,
    read_populated: f64,
    mark_idle: f64,
    write_idle: f64,
    mark_idle_again: f64,
    read_idle: f64,
}

/// The smallest share of pages that must be marked. Pages that are not yet on an LRU list cannot be
/// marked.
const MARKED: f64 = 0.9;

/// Runs the benchmark.
pub fn run(config: &Config) -> Result<Report, Error> {
    let Region { bytes, backing, vcpus } = config.region;
    config.region.check(backing.best_mapping())?;
    if let Backing::Hugetlb(_) | Backing::SharedHugetlb(_) = backing {
        let why = "idle page tracking does not cover hugetlb pages; anonymous, thp or shmem would work";
        return Err(Error::Asked(Field::Backing, format!("{backing}: {why}")));
    }
    let idle = PageIdle::open().map_err(|e| {
        Error::Lacking(format!(
            "idle page tracking: /sys/kernel/mm/page_idle/bitmap: {e}: it needs a kernel with CONFIG_IDLE_PAGE_TRACKING, and root"
        ))
    })?;
    config.region.affordable(config.overlap)?;
    let mut report = config.common.report("access-tracking");
    report.ask("bytes_per_vcpu", bytes);
    report.ask("backing", backing.to_string());
    report.ask("vcpus", vcpus);
    report.ask("overlap", config.overlap);
    config.common.ask_page(&mut report);
    config.common.ask(&mut report);
    let mut rounds = Vec::new();
    config.common.each(&mut report, &config.common.rounds(), |report, round| {
        rounds.push(run_round(report, config, &idle, round.is_first())?);
        Ok(())
    })?;
    let mut put = |name: &str, of: fn(&Stages) -> f64| {
        report.samples(name, "s", of_rounds(&rounds, |stages| Some(of(stages))));
    };
    put("populate", |stages| stages.populate);
    put("write_populated", |stages| stages.write_populated);
    put("read_populated", |stages| stages.read_populated);
    put("mark_idle", |stages| stages.mark_idle);
    put("write_idle", |stages| stages.write_idle);
    put("mark_idle_again", |stages| stages.mark_idle_again);
    put("read_idle", |stages| stages.read_idle);
    report.set_headline("write_idle");
    report.answer_with_headline("Writing to pages that were marked idle takes");
    Ok(report)
}

fn run_round(report: &mut Report, config: &Config, idle: &PageIdle, first: bool) -> Result<Stages, Error> {
    let kvm = vm::open()?;
    let Region { backing, vcpus, .. } = config.region;
    let bytes = config.region.total(config.overlap);
    let memory =
        Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig { backing, ..MemoryConfig::new(bytes) })?;
    let guest = Guest::build(
        &kvm,
        memory,
        GuestConfig {
            code: touch_code(),
            page: config.common.page(&report.host),
            ..config.common.guest(vcpus)
        },
    )?;
    let counted = Counted::start(&guest, report);
    let access = |write| -> Result<f64, Error> {
        for vcpu in 0..vcpus {
            let start = if config.overlap { 0 } else { config.region.bytes * vcpu as u64 };
            Plan { start, ..Plan::every(PAGE_SIZE, config.region.bytes, write) }.program(&guest, vcpu);
        }
        let clock = Instant::now();
        guest.resume();
        guest.wait_all_rung()?;
        Ok(clock.elapsed().as_secs_f64())
    };
    let mut remains = |what: &str, expected: bool| -> Result<(), Error> {
        let failed = |e| Error::Host("page_idle", e);
        let frames = idle.frames(&guest.vm.memory.mapping, 0, bytes).map_err(failed)?;
        let share = idle.count(&frames).map_err(failed)? as f64 / frames.len().max(1) as f64;
        let fine = if expected { share >= MARKED } else { share <= 1.0 - MARKED };
        // A huge page has a single bit, at its first frame.
        if !fine && backing != Backing::Thp {
            report.fail(None, Premise::IdlePages { share, after: what.into() });
        }
        Ok(())
    };
    let populate = access(true)?;
    let write_populated = access(true)?;
    let read_populated = access(false)?;
    let mark_idle = mark(config, idle, &guest)?;
    remains("marking all", true)?;
    // Reading also cleared accessed bits. Nothing has been accessed since, so the guest pays as
    // after marking.
    let write_idle = access(true)?;
    remains("writing all", false)?;
    let mark_idle_again = mark(config, idle, &guest)?;
    let read_idle = access(false)?;
    let now = counted.now();
    huge_premise(report, backing, config.common.page(&report.host), &now);
    // The first round's counters represent all.
    if first {
        counted.finish(report, &now, None);
    }
    Ok(Stages {
        populate,
        write_populated,
        read_populated,
        mark_idle,
        write_idle,
        mark_idle_again,
        read_idle,
    })
}

/// Marks each vCPU's region in a thread of its own.
fn mark(config: &Config, idle: &PageIdle, guest: &Guest) -> Result<f64, Error> {
    let Region { bytes, vcpus, .. } = config.region;
    let regions = if config.overlap { 1 } else { vcpus as u64 };
    let clock = Instant::now();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..regions)
            .map(|region| {
                let mapping = &guest.vm.memory.mapping;
                scope.spawn(move || idle.mark(&idle.frames(mapping, region * bytes, bytes)?))
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
    .map_err(|e| match e.raw_os_error() {
        Some(libc::EPERM) => {
            Error::Lacking("/proc/self/pagemap shows no page frames: this needs CAP_SYS_ADMIN".into())
        }
        _ => Error::Host("page_idle", e),
    })?;
    Ok(clock.elapsed().as_secs_f64())
}
