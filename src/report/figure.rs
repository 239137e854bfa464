//! Figures and their samples.
//!
//! A sample records its VM, round and vCPU, and its result records the boot. [`super::compare`]
//! reads from these whether samples are independent and whether they form pairs.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::units::{Scale, grouped};

/// The name of a figure, counter, series or histogram. Labels with one name and different indices
/// belong together: one for each vCPU, pass or phase.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Label {
    /// Lower-case words joined by `_`.
    pub name: String,
    /// For example `vcpu0`, `before` or `3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<String>,
}

impl Label {
    /// A label with an index.
    pub fn of(name: impl Into<String>, index: impl fmt::Display) -> Self {
        Self { name: name.into(), index: Some(index.to_string()) }
    }
}

impl From<&str> for Label {
    fn from(name: &str) -> Self {
        name.to_owned().into()
    }
}

impl From<String> for Label {
    fn from(name: String) -> Self {
        Self { name, index: None }
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.index {
            Some(index) => write!(f, "{}[{index}]", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// One value and where it was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// The value in the figure's unit.
    pub value: f64,
    /// The number of the VM.
    #[serde(default)]
    pub machine: u32,
    /// The round, from 0. If each round has a VM of its own, `machine` equals it.
    #[serde(default)]
    pub round: u32,
    /// The vCPU, if the sample covers only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpu: Option<u32>,
}

impl Sample {
    /// A value of a round that has a machine of its own.
    pub fn of_round(round: u32, value: f64) -> Self {
        Self { value, machine: round, round, vcpu: None }
    }
}

/// A figure. It has at least one sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct Figure {
    /// The figure's label.
    pub label: Label,
    /// The unit as printed: `s`, `ns`, `pages/s`, `pages`, `bytes`, `exits`, `instructions`.
    pub unit: String,
    /// How much too large a value may be, as a share of the value. A histogram bucket's bound
    /// stands for all values in the bucket. 0 if the value is exact.
    pub resolution: f64,
    /// The samples in the order of measurement.
    pub samples: Vec<Sample>,
}

impl Figure {
    /// A count, or a figure with one sample.
    pub fn once(label: impl Into<Label>, unit: &str, value: f64) -> Self {
        Self::sampled(label, unit, vec![Sample { value, ..Sample::default() }])
    }

    /// A figure with at least one sample.
    pub fn sampled(label: impl Into<Label>, unit: &str, samples: Vec<Sample>) -> Self {
        Self { label: label.into(), unit: unit.into(), resolution: 0.0, samples }
    }

    /// Sets by what share a value may be too large.
    #[must_use]
    pub fn resolved_to(self, resolution: f64) -> Self {
        Self { resolution, ..self }
    }

    /// The samples' values.
    pub fn values(&self) -> impl Iterator<Item = f64> {
        self.samples.iter().map(|sample| sample.value)
    }

    /// The median of the samples.
    pub fn value(&self) -> f64 {
        median(self.values()).unwrap_or_default()
    }

    /// The smallest sample.
    pub fn min(&self) -> f64 {
        self.values().fold(f64::INFINITY, f64::min)
    }

    /// The largest sample.
    pub fn max(&self) -> f64 {
        self.values().fold(f64::NEG_INFINITY, f64::max)
    }

    /// The value with its unit, and the range of the samples: `19.3 M pages/s (19.0 to 19.7, n=2)`.
    pub fn told(&self) -> String {
        let scale = Scale::of(&self.unit, self.value());
        let value = scale.with_unit(self.value());
        match self.samples.len() {
            0 | 1 => value,
            n => {
                let (min, max) = (scale.number(self.min()), scale.number(self.max()));
                format!("{value} ({min} to {max}, n={})", grouped(n as i128))
            }
        }
    }

    /// (largest - smallest) / median. `None` for a single sample or a median of 0.
    pub fn spread(&self) -> Option<f64> {
        let median = self.value();
        (self.samples.len() > 1 && median != 0.0).then(|| (self.max() - self.min()) / median.abs())
    }
}

/// The middle value, or the mean of the middle two. `None` if there are no values.
pub fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let &upper = sorted.get(middle)?;
    Some(if sorted.len() % 2 == 1 { upper } else { (sorted[middle - 1] + upper) / 2.0 })
}

/// The JSON form of a figure: a single value, or the samples with median, minimum and maximum for
/// readers that do no arithmetic.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    index: Option<String>,
    unit: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    resolution: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    median: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    min: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max: Option<f64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    samples: Vec<Sample>,
}

impl From<Figure> for Written {
    fn from(figure: Figure) -> Self {
        let alone = match figure.samples[..] {
            [sample] if sample == (Sample { value: sample.value, ..Sample::default() }) => Some(sample.value),
            _ => None,
        };
        let spread = |value: f64| alone.is_none().then_some(value);
        Self {
            resolution: (figure.resolution != 0.0).then_some(figure.resolution),
            value: alone,
            median: spread(figure.value()),
            min: spread(figure.min()),
            max: spread(figure.max()),
            name: figure.label.name,
            index: figure.label.index,
            unit: figure.unit,
            samples: if alone.is_some() { Vec::new() } else { figure.samples },
        }
    }
}

impl TryFrom<Written> for Figure {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        let Written { name, index, unit, resolution, value, median, min, max, samples } = written;
        let label = Label { name, index };
        let resolution = resolution.unwrap_or(0.0);
        let figure = match (value, median.zip(min).zip(max)) {
            (Some(value), None) if samples.is_empty() && median.or(min).or(max).is_none() => {
                Self::once(label, &unit, value)
            }
            (None, Some(_)) if !samples.is_empty() => Self::sampled(label, &unit, samples),
            _ => {
                return Err(format!(
                    "figure `{label}` has neither a value alone nor median, min, max and samples"
                ));
            }
        };
        // Parsing a decimal may change the last bit of each value.
        let near = |written: Option<f64>, found: f64| {
            written.is_none_or(|written| (written - found).abs() <= 1e-9 * written.abs().max(found.abs()))
        };
        match near(median, figure.value()) && near(min, figure.min()) && near(max, figure.max()) {
            true => Ok(figure.resolved_to(resolution)),
            false => Err(format!(
                "figure `{}`: its median, min and max are not those of its samples",
                figure.label
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_rounds(values: &[f64]) -> Figure {
        let samples = (0..).zip(values).map(|(round, &value)| Sample::of_round(round, value));
        Figure::sampled("t", "s", samples.collect())
    }

    #[test]
    fn samples_keep_their_order_and_have_a_median() {
        let figure = of_rounds(&[3.0, 1.0, 2.0, 10.0]);
        assert_eq!((figure.value(), figure.min(), figure.max()), (2.5, 1.0, 10.0));
        assert_eq!(figure.values().collect::<Vec<_>>(), [3.0, 1.0, 2.0, 10.0]);
        assert_eq!(figure.spread(), Some(9.0 / 2.5));
        assert_eq!(median(std::iter::empty()), None);
    }

    #[test]
    fn what_is_written_can_be_read() {
        let value = |text: &str| serde_json::from_str::<Figure>(text).map_err(|e| e.to_string());
        for figure in [
            Figure::once("a", "s", 1.5),
            Figure::once(Label::of("a", "vcpu0"), "ns", 16.0).resolved_to(0.0625),
            of_rounds(&[1.0, 2.0]),
            of_rounds(&[7.0]),
            Figure::sampled("b", "s", vec![Sample { value: 1.0, vcpu: Some(3), ..Sample::default() }]),
        ] {
            assert_eq!(value(&serde_json::to_string(&figure).unwrap()), Ok(figure));
        }
        let alone = serde_json::to_string(&Figure::once("a", "s", 1.5)).unwrap();
        assert_eq!(alone, r#"{"name":"a","unit":"s","value":1.5}"#);
        let refused = |text: &str, why: &str| {
            let error = value(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        };
        refused(r#"{"name":"a","unit":"s"}"#, "neither a value");
        refused(r#"{"name":"a","unit":"s","value":1,"median":1}"#, "neither a value");
        refused(r#"{"name":"a","unit":"s","median":1,"min":1,"max":1}"#, "neither a value");
        refused(
            r#"{"name":"a","unit":"s","median":2,"min":1,"max":1,"samples":[{"value":1}]}"#,
            "not those of its samples",
        );
    }
}
