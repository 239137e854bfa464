//! The methods that restore an arriving machine before it runs, each forwarded by name. There is no
//! `Deref`: a method that is missing here would reach the inner machine directly and bypass its
//! debugger and its operation.

use super::{Error, MigratableMachine};
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::arch::core::Core;
use vellum_kvm::memory::{Memory, Slot};
use vellum_kvm::vm::lifecycle::Exit;
use vellum_kvm::vm::vcpu::{Throttle, VcpusDebugHandle};
use vellum_machine::{Disk, Inspect, RestoreState, SaveState, Section};

impl<P: SaveState> Inspect for MigratableMachine<P>
where
    Error: From<P::Error>,
{
    fn memory(&self) -> Vec<Slot> {
        self.machine.memory()
    }

    fn ram(&self) -> Memory {
        self.machine.ram()
    }

    fn debug_handle(&self) -> VcpusDebugHandle {
        self.machine.debug_handle()
    }

    fn last_core(&self) -> Option<(usize, Core)> {
        self.machine.last_core()
    }

    fn has_panicked(&self, exit: Exit) -> bool {
        self.machine.has_panicked(exit)
    }
}

impl<P: SaveState> RestoreState for MigratableMachine<P>
where
    Error: From<P::Error>,
{
    fn disks(&self) -> Vec<Disk> {
        self.machine.disks()
    }

    fn throttle(&self) -> Throttle {
        self.machine.throttle()
    }

    fn restore(&mut self, sections: Vec<Section>, meanwhile: ClockPolicy) -> Result<(), Error> {
        Ok(self.machine.restore(sections, meanwhile)?)
    }

    fn commit(&mut self, forked: bool) -> Result<(), Error> {
        Ok(self.machine.commit(forked)?)
    }

    fn renew(&mut self) -> Result<(), Error> {
        Ok(self.machine.renew()?)
    }

    fn retake(&mut self) -> Result<(), Error> {
        Ok(self.machine.retake()?)
    }

    fn give_typed(&mut self, typed: &[u8]) {
        self.machine.give_typed(typed);
    }
}
