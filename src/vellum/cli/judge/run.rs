//! `vellum judge run`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;

use crate::cli::failure::Failure;
use crate::cli::judged::JudgedArgs;
use vellum_host::Facts;
use vellum_judge::drive::{self, Scenario, Setup, Trouble, Vmm};
use vellum_judge::read::Verdict;
use vellum_kvm::vm::lifecycle::{self, Exit};
use vellum_report::{Answer, Case, Report, Status};
use vellum_sys::{keyvalue, signal};

/// Start a VMM with the image, migrate its machine, and say what was lost
#[derive(Debug, Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", lifecycle::HELP))]
pub(super) struct RunArgs {
    /// cloud-hypervisor, firecracker, qemu (qemu-system-x86_64) or vellum (this program); programs
    /// are looked for in the directory VELLUM_VMMS and in PATH
    #[arg(long, value_name = "NAME", value_parser = |text: &str| keyvalue::one_of("VMM", text, &Vmm::NAMES))]
    vmm: Vmm,

    /// boot, pause, snapshot, snapshot-diff, migrate or migrate-postcopy; may be repeated
    /// [default: all of them]
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

    /// Options of the image, behind those of the scenario
    #[arg(short = 'p', long, value_name = "TEXT", default_value = "")]
    cmdline: String,

    /// How long a step may take
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = keyvalue::duration)]
    limit: Duration,

    /// Keep the consoles of each round in this new directory
    #[arg(long, value_name = "DIR")]
    logs: Option<PathBuf>,

    #[command(flatten)]
    result: JudgedArgs,
}

const EXAMPLES: &str = "\
Examples:
  vellum judge run --vmm qemu
  vellum judge run --vmm vellum --scenario migrate --times 100 --format ktap";

/// Runs `vellum judge run`.
pub(super) fn run(args: &RunArgs) -> Result<Exit, Failure> {
    let mebibytes = args.memory >> 20;
    if mebibytes << 20 != args.memory || mebibytes < 4 {
        return Err(Failure::usage("--memory: whole MiB, at least 4m, would work"));
    }
    let logs = Logs::new(args.logs.as_deref())?;
    let all = Scenario::NAMES.map(|(_, scenario)| scenario);
    let scenarios = if args.scenario.is_empty() { &all[..] } else { &args.scenario };
    args.result.deliver("judge run", &ProgressBar::hidden(), || {
        signal::remember(&signal::ENDING).map_err(Failure::host)?;
        let mut report = Report::new("judge run", Facts::collect("off".into()));
        let version = match drive::version(args.vmm) {
            Ok(version) => version,
            Err(Trouble::Missing(what, remedy)) => {
                return Err(Failure { lacking: true, ..Failure::usage(format!("{what}: {remedy}")) });
            }
            Err(Trouble::Failed(why)) => return Err(Failure::host(why)),
        };
        report.ask("vmm", version);
        report.ask("times", args.times);
        report.ask("cpus", args.cpus);
        report.ask("memory", format!("{mebibytes}m"));
        report.ask("cmdline", args.cmdline.clone());
        let mut lost = Vec::new();
        for scenario in scenarios {
            let case = judge(args, *scenario, mebibytes, &logs)?;
            if case.status.is_bad() {
                lost.push(format!("{}: {}", case.name, case.why()));
            }
            report.cases.push(case);
            if signal::last().is_some() {
                report.cut_short = Some("a signal ended it".into());
                break;
            }
        }
        let passed = report.cases.iter().filter(|case| case.status == Status::Pass).count();
        report.figure("scenarios_whole", "scenarios", passed as f64);
        report.set_headline("scenarios_whole");
        let count = report.cases.len();
        report.answer(Answer::of_test(match lost.first() {
            None => format!("{passed} of {count} scenarios whole, {} times each", args.times),
            Some(first) => first.clone(),
        }));
        let exit = match (lost.first(), signal::last()) {
            (_, Some(signal)) => Ok(Exit::Signal(signal)),
            (Some(first), _) => Err(Failure::ended(Exit::Error, first.clone())),
            (None, None) if passed < scenarios.len() => Err(Failure::not_run(&report)),
            (None, None) => Ok(Exit::PowerOff),
        };
        Ok((vec![report], exit))
    })?
}

/// All rounds of a scenario as one case. The first failed round decides. If none failed, a crashed
/// one does.
fn judge(args: &RunArgs, scenario: Scenario, mebibytes: u64, logs: &Logs) -> Result<Case, Failure> {
    // Long enough for a migration to start in the middle. A boot has nothing to wait for.
    let passes = if scenario == Scenario::Boot { "passes=3" } else { "passes=16 rate=30000" };
    let mut found = BTreeMap::new();
    for round in 1..=args.times {
        let setup = Setup {
            cpus: args.cpus,
            memory: mebibytes,
            cmdline: format!("{passes} report=50ms seed={round} {}", args.cmdline),
            limit: args.limit,
            between: |_| Ok(()),
        };
        let dir = logs.round(scenario, round)?;
        let what = match drive::run(args.vmm, scenario, &setup, &dir) {
            Err(Trouble::Missing(what, remedy)) => {
                let case = Case::new(scenario.name(), Status::Skip);
                return Ok(case.because(what).mended_by(remedy));
            }
            Err(Trouble::Failed(why)) => Some((Status::Crash, why)),
            Ok(log) => match log.verdict() {
                Verdict::Whole => None,
                Verdict::Lost => {
                    let first = log.faults.first();
                    let first = first
                        .map_or(String::new(), |fault| format!(" {} at {:#x}", fault.kind, fault.address));
                    Some((Status::Fail, format!("LOST{first}")))
                }
                Verdict::Refused(why) | Verdict::Crashed(why) => Some((Status::Crash, why)),
            },
        };
        if let Some((status, why)) = what {
            found.entry(status).or_insert_with(|| format!("{why} (round {round})"));
            if signal::last().is_some() {
                break;
            }
        }
    }
    let worst = found.remove_entry(&Status::Fail).or_else(|| found.pop_first());
    Ok(match worst {
        None => Case::new(scenario.name(), Status::Pass),
        Some((status, why)) => Case::new(scenario.name(), status).because(why),
    })
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
        Ok(Self { dir, kept })
    }

    fn round(&self, scenario: Scenario, round: u32) -> Result<PathBuf, Failure> {
        let dir = self.dir.join(format!("{}-{round}", scenario.name()));
        if !self.kept {
            // The previous round's directory is not needed further.
            let _ = fs::remove_dir_all(self.dir.join(format!("{}-{}", scenario.name(), round - 1)));
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
