//! `vellum bench fork`.

use std::path::Path;
use std::time::Duration;

use clap::Args;

use super::Output;
use crate::cli::args;
use crate::cli::bench::migration::rate;
use crate::cli::failure::Failure;
use crate::cli::flags::Flags;
use vellum_bench::fork::{self, Config, Lines};
use vellum_bench::migration::Rate;
use vellum_bench::{Common, Region};
use vellum_kvm::memory::Backing;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_sys::diagnose::Field;
use vellum_sys::keyvalue;

/// Fork a guest that writes: how long it stands still, how soon another machine runs, and the cost
/// of a further one
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
#[command(after_help = EXAMPLES)]
pub struct ForkArgs {
    /// vCPUs
    #[arg(short, long, value_name = "N", default_value_t = 1,
        value_parser = |text: &str| keyvalue::number(text, 1..=65_536usize))]
    vcpus: usize,

    /// Memory of each vCPU; sizes take k, m, g, t
    #[arg(short, long, alias = "memory", value_name = "SIZE", default_value = "1g", value_parser = |text: &str| keyvalue::size(text, 1))]
    bytes: u64,

    /// Backing: memfd, shared-hugetlb-2m, anonymous or thp
    #[arg(short = 's', long, value_name = "BACKING", default_value = "memfd", value_parser = args::BACKING, hide_possible_values = true)]
    backing: Backing,

    /// CPUs that the processes of the measurement may use, as in 2,3 [default: all]
    #[arg(short = 'c', long, value_name = "LIST", value_delimiter = ',', value_parser = args::cpu)]
    cpus: Option<Vec<usize>>,

    /// Memory that all vCPUs together write in a second, in distinct pages, as in 64m; max for as
    /// much as they can
    #[arg(long, value_name = "SIZE", default_value = "64m", value_parser = rate)]
    dirty_rate: Rate,

    /// Fork the guest again after it has written this many more pages
    #[arg(long, value_name = "PAGES", default_value_t = 1000, value_parser = |text: &str| keyvalue::number(text, 0..=u64::MAX))]
    changed: u64,

    /// How long the guest runs undisturbed before it is forked
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = keyvalue::duration)]
    around: Duration,

    /// Rounds, each with its own processes; figures then have a median and a spread
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = |text: &str| keyvalue::number(text, 1..=100_000u32))]
    repeat: u32,

    #[command(flatten)]
    output: Output,
}

const EXAMPLES: &str = "\
Examples:
  vellum bench fork
  vellum bench fork -b 8g --dirty-rate max --repeat 15
  vellum bench fork -s shared-hugetlb-2m --changed 0";

/// The flag of each field.
pub(super) const FLAGS: Flags = &[&[
    (Field::Backing, "-s"),
    (Field::Cpus, "-v"),
    (Field::Memory, "-b:"),
    (Field::Pin, "-c:"),
    (Field::Sandbox, "--sandbox:"),
]];

pub(super) fn run(args: ForkArgs) -> Result<Exit, Failure> {
    let config = Config {
        common: Common {
            sandbox: args.output.sandbox,
            pins: args.cpus,
            repeat: args.repeat,
            progress: args.output.progress.clone(),
            ..Common::default()
        },
        region: Region { bytes: args.bytes, backing: args.backing, vcpus: args.vcpus },
        dirty_rate: args.dirty_rate,
        changed: args.changed,
        around: args.around,
        lines: Lines { source, fork },
    };
    args.output.deliver(FLAGS, || fork::run(&config))
}

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

/// The arguments of `vellum run`, for the machine that is forked.
fn source(config: &Config, result: &Path) -> Vec<String> {
    let (backing, sandbox) = (config.region.backing, config.common.sandbox);
    let mut workload = "write,order=sequential,warm,journal=100ms".to_owned();
    if let Some(pages) = config.pages() {
        workload = format!("{workload},rate={pages}");
    }
    let (vcpus, kib) = (config.region.vcpus, config.region.total(false) >> 10);
    words(&format!(
        "run --name source --cpus {vcpus},pin=off --memory {kib}k,backing={backing} --passes 0 --sandbox {sandbox} --workload {workload} \
         --json {}",
        result.display()
    ))
}

/// The arguments of `vellum fork`, for a new machine `name`.
fn fork(config: &Config, name: &str, result: &Path, paused: bool) -> Vec<String> {
    let sandbox = config.common.sandbox;
    let paused = if paused { " --paused" } else { "" };
    words(&format!("fork source --name {name} --sandbox {sandbox} --json {}{paused}", result.display()))
}
