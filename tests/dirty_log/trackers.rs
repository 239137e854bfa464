//! The trackers themselves: what each reports of the pages that a guest and the VMM have written.

use std::io::ErrorKind;
use std::sync::Arc;

use support::hosts::kvm;
use support::{Failed, ensure, test};
use vellum_guests::guest::GuestConfig;
use vellum_guests::{Guest, WriteConfig};
use vellum_kvm::dirty::{self, Method};
use vellum_kvm::memory::{Memory, MemoryConfig, Slot};
use vellum_kvm::vm::quiesced::Quiesced;
use vellum_kvm::vm::{self, Vm};
use vm_memory::bitmap::Bitmap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use crate::has;

/// A machine of 4 MiB in three memslots, its log on, and its tracker.
fn machine(method: Method) -> Result<(Guest, Box<dyn dirty::DirtyTracker>), Failed> {
    machine_in_chunks(method, None)
}

/// The same machine. Its log is cleared this many pages at a time.
fn machine_in_chunks(
    method: Method,
    chunk: Option<u64>,
) -> Result<(Guest, Box<dyn dirty::DirtyTracker>), Failed> {
    let kvm = vm::open()?;
    let memory =
        Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig { slots: 3, ..MemoryConfig::new(4 << 20) })?;
    let mut guest = Guest::build(&kvm, memory, GuestConfig::new(1))?;
    let (vm, quiesced) = guest.quiesced()?;
    let mut tracker = dirty::tracker(method, vm, &quiesced, chunk)?;
    guest.vm.memory.slots().iter().try_for_each(|slot| tracker.track(slot.id()))?;
    tracker.enable(true)?;
    Ok((guest, tracker))
}

/// All dirty pages, counted from the start of RAM.
fn pages(tracker: &dyn dirty::DirtyTracker) -> Vec<u64> {
    let of = |log: &dirty::SlotLog| {
        let first = log.slot().offset() / 4096;
        log.runs().flatten().map(move |page| first + page).collect::<Vec<_>>()
    };
    tracker.logs().iter().flat_map(of).collect()
}

#[test(kvm())]
fn what_the_vmm_writes_is_merged() -> Result<(), Failed> {
    let (guest, mut tracker) = machine(Method::Bitmap)?;
    // The last byte of one memslot and the first of the next.
    let seam = guest.vm.memory.slots()[1].gpa();
    guest.vm.memory.guest.write_slice(&[1, 2], GuestAddress(seam - 1))?;
    tracker.collect()?;
    let page = seam / 4096;
    ensure(pages(&*tracker) == [page - 1, page], || format!("{:?}", pages(&*tracker)))?;
    tracker.collect()?;
    ensure(pages(&*tracker).is_empty(), || "told twice".into())
}

#[test(kvm(), has(Method::ManualProtect))]
fn only_what_was_read_is_cleared() -> Result<(), Failed> {
    let (guest, mut tracker) = machine(Method::ManualProtect)?;
    guest.program(&WriteConfig { passes: 1, ..WriteConfig::default() })?;
    guest.resume();
    guest.wait_all_rung()?;
    tracker.get()?;
    let all = pages(&*tracker).len();
    // Half of the words are left in KVM.
    for log in tracker.logs_mut() {
        log.words.iter_mut().step_by(2).for_each(|word| *word = 0);
    }
    let taken = pages(&*tracker);
    tracker.clear()?;
    tracker.collect()?;
    let left = pages(&*tracker);
    ensure(all == 1024 && taken.len() + left.len() == all, || {
        format!("{all}: {} and {}", taken.len(), left.len())
    })?;
    ensure(left.iter().all(|page| !taken.contains(page)), || "a page in both".into())
}

/// A page that is written before its chunk is cleared is named once. A page that is written
/// afterwards is named again. Pages of other chunks are not lost.
#[test(kvm(), has(Method::InitiallySet))]
fn a_log_is_cleared_chunk_by_chunk() -> Result<(), Failed> {
    for method in [Method::ManualProtect, Method::InitiallySet] {
        let (guest, mut tracker) = machine_in_chunks(method, Some(64))?;
        guest.program(&WriteConfig { passes: 0, lockstep: true, ..WriteConfig::default() })?;
        let write_all = || {
            guest.resume();
            guest.wait_all_rung()
        };
        write_all()?;
        tracker.collect_deferred()?;
        let named = pages(&*tracker).len();
        ensure(named == 1024, || format!("{}: {named} pages were named", method.name()))?;
        // Pages of the first two chunks, the last chunk of a memslot, which is not full, and a
        // memslot that is not tracked.
        let last = tracker.logs()[1].pages();
        ensure(tracker.clear_chunks(0, 3..7)? == (0..64), || "one chunk was to be cleared".into())?;
        ensure(tracker.clear_chunks(1, last - 1..last)?.end == last, || "the last chunk has an end".into())?;
        tracker.clear_chunks(9, 0..64)?;
        let left = pages(&*tracker).len() as u64;
        let part = last - (last - 1) / 64 * 64;
        ensure(left == 1024 - 64 - part, || format!("{left} pages are left to be cleared"))?;
        write_all()?;
        // Pages of two chunks. The first one is clear already and is not cleared again.
        ensure(tracker.clear_chunks(0, 60..70)? == (0..128), || "two chunks hold these pages".into())?;
        tracker.collect_deferred()?;
        let again = pages(&*tracker);
        let cleared_late = |page: &u64| (64..128).contains(page);
        ensure(again.len() == 1024 - 64 && !again.iter().any(cleared_late), || {
            format!("{}: {} pages were named again: {again:?}", method.name(), again.len())
        })?;
    }
    Ok(())
}

/// KVM writes whole words, as many as the slot's size requires. Shorter bitmaps are refused before
/// KVM is asked.
#[test(kvm())]
fn a_bitmap_is_as_long_as_what_kvm_writes() -> Result<(), Failed> {
    const UNTOUCHED: u64 = 0x5a5a_5a5a_5a5a_5a5a;
    let memory = Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(4 << 20))?;
    let vm = Vm::new(&vm::open()?, memory)?;
    for pages in [1, 63, 64, 65, 130, 1000] {
        let slot = Slot::new(9, 1 << 32, &vm.memory.mapping, 0..pages * 4096)?;
        vm.memslots().set(&slot, kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES)?;
        let mut words = vec![UNTOUCHED; slot.bitmap_words() + 8];
        vm.memslots().dirty_log(9, |_| &mut words)?;
        let written = words.iter().take_while(|word| **word != UNTOUCHED).count();
        let rest = words[written..].iter().all(|word| *word == UNTOUCHED);
        ensure(written == slot.bitmap_words() && rest, || format!("{pages} pages: {words:x?}"))?;
        let few = vm.memslots().dirty_log(9, |_| &mut words[..written - 1]);
        ensure(few.is_err_and(|error| error.kind() == ErrorKind::InvalidInput), || {
            format!("{pages} pages: {} words were taken", written - 1)
        })?;
        vm.memslots().delete(9)?;
    }
    let mut none = [0; 64];
    let gone = vm.memslots().dirty_log(9, |_| &mut none);
    ensure(gone.is_err(), || "the log of a slot that is deleted".into())
}

#[test(kvm())]
fn a_slot_made_anew_and_larger_is_followed() -> Result<(), Failed> {
    let (guest, mut tracker) = machine(Method::Bitmap)?;
    let (memory, slots) = (&guest.vm.memory, guest.vm.memslots());
    let small = Slot::new(9, 1 << 32, &memory.mapping, 0..64 * 4096)?;
    slots.set(&small, 0)?;
    tracker.track(9)?;
    tracker.enable(true)?;
    tracker.collect()?;
    slots.delete(9)?;
    ensure(tracker.collect().is_err(), || "a collection of a slot that is deleted".into())?;
    // So large that its bitmap would exceed the small one's buffer by far.
    slots.set(&Slot::new(9, 1 << 32, &memory.mapping, 0..4 << 20)?, kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES)?;
    tracker.collect()?;
    let log = tracker.logs().last().ok_or("no log")?;
    ensure((log.pages(), log.words.len()) == (1024, 16), || format!("{} pages", log.pages()))?;
    tracker.logs_mut().iter_mut().for_each(|log| log.words.truncate(1));
    ensure(tracker.get().is_err(), || "a bitmap of one word for 1024 pages".into())
}

#[test(kvm())]
fn a_vcpu_keeps_the_memory_that_it_runs_on() -> Result<(), Failed> {
    let memory = Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(4 << 20))?;
    let mapping = Arc::downgrade(&memory.mapping);
    let vm = Vm::new(&vm::open()?, memory)?;
    let processor = vm.create_vcpu(0)?;
    drop(vm);
    ensure(mapping.strong_count() > 0, || "memory was unmapped under a vCPU".into())?;
    drop(processor);
    ensure(mapping.strong_count() == 0, || "memory is still mapped, and nobody has it".into())
}

#[test(kvm())]
fn a_tracker_wants_a_machine_that_stands_still() -> Result<(), Failed> {
    let memory = Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(4 << 20))?;
    let mut guest = Guest::build(&vm::open()?, memory, GuestConfig::new(2))?;
    guest.program(&WriteConfig { passes: 0, ..WriteConfig::default() })?;
    guest.resume();
    ensure(guest.quiesced().is_err(), || "it runs".into())?;
    guest.pause()?;
    let (vm, quiesced) = guest.quiesced()?;
    let region = || vm.memory.guest.find_region(GuestAddress(8192)).map(|region| region.bitmap());
    let marked = || region().is_some_and(|slice| slice.dirty_at(8192));
    let write = || vm.memory.guest.write_obj(1u8, GuestAddress(8192));
    write()?;
    ensure(!marked(), || "nobody tracks, and a write is logged".into())?;
    let tracker = dirty::tracker(Method::Bitmap, vm, &quiesced, None)?;
    let second = dirty::tracker(Method::Bitmap, vm, &quiesced, None).err().map(|error| error.to_string());
    ensure(second.as_ref().is_some_and(|why| why.contains("another dirty tracker")), || {
        format!("{second:?}")
    })?;
    write()?;
    ensure(marked(), || "a write after the tracker was made is not logged".into())?;
    drop(tracker);
    // A new tracker does not see what the previous one has left.
    let mut tracker = dirty::tracker(Method::Bitmap, vm, &quiesced, None)?;
    tracker.track(0)?;
    tracker.enable(true)?;
    tracker.collect()?;
    ensure(pages(&*tracker).is_empty(), || format!("{:?}", pages(&*tracker)))
}

#[test(kvm(), has(Method::Ring))]
fn a_ring_excludes_initially_set() -> Result<(), Failed> {
    let kvm = vm::open()?;
    let machine = Vm::with_dirty_ring(
        &kvm,
        Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(4 << 20))?,
        Some(4096),
    )?;
    let quiesced = Quiesced::new(&mut [], || ())?;
    let refused =
        dirty::tracker(Method::InitiallySet, &machine, &quiesced, None).err().map(|error| error.to_string());
    ensure(refused.as_ref().is_some_and(|why| why.contains("lost silently")), || format!("{refused:?}"))?;
    let late = Vm::new(&kvm, Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(4 << 20))?)?;
    ensure(dirty::tracker(Method::Ring, &late, &quiesced, None).is_err(), || {
        "a ring for a machine without one".into()
    })
}

#[test(kvm(), has(Method::Ring))]
fn rings_of_impossible_sizes_are_refused() -> Result<(), Failed> {
    let kvm = vm::open()?;
    for entries in [0, 1, 512, 3000, 1 << 30] {
        let refused = Vm::with_dirty_ring(
            &kvm,
            Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(4 << 20))?,
            Some(entries),
        );
        let why = refused.err().map(|error| error.to_string()).unwrap_or_default();
        ensure(why.contains("would work here"), || format!("{entries}: {why}"))?;
    }
    Ok(())
}
