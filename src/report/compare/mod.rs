//! Two sides of a measurement weighed against each other, for `vellum report compare` and for the laboratory alike: by what factor
//! each figure moved, and whether that is more than noise.
//!
//! *Noise* has one meaning: that no difference was shown. What may be shown depends on what was repeated. A [`Replicate`]
//! is one value of a side that is independent of its others as far as the change goes that is looked for; passes and vCPUs
//! of one machine are not, and come as one. Replicates are compared in pairs only where they were measured as pairs. How many
//! there must be, and how well a bed repeats at best, is its [`Policy`].
//!
//! One figure, the headline, was declared before: it is held to 95 %. All others are held to it together (Holm), because of forty
//! figures two differ so by chance.
//!
//! Start reading at [`weigh`]. [`results`] makes replicates of two sets of results, `stats` has the arithmetic, `text` and
//! [`super::html`] the faces.

mod repeated;
pub mod results;
mod stats;
pub(super) mod text;

use serde::{Deserialize, Serialize};
pub use stats::mean_interval;

use self::stats::{Estimate, Known, holm, paired, unpaired};
use super::figure::{Label, median};

pub use results::{Comparison, Error, Question, Side, compare};
pub use text::{method, table};

/// How often a difference may be claimed where there is none.
const ALPHA: f64 = 0.05;

/// What comparisons rest on, bed by bed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// Boots of each side below which nothing is claimed of what differs between boots.
    pub boots: usize,
    /// The same of processes and machines of one boot.
    pub runs: usize,
    /// The least relative standard deviation that a replicate is believed to have.
    pub repeatability: f64,
}

impl Policy {
    /// Where time is counted in instructions: what runs twice differs by a thousandth at most where nothing is scheduled
    /// otherwise. Two boots of each side would do for the headline, which then has to move by 1.3 %; but of twenty figures
    /// that are held to 95 % together the first would have to move by a quarter. With three it is 1.6 %.
    pub const EMULATED: Self = Self { boots: 3, runs: 3, repeatability: 0.001 };

    /// Where time is real. Physical pages, huge ones and caches fall otherwise with every boot: with two boots of each side
    /// Student's interval is 12.7 standard errors wide on either side, with five 2.8.
    pub const REAL: Self = Self { boots: 5, runs: 3, repeatability: 0.0 };

    /// That of a bed.
    pub fn of(emulated: bool) -> Self {
        if emulated { Self::EMULATED } else { Self::REAL }
    }
}

/// What was repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Boots of the host: the sides have none in common, so that whatever differs between boots may be the difference.
    Boot,
    /// Processes, which is results.
    Process,
    /// Machines of one process.
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

/// One value of a side.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Replicate {
    /// In the unit of its figure.
    pub value: f64,
    /// That of the other side with the same number was measured with it, as a pair.
    pub pair: Option<u32>,
}

/// One figure on both sides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// Its name.
    pub label: Label,
    /// Its unit.
    pub unit: String,
    /// By what share of itself a value may be too large.
    pub resolution: f64,
    /// Before.
    pub a: Vec<Replicate>,
    /// After.
    pub b: Vec<Replicate>,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Weighed {
    /// What was compared.
    #[serde(flatten)]
    pub of: Compared,
    /// B/A: the geometric mean of the pairs' ratios, or the ratio of the sides' geometric means. `None` where a value is not
    /// above zero.
    pub ratio: Option<f64>,
    /// Where the ratio lies, at the level that this figure is held to.
    pub interval: Option<(f64, f64)>,
    /// What may be said.
    pub verdict: FigureVerdict,
    /// Whether it is the figure that the comparison was made for.
    pub headline: bool,
}

/// What may be said of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FigureVerdict {
    /// Every value of both sides is the same.
    Equal,
    /// No difference was shown.
    Noise,
    /// The difference is more than noise.
    Differs,
    /// There are too few replicates to say.
    TooFew,
    /// A value that is not above zero has no ratio.
    NoRatio,
}

impl Compared {
    /// The replicates as pairs, where every one of both sides is in one.
    fn pairs(&self) -> Option<Vec<(f64, f64)>> {
        let partner = |a: &Replicate| self.b.iter().find(|b| a.pair.is_some() && b.pair == a.pair);
        let pairs: Option<Vec<_>> = self.a.iter().map(|a| Some((a.value, partner(a)?.value))).collect();
        pairs.filter(|pairs| pairs.len() == self.b.len())
    }

    /// How many replicates the smaller side has.
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

    /// Whether there is but one value.
    fn is_equal(&self) -> bool {
        let mut values = self.a.iter().chain(&self.b).map(|r| r.value);
        let first = values.next();
        values.all(|value| Some(value) == first)
    }
}

impl Weighed {
    /// Whether it was weighed in pairs.
    pub fn is_paired(&self) -> bool {
        self.of.pairs().is_some()
    }

    /// The middle of each side: geometric means, whose ratio is the ratio; medians where there is none.
    pub fn middles(&self) -> (f64, f64) {
        let middle = |side: &[Replicate]| match self.ratio {
            Some(_) => (side.iter().map(|r| r.value.ln()).sum::<f64>() / side.len() as f64).exp(),
            None => median(side.iter().map(|r| r.value)).unwrap_or_default(),
        };
        (middle(&self.of.a), middle(&self.of.b))
    }
}

/// Weighs `figures`, one of which may be the headline, of which there are `least` replicates at least where a
/// difference is claimed.
pub fn weigh(figures: Vec<Compared>, headline: Option<&Label>, least: usize, policy: Policy) -> Vec<Weighed> {
    // The first of that name, where several benchmarks have one.
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

    fn figure(name: &str, a: &[f64], b: &[f64], pairs: bool) -> Compared {
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
