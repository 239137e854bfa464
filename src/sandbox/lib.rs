//! What a running VMM gives up, so that a guest that takes it over gains little.
//!
//! [`Sandbox`] is the way in. Before it starts any thread, main calls [`Sandbox::process`]: no new privileges, hardly a capability, and a
//! Landlock domain in which no path can be opened and no TCP port reached. Then each thread calls
//! [`Sandbox::enter`] as its last act before its loop, and gets the capabilities and the seccomp filter of its kind; main comes last. From
//! then on files and sockets come through the control socket, already open.
//!
//! What each kind may call is in [`allowed`], the ioctl requests in [`ioctls`]; [`bpf`] turns both into filters; what root's threads keep
//! is in [`capabilities`];
//! [`violation`] says which thread called what, and ends the process.

mod allowed;
mod bpf;
mod capabilities;
mod ioctls;
mod names;
pub mod user;
mod violation;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::sock_filter;

use landlock::{
    ABI, Access, AccessFs, AccessNet, LandlockStatus, PathBeneath, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, Scope,
};

use rustix::thread::CapabilitySet;

use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::{identity, seccomp};

pub use violation::EXIT_STATUS;

/// Whether the sandbox is in force.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// A violation ends the process.
    #[default]
    On,
    /// What would be a violation is written to the kernel's log and goes on. No Landlock, which cannot do that.
    Log,
    /// No sandbox.
    Off,
}

impl Mode {
    /// As a result says it where [`each_vcpu`] is used.
    pub fn of_vcpus(self) -> String {
        if self == Self::Off { self.to_string() } else { format!("{self} for vCPU threads") }
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "on" => Ok(Self::On),
            "log" => Ok(Self::Log),
            "off" => Ok(Self::Off),
            _ => Err("one of on, log and off is expected".into()),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::On => "on",
            Self::Log => "log",
            Self::Off => "off",
        })
    }
}

/// The kinds of thread, by what they have to call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// The event loop, the control socket, devices; it starts the threads that are needed later, so it may call
    /// whatever these may, except to run a vCPU.
    Main,
    /// Runs a vCPU and answers its exits.
    Vcpu,
    /// Reads and writes a disk's file.
    Disk,
    /// Collects dirty pages, sends, receives and stores them.
    Migration,
    /// One of several connections of a migration: sends pages, or receives and stores them.
    Connection,
    /// Answers for memory that is not there, out of files.
    Fetching,
    /// Main while it waits for a machine of another process, which it makes out of what that says.
    Receiver,
    /// Carries requests between a guest and the server of a shared directory, and reads and writes its files.
    Share,
    /// That server, in a process of its own.
    FileServer,
}

impl ThreadKind {
    /// Every kind.
    pub const ALL: [Self; 9] = [
        Self::Main,
        Self::Vcpu,
        Self::Disk,
        Self::Migration,
        Self::Connection,
        Self::Fetching,
        Self::Receiver,
        Self::Share,
        Self::FileServer,
    ];
}

impl fmt::Display for ThreadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Main => "main",
            Self::Vcpu => "vcpu",
            Self::Disk => "disk",
            Self::Migration => "migration",
            Self::Connection => "connection",
            Self::Fetching => "fetching",
            Self::Receiver => "receiver",
            Self::Share => "share",
            Self::FileServer => "file-server",
        })
    }
}

/// Why the sandbox could not be entered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Refused by the kernel, which only a stricter sandbox around this process does.
    #[error("it cannot be set up: {0} failed ({1}); off runs without it")]
    Setup(&'static str, #[source] io::Error),
    /// No seccomp in this kernel.
    #[error("{kind} thread {name}: this kernel installs no seccomp filter ({source}); off runs without it")]
    Filter {
        /// The thread's kind.
        kind: ThreadKind,
        /// Its name.
        name: String,
        /// What the kernel said.
        source: io::Error,
    },
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::host(Field::Sandbox)
    }
}

/// What each vCPU thread does last before its loop, given its number, where the main thread goes on to build machines and so
/// has no sandbox of its own.
pub fn each_vcpu(mode: Mode) -> Arc<dyn Fn(usize) -> io::Result<()> + Send + Sync> {
    Arc::new(move |index| {
        let mut sandbox = Sandbox::new(mode);
        sandbox.process().map_err(io::Error::other)?;
        sandbox.enter(ThreadKind::Vcpu, &format!("vcpu{index}")).map_err(io::Error::other)
    })
}

/// The sandbox of this process. A copy goes to each thread.
#[derive(Clone, Copy, Debug)]
pub struct Sandbox {
    mode: Mode,
    /// The ABI of Landlock in force.
    landlock: Option<i32>,
}

impl Sandbox {
    /// A sandbox that is not in force yet.
    pub fn new(mode: Mode) -> Self {
        Self { mode, landlock: None }
    }

    /// Restricts the whole process. Called once, by main, when everything has been opened and before there are
    /// threads: Landlock restricts the calling thread and those that it starts.
    pub fn process(&mut self) -> Result<(), Error> {
        if self.mode == Mode::Off {
            return Ok(());
        }
        seccomp::no_new_privileges().map_err(|error| Error::Setup("prctl(PR_SET_NO_NEW_PRIVS)", error))?;
        seccomp::on_trap(violation::report).map_err(|error| Error::Setup("sigaction(SIGSYS)", error))?;
        if self.mode == Mode::On {
            keep(capabilities::KEPT_BY_PROCESS)?;
            self.landlock = restrict_paths::<BorrowedFd<'_>>(None);
        }
        Ok(())
    }

    /// As [`Sandbox::process`], for a process that may reach what lies beneath `directory`: to read it, and where it is `writable` to
    /// change it, with those of `kept` that are among its capabilities.
    ///
    /// # Errors
    /// As there.
    pub fn process_beneath(
        &mut self,
        directory: &impl AsFd,
        writable: bool,
        kept: CapabilitySet,
    ) -> Result<(), Error> {
        if self.mode == Mode::Off {
            return Ok(());
        }
        seccomp::no_new_privileges().map_err(|error| Error::Setup("prctl(PR_SET_NO_NEW_PRIVS)", error))?;
        seccomp::on_trap(violation::report).map_err(|error| Error::Setup("sigaction(SIGSYS)", error))?;
        let rights = if writable { AccessFs::from_all(NEWEST) } else { AccessFs::from_read(NEWEST) };
        keep(kept)?;
        // To run nothing, and to talk to no device.
        let rights = rights & !(AccessFs::Execute | AccessFs::IoctlDev);
        self.landlock = restrict_paths(Some(PathBeneath::new(directory.as_fd(), rights)));
        Ok(())
    }

    /// For the process of a command that stays with its user's standard streams, before it has threads: no new privileges and no
    /// capabilities. It connects to the machine by a path.
    ///
    /// # Errors
    /// Where the kernel refuses.
    pub fn client(mode: Mode) -> Result<(), Error> {
        if mode == Mode::On {
            seccomp::no_new_privileges()
                .map_err(|error| Error::Setup("prctl(PR_SET_NO_NEW_PRIVS)", error))?;
            keep(CapabilitySet::empty())?;
        }
        Ok(())
    }

    /// Restricts the calling thread to what its kind needs, for good. `name` is for the message about a violation.
    pub fn enter(&self, kind: ThreadKind, name: &str) -> Result<(), Error> {
        let otherwise = match self.mode {
            Mode::On => libc::SECCOMP_RET_TRAP,
            Mode::Log => libc::SECCOMP_RET_LOG,
            Mode::Off => return Ok(()),
        };
        violation::introduce(kind, name);
        seccomp::unblock_traps();
        if self.mode == Mode::On {
            keep(capabilities::kept_by(kind))?;
        }
        let filter = bpf::compile(allowed::by(kind), otherwise);
        IN_FORCE.store(self.mode == Mode::On, Ordering::Relaxed);
        seccomp::install(&filter).map_err(|source| Error::Filter { kind, name: name.to_owned(), source })
    }

    /// What is in force, as results record it: `on (landlock abi 7)`, `on (no landlock)`, `log`, `off`.
    pub fn status(&self) -> String {
        match (self.mode, self.landlock) {
            (Mode::On, Some(abi)) => format!("on (landlock abi {abi})"),
            (Mode::On, None) => "on (no landlock)".into(),
            (mode, _) => mode.to_string(),
        }
    }
}

/// What the guard of a machine's names gives up ([`vellum_sys::guard`]).
#[derive(Debug)]
pub struct OfGuard {
    filter: Option<Vec<sock_filter>>,
}

impl OfGuard {
    /// Made before the guard is: it may not allocate.
    pub fn new(mode: Mode) -> Self {
        let compile = || bpf::compile(allowed::by_guard(), libc::SECCOMP_RET_KILL_PROCESS);
        Self { filter: (mode == Mode::On).then(compile) }
    }

    /// Restricts the guard, for good.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn enter(&self) -> io::Result<()> {
        let Some(filter) = &self.filter else { return Ok(()) };
        seccomp::no_new_privileges()?;
        identity::keep_capabilities(capabilities::KEPT_BY_GUARD)?;
        seccomp::install(filter)
    }
}

fn keep(kept: CapabilitySet) -> Result<(), Error> {
    identity::keep_capabilities(kept).map_err(|error| Error::Setup("capset", error))
}

static IN_FORCE: AtomicBool = AtomicBool::new(false);

/// Whether some thread of this process has a filter by which a violation is the end.
pub fn is_in_force() -> bool {
    IN_FORCE.load(Ordering::Relaxed)
}

/// The newest of Landlock's interfaces that is known here.
const NEWEST: ABI = ABI::V9;

/// Denies every access that the kernel's Landlock knows, but for `allowed`; returns its ABI. Seccomp forbids the same
/// calls, so that a kernel without Landlock loses the second lock and not the first.
fn restrict_paths<F: AsFd>(allowed: Option<PathBeneath<F>>) -> Option<i32> {
    let status = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(NEWEST)))
        .and_then(|rules| rules.scope(Scope::from_all(NEWEST)))
        .and_then(|rules| rules.create())
        .and_then(|rules| rules.add_rules(allowed.into_iter().map(Ok::<_, RulesetError>)))
        .and_then(|rules| rules.restrict_self())
        .ok()?;
    match status.landlock {
        LandlockStatus::Available { effective_abi, .. } => Some(effective_abi as i32),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_what_they_print() {
        for mode in [Mode::On, Mode::Log, Mode::Off] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        assert!("yes".parse::<Mode>().is_err());
        assert_eq!(Sandbox::new(Mode::Log).status(), "log");
    }

    #[test]
    fn every_kind_has_a_filter_that_the_kernel_would_take() {
        for kind in ThreadKind::ALL {
            let filter = bpf::compile(allowed::by(kind), libc::SECCOMP_RET_TRAP);
            // BPF_MAXINSNS, include/uapi/linux/bpf_common.h.
            assert!(filter.len() <= 4096, "{kind}: {}", filter.len());
        }
    }
}
