//! `demand-paging`: a guest touches missing memory and userfaultfd handlers provide it.
//!
//! As in the KVM selftest demand_paging_test, each vCPU accesses each page of its region once. Each
//! region has its own descriptor and handlers, or all share one. Faults are *missing* (the handler
//! copies a page in) or *minor* (the page is in the file and the handler maps it). The guest times
//! each write, so the latency includes the fault, the handler and KVM's mapping of the page.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::EventFd;

use super::{Common, Counted, Error, Region, Round, huge_premise, of_rounds, pass_seconds};
use vellum_guests::control::{BUCKETS, bucket_of};
use vellum_guests::guest::GuestConfig;
use vellum_guests::model::{self, Model};
use vellum_guests::{Guest, WriteConfig, latency};
use vellum_kvm::memory::{Backing, Memory, MemoryConfig, short_size};
use vellum_kvm::vm;
use vellum_report::{Histogram, Label, Premise, Report, Sample};
use vellum_sys::diagnose::Field;
use vellum_sys::mmap::{Mapping, PAGE_SIZE, Source};
use vellum_sys::uffd::{BATCH, Mode, Uffd};

/// The parameters.
#[derive(Clone, Debug)]
pub struct Config {
    /// The common parameters.
    pub common: Common,
    /// Missing or minor faults.
    pub mode: Mode,
    /// One descriptor for all memory instead of one per vCPU.
    pub single: bool,
    /// How long a handler waits before it resolves a fault.
    pub delay: Duration,
    /// The number of handlers per descriptor.
    pub readers: usize,
    /// The number of pages, of the backing's size, that a handler provides per fault.
    pub batch: u64,
    /// The memory of each vCPU.
    pub region: Region,
    /// Whether all vCPUs access the same region.
    pub overlap: bool,
}

/// The results of one round.
struct Measured {
    /// The time until the last vCPU was done, in seconds.
    execution: f64,
    /// Pages per second of all vCPUs together.
    overall: f64,
    /// Pages per second of each vCPU, by its own clock.
    per_vcpu: Vec<f64>,
    /// The faults handled.
    faults: u64,
    /// The durations of the handlers' answers in nanoseconds, as buckets, and the longest.
    answers: Vec<u64>,
    slowest: u64,
    /// The latencies of the guest's writes.
    writes: Histogram,
}

/// Runs the benchmark.
pub fn run(config: &Config) -> Result<Report, Error> {
    let Region { bytes, backing, vcpus } = config.region;
    let mapped = match (config.mode, backing) {
        // Minor faults need a file that this process can map twice.
        (Mode::Minor, Backing::Shmem) => Backing::Memfd,
        (Mode::Minor, other @ (Backing::Anonymous | Backing::Thp | Backing::Hugetlb(_))) => {
            let why = "minor faults need shared memory; shmem or shared_hugetlb would work";
            return Err(Error::Asked(Field::PageFaults, format!("MINOR with {other}: {why}")));
        }
        (_, other) => other,
    };
    config.region.check(mapped.page_size())?;
    let size = config.region.affordable(config.overlap)?;
    if bytes < 2 * PAGE_SIZE {
        let why = format!("{}: each vCPU needs at least 2 pages; 8k would work", short_size(bytes));
        return Err(Error::Asked(Field::Memory, why));
    }
    let mut report = describe(config);
    if mapped != backing {
        report.note(format!(
            "{backing} is a {mapped} here, so that the handlers can populate pages before the guest"
        ));
    }
    let mut rounds = Vec::new();
    config.common.each(&mut report, &config.common.rounds(), |report, &round| {
        let memory = MemoryConfig { backing: mapped, ..MemoryConfig::new(size) };
        rounds.push(run_round(config, memory, round, report)?);
        Ok(())
    })?;
    report.samples("execution_time", "s", of_rounds(&rounds, |r| Some(r.execution)));
    report.samples("overall_rate", "pages/s", of_rounds(&rounds, |r| Some(r.overall)));
    report.samples("faults_answered", "faults", of_rounds(&rounds, |r| Some(r.faults as f64)));
    report.set_headline("overall_rate");
    report.answer_with_headline("Missing pages are handed out at");
    for vcpu in 0..vcpus {
        let mut samples = of_rounds(&rounds, |r| r.per_vcpu.get(vcpu).copied());
        samples.iter_mut().for_each(|sample: &mut Sample| sample.vcpu = Some(vcpu as u32));
        report.samples(Label::of("rate", format_args!("vcpu{vcpu}")), "pages/s", samples);
    }
    let mut answers = vec![0; BUCKETS];
    rounds.iter().for_each(|r| answers.iter_mut().zip(&r.answers).for_each(|(sum, n)| *sum += n));
    let slowest = rounds.iter().map(|r| r.slowest).max().unwrap_or(0);
    // The first round's write latencies represent all, like its counters.
    report.histograms.extend(rounds.into_iter().next().map(|r| r.writes));
    // Already in nanoseconds.
    report.histograms.push(latency::nanoseconds("answer_time".into(), &answers, slowest, 1_000_000_000));
    Ok(report)
}

fn describe(config: &Config) -> Report {
    let mut report = config.common.report("demand-paging");
    report.ask("mode", if config.mode == Mode::Missing { "MISSING" } else { "MINOR" });
    report.ask("userfaultfds", if config.single { 1 } else { config.region.vcpus });
    report.ask("readers", config.readers);
    report.ask("delay_us", config.delay.as_micros() as u64);
    report.ask("batch", config.batch);
    report.ask("bytes_per_vcpu", config.region.bytes);
    report.ask("backing", config.region.backing.to_string());
    report.ask("vcpus", config.region.vcpus);
    report.ask("overlap", config.overlap);
    config.common.ask_page(&mut report);
    config.common.ask(&mut report);
    report
}

/// A descriptor and the memory whose faults it reports.
struct Part {
    uffd: Uffd,
    offset: u64,
    len: u64,
}

/// The work of its handlers.
struct Answers {
    faults: AtomicU64,
    times: Vec<AtomicU64>,
    slowest: AtomicU64,
}

impl Answers {
    fn none() -> Self {
        let times = (0..BUCKETS).map(|_| AtomicU64::new(0)).collect();
        Self { faults: AtomicU64::new(0), times, slowest: AtomicU64::new(0) }
    }

    fn add(&self, took: Duration) {
        let took = took.as_nanos() as u64;
        self.faults.fetch_add(1, Ordering::Relaxed);
        self.times[bucket_of(took)].fetch_add(1, Ordering::Relaxed);
        self.slowest.fetch_max(took, Ordering::Relaxed);
    }
}

fn run_round(
    config: &Config,
    memory: MemoryConfig,
    round: Round,
    report: &mut Report,
) -> Result<Measured, Error> {
    let kvm = vm::open()?;
    let memory = Memory::map(vellum_kvm::arch::layout::RAM, memory)?;
    let alias = match (memory.shared_file(), config.mode) {
        (Some(file), Mode::Minor) => {
            let map =
                Mapping::new(memory.config.size, memory.config.backing.page_size(), Source::Shared(&file));
            let alias = map.map_err(|e| Error::Host("mmap", e))?;
            // Populates the file before the guest accesses it.
            alias.populate(0, alias.len()).map_err(|e| Error::Host("MADV_POPULATE_WRITE", e))?;
            Some(alias)
        }
        _ => None,
    };
    let Region { bytes, vcpus, .. } = config.region;
    let whole = config.single || config.overlap;
    let parts = if whole { 1 } else { vcpus as u64 };
    let len = memory.config.size / parts;
    let parts = (0..parts).map(|index| part(config.mode, &memory.mapping, index * len, len));
    let parts = parts.collect::<Result<Vec<_>, _>>()?;
    let guest = Guest::build(
        &kvm,
        memory,
        GuestConfig { page: config.common.page(&report.host), ..config.common.guest(vcpus) },
    )?;
    guest.program(&WriteConfig { passes: 1, shared: config.overlap, ..WriteConfig::default() })?;
    let models: Vec<_> = guest.controls().map(Model::new).collect();
    config.common.pin_main(vcpus)?;
    let counted = Counted::start(&guest, report);
    let quit = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(|e| Error::Host("eventfd", e))?;
    let page = guest.vm.memory.config.backing.page_size();
    // Not zero: untouched pages would fault one by one while the first fault is handled.
    let source = vec![0xa5u8; (page * config.batch) as usize];
    let answers = Answers::none();
    let mapping = guest.vm.memory.mapping.clone();
    let elapsed = thread::scope(|scope| -> Result<f64, Error> {
        for part in &parts {
            for _ in 0..config.readers {
                let (mapping, source, quit, answers) = (&mapping, &source, &quit, &answers);
                scope.spawn(move || {
                    // If a handler fails, vCPUs wait forever, so the process exits.
                    if let Err(error) = serve(config, part, mapping, source, page, quit, answers) {
                        eprintln!("vellum: userfaultfd handler: {error}");
                        std::process::exit(1);
                    }
                });
            }
        }
        let start = Instant::now();
        guest.resume();
        let rung = guest.wait_all_rung();
        let elapsed = start.elapsed().as_secs_f64();
        if rung.is_err() {
            // Handlers still run here: a vCPU that waits for its page may be unable to leave
            // KVM_RUN.
            let _ = guest.pause();
            quit.write(1).map_err(|e| Error::Host("eventfd", e))?;
            rung?;
        }
        // Handlers still run here: reading the stamp of a page that the guest never reached is a
        // fault.
        let reached = guest.controls().map(model::Reached::new);
        let pages = guest.vm.memory.config.size / PAGE_SIZE;
        let verdict = model::verify(models.into_iter().zip(reached).collect(), pages, |page| {
            guest.stamp(page, PAGE_SIZE)
        });
        if verdict.wrong > 0 || verdict.checked < pages {
            let wrong = verdict.wrong.max(pages - verdict.checked.min(pages));
            let example = Some("the handlers lost pages".to_owned());
            report.fail(Some(round.to_string()), Premise::WrongContents { wrong, of: pages, example });
        }
        quit.write(1).map_err(|e| Error::Host("eventfd", e))?;
        Ok(elapsed)
    })?;
    drop(alias);
    let each = bytes / PAGE_SIZE;
    let count = |n: &AtomicU64| n.load(Ordering::Relaxed);
    let faults = count(&answers.faults);
    let least = guest.vm.memory.config.size / page / config.batch;
    if faults < least {
        report.fail(Some(round.to_string()), Premise::NotMissing { faults, least });
    }
    let measured = Measured {
        execution: elapsed,
        overall: (each * vcpus as u64) as f64 / elapsed,
        per_vcpu: guest.controls().map(|c| each as f64 / pass_seconds(c, guest.tsc_hz)).collect(),
        faults,
        answers: answers.times.iter().map(count).collect(),
        slowest: count(&answers.slowest),
        writes: latency::of_writes(&guest),
    };
    let now = counted.now();
    if round.is_first() {
        // Missing THP memory arrives as small pages.
        if guest.vm.memory.config.backing != Backing::Thp {
            let page = config.common.page(&report.host);
            huge_premise(report, guest.vm.memory.config.backing, page, &now);
        }
        counted.finish(report, &now, None);
    }
    Ok(measured)
}

fn part(mode: Mode, mapping: &Mapping, offset: u64, len: u64) -> Result<Part, Error> {
    Ok(Part { uffd: reported(mode, mapping, offset, len)?, offset, len })
}

/// Registers `[offset, offset + len)` of `mapping` with a new userfaultfd.
pub(super) fn reported(mode: Mode, mapping: &Mapping, offset: u64, len: u64) -> Result<Uffd, Error> {
    let uffd = Uffd::new(mode).map_err(|e| match e.raw_os_error() {
        Some(libc::EPERM) => Error::Lacking(
            "userfaultfd: no permission to handle KVM's faults: use sudo sysctl vm.unprivileged_userfaultfd=1, or access to /dev/userfaultfd, or CAP_SYS_PTRACE".into(),
        ),
        Some(libc::EINVAL) => Error::Lacking("userfaultfd: this kernel lacks a requested feature: minor faults of shmem need Linux 5.14".into()),
        _ => Error::Host("userfaultfd", e),
    })?;
    uffd.register(mapping, offset, len, mode).map_err(|e| Error::Host("UFFDIO_REGISTER", e))?;
    Ok(uffd)
}

/// A handler: resolves faults until `quit`.
fn serve(
    config: &Config,
    part: &Part,
    mapping: &Mapping,
    source: &[u8],
    page: u64,
    quit: &EventFd,
    answers: &Answers,
) -> std::io::Result<()> {
    let base = mapping.as_ptr() as u64;
    let mut addresses = [0; BATCH];
    while part.uffd.wait(quit)? {
        let count = part.uffd.take(&mut addresses)?;
        for address in &addresses[..count] {
            let start = Instant::now();
            if !config.delay.is_zero() {
                thread::sleep(config.delay);
            }
            let offset = (address - base) / page * page;
            let len = (page * config.batch).min(part.offset + part.len - offset);
            match config.mode {
                Mode::Missing => part.uffd.copy(mapping, offset, &source[..len as usize], page)?,
                Mode::Minor => part.uffd.map(mapping, offset, len, page)?,
            }
            answers.add(start.elapsed());
        }
    }
    Ok(())
}
