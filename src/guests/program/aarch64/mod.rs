//! Workloads without an operating system on Arm: the code, its page table entries, and the initial
//! registers.
//!
//! The code runs at EL1 with the MMU on. It has no stack, no exception vectors and no interrupts.
//! It leaves the guest by a write to the doorbell page, which no memslot backs.

mod tables;
mod touch;

pub use touch::COME_BACK;

use kvm_bindings::KVM_ARM_VCPU_POWER_OFF;
use kvm_ioctls::VcpuFd;

use crate::control::SUB_BITS;
use crate::program::Entry;
use vellum_kvm::arch::cpuid::Setup;
use vellum_kvm::arch::regs::{MAIR_EL1, PC, PSTATE, PSTATE_EL1H, SCTLR_EL1, TCR_EL1, TTBR0_EL1, set, x};
use vellum_kvm::vm::{Error, ioctl};
use vellum_sys::clock;

// The `write` workload. A function of Arm's procedure call standard except for its return: x0 holds
// the control block. With flags::RETURN it returns to its caller after ringing the doorbell, so
// that a process can run it too.
//
//     x0  control block             x4  page index relative to the hot set's end, sequential order
//     x1  the latest stamp's        x5  accesses left in this pass
//         writer word               x6  the stamp's writer word at the start of the pass
//     x2  xorshift state            x7  shuffle state
//     x3  deadline, counter         x8 to x17  scratch
write_section!(
    ".pushsection .rodata.vellum_workload_write, \"a\", %progbits",
    ".balign 64",
    ".globl vellum_workload_write",
    ".globl vellum_workload_write_guest",
    ".globl vellum_workload_write_end",
    "vellum_workload_write:",
    // No callee-saved register is used, so a guest, which has no stack, enters at the same place.
    "vellum_workload_write_guest:",
    "1:  ldr x2, [x0, {seed}]",
    "    ldr x1, [x0, {written}]",
    "    ldr x8, [x0, {writer}]",
    "    add x1, x1, x8",
    "    ldr x7, [x0, {shuffle}]",
    "    mrs x3, cntvct_el0",
    "    str x3, [x0, {started}]",
    // One pass.
    "2:  ldr x5, [x0, {pages}]",
    "    mov x6, x1",
    "    mov x4, xzr",
    "    ldr x8, [x0, {done}]",
    "    str x8, [x0, {pass_start}]",
    // One access.
    "3:  ldr x8, [x0, {stop}]",
    "    cbnz x8, 80f",
    "    ldr x16, [x0, {flags}]",
    "    ldr x15, [x0, {hot_pages}]",
    "    tst w16, {DRAW}",
    "    b.eq 5f",
    "    eor x2, x2, x2, lsl #13",
    "    eor x2, x2, x2, lsr #7",
    "    eor x2, x2, x2, lsl #17",
    // The hot set: the low half decides, a multiplicative hash of the whole selects the page.
    "    mov w9, w2",
    "    ldr x10, [x0, {hot_below}]",
    "    cmp x9, x10",
    "    b.hs 5f",
    "    movz x8, #0x7c15",
    "    movk x8, #0x7f4a, lsl #16",
    "    movk x8, #0x79b9, lsl #32",
    "    movk x8, #0x9e37, lsl #48",
    "    mul x8, x8, x2",
    "    umulh x14, x8, x15",
    "    b 7f",
    // The other pages, in their order.
    "5:  ldr x13, [x0, {pages}]",
    "    sub x13, x13, x15",
    "    ldr x8, [x0, {order}]",
    "    cmp x8, {RANDOM}",
    "    b.eq 51f",
    "    b.hi 52f",
    "    mov x14, x4",
    "    add x4, x4, #1",
    "    cmp x4, x13",
    "    b.lo 6f",
    "    mov x4, xzr",
    "    b 6f",
    "51: movz x8, #0xef95",
    "    movk x8, #0xde82, lsl #16",
    "    movk x8, #0x2543, lsl #32",
    "    movk x8, #0xd134, lsl #48",
    "    mul x8, x8, x2",
    "    umulh x14, x8, x13",
    "    b 6f",
    "52: ldr x8, [x0, {shuffle_mul}]",
    "    ldr x9, [x0, {shuffle_add}]",
    "    madd x7, x7, x8, x9",
    "    ldr x8, [x0, {shuffle_mask}]",
    "    and x7, x7, x8",
    "    cmp x7, x13",
    "    b.hs 52b",
    "    mov x14, x7",
    "6:  add x14, x14, x15",
    // x14: the page. x13: its address.
    "7:  ldr x8, [x0, {stride}]",
    "    ldr x9, [x0, {region}]",
    "    madd x13, x14, x8, x9",
    // Read or write: the high half decides.
    "    lsr x8, x2, #32",
    "    ldr x9, [x0, {write_below}]",
    "    cmp x8, x9",
    "    b.lo 8f",
    "    ldr x8, [x13]",
    "    b 70f",
    // Stamp. The first access to the page is a store: a load would first map a zero page, and a
    // second fault would have to replace it. x16: start time; x14: the page's previous writer. The
    // writer word is stored last, with release order: a reader that sees it also sees the other
    // words. Neither counter read is fenced; docs/src/explanation/benchmarks.md says what is timed
    // then.
    "8:  add x1, x1, #1",
    "    ldr x9, [x0, {epoch}]",
    "    ldr x15, [x0, {first_page}]",
    "    add x15, x15, x14",
    "    add x17, x13, {s_writer}",
    "    mov w8, {TIMED}",
    "    tst w16, w8",
    "    b.ne 81f",
    "    str x9, [x13, {s_epoch}]",
    "    ldr x14, [x17]",
    "    str x15, [x13, {s_page}]",
    "    stlr x1, [x17]",
    "    b 83f",
    "81: tst w16, {JOURNAL}",
    "    b.ne 91f",
    "    mrs x16, cntvct_el0",
    "    str x9, [x13, {s_epoch}]",
    "    ldr x14, [x17]",
    "    str x15, [x13, {s_page}]",
    "    stlr x1, [x17]",
    "    mrs x8, cntvct_el0",
    "    sub x8, x8, x16",
    "    ldr x10, [x0, {slowest}]",
    "    cmp x8, x10",
    "    b.ls 82f",
    "    str x8, [x0, {slowest}]",
    // Bucket: below 16 the value itself, else ((log2 - 4) << 4) + (ticks >> (log2 - 4)).
    "82: orr x10, x8, {SUB}",
    "    clz x9, x10",
    "    mov x11, {MAX_SHIFT}",
    "    sub x9, x11, x9",
    "    lsr x8, x8, x9",
    "    add x8, x8, x9, lsl {SUB_BITS}",
    "    add x10, x0, x8, lsl #3",
    "    ldr x11, [x10, {latency}]",
    "    add x11, x11, #1",
    "    str x11, [x10, {latency}]",
    // x14: the page's previous writer. If this vCPU has written the page before in this pass, it is
    // not the pass's first write of it.
    "83: sub x8, x1, x6",
    "    sub x14, x14, x6",
    "    sub x8, x8, #1",
    "    sub x14, x14, #1",
    "    cmp x14, x8",
    "    b.lo 69f",
    "    ldr x8, [x0, {distinct}]",
    "    add x8, x8, #1",
    "    str x8, [x0, {distinct}]",
    "    ldr x8, [x0, {interval}]",
    "    cbz x8, 69f",
    "    ldr x9, [x0, {pass}]",
    "    ldr x10, [x0, {warm}]",
    "    cmp x9, x10",
    "    b.lo 69f",
    // Paced: wait for the deadline. After a stall, at most `burst` is caught up.
    "    add x3, x3, x8",
    "84: mrs x8, cntvct_el0",
    "    ldr x9, [x0, {burst}]",
    "    sub x9, x8, x9",
    "    cmp x3, x9",
    "    csel x3, x9, x3, lt",
    "    cmp x8, x3",
    "    b.ge 69f",
    "    ldr x9, [x0, {stop}]",
    "    cbnz x9, 69f",
    "    yield",
    "    b 84b",
    "69: ldr x8, [x0, {writer}]",
    "    sub x8, x1, x8",
    "    str x8, [x0, {written}]",
    "70: ldr x8, [x0, {done}]",
    "    add x8, x8, #1",
    "    str x8, [x0, {done}]",
    "    subs x5, x5, #1",
    "    b.ne 3b",
    // The end of a pass.
    "    mrs x8, cntvct_el0",
    "    ldr x9, [x0, {pass}]",
    "    and x10, x9, {PASS_MASK}",
    "    add x10, x0, x10, lsl #3",
    "    str x8, [x10, {pass_ends}]",
    "    add x9, x9, #1",
    "    str x9, [x0, {pass}]",
    "    mov w8, {DONE}",
    "    ldr x10, [x0, {passes}]",
    "    cmp x9, x10",
    "    b.eq 90f",
    "    ldr x10, [x0, {flags}]",
    "    tst w10, {LOCKSTEP}",
    "    b.eq 2b",
    "    mov w8, {PASS}",
    "    b 90f",
    "80: mov w8, {STOPPED}",
    // Ring, and start again with the parameters that the host has written meanwhile.
    "90: str x2, [x0, {seed}]",
    "    str x7, [x0, {shuffle}]",
    "    mrs x9, cntvct_el0",
    "    str x9, [x0, {ended}]",
    "    ldr x9, [x0, {doorbell}]",
    "    dmb ish",
    "    str w8, [x9]",
    "    ldr x10, [x0, {flags}]",
    "    tst w10, {RETURN}",
    "    b.eq 1b",
    "    ret",
    // The same write with a journal, separate from the path without one. A write belongs to the
    // phase in which it begins. A guest that moves in the middle of a write learns of it at the
    // next write; the gap of its move is then the previous one.
    "91: ldr x8, [x0, {phase}]",
    "    str x8, [x0, {writing}]",
    "    mrs x16, cntvct_el0",
    "    str x9, [x13, {s_epoch}]",
    "    ldr x14, [x17]",
    "    str x15, [x13, {s_page}]",
    "    stlr x1, [x17]",
    "    mrs x8, cntvct_el0",
    "    ldr x15, [x0, {writing}]",
    // x8: the end; x9: the gap since the previous write; x13: the gap before that.
    "    ldr x9, [x0, {last}]",
    "    sub x9, x8, x9",
    "    str x8, [x0, {last}]",
    "    ldr x10, [x0, {origin}]",
    "    cbz x10, 97f",
    "    ldr x10, [x0, {gap}]",
    "    cmp x9, x10",
    "    b.ls 92f",
    "    str x9, [x0, {gap}]",
    "    str x8, [x0, {gap_end}]",
    "92: ldr x13, [x0, {gap_before}]",
    "    str x9, [x0, {gap_before}]",
    "    ldr x10, [x0, {seen}]",
    "    cmp x15, x10",
    "    b.eq 94f",
    "    str x15, [x0, {seen}]",
    "    mov x10, x8",
    "    cmp x9, x13",
    "    b.hs 93f",
    "    sub x10, x10, x9",
    "    mov x9, x13",
    "93: add x11, x0, x15, lsl #3",
    "    str x9, [x11, {entered_gap}]",
    "    str x10, [x11, {entered}]",
    "94: ldr x10, [x0, {origin}]",
    "    sub x10, x8, x10",
    "    ldr x9, [x0, {slice_shift}]",
    "    lsr x10, x10, x9",
    "    mov x9, {LAST_SLICE}",
    "    cmp x10, x9",
    "    csel x10, x9, x10, hi",
    "    ldr x9, [x0, {distinct}]",
    "    add x11, x0, x10, lsl #3",
    "    str x9, [x11, {slices}]",
    "    sub x8, x8, x16",
    "    add x11, x0, x15, lsl #3",
    "    ldr x10, [x11, {slowest}]",
    "    cmp x8, x10",
    "    b.ls 95f",
    "    str x8, [x11, {slowest}]",
    // The bucket as above, in the phase's histogram.
    "95: mov x10, {BUCKETS}",
    "    mul x15, x15, x10",
    "    orr x10, x8, {SUB}",
    "    clz x9, x10",
    "    mov x11, {MAX_SHIFT}",
    "    sub x9, x11, x9",
    "    lsr x8, x8, x9",
    "    add x8, x8, x9, lsl {SUB_BITS}",
    "    add x8, x8, x15",
    "    add x10, x0, x8, lsl #3",
    "    ldr x11, [x10, {latency}]",
    "    add x11, x11, #1",
    "    str x11, [x10, {latency}]",
    "    b 83b",
    "97: str x8, [x0, {origin}]",
    "    b 94b",
    "vellum_workload_write_end:",
    ".popsection";
    MAX_SHIFT = const 63 - SUB_BITS,
);

// Stage 1 descriptors (Arm DDI 0487, D8.3): memory that EL1 reads, writes and executes, write-back
// and shared by all vCPUs.
const VALID: u64 = 1 << 0;
const TABLE_OR_PAGE: u64 = 1 << 1;
const DEVICE: u64 = 1 << 2;
const INNER_SHAREABLE: u64 = 3 << 8;
// Set in advance: otherwise the processor would set it during a timed pass.
const ACCESSED: u64 = 1 << 10;
const NO_EXECUTION: u64 = 3 << 53;
/// An entry that points to another table.
pub(super) const TABLE: u64 = VALID | TABLE_OR_PAGE;
/// An entry that maps a 4 KiB page.
pub(super) const LEAF: u64 = LARGE | TABLE_OR_PAGE;
/// An entry that maps a 2 MiB block.
pub(super) const LARGE: u64 = VALID | INNER_SHAREABLE | ACCESSED;
/// A 2 MiB block with the doorbell, as device memory: it is not read speculatively.
pub(super) const DOORBELL: u64 = VALID | DEVICE | ACCESSED | NO_EXECUTION;

/// Attributes 0 and 1 (MAIR_EL1): write-back memory, and devices without gathering, reordering or
/// early acknowledgement.
const MEMORY_AND_DEVICE: u64 = 0xff;
/// TCR_EL1: 48-bit lower address range, no upper one; tables in write-back memory shared by vCPUs;
/// 4 KiB pages; 40-bit guest-physical addresses.
const TABLES: u64 = 16 | 1 << 8 | 1 << 10 | 3 << 12 | 1 << 23 | 2 << 32;
/// SCTLR_EL1: the MMU and caches on, and the bits that are always 1.
const MMU_AND_CACHES: u64 = 1 | 1 << 2 | 1 << 12 | 0x30d0_0800;

/// Makes a fresh vCPU run at `entry`.
pub(crate) fn set_entry(fd: &VcpuFd, setup: &Setup, entry: Entry) -> Result<(), Error> {
    let mut setup = *setup;
    // All vCPUs run from the beginning.
    setup.features[0] &= !(1 << KVM_ARM_VCPU_POWER_OFF);
    ioctl("KVM_ARM_VCPU_INIT", fd.vcpu_init(&setup))?;
    let values = [
        (PSTATE, PSTATE_EL1H),
        (PC, entry.code),
        (x(0), entry.control),
        (MAIR_EL1, MEMORY_AND_DEVICE),
        (TCR_EL1, TABLES),
        (TTBR0_EL1, entry.root),
        (SCTLR_EL1, MMU_AND_CACHES),
    ];
    values.into_iter().try_for_each(|(register, value)| ioctl("KVM_SET_ONE_REG", set(fd, register, value)))
}

/// Does nothing: no vCPU is powered off.
pub(crate) fn set_runnable(_fd: &VcpuFd) -> Result<(), Error> {
    Ok(())
}

/// The ticks per second of the guest's counter.
pub fn tsc_hz(_fd: &VcpuFd) -> Result<u64, Error> {
    Ok(clock::counter_hz())
}
