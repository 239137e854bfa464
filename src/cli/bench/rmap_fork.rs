//! `vellum bench rmap-fork`.

use clap::Args;

use super::{Output, cpu};
use crate::bench::rmap_fork::{self, Config};
use crate::cli::{Failure, keyvalue};
use crate::vm::lifecycle::Exit;
use crate::workload::tables::MOST_PAGES;

/// N page tables over the same frames, as N forked children have: build, touch through each, drop
#[derive(Debug, Args)]
#[command(after_help = "Meaningful where KVM shadows guest page tables: kvm_amd npt=0, kvm_intel ept=0.
`vellum bench rmap-fork 500` is what `rmap_fork 500` is inside a Linux guest, without the Linux.")]
pub struct RmapForkArgs {
    /// How many page tables; several numbers are measured one after the other, as in 1,2,15,500
    #[arg(value_name = "N", value_delimiter = ',', default_value = "500",
        value_parser = |text: &str| keyvalue::number(text, 1..=100_000u64))]
    tables: Vec<u64>,

    /// Frames that each table maps
    #[arg(long, value_name = "N", default_value_t = 256,
        value_parser = |text: &str| keyvalue::number(text, 1..=MOST_PAGES))]
    pages: u64,

    /// Shadow pages that KVM may use (KVM_SET_NR_MMU_PAGES); enough for all tables unless given
    #[arg(long, value_name = "N", value_parser = |text: &str| keyvalue::number(text, 64..=u64::from(u32::MAX)))]
    mmu_pages: Option<u64>,

    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = |text: &str| keyvalue::number(text, 1..=100_000u32))]
    repeat: u32,

    /// Stay on this CPU
    #[arg(short, long, value_name = "CPU", value_parser = cpu)]
    cpu: Option<usize>,

    #[command(flatten)]
    output: Output,
}

pub(super) fn run(args: RmapForkArgs) -> Result<Exit, Failure> {
    let RmapForkArgs { tables, pages, mmu_pages, repeat, cpu, output } = args;
    output.deliver(|| {
        rmap_fork::run(&Config { common: output.common(), tables, pages, mmu_pages, repeat, pin: cpu })
    })
}
