// The loop of a processor: what it writes, reads and compares, and the state that it keeps in registers.
//
//     r12    position: poison (bit 61), phase (bits 26 to 60), accesses in the phase (bits 0 to 25)
//     r13    running checksum of the pass
//     r14    pass                        rdi  the processor's parameters
//     r15    the last TSC                rbx  segment     rbp  index in it    r8  segments left
//     xmm12, xmm13  the last position seen of each processor, 32 bits each     r9   its address
//     xmm14  sum of the image            r10  multiplier of the order
//     xmm15  position and checksum at the last boundary; FS and GS base hold the same (`SET_BASES`)     r11  deadline
//
// A boundary is a multiple of 64 accesses, or a change of phase. There all copies are compared and renewed. Rust code may
// use any of these registers. While it runs, r12, r13, xmm12 to xmm14 and the upper half of xmm15 are in the MMX registers,
// and the lower half of xmm15 is in r14, which Rust may save on the stack. So a position that the FPU's state has lost
// differs from the one that memory has. The pass is derived from the position again. The others are on the stack: they
// determine which page comes next, and a wrong one is seen in what the page holds. schedule.rs has the same functions for
// the host.

.set POISON, {POISON}
.set PHASE, {PHASE}

// rax: mixed, as mix() does. Changes rcx.
.macro MIX
    movabs rcx, 0x9e3779b97f4a7c15
    add rax, rcx
    mov rcx, rax
    shr rcx, 30
    xor rax, rcx
    movabs rcx, 0xbf58476d1ce4e5b9
    imul rax, rcx
    mov rcx, rax
    shr rcx, 27
    xor rax, rcx
    movabs rcx, 0x94d049bb133111eb
    imul rax, rcx
    mov rcx, rax
    shr rcx, 31
    xor rax, rcx
.endm

// rcx: the last word of the page at rsi when pass \pass has written it, as tail() says.
.macro TAIL pass
    mov rcx, \pass
    imul rcx, [rdi + {c_odd1}]
    xor rcx, rsi
    add rcx, [rdi + {c_seed}]
    imul rcx, [rdi + {c_odd2}]
    rol rcx, 29
.endm

.macro PARK
    push rdi
    push rsi
    push r8
    push r9
    push r10
    push r11
    movdq2q mm0, xmm12
    pshufd xmm0, xmm12, 0xee
    movdq2q mm1, xmm0
    movdq2q mm2, xmm13
    pshufd xmm0, xmm13, 0xee
    movdq2q mm3, xmm0
    movdq2q mm4, xmm14
    pshufd xmm0, xmm15, 0xee
    movdq2q mm5, xmm0
    movq mm6, r12
    movq mm7, r13
    movq r14, xmm15
    mov r12, rsp
    and rsp, -16
.endm

// r14: the pass of the position. Changes nothing else.
.macro SET_PASS
    mov r14, r12
    btr r14, POISON
    shr r14, PHASE + 2
.endm

.macro UNPARK
    mov rsp, r12
    movq r12, mm6
    movq r13, mm7
    movq2dq xmm12, mm0
    movq2dq xmm0, mm1
    punpcklqdq xmm12, xmm0
    movq2dq xmm13, mm2
    movq2dq xmm0, mm3
    punpcklqdq xmm13, xmm0
    movq2dq xmm14, mm4
    movq xmm15, r14
    movq2dq xmm0, mm5
    punpcklqdq xmm15, xmm0
    SET_PASS
    pop r11
    pop r10
    pop r9
    pop r8
    pop rsi
    pop rdi
.endm

.section .text.run, "ax", @progbits
.globl judge_run
judge_run:
    push rbx
    push rbp
    push r12
    push r13
    push r14
    push r15
    xor r12d, r12d
    xor r13d, r13d
    xor r14d, r14d
    pxor xmm12, xmm12
    pxor xmm13, xmm13
    rdtsc
    shl rdx, 32
    or rax, rdx
    mov r15, rax
    mov r11, rax
    call image_sum
    movq xmm14, rax
    call store_copies
2:  mov rax, r14
    shl rax, PHASE + 2
    call enter_phase
    mov rbx, [rdi + {c_own}]
    mov r8, [rdi + {c_own_count}]
    call segments
    // The neighbour's pages.
    mov rax, r14
    shl rax, PHASE + 2
    bts rax, PHASE
    call enter_phase
    test r14, r14
    jz 4f
    test dword ptr [rdi + {c_flags}], {F_EACH}
    jnz 3f
    cmp r14, [rdi + {c_passes}]
    jne 4f
3:  mov rbx, [rdi + {c_other}]
    mov r8, [rdi + {c_other_count}]
    call segments
    // The image.
4:  mov rax, r14
    shl rax, PHASE + 2
    bts rax, PHASE + 1
    call enter_phase
    call image_sum
    movq rdx, xmm14
    cmp rax, rdx
    je 5f
    mov rcx, rax
    PARK
    mov rsi, rdx
    mov rdx, rcx
    call judge_image_changed
    UNPARK
    call poison
    call image_sum
    movq xmm14, rax
5:  mov rax, r14
    shl rax, PHASE + 2
    bts rax, PHASE
    bts rax, PHASE + 1
    call enter_phase
    cmp r14, [rdi + {c_passes}]
    jae 6f
    inc r14
    jmp 2b
6:  mov rax, [rdi + {c_result}]
    mov [rax], r12
    mov [rax + 8], r13
    pop r15
    pop r14
    pop r13
    pop r12
    pop rbp
    pop rbx
    ret

// rax: the sum of all regions that must not change, this stack included. Changes rcx, rdx, rsi, r8.
image_sum:
    xor eax, eax
    mov rcx, [rdi + {c_regions}]
    mov rdx, [rdi + {c_region_count}]
2:  mov rsi, [rcx]
    mov r8, [rcx + 8]
3:  cmp rsi, r8
    jae 4f
    rol rax, 5
    add rax, [rsi]
    add rsi, 8
    jmp 3b
4:  add rcx, 16
    dec rdx
    jnz 2b
    // Below the return address, which differs from call to call.
    lea rsi, [rsp + 8]
5:  cmp rsi, [rdi + {c_stack}]
    jae 6f
    rol rax, 5
    add rax, [rsi]
    add rsi, 8
    jmp 5b
6:  ret

// FS base := bits 0 to 45 of the position; GS base := bits 46 to 63 of it, and bits 0 to 29 of the checksum. Both are
// canonical addresses then. Changes rax, rcx, rdx, rsi. What runs at every boundary uses as little of the stack as it can:
// where registers and memory are of two times, a return address may be of neither, and the image crashes before it judges.
.macro SET_BASES
    movabs rsi, 0x3fffffffffff
    and rsi, r12
    mov rax, r12
    shr rax, 46
    shl rax, 30
    mov edx, r13d
    and edx, 0x3fffffff
    or rdx, rax
    test dword ptr [rdi + {c_flags}], {F_FSGSBASE}
    jz 7f
    wrfsbase rsi
    wrgsbase rdx
    jmp 8f
7:  push rdx
    mov ecx, 0xc0000100
    mov eax, 1
    call service
    pop rsi
    mov ecx, 0xc0000101
    mov eax, 1
    call service
8:
.endm

// rax: FS base; rdx: GS base.
.macro GET_BASES
    test dword ptr [rdi + {c_flags}], {F_FSGSBASE}
    jz 7f
    rdfsbase rax
    rdgsbase rdx
    jmp 8f
7:  push rcx
    mov ecx, 0xc0000101
    xor eax, eax
    call service
    push rax
    mov ecx, 0xc0000100
    xor eax, eax
    call service
    pop rdx
    pop rcx
8:
.endm

// Copies position and checksum, and publishes the position.
store_copies:
    movq xmm15, r12
    movq xmm0, r13
    punpcklqdq xmm15, xmm0
    SET_BASES
    mov rax, r12
    shr rax, 6
    mov rcx, [rdi + {c_number}]
    mov [published + rcx * 4], eax
    ret

// After a fault: the position says so from now on, in all copies. A position of another time stays what it is, for
// `check_copies` to find.
poison:
    bts r12, POISON
    push r12
    push r13
    pshufd xmm0, xmm15, 0xee
    movq r13, xmm0
    movq r12, xmm15
    bts r12, POISON
    movq xmm15, r12
    punpcklqdq xmm15, xmm0
    push rsi
    SET_BASES
    pop rsi
    pop r13
    pop r12
    ret

// rcx: the position at the last boundary. Compares all copies with it.
check_copies:
    movq xmm5, r9
    movq xmm6, r10
    movq r9, xmm15
    pshufd xmm0, xmm15, 0xee
    movq r10, xmm0
    GET_BASES
    cmp r9, rcx
    jne 3f
    movabs rsi, 0x3fffffffffff
    and rsi, rcx
    cmp rsi, rax
    jne 3f
    mov rsi, rcx
    shr rsi, 46
    shl rsi, 30
    mov r9d, r10d
    and r9d, 0x3fffffff
    or rsi, r9
    cmp rsi, rdx
    jne 3f
    mov rsi, [rdi + {c_number}]
    mov esi, [published + rsi * 4]
    mov r9, rcx
    shr r9, 6
    cmp esi, r9d
    jne 3f
    movq r9, xmm5
    movq r10, xmm6
    ret
3:  movq r9, xmm5
    movq r10, xmm6
    movq xmm7, rcx
    PARK
    movq rsi, xmm7
    mov r8, rdx
    mov rcx, rax
    movq rdx, xmm15
    mov r9, [rdi + {c_number}]
    mov r9d, [published + r9 * 4]
    // With the bits of the checksum that the GS base has, in the upper half.
    movq rax, mm5
    and eax, 0x3fffffff
    shl rax, 32
    or r9, rax
    call judge_copies_differ
    UNPARK
    jmp poison

// Looks at the positions of all processors: none goes back, and none is more than one phase ahead.
look:
    movdqa xmm0, [published]
    movdqa xmm2, [published + 16]
    movdqa xmm1, xmm0
    psubd xmm1, xmm12
    movmskps eax, xmm1
    movdqa xmm3, xmm2
    psubd xmm3, xmm13
    movmskps ecx, xmm3
    shl ecx, 4
    or eax, ecx
    mov rdx, r12
    shr rdx, PHASE
    add edx, 2
    shl edx, PHASE - 6
    movd xmm4, edx
    pshufd xmm4, xmm4, 0
    movdqa xmm1, xmm0
    psubd xmm1, xmm4
    movmskps ecx, xmm1
    movdqa xmm3, xmm2
    psubd xmm3, xmm4
    movmskps edx, xmm3
    shl edx, 4
    or ecx, edx
    not ecx
    and ecx, [rdi + {c_active}]
    mov edx, eax
    or edx, ecx
    jnz 2f
    movdqa xmm12, xmm0
    movdqa xmm13, xmm2
    ret
2:  PARK
    // Who is ahead, and of what, in the upper halves.
    shl rcx, 32
    mov esi, eax
    or rsi, rcx
    movd eax, xmm4
    push rax
    push rax
    movq rdx, xmm12
    pshufd xmm0, xmm12, 0xee
    movq rcx, xmm0
    movq r8, xmm13
    pshufd xmm0, xmm13, 0xee
    movq r9, xmm0
    call judge_position_wrong
    UNPARK
    movdqa xmm12, [published]
    movdqa xmm13, [published + 16]
    jmp poison

// rax: the position at the start of the next phase. Waits for all processors to be there.
enter_phase:
    push rax
    mov rcx, r12
    and rcx, -64
    call check_copies
    pop rax
    btr r12, POISON
    jnc 2f
    bts rax, POISON
2:  mov r12, rax
    SET_PASS
    bt rax, PHASE
    jc 3f
    bt rax, PHASE + 1
    jc 3f
    mov rax, [rdi + {c_number}]
    shl rax, 40
    xor rax, r14
    MIX
    xor rax, [rdi + {c_seed}]
    MIX
    mov r13, rax
3:  call store_copies
    jmp 5f
4:  pause
    call time
5:  call look
    // Whose position is lower than the start of this phase.
    mov rax, r12
    shr rax, PHASE
    shl eax, PHASE - 6
    movd xmm4, eax
    pshufd xmm4, xmm4, 0
    movdqa xmm0, xmm12
    psubd xmm0, xmm4
    movmskps eax, xmm0
    movdqa xmm0, xmm13
    psubd xmm0, xmm4
    movmskps ecx, xmm0
    shl ecx, 4
    or eax, ecx
    and eax, [rdi + {c_active}]
    jnz 4b
    ret

// The time does not go back. Looks at clocks, timers and progress when it is due. rax: the time.
time:
    rdtsc
    shl rdx, 32
    or rax, rdx
    mov rcx, rax
    sub rcx, r15
    cmp rcx, [rdi + {c_clock}]
    ja 3f
    mov r15, rax
    mov rcx, [rdi + {c_number}]
    cmp rax, [next_look + rcx * 8]
    jb 2f
    push rax
    PARK
    movq rsi, mm6
    mov rdx, rax
    call judge_look
    mov rcx, rax
    UNPARK
    pop rax
    test ecx, ecx
    jnz 4f
2:  ret
3:  mov rcx, r15
    mov r15, rax
    push rax
    PARK
    mov rsi, rcx
    mov rdx, rax
    call judge_time_jumped
    UNPARK
    pop rax
4:  push rax
    call poison
    pop rax
    ret

boundary:
    lea rcx, [r12 - 64]
    call check_copies
    call look
    call store_copies
    test dword ptr [rdi + {c_flags}], {F_DISK}
    jz 1f
    test r12d, {EVERY} - 1
    jnz 1f
    // While it writes.
    mov rax, r12
    shr rax, PHASE
    test eax, 3
    jnz 1f
    PARK
    movq rsi, mm6
    call judge_disks
    mov rcx, rax
    UNPARK
    test ecx, ecx
    jz 1f
    call poison
1:  call time
    test dword ptr [rdi + {c_flags}], {F_RATE}
    jz 3f
    add r11, [rdi + {c_interval}]
    cmp r11, rax
    jae 2f
    mov r11, rax
    ret
2:  // After a clock that went back, the deadline is far away.
    mov rcx, r11
    sub rcx, rax
    shr rcx
    cmp rcx, [rdi + {c_interval}]
    ja 4f
    pause
    call look
    call time
    cmp rax, r11
    jb 2b
3:  ret
4:  mov r11, rax
    ret

// rdx: the last pass up to rdx that wrote the page at rsi, as last() says. Changes rax, rcx.
last_written:
    push r8
    mov rax, rsi
    xor rax, [rdi + {c_seed}]
    MIX
    shr rax, 32
    mov r8, [rdi + {c_cold}]
    cmp rax, [rdi + {c_hot_set}]
    jae 2f
    mov r8, [rdi + {c_hot}]
2:  test rdx, rdx
    jz 3f
    mov rax, rdx
    imul rax, [rdi + {c_odd1}]
    add rax, rsi
    xor rax, [rdi + {c_seed}]
    MIX
    shr rax, 32
    cmp rax, r8
    jb 3f
    dec rdx
    jmp 2b
3:  pop r8
    ret

// Each page of r8 segments, from rbx on, in this phase's way.
segments:
    mov r9, [rbx + {s_base}]
    cmp qword ptr [rbx + {s_shared}], 0
    je 2f
    // Of each group of shared pages one: which, changes with each pass.
    mov rax, r14
    xor edx, edx
    div qword ptr [rdi + {c_vcpus}]
    mov rax, [rdi + {c_number}]
    bt r12, PHASE
    jnc 1f
    mov rax, [rdi + {c_neighbour}]
1:  sub rax, rdx
    jns 1f
    add rax, [rdi + {c_vcpus}]
1:  shl rax, 12
    add r9, rax
2:  mov rax, r14
    xor rax, [rdi + {c_seed}]
    MIX
    or rax, 1
    mov r10, rax
    xor ebp, ebp
3:  cmp rbp, [rbx + {s_count}]
    jae 9f
    mov rax, rbp
    mov rdx, [rbx + {s_mask}]
    test rdx, rdx
    jz 5f
    mov rcx, [rbx + {s_shift}]
4:  imul rax, r10
    mov rsi, r10
    shr rsi, 32
    add rax, rsi
    and rax, rdx
    mov rsi, rax
    shr rsi, cl
    xor rax, rsi
    imul rax, r10
    and rax, rdx
    cmp rax, [rbx + {s_count}]
    jae 4b
5:  imul rax, [rbx + {s_stride}]
    lea rsi, [rax + r9]
    inc rbp
    test r14, r14
    jz 30f
    mov rdx, r14
    test dword ptr [rdi + {c_flags}], {F_SPARSE}
    jnz 40f
    bt r12, PHASE
    jc 20f
    dec rdx
    // Written by this pass; pass rdx was the last. The first access is a store: a load would have the host map the page twice.
10: mov rax, r14
    xchg [rsi + 8], rax
    cmp rax, rdx
    jne 50f
    cmp [rsi], rsi
    jne 50f
    TAIL rdx
    cmp rcx, [rsi + 4088]
    jne 50f
11: rol r13, 7
    add r13, [rsi + 4088]
    TAIL r14
    mov [rsi + 4088], rcx
    jmp 60f
    // Read; pass rdx was the last.
20: cmp [rsi + 8], rdx
    jne 51f
    cmp [rsi], rsi
    jne 51f
    TAIL rdx
    cmp rcx, [rsi + 4088]
    jne 51f
21: rol r13, 7
    add r13, [rsi + 4088]
    jmp 60f
    // The first pass fills.
30: mov [rsi], rsi
    mov [rsi + 8], r14
    TAIL r14
    mov [rsi + 4088], rcx
    rol r13, 7
    add r13, rcx
    jmp 60f
    // Not all pages are written in each pass.
40: call last_written
    bt r12, PHASE
    jc 20b
    cmp rdx, r14
    jne 20b
    dec rdx
    call last_written
    jmp 10b
50: call page_wrong
    mov [rsi], rsi
    jmp 11b
51: mov rax, [rsi + 8]
    call page_wrong
    jmp 21b
60: inc r12
    test r12d, 63
    jnz 3b
    call boundary
    jmp 3b
9:  add rbx, {s_size}
    dec r8
    jnz segments
    ret

// The page at rsi: pass rax is in it, and pass rdx was the last to write it.
page_wrong:
    PARK
    mov rcx, rax
    call judge_page_wrong
    UNPARK
    jmp poison

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
    mov rax, rdi
    mov rcx, rdx
    rep movsb
    ret
.globl memset
memset:
    mov r8, rdi
    mov eax, esi
    mov rcx, rdx
    rep stosb
    mov rax, r8
    ret
.globl memmove
memmove:
    mov rax, rdi
    mov rcx, rdx
    mov r8, rdi
    sub r8, rsi
    cmp r8, rdx
    jb 2f
    rep movsb
    ret
2:  lea rdi, [rdi + rdx - 1]
    lea rsi, [rsi + rdx - 1]
    std
    rep movsb
    cld
    ret
.globl memcmp
.globl bcmp
memcmp:
bcmp:
    xor ecx, ecx
2:  cmp rcx, rdx
    jae 3f
    movzx eax, byte ptr [rdi + rcx]
    movzx r8d, byte ptr [rsi + rcx]
    inc rcx
    sub eax, r8d
    jz 2b
    ret
3:  xor eax, eax
    ret
