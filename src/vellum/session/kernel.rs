//! Boots a kernel on a Linux machine in a session.

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

/// A machine whose vCPUs wait at the kernel's entry, and its session.
pub struct Ready {
    // Dropped first: the machine's threads must end before the event loop.
    /// The machine.
    pub machine: MigratableMachine<LinuxMachine>,
    /// The session.
    pub session: Session,
    /// Kept open because it holds the locks of its files.
    _image: Image,
}

/// How a run ended.
#[derive(Debug)]
pub struct Outcome {
    /// The reason, and the exit status of the process.
    pub exit: Exit,
    /// The last exit of the vCPU that failed, if one did.
    pub ended: Option<(usize, Ended)>,
    /// Bytes of serial output without a reader.
    pub lost_output: u64,
    /// Bytes of serial output that the output file did not take.
    pub unwritten_output: u64,
    /// KVM's counters at the end, if they were requested and this KVM has them.
    pub counters: Option<Snapshot>,
}

/// Makes a machine of `memory` with `config`'s devices that boots `boot`, and opens its session in
/// this process. If the guest panics, its memory is dumped to `on_panic`.
///
/// # Errors
/// [`Error`]. Files are opened and checked first, so that bad input has no cost and leaves nothing
/// behind.
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
    /// Runs the machine until it ends, the user ends it, or its time is over.
    ///
    /// # Errors
    /// The machine cannot go on.
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
    /// The outcome without a machine.
    pub(super) fn none(end: End) -> Self {
        Self { exit: end.exit, ended: None, lost_output: 0, unwritten_output: 0, counters: None }
    }

    /// The outcome of a machine that ended with `end`.
    pub(super) fn of(machine: &mut LinuxMachine, end: End) -> Self {
        let (lost_output, unwritten_output) = (machine.serial.unread(), machine.serial.unwritten());
        let counters = machine.last_counters.take();
        Self { exit: end.exit, ended: machine.ended.take(), lost_output, unwritten_output, counters }
    }
}
