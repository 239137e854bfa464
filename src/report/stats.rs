//! The statistics of a comparison: the mean of log-ratios and its confidence interval.
//!
//! Ratios of times are skewed and multiply; their logarithms are nearly symmetric and add up, so the interval is
//! Student's on the logarithms, carried back by exp. It is exact for log-normal samples and sound for a few of them,
//! where a bootstrap of three samples would only repeat them.

/// How B relates to A: the geometric mean of B/A.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ratio {
    pub(super) mean: f64,
    /// The 95 % confidence interval; `None` where a single sample tells nothing about noise.
    pub(super) interval: Option<(f64, f64)>,
}

impl Ratio {
    /// Whether a ratio of one is as good an explanation: then the difference is noise.
    pub(super) fn is_noise(&self) -> Option<bool> {
        self.interval.map(|(low, high)| low <= 1.0 && 1.0 <= high)
    }
}

/// Sample by sample: each of `b` against the one of `a` that was measured in the same place. `None` where a sample is
/// not above zero, or the counts differ or are zero: then there is no ratio.
pub(super) fn paired(a: &[f64], b: &[f64]) -> Option<Ratio> {
    if a.len() != b.len() || a.is_empty() || a.iter().chain(b).any(|v| *v <= 0.0) {
        return None;
    }
    let logs: Vec<f64> = a.iter().zip(b).map(|(a, b)| b.ln() - a.ln()).collect();
    let (mean, variance) = moments(&logs);
    let n = logs.len() as f64;
    let interval = (logs.len() > 1).then(|| (variance / n).sqrt() * student(n - 1.0));
    Some(Ratio { mean: mean.exp(), interval: interval.map(|h| ((mean - h).exp(), (mean + h).exp())) })
}

/// Welch's interval for sets whose samples belong to no pairs.
pub(super) fn unpaired(a: &[f64], b: &[f64]) -> Option<Ratio> {
    if a.is_empty() || b.is_empty() || a.iter().chain(b).any(|v| *v <= 0.0) {
        return None;
    }
    let logs = |v: &[f64]| v.iter().map(|v| v.ln()).collect::<Vec<_>>();
    let ((mean_a, var_a), (mean_b, var_b)) = (moments(&logs(a)), moments(&logs(b)));
    let mean = mean_b - mean_a;
    let interval = (a.len() > 1 && b.len() > 1).then(|| {
        let (na, nb) = (a.len() as f64, b.len() as f64);
        let (sa, sb) = (var_a / na, var_b / nb);
        let freedom = (sa + sb).powi(2) / (sa * sa / (na - 1.0) + sb * sb / (nb - 1.0));
        let half = if sa + sb > 0.0 { (sa + sb).sqrt() * student(freedom) } else { 0.0 };
        ((mean - half).exp(), (mean + half).exp())
    });
    Some(Ratio { mean: mean.exp(), interval })
}

/// Mean and unbiased variance.
fn moments(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
    (mean, if n > 1.0 { squares / (n - 1.0) } else { 0.0 })
}

/// The 97.5 % quantile of Student's distribution, from the printed table; between rows the wider interval.
fn student(freedom: f64) -> f64 {
    const TABLE: [f64; 30] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
        2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
        2.045, 2.042,
    ];
    match freedom.floor() as usize {
        n @ 1..=30 => TABLE[n - 1],
        0 => TABLE[0],
        31..40 => 2.042,
        40..60 => 2.021,
        60..120 => 2.000,
        _ => 1.980,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_cancel_what_both_share() {
        // Each pair differs by exactly 2, however much the pairs differ from each other.
        let ratio = paired(&[1.0, 10.0, 100.0], &[2.0, 20.0, 200.0]).unwrap();
        assert!((ratio.mean - 2.0).abs() < 1e-12);
        let (low, high) = ratio.interval.unwrap();
        assert!((low - 2.0).abs() < 1e-9 && (high - 2.0).abs() < 1e-9);
        let loose = unpaired(&[1.0, 10.0, 100.0], &[2.0, 20.0, 200.0]).unwrap();
        assert_eq!(loose.is_noise(), Some(true));
    }

    #[test]
    fn the_interval_is_the_one_of_the_textbook() {
        // Logs 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, half width 4.303 * 0.1 / sqrt(3).
        let b = [0.1f64, 0.2, 0.3].map(f64::exp);
        let (low, high) = paired(&[1.0; 3], &b).unwrap().interval.unwrap();
        let half = 4.303 * 0.1 / 3f64.sqrt();
        assert!((low.ln() - (0.2 - half)).abs() < 1e-9 && (high.ln() - (0.2 + half)).abs() < 1e-9);
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
            noise[0] += usize::from(paired(&a, &b).unwrap().is_noise() == Some(true));
            noise[1] += usize::from(unpaired(&a, &b).unwrap().is_noise() == Some(true));
        }
        // 95 % of 4000 is 3800, its deviation 14; Welch on floored degrees of freedom errs to the wide side.
        assert!((3740..=3860).contains(&noise[0]), "paired: {noise:?}");
        assert!((3740..=3920).contains(&noise[1]), "unpaired: {noise:?}");
    }

    #[test]
    fn no_ratio_without_samples_above_zero() {
        assert_eq!(paired(&[], &[]), None);
        assert_eq!(paired(&[1.0], &[0.0]), None);
        assert_eq!(paired(&[1.0], &[1.0, 2.0]), None);
        let one = paired(&[2.0], &[3.0]).unwrap();
        assert!((one.mean - 1.5).abs() < 1e-12 && one.interval.is_none());
    }
}
