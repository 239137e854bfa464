//! `vellum bench page-table`.

use clap::{Args, ValueEnum};

use super::{Output, REGION, RegionArgs};
use crate::cli::failure::Failure;
use crate::cli::flags::Flags;
use vellum_bench::page_table::{self, Config, FirstTouch};
use vellum_kvm::vm::lifecycle::Exit;
use vellum_sys::diagnose::Field;
use vellum_sys::keyvalue;

/// Create, change and rebuild KVM's mappings of a region that all vCPUs share
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
#[command(mut_arg("bytes", |arg| arg.help("Memory in all, which all vCPUs share; sizes take k, m, g, t")))]
pub struct PageTableArgs {
    /// Run the rows of a published table, scaled to this host; the result records the scale. With
    /// --preset, -v sets the vCPUs of the largest row [default: two for each CPU]
    #[arg(long, conflicts_with_all = ["bytes", "backing", "pin", "together"])]
    preset: Option<Preset>,

    #[command(flatten)]
    region: RegionArgs,

    /// Do not populate memory beforehand: create_mappings then includes the host's first touch of
    /// it, as in kvm_page_table_test
    #[arg(long)]
    unpopulated: bool,

    /// Have all vCPUs create each mapping at the same time: a page is missing until every vCPU
    /// waits for it on userfaultfd. create_mappings then includes that
    #[arg(long, conflicts_with_all = ["unpopulated", "execute"])]
    together: bool,

    /// Once memory is logged, first execute an instruction in each page of the backing's size: an
    /// Arm host, which maps written pages without execute permission, splits its blocks on that
    #[arg(long)]
    execute: bool,

    /// Where memory starts in the guest's physical address space, as in 0x100000000
    #[arg(short = 'p', long, value_name = "ADDRESS", value_parser = keyvalue::address)]
    phys_offset: Option<u64>,

    #[command(flatten)]
    output: Output,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Preset {
    /// The six rows of the arm64 stage-2 page table series of 2021
    Seed,
}

/// The flag of each field.
pub(super) const FLAGS: Flags = &[REGION, &[(Field::GuestAddress, "-p")]];

pub(super) fn run(args: PageTableArgs) -> Result<Exit, Failure> {
    let config = Config {
        common: args.region.common(&args.output)?,
        region: args.region.region(),
        first_touch: match (args.together, args.unpopulated) {
            (true, _) => FirstTouch::Together,
            (_, true) => FirstTouch::Guest,
            _ => FirstTouch::Before,
        },
        execute: args.execute,
        phys_offset: args.phys_offset,
    };
    args.output.deliver(FLAGS, || match args.preset {
        Some(Preset::Seed) => page_table::run_seed(&config, args.region.vcpus),
        None => page_table::run(&config),
    })
}
