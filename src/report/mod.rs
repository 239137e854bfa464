//! Results: the one type that every run, benchmark and test ends in.
//!
//! A [`Report`] says what was asked, what the host was, and what was measured; `terminal`, JSON (serde) and `html`
//! print the same value, so a pasted result stands alone. What does *not* live here: how a figure is measured
//! (`bench/`, `guests/`), and how the host is examined ([`crate::host`]).
//!
//! Start reading here for the type; [`json`] writes and reads it, [`units`] says how a number looks, [`terminal`] and
//! [`html`] print it, and [`compare`] weighs two of them.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::host::Facts;

pub mod compare;
pub mod html;
pub mod json;
mod plot;
mod stats;
pub mod terminal;
pub mod units;

/// The version of the JSON form. Raised whenever a reader of the previous version would misread the new one.
pub const SCHEMA: u32 = 1;

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
    /// Why the result must not be trusted: each entry is a premise that failed. Empty for a valid result.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub invalid: Vec<String>,
    /// What a reader should know but which does not invalidate anything.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
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

/// One figure: a single value, or the spread of several samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, try_from = "AnyFigure")]
pub enum Figure {
    /// Measured over several samples.
    Spread {
        /// Lower-case words joined by `_`; several of a kind end in `[index]`, as in `pages_per_second[vcpu0]`.
        name: String,
        /// The unit as printed: `s`, `ns`, `pages/s`, `pages`, `bytes`, `exits`, `instructions`.
        unit: String,
        /// The middle sample (the mean of the middle two for an even count).
        median: f64,
        /// The smallest sample.
        min: f64,
        /// The largest sample.
        max: f64,
        /// How many samples.
        count: u64,
        /// The samples in the order of measurement, so that two results can be compared in pairs.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        samples: Vec<f64>,
    },
    /// Measured once, or a count.
    Single {
        /// As above.
        name: String,
        /// As above.
        unit: String,
        /// The value.
        value: f64,
    },
}

/// A figure as it may stand in a file: so that an error names the field that is wrong, which an untagged enum cannot.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AnyFigure {
    name: String,
    unit: String,
    value: Option<f64>,
    median: Option<f64>,
    min: Option<f64>,
    max: Option<f64>,
    count: Option<u64>,
    #[serde(default)]
    samples: Vec<f64>,
}

impl TryFrom<AnyFigure> for Figure {
    type Error = String;

    fn try_from(any: AnyFigure) -> Result<Self, String> {
        let AnyFigure { name, unit, value, median, min, max, count, samples } = any;
        match (value, median, min, max, count) {
            (Some(value), None, None, None, None) if samples.is_empty() => {
                Ok(Self::Single { name, unit, value })
            }
            (None, Some(median), Some(min), Some(max), Some(count)) => {
                Ok(Self::Spread { name, unit, median, min, max, count, samples })
            }
            _ => Err(format!("figure `{name}` has neither a value alone nor median, min, max and count")),
        }
    }
}

/// One of KVM's counters, summed over vCPUs where it is theirs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counter {
    /// KVM's name for it (`Documentation/virt/kvm/api.rst`, `KVM_GET_STATS_FD`).
    pub name: String,
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
    /// The unit of the bounds.
    pub unit: String,
    /// Only the buckets that hold something.
    pub buckets: Vec<(f64, u64)>,
}

impl Report {
    /// An empty result for `name` on this host.
    pub fn new(name: impl Into<String>, host: Facts) -> Self {
        Self {
            schema: SCHEMA,
            vellum: env!("CARGO_PKG_VERSION").into(),
            name: name.into(),
            command: std::env::args().collect(),
            asked: BTreeMap::new(),
            host,
            invalid: Vec::new(),
            notes: Vec::new(),
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

    /// Adds a figure measured once. One that is not a number (nothing happened in no time) makes the result invalid:
    /// JSON could not hold it, and a reader would miss it without knowing.
    pub fn figure(&mut self, name: impl Into<String>, unit: &str, value: f64) {
        let name = name.into();
        if value.is_finite() {
            self.figures.push(Figure::Single { name, unit: unit.into(), value });
        } else {
            self.invalid.push(format!("{name} could not be computed: there was nothing to measure it by"));
        }
    }

    /// Adds a figure with its spread; nothing is added where there is no sample. As for [`figure`](Self::figure), a
    /// sample that is not a number makes the result invalid.
    pub fn spread(&mut self, name: impl Into<String>, unit: &str, samples: &[f64]) {
        let name = name.into();
        if samples.iter().any(|s| !s.is_finite()) {
            self.invalid.push(format!("{name} could not be computed: there was nothing to measure it by"));
        } else if let Some(figure) = Figure::from_samples(name, unit, samples) {
            self.figures.push(figure);
        }
    }

    /// Adds KVM's counters as they were before and after, and one that only one of the two has as 0 in the other.
    pub fn counters(&mut self, before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) {
        let names: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).collect();
        let value = |of: &BTreeMap<String, u64>, name| of.get(name).copied().unwrap_or(0);
        self.counters.extend(names.into_iter().map(|name| Counter {
            name: name.clone(),
            before: value(before, name),
            after: value(after, name),
        }));
    }

    /// Whether the host's time is one that may be compared with `other`'s: both real, or both emulated.
    pub fn same_time(&self, other: &Self) -> bool {
        self.host.emulated == other.host.emulated
    }
}

impl Figure {
    /// The spread of `samples`; `None` where there is none.
    pub fn from_samples(name: impl Into<String>, unit: &str, samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        Some(Self::Spread {
            name: name.into(),
            unit: unit.into(),
            median,
            min,
            max,
            count: samples.len() as u64,
            samples: samples.to_vec(),
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Self::Spread { name, .. } | Self::Single { name, .. } => name,
        }
    }

    /// Its unit.
    pub fn unit(&self) -> &str {
        match self {
            Self::Spread { unit, .. } | Self::Single { unit, .. } => unit,
        }
    }

    /// Its name without, and the index with which it belongs to others of its kind: `pages[vcpu0]` is
    /// `("pages", Some("vcpu0"))`.
    pub fn split_name(&self) -> (&str, Option<&str>) {
        let name = self.name();
        match name.strip_suffix(']').and_then(|n| n.split_once('[')) {
            Some((base, index)) => (base, Some(index)),
            None => (name, None),
        }
    }

    /// The samples in the order of measurement; of a single value, or where they were not kept, the one that stands
    /// for them.
    pub fn samples(&self) -> Cow<'_, [f64]> {
        match self {
            Self::Spread { samples, .. } if !samples.is_empty() => Cow::Borrowed(samples),
            Self::Spread { median: value, .. } | Self::Single { value, .. } => Cow::Owned(vec![*value]),
        }
    }

    /// The value, or the median of the samples.
    pub fn value(&self) -> f64 {
        match self {
            Self::Spread { median, .. } => *median,
            Self::Single { value, .. } => *value,
        }
    }
}

impl Histogram {
    /// How many samples it holds.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|&(_, n)| n).sum()
    }

    /// The upper bound of the bucket that holds the `q`-quantile (0 < q <= 1); `None` where it is empty.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        let target = ((self.count() as f64 * q).ceil() as u64).max(1);
        let mut seen = 0;
        self.buckets.iter().find_map(|&(bound, n)| {
            seen += n;
            (seen >= target).then_some(bound)
        })
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
        report.spread("time", "s", &[1.0, f64::INFINITY]);
        assert!(report.figures.is_empty());
        assert_eq!(report.invalid.len(), 2);
    }

    #[test]
    fn names_split_at_their_index() {
        let figure = |name: &str| Figure::Single { name: name.into(), unit: "s".into(), value: 0.0 };
        assert_eq!(figure("a[vcpu0]").split_name(), ("a", Some("vcpu0")));
        assert_eq!(figure("a").split_name(), ("a", None));
        assert_eq!(figure("]").split_name(), ("]", None));
    }

    #[test]
    fn nothing_printable_moves_the_cursor() {
        assert_eq!(printable("a\u{1b}[2J\u{202e}b"), "a\\u{1b}[2J\\u{202e}b");
        assert!(matches!(printable("plain é"), Cow::Borrowed(_)));
    }

    #[test]
    fn spread_keeps_order_and_finds_the_median() {
        let figure = Figure::from_samples("t", "s", &[3.0, 1.0, 2.0, 10.0]).unwrap();
        let Figure::Spread { median, min, max, count, samples, .. } = figure else { panic!("not a spread") };
        assert_eq!((median, min, max, count), (2.5, 1.0, 10.0, 4));
        assert_eq!(samples, [3.0, 1.0, 2.0, 10.0]);
        assert!(Figure::from_samples("t", "s", &[]).is_none());
    }

    #[test]
    fn quantiles_are_bucket_bounds() {
        let h = Histogram {
            name: "l".into(),
            unit: "ns".into(),
            buckets: vec![(10.0, 98), (20.0, 1), (90.0, 1)],
        };
        assert_eq!(h.quantile(0.5), Some(10.0));
        assert_eq!(h.quantile(0.99), Some(20.0));
        assert_eq!(h.quantile(1.0), Some(90.0));
    }
}
