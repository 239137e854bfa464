//! Two results, or two sets of them, side by side: by what factor each figure moved, and whether that is more than noise.
//!
//! One result against one compares their samples in the order of measurement; sets compare result by result. Start
//! reading at [`compare`]. The arithmetic is in `stats`. What cannot be compared is refused rather than printed: a
//! figure in emulated time says nothing about one in real time.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::stats::{Ratio, paired, unpaired};
use super::terminal::{self, Table, WIDTH};
use super::units::{Scale, grouped};
use super::{Figure, Report, printable};

/// Why two sets are not comparable. Each is one line.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum Error {
    /// Instructions against seconds.
    #[error(
        "{emulated} was measured on an emulated host ({bed}) and {real} on a real one: instructions and seconds have no ratio; compare results of one kind"
    )]
    EmulatedWithReal {
        /// The side, and where it matters the number of the result in it.
        emulated: String,
        /// Its bed.
        bed: String,
        /// The other.
        real: String,
    },
    /// A benchmark against another.
    #[error(
        "{a} holds {what_a} and {b} holds {what_b}: nothing in them was asked alike; compare results of one command"
    )]
    NothingInCommon {
        /// The first side.
        a: String,
        /// What it holds.
        what_a: String,
        /// The second side.
        b: String,
        /// What it holds.
        what_b: String,
    },
}

/// One side: what it is called, and its results.
#[derive(Clone, Copy)]
pub struct Side<'a> {
    /// As the user named it.
    pub name: &'a str,
    /// One or several.
    pub results: &'a [Report],
}

/// The comparison as text.
pub fn compare(a: Side, b: Side) -> Result<String, Error> {
    same_time(a, b)?;
    let (by_a, by_b) = (by_question(a.results), by_question(b.results));
    let mut out = String::new();
    let mut alone = Vec::new();
    match (&by_a[..], &by_b[..]) {
        // One thing on each side: what was asked may differ, that is often the point.
        ([(_, ra)], [(_, rb)]) if ra[0].name == rb[0].name => one(&mut out, a.name, ra, b.name, rb),
        _ => {
            let other: HashMap<_, _> = by_b.iter().map(|(key, results)| (key, results)).collect();
            let mut matched = Vec::new();
            for (key, ra) in &by_a {
                match other.get(key) {
                    Some(rb) => {
                        if !out.is_empty() {
                            out.push('\n');
                        }
                        one(&mut out, a.name, ra, b.name, rb);
                        matched.push(key);
                    }
                    None => alone.push((a.name, ra)),
                }
            }
            alone.extend(
                by_b.iter().filter(|(key, _)| !by_a.iter().any(|(k, _)| k == key)).map(|(_, r)| (b.name, r)),
            );
        }
    }
    if out.is_empty() {
        let what = |side: &[(String, Vec<&Report>)]| match side {
            [(_, results)] => format!("`{}`", printable(&results[0].name)),
            many => format!("{} different ones", many.len()),
        };
        return Err(Error::NothingInCommon {
            a: a.name.into(),
            what_a: what(&by_a),
            b: b.name.into(),
            what_b: what(&by_b),
        });
    }
    for (side, results) in alone {
        let command = terminal::command_line(&results[0].command);
        let _ = writeln!(out, "only in {}: {}  $ {command}", printable(side), printable(&results[0].name));
    }
    out.push_str(METHOD);
    Ok(out)
}

const METHOD: &str = "
B/A is the geometric mean of the ratios of samples in pairs, or of all samples where the numbers differ (*). The
interval is the 95 % confidence interval by Student's t on the logarithms (Welch's for *); `noise` means that it
includes 1, so that no difference was shown.
";

fn same_time(a: Side, b: Side) -> Result<(), Error> {
    let find = |emulated: bool| {
        [a, b].into_iter().find_map(|side| {
            let i = side.results.iter().position(|r| r.host.emulated == emulated)?;
            let name = match side.results.len() {
                1 => side.name.to_owned(),
                _ => format!("result {} of {}", i + 1, side.name),
            };
            Some((name, side.results[i].host.bed.clone()))
        })
    };
    match (find(true), find(false)) {
        (Some((emulated, bed)), Some((real, _))) => {
            Err(Error::EmulatedWithReal { emulated, bed: printable(&bed).into_owned(), real })
        }
        _ => Ok(()),
    }
}

/// Results that were asked alike, in the order of their first appearance. A seed does not make a question another one.
fn by_question(results: &[Report]) -> Vec<(String, Vec<&Report>)> {
    let mut questions: Vec<(String, Vec<&Report>)> = Vec::new();
    let mut place = HashMap::new();
    for result in results {
        let asked: Vec<_> = result.asked.iter().filter(|(k, _)| *k != "seed").collect();
        let key = format!("{} {asked:?}", result.name);
        let i = *place.entry(key.clone()).or_insert_with(|| {
            questions.push((key, Vec::new()));
            questions.len() - 1
        });
        questions[i].1.push(result);
    }
    questions
}

/// One question: a table with a line a figure.
fn one(out: &mut String, name_a: &str, a: &[&Report], name_b: &str, b: &[&Report]) {
    let _ = writeln!(out, "{}, compared", printable(&a[0].name));
    for (label, name, results) in [("A", name_a, a), ("B", name_b, b)] {
        let command = terminal::command_line(&results[0].command);
        let _ = writeln!(out, "{label}        {}: {} result(s)  $ {command}", printable(name), results.len());
        for (i, result) in results.iter().enumerate() {
            for reason in &result.invalid {
                let _ = writeln!(out, "INVALID  {label}, result {}: {}", i + 1, printable(reason));
            }
        }
    }
    let (facts_a, facts_b) = (facts(a[0]), facts(b[0]));
    let mut line = String::from("both    ");
    for (key, value) in facts_a.iter().filter(|fact| facts_b.contains(fact)) {
        let item = format!(" {key}={value}");
        if line.chars().count() + item.chars().count() > WIDTH {
            let _ = writeln!(out, "{line}");
            line = "        ".into();
        }
        line.push_str(&item);
    }
    let _ = writeln!(out, "{line}");
    let mut keys: Vec<_> = facts_a.iter().chain(&facts_b).map(|(key, _)| key).collect();
    let mut seen = std::collections::HashSet::new();
    keys.retain(|key| seen.insert(*key));
    for key in keys {
        let of = |facts: &[(String, String)]| {
            facts.iter().find(|(k, _)| k == key).map_or("-".into(), |(_, v)| v.clone())
        };
        let (in_a, in_b) = (of(&facts_a), of(&facts_b));
        if in_a != in_b {
            let _ = writeln!(out, "differs  {key}: A {in_a}, B {in_b}");
        }
    }
    out.push('\n');
    table(out, a, b);
}

/// What was asked and what the host was, as pairs that can be told apart.
fn facts(result: &Report) -> Vec<(String, String)> {
    let mut facts: Vec<_> =
        result.asked.iter().map(|(k, v)| (printable(k).into_owned(), terminal::asked_value(v))).collect();
    let host = serde_json::to_value(&result.host).unwrap_or_default();
    let fields = host.as_object().into_iter().flatten();
    facts.extend(fields.map(|(k, v)| {
        (format!("host.{k}"), v.as_str().map_or(v.to_string(), |s| printable(s).into_owned()))
    }));
    facts
}

fn table(out: &mut String, a: &[&Report], b: &[&Report]) {
    let (samples_a, samples_b) = (samples(a), samples(b));
    let mut table = Table::with_head(&["figure", "A", "B", "unit", "B/A", "95 % interval", "n", "verdict"]);
    let mut seen = std::collections::HashSet::new();
    let mut only_a = Vec::new();
    for figure in a.iter().flat_map(|r| &r.figures) {
        let key = (figure.name(), figure.unit());
        if !seen.insert(key) {
            continue;
        }
        match samples_b.get(&key) {
            Some(values_b) => table.row(line(key, &samples_a[&key], values_b)),
            None => only_a.push(printable(figure.name()).into_owned()),
        }
    }
    table.print(out);
    let mut only_b: Vec<_> =
        samples_b.keys().filter(|key| !samples_a.contains_key(*key)).map(|key| key.0).collect();
    only_b.sort_unstable();
    for (label, names) in
        [("A", only_a), ("B", only_b.into_iter().map(|n| printable(n).into_owned()).collect())]
    {
        if !names.is_empty() {
            let _ = writeln!(out, "  only in {label}: {}", names.join(", "));
        }
    }
}

/// By name and unit: the samples of the one result, or each result's own value where there are several.
fn samples<'a>(results: &[&'a Report]) -> HashMap<(&'a str, &'a str), Vec<f64>> {
    let mut samples: HashMap<_, Vec<f64>> = HashMap::new();
    for figure in results.iter().flat_map(|r| &r.figures) {
        let values = samples.entry((figure.name(), figure.unit())).or_default();
        match results.len() {
            1 => values.extend(figure.samples().iter()),
            _ => values.push(figure.value()),
        }
    }
    samples
}

fn line((name, unit): (&str, &str), a: &[f64], b: &[f64]) -> Vec<String> {
    let middle = |values: &[f64]| Figure::from_samples("", unit, values).map_or(0.0, |f| f.value());
    let scale = Scale::of(unit, middle(a).abs().max(middle(b).abs()));
    let pairs = a.len() == b.len();
    let ratio = if pairs { paired(a, b) } else { unpaired(a, b) };
    let count = |n: usize| grouped(n as i128);
    vec![
        printable(name).into_owned(),
        scale.number(middle(a)),
        scale.number(middle(b)),
        printable(&scale.unit).into_owned(),
        ratio.map_or("-".into(), |r| digits(r.mean)),
        ratio
            .and_then(|r| r.interval)
            .map_or("-".into(), |(low, high)| format!("{} .. {}", digits(low), digits(high))),
        if pairs { count(a.len()) } else { format!("{}/{}*", count(a.len()), count(b.len())) },
        verdict(unit, a, b, ratio),
    ]
}

/// Three decimals for the usual ratio; a factor of thousands in powers of ten.
fn digits(ratio: f64) -> String {
    if (0.001..1000.0).contains(&ratio) { format!("{ratio:.3}") } else { format!("{ratio:.2e}") }
}

fn verdict(unit: &str, a: &[f64], b: &[f64], ratio: Option<Ratio>) -> String {
    if a == b {
        return "equal".into();
    }
    let Some(ratio) = ratio else { return "no ratio (zero)".into() };
    match ratio.is_noise() {
        Some(true) => return "noise".into(),
        None => return "one sample: noise unknown".into(),
        Some(false) => {}
    }
    // A percentage of a time is not one of a speed, so it is called by what it is.
    let word = match (unit, ratio.mean < 1.0) {
        ("s" | "ms" | "us" | "µs" | "ns", true) => "less time",
        ("s" | "ms" | "us" | "µs" | "ns", false) => "more time",
        (_, true) => "lower",
        (_, false) => "higher",
    };
    match ratio.mean {
        ..2.0 => format!("{:.1}% {word}", (ratio.mean - 1.0).abs() * 100.0),
        _ => format!("{} times {word}", digits(ratio.mean)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::json::parse;
    use super::*;

    fn example() -> Report {
        let bytes = include_bytes!("../../tests/data/dirty-log.json");
        parse(bytes, std::path::Path::new("dirty-log.json")).unwrap().remove(0)
    }

    fn with(figures: &[(&str, &str, &[f64])]) -> Report {
        let mut report = Report { figures: Vec::new(), ..example() };
        for (name, unit, samples) in figures {
            report.spread(*name, unit, samples);
        }
        report
    }

    fn text(a: &[Report], b: &[Report]) -> Result<String, Error> {
        compare(Side { name: "a.json", results: a }, Side { name: "b.json", results: b })
    }

    fn line<'a>(text: &'a str, name: &str) -> &'a str {
        text.lines()
            .find(|l| l.trim_start().starts_with(name))
            .unwrap_or_else(|| panic!("no {name} in:\n{text}"))
    }

    #[test]
    fn emulated_against_real_is_refused_and_named() {
        let mut emulated = example();
        emulated.host.emulated = true;
        emulated.host.bed = "svm".into();
        for (a, b) in
            [(&[example()][..], &[emulated.clone()][..]), (&[emulated.clone()][..], &[example()][..])]
        {
            let error = text(a, b).unwrap_err().to_string();
            assert!(error.contains("emulated host (svm)") && error.contains("b.json"), "{error}");
        }
        // A set that is mixed in itself is no better.
        let error = text(&[example(), emulated], &[example()]).unwrap_err().to_string();
        assert!(error.contains("result 2 of a.json"), "{error}");
    }

    #[test]
    fn a_difference_within_the_noise_is_called_noise() {
        let a = with(&[("t", "s", &[1.00, 1.05, 0.95, 1.02]), ("u", "s", &[1.0, 1.1, 1.2, 1.3])]);
        let b = with(&[("t", "s", &[1.03, 1.00, 0.99, 1.01]), ("u", "s", &[0.71, 0.76, 0.85, 0.91])]);
        let text = text(&[a], &[b]).unwrap();
        assert!(line(&text, "t ").ends_with("noise"), "{text}");
        assert!(line(&text, "u ").ends_with("% less time"), "{text}");
        assert!(line(&text, "u ").contains("0.70"), "{text}");
    }

    #[test]
    fn one_sample_claims_nothing() {
        let text = text(&[with(&[("t", "s", &[1.0])])], &[with(&[("t", "s", &[0.5])])]).unwrap();
        assert!(
            line(&text, "t ").contains("0.500") && line(&text, "t ").ends_with("noise unknown"),
            "{text}"
        );
    }

    #[test]
    fn sets_are_compared_result_by_result() {
        let a: Vec<_> = [1.0, 1.1, 1.2].iter().map(|t| with(&[("t", "s", &[*t])])).collect();
        let b: Vec<_> = [2.0, 2.2, 2.5].iter().map(|t| with(&[("t", "s", &[*t])])).collect();
        let paired = text(&a, &b).unwrap();
        assert!(line(&paired, "t ").ends_with("2.027 times more time"), "{paired}");
        let uneven = text(&a, &b[..2]).unwrap();
        assert!(line(&uneven, "t ").contains("3/2*"), "{uneven}");
    }

    #[test]
    fn what_was_asked_and_hosts_that_differ_are_named() {
        let mut b = example();
        b.asked.insert("backing".into(), "hugetlb-2m".into());
        b.host.kernel = "7.2.13".into();
        let text = text(&[example()], &[b]).unwrap();
        assert!(line(&text, "differs  backing").ends_with("B hugetlb-2m"), "{text}");
        assert!(line(&text, "differs  host.kernel").ends_with("B 7.2.13"), "{text}");
    }

    #[test]
    fn sets_of_several_questions_match_what_was_asked_alike() {
        let mut huge = with(&[("t", "s", &[3.0])]);
        huge.asked.insert("backing".into(), "hugetlb-2m".into());
        let small = with(&[("t", "s", &[1.0])]);
        let text = text(&[small.clone(), huge.clone()], &[huge, small.clone()]).unwrap();
        assert_eq!(text.matches("equal").count(), 2, "{text}");
        let mut other = small.clone();
        other.name = "bench memslot".into();
        let error = super::tests::text(&[small], &[other]).unwrap_err().to_string();
        assert!(error.contains("bench memslot"), "{error}");
    }

    #[test]
    fn invalid_results_stay_invalid() {
        let mut bad = example();
        bad.invalid.push("no huge mapping".into());
        assert!(text(&[example()], &[bad]).unwrap().contains("INVALID  B, result 1: no huge mapping"));
    }
}
