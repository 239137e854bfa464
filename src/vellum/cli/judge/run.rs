//! `vellum judge run`.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use indicatif::ProgressBar;

use crate::cli::failure::Failure;
use crate::cli::judged::JudgedArgs;
use vellum_host::Facts;
use vellum_judge::drive::{self, Machine, Scenario, Setup, Shown, Trouble, Vmm};
use vellum_judge::image::Arch;
use vellum_judge::read::{self, Log, Verdict};
use vellum_kvm::vm::lifecycle::{self, Exit};
use vellum_report::{Answer, Case, Report, Status};
use vellum_sys::{keyvalue, signal};

/// Start a VMM with the image, migrate its machine, and say what was lost
#[derive(Debug, Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", lifecycle::HELP))]
pub(super) struct RunArgs {
    /// cloud-hypervisor, crosvm, firecracker, kvmtool (lkvm), qemu (qemu-system-ARCH) or vellum
    /// (this program); programs are looked for in the directory VELLUM_VMMS and in PATH
    #[arg(long, value_name = "NAME", required_unless_present = "command", conflicts_with = "command", value_parser = |text: &str| keyvalue::one_of("VMM", text, &Vmm::NAMES))]
    vmm: Option<Vmm>,

    /// The machine's architecture, x86_64 or aarch64: QEMU emulates another than this host's
    /// [default: this host's]
    #[arg(long, value_name = "ARCH", conflicts_with = "command", value_parser = |text: &str| keyvalue::one_of("architecture", text, &Arch::NAMES))]
    arch: Option<Arch>,

    /// boot, pause, snapshot, snapshot-diff, restore, migrate, migrate-postcopy or fork; may be
    /// repeated [default: all of them, and boot of a command]
    #[arg(long, value_name = "NAME", value_parser = |text: &str| keyvalue::one_of("scenario", text, &Scenario::NAMES))]
    scenario: Vec<Scenario>,

    /// The number of rounds of each
    #[arg(long, value_name = "N", default_value = "1", value_parser = |text: &str| keyvalue::number(text, 1..=1_000_000u32))]
    times: u32,

    /// vCPUs of the machine
    #[arg(short, long, value_name = "N", default_value = "2", value_parser = |text: &str| keyvalue::number(text, 1..=8u32))]
    cpus: u32,

    /// The machine's memory
    #[arg(short, long, value_name = "SIZE", default_value = "64m", value_parser = |text: &str| keyvalue::size(text, 1 << 20))]
    memory: u64,

    /// Options of the image, behind those of the scenario. Without seed= a seed is drawn, and
    /// printed
    #[arg(short = 'p', long, value_name = "TEXT", default_value = "")]
    cmdline: String,

    /// A further argument for the VMM when it starts a machine; may be repeated
    #[arg(long, value_name = "ARG", allow_hyphen_values = true, conflicts_with = "command")]
    vmm_arg: Vec<String>,

    /// How long a step may take
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = keyvalue::duration)]
    limit: Duration,

    /// Keep the consoles of each round in this new directory
    #[arg(long, value_name = "DIR")]
    logs: Option<PathBuf>,

    #[command(flatten)]
    result: JudgedArgs,

    /// Any other VMM: a command that boots the image and prints its console on standard output.
    /// {elf}, {bzimage}, {flat}, {image}, {disk}, {cmdline}, {cpus} and {memory} (in MiB) are replaced
    #[arg(value_name = "COMMAND", last = true)]
    command: Vec<String>,
}

const EXAMPLES: &str = "\
Examples:
  vellum judge run --vmm qemu
  vellum judge run --vmm vellum --scenario migrate --times 100 --format ktap
  vellum judge run --vmm cloud-hypervisor --vmm-arg=--seccomp --vmm-arg=false
  vellum judge run -- my-vmm --kernel {elf} --args {cmdline} --cpus {cpus} --ram {memory}";

/// Runs `vellum judge run`.
pub(super) fn run(args: &RunArgs) -> Result<Exit, Failure> {
    let mebibytes = args.memory >> 20;
    if mebibytes << 20 != args.memory || mebibytes < 4 {
        return Err(Failure::usage("--memory: whole MiB, at least 4m, would work"));
    }
    let vmm = args.vmm.unwrap_or(Vmm::Command);
    if vmm == Vmm::Command && !args.command.iter().any(|word| IMAGES.iter().any(|name| word.contains(name))) {
        let known = drive::PLACEHOLDERS.join(", ");
        return Err(Failure::usage(format!(
            "COMMAND boots no image: a word with {} would work; there are {known}",
            IMAGES.join(", ")
        )));
    }
    if args.arch.is_some_and(|arch| arch != Arch::HOST) && vmm != Vmm::Qemu {
        return Err(Failure::usage("--arch: only --vmm qemu emulates another architecture than this host's"));
    }
    let logs = Logs::new(args.logs.as_deref())?;
    let all = Scenario::NAMES.map(|(_, scenario)| scenario);
    let scenarios = match (args.scenario.is_empty(), vmm) {
        (false, _) => &args.scenario[..],
        (true, Vmm::Command) => &[Scenario::Boot],
        (true, _) => &all,
    };
    args.result.deliver("judge run", &ProgressBar::hidden(), || {
        signal::remember(&signal::ENDING).map_err(Failure::host)?;
        let mut report = Report::new("judge run", Facts::collect("off".into()));
        let version = match drive::version(vmm, &setup(args, mebibytes, ""), &logs.dir) {
            Ok(version) => version,
            Err(Trouble::Missing(what, remedy)) => {
                return Err(Failure { lacking: true, ..Failure::usage(format!("{what}: {remedy}")) });
            }
            Err(trouble) => return Err(stopped().unwrap_or_else(|| Failure::host(trouble.to_string()))),
        };
        report.ask("vmm", version);
        let arch = args.arch.unwrap_or(Arch::HOST);
        report.ask("arch", Arch::NAMES.iter().find(|(_, known)| *known == arch).map_or("", |(name, _)| name));
        report.ask("times", args.times);
        report.ask("cpus", args.cpus);
        report.ask("memory", format!("{mebibytes}m"));
        report.ask("cmdline", args.cmdline.clone());
        report.ask("vmm_arguments", args.vmm_arg.join(" "));
        let drawn = drawn();
        report.ask("seed", seed(args, drawn, 1));
        for scenario in scenarios {
            let (case, done) = judge(args, vmm, *scenario, mebibytes, drawn, &logs, &mut report)?;
            if let Some(signal) = signal::last() {
                let (name, of) = (scenario.name(), args.times);
                report.cut_short = Some(format!(
                    "ended by signal {signal} after {done} of {of} rounds of {name}: these are the results so far"
                ));
            }
            // What was found counts. What was not looked at to the end has not passed.
            if signal::last().is_none() || case.status.is_bad() {
                report.cases.push(case);
            }
            if signal::last().is_some() {
                break;
            }
        }
        let passed = report.cases.iter().filter(|case| case.status == Status::Pass).count();
        report.figure("scenarios_whole", "scenarios", passed as f64);
        report.set_headline("scenarios_whole");
        let skipped = report.cases.iter().filter(|case| case.status == Status::Skip);
        report.not_run = skipped.map(|case| format!("{}: {}", case.name, case.why())).collect();
        let count = report.cases.len();
        let worst = report.cases.iter().filter(|case| case.status.is_bad()).min_by_key(|case| badness(case.status));
        let worst = worst.map(|case| format!("{}: {}", case.name, case.why()));
        report.answer(Answer::of_test(match &worst {
            None => format!("{passed} of {count} scenarios whole, {} times each", args.times),
            Some(worst) => worst.clone(),
        }));
        let exit = match (worst, &report.cut_short) {
            (Some(worst), _) => Err(Failure::ended(Exit::Error, worst)),
            (None, Some(_)) => Err(stopped().unwrap_or_else(|| Failure::host("a signal came"))),
            (None, None) if passed < scenarios.len() => Err(Failure::not_run(&report)),
            (None, None) => Ok(Exit::PowerOff),
        };
        Ok((vec![report], exit))
    })?
}

/// The placeholders of which a command has one, at least.
const IMAGES: [&str; 4] = ["{elf}", "{bzimage}", "{flat}", "{image}"];

/// How a command ends that a signal has stopped, if there was one.
fn stopped() -> Option<Failure> {
    let signal = signal::last()?;
    Some(Failure::ended(Exit::Signal(signal), format!("ended by signal {signal}; no machine is left")))
}

/// The place of a status among those that are bad, from the worst on. A machine that lost something
/// is worse than one without a verdict.
fn badness(status: Status) -> u32 {
    match status {
        Status::Fail => 0,
        Status::Crash => 1,
        Status::Timeout => 2,
        Status::Pass | Status::Skip => 3,
    }
}

fn setup(args: &RunArgs, mebibytes: u64, cmdline: &str) -> Setup {
    Setup {
        arch: args.arch.unwrap_or(Arch::HOST),
        cpus: args.cpus,
        memory: mebibytes,
        cmdline: format!("{cmdline} {}", args.cmdline),
        command: args.command.clone(),
        arguments: args.vmm_arg.clone(),
        limit: args.limit,
        between: |_| Ok(()),
    }
}

/// A seed that no other run has, so that the log of another run does not pass.
fn drawn() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(1, |since| since.as_nanos() as u64 & 0xffff_ffff)
}

/// The seed of a round: the user's, or the next one from `drawn` on.
fn seed(args: &RunArgs, drawn: u64, round: u32) -> u64 {
    drive::asked(&args.cmdline, "seed").unwrap_or(drawn + u64::from(round) - 1)
}

/// The passes of a guest that is moved, and the most of one that was over too soon with fewer.
const PASSES: u64 = 32;
const MAX_PASSES: u64 = PASSES << 6;
/// Bytes of the path of all consoles, so that a socket's fits into its address of 107 bytes
/// (unix(7)): `migrate-postcopy-1000000-again-6/second.sock` is below it.
const MAX_PATH: usize = 107 - 45;
/// Why a whole log does not pass.
const NOT_COMPARED: &str = "a machine ended before it had run for a pass after its move";

/// The rounds of a scenario as one case, and how many there were to the end. The worst one decides,
/// and the first one of these.
fn judge(
    args: &RunArgs,
    vmm: Vmm,
    scenario: Scenario,
    mebibytes: u64,
    drawn: u64,
    logs: &Logs,
    report: &mut Report,
) -> Result<(Case, u32), Failure> {
    // Long enough for a migration to start in the middle. A boot has nothing to wait for. All
    // processors write all the time: what is written last is lost most easily.
    let (mut passes, more) =
        if scenario == Scenario::Boot { (3, "") } else { (PASSES, " rate=30000 verify=end late=2s") };
    let may_go_on = scenario != Scenario::Boot && drive::asked(&args.cmdline, "passes").is_none();
    let (mut worst, mut last) = (None::<(Status, String)>, None::<String>);
    let mut done = 0;
    for round in 1..=args.times {
        let seed = seed(args, drawn, round);
        let mut attempt = 1;
        let (setup, shown) = loop {
            let setup = setup(args, mebibytes, &format!("passes={passes}{more} report=50ms seed={seed}"));
            let dir = logs.round(scenario, round, attempt)?;
            let shown = drive::run(vmm, scenario, &setup, &dir);
            // On a busy host the guest was over, and whole, before it was asked for something, or
            // before it had compared its memory after that.
            let why = match &shown.trouble {
                Some(Trouble::Failed(why)) if drive::is_over(&setup, &dir) && !is_lost(&shown) => {
                    Some(why.clone())
                }
                None if is_over_too_soon(&shown) => Some(NOT_COMPARED.into()),
                _ => None,
            };
            let Some(why) = why.filter(|_| may_go_on && passes < MAX_PASSES) else {
                break (setup, shown);
            };
            (passes, attempt) = (passes * 4, attempt + 1);
            let name = scenario.name();
            report.note(format!(
                "{name}: the guest of round {round} was over ({why}), so the round ran again with {passes} passes"
            ));
        };
        let bad = shown.machines.iter().filter_map(|machine| verdict(&setup, machine));
        let found = bad.min_by_key(|(status, _)| badness(*status));
        let found = match (shown.trouble, found) {
            // What was lost counts, whatever failed then.
            (Some(trouble), Some((Status::Fail, why))) => Some((Status::Fail, format!("{why}; {trouble}"))),
            (Some(Trouble::Missing(what, remedy)), _) if done == 0 => {
                let case = Case::new(scenario.name(), Status::Skip);
                return Ok((case.because(what).mended_by(remedy), done));
            }
            // The round was broken off, and shows nothing.
            (Some(_), _) if signal::last().is_some() => break,
            (Some(trouble), _) => Some((Status::Crash, trouble.to_string())),
            (None, found) => {
                // Those of the first round: the others have the same machine.
                for note in shown.machines.iter().take(1).flat_map(|machine| not_judged(&setup, &machine.log))
                {
                    if done == 0 {
                        report.note(format!("{}: {note}", scenario.name()));
                    }
                }
                found
            }
        };
        (done, last) = (round, Some(setup.cmdline));
        if let Some((status, why)) = found
            && worst.as_ref().is_none_or(|(known, _)| badness(status) < badness(*known))
        {
            worst = Some((status, format!("{why} (round {round}, seed {seed})")));
        }
        if signal::last().is_some() {
            break;
        }
    }
    // A run with these options does the same again.
    if let Some(options) = last {
        let name = scenario.name();
        report.note(format!("{name}: the image's options in round {done}: {}", options.trim()));
    }
    let case = match worst {
        None => Case::new(scenario.name(), Status::Pass),
        Some((status, why)) => Case::new(scenario.name(), status).because(why),
    };
    Ok((case, done))
}

/// What the image could not judge in this machine.
fn not_judged(setup: &Setup, log: &Log) -> Vec<String> {
    let kinds = read::kinds().iter().zip(&log.skipped);
    // A limit of a clock's steps is the user's choice.
    let skipped =
        kinds.filter(|(kind, why)| **kind != "clock-jump" && why.as_deref() != Some("clock= is not given"));
    let skipped = skipped.filter_map(|(kind, why)| Some(format!("{kind} was not judged: {}", why.as_ref()?)));
    let disk = setup.disk_left_out(log).map(|why| format!("no disk was judged: {why}"));
    skipped.chain(disk).collect()
}

/// Whether a machine has lost something.
fn is_lost(shown: &Shown) -> bool {
    shown.machines.iter().any(|machine| machine.log.verdict() == Verdict::Lost)
}

/// Whether all machines are whole, but one has not compared all of its memory.
fn is_over_too_soon(shown: &Shown) -> bool {
    shown.machines.iter().any(|machine| !machine.is_compared)
        && shown.machines.iter().all(|machine| machine.log.verdict() == Verdict::Whole)
}

/// What is bad in a machine's log.
fn verdict(setup: &Setup, machine: &Machine) -> Option<(Status, String)> {
    let log = &machine.log;
    match log.verdict() {
        Verdict::Whole => {
            let not_compared = (!machine.is_compared).then(|| NOT_COMPARED.into());
            setup.differs(log).or(not_compared).map(|why| (Status::Crash, why))
        }
        Verdict::Lost => {
            let stopped = log.stopped().map_or(String::new(), |why| format!("; then {why}"));
            Some((Status::Fail, format!("LOST{}{stopped}", log.loss())))
        }
        Verdict::Refused(why) | Verdict::Crashed(why) => Some((Status::Crash, why)),
    }
}

/// The directory of the rounds' consoles. It is removed in the end, unless `--logs` keeps it.
struct Logs {
    dir: PathBuf,
    kept: bool,
}

impl Logs {
    fn new(dir: Option<&Path>) -> Result<Self, Failure> {
        let kept = dir.is_some();
        let own = || std::env::temp_dir().join(format!("vellum-judge-{}", std::process::id()));
        let dir = dir.map_or_else(own, Path::to_owned);
        let failed = |error| Failure::usage(format!("--logs {}: cannot make it: {error}", dir.display()));
        fs::create_dir(&dir).map_err(failed)?;
        let dir = fs::canonicalize(&dir).map_err(failed)?;
        if dir.as_os_str().len() > MAX_PATH {
            let _ = fs::remove_dir(&dir);
            return Err(Failure::usage(format!(
                "--logs {}: is too long for the sockets in it; up to {MAX_PATH} bytes would work",
                dir.display()
            )));
        }
        Ok(Self { dir, kept })
    }

    /// The directory of an attempt at a round. Attempts after the first are called `again`.
    fn round(&self, scenario: Scenario, round: u32, attempt: u32) -> Result<PathBuf, Failure> {
        let again = if attempt > 1 { format!("-again-{}", attempt - 1) } else { String::new() };
        let dir = self.dir.join(format!("{}-{round}{again}", scenario.name()));
        if !self.kept {
            // Those of earlier rounds are not needed further.
            let earlier = fs::read_dir(&self.dir).into_iter().flatten().flatten();
            earlier.for_each(|entry| drop(fs::remove_dir_all(entry.path())));
        }
        fs::create_dir(&dir).map_err(Failure::host)?;
        Ok(dir)
    }
}

impl Drop for Logs {
    fn drop(&mut self) {
        if !self.kept {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}
