//! What the disk of the image holds: each sector is a function of its number. Both the image and
//! the host use this.

use crate::schedule::mix;

/// Words of a sector.
pub(crate) const WORDS: u64 = 64;
/// Sectors of a request.
pub(crate) const SECTORS: u64 = 8;
/// Accesses of the first processor between two requests.
pub(crate) const EVERY: u64 = 512;

/// A word of a sector. The first one is the sector's number.
pub(crate) fn word(sector: u64, at: u64) -> u64 {
    if at == 0 { sector } else { mix(sector * WORDS + at) }
}

/// The first sector of request `number`. The first request, 0, reads the start of the disk.
pub(crate) fn first(number: u64, seed: u64, sectors: u64) -> u64 {
    match number {
        0 => 0,
        _ => mix(number ^ seed) % (sectors / SECTORS).max(1) * SECTORS,
    }
}

/// Requests of a pass in which the first processor makes so many accesses.
pub(crate) fn each_pass(accesses: u64) -> u64 {
    accesses / EVERY
}

/// A sector's bytes.
pub fn sector(number: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    for (at, chunk) in (0..).zip(bytes.as_chunks_mut().0) {
        *chunk = word(number, at).to_le_bytes();
    }
    bytes
}
