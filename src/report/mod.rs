//! Results: the one type that every run, benchmark and test ends in.
//!
//! A [`Report`] says what was asked, what the host was, and what was measured; `terminal`, JSON (serde) and `html`
//! print the same value, so a pasted result stands alone. What does *not* live here: how a figure is measured
//! (`bench/`, `workload/`), and how the host is examined ([`crate::host`]).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::host::Facts;

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
#[serde(untagged)]
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

    /// Adds a figure measured once.
    pub fn figure(&mut self, name: impl Into<String>, unit: &str, value: f64) {
        self.figures.push(Figure::Single { name: name.into(), unit: unit.into(), value });
    }

    /// Adds a figure with its spread; nothing is added where there is no sample.
    pub fn spread(&mut self, name: impl Into<String>, unit: &str, samples: &[f64]) {
        if let Some(figure) = Figure::from_samples(name, unit, samples) {
            self.figures.push(figure);
        }
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

#[cfg(test)]
mod tests {
    use super::*;

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
