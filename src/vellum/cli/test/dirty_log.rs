//! `vellum test dirty-log`.

use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;

use super::fits;
use crate::cli::args;
use crate::cli::failure::Failure;
use crate::cli::flags::Flags;
use crate::cli::judged::JudgedArgs;
use crate::session::progress::bar;
use vellum_bench::oracle::edges::{self, EdgeVerdict};
use vellum_bench::oracle::judge::Mode;
use vellum_bench::oracle::soak::{self, LeftOut};
use vellum_host::Facts;
use vellum_host::hugepages::{self, Shortage};
use vellum_host::kvm::create_vm;
use vellum_kvm::dirty::Method;
use vellum_kvm::memory::Backing;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_kvm::vm::{self, lifecycle};
use vellum_report::{Report, Status};
use vellum_sandbox as sandbox;
use vellum_sys::diagnose::{Diagnose, Field};
use vellum_sys::keyvalue;
use vellum_sys::mmap::host_page;
use vellum_sys::signal;

/// Write at random, collect the dirty log while memslots are added, removed and moved, and check
/// every page of every collection
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", lifecycle::HELP))]
pub(super) struct DirtyLogArgs {
    /// How the log is collected: bitmap, manual-protect, initially-set, ring[,entries=N]; may be
    /// repeated [default: all that this host has]
    #[arg(long, value_name = "NAME", value_parser = args::TRACKER, hide_possible_values = true)]
    tracker: Vec<args::Tracker>,

    /// What backs memory; may be repeated [default: all that this host has pages for]
    #[arg(short = 's', long, value_name = "BACKING", value_parser = args::BACKING, hide_possible_values = true)]
    backing: Vec<Backing>,

    /// Memory that the guest writes to
    #[arg(short = 'b', short_alias = 'm', long, value_name = "SIZE", value_parser = |text: &str| keyvalue::size(text, 1 << 20), default_value = "128m")]
    memory: u64,

    /// Virtual CPUs that write
    #[arg(short, long, value_name = "N", value_parser = |text: &str| keyvalue::number(text, 1..=1024usize), default_value = "2")]
    cpus: usize,

    /// Stop each tracker after this many distinct (page, collection) events, as in 500k or 10m
    /// [default: 1m, or no end with --duration]
    #[arg(long, value_name = "N", value_parser = events)]
    events: Option<u64>,

    /// Run for this long, as in 30s or 1h, divided among the trackers
    #[arg(long, value_name = "TIME", value_parser = keyvalue::duration)]
    pub(super) duration: Option<Duration>,

    /// The seed of all that is random. It repeats the choices and not the timing: the same seed may
    /// lose other pages, or none [default: drawn, and printed]
    #[arg(long, value_name = "N", value_parser = |text: &str| keyvalue::number(text, 0..=u64::MAX))]
    pub(super) seed: Option<u64>,

    /// Collect only while the guest runs, or only with its vCPUs out of the guest: running or
    /// quiesced [default: both]
    #[arg(long, value_name = "MODE", value_parser = mode)]
    mode: Option<Mode>,

    /// Remove bits from each tracker's collections after KVM has cleared them: lose=N. The test
    /// must then fail, and name these pages
    #[arg(long, value_name = "lose=N", value_parser = lose)]
    inject: Option<u64>,

    /// Test one memslot at this guest-physical address, as in 0x40001000; host addresses are
    /// congruent modulo 2 MiB
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    slot_base: Option<u64>,

    /// Clear in chunks of this many pages, a multiple of 64, and only a part of the chunks in each
    /// collection
    #[arg(long, value_name = "PAGES", value_parser = args::clear_chunk)]
    clear_chunk: Option<u64>,

    #[command(flatten)]
    result: JudgedArgs,

    /// Confine the vCPU threads: on, log or off
    #[arg(long, value_name = "MODE", default_value = "on", value_parser = args::SANDBOX, hide_possible_values = true)]
    sandbox: sandbox::Mode,
}

/// The flag of each field.
pub(super) const FLAGS: Flags = &[&[
    (Field::Backing, "--backing"),
    (Field::ClearChunk, "--clear-chunk"),
    (Field::Cpus, "--cpus"),
    (Field::Memory, "--memory:"),
    (Field::RingEntries, "--tracker ring,entries="),
    (Field::Sandbox, "--sandbox:"),
    (Field::Tracker, "--tracker:"),
]];

const EXAMPLES: &str = "\
Examples:
  vellum test dirty-log                         a million events with each tracker
  vellum test dirty-log --duration 1h -s thp    an hour, transparent huge pages
  vellum test dirty-log --inject lose=10        does the test notice?
  vellum test dirty-log --tracker initially-set -s thp --slot-base 0x40001000 \\
    --clear-chunk 64                            a huge page that a clear forgets";

fn events(text: &str) -> Result<u64, String> {
    let lower = text.to_ascii_lowercase();
    let (digits, unit) = match lower.strip_suffix('k') {
        Some(digits) => (digits, 1_000),
        None => lower.strip_suffix('m').map_or((lower.as_str(), 1), |digits| (digits, 1_000_000)),
    };
    keyvalue::number(digits, 1..=1_000_000_000_000u64).map(|n| n * unit)
}

fn mode(text: &str) -> Result<Mode, String> {
    keyvalue::one_of("mode", text, &[("running", Mode::Running), ("quiesced", Mode::Quiesced)])
}

fn lose(text: &str) -> Result<u64, String> {
    let kv = keyvalue::KeyValues::parse(text, None, &["lose"]).map_err(|e| e.to_string())?;
    kv.required("lose", |text| keyvalue::number(text, 1..=1_000_000u64)).map_err(|e| e.to_string())
}

pub(super) fn address(text: &str) -> Result<u64, String> {
    keyvalue::address(text)
        .ok()
        .filter(|address| address.is_multiple_of(host_page()) && *address < soak::MAX_MEMORY)
        .ok_or_else(|| {
            format!(
                "no multiple of {0} below {1:#x}, as in {2:#x}",
                host_page(),
                soak::MAX_MEMORY,
                (1 << 30) + host_page()
            )
        })
}

/// Runs `vellum test dirty-log`.
pub(super) fn run(args: &DirtyLogArgs) -> Result<Exit, Failure> {
    let progress = bar(0, "{elapsed_precise}  {msg}  (Ctrl-C ends it)");
    args.result.deliver("test dirty-log", &progress, || {
        let (report, exit) = soak(&config(args)?, &progress)?;
        Ok((vec![report], exit))
    })?
}

/// Runs the test. Returns the result, and how the command ends.
pub(super) fn soak(
    config: &soak::Config,
    progress: &ProgressBar,
) -> Result<(Report, Result<Exit, Failure>), Failure> {
    signal::remember(&signal::ENDING).map_err(Failure::host)?;
    let result = soak::run(config, &mut |tally| {
        progress.set_message(format!(
            "{}: {} events, {} lost",
            tally.method.name(),
            vellum_report::units::grouped(tally.events.into()),
            tally.lost
        ));
    });
    progress.finish_and_clear();
    let held = result.map_err(|error| Failure::of(&error, FLAGS))?;
    let mut report = soak::report(config, &held, Facts::collect(config.sandbox.of_vcpus()));
    let tallies = &held.tallies;
    if let Some(tally) = tallies.iter().find(|tally| tally.only_edges()) {
        report.notes.push(format!(
            "{}: all {} lost pages are the first of 2 MiB; {}",
            tally.method.name(),
            tally.lost,
            match edges::probe() {
                Ok(EdgeVerdict::Lost) => "a directed test loses such a page every time: it is the kernel's fault (see \
                     kvm_arch_mmu_enable_log_dirty_pt_masked; kernel-patches/6.12/init-all-set-boundary fixes it)"
                    .to_owned(),
                Ok(found) => format!("a directed test of this kernel found: {found}"),
                Err(error) => format!("a directed test of this kernel failed: {error}"),
            }
        ));
    }
    let exit = match tallies.iter().find(|tally| !tally.is_clean()) {
        Some(tally) => {
            let [injected, caught] = tally.injected;
            let message = format!(
                "{}: {} pages lost ({caught} of {injected} that were injected), {} bits unexplained, {} stamps misplaced; seed {}, which repeats the choices and not the timing",
                tally.method.name(),
                tally.lost,
                tally.unexplained,
                tally.misplaced,
                config.seed
            );
            Err(Failure::ended(Exit::Error, message))
        }
        None => match held.interrupted {
            Some(signal) => Ok(Exit::Signal(signal)),
            None if report.status() == Status::Pass => Ok(Exit::PowerOff),
            None => Err(Failure::not_run(&report)),
        },
    };
    Ok((report, exit))
}

pub(super) fn config(args: &DirtyLogArgs) -> Result<soak::Config, Failure> {
    fits(args.slot_base.unwrap_or(0), args.memory)?;
    let mut left_out = Vec::new();
    let methods = match args.tracker.as_slice() {
        [] => {
            let (methods, absent) = Method::available().map_err(|error| Failure::of(&error, FLAGS))?;
            left_out.extend(absent.into_iter().map(|(method, why)| LeftOut {
                method: Some(method),
                backing: None,
                why: why.to_string(),
                asked: false,
            }));
            methods
        }
        some => {
            let asked = some.iter().map(|tracker| tracker.method);
            let kvm = vm::open().map_err(|error| Failure::of(&error, FLAGS))?;
            let probe = create_vm(&kvm).map_err(|error| Failure::of(&error, FLAGS))?;
            present(asked, |method| method.check(&probe), &mut left_out, |method| (Some(method), None))?
        }
    };
    let entries = args.tracker.iter().find_map(|tracker| tracker.entries);
    let backings = match args.backing.as_slice() {
        [] => backings(args.slot_base.unwrap_or(0), args.memory, &mut left_out),
        some => {
            let check = |backing| check_backing(backing, args.slot_base.unwrap_or(0), args.memory);
            present(some.iter().copied(), check, &mut left_out, |backing| (None, Some(backing)))?
        }
    };
    let seed = args.seed.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(1, |since| since.as_nanos() as u64 & 0xffff_ffff)
    });
    let events = args.events.unwrap_or(if args.duration.is_some() { u64::MAX } else { 1_000_000 });
    Ok(soak::Config {
        methods,
        backings,
        size: args.memory,
        vcpus: args.cpus,
        seed,
        events,
        duration: args.duration,
        mode: args.mode,
        ring_entries: entries.unwrap_or(vellum_kvm::vm::ring::RING_ENTRIES),
        slot_base: args.slot_base,
        clear_chunk: args.clear_chunk,
        lose: args.inject.unwrap_or(0),
        left_out,
        sandbox: args.sandbox,
    })
}

/// The items of `asked` that this host supports, by `check`. The others are left out. If none are
/// supported, that is an error.
fn present<T: Copy, E: Diagnose + 'static>(
    asked: impl IntoIterator<Item = T>,
    check: impl Fn(T) -> Result<(), E>,
    left_out: &mut Vec<LeftOut>,
    name: impl Fn(T) -> (Option<Method>, Option<Backing>),
) -> Result<Vec<T>, Failure> {
    let (mut present, mut absent) = (Vec::new(), None);
    for one in asked {
        let Err(why) = check(one) else {
            present.push(one);
            continue;
        };
        let (method, backing) = name(one);
        left_out.push(LeftOut { method, backing, why: why.to_string(), asked: true });
        absent = absent.or(Some(why));
    }
    match absent {
        Some(why) if present.is_empty() => Err(Failure::of(&why, FLAGS)),
        _ => Ok(present),
    }
}

/// Checks that this host has `size` bytes of this backing, if the first memslot is at `base`.
fn check_backing(backing: Backing, base: u64, size: u64) -> Result<(), Shortage> {
    match backing {
        Backing::Hugetlb(page) | Backing::SharedHugetlb(page) => {
            hugepages::check(page, vellum_bench::oracle::ram(base, size, backing).1)
        }
        _ => Ok(()),
    }
}

/// Every backing that this host has `size` bytes of, if the first memslot is at `base`. The others
/// are added to `left_out`.
fn backings(base: u64, size: u64, left_out: &mut Vec<LeftOut>) -> Vec<Backing> {
    let mut backings = vec![Backing::Anonymous, Backing::Thp, Backing::Shmem, Backing::Memfd];
    for page in hugepages::sizes() {
        let both = [Backing::Hugetlb(page), Backing::SharedHugetlb(page)];
        match check_backing(both[0], base, size) {
            Ok(()) => backings.extend(both),
            Err(why) => left_out.extend(both.map(|backing| LeftOut {
                method: None,
                backing: Some(backing),
                why: why.to_string(),
                asked: false,
            })),
        }
    }
    backings
}
