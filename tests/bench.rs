//! What benchmarks stand on, on real KVM.

mod bed;

use bed::{ensure, kvm, trial};
use libtest_mimic::{Arguments, Failed};
use vellum::vm::counters::Counters;
use vellum::vm::memory::{Memory, MemoryConfig};
use vellum::workload::guest::GuestConfig;
use vellum::workload::{Guest, WriteConfig};

fn main() {
    let args = Arguments::from_args();
    let trials = vec![trial("counters_tell_what_kvm_mapped", kvm(), counters)];
    libtest_mimic::run(&args, trials).exit();
}

fn counters() -> Result<(), Failed> {
    let pages = 2048;
    let kvm = vellum::vm::open()?;
    let guest = Guest::build(&kvm, Memory::map(MemoryConfig::new(pages << 12))?, GuestConfig::new(2))?;
    let counters = Counters::open(&guest.vm.fd, &guest.vcpus)?;
    let before = counters.read()?;
    guest.program(&WriteConfig { passes: 1, ..WriteConfig::default() })?;
    guest.resume();
    guest.wait_all_rung()?;
    let after = counters.read()?;
    let grown = |name: &str| after[name] - before[name];
    ensure(grown("pages_4k") >= pages, || format!("{} of {pages} pages mapped", grown("pages_4k")))?;
    ensure(grown("exits") >= 2, || format!("{} exits of 2 vCPUs that rang", grown("exits")))
}
