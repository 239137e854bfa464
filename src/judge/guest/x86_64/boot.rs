//! Reads the data of the boot protocol: PVH's start_info, or Linux's zero page.

use super::{TRAMPOLINE, address, read, write};
use crate::dtb::{self, List};
use crate::schedule::{MAX_FOUND, PAGE, Range};
use crate::{Shared, refuse};

const MAX_LINE: usize = 2048;
/// The initial page tables map the addresses below. [`Boot::map`] maps RAM above.
const MAPPED: u64 = 4 << 30;
/// RAM above is not judged.
const MAX_ADDRESS: u64 = 512 << 30;
const LOW: u64 = 1 << 20;

/// The data, copied before anything is written to memory.
pub(crate) struct Boot {
    is_pvh: bool,
    pub(crate) rsdp: u64,
    line: [u8; MAX_LINE],
    line_len: usize,
    memory: List<Range, 64>,
    /// What the memory map has besides RAM, which is stricter where both overlap.
    reserved: List<Range, 64>,
    modules: [Range; 4],
    module_count: usize,
    /// The end of the image and of the page tables after it.
    pub(super) end: u64,
}

#[unsafe(link_section = ".bss.sealed")]
static BOOT: Shared<Boot> = Shared::new(Boot {
    is_pvh: false,
    rsdp: 0,
    line: [0; MAX_LINE],
    line_len: 0,
    memory: List::new(Range { start: 0, end: 0 }),
    reserved: List::new(Range { start: 0, end: 0 }),
    modules: [Range { start: 0, end: 0 }; 4],
    module_count: 0,
    end: 0,
});

/// Reads the data of this boot.
pub(crate) fn boot() -> &'static Boot {
    // SAFETY: called once, by the first processor.
    let boot = unsafe { &mut *BOOT.get() };
    let info = u64::from(read::<u32>(address!(boot_info)));
    if read::<u32>(address!(boot_kind)) == 2 {
        boot.pvh(info)
    } else {
        boot.zero_page(info)
    }
    boot.end = address!(image_end);
    boot.map();
    boot
}

impl Boot {
    fn pvh(&mut self, info: u64) {
        self.is_pvh = true;
        if read::<u32>(info) != 0x336e_c578 {
            refuse("PVH's start_info has another magic number");
        }
        if read::<u32>(info + 4) < 1 {
            refuse("PVH's start_info has no memory map: version 1 is needed");
        }
        let modules = read::<u32>(info + 12).min(4);
        for module in 0..u64::from(modules) {
            let at = read::<u64>(info + 16) + 32 * module;
            self.module(read(at), read(at + 8));
        }
        self.copy_line(read(info + 24), MAX_LINE);
        self.rsdp = read(info + 32);
        let map = read::<u64>(info + 40);
        for entry in 0..u64::from(read::<u32>(info + 48)) {
            let at = map + 24 * entry;
            self.entry(read(at), read(at + 8), read(at + 16));
        }
    }

    fn zero_page(&mut self, info: u64) {
        let line = u64::from(read::<u32>(info + 0x228)) | u64::from(read::<u32>(info + 0xc8)) << 32;
        self.copy_line(line, MAX_LINE);
        self.rsdp = read(info + 0x70);
        self.module(read::<u32>(info + 0x218).into(), read::<u32>(info + 0x21c).into());
        for entry in 0..u64::from(read::<u8>(info + 0x1e8)).min(128) {
            let at = info + 0x2d0 + 20 * entry;
            self.entry(read(at), read(at + 8), read(at + 16));
        }
        // SETUP_E820_EXT: further entries (Documentation/arch/x86/boot.rst in Linux).
        let mut data = read::<u64>(info + 0x250);
        for _ in 0..16 {
            if data == 0 || data >= MAPPED {
                break;
            }
            if read::<u32>(data + 8) == 1 {
                for entry in 0..u64::from(read::<u32>(data + 12) / 20).min(128) {
                    let at = data + 16 + 20 * entry;
                    self.entry(read(at), read(at + 8), read(at + 16));
                }
            }
            data = read(data);
        }
    }

    fn copy_line(&mut self, address: u64, limit: usize) {
        if address == 0 || address >= MAPPED {
            return;
        }
        while self.line_len < limit {
            let byte = read::<u8>(address + self.line_len as u64);
            if byte == 0 {
                break;
            }
            self.line[self.line_len] = byte;
            self.line_len += 1;
        }
    }

    fn module(&mut self, start: u64, size: u64) {
        if size > 0 && self.module_count < self.modules.len() {
            self.modules[self.module_count] =
                Range { start: start & !(PAGE - 1), end: (start + size).next_multiple_of(PAGE) };
            self.module_count += 1;
        }
    }

    fn entry(&mut self, start: u64, size: u64, kind: u32) {
        let end = start.saturating_add(size);
        if start >= end {
            return;
        }
        if self.memory.is_full() || self.reserved.is_full() {
            refuse("the memory map has too many entries");
        }
        if kind == 1 {
            self.memory.push(Range { start, end });
        } else {
            let end = end.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
            self.reserved.push(Range { start: start & !(PAGE - 1), end });
        }
    }

    /// Maps RAM above 4 GiB, with page directories after the image.
    fn map(&mut self) {
        let top = self.memory.iter().map(|range| range.end.min(MAX_ADDRESS)).max().unwrap_or(0);
        let pointers = address!(page_tables) + 0x1000;
        for gib in MAPPED >> 30..top.div_ceil(1 << 30) {
            let directory = self.end;
            self.end += PAGE;
            for entry in 0..512 {
                write(directory + 8 * entry, gib << 30 | entry << 21 | 0xe7);
            }
            write(pointers + 8 * gib, directory | 0x67);
        }
    }

    pub(crate) fn protocol(&self) -> &'static str {
        if self.is_pvh { "pvh" } else { "linux" }
    }

    pub(crate) fn command_line(&self) -> &[u8] {
        &self.line[..self.line_len]
    }

    /// The ranges that are not judged, with the reasons.
    pub(crate) fn left_out(&self) -> impl Iterator<Item = (u64, u64, &'static str)> {
        let (live, end) = (address!(live_end), address!(image_end));
        let own = [
            (0, LOW, "low memory, which firmware writes"),
            (LOW, live, "the image, which checks itself"),
            (live, end, "the image's stacks and buffers, of which it checks those in use"),
            (end, self.end, "page tables, which the image checks"),
        ];
        let modules =
            self.modules[..self.module_count].iter().map(|range| (range.start, range.end, "a module"));
        let high = (MAX_ADDRESS, 1 << 52, "memory above 512 GiB");
        let has_high = self.memory.iter().any(|range| range.end > MAX_ADDRESS);
        own.into_iter().filter(|(start, end, _)| start < end).chain(modules).chain(has_high.then_some(high))
    }

    /// The RAM that is judged. Returns the number of ranges.
    pub(crate) fn ranges(&self, ranges: &mut [Range; MAX_FOUND]) -> usize {
        let own = || self.left_out().map(|(start, end, _)| Range { start, end });
        dtb::without(&self.memory, || own().chain(self.reserved.iter().copied()), ranges)
    }

    /// Whether there is RAM at the page of the trampoline.
    pub(crate) fn has_trampoline(&self) -> bool {
        self.memory
            .iter()
            .any(|range| range.start <= TRAMPOLINE && range.end >= TRAMPOLINE + PAGE)
    }
}

/// The data that [`boot`] has read.
pub(super) fn boot_of() -> &'static Boot {
    // SAFETY: constant since `boot`.
    unsafe { &*BOOT.get() }
}
