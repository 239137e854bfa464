//! `vellum judge read`.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use clap::Args;
use indicatif::ProgressBar;

use crate::cli::failure::Failure;
use crate::cli::judged::JudgedArgs;
use vellum_host::Facts;
use vellum_judge::read::{self, Log, Verdict};
use vellum_kvm::vm::lifecycle::{self, Exit};
use vellum_report::{Answer, Case, Report, Status};

/// Read the image's console output, and say whether its machine lost anything
#[derive(Debug, Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", lifecycle::HELP))]
pub(super) struct ReadArgs {
    /// The log; `-` is standard input
    #[arg(value_name = "FILE")]
    log: PathBuf,

    #[command(flatten)]
    result: JudgedArgs,
}

const EXAMPLES: &str = "\
A log that stops in the middle is a crash, and never passes.

Examples:
  vellum judge read log
  vellum run -k judge.elf | vellum judge read - --format ktap";

/// The maximum size of a log in bytes. Larger ones are refused.
const MAX_LOG: u64 = 256 << 20;
/// The number of faults that the terminal shows.
const SHOWN: usize = 16;

/// Runs `vellum judge read`.
pub(super) fn run(args: &ReadArgs) -> Result<Exit, Failure> {
    let text = load(&args.log)?;
    args.result.deliver("judge read", &ProgressBar::hidden(), || {
        let log = read::read(&text);
        let verdict = log.verdict();
        let report = report(&log, &verdict);
        let exit = match verdict {
            Verdict::Whole => Ok(Exit::PowerOff),
            Verdict::Lost => Err(Failure::ended(Exit::Error, lost(&log))),
            Verdict::Refused(why) => {
                Err(Failure::ended(Exit::Error, format!("the image judged nothing: {why}")))
            }
            Verdict::Crashed(why) => Err(Failure::ended(Exit::Error, format!("no verdict: {why}"))),
        };
        Ok((vec![report], exit))
    })?
}

fn load(path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |error: io::Error| Failure::usage(format!("{}: cannot read: {error}", path.display()));
    let input: Box<dyn Read> = match path == Path::new("-") {
        true => Box::new(io::stdin()),
        false => Box::new(File::open(path).map_err(failed)?),
    };
    let mut text = Vec::new();
    input.take(MAX_LOG + 1).read_to_end(&mut text).map_err(failed)?;
    match text.len() as u64 > MAX_LOG {
        false => Ok(text),
        true => Err(Failure::usage(format!(
            "{}: is longer than 256 MiB; `grep -a '^[#1-9BKno]'` keeps the image's lines",
            path.display()
        ))),
    }
}

fn total(log: &Log) -> u64 {
    let counted: u64 = log.counts.iter().flatten().fold(0, |sum, count| sum.saturating_add(*count));
    counted.max(log.faults.len() as u64) + u64::from(log.went_back.is_some())
}

fn lost(log: &Log) -> String {
    let loss = log.loss();
    let first = if loss.is_empty() { loss } else { format!("; the first is{loss}") };
    let stopped = log.stopped().map_or(String::new(), |why| format!("; then {why}"));
    format!("LOST: {} faults{first}{stopped}", total(log))
}

fn report(log: &Log, verdict: &Verdict) -> Report {
    let mut report = Report::new("judge read", Facts::collect("off".into()));
    if let Some(start) = &log.start {
        report.ask("arch", start.arch.clone());
        report.ask("seed", start.seed);
        report.ask("passes", start.passes);
        report.ask("order", if start.shuffled { "shuffled" } else { "sequential" });
        report.ask("write", start.write);
        report.ask("verify", if start.each { "each" } else { "end" });
        report.ask("boot", start.boot.clone());
        report.ask("kvmclock", start.kvmclock);
        report.ask("timer", start.timer);
        report.figure("vcpus", "vcpus", start.vcpus as f64);
        report.figure("vcpus_given", "vcpus", start.given as f64);
    }
    let pages: u64 = log.ranges.iter().map(|range| (range.end - range.start) / 4096).sum();
    report.figure("pages_judged", "pages", pages as f64);
    report.figure("faults", "faults", total(log) as f64);
    report.set_headline("faults");
    report.figure("disks", "disks", log.disks.len() as f64);
    for left_out in &log.left_out {
        report.note(format!("not judged: {left_out}"));
    }
    for fault in log.faults.iter().take(SHOWN) {
        let (kind, vcpu, address) = (fault.kind, fault.vcpu, fault.address);
        let (expected, found) = (fault.expected, fault.found);
        report.note(format!("{kind} at {address:#x}, vCPU {vcpu}: expected {expected:#x}, found {found:#x}"));
    }
    for ((kind, count), skipped) in read::kinds().iter().zip(&log.counts).zip(&log.skipped) {
        let printed = log.faults.iter().filter(|fault| fault.kind == *kind).count() as u64;
        let count = count.map_or(printed, |count| count.max(printed));
        // A kind does not pass if the log ends before its count.
        let ended = matches!(verdict, Verdict::Whole | Verdict::Lost);
        match (count, ended) {
            (0, true) if skipped.is_some() => {
                let why = skipped.clone().unwrap_or_default();
                report.cases.push(Case::new(*kind, Status::Skip).because(why));
            }
            (0, true) => report.cases.push(Case::new(*kind, Status::Pass)),
            (0, false) => {
                report.cases.push(Case::new(*kind, Status::Crash).because("the log has no verdict"))
            }
            (count, _) => {
                report.cases.push(Case::new(*kind, Status::Fail).because(format!("{count} found")));
            }
        }
    }
    report.cases.push(match (log.went_back, verdict) {
        (Some(_), _) => Case::new(read::WENT_BACK, Status::Fail).because("the progress goes back"),
        (None, Verdict::Whole | Verdict::Lost) => Case::new(read::WENT_BACK, Status::Pass),
        _ => Case::new(read::WENT_BACK, Status::Crash).because("the log has no verdict"),
    });
    let answer = Answer::of_test(match verdict {
        Verdict::Whole => format!("{pages} pages judged, nothing lost"),
        Verdict::Lost => lost(log),
        Verdict::Refused(why) => format!("the image judged nothing: {why}"),
        Verdict::Crashed(why) => format!("no verdict: {why}"),
    });
    let verdict = match verdict {
        Verdict::Whole => Case::new("verdict", Status::Pass),
        Verdict::Lost => Case::new("verdict", Status::Fail).because("LOST"),
        Verdict::Refused(why) | Verdict::Crashed(why) => {
            Case::new("verdict", Status::Crash).because(why.clone())
        }
    };
    report.cases.push(verdict);
    report.answer(answer);
    report
}
