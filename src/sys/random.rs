//! getrandom(2).

use std::io;

/// Fills `bytes` with what nobody can guess.
///
/// # Errors
/// Where the kernel has no randomness yet.
pub fn fill(bytes: &mut [u8]) -> io::Result<()> {
    // SAFETY: the kernel writes no more than `bytes` has room for.
    let filled = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    // Up to 256 bytes come whole (random(4)).
    if usize::try_from(filled) == Ok(bytes.len()) { Ok(()) } else { Err(io::Error::last_os_error()) }
}
