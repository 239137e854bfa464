//! The code of [`crate::guests::touch`]: CPL 3, no stack.

use std::mem::offset_of;

use crate::guests::program::Code;
use crate::guests::touch::Touch;

//   rdi  control block      rbx  blocks left      r8   this block      r9   page in the run      r10  pages left
std::arch::global_asm!(
    ".pushsection .rodata.vellum_workload_touch, \"a\", @progbits",
    ".balign 64",
    ".globl vellum_workload_touch",
    ".globl vellum_workload_touch_end",
    "vellum_workload_touch:",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    mov [rdi + {ticks}], rax",
    "    mov rbx, [rdi + {blocks}]",
    "    mov r8, [rdi + {region}]",
    "    mov r11, [rdi + {stride}]",
    "    mov r12, [rdi + {first}]",
    "    mov r13, [rdi + {write}]",
    "    mov r14, [rdi + {block}]",
    "2:  test r12, r12",
    "    jz 3f",
    "    mov [r8], rbx",
    "3:  mov r9, r8",
    "    add r9, [rdi + {offset}]",
    "    mov r10, [rdi + {run}]",
    "    test r10, r10",
    "    jz 7f",
    "    test r13, r13",
    "    jz 5f",
    // Few instructions a page, lest they be what is measured where no access faults.
    "4:  mov [r9], r10",
    "    add r9, r11",
    "    dec r10",
    "    jnz 4b",
    "    jmp 7f",
    "5:  mov rax, [r9]",
    "    add r9, r11",
    "    dec r10",
    "    jnz 5b",
    "7:  add r8, r14",
    "    dec rbx",
    "    jnz 2b",
    "    rdtsc",
    "    shl rdx, 32",
    "    or rax, rdx",
    "    mov [rdi + {ticks} + 8], rax",
    "    mov rcx, [rdi + {doorbell}]",
    "    mov eax, 1",
    "    mov [rcx], eax",
    "    jmp vellum_workload_touch",
    "vellum_workload_touch_end:",
    ".popsection",
    ticks = const offset_of!(Touch, ticks),
    blocks = const offset_of!(Touch, blocks),
    region = const offset_of!(Touch, region),
    stride = const offset_of!(Touch, stride),
    first = const offset_of!(Touch, first),
    write = const offset_of!(Touch, write),
    block = const offset_of!(Touch, block),
    offset = const offset_of!(Touch, offset),
    run = const offset_of!(Touch, run),
    doorbell = const offset_of!(Touch, doorbell),
);

unsafe extern "C" {
    static vellum_workload_touch: u8;
    static vellum_workload_touch_end: u8;
}

/// The code, for CPL 3.
pub fn code() -> Code {
    let start = &raw const vellum_workload_touch;
    let end = &raw const vellum_workload_touch_end;
    // SAFETY: both symbols are labels of the one section above, in this order, in memory that is never written.
    let bytes = unsafe { std::slice::from_raw_parts(start, end.offset_from(start) as usize) };
    Code { bytes, entry: 0 }
}
