//! `vellum run`: runs a guest. The flags of all guests are here; [`kernel`] has those of guests with
//! a kernel, and `devices` those of devices.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::args::Pin;
use super::failure::Failure;
use super::kernel::Ready;
use super::output::print;
use super::result::ResultArgs;
use super::run_flags::{FLAGS, failure};
use super::{args, image, kernel, launch, ssh};
use crate::session::log::{self, Beside};
use crate::session::{self, Gdb, builtin};
use vellum_control::names;
use vellum_guests::run::RunConfig;
use vellum_kvm::arch::cpuid::Choice;
use vellum_kvm::arch::cpuid::model::Model;
use vellum_kvm::memory::MemoryConfig;
use vellum_kvm::vm::lifecycle::{self, Exit};
use vellum_linux as machine;
use vellum_sandbox::Mode;
use vellum_sandbox::user::User;
use vellum_sys::host::allowed_cpus;
use vellum_sys::keyvalue;

/// Boot a kernel or a disk image, or run the built-in guest
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
#[command(after_help = format!("{}\n\n{}", EXAMPLES, lifecycle::HELP))]
pub struct RunArgs {
    /// Virtual CPUs: `N[,pin=auto|off|LIST]`, as in `4,pin=[0,2-4]`; auto, the built-in guest's
    /// default, pins each vCPU to a CPU of its own if one CPU is left over
    #[arg(short, long, value_name = "N", value_parser = args::cpus, default_value = "1")]
    cpus: args::Cpus,

    /// Guest memory:
    /// `SIZE[,backing=anonymous|thp|hugetlb-2m|hugetlb-1g|shmem|memfd][,prealloc][,lock][,slots=N]`
    /// `[,eager-split=SIZE]`; sizes take k, m, g, t, and a bare number is in MiB; eager-split makes
    /// Arm's KVM split blocks of that size as soon as they are logged
    #[arg(short, long, value_name = "SIZE", value_parser = args::memory, default_value = "256m")]
    #[arg(default_value_ifs = [
        ("kernel", clap::builder::ArgPredicate::IsPresent, Some("512m")),
        ("firmware", clap::builder::ArgPredicate::IsPresent, Some("1g")),
        ("disk", clap::builder::ArgPredicate::IsPresent, Some("1g")),
    ])]
    memory: MemoryConfig,

    /// The built-in guest:
    /// `write[,order=sequential|random|shuffled][,hot=PCT[,share=PCT]][,write=PCT][,rate=PAGES/S]`
    /// `[,seed=N][,region=each|shared][,stride=SIZE][,page=2m|4k][,latency=on|off]`
    /// `[,warm][,fill][,journal=TIME]`; warm: the first pass ignores the rate; fill: memory holds
    /// random numbers at first; journal: record the progress in slices of that time, and the
    /// longest time without a write
    #[arg(short, long, value_name = "NAME", value_parser = args::workload, default_value = "write")]
    workload: args::Workload,

    /// Passes of the workload over its memory; 0 for no end
    #[arg(
        long,
        value_name = "N",
        value_parser = |text: &str| keyvalue::number(text, 0..=u64::MAX),
        default_value = "3",
        default_value_if("duration", clap::builder::ArgPredicate::IsPresent, "0")
    )]
    passes: u64,

    /// Stop the workload after a time, as in 30s or 5m
    #[arg(long, value_name = "TIME", value_parser = keyvalue::duration)]
    duration: Option<Duration>,

    #[command(flatten)]
    result: ResultArgs,

    /// Confine the running VMM by seccomp and Landlock: on; log (the kernel logs what seccomp would
    /// forbid, and Landlock, which cannot log, is left out); off
    #[arg(long, value_name = "MODE", default_value = "on", value_parser = args::SANDBOX, hide_possible_values = true)]
    sandbox: Mode,

    /// Switch from root to this user and group once everything is open, as two numbers
    #[arg(long, value_name = "UID:GID")]
    user: Option<User>,

    /// The machine's name; `vellum list`, `ctl` and `exec` find it by that
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// The guest's CPU: host, all that this host's KVM supports; x86-64-v2, x86-64-v3 or x86-64-v4,
    /// a level of the psABI without further features, to migrate between CPU models; or a FILE from
    /// `vellum doctor --cpu-common`
    #[arg(long, value_name = "MODEL", default_value = "host", hide_default_value = true)]
    cpu: Model,

    /// CPU features, +NAME or -NAME, as in -pv-eoi,-steal-time; may be repeated
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    cpuid: Vec<Choice>,

    /// Give each vCPU a dirty ring of N entries, a power of two, for migrations of this machine.
    /// KVM then lists dirty pages in the rings and keeps no bitmap
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = args::RING_ENTRIES, value_parser = args::ring_entries)]
    dirty_ring: Option<u32>,

    /// Let GDB connect to a unix socket: `SOCK[,wait]`; wait: the guest does not run before GDB
    /// continues it. GDB's command line is printed. A kernel gets nokaslr, so that its symbols are
    /// at their linked addresses
    #[arg(long, value_name = "SOCK", value_parser = gdb)]
    gdb: Option<Gdb>,

    /// The log level of Vellum on standard error while the guest runs; debug adds KVM's counters of
    /// a guest with a kernel
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    loglevel: LogLevel,

    #[command(flatten)]
    kernel: kernel::KernelArgs,
}

/// kvmtool's log levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogLevel {
    Error,
    Warning,
    Info,
    Debug,
}

impl From<LogLevel> for tracing::Level {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => Self::ERROR,
            LogLevel::Warning => Self::WARN,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  vellum run                                     3 passes over 256 MiB
  vellum run -c 4 -m 4g,backing=hugetlb-2m       4 vCPUs, 2 MiB pages
  vellum run -k vmlinuz -i initrd.gz -c 2        Linux on this terminal
  vellum run -k ~/linux -- uname -r              a command in a kernel you built
  vellum run -k ~/linux --root / --zygote z      boot it once, and wait
  vellum run --from z -- uname -r                a command in a fork of that
  vellum run -d debian-12.qcow2 --login me       the system in an image
  vellum run -w write,hot=10,rate=50000 --duration 30s --json result.json";

/// Runs `vellum run`.
pub fn run(mut args: RunArgs) -> Result<Exit, Failure> {
    if args.kernel.launch.kconfig {
        return print(vellum_launch::config::fragment(args.kernel.board())).map(|_| Exit::PowerOff);
    }
    if let Some(name) = args.kernel.launch.from.take() {
        return launch::from(&name, &args.kernel.launch, args.sandbox, args.kernel.timeout);
    }
    if args.kernel.boots() {
        // A guest with a kernel has no figures. --verbose prints more of Vellum's log instead.
        if args.result.is_verbose() {
            args.loglevel = LogLevel::Debug;
        }
        log::start(args.loglevel.into(), Beside::Console);
        if let Some(zygote) = &args.kernel.launch.zygote {
            args.name = Some(zygote.clone());
            args.memory.backing = launch::backing(args.memory.backing)?;
        }
        args.name = args.name.or_else(|| image::default_name(&args.kernel));
        let process = process(&args)?;
        let launched = args.kernel.kernel.clone();
        // Guests with a kernel share a host, so they are not pinned by default. A guest that
        // measures has the host to itself.
        let pins = pins(&args.cpus, Pin::Off)?;
        let config = machine::Config {
            cpus: args.cpus.count,
            pins,
            cpuid: cpuid(&args),
            counters: args.loglevel == LogLevel::Debug,
            dirty_ring: args.dirty_ring,
            ..machine::Config::default()
        };
        if let Some(named) = launched
            && let Some(plan) = launch::plan(&args.kernel, &named)?
        {
            if let Some(flag) = args.kernel.image.given() {
                return Err(Failure::usage(format!(
                    "{flag} is for the system in a disk image, which does not boot for a command or a shell: leave out one of the two"
                )));
            }
            return launch::run(plan, args.kernel, args.memory, config, process);
        }
        let prepared = image::prepare(&mut args.kernel, args.name.as_deref(), args.sandbox)?;
        let ended = match args.name.filter(|_| args.kernel.image.ssh) {
            Some(name) => ssh::beside(&prepared, args.kernel, &name, args.memory, config, process),
            None => kernel::boot(
                args.kernel,
                prepared.kernel.clone(),
                args.memory,
                config,
                process,
                Ready::none(),
            ),
        };
        return ended.map_err(|failure| prepared.name(failure));
    }
    let place = args.result.open()?;
    match run_workload(&args) {
        // The process that took over delivered the result to the same place.
        Ok(outcome) if outcome.succeeded => Ok(outcome.exit),
        Ok(outcome) => place.deliver(&[outcome.report]).map(|()| outcome.exit),
        Err(failure) => {
            place.discard();
            Err(failure)
        }
    }
}

/// Runs the built-in guest.
pub(crate) fn run_workload(args: &RunArgs) -> Result<builtin::Outcome, Failure> {
    log::start(args.loglevel.into(), Beside::Progress);
    let (pins, process) = (pins(&args.cpus, Pin::Auto)?, process(args)?);
    if let Some(gdb) = &process.gdb {
        tracing::info!("{}", vellum_machine::gdb::command(&gdb.socket, None));
    }
    let mut write = args.workload.write.clone();
    write.passes = args.passes;
    let config = RunConfig {
        vcpus: args.cpus.count,
        pins,
        memory: args.memory,
        write,
        page: args.workload.page,
        cpuid: cpuid(args),
        dirty_ring: args.dirty_ring,
        duration: args.duration,
        fill: args.workload.fill,
    };
    builtin::run(&process, &config).map_err(failure)
}

/// The configuration of the process, for any machine.
fn process(args: &RunArgs) -> Result<session::Config, Failure> {
    let control = args.name.as_deref().map(names::own_socket).transpose();
    let control = control.map_err(|error| Failure::of(&error, FLAGS))?;
    Ok(session::Config {
        control,
        sandbox: args.sandbox,
        user: args.user,
        result: args.result.path(),
        gdb: args.gdb.clone(),
        ..session::Config::default()
    })
}

/// Parses `SOCK[,wait]`.
fn gdb(text: &str) -> Result<Gdb, keyvalue::Error> {
    let kv = keyvalue::KeyValues::parse(text, Some("socket"), &["socket", "wait"])?;
    Ok(Gdb {
        socket: kv.required("socket", |path| Ok::<_, String>(path.into()))?,
        waits: kv.switch("wait")?.unwrap_or(false),
    })
}

/// Combines `--cpu` and all of `--cpuid`.
fn cpuid(args: &RunArgs) -> Choice {
    let mut all = Choice::of(args.cpu.clone());
    args.cpuid.iter().cloned().for_each(|later| all.append(later));
    all
}

fn pins(cpus: &args::Cpus, otherwise: Pin) -> Result<Option<Vec<usize>>, Failure> {
    let allowed = allowed_cpus().map_err(Failure::host)?;
    cpus.pins(otherwise, &allowed).map_err(Failure::usage)
}
