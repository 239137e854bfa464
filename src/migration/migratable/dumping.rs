//! A machine that is dumped: it stands still for that, beside whatever else holds it, and each turn of the event loop writes a part.
//! Where it is to be dumped when its guest panics it has come to its end already, which is told when the dump is written.

use std::fs::File;
use std::io;

use super::MigratableMachine;
use super::operation::{DumpJob, OnPanic, Operation, Work};
use vellum_control::Event;
use vellum_control::operation::{Asker, Kind};
use vellum_kvm::arch::core::{Core, IMPOSSIBLE};
use vellum_kvm::vm::lifecycle::Exit;
use vellum_machine::Inspect;
use vellum_machine::dump::{Dumped, Dumping};

impl<P: Inspect> MigratableMachine<P> {
    /// Has a guest that panics be dumped.
    pub fn dump_on_panic(&mut self, to: OnPanic) {
        self.on_panic = Some(to);
    }

    /// Begins to dump it into `file`.
    pub(super) fn dump(&mut self, by: Asker, file: File) -> Result<(), String> {
        if let Some(why) = IMPOSSIBLE {
            return Err(why.into());
        }
        self.is_idle()?;
        if !file.metadata().is_ok_and(|about| about.is_file() && about.len() == 0) {
            return Err("it takes a file that is empty".into());
        }
        if !self.stands() {
            self.machine.pause().map_err(|error| error.to_string())?;
        }
        self.held.dump = true;
        self.begin_dump(file, Some(by), None);
        Ok(())
    }

    fn begin_dump(&mut self, file: File, by: Option<Asker>, ended: Option<(Exit, OnPanic)>) {
        let vcpus = self.machine.debug_handle();
        let last = self.machine.last_core();
        let core = |index| match &last {
            // The one that has ended is asked no more.
            Some((ended, core)) if *ended == index => *core,
            _ => vcpus.with(index, Core::read).ok().and_then(Result::ok).unwrap_or_default(),
        };
        let cores = (0..vcpus.count()).map(core).collect();
        let ram = self.machine.ram();
        let slots = ram.slots().to_vec();
        let errand = DumpJob { dumping: Dumping::new(file, cores, ram, slots, self.pagemap.clone()), ended };
        self.operation.begin(Operation::new(Kind::Dump, by, Work::Dumping(Box::new(errand))));
        self.come_again();
    }

    fn come_again(&self) {
        // It can only fail by overflowing, and then it is signalled anyway.
        let _ = self.wake.write(1);
    }

    /// The guest has ended so: whether it is dumped first.
    pub(super) fn dumps(&mut self, exit: Exit) -> bool {
        if !self.machine.has_panicked(exit) {
            return false;
        }
        let Some(to) = self.on_panic.take() else { return false };
        if let Err(error) = self.machine.pause() {
            tracing::error!("{}: the guest has panicked, and is not dumped: {error}", to.name);
            return false;
        }
        match to.file.try_clone() {
            Ok(file) => self.begin_dump(file, None, Some((exit, to))),
            Err(error) => {
                tracing::error!("{}: the guest has panicked, and is not dumped: {error}", to.name);
                return false;
            }
        }
        true
    }

    /// Goes on with the dump; how the guest has ended, once it is written where that was why.
    pub(super) fn serve_dump(&mut self) -> Option<Exit> {
        let errand = self.operation.dumping()?;
        let done = match errand.dumping.turn() {
            Ok(None) => {
                self.come_again();
                return None;
            }
            Ok(Some(dumped)) => Ok(dumped),
            Err(error) => Err(error),
        };
        if !self.operation.is_of_panic() {
            self.end_dump(done);
            return None;
        }
        let DumpJob { dumping, ended } = self.operation.take_dump()?;
        let (exit, to) = ended?;
        match done.and_then(|dumped| dumping.sync().map(|()| dumped)) {
            Ok(dumped) => {
                let _ = to.written.write(1);
                tracing::info!(
                    "{}: the guest has panicked, and this is its dump{}",
                    to.name,
                    without(&dumped)
                );
            }
            Err(error) => tracing::error!("{}: the guest has panicked, and is not dumped: {error}", to.name),
        }
        Some(exit)
    }

    /// Tells whoever asked what has come of the dump, and lets the guest go on. Whoever asked has it on the disk.
    pub(super) fn end_dump(&mut self, done: io::Result<Dumped>) {
        self.over_with_dump(done);
        if !self.stands() {
            self.machine.resume();
        }
    }

    /// The same for a guest that has ended.
    pub(super) fn over_with_dump(&mut self, done: io::Result<Dumped>) {
        self.tell(event_of(done));
        self.operation.end();
        self.held.dump = false;
    }

    /// Whether a client has it dumped.
    pub(super) fn is_dumped_for_a_client(&self) -> bool {
        self.operation.kind() == Some(Kind::Dump) && !self.operation.is_of_panic()
    }
}

fn event_of(done: io::Result<Dumped>) -> Event {
    match done {
        Ok(Dumped { bytes, content, vmcoreinfo }) => Event::Dumped {
            bytes,
            content,
            release: vmcoreinfo.as_ref().map(|info| info.release.clone()),
            kaslr: vmcoreinfo.as_ref().map(|info| info.kaslr),
            phys_base: vmcoreinfo.map(|info| info.phys_base as i64),
        },
        Err(error) => Event::NotDumped { why: error.to_string() },
    }
}

/// What is said of a dump without VMCOREINFO.
fn without(dumped: &Dumped) -> &'static str {
    match dumped.vmcoreinfo {
        Some(_) => "",
        None => "; without VMCOREINFO, which was not found in its memory",
    }
}
