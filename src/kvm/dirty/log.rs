//! The dirty log as bitmaps: `KVM_GET_DIRTY_LOG`, and `KVM_CLEAR_DIRTY_LOG` with manual protection.

use std::ops::Range;
use std::sync::Arc;

use kvm_bindings::{KVM_DIRTY_LOG_INITIALLY_SET, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE};
use kvm_ioctls::VmFd;

use super::{DirtyTracker, Error, Method, SlotLog, Slots, scan, sys};
use crate::memory::Slot;
use crate::vm::Vm;
use crate::vm::quiesced::Quiesced;
use vellum_sys::mmap::PAGE_SIZE;

/// The maximum number of pages of one `KVM_CLEAR_DIRTY_LOG`: its count has 32 bits.
const MAX_CLEAR: u64 = u32::MAX as u64;

/// Whether a clear of all pages of `slot` has a part that begins in one huge page and ends on the
/// first page of the next. KVM clears 64 pages at a time, counted from the slot's start. Linux 5.14
/// and later, with an initially-all-set log, treat such a part as if it touched only one huge page
/// (the dirty-edges test checks that).
pub fn ends_on_a_huge_page(slot: &Slot) -> bool {
    const HUGE: u64 = (2 << 20) / PAGE_SIZE;
    let (first, end) = (slot.gpa() / PAGE_SIZE, slot.gpa() / PAGE_SIZE + slot.pages());
    // All parts but the last have the same length. The last may be shorter.
    let part = |gfn: u64| (gfn - first) / 64 * 64 + first;
    let ends = |gfn: u64| gfn > part(gfn) && gfn == (part(gfn) + 63).min(end - 1);
    let edges = (first + 1).next_multiple_of(HUGE)..end;
    !edges.is_empty() && (ends(edges.start) || ends((end - 1) / HUGE * HUGE))
}

/// One of the three methods that use bitmaps.
#[derive(Debug)]
pub(crate) struct LogTracker {
    method: Method,
    chunk: u64,
    vm: Arc<VmFd>,
    slots: Slots,
}

impl LogTracker {
    /// Configures KVM for `method`.
    pub(super) fn new(
        method: Method,
        vm: &Vm,
        quiesced: &Quiesced<'_>,
        chunk: Option<u64>,
    ) -> Result<Self, Error> {
        method.check(&vm.fd)?;
        let bits = match method {
            Method::ManualProtect => KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
            Method::InitiallySet => KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET,
            Method::Bitmap | Method::Ring => 0,
        };
        if sys::manual_protect_bits(&vm.fd) != 0 {
            let call = "KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2";
            sys::set_manual_protect(&vm.fd, bits).map_err(|source| Error::Ioctl { call, source })?;
        }
        // KVM clears at least 64 host pages.
        let least = 64 * sys::in_one();
        let chunk = chunk.unwrap_or(MAX_CLEAR).clamp(least, MAX_CLEAR) / least * least;
        Ok(Self { method, chunk, vm: vm.fd.clone(), slots: Slots::new(vm, quiesced)? })
    }
}

impl DirtyTracker for LogTracker {
    fn method(&self) -> Method {
        self.method
    }

    fn slots(&self) -> &Slots {
        &self.slots
    }

    fn slots_mut(&mut self) -> &mut Slots {
        &mut self.slots
    }

    fn get(&mut self) -> Result<(), Error> {
        self.slots.fetch()
    }

    fn clear(&mut self) -> Result<(), Error> {
        if self.method.is_manual() {
            for log in &self.slots.logs {
                let chunks = 0..log.pages().div_ceil(self.chunk);
                chunks.into_iter().try_for_each(|chunk| self.clear_chunk(log, chunk).map(drop))?;
            }
        }
        self.slots.merge_own();
        Ok(())
    }

    fn collect_deferred(&mut self) -> Result<(), Error> {
        if !self.method.is_manual() {
            return self.collect();
        }
        self.get()?;
        self.slots.merge_own();
        Ok(())
    }

    fn clear_chunks(&mut self, index: usize, pages: Range<u64>) -> Result<Range<u64>, Error> {
        let Some(log) = self.slots.logs.get(index).filter(|_| self.method.is_manual()) else {
            return Ok(0..u64::MAX);
        };
        let count = log.pages();
        let chunks = pages.start / self.chunk..pages.end.min(count).div_ceil(self.chunk);
        for chunk in chunks.clone() {
            let words = self.clear_chunk(&self.slots.logs[index], chunk)?;
            self.slots.logs[index].words[words].fill(0);
        }
        Ok(chunks.start * self.chunk..count.min(chunks.end * self.chunk))
    }
}

impl LogTracker {
    /// Clears and protects the dirty pages of `log` in its chunk `chunk`. Returns the chunk's
    /// words.
    fn clear_chunk(&self, log: &SlotLog, chunk: u64) -> Result<Range<usize>, Error> {
        let (first, end) = (chunk * self.chunk, log.pages().min((chunk + 1) * self.chunk));
        let words = (first / 64) as usize..scan::words_for(end);
        let part = &log.words[words.clone()];
        // A clean chunk has nothing to protect.
        if !scan::is_clean(part) {
            let (call, slot) = ("KVM_CLEAR_DIRTY_LOG", log.slot.id());
            sys::clear_log(&self.vm, slot, first, (end - first) as u32, part)
                .map_err(|source| Error::Slot { call, slot, source })?;
        }
        Ok(words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vellum_sys::mmap::{Mapping, Source};

    /// What KVM would do, part by part.
    fn by_parts(first: u64, pages: u64) -> bool {
        (first..first + pages).step_by(64).any(|part| {
            let last = (part + 63).min(first + pages - 1);
            last > part && last.is_multiple_of(512)
        })
    }

    #[test]
    fn slots_whose_clears_end_on_a_huge_page_are_known() {
        const MAX_CLEAR: u64 = 1300;
        let mapping = Arc::new(Mapping::new(MAX_CLEAR * PAGE_SIZE, PAGE_SIZE, Source::Anonymous).unwrap());
        let mut found = 0;
        for first in (0..=130).chain(448..=578) {
            for pages in [
                1, 2, 63, 64, 65, 383, 384, 385, 448, 511, 512, 513, 514, 577, 1023, 1024, 1025, 1026,
                MAX_CLEAR,
            ] {
                let slot = Slot::new(0, first * PAGE_SIZE, &mapping, 0..pages * PAGE_SIZE).unwrap();
                assert_eq!(
                    ends_on_a_huge_page(&slot),
                    by_parts(first, pages),
                    "{pages} pages from {first} on"
                );
                found += usize::from(by_parts(first, pages));
            }
        }
        assert!(found > 10, "{found}");
        // The PC's RAM begins on huge pages, below and above 4 GiB.
        assert!(!by_parts(0, MAX_CLEAR) && !by_parts(1 << 20, MAX_CLEAR) && by_parts(1, MAX_CLEAR));
    }
}
