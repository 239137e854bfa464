//! Workloads without an operating system on x86-64: the code, its page table entries, and the
//! initial registers.
//!
//! The code runs in long mode at CPL 3, so that a KVM without hardware virtualization (kvm_pvm)
//! also executes it natively. It has no stack, no descriptor tables and no interrupts. It leaves
//! the guest by a write to the doorbell page, which no memslot backs. A workload that needs
//! privileged instructions runs at CPL 0.

mod tables;
mod touch;

pub use touch::COME_BACK;

use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;

use crate::program::{Entry, Privilege};
use vellum_kvm::arch::cpuid::Setup;
use vellum_kvm::vm::{Error, ioctl};

// The `write` workload. A function of the System V ABI except for its return: rdi holds the control
// block. With flags::RETURN it returns to its caller after ringing the doorbell, so that a process
// can run it too.
//
//     rdi  control block            r8   page index relative to the hot set's end, sequential order
//     rsi  the latest stamp's       r9   accesses left in this pass
//          writer word              r10  the stamp's writer word at the start of the pass
//     rbx  xorshift state           r11  shuffle state
//     rbp  deadline, TSC            rax rcx rdx r12 r13 r14 r15   scratch
write_section!(
    ".pushsection .rodata.vellum_workload_write, \"a\", @progbits",
    ".balign 64",
    ".globl vellum_workload_write",
    ".globl vellum_workload_write_guest",
    ".globl vellum_workload_write_end",
    // Another codegen unit may refer to the entry.
    ".globl vellum_workload_write_guest",
    ".hidden vellum_workload_write_guest",
    "vellum_workload_write:",
    "    push rbx; push rbp; push r12; push r13; push r14; push r15",
    // A guest enters here: it has no stack.
    "vellum_workload_write_guest:",
    "    mov rbx, [rdi + {seed}]",
    "    mov rsi, [rdi + {written}]",
    "    add rsi, [rdi + {writer}]",
    "    mov r11, [rdi + {shuffle}]",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    mov rbp, rax",
    "    mov [rdi + {started}], rax",
    // One pass.
    "2:  mov r9, [rdi + {pages}]",
    "    mov r10, rsi",
    "    xor r8d, r8d",
    "    mov rax, [rdi + {done}]",
    "    mov [rdi + {pass_start}], rax",
    // One access.
    "3:  cmp qword ptr [rdi + {stop}], 0",
    "    jne 80f",
    "    mov r15, [rdi + {flags}]",
    "    mov r14, [rdi + {hot_pages}]",
    "    test r15d, {DRAW}",
    "    jz 5f",
    "    mov rax, rbx",
    "    shl rax, 13",
    "    xor rbx, rax",
    "    mov rax, rbx",
    "    shr rax, 7",
    "    xor rbx, rax",
    "    mov rax, rbx",
    "    shl rax, 17",
    "    xor rbx, rax",
    // The hot set: the low half decides, a multiplicative hash of the whole selects the page.
    "    mov ecx, ebx",
    "    cmp rcx, [rdi + {hot_below}]",
    "    jae 5f",
    "    movabs rax, 0x9e3779b97f4a7c15",
    "    mul rbx",
    "    mul r14",
    "    mov r13, rdx",
    "    jmp 7f",
    // The other pages, in their order.
    "5:  mov r12, [rdi + {pages}]",
    "    sub r12, r14",
    "    mov rax, [rdi + {order}]",
    "    cmp eax, {RANDOM}",
    "    je 51f",
    "    ja 52f",
    "    mov r13, r8",
    "    inc r8",
    "    cmp r8, r12",
    "    jb 6f",
    "    xor r8d, r8d",
    "    jmp 6f",
    "51: movabs rax, 0xd1342543de82ef95",
    "    mul rbx",
    "    mul r12",
    "    mov r13, rdx",
    "    jmp 6f",
    "52: imul r11, [rdi + {shuffle_mul}]",
    "    add r11, [rdi + {shuffle_add}]",
    "    and r11, [rdi + {shuffle_mask}]",
    "    cmp r11, r12",
    "    jae 52b",
    "    mov r13, r11",
    "6:  add r13, r14",
    // r13: the page. r12: its address.
    "7:  mov r12, r13",
    "    imul r12, [rdi + {stride}]",
    "    add r12, [rdi + {region}]",
    // Read or write: the high half decides.
    "    mov rax, rbx",
    "    shr rax, 32",
    "    cmp rax, [rdi + {write_below}]",
    "    jb 8f",
    "    mov rax, [r12]",
    "    jmp 70f",
    // Stamp. The first access to the page is a store: a load would first map a zero page, and a
    // second fault would have to replace it. r15: start time, if timed; r13: the page's previous
    // writer. Neither rdtsc is fenced; docs/src/explanation/benchmarks.md says what is timed then.
    "8:  inc rsi",
    "    mov rcx, [rdi + {epoch}]",
    "    mov r14, r13",
    "    add r14, [rdi + {first_page}]",
    "    test r15d, {TIMED}",
    "    jnz 81f",
    "    mov [r12 + {s_epoch}], rcx",
    "    mov r13, [r12 + {s_writer}]",
    "    mov [r12 + {s_page}], r14",
    "    mov [r12 + {s_writer}], rsi",
    "    jmp 83f",
    "81: test r15d, {JOURNAL}",
    "    jnz 91f",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    mov r15, rax",
    "    mov [r12 + {s_epoch}], rcx",
    "    mov r13, [r12 + {s_writer}]",
    "    mov [r12 + {s_page}], r14",
    "    mov [r12 + {s_writer}], rsi",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    sub rax, r15",
    "    cmp rax, [rdi + {slowest}]",
    "    jbe 82f",
    "    mov [rdi + {slowest}], rax",
    // Bucket: below 16 the value itself, else ((log2 - 4) << 4) + (ticks >> (log2 - 4)).
    "82: mov rdx, rax",
    "    or rdx, {SUB}",
    "    bsr rcx, rdx",
    "    sub ecx, {SUB_BITS}",
    "    shr rax, cl",
    "    shl ecx, {SUB_BITS}",
    "    add rax, rcx",
    "    inc qword ptr [rdi + rax * 8 + {latency}]",
    // r13: the page's previous writer. If this vCPU has written the page before in this pass, it is
    // not the pass's first write of it.
    "83: mov rax, rsi",
    "    sub rax, r10",
    "    sub r13, r10",
    "    dec rax",
    "    dec r13",
    "    cmp r13, rax",
    "    jb 69f",
    "    inc qword ptr [rdi + {distinct}]",
    "    mov rax, [rdi + {interval}]",
    "    test rax, rax",
    "    jz 69f",
    "    mov rcx, [rdi + {pass}]",
    "    cmp rcx, [rdi + {warm}]",
    "    jb 69f",
    // Paced: wait for the deadline. After a stall, at most `burst` is caught up.
    "    add rbp, rax",
    "84: rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    mov rcx, rax",
    "    sub rcx, [rdi + {burst}]",
    "    cmp rbp, rcx",
    "    cmovl rbp, rcx",
    "    cmp rax, rbp",
    "    jge 69f",
    "    cmp qword ptr [rdi + {stop}], 0",
    "    jne 69f",
    "    pause",
    "    jmp 84b",
    "69: mov rax, rsi",
    "    sub rax, [rdi + {writer}]",
    "    mov [rdi + {written}], rax",
    "70: inc qword ptr [rdi + {done}]",
    "    dec r9",
    "    jnz 3b",
    // The end of a pass.
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    mov rcx, [rdi + {pass}]",
    "    mov rdx, rcx",
    "    and edx, {PASS_MASK}",
    "    mov [rdi + rdx * 8 + {pass_ends}], rax",
    "    inc rcx",
    "    mov [rdi + {pass}], rcx",
    "    mov eax, {DONE}",
    "    cmp rcx, [rdi + {passes}]",
    "    je 90f",
    "    test dword ptr [rdi + {flags}], {LOCKSTEP}",
    "    jz 2b",
    "    mov eax, {PASS}",
    "    jmp 90f",
    "80: mov eax, {STOPPED}",
    // Ring, and start again with the parameters that the host has written meanwhile.
    "90: mov [rdi + {seed}], rbx",
    "    mov [rdi + {shuffle}], r11",
    "    mov r14d, eax",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    mov [rdi + {ended}], rax",
    "    mov eax, r14d",
    "    mov rcx, [rdi + {doorbell}]",
    "    mov [rcx], eax",
    "    test dword ptr [rdi + {flags}], {RETURN}",
    "    jz vellum_workload_write_guest",
    "    pop r15; pop r14; pop r13; pop r12; pop rbp; pop rbx",
    "    ret",
    // The same write with a journal, separate from the path without one. After the stores, r12 and
    // r14 are free. A write belongs to the phase in which it begins. A guest that moves in the
    // middle of a write learns of it at the next write; the gap of its move is then the previous
    // one.
    "91: mov rax, [rdi + {phase}]",
    "    mov [rdi + {writing}], rax",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    mov r15, rax",
    "    mov [r12 + {s_epoch}], rcx",
    "    mov r13, [r12 + {s_writer}]",
    "    mov [r12 + {s_page}], r14",
    "    mov [r12 + {s_writer}], rsi",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    mov r14, [rdi + {writing}]",
    // rax: the end; rcx: the gap since the previous write; r12: the gap before that.
    "    mov rcx, rax",
    "    sub rcx, [rdi + {last}]",
    "    mov [rdi + {last}], rax",
    "    cmp qword ptr [rdi + {origin}], 0",
    "    je 97f",
    "    cmp rcx, [rdi + {gap}]",
    "    jbe 92f",
    "    mov [rdi + {gap}], rcx",
    "    mov [rdi + {gap_end}], rax",
    "92: mov r12, [rdi + {gap_before}]",
    "    mov [rdi + {gap_before}], rcx",
    "    cmp r14, [rdi + {seen}]",
    "    je 94f",
    "    mov [rdi + {seen}], r14",
    "    mov rdx, rax",
    "    cmp rcx, r12",
    "    jae 93f",
    "    sub rdx, rcx",
    "    mov rcx, r12",
    "93: mov [rdi + r14 * 8 + {entered_gap}], rcx",
    "    mov [rdi + r14 * 8 + {entered}], rdx",
    "94: mov rdx, rax",
    "    sub rdx, [rdi + {origin}]",
    "    mov rcx, [rdi + {slice_shift}]",
    "    shr rdx, cl",
    "    mov ecx, {LAST_SLICE}",
    "    cmp rdx, rcx",
    "    cmova rdx, rcx",
    "    mov rcx, [rdi + {distinct}]",
    "    mov [rdi + rdx * 8 + {slices}], rcx",
    "    sub rax, r15",
    "    cmp rax, [rdi + r14 * 8 + {slowest}]",
    "    jbe 95f",
    "    mov [rdi + r14 * 8 + {slowest}], rax",
    // The bucket as above, in the phase's histogram.
    "95: imul r14d, r14d, {BUCKETS}",
    "    mov rdx, rax",
    "    or rdx, {SUB}",
    "    bsr rcx, rdx",
    "    sub ecx, {SUB_BITS}",
    "    shr rax, cl",
    "    shl ecx, {SUB_BITS}",
    "    add rax, rcx",
    "    add rax, r14",
    "    inc qword ptr [rdi + rax * 8 + {latency}]",
    "    jmp 83b",
    "97: mov [rdi + {origin}], rax",
    "    jmp 94b",
    "vellum_workload_write_end:",
    ".popsection";
);

const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
// Set in advance: otherwise the processor, or KVM in its place, would set them during a timed pass.
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const PAGE_SIZE_BIT: u64 = 1 << 7;
/// An entry that points to another table.
pub(super) const TABLE: u64 = PRESENT | WRITABLE | USER | ACCESSED;
/// An entry that maps a 4 KiB page.
pub(super) const LEAF: u64 = TABLE | DIRTY;
/// An entry that maps a 2 MiB page.
pub(super) const LARGE: u64 = LEAF | PAGE_SIZE_BIT;
/// A 2 MiB page with the doorbell. It needs no special bits.
pub(super) const DOORBELL: u64 = LARGE;

/// Bit 1, which is always set, and IF (SDM volume 1, 3.4.3). Nothing interrupts these guests. But
/// if a guest was entered with IF as clear as the kernel's own, Bochs 3.0 does not report
/// interrupts to its kernel while the guest runs. A guest without exits would then keep the CPU for
/// ever.
const RFLAGS: u64 = 1 << 1 | 1 << 9;

/// Puts a fresh vCPU into long mode at `entry`.
pub(crate) fn set_entry(fd: &VcpuFd, cpuid: &Setup, entry: Entry) -> Result<(), Error> {
    // First, because KVM checks guest-physical addresses and long-mode segments against CPUID.
    ioctl("KVM_SET_CPUID2", fd.set_cpuid2(cpuid))?;
    let mut sregs = ioctl("KVM_GET_SREGS", fd.get_sregs())?;
    let dpl = if entry.privilege == Privilege::User { 3 } else { 0 };
    // SDM volume 3, 3.4.5: type 11 is code (execute, read, accessed), 3 data (read, write,
    // accessed).
    let segment = kvm_segment { limit: u32::MAX, present: 1, s: 1, g: 1, dpl, ..Default::default() };
    let selector = |index: u16| (index << 3) | u16::from(dpl);
    sregs.cs = kvm_segment { selector: selector(1), type_: 11, l: 1, ..segment };
    let data = kvm_segment { selector: selector(2), type_: 3, db: 1, ..segment };
    (sregs.ss, sregs.ds, sregs.es, sregs.fs, sregs.gs) = (data, data, data, data, data);
    const PE_MP_ET_NE_WP_PG: u64 = 1 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31;
    const PAE_OSFXSR_OSXMMEXCPT: u64 = 1 << 5 | 1 << 9 | 1 << 10;
    const LME_LMA_NXE: u64 = 1 << 8 | 1 << 10 | 1 << 11;
    sregs.cr0 = PE_MP_ET_NE_WP_PG;
    sregs.cr3 = entry.root;
    sregs.cr4 = PAE_OSFXSR_OSXMMEXCPT;
    sregs.efer = LME_LMA_NXE;
    ioctl("KVM_SET_SREGS", fd.set_sregs(&sregs))?;
    let regs = kvm_regs { rip: entry.code, rdi: entry.control, rflags: RFLAGS, ..Default::default() };
    ioctl("KVM_SET_REGS", fd.set_regs(&regs))
}

/// Makes a vCPU runnable at once, even if its local APIC waits for a SIPI.
pub(crate) fn set_runnable(fd: &VcpuFd) -> Result<(), Error> {
    let state = kvm_bindings::kvm_mp_state { mp_state: kvm_bindings::KVM_MP_STATE_RUNNABLE };
    ioctl("KVM_SET_MP_STATE", fd.set_mp_state(state))
}

/// The guest's TSC ticks per second.
pub fn tsc_hz(fd: &VcpuFd) -> Result<u64, Error> {
    ioctl("KVM_GET_TSC_KHZ", fd.get_tsc_khz()).map(|khz| u64::from(khz) * 1000)
}
