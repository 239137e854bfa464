//! A command's standard streams on one connection. Each frame has a kind (a byte), a length (4
//! bytes, little-endian) and data.
//!
//! [`INPUT`], [`CLOSED`] and [`RESIZED`] go to the guest; an empty [`INPUT`] is EOF. [`OUTPUT`],
//! [`ERRORS`], and finally [`EXIT`] or [`FAILED`] come from the guest. Flow control is that of the
//! connection: a side that does not read blocks the other.

use std::io::{self, Read, Write};

/// For standard input. Empty data means EOF.
pub const INPUT: u8 = 0;
/// From standard output.
pub const OUTPUT: u8 = 1;
/// From standard error.
pub const ERRORS: u8 = 2;
/// The command has ended: its exit status, or 128 plus its signal, 4 bytes.
pub const EXIT: u8 = 3;
/// The command could not be started. The data is the reason as text.
pub const FAILED: u8 = 4;
/// A stream, [`OUTPUT`] or [`ERRORS`], has no reader any more: a byte.
pub const CLOSED: u8 = 5;
/// The user's terminal was resized: rows and columns, 2 bytes each, little-endian.
pub const RESIZED: u8 = 6;

/// The maximum length of a frame's data.
pub const MAX: usize = 64 << 10;

/// Writes a frame.
///
/// # Errors
/// The connection is closed.
pub fn write(to: &mut impl Write, kind: u8, data: &[u8]) -> io::Result<()> {
    let length = u32::try_from(data.len()).map_err(io::Error::other)?;
    let mut piece = Vec::with_capacity(5 + data.len());
    piece.push(kind);
    piece.extend(length.to_le_bytes());
    piece.extend(data);
    to.write_all(&piece)
}

/// Reads a frame into `data`, and returns its kind. `None` if the connection ended before the
/// frame.
///
/// # Errors
/// The frame is longer than [`MAX`] or cut off.
pub fn read(from: &mut impl Read, data: &mut Vec<u8>) -> io::Result<Option<u8>> {
    let mut kind = [0];
    loop {
        match from.read(&mut kind) {
            Ok(0) => return Ok(None),
            Ok(_) => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX {
        return Err(io::Error::other(format!("a frame of {length} bytes; at most {MAX} are possible")));
    }
    data.resize(length, 0);
    from.read_exact(data)?;
    Ok(Some(kind[0]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_as_they_were_sent_and_long_or_cut_ones_are_refused() {
        let mut bytes = Vec::new();
        write(&mut bytes, OUTPUT, b"a\0\xff").unwrap();
        write(&mut bytes, INPUT, b"").unwrap();
        let (mut from, mut data) = (&bytes[..], Vec::new());
        assert_eq!(read(&mut from, &mut data).unwrap(), Some(OUTPUT));
        assert_eq!(data, b"a\0\xff");
        assert_eq!(read(&mut from, &mut data).unwrap(), Some(INPUT));
        assert!(data.is_empty());
        assert_eq!(read(&mut from, &mut data).unwrap(), None);
        assert!(read(&mut &bytes[..6], &mut data).is_err());
        assert!(read(&mut &[OUTPUT, 1, 0, 1, 0][..], &mut data).unwrap_err().to_string().contains("65537"));
    }
}
