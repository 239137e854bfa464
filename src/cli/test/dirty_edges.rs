//! `vellum test dirty-edges`.

use std::io::Write;

use clap::Args;

use super::dirty_log::address;
use crate::cli::{Failure, args, keyvalue};
use crate::dirty::{Method, edges, soak};
use crate::report::{json, terminal};
use crate::vm::lifecycle::{self, Exit};
use crate::vm::memory::Backing;

/// Clear the dirty log chunk by chunk and write at both ends of each chunk: the pages that a test at random hardly meets
#[derive(Debug, Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", lifecycle::HELP))]
pub(super) struct DirtyEdgesArgs {
    /// How the log is collected: manual-protect or initially-set
    #[arg(long, value_name = "NAME", default_value = "initially-set", value_parser = args::tracker)]
    tracker: args::Tracker,

    /// What backs memory
    #[arg(short = 's', long, value_name = "BACKING", default_value = "thp", value_parser = args::backing)]
    backing: Backing,

    /// The memslot's size
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = |text: &str| keyvalue::size(text, 1 << 20), default_value = "8m")]
    memory: u64,

    /// Where it starts, guest-physical; host addresses are congruent modulo 2 MiB
    #[arg(long, value_name = "ADDRESS", value_parser = address, default_value = "0x40001000")]
    slot_base: u64,

    /// Revoke KVM_DIRTY_LOG_INITIALLY_SET between switching the log on and clearing it
    #[arg(long)]
    revoke: bool,
}

const EXAMPLES: &str = "\
Examples:
  vellum test dirty-edges                    huge pages that a clear leaves writable (eager_page_split=N)
  vellum test dirty-edges --revoke           the same after a change of mind";

/// Does what was asked.
pub(super) fn run(args: &DirtyEdgesArgs) -> Result<Exit, Failure> {
    let method = args.tracker.method;
    if !method.is_manual() {
        let name = method.name();
        return Err(Failure::usage(format!(
            "--tracker {name}: nothing can be cleared in part with it; manual-protect and initially-set would work"
        )));
    }
    if args.revoke && method != Method::InitiallySet {
        return Err(Failure::usage("--revoke: only --tracker initially-set has something to revoke"));
    }
    if args.slot_base + args.memory > soak::MOST {
        let most = (soak::MOST - args.slot_base) >> 20;
        return Err(Failure::usage(format!("--memory: at most {most}m fits below the gap at 3g here")));
    }
    let config = edges::Config {
        method,
        backing: args.backing,
        size: args.memory,
        base: args.slot_base,
        revoke: args.revoke,
    };
    let (report, lost) = edges::run(&config)
        .map_err(|error| if error.is_usage() { Failure::usage(error) } else { Failure::host(error) })?;
    let text = terminal::render(&report);
    json::allow_broken_pipe(std::io::stdout().lock().write_all(text.as_bytes())).map_err(Failure::host)?;
    if lost.is_empty() && report.invalid.is_empty() {
        return Ok(Exit::PowerOff);
    }
    let message = format!("{} pages lost", lost.len());
    Err(Failure { exit: Exit::Error, message })
}
