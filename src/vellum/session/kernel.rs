//! A PC with a kernel and the session around it, put together.

use std::sync::Arc;

use super::{Config, End, Error, Session, progress};
use vellum_kvm::memory::MemoryConfig;
use vellum_kvm::vm;
use vellum_kvm::vm::counters::Snapshot;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_kvm::vm::vcpu::Ended;
use vellum_linux as machine;
use vellum_linux::{BootConfig, Image, LinuxMachine, Opened, Origin};
use vellum_machine::SessionMachine;
use vellum_migration::migratable::{MigratableMachine, OnPanic};
use vellum_sys::guard::Naming;
use vellum_sys::pagemap::Pagemap;

/// A machine that waits at its kernel's entry, and the session that is to run it.
pub struct Ready {
    // Dropped first: its threads must be gone before the event loop is.
    /// The machine.
    pub machine: MigratableMachine<LinuxMachine>,
    /// The session.
    pub session: Session,
    /// Kept open with its files' locks.
    _image: Image,
}

/// How a run ended.
#[derive(Debug)]
pub struct Outcome {
    /// Why, and with which status the process should exit.
    pub exit: Exit,
    /// What the failing vCPU said, where one failed.
    pub ended: Option<(usize, Ended)>,
    /// Bytes of serial output that nobody read.
    pub lost_output: u64,
    /// Bytes of it that its file did not take.
    pub unwritten_output: u64,
    /// KVM's counters at the end, where they were asked for and this KVM has them.
    pub counters: Option<Snapshot>,
}

/// Makes a machine of `memory` with `config`'s devices that is to boot `boot`, and takes over this process for it. If its guest panics it
/// is dumped to `on_panic`.
///
/// # Errors
/// [`Error`]; files are opened and checked first, so that bad input costs nothing and leaves nothing behind.
pub fn ready(
    process: &Config,
    memory: MemoryConfig,
    config: machine::Config,
    boot: BootConfig,
    on_panic: Option<(OnPanic, Naming)>,
) -> Result<Ready, Error> {
    let kvm = vm::open()?;
    let mut image = Image::open(boot)?;
    let cr3_cache = config.cr3_cache.decided(&kvm).map_err(vm::Error::from)?;
    let opened = Opened::open(machine::Config { cr3_cache, ..config })?;
    let (on_panic, naming) = on_panic.unzip();
    let mut session = Session::open(process, opened.sockets(), naming)?;
    let board = opened.assemble(&kvm, None, || progress::map(memory))?;
    let entry = board.boot(&mut image)?;
    let serial = board.open_serial()?;
    let pagemap = match on_panic {
        Some(_) => Pagemap::open().ok().map(Arc::new),
        None => Session::pagemap(process),
    };
    let door = session.door(&kvm)?;
    let sandbox = session.confine()?;
    let machine = board.start(Origin::Boot(&entry), serial, sandbox)?;
    let mut machine =
        MigratableMachine::new(machine, sandbox, pagemap).map_err(|error| Error::Host("eventfd", error))?;
    door.into_iter().for_each(|door| machine.debug(door));
    on_panic.into_iter().for_each(|to| machine.dump_on_panic(to));
    Ok(Ready { machine, session, _image: image })
}

impl Ready {
    /// Runs it until it ends, by itself or by the user, or until its time is over.
    ///
    /// # Errors
    /// Where it cannot go on.
    pub fn run(self) -> Result<Outcome, Error> {
        let Self { mut machine, mut session, _image } = self;
        let end = session.run(&mut machine)?;
        let outcome = Outcome::of(&mut machine.machine, end);
        let Some(successor) = machine.successor() else { return Ok(outcome) };
        drop((machine, _image));
        Ok(Outcome::none(End { exit: session.wait_for(successor), ..end }))
    }
}

impl Outcome {
    /// Without a machine.
    pub(super) fn none(end: End) -> Self {
        Self { exit: end.exit, ended: None, lost_output: 0, unwritten_output: 0, counters: None }
    }

    /// Of a machine that has ended so.
    pub(super) fn of(machine: &mut LinuxMachine, end: End) -> Self {
        let (lost_output, unwritten_output) = (machine.serial.unread(), machine.serial.unwritten());
        let counters = machine.last_counters.take();
        Self { exit: end.exit, ended: machine.ended.take(), lost_output, unwritten_output, counters }
    }
}
