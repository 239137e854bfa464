//! What two sets of results repeat (boots, processes or VMs), and which repetitions were measured
//! in turn and form pairs.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::{Compared, Replicate, Unit};
use crate::Report;
use crate::figure::{Figure, Label, median};

/// The unit of repetition and the pairs.
pub(super) struct Repeated<'a> {
    /// What counts as one repetition.
    pub(super) unit: Unit,
    /// For each side, the pair number of each boot or process, if they were measured in turn.
    pairs: [HashMap<Run<'a>, u32>; 2],
}

/// A boot or a process.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Run<'a> {
    Boot(&'a str),
    Process(usize),
}

impl<'a> Repeated<'a> {
    /// Finds the unit and the pairs of both sides' results.
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

    /// A side's boots or processes, with the first and last time of measurement.
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

    /// A side's figures, with its replicates in [`Compared::a`].
    pub(super) fn replicates(&self, side: &[&'a Report], which: usize) -> Vec<Compared> {
        let mut figures: Vec<Compared> = Vec::new();
        let mut place: HashMap<(&Label, &str), usize> = HashMap::new();
        // By number, in order of appearance: boot IDs have no order.
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

/// The values of a figure in one boot, process or VM.
struct Repetition {
    pair: Option<u32>,
    values: Vec<f64>,
}

/// One value per VM: the median of its samples.
fn of_machines(figure: &Figure) -> BTreeMap<u32, f64> {
    let mut machines: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for sample in &figure.samples {
        machines.entry(sample.machine).or_default().push(sample.value);
    }
    machines.into_iter().filter_map(|(m, values)| Some((m, median(values.into_iter())?))).collect()
}

/// Pairs two sides that took turns: each pair has one run of each side, and no run began before the
/// previous one ended.
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

/// The boots that `results` come from.
pub(super) fn boots<'a>(results: &[&'a Report]) -> HashSet<&'a str> {
    results.iter().map(|result| result.host.boot.as_str()).collect()
}
