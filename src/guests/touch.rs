//! A workload that touches memory in blocks: the first word of each block, then a run of pages
//! inside it.
//!
//! `kvm_page_table_test` and similar tests need this; the `write` workload has only even strides.
//! [`Touch`] is the layout of the control block. The code is `program/*/touch.rs`, at CPL 3.

use std::mem::offset_of;
use std::sync::atomic::Ordering;

use super::guest::Guest;
use crate::program::RAM_VA;

/// The control block as the code reads it, all words.
#[repr(C)]
pub struct Touch {
    /// The guest-virtual address of the doorbell.
    pub doorbell: u64,
    /// The guest-virtual address of the first block.
    pub region: u64,
    /// The number of blocks; at least 1.
    pub blocks: u64,
    /// Bytes from one block to the next.
    pub block: u64,
    /// Whether the first word of each block is written. The value is the number of blocks left.
    pub first: u64,
    /// The offset of the run in each block, in bytes.
    pub offset: u64,
    /// Pages in the run; may be 0.
    pub run: u64,
    /// Bytes from one page of the run to the next.
    pub stride: u64,
    /// The [`Access`] to each page of the run. A write stores the number of pages left.
    pub access: u64,
    /// Written by the guest: TSC at start and end.
    pub ticks: [u64; 2],
}

/// The access to a run's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Access {
    /// Read each page.
    Read = 0,
    /// Write each page.
    Write = 1,
    /// Execute the instruction in each page, which must be
    /// [`COME_BACK`](super::program::COME_BACK).
    Execute = 2,
}

/// What a vCPU does when it is resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The first block's offset in RAM.
    pub start: u64,
    /// The number of blocks; at least 1.
    pub blocks: u64,
    /// Bytes from one block to the next.
    pub block: u64,
    /// Whether the first word of each block is written, before the run.
    pub first: bool,
    /// The offset of the run in each block, in bytes.
    pub offset: u64,
    /// Pages in the run; may be 0.
    pub run: u64,
    /// Bytes from one page of the run to the next.
    pub stride: u64,
    /// The access to each page of the run.
    pub access: Access,
}

impl Plan {
    /// Every `stride` bytes of `bytes` from the start of RAM, written or read.
    pub fn every(stride: u64, bytes: u64, write: bool) -> Self {
        let run = bytes / stride;
        let access = if write { Access::Write } else { Access::Read };
        Self { start: 0, blocks: 1, block: bytes, first: false, offset: 0, run, stride, access }
    }

    /// Sets up `vcpu`, which is paused.
    pub fn program(&self, guest: &Guest, vcpu: usize) {
        let block = guest.block(vcpu);
        let set = |offset: usize, value: u64| block[offset / 8].store(value, Ordering::Relaxed);
        set(offset_of!(Touch, doorbell), vellum_kvm::arch::layout::DOORBELL);
        set(offset_of!(Touch, region), RAM_VA + self.start);
        set(offset_of!(Touch, blocks), self.blocks);
        set(offset_of!(Touch, block), self.block);
        set(offset_of!(Touch, first), self.first.into());
        set(offset_of!(Touch, offset), self.offset);
        set(offset_of!(Touch, run), self.run);
        set(offset_of!(Touch, stride), self.stride);
        set(offset_of!(Touch, access), self.access as u64);
    }
}

/// The duration of `vcpu`'s run in seconds, by its TSC.
pub fn seconds(guest: &Guest, vcpu: usize) -> f64 {
    let ticks = &guest.block(vcpu)[offset_of!(Touch, ticks) / 8..];
    let (start, end) = (ticks[0].load(Ordering::Relaxed), ticks[1].load(Ordering::Relaxed));
    end.saturating_sub(start) as f64 / guest.tsc_hz as f64
}
