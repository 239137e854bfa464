//! getrandom(2).

use std::io;

use rustix::rand::GetRandomFlags;

/// Fills `bytes`, at most 256, with unpredictable random bytes.
///
/// # Errors
/// The kernel has no randomness yet.
pub fn fill(bytes: &mut [u8]) -> io::Result<()> {
    let filled = rustix::rand::getrandom(&mut *bytes, GetRandomFlags::empty())?;
    // Reads of up to 256 bytes are complete (random(4)).
    if filled == bytes.len() { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
}
