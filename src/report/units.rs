//! Number formatting: prefixes, digits and separators.
//!
//! Counts and whole sizes are printed exactly. Times and rates get four significant digits, because
//! no run repeats the fifth. JSON keeps every digit.

/// A unit scaled to the values, so that the numbers of one row or axis share it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Scale {
    /// The divisor for values in the figure's own unit.
    pub divisor: f64,
    /// The printed unit: `ms` for a figure in `s`.
    pub unit: String,
    exact: bool,
}

/// If the largest and smallest value differ by more than this factor, each keeps its own decimals.
pub(crate) const FAR: f64 = 1e4;

const DECIMAL: [(f64, &str); 4] = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
const BINARY: [(f64, &str); 4] = [
    ((1u64 << 40) as f64, "TiB"),
    ((1u64 << 30) as f64, "GiB"),
    ((1u64 << 20) as f64, "MiB"),
    (1024.0, "KiB"),
];
const TIME: [(f64, &str); 4] = [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")];

impl Scale {
    /// The scale for values in `unit` of about the size of `reference`.
    pub fn of(unit: &str, reference: f64) -> Self {
        let size = reference.abs();
        let plain = |unit: &str| Self { divisor: 1.0, unit: unit.into(), exact: true };
        let seconds = match unit {
            "s" => Some(1.0),
            "ms" => Some(1e-3),
            "us" | "µs" => Some(1e-6),
            "ns" => Some(1e-9),
            _ => None,
        };
        if let Some(second) = seconds {
            let of_nothing = if second < 1e-3 { TIME[3] } else { TIME[0] };
            let &(step, name) = TIME
                .iter()
                .find(|(step, _)| size * second >= *step * 0.9999995)
                .unwrap_or(if size == 0.0 { &of_nothing } else { &TIME[3] });
            return Self { divisor: step / second, unit: name.into(), exact: false };
        }
        let (base, per) = match unit.split_once('/') {
            Some((base, per)) => (base, format!("/{per}")),
            None => (unit, String::new()),
        };
        if base == "bytes" {
            // A size that is not a multiple is printed in bytes: "1.0 GiB" would hide the extra
            // page.
            let whole = |step: f64| !per.is_empty() || size % step == 0.0;
            return match BINARY.iter().find(|(step, _)| size >= *step && whole(*step)) {
                Some(&(step, name)) => {
                    Self { divisor: step, unit: format!("{name}{per}"), exact: per.is_empty() }
                }
                None => plain(unit),
            };
        }
        if per.is_empty() {
            return plain(unit);
        }
        match DECIMAL.iter().find(|(step, _)| size >= *step * 0.9999995) {
            Some(&(step, name)) => Self { divisor: step, unit: format!("{name} {unit}"), exact: false },
            None => Self { exact: false, ..plain(unit) },
        }
    }

    /// Formats `value` without the unit.
    pub fn number(&self, value: f64) -> String {
        let scaled = value / self.divisor;
        if self.exact && scaled.fract() == 0.0 && scaled.abs() < 1e15 {
            return grouped(scaled as i128);
        }
        four_digits(scaled)
    }

    /// Formats `values` as one column. All have the same number of decimals, chosen so that the
    /// smallest has four digits.
    pub fn column(&self, values: &[f64]) -> Vec<String> {
        let scaled = |v: &f64| v / self.divisor;
        if self.exact && values.iter().all(|v| scaled(v).fract() == 0.0 && scaled(v).abs() < 1e15) {
            return values.iter().map(|v| grouped(scaled(v) as i128)).collect();
        }
        let sizes = || values.iter().map(|v| scaled(v).abs()).filter(|v| *v > 0.0);
        let smallest = sizes().fold(f64::INFINITY, f64::min);
        let largest = sizes().fold(0.0, f64::max);
        if !smallest.is_finite() || smallest < 1e-4 || largest >= 1e9 || largest > smallest * FAR {
            return values.iter().map(|v| self.number(*v)).collect();
        }
        let decimals = (3 - smallest.log10().floor() as i32).clamp(0, 6) as usize;
        values.iter().map(|v| fixed(scaled(v), decimals)).collect()
    }

    /// Formats `value` with the unit.
    pub(crate) fn with_unit(&self, value: f64) -> String {
        let number = self.number(value);
        match self.unit.as_str() {
            "" => number,
            "%" => format!("{number}%"),
            unit => format!("{number} {unit}"),
        }
    }
}

/// Formats `value` with a unit that suits its size.
pub fn humanised(unit: &str, value: f64) -> String {
    Scale::of(unit, value).with_unit(value)
}

/// A whole number with thousands separators.
pub fn grouped(value: i128) -> String {
    let digits = value.unsigned_abs().to_string();
    let mut out = String::from(if value < 0 { "-" } else { "" });
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `value` with that many decimals and thousands separators.
fn fixed(value: f64, decimals: usize) -> String {
    let text = format!("{value:.decimals$}");
    match text.split_once('.') {
        Some((whole, fraction)) => match whole.parse() {
            Ok(whole) if whole != 0 => format!("{}.{fraction}", grouped(whole)),
            _ => text,
        },
        None => text.parse().map_or(text, grouped),
    }
}

/// Four significant digits, or all digits of the whole part. Very large and very small values use
/// powers of ten.
fn four_digits(value: f64) -> String {
    let size = value.abs();
    if size == 0.0 {
        "0".into()
    } else if !(1e-4..1e15).contains(&size) {
        format!("{value:.3e}")
    } else if size >= 999.95 {
        grouped(value.round() as i128)
    } else {
        let whole = size.log10().floor().max(-4.0) as i32;
        format!("{value:.*}", (3 - whole).max(0) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_reads_as_people_write_it() {
        for (unit, value, text) in [
            ("s", 1.23456, "1.235 s"),
            ("s", 0.00123456, "1.235 ms"),
            ("s", 0.0, "0 s"),
            ("s", 1e-12, "0.001000 ns"),
            ("ns", 43.21, "43.21 ns"),
            ("ns", 1_234_567.0, "1.235 ms"),
            ("ns", 0.0, "0 ns"),
            ("pages", 12_345_678.0, "12,345,678 pages"),
            ("exits", -1234.0, "-1,234 exits"),
            ("pages/s", 23_456_789.0, "23.46 M pages/s"),
            ("pages/s", 7.0, "7.000 pages/s"),
            ("bytes", 1_073_741_824.0, "1 GiB"),
            ("bytes", 1_073_741_825.0, "1,073,741,825 bytes"),
            ("bytes/s", 1_610_612_736.0, "1.500 GiB/s"),
            ("%", 0.5, "0.5000%"),
            ("", 2.0, "2"),
        ] {
            assert_eq!(humanised(unit, value), text, "{value} {unit}");
        }
    }

    #[test]
    fn a_row_keeps_the_scale_of_its_reference() {
        let scale = Scale::of("s", 0.9);
        assert_eq!((scale.with_unit(0.9), scale.with_unit(1.2)), ("900.0 ms".into(), "1,200 ms".into()));
    }

    #[test]
    fn a_column_shares_its_decimals() {
        let seconds = Scale::of("s", 1234.5);
        assert_eq!(
            seconds.column(&[1234.5, 0.51, -0.75, 0.0]),
            ["1,234.5000", "0.5100", "-0.7500", "0.0000"]
        );
        assert_eq!(Scale::of("pages", 9.0).column(&[262_144.0, 9.0]), ["262,144", "9"]);
    }

    #[test]
    fn no_number_is_too_strange() {
        for value in [f64::MAX, f64::MIN_POSITIVE, 5e-324, -1e300, 1e15, 999.96, 9_999_999.0] {
            for unit in ["s", "ns", "bytes", "bytes/s", "pages", "pages/s", "%", "", "/"] {
                assert!(humanised(unit, value).len() < 40, "{value} {unit}");
            }
        }
    }
}
