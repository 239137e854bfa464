//! A kernel that writes the numbers 1, 2, 3, … to its disk, each into the next of a few sectors. It
//! flushes each one and then prints it on the serial port, as four bytes in little endian. If the
//! disk fails, it prints four bytes with all bits set and stops.

use std::fs;

use support::env::{Machine, TestEnv};
use support::guests::Code;
use support::{Failed, LIMIT, ensure, eventually};
use vellum_kvm::arch::layout::VIRTIO_BASE;
use vellum_kvm::arch::ports::COM1;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_OUT};
use virtio_bindings::virtio_mmio::*;
use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};

/// The number of sectors that it writes to.
pub const SECTORS: u64 = 8;

/// Its stack, the rings of its disk's queue, and its buffers: the headers of both requests, their
/// status, and the data.
const STACK: u64 = 0x18_4000;
const DESCRIPTORS: u64 = 0x19_0000;
const AVAILABLE: u64 = 0x19_1000;
const USED: u64 = 0x19_2000;
const HEADER: u64 = 0x19_3000;
const FLUSH: u64 = 0x19_3010;
const STATUS: u64 = 0x19_3020;
const DATA: u64 = 0x19_4000;

std::arch::global_asm!(
    ".pushsection .rodata.vellum_test_numbered, \"a\", @progbits",
    ".macro vellum_register offset, value",
    "    mov dword ptr [r15 + \\offset], \\value",
    ".endm",
    ".macro vellum_descriptor index, at, length, flags, next",
    "    mov qword ptr [rdi + 16 * \\index], \\at",
    "    mov dword ptr [rdi + 16 * \\index + 8], \\length",
    "    mov word ptr [rdi + 16 * \\index + 12], \\flags",
    "    mov word ptr [rdi + 16 * \\index + 14], \\next",
    ".endm",
    ".globl vellum_test_numbered",
    ".globl vellum_test_numbered_end",
    "vellum_test_numbered:",
    "    mov r15d, {BASE}",
    "    mov esp, {STACK}",
    "    vellum_register {R_STATUS}, 3",
    "    vellum_register {R_FEATURES_SEL}, 0",
    "    vellum_register {R_FEATURES}, {F_FLUSH}",
    "    vellum_register {R_FEATURES_SEL}, 1",
    "    vellum_register {R_FEATURES}, 1",
    "    vellum_register {R_STATUS}, 0xb",
    "    vellum_register {R_QUEUE_NUM}, 16",
    "    vellum_register {R_QUEUE_DESC}, {DESCRIPTORS}",
    "    vellum_register {R_QUEUE_AVAIL}, {AVAILABLE}",
    "    vellum_register {R_QUEUE_USED}, {USED}",
    "    vellum_register {R_QUEUE_READY}, 1",
    "    vellum_register {R_STATUS}, 0xf",
    "    mov edi, {DESCRIPTORS}",
    "    vellum_descriptor 0, {HEADER}, 16, {NEXT}, 1",
    "    vellum_descriptor 1, {DATA}, 512, {NEXT}, 2",
    "    vellum_descriptor 2, {STATUS}, 1, {WRITE}, 0",
    "    vellum_descriptor 3, {FLUSH}, 16, {NEXT}, 2",
    "    mov dword ptr [{HEADER}], {T_OUT}",
    "    mov dword ptr [{FLUSH}], {T_FLUSH}",
    "    xor ebx, ebx",
    "2:  inc ebx",
    "    mov eax, ebx",
    "    and eax, {SECTORS} - 1",
    "    mov dword ptr [{HEADER} + 8], eax",
    "    mov dword ptr [{DATA}], ebx",
    "    xor eax, eax",
    "    call 5f",
    "    mov eax, 3",
    "    call 5f",
    "    mov eax, ebx",
    "    call 3f",
    "    jmp 2b",
    // Prints eax.
    "3:  mov edx, {COM1}",
    "    mov ecx, 4",
    "4:  out dx, al",
    "    shr eax, 8",
    "    dec ecx",
    "    jnz 4b",
    "    ret",
    // Submits the chain that begins with descriptor eax, and waits for it.
    "5:  mov byte ptr [{STATUS}], 0xff",
    "    movzx ecx, word ptr [{AVAILABLE} + 2]",
    "    mov edx, ecx",
    "    and edx, 15",
    "    mov word ptr [{AVAILABLE} + rdx * 2 + 4], ax",
    "    inc ecx",
    "    mov word ptr [{AVAILABLE} + 2], cx",
    "    mov dword ptr [r15 + {R_NOTIFY}], 0",
    "6:  pause",
    "    cmp word ptr [{USED} + 2], cx",
    "    jne 6b",
    "    cmp byte ptr [{STATUS}], 0",
    "    jne 7f",
    "    ret",
    "7:  mov eax, -1",
    "    call 3b",
    "8:  jmp 8b",
    "vellum_test_numbered_end:",
    ".popsection",
    BASE = const VIRTIO_BASE,
    STACK = const STACK,
    DESCRIPTORS = const DESCRIPTORS,
    AVAILABLE = const AVAILABLE,
    USED = const USED,
    HEADER = const HEADER,
    FLUSH = const FLUSH,
    STATUS = const STATUS,
    DATA = const DATA,
    SECTORS = const SECTORS,
    COM1 = const COM1,
    NEXT = const VRING_DESC_F_NEXT,
    WRITE = const VRING_DESC_F_WRITE,
    T_OUT = const VIRTIO_BLK_T_OUT,
    T_FLUSH = const VIRTIO_BLK_T_FLUSH,
    F_FLUSH = const 1u32 << VIRTIO_BLK_F_FLUSH,
    R_STATUS = const VIRTIO_MMIO_STATUS,
    R_FEATURES_SEL = const VIRTIO_MMIO_DRIVER_FEATURES_SEL,
    R_FEATURES = const VIRTIO_MMIO_DRIVER_FEATURES,
    R_QUEUE_NUM = const VIRTIO_MMIO_QUEUE_NUM,
    R_QUEUE_DESC = const VIRTIO_MMIO_QUEUE_DESC_LOW,
    R_QUEUE_AVAIL = const VIRTIO_MMIO_QUEUE_AVAIL_LOW,
    R_QUEUE_USED = const VIRTIO_MMIO_QUEUE_USED_LOW,
    R_QUEUE_READY = const VIRTIO_MMIO_QUEUE_READY,
    R_NOTIFY = const VIRTIO_MMIO_QUEUE_NOTIFY,
);

unsafe extern "C" {
    static vellum_test_numbered: u8;
    static vellum_test_numbered_end: u8;
}

/// The kernel as an image.
pub fn kernel() -> Vec<u8> {
    let length = &raw const vellum_test_numbered_end as usize - &raw const vellum_test_numbered as usize;
    // SAFETY: the two symbols bound one section's bytes, which are never written.
    let bytes = unsafe { std::slice::from_raw_parts(&raw const vellum_test_numbered, length) };
    Code(bytes.to_vec()).elf64()
}

/// The same kernel, which never flushes.
pub fn without_flushes() -> Vec<u8> {
    // mov eax, 3; call 5f
    const FLUSHES: [u8; 6] = [0xb8, 3, 0, 0, 0, 0xe8];
    const NOP: u8 = 0x90;
    let mut image = kernel();
    let at = image.windows(FLUSHES.len()).position(|bytes| bytes == FLUSHES).expect("it flushes");
    image[at..at + FLUSHES.len() + 4].fill(NOP);
    image
}

/// The arguments for the disk, and for a serial port that leads to the file `serial`.
pub fn devices(env: &TestEnv, serial: &str) -> String {
    format!("--disk {} --serial file={}", env.path("disk").display(), env.path(serial).display())
}

/// A machine called `here` that runs the kernel and has printed some numbers to the file `out`.
pub fn here(env: &TestEnv) -> Result<Machine, Failed> {
    fs::write(env.path("kernel"), kernel())?;
    fs::write(env.path("disk"), [0; 512 * SECTORS as usize])?;
    let kernel = env.path("kernel");
    let line = format!("run --kernel {} --memory 32m {}", kernel.display(), devices(env, "out"));
    let here = env.run("here", &line)?;
    has_printed(env, "out")?;
    Ok(here)
}

/// Waits until there are some numbers in the file `serial`.
pub fn has_printed(env: &TestEnv, serial: &str) -> Result<(), Failed> {
    eventually(LIMIT, "it writes", || Ok((fs::metadata(env.path(serial))?.len() > 200).then_some(())))
}

/// Checks that the numbers in `out`, and then those in `far`, are consecutive.
pub fn go_on(env: &TestEnv) -> Result<(), Failed> {
    let all = [fs::read(env.path("out"))?, fs::read(env.path("far"))?].concat();
    let numbers = all.as_chunks::<4>().0.iter().map(|number| u32::from_le_bytes(*number));
    let wrong = numbers.zip(1..).find(|(number, due)| number != due);
    ensure(wrong.is_none(), || format!("said and due: {wrong:?}"))
}
