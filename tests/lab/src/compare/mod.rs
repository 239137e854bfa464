//! `cargo lab compare`: runs a series' benchmarks on the pristine and the patched kernel,
//! alternating: A B A B.
//!
//! Consecutive boots are pairs. [`vellum_report::compare`] weighs them, as it weighs Vellum's own
//! results. The test host's [`Policy`] sets the number of boots. Every command yields a figure of
//! the laboratory's own, the instructions that the whole host ran for it. A command that writes a
//! result (`{json}`) adds its figures. Time on an emulated host is given as instructions, which
//! would include idle time, so a run with more than 1 % idle time is refused. Lock statistics need
//! kernels of another configuration ([`locks`]); on two CPUs they are the only figures. The results
//! of each [`boot`] are kept until all boots are done, so a stopped comparison continues from
//! there.

pub mod boot;
pub mod calls;
pub mod locks;
pub mod metal;
pub mod own;
pub mod speed;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vellum_report::compare::{self as weighing, Compared, Policy, Replicate, Weighed, weigh};
use vellum_report::{Case, Label, Report, Status, html, terminal};

use self::boot::{Boot, Hosts, Sample};
use crate::architecture::Architecture;
use crate::artifacts::Programs;
use crate::cache::Cache;
use crate::form;
use crate::hosts::{self, Emulated, HOSTS};
use crate::kernel::bench::{Bench, by_host};
use crate::kernel::build::{self, Image};
use crate::kernel::series::{self, Series};
use crate::kernel::tree;
use crate::kernel::{BASES, Base};
use crate::{Error, Result};

/// Boots of each kernel on an emulated host.
const ROUNDS: usize = Policy::EMULATED.boots;

/// One figure, before and after.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row<T> {
    /// The command.
    pub bench: String,
    /// `svm npt=0`, `vmx ept=1 pml`.
    pub bed: String,
    /// The largest idle share of the runs that it comes from.
    pub idle: f64,
    /// The figure itself.
    pub figure: T,
}

/// Weighs all rows of a comparison together. One of them may be the `headline`.
fn weighed(rows: Vec<Row<Compared>>, headline: &str, policy: Policy) -> Vec<Row<Weighed>> {
    let label = rows.iter().map(|row| &row.figure.label).find(|label| label.to_string() == headline).cloned();
    let figures = rows.iter().map(|row| row.figure.clone()).collect();
    let weighed = weigh(figures, label.as_ref(), policy.boots, policy);
    let row = |(row, figure): (Row<Compared>, Weighed)| {
        let Row { bench, bed, idle, .. } = row;
        Row { bench, bed, idle, figure }
    };
    rows.into_iter().zip(weighed).map(row).collect()
}

/// A comparison as it is kept for `cargo lab list`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Comparison {
    /// `5.10/pte-list-desc`.
    pub series: String,
    /// The name of the pristine kernel.
    pub before: String,
    /// The name of the other kernel.
    pub after: String,
    /// The figures.
    pub rows: Vec<Row<Weighed>>,
}

/// The processor of a comparison's hosts. The emulated host that has it.
#[derive(Clone, Copy, Debug)]
pub struct Processor {
    /// Whose it is.
    pub bed: Emulated,
    /// With page-modification logging.
    pub pml: bool,
}

impl Processor {
    /// All processors of all emulated hosts.
    pub fn all() -> impl Iterator<Item = Self> {
        let processors = HOSTS.iter().flat_map(|&bed| [false, true].map(|pml| Self { bed, pml }));
        processors.filter(|processor| !processor.pml || processor.bed.has_pml().is_ok())
    }

    fn name(self) -> String {
        format!("{}{}", self.bed.name(), if self.pml { "-pml" } else { "" })
    }

    fn label(self, second_stage: bool) -> String {
        self.bed.label(second_stage, self.pml)
    }
}

/// Where the last comparison of `series` on `processor` is kept, or of its base with `other`.
pub fn kept(cache: &Cache, series: &Series, other: Option<&Base>, processor: Processor) -> PathBuf {
    let what =
        other.map_or_else(|| series.name.clone(), |other| format!("{}-on-{}", series.name, other.name));
    cache.path(&format!("compare/{}-{what}-{}", series.base.name, processor.name()))
}

/// Where the comparison on this machine itself is kept.
pub fn kept_of_metal(cache: &Cache, series: &Series) -> PathBuf {
    cache.path(&format!("compare/{}-{}-metal", series.base.name, series.name))
}

/// The last comparisons of `series` that are kept here: on every processor, with other bases, and
/// on this machine itself.
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

/// Lists every series, its claim, and the headline figure of each comparison kept here.
pub fn list(cache: &Cache) -> Result<String> {
    let mut list = String::new();
    for series in series::all()? {
        let (base, name) = (series.base.name, &series.name);
        list += &format!("{base}/{name}: {} patches; {}\n", series.patches.len(), series.about.claim);
        let last = last(cache, &series);
        for comparison in &last {
            let Some(row) =
                comparison.rows.iter().find(|row| row.figure.headline).or(comparison.rows.first())
            else {
                continue;
            };
            let ratio = row.figure.ratio.map_or("-".into(), |ratio| format!("{ratio:.3}"));
            let Row { bed, bench, figure, .. } = row;
            let figure = &figure.of.label;
            let after = &comparison.after;
            list += &format!("  last measured here: {figure} x {ratio} ({bed}: {bench}; {after})\n");
        }
        if last.is_empty() {
            list += &format!("  not measured here: cargo lab compare {base}/{name}\n");
        }
    }
    Ok(list)
}

/// The comparison kept in `dir` as a result: a case and a ratio for each row.
pub fn as_report(dir: &Path, name: &str) -> Report {
    let mut report = form::report(name);
    let kept = fs::read(dir.join("comparison.json")).ok();
    let Some(comparison) = kept.and_then(|bytes| serde_json::from_slice::<Comparison>(&bytes).ok()) else {
        let case = Case::new(name, Status::Skip)
            .because("there is no table yet")
            .mended_by("collect the boots that are left");
        form::add(&mut report, case);
        return report;
    };
    report.notes.push(format!("before: {}; after: {}", comparison.before, comparison.after));
    for row in &comparison.rows {
        let what = format!("{}/{}/{}", row.bed, row.bench, row.figure.of.label);
        let case = Case::new(&what, Status::Pass);
        match row.figure.ratio {
            Some(ratio) => {
                report.figure(Label::of("ratio", &what), "x", ratio);
                form::add(&mut report, case);
            }
            None => form::add(
                &mut report,
                Case { status: Status::Skip, ..case.because("it has no ratio: a side is zero") },
            ),
        }
    }
    report
}

/// Compares the pristine kernel with the patched one, or with the pristine kernel of `other`.
/// Prints the table, and keeps it and every result (as JSON and as a page) in `out`.
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
    let (base, architecture) = (series.base, processor.bed.architecture());
    if series.architecture()? == Architecture::Arm && architecture != Architecture::Arm {
        return Err(Error::Usage(format!(
            "--bed {}: {} changes files of arm64 alone; use --bed arm64, or leave it out",
            processor.bed.name(),
            series.name
        )));
    }
    let kernels = |variant: Option<&str>| -> Result<[Image; 2]> {
        let after = match other {
            None => build::build_for(cache, architecture, base, std::slice::from_ref(series), variant),
            Some(other) => build::build_for(cache, architecture, other, &[], variant),
        };
        Ok([build::build_for(cache, architecture, base, &[], variant)?, after?])
    };
    let subject = Subject {
        name: format!("{}/{}", series.base.name, series.name),
        headline: &series.about.headline,
        benches: &benches,
        is_patched: other.is_none(),
        kernels: &kernels,
    };
    measure(cache, &subject, processor, out)
}

/// A comparison's subject.
struct Subject<'a> {
    /// Its name in the table.
    name: String,
    /// The name of the headline figure.
    headline: &'a str,
    /// The commands that run on both kernels.
    benches: &'a [&'a Bench],
    /// Whether the second kernel is the first with a series. Its commands may then ask more of it.
    is_patched: bool,
    /// Builds both kernels of a variant.
    kernels: &'a dyn Fn(Option<&str>) -> Result<[Image; 2]>,
}

/// Boots both kernels alternately and weighs their results.
fn measure(cache: &Cache, subject: &Subject<'_>, processor: Processor, out: &Path) -> Result<()> {
    let Subject { name, headline, benches, is_patched, kernels } = subject;
    let [before, after] = kernels(None)?;
    let guests = boot::guests(cache, benches)?;
    let programs = Programs::build_for(processor.bed.architecture())?;
    let hosts = Hosts { cache, programs, processor, kept: out.join("boots"), guests };
    let mut rows = Vec::new();
    let mut results = Vec::new();
    for group in by_host(benches) {
        let counting = if group[0].locks.is_empty() { None } else { Some(kernels(Some(locks::VARIANT))?) };
        let images = counting.as_ref().map_or([&before, &after], |[before, after]| [before, after]);
        let patched: Vec<Bench> = group.iter().map(|bench| bench.on_the_patched()).collect();
        // Another base's kernel lacks what the series adds, so its commands do not ask for it.
        let sides = [group.clone(), if *is_patched { patched.iter().collect() } else { group.clone() }];
        let mut boots: [Vec<Boot>; 2] = [Vec::new(), Vec::new()];
        for round in 1..=ROUNDS {
            for (side, image) in images.into_iter().enumerate() {
                boots[side].push(hosts.boot(image, &sides[side], round)?);
            }
        }
        for (index, bench) in group.iter().enumerate() {
            let of_bench = |boots: &mut Vec<Boot>| -> Vec<Option<Sample>> {
                boots.iter_mut().for_each(|boot| results.append(&mut boot.benches[index].reports));
                boots.iter().map(|boot| Some(boot.benches[index].sample.clone())).collect()
            };
            let sides = boots.each_mut().map(of_bench);
            rows.extend(rows_of(bench, &label(processor, bench), &sides));
        }
    }
    let comparison = Comparison {
        series: name.clone(),
        before: before.label,
        after: after.label,
        rows: weighed(rows, headline, Policy::EMULATED),
    };
    deliver(&comparison, &results, out)?;
    tree::remove(&hosts.kept)?;
    println!(
        "An emulated host: times are instructions, {} ns each by its clock, without the cost of caches or TLBs.",
        processor.bed.nanoseconds_per_instruction()
    );
    Ok(())
}

/// The benchmarks for a comparison on `bed`, and those left out of a comparison with the base
/// `other`.
fn chosen<'a>(series: &'a Series, other: Option<&Base>, bed: Emulated) -> (Vec<&'a Bench>, Vec<&'a Bench>) {
    let of_bed = series.about.bench.iter().filter(|bench| bench.runs_on(bed));
    of_bed.partition(|bench| other.is_none() || !bench.own_base)
}

/// The label of a row's host.
fn label(processor: Processor, bench: &Bench) -> String {
    let mut words = vec![processor.label(bench.npt)];
    words.extend(bench.cpu.as_ref().map(|cpu| format!("-cpu {cpu}")));
    words.extend(bench.parameters.iter().cloned());
    words.extend(bench.multi.then(|| hosts::AT_ONCE.to_owned()));
    words.extend((!bench.locks.is_empty()).then(|| locks::VARIANT.to_owned()));
    words.extend(bench.after.as_ref().map(|after| format!("B with {after}")));
    words.join(" ")
}

/// Prints the table, and writes it and the results to `out`.
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

/// The rows of one command, from its samples on the pristine and the patched kernel. Boots of the
/// same number are pairs. `None` is a boot that did not run the command.
fn rows_of(bench: &Bench, bed: &str, sides: &[Vec<Option<Sample>>; 2]) -> Vec<Row<Compared>> {
    let mut rows: Vec<Row<Compared>> = Vec::new();
    let mut place: HashMap<Label, usize> = HashMap::new();
    for (side, samples) in sides.iter().enumerate() {
        for (pair, sample) in (0..).zip(samples).filter_map(|(pair, sample)| Some((pair, sample.as_ref()?))) {
            for figure in &sample.figures {
                let at = *place.entry(figure.label.clone()).or_insert_with(|| {
                    let (label, unit) = (figure.label.clone(), figure.unit.clone());
                    let (resolution, a, b) = (figure.resolution, Vec::new(), Vec::new());
                    let figure = Compared { label, unit, resolution, a, b };
                    rows.push(Row { bench: bench.run.clone(), bed: bed.to_owned(), idle: 0.0, figure });
                    rows.len() - 1
                });
                let row = &mut rows[at];
                row.idle = row.idle.max(sample.idle);
                let side = if side == 0 { &mut row.figure.a } else { &mut row.figure.b };
                side.push(Replicate { value: figure.value(), pair: Some(pair) });
            }
        }
    }
    // A figure of one kernel only, such as a counter that the series adds, has no ratio.
    rows.retain(|row| !row.figure.a.is_empty() && !row.figure.b.is_empty());
    rows
}

/// The table, with a block per command. A is the kernel before, B the one after.
pub fn table(comparison: &Comparison) -> String {
    let Comparison { series, before, after, rows } = comparison;
    let mut out = weighing::Tables::new(terminal::WIDTH);
    out.text(&format!("{series}: B {after} against A {before}"));
    for block in rows.chunk_by(|one, other| (&one.bench, &one.bed) == (&other.bench, &other.bed)) {
        let idle = block.iter().map(|row| row.idle).fold(0.0, f64::max);
        out.text(&format!("{} ({}, idle {:.2} %)", block[0].bench, block[0].bed, idle * 100.0));
        let figures: Vec<Weighed> = block.iter().map(|row| row.figure.clone()).collect();
        out.table(&figures);
    }
    out.finish()
}

#[cfg(test)]
mod tests {
    use vellum_report::Figure;
    use vellum_report::compare::FigureVerdict;

    use super::*;

    fn sample(values: &[(&str, f64)]) -> Option<Sample> {
        let figures = values.iter().map(|(name, value)| Figure::once(*name, "instructions", *value));
        Some(Sample { idle: 0.001, figures: figures.collect() })
    }

    fn compared(before: &[f64], after: &[f64], policy: Policy) -> Vec<Row<Weighed>> {
        let side = |values: &[f64]| values.iter().map(|value| sample(&[("f", *value)])).collect();
        let rows = rows_of(&Bench::plain("b", true), "svm npt=1", &[side(before), side(after)]);
        weighed(rows, "f", policy)
    }

    /// Each command in the list must be valid.
    #[test]
    fn the_command_that_is_listed_for_a_series_names_one() {
        let dir = std::env::temp_dir().join(format!("vellum-lab-list-{}", std::process::id()));
        let list = list(&Cache::at(dir.clone()).unwrap()).unwrap();
        let commands: Vec<_> =
            list.lines().filter_map(|line| line.split_once("cargo lab compare ")).collect();
        assert_eq!(commands.len(), series::all().unwrap().len(), "nothing was measured there");
        for (_, name) in commands {
            series::named(name).unwrap();
        }
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn what_would_idle_on_another_base_is_left_out_there_alone() {
        let series = series::named("tdp-mmu-parallel-faults").unwrap();
        let counts = |other| {
            let (benches, left_out) = chosen(&series, other, HOSTS[0]);
            (benches.len(), left_out.len())
        };
        let (all, own) =
            (series.about.bench.len(), series.about.bench.iter().filter(|bench| bench.own_base).count());
        assert!(own > 0);
        assert_eq!((counts(None), counts(Some(&BASES[1]))), ((all, 0), (all - own, own)));
    }

    #[test]
    fn boots_are_pairs_and_the_ratio_is_of_their_means() {
        let rows = compared(&[100.0, 102.0, 101.0], &[50.0, 51.5, 50.5], Policy::EMULATED);
        let [Row { figure, .. }] = rows.as_slice() else { panic!("{rows:?}") };
        assert!(figure.is_paired() && figure.headline);
        assert!((figure.ratio.unwrap() - (0.5f64 * 51.5 / 102.0 * 0.5).cbrt()).abs() < 1e-12);
        assert_eq!(figure.verdict, FigureVerdict::Differs);
    }

    #[test]
    fn boots_that_agree_to_the_last_digit_are_no_certainty() {
        let rows = compared(&[1000.0; 3], &[998.0; 3], Policy::EMULATED);
        assert_eq!(rows[0].figure.verdict, FigureVerdict::Noise);
        let (low, high) = rows[0].figure.interval.unwrap();
        assert!(low < 0.998 && high > 1.0);
        for (boots, policy) in [(2, Policy::EMULATED), (4, Policy::REAL)] {
            let rows = compared(&vec![1000.0; boots], &vec![500.0; boots], policy);
            assert_eq!(rows[0].figure.verdict, FigureVerdict::TooFew, "{boots}");
        }
    }

    #[test]
    fn a_boot_that_did_not_run_a_command_leaves_the_others_their_pairs() {
        let before = vec![sample(&[("f", 1.0)]), None, sample(&[("f", 4.0)])];
        let after = vec![sample(&[("f", 2.0), ("added", 1.0)]), sample(&[("f", 9.0)]), sample(&[("f", 8.0)])];
        let rows = rows_of(&Bench::plain("b", true), "metal", &[before, after]);
        assert_eq!(rows.len(), 1, "what one side alone has is not compared");
        let pairs = |side: &[Replicate]| side.iter().map(|r| r.pair).collect::<Vec<_>>();
        assert_eq!(pairs(&rows[0].figure.a), [Some(0), Some(2)]);
        assert_eq!(pairs(&rows[0].figure.b), [Some(0), Some(1), Some(2)]);
        assert!(!weighed(rows, "f", Policy::REAL)[0].figure.is_paired());
    }

    #[test]
    fn a_table_stands_alone() {
        let rows = compared(&[100.0, 102.0], &[50.0, 51.5], Policy::EMULATED);
        let (series, before, after) = ("5.10/x".to_owned(), "5.10".to_owned(), "5.10 patched".to_owned());
        let text = table(&Comparison { series, before, after, rows });
        for part in ["B 5.10 patched against A 5.10", "b (svm npt=1, idle 0.10 %)", "f *", "Holm"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
