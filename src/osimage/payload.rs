//! Unpacks the kernels of Arm distributions: a compressed Image, or an EFI program that contains
//! one (CONFIG_EFI_ZBOOT). Other formats stay unchanged.

use std::io::Read;

use flate2::read::GzDecoder;
use ruzstd::decoding::StreamingDecoder;

use super::MAX_KERNEL;
use super::partitions::le32;

/// Unpacks the kernel in `file`.
///
/// # Errors
/// The reason, as text.
pub fn unpack(file: Vec<u8>) -> Result<Vec<u8>, String> {
    if file.starts_with(&[0x1f, 0x8b]) {
        return all(GzDecoder::new(&file[..]));
    }
    // struct linux_efi_zboot_header.
    if file.len() < 64 || &file[..2] != b"MZ" || &file[4..8] != b"zimg" {
        return Ok(file);
    }
    let (at, len) = (le32(&file, 8) as usize, le32(&file, 12) as usize);
    let payload = at.checked_add(len).and_then(|end| file.get(at..end));
    let payload = payload.ok_or("its compressed kernel lies outside of it")?;
    let name = &file[24..56];
    let name = &name[..name.iter().position(|&byte| byte == 0).unwrap_or(name.len())];
    match name {
        b"gzip" => all(GzDecoder::new(payload)),
        b"zstd" | b"zstd22" => all(StreamingDecoder::new(payload).map_err(|error| error.to_string())?),
        _ => Err(format!(
            "a kernel compressed by {} is not read",
            String::from_utf8_lossy(name).escape_debug()
        )),
    }
}

fn all(from: impl Read) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let read = from.take(MAX_KERNEL + 1).read_to_end(&mut bytes);
    read.map_err(|error| format!("it cannot be decompressed: {error}"))?;
    if bytes.len() as u64 > MAX_KERNEL { Err("it is too large".into()) } else { Ok(bytes) }
}
