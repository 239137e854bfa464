// The loop of a processor: what it writes, reads and compares, and the state that it keeps in registers.
//
//     x20    position: poison (bit 61), phase (bits 26 to 60), accesses in the phase (bits 0 to 25)
//     x21    running checksum of the pass       x9   the page's address
//     x22    the last CNTVCT                    x10  segment     x11  index in it
//     x23    sum of the image                   x13  its address
//     x24 to x27  the last position seen of     x14  multiplier of the order
//            each processor, 32 bits each       x15  deadline
//     x28    the processor's parameters
//     v15    position and checksum at the last boundary; TPIDR_EL0 and TPIDRRO_EL0 hold the same
//
// The pass follows from the position (`PASS`). A boundary is a multiple of 64 accesses, or a change of phase. There all
// copies are compared and renewed.
//
// The compiler does not use x9 to x15 and x20 to x28 (build.rs reserves them; a test of image.rs looks for stores of them),
// so they keep their values while Rust code prints. It may use v15, which waits in TPIDR_EL1 and x12 meanwhile. None of
// these go to memory. Return addresses are in x30, x19 and d14, which Rust code preserves. schedule.rs has the same
// functions for the host.

.set POISON, {POISON}
.set PHASE, {PHASE}

// The pass of the position.
.macro PASS register
    ubfx \register, x20, #PHASE + 2, #POISON - PHASE - 2
.endm

// x0: mixed, as mix() does. Changes x2 and x3.
.macro MIX
    ldr x2, =0x9e3779b97f4a7c15
    add x0, x0, x2
    eor x0, x0, x0, lsr #30
    ldr x2, =0xbf58476d1ce4e5b9
    mul x0, x0, x2
    eor x0, x0, x0, lsr #27
    ldr x2, =0x94d049bb133111eb
    mul x0, x0, x2
    eor x0, x0, x0, lsr #31
.endm

// x2: the last word of the page at x9 when pass \pass has written it, as tail() says. Changes x3.
.macro TAIL pass
    ldr x3, [x28, #{c_odd1}]
    mul x2, \pass, x3
    eor x2, x2, x9
    ldr x3, [x28, #{c_seed}]
    add x2, x2, x3
    ldr x3, [x28, #{c_odd2}]
    mul x2, x2, x3
    ror x2, x2, #35
.endm

.macro PARK
    str x30, [sp, #-16]!
    fmov x12, d15
    msr tpidr_el1, x12
    mov x12, v15.d[1]
.endm

// Changes x1.
.macro UNPARK
    mrs x1, tpidr_el1
    fmov d15, x1
    mov v15.d[1], x12
    ldr x30, [sp], #16
.endm

.section .text.run, "ax", @progbits
.globl judge_run
judge_run:
    stp x29, x30, [sp, #-32]!
    str x19, [sp, #16]
    mov x28, x0
    mov x20, #0
    mov x21, #0
    mov x24, #0
    mov x25, #0
    mov x26, #0
    mov x27, #0
    isb
    mrs x22, cntvct_el0
    mov x15, x22
    bl image_sum
    mov x23, x0
    bl store_copies
    mov x4, #0
2:  lsl x0, x4, #PHASE + 2
    bl enter_phase
    bl segments
    // The neighbour's pages.
    PASS x4
    lsl x0, x4, #PHASE + 2
    orr x0, x0, #1 << PHASE
    bl enter_phase
    PASS x4
    cbz x4, 4f
    ldr x1, [x28, #{c_flags}]
    tst x1, #{F_EACH}
    b.ne 3f
    ldr x1, [x28, #{c_passes}]
    cmp x4, x1
    b.ne 4f
3:  bl segments
    // The image.
4:  PASS x4
    lsl x0, x4, #PHASE + 2
    orr x0, x0, #2 << PHASE
    bl enter_phase
    bl image_sum
    cmp x0, x23
    b.eq 5f
    mov x2, x0
    mov x1, x23
    mov x0, x28
    PARK
    bl judge_image_changed
    UNPARK
    bl poison
    bl image_sum
    mov x23, x0
5:  PASS x4
    lsl x0, x4, #PHASE + 2
    orr x0, x0, #3 << PHASE
    bl enter_phase
    PASS x4
    ldr x1, [x28, #{c_passes}]
    cmp x4, x1
    b.hs 6f
    add x4, x4, #1
    b 2b
6:  ldr x0, [x28, #{c_result}]
    stp x20, x21, [x0]
    ldr x19, [sp, #16]
    ldp x29, x30, [sp], #32
    ret

// x0: the sum of all regions that must not change, this stack included. Changes x1 to x5.
image_sum:
    mov x0, #0
    ldr x1, [x28, #{c_regions}]
    ldr x2, [x28, #{c_region_count}]
2:  ldp x3, x4, [x1], #16
3:  cmp x3, x4
    b.hs 4f
    ldr x5, [x3], #8
    ror x0, x0, #59
    add x0, x0, x5
    b 3b
4:  subs x2, x2, #1
    b.ne 2b
    mov x3, sp
    ldr x4, [x28, #{c_stack}]
5:  cmp x3, x4
    b.hs 6f
    ldr x5, [x3], #8
    ror x0, x0, #59
    add x0, x0, x5
    b 5b
6:  ret

// Copies position and checksum, and publishes the position after all that was written before. Changes x0 to x2.
store_copies:
    fmov d15, x20
    mov v15.d[1], x21
    msr tpidr_el0, x20
    msr tpidrro_el0, x21
    adrp x0, published
    add x0, x0, :lo12:published
    ldr x1, [x28, #{c_number}]
    add x0, x0, x1, lsl #2
    lsr x2, x20, #6
    stlr w2, [x0]
    ret

// After a fault: the position says so from now on, in all copies. A position of another time stays what it is, for
// `check_copies` to find. Changes x0 and x1.
poison:
    orr x20, x20, #1 << POISON
    fmov x0, d15
    orr x0, x0, #1 << POISON
    mov x1, v15.d[1]
    mov v15.d[0], x0
    msr tpidr_el0, x0
    msr tpidrro_el0, x1
    ret

// x1: the position at the last boundary. Compares all copies with it. Changes x0 to x6.
check_copies:
    fmov x2, d15
    mrs x3, tpidr_el0
    mrs x4, tpidrro_el0
    adrp x5, published
    add x5, x5, :lo12:published
    ldr x0, [x28, #{c_number}]
    ldr w5, [x5, x0, lsl #2]
    lsr x0, x1, #6
    cmp x2, x1
    b.ne 3f
    cmp x3, x1
    b.ne 3f
    cmp w5, w0
    b.ne 3f
    mov x6, v15.d[1]
    cmp x6, x4
    b.ne 3f
    ret
    // As x86-64 has them: bits 0 to 45 of the position; bits 46 to 63 of it, and bits 0 to 29 of the checksum.
3:  lsr x6, x3, #46
    and x4, x4, #0x3fffffff
    orr x4, x4, x6, lsl #30
    and x3, x3, #0x3fffffffffff
    mov x6, v15.d[1]
    and x6, x6, #0x3fffffff
    orr x5, x5, x6, lsl #32
    mov x0, x28
    PARK
    bl judge_copies_differ
    UNPARK
    b poison

// w0: which positions are lower than the number in all lanes of v4, of those in v0 and v1. Changes v5, v6 and x1.
.macro LOWER first, second
    sub v5.4s, v0.4s, \first
    sub v6.4s, v1.4s, \second
    cmlt v5.4s, v5.4s, #0
    cmlt v6.4s, v6.4s, #0
    and v5.16b, v5.16b, v7.16b
    and v6.16b, v6.16b, v7.16b
    addv s5, v5.4s
    addv s6, v6.4s
    fmov w0, s5
    fmov w1, s6
    orr w0, w0, w1, lsl #4
.endm

// Looks at the positions of all processors: none goes back, and none is more than one phase ahead. What they wrote before
// can be read after it. Changes x0 to x6.
look:
    adrp x3, published
    add x3, x3, :lo12:published
    ldp q0, q1, [x3]
    dmb ish
    adrp x3, weights
    ldr q7, [x3, :lo12:weights]
    mov v2.d[0], x24
    mov v2.d[1], x25
    mov v3.d[0], x26
    mov v3.d[1], x27
    LOWER v2.4s, v3.4s
    mov w3, w0
    lsr x4, x20, #PHASE
    add w4, w4, #2
    lsl w4, w4, #20
    dup v4.4s, w4
    LOWER v4.4s, v4.4s
    ldr x5, [x28, #{c_active}]
    bic w4, w5, w0
    orr w5, w4, w3
    cbnz w5, 2f
    mov x24, v0.d[0]
    mov x25, v0.d[1]
    mov x26, v1.d[0]
    mov x27, v1.d[1]
    ret
2:  mov x0, x28
    // Who is ahead, and of what, in the upper half.
    orr x1, x3, x4, lsl #32
    fmov w6, s4
    mov x2, x24
    mov x3, x25
    mov x4, x26
    mov x5, x27
    PARK
    bl judge_position_wrong
    UNPARK
    adrp x3, published
    add x3, x3, :lo12:published
    ldp x24, x25, [x3]
    ldp x26, x27, [x3, #16]
    b poison

// x0: the position at the start of the next phase. Waits for all processors to be there.
enter_phase:
    mov x19, x30
    mov x11, x0
    and x1, x20, #~63
    bl check_copies
    and x1, x20, #1 << POISON
    orr x20, x11, x1
    tst x20, #3 << PHASE
    b.ne 3f
    ldr x0, [x28, #{c_number}]
    PASS x4
    eor x0, x4, x0, lsl #40
    MIX
    ldr x1, [x28, #{c_seed}]
    eor x0, x0, x1
    MIX
    mov x21, x0
3:  bl store_copies
    b 5f
4:  yield
    bl time
5:  bl look
    // Whose position is lower than the start of this phase.
    adrp x3, weights
    ldr q7, [x3, :lo12:weights]
    lsr x0, x20, #PHASE
    lsl w0, w0, #20
    dup v4.4s, w0
    mov v0.d[0], x24
    mov v0.d[1], x25
    mov v1.d[0], x26
    mov v1.d[1], x27
    LOWER v4.4s, v4.4s
    ldr x1, [x28, #{c_active}]
    tst w0, w1
    b.ne 4b
    br x19

// The time does not go back. Looks at clocks, timers and progress when it is due. x0: the time. Changes x1 to x6.
time:
    isb
    mrs x0, cntvct_el0
    sub x1, x0, x22
    ldr x2, [x28, #{c_clock}]
    cmp x1, x2
    b.hi 3f
    mov x22, x0
    ldr x1, [x28, #{c_number}]
    adrp x2, next_look
    add x2, x2, :lo12:next_look
    ldr x2, [x2, x1, lsl #3]
    cmp x0, x2
    b.hs 4f
    ret
4:  mov x2, x0
    mov x1, x20
    mov x0, x28
    PARK
    bl judge_look
    UNPARK
    cbnz w0, 5f
    mov x0, x22
    ret
3:  mov x1, x22
    mov x22, x0
    mov x2, x0
    mov x0, x28
    PARK
    bl judge_time_jumped
    UNPARK
5:  mov x6, x30
    bl poison
    mov x0, x22
    br x6

boundary:
    fmov d14, x30
    sub x1, x20, #64
    bl check_copies
    bl look
    bl store_copies
    ldr x0, [x28, #{c_flags}]
    tst x0, #{F_DISK}
    b.eq 1f
    tst x20, #{EVERY} - 1
    b.ne 1f
    // While it writes.
    tst x20, #3 << PHASE
    b.ne 1f
    mov x0, x28
    mov x1, x20
    PARK
    bl judge_disks
    UNPARK
    cbz w0, 1f
    bl poison
1:  bl time
    ldr x1, [x28, #{c_flags}]
    tst x1, #{F_RATE}
    b.eq 4f
    ldr x1, [x28, #{c_interval}]
    add x15, x15, x1
    // A deadline that is over, or far away because the clock went back, begins anew.
2:  subs x2, x15, x0
    b.ls 3f
    ldr x1, [x28, #{c_interval}]
    cmp x2, x1, lsl #1
    b.hi 3f
    yield
    bl look
    bl time
    cmp x0, x15
    b.lo 2b
    b 4f
3:  mov x15, x0
4:  fmov x0, d14
    br x0

// x1: the last pass up to x1 that wrote the page at x9, as last() says. Changes x0 and x2 to x5.
last_written:
    ldr x4, [x28, #{c_seed}]
    eor x0, x9, x4
    MIX
    lsr x0, x0, #32
    ldr x5, [x28, #{c_cold}]
    ldr x2, [x28, #{c_hot_set}]
    cmp x0, x2
    b.hs 2f
    ldr x5, [x28, #{c_hot}]
2:  cbz x1, 3f
    ldr x0, [x28, #{c_odd1}]
    mul x0, x1, x0
    add x0, x0, x9
    eor x0, x0, x4
    MIX
    lsr x0, x0, #32
    cmp x0, x5
    b.lo 3f
    sub x1, x1, #1
    b 2b
3:  ret

// The pages of this phase: one's own, or the neighbour's.
segments:
    mov x19, x30
    ldr x10, [x28, #{c_own}]
    tbz x20, #PHASE, segment
    ldr x10, [x28, #{c_other}]
segment:
    ldr x13, [x10, #{s_base}]
    PASS x4
    ldr x0, [x10, #{s_shared}]
    cbz x0, 2f
    // Of each group of shared pages one: which, changes with each pass.
    ldr x0, [x28, #{c_vcpus}]
    udiv x1, x4, x0
    msub x1, x1, x0, x4
    ldr x2, [x28, #{c_number}]
    tbz x20, #PHASE, 1f
    ldr x2, [x28, #{c_neighbour}]
1:  subs x2, x2, x1
    b.pl 1f
    add x2, x2, x0
1:  add x13, x13, x2, lsl #12
2:  ldr x0, [x28, #{c_seed}]
    eor x0, x0, x4
    MIX
    orr x14, x0, #1
    mov x11, #0
3:  ldr x1, [x10, #{s_count}]
    cmp x11, x1
    b.hs 90f
    mov x0, x11
    ldr x2, [x10, #{s_mask}]
    cbz x2, 5f
    ldr x3, [x10, #{s_shift}]
    lsr x4, x14, #32
4:  madd x0, x0, x14, x4
    and x0, x0, x2
    lsr x5, x0, x3
    eor x0, x0, x5
    mul x0, x0, x14
    and x0, x0, x2
    cmp x0, x1
    b.hs 4b
5:  ldr x1, [x10, #{s_stride}]
    madd x9, x0, x1, x13
    add x11, x11, #1
    PASS x6
    cbz x6, 30f
    mov x1, x6
    ldr x0, [x28, #{c_flags}]
    tst x0, #{F_SPARSE}
    b.ne 40f
    tbnz x20, #PHASE, 20f
    sub x1, x1, #1
    // Written by this pass; pass x1 was the last.
10: ldr x0, [x9, #8]
    str x6, [x9, #8]
    cmp x0, x1
    b.ne 50f
    ldr x2, [x9]
    cmp x2, x9
    b.ne 50f
    TAIL x1
    ldr x3, [x9, #4088]
    cmp x2, x3
    b.ne 50f
11: ldr x3, [x9, #4088]
    ror x21, x21, #57
    add x21, x21, x3
    PASS x6
    TAIL x6
    str x2, [x9, #4088]
    b 60f
    // Read; pass x1 was the last.
20: ldr x0, [x9, #8]
    cmp x0, x1
    b.ne 51f
    ldr x2, [x9]
    cmp x2, x9
    b.ne 51f
    TAIL x1
    ldr x3, [x9, #4088]
    cmp x2, x3
    b.ne 51f
21: ldr x3, [x9, #4088]
    ror x21, x21, #57
    add x21, x21, x3
    b 60f
    // The first pass fills.
30: stp x9, x6, [x9]
    TAIL x6
    str x2, [x9, #4088]
    ror x21, x21, #57
    add x21, x21, x2
    b 60f
    // Not all pages are written in each pass.
40: bl last_written
    tbnz x20, #PHASE, 20b
    cmp x1, x6
    b.ne 20b
    sub x1, x1, #1
    bl last_written
    b 10b
50: bl page_wrong
    str x9, [x9]
    b 11b
51: bl page_wrong
    b 21b
60: add x20, x20, #1
    tst x20, #63
    b.ne 3b
    bl boundary
    b 3b
    // The next segment, if there is one.
90: add x10, x10, #{s_size}
    ldr x0, [x28, #{c_own}]
    ldr x1, [x28, #{c_own_count}]
    tbz x20, #PHASE, 1f
    ldr x0, [x28, #{c_other}]
    ldr x1, [x28, #{c_other_count}]
1:  mov x2, #{s_size}
    madd x0, x1, x2, x0
    cmp x10, x0
    b.lo segment
    br x19

// The page at x9: pass x0 is in it, and pass x1 was the last to write it.
page_wrong:
    mov x3, x0
    mov x2, x1
    mov x1, x9
    mov x0, x28
    PARK
    bl judge_page_wrong
    UNPARK
    b poison

.ltorg

.section .rodata.run, "a", @progbits
.balign 16
weights:
    .word 1, 2, 4, 8

// On one page with all else that changes and is not stamped: if that page is old, the positions are old, too.
.section .bss.live, "aw", @nobits
.balign 64
.globl published
published:
    .skip 64
.globl next_look
next_look:
    .skip 64

// What the compiler calls.
.section .text.memory, "ax", @progbits
.globl memcpy
memcpy:
    mov x3, x0
2:  cbz x2, 3f
    ldrb w4, [x1], #1
    strb w4, [x3], #1
    sub x2, x2, #1
    b 2b
3:  ret
.globl memset
memset:
    mov x3, x0
2:  cbz x2, 3f
    strb w1, [x3], #1
    sub x2, x2, #1
    b 2b
3:  ret
.globl memmove
memmove:
    sub x3, x0, x1
    cmp x3, x2
    b.hs memcpy
2:  cbz x2, 3f
    sub x2, x2, #1
    ldrb w4, [x1, x2]
    strb w4, [x0, x2]
    b 2b
3:  ret
.globl memcmp
.globl bcmp
memcmp:
bcmp:
    mov x3, #0
2:  cmp x3, x2
    b.hs 3f
    ldrb w4, [x0, x3]
    ldrb w5, [x1, x3]
    add x3, x3, #1
    subs w4, w4, w5
    b.eq 2b
    mov w0, w4
    ret
3:  mov w0, #0
    ret
