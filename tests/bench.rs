//! What benchmarks stand on, on real KVM.

mod bed;

use bed::{ensure, kvm, trial};
use std::sync::atomic::Ordering;

use libtest_mimic::{Arguments, Failed};
use vellum::arch::tables::code;
use vellum::arch::workload::Privilege;
use vellum::vm::counters::Counters;
use vellum::vm::memory::{Memory, MemoryConfig};
use vellum::workload::guest::GuestConfig;
use vellum::workload::tables::{self, Command, perform};
use vellum::workload::{Guest, WriteConfig};

fn main() {
    let args = Arguments::from_args();
    let trials = vec![
        trial("counters_tell_what_kvm_mapped", kvm(), counters),
        trial("tables_lead_to_the_same_frames_and_are_cleared", kvm(), tables),
    ];
    libtest_mimic::run(&args, trials).exit();
}

/// What the guest does to its tables, seen in its memory; functional wherever KVM runs code at CPL 0 at all.
fn tables() -> Result<(), Failed> {
    let (count, pages) = (3u64, 5u64);
    let kvm = vellum::vm::open()?;
    let memory = Memory::map(MemoryConfig::new(tables::ram(count)))?;
    let config = GuestConfig { code: code(), privilege: Privilege::Kernel, ..GuestConfig::new(1) };
    let guest = Guest::build(&kvm, memory, config)?;
    tables::program(&guest, count, pages);
    let words = guest.vm.memory.mapping.words();
    let word = |gpa: u64| words[gpa as usize / 8].load(Ordering::Relaxed);
    let last_level = |table: u64| tables::MOST_PAGES * 4096 + table * tables::TABLE_BYTES + 3 * 4096;
    for _ in 0..2 {
        perform(&guest, Command::Build)?;
        let entry = word(last_level(2) + 8 * (pages - 1));
        ensure(entry & !0xfff == (pages - 1) * 4096 && entry & 1 == 1, || format!("entry {entry:#x}"))?;
        ensure(word(last_level(2) + 8 * pages) == 0, || "an entry too many".into())?;
        words.iter().take(pages as usize * 512).for_each(|w| w.store(77, Ordering::Relaxed));
        perform(&guest, Command::Touch)?;
        for page in 0..pages {
            ensure(word(page * 4096) == 1, || format!("frame {page} holds {}", word(page * 4096)))?;
        }
        tables::set_switches(&guest, 7, pages);
        perform(&guest, Command::Switch)?;
        perform(&guest, Command::Loop)?;
        perform(&guest, Command::Clear)?;
        ensure((0..count).all(|table| word(last_level(table)) == 0), || "not cleared".into())?;
        ensure(word(last_level(1) - 4096) != 0, || "cleared too much".into())?;
        perform(&guest, Command::Free)?;
        ensure((0..count).all(|table| word(last_level(table) - 4096) == 0), || "not freed".into())?;
    }
    Ok(())
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
