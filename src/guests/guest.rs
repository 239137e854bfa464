//! A machine that runs a workload: memory, vCPUs at the code's entry, and the bell that they ring.
//!
//! ```text
//! the workload's own memslot, at layout::WORKLOAD_BASE
//!   page 0        code
//!   then          a control block for each vCPU
//!   then          the guest's page tables
//! ```
//!
//! [`Guest::build`] creates it with paused vCPUs. [`Guest::resume`] lets each run until it rings
//! the doorbell. Then it is paused again, ready for new parameters.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use vm_memory::{Bytes, GuestAddress};

use super::bell::Bell;
use super::control::Control;
pub use super::error::Error;
use super::stamp::Stamp;
use super::{Region, WriteConfig};
use crate::program::{self as machine, Code, Entry, GuestPage, Privilege};
use vellum_host::kvm::create_vm;
use vellum_kvm::arch::cpuid::{self, Choice, Cpuid, Leaf};
use vellum_kvm::arch::irqchip::{self, Irqchip};
use vellum_kvm::arch::prepared_vm::PreparedVm;
use vellum_kvm::arch::state::Context;
use vellum_kvm::arch::{layout, regs};
use vellum_kvm::memory::{GuestMemory, Memory, Slot};
use vellum_kvm::vm::counters::{self, Counters};
use vellum_kvm::vm::cr3_cache;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_kvm::vm::quiesced::Quiesced;
use vellum_kvm::vm::vcpu::{self, Flow, Vcpu};
use vellum_kvm::vm::{Error as VmError, Vm};
use vellum_machine::state;
use vellum_sys::mmap::{Mapping, PAGE_SIZE, Source, host_page};
use vellum_sys::signal;

/// The maximum time until a pending signal ends a wait.
const ASKING: Duration = Duration::from_millis(100);

/// How to build a workload's machine.
pub struct GuestConfig {
    /// The number of vCPUs.
    pub vcpus: usize,
    /// The CPU of each vCPU, if pinned. The vCPUs take turns if there are fewer.
    pub pins: Option<Vec<usize>>,
    /// The page size of the guest's own tables.
    pub page: GuestPage,
    /// The workload's code.
    pub code: Code,
    /// See [`Privilege`].
    pub privilege: Privilege,
    /// Enters the sandbox. Each vCPU thread calls this with its number, directly before its loop.
    pub enter: Arc<dyn Fn(usize) -> io::Result<()> + Send + Sync>,
    /// Flags of RAM's memslots, for example `KVM_MEM_LOG_DIRTY_PAGES`.
    pub slot_flags: u32,
    /// The size of each vCPU's dirty ring in entries, if there is one.
    pub dirty_ring: Option<u32>,
    /// The interrupt controller in KVM. No workload needs one, but with a local APIC every exit
    /// costs more.
    pub irqchip: Option<irqchip::Mode>,
    /// CPU features.
    pub cpuid: Choice,
    /// Whether the guest may load CR3 without an exit.
    pub cr3_cache: cr3_cache::Choice,
    /// The parts that were prepared before, if any.
    pub begun: Option<PreparedVm>,
}

impl GuestConfig {
    /// `vcpus` vCPUs that run the `write` workload, unpinned and unsandboxed.
    pub fn new(vcpus: usize) -> Self {
        Self {
            vcpus,
            pins: None,
            page: GuestPage::Large,
            code: machine::write_code(),
            privilege: Privilege::User,
            enter: Arc::new(|_| Ok(())),
            slot_flags: 0,
            dirty_ring: None,
            irqchip: None,
            cpuid: Choice::default(),
            cr3_cache: cr3_cache::Choice::Off,
            begun: None,
        }
    }
}

/// Why [`Guest::wait`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woke {
    /// Every vCPU has rung and is paused.
    Rung,
    /// The time is over, and not every vCPU has rung.
    Timeout,
}

/// A workload's machine.
pub struct Guest {
    // Dropped first: vCPU threads use everything below.
    /// The vCPUs.
    pub vcpus: Vec<Vcpu>,
    /// KVM's VM and RAM.
    pub vm: Vm,
    /// The memslot with code, control blocks and tables. It covers its whole mapping.
    pub slot: Slot,
    /// The bell that the vCPUs ring.
    pub bell: Arc<Bell>,
    /// The guest's TSC ticks per second.
    pub tsc_hz: u64,
    /// The guest-physical address of the initial root page table.
    pub root: u64,
    /// CPUID of the first vCPU.
    pub(super) cpuid: Vec<Leaf>,
    /// KVM capabilities on which the state depends.
    pub(super) context: Context,
    /// KVM's counters of the VM and its vCPUs, or why there are none.
    pub counters: Result<Counters, counters::Error>,
}

impl Guest {
    /// Builds the machine over `memory`. Every vCPU is paused at the code's entry.
    pub fn build(kvm: &Kvm, memory: Memory, config: GuestConfig) -> Result<Self, Error> {
        let guest = Self::start(kvm, memory, config)?;
        guest.ready()?;
        Ok(guest)
    }

    /// Whether this host can give the guest a TSC of another frequency than its own.
    pub fn scales_tsc(&self) -> bool {
        self.context.scales_tsc
    }

    /// Accepts an incoming guest whose TSC frequency this host cannot provide.
    pub fn allow_other_tsc(&mut self) {
        self.context.allows_other_tsc = true;
    }

    /// Waits until every vCPU thread that [`Guest::start`] has started is ready.
    pub fn ready(&self) -> Result<(), Error> {
        self.vcpus.iter().try_for_each(Vcpu::ready).map_err(|error| VmError::from(error).into())
    }

    /// Like [`Guest::build`], but does not wait. The caller can do other work until the vCPU
    /// threads are [`ready`](Guest::ready), or let them run as soon as they are.
    pub fn start(kvm: &Kvm, memory: Memory, config: GuestConfig) -> Result<Self, Error> {
        let most = kvm.get_max_vcpus();
        if config.vcpus == 0 || config.vcpus > most {
            return Err(VmError::Cpus { asked: config.vcpus, most }.into());
        }
        let control_bytes = size_of::<Control>() as u64;
        let tables = PAGE_SIZE + control_bytes * config.vcpus as u64;
        let ram = memory.config.size;
        let need = tables + machine::table_pages(ram, config.page) * PAGE_SIZE;
        let room = layout::WORKLOAD_END - layout::WORKLOAD_BASE;
        if need > room {
            return Err(Error::TablesTooLarge { need, room });
        }
        let own = Mapping::new(need.next_multiple_of(host_page()), 2 << 20, Source::Anonymous)
            .map_err(Error::Map)?;
        own.advise(libc::MADV_DONTDUMP).map_err(Error::Map)?;
        let store =
            |offset: u64, value: u64| own.words()[offset as usize / 8].store(value, Ordering::Relaxed);
        for (index, bytes) in config.code.bytes.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            store(index as u64 * 8, u64::from_le_bytes(word));
        }
        let base = layout::WORKLOAD_BASE;
        let low = base..layout::DOORBELL + PAGE_SIZE;
        let root = machine::build_tables(
            &mut |word, entry| store(tables + word * 8, entry),
            base + tables,
            low,
            parts(memory.slots()).into_iter(),
            config.page,
        );
        let own = Arc::new(own);
        let make = |vm| Vm::over(vm, memory, config.dirty_ring)?.with_cr3_cache(config.cr3_cache);
        let (supported, vm) = match config.begun {
            Some(PreparedVm { vm, supported }) => (supported, make(vm)),
            None => cpuid::supported_beside(kvm, || make(create_vm(kvm)?)),
        };
        let vm = vm?;
        let irqchip = config.irqchip.map(|mode| Irqchip::new(&vm.fd, mode)).transpose()?;
        let slot = Slot::new(vm.memory.slots().len() as u32, base, &own, 0..own.len());
        let slot = slot.map_err(VmError::from)?;
        vm.memslots().set(&slot, 0)?;
        if config.slot_flags != 0 {
            vm.memory.slots().iter().try_for_each(|slot| vm.memslots().set(slot, config.slot_flags))?;
        }
        let mut cpuid = Cpuid::of_vm(supported, &vm.fd, &config.cpuid, config.vcpus as u32)?;
        if vm.cr3_cache.is_some() {
            cpuid.show_cr3_cache();
        }
        let bell = Arc::new(Bell::new(config.vcpus).map_err(Error::Map)?);
        let counters = Counters::of_vm(&vm.fd);
        let vcpus = Vec::with_capacity(config.vcpus);
        let context = Context::new(kvm, &vm.fd, config.irqchip.is_some());
        let mut context = context.map_err(|error| state::Error::State(0, error))?;
        context.has_cr3_cache = vm.cr3_cache.is_some();
        let first = cpuid.leaves()?;
        let mut guest = Self { vcpus, vm, slot, bell, tsc_hz: 0, root, cpuid: first, context, counters };
        for index in 0..config.vcpus {
            // Hundreds of vCPUs take seconds.
            if let Some(signal) = signal::take() {
                return Err(Error::Interrupted(signal));
            }
            let fd = guest.vm.create_vcpu(index)?;
            let entry = Entry {
                code: base + config.code.entry,
                control: base + PAGE_SIZE + control_bytes * index as u64,
                root,
                privilege: config.privilege,
            };
            let (cpuid, has_irqchip) = (cpuid.for_vcpu(index as u32)?, config.irqchip.is_some());
            let prepare = move |fd: &VcpuFd| {
                machine::set_entry(fd, &cpuid, entry)?;
                if has_irqchip {
                    // With a local APIC, all vCPUs but the first wait for INIT and SIPI.
                    machine::set_runnable(fd)?;
                }
                Ok(())
            };
            if index == 0 {
                guest.tsc_hz = machine::tsc_hz(&fd)?;
            }
            if let Err(error) = guest.counters.as_mut().map_or(Ok(()), |counters| counters.add_vcpu(&fd)) {
                guest.counters = Err(error);
            }
            let (bell, enter) = (guest.bell.clone(), config.enter.clone());
            let thread = vcpu::Thread {
                index,
                pin: config.pins.as_ref().and_then(|pins| pins.iter().cycle().nth(index).copied()),
                describe: regs::describe,
                keep: |_| None,
                enter: Box::new(move || enter(index)),
                on_end: Box::new(move || bell.end()),
            };
            let vcpu = Vcpu::spawn(thread).map_err(VmError::from)?;
            vcpu.give(fd, prepare, on_exit(index, guest.bell.clone(), guest.vm.memory.guest.clone()));
            guest.vcpus.push(vcpu);
        }
        irqchip.map_or(Ok(()), |irqchip| irqchip.complete(config.vcpus))?;
        Ok(guest)
    }

    /// The control block of a vCPU.
    pub fn control(&self, vcpu: usize) -> &Control {
        Self::control_in(self.slot.mapping(), vcpu)
            .expect("every vCPU of this guest has a block inside its mapping")
    }

    /// The control block of a vCPU in its guest's [own memory](Guest::own_memory).
    pub fn control_in(own: &Mapping, vcpu: usize) -> Option<&Control> {
        Control::at(own, PAGE_SIZE + size_of::<Control>() as u64 * vcpu as u64)
    }

    /// A vCPU's control block as words, for code with another layout.
    pub fn block(&self, vcpu: usize) -> &[AtomicU64] {
        let words = size_of::<Control>() / 8;
        let first = PAGE_SIZE as usize / 8 + words * vcpu;
        &self.slot.mapping().words()[first..first + words]
    }

    /// The first two entries of the guest's root page table: its own slot, and RAM.
    pub(crate) fn root_entries(&self) -> [u64; 2] {
        let root = (self.root - self.slot.gpa()) as usize / 8;
        [0, 1].map(|index| self.slot.mapping().words()[root + index].load(Ordering::Relaxed))
    }

    /// The memory with the control blocks, for a thread that watches progress while others use the
    /// machine.
    pub fn own_memory(&self) -> Arc<Mapping> {
        self.slot.mapping().clone()
    }

    /// All control blocks, ordered by vCPU.
    pub fn controls(&self) -> impl Iterator<Item = &Control> {
        (0..self.vcpus.len()).map(|index| self.control(index))
    }

    /// Programs every vCPU with `config`. All must be paused. Returns their regions.
    pub fn program(&self, config: &WriteConfig) -> Result<Vec<Region>, Error> {
        let (vcpus, ram) = (self.vcpus.len(), self.vm.memory.config.size);
        let pages = ram / config.stride;
        let need = if config.shared { 2 } else { 2 * vcpus as u64 };
        if pages < need {
            return Err(Error::TooFewPages { pages, vcpus });
        }
        Ok((0..vcpus)
            .map(|index| {
                let region = config.region(index, vcpus, ram);
                config.program(self.control(index), index, region, machine::RAM_VA, self.tsc_hz);
                region
            })
            .collect())
    }

    /// Lets all vCPUs run and clears earlier rings. A pending signal ends this early, because
    /// hundreds of running vCPUs leave this thread little time to start the rest. The following
    /// wait reports the signal.
    pub fn resume(&self) {
        self.bell.lock().codes.fill(0);
        for vcpu in self.vcpus.iter().take_while(|_| !signal::is_pending()) {
            vcpu.resume();
        }
    }

    /// Resumes those vCPUs that have not rung, after [`Guest::pause`].
    pub(crate) fn resume_unfinished(&self) {
        let rung = self.bell.lock();
        self.vcpus
            .iter()
            .zip(&rung.codes)
            .filter(|(_, code)| **code == 0)
            .for_each(|(vcpu, _)| vcpu.resume());
    }

    /// Waits until every vCPU has rung, at most for `timeout`.
    pub fn wait(&self, timeout: Duration) -> Result<Woke, Error> {
        let deadline = Instant::now() + timeout;
        let mut rung = self.bell.lock();
        loop {
            if rung.ended > 0 {
                drop(rung);
                return Err(self.ended());
            }
            if !rung.codes.contains(&0) {
                break;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Woke::Timeout);
            }
            if let Some(signal) = signal::take() {
                return Err(Error::Interrupted(signal));
            }
            rung = self.bell.wait(rung, left.min(ASKING));
        }
        drop(rung);
        self.vcpus.iter().try_for_each(Vcpu::wait_paused).map_err(VmError::from)?;
        Ok(Woke::Rung)
    }

    /// Pauses all vCPUs. Returns how long that took.
    pub fn pause(&self) -> Result<Duration, Error> {
        vcpu::pause_all(&self.vcpus).map_err(|error| VmError::from(error).into())
    }

    /// The VM, and proof that nothing writes to its memory. The guest must be paused.
    pub fn quiesced(&mut self) -> Result<(&Vm, Quiesced<'_>), Error> {
        // There are no devices to stop.
        let quiesced = Quiesced::new(&mut self.vcpus, || ()).map_err(VmError::from)?;
        Ok((&self.vm, quiesced))
    }

    /// Asks the guest to stop before its next access. Each vCPU then rings.
    pub fn request_stop(&self) {
        self.controls().for_each(|control| control.stop.store(1, Ordering::Release));
    }

    /// Returns true when every vCPU has rung since the last [`Guest::resume`], and an error if one
    /// has ended instead.
    pub fn all_rung(&self) -> Result<bool, Error> {
        let rung = self.bell.lock();
        if rung.ended > 0 {
            drop(rung);
            return Err(self.ended());
        }
        Ok(rung.codes.iter().all(|&code| code != 0))
    }

    /// Waits until every vCPU has rung and is paused.
    pub fn wait_all_rung(&self) -> Result<(), Error> {
        while self.wait(Duration::from_secs(3600))? != Woke::Rung {}
        Ok(())
    }

    /// The stamp on page `page` of `stride` bytes, counted from the start of RAM.
    pub fn stamp(&self, page: u64, stride: u64) -> Stamp {
        Stamp::read(self.vm.memory.mapping.words(), (page * stride / 8) as usize)
    }

    fn ended(&self) -> Error {
        if let Some(failed) = self.vcpus.iter().find_map(Vcpu::take_failed) {
            return VmError::from(failed).into();
        }
        let ended = self.vcpus.iter().find_map(|vcpu| Some((vcpu.index(), vcpu.take_ended()?)));
        let (index, what) = ended.map_or((0, "for an unknown reason".into()), |(index, ended)| {
            let what = match (ended.exit, ended.error) {
                (_, Some(error)) => format!("KVM_RUN: {error}"),
                (Exit::TripleFault, None) => "triple fault".into(),
                (exit, None) => format!("{exit:?}"),
            };
            (index, what)
        });
        Error::Ended { index, what }
    }
}

impl Drop for Guest {
    /// Tells all vCPUs to stop before waiting for the first. Otherwise a vCPU waiting for its turn
    /// among hundreds of running ones may take minutes.
    fn drop(&mut self) {
        self.vcpus.iter().for_each(Vcpu::request_stop);
    }
}

/// RAM as few `(guest-physical address, bytes)` parts, by joining adjacent memslots.
fn parts(slots: &[Slot]) -> Vec<(u64, u64)> {
    let mut parts: Vec<(u64, u64)> = Vec::new();
    for slot in slots {
        match parts.last_mut() {
            Some((gpa, len)) if *gpa + *len == slot.gpa() => *len += slot.bytes(),
            _ => parts.push((slot.gpa(), slot.bytes())),
        }
    }
    parts
}

/// The exit handler of a workload.
fn on_exit(
    index: usize,
    bell: Arc<Bell>,
    memory: GuestMemory,
) -> impl FnMut(VcpuExit<'_>) -> Flow + Send + 'static {
    move |exit| match exit {
        VcpuExit::MmioWrite(layout::DOORBELL, data) => {
            let code = data.iter().rev().fold(0, |code, &byte| (code << 8) | u64::from(byte));
            bell.ring(index, code);
            Flow::Pause
        }
        // An access that faulted while its memslot was being moved exits as MMIO. Complete it as
        // KVM would have.
        VcpuExit::MmioWrite(gpa, data) => match memory.write_slice(data, GuestAddress(gpa)) {
            Ok(()) => Flow::Continue,
            Err(_) => Flow::Stop(Exit::Error),
        },
        VcpuExit::MmioRead(gpa, data) => match memory.read_slice(data, GuestAddress(gpa)) {
            Ok(()) => Flow::Continue,
            Err(_) => Flow::Stop(Exit::Error),
        },
        VcpuExit::Intr => Flow::Continue,
        VcpuExit::Shutdown => Flow::Stop(Exit::TripleFault),
        _ => Flow::Stop(Exit::Error),
    }
}
