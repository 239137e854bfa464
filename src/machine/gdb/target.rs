//! A machine as a target of the gdbstub crate: vCPUs as threads, their registers, memory through
//! their page tables, and breakpoints.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use gdbstub::arch::{Arch, Registers as GdbRegisters};
use gdbstub::common::{Signal, Tid};
use gdbstub::stub::{BaseStopReason, MultiThreadStopReason};
use gdbstub::target::ext::base::BaseOps;
use gdbstub::target::ext::base::multithread::{
    MultiThreadBase, MultiThreadResume, MultiThreadResumeOps, MultiThreadSchedulerLocking,
    MultiThreadSchedulerLockingOps, MultiThreadSingleStep, MultiThreadSingleStepOps,
};
use gdbstub::target::ext::breakpoints::{
    Breakpoints, BreakpointsOps, HwBreakpoint, HwBreakpointOps, HwWatchpoint, HwWatchpointOps, SwBreakpoint,
    SwBreakpointOps, WatchKind,
};
use gdbstub::target::ext::thread_extra_info::{ThreadExtraInfo, ThreadExtraInfoOps};
use gdbstub::target::{self, TargetError, TargetResult};
use vm_memory::{Bytes, GuestAddress};

use vellum_kvm::arch::debug::{self, BREAKPOINT, BYTES};
use vellum_kvm::arch::watch::{Access, Watch};
use vellum_kvm::memory::{GuestMemory, Slot};
use vellum_kvm::vm::vcpu::{SLOTS, Trap, Traps, VcpusDebugHandle};
use vellum_sys::mmap::PAGE_SIZE;

/// This architecture, for GDB.
pub(super) enum Here {}

impl Arch for Here {
    type Usize = u64;
    type Registers = File;
    type BreakpointKind = usize;
    type RegId = ();

    fn target_description_xml() -> Option<&'static str> {
        Some(debug::DESCRIPTION)
    }
}

/// The registers in GDB's format.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct File([u8; BYTES]);

impl Default for File {
    fn default() -> Self {
        Self([0; BYTES])
    }
}

impl GdbRegisters for File {
    type ProgramCounter = u64;

    fn pc(&self) -> u64 {
        0
    }

    fn gdb_serialize(&self, mut write_byte: impl FnMut(Option<u8>)) {
        self.0.iter().for_each(|byte| write_byte(Some(*byte)));
    }

    fn gdb_deserialize(&mut self, bytes: &[u8]) -> Result<(), ()> {
        self.0 = bytes.try_into().map_err(|_| ())?;
        Ok(())
    }
}

/// GDB's thread ID of vCPU `index`. IDs start at 1, because 0 means any thread.
pub(super) fn tid(index: usize) -> Tid {
    NonZeroUsize::MIN.saturating_add(index)
}

fn index(tid: Tid) -> usize {
    tid.get() - 1
}

/// What a vCPU is to do when its machine resumes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Action {
    #[default]
    Continue,
    Step,
    /// GDB gave no action. The vCPU continues with the others, unless only those with an action may
    /// run.
    Untold,
}

/// Guest-physical memory: RAM, whose writes are logged, and the machine's other slots.
struct Space {
    ram: GuestMemory,
    slots: Vec<Slot>,
}

impl Space {
    /// Reads from `at`, within a page. Returns false if there is no memory.
    fn read(&self, at: u64, to: &mut [u8]) -> bool {
        if self.ram.read_slice(to, GuestAddress(at)).is_ok() {
            return true;
        }
        self.word_by_word(
            at,
            to.len(),
            |words, skip| to.copy_from_slice(&words[skip..skip + to.len()]),
            false,
        )
    }

    /// Writes `from` to `at`, within a page. Returns false if there is no memory.
    fn write(&self, at: u64, from: &[u8]) -> bool {
        if self.ram.write_slice(from, GuestAddress(at)).is_ok() {
            return true;
        }
        self.word_by_word(
            at,
            from.len(),
            |words, skip| words[skip..skip + from.len()].copy_from_slice(from),
            true,
        )
    }

    fn word_by_word(
        &self,
        at: u64,
        len: usize,
        change: impl FnOnce(&mut [u8], usize),
        written: bool,
    ) -> bool {
        let inside = |slot: &&Slot| {
            at >= slot.gpa() && at.checked_add(len as u64).is_some_and(|end| end <= slot.gpa() + slot.bytes())
        };
        let Some(slot) = self.slots.iter().find(inside) else { return false };
        let offset = slot.offset() + (at - slot.gpa());
        let (first, skip) = (offset & !7, (offset & 7) as usize);
        let mut words = vec![0; (skip + len).next_multiple_of(8)];
        slot.mapping().copy_to(first, &mut words);
        change(&mut words, skip);
        if written {
            slot.mapping().copy_from(first, &words);
        }
        true
    }
}

/// The machine.
pub(super) struct Target {
    /// Whether the machine is paused for its debugger. Only then is it accessed.
    pub stands: bool,
    reins: VcpusDebugHandle,
    traps: Arc<Traps>,
    space: Space,
    /// Whether interrupts are blocked for a vCPU that single-steps.
    blocks: bool,
    /// The vCPU of the last report.
    current: usize,
    actions: Vec<Action>,
    alone: bool,
    /// Breakpoints in the guest's code, by virtual address: the guest-physical address and the
    /// original bytes.
    planted: BTreeMap<u64, (u64, Vec<u8>)>,
    watches: [Option<Watch>; SLOTS],
}

impl Target {
    pub fn new(
        reins: VcpusDebugHandle,
        traps: Arc<Traps>,
        ram: GuestMemory,
        slots: Vec<Slot>,
        blocks: bool,
    ) -> Self {
        let actions = vec![Action::Continue; reins.count()];
        let space = Space { ram, slots };
        let (planted, watches) = (BTreeMap::new(), [None; SLOTS]);
        Self {
            stands: false,
            reins,
            traps,
            space,
            blocks,
            current: 0,
            actions,
            alone: false,
            planted,
            watches,
        }
    }

    /// The stop reason that GDB gets for a trap.
    pub fn reason(&mut self, trap: &Trap) -> MultiThreadStopReason<u64> {
        self.current = trap.vcpu;
        let tid = tid(trap.vcpu);
        if trap.planted {
            return BaseStopReason::SwBreak(tid);
        }
        let met = (0..SLOTS).filter(|slot| trap.dr6 >> slot & 1 == 1);
        let met = met.filter_map(|slot| self.watches[slot]);
        match met.max_by_key(|watch| watch.access != Access::Execute) {
            Some(Watch { access: Access::Execute, .. }) => BaseStopReason::HwBreak(tid),
            Some(Watch { at, access, .. }) => {
                let kind = if access == Access::Write { WatchKind::Write } else { WatchKind::ReadWrite };
                BaseStopReason::Watch { tid, kind, addr: at }
            }
            None => BaseStopReason::SignalWithThread { tid, signal: Signal::SIGTRAP },
        }
    }

    /// Whether a resumed vCPU would hit this trap again, because it stopped before an instruction.
    pub fn comes_again(&self, trap: &Trap) -> bool {
        let waits = |slot: usize| {
            trap.dr6 >> slot & 1 == 1
                && self.watches[slot].is_none_or(|watch| watch.access == Access::Execute)
        };
        trap.planted || (0..SLOTS).any(waits)
    }

    /// The stop reason that GDB gets for its own interrupt.
    pub fn interrupted(&self) -> MultiThreadStopReason<u64> {
        BaseStopReason::SignalWithThread { tid: tid(self.current), signal: Signal::SIGINT }
    }

    /// Removes all breakpoints and releases every vCPU.
    pub fn clear(&mut self) {
        for (at, (physical, was)) in std::mem::take(&mut self.planted) {
            self.take_out(at, physical, &was);
        }
        self.watches = [None; SLOTS];
        self.traps.watch(0);
        for index in 0..self.reins.count() {
            // A vCPU that has exited needs no change.
            let _ = self.reins.set(index, Default::default());
            self.reins.park(index, false);
        }
    }

    fn take_out(&self, at: u64, physical: u64, was: &[u8]) {
        let mut now = vec![0; was.len()];
        // If the guest has written something else there, that stays.
        if self.space.read(physical, &mut now) && now == BREAKPOINT {
            self.space.write(physical, was);
        }
        self.traps.plant(at, false);
    }

    /// Sets the debug state of each vCPU in KVM, and parks those that are not to run.
    fn apply(&mut self) -> Result<(), &'static str> {
        let watched =
            (0..SLOTS).filter(|slot| self.watches[*slot].is_some()).fold(0, |all, slot| all | 1 << slot);
        self.traps.watch(watched);
        for (index, action) in self.actions.iter().enumerate() {
            let step = *action == Action::Step;
            let planted = !self.planted.is_empty();
            let set = self.reins.set(index, debug::control(&self.watches, planted, step, self.blocks));
            // A vCPU that has exited does not matter. One that KVM refuses to debug does.
            if let Ok(Err(error)) = set {
                tracing::error!("KVM_SET_GUEST_DEBUG of vCPU {index}: {error}");
                return Err("KVM does not debug this guest");
            }
            self.reins.park(index, self.alone && *action == Action::Untold);
        }
        Ok(())
    }

    fn still(&self) -> TargetResult<(), Self> {
        if self.stands { Ok(()) } else { Err(TargetError::NonFatal) }
    }

    /// The guest-physical address of `at` in the tables of vCPU `first`, or of another: the tables
    /// of a vCPU in user space may not map the kernel.
    fn physical(&self, at: u64, first: usize) -> Option<u64> {
        let all = std::iter::once(first).chain((0..self.reins.count()).filter(|index| *index != first));
        all.filter_map(|index| self.reins.with(index, move |fd| debug::physical(fd, at)).ok().flatten())
            .next()
    }

    /// Calls `part` for each page of `[at, at + len)`, with its guest-physical address and its part
    /// of the range. Returns the number of bytes done.
    fn pages(
        &self,
        at: u64,
        len: usize,
        tid: Tid,
        mut part: impl FnMut(u64, std::ops::Range<usize>) -> bool,
    ) -> usize {
        let mut done = 0;
        while done < len {
            let Some(here) = at.checked_add(done as u64) else { break };
            let count = (len - done).min((PAGE_SIZE - here % PAGE_SIZE) as usize);
            let Some(physical) = self.physical(here, index(tid)) else { break };
            if !part(physical, done..done + count) {
                break;
            }
            done += count;
        }
        done
    }

    fn set_action(&mut self, tid: Tid, action: Action) -> Result<(), &'static str> {
        *self.actions.get_mut(index(tid)).ok_or("there is no such vCPU")? = action;
        Ok(())
    }

    fn add_watch(&mut self, watch: Option<Watch>) -> bool {
        let free = self.watches.iter_mut().find(|slot| slot.is_none());
        match (watch, free) {
            (Some(watch), Some(slot)) => {
                *slot = Some(watch);
                true
            }
            _ => false,
        }
    }

    fn remove_watch(&mut self, watch: Option<Watch>) -> bool {
        let slot = self.watches.iter_mut().find(|slot| slot.is_some() && **slot == watch);
        slot.map(Option::take).is_some()
    }
}

impl target::Target for Target {
    type Arch = Here;
    type Error = &'static str;

    fn base_ops(&mut self) -> BaseOps<'_, Here, &'static str> {
        BaseOps::MultiThread(self)
    }

    fn support_breakpoints(&mut self) -> Option<BreakpointsOps<'_, Self>> {
        Some(self)
    }

    fn guard_rail_implicit_sw_breakpoints(&self) -> bool {
        true
    }
}

impl MultiThreadBase for Target {
    fn read_registers(&mut self, regs: &mut File, tid: Tid) -> TargetResult<(), Self> {
        self.still()?;
        let read = self.reins.with(index(tid), debug::Registers::read);
        regs.0 = read.ok().and_then(Result::ok).ok_or(TargetError::NonFatal)?.to_bytes();
        Ok(())
    }

    fn write_registers(&mut self, regs: &File, tid: Tid) -> TargetResult<(), Self> {
        self.still()?;
        let bytes = regs.0;
        let written = self.reins.with(index(tid), move |fd| {
            let before = debug::Registers::read(fd)?;
            before.with_bytes(&bytes).write(fd, &before)
        });
        written.ok().and_then(Result::ok).ok_or(TargetError::NonFatal)
    }

    fn read_addrs(&mut self, start_addr: u64, data: &mut [u8], tid: Tid) -> TargetResult<usize, Self> {
        self.still()?;
        let done = self.pages(start_addr, data.len(), tid, |at, part| self.space.read(at, &mut data[part]));
        if done == 0 && !data.is_empty() { Err(TargetError::NonFatal) } else { Ok(done) }
    }

    fn write_addrs(&mut self, start_addr: u64, data: &[u8], tid: Tid) -> TargetResult<(), Self> {
        self.still()?;
        let done = self.pages(start_addr, data.len(), tid, |at, part| self.space.write(at, &data[part]));
        if done < data.len() { Err(TargetError::NonFatal) } else { Ok(()) }
    }

    fn list_active_threads(&mut self, thread_is_active: &mut dyn FnMut(Tid)) -> Result<(), &'static str> {
        (0..self.reins.count()).for_each(|index| thread_is_active(tid(index)));
        Ok(())
    }

    fn support_resume(&mut self) -> Option<MultiThreadResumeOps<'_, Self>> {
        Some(self)
    }

    fn support_thread_extra_info(&mut self) -> Option<ThreadExtraInfoOps<'_, Self>> {
        Some(self)
    }
}

impl ThreadExtraInfo for Target {
    fn thread_extra_info(&self, tid: Tid, buf: &mut [u8]) -> Result<usize, &'static str> {
        let text = format!("vCPU {}", index(tid));
        let count = text.len().min(buf.len());
        buf[..count].copy_from_slice(&text.as_bytes()[..count]);
        Ok(count)
    }
}

impl MultiThreadResume for Target {
    fn resume(&mut self) -> Result<(), &'static str> {
        if self.stands { self.apply() } else { Err("it runs already") }
    }

    fn clear_resume_actions(&mut self) -> Result<(), &'static str> {
        self.actions.fill(Action::Untold);
        self.alone = false;
        Ok(())
    }

    fn set_resume_action_continue(&mut self, tid: Tid, _: Option<Signal>) -> Result<(), &'static str> {
        self.set_action(tid, Action::Continue)
    }

    fn support_single_step(&mut self) -> Option<MultiThreadSingleStepOps<'_, Self>> {
        Some(self)
    }

    fn support_scheduler_locking(&mut self) -> Option<MultiThreadSchedulerLockingOps<'_, Self>> {
        Some(self)
    }
}

impl MultiThreadSingleStep for Target {
    fn set_resume_action_step(&mut self, tid: Tid, _: Option<Signal>) -> Result<(), &'static str> {
        self.set_action(tid, Action::Step)
    }
}

impl MultiThreadSchedulerLocking for Target {
    fn set_resume_action_scheduler_lock(&mut self) -> Result<(), &'static str> {
        self.alone = true;
        Ok(())
    }
}

impl Breakpoints for Target {
    fn support_sw_breakpoint(&mut self) -> Option<SwBreakpointOps<'_, Self>> {
        Some(self)
    }

    fn support_hw_breakpoint(&mut self) -> Option<HwBreakpointOps<'_, Self>> {
        Some(self)
    }

    fn support_hw_watchpoint(&mut self) -> Option<HwWatchpointOps<'_, Self>> {
        Some(self)
    }
}

impl SwBreakpoint for Target {
    fn add_sw_breakpoint(&mut self, addr: u64, _: usize) -> TargetResult<bool, Self> {
        self.still()?;
        if self.planted.contains_key(&addr) {
            return Ok(true);
        }
        // Code that is not mapped yet cannot hold a breakpoint instruction. A hardware breakpoint
        // works there.
        let Some(physical) = self.physical(addr, self.current) else { return Ok(false) };
        let mut was = vec![0; BREAKPOINT.len()];
        if !self.space.read(physical, &mut was) || !self.space.write(physical, BREAKPOINT) {
            return Ok(false);
        }
        self.traps.plant(addr, true);
        self.planted.insert(addr, (physical, was));
        Ok(true)
    }

    fn remove_sw_breakpoint(&mut self, addr: u64, _: usize) -> TargetResult<bool, Self> {
        self.still()?;
        let Some((physical, was)) = self.planted.remove(&addr) else { return Ok(false) };
        self.take_out(addr, physical, &was);
        Ok(true)
    }
}

impl HwBreakpoint for Target {
    fn add_hw_breakpoint(&mut self, addr: u64, _: usize) -> TargetResult<bool, Self> {
        self.still()?;
        Ok(self.add_watch(debug::watch(addr, 1, Access::Execute)))
    }

    fn remove_hw_breakpoint(&mut self, addr: u64, _: usize) -> TargetResult<bool, Self> {
        self.still()?;
        Ok(self.remove_watch(debug::watch(addr, 1, Access::Execute)))
    }
}

/// The processor's closest watch type for `kind`.
fn access(kind: WatchKind) -> Access {
    match kind {
        WatchKind::Write => Access::Write,
        WatchKind::Read | WatchKind::ReadWrite => Access::Any,
    }
}

impl HwWatchpoint for Target {
    fn add_hw_watchpoint(&mut self, addr: u64, len: u64, kind: WatchKind) -> TargetResult<bool, Self> {
        self.still()?;
        Ok(self.add_watch(debug::watch(addr, len, access(kind))))
    }

    fn remove_hw_watchpoint(&mut self, addr: u64, len: u64, kind: WatchKind) -> TargetResult<bool, Self> {
        self.still()?;
        Ok(self.remove_watch(debug::watch(addr, len, access(kind))))
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use vmm_sys_util::eventfd::EventFd;

    use super::*;
    use vellum_kvm::memory::plan::Space as Plan;
    use vellum_kvm::memory::{Memory, MemoryConfig};
    use vm_memory::GuestMemoryBackend;
    use vm_memory::GuestMemoryRegion;

    /// A machine without vCPUs.
    fn target(memory: &Memory) -> Target {
        let traps = Arc::new(Traps::new(Arc::new(EventFd::new(0).unwrap())));
        Target::new(VcpusDebugHandle::new(&[]), traps, memory.guest.clone(), memory.slots().to_vec(), false)
    }

    #[test]
    fn what_a_debugger_writes_is_in_the_log() {
        const BELOW: &[std::ops::Range<u64>] = std::slice::from_ref(&(0..1 << 30));
        let memory = Memory::map(Plan(BELOW), MemoryConfig::new(1 << 20)).unwrap();
        let target = target(&memory);
        let region = memory.guest.iter().next().unwrap();
        assert!(region.bitmap().log().start());
        assert!(target.space.write(0x5ffe, b"abcd"));
        let mut pages = Vec::new();
        region.bitmap().log().drain(|page| pages.push(page));
        assert_eq!(pages, [5, 6]);
        let mut read = [0; 4];
        assert!(target.space.read(0x5ffe, &mut read) && read == *b"abcd");
        assert!(!target.space.read((1 << 20) - 2, &mut read) && !target.space.write(1 << 20, b"x"));
        assert!(!target.space.read(u64::MAX - 1, &mut read));
    }

    #[test]
    fn debug_registers_are_four_and_found_again() {
        let mut target = target(
            &Memory::map(Plan(std::slice::from_ref(&(0..1 << 30))), MemoryConfig::new(1 << 20)).unwrap(),
        );
        assert_eq!(target.add_hw_breakpoint(0x1000, 1).ok(), None, "it does not stand still");
        target.stands = true;
        for at in 0..4 {
            assert_eq!(target.add_hw_watchpoint(at * 8, 8, WatchKind::Write).ok(), Some(true));
        }
        assert_eq!(target.add_hw_breakpoint(0x1000, 1).ok(), Some(false));
        assert_eq!(target.remove_hw_watchpoint(8, 8, WatchKind::Read).ok(), Some(false));
        assert_eq!(target.remove_hw_watchpoint(8, 8, WatchKind::Write).ok(), Some(true));
        assert_eq!(target.add_hw_breakpoint(0x1000, 1).ok(), Some(true));
        let trap = |dr6| Trap { vcpu: 0, planted: false, pc: 0, dr6 };
        assert!(matches!(target.reason(&trap(2)), BaseStopReason::HwBreak(_)));
        assert!(matches!(target.reason(&trap(6)), BaseStopReason::Watch { addr: 16, .. }));
        assert!(matches!(target.reason(&trap(1 << 14)), BaseStopReason::SignalWithThread { .. }));
        assert!(target.comes_again(&trap(2)) && !target.comes_again(&trap(4)));
    }
}
