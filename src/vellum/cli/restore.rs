//! `vellum restore`: runs a machine from a snapshot.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::args;
use super::client::failure;
use super::failure::Failure;
use super::flags::Flags;
use super::host::{self, HostArgs};
use crate::session::incoming::{Brings, Listen, Restore};
use crate::session::log::{self, Beside};
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::vm::lifecycle::{self, Exit};
use vellum_migration::link::LIVENESS;
use vellum_migration::snapshot::source::Source;
use vellum_sys::diagnose::Field;
use vellum_sys::keyvalue;

/// Run a machine from a snapshot
#[derive(Debug, Args)]
#[command(after_help = format!("{}\n\n{}", EXAMPLES, lifecycle::HELP))]
pub struct RestoreArgs {
    /// The directory that `vellum snapshot` wrote
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// The number of the point (`vellum snapshot list DIR`) [default: the newest]
    #[arg(long, value_name = "N")]
    at: Option<u32>,

    /// What the guest's clocks do about the time since the snapshot: stand-still, as if none had
    /// passed; advance, by the host's real time
    #[arg(long, value_name = "HOW", default_value = "stand-still", hide_possible_values = true)]
    clock: Clock,

    /// Keep it paused until `vellum resume NAME`, however it was saved
    #[arg(long, requires = "name")]
    paused: bool,

    /// Accept disks that were written to since, have another size or are others; the guest does not
    /// expect what it finds on them
    #[arg(long)]
    disk_changed: bool,

    /// How memory is loaded and what backs it:
    /// `eager|map|demand[,backing=anonymous|thp|hugetlb-2m|hugetlb-1g|shmem|memfd][,prealloc][,lock]`;
    /// eager: all memory is read and compared with its checksums before the guest runs; map: memory
    /// maps the files, on anonymous or thp, so that pages are read on demand, shared between
    /// machines and not compared; demand: the guest runs at once, on any backing, each page is read
    /// on demand and compared, and the rest is read in the background. A migration or snapshot that
    /// starts before all memory is there reads the missing pages in its first pass. A damaged page
    /// ends the machine
    #[arg(short, long, value_name = "HOW", value_parser = args::restored_memory, default_value = "eager")]
    memory: args::RestoredMemory,

    /// With --memory demand: write into DIR which pages are wanted in this time, and in which
    /// order; no other pages are read meanwhile
    #[arg(long, value_name = "TIME", value_parser = keyvalue::duration, num_args = 0..=1, require_equals = true,
          default_missing_value = "10s", conflicts_with = "prefetch")]
    record: Option<Duration>,

    /// With --memory demand: first read the pages that the recorded restore wanted
    #[arg(long)]
    prefetch: bool,

    #[command(flatten)]
    host: HostArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Clock {
    StandStill,
    Advance,
}

const EXAMPLES: &str = "\
Examples:
  vellum restore web.snap --name web --disk web.img   name its devices here
  vellum restore web.snap --at 0                      its first point
  vellum restore web.snap --memory map                at once; pages are shared
  vellum restore web.snap --memory demand --record    record the pages wanted
  vellum restore web.snap --memory demand --prefetch  read those pages first";

/// The flag of each field.
pub(super) const FLAGS: Flags = &[
    host::FLAGS,
    host::MEMORY,
    &[(Field::DiskChanged, "--disk-changed accepts it:"), (Field::OnDemand, "--memory demand:")],
];

/// Runs `vellum restore`.
pub fn run(args: RestoreArgs) -> Result<Exit, Failure> {
    log::start(tracing::Level::INFO, Beside::Console);
    let source = Source::open(&args.dir).map_err(failure)?;
    let meanwhile = match args.clock {
        Clock::StandStill => ClockPolicy::Stands,
        Clock::Advance => ClockPolicy::Passes,
    };
    if args.prefetch && args.memory.way == args::Way::Demand && !source.has_working_set() {
        let why =
            format!("--prefetch: no restore of {} was recorded: --record does that", args.dir.display());
        return Err(Failure::usage(why));
    }
    let memory = match args.memory.way {
        args::Way::Demand => Brings::Demand {
            prefetch: args.prefetch,
            record: args.record.map(|lasts| (lasts, args.dir.clone())),
        },
        _ if args.prefetch || args.record.is_some() => {
            let flag = if args.prefetch { "--prefetch" } else { "--record" };
            return Err(Failure::usage(format!("{flag}: it goes with --memory demand alone")));
        }
        args::Way::Eager => Brings::Eager,
        args::Way::Map => Brings::Map,
    };
    let restore = Restore {
        source,
        point: args.at,
        meanwhile,
        paused: args.paused,
        disk_changed: args.disk_changed,
        memory,
    };
    args.host.run(Listen::Snapshot(restore), args.memory.config, LIVENESS, FLAGS)
}
