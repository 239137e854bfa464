//! The errors of starting and running a machine.

use std::io;

use vellum_guests::guest;
use vellum_host::doctor;
use vellum_kvm::memory;
use vellum_linux as machine;
use vellum_machine::gdb;
use vellum_migration::{migratable, snapshot};
use vellum_sandbox::{self as sandbox, user};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::socket::SocketError;

/// The reason that a machine cannot be started or run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The Linux machine.
    #[error(transparent)]
    Machine(#[from] machine::Error),
    /// The built-in guest.
    #[error(transparent)]
    Guest(#[from] guest::Error),
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] memory::Error),
    /// A machine that can migrate.
    #[error(transparent)]
    MigratableMachine(#[from] migratable::Error),
    /// KVM.
    #[error(transparent)]
    Vm(#[from] vellum_kvm::vm::Error),
    /// The debugger.
    #[error(transparent)]
    Gdb(#[from] gdb::Error),
    /// The control socket.
    #[error("{0}")]
    Control(#[source] SocketError),
    /// The socket that a migration source connects to.
    #[error("{0}")]
    Listen(#[source] SocketError),
    /// The sandbox.
    #[error(transparent)]
    Sandbox(#[from] sandbox::Error),
    /// Privileges.
    #[error(transparent)]
    User(#[from] user::Error),
    /// A file of a snapshot.
    #[error(transparent)]
    Snapshot(#[from] snapshot::Error),
    /// The host has no userfaultfd, so memory cannot be fetched on demand.
    #[error("no userfaultfd that sees KVM's faults ({0}): {remedy}", remedy = doctor::remedy_for_userfaultfd(.0))]
    Userfaultfd(#[source] io::Error),
    /// The event loop.
    #[error("the event loop: {0}")]
    EventLoop(#[from] event_manager::Error),
    /// The host refused a descriptor, or the terminal refused its mode.
    #[error("{0}: {1}")]
    Host(&'static str, #[source] io::Error),
}

impl Error {
    /// The signal, if the user ended the start by one.
    pub fn interrupted(&self) -> Option<i32> {
        match self {
            Self::Memory(memory::Error::Interrupted(signal))
            | Self::Machine(machine::Error::Memory(memory::Error::Interrupted(signal)))
            | Self::Guest(guest::Error::Interrupted(signal)) => Some(*signal),
            _ => None,
        }
    }
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Machine(error) => error.origin(),
            Self::Guest(error) => error.origin(),
            Self::Memory(error) => error.origin(),
            Self::MigratableMachine(error) => error.origin(),
            Self::Vm(error) => error.origin(),
            Self::Gdb(error) => error.origin(),
            Self::Control(_) => ErrorOrigin::user(Field::Name),
            Self::Listen(_) => ErrorOrigin::user(Field::Listen),
            Self::Sandbox(error) => error.origin(),
            Self::User(error) => error.origin(),
            Self::Snapshot(error) => error.origin(),
            Self::Userfaultfd(_) => ErrorOrigin::user(Field::OnDemand),
            Self::EventLoop(_) | Self::Host(..) => ErrorOrigin::HOST,
        }
    }
}
