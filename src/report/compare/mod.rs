//! Compares two sides of a measurement, for `vellum report compare` and for the lab: by what factor
//! each figure changed, and whether that is more than noise.
//!
//! *Noise* means that no difference was shown. What can be shown depends on what was repeated. A
//! [`Replicate`] is one value of a side, independent of the side's other values with respect to the
//! change in question. Passes and vCPUs of one VM are not independent and count as one. Replicates
//! are compared in pairs only if they were measured as pairs. [`Policy`] sets the minimum number of
//! replicates and how well a bed can repeat.
//!
//! The headline is one figure, declared in advance and tested at 95 %. All other figures are tested
//! at 95 % together (Holm), because two of forty figures differ at that level by chance.
//!
//! Start at [`weigh`]. [`results`] makes replicates from two sets of results, `stats` has the
//! arithmetic, `text` and [`super::html`] the output.

mod repeated;
pub mod results;
mod stats;
pub(super) mod text;

use serde::{Deserialize, Serialize};
pub use stats::mean_interval;

use self::stats::{Estimate, Known, holm, paired, unpaired};
use super::figure::{Label, median};

pub use results::{Comparison, Error, Question, Side, compare};
pub use text::Tables;

/// The probability of claiming a difference that does not exist.
const ALPHA: f64 = 0.05;

/// The rules of a comparison for a kind of bed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// The minimum number of boots per side to claim a difference between boots.
    pub boots: usize,
    /// The minimum number of processes or VMs per side within a boot.
    pub runs: usize,
    /// The smallest relative standard deviation assumed for a replicate.
    pub repeatability: f64,
}

impl Policy {
    /// For emulated hosts, whose clock counts instructions. Two runs differ by a thousandth at most
    /// if scheduling is the same. Two boots per side would do for the headline, which then has to
    /// move by 1.3 %. But with twenty figures tested at 95 % together, the first would have to move
    /// by a quarter. With three boots it is 1.6 %.
    pub const EMULATED: Self = Self { boots: 3, runs: 3, repeatability: 0.001 };

    /// For real time. Page placement, huge pages and caches vary with each boot. With two boots per
    /// side Student's interval is 12.7 standard errors to each side, with five it is 2.8.
    pub const REAL: Self = Self { boots: 5, runs: 3, repeatability: 0.0 };

    /// The policy for a kind of bed.
    pub fn of(emulated: bool) -> Self {
        if emulated { Self::EMULATED } else { Self::REAL }
    }
}

/// The unit of repetition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Boots of the host. The sides have none in common, so anything that varies between boots may
    /// be the difference.
    Boot,
    /// Processes: one result each.
    Process,
    /// VMs of one process.
    Machine,
}

impl std::fmt::Display for Unit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Boot => "boots",
            Self::Process => "processes",
            Self::Machine => "machines",
        })
    }
}

/// One independent value of a side.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Replicate {
    /// The value in the figure's unit.
    pub value: f64,
    /// The pair's number. The replicate of the other side with the same number was measured with
    /// this one.
    pub pair: Option<u32>,
}

/// One figure on both sides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// The figure's label.
    pub label: Label,
    /// The figure's unit.
    pub unit: String,
    /// The share by which a value may be too large.
    pub resolution: f64,
    /// The replicates of side A (before).
    pub a: Vec<Replicate>,
    /// The replicates of side B (after).
    pub b: Vec<Replicate>,
}

/// A compared figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Weighed {
    /// The figure with the replicates of both sides.
    #[serde(flatten)]
    pub of: Compared,
    /// B/A: the geometric mean of the pairs' ratios, or the ratio of the geometric means. `None` if
    /// a value is not positive.
    pub ratio: Option<f64>,
    /// The interval of the ratio, at this figure's level.
    pub interval: Option<(f64, f64)>,
    /// The verdict.
    pub verdict: FigureVerdict,
    /// Whether this is the headline.
    pub headline: bool,
}

/// The verdict on a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FigureVerdict {
    /// All values of both sides are the same.
    Equal,
    /// No difference was shown.
    Noise,
    /// The difference is more than noise.
    Differs,
    /// There are too few replicates to tell.
    TooFew,
    /// A value is not positive, so there is no ratio.
    NoRatio,
}

/// The direction of a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// More time, or less work a second.
    Slower,
    /// Less time, or more work a second.
    Faster,
    /// Larger, of something that is neither a time nor a rate.
    Higher,
    /// Smaller.
    Lower,
}

/// Whether a unit is of time. Instructions are the time of emulated hosts.
fn is_time(unit: &str) -> bool {
    matches!(unit, "s" | "ms" | "us" | "µs" | "ns" | "instructions")
}

impl Compared {
    /// The replicates as pairs, if every replicate of both sides is in one.
    fn pairs(&self) -> Option<Vec<(f64, f64)>> {
        let partner = |a: &Replicate| self.b.iter().find(|b| a.pair.is_some() && b.pair == a.pair);
        let pairs: Option<Vec<_>> = self.a.iter().map(|a| Some((a.value, partner(a)?.value))).collect();
        pairs.filter(|pairs| pairs.len() == self.b.len())
    }

    /// The number of replicates of the smaller side.
    fn least(&self) -> usize {
        self.a.len().min(self.b.len())
    }

    fn estimate(&self, policy: Policy) -> Option<Estimate> {
        let known = Known { repeatability: policy.repeatability, resolution: self.resolution };
        match self.pairs() {
            Some(pairs) => paired(&pairs, known),
            None => {
                let values = |side: &[Replicate]| side.iter().map(|r| r.value).collect::<Vec<_>>();
                unpaired(&values(&self.a), &values(&self.b), known)
            }
        }
    }

    /// Whether all values are the same.
    fn is_equal(&self) -> bool {
        let mut values = self.a.iter().chain(&self.b).map(|r| r.value);
        let first = values.next();
        values.all(|value| Some(value) == first)
    }
}

impl Weighed {
    /// The direction of the difference. `None` if none was shown.
    pub(crate) fn change(&self) -> Option<Change> {
        let grown = self.ratio.filter(|_| self.verdict == FigureVerdict::Differs)? > 1.0;
        Some(match (is_time(&self.of.unit), self.of.unit.ends_with("/s"), grown) {
            (true, _, true) | (_, true, false) => Change::Slower,
            (true, _, false) | (_, true, true) => Change::Faster,
            (_, _, true) => Change::Higher,
            (_, _, false) => Change::Lower,
        })
    }

    /// By how many percent the same work takes longer. `None` unless it was shown to.
    fn slower_by(&self) -> Option<f64> {
        let ratio = self.ratio.filter(|_| self.change() == Some(Change::Slower))?;
        let longer = if is_time(&self.of.unit) { ratio } else { 1.0 / ratio };
        Some((longer - 1.0) * 100.0)
    }

    /// Whether the figure was compared in pairs.
    pub fn is_paired(&self) -> bool {
        self.of.pairs().is_some()
    }

    /// The middle of each side: geometric means if there is a ratio, otherwise medians.
    pub(crate) fn middles(&self) -> (f64, f64) {
        let middle = |side: &[Replicate]| match self.ratio {
            Some(_) => (side.iter().map(|r| r.value.ln()).sum::<f64>() / side.len() as f64).exp(),
            None => median(side.iter().map(|r| r.value)).unwrap_or_default(),
        };
        (middle(&self.of.a), middle(&self.of.b))
    }
}

/// Compares `figures`. `headline` is tested on its own. A difference needs at least `least`
/// replicates per side.
pub fn weigh(figures: Vec<Compared>, headline: Option<&Label>, least: usize, policy: Policy) -> Vec<Weighed> {
    // The first with that label, if several benchmarks have one.
    let headline = headline.and_then(|label| figures.iter().position(|figure| figure.label == *label));
    let estimates: Vec<Option<Estimate>> = figures.iter().map(|figure| figure.estimate(policy)).collect();
    let tested = |i: &usize| figures[*i].least() >= least && !figures[*i].is_equal();
    let ps: Vec<(usize, f64)> = (0..figures.len())
        .filter(|i| tested(i) && Some(*i) != headline)
        .filter_map(|i| Some((i, estimates[i].as_ref()?.p()?)))
        .collect();
    let mut levels = vec![ALPHA; figures.len()];
    let together = holm(&ps.iter().map(|(_, p)| *p).collect::<Vec<_>>(), ALPHA);
    ps.iter().zip(together).for_each(|((i, _), level)| levels[*i] = level);
    let weighed = |(i, of): (usize, Compared)| {
        let estimate = estimates[i].as_ref();
        let enough = of.least() >= least;
        let interval = estimate.filter(|_| enough).and_then(|estimate| estimate.interval(levels[i]));
        let verdict = match estimate {
            _ if of.is_equal() => FigureVerdict::Equal,
            None => FigureVerdict::NoRatio,
            Some(_) if !enough => FigureVerdict::TooFew,
            Some(estimate) => match estimate.p() {
                Some(p) if p <= levels[i] => FigureVerdict::Differs,
                Some(p) if interval.is_some() || p == 1.0 => FigureVerdict::Noise,
                _ => FigureVerdict::TooFew,
            },
        };
        Weighed { ratio: estimate.map(Estimate::ratio), interval, verdict, headline: Some(i) == headline, of }
    };
    figures.into_iter().enumerate().map(weighed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn figure(name: &str, a: &[f64], b: &[f64], pairs: bool) -> Compared {
        let side = |values: &[f64]| {
            let one = |(i, &value): (u32, &f64)| Replicate { value, pair: pairs.then_some(i) };
            (0..).zip(values).map(one).collect()
        };
        Compared { label: name.into(), unit: "s".into(), resolution: 0.0, a: side(a), b: side(b) }
    }

    fn verdicts(figures: Vec<Compared>, headline: &str) -> Vec<FigureVerdict> {
        weigh(figures, Some(&headline.into()), 3, Policy::REAL).iter().map(|row| row.verdict).collect()
    }

    #[test]
    fn only_what_was_measured_in_pairs_is_paired() {
        let (a, b) = ([1.0, 10.0, 100.0], [1.1, 11.2, 109.0]);
        let rows = vec![figure("p", &a, &b, true), figure("u", &a, &b, false)];
        assert_eq!(verdicts(rows, "p"), [FigureVerdict::Differs, FigureVerdict::Noise]);
        let mut half = figure("p", &a, &b, true);
        half.b[2].pair = Some(77);
        assert!(half.pairs().is_none());
    }

    #[test]
    fn the_headline_is_judged_alone_and_the_rest_together() {
        let moved = |name: &str| figure(name, &[1.0, 1.0, 1.0, 1.0], &[1.05, 1.02, 1.06, 1.02], true);
        let rows = (0..40).map(|i| moved(&format!("f{i}"))).collect();
        let found = verdicts(rows, "f7");
        assert_eq!(found[7], FigureVerdict::Differs);
        assert!(found.iter().enumerate().all(|(i, v)| i == 7 || *v == FigureVerdict::Noise), "{found:?}");
        assert_eq!(
            verdicts(vec![moved("a"), figure("b", &[1.0; 4], &[1.0; 4], true)], "x")[0],
            FigureVerdict::Differs
        );
    }

    #[test]
    fn two_replicates_on_real_time_claim_nothing() {
        let two = figure("t", &[1.0, 1.001], &[0.5, 0.5], true);
        assert_eq!(verdicts(vec![two.clone()], "t"), [FigureVerdict::TooFew]);
        let row = &weigh(vec![two.clone()], None, 2, Policy::REAL)[0];
        assert_eq!(row.verdict, FigureVerdict::Differs);
        let equal = figure("t", &[1.0, 1.0], &[0.5, 0.5], true);
        let row = &weigh(vec![equal.clone()], None, 2, Policy::REAL)[0];
        assert_eq!((row.verdict, row.interval), (FigureVerdict::TooFew, None));
        let row = &weigh(vec![equal], None, 2, Policy::EMULATED)[0];
        assert_eq!(row.verdict, FigureVerdict::Differs);
        assert!(row.interval.is_some_and(|(low, high)| low < 0.5 && high > 0.5));
    }

    #[test]
    fn what_is_shown_is_what_the_ratio_is_of() {
        let row =
            &weigh(vec![figure("t", &[1.0, 4.0, 2.0], &[2.0, 8.0, 4.0], false)], None, 3, Policy::REAL)[0];
        let (a, b) = row.middles();
        assert!((b / a - row.ratio.unwrap()).abs() < 1e-12 && (a - 2.0).abs() < 1e-12);
        let zero = &weigh(vec![figure("z", &[0.0, 1.0], &[3.0, 5.0], false)], None, 2, Policy::REAL)[0];
        assert_eq!((zero.verdict, zero.middles()), (FigureVerdict::NoRatio, (0.5, 4.0)));
    }
}
