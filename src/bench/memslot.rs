//! `memslot`: the cost of mapping, unmapping and moving guest memory, as in memory hotplug and
//! devices.
//!
//! The tests of the KVM selftest memslot_perf_test. Each repeats its rounds for a given time, on a
//! given number of memslots:
//! - *map*: the guest writes to memory that the host has dropped.
//! - *unmap*: the host drops one half, which the guest has touched, while the guest writes to the
//!   other half.
//! - *unmap_chunked*: as *unmap*, in pieces of 2 MiB.
//! - *move_active*: a slot moves back and forth while the guest writes to it. Writes to the missing
//!   slot exit as MMIO and are completed.
//! - *move_inactive*: as *move_active*, while the guest writes to another slot.
//! - *rw*: the guest writes and reads all memory, and nothing moves.
//!
//! An additional test, *create*, creates and deletes a slot as large as all memory, and measures
//! the kernel's memory in between.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::region::{check_memory, populated};
use super::{Common, Counted, Error};
use vellum_guests::Guest;
use vellum_guests::guest::GuestConfig;
use vellum_guests::program::touch_code;
use vellum_guests::touch::{self, Plan};
use vellum_host::topology;
use vellum_kvm::memory::{Backing, MemoryConfig, Slot, short_size};
use vellum_kvm::vm;
use vellum_report::{Label, Premise, Report, Sample};
use vellum_sys::diagnose::Field;
use vellum_sys::mmap::PAGE_SIZE;

/// The parameters.
#[derive(Clone, Debug)]
pub struct Config {
    /// The common parameters.
    pub common: Common,
    /// The tests to run.
    pub tests: Vec<Test>,
    /// The number of memslots.
    pub slots: u32,
    /// The size of memory in bytes.
    pub bytes: u64,
    /// The backing of memory.
    pub backing: Backing,
    /// The duration of each test.
    pub time: Duration,
}

/// A test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Test {
    /// The guest writes to dropped memory.
    Map,
    /// The host drops half of the memory.
    Unmap,
    /// The host drops half of the memory in pieces of 2 MiB.
    UnmapChunked,
    /// A slot moves while the guest writes to it.
    MoveActive,
    /// A slot moves while the guest writes to another.
    MoveInactive,
    /// The guest writes and reads. Nothing moves.
    Rw,
    /// A slot is created and deleted.
    Create,
}

impl Test {
    /// The names on the command line.
    pub const NAMES: [(&str, Self); 7] = [
        ("map", Self::Map),
        ("unmap", Self::Unmap),
        ("unmap_chunked", Self::UnmapChunked),
        ("move_active", Self::MoveActive),
        ("move_inactive", Self::MoveInactive),
        ("rw", Self::Rw),
        ("create", Self::Create),
    ];

    fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, test)| *test == self).map_or("", |(name, _)| name)
    }
}

impl std::fmt::Display for Test {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The size of a piece in *unmap_chunked*.
const CHUNK: u64 = 2 << 20;

/// Runs the benchmark.
pub fn run(config: &Config) -> Result<Report, Error> {
    let unit = 2 * CHUNK;
    let asked = |field, why: String| Err(Error::Asked(field, why));
    let page = config.backing.best_mapping();
    let most = config.bytes / page;
    if config.bytes == 0 || !config.bytes.is_multiple_of(unit) {
        let [bytes, unit, next] =
            [config.bytes, unit, config.bytes.max(1).next_multiple_of(unit)].map(short_size);
        let why =
            format!("{bytes} is not a multiple of {unit} (two halves of 2 MiB pieces); {next} would work");
        return asked(Field::Memory, why);
    }
    if config.slots < 2 && config.tests.contains(&Test::MoveInactive) {
        let why = "1: move_inactive needs one slot to move and one for the guest: 2 or more would work";
        return asked(Field::Slots, why.into());
    }
    if u64::from(config.slots) > most {
        let [bytes, page] = [config.bytes, page].map(short_size);
        let slots = config.slots;
        let why = format!(
            "{slots}: {bytes} have {most} pages of {page}, one for each memslot at most; {most} would work"
        );
        return asked(Field::Slots, why);
    }
    check_memory(config.bytes, config.backing)?;
    let mut report = config.common.report("memslot");
    report.ask("tests", config.tests.iter().map(|t| t.name()).collect::<Vec<_>>());
    report.ask("slots", config.slots);
    report.ask("bytes", config.bytes);
    report.ask("backing", config.backing.to_string());
    report.ask("time_seconds", config.time.as_secs_f64());
    config.common.ask(&mut report);
    config.common.each(&mut report, &config.tests, |report, &test| measure(report, config, test))?;
    if let Some(test) = config.tests.first() {
        report.set_headline(Label::of("rounds_per_second", test));
    }
    report.answer_with_headline("Changing memslots reaches");
    Ok(report)
}

/// The results of one run of a test: many rounds, on the machine of all its runs.
#[derive(Default)]
struct Measured {
    /// The duration of the guest's part of a round in seconds, by its own clock, if it has a part.
    guest: Option<f64>,
    /// The duration of the host's calls in seconds, if it makes any.
    call: Option<f64>,
    /// Rounds per second.
    rounds: f64,
    /// The kernel memory per GiB of a slot, in bytes.
    kernel: Option<f64>,
}

fn measure(report: &mut Report, config: &Config, test: Test) -> Result<(), Error> {
    let kvm = vm::open()?;
    let memory = populated(MemoryConfig {
        backing: config.backing,
        slots: config.slots,
        ..MemoryConfig::new(config.bytes)
    })?;
    // The guest's code has its own slot.
    let most = kvm.get_nr_memslots().saturating_sub(2);
    if test == Test::Create && config.slots as usize > most {
        let why = format!("{}: create needs one more slot, so use at most {most}", config.slots);
        return Err(Error::Asked(Field::Slots, why));
    }
    let guest = Guest::build(&kvm, memory, GuestConfig { code: touch_code(), ..config.common.guest(1) })?;
    let counted = Counted::start(&guest, report);
    let mut runs = Vec::new();
    for _ in 0..config.common.repeat {
        runs.push(once(report, config, test, &guest)?);
    }
    let mut put = |name: &str, unit: &str, of: fn(&Measured) -> Option<f64>| {
        // Runs share a machine, so they show repeatability but are not replicates.
        let sample =
            |(round, run): (u32, &Measured)| Some(Sample { value: of(run)?, round, ..Sample::default() });
        report.samples(Label::of(name, test), unit, (0..).zip(&runs).filter_map(sample).collect());
    };
    put("rounds_per_second", "rounds/s", |run| Some(run.rounds));
    put("guest_time", "s", |run| run.guest);
    put("call_time", "s", |run| run.call);
    put("kernel_memory", "bytes/GiB", |run| run.kernel);
    let now = counted.now();
    counted.finish(report, &now, (config.tests.len() > 1).then_some(test.name()));
    Ok(())
}

/// Repeats rounds for the given time, at least one.
fn once(report: &mut Report, config: &Config, test: Test, guest: &Guest) -> Result<Measured, Error> {
    let (mut rounds, mut sum) = (0u64, Round::default());
    let start = Instant::now();
    while rounds == 0 || start.elapsed() < config.time {
        let round = test.once(guest, config.bytes)?;
        sum.guest += round.guest;
        sum.host += round.host;
        sum.calls += round.calls;
        sum.kernel += round.kernel;
        rounds += 1;
        if round.lost > 0 {
            let (wrong, of) = (round.lost, config.bytes / PAGE_SIZE);
            report.fail(Some(test.to_string()), Premise::WrongContents { wrong, of, example: None });
        }
    }
    let per_gib = (1u64 << 30) as f64 / config.bytes as f64;
    Ok(Measured {
        guest: (sum.guest > 0.0).then(|| sum.guest / rounds as f64),
        call: (sum.calls > 0).then(|| sum.host.as_secs_f64() / sum.calls as f64),
        rounds: rounds as f64 / start.elapsed().as_secs_f64(),
        kernel: (test == Test::Create).then(|| sum.kernel as f64 / rounds as f64 * per_gib),
    })
}

/// The results of one round.
#[derive(Default)]
struct Round {
    guest: f64,
    host: Duration,
    calls: u64,
    lost: u64,
    /// Growth of the kernel's memory in bytes.
    kernel: i64,
}

impl Test {
    fn once(self, guest: &Guest, bytes: u64) -> Result<Round, Error> {
        let half = bytes / 2;
        let mut round = Round::default();
        let all = |write| Plan::every(PAGE_SIZE, bytes, write);
        match self {
            Self::Map => {
                drop_range(guest, 0, bytes)?;
                round.guest = alone(guest, all(true))?;
            }
            Self::Unmap | Self::UnmapChunked => {
                let chunk = if self == Self::Unmap { half } else { CHUNK };
                alone(guest, Plan::every(PAGE_SIZE, half, true))?;
                start(guest, Plan { start: half, ..Plan::every(PAGE_SIZE, half, true) });
                let clock = Instant::now();
                for offset in (0..half).step_by(chunk as usize) {
                    drop_range(guest, offset, chunk)?;
                    round.calls += 1;
                }
                round.host = clock.elapsed();
                round.guest = finish(guest)?;
            }
            Self::MoveActive | Self::MoveInactive => {
                let slots = guest.vm.memory.slots();
                let moved = &slots[slots.len() - 1];
                let touched = if self == Self::MoveActive { moved } else { &slots[0] };
                let away = moved.at(moved.id(), beyond(moved.gpa(), bytes))?;
                let plan = Plan::every(PAGE_SIZE, touched.bytes(), true);
                start(guest, Plan { start: touched.offset(), ..plan });
                let mut done = false;
                while !done {
                    let clock = Instant::now();
                    guest.vm.memslots().set(&away, 0)?;
                    guest.vm.memslots().set(moved, 0)?;
                    round.host += clock.elapsed();
                    round.calls += 2;
                    done = guest.all_rung()?;
                }
                round.guest = finish(guest)?;
                round.lost = lost(touched);
            }
            Self::Rw => round.guest = alone(guest, all(true))? + alone(guest, all(false))?,
            Self::Create => {
                let slots = guest.vm.memory.slots();
                let (id, gpa) = (slots.len() as u32 + 1, beyond(slots[0].gpa(), bytes));
                let made = Slot::new(id, gpa, &guest.vm.memory.mapping, 0..bytes)?;
                let taken = || {
                    let missing =
                        || Error::Lacking("create: /proc/meminfo lacks VmallocUsed or SUnreclaim".into());
                    topology::kernel_memory().map(|bytes| bytes as i64).ok_or_else(missing)
                };
                let before = taken()?;
                let clock = Instant::now();
                guest.vm.memslots().set(&made, 0)?;
                round.host = clock.elapsed();
                round.kernel = taken()? - before;
                let clock = Instant::now();
                guest.vm.memslots().delete(made.id())?;
                round.host += clock.elapsed();
                round.calls = 2;
            }
        }
        Ok(round)
    }
}

/// An address above all RAM with the alignment of `gpa`.
fn beyond(gpa: u64, bytes: u64) -> u64 {
    gpa + (bytes.next_power_of_two() << 1).max(8 << 30)
}

/// The number of pages of `slot` that do not hold the guest's last write.
fn lost(slot: &Slot) -> u64 {
    let words = &slot.mapping().words()[(slot.offset() / 8) as usize..];
    let pages = slot.pages();
    (0..pages).filter(|page| words[*page as usize * 512].load(Ordering::Relaxed) != pages - page).count()
        as u64
}

fn start(guest: &Guest, plan: Plan) {
    plan.program(guest, 0);
    guest.resume();
}

fn finish(guest: &Guest) -> Result<f64, Error> {
    guest.wait_all_rung()?;
    Ok(touch::seconds(guest, 0))
}

fn alone(guest: &Guest, plan: Plan) -> Result<f64, Error> {
    start(guest, plan);
    finish(guest)
}

/// Returns memory to the host, which also removes KVM's mappings.
fn drop_range(guest: &Guest, offset: u64, len: u64) -> Result<(), Error> {
    let memory = &guest.vm.memory;
    let advice = match memory.config.backing {
        Backing::Shmem | Backing::Memfd | Backing::SharedHugetlb(_) => libc::MADV_REMOVE,
        _ => libc::MADV_DONTNEED,
    };
    memory.mapping.advise_range(offset, len, advice).map_err(|e| Error::Host("madvise", e))
}
