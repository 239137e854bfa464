//! `fork`: the cost of forking a running machine, for that machine and for the host.
//!
//! It starts processes of this program as a user would: `vellum run` with the built-in guest, and
//! `vellum fork` three times. The guest fills its memory as fast as it can, then writes at the
//! requested rate. The first fork follows. The second starts when the guest has reported (once a
//! second) that it has written the requested number of further pages. The third makes a paused
//! machine, whose share of the host's memory is measured. At the end every page of every machine is
//! checked.
//!
//! The machine itself reports the pause. A fork that makes a new base also pauses it once for each
//! part of memory: the number of these pauses and their sum are shown beside the pause. So are two
//! other figures:
//! - The longest time in which the guest wrote nothing, by its own clock. For this, another machine
//!   is forked once. The figure covers its life from its first write on, and everything else that
//!   kept the guest from its CPU.
//! - The time to map the same amount of memory privately at once. The pause would include it if
//!   memory did not part while the guest runs.
//!
//! What the fork costs afterwards is measured with a third machine, which writes as fast as it can. It
//! is paused, forked, and resumed, so that it has no page of its own then. Its rate is that of the
//! second before the pause, and of the second after it. The guest's first write to each page is the
//! time from then on until it has written as many pages as it has, divided by their number: it writes
//! them in their order, and each write copies a page. Beside it, the same guest runs in this process,
//! and all of its memory is mapped privately at once. Its figures begin when that has happened.

use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::migration::Rate;
use super::process::{Directory, Process};
use super::{Common, Error, Region, of_rounds};
use vellum_control::client::{self, Client};
use vellum_control::{Do, Event};
use vellum_guests::WriteConfig;
use vellum_guests::guest::{self, Guest};
use vellum_kvm::memory::{Backing, MemoryConfig};
use vellum_kvm::vm;
use vellum_report::units::humanised;
use vellum_report::{Answer, Premise, Report, json};
use vellum_sys::affinity;
use vellum_sys::diagnose::Field;
use vellum_sys::mmap::{Mapping, PAGE_SIZE, Source, freezable_memfd};
use vellum_sys::signal;

/// The parameters.
#[derive(Clone, Debug)]
pub struct Config {
    /// The common parameters. All processes share its CPUs.
    pub common: Common,
    /// The memory of each vCPU.
    pub region: Region,
    /// The rate at which all vCPUs together write pages.
    pub dirty_rate: Rate,
    /// The number of pages that the guest writes before it is forked again.
    pub changed: u64,
    /// How long the guest runs undisturbed before the first fork.
    pub around: Duration,
    /// The command lines of the processes.
    pub lines: Lines,
}

/// Build the command lines of the processes. The command line's own crate provides them.
#[derive(Clone, Copy, Debug)]
pub struct Lines {
    /// The machine that is forked. Its name is `source`. The path is that of its result.
    pub source: fn(&Config, &Path) -> Vec<String>,
    /// The fork: the new machine's name, the path of its result, and whether it starts paused.
    pub fork: fn(&Config, &str, &Path, bool) -> Vec<String>,
}

impl Config {
    /// Distinct pages per second that each vCPU writes.
    pub fn pages(&self) -> Option<u64> {
        let share = |bytes: u64| (bytes / PAGE_SIZE / self.region.vcpus as u64).max(1);
        self.dirty_rate.0.map(share)
    }

    /// Checks for contradictions and against this host.
    fn check(&self) -> Result<(), Error> {
        self.region.check(self.region.backing.best_mapping())?;
        // The machine, three forks of it, and the memory of `remap_at_once`. Huge pages of the pool
        // are all reserved. With others, forks write few pages. Private memory is copied once.
        let times = match self.region.backing {
            Backing::SharedHugetlb(_) => 5,
            Backing::Memfd | Backing::Anonymous | Backing::Thp => 3,
            other => {
                let why = format!("{other} memory cannot be forked: {}", Backing::FORKED);
                return Err(Error::Asked(Field::Backing, why));
            }
        };
        Region { bytes: self.region.bytes.saturating_mul(times), ..self.region }.affordable(false)?;
        if let Some(cpus) = &self.common.pins {
            affinity::allow(cpus).map_err(|e| Error::Host("sched_setaffinity", e))?;
        }
        Ok(())
    }
}

/// One fork. Times are in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Forked {
    /// How long the machine was paused.
    pause: f64,
    /// How often it was paused before, for a part of memory, and the sum of these times.
    parts: [f64; 2],
    /// From the start of the command to its end, when the new machine runs.
    command: f64,
    /// Pages that were copied.
    copied: f64,
}

/// One round.
struct Round {
    first: Forked,
    later: Forked,
    /// The host's memory for a machine that has not run, in bytes.
    further: Option<f64>,
    /// The longest time in which the guest wrote nothing.
    gap: Option<f64>,
    /// Pages that the guest wrote per second, before the first fork and after the second.
    rates: [f64; 2],
    /// A guest that writes as fast as it can, and is forked.
    busy: Busy,
    /// The same, whose memory is mapped privately.
    remapped: Busy,
    /// The time to map the same amount of memory privately at once.
    remap: f64,
}

/// A guest that writes as fast as it can, before and after all of its memory was mapped privately.
#[derive(Clone, Copy, Debug, Default)]
struct Busy {
    /// Pages that it wrote in the second before.
    before: f64,
    /// Pages that it wrote in the second after.
    after: f64,
    /// Seconds that the first write to each page took after.
    first_write: f64,
}

/// Runs the benchmark.
///
/// # Errors
/// This host lacks something, or a machine fails.
pub fn run(config: &Config) -> Result<Report, Error> {
    config.check()?;
    let mut report = config.common.report("fork");
    report.host.sandbox = config.common.sandbox.to_string();
    report.ask("vcpus", config.region.vcpus);
    report.ask("bytes_per_vcpu", config.region.bytes);
    report.ask("backing", config.region.backing.to_string());
    report.ask("dirty_rate", config.dirty_rate.to_string());
    report.ask("changed_pages", config.changed);
    report.ask("left_alone_seconds", config.around.as_secs_f64());
    config.common.ask(&mut report);
    let mut rounds = Vec::new();
    config.common.each(&mut report, &config.common.rounds(), |report, round| {
        rounds.push(measure(report, config, &round.to_string())?);
        Ok(())
    })?;
    add(&mut report, &rounds);
    report.set_headline("pause");
    report.answer(answer(&report));
    Ok(report)
}

fn add(report: &mut Report, rounds: &[Round]) {
    let mut samples = |name: &str, unit: &str, value: &dyn Fn(&Round) -> Option<f64>| {
        report.samples(name, unit, of_rounds(rounds, value));
    };
    samples("pause", "s", &|round| Some(round.first.pause));
    samples("later_pause", "s", &|round| Some(round.later.pause));
    samples("parts", "pauses", &|round| Some(round.first.parts[0]));
    samples("parts_pause", "s", &|round| Some(round.first.parts[1]));
    samples("later_parts", "pauses", &|round| Some(round.later.parts[0]));
    samples("later_parts_pause", "s", &|round| Some(round.later.parts[1]));
    samples("longest_gap", "s", &|round| round.gap);
    samples("remap_at_once", "s", &|round| Some(round.remap));
    samples("command", "s", &|round| Some(round.first.command));
    samples("later_command", "s", &|round| Some(round.later.command));
    samples("pages_copied", "pages", &|round| Some(round.first.copied));
    samples("later_pages_copied", "pages", &|round| Some(round.later.copied));
    samples("further_machine", "bytes", &|round| round.further);
    samples("later_of_first", "", &|round| Some(round.later.command / round.first.command));
    samples("busy_before", "pages/s", &|round| Some(round.busy.before));
    samples("busy_after", "pages/s", &|round| Some(round.busy.after));
    samples("first_write", "s", &|round| Some(round.busy.first_write));
    samples("remapped_after", "pages/s", &|round| Some(round.remapped.after));
    samples("remapped_first_write", "s", &|round| Some(round.remapped.first_write));
    let of_remapped = |round: &Round| Some(round.busy.first_write / round.remapped.first_write);
    samples("first_write_of_remapped", "", &of_remapped);
    samples("progress_before", "pages/s", &|round| Some(round.rates[0]));
    samples("progress_after", "pages/s", &|round| Some(round.rates[1]));
}

/// The first lines of the result.
fn answer(report: &Report) -> Answer {
    let told = |name: &str| report.told(name).unwrap_or_else(|| "unknown".into());
    let limit = report.find("remap_at_once").map(|remap| humanised("s", remap.value()));
    let of_parts = |name: &str| report.find(name).is_some_and(|parts| parts.max() > 0.0);
    let parts = of_parts("parts").then(|| format!("{}, {} in all", told("parts"), told("parts_pause")));
    Answer::of_measurement(format!("The guest stood still for {}", told("pause")))
        .fact_if("before that, for parts of memory", parts)
        .fact("another machine ran after", told("command"))
        .fact("forked again", format!("{}, {} copied", told("later_pause"), told("later_pages_copied")))
        .fact_if("all memory mapped privately at once", limit)
        .fact_if("a further machine", report.told("further_machine"))
}

/// The machine that is forked.
struct Running {
    source: Process,
    directory: Directory,
    /// A subscription to its events.
    events: Client,
    done: u64,
}

/// The command that forks it.
struct Forking {
    command: Process,
    name: String,
    result: PathBuf,
}

/// A machine that was forked, until it is stopped.
struct Child {
    client: Client,
    pid: u32,
    result: PathBuf,
}

impl Drop for Child {
    fn drop(&mut self) {
        // These fail if the machine has ended.
        let _ = self.client.ask(&Do::Resume { force: false });
        let _ = self.client.ask(&Do::Stop {});
    }
}

/// The polling interval.
const LOOK: Duration = Duration::from_millis(5);
/// The timeout of one read of the events.
const LISTEN: Duration = Duration::from_millis(100);
/// The guest's progress is watched for at least half of this time.
const WATCH: Duration = Duration::from_secs(1);

fn unheard(error: client::Error) -> Error {
    Error::Host("a machine of the measurement", io::Error::other(error.to_string()))
}

/// Forks a guest three times. Adds premises that fail to `report`, under the name `part`.
fn measure(report: &mut Report, config: &Config, part: &str) -> Result<Round, Error> {
    let remap = remap_at_once(config)?;
    let mut running = Running::start(config)?;
    let pages = config.region.total(false) / PAGE_SIZE;
    running.until(|running| Ok((running.done >= pages).then_some(())))?;
    running.leave_alone(config.around)?;
    let before = running.rate()?;
    let (first, one) = running.fork(config, "one", false)?;
    let done = running.done;
    running.until(|running| Ok((running.done >= done + config.changed).then_some(())))?;
    let (later, two) = running.fork(config, "two", false)?;
    // Between the two forks this would let the guest write more than the requested pages.
    let after = running.rate()?;
    let (_, three) = running.fork(config, "three", true)?;
    let further = own_memory(three.pid);
    for child in [one, two, three] {
        judge(report, part, &child.end()?);
    }
    judge(report, part, &running.end()?);
    let gap = gap_of_a_fork(report, config, part)?;
    let (busy, remapped) = (busy_forked(report, config, part)?, busy_remapped(config)?);
    Ok(Round { first, later, further, gap, rates: [before, after], busy, remapped, remap })
}

/// The longest time in which a guest wrote nothing whose machine was forked once.
fn gap_of_a_fork(report: &mut Report, config: &Config, part: &str) -> Result<Option<f64>, Error> {
    let mut running = Running::start(config)?;
    let pages = config.region.total(false) / PAGE_SIZE;
    running.until(|running| Ok((running.done >= pages).then_some(())))?;
    running.leave_alone(config.around)?;
    let (_, child) = running.fork(config, "one", true)?;
    running.leave_alone(config.around)?;
    judge(report, part, &child.end()?);
    let result = running.end()?;
    judge(report, part, &result);
    Ok(result.find("longest_gap").map(vellum_report::Figure::max))
}

/// How a guest fares that writes as fast as it can and is forked.
fn busy_forked(report: &mut Report, config: &Config, part: &str) -> Result<Busy, Error> {
    let config = Config { dirty_rate: Rate(None), ..config.clone() };
    let pages = config.region.total(false) / PAGE_SIZE;
    let mut running = Running::start(&config)?;
    running.until(|running| Ok((running.done >= pages).then_some(())))?;
    running.leave_alone(config.around)?;
    let mut client = Client::connect(&running.directory.socket("source")).map_err(unheard)?;
    let mut done = || {
        let status = client.ask(&Do::Status {}).map_err(unheard)?;
        Ok(status["done"].as_u64().unwrap_or(0))
    };
    let before = rate_of(&mut done)?;
    let mut control = Client::connect(&running.directory.socket("source")).map_err(unheard)?;
    control.ask(&Do::Pause {}).map_err(unheard)?;
    let mut forking = running.begin(&config, "busy", true)?;
    running.forked(&mut forking)?;
    let child = running.child(forking)?;
    control.ask(&Do::Resume { force: false }).map_err(unheard)?;
    let (after, first_write) = after(pages, &mut done)?;
    judge(report, part, &child.end()?);
    judge(report, part, &running.end()?);
    Ok(Busy { before, after, first_write })
}

/// How the same guest fares whose memory is mapped privately at once.
fn busy_remapped(config: &Config) -> Result<Busy, Error> {
    let failed = |what| move |error| Error::Host(what, error);
    let region = config.region;
    let (len, backing) = (region.total(false), region.backing);
    let memory = super::region::populated(MemoryConfig { backing, ..MemoryConfig::new(len) })?;
    let mapping = memory.mapping.clone();
    let file = match memory.shared_file() {
        Some(file) => file,
        // The guest does not read what it writes, so the file stays empty.
        None => {
            let file = freezable_memfd(c"vellum-bench", len, None).map_err(failed("memfd_create"))?;
            let zeroes = vec![0; 1 << 20];
            for at in (0..len).step_by(zeroes.len()) {
                let some = &zeroes[..zeroes.len().min((len - at) as usize)];
                file.write_all_at(some, at).map_err(failed("a file in memory"))?;
            }
            Arc::new(file)
        }
    };
    let guest = Guest::start(&vm::open()?, memory, config.common.guest(region.vcpus))?;
    let write = WriteConfig { passes: 0, warm: true, latency: false, ..WriteConfig::default() };
    guest.program(&write)?;
    guest.resume();
    let mut done = || {
        guest.all_rung()?;
        Ok(guest.controls().map(|control| control.done.load(Ordering::Relaxed)).sum())
    };
    let pages = len / PAGE_SIZE;
    while done()? < pages {
        pause(LOOK)?;
    }
    let before = rate_of(&mut done)?;
    mapping.part(0, len, &file, backing.pages()).map_err(failed("mremap"))?;
    let (after, first_write) = after(pages, &mut done)?;
    guest.request_stop();
    guest.wait_all_rung()?;
    Ok(Busy { before, after, first_write })
}

/// Waits for `time`, unless a signal interrupts.
fn pause(time: Duration) -> Result<(), Error> {
    std::thread::sleep(time);
    signal::take().map_or(Ok(()), |signal| Err(guest::Error::Interrupted(signal).into()))
}

/// The rate of `done` for a second.
fn rate_of(done: &mut impl FnMut() -> Result<u64, Error>) -> Result<f64, Error> {
    let (before, since) = (done()?, Instant::now());
    while since.elapsed() < WATCH {
        pause(LOOK)?;
    }
    Ok((done()? - before) as f64 / since.elapsed().as_secs_f64())
}

/// The rate of `done` in a second from now on, and the seconds that each of the next `pages` takes.
fn after(pages: u64, done: &mut impl FnMut() -> Result<u64, Error>) -> Result<(f64, f64), Error> {
    let (before, since) = (done()?, Instant::now());
    let (mut rate, mut each) = (None, None);
    loop {
        let (now, took) = (done()? - before, since.elapsed());
        if took >= WATCH {
            rate.get_or_insert(now as f64 / took.as_secs_f64());
        }
        if now >= pages {
            each.get_or_insert(took.as_secs_f64() / now as f64);
        }
        if let Some(both) = rate.zip(each) {
            return Ok(both);
        }
        pause(Duration::from_millis(1))?;
    }
}

/// Copies a machine's findings of wrong pages to `report`.
fn judge(report: &mut Report, part: &str, result: &Report) {
    for failed in &result.invalid {
        if let premise @ Premise::WrongContents { .. } = &failed.premise {
            report.fail(Some(part.to_owned()), premise.clone());
        }
    }
}

/// Measures the time to map the same amount of populated memory privately.
fn remap_at_once(config: &Config) -> Result<f64, Error> {
    let failed = |what| move |error| Error::Host(what, error);
    let (len, backing) = (config.region.total(false), config.region.backing);
    let huge = match backing {
        Backing::SharedHugetlb(page) => Some(page.ilog2()),
        _ => None,
    };
    let file = freezable_memfd(c"vellum-bench", len, huge).map_err(failed("memfd_create"))?;
    let source = match backing.can_be_handed_over() {
        true => Source::Shared(&file),
        false => Source::Anonymous,
    };
    let mapping = Mapping::new(len, backing.best_mapping(), source).map_err(failed("mmap"))?;
    if backing == Backing::Thp {
        mapping.advise(libc::MADV_HUGEPAGE).map_err(failed("MADV_HUGEPAGE"))?;
    }
    mapping.populate(0, len).map_err(failed("MADV_POPULATE_WRITE"))?;
    let start = Instant::now();
    mapping.part(0, len, &file, backing.pages()).map_err(failed("mremap"))?;
    Ok(start.elapsed().as_secs_f64())
}

/// A process's proportional share of the host's memory (Pss), in bytes.
fn own_memory(pid: u32) -> Option<f64> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    let kib: f64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024.0)
}

/// Reads the result that a machine wrote when it ended.
fn read(result: &Path) -> Result<Report, Error> {
    let unreadable = |why: String| Error::Host("the result of a machine", io::Error::other(why));
    let results = json::read(result).map_err(|error| unreadable(error.to_string()))?;
    results.into_iter().next().ok_or_else(|| unreadable("it is empty".into()))
}

impl Running {
    fn start(config: &Config) -> Result<Self, Error> {
        let directory = Directory::new()?;
        let words = (config.lines.source)(config, &directory.path("source.json"));
        let mut source = Process::start(&directory, "the machine", "source", &words)?;
        let socket = directory.socket("source");
        let events = loop {
            if let Some(signal) = signal::take() {
                return Err(guest::Error::Interrupted(signal).into());
            }
            let client = Client::connect_within(&socket, LISTEN).ok();
            if let Some(client) =
                client.and_then(|mut client| client.ask(&Do::Events {}).ok().map(|_| client))
            {
                break client;
            }
            if source.ended()?.is_some() {
                return Err(source.failed());
            }
            std::thread::sleep(LOOK);
        };
        Ok(Self { source, directory, events, done: 0 })
    }

    /// The machine's next event, if one comes in time.
    fn event(&mut self) -> Result<Option<Event>, Error> {
        let event = match self.events.line() {
            Ok(line) => serde_json::from_value(line).ok(),
            Err(client::Error::Silent { .. }) => None,
            Err(_) if self.source.ended()?.is_some() => return Err(self.source.failed()),
            Err(error) => return Err(unheard(error)),
        };
        if let Some(Event::Progress { done, .. }) = event {
            self.done = done;
        }
        Ok(event)
    }

    /// Reads events until `ready` returns a value. Fails if the machine ends or the user
    /// interrupts.
    fn until<T>(&mut self, mut ready: impl FnMut(&mut Self) -> Result<Option<T>, Error>) -> Result<T, Error> {
        loop {
            if let Some(signal) = signal::take() {
                return Err(guest::Error::Interrupted(signal).into());
            }
            if let Some(done) = ready(self)? {
                return Ok(done);
            }
            self.event()?;
        }
    }

    fn leave_alone(&mut self, time: Duration) -> Result<(), Error> {
        let since = Instant::now();
        self.until(|_| Ok((since.elapsed() >= time).then_some(())))
    }

    /// Pages that the guest writes per second, from one report of its progress to a later one.
    fn rate(&mut self) -> Result<f64, Error> {
        let mut begun: Option<(u64, Instant)> = None;
        loop {
            if let Some(signal) = signal::take() {
                return Err(guest::Error::Interrupted(signal).into());
            }
            let Some(Event::Progress { done, .. }) = self.event()? else { continue };
            match begun {
                Some((before, since)) if since.elapsed() >= WATCH / 2 => {
                    return Ok(done.saturating_sub(before) as f64 / since.elapsed().as_secs_f64());
                }
                Some(_) => {}
                None => begun = Some((done, Instant::now())),
            }
        }
    }

    /// Forks it.
    fn fork(&mut self, config: &Config, name: &str, paused: bool) -> Result<(Forked, Child), Error> {
        let start = Instant::now();
        let mut forking = self.begin(config, name, paused)?;
        if !forking.command.wait()?.success() {
            return Err(forking.command.failed());
        }
        let command = start.elapsed().as_secs_f64();
        let forked = self.forked(&mut forking)?;
        Ok((Forked { command, ..forked }, self.child(forking)?))
    }

    /// Starts the command that forks it.
    fn begin(&self, config: &Config, name: &str, paused: bool) -> Result<Forking, Error> {
        let result = self.directory.path(&format!("{name}.json"));
        let words = (config.lines.fork)(config, name, &result, paused);
        let command = Process::start(&self.directory, "the fork", name, &words)?;
        Ok(Forking { command, name: name.to_owned(), result })
    }

    /// Waits until it has reported the fork. Returns what it has reported.
    fn forked(&mut self, forking: &mut Forking) -> Result<Forked, Error> {
        loop {
            match self.event()? {
                Some(Event::Forked { us, parts, parts_us, written, .. }) => {
                    let (pause, parts) = (us as f64 / 1e6, [parts as f64, parts_us as f64 / 1e6]);
                    let copied = written.present as f64 + written.zero as f64;
                    return Ok(Forked { pause, parts, copied, ..Forked::default() });
                }
                Some(Event::NotForked { .. }) => return Err(forking.command.failed()),
                _ => {}
            }
        }
    }

    /// Waits until the command has ended. Returns the new machine.
    fn child(&mut self, mut forking: Forking) -> Result<Child, Error> {
        if !forking.command.wait()?.success() {
            return Err(forking.command.failed());
        }
        let mut client = Client::connect(&self.directory.socket(&forking.name)).map_err(unheard)?;
        let status = client.ask(&Do::Status {}).map_err(unheard)?;
        let pid = status["pid"].as_u64().unwrap_or(0) as u32;
        Ok(Child { client, pid, result: forking.result })
    }

    /// Ends it and returns its result.
    fn end(mut self) -> Result<Report, Error> {
        let mut client = Client::connect(&self.directory.socket("source")).map_err(unheard)?;
        client.ask(&Do::Stop {}).map_err(unheard)?;
        self.source.wait()?;
        read(&self.directory.path("source.json"))
    }
}

impl Child {
    /// Ends it and returns its result.
    fn end(mut self) -> Result<Report, Error> {
        self.client.ask(&Do::Resume { force: false }).map_err(unheard)?;
        self.client.ask(&Do::Stop {}).map_err(unheard)?;
        while Path::new(&format!("/proc/{}", self.pid)).exists() && !is_zombie(self.pid) {
            if let Some(signal) = signal::take() {
                return Err(guest::Error::Interrupted(signal).into());
            }
            std::thread::sleep(LOOK);
        }
        read(&self.result)
    }
}

/// Whether a process has ended and its parent has not waited for it.
fn is_zombie(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z'))
}
