//! What was repeated in two sets of results that were asked alike: boots, processes or machines, and which of them were measured in
//! turn and so are pairs.

use std::collections::{BTreeMap, HashMap};

use super::results::boots;
use super::{Compared, Replicate, Unit};
use crate::Report;
use crate::figure::{Figure, Label, median};

/// What was repeated, and what of it was measured in turn.
pub(super) struct Repeated<'a> {
    /// What counts as one repetition.
    pub(super) unit: Unit,
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
    /// Of the results of both sides.
    pub(super) fn of(a: &[&'a Report], b: &[&'a Report]) -> Self {
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
    pub(super) fn replicates(&self, side: &[&'a Report], which: usize) -> Vec<Compared> {
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
