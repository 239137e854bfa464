//! A kernel and what it needs around it so that a command runs in it: the kernel and its modules where they were built or unpacked
//! ([`kernel`]) and as modprobe wants them ([`modules`]), what its configuration lacks ([`config`]), the initramfs with this very
//! program as PID 1 ([`image`]), and the command's standard streams or terminal ([`streams`], [`client`]).
//!
//! The machine is an ordinary one, in a process of its own, with a vsock. Its guest connects to the host once it is up, and is told
//! what to run ([`guest_agent::Launch`]). Before that it mounts directories of the host's, one of which may be its
//! root, by the tags that are in the file [`guest_agent::LAUNCH`] of the initramfs ([`image::pack`] writes it).

pub mod client;
pub mod config;
pub mod console;
pub mod image;
pub mod initramfs;
pub mod kernel;
pub mod modules;
pub mod streams;

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::open;

/// Why there is no guest for a command.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory.
    #[error("{path}: {source}")]
    File {
        /// Which.
        path: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
    /// Nothing to boot there.
    #[error(
        "{0}: neither a built kernel tree (arch/x86/boot/bzImage) nor an unpacked linux-image package (boot/vmlinuz-*)"
    )]
    NoTree(PathBuf),
    /// More than one kernel in a package's directory.
    #[error("{0}: several kernels, {1}: name one of them")]
    Several(PathBuf, String),
    /// This host's kernel is not where distributions have it.
    #[error("host: {0} cannot be read: name a kernel's file or directory")]
    NoHostKernel(PathBuf),
    /// The modules of a kernel whose configuration says that it has some.
    #[error(
        "{image}: its configuration has {symbol} as a module, and there is none in {place}: build them (make modules), or unpack the \
         whole package"
    )]
    NoModules {
        /// The kernel.
        image: PathBuf,
        /// What is a module.
        symbol: String,
        /// Where they were looked for.
        place: PathBuf,
    },
    /// What a kernel lacks.
    #[error("{image}: its configuration lacks {lacks}")]
    Lacks {
        /// The kernel.
        image: PathBuf,
        /// The symbols.
        lacks: String,
    },
    /// A module that cannot be unpacked.
    #[error("module {path}: {why}")]
    Module {
        /// Which.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// This program is not one that runs in an initramfs by itself.
    #[error(
        "{0}: this vellum is no static program, which it must be to be a guest's PID 1: build it for a -musl target"
    )]
    NotStatic(PathBuf),
    /// The host refuses.
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

/// The content of a regular file, however long.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open::for_reading(path, open::Kind::Regular)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// As [`read`], for text.
fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(io::Error::other)
}
