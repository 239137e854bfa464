//! The kernel Image: its header, its compressed forms, and where it is loaded.

use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;

use flate2::read::GzDecoder;
use vm_memory::GuestMemoryBackend;

use super::Error;
use crate::arch::load::{self, Image};

/// The header's size, and the offsets of its fields.
const HEADER: usize = 64;
const TEXT_OFFSET: usize = 8;
const IMAGE_SIZE: usize = 16;
const FLAGS: usize = 24;
const MAGIC: (usize, &[u8; 4]) = (56, b"ARM\x64");
/// The magic number of a bzImage (Documentation/arch/x86/boot.rst).
const BZIMAGE: (u64, &[u8; 4]) = (0x202, b"HdrS");
/// Bit 0 of the flags: the kernel is big-endian.
const BIG_ENDIAN: u64 = 1;
/// An image is loaded at its text offset from a multiple of this.
pub(super) const ALIGNMENT: u64 = 2 << 20;
/// A flat binary is loaded at this offset from a multiple of [`ALIGNMENT`]. It is the text offset
/// of kernels before Linux 5.8. kvmtool uses it for flat binaries.
const FLAT_OFFSET: u64 = 512 << 10;
/// The size to reserve if `image_size` is 0, as in kernels before Linux 3.17.
const UNSAID: u64 = 16 << 20;

/// The first bytes of a gzip file (RFC 1952, 2.3.1).
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// Fields of a zboot image (drivers/firmware/efi/libstub/zboot-header.S): "MZ", "zimg", the
/// payload's offset, its length, and its compression.
const ZBOOT: (usize, &[u8; 4]) = (4, b"zimg");
const PAYLOAD: usize = 8;
const PAYLOAD_LEN: usize = 12;
const COMPRESSION: Range<usize> = 24..32;

/// Bytes copied at once.
const CHUNK: usize = 1 << 20;

fn read(source: io::Error) -> Error {
    load::Error::Read { image: Image::Kernel, source }.into()
}

/// Loads the Image in `source`, compressed or not, into `free`, and returns the range that it
/// occupies. Its entry is its start.
pub(super) fn load<M: GuestMemoryBackend>(
    memory: &M,
    source: &mut (impl Read + Seek),
    free: Range<u64>,
) -> Result<Range<u64>, Error> {
    source.seek(SeekFrom::Start(0)).map_err(read)?;
    let mut start = Vec::new();
    source.by_ref().take(HEADER as u64).read_to_end(&mut start).map_err(read)?;
    let has = |at: usize, bytes: &[u8]| start.get(at..at + bytes.len()) == Some(bytes);
    let word =
        |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| start.get(at + byte).copied().unwrap_or(0)));
    let unpacked = |error: io::Error| Error::Malformed(format!("it cannot be unpacked: {error}"));
    if has(0, &GZIP) {
        source.seek(SeekFrom::Start(0)).map_err(read)?;
        return place(memory, &mut GzDecoder::new(source), free, unpacked);
    }
    if has(0, b"MZ") && has(ZBOOT.0, ZBOOT.1) {
        let compression = start.get(COMPRESSION).unwrap_or_default();
        let name = String::from_utf8_lossy(compression).trim_end_matches('\0').to_owned();
        if name != "gzip" {
            return Err(Error::Malformed(format!(
                "a zboot image compressed with {name:?}; only gzip is supported"
            )));
        }
        source.seek(SeekFrom::Start(word(PAYLOAD).into())).map_err(read)?;
        let payload = source.take(word(PAYLOAD_LEN).into());
        return place(memory, &mut GzDecoder::new(payload), free, unpacked);
    }
    if !has(MAGIC.0, MAGIC.1) {
        source.seek(SeekFrom::Start(BZIMAGE.0)).map_err(read)?;
        let mut magic = Vec::new();
        source.take(BZIMAGE.1.len() as u64).read_to_end(&mut magic).map_err(read)?;
        if magic == BZIMAGE.1 {
            return Err(Error::OfX86);
        }
        return Err(Error::NotAKernel { start: start.get(..8).unwrap_or(&start).to_vec() });
    }
    source.seek(SeekFrom::Start(0)).map_err(read)?;
    place(memory, source, free, read)
}

/// Loads the flat binary `source` into `free`, and returns the range that it occupies. Its entry is
/// its start.
pub(super) fn load_flat<M: GuestMemoryBackend>(
    memory: &M,
    source: &mut (impl Read + Seek),
    free: Range<u64>,
) -> Result<Range<u64>, Error> {
    source.seek(SeekFrom::Start(0)).map_err(read)?;
    let start = free.start.next_multiple_of(ALIGNMENT) + FLAT_OFFSET;
    let refuse = |end| Error::Place { start, end, ram: free.end };
    if start >= free.end {
        return Err(refuse(start));
    }
    let end = copy(memory, source, Vec::new(), start..free.end, refuse, read)?;
    if end == start { Err(Error::Empty) } else { Ok(start..end) }
}

/// Copies an Image from `source`.
fn place<M: GuestMemoryBackend>(
    memory: &M,
    source: &mut impl Read,
    free: Range<u64>,
    failed: impl Fn(io::Error) -> Error,
) -> Result<Range<u64>, Error> {
    let mut header = [0; HEADER];
    source.read_exact(&mut header).map_err(&failed)?;
    let field = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| header[at + byte]));
    if header[MAGIC.0..MAGIC.0 + MAGIC.1.len()] != *MAGIC.1 {
        return Err(Error::NotAKernel { start: header[..8].to_vec() });
    }
    if field(FLAGS) & BIG_ENDIAN != 0 {
        return Err(Error::Malformed("it is big-endian".into()));
    }
    let (offset, size) = (field(TEXT_OFFSET), field(IMAGE_SIZE));
    let size = if size == 0 { UNSAID } else { size };
    if offset >= ALIGNMENT {
        return Err(Error::Malformed(format!("its text offset {offset:#x} is 2 MiB or more")));
    }
    let start = free.start.next_multiple_of(ALIGNMENT) + offset;
    let end = start.saturating_add(size);
    let refuse = |end| Error::Place { start, end, ram: free.end };
    if end > free.end {
        return Err(refuse(end));
    }
    let at = copy(memory, source, header.to_vec(), start..free.end, refuse, failed)?;
    Ok(start..end.max(at))
}

/// Copies `first` and then all of `source` to the start of `to`, and returns the end. `refuse`
/// makes the error for an end beyond `to`.
fn copy<M: GuestMemoryBackend>(
    memory: &M,
    source: &mut impl Read,
    first: Vec<u8>,
    to: Range<u64>,
    refuse: impl Fn(u64) -> Error,
    failed: impl Fn(io::Error) -> Error,
) -> Result<u64, Error> {
    let mut at = to.start;
    let mut filled = first.len();
    let mut chunk = first;
    chunk.resize(CHUNK.max(filled), 0);
    loop {
        // Write whole chunks, because decoders return small pieces.
        while filled < chunk.len() {
            match source.read(&mut chunk[filled..]) {
                Ok(0) => break,
                Ok(more) => filled += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(error)),
            }
        }
        if filled == 0 {
            return Ok(at);
        }
        let behind = at.saturating_add(filled as u64);
        if behind > to.end {
            return Err(refuse(behind));
        }
        load::write(memory, at, &chunk[..filled])?;
        (at, filled) = (behind, 0);
    }
}
