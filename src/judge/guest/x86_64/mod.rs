//! x86-64: ports, MSRs, time, and the addresses that the linker script defines.

mod acpi;
mod boot;
mod clocks;
mod pci;
mod processors;

pub(crate) use boot::boot;
pub(crate) use clocks::{find_clocks, interrupts, look_at_clocks, outstanding, shoot, start_clocks};
pub(crate) use pci::{pci_config, pci_window, set_pci_config, virtio_mmio};
pub(crate) use processors::start as start_processors;

use core::arch::{asm, global_asm, x86_64};
use core::mem::offset_of;

use crate::console::Output;
use crate::schedule::Segment;
use crate::{Cpu, Shared};

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
    F_FSGSBASE = const crate::FLAG_FSGSBASE,
    F_SPARSE = const crate::FLAG_SPARSE,
    F_EACH = const crate::FLAG_EACH,
    F_RATE = const crate::FLAG_RATE,
    F_DISK = const crate::FLAG_DISK,
    EVERY = const crate::sectors::EVERY,
    POISON = const crate::schedule::POISON,
    PHASE = const crate::schedule::PHASE,
);

/// The name in results.
pub(crate) const NAME: &str = "x86_64";
/// The register with the address of an exception.
pub(crate) const FAULT_ADDRESS: &str = "CR2";

#[allow(improper_ctypes)]
unsafe extern "C" {
    pub(crate) fn judge_run(cpu: *const Cpu);
    static image_start: u8;
    static constant_end: u8;
    static image_end: u8;
    static gdt: u8;
    static file_end: u8;
    static idt: u8;
    static user_stacks: u8;
    static page_tables: u8;
    static sealed_end: u8;
    static live_end: u8;
    static published: u8;
    static next_look: u8;
    static fired: u8;
    static local_apics: u8;
    static timer_interrupt: u8;
    static other_interrupt: u8;
    static exception_stubs: u8;
    static trampoline: u8;
    static trampoline_end: u8;
    static boot_info: u8;
    static boot_kind: u8;
    static ap_index: u8;
}

macro_rules! address {
    ($name:ident) => {
        &raw const crate::arch::$name as u64
    };
}
use address;

/// The serial port of a PC, COM1.
const SERIAL: u16 = 0x3f8;
/// The page below 1 MiB in which processors start.
const TRAMPOLINE: u64 = 0x8000;

#[unsafe(link_section = ".bss.sealed")]
static POWER: Shared<acpi::Power> = Shared::new(acpi::Power { ports: [(0, 0); 2], sleep: (0, 0) });

/// Calls `service` in boot.s, which runs in ring 0. Returns RAX.
fn service(what: Service, target: u32, value: u64) -> u64 {
    let result;
    // SAFETY: ports and MSRs; the exception uses a stack of its own.
    unsafe {
        asm!("call service", inout("rax") what as u64 => result, in("ecx") target, inout("rdx") u64::from(target) => _, in("rsi") value);
    }
    result
}

/// The requests that `service` handles.
enum Service {
    ReadMsr,
    WriteMsr,
    In,
    Out,
    Out16,
    Cpuid,
    TripleFault,
    Halt,
    In32,
    Out32,
    Interrupts,
}

fn out(port: u16, value: u8) {
    service(Service::Out, port.into(), value.into());
}

fn out16(port: u16, value: u16) {
    service(Service::Out16, port.into(), value.into());
}

fn input(port: u16) -> u8 {
    service(Service::In, port.into(), 0) as u8
}

/// Reads a value at a physical address, which need not be aligned.
fn read<T: Copy>(address: u64) -> T {
    // SAFETY: the first 4 GiB are mapped.
    unsafe { core::ptr::read_unaligned(address as *const T) }
}

fn write<T>(address: u64, value: T) {
    // SAFETY: callers pass addresses of the image's own memory, or of a device.
    unsafe { core::ptr::write_volatile(address as *mut T, value) }
}

/// Reads memory that a device or another processor may write at the same time.
pub(crate) fn load<T: Copy>(address: u64) -> T {
    // SAFETY: callers pass addresses of a device's registers, or of shared memory.
    unsafe { core::ptr::read_volatile(address as *const T) }
}

/// Writes memory that a device or another processor may read at the same time.
pub(crate) fn store<T>(address: u64, value: T) {
    write(address, value);
}

/// EAX, EBX, ECX and EDX of a leaf.
fn cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    let [mut a, mut b, mut c, mut d] = [Service::Cpuid as u32, 0, subleaf, 0];
    // SAFETY: as in `service`. The compiler reserves rbx, so it is restored.
    unsafe {
        asm!("mov {0:r}, rbx", "call service", "xchg {0:r}, rbx", inout(reg) b, inout("eax") a, inout("ecx") c, inout("edx") d, in("rsi") u64::from(leaf));
    }
    [a, b, c, d]
}

fn read_msr(msr: u32) -> u64 {
    service(Service::ReadMsr, msr, 0)
}

fn write_msr(msr: u32, value: u64) {
    service(Service::WriteMsr, msr, value);
}

/// Fills in the interrupt descriptors. All handlers run in ring 0.
pub(crate) fn start() {
    let gate = |vector: u64, handler: u64, kind: u64| {
        let at = address!(idt) + 16 * vector;
        write(at, handler & 0xffff | 0x08 << 16 | kind << 40 | (handler >> 16 & 0xffff) << 48);
        write(at + 8, handler >> 32);
    };
    for vector in 0..22 {
        gate(vector, address!(exception_stubs) + 16 * vector, 0x8e);
    }
    for vector in 32..256 {
        gate(vector, address!(other_interrupt), 0x8e);
    }
    gate(32, address!(timer_interrupt), 0x8e);
}

/// Opens COM1. Returns whether it exists.
pub(crate) fn open_console() -> bool {
    let present = input(SERIAL + 5) != 0xff;
    if present {
        for (register, value) in [(1, 0), (3, 0x80), (0, 1), (1, 0), (3, 3), (2, 1), (4, 3)] {
            out(SERIAL + register, value);
        }
    }
    present
}

/// The serial port in memory that ACPI's SPCR names.
pub(crate) fn find_serial() -> Option<Output> {
    let (base, shift, width) = acpi::serial(boot::boot_of().rsdp)?;
    Some(Output::Uart { base, shift, width })
}

/// Whether a device's registers can be accessed.
pub(crate) fn is_mapped(address: u64) -> bool {
    address < 1 << 32
}

/// Prints on COM1.
pub(crate) fn put(byte: u8) {
    for _ in 0..1_000_000 {
        if input(SERIAL + 5) & 0x20 != 0 {
            break;
        }
    }
    out(SERIAL, byte);
}

pub(crate) fn now() -> u64 {
    // SAFETY: CR4.TSD is clear.
    unsafe { x86_64::_rdtsc() }
}

/// The frequency of the TSC: from the hypervisor's CPUID leaf, the processor's, the PIT, or a
/// guess.
pub(crate) fn ticks_per_second() -> u64 {
    let hypervisor = cpuid(1, 0)[2] >> 31 == 1;
    if hypervisor && (0x4000_0010..0x4000_1000).contains(&cpuid(0x4000_0000, 0)[0]) {
        let khz = u64::from(cpuid(0x4000_0010, 0)[0]);
        if khz > 1000 {
            return khz * 1000;
        }
    }
    if cpuid(0, 0)[0] >= 0x15 {
        let [denominator, numerator, crystal, _] = cpuid(0x15, 0);
        if denominator != 0 && numerator != 0 && crystal != 0 {
            return u64::from(crystal) * u64::from(numerator) / u64::from(denominator);
        }
    }
    // Channel 2 of the PIT, 10 ms of its 1,193,182 Hz.
    out(0x61, input(0x61) & 0xfc | 1);
    out(0x43, 0xb0);
    out(0x42, (11932 & 0xff) as u8);
    out(0x42, (11932 >> 8) as u8);
    let begun = now();
    let mut polls = 0u32;
    while input(0x61) & 0x20 == 0 {
        polls += 1;
        if polls > 2_000_000 {
            return 1_000_000_000;
        }
    }
    let ticks = (now() - begun) * 100;
    // Without a PIT the bit is set at once.
    if polls < 2 { 1_000_000_000 } else { ticks }
}

pub(crate) fn has_fsgsbase() -> bool {
    cpuid(0, 0)[0] >= 7 && cpuid(7, 0)[1] & 1 == 1
}

/// The memory that is constant while the loop runs.
pub(crate) fn constant_regions() -> [[u64; 2]; 4] {
    [
        [address!(image_start), address!(constant_end)],
        [address!(gdt), address!(file_end)],
        // Page tables, descriptors, and all parameters.
        [address!(page_tables), address!(sealed_end)],
        // The page tables for RAM above 4 GiB.
        [address!(image_end), boot::boot_of().end],
    ]
}

pub(crate) fn image_start_address() -> u64 {
    address!(image_start)
}

pub(crate) fn stack_top(cpu: u64) -> u64 {
    address!(user_stacks) + (cpu + 1) * 32768
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
    write(address!(next_look) + 8 * cpu, at);
}

pub(crate) fn halt() -> ! {
    loop {
        service(Service::Halt, 0, 0);
    }
}

/// Powers off by the first of these that works: ACPI, QEMU's debug exit, the keyboard controller, a
/// triple fault.
pub(crate) fn power_off() -> ! {
    // SAFETY: constant since `start_processors`.
    let power = unsafe { *POWER.get() };
    for (port, value) in power.ports {
        if port != 0 {
            out16(port, value);
        }
    }
    let (port, value) = power.sleep;
    if port != 0 {
        out(port, value);
    }
    out(0xf4, 0);
    for _ in 0..100_000 {
        core::hint::spin_loop();
    }
    out(0x64, 0xfe);
    for _ in 0..10_000_000 {
        core::hint::spin_loop();
    }
    service(Service::TripleFault, 0, 0);
    halt()
}
