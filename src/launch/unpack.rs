//! Unpacks ELF files: modules, and the payloads of kernel images.

use std::io::Read;

/// The largest unpacked size.
const MAX_IMAGE: u64 = 256 << 20;

/// Unpacks gzip, xz or zstd. The result must be an ELF file.
pub(crate) fn unpack(packed: Vec<u8>) -> Result<Vec<u8>, String> {
    let mut content = Vec::new();
    if packed.starts_with(&[0x1f, 0x8b]) {
        let mut reader = flate2::read::GzDecoder::new(&packed[..]).take(MAX_IMAGE + 1);
        reader.read_to_end(&mut content).map_err(|error| error.to_string())?;
    } else if packed.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        let decoder =
            ruzstd::decoding::StreamingDecoder::new(&packed[..]).map_err(|error| error.to_string())?;
        decoder.take(MAX_IMAGE + 1).read_to_end(&mut content).map_err(|error| error.to_string())?;
    } else if packed.starts_with(&[0xfd, b'7', b'z', b'X', b'Z', 0]) {
        // The decoder has no limit, and collects each block in memory.
        if xz_size(&packed).ok_or("its xz blocks are damaged")? > MAX_IMAGE {
            return Err(too_large());
        }
        lzma_rs::xz_decompress(&mut &packed[..], &mut content).map_err(|error| format!("{error:?}"))?;
    } else {
        content = packed;
    }
    if content.len() as u64 > MAX_IMAGE {
        return Err(too_large());
    }
    if !content.starts_with(b"\x7fELF") {
        return Err("not an ELF file, plain or packed by gzip, xz or zstd".into());
    }
    Ok(content)
}

fn too_large() -> String {
    format!("unpacked it has more than {} MiB", MAX_IMAGE >> 20)
}

/// The unpacked size of an xz file (The .xz File Format 1.2.1), or what of it is already more than
/// [`MAX_IMAGE`]. `None` if it is damaged. This sums what each LZMA2 chunk says of itself: a decoder
/// unpacks no more than that from a chunk. The sizes in the index may be wrong until everything is
/// unpacked.
fn xz_size(packed: &[u8]) -> Option<u64> {
    let byte = |at: usize| packed.get(at).copied().map(usize::from);
    let half = |at: usize| Some(byte(at)? << 8 | byte(at + 1)?);
    // The check after each block, by the type in the header.
    let check = match byte(7)? & 15 {
        0 => 0,
        kind => 4 << ((kind - 1) / 3),
    };
    let (mut at, mut size) = (12, 0);
    // The index begins with 0, a block with the size of its header.
    while byte(at)? != 0 {
        at += (byte(at)? + 1) * 4;
        loop {
            let control = byte(at)?;
            let (unpacked, len) = match control {
                0 => break,
                1 | 2 => (half(at + 1)? + 1, 3 + half(at + 1)? + 1),
                3..0x80 => return None,
                // From 0xc0 on, the properties follow.
                _ => {
                    let unpacked = ((control & 31) << 16 | half(at + 1)?) + 1;
                    (unpacked, if control >= 0xc0 { 6 } else { 5 } + half(at + 3)? + 1)
                }
            };
            (size, at) = (size + unpacked as u64, at + len);
            if size > MAX_IMAGE {
                return Some(size);
            }
        }
        at = (at + 1).next_multiple_of(4) + check;
    }
    Some(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An xz file that unpacks to `content`, in chunks that are not packed.
    fn xz(content: &[u8]) -> Vec<u8> {
        let mut packed = Vec::new();
        lzma_rs::xz_compress(&mut &content[..], &mut packed).unwrap();
        packed
    }

    #[test]
    fn the_size_of_an_xz_file_is_known_before_it_is_unpacked() {
        for len in [0, 1, 4, 65536, 65537, 300_000] {
            let content: Vec<u8> = (0..len).map(|at| (at * 7) as u8).collect();
            let packed = xz(&content);
            assert_eq!(xz_size(&packed), Some(len as u64));
            // A part has no size, and nothing is read behind it.
            let first = if len > 60_000 { 60_000 } else { 13 };
            (0..first).for_each(|end| assert_eq!(xz_size(&packed[..end]), None, "{end}"));
        }
        let content = [&b"\x7fELF"[..], &[7; 100_000]].concat();
        assert_eq!(unpack(xz(&content)).unwrap(), content);
    }

    /// Without a look at its chunks, the decoder would use as much memory as they say.
    #[test]
    fn an_xz_file_that_is_too_large_is_refused_before_it_is_unpacked() {
        let mut bomb = b"\xfd7zXZ\0\0\0----\x02\0\x21\x01\x16\0\0\0----".to_vec();
        // Each says that it unpacks to 2 MiB and has 1 byte.
        for first in [0xff].into_iter().chain([0x9f; 128]) {
            bomb.extend([first, 0xff, 0xff, 0, 0]);
            bomb.extend(vec![0; if first >= 0xc0 { 2 } else { 1 }]);
        }
        bomb.resize(bomb.len() + 16, 0);
        let refused = unpack(bomb).unwrap_err();
        assert_eq!(refused, "unpacked it has more than 256 MiB");
    }
}
