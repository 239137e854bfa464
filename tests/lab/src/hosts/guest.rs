//! Linux guests: a Debian kernel and an initramfs with the guest agent. `resources/guest-image` is
//! the recipe. On x86 the kernel is a bzImage, and its ELF image can be extracted. On Arm it is an
//! Image.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::architecture::Architecture;
use crate::artifacts::{self, Kernel, build_for};
use crate::cache::Cache;
use crate::hosts::initramfs::{Initramfs, copy};
use crate::{Error, Result, tool};

/// The modules that a guest needs to mount its host's directories.
const SHARES: [&str; 2] = ["virtiofs", "overlay"];
/// The other modules that a guest needs.
pub const MODULES: &str = include_str!("../../../../resources/guest-image/modules");

/// A guest for `vellum run`.
#[derive(Clone, Debug)]
pub struct Guest {
    /// The package of its kernel, as reports name it.
    pub package: String,
    /// Its bzImage, or its Image.
    pub kernel: PathBuf,
    /// Its initramfs.
    pub initrd: PathBuf,
}

impl Guest {
    /// Makes a guest of Debian's kernel `version` for `architecture` in `dir`.
    pub fn make(cache: &Cache, architecture: Architecture, version: &str, dir: &Path) -> Result<Self> {
        let kernel = Kernel::debian_for(cache, architecture, version)?;
        let mut image = with_agent(cache, architecture)?;
        for (list, names) in [("order", &modules()[..]), ("shares", &SHARES)] {
            let mut order = String::new();
            for (name, module) in kernel.modules(names)? {
                image.file(&format!("/modules/{name}.ko"), 0o644, &module);
                order += &format!("{name}\n");
            }
            image.file(&format!("/modules/{list}"), 0o644, order.as_bytes());
        }

        fs::create_dir_all(dir).map_err(Error::file("create", dir))?;
        let (to, initrd) = (dir.join("vmlinuz"), dir.join("initrd"));
        let bzimage = fs::read(&kernel.image).map_err(Error::file("read", &kernel.image))?;
        put(&to, &bzimage)?;
        put(&initrd, &image.finish())?;
        Ok(Self { package: kernel.package, kernel: to, initrd })
    }

    /// Writes the ELF image beside the bzImage that contains it.
    pub fn unpack_vmlinux(&self) -> Result<PathBuf> {
        let bzimage = fs::read(&self.kernel).map_err(Error::file("read", &self.kernel))?;
        let bad = |why: &str| Error::Package(format!("{}: {why}", self.kernel.display()));
        let (format, packed, size) = compressed_kernel(&bzimage).map_err(bad)?;
        let path = self.kernel.with_file_name("vmlinux");
        let part = path.with_extension(format!("packed-{}", std::process::id()));
        fs::write(&part, packed).map_err(Error::file("write", &part))?;
        let unpacked = tool::output(Command::new(tool::need(format)?).arg("-dc").arg(&part));
        fs::remove_file(&part).map_err(Error::file("remove", &part))?;
        let image = unpacked?;
        if image.len() != size || !image.starts_with(b"\x7fELF") {
            return Err(bad(&format!(
                "{format} made {} bytes of it, not an ELF image of {size}",
                image.len()
            )));
        }
        put(&path, &image)?;
        Ok(path)
    }
}

/// Writes the initramfs of an x86 guest whose kernel needs no modules.
pub fn without_modules(cache: &Cache, initrd: &Path) -> Result<()> {
    let image = with_agent(cache, Architecture::X86)?;
    if let Some(dir) = initrd.parent() {
        fs::create_dir_all(dir).map_err(Error::file("create", dir))?;
    }
    put(initrd, &image.finish())
}

/// An initramfs with the guest agent and busybox.
fn with_agent(cache: &Cache, architecture: Architecture) -> Result<Initramfs> {
    let built = build_for(architecture, &["build", "--package", "guest-agent", "--bins"])?;
    let agent = built.first().ok_or_else(|| Error::Usage("cargo built no guest agent".into()))?;
    let mut image = Initramfs::new();
    copy(&mut image, &agent.path, "/init")?;
    let busybox = tool::need("busybox")?;
    match architecture {
        Architecture::X86 => copy(&mut image, &busybox, "/bin/busybox")?,
        other => copy(&mut image, &artifacts::busybox(cache, other)?, "/bin/busybox")?,
    }
    for name in applets()? {
        image.link(&format!("/bin/{name}"), "busybox");
    }
    Ok(image)
}

/// The names of the modules that a guest needs, shares apart.
pub(super) fn modules() -> Vec<&'static str> {
    MODULES.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect()
}

/// The names of busybox's programs.
pub(super) fn applets() -> Result<Vec<String>> {
    let names = tool::text(Command::new(tool::need("busybox")?).arg("--list"))?;
    Ok(names.lines().filter(|name| *name != "busybox").map(str::to_owned).collect())
}

/// Writes a file atomically, because another laboratory may be about to boot the old one.
fn put(path: &Path, content: &[u8]) -> Result<()> {
    let part = path.with_extension(format!("part-{}", std::process::id()));
    fs::write(&part, content).map_err(Error::file("write", &part))?;
    fs::rename(&part, path).map_err(Error::file("write", path))
}

/// The compressed kernel in a bzImage: the program that unpacks it, its bytes, and its unpacked
/// size, which the kernel stores after the bytes (Documentation/arch/x86/boot.rst, `payload_offset`
/// and `payload_length`).
fn compressed_kernel(bzimage: &[u8]) -> std::result::Result<(&'static str, &[u8], usize), &'static str> {
    /// Each format's magic.
    const FORMATS: [(&[u8], &str); 4] = [
        (&[0x02, 0x21, 0x4c, 0x18], "lz4"),
        (&[0x28, 0xb5, 0x2f, 0xfd], "zstd"),
        (&[0xfd, b'7', b'z', b'X', b'Z', 0], "xz"),
        (&[0x1f, 0x8b], "gzip"),
    ];
    let word = |at: usize| {
        let bytes = bzimage.get(at..at.saturating_add(4)).ok_or("it is cut off")?;
        Ok(u32::from_le_bytes(bytes.try_into().expect("4 bytes")) as usize)
    };
    if bzimage.get(0x202..0x206) != Some(b"HdrS") {
        return Err("it is no bzImage");
    }
    // Byte 0x1f1 has the number of sectors of setup code, 0 meaning 4. The boot sector comes before
    // them.
    let sectors = usize::from(if bzimage[0x1f1] == 0 { 4 } else { bzimage[0x1f1] }) + 1;
    let start = sectors * 512 + word(0x248)?;
    let payload = start.checked_add(word(0x24c)?).and_then(|end| bzimage.get(start..end));
    let payload = payload.ok_or("its payload lies beyond its end")?;
    let format = FORMATS.iter().find(|(magic, _)| payload.starts_with(magic));
    let (_, format) = format.ok_or("its payload is neither lz4, zstd, xz nor gzip")?;
    let (packed, size) = payload.split_last_chunk::<4>().ok_or("its payload is too short")?;
    let size = u32::from_le_bytes(*size) as usize;
    // In gzip the size is part of the format's trailer.
    Ok((format, if *format == "gzip" { payload } else { packed }, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bzimage(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 2 * 512 + 16];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248] = 16;
        image[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        image.extend_from_slice(payload);
        image
    }

    #[test]
    fn a_payload_is_found_with_its_size_and_its_program() {
        let image = bzimage(b"\x28\xb5\x2f\xfddata\x07\0\0\0");
        assert_eq!(compressed_kernel(&image), Ok(("zstd", &b"\x28\xb5\x2f\xfddata"[..], 7)));
        assert_eq!(compressed_kernel(&bzimage(b"\x1f\x8bdata\x07\0\0\0")).unwrap().1.len(), 10);
    }

    #[test]
    fn what_holds_no_kernel_says_why() {
        assert_eq!(compressed_kernel(b"MZ"), Err("it is no bzImage"));
        assert_eq!(
            compressed_kernel(&bzimage(b"BZh9abcd")),
            Err("its payload is neither lz4, zstd, xz nor gzip")
        );
        let image = bzimage(b"\x28\xb5\x2f\xfd\x07\0\0\0");
        assert_eq!(compressed_kernel(&image[..image.len() - 1]), Err("its payload lies beyond its end"));
        assert_eq!(compressed_kernel(&image[..0x24a]), Err("it is cut off"));
    }
}
