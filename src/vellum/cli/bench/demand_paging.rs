//! `vellum bench demand-paging`.

use std::time::Duration;

use clap::Args;

use super::{Output, REGION, RegionArgs};
use crate::cli::failure::Failure;
use crate::cli::flags::Flags;
use vellum_bench::demand_paging::{self, Config};
use vellum_kvm::vm::lifecycle::Exit;
use vellum_sys::diagnose::Field;
use vellum_sys::keyvalue;
use vellum_sys::uffd::Mode;

/// A guest touches missing memory, and userfaultfd handlers provide it
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub struct DemandPagingArgs {
    /// MISSING (the handler copies pages in) or MINOR (it maps pages that the file has)
    #[arg(short = 'u', value_name = "MODE", default_value = "MISSING", value_parser = mode)]
    faults: Mode,

    /// One userfaultfd for all memory instead of one for each vCPU's region
    #[arg(short = 'a')]
    single: bool,

    /// Microseconds that a handler waits before it answers
    #[arg(short = 'd', value_name = "USEC", default_value_t = 0,
        value_parser = |text: &str| keyvalue::number(text, 0..=60_000_000u64))]
    delay: u64,

    /// Handlers of each userfaultfd
    #[arg(short = 'r', value_name = "N", default_value_t = 1,
        value_parser = |text: &str| keyvalue::number(text, 1..=1024usize))]
    readers: usize,

    /// Pages that a handler provides for each fault
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = |text: &str| keyvalue::number(text, 1..=65_536u64))]
    batch: u64,

    #[command(flatten)]
    region: RegionArgs,

    /// All vCPUs access the same region
    #[arg(short, long)]
    overlap: bool,

    #[command(flatten)]
    output: Output,
}

fn mode(text: &str) -> Result<Mode, String> {
    keyvalue::one_of(
        "mode",
        &text.to_ascii_uppercase(),
        &[("MISSING", Mode::Missing), ("MINOR", Mode::Minor)],
    )
}

/// The flag of each field.
pub(super) const FLAGS: Flags = &[REGION, &[(Field::PageFaults, "-u")]];

pub(super) fn run(args: DemandPagingArgs) -> Result<Exit, Failure> {
    let config = Config {
        common: args.region.common(&args.output)?,
        region: args.region.region(),
        mode: args.faults,
        single: args.single,
        delay: Duration::from_micros(args.delay),
        readers: args.readers,
        batch: args.batch,
        overlap: args.overlap,
    };
    args.output.deliver(FLAGS, || demand_paging::run(&config))
}
