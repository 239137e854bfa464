//! The result type. Every run, benchmark and test produces a [`Report`].
//!
//! A [`Report`] records the parameters, the host and the measurements. The terminal, JSON (serde)
//! and HTML forms print the same value, so a pasted result is complete. This crate does not measure
//! (`bench/`, the built-in guests) and does not examine the host ([`vellum_host`]).
//!
//! Start here for the type.
//! - [`answer`] has the answer, with which every form begins.
//! - [`figure`] has the samples of a figure, [`premise`] the conditions of a valid result.
//! - [`json`] writes and reads results.
//! - [`view`] turns [`case`]s into the formats of other programs.
//! - [`units`] formats numbers, [`terminal`] and [`html`] print them.
//! - [`compare`] compares two sets of results.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use vellum_host::Facts;

pub mod answer;
pub mod case;
pub mod compare;
pub mod figure;
pub mod html;
pub mod json;
pub mod output;
mod page;
mod plot;
pub mod premise;
mod table;
pub mod terminal;
pub mod units;
pub mod view;

pub use answer::Answer;
pub use case::{Case, Status};
pub use figure::{Figure, Label, Sample};
pub use premise::{Failed, Premise};

/// The version of the JSON form. It is raised when a reader of the previous version would misread
/// the new one.
///
/// Version 3 added cases.
pub const SCHEMA: u32 = 3;

/// The oldest version that this version reads.
pub const OLDEST: u32 = 2;

/// One result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// [`SCHEMA`] at the time of writing.
    pub schema: u32,
    /// The version of Vellum that wrote it.
    pub vellum: String,
    /// The command that ran: `run write`, `bench dirty-log`, `test dirty-log`.
    pub name: String,
    /// The command line as typed.
    pub command: Vec<String>,
    /// Every parameter with its value, defaults included.
    pub asked: BTreeMap<String, Value>,
    /// Facts about the host.
    pub host: Facts,
    /// When the measurement ran, in seconds since 1970 by the host's clock. Comparisons use it to
    /// find results that were measured in turn.
    pub at: f64,
    /// What was not done because the run ended early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut_short: Option<String>,
    /// What was requested by name but not run, and what this host lacks for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_run: Vec<String>,
    /// The premises that failed. A valid result has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub invalid: Vec<Failed>,
    /// Remarks that do not invalidate the result.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The answer. Results of older versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<Answer>,
    /// The main figure of the measurement. A comparison tests it on its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headline: Option<Label>,
    /// The parts of the result and how each ended. Empty if the result has no parts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cases: Vec<Case>,
    /// The figures in reading order.
    pub figures: Vec<Figure>,
    /// KVM's counters before and after.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub counters: Vec<Counter>,
    /// Figures over time. Time 0 is the start of the measurement.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub series: Vec<Series>,
    /// Spans on the same clock, for example each collection of a dirty log.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub marks: Vec<Mark>,
    /// Distributions of samples.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub histograms: Vec<Histogram>,
}

/// One of KVM's counters. Per-vCPU counters are summed over the vCPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counter {
    /// KVM's name (`Documentation/virt/kvm/api.rst`, `KVM_GET_STATS_FD`).
    pub name: String,
    /// The VM, if the result covers several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<String>,
    /// The value at the start of the measurement.
    pub before: u64,
    /// The value at the end.
    pub after: u64,
}

/// A figure over time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Series {
    /// What the series measures.
    pub name: String,
    /// Tells series of the same name apart. They share a plot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<String>,
    /// The unit of the values.
    pub unit: String,
    /// (seconds since the start of the measurement, value), in order.
    pub points: Vec<(f64, f64)>,
}

/// A span of time to show in a plot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mark {
    /// What happened in it.
    pub name: String,
    /// Start, in seconds since the measurement began.
    pub start: f64,
    /// End, in seconds since the measurement began.
    pub end: f64,
}

/// A distribution as (inclusive upper bound, count) pairs with rising bounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Histogram {
    /// What the samples measure.
    pub name: String,
    /// Tells distributions of the same name apart. They share a plot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<String>,
    /// The unit of the bounds.
    pub unit: String,
    /// The buckets that are not empty.
    pub buckets: Vec<(f64, u64)>,
    /// The largest sample, if known. The last bucket's bound may exceed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
}

impl Report {
    /// Creates an empty result for `name` on this host.
    pub fn new(name: impl Into<String>, host: Facts) -> Self {
        // JSON readers keep milliseconds exactly.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
        Self {
            schema: SCHEMA,
            vellum: env!("CARGO_PKG_VERSION").into(),
            name: name.into(),
            // JSON cannot hold bytes that are not UTF-8, so they are replaced.
            command: std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect(),
            asked: BTreeMap::new(),
            host,
            at: now as f64 / 1e3,
            cut_short: None,
            not_run: Vec::new(),
            invalid: Vec::new(),
            notes: Vec::new(),
            answer: None,
            headline: None,
            cases: Vec::new(),
            figures: Vec::new(),
            counters: Vec::new(),
            series: Vec::new(),
            marks: Vec::new(),
            histograms: Vec::new(),
        }
    }

    /// Records a parameter with its value.
    pub fn ask(&mut self, name: &str, value: impl Into<Value>) {
        self.asked.insert(name.into(), value.into());
    }

    /// Records a failed premise, once for each part of the measurement.
    pub fn fail(&mut self, part: Option<String>, premise: Premise) {
        let failed = Failed { part, premise };
        if !self.invalid.contains(&failed) {
            self.invalid.push(failed);
        }
    }

    /// Adds a note, once.
    pub fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Adds a count, or a figure with one sample.
    pub fn figure(&mut self, label: impl Into<Label>, unit: &str, value: f64) {
        self.push(Figure::once(label, unit, value));
    }

    /// Adds a figure with its samples. Does nothing if there are none.
    pub fn samples(&mut self, label: impl Into<Label>, unit: &str, samples: Vec<Sample>) {
        self.push(Figure::sampled(label, unit, samples));
    }

    /// Adds `figure`, unless it has no samples. A value that is not finite (a division by zero
    /// time, for example) makes the result invalid: JSON cannot hold it, and a reader would not
    /// notice that it is missing.
    pub fn push(&mut self, figure: Figure) {
        if figure.values().any(|value| !value.is_finite()) {
            self.fail(None, Premise::NothingToMeasureBy { figure: figure.label.to_string() });
        } else if !figure.samples.is_empty() {
            self.figures.push(figure);
        }
    }

    /// Declares the headline, if that figure was measured.
    pub fn set_headline(&mut self, label: impl Into<Label>) {
        self.headline = Some(label.into()).filter(|label| self.figures.iter().any(|f| f.label == *label));
    }

    /// Finds the figure with that label.
    pub fn find(&self, label: impl Into<Label>) -> Option<&Figure> {
        let label = label.into();
        self.figures.iter().find(|figure| figure.label == label)
    }

    /// Adds KVM's counters from before and after. A counter missing on one side counts as 0 there.
    /// `index` names the VM if the result covers several.
    pub fn counters(
        &mut self,
        index: Option<&str>,
        before: &BTreeMap<String, u64>,
        after: &BTreeMap<String, u64>,
    ) {
        let names: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).collect();
        let value = |of: &BTreeMap<String, u64>, name| of.get(name).copied().unwrap_or(0);
        self.counters.extend(names.into_iter().map(|name| Counter {
            name: name.clone(),
            index: index.map(str::to_owned),
            before: value(before, name),
            after: value(after, name),
        }));
    }
}

impl Counter {
    /// The counter's label.
    pub fn label(&self) -> Label {
        Label { name: self.name.clone(), index: self.index.clone() }
    }

    /// The change from before to after.
    pub fn grown(&self) -> i128 {
        i128::from(self.after) - i128::from(self.before)
    }
}

impl Series {
    /// The series' label.
    pub fn label(&self) -> Label {
        Label { name: self.name.clone(), index: self.index.clone() }
    }
}

impl Histogram {
    /// The distribution's label.
    pub fn label(&self) -> Label {
        Label { name: self.name.clone(), index: self.index.clone() }
    }

    /// The number of samples.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|&(_, n)| n).sum()
    }

    /// The largest sample, or the bound of the last bucket. `None` if there are no samples.
    pub fn max(&self) -> Option<f64> {
        self.max.or(self.buckets.last().map(|&(bound, _)| bound))
    }

    /// The upper bound of the bucket that holds the `q`-quantile (0 < q <= 1), or the largest
    /// sample if that is lower. `None` if there are no samples.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        let target = ((self.count() as f64 * q).ceil() as u64).max(1);
        let mut seen = 0;
        let bound = self.buckets.iter().find_map(|&(bound, n)| {
            seen += n;
            (seen >= target).then_some(bound)
        })?;
        Some(self.max.map_or(bound, |max| bound.min(max)))
    }
}

/// Makes text from a file safe to print. Escapes characters that move the cursor, colour the
/// terminal or change the reading direction.
pub fn printable(text: &str) -> Cow<'_, str> {
    let bad = |c: char| {
        c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
    };
    if !text.contains(bad) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if bad(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_that_is_no_number_makes_the_result_invalid() {
        let mut report = Report::new("t", Facts::collect("off".into()));
        report.figure("rate", "pages/s", f64::NAN);
        report.samples("time", "s", vec![Sample::of_round(0, 1.0), Sample::of_round(1, f64::INFINITY)]);
        report.samples("none", "s", Vec::new());
        assert!(report.figures.is_empty());
        assert_eq!(report.invalid.len(), 2);
    }

    #[test]
    fn what_is_said_twice_is_said_once() {
        let mut report = Report::new("t", Facts::collect("off".into()));
        for _round in 0..2 {
            report.fail(None, Premise::Recycled { pages: 3 });
            report.note("noted".into());
        }
        report.fail(Some("round 2".into()), Premise::Recycled { pages: 3 });
        assert_eq!((report.invalid.len(), report.notes.len()), (2, 1));
    }

    #[test]
    fn nothing_printable_moves_the_cursor() {
        assert_eq!(printable("a\u{1b}[2J\u{202e}b"), "a\\u{1b}[2J\\u{202e}b");
        assert!(matches!(printable("plain é"), Cow::Borrowed(_)));
    }

    fn latencies(max: Option<f64>) -> Histogram {
        let buckets = vec![(10.0, 98), (20.0, 1), (90.0, 1)];
        Histogram { name: "l".into(), index: None, unit: "ns".into(), buckets, max }
    }

    #[test]
    fn quantiles_are_bucket_bounds() {
        let h = latencies(None);
        assert_eq!(h.quantile(0.5), Some(10.0));
        assert_eq!(h.quantile(0.99), Some(20.0));
        assert_eq!(h.quantile(1.0), Some(90.0));
    }

    #[test]
    fn no_quantile_lies_above_the_largest_sample() {
        let h = latencies(Some(86.0));
        assert_eq!((h.quantile(0.999), h.quantile(1.0), h.max()), (Some(86.0), Some(86.0), Some(86.0)));
        assert_eq!(h.quantile(0.5), Some(10.0));
    }
}
