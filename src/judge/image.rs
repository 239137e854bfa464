//! The image that `build.rs` has built, in the file formats that VMMs load.

use std::iter;

const X86_64: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/x86_64.elf"));

/// The two setup sectors of a bzImage in the flat image, where link.ld puts `.setup`.
const SETUP: std::ops::Range<usize> = 0x400..0x800;
/// `syssize` in them, in units of 16 bytes (Documentation/arch/x86/boot.rst in Linux).
const SYSSIZE: usize = 0x1f4;

/// A file format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// ELF with a PVH note. Its entry takes Linux's zero page in 64-bit mode.
    Elf,
    /// A bzImage.
    BzImage,
    /// The memory content from 1 MiB on.
    Flat,
}

impl Format {
    /// The names on the command line.
    pub const NAMES: [(&str, Self); 3] =
        [("elf", Self::Elf), ("bzimage", Self::BzImage), ("flat", Self::Flat)];
}

/// The image in a format.
pub fn image(format: Format) -> Vec<u8> {
    match format {
        Format::Elf => X86_64.to_vec(),
        Format::Flat => flat(X86_64),
        Format::BzImage => {
            let flat = flat(X86_64);
            let mut image = flat[SETUP].to_vec();
            image[SYSSIZE..SYSSIZE + 4].copy_from_slice(&(flat.len() as u32 / 16).to_le_bytes());
            image.extend(flat);
            image
        }
    }
}

/// The content of the first program header, padded to 16 bytes. The linker script makes no other
/// segment.
fn flat(elf: &[u8]) -> Vec<u8> {
    let number = |at: usize| u64::from_le_bytes(elf[at..at + 8].try_into().expect("8 bytes")) as usize;
    let header = number(32);
    let (offset, size) = (number(header + 8), number(header + 32));
    let bytes = elf[offset..offset + size].iter().copied();
    bytes.chain(iter::repeat_n(0, size.next_multiple_of(16) - size)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_format_has_its_header() {
        let elf = image(Format::Elf);
        assert_eq!(&elf[..4], b"\x7fELF");
        assert!(elf.len() < 64 << 10, "{} bytes", elf.len());
        let bzimage = image(Format::BzImage);
        assert_eq!(&bzimage[0x202..0x206], b"HdrS");
        assert_eq!(&bzimage[0x1fe..0x200], [0x55, 0xaa]);
        assert_eq!(bzimage[1024..], image(Format::Flat));
        // The ELF entry is the 64-bit entry of the bzImage, at 0x200.
        assert_eq!(u64::from_le_bytes(elf[24..32].try_into().unwrap()), 0x10_0200);
    }
}
