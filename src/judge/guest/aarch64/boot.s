// The entry of the image, by the boot protocol of Linux (Documentation/arch/arm64/booting.rst), and of the processors
// that PSCI starts. Both enter EL1 with the MMU on and call judge_main.
//
// judge_main and the loop use SP_EL0. Exceptions use SP_EL1, so they never write to the stack that the loop judges.

.section .head, "ax", @progbits
    b start
    .word 0
    .quad 0
    .quad image_memory
    // Little endian, 4 KiB pages, at any place.
    .quad 0xa
    .quad 0, 0, 0
    .ascii "ARM\x64"
    .word 0

.section .text.boot, "ax", @progbits

.macro ADDRESS register, symbol
    adrp \register, \symbol
    add \register, \register, :lo12:\symbol
.endm

// Memory: write-back, inner shareable, not executable at EL0. Devices: nGnRnE, never executable.
.set NORMAL, 0x0040000000000705
.set DEVICE, 0x0060000000000401

// x0: the device tree. The MMU is off.
start:
    msr daifset, #0xf
    mov x19, x0
    bl enter_el1
    // The addresses in the data.
    ADDRESS x1, image_start
    ADDRESS x2, relocations
    ADDRESS x3, relocations_end
2:  cmp x2, x3
    b.hs 3f
    ldp x4, x5, [x2]
    ldr x6, [x2, #16]
    add x2, x2, #24
    // R_AARCH64_RELATIVE.
    cmp w5, #1027
    b.ne 2b
    add x6, x6, x1
    str x6, [x1, x4]
    b 2b
3:  ADDRESS x2, bss_start
    ADDRESS x3, image_end
4:  stp xzr, xzr, [x2], #16
    cmp x2, x3
    b.lo 4b
    ADDRESS x2, boot_tree
    str x19, [x2]
    // The first 512 GiB are devices, except for the image and the device tree. map() in mod.rs maps RAM.
    ADDRESS x20, page_tables
    ldr x2, =DEVICE
    mov x3, #512
    mov x4, x20
    mov x5, #1 << 30
5:  str x2, [x4], #8
    add x2, x2, x5
    subs x3, x3, #1
    b.ne 5b
    add x21, x20, #4096
    mov x0, x1
    ADDRESS x22, image_end
6:  bl map_block
    add x0, x0, #1 << 21
    cmp x0, x22
    b.lo 6b
    // Its size is at most 2 MiB, and it may begin anywhere in a block.
    and x0, x19, #~0x1fffff
    bl map_block
    add x0, x0, #1 << 21
    bl map_block
    ADDRESS x2, table_next
    str x21, [x2]
    // What was written past the caches must not be hidden by what is in them.
    mrs x2, ctr_el0
    ubfx x2, x2, #16, #4
    mov x3, #4
    lsl x3, x3, x2
    ADDRESS x2, image_start
7:  dc civac, x2
    add x2, x2, x3
    cmp x2, x22
    b.lo 7b
    mov x0, #0
    b enter

// Maps 2 MiB at x0 as memory. x20: the first table; x21: the next free one. Changes x2 to x7.
map_block:
    ubfx x2, x0, #30, #9
    ldr x3, [x20, x2, lsl #3]
    tbnz x3, #1, 3f
    // A table in place of the block of 1 GiB.
    ldr x4, =DEVICE
    add x4, x4, x2, lsl #30
    mov x5, x21
    mov x6, #512
    mov x7, #1 << 21
2:  str x4, [x5], #8
    add x4, x4, x7
    subs x6, x6, #1
    b.ne 2b
    orr x3, x21, #3
    str x3, [x20, x2, lsl #3]
    mov x21, x5
3:  and x3, x3, #~0xfff
    ubfx x2, x0, #21, #9
    ldr x4, =NORMAL
    and x5, x0, #~0x1fffff
    orr x4, x4, x5
    str x4, [x3, x2, lsl #3]
    ret

// A processor that was started. x0: its number.
.globl secondary
secondary:
    msr daifset, #0xf
    mov x19, x0
    bl enter_el1
    mov x0, x19

// x0: the processor's number. The MMU, its stacks and vectors.
enter:
    // Attribute 0: device nGnRnE, 1: write-back.
    mov x1, #0xff00
    msr mair_el1, x1
    ADDRESS x1, page_tables
    msr ttbr0_el1, x1
    // 39 bits of address, 4 KiB pages, walks through the caches, inner shareable, no TTBR1.
    ldr x1, =0x803519
    mrs x2, id_aa64mmfr0_el1
    and x2, x2, #7
    mov x3, #5
    cmp x2, x3
    csel x2, x2, x3, lo
    orr x1, x1, x2, lsl #32
    msr tcr_el1, x1
    dsb sy
    tlbi vmalle1
    ic iallu
    dsb sy
    isb
    // SCTLR_EL1's bits that are one, with I, C and M.
    ldr x1, =0x30d01805
    msr sctlr_el1, x1
    isb
    // SIMD.
    mov x1, #3 << 20
    msr cpacr_el1, x1
    ADDRESS x1, vectors
    msr vbar_el1, x1
    isb
    add x2, x0, #1
    ADDRESS x1, exception_stacks
    add x1, x1, x2, lsl #12
    msr spsel, #1
    mov sp, x1
    msr spsel, #0
    ADDRESS x1, stacks
    add x1, x1, x2, lsl #15
    mov sp, x1
    mov x29, #0
    bl judge_main
    b .

// Returns at EL1, with the MMU off. Changes x1 and x2.
enter_el1:
    mrs x1, currentel
    cmp x1, #8
    b.ne 3f
    // EL1 is AArch64, and nothing of it traps: timers, SIMD, the GIC's registers.
    mov x1, #1 << 31
    msr hcr_el2, x1
    mov x1, #3
    msr cnthctl_el2, x1
    msr cntvoff_el2, xzr
    mov x1, #0x33ff
    msr cptr_el2, x1
    msr hstr_el2, xzr
    msr vttbr_el2, xzr
    mrs x1, midr_el1
    msr vpidr_el2, x1
    mrs x1, mpidr_el1
    msr vmpidr_el2, x1
    mrs x1, id_aa64pfr0_el1
    ubfx x1, x1, #24, #4
    cbz x1, 2f
    mrs x1, icc_sre_el2
    mov x2, #9
    orr x1, x1, x2
    msr icc_sre_el2, x1
    isb
    msr ich_hcr_el2, xzr
2:  ldr x1, =0x30d00800
    msr sctlr_el1, x1
    mov x1, #0x3c5
    msr spsr_el2, x1
    msr elr_el2, x30
    isb
    eret
3:  ldr x1, =0x30d00800
    msr sctlr_el1, x1
    isb
    ret

.ltorg

.macro VECTOR number
    .balign 128
    mov x0, #\number
    b exception
.endm

.balign 2048
.globl vectors
vectors:
    VECTOR 0
    .balign 128
    b interrupt
    VECTOR 2
    VECTOR 3
    VECTOR 4
    VECTOR 5
    VECTOR 6
    VECTOR 7
    VECTOR 8
    VECTOR 9
    VECTOR 10
    VECTOR 11
    VECTOR 12
    VECTOR 13
    VECTOR 14
    VECTOR 15
    .balign 128

exception:
    mrs x1, esr_el1
    mrs x2, elr_el1
    mrs x3, far_el1
    bl judge_exception

// The virtual timer's interrupt: it is counted for the processor, whose number SP_EL1 tells, and the timer is stopped.
// Of the loop's registers this changes none.
interrupt:
    stp x0, x1, [sp, #-32]!
    stp x2, x3, [sp, #16]
    adrp x0, gic_cpu
    ldr x0, [x0, :lo12:gic_cpu]
    // GICC_IAR, or ICC_IAR1_EL1 where the GIC's processor interface has no address.
    cbz x0, 2f
    ldr w1, [x0, #12]
    and w2, w1, #0x3ff
    b 3f
2:  mrs x1, icc_iar1_el1
    mov w2, w1
3:  cmp w2, #1020
    b.hs 6f
    adrp x3, timer_interrupt
    ldr w3, [x3, :lo12:timer_interrupt]
    cmp w2, w3
    b.ne 4f
    msr cntv_ctl_el0, xzr
    isb
    ADDRESS x2, exception_stacks
    sub x2, sp, x2
    lsr x2, x2, #12
    ADDRESS x3, fired
    add x3, x3, x2, lsl #3
    ldr x2, [x3]
    add x2, x2, #1
    str x2, [x3]
4:  cbz x0, 5f
    str w1, [x0, #16]
    b 6f
5:  msr icc_eoir1_el1, x1
    isb
6:  ldp x2, x3, [sp, #16]
    ldp x0, x1, [sp], #32
    eret

.section .bss.tables, "aw", @nobits
.balign 4096
// One table of the first level, and the tables below it.
.globl page_tables
page_tables:
    .skip 33 * 4096
.globl page_tables_end
page_tables_end:

.section .bss.stacks, "aw", @nobits
.balign 4096
.globl exception_stacks
exception_stacks:
    .skip 8 * 4096
.globl stacks
stacks:
    .skip 8 * 32768

.section .bss.live, "aw", @nobits
.balign 64
.globl fired
fired:
    .skip 64

// Constant while the loop runs.
.section .bss.sealed, "aw", @nobits
.balign 8
.globl boot_tree
boot_tree:
    .skip 8
.globl table_next
table_next:
    .skip 8
// The address of the GIC's processor interface, 0 if it is in system registers.
.globl gic_cpu
gic_cpu:
    .skip 8
.globl timer_interrupt
timer_interrupt:
    .skip 8
