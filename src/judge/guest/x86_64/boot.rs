//! Reads the data of the boot protocol: PVH's start_info, or Linux's zero page.

use super::{TRAMPOLINE, address, read, write};
use crate::schedule::{MAX_RANGES, PAGE, Range};
use crate::{Shared, refuse};

const MAX_LINE: usize = 2048;
const MAX_ENTRIES: usize = 64;
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
    entries: [Range; MAX_ENTRIES],
    count: usize,
    modules: [Range; 4],
    module_count: usize,
    /// The end of the image and of the page tables after it.
    pub(super) end: u64,
}

static BOOT: Shared<Boot> = Shared::new(Boot {
    is_pvh: false,
    rsdp: 0,
    line: [0; MAX_LINE],
    line_len: 0,
    entries: [Range { start: 0, end: 0 }; MAX_ENTRIES],
    count: 0,
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
    boot.entries[..boot.count].sort_unstable_by_key(|range| range.start);
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
        if kind == 1 && self.count < MAX_ENTRIES {
            let end = start.saturating_add(size).min(MAX_ADDRESS) & !(PAGE - 1);
            let start = start.next_multiple_of(PAGE);
            if start < end {
                self.entries[self.count] = Range { start, end };
                self.count += 1;
            }
        }
    }

    /// Maps RAM above 4 GiB, with page directories after the image.
    fn map(&mut self) {
        let top = self.entries[..self.count].iter().map(|range| range.end).max().unwrap_or(0);
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
        let image = (LOW, self.end, "the image, which checks itself");
        let modules =
            self.modules[..self.module_count].iter().map(|range| (range.start, range.end, "a module"));
        [(0, LOW, "low memory, which firmware writes"), image].into_iter().chain(modules)
    }

    /// The RAM that is judged.
    pub(crate) fn ranges<'a>(&self, ranges: &'a mut [Range; MAX_RANGES]) -> &'a [Range] {
        let mut count = 0;
        for entry in &self.entries[..self.count] {
            let mut start = entry.start.max(LOW);
            // Takes the holes one by one, lowest first.
            loop {
                let holes = self.left_out().map(|(from, to, _)| Range { start: from, end: to });
                let next = holes
                    .filter(|hole| hole.end > start && hole.start < entry.end)
                    .min_by_key(|hole| hole.start);
                let end = next.map_or(entry.end, |hole| hole.start.max(start));
                if start < end && count < MAX_RANGES {
                    ranges[count] = Range { start, end };
                    count += 1;
                }
                match next {
                    Some(hole) if hole.end < entry.end => start = hole.end,
                    _ => break,
                }
            }
        }
        &ranges[..count]
    }

    /// Whether there is RAM at the page of the trampoline.
    pub(crate) fn has_trampoline(&self) -> bool {
        self.entries[..self.count]
            .iter()
            .any(|range| range.start <= TRAMPOLINE && range.end >= TRAMPOLINE + PAGE)
    }
}

/// The data that [`boot`] has read.
pub(super) fn boot_of() -> &'static Boot {
    // SAFETY: constant since `boot`.
    unsafe { &*BOOT.get() }
}
