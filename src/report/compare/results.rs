//! Two sets of results as figures to be weighed: which of them were asked alike, what was repeated, and what was measured in
//! pairs. What cannot be compared is refused: a figure in emulated time says nothing about one in real time.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{Compared, Policy, Replicate, Unit, Weighed, text, weigh};
use crate::report::figure::{Figure, Label, median};
use crate::report::{Report, printable, terminal};

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

/// Two sets of results, weighed question by question.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// What both sides were asked.
    pub questions: Vec<Question>,
    /// What one side alone was asked.
    pub alone: Vec<Alone>,
}

impl Comparison {
    /// The terminal's face of `width` columns.
    pub fn text(&self, width: usize) -> String {
        text::text(self, width)
    }
}

/// What one side alone was asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Alone {
    /// Which side.
    pub side: String,
    /// What ran.
    pub name: String,
    /// The command.
    pub command: Vec<String>,
}

/// Results that were asked alike, both sides of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// What ran.
    pub name: String,
    /// A and B.
    pub sides: [Asked; 2],
    /// What was asked and what the host was, where the sides agree.
    pub both: Vec<(String, String)>,
    /// Where they do not.
    pub differs: Vec<Differs>,
    /// What was repeated.
    pub unit: Unit,
    /// How many of these there must be of each side.
    pub least: usize,
    /// The figures.
    pub rows: Vec<Weighed>,
}

impl Question {
    /// What the verdicts rest on, in words.
    pub fn repeated(&self) -> String {
        let why = match self.unit {
            Unit::Boot => "boots, since the sides have none in common",
            Unit::Process => "processes",
            Unit::Machine => {
                "machines of one process on each side: what differs between processes is in no interval"
            }
        };
        format!("{why}; below {} of each side no difference is claimed", self.least)
    }
}

/// One side of a question.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// As the user named it.
    pub name: String,
    /// The first result's command.
    pub command: Vec<String>,
    /// How many results.
    pub results: usize,
    /// In how many boots.
    pub boots: usize,
    /// What a reader must know before the figures.
    pub warnings: Vec<Warning>,
    /// Figures that the other side does not have.
    pub alone: Vec<String>,
}

impl Asked {
    /// How many results, in how many boots.
    pub fn counted(&self) -> String {
        let of = |n: usize, one: &str, more: &str| format!("{n} {}", if n == 1 { one } else { more });
        format!("{} of {}", of(self.results, "result", "results"), of(self.boots, "boot", "boots"))
    }
}

/// Why a result says less than it seems.
#[derive(Clone, Debug, PartialEq)]
pub struct Warning {
    /// `INVALID` or `CUT OFF`.
    pub kind: &'static str,
    /// Which result, and why.
    pub text: String,
}

/// What is not alike.
#[derive(Clone, Debug, PartialEq)]
pub struct Differs {
    /// A parameter, or a fact about the host.
    pub key: String,
    /// Of the first side.
    pub a: String,
    /// Of the second.
    pub b: String,
}

/// Weighs two sets of results.
pub fn compare(a: Side, b: Side) -> Result<Comparison, Error> {
    same_time(a, b)?;
    let (by_a, by_b) = (by_question(a.results), by_question(b.results));
    let mut comparison = Comparison { questions: Vec::new(), alone: Vec::new() };
    let names = [a.name, b.name];
    match (&by_a[..], &by_b[..]) {
        // One thing on each side: what was asked may differ, that is often the point.
        ([(_, ra)], [(_, rb)]) if ra[0].name == rb[0].name => {
            comparison.questions.push(question(names, [ra, rb]));
        }
        _ => {
            let alone = |side: &str, results: &[&Report]| Alone {
                side: side.into(),
                name: results[0].name.clone(),
                command: results[0].command.clone(),
            };
            let other: HashMap<_, _> = by_b.iter().map(|(key, results)| (key, results)).collect();
            let mine: HashSet<_> = by_a.iter().map(|(key, _)| key).collect();
            for (key, ra) in &by_a {
                match other.get(key) {
                    Some(rb) => comparison.questions.push(question(names, [ra, rb])),
                    None => comparison.alone.push(alone(a.name, ra)),
                }
            }
            let left = by_b.iter().filter(|(key, _)| !mine.contains(key));
            comparison.alone.extend(left.map(|(_, rb)| alone(b.name, rb)));
        }
    }
    if !comparison.questions.is_empty() {
        return Ok(comparison);
    }
    let what = |side: &[(String, Vec<&Report>)]| match side {
        [(_, results)] => format!("`{}`", printable(&results[0].name)),
        many => format!("{} different ones", many.len()),
    };
    Err(Error::NothingInCommon {
        a: a.name.into(),
        what_a: what(&by_a),
        b: b.name.into(),
        what_b: what(&by_b),
    })
}

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

fn question(names: [&str; 2], sides: [&[&Report]; 2]) -> Question {
    let [a, b] = sides;
    let policy = Policy::of(a[0].host.emulated);
    let repeated = Repeated::of(a, b);
    let least = if repeated.unit == Unit::Boot { policy.boots } else { policy.runs };
    let [of_a, of_b] = [repeated.replicates(a, 0), repeated.replicates(b, 1)];
    let named = |figure: &Compared| printable(&figure.label.to_string()).into_owned();
    let key = |figure: &Compared| (figure.label.clone(), figure.unit.clone());
    let mut others: HashMap<_, _> = of_b.iter().map(|figure| (key(figure), &figure.a)).collect();
    let (mut figures, mut alone_a) = (Vec::new(), Vec::new());
    for figure in of_a {
        match others.remove(&key(&figure)) {
            Some(b) => figures.push(Compared { b: b.clone(), ..figure }),
            None => alone_a.push(named(&figure)),
        }
    }
    let alone_b = of_b.iter().filter(|figure| others.contains_key(&key(figure))).map(named).collect();
    let (facts_a, facts_b) = (facts(a[0]), facts(b[0]));
    let (both, differs) = apart(&facts_a, &facts_b);
    Question {
        name: a[0].name.clone(),
        sides: [asked(names[0], a, alone_a), asked(names[1], b, alone_b)],
        both,
        differs,
        unit: repeated.unit,
        least,
        rows: weigh(figures, a[0].headline.as_ref(), least, policy),
    }
}

fn asked(name: &str, results: &[&Report], alone: Vec<String>) -> Asked {
    let mut warnings = Vec::new();
    for (i, result) in (1..).zip(results) {
        let mut warn = |kind, why: &str| {
            let text = format!("result {i}: {why}");
            warnings.push(Warning { kind, text });
        };
        if let Some(rest) = &result.cut_short {
            warn("CUT OFF", rest);
        }
        result.invalid.iter().for_each(|failed| warn("INVALID", &failed.to_string()));
    }
    Asked {
        name: name.into(),
        command: results[0].command.clone(),
        results: results.len(),
        boots: boots(results).len(),
        warnings,
        alone,
    }
}

fn boots<'a>(results: &[&'a Report]) -> HashSet<&'a str> {
    results.iter().map(|result| result.host.boot.as_str()).collect()
}

/// What was asked and what the host was, as pairs that can be told apart. Boots are counted, not named.
fn facts(result: &Report) -> Vec<(String, String)> {
    let mut facts: Vec<_> =
        result.asked.iter().map(|(k, v)| (printable(k).into_owned(), terminal::asked_value(v))).collect();
    let host = serde_json::to_value(&result.host).unwrap_or_default();
    let fields = host.as_object().into_iter().flatten().filter(|(key, _)| *key != "boot");
    facts.extend(fields.map(|(k, v)| {
        (format!("host.{k}"), v.as_str().map_or(v.to_string(), |s| printable(s).into_owned()))
    }));
    facts
}

/// What is alike in both, and what is not, in the order of the first and then of the second.
fn apart(a: &[(String, String)], b: &[(String, String)]) -> (Vec<(String, String)>, Vec<Differs>) {
    let of = |facts: &[(String, String)]| -> HashMap<String, String> { facts.iter().cloned().collect() };
    let (map_a, map_b) = (of(a), of(b));
    let (mut both, mut differs) = (Vec::new(), Vec::new());
    let missing = b.iter().filter(|(key, _)| !map_a.contains_key(key));
    for (key, _) in a.iter().chain(missing) {
        let value = |map: &HashMap<String, String>| map.get(key).cloned().unwrap_or("-".into());
        let (in_a, in_b) = (value(&map_a), value(&map_b));
        match in_a == in_b {
            true => both.push((key.clone(), in_a)),
            false => differs.push(Differs { key: key.clone(), a: in_a, b: in_b }),
        }
    }
    (both, differs)
}

/// What was repeated, and what of it was measured in turn.
struct Repeated<'a> {
    unit: Unit,
    /// By side: the pair of each boot or process, where they were measured in turn.
    pairs: [HashMap<Run<'a>, u32>; 2],
}

/// A boot or a process.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Run<'a> {
    Boot(&'a str),
    Process(usize),
}

impl<'a> Repeated<'a> {
    fn of(a: &[&'a Report], b: &[&'a Report]) -> Self {
        let unit = match (boots(a).is_disjoint(&boots(b)), a.len() > 1 || b.len() > 1) {
            (true, _) => Unit::Boot,
            (false, true) => Unit::Process,
            (false, false) => Unit::Machine,
        };
        let mut repeated = Self { unit, pairs: [HashMap::new(), HashMap::new()] };
        if unit != Unit::Machine {
            repeated.pairs = in_turn([repeated.runs(a), repeated.runs(b)]).unwrap_or_default();
        }
        repeated
    }

    fn run(&self, index: usize, result: &'a Report) -> Run<'a> {
        if self.unit == Unit::Boot { Run::Boot(&result.host.boot) } else { Run::Process(index) }
    }

    /// The boots or processes of a side, and when each of them began and ended to measure.
    fn runs(&self, side: &[&'a Report]) -> Vec<(Run<'a>, f64, f64)> {
        let mut runs: Vec<(Run, f64, f64)> = Vec::new();
        for (i, result) in side.iter().enumerate() {
            let run = self.run(i, result);
            match runs.iter_mut().find(|(known, ..)| *known == run) {
                Some((_, first, last)) => (*first, *last) = (first.min(result.at), last.max(result.at)),
                None => runs.push((run, result.at, result.at)),
            }
        }
        runs
    }

    /// A side's figures, their replicates in [`Compared::a`].
    fn replicates(&self, side: &[&'a Report], which: usize) -> Vec<Compared> {
        let mut figures: Vec<Compared> = Vec::new();
        let mut place: HashMap<(&Label, &str), usize> = HashMap::new();
        // By the number of the boot, process or machine: boots by their name would be in no order.
        let mut values: Vec<BTreeMap<usize, Repetition>> = Vec::new();
        for (i, result) in side.iter().enumerate() {
            let run = self.run(i, result);
            let number =
                side.iter().enumerate().position(|(j, other)| self.run(j, other) == run).unwrap_or(i);
            for figure in &result.figures {
                let at = *place.entry((&figure.label, &figure.unit)).or_insert_with(|| {
                    figures.push(Compared {
                        label: figure.label.clone(),
                        unit: figure.unit.clone(),
                        resolution: figure.resolution,
                        a: Vec::new(),
                        b: Vec::new(),
                    });
                    values.push(BTreeMap::new());
                    figures.len() - 1
                });
                if self.unit == Unit::Machine {
                    let machines = of_machines(figure);
                    let alone = |value| Repetition { pair: None, values: vec![value] };
                    values[at].extend(machines.into_iter().map(|(m, value)| (m as usize, alone(value))));
                } else {
                    let pair = self.pairs[which].get(&run).copied();
                    let first = Repetition { pair, values: Vec::new() };
                    values[at].entry(number).or_insert(first).values.push(figure.value());
                }
            }
        }
        for (figure, values) in figures.iter_mut().zip(values) {
            let one = |Repetition { pair, values }| Replicate {
                value: median(values.into_iter()).unwrap_or_default(),
                pair,
            };
            figure.a = values.into_values().map(one).collect();
        }
        figures
    }
}

/// What one boot, process or machine says of a figure.
struct Repetition {
    pair: Option<u32>,
    values: Vec<f64>,
}

/// A value for each machine: the median of what was measured on it.
fn of_machines(figure: &Figure) -> BTreeMap<u32, f64> {
    let mut machines: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for sample in &figure.samples {
        machines.entry(sample.machine).or_default().push(sample.value);
    }
    machines.into_iter().filter_map(|(m, values)| Some((m, median(values.into_iter())?))).collect()
}

/// The pairs of two sides that took turns: one of each, and none began before the one before it had ended.
fn in_turn<'a>(sides: [Vec<(Run<'a>, f64, f64)>; 2]) -> Option<[HashMap<Run<'a>, u32>; 2]> {
    let mut all: Vec<(usize, Run, f64, f64)> = Vec::new();
    for (which, runs) in sides.into_iter().enumerate() {
        all.extend(runs.into_iter().map(|(run, first, last)| (which, run, first, last)));
    }
    all.sort_by(|a, b| a.2.total_cmp(&b.2));
    let apart = all.windows(2).all(|two| two[0].3 < two[1].2);
    let turns = all.len().is_multiple_of(2) && all.chunks(2).all(|two| two[0].0 != two[1].0);
    (apart && turns).then(|| {
        let mut pairs = [HashMap::new(), HashMap::new()];
        for (number, two) in (0..).zip(all.chunks(2)) {
            for (which, run, ..) in two {
                pairs[*which].insert(*run, number);
            }
        }
        pairs
    })
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;
    use crate::report::{Premise, Sample, json};

    fn example() -> Report {
        let bytes = include_bytes!("../../../tests/data/dirty-log.json");
        json::parse(bytes, std::path::Path::new("dirty-log.json")).unwrap().remove(0)
    }

    /// A result of rounds that have a machine each.
    fn rounds(values: &[f64]) -> Report {
        let samples = (0..).zip(values).map(|(round, &value)| Sample::of_round(round, value)).collect();
        with("t", samples)
    }

    fn with(name: &str, samples: Vec<Sample>) -> Report {
        let mut report = Report { figures: Vec::new(), headline: None, ..example() };
        report.samples(name, "s", samples);
        report
    }

    /// Results of one value each, measured at these times in these boots.
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
        compare(Side { name: "a.json", results: a }, Side { name: "b.json", results: b })
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn emulated_against_real_is_refused_and_named() {
        let mut emulated = example();
        emulated.host.emulated = true;
        emulated.host.bed = "svm".into();
        for (a, b) in
            [(&[example()][..], &[emulated.clone()][..]), (&[emulated.clone()][..], &[example()][..])]
        {
            let error = error(a, b);
            assert!(error.contains("emulated host (svm)") && error.contains("b.json"), "{error}");
        }
        // A set that is mixed in itself is no better.
        let error = error(&[example(), emulated], &[example()]);
        assert!(error.contains("result 2 of a.json"), "{error}");
    }

    #[test]
    fn rounds_of_one_boot_are_replicates_and_no_pairs() {
        let question = weighed(&[rounds(&[1.0, 1.1, 1.2, 1.3])], &[rounds(&[0.71, 0.76, 0.85, 0.91])]);
        assert_eq!((question.unit, question.rows[0].is_paired()), (Unit::Machine, false));
        assert_eq!(question.rows[0].verdict, Verdict::Differs);
        let noise = weighed(&[rounds(&[1.00, 1.05, 0.95, 1.02])], &[rounds(&[1.03, 1.00, 0.99, 1.01])]);
        assert_eq!(noise.rows[0].verdict, Verdict::Noise);
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
        assert_eq!((question.rows[0].of.a.len(), question.rows[0].verdict), (1, Verdict::TooFew));
    }

    #[test]
    fn one_boot_of_each_side_claims_nothing() {
        let mut b = rounds(&[0.5, 0.51, 0.49, 0.5, 0.52]);
        b.host.boot = "another".into();
        let question = weighed(&[rounds(&[1.0, 1.01, 0.99, 1.0, 1.02])], &[b]);
        assert_eq!((question.unit, question.least), (Unit::Boot, 5));
        assert_eq!(question.rows[0].verdict, Verdict::TooFew);
    }

    #[test]
    fn boots_that_took_turns_are_pairs() {
        let a = at(&[
            (1.0, 10.0, "a1"),
            (2.0, 30.0, "a2"),
            (4.0, 50.0, "a3"),
            (8.0, 70.0, "a4"),
            (16.0, 90.0, "a5"),
        ]);
        let b = at(&[
            (1.1, 20.0, "b1"),
            (2.21, 40.0, "b2"),
            (4.39, 60.0, "b3"),
            (8.8, 80.0, "b4"),
            (17.6, 100.0, "b5"),
        ]);
        let turns = weighed(&a, &b);
        assert!(turns.rows[0].is_paired());
        assert_eq!((turns.unit, turns.rows[0].verdict), (Unit::Boot, Verdict::Differs));
        // The same values, first all of one side and then all of the other.
        let mut later = b;
        later.iter_mut().for_each(|report| report.at += 1000.0);
        let apart = weighed(&a, &later);
        assert!(!apart.rows[0].is_paired());
        assert_eq!(apart.rows[0].verdict, Verdict::Noise);
    }

    #[test]
    fn processes_that_took_turns_are_pairs_in_either_order() {
        let a = at(&[(1.0, 1.0, "x"), (2.0, 4.0, "x"), (4.0, 5.0, "x")]);
        let b = at(&[(1.1, 2.0, "x"), (2.21, 3.0, "x"), (4.39, 6.0, "x")]);
        let question = weighed(&a, &b);
        assert_eq!((question.unit, question.rows[0].is_paired()), (Unit::Process, true));
        let uneven = weighed(&a, &b[..2]);
        assert!(!uneven.rows[0].is_paired());
        assert_eq!(uneven.rows[0].verdict, Verdict::TooFew);
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
        assert_eq!(verdicts, [Verdict::Equal; 2]);
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
        let text = both.unwrap().text(100);
        assert!(text.contains("INVALID, B, result 1: on one CPU"), "{text}");
        assert!(text.contains("CUT OFF, B, result 1: ended in round 3 of 500"), "{text}");
    }
}
