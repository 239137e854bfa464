//! Detects the formats of disk images from their first bytes. Only this module knows them: anything
//! else is raw.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use vellum_sys::quote;

/// A format other than raw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// QEMU's first qcow format.
    Qcow,
    /// QEMU's format, used by most cloud images.
    Qcow2,
    /// VMware's: a sparse extent, or a descriptor of several files.
    Vmdk,
    /// Hyper-V's.
    Vhdx,
    /// Hyper-V's older format, if it is sparse.
    Vhd,
    /// VirtualBox's.
    Vdi,
    /// Compressed by gzip.
    Gzip,
    /// Compressed by bzip2.
    Bzip2,
    /// Compressed by xz.
    Xz,
    /// Compressed by zstd.
    Zstd,
}

/// The number of bytes that identify a format. All of them are in the first sector.
const HEAD: usize = 72;

impl Format {
    /// The format of `file`; `None` if it is raw.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn of(file: &File) -> io::Result<Option<Self>> {
        let (mut head, mut len) = ([0; HEAD], 0);
        while len < HEAD {
            match file.read_at(&mut head[len..], len as u64) {
                Ok(0) => break,
                Ok(count) => len += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Self::told_by(&head[..len]))
    }

    /// The format of a disk that begins with the sector `head`, if that is a format of disks. A guest
    /// could write it to a raw disk, and the next start would take the disk for such an image.
    pub fn of_sector(head: &[u8; 512]) -> Option<Self> {
        Self::told_by(&head[..HEAD]).filter(|format| !format.is_archive())
    }

    /// Whether this is a packed file of any kind.
    fn is_archive(self) -> bool {
        matches!(self, Self::Gzip | Self::Bzip2 | Self::Xz | Self::Zstd)
    }

    fn told_by(head: &[u8]) -> Option<Self> {
        let version = head.get(4..8).map(|bytes| u32::from_be_bytes(bytes.try_into().expect("4 bytes")));
        Some(match head {
            [b'Q', b'F', b'I', 0xfb, ..] if version == Some(1) => Self::Qcow,
            [b'Q', b'F', b'I', 0xfb, ..] => Self::Qcow2,
            [b'K', b'D', b'M', b'V', ..] | [b'C', b'O', b'W', b'D', ..] => Self::Vmdk,
            _ if head.starts_with(b"# Disk DescriptorFile") => Self::Vmdk,
            _ if head.starts_with(b"vhdxfile") => Self::Vhdx,
            _ if head.starts_with(b"conectix") => Self::Vhd,
            // A VDI file begins with its creator's name.
            _ if head.starts_with(b"<<< ") && head.get(64..68) == Some(&[0x7f, 0x10, 0xda, 0xbe]) => {
                Self::Vdi
            }
            [0x1f, 0x8b, 8, ..] => Self::Gzip,
            [b'B', b'Z', b'h', b'1'..=b'9', b'1', b'A', b'Y', b'&', b'S', b'Y', ..] => Self::Bzip2,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Self::Xz,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            _ => return None,
        })
    }

    /// The format's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qcow => "qcow",
            Self::Qcow2 => "qcow2",
            Self::Vmdk => "VMDK",
            Self::Vhdx => "VHDX",
            Self::Vhd => "VHD",
            Self::Vdi => "VDI",
            Self::Gzip => "gzip",
            Self::Bzip2 => "bzip2",
            Self::Xz => "xz",
            Self::Zstd => "zstd",
        }
    }

    /// The command that converts the image at `path` to a raw image.
    pub fn conversion(self, path: &Path) -> String {
        let mut raw = path.with_extension("raw");
        if raw == path {
            // The command would empty the image before it reads it.
            raw = path.with_extension("raw.raw");
        }
        let [from, to] = [path, &raw].map(|path| quote::word(&path.to_string_lossy()));
        match self {
            Self::Gzip => format!("gzip -dc {from} >{to}"),
            Self::Bzip2 => format!("bzip2 -dc {from} >{to}"),
            Self::Xz => format!("xz -dc {from} >{to}"),
            Self::Zstd => format!("zstd -dc {from} >{to}"),
            _ => format!("qemu-img convert -O raw {from} {to}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_told_by_their_first_bytes() {
        let vdi =
            [&b"<<< Oracle VM VirtualBox Disk Image >>>\n"[..], &[0; 24], &[0x7f, 0x10, 0xda, 0xbe]].concat();
        for (head, expected) in [
            (&b"QFI\xfb\0\0\0\x01"[..], Some(Format::Qcow)),
            (b"QFI\xfb\0\0\0\x02", Some(Format::Qcow2)),
            (b"QFI\xfb\0\0\0\x03", Some(Format::Qcow2)),
            (b"QFI\xfb", Some(Format::Qcow2)),
            (b"KDMV\x01\0\0\0", Some(Format::Vmdk)),
            (b"# Disk DescriptorFile\nversion=1\n", Some(Format::Vmdk)),
            (b"vhdxfileM\0i\0", Some(Format::Vhdx)),
            (b"conectix\0\0\0\x02", Some(Format::Vhd)),
            (&vdi, Some(Format::Vdi)),
            (&vdi[..66], None),
            (b"\x1f\x8b\x08\0", Some(Format::Gzip)),
            (b"BZh91AY&SY", Some(Format::Bzip2)),
            (b"\xfd7zXZ\0", Some(Format::Xz)),
            (b"\x28\xb5\x2f\xfd\x04", Some(Format::Zstd)),
            (b"", None),
            (b"QFI", None),
            (b"\xfd7zXZ", None),
            (b"BZhello", None),
            (b"\xeb\x63\x90 a boot sector", None),
            (&[0; HEAD], None),
        ] {
            assert_eq!(Format::told_by(head), expected, "{head:x?}");
        }
    }

    #[test]
    fn each_names_the_command_that_converts_it() {
        let path = Path::new("/a/debian.qcow2");
        let qcow2 = Format::Qcow2.conversion(path);
        assert_eq!(qcow2, "qemu-img convert -O raw /a/debian.qcow2 /a/debian.raw");
        assert_eq!(Format::Xz.conversion(Path::new("a.raw.xz")), "xz -dc a.raw.xz >a.raw.raw");
        assert_eq!(Format::Gzip.conversion(Path::new("a.raw")), "gzip -dc a.raw >a.raw.raw");
        let odd = Format::Xz.conversion(Path::new("my dog's.xz"));
        assert_eq!(odd, r"xz -dc 'my dog'\''s.xz' >'my dog'\''s.raw'");
    }
}
