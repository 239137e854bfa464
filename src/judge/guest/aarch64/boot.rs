//! Reads the device tree.

use super::{METHOD, address, load, map};
use crate::dtb::{self, MAPPED, MAX_SIZE, Tree};
use crate::schedule::{MAX_FOUND, PAGE, Range};
use crate::{Shared, refuse};

const MAX_LINE: usize = 2048;

/// What the tree says, copied before anything is written to memory.
pub(crate) struct Boot {
    pub(super) tree: Tree,
    line: [u8; MAX_LINE],
    line_len: usize,
    at: Range,
}

#[unsafe(link_section = ".data.sealed")]
static BOOT: Shared<Boot> = Shared::new(Boot {
    tree: Tree::EMPTY,
    line: [0; MAX_LINE],
    line_len: 0,
    at: Range { start: 0, end: 0 },
});

/// Reads the device tree of this boot, and maps RAM.
pub(crate) fn boot() -> &'static Boot {
    // SAFETY: called once, by the first processor.
    let boot = unsafe { &mut *BOOT.get() };
    let start = load::<u64>(address!(boot_tree));
    if start == 0 || start % 8 != 0 || start >= MAPPED - MAX_SIZE {
        refuse("x0 is not the address of a device tree");
    }
    // SAFETY: boot.s has mapped this much.
    let bytes = unsafe { core::slice::from_raw_parts(start as *const u8, MAX_SIZE as usize) };
    let line = match dtb::read(bytes, &mut boot.tree) {
        Ok(line) => line,
        Err(why) => refuse(why),
    };
    boot.line_len = line.len().min(MAX_LINE);
    boot.line[..boot.line_len].copy_from_slice(&line[..boot.line_len]);
    let size = dtb::size(bytes).unwrap_or(0);
    boot.at = Range { start: start & !(PAGE - 1), end: (start + size).next_multiple_of(PAGE) };
    // SAFETY: before other processors run.
    unsafe { *METHOD.get() = boot.tree.method };
    boot
}

impl Boot {
    pub(crate) fn protocol(&self) -> &'static str {
        "devicetree"
    }

    pub(crate) fn command_line(&self) -> &[u8] {
        &self.line[..self.line_len]
    }

    /// The ranges that are not judged, with the reasons.
    pub(crate) fn left_out(&self) -> impl Iterator<Item = (u64, u64, &'static str)> {
        let (live, end) = (address!(live_end), address!(image_end));
        let image = [
            (address!(image_start), live, "the image, which checks itself"),
            (live, end, "the image's stacks and buffers, of which it checks those in use"),
        ];
        let tree = (self.at.start, self.at.end, "the device tree");
        let high = (MAPPED, 1 << 52, "memory above 512 GiB");
        let reserved = self.tree.reserved.iter().map(|range| (range.start, range.end, "reserved by the device tree"));
        let has_high = self.tree.memory.iter().any(|range| range.end > MAPPED);
        image.into_iter().chain([tree]).chain(has_high.then_some(high)).chain(reserved)
    }

    /// The RAM that is judged. It is mapped as memory.
    pub(crate) fn ranges(&self, ranges: &mut [Range; MAX_FOUND]) -> usize {
        let high = Range { start: MAPPED, end: u64::MAX };
        let holes = || self.left_out().map(|(start, end, _)| Range { start, end }).chain([high]);
        let count = dtb::without(&self.tree.memory, holes, ranges);
        ranges.iter().take(count).for_each(|range| map(range.start, range.end));
        count
    }
}

/// The data that [`boot`] has read.
pub(super) fn boot_of() -> &'static Boot {
    // SAFETY: constant since `boot`.
    unsafe { &*BOOT.get() }
}
