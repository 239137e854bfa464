//! `vellum test dirty-log`: guests write at random while their log is collected, toggled and cut,
//! and the oracle checks it.
//!
//! The test builds one machine after the other, each with one tracker, one backing and random
//! memslots. Some memslots have odd bases, with host addresses congruent modulo 2 MiB, so that huge pages are still
//! mapped. The writers' order, hot set and overlap are random too. `SoakMachine::step`
//! (`machine.rs`) draws the next action within a machine. One seed determines everything drawn, but
//! not how far the guest has written by then.

mod machine;

use std::fmt;
use std::time::{Duration, Instant};

use super::judge::Mode;
use vellum_guests::{guest, mix};
use vellum_host::{self as host, Facts};
use vellum_kvm::dirty::{Error as DirtyError, Method};
use vellum_kvm::memory::{self, Backing, short_size};
use vellum_kvm::vm::{self, vcpu};
use vellum_report::units::grouped;
use vellum_report::{Answer, Case, Label, Report, Status};
use vellum_sandbox as sandbox;

use machine::SoakMachine;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin};

/// The parameters.
#[derive(Clone, Debug)]
pub struct Config {
    /// The trackers. Each gets an equal share of the time.
    pub methods: Vec<Method>,
    /// The backings, tested in turn for each tracker.
    pub backings: Vec<Backing>,
    /// The memory that the guest writes to, in bytes.
    pub size: u64,
    /// The number of writing vCPUs.
    pub vcpus: usize,
    /// The seed of everything random.
    pub seed: u64,
    /// The fewest events to check with each tracker.
    pub events: u64,
    /// The time limit over all trackers.
    pub duration: Option<Duration>,
    /// Use only collections of this kind.
    pub mode: Option<Mode>,
    /// The entries of a dirty ring.
    pub ring_entries: u32,
    /// The start of a single memslot, instead of random ones.
    pub slot_base: Option<u64>,
    /// The pages per `KVM_CLEAR_DIRTY_LOG`. Collections then clear a random part of the chunks and
    /// leave the rest.
    pub clear_chunk: Option<u64>,
    /// The number of bits to remove from each tracker's collections, to test the oracle.
    pub lose: u64,
    /// What this host cannot test.
    pub left_out: Vec<LeftOut>,
    /// Whether to confine vCPU threads. Each is confined separately.
    pub sandbox: sandbox::Mode,
}

/// A combination that this host cannot test.
#[derive(Clone, Debug)]
pub struct LeftOut {
    /// The tracker, or `None` for all.
    pub method: Option<Method>,
    /// The backing, or `None` for all.
    pub backing: Option<Backing>,
    /// What the host lacks, and the remedy.
    pub why: String,
    /// Whether the user named it.
    pub asked: bool,
}

impl LeftOut {
    /// Describes the combination and what is lacking.
    fn said(&self) -> String {
        let backing = self.backing.map(|backing| backing.to_string());
        let what = self.method.map(|method| method.name().to_owned()).or(backing);
        format!("{}: {}", what.unwrap_or_default(), self.why)
    }
}

/// The largest guest memory of a test. It must be contiguous, so that offsets are addresses
/// relative to the start of RAM.
pub const MAX_MEMORY: u64 = vellum_kvm::arch::layout::ONE_PIECE;

/// Why the test could not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A tracker failed.
    #[error(transparent)]
    Dirty(#[from] DirtyError),
    /// The machine failed.
    #[error(transparent)]
    Run(#[from] guest::Error),
    /// The guest stopped unexpectedly.
    #[error("the guest's writers stopped unexpectedly")]
    Stopped,
}

impl From<vm::Error> for Error {
    fn from(error: vm::Error) -> Self {
        Self::Run(error.into())
    }
}

impl From<memory::Error> for Error {
    fn from(error: memory::Error) -> Self {
        vm::Error::from(error).into()
    }
}

impl From<vcpu::Error> for Error {
    fn from(error: vcpu::Error) -> Self {
        vm::Error::from(error).into()
    }
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Dirty(error) => error.origin(),
            Self::Run(error) => error.origin(),
            Self::Stopped => ErrorOrigin::GUEST,
        }
    }
}

/// The most findings to list. The rest is only counted.
pub const NAMED: usize = 32;

/// The results of one tracker.
#[derive(Clone, Debug)]
pub struct Tally {
    /// The tracker.
    pub method: Method,
    /// Distinct (page, collection) events checked: a write proved by the stamps, and its bit.
    pub events: u64,
    /// Collections with running vCPUs, and with vCPUs out of the guest.
    pub collections: [u64; 2],
    /// Bits that were one collection late, as allowed with a running guest.
    pub late: u64,
    /// Bits without a new stamp that KVM's rules explain.
    pub explained: u64,
    /// Lost pages.
    pub lost: u64,
    /// Lost pages that are the first of 2 MiB: see [`super::edges`].
    pub lost_at_edges: u64,
    /// Bits without an explanation.
    pub unexplained: u64,
    /// Pages that hold another page's stamp.
    pub misplaced: u64,
    /// The first findings, as lines.
    pub names: Vec<String>,
    /// Removed bits whose pages were not written again, and those that the oracle reported.
    pub injected: [u64; 2],
    /// How often the log was toggled, memslots were recreated, and memslots were moved.
    pub upheavals: [u64; 3],
    /// The number of machines.
    pub machines: u64,
    /// The backings with at least one collection.
    pub backings: Vec<Backing>,
    /// The most 2 MiB mappings that KVM had when a log was enabled.
    pub pages_2m: Option<u64>,
    /// The results on each backing, in order of testing.
    pub parts: Vec<Part>,
}

/// The results of one tracker on one backing.
#[derive(Clone, Debug)]
pub struct Part {
    /// The backing.
    pub backing: Backing,
    /// Events checked.
    pub events: u64,
    /// Lost pages.
    pub lost: u64,
    /// Unexplained bits, misplaced stamps, and removed bits that the oracle missed.
    pub wrong: u64,
    /// The running time of its machines in seconds.
    pub seconds: f64,
}

impl Tally {
    fn new(method: Method) -> Self {
        Self {
            method,
            events: 0,
            collections: [0; 2],
            late: 0,
            explained: 0,
            lost: 0,
            lost_at_edges: 0,
            unexplained: 0,
            misplaced: 0,
            names: Vec::new(),
            injected: [0; 2],
            upheavals: [0; 3],
            machines: 0,
            backings: Vec::new(),
            pages_2m: None,
            parts: Vec::new(),
        }
    }

    /// Whether the log lost nothing (except removed bits) and the oracle missed nothing.
    pub fn is_clean(&self) -> bool {
        self.lost == 0 && self.unexplained == 0 && self.misplaced == 0 && self.injected[0] == self.injected[1]
    }

    /// Whether the only findings are losses that [`super::edges`] may explain.
    pub fn only_edges(&self) -> bool {
        self.method == Method::InitiallySet
            && self.lost > 0
            && self.lost == self.lost_at_edges
            && Self { lost: 0, ..self.clone() }.is_clean()
    }

    /// The number of findings other than losses.
    fn wrong(&self) -> u64 {
        self.unexplained + self.misplaced + (self.injected[0] - self.injected[1])
    }

    /// Adds the results since `before`, when a machine with `backing` started.
    fn add_part(&mut self, before: &Self, backing: Backing, seconds: f64) {
        let at = self.parts.iter().position(|part| part.backing == backing).unwrap_or_else(|| {
            self.parts.push(Part { backing, events: 0, lost: 0, wrong: 0, seconds: 0.0 });
            self.parts.len() - 1
        });
        let (events, lost) = (self.events - before.events, self.lost - before.lost);
        let wrong = self.wrong() - before.wrong();
        let part = &mut self.parts[at];
        part.events += events;
        part.lost += lost;
        part.wrong += wrong;
        part.seconds += seconds;
    }

    fn name(&mut self, what: impl fmt::Display, machine: &str) {
        if self.names.len() < NAMED {
            self.names.push(format!("{what} [{}, {machine}]", self.method.name()));
        }
    }
}

/// Random numbers from a seed.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(mix(self.0))
    }

    /// A number below `n`, which must not be 0.
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// The results of a test.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The results of each tracker that was reached.
    pub tallies: Vec<Tally>,
    /// The signal that interrupted the test, if one did.
    pub interrupted: Option<i32>,
    /// The error of a machine that ended the test after an earlier one had lost pages.
    pub failed: Option<String>,
}

/// Runs the test. Calls `watch` after every collection. A remembered signal
/// ([`remember`](vellum_sys::signal::remember)) ends it with the results so far.
pub fn run(config: &Config, watch: &mut dyn FnMut(&Tally)) -> Result<Outcome, Error> {
    let kvm = vm::open()?;
    // Reports a missing tracker now, not after an hour.
    let probe = host::kvm::create_vm(&kvm).map_err(vm::Error::from)?;
    for &method in &config.methods {
        method.check(&probe)?;
        if method == Method::Ring {
            vm::ring::check(&probe, config.ring_entries).map_err(vm::Error::from)?;
        }
    }
    drop(probe);
    let start = Instant::now();
    let share = config.duration.map(|duration| duration / config.methods.len().max(1) as u32);
    let budget = budget(config.events, config.backings.len());
    let mut held = Outcome { tallies: Vec::new(), interrupted: None, failed: None };
    for (&method, nth) in config.methods.iter().zip(1..) {
        let until = share.map(|share| start + share * nth);
        // Each backing gets a turn even in a short test.
        let turn = share.map(|share| share / config.backings.len().max(1) as u32);
        let mut tally = Tally::new(method);
        for &backing in config.backings.iter().cycle() {
            let over = until.is_some_and(|until| Instant::now() >= until);
            let enough = match config.lose {
                0 => tally.events >= config.events && tally.machines >= config.backings.len() as u64,
                lose => tally.injected[0] >= lose,
            };
            if over || enough || held.is_cut_off() {
                break;
            }
            tally.machines += 1;
            let seed = mix(config.seed ^ mix(tally.machines ^ (nth as u64) << 32));
            let until = until.zip(turn).map(|(until, turn)| until.min(Instant::now() + turn));
            let (before, begun) = (tally.clone(), Instant::now());
            let machine = SoakMachine::build(&kvm, config, method, backing, Rng(seed), &mut tally);
            let ended = machine.and_then(|machine| machine.run(budget, until, watch));
            tally.add_part(&before, backing, begun.elapsed().as_secs_f64());
            match ended {
                Err(Error::Run(guest::Error::Interrupted(signal))) => held.interrupted = Some(signal),
                // What was found must not be lost with a machine that cannot be built.
                Err(error) if !held.tallies.iter().chain([&tally]).all(Tally::is_clean) => {
                    held.failed = Some(error.to_string());
                }
                ended => ended?,
            }
        }
        if tally.machines > 0 {
            held.tallies.push(tally);
        }
    }
    Ok(held)
}

/// The number of events to check in one machine: each backing gets two machines, without exceeding
/// the requested total.
fn budget(events: u64, backings: usize) -> u64 {
    (events / (backings.max(1) as u64 * 2)).clamp(20_000.min(events), 500_000)
}

impl Outcome {
    /// What was requested but not tested, and why.
    fn cut_short(&self, config: &Config) -> Option<String> {
        let missing = |method: &Method| {
            let tally = self.tallies.iter().find(|tally| tally.method == *method);
            // With removed bits, the test ends when enough were found, on any backing.
            if config.lose > 0 {
                let taken = tally.map_or(0, |tally| tally.injected[0]);
                return (taken < config.lose).then(|| method.name().to_owned());
            }
            let reached = tally.map_or(&[][..], |tally| &tally.backings);
            let backings = config.backings.iter().filter(|backing| !reached.contains(backing));
            let backings: Vec<_> = backings.map(Backing::to_string).collect();
            match backings.len() {
                0 => None,
                _ if reached.is_empty() => Some(method.name().to_owned()),
                _ => Some(format!("{} on {}", method.name(), backings.join(", "))),
            }
        };
        let missing: Vec<_> = config.methods.iter().filter_map(missing).collect();
        let why = match (self.interrupted, &self.failed) {
            (Some(signal), _) => format!("ended by signal {signal}"),
            (None, Some(error)) => format!("ended by an error ({error})"),
            (None, None) if missing.is_empty() => return None,
            (None, None) => "the time limit expired".into(),
        };
        Some(match missing.is_empty() {
            true => format!("{why}; every tracker was tested with every backing"),
            false if config.lose > 0 => {
                format!("{why} before {} bits were removed with {}", config.lose, missing.join("; "))
            }
            false => format!("{why} before anything was tested with {}", missing.join("; ")),
        })
    }

    /// Whether the test ended before its time.
    fn is_cut_off(&self) -> bool {
        self.interrupted.is_some() || self.failed.is_some()
    }

    /// The backings that any tracker reached, in the requested order.
    fn backings<'a>(&'a self, config: &'a Config) -> impl Iterator<Item = &'a Backing> {
        let reached = |backing: &&Backing| self.tallies.iter().any(|tally| tally.backings.contains(backing));
        config.backings.iter().filter(reached)
    }
}

/// A case for each tracker and backing, including those left out or not reached.
fn cases(config: &Config, held: &Outcome) -> Vec<Case> {
    let mut cases = Vec::new();
    let seeded = |case: Case| Case { seed: Some(config.seed), ..case };
    for &method in &config.methods {
        let tally = held.tallies.iter().find(|tally| tally.method == method);
        for backing in &config.backings {
            let name = format!("{}/{backing}", method.name());
            let part = tally.and_then(|tally| tally.parts.iter().find(|part| part.backing == *backing));
            let case = match part.filter(|part| part.events > 0 || part.lost + part.wrong > 0) {
                Some(part) if part.lost + part.wrong == 0 => Case::new(name, Status::Pass),
                Some(part) => Case::new(name, Status::Fail).because(format!(
                    "{} pages lost, {} unexplained bits or misplaced stamps in {} events",
                    part.lost, part.wrong, part.events
                )),
                None if held.is_cut_off() => Case::new(name, Status::Timeout)
                    .because("the test was interrupted before this")
                    .mended_by("let it run"),
                None if config.lose > 0 => {
                    Case::new(name, Status::Skip).because("all removed bits were found before this")
                }
                None => Case::new(name, Status::Timeout)
                    .because("the time limit expired before this")
                    .mended_by("give it more time"),
            };
            cases.push(seeded(Case { seconds: part.map(|part| part.seconds), ..case }));
        }
        for left_out in config.left_out.iter().filter(|left_out| left_out.method.is_none()) {
            let backing = left_out.backing.map_or("all".to_owned(), |backing| backing.to_string());
            cases
                .push(Case::new(format!("{}/{backing}", method.name()), Status::Skip).because(&left_out.why));
        }
    }
    for left_out in &config.left_out {
        if let Some(method) = left_out.method {
            cases.push(Case::new(method.name(), Status::Skip).because(&left_out.why));
        }
    }
    cases
}

/// The report of a test.
pub fn report(config: &Config, held: &Outcome, facts: Facts) -> Report {
    let mut report = Report::new("test dirty-log", facts);
    let tested = || held.tallies.iter().filter(|tally| !tally.backings.is_empty());
    report.cut_short = held.cut_short(config);
    report.cases = cases(config, held);
    report.not_run = config.left_out.iter().filter(|left_out| left_out.asked).map(LeftOut::said).collect();
    let names = |names: &mut dyn Iterator<Item = String>| names.collect::<Vec<_>>().join(",");
    // Combinations that were not reached are in the cases, and must not look tested here.
    if tested().next().is_some() {
        report.ask("tracker", names(&mut tested().map(|tally| tally.method.name().to_owned())));
        report.ask("backing", names(&mut held.backings(config).map(Backing::to_string)));
    }
    report.ask("memory", short_size(config.size));
    report.ask("cpus", config.vcpus);
    report.ask("seed", config.seed);
    if config.events < u64::MAX {
        report.ask("events", config.events);
    }
    if let Some(duration) = config.duration {
        report.ask("duration_seconds", duration.as_secs_f64());
    }
    if let Some(mode) = config.mode {
        report.ask("mode", if mode == Mode::Running { "running" } else { "quiesced" });
    }
    if config.methods.contains(&Method::Ring) {
        report.ask("ring_entries", config.ring_entries);
    }
    if let Some(base) = config.slot_base {
        report.ask("slot_base", format!("{base:#x}"));
    }
    if let Some(chunk) = config.clear_chunk {
        report.ask("clear_chunk", chunk);
    }
    if config.lose > 0 {
        report.ask("inject_lose", config.lose);
    }
    for tally in tested() {
        let mut figure = |name: &str, unit: &str, value: u64| {
            report.figure(Label::of(name, tally.method.name()), unit, value as f64);
        };
        figure("events_checked", "events", tally.events);
        figure("collections_running", "", tally.collections[0]);
        figure("collections_quiesced", "", tally.collections[1]);
        figure("bits_one_collection_late", "pages", tally.late);
        figure("bits_explained", "pages", tally.explained);
        figure("bits_unexplained", "pages", tally.unexplained);
        figure("stamps_misplaced", "pages", tally.misplaced);
        figure("lost", "pages", tally.lost);
        figure("lost_at_edges_of_2m", "pages", tally.lost_at_edges);
        if config.lose > 0 {
            figure("injected", "pages", tally.injected[0]);
            figure("injected_and_caught", "pages", tally.injected[1]);
        }
        figure("log_toggled", "", tally.upheavals[0]);
        figure("memslots_recreated", "", tally.upheavals[1]);
        figure("memslots_moved", "", tally.upheavals[2]);
        figure("machines", "", tally.machines);
        if let Some(pages) = tally.pages_2m {
            figure("most_pages_mapped_2m", "pages", pages);
        }
        for part in tally.parts.iter().filter(|part| part.events > 0) {
            // The same name as the case's, so that merging many results can find them.
            let index = format!("{}/{}", tally.method.name(), part.backing);
            report.figure(Label::of("events", &index), "events", part.events as f64);
            report.figure(Label::of("pages_lost", &index), "pages", part.lost as f64);
        }
        report.notes.extend(tally.names.iter().cloned());
        let more =
            (tally.lost + tally.unexplained + tally.misplaced).saturating_sub(tally.names.len() as u64);
        if more > 0 {
            report.notes.push(format!("{more} more of these with {}", tally.method.name()));
        }
    }
    report.answer(answer(config, held, &report.cases));
    report
}

/// The first lines of the result.
fn answer(config: &Config, held: &Outcome, cases: &[Case]) -> Answer {
    let sum = |of: fn(&Tally) -> u64| held.tallies.iter().map(of).sum::<u64>();
    let (events, lost) = (sum(|tally| tally.events), sum(|tally| tally.lost));
    let wrong = sum(|tally| tally.unexplained + tally.misplaced);
    let tested = cases.iter().filter(|case| matches!(case.status, Status::Pass | Status::Fail)).count();
    let asked = cases.iter().filter(|case| case.status != Status::Skip).count();
    let absent = cases.len() - asked;
    let short = |count: u64| match count {
        1_000_000.. => format!("{:.2} M", count as f64 / 1e6),
        count => grouped(count.into()),
    };
    let mut text =
        format!("dirty-log: {tested} of {asked} combinations, {} events, {lost} lost", short(events));
    if wrong > 0 {
        text = format!("{text}, {wrong} unexplained bits or misplaced stamps");
    }
    let seconds: f64 = cases.iter().filter_map(|case| case.seconds).sum();
    let absent = (absent > 0).then(|| format!("{absent} combinations"));
    // The rule of three: no loss in N events bounds the probability at 3/N.
    let bound =
        (lost + wrong == 0 && events > 0).then(|| format!("under 1 loss in {} events", short(events / 3)));
    let answer = Answer::of_test(text)
        .fact_if("95 % bound", bound)
        .fact("time and seed", format!("{seconds:.0} s, seed {}", config.seed))
        .fact_if("not on this host", absent);
    let losing: Vec<_> =
        held.tallies.iter().filter(|tally| tally.lost > 0).map(|t| t.method.name()).collect();
    if losing.is_empty() { answer } else { answer.fact("lost with", losing.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(backings: Vec<Backing>) -> Config {
        Config {
            methods: vec![Method::Bitmap, Method::Ring],
            backings,
            size: 1 << 20,
            vcpus: 1,
            seed: 1,
            events: u64::MAX,
            duration: None,
            mode: None,
            ring_entries: 4096,
            slot_base: None,
            clear_chunk: None,
            lose: 0,
            left_out: Vec::new(),
            sandbox: sandbox::Mode::Off,
        }
    }

    fn held(reached: &[(Method, &[Backing])], interrupted: Option<i32>) -> Outcome {
        let tally = |&(method, backings): &(Method, &[Backing])| Tally {
            backings: backings.to_vec(),
            ..Tally::new(method)
        };
        Outcome { tallies: reached.iter().map(tally).collect(), interrupted, failed: None }
    }

    #[test]
    fn a_machine_checks_no_more_events_than_were_asked_for() {
        assert_eq!([1, 10, 20_000, 1_000_000].map(|events| budget(events, 4)), [1, 10, 20_000, 125_000]);
        assert_eq!(budget(u64::MAX, 4), 500_000);
    }

    #[test]
    fn what_was_not_reached_is_named_and_not_listed() {
        use Backing::{Anonymous, Shmem, Thp};
        let config = config(vec![Anonymous, Thp, Shmem]);
        let some = held(&[(Method::Bitmap, &[Anonymous, Thp]), (Method::Ring, &[])], None);
        let report = |held: &Outcome| report(&config, held, Facts::collect("off".into()));
        let short = report(&some);
        let said = "the time limit expired before anything was tested with bitmap on shmem; ring";
        assert_eq!(short.cut_short.as_deref(), Some(said));
        assert_eq!(
            (&short.asked["tracker"], &short.asked["backing"]),
            (&"bitmap".into(), &"anonymous,thp".into())
        );
        assert!(short.figures.iter().all(|figure| figure.label.index.as_deref() == Some("bitmap")));

        let all: &[Backing] = &[Anonymous, Thp, Shmem];
        let every = held(&[(Method::Bitmap, all), (Method::Ring, all)], None);
        assert_eq!(report(&every).cut_short, None);
        let ended = report(&Outcome { interrupted: Some(2), ..every.clone() });
        assert!(ended.cut_short.is_some_and(|said| said.starts_with("ended by signal 2")));
        let ended = Outcome { interrupted: None, failed: Some("no huge page".into()), ..every };
        let said = "ended by an error (no huge page); every tracker was tested with every backing";
        assert_eq!(report(&ended).cut_short.as_deref(), Some(said));
        let none = report(&held(&[], Some(15)));
        let said = "ended by signal 15 before anything was tested with bitmap; ring";
        assert_eq!((none.cut_short.as_deref(), none.figures.len()), (Some(said), 0));
    }
}
