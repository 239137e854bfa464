use super::super::{FigureVerdict, Unit};
use super::*;
use crate::terminal::{Extent, Form};
use crate::{Premise, Sample, json};

fn example() -> Report {
    let bytes = include_bytes!("../../../../tests/data/dirty-log.json");
    json::parse(bytes, std::path::Path::new("dirty-log.json")).unwrap().remove(0)
}

/// A result of rounds with a VM each.
fn rounds(values: &[f64]) -> Report {
    let samples = (0..).zip(values).map(|(round, &value)| Sample::of_round(round, value)).collect();
    with("t", samples)
}

fn with(name: &str, samples: Vec<Sample>) -> Report {
    let mut report = Report { figures: Vec::new(), headline: None, ..example() };
    report.samples(name, "s", samples);
    report
}

/// Results with one value each, measured at these times in these boots.
fn at(of: &[(f64, f64, &str)]) -> Vec<Report> {
    let one = |&(value, at, boot): &(f64, f64, &str)| {
        let mut report = Report { at, ..rounds(&[value]) };
        report.host.boot = boot.into();
        report
    };
    of.iter().map(one).collect()
}

fn weighed(a: &[Report], b: &[Report]) -> Question {
    compare(Side { name: "a.json", results: a }, Side { name: "b.json", results: b })
        .unwrap()
        .questions
        .remove(0)
}

fn error(a: &[Report], b: &[Report]) -> String {
    compare(Side { name: "a.json", results: a }, Side { name: "b.json", results: b }).unwrap_err().to_string()
}

#[test]
fn emulated_against_real_is_refused_and_named() {
    let mut emulated = example();
    emulated.host.emulated = true;
    emulated.host.bed = "svm".into();
    for (a, b) in [(&[example()][..], &[emulated.clone()][..]), (&[emulated.clone()][..], &[example()][..])] {
        let error = error(a, b);
        assert!(error.contains("emulated host (svm)") && error.contains("b.json"), "{error}");
    }
    // A set that mixes both is refused too.
    let error = error(&[example(), emulated], &[example()]);
    assert!(error.contains("result 2 of a.json"), "{error}");
}

#[test]
fn rounds_of_one_boot_are_replicates_and_no_pairs() {
    let question = weighed(&[rounds(&[1.0, 1.1, 1.2, 1.3])], &[rounds(&[0.71, 0.76, 0.85, 0.91])]);
    assert_eq!((question.unit, question.rows[0].is_paired()), (Unit::Machine, false));
    assert_eq!(question.rows[0].verdict, FigureVerdict::Differs);
    let noise = weighed(&[rounds(&[1.00, 1.05, 0.95, 1.02])], &[rounds(&[1.03, 1.00, 0.99, 1.01])]);
    assert_eq!(noise.rows[0].verdict, FigureVerdict::Noise);
}

#[test]
fn passes_and_vcpus_of_one_machine_are_one_replicate() {
    let of = |value: f64| {
        let sample = |i: u32| Sample {
            value: value + f64::from(i) * 1e-3,
            round: i / 2,
            vcpu: Some(i % 2),
            machine: 0,
        };
        with("t", (0..40).map(sample).collect())
    };
    let question = weighed(&[of(1.0)], &[of(0.5)]);
    assert_eq!((question.rows[0].of.a.len(), question.rows[0].verdict), (1, FigureVerdict::TooFew));
}

#[test]
fn one_boot_of_each_side_claims_nothing() {
    let mut b = rounds(&[0.5, 0.51, 0.49, 0.5, 0.52]);
    b.host.boot = "another".into();
    let question = weighed(&[rounds(&[1.0, 1.01, 0.99, 1.0, 1.02])], &[b]);
    assert_eq!((question.unit, question.least), (Unit::Boot, 5));
    assert_eq!(question.rows[0].verdict, FigureVerdict::TooFew);
}

#[test]
fn boots_that_took_turns_are_pairs() {
    let a =
        at(&[(1.0, 10.0, "a1"), (2.0, 30.0, "a2"), (4.0, 50.0, "a3"), (8.0, 70.0, "a4"), (16.0, 90.0, "a5")]);
    let b = at(&[
        (1.1, 20.0, "b1"),
        (2.21, 40.0, "b2"),
        (4.39, 60.0, "b3"),
        (8.8, 80.0, "b4"),
        (17.6, 100.0, "b5"),
    ]);
    let turns = weighed(&a, &b);
    assert!(turns.rows[0].is_paired());
    assert_eq!((turns.unit, turns.rows[0].verdict), (Unit::Boot, FigureVerdict::Differs));
    // The same values, but all of one side before all of the other.
    let mut later = b;
    later.iter_mut().for_each(|report| report.at += 1000.0);
    let apart = weighed(&a, &later);
    assert!(!apart.rows[0].is_paired());
    assert_eq!(apart.rows[0].verdict, FigureVerdict::Noise);
}

#[test]
fn processes_that_took_turns_are_pairs_in_either_order() {
    let a = at(&[(1.0, 1.0, "x"), (2.0, 4.0, "x"), (4.0, 5.0, "x")]);
    let b = at(&[(1.1, 2.0, "x"), (2.21, 3.0, "x"), (4.39, 6.0, "x")]);
    let question = weighed(&a, &b);
    assert_eq!((question.unit, question.rows[0].is_paired()), (Unit::Process, true));
    let uneven = weighed(&a, &b[..2]);
    assert!(!uneven.rows[0].is_paired());
    assert_eq!(uneven.rows[0].verdict, FigureVerdict::TooFew);
}

#[test]
fn the_headline_that_was_declared_is_marked() {
    let mut a = rounds(&[1.0, 1.1, 1.2]);
    a.headline = Some("t".into());
    assert!(weighed(&[a.clone()], &[a]).rows[0].headline);
}

#[test]
fn what_was_asked_and_hosts_that_differ_are_named() {
    let mut b = example();
    b.asked.insert("backing".into(), "hugetlb-2m".into());
    b.host.kernel = "7.2.13".into();
    b.host.boot = "another".into();
    let question = weighed(&[example()], &[b]);
    let keys: Vec<&str> = question.differs.iter().map(|d| d.key.as_str()).collect();
    assert_eq!(keys, ["backing", "host.kernel"]);
    assert_eq!(question.differs[1].b, "7.2.13");
}

#[test]
fn sets_of_several_questions_match_what_was_asked_alike() {
    let mut huge = rounds(&[3.0]);
    huge.asked.insert("backing".into(), "hugetlb-2m".into());
    let small = rounds(&[1.0]);
    let both = compare(
        Side { name: "a", results: &[small.clone(), huge.clone()] },
        Side { name: "b", results: &[huge, small.clone()] },
    );
    let verdicts: Vec<_> = both.unwrap().questions.iter().map(|q| q.rows[0].verdict).collect();
    assert_eq!(verdicts, [FigureVerdict::Equal; 2]);
    let mut other = small.clone();
    other.name = "bench memslot".into();
    let error = error(&[small], &[other]);
    assert!(error.contains("bench memslot"), "{error}");
}

#[test]
fn what_is_invalid_or_cut_short_is_said_first() {
    let mut bad = example();
    bad.fail(None, Premise::OneCpu);
    bad.cut_short = Some("ended in round 3 of 500".into());
    let both = compare(Side { name: "a", results: &[example()] }, Side { name: "b", results: &[bad] });
    let text = both.unwrap().render(Form::Text(100), Extent::Whole);
    assert!(text.contains("INVALID  B, result 1: the host has one CPU"), "{text}");
    assert!(text.contains("CUT OFF  B, result 1: ended in round 3 of 500"), "{text}");
}
