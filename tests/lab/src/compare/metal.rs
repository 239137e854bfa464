//! A comparison on this machine itself, which only its owner can boot. The kernels are built as
//! Debian packages, and each call under one of them records a boot. The kernels alternate, so that
//! drift from boot to boot affects both. When each has enough boots, which is more than on an
//! emulated host ([`Policy::REAL`]), the table is printed.
//!
//! A call finds its next step by the name of the running kernel. Times are seconds here.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use vellum_report::Figure;
use vellum_report::compare::Policy;

use super::boot::{Sample, written};
use super::{Comparison, deliver, rows_of, weighed};
use crate::artifacts::Programs;
use crate::cache::{Cache, digest};
use crate::hosts::doctor;
use crate::hosts::parameter;
use crate::kernel::bench::Bench;
use crate::kernel::series::Series;
use crate::kernel::tree::{self, Tree};
use crate::kernel::{build, deb};
use crate::{Error, Result};

/// Boots of each kernel.
const ROUNDS: usize = Policy::REAL.boots;

/// The suffixes of the kernels' names: the pristine one's and the series'. The latter contains a
/// digest of the patches, so a changed patch makes another kernel.
fn suffixes(series: &Series) -> Result<[String; 2]> {
    let mut patches = Vec::new();
    for path in &series.patches {
        patches.push(build::change(&fs::read(path).map_err(Error::file("read", path))?).to_vec());
    }
    let key = digest(patches.iter().map(Vec::as_slice));
    Ok(["-vellum-pristine".to_owned(), format!("-vellum-{}-{}", series.name, &key[..6])])
}

/// Takes the next step in the comparison of `series`: building packages, recording a boot, or
/// printing the table.
pub fn compare(cache: &Cache, series: &Series, out: &Path) -> Result<()> {
    let release = read("/proc/sys/kernel/osrelease")?;
    let suffixes = suffixes(series)?;
    // Debian's `5.10.223-1` names itself 5.10.223.
    let version = Tree::package(cache, series.base)?.version;
    let upstream = version.split(['-', '~', '+']).next().unwrap_or_default().to_owned();
    // Figures of other patches or benchmarks must not be averaged with these.
    let benches = format!("{:?}", series.about.bench);
    let what = digest([version.as_bytes(), suffixes[1].as_bytes(), benches.as_bytes()]);
    let home = cache.dir(&format!("metal/{}-{}-{what}", series.base.name, series.name))?;
    match suffixes.iter().position(|suffix| release == format!("{upstream}{suffix}")) {
        None => packages(cache, series, &suffixes),
        Some(side) => {
            let turn = next(&[boots(&home, 0)?, boots(&home, 1)?]);
            if let Some(other) = turn.filter(|turn| *turn != side) {
                return Err(Error::Usage(format!(
                    "it is the other kernel's turn: boot the one whose name ends in {} and run this again there",
                    suffixes[other]
                )));
            }
            collect(series, side, &home)?;
            let boots = [boots(&home, 0)?, boots(&home, 1)?];
            match next(&boots) {
                Some(side) => {
                    println!(
                        "Collected {} boots before and {} after the patches, of {ROUNDS} each. Now boot the kernel whose name ends in \
                         {} and run this again.",
                        boots[0].len(),
                        boots[1].len(),
                        suffixes[side]
                    );
                    Ok(())
                }
                None => {
                    finish(series, &suffixes, &boots, out)?;
                    start_over(&home)
                }
            }
        }
    }
}

/// The side that is to boot next. None if both have enough boots.
fn next(boots: &[Vec<Boot>; 2]) -> Option<usize> {
    match boots.each_ref().map(Vec::len) {
        [before, after] if before >= ROUNDS && after >= ROUNDS => None,
        [before, after] => Some(usize::from(before > after)),
    }
}

/// Removes the boots of a finished comparison, but keeps the identity of the last boot.
fn start_over(home: &Path) -> Result<()> {
    for side in 0..2 {
        for boot in 0.. {
            let file = home.join(format!("{side}-{boot}.json"));
            if !file.exists() {
                break;
            }
            tree::remove(&file)?;
        }
    }
    Ok(())
}

fn packages(cache: &Cache, series: &Series, suffixes: &[String; 2]) -> Result<()> {
    let config = deb::running_config()?;
    let pristine = deb::build(cache, series.base, &[], &suffixes[0], &config)?;
    let patched = deb::build(cache, series.base, std::slice::from_ref(series), &suffixes[1], &config)?;
    let packages = format!("{} {}", pristine.display(), patched.display());
    println!(
        "As root: dpkg -i {packages}\nThen boot the kernel whose name ends in {} (GRUB lists it under \"Advanced options\"), and \
         run this again there: it collects the figures and says what to boot next, {ROUNDS} times each.\nLater, to be rid of \
         them: dpkg -r {} {}",
        suffixes[0],
        deb::package_of(&pristine),
        deb::package_of(&patched),
    );
    Ok(())
}

/// One boot: a sample for each benchmark, `None` if this host does not fit the benchmark.
type Boot = Vec<Option<Sample>>;

fn boots(home: &Path, side: usize) -> Result<Vec<Boot>> {
    let mut boots = Vec::new();
    for boot in 0.. {
        let file = home.join(format!("{side}-{boot}.json"));
        match fs::read(&file) {
            Ok(bytes) => boots.push(serde_json::from_slice(&bytes).map_err(|error| {
                Error::Refused(format!("{}: {error}; remove it and boot that kernel again", file.display()))
            })?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => break,
            Err(error) => return Err(Error::file("read", &file)(error)),
        }
    }
    Ok(boots)
}

fn collect(series: &Series, side: usize, home: &Path) -> Result<()> {
    doctor::kvm().map_err(Error::Usage)?;
    let id = read("/proc/sys/kernel/random/boot_id")?;
    let last = home.join("boot");
    if fs::read_to_string(&last).is_ok_and(|last| last == id) {
        return Err(Error::Usage(
            "the figures of this boot are collected: two runs of one boot are not two boots; reboot first"
                .into(),
        ));
    }
    let programs = Programs::build()?;
    let mut boot: Boot = Vec::new();
    for (index, bench) in series.about.bench.iter().enumerate() {
        if let Some(remedy) = unlike(bench) {
            println!("skipped: `{}`: {remedy}", bench.run);
            boot.push(None);
            continue;
        }
        let json = home.join(format!("result-{index}.json"));
        let line = bench.command(&json.to_string_lossy());
        // The laboratory's own vellum runs, not an installed one.
        let program = if line[0] == "vellum" { programs.vellum.clone() } else { PathBuf::from(&line[0]) };
        // A result that the other kernel wrote must not be taken for this one's.
        tree::remove(&json)?;
        println!("{}", line.join(" "));
        let start = Instant::now();
        let status = Command::new(&program).args(&line[1..]).current_dir(home).status();
        let status = status.map_err(Error::file("start", &program))?;
        if !status.success() {
            return Err(Error::Series(format!("`{}` ended with {status}", line.join(" "))));
        }
        let mut figures = vec![Figure::once("whole_run", "s", start.elapsed().as_secs_f64())];
        let reports = written(bench, fs::read(&json).ok().as_deref())?;
        figures.extend(reports.into_iter().flat_map(|report| report.figures));
        boot.push(Some(Sample { idle: 0.0, figures }));
    }
    let number = boots(home, side)?.len();
    let text = serde_json::to_vec(&boot).expect("samples are plain data");
    for (file, content) in [(home.join(format!("{side}-{number}.json")), text), (last, id.into_bytes())] {
        fs::write(&file, content).map_err(Error::file("write", &file))?;
    }
    Ok(())
}

/// The settings that this host lacks for `bench`, and how to set them.
fn unlike(bench: &Bench) -> Option<String> {
    if !bench.is_for("metal") {
        return Some(format!("it is for {} alone", bench.beds.join(" and ")));
    }
    if !bench.locks.is_empty() {
        return Some("it watches locks, which kernels count for --bed svm alone".into());
    }
    let stages = [("kvm_intel", "ept"), ("kvm_amd", "npt")];
    let stage = stages.iter().find(|(module, _)| Path::new("/sys/module").join(module).exists());
    let stage = stage.map(|(module, name)| format!("{module}.{name}={}", u8::from(bench.npt)));
    let wanted = stage.into_iter().chain(bench.parameters.iter().cloned());
    let differences: Vec<String> = wanted.filter(|setting| parameter::refused(setting).is_some()).collect();
    (!differences.is_empty())
        .then(|| format!("it needs {0}: add {0} to the kernel's command line", differences.join(" ")))
}

fn finish(series: &Series, suffixes: &[String; 2], boots: &[Vec<Boot>; 2], out: &Path) -> Result<()> {
    let mut rows = Vec::new();
    for (index, bench) in series.about.bench.iter().enumerate() {
        let side = |boots: &Vec<Boot>| -> Vec<Option<Sample>> {
            boots.iter().map(|boot| boot.get(index)?.clone()).collect()
        };
        rows.extend(rows_of(bench, "metal", &[side(&boots[0]), side(&boots[1])]));
    }
    let [before, after] = suffixes.clone();
    let rows = weighed(rows, &series.about.headline, Policy::REAL);
    let series = format!("{}/{}", series.base.name, series.name);
    deliver(&Comparison { series, before, after, rows }, &[], out)
}

fn read(path: &str) -> Result<String> {
    Ok(fs::read_to_string(path).map_err(Error::file("read", path))?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_take_turns() {
        let sides = |before, after| next(&[vec![Vec::new(); before], vec![Vec::new(); after]]);
        let mut collected = [0, 0];
        let mut order = Vec::new();
        while let Some(side) = sides(collected[0], collected[1]) {
            collected[side] += 1;
            order.push(side);
        }
        assert_eq!(order, [0, 1].repeat(ROUNDS));
        assert!(collected[0] > 2, "two boots of each tell nothing");
    }

    #[test]
    fn a_bench_for_another_host_says_what_it_needs() {
        let bench: Bench = toml::from_str("run = 'x'\nparameters = ['no_such_module.flag=1']").unwrap();
        assert!(unlike(&bench).unwrap().contains("no_such_module.flag=1"));
    }
}
