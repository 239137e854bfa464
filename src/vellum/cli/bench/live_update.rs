//! `vellum bench live-update`.

use std::path::{Path, PathBuf};

use clap::Args;

use super::Output;
use crate::cli::failure::Failure;
use crate::cli::flags::Flags;
use vellum_bench::Common;
use vellum_bench::live_update::{self, Config, Lines, SESSION};
use vellum_kvm::vm::lifecycle::Exit;
use vellum_sys::diagnose::Field;
use vellum_sys::keyvalue;

/// Save machines for the host's next kernel: how long it preserves their memory, how long they stand
/// still, and how soon they run again
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
#[command(after_help = EXAMPLES)]
pub struct LiveUpdateArgs {
    /// Memory of each machine; sizes take k, m, g, t
    #[arg(short, long, alias = "memory", value_name = "SIZE", default_value = "256m", value_parser = |text: &str| keyvalue::size(text, 1 << 20))]
    bytes: u64,

    /// Machines
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1, value_parser = |text: &str| keyvalue::number(text, 1..=100u32))]
    machines: u32,

    /// Leave the machines saved and keep the figures in FILE, which must outlive the kernel. The same
    /// command in the next kernel restores them
    #[arg(long, value_name = "FILE")]
    between: Option<PathBuf>,

    /// Rounds, each with its own machines; figures then have a median and a spread
    #[arg(long, value_name = "N", default_value_t = 3, conflicts_with = "between", value_parser = |text: &str| keyvalue::number(text, 1..=100_000u32))]
    repeat: u32,

    #[command(flatten)]
    output: Output,
}

const EXAMPLES: &str = "\
Examples:
  vellum bench live-update -b 1g -n 5
  vellum bench live-update --between /srv/bench   before the kexec, and after it";

/// The flag of each field.
pub(super) const FLAGS: Flags = &[&[(Field::Between, "--between"), (Field::Sandbox, "--sandbox:")]];

pub(super) fn run(args: LiveUpdateArgs) -> Result<Exit, Failure> {
    let config = Config {
        common: Common {
            sandbox: args.output.sandbox,
            repeat: args.repeat,
            progress: args.output.progress.clone(),
            ..Common::default()
        },
        bytes: args.bytes,
        machines: args.machines,
        between: args.between,
        lines: Lines { machine, save, restore },
    };
    args.output.deliver(FLAGS, || live_update::run(&config))
}

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

/// The arguments of `vellum run`, for a machine.
fn machine(config: &Config, name: &str, result: &Path) -> Vec<String> {
    let (kib, sandbox) = (config.bytes >> 10, config.common.sandbox);
    words(&format!(
        "run --name {name} --memory {kib}k,backing=memfd --passes 0 --sandbox {sandbox} --workload write,warm --json {}",
        result.display()
    ))
}

/// The arguments of `vellum live-update save`.
fn save(times: &Path, kept: bool) -> Vec<String> {
    let detach = if kept { " --detach" } else { "" };
    words(&format!(
        "live-update save --all --not-loaded --session {SESSION} --json {}{detach}",
        times.display()
    ))
}

/// The arguments of `vellum live-update restore`.
fn restore() -> Vec<String> {
    words(&format!("live-update restore --session {SESSION} --tsc-mismatch allow"))
}
