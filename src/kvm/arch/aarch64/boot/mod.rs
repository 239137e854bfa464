//! The boot protocol of 64-bit Arm Linux (Documentation/arch/arm64/booting.rst): loads a kernel
//! image into guest memory and tells how the first vCPU enters it. A flat binary, as built by
//! kvm-unit-tests, is entered in the same way.
//!
//! Start with [`load()`]. It examines the image, decompresses it if needed (Image.gz, or a zboot
//! image: an EFI program with a compressed Image inside), places kernel and initrd, writes the
//! device tree, and returns the [`Entry`]. This module works on bytes in any guest memory and needs
//! no KVM.
//!
//! Images are hostile: every offset, size and address in them is checked before use, and
//! decompression stops at the end of guest memory.

mod image;
#[cfg(test)]
mod tests;

use std::ops::Range;

use vm_memory::GuestMemoryBackend;

use self::image::ALIGNMENT;
use super::fdt::{self, Chosen};
use super::layout::{FDT, FDT_SIZE, KERNEL, RAM_START};
use super::protocol::Protocol;
use crate::arch::fixed::Uart;
use crate::arch::load::{self, BootRequest, Image, Input, Source, ram};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::random;

/// `COMMAND_LINE_SIZE` (arch/arm64/include/uapi/asm/setup.h), without the NUL.
const CMDLINE: usize = 2047;
/// Kernel and initrd must lie within a 1 GiB aligned window of 32 GiB. The kernel is at the start
/// of RAM.
const INITRD_REACH: u64 = RAM_START + (31 << 30);
/// The largest page size of a guest.
const PAGE: u64 = 0x1_0000;
/// Bytes of the seed for the kernel's random numbers.
const SEED: usize = 64;

/// The default command line of a Linux guest: the console, and to reboot on a panic instead of
/// hanging.
pub fn default_cmdline(uart: Uart) -> &'static str {
    match uart {
        Uart::Ns16550 => "console=ttyS0 panic=-1",
        Uart::Pl011 => "console=ttyAMA0 panic=-1",
    }
}

/// The first vCPU's start: at EL1, MMU off, the device tree's address in x0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The first instruction.
    pub pc: u64,
    /// The device tree.
    pub fdt: u64,
}

impl Entry {
    /// Whether a kernel with this entry is a test that needs test devices, which other guests must
    /// not get. On Arm, tests cannot be told from Linux.
    pub fn is_of_test(&self) -> bool {
        false
    }
}

/// Why an image cannot be booted.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum Error {
    /// An image cannot be read into guest memory.
    #[error(transparent)]
    Load(#[from] load::Error),
    /// The image is not a kernel.
    #[error("not a kernel (it starts with {start:02x?}); use an arm64 Image, an Image.gz or a zboot image")]
    NotAKernel { start: Vec<u8> },
    /// The kernel is a bzImage.
    #[error("a kernel for x86-64 (amd64), which this host's processor cannot run; use one for arm64")]
    OfX86,
    /// The flat binary is empty.
    #[error("it is empty; use a flat binary, as kvm-unit-tests builds them")]
    Empty,
    /// A kernel, but malformed or unsupported.
    #[error("not a bootable kernel: {0}; use a complete arm64 Image or Image.gz")]
    Malformed(String),
    /// The image does not fit.
    #[error(
        "the kernel needs guest memory at {start:#x}..{end:#x}, and RAM ends at {ram:#x}; use more memory"
    )]
    Place { start: u64, end: u64, ram: u64 },
    /// There is too little memory for any kernel.
    #[error("guest memory must begin at {RAM_START:#x} and hold at least 4 MiB for a kernel; use more")]
    TooLittleMemory,
    /// The device tree is too large or cannot be built.
    #[error("the device tree of this machine cannot be built: {0}; use fewer devices or vCPUs")]
    Tree(String),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::user(match self {
            Self::Load(error) => return error.origin(),
            Self::TooLittleMemory | Self::Place { .. } | Self::Tree(_) => Field::Memory,
            Self::NotAKernel { .. } | Self::OfX86 | Self::Empty | Self::Malformed(_) => Field::Kernel,
        })
    }
}

/// Loads `kernel` (and `initrd`) into `memory` and returns how to enter it.
///
/// # Errors
/// [`Error`] names the field at fault. Guest memory may have been partly written.
pub fn load<M: GuestMemoryBackend>(
    memory: &M,
    kernel: &mut impl Source,
    initrd: Option<&mut impl Source>,
    request: &BootRequest<'_>,
) -> Result<Entry, Error> {
    request.check_cmdline()?;
    if request.cmdline.len() > CMDLINE {
        return Err(load::Error::CmdlineTooLong { len: request.cmdline.len(), max: CMDLINE }.into());
    }
    let ram = ram(memory);
    let end = ram.first().filter(|ram| ram.start == RAM_START).map_or(0, |ram| ram.end);
    if end < RAM_START + (4 << 20) {
        return Err(Error::TooLittleMemory);
    }
    let flat = request.protocol == Some(Protocol::Flat);
    let kernel = match flat {
        true => image::load_flat(memory, kernel, KERNEL..end)?,
        false => image::load(memory, kernel, KERNEL..end)?,
    };
    let initrd = initrd.map(|initrd| load_initrd(memory, initrd, kernel.end..end)).transpose()?;
    let tree_at = match flat {
        true => behind(&kernel, initrd.as_ref().map_or(end, |initrd| initrd.start))?,
        false => FDT,
    };
    let mut seed = [0; SEED];
    random::fill(&mut seed).map_err(|error| Error::Tree(error.to_string()))?;
    let told = Chosen { ram: &ram, cmdline: request.cmdline, initrd: initrd.as_ref(), seed: &seed };
    if let Some(tables) = request.tables {
        let tree = fdt::build(&tables.parts, &told).map_err(|error| Error::Tree(error.to_string()))?;
        if tree.len() as u64 > FDT_SIZE {
            return Err(Error::Tree(format!(
                "it has {} bytes, and there is room for {FDT_SIZE}",
                tree.len()
            )));
        }
        load::write(memory, tree_at, &tree)?;
    }
    Ok(Entry { pc: kernel.start, fdt: tree_at })
}

/// The address of a flat binary's device tree: as far behind `kernel` as possible below `end`,
/// because the binary does not tell how much memory it uses after its end. The tree lies within one
/// 2 MiB block, and within the reach of Linux's initrd.
fn behind(kernel: &Range<u64>, end: u64) -> Result<u64, Error> {
    let start = (end.min(INITRD_REACH) - FDT_SIZE) & !(ALIGNMENT - 1);
    match start >= kernel.end {
        true => Ok(start),
        false => Err(Error::Place { start: kernel.start, end: kernel.end + ALIGNMENT + FDT_SIZE, ram: end }),
    }
}

/// Loads the initrd at the end of `free`.
fn load_initrd<M: GuestMemoryBackend>(
    memory: &M,
    initrd: &mut impl Source,
    free: Range<u64>,
) -> Result<Range<u64>, Error> {
    let mut initrd = Input::new(Image::Initrd, initrd)?;
    let size = initrd.len;
    let limit = free.end.min(INITRD_REACH);
    let start = limit.checked_sub(size).map(|start| start & !(PAGE - 1));
    let Some(start) = start.filter(|start| *start >= free.start) else {
        return Err(load::Error::InitrdTooLarge { size, limit }.into());
    };
    initrd.copy("its content", 0, size, memory, start)?;
    Ok(start..start + size)
}
