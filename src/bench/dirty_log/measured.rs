//! The results of one round of `dirty-log`, and the figures of all rounds.

use crate::of_rounds;
use vellum_guests::latency::BUCKET_RESOLUTION;
use vellum_kvm::vm::counters::Snapshot;
use vellum_report::{Figure, Histogram, Label, Mark, Report, Series};

/// One round on its own machine.
pub(super) struct Round {
    /// The duration of the first pass, which writes every page, in seconds.
    pub(super) populate: f64,
    /// How long enabling logging took, and disabling it if that was reached, in seconds.
    pub(super) enable: f64,
    pub(super) disable: Option<f64>,
    pub(super) schedule: Schedule,
    /// KVM's mappings after populating, before disabling logging, and at the end.
    pub(super) mapped: [(When, Option<Mapped>); 3],
    /// The guest's write latencies by phase, if measured.
    pub(super) latencies: Vec<(Phase, Histogram)>,
    pub(super) pictures: Pictures,
}

/// The results of the schedule.
pub(super) enum Schedule {
    Lockstep(Lockstep),
    Continuous(Continuous),
}

/// The guest accesses its memory and stops, then the log is collected.
pub(super) struct Lockstep {
    /// The duration of a pass without logging, in seconds.
    pub(super) before: f64,
    pub(super) passes: Vec<Pass>,
    /// The duration of a pass after logging, in seconds, if that was reached.
    pub(super) after: Option<f64>,
}

/// A pass while logging, and its collection.
pub(super) struct Pass {
    pub(super) write: f64,
    pub(super) collected: Parts,
    pub(super) pages: u64,
}

/// The guest runs while the log is collected.
pub(super) struct Continuous {
    /// Pages per second of all vCPUs.
    pub(super) before: f64,
    pub(super) during: f64,
    pub(super) after: f64,
    pub(super) collections: u64,
    /// The sum of all collections.
    pub(super) total: Parts,
    /// The longest of each part.
    pub(super) longest: Parts,
    pub(super) pages: u64,
}

/// The durations of a collection's parts in seconds. The scan is Vellum's own.
#[derive(Clone, Copy, Default)]
pub(super) struct Parts {
    pub(super) get: f64,
    pub(super) clear: f64,
    pub(super) scan: f64,
}

impl Parts {
    pub(super) fn each(self, other: Self, of: fn(f64, f64) -> f64) -> Self {
        Self {
            get: of(self.get, other.get),
            clear: of(self.clear, other.clear),
            scan: of(self.scan, other.scan),
        }
    }
}

/// When mappings were counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    Populated,
    Logged,
    After,
}

impl When {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Populated => "populated",
            Self::Logged => "logged",
            Self::After => "after",
        }
    }
}

/// KVM's mappings by size.
#[derive(Clone, Copy)]
pub(super) struct Mapped {
    pub(super) small: u64,
    pub(super) large: u64,
    pub(super) huge: u64,
}

impl Mapped {
    /// `None` if this kernel does not count them.
    pub(super) fn read(now: &Snapshot) -> Option<Self> {
        let count = |name| now.get(name).copied();
        Some(Self { small: count("pages_4k")?, large: count("pages_2m")?, huge: count("pages_1g")? })
    }
}

/// Phases of the log's life, as seen by the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Before,
    During,
    Disabling,
    After,
}

impl Phase {
    pub(super) const ALL: [Self; 4] = [Self::Before, Self::During, Self::Disabling, Self::After];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::During => "during",
            Self::Disabling => "disabling",
            Self::After => "after",
        }
    }
}

/// The data for plots. The first round represents all.
#[derive(Default)]
pub(super) struct Pictures {
    pub(super) series: Vec<Series>,
    pub(super) marks: Vec<Mark>,
}

/// The quantiles of latencies that become figures.
pub(crate) const QUANTILES: [(&str, f64); 3] = [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)];

impl Round {
    pub(super) fn lockstep(&self) -> Option<&Lockstep> {
        match &self.schedule {
            Schedule::Lockstep(lockstep) => Some(lockstep),
            Schedule::Continuous(_) => None,
        }
    }

    pub(super) fn continuous(&self) -> Option<&Continuous> {
        match &self.schedule {
            Schedule::Lockstep(_) => None,
            Schedule::Continuous(continuous) => Some(continuous),
        }
    }

    pub(super) fn pass(&self, pass: usize) -> Option<&Pass> {
        self.lockstep()?.passes.get(pass)
    }

    pub(super) fn latency(&self, phase: Phase) -> Option<&Histogram> {
        self.latencies.iter().find(|(of, _)| *of == phase).map(|(_, histogram)| histogram)
    }

    pub(super) fn mapped(&self, when: When) -> Option<Mapped> {
        self.mapped.iter().find(|(of, _)| *of == when)?.1
    }
}

/// Adds the figures of `rounds` and the plots of the first.
pub(super) fn add(report: &mut Report, mut rounds: Vec<Round>) {
    figures(report, &rounds);
    if let Some(first) = rounds.first_mut() {
        report.histograms =
            std::mem::take(&mut first.latencies).into_iter().map(|(_, histogram)| histogram).collect();
        (report.series, report.marks) =
            (std::mem::take(&mut first.pictures.series), std::mem::take(&mut first.pictures.marks));
    }
}

/// The mean of all logged passes but the first. What the first costs depends on the tracker: memory
/// is not write-protected yet, or all of it is mapped anew.
pub(super) const WARM: &str = "dirty_memory_warm";

fn mean(passes: &[Pass]) -> Option<f64> {
    let total: f64 = passes.iter().map(|pass| pass.write).sum();
    (!passes.is_empty()).then(|| total / passes.len() as f64)
}

/// Over all passes or collections of a round: the total seconds, their number, and the longest if
/// that is a figure.
struct OverAll {
    total: f64,
    times: f64,
    longest: Option<f64>,
}

fn figures(report: &mut Report, rounds: &[Round]) {
    let mut put = |label: Label, unit: &str, of: &dyn Fn(&Round) -> Option<f64>| {
        report.samples(label, unit, of_rounds(rounds, of));
    };
    put("populate_memory".into(), "s", &|r| Some(r.populate));
    put("enable_logging".into(), "s", &|r| Some(r.enable));
    put("disable_logging".into(), "s", &|r| r.disable);
    let passes = rounds.iter().filter_map(Round::lockstep).map(|l| l.passes.len()).max().unwrap_or(0);
    put(Label::of("dirty_memory", "before"), "s", &|r| Some(r.lockstep()?.before));
    for pass in 0..passes {
        put(Label::of("dirty_memory", pass), "s", &|r| Some(r.pass(pass)?.write));
    }
    put(Label::of("dirty_memory", "after"), "s", &|r| r.lockstep()?.after);
    put(WARM.into(), "s", &|r| mean(r.lockstep()?.passes.get(1..)?));
    for pass in 0..passes {
        put(Label::of("get_dirty_log", pass), "s", &|r| Some(r.pass(pass)?.collected.get));
        put(Label::of("clear_dirty_log", pass), "s", &|r| Some(r.pass(pass)?.collected.clear));
        put(Label::of("scan_dirty_log", pass), "s", &|r| Some(r.pass(pass)?.collected.scan));
        put(Label::of("dirty_pages", pass), "pages", &|r| Some(r.pass(pass)?.pages as f64));
    }
    put("collections".into(), "", &|r| Some(r.continuous()?.collections as f64));
    let mut over_all = |name: &str, of: &dyn Fn(&Round) -> Option<OverAll>| {
        put(format!("{name}_total").into(), "s", &|r| Some(of(r)?.total));
        put(format!("{name}_average").into(), "s", &|r| of(r).map(|all| all.total / all.times));
        put(format!("{name}_longest").into(), "s", &|r| of(r)?.longest);
    };
    let lockstep = |r: &Round, part: &dyn Fn(&Pass) -> f64| {
        let passes = &r.lockstep()?.passes;
        Some(OverAll { total: passes.iter().map(part).sum(), times: passes.len() as f64, longest: None })
    };
    over_all("dirty_memory", &|r| lockstep(r, &|pass| pass.write));
    let mut collected = |name: &str, part: fn(Parts) -> f64| {
        over_all(name, &|r| match &r.schedule {
            Schedule::Lockstep(_) => lockstep(r, &|pass| part(pass.collected)),
            Schedule::Continuous(c) => Some(OverAll {
                total: part(c.total),
                times: c.collections.max(1) as f64,
                longest: Some(part(c.longest)),
            }),
        });
    };
    collected("get_dirty_log", |parts| parts.get);
    collected("clear_dirty_log", |parts| parts.clear);
    collected("scan_dirty_log", |parts| parts.scan);
    put("dirty_pages_total".into(), "pages", &|r| Some(r.continuous()?.pages as f64));
    put("dirty_pages_average".into(), "pages", &|r| {
        r.continuous().map(|c| c.pages as f64 / c.collections.max(1) as f64)
    });
    put(Label::of("progress", "before"), "pages/s", &|r| Some(r.continuous()?.before));
    put(Label::of("progress", "during"), "pages/s", &|r| Some(r.continuous()?.during));
    put(Label::of("progress", "after"), "pages/s", &|r| Some(r.continuous()?.after));
    for when in [When::Populated, When::Logged, When::After] {
        put(Label::of("mapped_4k", when.name()), "pages", &|r| Some(r.mapped(when)?.small as f64));
        put(Label::of("mapped_2m", when.name()), "pages", &|r| Some(r.mapped(when)?.large as f64));
        put(Label::of("mapped_1g", when.name()), "pages", &|r| Some(r.mapped(when)?.huge as f64));
    }
    for phase in Phase::ALL {
        for (name, q) in QUANTILES {
            let samples = of_rounds(rounds, |r| r.latency(phase)?.quantile(q));
            let label = Label::of(format!("write_latency_{name}"), phase.name());
            report.push(Figure::sampled(label, "ns", samples).resolved_to(BUCKET_RESOLUTION));
        }
        let longest = of_rounds(rounds, |r| r.latency(phase)?.max());
        report.samples(Label::of("write_latency_max", phase.name()), "ns", longest);
    }
}
