//! Adds copies of this machine's files to an initramfs of `vellum_launch`.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

pub use vellum_launch::initramfs::Initramfs;

use crate::{Error, Result};

/// Adds a copy of this machine's file to `image`, with its permission bits.
pub fn copy(image: &mut Initramfs, from: &Path, to: &str) -> Result<()> {
    add(image, from, to, std::fs::read(from).map_err(Error::file("read", from))?)
}

/// Adds a program without its symbols and its debug information, which take most of its size.
pub fn program(image: &mut Initramfs, from: &Path, to: &str) -> Result<()> {
    let mut content = std::fs::read(from).map_err(Error::file("read", from))?;
    strip(&mut content);
    add(image, from, to, content)
}

fn add(image: &mut Initramfs, from: &Path, to: &str, content: Vec<u8>) -> Result<()> {
    let mode = std::fs::metadata(from).map_err(Error::file("read", from))?.permissions().mode();
    if u32::try_from(content.len()).is_err() {
        return Err(Error::Usage(format!(
            "{}: {} GiB: an initramfs holds files of less than 4 GiB",
            from.display(),
            content.len() >> 30
        )));
    }
    image.file(to, mode & 0o777, &content);
    Ok(())
}

/// Removes what an ELF program has beyond what is loaded: symbols, debug information, and the table of
/// sections. Other files stay as they are.
fn strip(file: &mut Vec<u8>) {
    let Some(end) = loaded(file) else { return };
    file.truncate(end);
    // e_shoff, and e_shnum and e_shstrndx.
    file[40..48].fill(0);
    file[60..64].fill(0);
}

/// Where the last loaded byte of an ELF program of 64 bits ends.
fn loaded(file: &[u8]) -> Option<usize> {
    let number = |at: usize, size: usize| -> Option<u64> {
        let mut bytes = [0; 8];
        bytes[..size].copy_from_slice(file.get(at..at.checked_add(size)?)?);
        Some(u64::from_le_bytes(bytes))
    };
    // 64 bits, little endian, and a program or a shared object.
    if !file.starts_with(b"\x7fELF\x02\x01") || ![2, 3].contains(&number(16, 2)?) {
        return None;
    }
    let (headers, size, count) = (number(32, 8)? as usize, number(54, 2)? as usize, number(56, 2)? as usize);
    let end = |at: usize| {
        let header = headers.checked_add(at * size)?;
        number(header.checked_add(8)?, 8)?.checked_add(number(header.checked_add(32)?, 8)?)
    };
    let ends: Option<Vec<u64>> = (0..count).map(end).collect();
    let end = ends?.into_iter().max()?.max(headers.checked_add(count * size)? as u64);
    usize::try_from(end).ok().filter(|end| (64..=file.len()).contains(end))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;

    /// This test program itself is stripped, and still runs.
    #[test]
    fn a_program_without_its_symbols_is_much_smaller_and_runs() {
        let own = std::env::current_exe().unwrap();
        let mut content = fs::read(&own).unwrap();
        let before = content.len();
        strip(&mut content);
        assert!(content.len() < before / 2, "{} of {before} bytes are left", content.len());
        let path = own.with_extension(format!("stripped-{}", std::process::id()));
        fs::write(&path, &content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        let listed = Command::new(&path).arg("--list").output();
        fs::remove_file(&path).unwrap();
        let listed = listed.unwrap();
        assert!(listed.status.success() && !listed.stdout.is_empty(), "{listed:?}");
        let again = content.clone();
        strip(&mut content);
        assert!(content == again, "it is stripped already");
    }

    #[test]
    fn what_is_no_program_stays_as_it_is() {
        let mut headers_beyond = b"\x7fELF\x02\x01".to_vec();
        headers_beyond.resize(64, 0xff);
        headers_beyond[16..18].copy_from_slice(&[2, 0]);
        for content in [&b""[..], b"#!/bin/sh\n", b"\x7fELF\x02\x01", &headers_beyond] {
            let mut copy = content.to_vec();
            strip(&mut copy);
            assert_eq!(copy, content);
        }
    }
}
