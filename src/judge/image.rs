//! The images that `build.rs` has built, in the file formats that VMMs load.

use std::iter;

const X86_64: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/x86_64.elf"));

const AARCH64: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/aarch64.elf"));

/// The two setup sectors of a bzImage in the flat image, where link.ld puts `.setup`.
const SETUP: std::ops::Range<usize> = 0x400..0x800;
/// `syssize` in them, in units of 16 bytes (Documentation/arch/x86/boot.rst in Linux).
const SYSSIZE: usize = 0x1f4;

/// A processor architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// x86-64.
    X86_64,
    /// 64-bit Arm.
    Aarch64,
}

impl Arch {
    /// The names on the command line.
    pub const NAMES: [(&str, Self); 2] = [("x86_64", Self::X86_64), ("aarch64", Self::Aarch64)];
    /// That of this program.
    pub const HOST: Self = if cfg!(target_arch = "aarch64") { Self::Aarch64 } else { Self::X86_64 };

    /// The format that most VMMs take.
    pub fn format(self) -> Format {
        match self {
            Self::X86_64 => Format::Elf,
            Self::Aarch64 => Format::Image,
        }
    }
}

/// A file format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// ELF with a PVH note. Its entry takes Linux's zero page in 64-bit mode.
    Elf,
    /// A bzImage.
    BzImage,
    /// The memory content from 1 MiB on.
    Flat,
    /// The `Image` of Linux on 64-bit Arm.
    Image,
}

impl Format {
    /// The names on the command line.
    pub const NAMES: [(&str, Self); 4] =
        [("elf", Self::Elf), ("bzimage", Self::BzImage), ("flat", Self::Flat), ("image", Self::Image)];

    /// The architecture of the image in this format.
    pub fn arch(self) -> Arch {
        if self == Self::Image { Arch::Aarch64 } else { Arch::X86_64 }
    }
}

/// The image in a format.
pub fn image(format: Format) -> Vec<u8> {
    match format {
        Format::Elf => X86_64.to_vec(),
        Format::Flat => flat(X86_64),
        Format::Image => flat(AARCH64),
        Format::BzImage => {
            let flat = flat(X86_64);
            let mut image = flat[SETUP].to_vec();
            image[SYSSIZE..SYSSIZE + 4].copy_from_slice(&(flat.len() as u32 / 16).to_le_bytes());
            image.extend(flat);
            image
        }
    }
}

/// The content of the first program header, padded to 16 bytes. The linker scripts make no other
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

    #[test]
    fn an_arm64_image_has_the_header_of_linux() {
        let image = image(Format::Image);
        assert_eq!(&image[56..60], b"ARM\x64");
        let number = |at: usize| u64::from_le_bytes(image[at..at + 8].try_into().unwrap());
        let [text_offset, size, flags] = [8, 16, 24].map(number);
        assert_eq!((text_offset, flags), (0, 0xa));
        assert!(size > image.len() as u64 && size < 1 << 20, "{size} bytes of memory");
        assert!(image.len() < 64 << 10, "{} bytes", image.len());
    }

    /// The registers that `aarch64/run.s` owns are never written to a stack. Otherwise a position
    /// might come back from memory. Functions of `core` are in a section of their own: those that
    /// panic, and what they refer to.
    #[test]
    fn the_loop_s_registers_on_arm64_are_never_spilled() {
        let number = |at: usize, size: usize| {
            AARCH64[at..at + size].iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte))
        };
        // The first section behind the empty one.
        let section = number(40, 8) + number(58, 2);
        let (offset, size) = (number(section + 24, 8), number(section + 32, 8));
        assert_eq!(number(section + 8, 8) & 4, 4, "it is not executable");
        let code = AARCH64[offset..offset + size].as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
        let is_owned = |register: u32| matches!(register, 9..=15 | 20..=28);
        let spills = code.filter(|word| {
            let (target, base, second) = (word & 31, word >> 5 & 31, word >> 10 & 31);
            // STR and STUR; STP. The base is SP or the frame pointer.
            let is_single = matches!(word >> 22, 0x3e0 | 0x3e4) && word >> 21 & 1 == 0;
            let is_pair = matches!(word >> 22, 0x2a2 | 0x2a4 | 0x2a6);
            matches!(base, 29 | 31)
                && (is_single && is_owned(target) || is_pair && (is_owned(target) || is_owned(second)))
        });
        let spills: Vec<u32> = spills.collect();
        assert!(size > 16 << 10 && spills.is_empty(), "{spills:x?} of {size} bytes");
        let of_core = number(section + 64 + 32, 8);
        assert!(of_core < 4096, "{of_core} bytes of core: does the loop call it?");
    }
}
