//! 64-bit Arm: time, PSCI, page tables, and the addresses that the linker script defines.

mod boot;
mod clocks;
mod processors;

pub(crate) use boot::boot;
pub(crate) use clocks::{find_clocks, interrupts, look_at_clocks, outstanding, shoot, start_clocks};
pub(crate) use processors::start as start_processors;

use core::arch::{asm, global_asm};
use core::mem::offset_of;

use crate::console::Output;
use crate::dtb::{Console, MAPPED, Method};
use crate::schedule::{PAGE, Segment};
use crate::{Cpu, Shared, refuse};
use boot::boot_of;

global_asm!(include_str!("boot.s"));
global_asm!(
    include_str!("run.s"),
    c_number = const offset_of!(Cpu, number),
    c_vcpus = const offset_of!(Cpu, vcpus),
    c_passes = const offset_of!(Cpu, passes),
    c_seed = const offset_of!(Cpu, seed),
    c_own = const offset_of!(Cpu, own),
    c_own_count = const offset_of!(Cpu, own_count),
    c_other = const offset_of!(Cpu, other),
    c_other_count = const offset_of!(Cpu, other_count),
    c_flags = const offset_of!(Cpu, flags),
    c_cold = const offset_of!(Cpu, cold),
    c_hot = const offset_of!(Cpu, hot),
    c_hot_set = const offset_of!(Cpu, hot_set),
    c_interval = const offset_of!(Cpu, interval),
    c_neighbour = const offset_of!(Cpu, neighbour),
    c_active = const offset_of!(Cpu, active),
    c_regions = const offset_of!(Cpu, regions),
    c_region_count = const offset_of!(Cpu, region_count),
    c_stack = const offset_of!(Cpu, stack),
    c_clock = const offset_of!(Cpu, clock),
    c_odd1 = const offset_of!(Cpu, odd1),
    c_odd2 = const offset_of!(Cpu, odd2),
    c_result = const offset_of!(Cpu, result),
    s_base = const offset_of!(Segment, base),
    s_count = const offset_of!(Segment, count),
    s_stride = const offset_of!(Segment, stride),
    s_mask = const offset_of!(Segment, mask),
    s_shift = const offset_of!(Segment, shift),
    s_shared = const offset_of!(Segment, shared),
    s_size = const size_of::<Segment>(),
    F_SPARSE = const crate::FLAG_SPARSE,
    F_EACH = const crate::FLAG_EACH,
    F_RATE = const crate::FLAG_RATE,
    F_DISK = const crate::FLAG_DISK,
    EVERY = const crate::sectors::EVERY,
    POISON = const crate::schedule::POISON,
    PHASE = const crate::schedule::PHASE,
);

/// The name in results.
pub(crate) const NAME: &str = "aarch64";
/// The register with the address of an exception.
pub(crate) const FAULT_ADDRESS: &str = "FAR";

#[allow(improper_ctypes)]
unsafe extern "C" {
    pub(crate) fn judge_run(cpu: *const Cpu);
    static image_start: u8;
    static file_end: u8;
    static sealed_end: u8;
    static live_end: u8;
    static image_end: u8;
    static page_tables: u8;
    static page_tables_end: u8;
    static table_next: u8;
    static stacks: u8;
    static published: u8;
    static next_look: u8;
    static fired: u8;
    static boot_tree: u8;
    static gic_cpu: u8;
    static timer_interrupt: u8;
    static secondary: u8;
}

macro_rules! address {
    ($name:ident) => {
        &raw const crate::arch::$name as u64
    };
}
use address;

/// PSCI's SYSTEM_OFF (Arm Power State Coordination Interface, 5.1).
const SYSTEM_OFF: u32 = 0x8400_0008;

/// How PSCI is called.
#[unsafe(link_section = ".data.sealed")]
static METHOD: Shared<Method> = Shared::new(Method::Hvc);

/// The end of what [`pci_window`] has given.
static TAKEN: Shared<u64> = Shared::new(0);

/// Calls PSCI.
fn psci(function: u32, arguments: [u64; 3]) -> i64 {
    // SAFETY: constant since `boot`.
    let method = unsafe { *METHOD.get() };
    let [a, b, c] = arguments;
    let mut result = u64::from(function);
    // SAFETY: the SMC Calling Convention preserves x18 to x30; the compiler keeps nothing in the
    // others.
    unsafe {
        match method {
            Method::Hvc => asm!("hvc #0", inout("x0") result, in("x1") a, in("x2") b, in("x3") c,
                lateout("x4") _, lateout("x5") _, lateout("x6") _, lateout("x7") _, lateout("x8") _,
                lateout("x16") _, lateout("x17") _),
            // `smc #0`, which the assembler knows for processors with EL3 only.
            Method::Smc => asm!(".inst 0xd4000003", inout("x0") result, in("x1") a, in("x2") b, in("x3") c,
                lateout("x4") _, lateout("x5") _, lateout("x6") _, lateout("x7") _, lateout("x8") _,
                lateout("x16") _, lateout("x17") _),
        }
    }
    result as i64
}

/// Reads memory, or a device's register of 1, 2, 4 or 8 bytes. A hypervisor emulates these
/// instructions, and no others.
pub(crate) fn load<T: Copy>(address: u64) -> T {
    // SAFETY: callers pass addresses of a device's registers, or of shared memory.
    unsafe {
        let value: u64;
        match size_of::<T>() {
            1 => asm!("ldrb {0:w}, [{1}]", out(reg) value, in(reg) address),
            2 => asm!("ldrh {0:w}, [{1}]", out(reg) value, in(reg) address),
            4 => asm!("ldr {0:w}, [{1}]", out(reg) value, in(reg) address),
            8 => asm!("ldr {0}, [{1}]", out(reg) value, in(reg) address),
            _ => return core::ptr::read_volatile(address as *const T),
        }
        core::mem::transmute_copy(&value)
    }
}

/// Writes memory or a device's register, as [`load`] reads it.
pub(crate) fn store<T>(address: u64, value: T) {
    // SAFETY: as in `load`.
    unsafe {
        let mut bits = 0u64;
        if size_of::<T>() > 8 {
            return core::ptr::write_volatile(address as *mut T, value);
        }
        core::ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), (&raw mut bits).cast(), size_of::<T>());
        match size_of::<T>() {
            1 => asm!("strb {0:w}, [{1}]", in(reg) bits, in(reg) address),
            2 => asm!("strh {0:w}, [{1}]", in(reg) bits, in(reg) address),
            4 => asm!("str {0:w}, [{1}]", in(reg) bits, in(reg) address),
            8 => asm!("str {0}, [{1}]", in(reg) bits, in(reg) address),
            _ => core::ptr::write_volatile(address as *mut T, value),
        }
    }
}

/// The tables of exceptions are in boot.s.
pub(crate) fn start() {}

/// The console needs the device tree.
pub(crate) fn open_console() -> bool {
    false
}

/// The serial port that the device tree names.
pub(crate) fn find_serial() -> Option<Output> {
    Some(match boot_of().tree.console? {
        Console::Pl011(base) => Output::Pl011(base),
        Console::Uart { base, shift, width } => Output::Uart { base, shift, width },
    })
}

/// Calls `each` with the addresses of all virtio-mmio devices.
pub(crate) fn virtio_mmio(each: impl FnMut(u64)) {
    boot_of().tree.virtio.iter().copied().for_each(each);
}

fn configuration(function: u32, register: u32) -> Option<u64> {
    let pci = boot_of().tree.pci?;
    let at = pci.configuration.start + (u64::from(function) << 12) + u64::from(register & 0xfc);
    (at < pci.configuration.end).then_some(at)
}

/// Reads 32 bits of a function's configuration.
pub(crate) fn pci_config(function: u32, register: u32) -> u32 {
    configuration(function, register).map_or(u32::MAX, load)
}

/// Writes 32 bits of a function's configuration.
pub(crate) fn set_pci_config(function: u32, register: u32, value: u32) {
    if let Some(at) = configuration(function, register) {
        store(at, value);
    }
}

/// A free place for registers of this size, a power of two. No firmware has assigned any.
pub(crate) fn pci_window(size: u64) -> Option<u64> {
    let window = boot_of().tree.pci?.window;
    // SAFETY: only the first processor runs.
    let taken = unsafe { &mut *TAKEN.get() };
    let start = (*taken).max(window.start).checked_next_multiple_of(size)?;
    *taken = start.checked_add(size).filter(|end| *end <= window.end)?;
    Some(start)
}

/// Whether a device's registers can be accessed.
pub(crate) fn is_mapped(address: u64) -> bool {
    address < MAPPED
}

/// There is no port besides those in memory.
pub(crate) fn put(_: u8) {}

pub(crate) fn now() -> u64 {
    let ticks;
    // SAFETY: reads a counter.
    unsafe { asm!("isb", "mrs {}, cntvct_el0", out(reg) ticks) }
    ticks
}

/// The frequency of CNTVCT, or a guess.
pub(crate) fn ticks_per_second() -> u64 {
    let hz: u64;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, cntfrq_el0", out(reg) hz) }
    if hz < 1000 { 1_000_000_000 } else { hz }
}

/// Only x86-64 has this choice.
pub(crate) fn has_fsgsbase() -> bool {
    false
}

/// The memory that is constant while the loop runs.
pub(crate) fn constant_regions() -> [[u64; 2]; 2] {
    [
        [address!(image_start), address!(file_end)],
        // Page tables and all parameters.
        [address!(page_tables), address!(sealed_end)],
    ]
}

pub(crate) fn image_start_address() -> u64 {
    address!(image_start)
}

pub(crate) fn stack_top(cpu: u64) -> u64 {
    address!(stacks) + (cpu + 1) * 32768
}

pub(crate) fn published_address(cpu: u64) -> u64 {
    address!(published) + 4 * cpu
}

/// The address of the number of a processor's timer interrupts.
pub(crate) fn fired_address(cpu: u64) -> u64 {
    address!(fired) + 8 * cpu
}

/// Sets the time at which a processor checks its clocks again.
pub(crate) fn set_next_look(cpu: u64, at: u64) {
    store(address!(next_look) + 8 * cpu, at);
}

pub(crate) fn halt() -> ! {
    loop {
        // SAFETY: waits.
        unsafe { asm!("wfi") }
    }
}

/// Powers off by PSCI.
pub(crate) fn power_off() -> ! {
    psci(SYSTEM_OFF, [0; 3]);
    halt()
}

const NORMAL: u64 = 0x0040_0000_0000_0705;
const DEVICE: u64 = 0x0060_0000_0000_0401;
/// Bit 1 of an entry: a table on levels 1 and 2, a page on level 3.
const TABLE: u64 = 2;

/// Maps RAM as memory. Before, it was a device.
fn map(start: u64, end: u64) {
    let mut at = start;
    while at < end {
        at += map_one(at, end);
    }
    // SAFETY: the entries are complete before anything uses them.
    unsafe { asm!("dsb ishst", "tlbi vmalle1is", "dsb ish", "isb") }
}

/// Maps the largest block that begins at `at` and is not beyond `end`. Returns its size.
fn map_one(at: u64, end: u64) -> u64 {
    let mut table = address!(page_tables);
    for level in 1..4 {
        let shift = 39 - 9 * level;
        let size = 1 << shift;
        let entry = table + 8 * (at >> shift & 511);
        let value = load::<u64>(entry);
        let is_table = level < 3 && value & TABLE != 0;
        if !is_table && at.is_multiple_of(size) && end - at >= size || level == 3 {
            set_entry(entry, at | NORMAL | if level == 3 { TABLE } else { 0 });
            return size;
        }
        // A block that is memory already: the image's, or the device tree's.
        if !is_table && value & 4 != 0 {
            return size - at % size;
        }
        table = if is_table { value & 0xffff_ffff_f000 } else { split(entry, value, shift - 9) };
    }
    PAGE
}

/// Replaces a block by a table of blocks of 1 << `shift`.
fn split(entry: u64, value: u64, shift: u32) -> u64 {
    let table = load::<u64>(address!(table_next));
    if table >= address!(page_tables_end) {
        refuse("too many ranges of RAM for the image's page tables");
    }
    store(address!(table_next), table + PAGE);
    let kind = if shift == 12 { TABLE } else { 0 };
    for index in 0..512 {
        store(table + 8 * index, (value & 0xffff_ffff_f000) | DEVICE | index << shift | kind);
    }
    set_entry(entry, table | 3);
    table
}

/// Writes an entry, which is invalid in between (Arm Architecture Reference Manual, D8.16.1).
fn set_entry(entry: u64, value: u64) {
    store(entry, 0u64);
    // SAFETY: nothing uses what this entry maps.
    unsafe { asm!("dsb ishst", "tlbi vmalle1is", "dsb ish") }
    store(entry, value);
    // SAFETY: as above.
    unsafe { asm!("dsb ishst", "isb") }
}
