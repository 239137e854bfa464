//! `cargo bench --bench pass` compares a warm pass of the write workload in a guest with the same
//! code as a function of this process on the same memory.
//!
//! The passes alternate, so other load on the host affects both alike.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use support::perf::function::Function;
use vellum_guests::control::Control;
use vellum_guests::guest::GuestConfig;
use vellum_guests::program::write_code;
use vellum_guests::{Guest, WriteConfig};
use vellum_kvm::memory::{Memory, MemoryConfig};
use vellum_sys::mmap::{Mapping, PAGE_SIZE, Source};

const RAM: u64 = 256 << 20;
const ROUNDS: usize = 41;

fn main() {
    let kvm = match vellum_kvm::vm::open() {
        Ok(kvm) => kvm,
        Err(error) => {
            println!("skipped: {error}");
            return;
        }
    };
    let cpus = vellum_sys::host::allowed_cpus().expect("a process has CPUs");
    let cpu = cpus[cpus.len() - 1];
    let memory = Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(RAM)).expect("memory");
    memory.populate(|_| true).expect("memory");
    let ram = memory.mapping.clone();
    let config = GuestConfig { pins: Some(vec![cpu]), ..GuestConfig::new(1) };
    let guest = Guest::build(&kvm, memory, config).expect("a guest");
    let process = Process::new(ram, guest.tsc_hz);
    // The process runs on the same CPU as the vCPU. They never run at the same time.
    vellum_sys::affinity::pin(cpu).expect("a CPU of ours");
    let (mut inside, mut outside) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        guest
            .program(&WriteConfig { passes: round as u64 + 1, ..WriteConfig::default() })
            .expect("programmed");
        guest.resume();
        guest.wait_all_rung().expect("a pass");
        let (mine, theirs) = (ticks(guest.control(0), round), process.pass(round));
        // The first pass is not warm.
        if round > 0 {
            inside.push(mine);
            outside.push(theirs);
        }
    }
    let mut ratios: Vec<f64> = inside.iter().zip(&outside).map(|(a, b)| a / b).collect();
    ratios.sort_by(f64::total_cmp);
    let (guest_pass, process_pass) = (median(inside), median(outside));
    let nanoseconds = |ticks: f64| ticks * 1e9 / guest.tsc_hz as f64 / (RAM / PAGE_SIZE) as f64;
    println!("a warm pass over 256 MiB, 1 vCPU, {ROUNDS} pairs:");
    println!("  guest    {:7.2} ns a page", nanoseconds(guest_pass));
    println!("  process  {:7.2} ns a page", nanoseconds(process_pass));
    let (low, middle, high) = (ratios[ROUNDS / 4], ratios[ROUNDS / 2], ratios[ROUNDS * 3 / 4]);
    println!("  ratio of pairs: median {middle:.3}, quartiles {low:.3} to {high:.3}");
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// The ticks that pass `round` took.
fn ticks(control: &Control, round: usize) -> f64 {
    let end = control.pass_ends[round].load(Ordering::Relaxed);
    (end - control.started.load(Ordering::Relaxed)) as f64
}

/// The workload as a function of this process.
struct Process {
    ram: Arc<Mapping>,
    block: Mapping,
    code: Function,
    tsc_hz: u64,
}

impl Process {
    fn new(ram: Arc<Mapping>, tsc_hz: u64) -> Self {
        let bytes = (size_of::<Control>() as u64).next_multiple_of(PAGE_SIZE);
        let block = Mapping::new(bytes, PAGE_SIZE, Source::Anonymous).expect("a block");
        let code = Function::new(write_code().bytes).expect("executable memory");
        Self { ram, block, code, tsc_hz }
    }

    fn pass(&self, round: usize) -> f64 {
        let control = Control::at(&self.block, 0).expect("the block holds one");
        let config = WriteConfig { passes: round as u64 + 1, ..WriteConfig::default() };
        config.program(control, 0, config.region(0, 1, RAM), self.ram.as_ptr() as u64, self.tsc_hz);
        self.code.call_workload(control, &self.ram);
        ticks(control, round)
    }
}
