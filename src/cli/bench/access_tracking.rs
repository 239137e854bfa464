//! `vellum bench access-tracking`.

use clap::Args;

use super::{Output, guest_page, pins};
use crate::arch::workload::GuestPage;
use crate::bench::access_tracking::{self, Config};
use crate::cli::{Failure, args, keyvalue};
use crate::vm::lifecycle::Exit;
use crate::vm::memory::Backing;

/// Accesses to memory that the host has marked idle: what clearing accessed bits costs a guest
#[derive(Debug, Args)]
pub struct AccessTrackingArgs {
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

    /// CPUs to pin to, one for each vCPU
    #[arg(short = 'c', value_name = "LIST")]
    pin: Option<String>,

    /// All vCPUs go over one and the same region
    #[arg(short = 'o')]
    overlap: bool,

    /// The page size of the guest's own tables: 2m or 4k
    #[arg(short = 'm', long = "mode", value_name = "SIZE", default_value = "2m", value_parser = guest_page)]
    page: GuestPage,

    /// Rounds, each in a machine of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = |text: &str| keyvalue::number(text, 1..=100_000u32))]
    repeat: u32,

    #[command(flatten)]
    output: Output,
}

pub(super) fn run(args: AccessTrackingArgs) -> Result<Exit, Failure> {
    let config = Config {
        common: args.output.common(),
        bytes: args.bytes,
        backing: args.backing,
        vcpus: args.vcpus,
        pins: pins(args.pin.as_deref(), args.vcpus)?,
        overlap: args.overlap,
        page: args.page,
        repeat: args.repeat,
    };
    args.output.deliver(|| access_tracking::run(&config))
}
