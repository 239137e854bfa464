//! The host's side of a machine that comes from elsewhere: the arguments that `vellum receive` and
//! `vellum restore` share, and how both run it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::devices::DeviceArgs;
use super::failure::Failure;
use super::flags::Flags;
use super::result::ResultArgs;
use super::{args, kernel};
use crate::session;
use crate::session::incoming::{self, Lenience, Listen, Outcome};
use vellum_control::{ChildDevice, names};
use vellum_devices::console::Target;
use vellum_kvm::memory::MemoryConfig;
use vellum_kvm::vm::cr3_cache;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_linux as machine;
use vellum_sandbox::Mode;
use vellum_sandbox::user::User;
use vellum_sys::diagnose::Field;

/// `--tsc-mismatch`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TscMismatch {
    Refuse,
    Allow,
}

/// The names, files and resources of this host that the machine gets.
#[derive(Debug, Args)]
pub(super) struct HostArgs {
    /// The machine's name, by which `vellum ctl`, `list` and `exec` find it
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// Where the serial port leads: terminal (Ctrl-a x ends the guest), file=PATH, pty or null
    #[arg(long, value_name = "WHERE", default_value = "terminal")]
    serial: Target,

    /// Confine this process by seccomp and Landlock, before the first byte of a source is read: on,
    /// log or off
    #[arg(long, value_name = "MODE", default_value = "on", value_parser = args::SANDBOX, hide_possible_values = true)]
    sandbox: Mode,

    /// Switch from root to this user and group once everything is open, as two numbers
    #[arg(long, value_name = "UID:GID")]
    user: Option<User>,

    /// Pin vCPUs to these CPUs of this host, as in 2,3 or 4-7: the first vCPU to the first CPU, and
    /// so on, in turns if there are more vCPUs [default: the host's scheduler decides]
    #[arg(long, value_name = "LIST", value_parser = args::cpu_list)]
    pin: Option<args::CpuList>,

    /// Give each vCPU a dirty ring of N entries, a power of two, for further migrations of the
    /// machine. It does not matter whether the source had one
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = args::RING_ENTRIES, value_parser = args::ring_entries)]
    dirty_ring: Option<u32>,

    /// Let a guest on shadow paging load CR3 without an exit: on; auto, if this host can; off. The
    /// guest must have been started with `vellum run --cr3-cache` and have registered with KVM,
    /// here or on the source. It then sees the addresses of its shadow page tables in this host's
    /// memory
    #[arg(long, value_name = "WHETHER", value_enum, default_value = "off", hide_possible_values = true)]
    cr3_cache: cr3_cache::Choice,

    /// What happens to a guest if this host cannot give its TSC the frequency that it had: refuse;
    /// allow, and clocks that use the TSC are wrong from then on, but kvmclock is not
    #[arg(long, value_name = "WHAT", value_enum, default_value = "refuse", hide_possible_values = true)]
    tsc_mismatch: TscMismatch,

    #[command(flatten)]
    result: ResultArgs,

    #[command(flatten)]
    devices: DeviceArgs<false>,

    #[arg(skip)]
    fork: Fork,
}

/// What a machine that another process has prepared gets besides its arguments.
#[derive(Debug, Default)]
pub(super) struct Fork {
    /// The socket to the client, which is told when the machine runs.
    pub waits: Option<Arc<OwnedFd>>,
    /// The process of the other machine.
    pub from: Option<u32>,
    /// The name for the file with its messages.
    pub log: Option<PathBuf>,
    /// The time after which it ends.
    pub limit: Option<Duration>,
    /// The user that root is dropped for, unless --user names one.
    pub user: Option<User>,
    /// Whether root opens its devices as its user: a process of that user has named them.
    pub devices_as_user: bool,
    /// The same of its result.
    pub result_as_user: bool,
    /// The overlays of its disks that have no name.
    pub unnamed: Vec<File>,
    /// Whether it goes on if the client ends before it runs.
    pub outlives_client: bool,
    /// How many vCPUs of other machines come before its first one where vCPUs take turns.
    pub pinned_before: usize,
}

/// The flag of each field.
pub(super) const FLAGS: &[(Field, &str)] = &[
    (Field::Cr3Cache, "--cr3-cache on:"),
    (Field::Name, "--name:"),
    (Field::OtherTsc, "--tsc-mismatch allow accepts it:"),
    (Field::RingEntries, "--dirty-ring="),
    (Field::Sandbox, "--sandbox:"),
    (Field::Serial, "--serial"),
    (Field::Tracker, "--dirty-ring:"),
    (Field::User, "--user"),
];

/// The same, for commands with options for the backing of memory.
pub(super) const MEMORY: &[(Field, &str)] = &[
    (Field::Backing, "--memory backing="),
    (Field::Lock, "--memory lock:"),
    (Field::Memory, "--memory:"),
    (Field::Prealloc, "--memory prealloc:"),
];

impl HostArgs {
    /// The same for a machine that is forked.
    pub fn forked(self, fork: Fork) -> Self {
        Self { fork, ..self }
    }

    /// The same with this place for the result, unless it has one.
    pub fn or_result(self, path: Option<PathBuf>) -> Self {
        Self { result: self.result.or_at(path), ..self }
    }

    /// Whether it has a place for the result.
    pub fn has_result(&self) -> bool {
        self.result.path().is_some()
    }

    /// The names of the devices, as a machine with them has them.
    pub fn device_names(&self) -> Vec<String> {
        self.devices.clone().config().names()
    }

    /// What is given that only one machine can have.
    pub fn of_one_machine(&self) -> Option<&'static str> {
        let given = [
            (self.name.is_some(), "--name"),
            (matches!(self.serial, Target::File(_)), "--serial file"),
            (self.result.path().is_some(), "--json"),
            (!self.device_names().is_empty(), "devices"),
        ];
        given.into_iter().find(|(is_given, _)| *is_given).map(|(_, flag)| flag)
    }

    /// The flag and the name of each thing that only one machine at a time can have, or that the
    /// next one would replace.
    pub fn exclusive(&self) -> Vec<(String, String)> {
        let mut all = self.devices.exclusive();
        if let Target::File(path) = &self.serial {
            all.push(("--serial".into(), format!("file={}", path.display())));
        }
        let result = self.result.path().filter(|path| path.as_os_str() != "-");
        all.extend(result.map(|path| ("--json".into(), path.display().to_string())));
        all
    }

    /// Whether results are printed as JSON on standard output.
    pub fn is_json_printed(&self) -> bool {
        self.result.path().is_some_and(|path| path.as_os_str() == "-")
    }

    /// Whether a network would have the address of the machine that is forked.
    pub fn lacks_address(&self) -> bool {
        self.devices.lacks_address()
    }

    /// The names of the disks with an overlay.
    pub fn overlays(&self) -> Vec<String> {
        self.devices.clone().overlays()
    }

    /// Gives the machine devices that another process wrote, and its disks copies of `overlays`.
    pub fn with_devices(
        mut self,
        devices: Vec<ChildDevice>,
        overlays: &[(String, File)],
    ) -> Result<Self, String> {
        self.devices.add_written(devices)?;
        self.devices.confine(self.sandbox);
        self.fork.unnamed = self.devices.copy_overlays(overlays)?;
        Ok(self)
    }

    /// Runs the machine that comes from `listen`. `flags` are those of the command.
    pub fn run(
        self,
        listen: Listen,
        memory: MemoryConfig,
        liveness: Duration,
        flags: Flags,
    ) -> Result<Exit, Failure> {
        let failure = |error: session::Error| Failure::of(&error, flags);
        let control = self.name.as_deref().map(names::own_socket).transpose();
        let control = control.map_err(|error| Failure::of(&error, flags))?;
        let process = session::Config {
            control,
            sandbox: self.sandbox,
            user: self.user.or(self.fork.user),
            result: self.result.path(),
            waits: self.fork.waits,
            opens_as_user: self.fork.devices_as_user,
            outlives_client: self.fork.outlives_client,
            forked_from: self.fork.from,
            log: self.fork.log,
            limit: self.fork.limit,
            ..session::Config::default()
        };
        let config = machine::Config {
            serial: self.serial.clone(),
            pins: self.pin.map(|args::CpuList(mut cpus)| {
                let first = self.fork.pinned_before % cpus.len();
                cpus.rotate_left(first);
                cpus
            }),
            dirty_ring: self.dirty_ring,
            cr3_cache: self.cr3_cache,
            virtio: self.devices.clone().config(),
            ..machine::Config::default()
        };
        let lenience = Lenience { liveness, other_tsc: self.tsc_mismatch == TscMismatch::Allow };
        let result = self.result.open_as(process.user.filter(|_| self.fork.result_as_user))?;
        match incoming::run(&process, listen, memory, config, lenience).map_err(failure) {
            // Another process delivered the result to the same place.
            Ok(Outcome::Succeeded(exit)) => Ok(exit),
            Ok(Outcome::BuiltIn(outcome)) if outcome.succeeded => Ok(outcome.exit),
            Ok(Outcome::BuiltIn(outcome)) => result.deliver(&[outcome.report]).map(|()| outcome.exit),
            // Only a built-in guest has a result.
            Ok(Outcome::Kernel(outcome)) => {
                result.discard();
                kernel::tell(&outcome);
                Ok(outcome.exit)
            }
            Err(failed) => {
                result.discard();
                Err(failed)
            }
        }
    }
}
