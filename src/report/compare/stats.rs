//! The statistics of a comparison: mean log-ratios, their intervals, and the correction for many
//! figures.
//!
//! Ratios of times are skewed and multiply. Their logarithms are nearly symmetric and add. So
//! Student's distribution is applied to the logarithms, and the result is mapped back by exp. This
//! is exact for log-normal samples and sound for a few of them, where a bootstrap of three samples
//! would only repeat them.
//!
//! Two corrections are added. *Repeatability*: no sample is assumed to repeat better than its bed
//! is known to, so two equal samples are not certainty. *Resolution*: if a value may be too large
//! by a share of itself, the ends of the interval move by that share.

use std::f64::consts::FRAC_PI_2;

/// The distribution of the mean log-ratio.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Estimate {
    /// ln(B/A).
    mean: f64,
    /// The variation of the mean. `None` if too few samples tell how much others would vary.
    variation: Option<Variation>,
    /// How far the true value may lie below and above the mean, whatever the samples.
    slack: Slack,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Variation {
    /// Student's distribution.
    Student { error: f64, freedom: f64 },
    /// The samples do not vary. Every assignment of the samples to the sides is equally likely, and
    /// this is the share of assignments that lie as far apart.
    Arrangements(f64),
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Slack {
    below: f64,
    above: f64,
}

/// What is known about samples in advance.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    /// The smallest relative standard deviation of a sample.
    pub(super) repeatability: f64,
    /// The share by which a value may be too large.
    pub(super) resolution: f64,
}

impl Known {
    /// A and B may each be too large by that share, so the true ratio lies between the two
    /// extremes.
    fn slack(self) -> Slack {
        let share = -(1.0 - self.resolution).ln();
        Slack { below: share, above: share }
    }
}

/// The estimate for pairs. `None` if there are no pairs, or if a sample is not positive and has no
/// ratio.
pub(super) fn paired(pairs: &[(f64, f64)], known: Known) -> Option<Estimate> {
    if pairs.is_empty() || pairs.iter().any(|(a, b)| *a <= 0.0 || *b <= 0.0) {
        return None;
    }
    let logs: Vec<f64> = pairs.iter().map(|(a, b)| b.ln() - a.ln()).collect();
    let (mean, variance) = moments(&logs);
    let n = logs.len() as f64;
    let variance = variance.max(2.0 * known.repeatability.powi(2));
    let variation = match logs.len() {
        1 => None,
        _ if negligible(variance, mean) => Some(Variation::Arrangements(2f64.powf(1.0 - n))),
        _ => Some(Variation::Student { error: (variance / n).sqrt(), freedom: n - 1.0 }),
    };
    Some(Estimate { mean, variation, slack: known.slack() })
}

/// Welch's estimate for unpaired samples.
pub(super) fn unpaired(a: &[f64], b: &[f64], known: Known) -> Option<Estimate> {
    if a.is_empty() || b.is_empty() || a.iter().chain(b).any(|v| *v <= 0.0) {
        return None;
    }
    let logs = |v: &[f64]| v.iter().map(|v| v.ln()).collect::<Vec<_>>();
    let ((mean_a, var_a), (mean_b, var_b)) = (moments(&logs(a)), moments(&logs(b)));
    let mean = mean_b - mean_a;
    let (na, nb) = (a.len() as f64, b.len() as f64);
    let least = known.repeatability.powi(2);
    let (sa, sb) = (var_a.max(least) / na, var_b.max(least) / nb);
    let variation = match () {
        () if na < 2.0 || nb < 2.0 => None,
        () if negligible(sa + sb, mean) => Some(Variation::Arrangements(2.0 / choose(na + nb, na))),
        () => {
            let freedom = (sa + sb).powi(2) / (sa * sa / (na - 1.0) + sb * sb / (nb - 1.0));
            Some(Variation::Student { error: (sa + sb).sqrt(), freedom })
        }
    };
    Some(Estimate { mean, variation, slack: known.slack() })
}

/// Whether the variance is only the rounding of the logarithms.
fn negligible(variance: f64, mean: f64) -> bool {
    variance.sqrt() <= 1e-12 * mean.abs().max(1.0)
}

impl Estimate {
    /// B/A.
    pub(super) fn ratio(&self) -> f64 {
        self.mean.exp()
    }

    /// The probability of a difference this large without a real one. `None` if the samples cannot
    /// tell.
    pub(super) fn p(&self) -> Option<f64> {
        let slack = if self.mean < 0.0 { self.slack.above } else { self.slack.below };
        let distance = self.mean.abs() - slack;
        match self.variation? {
            _ if distance <= 0.0 => Some(1.0),
            Variation::Student { error, freedom } => Some(student(distance / error, freedom)),
            Variation::Arrangements(p) => Some(p),
        }
    }

    /// The interval that misses the true ratio with probability `alpha`. `None` if the samples do
    /// not vary.
    pub(super) fn interval(&self, alpha: f64) -> Option<(f64, f64)> {
        let Some(Variation::Student { error, freedom }) = self.variation else { return None };
        let half = error * quantile(alpha, freedom);
        Some(((self.mean - half - self.slack.below).exp(), (self.mean + half + self.slack.above).exp()))
    }
}

/// Holm's procedure: the level for each of `ps`, so that the probability of any wrong rejection is
/// at most `alpha`. The smallest p is tested at `alpha` divided by their number, the next at
/// `alpha` divided by one less, until one is not rejected. All later ones get its level.
pub(super) fn holm(ps: &[f64], alpha: f64) -> Vec<f64> {
    let mut order: Vec<usize> = (0..ps.len()).collect();
    order.sort_by(|a, b| ps[*a].total_cmp(&ps[*b]));
    let mut levels = vec![alpha; ps.len()];
    let mut stopped = None;
    for (rank, &i) in order.iter().enumerate() {
        let level = stopped.unwrap_or(alpha / (ps.len() - rank) as f64);
        levels[i] = level;
        if ps[i] > level {
            stopped = Some(level);
        }
    }
    levels
}

/// Mean and unbiased variance.
fn moments(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
    (mean, if n > 1.0 { squares / (n - 1.0) } else { 0.0 })
}

/// The number of ways to choose `k` of `n`.
fn choose(n: f64, k: f64) -> f64 {
    (1..=k as u64).map(|i| (n - k + i as f64) / i as f64).product()
}

/// The two-sided tail of Student's distribution beyond `t`.
///
/// With t = sqrt(freedom) tan x the density is proportional to cos(x)^(freedom - 1), for x from 0
/// to pi/2. Simpson's rule computes both integrals.
fn student(t: f64, freedom: f64) -> f64 {
    // Above this it equals the normal distribution to more digits than are printed, and the spike
    // is too thin to integrate.
    let freedom = freedom.min(10_000.0);
    let power = |x: f64| x.cos().max(0.0).powf(freedom - 1.0);
    // Beyond `end` the logarithm of the density is below -60.
    let end = if freedom <= 1.0 { FRAC_PI_2 } else { (-60.0 / (freedom - 1.0)).exp().acos().max(0.05) };
    let from = (t.abs() / freedom.sqrt()).atan();
    let tail = if from < end { simpson(power, from, end) } else { simpson(power, from, FRAC_PI_2) };
    (tail / simpson(power, 0.0, end)).min(1.0)
}

fn simpson(f: impl Fn(f64) -> f64, from: f64, to: f64) -> f64 {
    const STEPS: usize = 400;
    let step = (to - from) / STEPS as f64;
    let weighted = |i: usize| {
        let weight = match i {
            0 | STEPS => 1.0,
            i if i % 2 == 1 => 4.0,
            _ => 2.0,
        };
        weight * f(from + i as f64 * step)
    };
    (0..=STEPS).map(weighted).sum::<f64>() * step / 3.0
}

/// The mean of `values` (at least two) and the half width of Student's interval at confidence 1 -
/// `alpha`.
pub fn mean_interval(values: &[f64], alpha: f64) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (mean, (variance / n).sqrt() * quantile(alpha, n - 1.0))
}

/// The distance from zero beyond which the two-sided tail is `alpha`.
fn quantile(alpha: f64, freedom: f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    while student(high, freedom) > alpha && high < 1e12 {
        (low, high) = (high, high * 2.0);
    }
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if student(middle, freedom) > alpha { low = middle } else { high = middle }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Known = Known { repeatability: 0.0, resolution: 0.0 };

    fn pairs(a: &[f64], b: &[f64]) -> Vec<(f64, f64)> {
        a.iter().copied().zip(b.iter().copied()).collect()
    }

    #[test]
    fn student_is_that_of_the_printed_tables() {
        for (freedom, alpha, printed) in [
            (1.0, 0.05, 12.706),
            (2.0, 0.05, 4.303),
            (4.0, 0.05, 2.776),
            (10.0, 0.01, 3.169),
            (30.0, 0.05, 2.042),
            (4.0, 0.001, 8.610),
            (120.0, 0.05, 1.980),
            (5000.0, 0.05, 1.960),
        ] {
            let found = quantile(alpha, freedom);
            assert!((found - printed).abs() < 0.002, "{freedom} {alpha}: {found}, printed {printed}");
        }
        assert!((student(0.0, 3.0) - 1.0).abs() < 1e-9);
        assert!(student(1e9, 50.0) < 1e-9);
    }

    #[test]
    fn pairs_cancel_what_both_share() {
        let (a, b) = ([1.0, 10.0, 100.0], [2.0, 20.2, 198.0]);
        let tight = paired(&pairs(&a, &b), NOTHING).unwrap();
        assert!((tight.ratio() - 2.0).abs() < 0.01);
        assert!(tight.p().unwrap() < 0.001);
        assert!(unpaired(&a, &b, NOTHING).unwrap().p().unwrap() > 0.5);
    }

    #[test]
    fn the_interval_is_the_one_of_the_textbook() {
        // Logs 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, half width 4.303 * 0.1 / sqrt(3).
        let b = [0.1f64, 0.2, 0.3].map(f64::exp);
        let (low, high) = paired(&pairs(&[1.0; 3], &b), NOTHING).unwrap().interval(0.05).unwrap();
        let half = 4.3027 * 0.1 / 3f64.sqrt();
        assert!((low.ln() - (0.2 - half)).abs() < 1e-4 && (high.ln() - (0.2 + half)).abs() < 1e-4);
    }

    #[test]
    fn interval_and_p_say_the_same() {
        let known = Known { repeatability: 0.001, resolution: 1.0 / 16.0 };
        for b in [[1.05, 1.06, 1.07], [1.2, 1.1, 1.15], [0.8, 0.82, 0.81], [1.0, 1.0, 1.0]] {
            let estimate = paired(&pairs(&[1.0; 3], &b), known).unwrap();
            for alpha in [0.05, 0.01, 0.001] {
                let (low, high) = estimate.interval(alpha).unwrap();
                let excluded = low > 1.0 || high < 1.0;
                assert_eq!(estimate.p().unwrap() < alpha, excluded, "{b:?} {alpha}");
            }
        }
    }

    #[test]
    fn nineteen_of_twenty_intervals_hold_the_truth() {
        // Log-normal noise from a fixed congruential sequence; the true ratio is 1.
        let mut state = 42u64;
        let mut uniform = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
        };
        let mut normal = || (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
        let mut noise = [0, 0];
        for _ in 0..4000 {
            let a: [f64; 5] = std::array::from_fn(|_| (0.1 * normal()).exp());
            let b: [f64; 5] = std::array::from_fn(|_| (0.1 * normal()).exp());
            noise[0] += usize::from(paired(&pairs(&a, &b), NOTHING).unwrap().p().unwrap() > 0.05);
            noise[1] += usize::from(unpaired(&a, &b, NOTHING).unwrap().p().unwrap() > 0.05);
        }
        // 95 % of 4000 is 3800, its deviation 14; Welch's degrees of freedom err to the wide side.
        assert!((3740..=3860).contains(&noise[0]), "paired: {noise:?}");
        assert!((3740..=3920).contains(&noise[1]), "unpaired: {noise:?}");
    }

    #[test]
    fn two_equal_pairs_are_no_certainty() {
        let two = paired(&[(1.0, 0.9), (1.0, 0.9)], NOTHING).unwrap();
        assert_eq!((two.interval(0.05), two.p()), (None, Some(0.5)));
        // By chance, six samples agree like this in one of 32 cases.
        let six = paired(&[(1.0, 0.9); 6], NOTHING).unwrap();
        assert_eq!(six.p(), Some(1.0 / 32.0));
        let four = unpaired(&[1.0; 4], &[0.9; 4], NOTHING).unwrap();
        assert_eq!(four.p(), Some(2.0 / 70.0));
        // A bed that repeats to a thousandth gives them that much weight.
        let bed = Known { repeatability: 0.001, ..NOTHING };
        let (low, high) = paired(&[(1.0, 0.9), (1.0, 0.9)], bed).unwrap().interval(0.05).unwrap();
        assert!(low < 0.9 * 0.992 && high > 0.9 * 1.008 && high < 0.9 * 1.02, "{low} {high}");
    }

    #[test]
    fn a_bucket_does_not_tell_neighbours_apart() {
        let known = Known { resolution: 1.0 / 16.0, ..NOTHING };
        let neighbours = paired(&[(2268.0, 2169.0); 9], known).unwrap();
        assert_eq!(neighbours.p(), Some(1.0));
        let far = paired(&[(2268.0, 1100.0); 9], known).unwrap();
        assert!(far.p().unwrap() < 0.01);
    }

    #[test]
    fn of_many_figures_one_in_twenty_is_not_believed() {
        let lone = holm(&[0.03], 0.05);
        assert_eq!(lone, [0.05]);
        let levels = holm(&[0.03, 0.001, 0.2, 0.02], 0.05);
        // 0.001 is tested at 0.05 / 4 and rejected. 0.02 is tested at 0.05 / 3 and not rejected,
        // nor is any after it.
        assert_eq!(levels[1], 0.05 / 4.0);
        assert!([0, 2, 3].iter().all(|&i| levels[i] == 0.05 / 3.0), "{levels:?}");
    }

    #[test]
    fn no_ratio_without_samples_above_zero() {
        assert_eq!(paired(&[], NOTHING), None);
        assert_eq!(paired(&[(1.0, 0.0)], NOTHING), None);
        assert_eq!(unpaired(&[1.0], &[], NOTHING), None);
        let one = paired(&[(2.0, 3.0)], NOTHING).unwrap();
        assert!((one.ratio() - 1.5).abs() < 1e-12 && one.interval(0.05).is_none() && one.p().is_none());
    }
}
