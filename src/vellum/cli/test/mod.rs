//! `vellum test`: tests of the host's KVM, and of the start of a guest.

mod both;
mod dirty_edges;
mod dirty_log;

use std::time::Duration;

use clap::{Args, Subcommand};

use super::failure::Failure;
use super::output::print;
use super::run;
use vellum_bench::oracle::soak;
use vellum_kvm::vm::lifecycle::Exit;

/// The flag of each field, by subcommand as typed.
#[cfg(test)]
pub(super) const TABLES: [(&str, super::flags::Flags); 2] =
    [("test dirty-edges", dirty_edges::FLAGS), ("test dirty-log", dirty_log::FLAGS)];

/// Test this host's KVM: both tests of the dirty log, or the named one
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, after_help = EXAMPLES)]
pub struct TestArgs {
    #[command(subcommand)]
    what: Option<TestCommand>,

    #[command(flatten)]
    both: both::BothArgs,
}

const EXAMPLES: &str = "\
Examples:
  vellum test                                 both tests, and one verdict
  vellum test --duration 1h --json lost.json  for an hour
  vellum test dirty-edges                     only at the ends of cleared chunks, which takes a second";

#[derive(Debug, Subcommand)]
enum TestCommand {
    DirtyLog(Box<dirty_log::DirtyLogArgs>),
    DirtyEdges(dirty_edges::DirtyEdgesArgs),
    /// Run the built-in guest as `vellum run` does, and print only when its first doorbell rang:
    /// nanoseconds on CLOCK_MONOTONIC. The caller reads the same clock before it starts this
    /// program
    Startup(Box<run::RunArgs>),
}

/// Runs `vellum test`.
pub fn run(args: TestArgs) -> Result<Exit, Failure> {
    match args.what {
        None => both::run(&args.both),
        Some(TestCommand::DirtyLog(args)) => dirty_log::run(&args),
        Some(TestCommand::DirtyEdges(args)) => dirty_edges::run(&args),
        Some(TestCommand::Startup(args)) => {
            let outcome = run::run_workload(&args)?;
            let rang = outcome.first_doorbell.as_ref().map_or(0, Duration::as_nanos);
            print(format_args!("{rang}\n")).map(|_| outcome.exit)
        }
    }
}

/// That memory of this size fits where its slot begins.
fn fits(slot_base: u64, memory: u64) -> Result<(), Failure> {
    let most = soak::MAX_MEMORY.saturating_sub(slot_base);
    if memory > most {
        let most = most >> 20;
        return Err(Failure::usage(format!("--memory: at most {most}m fits below the gap at 3g here")));
    }
    Ok(())
}
