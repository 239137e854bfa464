//! `vellum bench page-table`.

use clap::{Args, ValueEnum};

use super::{Output, RegionArgs, guest_page};
use crate::arch::workload::GuestPage;
use crate::bench::page_table::{self, Config};
use crate::cli::Failure;
use crate::vm::lifecycle::Exit;

/// Make, change and rebuild KVM's mappings of a region that all vCPUs share
#[derive(Debug, Args)]
#[command(mut_arg("bytes", |arg| arg.help("Memory in all, which all vCPUs share; sizes take k, m, g, t")))]
pub struct PageTableArgs {
    /// Run rows that others have published, scaled to this host; the scale is part of the result
    #[arg(long, conflicts_with_all = ["bytes", "backing", "vcpus", "pin"])]
    preset: Option<Preset>,

    #[command(flatten)]
    region: RegionArgs,

    /// The page size of the guest's own tables: 2m or 4k
    #[arg(short = 'm', long = "mode", value_name = "SIZE", default_value = "2m", value_parser = guest_page)]
    page: GuestPage,

    #[command(flatten)]
    output: Output,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Preset {
    /// The six rows of the arm64 stage-2 page table series of 2021
    Seed,
}

pub(super) fn run(args: PageTableArgs) -> Result<Exit, Failure> {
    let config =
        Config { common: args.region.common(&args.output)?, region: args.region.region(), page: args.page };
    args.output.deliver(|| match args.preset {
        Some(Preset::Seed) => page_table::run_seed(&config),
        None => page_table::run(&config),
    })
}
