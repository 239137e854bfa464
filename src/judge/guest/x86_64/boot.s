// Entries of the image, from each boot protocol to ring 3.
//
// Everything but this file runs at CPL 3: a KVM without hardware virtualization emulates ring 0 instruction by
// instruction. Page tables, descriptor tables and stacks are accessible from ring 3, so that Rust code sets them up.
// Ports and MSRs are not: `service` is for those.
//
// ebp: the address of the zero page or of PVH's start_info. ebx: which of them, 1 or 2.

.section .head, "ax", @progbits
.code32
.globl start32
start32:
    mov ebp, esi
    mov ebx, 1
    jmp common32
.globl pvh32
pvh32:
    mov ebp, ebx
    mov ebx, 2
    jmp common32

.org 0x200
.code64
.globl start64
start64:
    mov ebp, esi
    mov ebx, 1
    jmp common64

// The rest is behind .setup.
.section .text.boot, "ax", @progbits
// Clears .bss and maps the first 4 GiB with huge pages: present, writable, user, accessed, dirty.
.macro PREPARE di
    cld
    xor eax, eax
    mov edi, offset bss_start
    mov ecx, offset bss_size
    shr ecx, 2
    rep stosd
    mov edi, offset page_tables
    mov eax, offset page_tables + 0x1000 + 0x67
    mov [\di], eax
    add edi, 0x1000
    mov eax, offset page_tables + 0x2000 + 0x67
    mov ecx, 4
2:  mov [\di], eax
    add eax, 0x1000
    add edi, 8
    dec ecx
    jnz 2b
    mov edi, offset page_tables + 0x2000
    mov eax, 0xe7
    mov ecx, 2048
3:  mov [\di], eax
    add eax, 0x200000
    add edi, 8
    dec ecx
    jnz 3b
.endm

// From protected mode without paging to long mode.
.macro LONG target
    mov eax, cr4
    or eax, 0x20
    mov cr4, eax
    mov eax, offset page_tables
    mov cr3, eax
    mov ecx, 0xc0000080
    rdmsr
    or eax, 0x100
    wrmsr
    mov eax, cr0
    or eax, 0x80000001
    mov cr0, eax
    mov esp, offset boot_stack + 256
    push 8
    mov eax, offset \target
    push eax
    retf
.endm

.code32
common32:
    cli
    PREPARE edi
    lgdt [gdt_pointer]
    LONG common

.code64
common64:
    cli
    PREPARE rdi
    lgdt [gdt_pointer]
    mov eax, offset page_tables
    mov cr3, rax
    mov esp, offset boot_stack + 256
    push 8
    mov eax, offset common
    push rax
    retfq

common:
    mov eax, 0x10
    mov ds, eax
    mov es, eax
    mov ss, eax
    mov [boot_kind], ebx
    mov [boot_info], ebp
    xor edi, edi
    jmp enter_user

// A processor that was started, in long mode.
ap_long:
    mov eax, 0x10
    mov ds, eax
    mov es, eax
    mov ss, eax
    mov edi, [ap_index]

// edi: the processor's number. Its TSS, its control registers, and ring 3.
enter_user:
    mov r8d, edi
    mov rax, cr0
    and eax, 0xfffffff3
    or eax, 0x10022
    mov cr0, rax
    mov eax, 7
    xor ecx, ecx
    cpuid
    mov rax, cr4
    or eax, 0x600
    test ebx, 1
    jz 2f
    or eax, 0x10000
2:  mov cr4, rax
    mov esi, r8d
    shl esi, 7
    add esi, offset tss
    mov eax, r8d
    inc eax
    shl eax, 11
    add eax, offset kernel_stacks
    mov [rsi + 4], rax
    mov esp, eax
    mov dword ptr [rsi + 100], 0x00800000
    mov edx, r8d
    shl edx, 4
    lea ecx, [rdx + 0x30]
    add edx, offset gdt + 0x30
    mov eax, esi
    and eax, 0xffff
    shl eax, 16
    or eax, 103
    mov [rdx], eax
    mov eax, esi
    shr eax, 16
    or eax, 0x8900
    mov [rdx + 4], eax
    xor eax, eax
    mov [rdx + 8], rax
    lgdt [gdt_pointer]
    ltr cx
    lidt [idt_pointer]
    mov eax, r8d
    inc eax
    shl eax, 15
    add eax, offset user_stacks
    push 0x1b
    push rax
    push 2
    push 0x23
    mov eax, offset user_entry
    push rax
    mov edi, r8d
    iretq

user_entry:
    mov eax, 0x1b
    mov ds, eax
    mov es, eax
    xor ebp, ebp
    call judge_main
    ud2

// An exception: reported by ring 3, which does not come back.
.macro STUB number, error
    .balign 16
    .if \error == 0
    push 0
    .endif
    push \number
    jmp exception
.endm

.balign 16
.globl exception_stubs
exception_stubs:
    STUB 0, 0
    STUB 1, 0
    STUB 2, 0
    STUB 3, 0
    STUB 4, 0
    STUB 5, 0
    .balign 16
    jmp undefined
    STUB 7, 0
    STUB 8, 1
    STUB 9, 0
    STUB 10, 1
    STUB 11, 1
    STUB 12, 1
    STUB 13, 1
    STUB 14, 1
    STUB 15, 0
    STUB 16, 0
    STUB 17, 1
    STUB 18, 0
    STUB 19, 0
    STUB 20, 0
    STUB 21, 1

exception:
    mov rdi, [rsp]
    mov rsi, [rsp + 8]
    mov rdx, [rsp + 16]
    mov rcx, cr2
    mov eax, offset judge_exception
    mov [rsp + 16], rax
    mov qword ptr [rsp + 24], 0x23
    mov qword ptr [rsp + 32], 2
    mov rax, [rsp + 40]
    and rax, -16
    sub rax, 1032
    mov [rsp + 40], rax
    mov qword ptr [rsp + 48], 0x1b
    add rsp, 16
    iretq

// What ring 3 needs of ring 0. eax: 0 reads MSR ecx, 1 writes rsi to it; 2 reads a byte from port dx, 3 and 4 write a byte
// and a word of esi to it; 5 is CPUID; 6 ends the machine by a triple fault; 7 halts; 8 reads 32 bits from port dx, 9
// writes esi to it; 10 lets interrupts in. It is called by an exception and not by an `int`, which kvm_pvm does not let
// ring 3 do.
.balign 16
.globl service
service:
    ud2
    ret

undefined:
    cmp qword ptr [rsp], offset service
    je 1f
    push 0
    push 6
    jmp exception
1:  add qword ptr [rsp], 2
    cmp eax, 2
    je 3f
    jb 2f
    cmp eax, 4
    je 5f
    jb 4f
    cmp eax, 6
    je 8f
    ja 6f
    mov eax, esi
    cpuid
    iretq
8:  lidt [no_idt]
    ud2
2:  test eax, eax
    jnz 7f
    rdmsr
    shl rdx, 32
    or rax, rdx
    iretq
7:  mov eax, esi
    mov rdx, rsi
    shr rdx, 32
    wrmsr
    iretq
3:  in al, dx
    iretq
4:  mov eax, esi
    out dx, al
    iretq
5:  mov eax, esi
    out dx, ax
    iretq
6:  cmp eax, 9
    je 10f
    ja 11f
    cmp eax, 8
    je 9f
12: cli
    hlt
    jmp 12b
9:  in eax, dx
    iretq
10: mov eax, esi
    out dx, eax
    iretq
    // The flags that ring 3 goes on with.
11: or qword ptr [rsp + 16], 0x200
    iretq

// The local APIC's timer: counted for the processor, whose number its stack tells. No register is kept anywhere.
.balign 16
.globl timer_interrupt
timer_interrupt:
    push rax
    push rcx
    push rdx
    mov rax, rsp
    sub rax, offset kernel_stacks
    shr rax, 11
    inc qword ptr [fired + rax * 8]
    mov rax, [local_apics + rax * 8]
    test rax, rax
    jz 1f
    mov dword ptr [rax + 0xb0], 0
    jmp 2f
1:  mov ecx, 0x80b
    xor eax, eax
    xor edx, edx
    wrmsr
2:  pop rdx
    pop rcx
    pop rax
    iretq

// Any other: the spurious one, which wants no answer.
.balign 16
.globl other_interrupt
other_interrupt:
    iretq

// The trampoline of other processors, copied to 0x8000.
.balign 16
.globl trampoline
trampoline:
.code16
    jmp 2f
    .balign 8
    .word 0xff
    .long gdt
    .word 0
2:  cli
    cld
    xor ax, ax
    mov ds, ax
    lgdt [0x8008]
    mov eax, cr0
    or eax, 1
    mov cr0, eax
    .byte 0x66, 0xea
    .long 0x8000 + trampoline32 - trampoline
    .word 0x28
.code32
trampoline32:
    mov eax, 0x10
    mov ds, eax
    mov es, eax
    mov ss, eax
    LONG ap_long
.globl trampoline_end
trampoline_end:
.code64

// The descriptors have their accessed bits set already, because the image checks that its tables do not change.
.section .gdt, "aw", @progbits
.balign 64
.globl gdt
gdt:
    .quad 0
    .quad 0x00af9b000000ffff
    .quad 0x00cf93000000ffff
    .quad 0x00cff3000000ffff
    .quad 0x00affb000000ffff
    .quad 0x00cf9b000000ffff
    .fill 26, 8, 0
gdt_pointer:
    .word 0xff
    .quad gdt
    .balign 8
idt_pointer:
    .word 0xfff
    .quad idt
    .balign 8
no_idt:
    .word 0
    .quad 0

.section .bss.tables, "aw", @nobits
.balign 4096
// PML4, PDPT, and the directories of the first 4 GiB.
.globl page_tables
page_tables:
    .skip 0x6000
.globl idt
idt:
    .skip 0x1000
tss:
    .skip 8 * 128

.section .bss.stacks, "aw", @nobits
.balign 4096
.globl user_stacks
user_stacks:
    .skip 8 * 32768
kernel_stacks:
    .skip 8 * 2048
boot_stack:
    .skip 256

// Constant while the loop runs.
.section .bss.sealed, "aw", @nobits
.globl boot_info
boot_info:
    .skip 4
.globl boot_kind
boot_kind:
    .skip 4
.globl ap_index
ap_index:
    .skip 4
    .balign 8
// Of each processor: its local APIC's registers; 0 where they are MSRs.
.globl local_apics
local_apics:
    .skip 8 * 8

// Of each processor: timer interrupts.
.section .bss.live, "aw", @nobits
.balign 64
.globl fired
fired:
    .skip 8 * 8

// XEN_ELFNOTE_PHYS32_ENTRY (include/xen/interface/elfnote.h in Linux).
.section .note.pvh, "a", @note
.balign 4
    .long 4, 4, 18
    .asciz "Xen"
    .long pvh32

// The first two sectors of a bzImage (Documentation/arch/x86/boot.rst in Linux). Loaded at any segment, by a boot loader
// or a firmware; VMMs that enter in protected or long mode only read the header.
.section .setup, "ax", @progbits
setup:
.org 0x1f1
    .byte 1
    .word 0
    .long 0
    .word 0, 0, 0
    .word 0xaa55
    .byte 0xeb, setup16 - . - 1
    .ascii "HdrS"
    .word 0x20c
    .long 0
    .word 0, 0
    .byte 0, 1
    .word 0
    .long 0x100000
    .long 0, 0, 0
    .word 0
    .byte 0, 0
    .long 0
    .long 0x7fffffff
    .long 0x1000
    .byte 0, 12
    .word 1
    .long 2047
    .long 0
    .quad 0
    .long 0, 0
    .quad 0
    .quad 0x100000
    .long image_memory
    .long 0
.code16
setup16:
    cli
    cld
    // Not every loader has DS and SS name these sectors: kvmtool has CS name them, too, and others enter 0x20 segments
    // above them at offset 0.
    cmp dword ptr [0x202], 0x53726448
    je 1f
    mov ax, cs
    sub ax, 0x20
    mov ds, ax
1:  mov ax, 0x600
    mov es, ax
    mov ss, ax
    mov esp, 0x1ff0
    xor di, di
    xor ax, ax
    mov cx, 2048
    rep stosw
    mov eax, [0x228]
    mov es:[0x228], eax
    // kvmtool's firmware takes DS, ES and SS for one segment, as they are in Linux, and writes to EDI.
    push ds
    push es
    pop ds
    mov edi, 0x2d0
    xor ebx, ebx
    xor bp, bp
2:  mov eax, 0xe820
    mov edx, 0x534d4150
    mov ecx, 20
    // A firmware may change what it does not return anything in.
    push es
    push edi
    push bp
    int 0x15
    pop bp
    pop edi
    pop es
    push es
    pop ds
    jc 3f
    cmp eax, 0x534d4150
    jne 3f
    add di, 20
    inc bp
    cmp bp, 100
    jae 3f
    test ebx, ebx
    jnz 2b
3:  mov ax, bp
    mov es:[0x1e8], al
    pop ds
    cli
    in al, 0x92
    or al, 2
    and al, 0xfe
    out 0x92, al
    // The GDT's address and the jump's target are known now.
    xor ebx, ebx
    mov bx, ds
    shl ebx, 4
    lea eax, [ebx + 0x3c0]
    mov [0x3e2], eax
    lea eax, [ebx + 0x3a0]
    mov [0x3f0], eax
    lgdt [0x3e0]
    mov eax, cr0
    or eax, 1
    mov cr0, eax
    // jmp far [0x3f0]
    .byte 0x66, 0xff, 0x2e, 0xf0, 0x03
.code32
.org 0x3a0
    mov eax, 0x10
    mov ds, eax
    mov es, eax
    mov ss, eax
    mov esi, 0x6000
    mov eax, 0x100000
    jmp eax
.org 0x3c0
    .quad 0
    .quad 0x00cf9b000000ffff
    .quad 0x00cf93000000ffff
.org 0x3e0
    .word 23
    .long 0
.org 0x3f0
    .long 0
    .word 0x08
.org 0x400
.code64
