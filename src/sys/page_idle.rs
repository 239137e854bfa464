//! Idle page tracking (Documentation/admin-guide/mm/idle_page_tracking.rst): which pages nobody has touched since they
//! were last marked, KVM's guests included.
//!
//! A bit a page frame, 64 to a word; frames come from `/proc/self/pagemap`, which shows them to CAP_SYS_ADMIN only.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::mmap::{Mapping, host_page};

/// The two files. Shared by threads: every access names its place.
#[derive(Debug)]
pub struct PageIdle {
    bitmap: File,
    pagemap: File,
}

/// Bits 0-54 of a pagemap entry are the frame, bit 63 says that there is one.
const FRAME: u64 = (1 << 55) - 1;
const PRESENT: u64 = 1 << 63;

/// Entries read at once.
const ENTRIES: usize = 4096;

impl PageIdle {
    /// Opens both; fails where the kernel was built without CONFIG_IDLE_PAGE_TRACKING, or without the privilege.
    pub fn open() -> io::Result<Self> {
        let bitmap = File::options().read(true).write(true).open("/sys/kernel/mm/page_idle/bitmap")?;
        Ok(Self { bitmap, pagemap: File::open("/proc/self/pagemap")? })
    }

    /// The frames behind `[offset, offset + len)` of `mapping`, of those pages that are there, in rising order.
    pub fn frames(&self, mapping: &Mapping, offset: u64, len: u64) -> io::Result<Vec<u64>> {
        let first = (mapping.as_ptr() as u64 + offset) / host_page();
        let mut frames = Vec::with_capacity((len / host_page()) as usize);
        let mut buffer = vec![0; ENTRIES * 8];
        let mut page = 0;
        while page < len / host_page() {
            let count = (len / host_page() - page).min(ENTRIES as u64);
            let bytes = &mut buffer[..count as usize * 8];
            self.pagemap.read_exact_at(bytes, (first + page) * 8)?;
            for entry in bytes.as_chunks().0.iter().map(word) {
                if entry & PRESENT != 0 {
                    match entry & FRAME {
                        0 => return Err(io::Error::from_raw_os_error(libc::EPERM)),
                        frame => frames.push(frame),
                    }
                }
            }
            page += count;
        }
        frames.sort_unstable();
        Ok(frames)
    }

    /// Marks `frames`, which rise, as idle.
    pub fn mark(&self, frames: &[u64]) -> io::Result<()> {
        for group in frames.chunk_by(|a, b| a / 64 == b / 64) {
            let bits = group.iter().fold(0u64, |bits, frame| bits | 1 << (frame % 64));
            // Of the last word, which memory's end cuts short, the kernel does its part and reports nothing done.
            self.bitmap.write_at(&bits.to_ne_bytes(), group[0] / 64 * 8)?;
        }
        Ok(())
    }

    /// How many of `frames`, which rise, are idle still.
    pub fn count(&self, frames: &[u64]) -> io::Result<u64> {
        let mut idle = 0;
        for group in frames.chunk_by(|a, b| a / 64 == b / 64) {
            let mut bytes = [0; 8];
            self.bitmap.read_at(&mut bytes, group[0] / 64 * 8)?;
            let bits = word(&bytes);
            idle += group.iter().filter(|frame| bits >> (*frame % 64) & 1 == 1).count() as u64;
        }
        Ok(idle)
    }
}

fn word(bytes: &[u8; 8]) -> u64 {
    u64::from_le_bytes(*bytes)
}
