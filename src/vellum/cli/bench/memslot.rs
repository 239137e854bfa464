//! `vellum bench memslot`.

use std::time::Duration;

use clap::Args;

use super::Output;
use crate::cli::args;
use crate::cli::failure::Failure;
use crate::cli::flags::Flags;
use vellum_bench::Common;
use vellum_bench::memslot::{self, Config, Test};
use vellum_kvm::memory::Backing;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_sys::diagnose::Field;
use vellum_sys::keyvalue;

/// Map, unmap and move memory of a guest
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub struct MemslotArgs {
    /// Tests, all by default: map, unmap, unmap_chunked, move_active, move_inactive, rw, create
    #[arg(value_name = "TEST", value_delimiter = ',', value_parser = test)]
    tests: Vec<Test>,

    /// Split memory into this many memslots
    #[arg(short = 's', value_name = "N", default_value_t = 32,
        value_parser = |text: &str| keyvalue::number(text, 1..=32_763u32))]
    slots: u32,

    /// Memory; sizes take k, m, g, t
    #[arg(short = 'b', value_name = "SIZE", default_value = "512m", value_parser = |text: &str| keyvalue::size(text, 1))]
    bytes: u64,

    /// Backing, by Vellum's names or the KVM selftests'
    #[arg(long, value_name = "BACKING", default_value = "anonymous", value_parser = args::BACKING, hide_possible_values = true)]
    backing: Backing,

    /// How long each test runs in each repetition
    #[arg(short = 'l', value_name = "TIME", default_value = "5s", value_parser = keyvalue::duration)]
    time: Duration,

    /// Repetitions of each test
    #[arg(short = 'r', long = "repeat", value_name = "N", default_value_t = 1,
        value_parser = |text: &str| keyvalue::number(text, 1..=100_000u32))]
    repeat: u32,

    /// Pin the vCPU to this CPU
    #[arg(short = 'c', value_name = "CPU", value_parser = args::cpu)]
    pin: Option<usize>,

    #[command(flatten)]
    output: Output,
}

fn test(text: &str) -> Result<Test, String> {
    keyvalue::one_of("test", text, &Test::NAMES)
}

/// The flag of each field.
pub(super) const FLAGS: Flags = &[&[
    (Field::Backing, "--backing"),
    (Field::Memory, "-b:"),
    (Field::Pin, "-c:"),
    (Field::Sandbox, "--sandbox:"),
    (Field::Slots, "-s"),
]];

pub(super) fn run(args: MemslotArgs) -> Result<Exit, Failure> {
    let all = || Test::NAMES.iter().map(|(_, test)| *test).collect();
    let config = Config {
        common: Common {
            sandbox: args.output.sandbox,
            pins: args.pin.map(|cpu| vec![cpu]),
            repeat: args.repeat,
            progress: args.output.progress.clone(),
            ..Common::default()
        },
        tests: if args.tests.is_empty() { all() } else { args.tests },
        slots: args.slots,
        bytes: args.bytes,
        backing: args.backing,
        time: args.time,
    };
    args.output.deliver(FLAGS, || memslot::run(&config))
}
