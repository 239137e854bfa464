//! `cargo lab compare`: a series' benchmarks on the pristine and the patched kernel, in turn: A B A B.
//!
//! Two boots of each tell the difference between kernels from the difference between boots. Every command also yields
//! a figure of the laboratory's own, the instructions that the whole host ran for it; a command that writes a result
//! (`{json}`) adds its own figures. Time on an emulated host is instructions and is given as such, so idle time would be
//! counted too: a run whose host idled for more than 1 % of it is refused. What the kernel's locks did is counted by kernels
//! of another configuration, [`locks`], and on two CPUs that alone. What each [`boot`] gave is kept until all have: a comparison that
//! was stopped goes on from there.

pub mod boot;
pub mod locks;
pub mod metal;

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vellum::report::{Report, html};

use self::boot::{Boot, Hosts, Sample};
use crate::artifacts::Programs;
use crate::bed::{self, BEDS, Emulated};
use crate::cache::Cache;
use crate::kernel::build::{self, Image};
use crate::kernel::series::{self, Bench, Series, by_host};
use crate::kernel::tree;
use crate::kernel::{BASES, Base};
use crate::{Error, Result};

/// Boots of each kernel.
const ROUNDS: usize = 2;

/// One figure, before and after.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The command.
    pub bench: String,
    /// The figure's name.
    pub figure: String,
    /// Its unit.
    pub unit: String,
    /// On the pristine kernel, a boot each.
    pub before: Vec<f64>,
    /// On the patched kernel.
    pub after: Vec<f64>,
    /// `svm npt=0`, `vmx ept=1 pml`.
    pub bed: String,
    /// The largest idle share of the runs that it comes from.
    pub idle: f64,
}

impl Row {
    /// Means of the boots, after by before; `None` where there is nothing to divide by.
    pub fn ratio(&self) -> Option<f64> {
        let (before, after) = (mean(&self.before), mean(&self.after));
        (before != 0.0).then(|| after / before)
    }

    /// The larger of the two kernels' differences between boots, by its mean.
    pub fn spread(&self) -> f64 {
        let of = |samples: &[f64]| {
            let (min, max) = samples.iter().fold((f64::MAX, f64::MIN), |(a, b), &x| (a.min(x), b.max(x)));
            let mean = mean(samples);
            if mean == 0.0 { 0.0 } else { (max - min) / mean }
        };
        of(&self.before).max(of(&self.after))
    }
}

fn mean(samples: &[f64]) -> f64 {
    samples.iter().sum::<f64>() / samples.len() as f64
}

/// What was compared, as it is kept for `cargo lab list`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Comparison {
    /// `5.10/pte-list-desc`.
    pub series: String,
    /// The kernels, as they call themselves.
    pub before: String,
    /// As above.
    pub after: String,
    /// The figures.
    pub rows: Vec<Row>,
}

/// The processor that hosts of a comparison have.
#[derive(Clone, Copy, Debug)]
pub struct Processor {
    /// Whose it is.
    pub bed: Emulated,
    /// With page-modification logging.
    pub pml: bool,
}

impl Processor {
    /// Every one there is.
    pub fn all() -> impl Iterator<Item = Self> {
        let processors = BEDS.iter().flat_map(|&bed| [false, true].map(|pml| Self { bed, pml }));
        processors.filter(|processor| !processor.pml || processor.bed.has_pml().is_ok())
    }

    fn name(self) -> String {
        format!("{}{}", self.bed.name(), if self.pml { "-pml" } else { "" })
    }

    fn label(self, second_stage: bool) -> String {
        self.bed.label(second_stage, self.pml)
    }
}

/// Where the last comparison of `series` on such hosts, or of its base with `other`, is kept.
pub fn kept(cache: &Cache, series: &Series, other: Option<&Base>, processor: Processor) -> PathBuf {
    let what =
        other.map_or_else(|| series.name.clone(), |other| format!("{}-on-{}", series.name, other.name));
    cache.path(&format!("compare/{}-{what}-{}", series.base.name, processor.name()))
}

/// Where that on this very machine is kept.
pub fn kept_of_metal(cache: &Cache, series: &Series) -> PathBuf {
    cache.path(&format!("compare/{}-{}-metal", series.base.name, series.name))
}

/// The last comparisons of `series` that were kept here: on every processor, with other bases, on this machine itself.
fn last(cache: &Cache, series: &Series) -> Vec<Comparison> {
    let others = || BASES.iter().filter(|base| *base != series.base).map(Some);
    let emulated = Processor::all().flat_map(|processor| {
        std::iter::once(None).chain(others()).map(move |other| kept(cache, series, other, processor))
    });
    emulated
        .chain([kept_of_metal(cache, series)])
        .filter_map(|dir| serde_json::from_slice(&fs::read(dir.join("comparison.json")).ok()?).ok())
        .collect()
}

/// Every series, what it claims, and the figure that says so of each comparison that was kept here.
pub fn list(cache: &Cache) -> Result<String> {
    let mut list = String::new();
    for series in series::all()? {
        let (base, name) = (series.base.name, &series.name);
        list += &format!("{base}/{name}: {} patches; {}\n", series.patches.len(), series.about.claim);
        let last = last(cache, &series);
        for comparison in &last {
            let headline = |row: &&Row| row.figure == series.about.headline;
            let Some(row) = comparison.rows.iter().find(headline).or(comparison.rows.first()) else {
                continue;
            };
            let ratio = row.ratio().map_or("-".into(), |ratio| format!("{ratio:.3}"));
            let Row { figure, bed, bench, .. } = row;
            let after = &comparison.after;
            list += &format!("  last measured here: {figure} x {ratio} ({bed}: {bench}; {after})\n");
        }
        if last.is_empty() {
            list += &format!("  not measured here: cargo lab compare {name}\n");
        }
    }
    Ok(list)
}

/// Compares the pristine kernel with the patched one, or with the pristine one of `other`; prints the table, and keeps it and
/// every result (as JSON, and as a page) in `out`.
pub fn compare(
    cache: &Cache,
    series: &Series,
    other: Option<&'static Base>,
    processor: Processor,
    out: &Path,
) -> Result<()> {
    let (benches, left_out) = chosen(series, other, processor.bed);
    for bench in left_out {
        eprintln!("lab: `{}` is for {} alone: with --on, its host would idle", bench.run, series.base.name);
    }
    if benches.is_empty() {
        return Err(Error::Series(format!(
            "{}: its series.toml names no [[bench]] for {}",
            series.name,
            processor.bed.name()
        )));
    }
    let base = series.base;
    let kernels = |variant| -> Result<[Image; 2]> {
        let after = match other {
            None => build::build(cache, base, std::slice::from_ref(series), variant),
            Some(other) => build::build(cache, other, &[], variant),
        };
        Ok([build::build(cache, base, &[], variant)?, after?])
    };
    let [before, after] = kernels(None)?;
    let hosts = Hosts { cache, programs: Programs::build()?, processor, kept: out.join("boots") };
    let mut rows = Vec::new();
    let mut results = Vec::new();
    for group in by_host(&benches) {
        let counting = if group[0].locks.is_empty() { None } else { Some(kernels(Some(locks::VARIANT))?) };
        let images = counting.as_ref().map_or([&before, &after], |[before, after]| [before, after]);
        let mut boots: [Vec<Boot>; 2] = [Vec::new(), Vec::new()];
        for round in 1..=ROUNDS {
            for (side, image) in images.into_iter().enumerate() {
                boots[side].push(hosts.boot(image, &group, round)?);
            }
        }
        for (index, bench) in group.iter().enumerate() {
            let of_bench = |boots: &mut Vec<Boot>| -> Vec<Sample> {
                boots.iter_mut().for_each(|boot| results.append(&mut boot.benches[index].reports));
                boots.iter().map(|boot| boot.benches[index].sample.clone()).collect()
            };
            let sides = boots.each_mut().map(of_bench);
            rows.extend(rows_of(bench, &label(processor, bench), &sides));
        }
    }
    let comparison = Comparison {
        series: format!("{}/{}", series.base.name, series.name),
        before: before.label,
        after: after.label,
        rows,
    };
    deliver(&comparison, &results, out)?;
    tree::remove(&hosts.kept)?;
    println!(
        "An emulated host: times are instructions, {} ns each by its clock, without the cost of caches or TLBs.",
        processor.bed.nanoseconds_per_instruction()
    );
    Ok(())
}

/// The benchmarks for a comparison on `bed`, and those that are left out because it is with the base `other`.
fn chosen<'a>(series: &'a Series, other: Option<&Base>, bed: Emulated) -> (Vec<&'a Bench>, Vec<&'a Bench>) {
    let of_bed = series.about.bench.iter().filter(|bench| bench.runs_on(bed));
    of_bed.partition(|bench| other.is_none() || !bench.own_base)
}

/// The host of a row.
fn label(processor: Processor, bench: &Bench) -> String {
    let mut words = vec![processor.label(bench.npt)];
    words.extend(bench.parameters.iter().cloned());
    words.extend(bench.multi.then(|| bed::AT_ONCE.to_owned()));
    words.extend((!bench.locks.is_empty()).then(|| locks::VARIANT.to_owned()));
    words.join(" ")
}

/// Prints the table, and keeps it and the results in `out`.
fn deliver(comparison: &Comparison, results: &[Report], out: &Path) -> Result<()> {
    print!("{}", table(comparison));
    fs::create_dir_all(out).map_err(Error::file("create", out))?;
    let keep = |name: &str, content: String| {
        let path = out.join(name);
        fs::write(&path, content).map_err(Error::file("write", &path))
    };
    let text = |value: serde_json::Result<String>| value.expect("results are plain data");
    for old in ["results.json", "results.html"] {
        tree::remove(&out.join(old))?;
    }
    keep("comparison.json", text(serde_json::to_string_pretty(comparison)))?;
    if !results.is_empty() {
        keep("results.json", text(serde_json::to_string(results)))?;
        keep("results.html", html::render(results))?;
    }
    println!("\nKept in {}", out.display());
    Ok(())
}

/// The rows of one command: its samples on the pristine and on the patched kernel.
fn rows_of(bench: &Bench, bed: &str, sides: &[Vec<Sample>; 2]) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for (side, samples) in sides.iter().enumerate() {
        for sample in samples {
            for (figure, unit, value) in &sample.figures {
                let known = rows.iter().position(|row| row.figure == *figure);
                let row = known.unwrap_or_else(|| {
                    let (bench, bed) = (bench.run.clone(), bed.to_owned());
                    let (figure, unit) = (figure.clone(), unit.clone());
                    rows.push(Row { bench, figure, unit, before: vec![], after: vec![], bed, idle: 0.0 });
                    rows.len() - 1
                });
                let row = &mut rows[row];
                row.idle = row.idle.max(sample.idle);
                if side == 0 { &mut row.before } else { &mut row.after }.push(*value);
            }
        }
    }
    // A figure that only one kernel has (a counter that the series adds) has no ratio.
    rows.retain(|row| !row.before.is_empty() && !row.after.is_empty());
    rows
}

/// The table, a block a command.
pub fn table(comparison: &Comparison) -> String {
    let mut out = format!("{}: {} against {}\n", comparison.series, comparison.after, comparison.before);
    let mut bench = None;
    for row in &comparison.rows {
        let heading = (&row.bench, &row.bed);
        if bench != Some(heading) {
            bench = Some(heading);
            out += &format!("\n{} ({}, idle {:.2} %)\n", row.bench, row.bed, row.idle * 100.0);
            out += &format!(
                "  {:36} {:>16} {:>16} {:>8} {:>8}  unit\n",
                "figure", "before", "after", "ratio", "spread"
            );
        }
        let ratio = row.ratio().map_or("-".into(), |ratio| format!("{ratio:.4}"));
        let (before, after) = (number(mean(&row.before)), number(mean(&row.after)));
        let spread = format!("{:.2} %", row.spread() * 100.0);
        out +=
            &format!("  {:36} {before:>16} {after:>16} {ratio:>8} {spread:>8}  {}\n", row.figure, row.unit);
    }
    out
}

fn number(value: f64) -> String {
    if value.abs() >= 1000.0 || value == value.trunc() {
        return format!("{value:.0}");
    }
    // Four digits that tell something: `metal` gives microseconds in seconds.
    let decimals = (3.0 - value.abs().log10().floor()).clamp(4.0, 12.0);
    format!("{value:.*}", decimals as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(before: &[f64], after: &[f64]) -> Row {
        Row {
            bench: "b".into(),
            figure: "f".into(),
            unit: "ns".into(),
            before: before.to_vec(),
            after: after.to_vec(),
            bed: "svm npt=1".into(),
            idle: 0.0,
        }
    }

    #[test]
    fn what_would_idle_on_another_base_is_left_out_there_alone() {
        let series = series::named("tdp-mmu-parallel-faults").unwrap();
        let counts = |other| {
            let (benches, left_out) = chosen(&series, other, BEDS[0]);
            (benches.len(), left_out.len())
        };
        let (all, own) =
            (series.about.bench.len(), series.about.bench.iter().filter(|bench| bench.own_base).count());
        assert!(own > 0);
        assert_eq!((counts(None), counts(Some(&BASES[1]))), ((all, 0), (all - own, own)));
    }

    #[test]
    fn numbers_have_digits_enough() {
        assert_eq!([0.0, 12345.6, 12.5, 0.000030664].map(number), ["0", "12346", "12.5000", "0.00003066"]);
    }

    #[test]
    fn the_ratio_is_of_means_and_the_spread_of_boots() {
        let row = row(&[100.0, 102.0], &[50.0, 50.0]);
        assert!((row.ratio().unwrap() - 50.0 / 101.0).abs() < 1e-12);
        assert!((row.spread() - 2.0 / 101.0).abs() < 1e-12);
        assert_eq!(super::Row { before: vec![0.0], ..row }.ratio(), None);
    }
}
