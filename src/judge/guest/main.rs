//! The image: a program that runs in place of a kernel. build.rs compiles it for each architecture.
//!
//! [`judge_main`] runs on every processor: on x86-64 in ring 3, on 64-bit Arm at EL1. The first
//! processor reads the data of the boot protocol, starts the others and divides memory. Then all run
//! the loop of the architecture's `run.s`, which calls the `judge_*` functions below when something
//! is wrong or due.

#![no_std]
#![no_main]

#[cfg_attr(target_arch = "x86_64", path = "x86_64/mod.rs")]
#[cfg_attr(target_arch = "aarch64", path = "aarch64/mod.rs")]
mod arch;
mod console;
mod disk;
#[path = "../dtb/mod.rs"]
#[allow(dead_code)] // x86-64 has no device tree.
mod dtb;
mod find;
mod options;
mod report;
#[path = "../schedule.rs"]
#[allow(dead_code)] // The reader uses the rest.
mod schedule;
#[path = "../sectors.rs"]
#[allow(dead_code)] // As above.
mod sectors;
mod virtio;
#[path = "../words.rs"]
mod words;

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use console::{Item, last_line, line};
use options::Options;
use report::Checked;
use schedule::{Division, MAX_FOUND, MAX_SEGMENTS, MAX_VCPUS, PAGE, Range, Schedule, Segment, Unfit};

/// A value that one processor writes before the others read it.
pub(crate) struct Shared<T>(UnsafeCell<T>);

// SAFETY: `release` and `GO` order the accesses.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    pub(crate) fn get(&self) -> *mut T {
        self.0.get()
    }
}

/// The parameters of a processor, in the layout that the loop reads.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Cpu {
    pub(crate) number: u64,
    vcpus: u64,
    passes: u64,
    seed: u64,
    own: u64,
    own_count: u64,
    other: u64,
    other_count: u64,
    flags: u64,
    cold: u64,
    hot: u64,
    hot_set: u64,
    interval: u64,
    neighbour: u64,
    active: u64,
    regions: u64,
    region_count: u64,
    stack: u64,
    clock: u64,
    odd1: u64,
    odd2: u64,
    result: u64,
}

/// The result of a processor. The loop writes the first two.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Outcome {
    pub(crate) position: u64,
    pub(crate) checksum: u64,
    pub(crate) interrupts: u64,
}

/// The parameters of all processors. They are in the section whose checksum the loop compares, like
/// all else that is constant while the loop runs. What changes is in the section `.bss.live`, which
/// is one page: the loop compares the positions that are there, too.
#[repr(C, align(16))]
struct Sealed {
    cpus: [Cpu; MAX_VCPUS],
    segments: [[Segment; MAX_SEGMENTS]; MAX_VCPUS],
    regions: [[u64; 2]; 8],
    schedule: Schedule,
    clock: Option<u64>,
    passes: u64,
    report: u64,
    /// Ticks of the TSC in a second.
    ticks: u64,
    /// Ticks that an interrupt or an answer may be late.
    late: u64,
    /// Requests of a disk in a pass.
    requests: u64,
    checked: Checked,
}

const NO_CPU: Cpu = Cpu {
    number: 0,
    vcpus: 0,
    passes: 0,
    seed: 0,
    own: 0,
    own_count: 0,
    other: 0,
    other_count: 0,
    flags: 0,
    cold: 0,
    hot: 0,
    hot_set: 0,
    interval: 0,
    neighbour: 0,
    active: 0,
    regions: 0,
    region_count: 0,
    stack: 0,
    clock: 0,
    odd1: 0,
    odd2: 0,
    result: 0,
};
const NO_SCHEDULE: Schedule = Schedule { seed: 0, vcpus: 0, shuffled: false, hot_set: 0, hot: 0, cold: 0 };
const NO_SEGMENT: Segment = Segment { base: 0, count: 0, stride: 0, mask: 0, shift: 0, shared: 0 };

#[unsafe(link_section = ".bss.sealed")]
static SEALED: Shared<Sealed> = Shared::new(Sealed {
    cpus: [NO_CPU; MAX_VCPUS],
    segments: [[NO_SEGMENT; MAX_SEGMENTS]; MAX_VCPUS],
    regions: [[0; 2]; 8],
    schedule: NO_SCHEDULE,
    clock: None,
    passes: 0,
    report: 0,
    ticks: 0,
    late: 0,
    requests: 0,
    checked: Checked::NONE,
});
/// The time at which the first processor reports progress again.
#[unsafe(link_section = ".bss.live")]
static NEXT_REPORT: AtomicU64 = AtomicU64::new(0);

/// The number of other processors that have started.
#[unsafe(link_section = ".bss.live")]
static STARTED: AtomicU32 = AtomicU32::new(0);
/// Set when the parameters are complete.
#[unsafe(link_section = ".bss.live")]
static GO: AtomicU32 = AtomicU32::new(0);
/// The number of processors whose clocks run.
#[unsafe(link_section = ".bss.live")]
static READY: AtomicU64 = AtomicU64::new(0);
/// The number of processors that have finished.
#[unsafe(link_section = ".bss.live")]
static DONE: AtomicU64 = AtomicU64::new(0);
/// Set when a processor prints the end.
#[unsafe(link_section = ".bss.live")]
static ENDS: AtomicU32 = AtomicU32::new(0);
#[unsafe(link_section = ".bss.live")]
static OUTCOMES: Shared<[Outcome; MAX_VCPUS]> =
    Shared::new([Outcome { position: 0, checksum: 0, interrupts: 0 }; MAX_VCPUS]);
/// The position of each processor when it last looked at its clocks, and how long it has been there.
#[unsafe(link_section = ".bss.live")]
static STUCK: Shared<[(u64, Patience); MAX_VCPUS]> = Shared::new([(0, Patience::NONE); MAX_VCPUS]);

const FLAG_FSGSBASE: u64 = 1;
const FLAG_SPARSE: u64 = 2;
const FLAG_EACH: u64 = 4;
const FLAG_RATE: u64 = 8;
const FLAG_DISK: u64 = 16;

/// Ticks of the TSC in a second.
pub(crate) fn ticks() -> u64 {
    // SAFETY: written before anything waits.
    unsafe { (*SEALED.get()).ticks }
}

/// Measures how long a processor has polled for something that is late. A step of the clock counts
/// for at most 10 ms, so pauses of the machine and jumps of its clock do not count as waiting.
#[derive(Clone, Copy)]
pub(crate) struct Patience {
    last: u64,
    spent: u64,
}

impl Patience {
    pub(crate) const NONE: Self = Self { last: 0, spent: 0 };

    /// Whether it has been polled for long enough.
    pub(crate) fn is_over(&mut self) -> bool {
        let now = arch::now();
        // SAFETY: as in `ticks`.
        let (ticks, late) = unsafe { ((*SEALED.get()).ticks, (*SEALED.get()).late) };
        let step = if self.last == 0 { 0 } else { now.saturating_sub(self.last) };
        (self.last, self.spent) = (now, self.spent + step.min(ticks / 100));
        self.spent > late
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    last_line(&[Item::Text(words::REFUSED), Item::Text("the image panicked")]);
    arch::power_off()
}

/// Powers off with the reason why nothing was judged.
pub(crate) fn refuse(reason: &str) -> ! {
    line(&[Item::Text(words::REFUSED), Item::Text(reason)]);
    arch::power_off()
}

#[unsafe(no_mangle)]
extern "C" fn judge_main(number: u64) -> ! {
    if number == 0 {
        prepare();
    } else {
        STARTED.fetch_add(1, Ordering::SeqCst);
    }
    while GO.load(Ordering::SeqCst) == 0 {
        core::hint::spin_loop();
    }
    // SAFETY: complete since GO. A processor that started too late is not counted.
    if number >= unsafe { (*SEALED.get()).schedule.vcpus } {
        arch::halt();
    }
    arch::start_clocks(number);
    // SAFETY: complete since GO.
    let sealed = unsafe { &*SEALED.get() };
    // `start_clocks` fills in the last parameters.
    READY.fetch_add(1, Ordering::SeqCst);
    while READY.load(Ordering::SeqCst) < sealed.schedule.vcpus {
        core::hint::spin_loop();
    }
    // SAFETY: its parameters are complete, and its outcome is its own.
    unsafe { arch::judge_run(&sealed.cpus[number as usize & 7]) };
    if number == 0 && disk::any() {
        disk::finish(1 + (sealed.passes + 1) * sealed.requests);
    }
    if sealed.checked.timer {
        finish_timer(number);
    }
    // SAFETY: as above.
    unsafe { (*OUTCOMES.get())[number as usize & 7].interrupts = arch::interrupts(number) };
    DONE.fetch_add(1, Ordering::SeqCst);
    if number != 0 {
        arch::halt();
    }
    let mut patience = Patience::NONE;
    while DONE.load(Ordering::SeqCst) < sealed.schedule.vcpus {
        // A processor that has lost its position may never finish.
        if report::total() != 0 && patience.is_over() {
            break;
        }
        core::hint::spin_loop();
    }
    end()
}

/// Waits for the timer's outstanding interrupt, and for another one.
fn finish_timer(cpu: u64) {
    for _ in 0..2 {
        let before = arch::outstanding(cpu);
        let mut patience = Patience::NONE;
        while arch::interrupts(cpu) == before {
            if patience.is_over() {
                return report::fault(report::Kind::Timer, cpu, arch::fired_address(cpu), before + 1, before);
            }
            core::hint::spin_loop();
        }
        arch::shoot(cpu);
    }
}

/// Prints the end and powers off. The first processor that gets here does.
fn end() -> ! {
    if ENDS.swap(1, Ordering::SeqCst) != 0 {
        arch::halt();
    }
    // SAFETY: complete since GO. The outcomes are complete, or the verdict does not depend on them.
    let (sealed, outcomes) = unsafe { (&*SEALED.get(), &*OUTCOMES.get()) };
    report::end(sealed.checked, outcomes.iter().take(sealed.schedule.vcpus as usize));
    arch::power_off()
}

/// The preparations of the first processor before the loop.
fn prepare() {
    arch::start();
    console::open();
    let boot = arch::boot();
    console::find(boot.command_line());
    line(&[Item::Text("KTAP version 1")]);
    // Comes before any refusal, because it finds out how to power off.
    let started = arch::start_processors(&STARTED);
    let options = Options::read(boot.command_line());
    let ticks = arch::ticks_per_second();
    let (kvmclock, timer) = arch::find_clocks(ticks);
    let vcpus = started.running.min(MAX_VCPUS as u64);
    let mut schedule =
        Schedule { seed: schedule::mix(options.seed), vcpus, shuffled: options.shuffled, ..NO_SCHEDULE };
    schedule.thresholds(options.write, options.hot);
    line(&[
        Item::Text(words::START),
        Item::Text(arch::NAME),
        Item::Name(" seed="),
        Item::Number(options.seed),
        Item::Name(" passes="),
        Item::Number(options.passes),
        Item::Name(" order="),
        Item::Text(if options.shuffled { "shuffled" } else { "sequential" }),
        Item::Name(" write="),
        Item::Number(options.write),
        Item::Name(" hot="),
        Item::Number(options.hot.unwrap_or_default().0),
        Item::Name(":"),
        Item::Number(options.hot.unwrap_or_default().1),
        Item::Name(" verify="),
        Item::Text(if options.each { "each" } else { "end" }),
        Item::Name(" vcpus="),
        Item::Number(vcpus),
        Item::Name(" given="),
        Item::Number(started.given),
        Item::Name(" ticks="),
        Item::Number(ticks),
        Item::Name(" kvmclock="),
        Item::Text(if kvmclock { "yes" } else { "no" }),
        Item::Name(" timer="),
        Item::Text(if timer { "yes" } else { "no" }),
        Item::Name(" clock="),
        Item::Number(options.clock.unwrap_or(0)),
        Item::Name(" boot="),
        Item::Text(boot.protocol()),
    ]);
    for (start, end, why) in boot.left_out() {
        line(&[
            Item::Text(words::LEFT_OUT),
            Item::Address(start),
            Item::Name(" "),
            Item::Address(end),
            Item::Name(" "),
            Item::Text(why),
        ]);
    }
    let mut ranges = [Range { start: 0, end: 0 }; MAX_FOUND];
    let found = boot.ranges(&mut ranges);
    let kept = schedule::keep_largest(&mut ranges, found, |range| {
        line(&[
            Item::Text(words::LEFT_OUT),
            Item::Address(range.start),
            Item::Name(" "),
            Item::Address(range.end),
            Item::Name(" one of too many ranges of RAM"),
        ]);
    });
    let ranges = ranges.get(..kept).unwrap_or_default();
    for range in ranges {
        line(&[
            Item::Text(words::RAM),
            Item::Address(range.start),
            Item::Name(" "),
            Item::Address(range.end),
        ]);
    }
    let division = match schedule.divide(ranges) {
        Ok(division) => division,
        Err(Unfit::TooLittle) => refuse("too little memory: 80 pages for each processor are needed"),
        Err(Unfit::TooMuch) => refuse("too much memory: 255 GiB for each processor are judged"),
    };
    find::disks(schedule.seed);
    let checked = Checked { clock: options.clock.is_some(), kvmclock, timer, disk: disk::any() };
    fill_in(&options, schedule, &division, ticks, checked);
    GO.store(1, Ordering::SeqCst);
}

fn fill_in(options: &Options, schedule: Schedule, division: &Division, ticks: u64, checked: Checked) {
    // SAFETY: the others wait for GO.
    let sealed = unsafe { &mut *SEALED.get() };
    sealed.segments = division.segments;
    sealed.schedule = schedule;
    sealed.checked = checked;
    sealed.passes = options.passes;
    sealed.clock = options.clock;
    sealed.report = options.report * ticks / 1000;
    sealed.ticks = ticks;
    sealed.late = options.late * (ticks / 1000);
    let own = &division.segments[0][..division.counts[0]];
    sealed.requests = sectors::each_pass(own.iter().map(|segment| segment.count).sum());
    NEXT_REPORT.store(arch::now() + sealed.report, Ordering::Relaxed);
    let regions = arch::constant_regions();
    sealed.regions[..regions.len()].copy_from_slice(&regions);
    let passes = if options.passes == 0 { options::MAX_PASSES } else { options.passes };
    for vcpu in 0..schedule.vcpus as usize {
        let other = (vcpu + 1) % schedule.vcpus as usize;
        let flag = |on: bool, flag: u64| if on { flag } else { 0 };
        sealed.cpus[vcpu & 7] = Cpu {
            number: vcpu as u64,
            vcpus: schedule.vcpus,
            passes,
            seed: schedule.seed,
            own: sealed.segments[vcpu & 7].as_ptr() as u64,
            own_count: division.counts[vcpu & 7] as u64,
            other: sealed.segments[other & 7].as_ptr() as u64,
            other_count: division.counts[other & 7] as u64,
            flags: flag(arch::has_fsgsbase(), FLAG_FSGSBASE)
                | flag(schedule.is_sparse(), FLAG_SPARSE)
                | flag(options.each, FLAG_EACH)
                | flag(options.rate != 0, FLAG_RATE)
                | flag(vcpu == 0 && disk::any(), FLAG_DISK),
            cold: schedule.cold,
            hot: schedule.hot,
            hot_set: schedule.hot_set,
            interval: if options.rate == 0 { 0 } else { 64 * ticks / options.rate },
            neighbour: other as u64,
            active: (1 << schedule.vcpus) - 1,
            regions: sealed.regions.as_ptr() as u64,
            region_count: regions.len() as u64,
            stack: arch::stack_top(vcpu as u64),
            // A difference in the upper half of all numbers is a step back.
            clock: options.clock.map_or(u64::MAX / 2, |limit| limit * (ticks / 1000)),
            odd1: schedule::ODD[0],
            odd2: schedule::ODD[1],
            result: OUTCOMES.get() as u64 + (size_of::<Outcome>() * vcpu) as u64,
        };
    }
}

/// The functions that the loop calls.
mod called {
    use super::*;
    use report::{Kind, fault};

    fn sealed() -> &'static Sealed {
        // SAFETY: nothing changes it while the loop runs.
        unsafe { &*SEALED.get() }
    }

    /// The page at `address` was not written last in pass `expected`. `found` was its second word.
    #[unsafe(no_mangle)]
    extern "C" fn judge_page_wrong(cpu: &Cpu, address: u64, expected: u64, found: u64) {
        let schedule = &sealed().schedule;
        // SAFETY: a page under test.
        let word = |offset: u64| unsafe { core::ptr::read_volatile((address + offset) as *const u64) };
        let (first, last) = (word(0), word(PAGE - 8));
        let kind = if first == address && found == expected {
            Kind::Torn
        } else if first | found | last == 0 {
            Kind::Zeroes
        } else if last != schedule.tail(first, found) {
            if first == address { Kind::Torn } else { Kind::Foreign }
        } else if first != address {
            Kind::OtherAddress
        } else if found < expected {
            Kind::LostWrite
        } else {
            Kind::Future
        };
        match kind {
            Kind::OtherAddress => fault(kind, cpu.number, address, address, first),
            Kind::Torn | Kind::Foreign => {
                fault(kind, cpu.number, address + PAGE - 8, schedule.tail(address, expected), last);
            }
            _ => fault(kind, cpu.number, address, expected, found),
        }
    }

    /// The copies of a position differ. The upper half of `more` has the bits of the checksum that
    /// the GS base has, and its lower half the position in memory.
    #[unsafe(no_mangle)]
    extern "C" fn judge_copies_differ(cpu: &Cpu, expected: u64, xmm: u64, fs: u64, gs: u64, more: u64) {
        let low = (1 << 46) - 1;
        let [gpr, vector, base, memory] = [expected & low, xmm & low, fs, more & 0xffff_ffff];
        if vector != gpr {
            // If two of three copies agree, the third is wrong. If all differ, the vector register
            // is reported.
            let kind = if base == vector { Kind::GeneralRegisters } else { Kind::VectorRegisters };
            let [right, wrong] = if base == vector { [vector, gpr] } else { [gpr, vector] };
            fault(kind, cpu.number, 0, right, wrong);
        } else if base != gpr {
            fault(Kind::Msrs, cpu.number, 0, gpr, base);
        } else if memory != (expected >> 6) & 0xffff_ffff {
            fault(
                Kind::Position,
                cpu.number,
                arch::published_address(cpu.number),
                (expected >> 6) & 0xffff_ffff,
                memory,
            );
        } else {
            fault(Kind::Msrs, cpu.number, 0, expected >> 46 << 30 | more >> 32, gs);
        }
    }

    /// The positions of the processors in the lower half of `wrong` went back from where they were
    /// seen. Those in its upper half have reached `limit`.
    #[unsafe(no_mangle)]
    extern "C" fn judge_position_wrong(
        cpu: &Cpu,
        wrong: u64,
        seen0: u64,
        seen2: u64,
        seen4: u64,
        seen6: u64,
        limit: u64,
    ) {
        let (back, ahead) = (wrong as u32, (wrong >> 32) as u32);
        let other = u64::from((back | ahead).trailing_zeros()) & 7;
        let pair = match other / 2 {
            0 => seen0,
            1 => seen2,
            2 => seen4,
            _ => seen6,
        };
        let seen = if other % 2 == 0 { pair & 0xffff_ffff } else { pair >> 32 };
        let expected = if back >> other & 1 == 1 { seen } else { limit };
        let address = arch::published_address(other);
        // SAFETY: the address is in the image's own memory.
        let found = unsafe { core::ptr::read_volatile(address as *const u32) };
        fault(Kind::Position, cpu.number, address, expected, found.into());
    }

    /// The checksum of code, tables and stack has changed.
    #[unsafe(no_mangle)]
    extern "C" fn judge_image_changed(cpu: &Cpu, expected: u64, found: u64) {
        fault(Kind::Image, cpu.number, arch::image_start_address(), expected, found);
    }

    /// The TSC went back, or forward by more than `clock=` allows.
    #[unsafe(no_mangle)]
    extern "C" fn judge_time_jumped(cpu: &Cpu, before: u64, now: u64) {
        fault(if now < before { Kind::ClockBack } else { Kind::ClockJump }, cpu.number, 0, before, now);
        arch::set_next_look(cpu.number, now);
        NEXT_REPORT.fetch_min(now, Ordering::Relaxed);
    }

    /// Checks the processor's clocks and reports progress if it is time. Returns whether something
    /// is wrong.
    #[unsafe(no_mangle)]
    extern "C" fn judge_look(cpu: &Cpu, position: u64, now: u64) -> u64 {
        let sealed = sealed();
        arch::set_next_look(cpu.number, now + sealed.ticks / 1000);
        let limit = sealed.clock.map_or(u64::MAX, |limit| limit * 1_000_000);
        let wrong = arch::look_at_clocks(cpu.number, limit);
        // A processor that waits for a position that was lost would wait for ever.
        // SAFETY: each processor has its own.
        let (before, patience) = unsafe { &mut (*STUCK.get())[cpu.number as usize & 7] };
        if *before != position {
            (*before, *patience) = (position, Patience::NONE);
        } else if (report::total() != 0 || position >> schedule::POISON & 1 == 1) && patience.is_over() {
            end();
        }
        if cpu.number == 0 && now >= NEXT_REPORT.load(Ordering::Relaxed) {
            report::progress(position, sealed.passes);
            // Counted from the end of the line. Otherwise, on a slow console, the image would only
            // print.
            NEXT_REPORT.store(arch::now() + sealed.report.max(1), Ordering::Relaxed);
        }
        wrong.into()
    }

    /// Makes the next request of the disks. Returns whether something is wrong.
    #[unsafe(no_mangle)]
    extern "C" fn judge_disks(_: &Cpu, position: u64) -> u64 {
        let accesses = position & ((1 << schedule::PHASE) - 1);
        let pass = (position & ((1 << schedule::POISON) - 1)) >> (schedule::PHASE + 2);
        disk::request(pass * sealed().requests + accesses / sectors::EVERY).into()
    }

    /// Reports an exception and powers off.
    #[unsafe(no_mangle)]
    extern "C" fn judge_exception(vector: u64, error: u64, address: u64, cr2: u64) -> ! {
        report::exception(vector, error, address, cr2);
        arch::power_off()
    }
}
