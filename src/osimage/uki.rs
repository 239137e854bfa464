//! Unified kernel images: EFI programs with kernel, initrd and command line in sections (UAPI.5).

use super::partitions::{le16, le32};
use super::{Disk, Entry, Refused, version};

/// The parts of an image.
#[derive(Debug, PartialEq, Eq)]
pub struct Unified<'f> {
    /// `.linux`.
    pub kernel: &'f [u8],
    /// `.initrd`.
    pub initrd: &'f [u8],
    /// `.cmdline`.
    pub cmdline: Option<String>,
}

/// Finds the parts of `file`. `None` if it is not a unified kernel image.
pub fn parse(file: &[u8]) -> Option<Unified<'_>> {
    if file.len() < 64 || &file[..2] != b"MZ" {
        return None;
    }
    // The COFF header follows the signature. The section table follows the optional header.
    let coff = file.get(le32(file, 60) as usize..)?;
    if coff.len() < 24 || &coff[..4] != b"PE\0\0" {
        return None;
    }
    let (count, optional) = (usize::from(le16(coff, 6)), usize::from(le16(coff, 20)));
    let sections = coff.get(24 + optional..)?.as_chunks::<40>().0.iter().take(count);
    let section = |name: &[u8]| {
        let padded =
            |entry: &&[u8; 40]| entry[..name.len()] == *name && entry[name.len()..8].iter().all(|&b| b == 0);
        let entry = sections.clone().find(padded)?;
        let (size, len, at) = (le32(entry, 8) as usize, le32(entry, 16) as usize, le32(entry, 20) as usize);
        file.get(at..at.checked_add(size.min(len))?)
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_matches(['\0', '\n', ' ']).to_owned();
    Some(Unified {
        kernel: section(b".linux")?,
        initrd: section(b".initrd").unwrap_or_default(),
        cmdline: section(b".cmdline").map(text),
    })
}

/// The images in EFI/Linux on the boot partitions of the disk, newest first.
pub fn entries(disk: &Disk, _: &mut Refused) -> Vec<(String, Entry)> {
    let mut found = Vec::new();
    for (at, volume, files) in disk.readable() {
        for directory in ["/EFI/Linux", "/boot/EFI/Linux", "/efi/EFI/Linux"] {
            let names = files.names(directory);
            let images = names.into_iter().filter(|name| name.to_lowercase().ends_with(".efi"));
            found.extend(images.map(|name| {
                let kernel = (at, format!("{directory}/{name}"));
                (
                    format!("a unified kernel of {}", volume.name()),
                    Entry { title: name, kernel, ..Entry::default() },
                )
            }));
        }
    }
    found.sort_by(|(_, one), (_, two)| version::compare(&two.title, &one.title));
    found
}
