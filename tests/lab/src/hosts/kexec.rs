//! Hosts whose kernel is replaced while they run.
//!
//! Such a host has a disk that outlives its kernel: an ext4 at [`KEPT`]. It holds the next kernels
//! and the host's own initramfs, which every kernel boots with, so that the initramfs need not
//! contain itself. Commands keep there what the next kernel shall find. All else of the host is in
//! memory and is lost, as at any reboot, unless it was handed over.
//!
//! A command asks the first process for another kernel, by [`SOCKET`] or by the program [`PROGRAM`].
//! The first process starts the kernel, because it alone knows that the results line is drained.
//! There it runs the same command again, with the number of kexecs so far in [`KEXECS`].

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
pub use support::kexec::{DONE, KEPT, KERNELS, KEXECS, SOCKET};

use super::{Request, disk};
use crate::{Error, Result, tool};

/// The initramfs, on the disk.
pub const INITRD: &str = "/kept/initrd";

/// The program that sends a request for a shell: `bed-kexec NAME`, `bed-kexec load NAME` and
/// `bed-kexec start`.
pub const PROGRAM: &str = "bed-kexec";

/// The kernel's command line: it hands memory over. The next kernel and its initramfs must fit into
/// the scratch areas, as must what it allocates before it knows which memory is handed over.
///
/// QEMU's TSC runs at a constant rate, which its AMD processors do not say. Without `constant_tsc`, KVM
/// keeps the frequency that each kernel measured first, off by some tenths of a percent, and a guest's
/// clock does not survive the difference. The watchdog compares clocks within 100 us, in which the
/// emulator may lose its CPU.
pub const HANDS_OVER: &str =
    " kho=on liveupdate=on kho_scratch=64M,512M,128M setcpuid=constant_tsc tsc=nowatchdog";

/// The disk's size in MiB. The file is sparse.
const MIB: u32 = 8192;

/// The host's part of the job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Replaced {
    /// The disk, by its name below /dev.
    pub disk: String,
    /// The next kernel's command line.
    pub command_line: String,
}

impl Replaced {
    /// What `request`'s job says of the next kernels. The disk is the host's last.
    pub(super) fn of(request: &Request) -> Option<Self> {
        let before = request.root.iter().chain(&request.disks).count() as u8;
        let disk = format!("vd{}", char::from(b'a' + before));
        (!request.next.is_empty()).then(|| Self { disk, command_line: request.command_line() })
    }
}

/// Makes the disk of a host with `initrd` in `dir`.
pub(super) fn disk(request: &Request, initrd: &Path, dir: &Path) -> Result<PathBuf> {
    let (root, image) = (dir.join("kept"), dir.join("kept.ext4"));
    let kernels = root.join("kernels");
    fs::create_dir_all(&kernels).map_err(Error::file("create", &kernels))?;
    let files = request.next.iter().map(|(name, kernel)| (kernel.as_path(), kernels.join(name)));
    for (from, to) in files.chain([(initrd, root.join("initrd"))]) {
        fs::copy(from, &to).map_err(Error::file("copy", from))?;
    }
    tool::output(disk::ext4(&root).arg(&image).arg(format!("{MIB}M")))?;
    fs::remove_dir_all(&root).map_err(Error::file("remove", &root))?;
    Ok(image)
}
