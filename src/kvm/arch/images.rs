//! The images of a boot protocol: which one an error is about, and their sources. Each architecture
//! has its own loaders (`boot`).

use std::io::{Read, Seek};

use vm_memory::ReadVolatile;

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
