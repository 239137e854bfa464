//! `vellum bench context-switch`.

use clap::Args;

use super::{Output, SHADOW, ShadowArgs};
use crate::cli::failure::Failure;
use crate::cli::flags::Flags;
use vellum_bench::context_switch::{self, Cached, Config, Tables};
use vellum_guests::tables::MAX_PAGES;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_sys::diagnose::Field;
use vellum_sys::keyvalue;

/// Load CR3 from among K page tables in turn: time and exits per switch
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub struct ContextSwitchArgs {
    /// Page tables; several numbers are measured one after the other
    #[arg(value_name = "K", value_delimiter = ',', default_value = "2,4,8",
        value_parser = |text: &str| keyvalue::number(text, 2..=100_000u64))]
    tables: Vec<u64>,

    /// Switches in a round
    #[arg(long, value_name = "N", default_value_t = 20_000,
        value_parser = |text: &str| keyvalue::number(text, 1..=u64::from(u32::MAX)))]
    switches: u64,

    /// Pages read after each switch
    #[arg(long, value_name = "N", default_value_t = 0,
        value_parser = |text: &str| keyvalue::number(text, 0..=MAX_PAGES))]
    reads: u64,

    /// Whether the guest loads CR3 through the CR3 cache, which needs a patched kernel: off; on; or
    /// both, whose figures have different names
    #[arg(long, value_name = "WHETHER", value_enum, default_value = "off", hide_possible_values = true)]
    cr3_cache: Cached,

    #[command(flatten)]
    shadow: ShadowArgs,

    #[command(flatten)]
    output: Output,
}

/// The flag of each field.
pub(super) const FLAGS: Flags = &[SHADOW, &[(Field::Cr3Cache, "--cr3-cache:")]];

pub(super) fn run(args: ContextSwitchArgs) -> Result<Exit, Failure> {
    let ContextSwitchArgs { tables, switches, reads, cr3_cache, shadow, output } = args;
    let tables = Tables { counts: tables };
    output.deliver(FLAGS, || {
        context_switch::run(&Config { common: shadow.common(&output), tables, switches, reads, cr3_cache })
    })
}
