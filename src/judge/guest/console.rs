//! Lines on the console.

use core::sync::atomic::{AtomicU32, Ordering};

use crate::arch;

/// A part of a line.
pub(crate) enum Item<'a> {
    Text(&'a str),
    /// Text that structures the line and is not a value.
    Name(&'static str),
    Number(u64),
    Address(u64),
}

static LOCK: AtomicU32 = AtomicU32::new(0);

/// Finds the console.
pub(crate) fn open() {
    arch::open_console();
}

/// Prints a line. Lines of different processors do not mix.
pub(crate) fn line(items: &[Item]) {
    while LOCK.swap(1, Ordering::Acquire) != 0 {
        core::hint::spin_loop();
    }
    for item in items {
        match item {
            Item::Text(text) | Item::Name(text) => text.bytes().for_each(arch::put),
            Item::Number(number) => decimal(*number),
            Item::Address(address) => hexadecimal(*address),
        }
    }
    arch::put(b'\r');
    arch::put(b'\n');
    LOCK.store(0, Ordering::Release);
}

fn decimal(number: u64) {
    let mut power = 1;
    while number / power >= 10 {
        power *= 10;
    }
    while power > 0 {
        arch::put(b'0' + (number / power % 10) as u8);
        power /= 10;
    }
}

fn hexadecimal(number: u64) {
    arch::put(b'0');
    arch::put(b'x');
    let digits = (64 - number.leading_zeros()).div_ceil(4).max(1);
    for digit in (0..digits).rev() {
        let value = (number >> (4 * digit)) as u8 & 15;
        arch::put(if value < 10 { b'0' + value } else { b'a' + value - 10 });
    }
}
