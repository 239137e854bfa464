//! `vellum bench access-tracking`.

use clap::Args;

use super::{Output, RegionArgs, guest_page};
use crate::arch::workload::GuestPage;
use crate::bench::access_tracking::{self, Config};
use crate::cli::Failure;
use crate::vm::lifecycle::Exit;

/// Accesses to memory that the host has marked idle: what clearing accessed bits costs a guest
#[derive(Debug, Args)]
pub struct AccessTrackingArgs {
    #[command(flatten)]
    region: RegionArgs,

    /// All vCPUs go over one and the same region
    #[arg(short, long)]
    overlap: bool,

    /// The page size of the guest's own tables: 2m or 4k
    #[arg(short = 'm', long = "mode", value_name = "SIZE", default_value = "2m", value_parser = guest_page)]
    page: GuestPage,

    #[command(flatten)]
    output: Output,
}

pub(super) fn run(args: AccessTrackingArgs) -> Result<Exit, Failure> {
    let config = Config {
        common: args.region.common(&args.output)?,
        region: args.region.region(),
        overlap: args.overlap,
        page: args.page,
    };
    args.output.deliver(|| access_tracking::run(&config))
}
