//! The results of a round, and how they become figures and plots.

use super::answer::Answer;
use crate::dirty_log::QUANTILES;
use crate::of_rounds;
use vellum_control::{Left, Pass, Waited};
use vellum_guests::journal::PHASES;
use vellum_guests::latency::BUCKET_RESOLUTION;
use vellum_report::{Figure, Histogram, Label, Mark, Premise, Report, Series};

/// One move of a guest. Times are in seconds, progress in pages per second.
pub(super) struct Round {
    /// From the guest's last write on the source to its first on the target, by its own clock. With
    /// several vCPUs, the longest.
    pub(super) downtime: f64,
    /// The downtime as reported by the two machines.
    pub(super) parts: Parts,
    /// From the start on the source until the guest runs on the target.
    pub(super) total: f64,
    /// From the start on the source until the target has all memory, if that follows the guest.
    pub(super) memory_there: Option<f64>,
    pub(super) passes: Vec<Pass>,
    pub(super) left: Left,
    /// The guest's progress.
    pub(super) before: f64,
    pub(super) during: f64,
    pub(super) after: f64,
    /// The difference between `before` and `during` that an undisturbed guest may show, if there
    /// were enough samples to tell.
    pub(super) noise: Option<f64>,
    /// How long the guest waited for pages after postcopy.
    pub(super) waited: Option<Waited>,
    /// The minimal cost of such a wait.
    pub(super) bare: Answer,
    /// How dirty pages were collected.
    pub(super) tracker: String,
    /// Pages that do not hold what the guest wrote, if any.
    pub(super) wrong: Option<Premise>,
    pub(super) latencies: Vec<Histogram>,
    pub(super) series: Vec<Series>,
    pub(super) marks: Vec<Mark>,
}

/// The downtime as reported by the machines, step by step.
#[derive(Clone, Copy, Default)]
pub(super) struct Parts {
    /// Until all vCPUs are paused.
    pub(super) pause: f64,
    /// Saving the state of vCPUs and devices.
    pub(super) save: f64,
    /// The last pages: collecting them and handing them to the kernel.
    pub(super) last_pass: f64,
    /// The state, until the target has received all of it.
    pub(super) transfer: f64,
    pub(super) restore: f64,
    /// READY, COMMIT, and starting the vCPUs.
    pub(super) resume: f64,
}

impl Parts {
    fn each(&self) -> [(&'static str, f64); 6] {
        [
            ("pause", self.pause),
            ("save", self.save),
            ("last_pass", self.last_pass),
            ("transfer", self.transfer),
            ("restore", self.restore),
            ("resume", self.resume),
        ]
    }

    fn sum(&self) -> f64 {
        self.each().iter().map(|(_, seconds)| seconds).sum()
    }
}

impl Round {
    fn latency(&self, phase: &str) -> Option<&Histogram> {
        self.latencies.iter().find(|histogram| histogram.index.as_deref() == Some(phase))
    }

    /// `rate` as a percentage of the undisturbed progress.
    fn share(&self, rate: f64) -> Option<f64> {
        (self.before > 0.0).then(|| 100.0 * rate / self.before)
    }

    /// The median duration of the minimal answer.
    fn bare_fault(&self) -> Option<f64> {
        let mut each = self.bare.each.clone();
        each.sort_by(f64::total_cmp);
        each.get(each.len() / 2).copied()
    }

    /// Bytes per second while pages were sent.
    fn bandwidth(&self) -> f64 {
        let time: u64 = self.passes.iter().map(|pass| pass.ended.saturating_sub(pass.began)).sum();
        self.left.bytes as f64 * 1e6 / time.max(1) as f64
    }
}

/// The number of passes with figures of their own.
const PASSES: usize = 12;

/// Adds the figures of `rounds` and the plots of the first.
pub(super) fn add(report: &mut Report, mut rounds: Vec<Round>) {
    figures(report, None, &rounds);
    let passes = rounds.iter().map(|round| round.passes.len()).max().unwrap_or(0).min(PASSES);
    for pass in 0..passes {
        let mut put = |name: &str, unit: &str, of: &dyn Fn(&Pass) -> u64, scale: f64| {
            let label = Label::of(name, pass + 1);
            let value = |round: &Round| Some(of(round.passes.get(pass)?) as f64 / scale);
            report.samples(label, unit, of_rounds(&rounds, value));
        };
        put("pass_time", "s", &|pass| pass.ended.saturating_sub(pass.began), 1e6);
        put("pass_pages", "pages", &|pass| pass.pages, 1.0);
        put("pass_bytes", "bytes", &|pass| pass.bytes, 1.0);
        put("pass_dirty", "pages", &|pass| pass.dirty, 1.0);
        put("pass_harvest", "s", &|pass| pass.harvest, 1e6);
    }
    if let Some(first) = rounds.first_mut() {
        report.histograms = std::mem::take(&mut first.latencies);
        report.series = std::mem::take(&mut first.series);
        report.marks = std::mem::take(&mut first.marks);
    }
}

/// Adds the figures of one part as a column.
pub(super) fn add_column(report: &mut Report, column: &str, rounds: &[Round]) {
    figures(report, Some(column), rounds);
    let Some(first) = rounds.first() else { return };
    for series in &first.series {
        report.series.push(Series { name: format!("{}_{column}", series.name), ..series.clone() });
    }
}

fn figures(report: &mut Report, column: Option<&str>, rounds: &[Round]) {
    let label = |name: &str, index: Option<&str>| match (column, index) {
        (None, None) => Label::from(name),
        (None, Some(index)) => Label::of(name, index),
        (Some(column), None) => Label::of(column, name),
        (Some(column), Some(index)) => Label::of(column, format_args!("{name} {index}")),
    };
    let mut put = |name: &str, index: Option<&str>, unit: &str, of: &dyn Fn(&Round) -> Option<f64>| {
        report.samples(label(name, index), unit, of_rounds(rounds, of));
    };
    let seconds = |micros: Option<u64>| micros.map(|micros| micros as f64 / 1e6);
    put("downtime", None, "s", &|r| Some(r.downtime));
    for (number, (part, _)) in Parts::default().each().into_iter().enumerate() {
        put("downtime_part", Some(part), "s", &|r| Some(r.parts.each()[number].1));
    }
    put("downtime_of_machines", None, "s", &|r| Some(r.parts.sum()));
    put("downtime_expected", None, "s", &|r| seconds(r.left.expected_downtime));
    put("downtime_estimated", None, "s", &|r| seconds(r.left.estimated_downtime));
    put("total", None, "s", &|r| Some(r.total));
    put("memory_there", None, "s", &|r| r.memory_there);
    put("total_estimated", None, "s", &|r| seconds(r.left.estimated_total));
    put("passes", None, "", &|r| Some(f64::from(r.left.passes)));
    put("bytes_sent", None, "bytes", &|r| Some(r.left.bytes as f64));
    put("bandwidth", None, "bytes/s", &|r| Some(r.bandwidth()));
    put("converged", None, "%", &|r| Some(if r.left.converged { 100.0 } else { 0.0 }));
    put("harvest_total", None, "s", &|r| seconds(Some(r.passes.iter().map(|pass| pass.harvest).sum())));
    put("harvest_longest", None, "s", &|r| seconds(r.passes.iter().map(|pass| pass.harvest).max()));
    put("clear_longest", None, "s", &|r| seconds(r.passes.iter().map(|pass| pass.clear).max()));
    put("progress", Some("before"), "pages/s", &|r| Some(r.before));
    put("progress", Some("during"), "pages/s", &|r| Some(r.during));
    put("progress", Some("after"), "pages/s", &|r| Some(r.after));
    put("progress_lost", None, "%", &|r| r.share(r.before - r.during));
    put("progress_noise", None, "%", &|r| r.share(r.noise?));
    let waited = |r: &Round, us: &dyn Fn(&Waited) -> u64| r.waited.as_ref().map(|w| us(w) as f64 / 1e6);
    let fault = |r: &Round| waited(r, &|w| w.median_us);
    put("faults", None, "", &|r| r.waited.as_ref().map(|w| w.faults as f64));
    put("fault_latency_p50", None, "s", &fault);
    put("fault_latency_max", None, "s", &|r| waited(r, &|w| w.longest_us));
    put("bare_fault_latency_p50", None, "s", &Round::bare_fault);
    put("fault_latency_ratio", None, "", &|r| Some(fault(r)? / r.bare_fault()?));
    put("blocktime_longest", None, "s", &|r| waited(r, &|w| w.vcpus_us.iter().max().copied().unwrap_or(0)));
    put("link_speed", None, "bytes/s", &|r| r.waited.as_ref().map(|_| r.bare.speed));
    for phase in PHASES {
        for (name, q) in QUANTILES {
            let samples = of_rounds(rounds, |r| r.latency(phase)?.quantile(q));
            let label = label(&format!("write_latency_{name}"), Some(phase));
            report.push(Figure::sampled(label, "ns", samples).resolved_to(BUCKET_RESOLUTION));
        }
        let longest = of_rounds(rounds, |r| r.latency(phase)?.max());
        report.samples(label("write_latency_max", Some(phase)), "ns", longest);
    }
}
