//! Boot protocols of x86-64: load a kernel image into guest memory, and tell how the first vCPU
//! enters it.
//!
//! Start with [`load()`]. It examines the image, chooses the protocol in the order of [`Protocol`],
//! places kernel, initrd, command line and the protocol's data, and returns the [`Entry`]. This
//! module works on bytes in any guest memory and needs no KVM. [`super::regs`] sets the registers
//! for an [`Entry`], and [`super::acpi`] writes the tables that describe the machine.
//!
//! Images are hostile: every offset, size and address in them is checked before use.
//!
//! ```text
//! 0x00500  GDT                      0x06000  the protocol's lists
//! 0x07000  zero page, or PVH start_info, or multiboot info
//! 0x09000  identity page tables (PML4, PDPT, 4 PDs), for a 64-bit entry only
//! 0x20000  command line (64 KiB)
//! 0x9fc00  EBDA, VGA hole, ROM area: reserved; ACPI tables from 0xe0000
//! ```
//!
//! Other low memory is free for an image.

mod elf;
mod linux;
mod memory_map;
mod multiboot;
mod pvh;

use std::io::SeekFrom;
use std::ops::Range;

use super::layout::GAP_START;
use super::protocol::Protocol;
use crate::arch::fixed::Uart;
use crate::arch::load::{self, BootRequest, Image, Input, Source, ram};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vm_memory::{GuestAddress, GuestMemoryBackend};

use memory_map::{RangeKind, memory_map};
use multiboot::LOADER_MAGIC as MULTIBOOT_MAGIC;

/// The address of the GDT of every protocol's segments.
pub(crate) const GDT: u64 = 0x500;
/// The page of the protocol's main structure: `boot_params`, `hvm_start_info` or the multiboot
/// information.
pub const INFO: u64 = 0x7000;
/// Lists that the main structure points to: memory map, modules.
const LISTS: u64 = 0x6000;
/// Page tables for a 64-bit entry: PML4, PDPT and four page directories.
pub(crate) const PAGE_TABLES: u64 = 0x9000;
/// The command line.
const CMDLINE: u64 = 0x2_0000;
/// The space for the command line with its NUL, the maximum of any protocol.
const CMDLINE_AREA: usize = 0x1_0000;
/// The lowest address of an image.
const LOWEST: u64 = INFO + PAGE;
/// The extended BIOS data area. From here to 1 MiB there is no RAM (the PC's map, which Linux also
/// assumes).
const EBDA: u64 = 0x9_fc00;
/// The end of the ROM area.
const HIGH: u64 = 0x10_0000;
/// `COMMAND_LINE_SIZE` (arch/x86/include/asm/setup.h), for kernels that do not tell.
const LINUX_CMDLINE: usize = 2048;
const PAGE: u64 = 4096;

/// The default command line of a Linux guest: the console, and to reboot on a panic instead of
/// hanging.
pub fn default_cmdline(_uart: Uart) -> &'static str {
    "console=ttyS0 reboot=k panic=-1"
}

/// How the first vCPU starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// 64-bit mode, paging with the tables at [`PAGE_TABLES`], the zero page's address in RSI.
    Long {
        /// The first instruction.
        rip: u64,
        /// The value of RSI.
        rsi: u64,
    },
    /// 32-bit protected mode, paging off, flat segments.
    Protected {
        /// The first instruction.
        eip: u32,
        /// The value of EAX.
        eax: u32,
        /// The value of EBX: the address of the protocol's information.
        ebx: u32,
    },
}

impl Entry {
    /// Whether a kernel with this entry is a test that needs test devices, which other guests must
    /// not get: kvm-unit-tests are multiboot kernels.
    pub fn is_of_test(&self) -> bool {
        matches!(self, Self::Protected { eax: MULTIBOOT_MAGIC, .. })
    }
}

impl BootRequest<'_> {
    /// The ranges that the memory map reserves beside RAM.
    fn reserved(&self) -> &[Range<u64>] {
        self.tables.map_or(&[], |tables| tables.ecam.as_slice())
    }
}

/// Why an image cannot be booted.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum Error {
    /// An image cannot be read into guest memory.
    #[error(transparent)]
    Load(#[from] load::Error),
    /// No protocol can enter the image.
    #[error(
        "not a kernel (it starts with {start:02x?}); use a bzImage, an ELF vmlinux, or a PVH or multiboot image"
    )]
    NotAKernel { start: Vec<u8> },
    /// The kernel is for Arm.
    #[error("a kernel for arm64, which this host's processor cannot run; use one for x86-64 (amd64)")]
    OfArm,
    /// A kernel, but malformed or unsupported.
    #[error("not a bootable kernel: {0}; use an x86-64 bzImage or ELF vmlinux")]
    Malformed(String),
    /// The image does not offer the requested protocol.
    #[error("the kernel cannot be entered by {asked}; it offers {offered}")]
    Protocol { asked: Protocol, offered: Protocol },
    /// A part does not fit at its address.
    #[error("{what} needs guest memory at {start:#x}..{end:#x}, which {why}")]
    Place { what: &'static str, start: u64, end: u64, why: String },
    /// The initrd does not fit within this kernel's limit, however much memory there is.
    #[error(
        "the initrd has {size} bytes, but this kernel takes at most {most}, below {limit:#x}; use a smaller \
         one: more memory would not help"
    )]
    InitrdBeyondReach { size: u64, most: u64, limit: u64 },
    /// There is too little memory for any kernel.
    #[error("guest memory must begin at address 0 and hold at least 2 MiB for a kernel; use more")]
    TooLittleMemory,
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::user(match self {
            Self::Load(error) => return error.origin(),
            Self::InitrdBeyondReach { .. } => Field::Initrd,
            Self::TooLittleMemory => Field::Memory,
            Self::Protocol { .. } => Field::Protocol,
            Self::NotAKernel { .. } | Self::OfArm | Self::Malformed(_) | Self::Place { .. } => Field::Kernel,
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
    let mut placement = Placement::new(memory)?;
    let kernel = &mut Input::new(Image::Kernel, kernel)?;
    let initrd = initrd.map(|source| Input::new(Image::Initrd, source)).transpose()?;
    let refuse = |offered| match request.protocol {
        Some(asked) if asked != offered => Err(Error::Protocol { asked, offered }),
        _ => Ok(()),
    };

    if let Some(header) = linux::setup_header(kernel)? {
        refuse(Protocol::Linux64)?;
        return linux::load_bzimage(&mut placement, kernel, header, initrd, request);
    }
    let elf = elf::Elf::parse(kernel)?;
    let asked = |protocol| request.protocol.is_none_or(|asked| asked == protocol);
    if asked(Protocol::Multiboot)
        && let Some(header) = multiboot::Header::find(kernel)?
    {
        return multiboot::load(&mut placement, kernel, &header, elf.as_ref(), initrd, request);
    }
    let Some(elf) = elf else {
        return match request.protocol {
            Some(Protocol::Multiboot) => Err(Error::Malformed("it has no multiboot header".into())),
            Some(asked) if multiboot::Header::find(kernel)?.is_some() => {
                Err(Error::Protocol { asked, offered: Protocol::Multiboot })
            }
            _ if kernel.is_of_arm()? => Err(Error::OfArm),
            _ => Err(Error::NotAKernel { start: kernel.start()? }),
        };
    };
    if asked(Protocol::Pvh)
        && let Some(entry) = elf.pvh_entry(kernel)?
    {
        return pvh::load(&mut placement, kernel, &elf, entry, initrd, request);
    }
    refuse(Protocol::Linux64)?;
    linux::load_elf(&mut placement, kernel, &elf, initrd, request)
}

impl<F: Source> Input<'_, F> {
    fn read_at(&mut self, what: &'static str, at: u64, bytes: &mut [u8]) -> Result<(), load::Error> {
        self.check(what, at, bytes.len() as u64)?;
        self.source
            .seek(SeekFrom::Start(at))
            .and_then(|_| self.source.read_exact(bytes))
            .map_err(|source| load::Error::Read { image: self.image, source })
    }

    /// Whether it is an arm64 Image (Documentation/arch/arm64/booting.rst).
    fn is_of_arm(&mut self) -> Result<bool, load::Error> {
        const MAGIC: u64 = 56;
        let mut magic = [0; 4];
        if self.len >= MAGIC + magic.len() as u64 {
            self.read_at("its magic number", MAGIC, &mut magic)?;
        }
        Ok(magic == *b"ARM\x64")
    }

    /// The first bytes, for a message.
    fn start(&mut self) -> Result<Vec<u8>, load::Error> {
        let mut bytes = vec![0; self.len.min(8) as usize];
        self.read_at("its start", 0, &mut bytes)?;
        Ok(bytes)
    }
}

/// The parts of guest memory that are taken, and by what.
struct Placement<'a, M> {
    memory: &'a M,
    taken: Vec<(Range<u64>, &'static str)>,
    /// The end of the RAM that starts at 0.
    low_end: u64,
}

impl<'a, M: GuestMemoryBackend> Placement<'a, M> {
    fn new(memory: &'a M) -> Result<Self, Error> {
        let low_end = ram(memory).first().filter(|ram| ram.start == 0).map_or(0, |ram| ram.end);
        if low_end < 2 << 20 {
            return Err(Error::TooLittleMemory);
        }
        let cmdline = CMDLINE..CMDLINE + CMDLINE_AREA as u64;
        let taken = vec![
            (0..LOWEST, "boot information"),
            (cmdline, "the command line"),
            (EBDA..HIGH, "the ROM area"),
        ];
        Ok(Self { memory, taken, low_end })
    }

    /// Takes `start..start + len` for `what`.
    fn claim(&mut self, what: &'static str, start: u64, len: u64) -> Result<(), Error> {
        let end = start.saturating_add(len);
        let refuse = |why: String| Err(Error::Place { what, start, end, why });
        if len == 0 {
            return Ok(());
        }
        if start.checked_add(len).is_none() {
            return refuse("wraps around; use an image linked elsewhere".into());
        }
        if let Some((_, by)) = self.taken.iter().find(|(taken, _)| taken.start < end && start < taken.end) {
            let remedy = match what == *by {
                true => "two parts of one image cannot: use a complete and unchanged one",
                false => "use an image linked elsewhere",
            };
            return refuse(format!("overlaps {by}; {remedy}"));
        }
        if !self.memory.check_range(GuestAddress(start), len as usize) {
            let remedy = "use more memory, or an image linked elsewhere";
            let low_end = self.low_end;
            return refuse(format!("is not all RAM (there is {low_end:#x} bytes of it from 0); {remedy}"));
        }
        self.taken.push((start..end, what));
        Ok(())
    }

    /// Loads the initrd at the highest page below `limit`, or at the lowest from `upwards_from` on,
    /// and returns its range.
    fn load_initrd(
        &mut self,
        initrd: Option<Input<'_, impl Source>>,
        limit: u64,
        upwards_from: Option<u64>,
    ) -> Result<Option<Range<u64>>, Error> {
        let Some(mut initrd) = initrd else { return Ok(None) };
        let reach = limit.min(GAP_START);
        let below = self.taken.iter().map(|(taken, _)| taken.end).filter(|end| *end <= reach).max();
        // A kernel may name any limit, also one below what is never used.
        let most = reach.saturating_sub(below.unwrap_or(HIGH).max(HIGH));
        if initrd.len > most {
            return Err(Error::InitrdBeyondReach { size: initrd.len, most, limit: reach });
        }
        let limit = limit.min(self.low_end);
        let too_large = load::Error::InitrdTooLarge { size: initrd.len, limit };
        let start = match upwards_from {
            Some(floor) => floor.checked_next_multiple_of(PAGE),
            None => limit.checked_sub(initrd.len).map(|start| start & !(PAGE - 1)),
        };
        let Some(start) = start.filter(|start| start.saturating_add(initrd.len) <= limit && *start >= HIGH)
        else {
            return Err(too_large.into());
        };
        if self.claim("the initrd", start, initrd.len).is_err() {
            return Err(too_large.into());
        }
        initrd.copy("its content", 0, initrd.len, self.memory, start)?;
        Ok(Some(start..start + initrd.len))
    }

    /// Writes the command line with its NUL. `max` is the kernel's limit, without the NUL.
    fn write_cmdline(&self, cmdline: &str, max: usize) -> Result<u64, Error> {
        let max = max.min(CMDLINE_AREA - 1);
        if cmdline.len() > max {
            return Err(load::Error::CmdlineTooLong { len: cmdline.len(), max }.into());
        }
        self.write(CMDLINE, cmdline.as_bytes())?;
        self.write(CMDLINE + cmdline.len() as u64, &[0])?;
        Ok(CMDLINE)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Error> {
        Ok(load::write(self.memory, at, bytes)?)
    }
}

#[cfg(test)]
mod tests;
