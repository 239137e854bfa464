//! The terminal form of a comparison.

use std::fmt::Write as _;

use super::results::{Comparison, Question};
use super::{FigureVerdict, Weighed};
use crate::printable;
use crate::table::Table;
use crate::terminal::{command_line, labelled};
use crate::units::{Scale, grouped};

/// Explains the columns, once below all tables.
pub(crate) const METHOD: &str = "\
n counts pairs that were measured in turn, or A/B without pairs. B/A is the ratio of geometric means. Noise means that no \
difference was shown. The interval is Student's on the logarithms (Welch's without pairs), widened by the resolution of the \
values. The headline (*) is tested at 95 % on its own. All other figures share one 95 % level (Holm); each interval uses its \
figure's level.";

/// `METHOD` in lines of `width` columns.
pub fn method(width: usize) -> String {
    let words: Vec<String> = METHOD.split(' ').map(str::to_owned).collect();
    let mut out = String::new();
    labelled(&mut out, "method", &words, " ", width);
    out
}

impl Comparison {
    /// The terminal form, `width` columns wide.
    pub fn text(&self, width: usize) -> String {
        let mut out = String::new();
        for (i, question) in self.questions.iter().enumerate() {
            if i > 0 {
                out.push('\n');
            }
            write_question(&mut out, question, width);
        }
        for alone in &self.alone {
            let (name, command) = (printable(&alone.name), command_line(&alone.command));
            let _ = writeln!(out, "only in {}: {name}  $ {command}", printable(&alone.side));
        }
        out + "\n" + &method(width)
    }
}

fn write_question(out: &mut String, question: &Question, width: usize) {
    let _ = writeln!(out, "{}, compared", printable(&question.name));
    for (label, side) in ["A", "B"].into_iter().zip(&question.sides) {
        let _ = writeln!(out, "{label}        {}: {}", printable(&side.name), side.counted());
        let _ = writeln!(out, "         $ {}", command_line(&side.command));
        for warning in &side.warnings {
            let _ = writeln!(out, "{}, {label}, {}", warning.kind, printable(&warning.text));
        }
    }
    let both: Vec<String> = question.both.iter().map(|(key, value)| format!("{key}={value}")).collect();
    labelled(out, "both", &both, " ", width);
    for differs in &question.differs {
        let _ = writeln!(out, "differs  {}: A {}, B {}", differs.key, differs.a, differs.b);
    }
    let words: Vec<String> = question.repeated().split(' ').map(str::to_owned).collect();
    labelled(out, "repeated", &words, " ", width);
    out.push('\n');
    table(out, &question.rows, width);
    for (label, side) in ["A", "B"].into_iter().zip(&question.sides) {
        if !side.alone.is_empty() {
            let _ = writeln!(out, "  only in {label}: {}", side.alone.join(", "));
        }
    }
}

/// Appends the rows as a table of `width` columns.
pub fn table(out: &mut String, rows: &[Weighed], width: usize) {
    let head = ["figure", "A", "B", "unit", "B/A", "interval", "n", "verdict"];
    let mut table = Table::with_head(&head).whole();
    in_order(rows).for_each(|row| table.row(cells(row)));
    table.print(out, width);
}

/// The headline first, then the other figures in order of measurement.
pub(crate) fn in_order(rows: &[Weighed]) -> impl Iterator<Item = &Weighed> {
    rows.iter().filter(|row| row.headline).chain(rows.iter().filter(|row| !row.headline))
}

/// One row of the table in either form.
pub(crate) fn cells(row: &Weighed) -> Vec<String> {
    let (a, b) = row.middles();
    let scale = Scale::of(&row.of.unit, a.abs().max(b.abs()));
    let count = |n: usize| grouped(n as i128);
    let (na, nb) = (row.of.a.len(), row.of.b.len());
    vec![
        format!("{}{}", row.of.label, if row.headline { " *" } else { "" }),
        scale.number(a),
        scale.number(b),
        scale.unit,
        row.ratio.map_or("-".into(), digits),
        row.interval.map_or("-".into(), |(low, high)| format!("{} .. {}", digits(low), digits(high))),
        if row.is_paired() { count(na) } else { format!("{}/{}", count(na), count(nb)) },
        verdict(row),
    ]
}

/// Three decimals for ratios below 100, none above.
fn digits(ratio: f64) -> String {
    match ratio {
        0.001..100.0 => format!("{ratio:.3}"),
        100.0..1e9 => grouped(ratio.round() as i128),
        _ => format!("{ratio:.1e}"),
    }
}

fn verdict(row: &Weighed) -> String {
    let ratio = match (row.verdict, row.ratio) {
        (FigureVerdict::Equal, _) => return "equal".into(),
        (FigureVerdict::Noise, _) => return "noise".into(),
        (FigureVerdict::TooFew, _) => return "too few to say".into(),
        (FigureVerdict::NoRatio, _) | (FigureVerdict::Differs, None) => return "no ratio (zero)".into(),
        (FigureVerdict::Differs, Some(ratio)) => ratio,
    };
    // The word tells whether time or speed changed: a percentage of one is not a percentage of the
    // other.
    let word = match (row.of.unit.as_str(), ratio < 1.0) {
        ("s" | "ms" | "us" | "µs" | "ns", true) => "less time",
        ("s" | "ms" | "us" | "µs" | "ns", false) => "more time",
        (_, true) => "lower",
        (_, false) => "higher",
    };
    match ratio {
        ..2.0 => format!("{:.1}% {word}", (ratio - 1.0).abs() * 100.0),
        _ => format!("{} times {word}", digits(ratio)),
    }
}
