//! `vellum test dirty-edges`.

use clap::Args;
use indicatif::ProgressBar;

use super::dirty_log::address;
use super::fits;
use crate::cli::args;
use crate::cli::failure::Failure;
use crate::cli::flags::Flags;
use crate::cli::judged::JudgedArgs;
use vellum_bench::oracle::edges::{self, Mind};
use vellum_bench::oracle::soak;
use vellum_guests::guest;
use vellum_kvm::dirty::Method;
use vellum_kvm::memory::{Backing, short_size};
use vellum_kvm::vm::lifecycle::{self, Exit};
use vellum_report::Report;
use vellum_sandbox::Mode;
use vellum_sys::diagnose::Field;
use vellum_sys::keyvalue;
use vellum_sys::mmap::{PAGE_SIZE, host_page};
use vellum_sys::signal;

/// Clear the dirty log chunk by chunk and write at both ends of each chunk: pages that a random
/// test rarely hits
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", lifecycle::HELP))]
pub(super) struct DirtyEdgesArgs {
    /// How the log is collected: manual-protect, initially-set, or ring (together with
    /// initially-set, which must make no difference)
    #[arg(long, value_name = "NAME", default_value = "initially-set", value_parser = args::TRACKER, hide_possible_values = true)]
    tracker: args::Tracker,

    /// What backs memory
    #[arg(short = 's', long, value_name = "BACKING", default_value = "thp", value_parser = args::BACKING, hide_possible_values = true)]
    backing: Backing,

    /// The memslot's size
    #[arg(short = 'b', short_alias = 'm', long, value_name = "SIZE", value_parser = |text: &str| keyvalue::size(text, 1 << 20), default_value = "8m")]
    memory: u64,

    /// The guest-physical address of the memslot; host addresses are congruent modulo 2 MiB
    /// [default: 0x40001000]
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    slot_base: Option<u64>,

    /// Revoke KVM_DIRTY_LOG_INITIALLY_SET between switching the log on and clearing it
    #[arg(long)]
    revoke: bool,

    /// Set and revoke it in another thread, again and again, while the log is switched on, and then
    /// write to all pages
    #[arg(long, conflicts_with = "revoke")]
    race: bool,

    /// With --tracker ring: signals interrupt resets of the ring, and each page whose entry was
    /// reset must be in the ring again
    #[arg(long, conflicts_with_all = ["revoke", "race"])]
    interrupt: bool,

    #[command(flatten)]
    result: JudgedArgs,

    /// Confine the vCPU thread: on, log or off
    #[arg(long, value_name = "MODE", default_value = "on", value_parser = args::SANDBOX, hide_possible_values = true)]
    sandbox: Mode,
}

/// The flag of each field.
pub(super) const FLAGS: Flags = &[&[
    (Field::Backing, "--backing"),
    (Field::Memory, "--memory:"),
    (Field::Sandbox, "--sandbox:"),
    (Field::Tracker, "--tracker:"),
]];

const EXAMPLES: &str = "\
Examples:
  vellum test dirty-edges                    huge pages that a clear leaves writable (eager_page_split=N)
  vellum test dirty-edges --revoke           the same after a change of mind
  vellum test dirty-edges --race             a change of mind while the log is switched on
  vellum test dirty-edges --tracker ring     a ring, which has no bits that could be set at first
  vellum test dirty-edges --tracker ring --interrupt
                                             resets of a ring that signals end";

/// Runs `vellum test dirty-edges`.
pub(super) fn run(args: &DirtyEdgesArgs) -> Result<Exit, Failure> {
    let config = config(args)?;
    args.result.deliver("test dirty-edges", &ProgressBar::hidden(), || {
        let (report, exit) = examine(&config)?;
        Ok((vec![report], exit))
    })?
}

pub(super) fn config(args: &DirtyEdgesArgs) -> Result<edges::Config, Failure> {
    if host_page() != PAGE_SIZE {
        let page = short_size(host_page());
        return Err(Failure::usage(format!(
            "test dirty-edges looks where 64 pages of 4k end on a huge one, and this host has pages of {page}; vellum test dirty-log would work"
        )));
    }
    let slot_base = args.slot_base.unwrap_or(0x4000_1000);
    let method = args.tracker.method;
    if method == Method::Bitmap {
        return Err(Failure::usage(
            "--tracker bitmap: nothing can be cleared in part with it; manual-protect, initially-set and ring would work",
        ));
    }
    if args.tracker.entries.is_some() {
        return Err(Failure::usage(
            "--tracker ring,entries=: this test takes a ring of its own size; leave entries out",
        ));
    }
    let mind = match (args.revoke, args.race, args.interrupt) {
        (true, ..) => Mind::Revoked,
        (_, true, _) => Mind::Raced,
        (.., true) => Mind::Interrupted,
        _ => Mind::Kept,
    };
    if mind == Mind::Interrupted {
        if method != Method::Ring {
            return Err(Failure::usage("--interrupt: only a ring is reset; --tracker ring would work"));
        }
        let (most, size) = (edges::MAX_INTERRUPTED, args.memory);
        if size > most {
            let [size, most] = [size, most].map(short_size);
            return Err(Failure::usage(format!(
                "--memory {size}: all its pages go into one ring with --interrupt; {most} would work"
            )));
        }
    } else if mind != Mind::Kept && method != Method::InitiallySet {
        let flag = if args.revoke { "--revoke" } else { "--race" };
        return Err(Failure::usage(format!("{flag}: only --tracker initially-set has something to revoke")));
    }
    fits(slot_base, args.memory)?;
    Ok(edges::Config {
        method,
        backing: args.backing,
        size: args.memory,
        base: slot_base,
        mind,
        sandbox: args.sandbox,
    })
}

/// Runs the test. Returns the result, and how the command ends.
pub(super) fn examine(config: &edges::Config) -> Result<(Report, Result<Exit, Failure>), Failure> {
    signal::remember(&signal::ENDING).map_err(Failure::host)?;
    let interrupted = |error: &soak::Error| match error {
        soak::Error::Run(guest::Error::Interrupted(signal)) => Some(Exit::Signal(*signal)),
        _ => None,
    };
    let (report, lost) = edges::run(config).map_err(|error| match interrupted(&error) {
        Some(exit) => Failure::ended(exit, error.to_string()),
        None => Failure::of(&error, FLAGS),
    })?;
    let exit = match (lost.len(), signal::last()) {
        (0, Some(signal)) => Ok(Exit::Signal(signal)),
        (0, None) if report.invalid.is_empty() => Ok(Exit::PowerOff),
        (0, None) => Ok(Exit::Error),
        (lost, _) => Err(Failure::ended(Exit::Error, failure(lost))),
    };
    Ok((report, exit))
}

/// The message of a test that found lost pages.
fn failure(lost: usize) -> String {
    let pages = if lost == 1 { "page that the guest wrote is" } else { "pages that the guest wrote are" };
    format!(
        "{lost} {pages} not in the dirty log: this kernel's KVM loses pages (kernel-patches/FAULTS.md has the known cases)"
    )
}
