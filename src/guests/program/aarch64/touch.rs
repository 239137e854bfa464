//! The code of [`crate::guests::touch`]: no stack.

use std::mem::offset_of;

use crate::guests::program::Code;
use crate::guests::touch::Touch;

//   x0  control block      x1  blocks left      x2   this block      x8  page in the run      x10  pages left
std::arch::global_asm!(
    ".pushsection .rodata.vellum_workload_touch, \"a\", %progbits",
    ".balign 64",
    ".globl vellum_workload_touch",
    ".globl vellum_workload_touch_end",
    "vellum_workload_touch:",
    "1:  mrs x9, cntvct_el0",
    "    str x9, [x0, {ticks}]",
    "    ldr x1, [x0, {blocks}]",
    "    ldr x2, [x0, {region}]",
    "    ldr x3, [x0, {stride}]",
    "    ldr x4, [x0, {first}]",
    "    ldr x5, [x0, {write}]",
    "    ldr x6, [x0, {block}]",
    "    ldr x7, [x0, {offset}]",
    "2:  cbz x4, 3f",
    "    str x1, [x2]",
    "3:  add x8, x2, x7",
    "    ldr x10, [x0, {run}]",
    "    cbz x10, 7f",
    "    cbz x5, 5f",
    // Few instructions a page, lest they be what is measured where no access faults.
    "4:  str x10, [x8]",
    "    add x8, x8, x3",
    "    subs x10, x10, #1",
    "    b.ne 4b",
    "    b 7f",
    "5:  ldr x9, [x8]",
    "    add x8, x8, x3",
    "    subs x10, x10, #1",
    "    b.ne 5b",
    "7:  add x2, x2, x6",
    "    subs x1, x1, #1",
    "    b.ne 2b",
    "    mrs x9, cntvct_el0",
    "    str x9, [x0, {ticks} + 8]",
    "    ldr x9, [x0, {doorbell}]",
    "    mov w10, #1",
    "    dmb ish",
    "    str w10, [x9]",
    "    b 1b",
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

/// The code.
pub fn code() -> Code {
    let start = &raw const vellum_workload_touch;
    let end = &raw const vellum_workload_touch_end;
    // SAFETY: both symbols are labels of the one section above, in this order, in memory that is never written.
    let bytes = unsafe { std::slice::from_raw_parts(start, end.offset_from(start) as usize) };
    Code { bytes, entry: 0 }
}
