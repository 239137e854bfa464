//! The CR3 cache, on a KVM that has it (a host kernel with the series `cr3-cache` of
//! `kernel-patches/`, kvm_intel.ept=0) and on one that does not.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use support::hosts::kvm;
use support::{Failed, Need, Tests, ensure, test};
use vellum_bench::context_switch::{self, Cached, Config, Tables};
use vellum_bench::{self as bench, Common};
use vellum_guests::Guest;
use vellum_guests::guest::GuestConfig;
use vellum_guests::program::Privilege;
use vellum_guests::program::tables_code;
use vellum_guests::tables::{self, Command as Do, LONGEST_PAUSE, MIN_PAUSE, TRIAL, perform};
use vellum_host::cr3_cache::entries;
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::arch::layout;
use vellum_kvm::arch::state::Context;
use vellum_kvm::memory::{Memory, MemoryConfig, Slot};
use vellum_kvm::vm::counters::{self, Snapshot};
use vellum_kvm::vm::cr3_cache::Choice;
use vellum_machine::state::{Error, Processors};
use vellum_report::Report;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::mmap::{Mapping, PAGE_SIZE, Source};

/// The number of page tables that a vCPU switches among, and the number of switches.
const TABLES: u64 = 2;
const SWITCHES: u64 = 1000;

fn main() -> ExitCode {
    vellum_sys::heap::keep_to_one();
    Tests::from_args().run()
}

fn cache() -> Need {
    kvm()?;
    match entries(&vellum_kvm::vm::open().map_err(|error| error.to_string())?) {
        Ok(_) => Ok(()),
        Err(why) => Err(format!("needs a CR3 cache: {why}")),
    }
}

fn no_cache() -> Need {
    kvm()?;
    match cache() {
        Ok(()) => Err("needs a KVM without a CR3 cache, and this one has it".into()),
        Err(_) => Ok(()),
    }
}

fn measure(cr3_cache: Cached, counts: &[u64]) -> Result<Report, bench::Error> {
    let tables = Tables { counts: counts.to_vec() };
    context_switch::run(&Config {
        common: Common::default(),
        tables,
        switches: 20 * SWITCHES,
        reads: 1,
        cr3_cache,
    })
}

#[test(no_cache())]
fn where_there_is_none_it_is_refused_with_the_reason() -> Result<(), Failed> {
    let Err(error) = measure(Cached::On, &[2]) else { return Err("it was measured".into()) };
    ensure(error.origin() == ErrorOrigin::user(Field::Cr3Cache).lacking(), || {
        format!("{:?}", error.origin())
    })?;
    let why = entries(&vellum_kvm::vm::open()?).expect_err("none").to_string();
    ensure(error.to_string() == why, || format!("{error}"))?;
    // The flag is checked before the kernel file.
    for (command, status) in [
        (&["run", "-k", "/proc/self/exe", "--cr3-cache", "on"][..], 2),
        (&["receive", "--listen", "unix:/nowhere/at/all", "--cr3-cache", "on"], 2),
        (&["bench", "context-switch", "2", "--cr3-cache", "both"], 4),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_vellum")).args(command).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure(output.status.code() == Some(status), || format!("{command:?}: {:?} {said}", output.status))?;
        ensure(said.lines().count() == 1 && said.contains("--cr3-cache") && said.contains(&why), || {
            format!("{command:?}: {said}")
        })?;
    }
    ensure(Choice::Auto.decided(&vellum_kvm::vm::open()?)? == Choice::Off, || "auto is not off".into())
}

/// The guarantee of the kernel series, as a guest sees it.
#[test(cache())]
fn the_built_in_guest_switches_without_an_exit() -> Result<(), Failed> {
    let report = measure(Cached::Both, &[2, 4])?;
    let value = |name: &str, tables: u64| -> Result<f64, Failed> {
        let of = |figure: &&vellum_report::Figure| {
            figure.label.name == name && figure.label.index.as_deref() == Some(&*tables.to_string())
        };
        let figure = report.figures.iter().find(of).ok_or_else(|| format!("no {name}[{tables}]"))?;
        figure.values().next().ok_or_else(|| "no sample".into())
    };
    for tables in [2, 4] {
        let (without, with) = (value("exits_per_switch", tables)?, value("cached_exits_per_switch", tables)?);
        // A switch that misses exits, and hits are checked below. Other exits are caused by
        // interrupts of the host. The slower the host is, for example with KASAN or with two CPUs
        // that take turns, the more of them fall into a switch: 0.0004 in the lab, 0.0014 on such a
        // host.
        ensure(without >= 1.0 && with < 0.01, || format!("{tables} tables: {without} and {with} exits"))?;
        let hits = value("cached_hits_per_switch", tables)?;
        ensure(hits > 0.999 && hits <= 1.0, || format!("{tables} tables: {hits} hits"))?;
    }
    Ok(())
}

/// Published entries stay while a guest switches among more tables than there are entries.
#[test(cache())]
fn some_of_too_many_tables_are_switched_to_without_an_exit() -> Result<(), Failed> {
    let machine = Machine::of(5, Choice::On)?;
    tables::program(&machine.guest, 5, 1);
    tables::set_switches(&machine.guest, SWITCHES, 1);
    perform(&machine.guest, Do::Build)?;
    perform(&machine.guest, Do::Touch)?;
    ensure(tables::register(&machine.guest)? == 4, || "it has not 4 entries".into())?;
    // With LRU replacement the next root would always be the replaced one, and none would hit.
    let hits = machine.switch()?;
    ensure(hits > SWITCHES / 4, || format!("{hits} hits of {SWITCHES}"))
}

/// A guest does invalid things in a random order. It may crash itself, but nothing else may happen.
/// VELLUM_CR3_STEPS sets the number of steps, and VELLUM_SEED repeats them. With
/// kvm.cr3_cache_check=1 KVM checks at each entry that all published values are roots.
#[test(cache())]
fn a_guest_that_misbehaves_loses_at_most_itself() -> Result<(), Failed> {
    const BURST: u64 = 1000;
    let number = |name: &str, otherwise: u64| -> Result<u64, Failed> {
        std::env::var(name).ok().map_or(Ok(otherwise), |text| Ok(text.parse()?))
    };
    let seed = number("VELLUM_SEED", u64::from(std::process::id()))?;
    let bursts = number("VELLUM_CR3_STEPS", 20 * BURST)?.div_ceil(BURST);
    println!("VELLUM_SEED={seed} VELLUM_CR3_STEPS={}", bursts * BURST);
    let (mut guest_draws, mut draws) = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, seed);
    let mut draw = |below: u64| {
        draws = draws.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (draws >> 33) % below
    };
    let (mut machine, mut lost, mut hits) = (Machine::misbehaving()?, 0, 0);
    let mut counted = BTreeMap::new();
    for burst in 0..bursts {
        let what = match tables::misbehave(&machine.guest, &mut guest_draws, BURST) {
            Ok(wrong) => {
                ensure(wrong == 0, || {
                    format!("seed {seed}, burst {burst}: {wrong} switches went elsewhere")
                })?;
                hits += tables::hits(&machine.guest);
                // An external event before the guest goes on.
                match draw(8) {
                    0..3 => machine.zap().map(|()| None)?,
                    3 | 4 => machine.save().map(|_| None)?,
                    // Any number, or one that looks like an address and may be that of a root.
                    5 => Some(tables::load(&machine.guest, draw(1 << 31) << draw(22))),
                    _ => None,
                }
            }
            Err(error) => Some(Err(error)),
        };
        if let Some(Err(error)) = what {
            ensure(error.to_string().contains("triple fault"), || {
                format!("seed {seed}, burst {burst}: {error}")
            })?;
            lost += 1;
            // The guest's random state was lost with it.
            guest_draws = draw(1 << 31) << 31 | draw(1 << 31) | 1;
            machine.add_counted(&mut counted)?;
            machine = Machine::misbehaving()?;
        }
    }
    machine.add_counted(&mut counted)?;
    println!("{hits} hits, {lost} machines lost, {counted:?}");
    ensure(hits > bursts && lost <= bursts / 3, || format!("seed {seed}: {hits} hits, {lost} lost"))?;
    for name in
        ["switches", "misses", "restarts", "overwritten", "skipped", "drop_lru", "drop_zap", "drop_flush"]
    {
        let count = counted.get(&format!("cr3_cache_{name}")).copied().unwrap_or_default();
        ensure(count > 0 || bursts < 20, || format!("seed {seed}: no {name}: {counted:?}"))?;
    }
    Ok(())
}

/// A vCPU that switches among its tables, with the page of its cache and the context of its state.
struct Machine {
    guest: Guest,
    context: Context,
}

impl Machine {
    fn new(cr3_cache: Choice) -> Result<Self, Failed> {
        Self::of(TABLES, cr3_cache)
    }

    fn of(count: u64, cr3_cache: Choice) -> Result<Self, Failed> {
        let kvm = vellum_kvm::vm::open()?;
        let memory = Memory::map(layout::RAM, MemoryConfig::new(tables::ram(count)))?;
        let config = GuestConfig {
            code: tables_code(),
            privilege: Privilege::Kernel,
            cr3_cache,
            ..GuestConfig::new(1)
        };
        let guest = Guest::build(&kvm, memory, config)?;
        let mut context = Context::new(&kvm, &guest.vm.fd, false)?;
        context.has_cr3_cache = guest.vm.cr3_cache.is_some();
        Ok(Self { guest, context })
    }

    /// A machine with more tables than entries, each with different content, and one table for KVM
    /// to write to.
    fn misbehaving() -> Result<Self, Failed> {
        const COUNT: u64 = 9;
        let machine = Self::of(COUNT, Choice::On)?;
        tables::program(&machine.guest, COUNT, 1);
        perform(&machine.guest, Do::Build)?;
        tables::number(&machine.guest, COUNT);
        Ok(machine)
    }

    /// Adds and removes a memslot, which makes KVM drop all roots.
    fn zap(&self) -> Result<(), Failed> {
        let (slots, last) = (self.guest.vm.memslots(), self.guest.vm.memory.slots().len() as u32 + 1);
        let mapping = Arc::new(Mapping::new(1 << 21, 1 << 21, Source::Anonymous)?);
        slots.set(&Slot::new(last, 1 << 44, &mapping, 0..PAGE_SIZE)?, 0)?;
        Ok(slots.delete(last)?)
    }

    fn add_counted(&self, sums: &mut BTreeMap<String, u64>) -> Result<(), Failed> {
        for (name, count) in self.counted()? {
            *sums.entry(name).or_default() += count;
        }
        Ok(())
    }

    /// KVM names a machine's counters after the thread that created it. That is this thread, which
    /// may not be the process's first.
    fn counted(&self) -> Result<Snapshot, Failed> {
        let thread = std::fs::read_link("/proc/thread-self")?;
        let thread = thread.file_name().ok_or("/proc/thread-self names none")?.to_string_lossy().into_owned();
        Ok(counters::of_other(&format!("{thread}-{}", self.guest.vm.fd.as_raw_fd()), "cr3_cache_")?)
    }

    /// A machine that is registered, with both tables in its page.
    fn warm() -> Result<Self, Failed> {
        let machine = Self::new(Choice::On)?;
        tables::program(&machine.guest, TABLES, 1);
        tables::set_switches(&machine.guest, SWITCHES, 1);
        perform(&machine.guest, Do::Build)?;
        perform(&machine.guest, Do::Touch)?;
        let entries = tables::register(&machine.guest)?;
        ensure(entries > 1, || format!("the registration gave {entries}"))?;
        let hits = machine.switch()?;
        ensure(hits >= SWITCHES - 10, || format!("{hits} hits"))?;
        ensure(machine.published() > 0, || "its page is empty".into())?;
        Ok(machine)
    }

    fn switch(&self) -> Result<u64, Failed> {
        perform(&self.guest, Do::SwitchCached)?;
        Ok(tables::hits(&self.guest))
    }

    /// The number of entries in its page.
    fn published(&self) -> usize {
        let words = self.guest.vm.memory.mapping.words();
        let page = tables::cache_offset(TABLES) as usize / 8;
        (0..4).filter(|entry| words[page + 2 * entry].load(Ordering::Relaxed) != 0).count()
    }

    fn save(&mut self) -> Result<Processors, Failed> {
        let context = self.context.clone();
        let (vm, quiesced) = self.guest.quiesced()?;
        Ok(Processors::save(&quiesced, &vm.fd, &context, Vec::new())?)
    }

    /// Continues from the state of `source`.
    fn take_over(&mut self, source: &Self, state: &Processors) -> Result<(), Failed> {
        copy(&source.guest.vm.memory.mapping, &self.guest.vm.memory.mapping);
        copy(source.guest.slot.mapping(), self.guest.slot.mapping());
        let context = self.context.clone();
        let (vm, quiesced) = self.guest.quiesced()?;
        let no_devices = || Ok::<_, Error>(());
        state.restore(&quiesced, &vm.fd, &context, ClockPolicy::Stands, None, no_devices)?;
        Ok(state.commit(&quiesced, &context)?)
    }
}

fn copy(from: &Mapping, to: &Mapping) {
    for (from, to) in from.words().iter().zip(to.words()) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// The guest's side without a cache: its page may name its own tables, which any KVM accepts.
#[test(kvm())]
fn the_guest_loads_what_its_page_has_and_its_own_value_where_it_has_none() -> Result<(), Failed> {
    let machine = Machine::new(Choice::Off)?;
    tables::program(&machine.guest, TABLES, 1);
    tables::set_switches(&machine.guest, SWITCHES, 1);
    perform(&machine.guest, Do::Build)?;
    perform(&machine.guest, Do::Touch)?;
    let words = machine.guest.vm.memory.mapping.words();
    for (entry, table, hits) in [(3, 0, SWITCHES / 2), (0, 1, SWITCHES)] {
        let before = machine.switch()?;
        ensure(before < hits, || format!("{before} hits before table {table} is there"))?;
        let at = tables::cache_offset(TABLES) as usize / 8 + 2 * entry;
        let root = layout::RAM_START + tables::cache_offset(table);
        words[at..at + 2].iter().for_each(|word| word.store(root, Ordering::Relaxed));
        let after = machine.switch()?;
        ensure(after == hits, || format!("{after} hits with entry {entry} of table {table}"))?;
    }
    Ok(())
}

/// With an empty page no load hits. With both tables in the page every load hits, with one of them
/// every second.
#[test(kvm())]
fn a_guest_that_hardly_hits_does_without_and_tries_again() -> Result<(), Failed> {
    let machine = Machine::new(Choice::Off)?;
    tables::program(&machine.guest, TABLES, 1);
    perform(&machine.guest, Do::Build)?;
    perform(&machine.guest, Do::Touch)?;
    let looks = |switches: u64| -> Result<u64, Failed> {
        tables::set_switches(&machine.guest, switches, 1);
        machine.switch()?;
        Ok(tables::looked_up(&machine.guest))
    };
    // Each pause is twice as long as the previous one, up to a maximum. The loop ends with the
    // second pause of that length.
    let (mut switches, mut pause, mut trials) = (0, MIN_PAUSE, 0);
    while pause < LONGEST_PAUSE {
        (switches, pause, trials) = (switches + TRIAL + pause, 2 * pause, trials + 1);
    }
    for (more, looked_up) in [
        (0, trials * TRIAL),
        (TRIAL, (trials + 1) * TRIAL),
        (TRIAL + LONGEST_PAUSE, (trials + 1) * TRIAL),
        (TRIAL + LONGEST_PAUSE + 3, (trials + 1) * TRIAL + 3),
        (2 * (TRIAL + LONGEST_PAUSE) + 1, (trials + 2) * TRIAL + 1),
    ] {
        let looked = looks(switches + more)?;
        ensure(looked == looked_up, || {
            format!("{looked} of {} looked up, not {looked_up}", switches + more)
        })?;
    }
    let words = machine.guest.vm.memory.mapping.words();
    for (entry, hits) in [(3, SWITCHES / 2), (1, SWITCHES)] {
        let at = tables::cache_offset(TABLES) as usize / 8 + 2 * entry as usize;
        let root = layout::RAM_START + tables::cache_offset(entry / 2);
        words[at..at + 2].iter().for_each(|word| word.store(root, Ordering::Relaxed));
        let looked = looks(SWITCHES)?;
        let hit = tables::hits(&machine.guest);
        ensure((looked, hit) == (SWITCHES, hits), || format!("{looked} looked up, {hit} hit, not {hits}"))?;
    }
    Ok(())
}

#[test(cache())]
fn what_is_saved_has_no_address_of_this_host_and_a_vcpu_that_moves_stays_registered() -> Result<(), Failed> {
    let mut source = Machine::warm()?;
    let state = source.save()?;
    ensure(source.published() == 0, || "entries in what is saved".into())?;
    let mut target = Machine::new(Choice::On)?;
    target.take_over(&source, &state)?;
    let hits = target.switch()?;
    ensure(hits >= SWITCHES - 10, || format!("{hits} hits after the move"))?;
    // Saving does not end the source. It continues too.
    let hits = source.switch()?;
    ensure(hits >= SWITCHES - 10, || format!("{hits} hits after saving"))?;
    let counted = source.counted()?;
    ensure(counted.get("cr3_cache_drop_saved").is_some_and(|saved| *saved > 0), || format!("{counted:?}"))
}

#[test(cache())]
fn a_vcpu_that_moves_to_a_machine_without_one_loads_its_own_values() -> Result<(), Failed> {
    let mut source = Machine::warm()?;
    let state = source.save()?;
    let mut target = Machine::new(Choice::Off)?;
    target.take_over(&source, &state)?;
    let hits = target.switch()?;
    ensure(hits == 0 && target.published() == 0, || format!("{hits} hits"))?;
    // The registration is dropped, also on the way back, because the guest was not asked for its
    // page meanwhile. It misses, and registers itself after its first pause.
    let state = target.save()?;
    let mut back = Machine::new(Choice::On)?;
    back.take_over(&target, &state)?;
    ensure(back.published() == 0, || "its page has entries after the way back".into())?;
    tables::set_switches(&back.guest, TRIAL + MIN_PAUSE + SWITCHES, 1);
    let hits = back.switch()?;
    ensure((SWITCHES - 10..=SWITCHES).contains(&hits), || {
        format!("{hits} hits after the way back, of {SWITCHES}")
    })?;
    tables::set_switches(&back.guest, SWITCHES, 1);
    ensure(tables::register(&back.guest)? > 1, || "it cannot register anew".into())?;
    let hits = back.switch()?;
    ensure(hits >= SWITCHES - 10, || format!("{hits} hits after it has registered anew"))
}
