//! The kernel that takes interrupts. It programs the local APIC and the I/O APIC, counts
//! interrupts, and triggers those that the host requests in each round.
//!
//! It runs at CPL 0 in 64-bit mode on the page tables that it was booted with. [`Control`] has its
//! commands and its counters. Its stack, its interrupt descriptor table and the rings of its virtio
//! device are beside that. The host writes the table and programs the device's registers.

use std::mem::offset_of;

use support::guests::{Code, ORIGIN};
use vellum_devices::test_device::LINES;
use vellum_kvm::arch::gsi::FREE;
use vellum_kvm::arch::ports::{COM1, COM1_GSI};
use vellum_kvm::arch::{ioapic, layout};
use virtio_bindings::virtio_mmio::{
    VIRTIO_MMIO_INTERRUPT_ACK, VIRTIO_MMIO_INTERRUPT_STATUS, VIRTIO_MMIO_QUEUE_NOTIFY,
};

/// The addresses of [`Control`] and of the guest's other memory.
pub const CONTROL: u64 = 0x18_0000;
pub const IDT: u64 = 0x18_1000;
const IDTR: u64 = 0x18_2000;
const STACK: u64 = 0x18_4000;
pub const DESCRIPTORS: u64 = 0x19_0000;
pub const AVAILABLE: u64 = 0x19_1000;
pub const USED: u64 = 0x19_2000;
pub const BUFFER: u64 = 0x19_3000;

/// The vectors. The highest belongs to the line whose interrupt stays in service and blocks all
/// others.
pub const TIMER: u8 = 0x30;
pub const SERIAL: u8 = 0x41;
pub const VIRTIO: u8 = 0x51;
pub const LEVEL: u8 = 0x61;
pub const HELD: u8 = 0x71;

/// Pins of the I/O APIC. The first two interrupts are edge triggered. These two are level triggered
/// and driven by ports.
const VIRTIO_GSI: u32 = FREE[0];
const LEVEL_GSI: u32 = 20;
const HELD_GSI: u32 = 21;
const BY_LEVEL: u32 = 1 << 15;

/// What a round can request, a bit each.
pub mod want {
    pub const TIMER: u64 = 1;
    pub const SERIAL: u64 = 2;
    pub const VIRTIO: u64 = 4;
    pub const LEVEL: u64 = 8;
    /// An interrupt is in service and was not ended.
    pub const HELD: u64 = 16;
    /// With HELD: the line stays asserted, so that it interrupts again.
    pub const STILL: u64 = 32;
}

/// The memory that host and guest share. All of it is zero at first.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Control {
    /// Host: the round to begin, its requests, the round in which interrupts are enabled, the last
    /// round that is over.
    pub go: u64,
    pub want: u64,
    pub release: u64,
    pub rest: u64,
    /// Host: start and stop interrupts that come freely.
    pub free: u64,
    pub stop: u64,
    /// Host: the timer's LVT entry, its period in ticks, and whether it uses TSC deadlines.
    pub lvt: u64,
    pub period: u64,
    pub by_deadline: u64,
    /// Host: the vectors that must be requested in the local APIC before a round is ready: 0x20 to
    /// 0x3f, 0x40 to 0x5f, 0x60 to 0x7f.
    pub requested: [u32; 4],
    /// Guest: it is programmed, the round that is ready, the round that is done.
    pub up: u64,
    pub ready: u64,
    pub done: u64,
    /// An interrupt is in service. With `hold`, the next one of that line stays in service.
    pub in_service: u64,
    hold: u64,
    /// Interrupts that came while one of higher priority was in service, before the timer's
    /// deadline, or on an unused vector.
    pub out_of_turn: u64,
    pub early: u64,
    pub unexpected: u64,
    /// When the timer is due, or all bits if it is not armed.
    deadline: u64,
    /// Interrupts of the timer, and how often it was armed.
    pub timer: u64,
    pub armed: u64,
    pub serial: u64,
    /// Bytes that were received, and those that were not the next.
    pub bytes: u64,
    pub wrong_bytes: u64,
    /// Interrupts of the line, how often it was asserted, and interrupts while it was not.
    pub level: u64,
    pub asserted: u64,
    pub unasserted: u64,
    line: u64,
    pub held: u64,
    /// Interrupts of the device, buffers that it has used, and buffers that it was given.
    pub virtio: u64,
    pub used: u64,
    pub offered: u64,
}

const DEVICE: u64 = layout::VIRTIO_BASE;
const LAPIC: u64 = 0xfee0_0000;

std::arch::global_asm!(
    ".pushsection .rodata.vellum_test_interrupts, \"a\", @progbits",
    ".macro vellum_pin gsi, low",
    "    mov dword ptr [rbx], \\gsi * 2 + 0x11",
    "    mov dword ptr [rbx + 0x10], 0",
    "    mov dword ptr [rbx], \\gsi * 2 + 0x10",
    "    mov dword ptr [rbx + 0x10], \\low",
    ".endm",
    ".macro vellum_port port, value",
    "    mov edx, \\port",
    "    mov al, \\value",
    "    out dx, al",
    ".endm",
    // An interrupt handler begins. No other interrupt may come while the highest is in service.
    ".macro vellum_enter",
    "    push rax",
    "    push rcx",
    "    push rdx",
    "    cmp qword ptr [r15 + {in_service}], 0",
    "    je 1f",
    "    inc qword ptr [r15 + {out_of_turn}]",
    "1:",
    ".endm",
    ".globl vellum_test_interrupts",
    ".globl vellum_test_interrupts_timer",
    ".globl vellum_test_interrupts_serial",
    ".globl vellum_test_interrupts_virtio",
    ".globl vellum_test_interrupts_level",
    ".globl vellum_test_interrupts_held",
    ".globl vellum_test_interrupts_unexpected",
    ".globl vellum_test_interrupts_end",
    "vellum_test_interrupts:",
    "    mov r15d, {CONTROL}",
    "    mov r14d, {LAPIC}",
    "    mov esp, {STACK}",
    "    mov eax, {IDTR}",
    "    lidt [rax]",
    // Masks the 8259s, and local interrupt 0, through which they would reach the vCPU. Enables the
    // local APIC. Its timer counts undivided.
    "    vellum_port 0x21, 0xff",
    "    vellum_port 0xa1, 0xff",
    "    mov dword ptr [r14 + 0x350], 0x10000",
    "    mov dword ptr [r14 + 0xf0], 0x1ff",
    "    mov dword ptr [r14 + 0x80], 0",
    "    mov dword ptr [r14 + 0x3e0], 0xb",
    "    mov eax, [r15 + {lvt}]",
    "    mov [r14 + 0x320], eax",
    "    mov qword ptr [r15 + {deadline}], -1",
    "    mov ebx, {IOAPIC}",
    "    vellum_pin {SERIAL_GSI}, {SERIAL}",
    "    vellum_pin {VIRTIO_GSI}, {VIRTIO}",
    "    vellum_pin {LEVEL_GSI}, {LEVEL}",
    "    vellum_pin {HELD_GSI}, {HELD}",
    // Enables the receive interrupt.
    "    vellum_port {IER}, 1",
    "    mov qword ptr [r15 + {up}], 1",
    // Waits for a round.
    "30: pause",
    "    cmp qword ptr [r15 + {free}], 0",
    "    jne 50f",
    "    mov rbx, [r15 + {go}]",
    "    cmp rbx, [r15 + {done}]",
    "    je 30b",
    "    mov r12, [r15 + {want}]",
    // Takes one interrupt that stays in service.
    "    test r12d, {WANT_HELD}",
    "    jz 12f",
    "    mov qword ptr [r15 + {hold}], 1",
    "    vellum_port {HELD_LINE}, 1",
    "    sti",
    "31: pause",
    "    cmp qword ptr [r15 + {in_service}], 0",
    "    je 31b",
    "    cli",
    "    test r12d, {WANT_STILL}",
    "    jnz 12f",
    "    vellum_port {HELD_LINE}, 0",
    "12: test r12d, {WANT_TIMER}",
    "    jz 13f",
    "    call 80f",
    "13: test r12d, {WANT_LEVEL}",
    "    jz 14f",
    "    call 82f",
    // Waits until the device has used its buffer. The driver does not acknowledge it before the
    // round.
    "14: test r12d, {WANT_VIRTIO}",
    "    jz 16f",
    "    call 83f",
    "15: pause",
    "    mov eax, [r15 + {offered}]",
    "    cmp ax, word ptr [{USED} + 2]",
    "    jne 15b",
    // Waits until the timer has expired.
    "16: test r12d, {WANT_TIMER}",
    "    jz 19f",
    "17: cmp qword ptr [r15 + {by_deadline}], 0",
    "    je 18f",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    cmp rax, [r15 + {deadline}]",
    "    jb 17b",
    "    jmp 19f",
    "18: cmp dword ptr [r14 + 0x390], 0",
    "    jne 18b",
    // Waits until everything that the host wants to see requested is.
    "19: xor ecx, ecx",
    "20: mov edx, [r15 + rcx * 4 + {requested}]",
    "    mov esi, ecx",
    "    shl esi, 4",
    "21: mov eax, [r14 + rsi + 0x210]",
    "    and eax, edx",
    "    cmp eax, edx",
    "    jne 21b",
    "    inc ecx",
    "    cmp ecx, 3",
    "    jb 20b",
    "    mov [r15 + {ready}], rbx",
    "22: pause",
    "    cmp [r15 + {release}], rbx",
    "    jne 22b",
    "    sti",
    "    test r12d, {WANT_HELD}",
    "    jz 24f",
    // The interrupt in service still blocks all others.
    "    mov ecx, 100",
    "23: dec ecx",
    "    jnz 23b",
    "    mov qword ptr [r15 + {in_service}], 0",
    "    mov dword ptr [r14 + 0xb0], 0",
    "24: pause",
    "    cmp [r15 + {rest}], rbx",
    "    jne 24b",
    "    cli",
    "    mov [r15 + {done}], rbx",
    "    jmp 30b",
    // All sources run freely. The handlers rearm the timer and the device. The line is asserted
    // here.
    "50: xor ebx, ebx",
    "    call 80f",
    "    call 83f",
    "    sti",
    "51: cmp qword ptr [r15 + {stop}], 0",
    "    jne 53f",
    "    cmp qword ptr [r15 + {line}], 0",
    "    jne 52f",
    // Once per tick of the timer. A KVM that emulates many instructions at once would do nothing
    // else.
    "    mov rax, [r15 + {timer}]",
    "    cmp rax, rbx",
    "    je 52f",
    "    mov rbx, rax",
    "    call 82f",
    "52: hlt",
    "    jmp 51b",
    "53: mov qword ptr [r15 + {done}], 1",
    "54: pause",
    "    jmp 54b",
    // Arms the timer.
    "80: inc qword ptr [r15 + {armed}]",
    "    mov rcx, [r15 + {period}]",
    "    cmp qword ptr [r15 + {by_deadline}], 0",
    "    je 81f",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    add rax, rcx",
    "    mov [r15 + {deadline}], rax",
    "    mov rdx, rax",
    "    shr rdx, 32",
    "    mov ecx, 0x6e0",
    "    wrmsr",
    "    ret",
    "81: mov qword ptr [r15 + {deadline}], 0",
    "    mov [r14 + 0x380], ecx",
    "    ret",
    // Asserts the line.
    "82: mov qword ptr [r15 + {line}], 1",
    "    inc qword ptr [r15 + {asserted}]",
    "    vellum_port {LEVEL_LINE}, 1",
    "    ret",
    // Gives the device its buffer.
    "83: inc qword ptr [r15 + {offered}]",
    "    mov rax, [r15 + {offered}]",
    "    mov word ptr [{AVAILABLE} + 2], ax",
    "    mov eax, {NOTIFY}",
    "    mov dword ptr [rax], 0",
    "    ret",
    "vellum_test_interrupts_timer:",
    "    vellum_enter",
    "    inc qword ptr [r15 + {timer}]",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    cmp rax, [r15 + {deadline}]",
    "    jae 1f",
    "    inc qword ptr [r15 + {early}]",
    "1:  mov qword ptr [r15 + {deadline}], -1",
    "    cmp qword ptr [r15 + {free}], 0",
    "    je 90f",
    "    cmp qword ptr [r15 + {stop}], 0",
    "    jne 90f",
    "    call 80b",
    "    jmp 90f",
    "vellum_test_interrupts_serial:",
    "    vellum_enter",
    "    inc qword ptr [r15 + {serial}]",
    // Handles only what the port reports, as drivers do.
    "    mov edx, {IIR}",
    "    in al, dx",
    "    test al, 1",
    "    jnz 90f",
    "2:  mov edx, {LSR}",
    "    in al, dx",
    "    test al, 1",
    "    jz 90f",
    "    mov edx, {COM1}",
    "    in al, dx",
    "    cmp al, byte ptr [r15 + {bytes}]",
    "    je 3f",
    "    inc qword ptr [r15 + {wrong_bytes}]",
    "3:  inc qword ptr [r15 + {bytes}]",
    "    jmp 2b",
    "vellum_test_interrupts_virtio:",
    "    vellum_enter",
    "    inc qword ptr [r15 + {virtio}]",
    "    mov ecx, {STATUS}",
    "    mov eax, [rcx]",
    "    mov ecx, {ACKNOWLEDGE}",
    "    mov [rcx], eax",
    "    test al, 1",
    "    jz 90f",
    // The device must have used all of its buffers.
    "    mov eax, [r15 + {offered}]",
    "    cmp ax, word ptr [{USED} + 2]",
    "    jne 90f",
    "    cmp rax, [r15 + {used}]",
    "    je 90f",
    "    mov [r15 + {used}], rax",
    "    cmp qword ptr [r15 + {free}], 0",
    "    je 90f",
    "    cmp qword ptr [r15 + {stop}], 0",
    "    jne 90f",
    "    call 83b",
    "    jmp 90f",
    "vellum_test_interrupts_level:",
    "    vellum_enter",
    "    inc qword ptr [r15 + {level}]",
    "    cmp qword ptr [r15 + {line}], 0",
    "    jne 4f",
    "    inc qword ptr [r15 + {unasserted}]",
    "4:  mov qword ptr [r15 + {line}], 0",
    "    vellum_port {LEVEL_LINE}, 0",
    "    jmp 90f",
    "vellum_test_interrupts_held:",
    "    push rax",
    "    push rcx",
    "    push rdx",
    "    inc qword ptr [r15 + {held}]",
    "    cmp qword ptr [r15 + {hold}], 0",
    "    je 5f",
    "    mov qword ptr [r15 + {hold}], 0",
    "    mov qword ptr [r15 + {in_service}], 1",
    "    jmp 91f",
    "5:  vellum_port {HELD_LINE}, 0",
    // Ends the interrupt.
    "90: mov dword ptr [r14 + 0xb0], 0",
    "91: pop rdx",
    "    pop rcx",
    "    pop rax",
    "    iretq",
    "vellum_test_interrupts_unexpected:",
    "    inc qword ptr [r15 + {unexpected}]",
    "6:  hlt",
    "    jmp 6b",
    "vellum_test_interrupts_end:",
    ".popsection",
    CONTROL = const CONTROL,
    IDTR = const IDTR,
    STACK = const STACK,
    AVAILABLE = const AVAILABLE,
    USED = const USED,
    LAPIC = const LAPIC,
    IOAPIC = const ioapic::BASE,
    NOTIFY = const DEVICE + VIRTIO_MMIO_QUEUE_NOTIFY as u64,
    STATUS = const DEVICE + VIRTIO_MMIO_INTERRUPT_STATUS as u64,
    ACKNOWLEDGE = const DEVICE + VIRTIO_MMIO_INTERRUPT_ACK as u64,
    COM1 = const COM1,
    IER = const COM1 + 1,
    IIR = const COM1 + 2,
    LSR = const COM1 + 5,
    SERIAL_GSI = const COM1_GSI,
    VIRTIO_GSI = const VIRTIO_GSI,
    LEVEL_GSI = const LEVEL_GSI,
    HELD_GSI = const HELD_GSI,
    LEVEL_LINE = const LINES as u32 + LEVEL_GSI,
    HELD_LINE = const LINES as u32 + HELD_GSI,
    SERIAL = const SERIAL,
    VIRTIO = const VIRTIO,
    LEVEL = const LEVEL as u32 | BY_LEVEL,
    HELD = const HELD as u32 | BY_LEVEL,
    WANT_TIMER = const want::TIMER,
    WANT_VIRTIO = const want::VIRTIO,
    WANT_LEVEL = const want::LEVEL,
    WANT_HELD = const want::HELD,
    WANT_STILL = const want::STILL,
    go = const offset_of!(Control, go),
    want = const offset_of!(Control, want),
    release = const offset_of!(Control, release),
    rest = const offset_of!(Control, rest),
    free = const offset_of!(Control, free),
    stop = const offset_of!(Control, stop),
    lvt = const offset_of!(Control, lvt),
    period = const offset_of!(Control, period),
    by_deadline = const offset_of!(Control, by_deadline),
    requested = const offset_of!(Control, requested),
    up = const offset_of!(Control, up),
    ready = const offset_of!(Control, ready),
    done = const offset_of!(Control, done),
    in_service = const offset_of!(Control, in_service),
    hold = const offset_of!(Control, hold),
    out_of_turn = const offset_of!(Control, out_of_turn),
    early = const offset_of!(Control, early),
    unexpected = const offset_of!(Control, unexpected),
    deadline = const offset_of!(Control, deadline),
    timer = const offset_of!(Control, timer),
    armed = const offset_of!(Control, armed),
    serial = const offset_of!(Control, serial),
    bytes = const offset_of!(Control, bytes),
    wrong_bytes = const offset_of!(Control, wrong_bytes),
    level = const offset_of!(Control, level),
    asserted = const offset_of!(Control, asserted),
    unasserted = const offset_of!(Control, unasserted),
    line = const offset_of!(Control, line),
    held = const offset_of!(Control, held),
    virtio = const offset_of!(Control, virtio),
    used = const offset_of!(Control, used),
    offered = const offset_of!(Control, offered),
);

unsafe extern "C" {
    static vellum_test_interrupts: u8;
    static vellum_test_interrupts_timer: u8;
    static vellum_test_interrupts_serial: u8;
    static vellum_test_interrupts_virtio: u8;
    static vellum_test_interrupts_level: u8;
    static vellum_test_interrupts_held: u8;
    static vellum_test_interrupts_unexpected: u8;
    static vellum_test_interrupts_end: u8;
}

/// The offset of `symbol` in the kernel.
fn offset(symbol: *const u8) -> u64 {
    symbol as u64 - &raw const vellum_test_interrupts as u64
}

/// The kernel as an image.
pub fn kernel() -> Vec<u8> {
    let length = offset(&raw const vellum_test_interrupts_end) as usize;
    // SAFETY: the two symbols bound one section's bytes, which are never written.
    let bytes = unsafe { std::slice::from_raw_parts(&raw const vellum_test_interrupts, length) };
    Code(bytes.to_vec()).elf64()
}

/// The interrupt descriptor table for [`IDT`], and the content of its register with the register's
/// address in memory.
pub fn descriptor_table() -> (Vec<u8>, (u64, [u8; 10])) {
    let handlers = [
        (TIMER, &raw const vellum_test_interrupts_timer),
        (SERIAL, &raw const vellum_test_interrupts_serial),
        (VIRTIO, &raw const vellum_test_interrupts_virtio),
        (LEVEL, &raw const vellum_test_interrupts_level),
        (HELD, &raw const vellum_test_interrupts_held),
    ];
    let mut table = Vec::new();
    for vector in 0..=u8::MAX {
        let of = handlers.iter().find(|(of, _)| *of == vector).map(|(_, handler)| *handler);
        let at = u64::from(ORIGIN) + offset(of.unwrap_or(&raw const vellum_test_interrupts_unexpected));
        // A present 64-bit interrupt gate to the boot code segment (Intel SDM vol. 3, figure 7-8).
        let low = (at & 0xffff) | 0x10 << 16 | 0x8e << 40 | (at >> 16 & 0xffff) << 48;
        table.extend([low, at >> 32].map(u64::to_le_bytes).as_flattened());
    }
    let mut register = [0; 10];
    register[..2].copy_from_slice(&(table.len() as u16 - 1).to_le_bytes());
    register[2..].copy_from_slice(&IDT.to_le_bytes());
    (table, (IDTR, register))
}
