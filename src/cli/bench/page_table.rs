//! `vellum bench page-table`.

use clap::{Args, ValueEnum};

use super::{Output, guest_page, pins};
use crate::arch::workload::GuestPage;
use crate::bench::page_table::{self, Config};
use crate::cli::{Failure, args, keyvalue};
use crate::vm::lifecycle::Exit;
use crate::vm::memory::Backing;

/// Make, change and rebuild KVM's mappings of a region that all vCPUs share
#[derive(Debug, Args)]
pub struct PageTableArgs {
    /// Run rows that others have published, scaled to this host; the scale is part of the result
    #[arg(long, conflicts_with_all = ["bytes", "backing", "vcpus", "pin"])]
    preset: Option<Preset>,

    /// Memory in all; sizes take k, m, g, t
    #[arg(short = 'b', value_name = "SIZE", default_value = "1g", value_parser = |text: &str| keyvalue::size(text, 1))]
    bytes: u64,

    /// Backing, by Vellum's names or the KVM selftests'
    #[arg(short = 's', value_name = "BACKING", default_value = "anonymous", value_parser = args::backing)]
    backing: Backing,

    /// vCPUs
    #[arg(short = 'v', value_name = "N", default_value_t = 1,
        value_parser = |text: &str| keyvalue::number(text, 1..=65_536usize))]
    vcpus: usize,

    /// CPUs to pin to, one for each vCPU
    #[arg(short = 'c', value_name = "LIST")]
    pin: Option<String>,

    /// The page size of the guest's own tables: 2m or 4k
    #[arg(short = 'm', long = "mode", value_name = "SIZE", default_value = "2m", value_parser = guest_page)]
    page: GuestPage,

    /// Rounds, each in a machine of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = |text: &str| keyvalue::number(text, 1..=100_000u32))]
    repeat: u32,

    #[command(flatten)]
    output: Output,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Preset {
    /// The six rows of the arm64 stage-2 page table series of 2021
    Seed,
}

pub(super) fn run(args: PageTableArgs) -> Result<Exit, Failure> {
    let config = Config {
        common: args.output.common(),
        bytes: args.bytes,
        backing: args.backing,
        vcpus: args.vcpus,
        pins: pins(args.pin.as_deref(), args.vcpus)?,
        page: args.page,
        repeat: args.repeat,
    };
    args.output.deliver(|| match args.preset {
        Some(Preset::Seed) => page_table::run_seed(&config),
        None => page_table::run(&config),
    })
}
