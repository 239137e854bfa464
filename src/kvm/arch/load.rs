//! What the boot loaders of both architectures share: the images and the rest of a request, reading
//! an image into guest memory, and the errors of that. Each architecture has its own loaders
//! (`boot`).

use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion, ReadVolatile};

use super::protocol::Protocol;
use super::tables::Tables;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// The image of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// The kernel.
    Kernel,
    /// The initrd.
    Initrd,
}

impl std::fmt::Display for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Kernel => "the kernel",
            Self::Initrd => "the initrd",
        })
    }
}

/// A source of an image: a file, or bytes in a `Cursor`.
pub trait Source: Read + ReadVolatile + Seek {}
impl<T: Read + ReadVolatile + Seek> Source for T {}

/// The loader's parameters besides the images.
#[derive(Clone, Copy, Debug)]
pub struct BootRequest<'a> {
    /// The kernel's name. Multiboot puts it before the command line.
    pub name: &'a str,
    /// The command line, without its NUL.
    pub cmdline: &'a str,
    /// The protocol; `None` for the first that the image offers.
    pub protocol: Option<Protocol>,
    /// The tables that describe the machine, if any.
    pub tables: Option<&'a Tables>,
}

impl BootRequest<'_> {
    /// Checks that the command line does not end early.
    pub(super) fn check_cmdline(&self) -> Result<(), Error> {
        if self.cmdline.contains('\0') { Err(Error::CmdlineNul) } else { Ok(()) }
    }
}

/// Why an image cannot be read into guest memory.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum Error {
    /// The image ends before a part that it declares.
    #[error("{image} is truncated: {what} should be at bytes {at:#x}..{:#x}; use a complete file", at + len)]
    Truncated { image: Image, what: &'static str, at: u64, len: u64 },
    /// Reading failed for another reason.
    #[error("{image} cannot be read; use a regular file that this user can read")]
    Read { image: Image, source: io::Error },
    /// The initrd does not fit.
    #[error(
        "the initrd's {size} bytes do not fit into guest memory below {limit:#x} beside the kernel; use more memory"
    )]
    InitrdTooLarge { size: u64, limit: u64 },
    /// The command line does not fit.
    #[error("{len} bytes are too long for this kernel, which takes {max}; shorten it")]
    CmdlineTooLong { len: usize, max: usize },
    /// The command line contains a NUL byte.
    #[error("it contains a NUL byte, which would end it early; remove it")]
    CmdlineNul,
    /// Guest memory refused a write that was checked before.
    #[error("guest memory at {0:#x} cannot be written")]
    Memory(u64, #[source] GuestMemoryError),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::user(match self {
            Self::Truncated { image, .. } | Self::Read { image, .. } => match image {
                Image::Kernel => Field::Kernel,
                Image::Initrd => Field::Initrd,
            },
            Self::InitrdTooLarge { .. } => Field::Initrd,
            Self::CmdlineTooLong { .. } | Self::CmdlineNul => Field::Cmdline,
            Self::Memory(..) => Field::Memory,
        })
    }
}

/// An image and its length.
pub(super) struct Input<'a, F> {
    pub image: Image,
    pub source: &'a mut F,
    pub len: u64,
}

impl<'a, F: Source> Input<'a, F> {
    pub fn new(image: Image, source: &'a mut F) -> Result<Self, Error> {
        let len = source.seek(SeekFrom::End(0)).map_err(|source| Error::Read { image, source })?;
        Ok(Self { image, source, len })
    }

    /// Checks that `at..at + len` lies within the image.
    pub fn check(&self, what: &'static str, at: u64, len: u64) -> Result<(), Error> {
        match at.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            // The message adds `at` and `len`, so an overflowing length is shown as 0.
            end => Err(Error::Truncated { image: self.image, what, at, len: end.map_or(0, |_| len) }),
        }
    }

    /// Copies `at..at + len` to guest memory, where the caller has found room.
    pub fn copy<M: GuestMemoryBackend>(
        &mut self,
        what: &'static str,
        at: u64,
        len: u64,
        memory: &M,
        to: u64,
    ) -> Result<(), Error> {
        self.check(what, at, len)?;
        self.source.seek(SeekFrom::Start(at)).map_err(|source| Error::Read { image: self.image, source })?;
        memory.read_exact_volatile_from(GuestAddress(to), self.source, len as usize).map_err(|error| {
            match error {
                GuestMemoryError::IOError(source) => Error::Read { image: self.image, source },
                other => Error::Memory(to, other),
            }
        })
    }
}

/// Writes `bytes` to guest memory at `at`.
pub(super) fn write<M: GuestMemoryBackend>(memory: &M, at: u64, bytes: &[u8]) -> Result<(), Error> {
    memory.write_slice(bytes, GuestAddress(at)).map_err(|error| Error::Memory(at, error))
}

/// The RAM of `memory`, in order, with adjacent regions joined.
pub(super) fn ram<M: GuestMemoryBackend>(memory: &M) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    // The regions of a guest memory are sorted.
    for region in memory.iter() {
        let (start, len) = (region.start_addr().0, region.len());
        match joined.last_mut() {
            Some(last) if last.end == start => last.end += len,
            _ => joined.push(start..start + len),
        }
    }
    joined
}
