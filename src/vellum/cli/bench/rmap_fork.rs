//! `vellum bench rmap-fork`.

use clap::Args;

use super::{Output, SHADOW, ShadowArgs};
use crate::cli::failure::Failure;
use crate::cli::flags::Flags;
use vellum_bench::rmap_fork::{self, Config, DropOrder, Step};
use vellum_guests::tables::MAX_PAGES;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_sys::keyvalue;

/// N page tables over the same frames, as N forked children have: build, touch through each, drop
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
#[command(after_help = "Meaningful where KVM shadows guest page tables: kvm_amd npt=0, kvm_intel ept=0.
`vellum bench rmap-fork 500` is what `rmap_fork 500` is inside a Linux guest, without the Linux.")]
pub struct RmapForkArgs {
    /// Page tables; several numbers are measured one after the other, as in 1,2,15,500
    #[arg(value_name = "N", value_delimiter = ',', default_value = "500",
        value_parser = |text: &str| keyvalue::number(text, 1..=100_000u64))]
    tables: Vec<u64>,

    /// In which order tables are dropped; each order is a round of its own: oldest, newest, any
    #[arg(long, value_name = "ORDER", value_delimiter = ',', default_value = "oldest",
        value_parser = |text: &str| keyvalue::one_of("order", text, &DropOrder::NAMES))]
    drop: Vec<DropOrder>,

    /// Time one table only, whose entries make or drop rmap chains of these lengths, as in
    /// 1,2,15,1000
    #[arg(long, value_name = "N", value_delimiter = ',', conflicts_with_all = ["tables", "drop"],
        value_parser = |text: &str| keyvalue::number(text, 1..=100_000u64))]
    lengths: Vec<u64>,

    /// Frames that each table maps
    #[arg(long, value_name = "N", default_value_t = 256,
        value_parser = |text: &str| keyvalue::number(text, 1..=MAX_PAGES))]
    pages: u64,

    #[command(flatten)]
    shadow: ShadowArgs,

    #[command(flatten)]
    output: Output,
}

/// The flag of each field.
pub(super) const FLAGS: Flags = &[SHADOW];

pub(super) fn run(args: RmapForkArgs) -> Result<Exit, Failure> {
    let RmapForkArgs { tables, drop, mut lengths, pages, shadow, output } = args;
    lengths.sort_unstable();
    lengths.dedup();
    let what = if lengths.is_empty() { Step::Tables(tables, drop) } else { Step::Lengths(lengths) };
    output.deliver(FLAGS, || rmap_fork::run(&Config { common: shadow.common(&output), what, pages }))
}
