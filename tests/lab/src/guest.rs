//! Linux guests: one of Debian's kernels, and an initramfs with the guest agent. `resources/guest-image` is the recipe.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::artifacts::{Kernel, build_static};
use crate::cache::Cache;
use crate::initramfs::Initramfs;
use crate::{Error, Result, tool};

/// The modules that a guest needs.
const MODULES: &str = include_str!("../../../resources/guest-image/modules");

/// A guest, ready to be given to `vellum run`.
#[derive(Clone, Debug)]
pub struct Guest {
    /// The package of its kernel, as reports name it.
    pub package: String,
    /// Its bzImage.
    pub kernel: PathBuf,
    /// Its initramfs.
    pub initrd: PathBuf,
}

impl Guest {
    /// Makes a guest of Debian's kernel `version` in `dir`.
    pub fn make(cache: &Cache, version: &str, dir: &Path) -> Result<Self> {
        let kernel = Kernel::debian(cache, version)?;
        let built = build_static(&["build", "--package", "guest-agent", "--bins"])?;
        let agent = built.first().ok_or_else(|| Error::Usage("cargo built no guest agent".into()))?;

        let mut image = Initramfs::new();
        image.copy(&agent.path, "/init")?;
        let names: Vec<&str> =
            MODULES.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
        let mut order = String::new();
        for (name, module) in kernel.modules(&names)? {
            image.file(&format!("/modules/{name}.ko"), 0o644, &module);
            order += &format!("{name}\n");
        }
        image.file("/modules/order", 0o644, order.as_bytes());
        let busybox = tool::need("busybox")?;
        image.copy(&busybox, "/bin/busybox")?;
        for name in
            tool::text(Command::new(&busybox).arg("--list"))?.lines().filter(|name| *name != "busybox")
        {
            image.link(&format!("/bin/{name}"), "busybox");
        }

        fs::create_dir_all(dir).map_err(Error::file("create", dir))?;
        let (to, initrd) = (dir.join("vmlinuz"), dir.join("initrd"));
        fs::copy(&kernel.image, &to).map_err(Error::file("write", &to))?;
        fs::write(&initrd, image.finish()).map_err(Error::file("write", &initrd))?;
        Ok(Self { package: kernel.package, kernel: to, initrd })
    }
}
