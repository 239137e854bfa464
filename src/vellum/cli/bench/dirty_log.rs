//! `vellum bench dirty-log`.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::{Output, REGION, RegionArgs};
use crate::cli::args;
use crate::cli::failure::Failure;
use crate::cli::flags::Flags;
use vellum_bench::dirty_log::{self, Config};
use vellum_guests::{Hot, Order};
use vellum_kvm::dirty::Method;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_kvm::vm::ring::RING_ENTRIES;
use vellum_sys::diagnose::Field;
use vellum_sys::keyvalue;

/// The cost of dirty logging to host and guest; options as in the kernel's dirty_log_perf_test, and
/// more
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
#[command(after_help = EXAMPLES)]
pub struct DirtyLogArgs {
    /// Show in one table where the cost arises: on 4 KiB, transparent and reserved huge pages, with
    /// manual-protect and with initially-set, over 5 passes unless -i is given
    #[arg(long, value_enum, conflicts_with_all = ["backing", "tracker", "no_manual_protect"])]
    preset: Option<Preset>,

    /// Passes over memory while it is logged [default: 2]
    #[arg(short, long, value_name = "N", value_parser = |text: &str| keyvalue::number(text, 1..=1_000_000u32))]
    iterations: Option<u32>,

    #[command(flatten)]
    region: RegionArgs,

    /// Percent of the accesses that write; the others read
    #[arg(short, long, value_name = "PCT", default_value_t = 100.0, value_parser = |text: &str| keyvalue::number(text, 0.0..=100.0))]
    write_percent: f64,

    /// Access pages in random order, with replacement
    #[arg(short = 'a', long)]
    random: bool,

    /// All vCPUs access all memory, instead of a part each
    #[arg(short, long)]
    overlap: bool,

    /// Split memory into this many memslots
    #[arg(short = 'x', long, value_name = "N", default_value_t = 1, value_parser = |text: &str| keyvalue::number(text, 1..=32_764u32))]
    slots: u32,

    /// No manual protection: the same as --tracker bitmap
    #[arg(short = 'g', long, conflicts_with = "tracker")]
    no_manual_protect: bool,

    /// Let vCPUs run while the log is switched off
    #[arg(short = 'e', long)]
    run_while_disabling: bool,

    /// The seed of random orders
    #[arg(short = 'r', long, value_name = "N", default_value_t = 1, value_parser = |text: &str| keyvalue::number(text, 0..=u64::MAX))]
    seed: u64,

    /// Where memory starts in the guest's physical address space, as in 0x100000000
    #[arg(short = 'p', long, value_name = "ADDRESS", value_parser = keyvalue::address)]
    phys_offset: Option<u64>,

    /// How the log is collected: bitmap, manual-protect, initially-set, ring[,entries=N] [default:
    /// initially-set, or the next best that this host has]
    #[arg(long, value_name = "NAME", value_parser = args::TRACKER, hide_possible_values = true)]
    tracker: Option<args::Tracker>,

    /// Make Arm's KVM split blocks as soon as they are logged, this many bytes at a time, as in 2m
    #[arg(long, value_name = "SIZE", value_parser = |text: &str| keyvalue::size(text, 1))]
    eager_split: Option<u64>,

    /// Clear in chunks of this many pages, a multiple of 64, instead of whole memslots
    #[arg(long, value_name = "PAGES", value_parser = args::clear_chunk)]
    clear_chunk: Option<u64>,

    /// A part of each vCPU's memory that gets a share of its accesses, as in 10%,share=90%
    #[arg(long, value_name = "PCT[,share=PCT]", value_parser = hot)]
    hot: Option<Hot>,

    /// Collect in lockstep with the guest, or as fast as possible while the guest runs
    #[arg(long, value_enum, default_value_t = Collect::Lockstep)]
    collect: Collect,

    /// How long to collect continuously [default: 5s]
    #[arg(long, value_name = "TIME", value_parser = keyvalue::duration)]
    duration: Option<Duration>,

    /// Measure how long each of the guest's writes takes
    #[arg(long, value_name = "on|off", default_value = "on", action = clap::ArgAction::Set,
        value_parser = |text: &str| keyvalue::one_of("switch", text, &[("on", true), ("off", false)]))]
    latency: bool,

    #[command(flatten)]
    output: Output,
}

const EXAMPLES: &str = "\
Examples:
  vellum bench dirty-log -i 5 -v 2 -b 512M -s anonymous_thp
  vellum bench dirty-log -v 4 -b 1G --hot 10% --collect continuous
  vellum bench dirty-log --preset lazy -b 64M
  vellum bench dirty-log -i 5 -b 256M -g --repeat 5 --json with-g.json";

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Preset {
    /// Huge pages are protected when the log is switched on, or when it is first cleared
    Lazy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Collect {
    /// The guest writes its memory and stops, then the log is collected, as in dirty_log_perf_test
    Lockstep,
    /// The guest never stops, and its progress is recorded over time
    Continuous,
}

fn hot(text: &str) -> Result<Hot, String> {
    let kv = keyvalue::KeyValues::parse(text, Some("percent"), &["percent", "share"])
        .map_err(|e| e.to_string())?;
    let read = || args::hot_of(&kv, "percent")?.ok_or_else(|| keyvalue::Error::Missing("percent".into()));
    read().map_err(|e| e.to_string())
}

/// The flag of each field.
pub(super) const FLAGS: Flags = &[
    REGION,
    &[
        (Field::ClearChunk, "--clear-chunk"),
        (Field::Collect, "--collect"),
        (Field::EagerSplit, "--eager-split:"),
        (Field::GuestAddress, "-p"),
        (Field::RingEntries, "--tracker ring,entries="),
        (Field::Slots, "-x"),
        (Field::Tracker, "--tracker:"),
    ],
];

pub(super) fn run(args: DirtyLogArgs) -> Result<Exit, Failure> {
    let continuous = match (args.collect, args.iterations, args.duration) {
        (Collect::Lockstep, _, Some(_)) => {
            return Err(Failure::usage(
                "--duration: --collect lockstep ends after so many passes, not after so long; -i N or --collect continuous would work",
            ));
        }
        (Collect::Continuous, Some(_), _) => {
            return Err(Failure::usage(
                "--iterations: with --collect continuous the guest runs through, and no passes are counted; --duration TIME or --collect lockstep would work",
            ));
        }
        (Collect::Lockstep, ..) => None,
        (Collect::Continuous, _, duration) => Some(duration.unwrap_or(Duration::from_secs(5))),
    };
    let method = match (args.tracker, args.no_manual_protect) {
        (Some(tracker), _) => Some(tracker.method),
        (None, true) => Some(Method::Bitmap),
        (None, false) => None,
    };
    let config = Config {
        iterations: args.iterations.unwrap_or(if args.preset.is_some() { 5 } else { 2 }),
        region: args.region.region(),
        write_percent: args.write_percent,
        order: if args.random { Order::Random } else { Order::Sequential },
        hot: args.hot,
        overlap: args.overlap,
        slots: args.slots,
        method,
        ring_entries: args.tracker.and_then(|tracker| tracker.entries).unwrap_or(RING_ENTRIES),
        chunk: args.clear_chunk,
        eager_split: args.eager_split,
        run_while_disabling: args.run_while_disabling,
        seed: args.seed,
        phys_offset: args.phys_offset,
        continuous,
        latency: args.latency,
        common: args.region.common(&args.output)?,
    };
    args.output.deliver(FLAGS, || match args.preset {
        Some(Preset::Lazy) => dirty_log::lazy::run(&config),
        None => dirty_log::run(&config),
    })
}
