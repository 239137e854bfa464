//! Dumps of a machine. The machine is paused for a dump, and each turn of the event loop writes a
//! part. A dump after a panic delays the report of the guest's end until it is written.

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
    /// Sets where to dump the guest if it panics.
    pub fn dump_on_panic(&mut self, to: OnPanic) {
        self.on_panic = Some(to);
    }

    /// Begins a dump into `file`.
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
            // The vCPU that has ended cannot be queried.
            Some((ended, core)) if *ended == index => *core,
            _ => vcpus.with(index, Core::read).ok().and_then(Result::ok).unwrap_or_default(),
        };
        let cores = (0..vcpus.count()).map(core).collect();
        let ram = self.machine.ram();
        let slots = ram.slots().to_vec();
        let job = DumpJob { dumping: Dumping::new(file, cores, ram, slots, self.pagemap.clone()), ended };
        self.operation.begin(Operation::new(Kind::Dump, by, Work::Dumping(Box::new(job))));
        self.come_again();
    }

    fn come_again(&self) {
        // The write fails only on overflow, and then the eventfd is signalled anyway.
        let _ = self.wake.write(1);
    }

    /// Begins a dump if the guest ended with a panic. Returns whether it did.
    pub(super) fn dumps(&mut self, exit: Exit) -> bool {
        if !self.machine.has_panicked(exit) {
            return false;
        }
        let Some(to) = self.on_panic.take() else { return false };
        if let Err(error) = self.machine.pause() {
            tracing::error!("{}: the guest has panicked, and is not dumped: {error}", to.name);
            return false;
        }
        // No request or debugger lets it run while its memory is written.
        self.held.dump = true;
        match to.file.try_clone() {
            Ok(file) => self.begin_dump(file, None, Some((exit, to))),
            Err(error) => {
                tracing::error!("{}: the guest has panicked, and is not dumped: {error}", to.name);
                return false;
            }
        }
        true
    }

    /// Continues the dump. Returns how the guest has ended once a dump after a panic is written.
    pub(super) fn serve_dump(&mut self) -> Option<Exit> {
        let job = self.operation.dumping()?;
        let done = match job.dumping.turn() {
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

    /// Reports the result of the dump to its client and lets the guest resume. The client syncs the
    /// file.
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

    /// Whether a client has requested the current dump.
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

/// The log message's suffix for a dump without VMCOREINFO.
fn without(dumped: &Dumped) -> &'static str {
    match dumped.vmcoreinfo {
        Some(_) => "",
        None => "; without VMCOREINFO, which was not found in its memory",
    }
}
