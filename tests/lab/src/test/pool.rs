//! Boots the emulated hosts of a run in parallel, each once, and counts their results.
//!
//! [`super::hosts`] decides what each does. Everything that they need is built before the first one
//! boots.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use support::record::{self, Line};
use support::watchdog::{OUTSIDE, OVERALL};

use super::tally::Tally;
use crate::architecture::Architecture;
use crate::artifacts::{Executable, Programs};
use crate::cache::Cache;
use crate::hosts::guest::Guest;
use crate::hosts::wire::{Frame, OUT_DIR};
use crate::hosts::{self, HostKernel, Pace, Request};
use crate::{Error, Result};

/// A guest for tests: its kernel's version, the guest, and its kernel's ELF image.
pub type Made = (&'static str, Guest, Option<PathBuf>);

/// A host and its work.
pub struct Job {
    /// Its name in the count: `svm npt=1`.
    pub name: String,
    /// The host.
    pub request: Request,
    /// Its work.
    pub work: Work,
}

/// A host's work.
pub enum Work {
    /// Test programs, each with these arguments, and their guests.
    Tests { programs: Vec<Executable>, guests: Vec<Made>, arguments: Vec<String> },
    /// One test, which goes on in the host's next kernels, and its guests.
    Test { program: Executable, test: String, guests: Vec<Made> },
    /// Commands, each with what it shows.
    Commands(Vec<(String, String)>),
}

/// The hosts of a run. Each thread that has a CPU to spare takes the next.
pub struct Hosts {
    cache: Cache,
    x86: Option<Programs>,
    arm: Option<Programs>,
    left: Mutex<VecDeque<Job>>,
    tally: Mutex<Tally>,
}

impl Hosts {
    /// Builds what the hosts of `jobs` have. Their results are counted in `tally`.
    pub fn new(jobs: Vec<Job>, mut tally: Tally) -> Result<Self> {
        let built = |architecture| {
            let mut own =
                jobs.iter().filter(|job| job.request.host.architecture() == architecture).peekable();
            own.peek()?;
            // A few commands do not earn an optimized build.
            let tries = own.all(|job| matches!(job.work, Work::Commands(_)));
            Some(if tries { Programs::build_to_try(architecture) } else { Programs::build_for(architecture) })
        };
        let built = |architecture| built(architecture).transpose();
        let (x86, arm) = (built(Architecture::X86)?, built(Architecture::Arm)?);
        tally.lap("hosts", "building what each has");
        Ok(Self { cache: Cache::open()?, x86, arm, left: Mutex::new(jobs.into()), tally: Mutex::new(tally) })
    }

    /// Adds hosts of an architecture that the first ones had.
    pub fn add(&self, jobs: Vec<Job>) {
        locked(&self.left).extend(jobs);
    }

    /// Boots one host after the other until none is left. One host keeps one CPU busy.
    pub fn work(&self) {
        loop {
            let Some(job) = locked(&self.left).pop_front() else { return };
            self.boot(&job);
        }
    }

    fn boot(&self, job: &Job) {
        let programs = match job.request.host.architecture() {
            Architecture::X86 => self.x86.as_ref(),
            Architecture::Arm => self.arm.as_ref(),
        };
        let programs = programs.expect("built at first");
        match &job.work {
            Work::Tests { programs: tests, guests, arguments } => {
                by_record(&self.cache, programs, job, (tests, guests, arguments), &self.tally);
            }
            Work::Test { program, test, guests } => {
                in_next_kernels(&self.cache, programs, job, (program, test, guests), &self.tally);
            }
            Work::Commands(commands) => in_turn(&self.cache, programs, job, commands, &self.tally),
        }
    }

    /// The count.
    pub fn into_tally(self) -> Tally {
        self.tally.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs `jobs`, as many in parallel as there are CPUs.
pub fn run(jobs: Vec<Job>, tally: &mut Tally) -> Result<()> {
    if jobs.is_empty() {
        return Ok(());
    }
    let lanes = thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    let hosts = Hosts::new(jobs, tally.beside())?;
    thread::scope(|scope| {
        for _ in 0..lanes {
            scope.spawn(|| hosts.work());
        }
    });
    tally.add(hosts.into_tally());
    tally.lap("hosts", "side by side");
    Ok(())
}

/// Runs a host's commands in turn.
fn in_turn(
    cache: &Cache,
    programs: &Programs,
    job: &Job,
    commands: &[(String, String)],
    tally: &Mutex<Tally>,
) {
    let Job { name, request, .. } = job;
    eprintln!("lab: {name}: {} commands on {}", commands.len(), request.kernel.image().display());
    let mut request = request.clone();
    request.commands =
        commands.iter().map(|(_, line)| line.split_whitespace().map(str::to_owned).collect()).collect();
    let (mut spans, mut names) = (Spans::start(), commands.iter().map(|(what, _)| what));
    let ended = hosts::run(cache, programs, &request, |frame| match frame {
        Frame::Boot(_) => spans.ended("boot"),
        Frame::Exit(_) => spans.ended(names.next().map_or("", String::as_str)),
        _ => (),
    });
    let mut tally = locked(tally);
    spans.tell(name, &mut tally);
    let outcome = match ended {
        Ok(outcome) => outcome,
        // The host itself is under test.
        Err(error) => {
            eprintln!("lab: {name}: {error}");
            return tally.fail(name, "the emulated host did not finish");
        }
    };
    for ((what, line), ran) in commands.iter().zip(&outcome.ran) {
        let said = || String::from_utf8_lossy(&[ran.stdout.as_slice(), &ran.stderr].concat()).into_owned();
        let ended = match ran.exit.as_ref().map(|exit| exit.code) {
            Some(0) => Ok(()),
            code => Err(Error::Refused(format!("`{line}` ended with {}:\n{}", code.unwrap_or(-1), said()))),
        };
        tally.stage(name, what, ended);
    }
}

/// Runs a host's test programs by the laboratory in the host.
fn by_record(
    cache: &Cache,
    programs: &Programs,
    job: &Job,
    (tests, guests, arguments): (&[Executable], &[Made], &[String]),
    tally: &Mutex<Tally>,
) {
    let name = &job.name;
    if let HostKernel::Debian(kernel) = &job.request.kernel {
        eprintln!("lab: {name}: {} test programs on {}", tests.len(), kernel.package);
    }
    let request = with_tests(job.request.clone(), programs, tests, guests, arguments);
    let (mut rows, mut lines, mut complaints) = (Rows::default(), Vec::new(), Vec::new());
    let (mut records, mut spans) = (Rows::default(), Spans::start());
    let outcome = hosts::run(cache, programs, &request, |frame| match frame {
        Frame::Stdout(bytes) => {
            lines.extend_from_slice(bytes);
            records.push(bytes, |row| spans.line(row));
        }
        // Lines of several hosts interleave, so each has the host's name.
        Frame::Stderr(bytes) => rows.push(bytes, |row| locked(tally).show(&format!("{name}: {row}"))),
        Frame::Boot(boot) => {
            spans.ended("boot");
            complaints.clone_from(&boot.complaints);
        }
        _ => (),
    });
    let (lines, mut tally) = (String::from_utf8_lossy(&lines), locked(tally));
    spans.tell(name, &mut tally);
    if !outcome.as_ref().is_ok_and(|outcome| outcome.code() == 0) {
        // A complaint may explain a failure, but hosts can do without much.
        complaints.iter().for_each(|lacks| tally.show(&format!("{name}: the host itself: {lacks}")));
    }
    match outcome {
        Ok(outcome) => tally.program(name, "", &lines, outcome.code() == 0),
        // The host itself is under test: one that dies is a failure. The other hosts continue.
        Err(error) => {
            eprintln!("lab: {name}: {error}");
            // The record is incomplete, as expected.
            let _ = tally.lines(name, "", &lines);
            tally.fail(name, "the emulated host did not finish");
        }
    }
}

/// The record of a test that goes on in other kernels, among the files that outlive a kernel.
const RECORD: &str = "record";

/// Runs one test, without a laboratory in the host: each kernel starts the same test again.
fn in_next_kernels(
    cache: &Cache,
    programs: &Programs,
    job: &Job,
    (program, test, guests): (&Executable, &str, &[Made]),
    tally: &Mutex<Tally>,
) {
    let name = &job.name;
    let mut request = with_files(job.request.clone(), programs, std::slice::from_ref(program), guests);
    request.commands.push([&format!("/tests/{}", program.name), "--exact", test].map(str::to_owned).to_vec());
    request.env.push((record::VARIABLE.into(), format!("{OUT_DIR}/{RECORD}")));
    let (mut rows, mut spans) = (Rows::default(), Spans::start());
    let outcome = hosts::run(cache, programs, &request, |frame| match frame {
        Frame::Stdout(bytes) | Frame::Stderr(bytes) => {
            rows.push(bytes, |row| locked(tally).show(&format!("{name}: {test}: {row}")));
        }
        Frame::Boot(boot) => spans.ended(&format!("until {} is up", boot.kernel)),
        Frame::Exit(_) => spans.ended(test),
        _ => (),
    });
    let mut tally = locked(tally);
    spans.tell(name, &mut tally);
    match outcome {
        Ok(outcome) => {
            let lines = outcome.files.get(RECORD).map_or("".into(), |lines| String::from_utf8_lossy(lines));
            tally.program(name, &program.name, &lines, outcome.code() == 0);
        }
        // A kernel that does not come up, or panics, fails the test.
        Err(error) => {
            eprintln!("lab: {name}: {test}: {error}");
            tally.fail(name, &format!("{}::{test}", program.name));
        }
    }
}

/// Adds `tests` and `guests` to a host, and the command that runs them.
fn with_tests(
    mut request: Request,
    programs: &Programs,
    tests: &[Executable],
    guests: &[Made],
    arguments: &[String],
) -> Request {
    request.files.push((programs.lab.clone(), "/bin/lab".into()));
    let mut request = with_files(request, programs, tests, guests);
    let line = ["lab", "test", "metal", "--prebuilt", "/tests", "--"].map(str::to_owned);
    request.commands.push([&line[..], arguments].concat());
    // In the host, standard output is the record. All other output goes to standard error.
    request.env.push((record::VARIABLE.into(), "/proc/self/fd/1".into()));
    request
}

/// Adds the files of `tests` and `guests` to a host.
fn with_files(mut request: Request, programs: &Programs, tests: &[Executable], guests: &[Made]) -> Request {
    request.silence_limit = Some(OVERALL);
    if request.pace != Pace::Counted {
        request.env.push((OUTSIDE.into(), "yes".into()));
    }
    // The tests find vellum at the path at which cargo built it.
    request.files.push((programs.vellum.clone(), absolute(&programs.vellum)));
    for test in tests {
        // CARGO_TARGET_TMPDIR of the tests' build: target/TRIPLE/tmp, for tests in
        // target/TRIPLE/PROFILE/deps/TEST.
        let target = test.path.ancestors().nth(3).unwrap_or(Path::new("/"));
        request.directories.push(target.join("tmp").to_string_lossy().into_owned());
        request.files.push((test.path.clone(), format!("/tests/{}", test.name)));
    }
    if !guests.is_empty() {
        request.env.push(("VELLUM_GUESTS".into(), "/guests".into()));
    }
    for (version, guest, vmlinux) in guests {
        for file in [&guest.kernel, &guest.initrd].into_iter().chain(vmlinux) {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            request.files.push((file.clone(), format!("/guests/{version}/{name}")));
        }
    }
    request
}

/// Ignores poison: the count consists of whole lines, even if a thread panicked.
fn locked<'a, T>(tally: &'a Mutex<T>) -> MutexGuard<'a, T> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

fn absolute(path: &Path) -> String {
    let path: OsString = path.canonicalize().unwrap_or_else(|_| path.to_owned()).into();
    path.to_string_lossy().into_owned()
}

/// A host's times by this machine's clock. Its own clock may count instructions.
struct Spans(Vec<(String, Duration)>, Instant);

impl Spans {
    fn start() -> Self {
        Self(Vec::new(), Instant::now())
    }

    /// Attributes the time since the last end to `what`. A program's tests are one entry.
    fn ended(&mut self, what: &str) {
        let passed = self.1.elapsed();
        self.1 += passed;
        match self.0.last_mut() {
            Some((last, sum)) if last == what => *sum += passed,
            _ => self.0.push((what.to_owned(), passed)),
        }
    }

    /// Processes a line of the host's record.
    fn line(&mut self, row: &str) {
        for line in record::parse(row).0 {
            if let Line::Test { name, .. } = line {
                self.ended(name.split_once("::").map_or(&*name, |(program, _)| program));
            }
        }
    }

    fn tell(self, name: &str, tally: &mut Tally) {
        self.0.into_iter().for_each(|(what, passed)| tally.took(name, &what, passed));
    }
}

/// Splits bytes into lines.
#[derive(Default)]
struct Rows(Vec<u8>);

impl Rows {
    fn push(&mut self, bytes: &[u8], mut each: impl FnMut(&str)) {
        self.0.extend_from_slice(bytes);
        while let Some(end) = self.0.iter().position(|&byte| byte == b'\n') {
            let row: Vec<u8> = self.0.drain(..=end).collect();
            each(String::from_utf8_lossy(&row).trim_end());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tests_of_a_program_are_one_span_and_the_boot_is_another() {
        let mut spans = Spans::start();
        spans.ended("boot");
        let mut rows = Rows::default();
        for bytes in [
            "{\"test\":{\"name\":\"run::a\",\"outcome\":\"passed\"}}\n{\"test\":{\"name\"",
            ":\"run::b\",\"outcome\":\"passed\"}}\n{\"test\":{\"name\":\"state::c\",\"outcome\":\"passed\"}}\n{\"end\":3}\n",
        ] {
            rows.push(bytes.as_bytes(), |row| spans.line(row));
        }
        let names: Vec<&str> = spans.0.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["boot", "run", "state"]);
    }
}
