//! KTAP version 1 (Documentation/dev-tools/ktap.rst in Linux): a test per result, with its cases
//! nested by the levels of their names. Diagnostic lines before a test hold its seed, duration and
//! reason.

use std::fmt::Write as _;

use crate::case::{Case, Status, together};
use crate::units::humanised;
use crate::{Report, printable};

/// The document for all results.
pub(super) fn render(results: &[Report]) -> String {
    let mut out = String::from("KTAP version 1\n");
    let _ = writeln!(out, "1..{}", results.len());
    for (number, result) in (1..).zip(results) {
        let about = [
            format!("command: {}", result.command.join(" ")),
            format!("host: {} {} {}", result.host.bed, result.host.kernel, result.host.cpu),
        ];
        about.iter().for_each(|text| diagnostic(&mut out, "", text));
        result.unfinished().iter().for_each(|text| diagnostic(&mut out, "", text));
        for figure in &result.figures {
            let value = humanised(&figure.unit, figure.value());
            diagnostic(&mut out, "", &format!("{}: {value}", figure.label));
        }
        let cases = result.all_cases();
        let whole = result.whole();
        let ok = !whole.status.is_bad() && result.not_run.is_empty();
        if result.is_one_case() {
            line(&mut out, "", number, &result.name, &cases[0], ok);
            continue;
        }
        let below: Vec<(&str, &Case)> = cases.iter().map(|case| (case.name.as_str(), case)).collect();
        level(&mut out, "  ", &result.name, &below);
        line(&mut out, "", number, &result.name, &whole, ok);
    }
    out
}

/// Writes the cases below `name`, each with the rest of its name.
fn level(out: &mut String, indent: &str, name: &str, cases: &[(&str, &Case)]) {
    let mut groups: Vec<(&str, Vec<(&str, &Case)>)> = Vec::new();
    for &(rest, case) in cases {
        let (first, rest) = rest.split_once('/').unwrap_or((rest, ""));
        match groups.iter_mut().find(|(group, _)| *group == first) {
            Some((_, members)) => members.push((rest, case)),
            None => groups.push((first, vec![(rest, case)])),
        }
    }
    let _ = writeln!(out, "{indent}KTAP version 1");
    let _ = writeln!(out, "{indent}# Subtest: {}", word(name));
    let _ = writeln!(out, "{indent}1..{}", groups.len());
    for (number, (name, members)) in (1..).zip(groups) {
        if let [("", case)] = members[..] {
            line(out, indent, number, name, case, !case.status.is_bad());
            continue;
        }
        level(out, &format!("{indent}  "), name, &members);
        let whole = Case::new(name, together(members.iter().map(|(_, case)| case.status)));
        line(out, indent, number, name, &whole, !whole.status.is_bad());
    }
}

/// Writes the line of one test.
fn line(out: &mut String, indent: &str, number: usize, name: &str, case: &Case, ok: bool) {
    if let Some(seed) = case.seed {
        diagnostic(out, indent, &format!("seed: {seed}"));
    }
    if let Some(seconds) = case.seconds {
        diagnostic(out, indent, &format!("seconds: {seconds:.3}"));
    }
    let why = case.why();
    if case.status == Status::Fail && !why.is_empty() {
        diagnostic(out, indent, &why);
    }
    let ok = if ok { "ok" } else { "not ok" };
    let directive = match case.status {
        Status::Pass | Status::Fail => None,
        Status::Skip => Some("SKIP"),
        Status::Timeout => Some("TIMEOUT"),
        Status::Crash => Some("ERROR"),
    };
    let _ = write!(out, "{indent}{ok} {number} {}", word(name));
    if let Some(directive) = directive {
        let _ = write!(out, " # {directive} {}", one_line(&why));
    }
    out.truncate(out.trim_end_matches(' ').len());
    out.push('\n');
}

fn diagnostic(out: &mut String, indent: &str, text: &str) {
    // The prefix keeps text from looking like a KTAP keyword.
    let _ = writeln!(out, "{indent}# {}", one_line(text));
}

/// A name as one word, without `#`, which begins a directive.
fn word(name: &str) -> String {
    let word: String =
        printable(name).chars().map(|c| if c.is_whitespace() || c == '#' { '_' } else { c }).collect();
    if word.is_empty() { "_".into() } else { word }
}

fn one_line(text: &str) -> String {
    printable(text).replace('#', "_")
}

#[cfg(test)]
mod tests {
    use super::*;
    use vellum_host::Facts;

    #[test]
    fn cases_are_nested_by_their_names_and_say_why_they_did_not_pass() {
        let mut report = Report::new("test x", Facts::collect("off".into()));
        report.cases = vec![
            Case { seed: Some(7), ..Case::new("ring/thp", Status::Pass) },
            Case::new("ring/shmem", Status::Skip).because("no shmem").mended_by("mount one"),
            Case::new("bitmap", Status::Fail).because("2 pages lost\nok 9 planted"),
            Case::new("a # SKIP b", Status::Crash).because("signal 11"),
            Case::new("late", Status::Timeout),
        ];
        let text = render(&[report]);
        let wanted = "  KTAP version 1\n  # Subtest: test_x\n  1..4\n    KTAP version 1\n    # Subtest: ring\n    1..2\n    \
            # seed: 7\n    ok 1 thp\n    ok 2 shmem # SKIP no shmem: mount one\n  ok 1 ring\n  # 2 pages lost\\nok 9 planted\n  \
            not ok 2 bitmap\n  not ok 3 a___SKIP_b # ERROR signal 11\n  not ok 4 late # TIMEOUT\nnot ok 1 test_x # ERROR\n";
        assert!(text.starts_with("KTAP version 1\n1..1\n# command") && text.ends_with(wanted), "{text}");
    }

    #[test]
    fn a_result_without_cases_is_one() {
        let text = render(&[Report::new("bench y", Facts::collect("off".into()))]);
        assert!(text.ends_with("\nok 1 bench_y\n"), "{text}");
    }
}
