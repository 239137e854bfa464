//! The content of the image's disk: each sector is a function of its number. The image and the host
//! share this file.

use crate::schedule::mix;

/// The number of 64-bit words in a sector.
pub(crate) const WORDS: u64 = 64;
/// The number of sectors in a request.
pub(crate) const SECTORS: u64 = 8;
/// The number of accesses of the first processor between two requests.
pub(crate) const EVERY: u64 = 512;

/// A word of a sector. The first word is the sector's number.
pub(crate) fn word(sector: u64, at: u64) -> u64 {
    if at == 0 { sector } else { mix(sector * WORDS + at) }
}

/// The first sector of request `number`. Request 0, the first, reads the start of the disk.
pub(crate) fn first(number: u64, seed: u64, sectors: u64) -> u64 {
    match number {
        0 => 0,
        _ => mix(number ^ seed) % (sectors / SECTORS).max(1) * SECTORS,
    }
}

/// The number of requests in a pass with this number of accesses by the first processor.
pub(crate) fn each_pass(accesses: u64) -> u64 {
    accesses / EVERY
}

/// The bytes of a sector.
pub fn sector(number: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    for (at, chunk) in (0..).zip(bytes.as_chunks_mut().0) {
        *chunk = word(number, at).to_le_bytes();
    }
    bytes
}
