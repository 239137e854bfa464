//! Lines on the console.

use core::mem::offset_of;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};

use crate::arch::{self, load, store};
use crate::virtio::{Device, Place, Rings, SIZE};
use crate::{Shared, find};

/// A part of a line.
pub(crate) enum Item<'a> {
    Text(&'a str),
    /// Text that structures the line and is not a value.
    Name(&'static str),
    Number(u64),
    Address(u64),
}

#[unsafe(link_section = ".bss.live")]
static LOCK: AtomicU32 = AtomicU32::new(0);

/// What the lines are printed on.
#[derive(Clone, Copy)]
pub(crate) enum Output {
    /// Nothing.
    None,
    /// The serial port that [`arch::put`] writes to.
    Port,
    /// A 16550 in memory. Register N is at `base` + (N << `shift`), and takes `width` bytes.
    Uart { base: u64, shift: u32, width: u32 },
    /// A PL011.
    Pl011(u64),
    /// A virtio console.
    Virtio(Device),
}

impl Output {
    /// The address of a serial port in memory.
    fn address(self) -> u64 {
        match self {
            Self::Uart { base, .. } | Self::Pl011(base) => base,
            _ => 0,
        }
    }
}

#[unsafe(link_section = ".data.sealed")]
static OUTPUT: Shared<Output> = Shared::new(Output::None);
/// A port that once did not take a byte in time is not waited for any more.
#[unsafe(link_section = ".bss.live")]
static IS_STUCK: AtomicBool = AtomicBool::new(false);

/// Opens the serial port that does not need the data of the boot protocol.
pub(crate) fn open() {
    if arch::open_console() {
        set(Output::Port);
    }
}

/// Opens another console, if there is none yet: the one that the command line names, a serial port
/// in memory, or a virtio console. With `console=hvc0` a virtio console comes first.
pub(crate) fn find(line: &[u8]) {
    let is_virtio = line.split(|byte| *byte <= b' ').any(|word| word == b"console=hvc0");
    let virtio = if is_virtio { find::console() } else { None };
    // SAFETY: only the first processor runs.
    let has_none = matches!(unsafe { *OUTPUT.get() }, Output::None);
    let found = match virtio {
        None if has_none => {
            let serial = of_earlycon(line).filter(|output| arch::is_mapped(output.address()));
            serial.or_else(arch::find_serial).or_else(find::console)
        }
        virtio => virtio,
    };
    if let Some(output) = found {
        set(output);
    }
}

fn set(output: Output) {
    // SAFETY: only the first processor runs.
    unsafe { *OUTPUT.get() = output }
}

/// The serial port that Linux's option `earlycon=` or `console=` names by its address.
fn of_earlycon(line: &[u8]) -> Option<Output> {
    line.split(|byte| *byte <= b' ').filter_map(output_of_word).next_back()
}

fn output_of_word(word: &[u8]) -> Option<Output> {
    let value = word.strip_prefix(b"earlycon=").or_else(|| word.strip_prefix(b"console="))?;
    let mut parts = value.split(|byte| *byte == b',');
    let kind = parts.next()?;
    let mut access = parts.next()?;
    // The address alone is the first word, of a PL011; or a kind of access is.
    let mut address = number(access);
    if address.is_none() {
        address = number(parts.next()?);
    } else {
        access = b"mmio";
    }
    let base = address.filter(|base| *base % 4 == 0 && *base < 1 << 38)?;
    match (kind, access) {
        (b"pl011", b"mmio" | b"mmio32") => Some(Output::Pl011(base)),
        (b"uart8250" | b"uart" | b"ns16550a", b"mmio") => Some(Output::Uart { base, shift: 0, width: 1 }),
        (b"uart8250" | b"uart" | b"ns16550a", b"mmio32") => Some(Output::Uart { base, shift: 2, width: 4 }),
        _ => None,
    }
}

/// A hexadecimal number behind 0x.
fn number(text: &[u8]) -> Option<u64> {
    let digits = text.strip_prefix(b"0x").filter(|digits| (1..=16).contains(&digits.len()))?;
    digits.iter().try_fold(0, |number, digit| Some(number << 4 | u64::from((*digit as char).to_digit(16)?)))
}

fn put(byte: u8) {
    // SAFETY: constant since it was opened.
    match unsafe { *OUTPUT.get() } {
        Output::None => {}
        Output::Port => arch::put(byte),
        Output::Uart { base, shift, width } => {
            let register = |number: u64| base + (number << shift);
            // LSR: the transmitter takes a byte.
            waits(|| {
                let at = register(5);
                let status = if width == 4 { load::<u32>(at) as u8 } else { load::<u8>(at) };
                status & 0x20 != 0
            });
            if width == 4 { store(base, u32::from(byte)) } else { store(base, byte) }
        }
        Output::Pl011(base) => {
            // UARTFR: the FIFO is not full.
            waits(|| load::<u32>(base + 0x18) & 0x20 == 0);
            store(base, u32::from(byte));
        }
        Output::Virtio(device) => virtio_put(device, byte),
    }
}

/// Waits for a console, for a bounded time.
fn waits(done: impl Fn() -> bool) {
    for _ in 0..1_000_000 {
        if IS_STUCK.load(Ordering::Relaxed) || done() {
            return;
        }
        core::hint::spin_loop();
    }
    IS_STUCK.store(true, Ordering::Relaxed);
}

/// The virtio device ID of a console, whose second queue takes what it prints.
pub(crate) const VIRTIO: u32 = 3;
const TRANSMIT: u16 = 1;
const LINE: usize = 256;

/// The memory that a virtio console and its driver share, in the layout of [`Rings`].
#[repr(C, align(4096))]
struct Memory {
    /// The first descriptor is the only one in use: address, length and flags.
    descriptor: [u64; 2],
    descriptors: [[u64; 2]; SIZE as usize - 1],
    available_flags: u16,
    available_index: u16,
    available: [u16; SIZE as usize],
    line: [u8; LINE],
    fill: [u8; 4096 - 18 * SIZE as usize - 4 - LINE],
    used_flags: u16,
    used_index: u16,
    used: [u8; 4092],
}

static MEMORY: Shared<Memory> = Shared::new(Memory {
    descriptor: [0; 2],
    descriptors: [[0; 2]; SIZE as usize - 1],
    available_flags: 0,
    available_index: 0,
    available: [0; SIZE as usize],
    line: [0; LINE],
    fill: [0; 4096 - 18 * SIZE as usize - 4 - LINE],
    used_flags: 0,
    used_index: 0,
    used: [0; 4092],
});
/// Bytes in the line, and the lines that were given to the device.
#[unsafe(link_section = ".bss.live")]
static PRINTED: Shared<(u64, u16)> = Shared::new((0, 0));

/// Starts the virtio console at `place`.
pub(crate) fn of_virtio(place: Place) -> Option<Output> {
    let memory = MEMORY.get() as u64;
    let rings = Rings {
        descriptors: memory,
        available: memory + offset_of!(Memory, available_flags) as u64,
        used: memory + offset_of!(Memory, used_flags) as u64,
    };
    // VIRTQ_AVAIL_F_NO_INTERRUPT.
    store(rings.available, 1u16);
    store(memory, memory + offset_of!(Memory, line) as u64);
    let (device, _) = place.start(TRANSMIT, &rings).ok()?;
    Some(Output::Virtio(device))
}

fn virtio_put(device: Device, byte: u8) {
    let memory = MEMORY.get() as u64;
    // SAFETY: the caller has the lock.
    let (length, lines) = unsafe { &mut *PRINTED.get() };
    store(memory + offset_of!(Memory, line) as u64 + *length, byte);
    *length += 1;
    if byte != b'\n' && *length < LINE as u64 {
        return;
    }
    // The length, and no flags: the device reads.
    store(memory + 8, *length);
    store(memory + offset_of!(Memory, available) as u64 + 2 * u64::from(*lines % SIZE), 0u16);
    (*length, *lines) = (0, lines.wrapping_add(1));
    fence(Ordering::SeqCst);
    store(memory + offset_of!(Memory, available_index) as u64, *lines);
    fence(Ordering::SeqCst);
    device.notify();
    let expected = *lines;
    waits(|| load::<u16>(memory + offset_of!(Memory, used_index) as u64) == expected);
}

/// Prints a line. Lines of different processors do not mix.
pub(crate) fn line(items: &[Item]) {
    while LOCK.swap(1, Ordering::Acquire) != 0 {
        core::hint::spin_loop();
    }
    print(items);
    LOCK.store(0, Ordering::Release);
}

/// Prints the last line of a run, which may end in the middle of another: the processor that has the
/// lock may be the one that prints this. After a bounded wait it begins on a line of its own.
pub(crate) fn last_line(items: &[Item]) {
    if !(0..10_000_000).any(|_| LOCK.swap(1, Ordering::Acquire) == 0) {
        print(&[]);
    }
    print(items);
    LOCK.store(0, Ordering::Release);
}

fn print(items: &[Item]) {
    for item in items {
        match item {
            Item::Text(text) | Item::Name(text) => text.bytes().for_each(put),
            Item::Number(number) => decimal(*number),
            Item::Address(address) => hexadecimal(*address),
        }
    }
    put(b'\r');
    put(b'\n');
}

fn decimal(number: u64) {
    let mut power = 1;
    while number / power >= 10 {
        power *= 10;
    }
    while power > 0 {
        put(b'0' + (number / power % 10) as u8);
        power /= 10;
    }
}

fn hexadecimal(number: u64) {
    put(b'0');
    put(b'x');
    let digits = (64 - number.leading_zeros()).div_ceil(4).max(1);
    for digit in (0..digits).rev() {
        let value = (number >> (4 * digit)) as u8 & 15;
        put(if value < 10 { b'0' + value } else { b'a' + value - 10 });
    }
}
