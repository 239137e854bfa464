//! `vellum bench NAME`: one file for each benchmark, with arguments only.

mod access_tracking;
mod context_switch;
mod demand_paging;
mod dirty_log;
mod fork;
mod live_update;
mod memslot;
mod migration;
mod page_table;
mod rmap_fork;

use std::time::Duration;

use clap::{Args, Subcommand};
use indicatif::ProgressBar;

use super::args;
use super::failure::Failure;
use super::flags::Flags;
use super::judged::JudgedArgs;
use crate::session::progress::bar;
use vellum_bench::{Common, Error, Region};
use vellum_guests::program::GuestPage;
use vellum_kvm::arch::irqchip;
use vellum_kvm::memory::Backing;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_report::Report;
use vellum_sandbox::Mode;
use vellum_sys::diagnose::Field;
use vellum_sys::keyvalue;
use vellum_sys::signal;

/// The flag of each field, by subcommand as typed.
#[cfg(test)]
pub(super) const TABLES: [(&str, Flags); 10] = [
    ("bench access-tracking", access_tracking::FLAGS),
    ("bench context-switch", context_switch::FLAGS),
    ("bench demand-paging", demand_paging::FLAGS),
    ("bench dirty-log", dirty_log::FLAGS),
    ("bench fork", fork::FLAGS),
    ("bench live-update", live_update::FLAGS),
    ("bench memslot", memslot::FLAGS),
    ("bench migration", migration::FLAGS),
    ("bench page-table", page_table::FLAGS),
    ("bench rmap-fork", rmap_fork::FLAGS),
];

/// Measure the host's KVM with a built-in guest
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: BenchCommand,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    DirtyLog(Box<dirty_log::DirtyLogArgs>),
    RmapFork(rmap_fork::RmapForkArgs),
    ContextSwitch(context_switch::ContextSwitchArgs),
    DemandPaging(demand_paging::DemandPagingArgs),
    PageTable(page_table::PageTableArgs),
    Memslot(memslot::MemslotArgs),
    AccessTracking(access_tracking::AccessTrackingArgs),
    Migration(Box<migration::MigrationArgs>),
    Fork(fork::ForkArgs),
    LiveUpdate(live_update::LiveUpdateArgs),
}

/// The target of the result.
#[derive(Debug, Args)]
struct Output {
    #[command(flatten)]
    result: JudgedArgs,

    /// Confine the vCPU threads: on, log or off
    #[arg(long, value_name = "MODE", default_value = "on", value_parser = args::SANDBOX, hide_possible_values = true)]
    sandbox: Mode,

    /// The progress on a terminal.
    #[arg(skip = bar(0, "{elapsed_precise}  {msg}  (Ctrl-C ends it)"))]
    progress: ProgressBar,
}

/// Runs `vellum bench`.
pub fn run(args: BenchArgs) -> Result<Exit, Failure> {
    match args.what {
        BenchCommand::DirtyLog(args) => dirty_log::run(*args),
        BenchCommand::RmapFork(args) => rmap_fork::run(args),
        BenchCommand::ContextSwitch(args) => context_switch::run(args),
        BenchCommand::DemandPaging(args) => demand_paging::run(args),
        BenchCommand::PageTable(args) => page_table::run(args),
        BenchCommand::Memslot(args) => memslot::run(args),
        BenchCommand::AccessTracking(args) => access_tracking::run(args),
        BenchCommand::Migration(args) => migration::run(*args),
        BenchCommand::Fork(args) => fork::run(args),
        BenchCommand::LiveUpdate(args) => live_update::run(args),
    }
}

/// vCPUs and the memory that they access, with the short options of the KVM selftests.
#[derive(Debug, Args)]
struct RegionArgs {
    /// Memory of each vCPU; sizes take k, m, g, t
    #[arg(short, long, alias = "memory", value_name = "SIZE", default_value = "1g", value_parser = |text: &str| keyvalue::size(text, 1))]
    bytes: u64,

    /// Backing: anonymous, thp, hugetlb-2m, shmem and so on, or as the KVM selftests call them
    /// (anonymous_thp)
    #[arg(short = 's', long, value_name = "BACKING", default_value = "anonymous", value_parser = args::BACKING, hide_possible_values = true)]
    backing: Backing,

    /// vCPUs [default: 1]
    #[arg(short, long, alias = "cpus", value_name = "N", value_parser = |text: &str| keyvalue::number(text, 1..=65_536usize))]
    vcpus: Option<usize>,

    /// CPUs to pin to, as in 1,2,3,0: one for each vCPU, and optionally one more for the main
    /// thread
    #[arg(short = 'c', long, value_name = "LIST")]
    pin: Option<String>,

    /// Rounds, each in a machine of its own; figures then have a median and a spread
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = |text: &str| keyvalue::number(text, 1..=100_000u32))]
    repeat: u32,

    /// The page size of the guest's own tables: 4k or 2m [default: 4k, or 2m where the host shadows
    /// them]
    #[arg(short, long, value_name = "SIZE", value_parser = guest_page)]
    mode: Option<GuestPage>,

    /// Give the machine interrupt controllers: split between KVM and Vellum, or all in KVM, as the
    /// KVM selftests do. No workload uses them, but every exit then costs more [default: none]
    #[arg(long, value_name = "WHERE")]
    irqchip: Option<irqchip::Mode>,
}

/// The flag of each field of [`RegionArgs`].
const REGION: &[(Field, &str)] = &[
    (Field::Backing, "-s"),
    (Field::Cpus, "-v"),
    (Field::GuestPage, "-m"),
    (Field::Irqchip, "--irqchip:"),
    (Field::Memory, "-b:"),
    (Field::Pin, "-c:"),
    (Field::Sandbox, "--sandbox:"),
];

impl RegionArgs {
    fn region(&self) -> Region {
        Region { bytes: self.bytes, backing: self.backing, vcpus: self.vcpus() }
    }

    fn vcpus(&self) -> usize {
        self.vcpus.unwrap_or(1)
    }

    fn common(&self, output: &Output) -> Result<Common, Failure> {
        let pins = pins(self.pin.as_deref(), self.vcpus())?;
        Ok(Common {
            sandbox: output.sandbox,
            pins,
            repeat: self.repeat,
            page: self.mode,
            irqchip: self.irqchip,
            progress: output.progress.clone(),
        })
    }
}

/// The arguments of the benchmarks of shadow paging, besides their numbers of page tables.
#[derive(Debug, Args)]
#[command(after_help = "Meaningful where KVM shadows guest page tables: kvm_amd npt=0, kvm_intel ept=0.")]
struct ShadowArgs {
    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = |text: &str| keyvalue::number(text, 1..=100_000u32))]
    repeat: u32,

    /// Pin to this CPU
    #[arg(short, long, value_name = "CPU", value_parser = args::cpu)]
    cpu: Option<usize>,
}

/// The flag of each field of [`ShadowArgs`].
const SHADOW: &[(Field, &str)] = &[(Field::Pin, "-c:"), (Field::Sandbox, "--sandbox:")];

impl ShadowArgs {
    fn common(&self, output: &Output) -> Common {
        let pins = self.cpu.map(|cpu| vec![cpu]);
        Common {
            sandbox: output.sandbox,
            pins,
            repeat: self.repeat,
            progress: output.progress.clone(),
            ..Common::default()
        }
    }
}

impl Output {
    /// Opens the outputs, measures, and delivers the result. An invalid result is delivered too,
    /// and the command fails. A signal ends the measurement, and the result so far is delivered.
    fn deliver(
        &self,
        flags: Flags,
        measure: impl FnOnce() -> Result<Report, Error>,
    ) -> Result<Exit, Failure> {
        let name = format!("bench {}", crate::cli::line::word(2).unwrap_or_default());
        self.result.deliver(&name, &self.progress, || {
            signal::remember(&signal::ENDING).map_err(Failure::host)?;
            self.progress.enable_steady_tick(Duration::from_secs(1));
            let measured = measure();
            self.progress.finish_and_clear();
            let mut report = measured.map_err(|error| match error.interrupted() {
                Some(signal) => Failure::ended(Exit::Signal(signal), error.to_string()),
                None => Failure::of(&error, flags),
            })?;
            let exit = match signal::last() {
                Some(signal) => Exit::Signal(signal),
                None if report.invalid.is_empty() => Exit::PowerOff,
                None => Exit::Error,
            };
            if let Some(answer) = &mut report.answer
                && report.asked.get("repeat").is_some_and(|repeat| *repeat == 1)
            {
                answer.next.get_or_insert_with(|| "n=1: no intervals; --repeat 5 for a comparison".into());
            }
            Ok((vec![report], exit))
        })
    }
}

/// Parses `-c LIST`: a CPU for each vCPU, and optionally one more for the main thread.
fn pins(list: Option<&str>, vcpus: usize) -> Result<Option<Vec<usize>>, Failure> {
    let Some(text) = list else { return Ok(None) };
    let wrong = |why: String| Failure::usage(format!("-c {text}: {why}"));
    let cpus = keyvalue::list(text).map_err(wrong)?;
    if cpus.len() != vcpus && cpus.len() != vcpus + 1 {
        let wanted = format!("{vcpus}, or {} with the main thread", vcpus + 1);
        return Err(wrong(format!("{} CPUs for {vcpus} vCPUs: name {wanted}", cpus.len())));
    }
    Ok(Some(args::usable(cpus).map_err(wrong)?))
}

/// Parses `--mode SIZE`: the page size of the guest's own tables.
fn guest_page(text: &str) -> Result<GuestPage, String> {
    keyvalue::one_of("guest page size", text, &[("2m", GuestPage::Large), ("4k", GuestPage::Small)])
}
