//! `live-update`: what it costs to hand machines to the host's next kernel.
//!
//! It starts processes of this program as a user would: machines with the built-in guest, which fill
//! their memory and then write, and `vellum live-update save`. That says how long the kernel took to
//! preserve each memory, and how long the guests had stood still when their state was written. Beside
//! it the kernel preserves files of the same size, with the same pages, for nobody: with pages of the
//! usual size, as machines have them, and with transparent huge pages.
//!
//! Without a file for what lies between two kernels the machines run on after each round, and every
//! page is checked. With one ([`Config::between`]) there is one round, which ends in the middle: the
//! machines stay saved. The same command in the next kernel finds the file, restores them, and has the
//! other figures. Beside these it makes machines of the same size and gives them the state of a vCPU:
//! KVM's own part of a restore.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::process::{Directory, Process, printed};
use super::{Common, Error, of_rounds};
use vellum_control::Do;
use vellum_control::client::{self, Client};
use vellum_guests::guest::{self, Guest, GuestConfig};
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::arch::layout;
use vellum_kvm::arch::state::{Context, Error as StateError, State};
use vellum_kvm::memory::{Backing, Memory, MemoryConfig};
use vellum_kvm::vm::{self, Vm};
use vellum_report::{Answer, Premise, Report, json};
use vellum_sys::diagnose::Field;
use vellum_sys::liveupdate::Orchestrator;
use vellum_sys::mmap::{Mapping, PAGE_SIZE, Source, freezable_memfd};
use vellum_sys::signal;

/// The parameters.
#[derive(Clone, Debug)]
pub struct Config {
    /// The common parameters.
    pub common: Common,
    /// The memory of each machine in bytes.
    pub bytes: u64,
    /// The number of machines.
    pub machines: u32,
    /// The file for what lies between two kernels, and for the results of machines, beside it. It must
    /// outlive the kernel.
    pub between: Option<PathBuf>,
    /// The command lines of the processes.
    pub lines: Lines,
}

/// Build the command lines of the processes. The command line's own crate provides them.
#[derive(Clone, Copy, Debug)]
pub struct Lines {
    /// A machine: its name and the path of its result.
    pub machine: fn(&Config, &str, &Path) -> Vec<String>,
    /// Saves all machines: the path for the times, and whether another process holds them.
    pub save: fn(&Path, bool) -> Vec<String>,
    /// Restores all machines.
    pub restore: fn() -> Vec<String>,
}

/// The session's name.
pub const SESSION: &str = "vellum-bench";

/// The times that `vellum live-update save` writes, in microseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Times {
    preserve_us: Vec<u64>,
    pause_us: Vec<u64>,
    record_us: u64,
}

/// What lies between two kernels.
#[derive(Debug, Serialize, Deserialize)]
struct Between {
    machines: u32,
    bytes: u64,
    bare: [Option<f64>; 2],
    times: Times,
    /// The pages that each machine had written.
    done: Vec<u64>,
}

/// One round. Times are in seconds.
struct Round {
    /// The kernel's own time for files of the same size: with pages of the usual size, and with huge
    /// ones, if this host has them.
    bare: [Option<f64>; 2],
    times: Times,
}

/// The other half of a round, in the next kernel. Times are in seconds.
#[derive(Clone, Copy, Debug)]
struct Restored {
    retrieve: f64,
    /// From the start of a machine's process until it runs, the longest of all.
    restore: f64,
    /// KVM's own part of it.
    bare: f64,
    /// From the start of the command until each machine has written a page.
    written: f64,
}

/// The polling interval.
const LOOK: Duration = Duration::from_millis(5);
/// How long a client waits for an answer.
const LISTEN: Duration = Duration::from_secs(10);

/// Runs the benchmark.
///
/// # Errors
/// This host lacks something, or a machine fails.
pub fn run(config: &Config) -> Result<Report, Error> {
    let mut report = config.common.report("live-update");
    report.ask("machines", config.machines);
    report.ask("bytes_per_machine", config.bytes);
    config.common.ask(&mut report);
    let Some(between) = &config.between else {
        let mut rounds = Vec::new();
        config.common.each(&mut report, &config.common.rounds(), |report, round| {
            let directory = Directory::new()?;
            let (round_of, machines) = save(config, &directory, false)?;
            rounds.push(round_of);
            for machine in machines {
                judge(report, &round.to_string(), &machine.end()?);
            }
            Ok(())
        })?;
        add(&mut report, &rounds, None);
        return Ok(report);
    };
    match fs::read(between) {
        Ok(bytes) => {
            let lies: Between = serde_json::from_slice(&bytes).map_err(|error| asked(between, &error))?;
            if (lies.machines, lies.bytes) != (config.machines, config.bytes) {
                let other = format!("{} machines of {} bytes were saved", lies.machines, lies.bytes);
                return Err(asked(between, &other));
            }
            let restored = restore(&mut report, config, between, &lies)?;
            let _ = fs::remove_file(between);
            add(&mut report, &[Round { bare: lies.bare, times: lies.times }], Some(restored));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let directory = Directory::new()?;
            let (Round { bare, times }, machines) = save(config, &directory, true)?;
            let done = machines.iter().map(|machine| machine.done).collect();
            let lies =
                Between { machines: config.machines, bytes: config.bytes, bare, times: times.clone(), done };
            let bytes = serde_json::to_vec(&lies).map_err(|error| asked(between, &error))?;
            fs::write(between, bytes).map_err(|error| asked(between, &error))?;
            // They are saved: their processes are no longer needed.
            drop(machines);
            add(&mut report, &[Round { bare, times }], None);
            report.note("the machines are saved: kexec now, and then run the same command".to_owned());
        }
        Err(error) => return Err(asked(between, &error)),
    }
    Ok(report)
}

fn asked(between: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::Asked(Field::Between, format!("{}: {error}", between.display()))
}

fn add(report: &mut Report, rounds: &[Round], restored: Option<Restored>) {
    let sum = |times: &[u64]| times.iter().sum::<u64>() as f64 / 1e6;
    let most = |times: &[u64]| times.iter().max().map_or(0.0, |us| *us as f64 / 1e6);
    let mut samples = |name: &str, value: &dyn Fn(&Round) -> Option<f64>| {
        report.samples(name, "s", of_rounds(rounds, value));
    };
    samples("preserve", &|round| Some(sum(&round.times.preserve_us)));
    samples("preserve_bare", &|round| round.bare[0]);
    samples("preserve_bare_huge", &|round| round.bare[1]);
    samples("pause", &|round| Some(most(&round.times.pause_us)));
    samples("record", &|round| Some(round.times.record_us as f64 / 1e6));
    samples("retrieve", &|_| restored.map(|restored| restored.retrieve));
    samples("restore", &|_| restored.map(|restored| restored.restore));
    samples("restore_bare", &|_| restored.map(|restored| restored.bare));
    samples("first_write", &|_| restored.map(|restored| restored.written));
    report.set_headline("pause");
    let told = |name: &str| report.told(name).unwrap_or_else(|| "unknown".into());
    let answer =
        Answer::of_measurement(format!("The guests were saved after standing still for {}", told("pause")))
            .fact("the kernel preserved their memory in", told("preserve"))
            .fact("and files of the same size in", told("preserve_bare"))
            .fact_if("each ran again after", report.told("restore"));
    report.answer(answer);
}

/// A machine of the measurement.
struct Machine {
    name: String,
    process: Process,
    client: Client,
    result: PathBuf,
    done: u64,
}

fn unheard(error: client::Error) -> Error {
    Error::Host("a machine of the measurement", io::Error::other(error.to_string()))
}

fn interrupted() -> Result<(), Error> {
    signal::take().map_or(Ok(()), |signal| Err(guest::Error::Interrupted(signal).into()))
}

/// Starts machines and saves them, once their memory is full. They run on unless they are `kept`.
fn save(config: &Config, directory: &Directory, kept: bool) -> Result<(Round, Vec<Machine>), Error> {
    let bare = [bare(config, libc::MADV_NOHUGEPAGE)?, bare(config, libc::MADV_HUGEPAGE)?];
    let mut machines = Vec::new();
    for number in 0..config.machines {
        machines.push(Machine::start(config, directory, &format!("m{number}"))?);
    }
    for machine in &mut machines {
        machine.fills(config.bytes / PAGE_SIZE)?;
    }
    let file = directory.path("times.json");
    let mut saving = Process::start(directory, "the save", "save", &(config.lines.save)(&file, kept))?;
    let times = loop {
        interrupted()?;
        // It is written at once.
        let read = fs::read(&file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        if let Some(times) = read {
            break times;
        }
        if saving.ended()?.is_some_and(|status| !status.success()) {
            return Err(saving.failed());
        }
        std::thread::sleep(LOOK);
    };
    if kept {
        if !saving.wait()?.success() {
            return Err(saving.failed());
        }
        for machine in &mut machines {
            machine.done = machine.done()?;
        }
    }
    // Otherwise it ends here, and the machines run on.
    drop(saving);
    Ok((Round { bare, times }, machines))
}

/// The time in which the kernel preserves files of the same size and number. None if it has no huge
/// pages for them.
fn bare(config: &Config, advice: i32) -> Result<Option<f64>, Error> {
    let failed = |what| move |error| Error::Host(what, error);
    let orchestrator = Orchestrator::open().map_err(|error| {
        Error::Lacking(format!("/dev/liveupdate: {error}; vellum live-update status says what it takes"))
    })?;
    let mut all = 0.0;
    for number in 0..config.machines {
        let file = freezable_memfd(c"vellum-bench", config.bytes, None).map_err(failed("memfd_create"))?;
        let mapping = Mapping::new(config.bytes, HUGE_PAGE, Source::Shared(&file)).map_err(failed("mmap"))?;
        // A kernel without huge pages refuses advice about them.
        if mapping.advise(advice).is_err() && advice == libc::MADV_HUGEPAGE {
            return Ok(None);
        }
        let before = huge_pages();
        mapping.populate(0, config.bytes).map_err(failed("MADV_POPULATE_WRITE"))?;
        if advice == libc::MADV_HUGEPAGE && huge_pages().saturating_sub(before) < config.bytes * 9 / 10 {
            return Ok(None);
        }
        let session = orchestrator.create(&format!("{SESSION}-{number}")).map_err(failed("a session"))?;
        let start = Instant::now();
        session.preserve(&file, 0).map_err(failed("preserving a file"))?;
        all += start.elapsed().as_secs_f64();
    }
    Ok(Some(all))
}

/// The size of a transparent huge page.
const HUGE_PAGE: u64 = 2 << 20;

/// The bytes of huge pages that files in memory have (proc_meminfo(5)).
fn huge_pages() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("ShmemHugePages:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).map_or(0, |kib| kib << 10)
}

/// The time in which KVM makes as many machines of this size, each with the state of a vCPU of the
/// built-in guest.
fn bare_restore(config: &Config) -> Result<f64, Error> {
    let failed = |what| move |error: StateError| Error::Host(what, io::Error::other(error.to_string()));
    let memory = || {
        let memory = MemoryConfig { backing: Backing::Memfd, ..MemoryConfig::new(config.bytes) };
        Memory::map(layout::RAM, memory)
    };
    let kvm = vm::open()?;
    let guest = Guest::build(&kvm, memory()?, GuestConfig::new(1))?;
    let context = Context::new(&kvm, &guest.vm.fd, false).map_err(failed("KVM's capabilities"))?;
    let saved =
        guest.vcpus[0].with(move |fd| State::save(fd, &context))?.map_err(failed("a vCPU's state"))?;
    drop(guest);
    let start = Instant::now();
    let mut all = Vec::new();
    for _ in 0..config.machines {
        let kvm = vm::open()?;
        let vm = Vm::new(&kvm, memory()?)?;
        let mut context = Context::new(&kvm, &vm.fd, false).map_err(failed("KVM's capabilities"))?;
        context.allows_other_tsc = true;
        let vcpu = vm.create_vcpu(0)?;
        let passes = ClockPolicy::Passes;
        let onward = saved.onward(&vcpu, &context, passes).map_err(failed("a vCPU's clock"))?;
        saved.restore(&vcpu, &context, onward, passes).map_err(failed("a vCPU's state"))?;
        saved.commit(&vcpu, &context).map_err(failed("a vCPU's state"))?;
        all.push((vcpu, vm));
    }
    Ok(start.elapsed().as_secs_f64())
}

impl Machine {
    fn start(config: &Config, directory: &Directory, name: &str) -> Result<Self, Error> {
        let result = result(config, directory, name);
        let words = (config.lines.machine)(config, name, &result);
        let mut process = Process::start(directory, "a machine", name, &words)?;
        let client = loop {
            interrupted()?;
            if let Ok(client) = Client::connect_within(&directory.socket(name), LISTEN) {
                break client;
            }
            if process.ended()?.is_some() {
                return Err(process.failed());
            }
            std::thread::sleep(LOOK);
        };
        Ok(Self { name: name.to_owned(), process, client, result, done: 0 })
    }

    fn done(&mut self) -> Result<u64, Error> {
        done(&mut self.client)
    }

    /// Waits until the guest has written this many pages.
    fn fills(&mut self, pages: u64) -> Result<(), Error> {
        while self.done()? < pages {
            interrupted()?;
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Ends it and returns its result.
    fn end(mut self) -> Result<Report, Error> {
        self.client.ask(&Do::Stop {}).map_err(unheard)?;
        if !self.process.wait()?.success() {
            return Err(self.process.failed());
        }
        read(&self.name, &self.result)
    }
}

fn done(client: &mut Client) -> Result<u64, Error> {
    Ok(client.ask(&Do::Status {}).map_err(unheard)?["done"].as_u64().unwrap_or(0))
}

/// The path of a machine's result.
fn result(config: &Config, directory: &Directory, name: &str) -> PathBuf {
    match &config.between {
        Some(between) => between.with_extension(format!("{name}.json")),
        None => directory.path(&format!("{name}.json")),
    }
}

/// Reads the result that a machine wrote when it ended.
fn read(name: &str, result: &Path) -> Result<Report, Error> {
    let unreadable = |why: String| Error::Host("the result of a machine", io::Error::other(why));
    let results = json::read(result).map_err(|error| unreadable(format!("{name}: {error}")))?;
    results.into_iter().next().ok_or_else(|| unreadable(format!("{name}: it is empty")))
}

/// Copies a machine's findings of wrong pages to `report`.
fn judge(report: &mut Report, part: &str, result: &Report) {
    for failed in &result.invalid {
        if let premise @ Premise::WrongContents { .. } = &failed.premise {
            report.fail(Some(part.to_owned()), premise.clone());
        }
    }
}

/// Restores the machines in the next kernel, and ends them.
fn restore(report: &mut Report, config: &Config, between: &Path, lies: &Between) -> Result<Restored, Error> {
    let (directory, bare) = (Directory::new()?, bare_restore(config)?);
    let start = Instant::now();
    let mut restoring = Process::start(&directory, "the restore", "restore", &(config.lines.restore)())?;
    if !restoring.wait()?.success() {
        return Err(restoring.failed());
    }
    let mut clients = Vec::new();
    for number in 0..config.machines {
        clients
            .push(Client::connect_within(&directory.socket(&format!("m{number}")), LISTEN).map_err(unheard)?);
    }
    for (client, before) in clients.iter_mut().zip(&lies.done) {
        while done(client)? <= *before {
            interrupted()?;
        }
    }
    let written = start.elapsed().as_secs_f64();
    let told = printed(&directory, "restore")?;
    let milliseconds = |line: &str, before: &str| -> Option<f64> {
        line.split_once(before)?.1.strip_suffix(" ms")?.parse().ok()
    };
    let longest = told.lines().filter_map(|line| milliseconds(line, ", after ")).fold(0.0, f64::max);
    let retrieve = told.lines().find_map(|line| milliseconds(line, "all memory was retrieved in "));
    for (number, client) in clients.iter_mut().enumerate() {
        let name = format!("m{number}");
        let status = client.ask(&Do::Status {}).map_err(unheard)?;
        client.ask(&Do::Stop {}).map_err(unheard)?;
        while Path::new(&format!("/proc/{}", status["pid"])).exists() {
            interrupted()?;
            std::thread::sleep(LOOK);
        }
        let path = between.with_extension(format!("{name}.json"));
        judge(report, &name, &read(&name, &path)?);
        let _ = fs::remove_file(path);
    }
    Ok(Restored { retrieve: retrieve.unwrap_or(0.0) / 1e3, restore: longest / 1e3, bare, written })
}
