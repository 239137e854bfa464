//! What a running VMM gives up, so that a guest that takes it over gains little.
//!
//! [`Sandbox`] is the entry point. Before it starts any thread, main calls [`Sandbox::process`]. It
//! sets no_new_privs, drops nearly all capabilities, and enters a Landlock domain in which no path
//! can be opened and no TCP port reached. Then each thread calls [`Sandbox::enter`] as its last act
//! before its loop. It gets the capabilities and the seccomp filter of its kind. Main comes last.
//! From then on files and sockets arrive through the control socket, already open.
//!
//! [`allowed`] has the calls of each kind, and [`ioctls`] the ioctl requests. [`bpf`] compiles both
//! to filters. [`capabilities`] has what root's threads keep. [`violation`] reports which thread
//! made which call, and ends the process.

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
use serde::{Deserialize, Serialize};

use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::{identity, seccomp};

pub use violation::EXIT_STATUS;

/// How the sandbox treats violations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// A violation ends the process.
    #[default]
    On,
    /// A violation is written to the kernel's log, and the call proceeds. There is no Landlock,
    /// which cannot do that.
    Log,
    /// No sandbox.
    Off,
}

impl Mode {
    /// The mode as a result records it if [`each_vcpu`] is used.
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

/// The kinds of thread, by the calls that they need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// The event loop, the control socket and devices. It also starts threads later, so it may make
    /// the calls that those need, but it may not run a vCPU.
    Main,
    /// Runs a vCPU and answers its exits.
    Vcpu,
    /// Reads and writes a disk's file.
    Disk,
    /// Collects dirty pages, sends, receives and stores them.
    Migration,
    /// One of several connections of a migration: sends pages, or receives and stores them.
    Connection,
    /// Loads missing memory from files.
    Fetching,
    /// Main while it waits for a machine from another process. It creates the machine from what
    /// that process sends.
    Receiver,
    /// Carries requests between a guest and the server of a shared directory, and reads and writes
    /// files for it.
    Share,
    /// The server of a shared directory, in a process of its own.
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

/// Why the sandbox cannot be entered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refuses. Only a stricter sandbox around this process causes that.
    #[error("it cannot be set up: {0} failed ({1}); off runs without it")]
    Setup(&'static str, #[source] io::Error),
    /// The kernel has no seccomp.
    #[error("{kind} thread {name}: this kernel installs no seccomp filter ({source}); off runs without it")]
    Filter {
        /// The thread's kind.
        kind: ThreadKind,
        /// The thread's name.
        name: String,
        /// The kernel's error.
        source: io::Error,
    },
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::host(Field::Sandbox)
    }
}

/// The function that each vCPU thread calls last before its loop, with its number. It is for
/// programs whose main thread continues to create machines and so has no sandbox of its own.
pub fn each_vcpu(mode: Mode) -> Arc<dyn Fn(usize) -> io::Result<()> + Send + Sync> {
    Arc::new(move |index| {
        let mut sandbox = Sandbox::new(mode);
        sandbox.process().map_err(io::Error::other)?;
        sandbox.enter(ThreadKind::Vcpu, &format!("vcpu{index}")).map_err(io::Error::other)
    })
}

/// The sandbox of this process. Each thread gets a copy.
#[derive(Clone, Copy, Debug)]
pub struct Sandbox {
    mode: Mode,
    /// The active Landlock ABI.
    landlock: Option<i32>,
}

impl Sandbox {
    /// A sandbox that is not active yet.
    pub fn new(mode: Mode) -> Self {
        Self { mode, landlock: None }
    }

    /// Restricts the whole process. Main calls this once, after everything has been opened and
    /// before there are threads, because Landlock restricts the calling thread and the threads that
    /// it starts.
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

    /// Like [`Sandbox::process`], for a process that may access what is beneath `directory`: to
    /// read it, and if `writable` to change it. It keeps those of its capabilities that are in
    /// `kept`.
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
        if self.mode == Mode::On {
            keep(kept)?;
            let rights = if writable { AccessFs::from_all(NEWEST) } else { AccessFs::from_read(NEWEST) };
            // It may not execute programs or use ioctls of devices.
            let rights = rights & !(AccessFs::Execute | AccessFs::IoctlDev);
            self.landlock = restrict_paths(Some(PathBeneath::new(directory.as_fd(), rights)));
        }
        Ok(())
    }

    /// Sets no_new_privs and drops all capabilities in the process of a command that keeps its
    /// user's standard streams. It must not have threads yet. Paths stay open to it, because it
    /// connects to the machine by a path.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn client(mode: Mode) -> Result<(), Error> {
        if mode == Mode::On {
            seccomp::no_new_privileges()
                .map_err(|error| Error::Setup("prctl(PR_SET_NO_NEW_PRIVS)", error))?;
            keep(CapabilitySet::empty())?;
        }
        Ok(())
    }

    /// Restricts the calling thread for good to what its kind needs. `name` is for the message
    /// about a violation.
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

    /// Whether Landlock is in force.
    pub fn has_landlock(&self) -> bool {
        self.landlock.is_some()
    }

    /// The active sandbox, as results record it: `on (landlock abi 7)`, `on (no landlock)`, `log`,
    /// `off`.
    pub fn status(&self) -> String {
        match (self.mode, self.landlock) {
            (Mode::On, Some(abi)) => format!("on (landlock abi {abi})"),
            (Mode::On, None) => "on (no landlock)".into(),
            (mode, _) => mode.to_string(),
        }
    }
}

/// The restrictions of the guard of a machine's names ([`vellum_sys::guard`]).
#[derive(Debug)]
pub struct OfGuard {
    filter: Option<Vec<sock_filter>>,
}

impl OfGuard {
    /// Compiles the filter. This happens before the guard is forked, because the guard may not
    /// allocate.
    pub fn new(mode: Mode) -> Self {
        let compile = || bpf::compile(allowed::by_guard(), libc::SECCOMP_RET_KILL_PROCESS);
        Self { filter: (mode == Mode::On).then(compile) }
    }

    /// Restricts the guard for good.
    ///
    /// # Errors
    /// The kernel's error.
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

/// Whether any thread of this process has a filter that ends the process on a violation.
pub fn is_in_force() -> bool {
    IN_FORCE.load(Ordering::Relaxed)
}

/// The newest Landlock ABI that this code uses.
const NEWEST: ABI = ABI::V9;

/// Denies every access that the kernel's Landlock supports, except `allowed`. Returns the ABI. Seccomp
/// forbids the same calls to the VMM, which needs no path: there a kernel without Landlock lacks only
/// the second layer. A file server opens paths, and Landlock alone limits it to those `allowed`.
/// Landlock does not cover changes of modes, owners, times and extended attributes (landlock(7)).
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
