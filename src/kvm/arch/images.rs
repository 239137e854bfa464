//! What a boot protocol loads: which image an error is about, and what an image may be read from. How one is loaded each architecture has
//! (`boot`).

use std::io::{Read, Seek};

use vm_memory::ReadVolatile;

/// Which image an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// What is booted.
    Kernel,
    /// What is handed to it.
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

/// What an image may be: a file, or bytes in a `Cursor`.
pub trait Source: Read + ReadVolatile + Seek {}
impl<T: Read + ReadVolatile + Seek> Source for T {}
