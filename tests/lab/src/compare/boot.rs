//! One boot of a comparison on an emulated host: its results, and the file that keeps them until
//! the comparison is done.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vellum_report::{Figure, Report, json};

use super::calls::{self, Call};
use super::{Processor, ROUNDS, locks};
use crate::artifacts::{self, Programs};
use crate::cache::{Cache, digest, recorded};
use crate::hosts::guest;
use crate::hosts::{self, Outcome};
use crate::kernel::bench::{self, Bench};
use crate::kernel::build::{self, Image};
use crate::kernel::series::{self, Series};
use crate::{Error, Result};

/// The host may be idle for at most this share of a run.
pub(crate) const IDLE_LIMIT: f64 = 0.01;

/// The path in a host of the program that runs workloads in a Linux guest.
pub const GUEST_TASKS: &str = "/bin/guest-tasks";

/// The hosts of one comparison.
pub struct Hosts<'a> {
    /// Holds the images that they boot.
    pub cache: &'a Cache,
    /// Run on the hosts.
    pub programs: Programs,
    /// The hosts' processor.
    pub processor: Processor,
    /// Holds a file for each finished boot of this comparison.
    pub kept: PathBuf,
    /// The benchmarks' Linux guests by name.
    pub guests: BTreeMap<String, Guest>,
}

/// A Linux guest of a benchmark, or of a test.
pub struct Guest {
    /// The kernel's name in the cache.
    pub name: String,
    /// Its files and their paths in a host.
    pub files: Vec<(PathBuf, String)>,
}

/// The guests of `benches` by name ([`Bench::guest_name`]).
pub fn guests(cache: &Cache, benches: &[&Bench]) -> Result<BTreeMap<String, Guest>> {
    let mut guests = BTreeMap::new();
    for bench in benches {
        if let (Some(series), Some(name)) = (&bench.guest, bench.guest_name())
            && !guests.contains_key(&name)
        {
            let mut series = series::named(series)?;
            if let Some(planted) = &bench.guest_planted {
                series = series.with_planted(planted)?;
            }
            let guest = guest_of(cache, &name, &series, bench.guest_variant.as_deref())?;
            guests.insert(name, guest);
        }
    }
    Ok(guests)
}

/// The guest `name` with a kernel of `series` and `variant`.
fn guest_of(cache: &Cache, name: &str, series: &Series, variant: Option<&str>) -> Result<Guest> {
    let image = build::build(cache, series.base, std::slice::from_ref(series), variant)?;
    let initrd = artifacts::workspace().join("target/guests").join(name).join("initrd");
    guest::without_modules(cache, &initrd)?;
    let [kernel_there, initrd_there] = bench::guest_files(name);
    Ok(Guest { files: vec![(image.file(), kernel_there), (initrd, initrd_there)], name: image.name })
}

/// The results of one boot.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Boot {
    /// One for each benchmark, in the group's order.
    pub benches: Vec<Gave>,
}

/// The results of one benchmark in one boot.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Gave {
    /// Its figures.
    pub sample: Sample,
    /// The results that it wrote.
    pub reports: Vec<Report>,
}

impl Hosts<'_> {
    /// Boots `image` for the benchmarks of `group`, unless an earlier, stopped comparison has done
    /// so.
    pub fn boot(&self, image: &Image, group: &[&Bench], round: usize) -> Result<Boot> {
        let label = format!("{}, boot {round} of {ROUNDS}", image.label);
        let host = self.processor.label(group[0].npt);
        let file = self.kept.join(format!("{}.json", self.key(image, group, round)?));
        fs::create_dir_all(&self.kept).map_err(Error::file("create", &self.kept))?;
        let mut done_before = true;
        let boot = recorded(&file, || {
            done_before = false;
            eprintln!("lab: {label}, on {host}: {} benchmarks", group.len());
            let outcome = self.measure(image, group)?;
            let instruction = self.processor.bed.nanoseconds_per_instruction();
            let gave = |(index, bench): (usize, &&Bench)| gave(index, bench, &outcome, &label, instruction);
            Ok(Boot { benches: group.iter().enumerate().map(gave).collect::<Result<_>>()? })
        })?;
        if done_before {
            eprintln!("lab: {label}, on {host}: done before the last comparison stopped");
        }
        Ok(boot)
    }

    /// A key of everything that a boot's figures depend on. The laboratory is part of it, because
    /// it converts times to instructions and builds its own Bochs.
    fn key(&self, image: &Image, group: &[&Bench], round: usize) -> Result<String> {
        let mut parts = vec![format!("{} {group:?} {:?} {round}", image.name, self.processor).into_bytes()];
        let programs =
            [&self.programs.vellum, &self.programs.init, &self.programs.lab, &self.programs.guest_tasks];
        let guests = guests_of(group).into_iter().filter_map(|name| self.guests.get(&name));
        let files = guests.flat_map(|guest| guest.files.iter().map(|(file, _)| file));
        for file in programs.into_iter().chain(files) {
            parts.push(fs::read(file).map_err(Error::file("read", file))?);
        }
        parts.push(self.processor.bed.version()?.into_bytes());
        Ok(digest(parts.iter().map(Vec::as_slice)))
    }

    /// Boots `image` and runs `group` on it. An error if a command fails or its host idles.
    fn measure(&self, image: &Image, group: &[&Bench]) -> Result<Outcome> {
        let mut request = image.host();
        (request.host, request.pml) = (self.processor.bed, self.processor.pml);
        request.files.push((self.programs.guest_tasks.clone(), GUEST_TASKS.into()));
        let guests = guests_of(group).into_iter().filter_map(|name| self.guests.get(&name));
        request.files.extend(guests.flat_map(|guest| guest.files.iter().cloned()));
        group[0].describe_host(&mut request);
        // The time limit is for one command, and the boot runs several.
        request.time_limit *= u32::try_from(group.len()).unwrap_or(u32::MAX);
        let command = |(index, bench): (usize, &&Bench)| {
            let command = bench.command(&format!("{index}.json"));
            let command = match bench.locks.is_empty() {
                true => command,
                false => locks::watched(command, &format!("{index}.locks")),
            };
            match calls_of(bench) {
                calls if calls.is_empty() => command,
                calls => calls::watched(command, &calls, &format!("{index}.calls")),
            }
        };
        request.commands = group.iter().enumerate().map(command).collect();
        let outcome = hosts::run(self.cache, &self.programs, &request, |_| ())?;
        for (bench, ran) in group.iter().zip(&outcome.ran) {
            let Some(exit) = &ran.exit else { continue };
            if exit.code != 0 {
                let said = [ran.stdout.as_slice(), &ran.stderr].concat();
                let said = String::from_utf8_lossy(&said).into_owned();
                return Err(Error::Series(format!(
                    "{}: `{}` ended with {}:\n{said}",
                    image.label, bench.run, exit.code
                )));
            }
            if exit.idle > IDLE_LIMIT && !bench.multi && !bench.timed && bench.calls.is_empty() {
                return Err(Error::Refused(format!(
                    "{}: `{}` left its host idle for {:.1} % of the time, which counts as instructions here; more than {:.0} % is \
                     no measurement",
                    image.label,
                    bench.run,
                    exit.idle * 100.0,
                    IDLE_LIMIT * 100.0
                )));
            }
        }
        Ok(outcome)
    }
}

/// The names of `group`'s guests.
fn guests_of(group: &[&Bench]) -> BTreeSet<String> {
    group.iter().filter_map(|bench| bench.guest_name()).collect()
}

/// The kernel functions that `bench` counts. They were checked when the series was read.
fn calls_of(bench: &Bench) -> Vec<Call<'_>> {
    bench.calls.iter().filter_map(|call| Call::parse(call).ok()).collect()
}

/// The figures of one benchmark in one boot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The host's idle share of the run.
    pub idle: f64,
    /// The figures. Times are in instructions on hosts that count them.
    pub figures: Vec<Figure>,
}

/// The results of the command with this index on an emulated host.
fn gave(index: usize, bench: &Bench, outcome: &Outcome, label: &str, instruction: f64) -> Result<Gave> {
    let Some(exit) = outcome.ran.get(index).and_then(|ran| ran.exit.as_ref()) else {
        return Err(Error::Refused(format!("`{}`: nothing was heard of its end", bench.run)));
    };
    let mut figures = Vec::new();
    if !bench.timed {
        figures.push(Figure::once("whole_run", "s", exit.seconds));
    }
    let mut reports = written(bench, outcome.files.get(&format!("{index}.json")).map(Vec::as_slice))?;
    figures.extend(reports.iter().flat_map(figures_of));
    // The page shows results of both kernels, so each names its own.
    reports.iter_mut().for_each(|report| {
        report.ask("host_kernel", label);
        // A host that counts instructions draws the same boot identity in every boot.
        report.host.boot = label.to_owned();
    });
    let calls = calls_of(bench);
    if bench.multi || !calls.is_empty() {
        // Probes slow the code down, and two CPUs have no clock that counts instructions. So only
        // what locks did and how often functions were called is reported.
        figures.clear();
    }
    if !bench.locks.is_empty() {
        let text = outcome
            .files
            .get(&format!("{index}.locks"))
            .map_or("".into(), |bytes| String::from_utf8_lossy(bytes));
        for lock in &bench.locks {
            figures.extend(locks::figures(&text, lock, reports.first(), !bench.multi)?);
        }
    }
    if !calls.is_empty() {
        let text = outcome.files.get(&format!("{index}.calls"));
        let text = text.map_or("".into(), |bytes| String::from_utf8_lossy(bytes));
        figures.extend(calls::figures(&text, &calls)?);
    }
    let figures = figures.into_iter().map(|figure| in_instructions(figure, instruction)).collect();
    // Timed benchmarks judge their own idle shares and mark their result invalid.
    let idle = if bench.timed { 0.0 } else { exit.idle };
    Ok(Gave { sample: Sample { idle, figures }, reports })
}

/// The result that `bench` wrote.
pub fn written(bench: &Bench, bytes: Option<&[u8]>) -> Result<Vec<Report>> {
    match bytes {
        Some(bytes) => valid(bytes, bench),
        None if bench.run.contains("{json}") => {
            Err(Error::Refused(format!("`{}` ended with 0 and wrote no result", bench.run)))
        }
        None => Ok(Vec::new()),
    }
}

/// A result's figures, without rates per second: a second of an emulated clock is not a second.
fn figures_of(report: &Report) -> impl Iterator<Item = Figure> {
    report.figures.iter().filter(|figure| !figure.unit.ends_with("/s")).cloned()
}

/// The results in a file. An invalid one is refused.
fn valid(bytes: &[u8], bench: &Bench) -> Result<Vec<Report>> {
    let reports =
        json::parse(bytes, Path::new(&bench.run)).map_err(|error| Error::Refused(error.to_string()))?;
    match reports.iter().find_map(|report| report.invalid.first()) {
        Some(why) => Err(Error::Refused(format!("`{}` calls its own result invalid: {why}", bench.run))),
        None => Ok(reports),
    }
}

/// A figure of an emulated host, with times converted to instructions.
pub(crate) fn in_instructions(mut figure: Figure, nanoseconds: f64) -> Figure {
    let each = match figure.unit.as_str() {
        "s" => 1e9 / nanoseconds,
        "ns" => 1.0 / nanoseconds,
        _ => return figure,
    };
    figure.unit = "instructions".into();
    figure.samples.iter_mut().for_each(|sample| sample.value *= each);
    figure
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_become_instructions_and_nothing_else_does() {
        let of = |unit, value, nanoseconds| {
            let figure = in_instructions(Figure::once("a", unit, value), nanoseconds);
            (figure.unit.clone(), figure.value())
        };
        assert_eq!(of("s", 0.5, 2.0), ("instructions".into(), 2.5e8));
        assert_eq!(of("ns", 30.0, 20.0), ("instructions".into(), 1.5));
        assert_eq!(of("pages", 3.0, 2.0), ("pages".into(), 3.0));
    }
}
