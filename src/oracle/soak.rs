//! `vellum test dirty-log`: guests write at random while their log is collected, toggled and cut, and the oracle looks on.
//!
//! The test runs in *legs*: a machine with one tracker, one backing, memslots cut at random (odd bases among them, with
//! host addresses congruent modulo 2 MiB so that huge pages are mapped all the same), and writers whose order, hot
//! set and overlap are drawn too. Within a leg (`leg.rs`), `Leg::step` draws what happens next. Everything that is drawn comes
//! from one seed; what the guest has written by then does not.

mod leg;

use std::fmt;
use std::time::{Duration, Instant};

use super::judge::Mode;
use crate::dirty::{Error as DirtyError, Method};
use crate::guests::{guest, mix};
use crate::host::{self, Facts};
use crate::memory::{self, Backing, short_size};
use crate::report::{Label, Report};
use crate::sandbox;
use crate::vm::{self, vcpu};

use crate::fault::{Blame, Fault};
use leg::Leg;

/// What to test, and for how long.
#[derive(Clone, Debug)]
pub struct Config {
    /// The trackers, each for an equal share of the time.
    pub methods: Vec<Method>,
    /// The backings, one after the other within each tracker.
    pub backings: Vec<Backing>,
    /// Bytes of memory that the guest writes to.
    pub size: u64,
    /// How many vCPUs write.
    pub vcpus: usize,
    /// The seed of all that is drawn.
    pub seed: u64,
    /// Events to check with each tracker at least.
    pub events: u64,
    /// How long to go on at most, over all trackers.
    pub duration: Option<Duration>,
    /// Collections of this kind only.
    pub mode: Option<Mode>,
    /// Entries of a dirty ring.
    pub ring_entries: u32,
    /// Where the one memslot of the test starts, instead of a drawn cut.
    pub slot_base: Option<u64>,
    /// Pages that one `KVM_CLEAR_DIRTY_LOG` clears; collections then clear a drawn part of the chunks and leave the rest.
    pub clear_chunk: Option<u64>,
    /// Bits to take out of each tracker's collections: the test of the test.
    pub lose: u64,
    /// Whether vCPU threads are confined, each on its own.
    pub sandbox: sandbox::Mode,
}

/// Where guest memory of a test must end: below the gap, so that addresses and offsets are the same.
pub const MOST: u64 = crate::arch::layout::GAP_START;

/// Why the test could not be held.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A tracker.
    #[error(transparent)]
    Dirty(#[from] DirtyError),
    /// The machine.
    #[error(transparent)]
    Run(#[from] guest::Error),
    /// The guest stopped although nobody asked it to.
    #[error("the guest's writers stopped by themselves")]
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

impl Fault for Error {
    fn blame(&self) -> Blame {
        match self {
            Self::Dirty(error) => error.blame(),
            Self::Run(error) => error.blame(),
            Self::Stopped => Blame::GUEST,
        }
    }
}

/// How many of what is named before the rest is only counted.
pub const NAMED: usize = 32;

/// What was seen with one tracker.
#[derive(Clone, Debug)]
pub struct Tally {
    /// Which.
    pub method: Method,
    /// Distinct (page, collection) events checked: a write that the stamps prove, and its bit.
    pub events: u64,
    /// Collections while vCPUs ran, and with vCPUs out of the guest.
    pub collections: [u64; 2],
    /// Bits that came one collection late, as a running guest's may.
    pub late: u64,
    /// Bits without a fresh stamp that KVM's rules explain.
    pub explained: u64,
    /// Pages lost.
    pub lost: u64,
    /// Those of them that are the first of 2 MiB: see [`super::edges`].
    pub lost_at_edges: u64,
    /// Bits that nothing explains.
    pub unexplained: u64,
    /// Pages that hold another page's stamp.
    pub misplaced: u64,
    /// The first few of these, as lines.
    pub names: Vec<String>,
    /// Bits taken out on purpose whose pages were not written again, and those of them that the oracle named.
    pub injected: [u64; 2],
    /// The log switched off and on, memslots recreated, memslots moved.
    pub upheavals: [u64; 3],
    /// Machines that were built.
    pub legs: u64,
    /// The most 2 MiB mappings that KVM had when a log was switched on.
    pub pages_2m: Option<u64>,
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
            legs: 0,
            pages_2m: None,
        }
    }

    /// Whether the log kept its word (bits taken out on purpose apart) and the oracle its own.
    pub fn is_clean(&self) -> bool {
        self.lost == 0 && self.unexplained == 0 && self.misplaced == 0 && self.injected[0] == self.injected[1]
    }

    /// Whether nothing is wrong but losses that [`super::edges`] may explain.
    pub fn only_edges(&self) -> bool {
        self.method == Method::InitiallySet
            && self.lost > 0
            && self.lost == self.lost_at_edges
            && Self { lost: 0, ..self.clone() }.is_clean()
    }

    fn name(&mut self, what: impl fmt::Display, leg: &str) {
        if self.names.len() < NAMED {
            self.names.push(format!("{what} [{}, {leg}]", self.method.name()));
        }
    }
}

/// Numbers from a seed.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(mix(self.0))
    }

    /// A number below `n`, which is not 0.
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// Holds the test. `watch` hears of the state after every collection and ends the test by returning false.
pub fn run(config: &Config, watch: &mut dyn FnMut(&Tally) -> bool) -> Result<Vec<Tally>, Error> {
    let kvm = vm::open()?;
    // A host that lacks one of the trackers says so before an hour has passed.
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
    let legs = config.backings.len().max(1) as u64 * 2;
    let budget = (config.events / legs).clamp(20_000, 500_000);
    let mut going = true;
    let mut tallies = Vec::new();
    for (&method, nth) in config.methods.iter().zip(1..) {
        let until = share.map(|share| start + share * nth);
        let mut tally = Tally::new(method);
        for &backing in config.backings.iter().cycle() {
            let over = until.is_some_and(|until| Instant::now() >= until);
            let enough = match config.lose {
                0 => tally.events >= config.events && tally.legs >= config.backings.len() as u64,
                lose => tally.injected[0] >= lose,
            };
            if !going || over || enough {
                break;
            }
            tally.legs += 1;
            let seed = mix(config.seed ^ mix(tally.legs ^ (nth as u64) << 32));
            let leg = Leg::build(&kvm, config, method, backing, Rng(seed), &mut tally)?;
            going = leg.run(budget, until, watch)?;
        }
        tallies.push(tally);
    }
    Ok(tallies)
}

/// The result of a test that was held.
pub fn report(config: &Config, tallies: &[Tally], facts: Facts) -> Report {
    let mut report = Report::new("test dirty-log", facts);
    let names = |names: &mut dyn Iterator<Item = String>| names.collect::<Vec<_>>().join(",");
    report.ask("tracker", names(&mut config.methods.iter().map(|method| method.name().to_owned())));
    report.ask("backing", names(&mut config.backings.iter().map(Backing::to_string)));
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
    for tally in tallies {
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
        figure("machines", "", tally.legs);
        if let Some(pages) = tally.pages_2m {
            figure("most_pages_mapped_2m", "pages", pages);
        }
        report.notes.extend(tally.names.iter().cloned());
        let more =
            (tally.lost + tally.unexplained + tally.misplaced).saturating_sub(tally.names.len() as u64);
        if more > 0 {
            report.notes.push(format!("{more} more of these with {}", tally.method.name()));
        }
    }
    report
}
