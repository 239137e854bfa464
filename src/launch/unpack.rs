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
        lzma_rs::xz_decompress(&mut &packed[..], &mut content).map_err(|error| format!("{error:?}"))?;
    } else {
        content = packed;
    }
    if content.len() as u64 > MAX_IMAGE {
        return Err(format!("unpacked it has more than {} MiB", MAX_IMAGE >> 20));
    }
    if !content.starts_with(b"\x7fELF") {
        return Err("not an ELF file, plain or packed by gzip, xz or zstd".into());
    }
    Ok(content)
}
