//! Turns two sets of results into figures to compare: matches results by their parameters and finds
//! replicates and pairs. Results that cannot be compared are refused: emulated time and real time
//! have no ratio.

use std::collections::{HashMap, HashSet};

use super::repeated::{Repeated, boots};
use super::{Compared, FigureVerdict, Policy, Unit, Weighed, weigh};
use crate::{Report, printable, terminal};

/// Why two sets cannot be compared. Each message is one line.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum Error {
    /// Instructions against seconds.
    #[error(
        "{emulated} was measured on an emulated host ({bed}), {real} on a real one: instructions and seconds have no ratio; compare results of one kind"
    )]
    EmulatedWithReal {
        /// The side, with the number of the result if it has several.
        emulated: String,
        /// Its bed.
        bed: String,
        /// The other side.
        real: String,
    },
    /// The sides have no command and parameters in common.
    #[error("{a} holds {what_a}, {b} holds {what_b}: no results match; compare results of one command")]
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

/// One side: its name and its results.
#[derive(Clone, Copy)]
pub struct Side<'a> {
    /// The name as the user gave it.
    pub name: &'a str,
    /// At least one result.
    pub results: &'a [Report],
}

/// Two sets of results, compared question by question.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Commands with parameters that both sides ran.
    pub questions: Vec<Question>,
    /// Commands with parameters that only one side ran.
    pub alone: Vec<Alone>,
}

impl Comparison {
    /// The figures of B that take more than `percent` longer than those of A, with by how many
    /// percent. `None` if nothing that varies could be compared for lack of results.
    pub fn slower_than(&self, percent: f64) -> Option<Vec<(String, f64)>> {
        let rows = || self.questions.iter().flat_map(|question| &question.rows);
        let open = |row: &&Weighed| matches!(row.verdict, FigureVerdict::TooFew | FigureVerdict::NoRatio);
        // Counts that are the same on both sides, such as pages, say nothing about the others.
        let varies = || rows().filter(|row| row.verdict != FigureVerdict::Equal);
        if rows().next().is_none() || (varies().next().is_some() && varies().all(|row| open(&row))) {
            return None;
        }
        let by = |row: &Weighed| Some((printable(&row.of.label.to_string()).into_owned(), row.slower_by()?));
        Some(rows().filter_map(by).filter(|(_, by)| *by > percent).collect())
    }
}

/// A command with parameters that only one side ran.
#[derive(Clone, Debug, PartialEq)]
pub struct Alone {
    /// The side.
    pub side: String,
    /// The result's name.
    pub name: String,
    /// The command line.
    pub command: Vec<String>,
}

/// The results of both sides for the same command and parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// The results' name.
    pub name: String,
    /// A and B.
    pub sides: [Asked; 2],
    /// Parameters and host facts that are equal on both sides.
    pub both: Vec<(String, String)>,
    /// Parameters and host facts that differ.
    pub differs: Vec<Differs>,
    /// The unit of repetition.
    pub unit: Unit,
    /// The minimum number of replicates on each side.
    pub least: usize,
    /// The compared figures.
    pub rows: Vec<Weighed>,
}

impl Question {
    /// What the verdicts rest on, in words.
    pub(crate) fn repeated(&self) -> String {
        let why = match self.unit {
            Unit::Boot => "boots (the sides have none in common)",
            Unit::Process => "processes",
            Unit::Machine => "machines of one process on each side (run-to-run variation was not measured)",
        };
        format!("{why}; at least {} per side are needed to claim a difference", self.least)
    }
}

/// One side of a question.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// The name as the user gave it.
    pub name: String,
    /// The first result's command.
    pub command: Vec<String>,
    /// The number of results.
    pub results: usize,
    /// The number of boots.
    pub boots: usize,
    /// Warnings to read before the figures.
    pub warnings: Vec<Warning>,
    /// Figures that the other side lacks.
    pub alone: Vec<String>,
}

impl Asked {
    /// The number of results and boots, in words.
    pub fn counted(&self) -> String {
        let of = |n: usize, one: &str, more: &str| format!("{n} {}", if n == 1 { one } else { more });
        format!("{} of {}", of(self.results, "result", "results"), of(self.boots, "boot", "boots"))
    }
}

/// A reason to distrust a result.
#[derive(Clone, Debug, PartialEq)]
pub struct Warning {
    /// `INVALID`, `CUT OFF` or `NOT RUN`.
    pub kind: &'static str,
    /// The result's number and the reason.
    pub text: String,
}

/// A parameter or host fact that differs.
#[derive(Clone, Debug, PartialEq)]
pub struct Differs {
    /// A parameter, or a fact about the host.
    pub key: String,
    /// The value on the first side.
    pub a: String,
    /// The value on the second side.
    pub b: String,
}

/// Compares two sets of results.
pub fn compare(a: Side, b: Side) -> Result<Comparison, Error> {
    same_time(a, b)?;
    let (by_a, by_b) = (by_question(a.results), by_question(b.results));
    let mut comparison = Comparison { questions: Vec::new(), alone: Vec::new() };
    let names = [a.name, b.name];
    match (&by_a[..], &by_b[..]) {
        // One question on each side: the parameters may differ, which is often the point of the
        // comparison.
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

/// Groups results by command and parameters, in order of first appearance. The seed is ignored.
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
        result.not_run.iter().for_each(|what| warn("NOT RUN", what));
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

/// Parameters and host facts as key-value pairs. The boot ID is left out.
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

/// Splits the facts into equal and different ones, in the order of the first side and then of the
/// second.
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

#[cfg(test)]
mod tests;
