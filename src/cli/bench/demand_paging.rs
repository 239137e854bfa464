//! `vellum bench demand-paging`.

use std::time::Duration;

use clap::Args;

use super::{Output, pins};
use crate::bench::demand_paging::{self, Config};
use crate::cli::{Failure, args, keyvalue};
use crate::sys::uffd::Mode;
use crate::vm::lifecycle::Exit;
use crate::vm::memory::Backing;

/// A guest touches memory that is not there, and userfaultfd handlers bring it
#[derive(Debug, Args)]
pub struct DemandPagingArgs {
    /// MISSING (the handler copies pages in) or MINOR (it maps pages that the file has)
    #[arg(short = 'u', value_name = "MODE", default_value = "MISSING", value_parser = mode)]
    mode: Mode,

    /// One userfaultfd for all memory instead of one for each vCPU's region
    #[arg(short = 'a')]
    single: bool,

    /// Microseconds that a handler waits before it answers
    #[arg(short = 'd', value_name = "USEC", default_value_t = 0)]
    delay: u64,

    /// Handlers of each userfaultfd
    #[arg(short = 'r', value_name = "N", default_value_t = 1,
        value_parser = |text: &str| keyvalue::number(text, 1..=1024usize))]
    readers: usize,

    /// Pages that a handler brings for each fault
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = |text: &str| keyvalue::number(text, 1..=65_536u64))]
    batch: u64,

    /// Memory of each vCPU; sizes take k, m, g, t
    #[arg(short = 'b', value_name = "SIZE", default_value = "1g", value_parser = |text: &str| keyvalue::size(text, 1))]
    bytes: u64,

    /// Backing, by Vellum's names or the KVM selftests'
    #[arg(short = 's', value_name = "BACKING", default_value = "anonymous", value_parser = args::backing)]
    backing: Backing,

    /// vCPUs
    #[arg(short = 'v', value_name = "N", default_value_t = 1,
        value_parser = |text: &str| keyvalue::number(text, 1..=65_536usize))]
    vcpus: usize,

    /// CPUs to pin to: one for each vCPU, and one more for the main thread if given
    #[arg(short = 'c', value_name = "LIST")]
    pin: Option<String>,

    /// All vCPUs go over one and the same region
    #[arg(short = 'o')]
    overlap: bool,

    /// Rounds, each with new memory
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = |text: &str| keyvalue::number(text, 1..=100_000u32))]
    repeat: u32,

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

pub(super) fn run(args: DemandPagingArgs) -> Result<Exit, Failure> {
    let pins = pins(args.pin.as_deref(), args.vcpus)?;
    let config = Config {
        common: args.output.common(),
        mode: args.mode,
        single: args.single,
        delay: Duration::from_micros(args.delay),
        readers: args.readers,
        batch: args.batch,
        bytes: args.bytes,
        backing: args.backing,
        vcpus: args.vcpus,
        pins,
        overlap: args.overlap,
        repeat: args.repeat,
    };
    args.output.deliver(|| demand_paging::run(&config))
}
