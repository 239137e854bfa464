//! Adds copies of this machine's files to an initramfs of `vellum_launch`.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

pub use vellum_launch::initramfs::Initramfs;

use crate::{Error, Result};

/// Adds a copy of this machine's file to `image`, with its permission bits.
pub fn copy(image: &mut Initramfs, from: &Path, to: &str) -> Result<()> {
    let content = std::fs::read(from).map_err(Error::file("read", from))?;
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
