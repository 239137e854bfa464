//! getrandom(2).

use std::io;

use rustix::rand::GetRandomFlags;

/// Fills `bytes`, 256 at most, with what nobody can guess.
///
/// # Errors
/// Where the kernel has no randomness yet.
pub fn fill(bytes: &mut [u8]) -> io::Result<()> {
    let filled = rustix::rand::getrandom(&mut *bytes, GetRandomFlags::empty())?;
    // So many come whole (random(4)).
    if filled == bytes.len() { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
}
