//! `vellum restore`: runs a machine out of a snapshot.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::host::{self, HostArgs};
use super::migrate::failure;
use super::{Failure, Flags, args};
use crate::arch::clocks::Meanwhile;
use crate::fault::Field;
use crate::migration::link::LIVENESS;
use crate::session::incoming::{Listen, Restore};
use crate::session::log::{self, Beside};
use crate::snapshot::source::Source;
use crate::vm::lifecycle::{self, Exit};

/// Run a machine out of a snapshot
#[derive(Debug, Args)]
#[command(after_help = format!("{}\n\n{}", EXAMPLES, lifecycle::HELP))]
pub struct RestoreArgs {
    /// The directory that `vellum snapshot` wrote
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// Which point of it (`vellum snapshot list DIR`) [default: the newest]
    #[arg(long, value_name = "N")]
    at: Option<u32>,

    /// What the guest's clocks do about the time since: stand-still, as if there had been none; advance, by the host's real time
    #[arg(long, value_name = "HOW", default_value = "stand-still", hide_possible_values = true)]
    clock: Clock,

    /// Let it wait until `vellum resume NAME`, however it was saved
    #[arg(long, requires = "name")]
    paused: bool,

    /// Take disks that have been written to since, are of another size or others: the guest finds on them what it does not expect
    #[arg(long)]
    disk_changed: bool,

    /// How its memory comes and what backs it: `eager|map[,backing=anonymous|thp|hugetlb-2m|hugetlb-1g|shmem|memfd][,prealloc][,lock]`;
    /// eager: all of it is read, and compared with its sums; map: it shows the files, on anonymous or thp, whose pages are read when
    /// somebody wants them, are shared by all who do, and are not compared
    #[arg(short, long, value_name = "HOW", value_parser = args::restored_memory, default_value = "eager")]
    memory: args::RestoredMemory,

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
  vellum restore web.snap --name web --disk web.img       the host's side of its devices is said here, as in vellum receive
  vellum restore web.snap --at 0                          its first point
  vellum restore web.snap --memory map                    at once, and many share the pages of one snapshot";

/// Which flag each field comes from.
pub(super) const FLAGS: Flags = &[host::FLAGS, &[(Field::DiskChanged, "--disk-changed accepts it:")]];

/// Does what was asked.
pub fn run(args: RestoreArgs) -> Result<Exit, Failure> {
    log::start(tracing::Level::INFO, Beside::Console);
    let source = Source::open(&args.dir).map_err(failure)?;
    let meanwhile = match args.clock {
        Clock::StandStill => Meanwhile::Stands,
        Clock::Advance => Meanwhile::Passes,
    };
    let restore = Restore {
        source,
        point: args.at,
        meanwhile,
        paused: args.paused,
        disk_changed: args.disk_changed,
        mapped: args.memory.mapped,
    };
    args.host.run(Listen::Snapshot(restore), args.memory.config, LIVENESS, FLAGS)
}
