//! `vellum test` without a subcommand: both tests of the dirty log, and one verdict.

use std::time::Duration;

use clap::{Args, FromArgMatches};

use super::dirty_edges::{self, DirtyEdgesArgs};
use super::dirty_log::{self, DirtyLogArgs};
use crate::cli::failure::Failure;
use crate::cli::judged::JudgedArgs;
use crate::session::progress::bar;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_report::{Report, Status};
use vellum_sys::keyvalue;

/// The arguments that both tests share. Each test has more of its own.
#[derive(Debug, Args)]
pub(super) struct BothArgs {
    /// Run for this long, as in 30s or 1h [default: a million events with each tracker]
    #[arg(long, value_name = "TIME", value_parser = keyvalue::duration)]
    duration: Option<Duration>,

    /// The seed of all that is random [default: drawn, and printed]
    #[arg(long, value_name = "N", value_parser = |text: &str| keyvalue::number(text, 0..=u64::MAX))]
    seed: Option<u64>,

    #[command(flatten)]
    result: JudgedArgs,
}

/// The arguments of a test without any options.
fn defaults<T: Args + FromArgMatches>() -> Result<T, Failure> {
    let command = T::augment_args(clap::Command::new("defaults").no_binary_name(true));
    let matches = command.try_get_matches_from(std::iter::empty::<&str>()).map_err(Failure::host)?;
    T::from_arg_matches(&matches).map_err(Failure::host)
}

/// Runs both tests. If this host cannot run one of them, the other still runs.
pub(super) fn run(args: &BothArgs) -> Result<Exit, Failure> {
    let edges: DirtyEdgesArgs = defaults()?;
    let mut log: DirtyLogArgs = defaults()?;
    (log.duration, log.seed) = (args.duration, args.seed);
    let progress = bar(0, "{elapsed_precise}  {msg}  (Ctrl-C ends it)");
    args.result.deliver("test", &progress, || {
        let at_edges = dirty_edges::config(&edges).and_then(|config| dirty_edges::examine(&config));
        let mut first = told("test dirty-edges", at_edges)?;
        // That test needs no flags to reproduce this.
        if first.0.cases.iter().any(|case| case.status == Status::Fail)
            && let Some(answer) = first.0.answer.take()
        {
            first.0.answer(answer.fact("shown by", "vellum test dirty-edges"));
        }
        if let Exit::Signal(_) = first.1 {
            return Ok((vec![first.0], first.1));
        }
        let at_random = dirty_log::config(&log).and_then(|config| dirty_log::soak(&config, &progress));
        let second = told("test dirty-log", at_random)?;
        let exit = [first.1, second.1].into_iter().max_by_key(|exit| severity(*exit)).unwrap_or(first.1);
        Ok((vec![first.0, second.0], exit))
    })
}

/// How bad the exit status of a test is.
fn severity(exit: Exit) -> u8 {
    match exit {
        Exit::PowerOff => 0,
        Exit::NotRun => 1,
        Exit::Signal(_) => 2,
        _ => 3,
    }
}

/// A test's result and exit status. The verdict contains the message of a failure.
fn told(
    name: &str,
    done: Result<(Report, Result<Exit, Failure>), Failure>,
) -> Result<(Report, Exit), Failure> {
    match done {
        Ok((report, exit)) => Ok((report, exit.unwrap_or_else(|failure| failure.exit))),
        // A usage error means that this host cannot run the test, because no options were given.
        Err(failure) if failure.lacking || failure.exit == Exit::Usage => {
            let failure = Failure { lacking: true, ..failure };
            Ok((failure.report(name), Exit::NotRun))
        }
        Err(failure) => Err(failure),
    }
}
