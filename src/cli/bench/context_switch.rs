//! `vellum bench context-switch`.

use clap::Args;

use super::{Output, cpu};
use crate::bench::context_switch::{self, Config};
use crate::cli::{Failure, keyvalue};
use crate::vm::lifecycle::Exit;
use crate::workload::tables::MOST_PAGES;

/// CR3 loaded from among K page tables in turn: time and exits per switch
#[derive(Debug, Args)]
#[command(after_help = "Meaningful where KVM shadows guest page tables: kvm_amd npt=0, kvm_intel ept=0.")]
pub struct ContextSwitchArgs {
    /// How many page tables; several numbers are measured one after the other
    #[arg(value_name = "K", value_delimiter = ',', default_value = "2,4,8",
        value_parser = |text: &str| keyvalue::number(text, 2..=100_000u64))]
    tables: Vec<u64>,

    /// Switches in a round
    #[arg(long, value_name = "N", default_value_t = 20_000,
        value_parser = |text: &str| keyvalue::number(text, 1..=u64::from(u32::MAX)))]
    switches: u64,

    /// Pages read after each switch
    #[arg(long, value_name = "N", default_value_t = 0,
        value_parser = |text: &str| keyvalue::number(text, 0..=MOST_PAGES))]
    reads: u64,

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

pub(super) fn run(args: ContextSwitchArgs) -> Result<Exit, Failure> {
    let ContextSwitchArgs { tables, switches, reads, mmu_pages, repeat, cpu, output } = args;
    output.deliver(|| {
        context_switch::run(&Config {
            common: output.common(),
            tables,
            switches,
            reads,
            mmu_pages,
            repeat,
            pin: cpu,
        })
    })
}
