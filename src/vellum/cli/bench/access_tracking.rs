//! `vellum bench access-tracking`.

use clap::Args;

use super::{Output, REGION, RegionArgs};
use crate::cli::failure::Failure;
use crate::cli::flags::Flags;
use vellum_bench::access_tracking::{self, Config};
use vellum_kvm::vm::lifecycle::Exit;

/// Accesses to memory that the host has marked idle: what clearing accessed bits costs a guest
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub struct AccessTrackingArgs {
    #[command(flatten)]
    region: RegionArgs,

    /// All vCPUs access the same region
    #[arg(short, long)]
    overlap: bool,

    #[command(flatten)]
    output: Output,
}

/// The flag of each field.
pub(super) const FLAGS: Flags = &[REGION];

pub(super) fn run(args: AccessTrackingArgs) -> Result<Exit, Failure> {
    let config = Config {
        common: args.region.common(&args.output)?,
        region: args.region.region(),
        overlap: args.overlap,
    };
    args.output.deliver(FLAGS, || access_tracking::run(&config))
}
