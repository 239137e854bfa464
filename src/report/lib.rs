//! Results: the one type that every run, benchmark and test ends in.
//!
//! A [`Report`] says what was asked, what the host was, and what was measured; `terminal`, JSON (serde) and `html`
//! print the same value, so a pasted result stands alone. What does *not* live here: how a figure is measured
//! (`bench/`, the built-in guests), and how the host is examined ([`vellum_host`]).
//!
//! Start reading here for the type; [`figure`] has its samples and [`premise`] what must have held, [`json`] writes and reads
//! it, [`view`] has the forms in which other programs want its [`case`]s, [`units`] says how a number looks, [`terminal`] and [`html`] print it, and [`compare`] weighs two sets of them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use vellum_host::Facts;

pub mod case;
pub mod compare;
pub mod figure;
pub mod html;
pub mod json;
pub mod output;
mod plot;
pub mod premise;
mod table;
pub mod terminal;
pub mod units;
pub mod view;

pub use case::{Case, Status};
pub use figure::{Figure, Label, Sample};
pub use premise::{Failed, Premise};

/// The version of the JSON form. Raised whenever a reader of the previous version would misread the new one.
///
/// 3: results have cases.
pub const SCHEMA: u32 = 3;

/// The oldest version that is read.
pub const OLDEST: u32 = 2;

/// One result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// [`SCHEMA`] at the time of writing.
    pub schema: u32,
    /// The version of Vellum that wrote it.
    pub vellum: String,
    /// What ran: `run write`, `bench dirty-log`, `test dirty-log`.
    pub name: String,
    /// The command line as typed.
    pub command: Vec<String>,
    /// Every parameter with the value that was used, defaults included.
    pub asked: BTreeMap<String, Value>,
    /// What the host was.
    pub host: Facts,
    /// A moment of the measurement: seconds since 1970 by the host's clock. What was measured in turn is known by it.
    pub at: f64,
    /// What was asked for and not done, where the run was ended early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut_short: Option<String>,
    /// What was asked for by name and was not run because this host lacks something, with what it lacks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_run: Vec<String>,
    /// Why the result must not be trusted: the premises that failed. Empty for a valid result.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub invalid: Vec<Failed>,
    /// What a reader should know but which does not invalidate anything.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The one figure that the measurement was made for: a comparison judges it by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headline: Option<Label>,
    /// What it consists of, each part with how it ended; empty where the whole is one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cases: Vec<Case>,
    /// The figures, in the order in which they should be read.
    pub figures: Vec<Figure>,
    /// KVM's own counters before and after.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub counters: Vec<Counter>,
    /// Figures over time, all on one clock that starts with the measurement.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub series: Vec<Series>,
    /// Spans on the same clock, for instance each collection of a dirty log.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub marks: Vec<Mark>,
    /// Distributions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub histograms: Vec<Histogram>,
}

/// One of KVM's counters, summed over vCPUs where it is theirs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counter {
    /// KVM's name for it (`Documentation/virt/kvm/api.rst`, `KVM_GET_STATS_FD`).
    pub name: String,
    /// Which machine, where the result is of several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<String>,
    /// When the measurement began.
    pub before: u64,
    /// When it ended.
    pub after: u64,
}

/// A figure over time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Series {
    /// What is plotted.
    pub name: String,
    /// Which of several of that name, which share a picture.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<String>,
    /// Its unit.
    pub unit: String,
    /// (seconds since the measurement began, value), in order.
    pub points: Vec<(f64, f64)>,
}

/// A span of time worth seeing in a plot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mark {
    /// What happened.
    pub name: String,
    /// Seconds since the measurement began.
    pub start: f64,
    /// Seconds since the measurement began.
    pub end: f64,
}

/// A distribution as (inclusive upper bound, count) pairs, bounds rising.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Histogram {
    /// What was measured.
    pub name: String,
    /// Which of several of that name, which share a picture.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<String>,
    /// The unit of the bounds.
    pub unit: String,
    /// Only the buckets that hold something.
    pub buckets: Vec<(f64, u64)>,
    /// The largest sample itself, where it is known: the last bucket's bound may lie above it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
}

impl Report {
    /// An empty result for `name` on this host.
    pub fn new(name: impl Into<String>, host: Facts) -> Self {
        // In milliseconds, which every reader of decimal digits reads as they were.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
        Self {
            schema: SCHEMA,
            vellum: env!("CARGO_PKG_VERSION").into(),
            name: name.into(),
            // Bytes that are not UTF-8 are shown as such, since JSON could not hold them.
            command: std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect(),
            asked: BTreeMap::new(),
            host,
            at: now as f64 / 1e3,
            cut_short: None,
            not_run: Vec::new(),
            invalid: Vec::new(),
            notes: Vec::new(),
            headline: None,
            cases: Vec::new(),
            figures: Vec::new(),
            counters: Vec::new(),
            series: Vec::new(),
            marks: Vec::new(),
            histograms: Vec::new(),
        }
    }

    /// Records a parameter with the value that was used.
    pub fn ask(&mut self, name: &str, value: impl Into<Value>) {
        self.asked.insert(name.into(), value.into());
    }

    /// Says that a premise failed, once for each part of the measurement.
    pub fn fail(&mut self, part: Option<String>, premise: Premise) {
        let failed = Failed { part, premise };
        if !self.invalid.contains(&failed) {
            self.invalid.push(failed);
        }
    }

    /// Says what a reader should know, once.
    pub fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Adds a figure measured once, or a count.
    pub fn figure(&mut self, label: impl Into<Label>, unit: &str, value: f64) {
        self.push(Figure::once(label, unit, value));
    }

    /// Adds a figure with its samples; nothing is added where there is none.
    pub fn samples(&mut self, label: impl Into<Label>, unit: &str, samples: Vec<Sample>) {
        self.push(Figure::sampled(label, unit, samples));
    }

    /// Adds `figure`, unless it has no sample. One that is not a number (nothing happened in no time) makes the result
    /// invalid: JSON could not hold it, and a reader would miss it without knowing.
    pub fn push(&mut self, figure: Figure) {
        if figure.values().any(|value| !value.is_finite()) {
            self.fail(None, Premise::NothingToMeasureBy { figure: figure.label.to_string() });
        } else if !figure.samples.is_empty() {
            self.figures.push(figure);
        }
    }

    /// Declares the figure that the measurement was made for, if it was measured.
    pub fn set_headline(&mut self, label: impl Into<Label>) {
        self.headline = Some(label.into()).filter(|label| self.figures.iter().any(|f| f.label == *label));
    }

    /// The figure of that label.
    pub fn find(&self, label: impl Into<Label>) -> Option<&Figure> {
        let label = label.into();
        self.figures.iter().find(|figure| figure.label == label)
    }

    /// Adds KVM's counters as they were before and after, and one that only one of the two has as 0 in the other; `index`
    /// is the machine, where the result is of several.
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
    /// What it is called.
    pub fn label(&self) -> Label {
        Label { name: self.name.clone(), index: self.index.clone() }
    }

    /// By how much it has grown.
    pub fn grown(&self) -> i128 {
        i128::from(self.after) - i128::from(self.before)
    }
}

impl Series {
    /// What it is called.
    pub fn label(&self) -> Label {
        Label { name: self.name.clone(), index: self.index.clone() }
    }
}

impl Histogram {
    /// What it is called.
    pub fn label(&self) -> Label {
        Label { name: self.name.clone(), index: self.index.clone() }
    }

    /// How many samples it holds.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|&(_, n)| n).sum()
    }

    /// The largest sample, or the bound of the bucket that holds it; `None` where there is none.
    pub fn max(&self) -> Option<f64> {
        self.max.or(self.buckets.last().map(|&(bound, _)| bound))
    }

    /// The upper bound of the bucket that holds the `q`-quantile (0 < q <= 1), or the largest sample where that is less;
    /// `None` where it is empty.
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

/// Text from a file as it may be shown: what could move the cursor, colour the terminal or turn the reading direction
/// is escaped.
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
