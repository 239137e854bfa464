//! Prepares a kernel to run one command: finds the kernel and its modules ([`kernel`]), lists the
//! modules for modprobe ([`modules`]), checks the configuration ([`config`]), packs the initramfs
//! with this program as PID 1 ([`image`]), and connects the command's standard streams or terminal
//! ([`streams`], [`client`]).
//!
//! The machine runs in its own process and has a vsock. After boot the guest connects to the host
//! and gets the command ([`guest_agent::Launch`]). Before that it mounts host directories, one of
//! which may be its root. The file [`guest_agent::LAUNCH`] in the initramfs names their tags
//! ([`image::pack`] writes it).

pub mod client;
pub mod config;
pub mod console;
pub mod image;
pub mod initramfs;
pub mod kernel;
pub mod modules;
pub mod streams;
mod unpack;

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::open;

/// Why a guest could not be started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory is not accessible.
    #[error("{path}: {source}")]
    File {
        /// Its path.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A link in the directory leads to another, which would be the guest's to read.
    #[error("{path}: it leads out of {root}, and a kernel's files are all below its directory")]
    Outside {
        /// The link, or what is behind one.
        path: PathBuf,
        /// The directory.
        root: PathBuf,
    },
    /// The directory has no kernel.
    #[error(
        "{0}: not a built kernel tree (arch/x86/boot/bzImage) or an unpacked linux-image package (boot/vmlinuz-*)"
    )]
    NoTree(PathBuf),
    /// The package's directory has more than one kernel.
    #[error("{0}: several kernels ({1}): name one of them")]
    Several(PathBuf, String),
    /// The host's kernel is not where distributions install it.
    #[error("host: cannot read {0}: name a kernel's file or directory")]
    NoHostKernel(PathBuf),
    /// The kernel's configuration has modules, but their files are missing.
    #[error(
        "{image}: its configuration has {symbol} as a module, but {place} does not: build the modules (make modules) or unpack the \
         whole package"
    )]
    NoModules {
        /// The kernel.
        image: PathBuf,
        /// The symbol that is a module.
        symbol: String,
        /// The directory that was searched.
        place: PathBuf,
    },
    /// The modules to be loaded depend on too many others.
    #[error("{first}: it and the modules before it depend on more than {most}; no kernel's do")]
    Modules {
        /// The first module that is too many.
        first: String,
        /// The maximum number.
        most: usize,
    },
    /// The configuration lacks symbols.
    #[error("{image}: its configuration lacks {lacks}")]
    Lacks {
        /// The kernel.
        image: PathBuf,
        /// The symbols.
        lacks: String,
    },
    /// A module cannot be unpacked.
    #[error("module {path}: {why}")]
    Module {
        /// Its path.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// This program cannot run alone in an initramfs.
    #[error(
        "{0}: this vellum is not a static program, so it cannot be a guest's PID 1: build it for a -musl target"
    )]
    NotStatic(PathBuf),
    /// The host failed an operation.
    #[error("{0}: {1}")]
    Host(&'static str, #[source] io::Error),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Host(..) | Self::NotStatic(_) => ErrorOrigin::HOST,
            _ => ErrorOrigin::user(Field::Kernel),
        }
    }
}

/// The content of a regular file of any length.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open::for_reading(path, open::Kind::Regular)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// As [`read`], unless it is a symbolic link. A stranger's package names no other file of this host.
fn read_unlinked(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open::for_reading(path, open::Kind::Unlinked)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// As [`read`], for text.
fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(io::Error::other)
}
