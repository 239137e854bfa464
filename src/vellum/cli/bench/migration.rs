//! `vellum bench migration`.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::Output;
use crate::cli::args;
use crate::cli::failure::Failure;
use crate::cli::flags::Flags;
use vellum_bench::migration::{self, Config, Lines, Paths, Rate};
use vellum_bench::{Common, Region};
use vellum_control::Mode;
use vellum_guests::{Hot, Order};
use vellum_kvm::dirty::Method;
use vellum_kvm::memory::Backing;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_kvm::vm::ring::RING_ENTRIES;
use vellum_sys::diagnose::Field;
use vellum_sys::keyvalue;

/// Migrate a writing guest between two processes: its downtime, what it loses, and the cost
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
#[command(after_help = EXAMPLES, after_long_help = format!("{FIGURES}\n\n{EXAMPLES}"))]
pub struct MigrationArgs {
    /// Show all figures in one table, from slow writes up to as fast as the guest can
    #[arg(long, value_enum, conflicts_with = "dirty_rate")]
    preset: Option<Preset>,

    /// vCPUs
    #[arg(short, long, value_name = "N", default_value_t = 1,
        value_parser = |text: &str| keyvalue::number(text, 1..=65_536usize))]
    vcpus: usize,

    /// Memory of each vCPU, which both processes need; sizes take k, m, g, t
    #[arg(short, long, alias = "memory", value_name = "SIZE", default_value = "512m", value_parser = |text: &str| keyvalue::size(text, 1))]
    bytes: u64,

    /// Backing: anonymous, thp, hugetlb-2m, shmem and so on, or as the KVM selftests call them
    /// (anonymous_thp)
    #[arg(short = 's', long, value_name = "BACKING", default_value = "anonymous", value_parser = args::BACKING, hide_possible_values = true)]
    backing: Backing,

    /// CPUs that the measured processes may use, as in 2,3 [default: all]
    #[arg(short = 'c', long, value_name = "LIST", value_delimiter = ',', value_parser = args::cpu)]
    cpus: Option<Vec<usize>>,

    /// How dirty pages are collected: bitmap, manual-protect, initially-set, ring[,entries=N]
    /// [default: what a migration chooses]
    #[arg(long, value_name = "NAME", value_parser = args::TRACKER, hide_possible_values = true)]
    tracker: Option<args::Tracker>,

    /// Memory that all vCPUs together write in a second, in distinct pages, as in 64m; max for as
    /// much as they can
    #[arg(long, value_name = "SIZE", default_value = "64m", value_parser = rate)]
    dirty_rate: Rate,

    /// In which order pages are written, and whether a part of them gets a share of the writes:
    /// `sequential|random|shuffled[,hot=PCT[,share=PCT]]`
    #[arg(long, value_name = "ORDER", default_value = "sequential", value_parser = pattern)]
    pattern: Pattern,

    /// When memory is sent: precopy, before the guest runs on the target; postcopy, after that;
    /// hybrid, all of it before and what was written meanwhile after. With postcopy and hybrid the
    /// guest's wait for a page is shown beside the fastest possible answer to such a fault
    #[arg(long, value_name = "WHEN", value_parser = args::MODE, default_value = "precopy", hide_possible_values = true)]
    mode: Mode,

    /// Send pages over this many connections, 1 to 16
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = |text: &str| keyvalue::number(text, 1..=16u32))]
    connections: u32,

    /// The highest bandwidth in bytes per second, as in 400m [default: that of the link; half of it
    /// for postcopy and hybrid]
    #[arg(long, value_name = "SIZE", value_parser = |text: &str| match keyvalue::size(text, 1 << 20)? {
        bytes if bytes >= 1 << 20 => Ok(bytes),
        _ => Err("1m or more".to_owned()),
    })]
    bandwidth: Option<u64>,

    /// The longest downtime
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = keyvalue::duration)]
    downtime: Duration,

    /// Migrate after this time, however long the downtime is then
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = keyvalue::duration)]
    timeout: Duration,

    /// How long the guest runs undisturbed before it migrates, and afterwards
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = keyvalue::duration)]
    around: Duration,

    /// Rounds, each with processes of its own; figures then have a median and a spread
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = |text: &str| keyvalue::number(text, 1..=100_000u32))]
    repeat: u32,

    #[command(flatten)]
    output: Output,
}

const FIGURES: &str = "\
The downtime is the guest's own: from its last write here to its first there, by its clock. Beside it stand the parts that
the two processes know of, and what `migrate` expected before the last pass and estimated after the first. The guest's
progress before, during and after says what logging and sending take from it; `vellum report --html` shows it over time.";

const EXAMPLES: &str = "\
Examples:
  vellum bench migration
  vellum bench migration -b 2g --dirty-rate 256m --downtime 30ms --repeat 15
  vellum bench migration --pattern shuffled,hot=10 --dirty-rate max
  vellum bench migration --mode postcopy --repeat 15 --json postcopy.json
  vellum bench migration --preset sweep -b 256m --repeat 1";

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Preset {
    /// From 16 MiB/s to as fast as the guest can
    Sweep,
}

/// The order of the writes.
#[derive(Clone, Copy, Debug)]
struct Pattern {
    order: Order,
    hot: Option<Hot>,
}

pub(super) fn rate(text: &str) -> Result<Rate, String> {
    if text == "max" {
        return Ok(Rate(None));
    }
    match keyvalue::size(text.strip_suffix("/s").unwrap_or(text), 1 << 20) {
        Ok(bytes) if bytes >= 1 << 20 => Ok(Rate(Some(bytes))),
        Ok(_) => {
            Err("1m or more, or max: a guest that writes seldom does not notice when it stands still".into())
        }
        Err(why) => Err(format!("{why}; or max")),
    }
}

fn pattern(text: &str) -> Result<Pattern, String> {
    let kv = keyvalue::KeyValues::parse(text, Some("order"), &["order", "hot", "share"]);
    let kv = kv.map_err(|e| e.to_string())?;
    let read = || -> Result<Pattern, keyvalue::Error> {
        let order = kv.required("order", |text| keyvalue::one_of("order", text, &Order::NAMES))?;
        let hot = args::hot_of(&kv, "hot")?;
        Ok(Pattern { order, hot })
    };
    read().map_err(|e| e.to_string())
}

/// The flag of each field.
pub(super) const FLAGS: Flags = &[&[
    (Field::Backing, "-s"),
    (Field::Cpus, "-v"),
    (Field::Memory, "-b:"),
    (Field::Pin, "-c:"),
    (Field::RingEntries, "--tracker ring,entries="),
    (Field::Sandbox, "--sandbox:"),
    (Field::Tracker, "--tracker:"),
]];

pub(super) fn run(args: MigrationArgs) -> Result<Exit, Failure> {
    let config = Config {
        common: Common {
            sandbox: args.output.sandbox,
            pins: args.cpus,
            repeat: args.repeat,
            progress: args.output.progress.clone(),
            ..Common::default()
        },
        region: Region { bytes: args.bytes, backing: args.backing, vcpus: args.vcpus },
        method: args.tracker.map(|tracker| tracker.method),
        ring_entries: args.tracker.and_then(|tracker| tracker.entries).unwrap_or(RING_ENTRIES),
        dirty_rate: args.dirty_rate,
        order: args.pattern.order,
        hot: args.pattern.hot,
        mode: args.mode,
        connections: args.connections,
        bandwidth: args.bandwidth,
        downtime: args.downtime,
        timeout: args.timeout,
        around: args.around,
        lines: Lines { target, source, client },
    };
    args.output.deliver(FLAGS, || match args.preset {
        Some(Preset::Sweep) => migration::sweep(&config),
        None => migration::run(&config),
    })
}

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

/// The target: `vellum receive`.
fn target(config: &Config, paths: &Paths) -> Vec<String> {
    let (backing, sandbox) = (config.region.backing, config.common.sandbox);
    let (listen, result) = (paths.listen.display(), paths.result.display());
    words(&format!(
        "receive --name target --memory backing={backing} --serial null --sandbox {sandbox} --listen unix:{listen} --json {result}"
    ))
}

/// The source: `vellum run`.
fn source(config: &Config, journal: Duration) -> Vec<String> {
    let (order, backing, sandbox) = (config.order.name(), config.region.backing, config.common.sandbox);
    let mut workload = format!("write,order={order},warm,fill,journal={}ms", journal.as_millis());
    if let Some(hot) = config.hot {
        workload = format!("{workload},hot={},share={}", hot.percent, hot.share);
    }
    if let Some(pages) = config.pages() {
        workload = format!("{workload},rate={pages}");
    }
    let (vcpus, kib) = (config.region.vcpus, config.region.total(false) >> 10);
    let mut line = format!(
        "run --name source --cpus {vcpus},pin=off --memory {kib}k,backing={backing} --passes 0 --sandbox {sandbox} \
         --workload {workload}"
    );
    if config.method == Some(Method::Ring) {
        line = format!("{line} --dirty-ring={}", config.ring_entries);
    }
    words(&line)
}

/// The client: `vellum migrate`.
fn client(config: &Config, paths: &Paths) -> Vec<String> {
    let ms = |time: Duration| format!("{}ms", time.as_secs_f64() * 1e3);
    let (connections, downtime, timeout) = (config.connections, ms(config.downtime), ms(config.timeout));
    let listen = paths.listen.display();
    let mut line =
        format!("migrate source --json --connections {connections} --downtime {downtime} --to unix:{listen}");
    match config.mode {
        Mode::Precopy => line = format!("{line} --timeout {timeout},then=force"),
        mode => line = format!("{line} --mode {}", mode.name()),
    }
    if let Some(bytes) = config.bandwidth {
        line = format!("{line} --bandwidth {}k", bytes.div_ceil(1024));
    }
    if let Some(method) = config.method {
        line = format!("{line} --tracker {}", method.name());
    }
    words(&line)
}
