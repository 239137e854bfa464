//! Idle page tracking (Documentation/admin-guide/mm/idle_page_tracking.rst): finds pages that have
//! not been accessed since they were last marked, neither by processes nor by KVM's guests.
//!
//! The bitmap has a bit per page frame, 64 to a word. Frame numbers come from `/proc/self/pagemap`,
//! which shows them only to CAP_SYS_ADMIN.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::mmap::{Mapping, host_page};

/// The two files. Threads may share this, because every access passes its own offset.
#[derive(Debug)]
pub struct PageIdle {
    bitmap: File,
    pagemap: File,
}

/// Bits 0-54 of a pagemap entry are the frame number. Bit 63 is set if the page is present.
const FRAME: u64 = (1 << 55) - 1;
const PRESENT: u64 = 1 << 63;

/// Pagemap entries per read.
const ENTRIES: usize = 4096;

impl PageIdle {
    /// Opens both files. Fails without the privilege, or if the kernel was built without
    /// CONFIG_IDLE_PAGE_TRACKING.
    pub fn open() -> io::Result<Self> {
        let bitmap = File::options().read(true).write(true).open("/sys/kernel/mm/page_idle/bitmap")?;
        Ok(Self { bitmap, pagemap: File::open("/proc/self/pagemap")? })
    }

    /// The frames of the present pages in `[offset, offset + len)` of `mapping`, in ascending
    /// order.
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

    /// Marks `frames`, in ascending order, as idle.
    pub fn mark(&self, frames: &[u64]) -> io::Result<()> {
        for group in frames.chunk_by(|a, b| a / 64 == b / 64) {
            let bits = group.iter().fold(0u64, |bits, frame| bits | 1 << (frame % 64));
            // The end of memory may cut the last word short. The kernel then handles the existing
            // bits but returns a count of 0.
            self.bitmap.write_at(&bits.to_ne_bytes(), group[0] / 64 * 8)?;
        }
        Ok(())
    }

    /// How many of `frames`, in ascending order, are still idle.
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
