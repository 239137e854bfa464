//! Balloon (virtio 1.2, section 5.5): pages that the guest lends to the host.
//!
//! The host asks for a size, the driver names pages, and the device discards them from the mapping.
//! A discarded page reads as zeros when it is touched again, and in a forked machine as the base
//! has it (`kvm/memory/slices.rs`). With free page reporting, the driver also names pages that are
//! currently unused. Discarding a page changes its content, so the page
//! is marked in the memory's dirty bitmap like any other write.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use event_manager::EventOps;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::queue::Served;
use super::transport::Transport;
use super::{
    Active, DeviceConfig, DeviceState, Hang, Kind, OpenError, RestoreError, VirtioDevice, read_space,
};

/// Feature bits and queues (section 5.5.3). virtio-bindings does not have them.
const F_STATS_VQ: u32 = 1;
const F_DEFLATE_ON_OOM: u32 = 2;
const F_REPORTING: u32 = 5;
const INFLATE: u16 = 0;
const DEFLATE: u16 = 1;
const STATS: u16 = 2;
/// The unit of page numbers, whatever the guest's page size (section 5.5.6).
const PAGE: u64 = 4096;
/// The maximum number of page numbers taken from one request. Linux sends 256. Without a limit, one
/// request with overlapping buffers could keep the event loop busy for minutes.
const MAX_PAGES: usize = 1 << 12;
/// After so many page numbers, and so many reported bytes, others of the event loop have their turn.
/// Each page may be a call of its own.
const MAX_TURN_PAGES: usize = 1 << 14;
const MAX_TURN_BYTES: usize = 1 << 30;
/// The maximum number of statistics taken from one request. The specification has 16.
const MAX_STATS: usize = 32;

/// The balloon as a kind of device.
pub static KIND: Kind = Kind {
    key: "balloon",
    about: "A balloon: the guest lends memory to the host, as much as the control socket asks for",
    value: None,
    repeats: false,
    parse: |_| Ok(Arc::new(BalloonConfig)),
    read: |written| Ok(Arc::new(serde_json::from_value::<BalloonConfig>(written)?)),
};

/// The configuration of a balloon. It has no options.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BalloonConfig;

impl DeviceConfig for BalloonConfig {
    fn kind(&self) -> &'static Kind {
        &KIND
    }

    fn written(&self) -> std::io::Result<Value> {
        super::handoff::write(self)
    }

    fn open(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        Ok(Box::new(Balloon::new().0))
    }
}

/// The device.
pub struct Balloon {
    shared: Arc<Shared>,
    active: Option<Active>,
}

/// State shared by the control socket and the device.
#[derive(Default)]
struct Shared {
    target: AtomicU32,
    actual: AtomicU32,
    refresh: AtomicBool,
    stats: Mutex<Vec<Stat>>,
}

/// The host's handle to a balloon.
#[derive(Clone)]
pub struct BalloonHandle {
    shared: Arc<Shared>,
}

/// A statistic that the driver reports (section 5.5.6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// VIRTIO_BALLOON_S_*
    pub tag: u16,
    /// Bytes or a count, depending on the tag.
    pub value: u64,
}

/// The saved state of a balloon, in pages of 4 KiB.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    target: u32,
    actual: u32,
    /// Statistics were requested and have not arrived yet.
    refresh: bool,
}

impl Balloon {
    /// An empty balloon and the handle that inflates it.
    pub fn new() -> (Self, BalloonHandle) {
        let shared = Arc::<Shared>::default();
        (Balloon { shared: shared.clone(), active: None }, BalloonHandle { shared })
    }

    /// Discards the pages that the driver names in an array of little-endian page numbers.
    /// Neighbours are discarded as one run: Linux names pages one by one as its allocator splits
    /// larger blocks.
    fn inflate(active: &mut Active) {
        let (memory, mut done) = (active.memory.clone(), 0);
        active.serve(INFLATE, |chain| {
            if done >= MAX_TURN_PAGES {
                return Served::NextTurn;
            }
            let named = std::iter::from_fn(|| chain.readable.read_array()).map(u32::from_le_bytes);
            let mut pages: Vec<u32> = named.take(MAX_PAGES).collect();
            done += pages.len();
            for (first, count) in runs(&mut pages) {
                let start = GuestAddress(u64::from(first) * PAGE);
                for slice in memory.get_slices(start, count * PAGE as usize).flatten() {
                    vellum_kvm::memory::slices::discard(&slice);
                }
            }
            Served::Done(0)
        });
    }

    /// Discards the pages that the driver's buffers cover. The driver reuses them when the request
    /// completes.
    fn report(active: &mut Active, index: u16) {
        let mut done = 0;
        active.serve(index, |chain| {
            if done >= MAX_TURN_BYTES {
                return Served::NextTurn;
            }
            done += chain.writable.left();
            chain.writable.for_each(usize::MAX, vellum_kvm::memory::slices::discard);
            Served::Done(0)
        });
    }

    /// The driver leaves one request in the queue. Completing it asks for new statistics.
    fn stats(&mut self) {
        let Some(active) = &mut self.active else { return };
        active.serve(STATS, |chain| {
            if self.shared.refresh.swap(false, Ordering::AcqRel) {
                return Served::Done(0);
            }
            let mut stats = self.shared.stats.lock().expect("the lock is not poisoned");
            stats.clear();
            while let Some(raw) = chain.readable.read_array::<10>().filter(|_| stats.len() < MAX_STATS) {
                let tag = u16::from_le_bytes([raw[0], raw[1]]);
                let value = u64::from_le_bytes(raw[2..10].try_into().expect("8 bytes"));
                stats.push(Stat { tag, value });
            }
            Served::Later
        });
    }
}

/// The runs of consecutive numbers in `pages`, which may be unsorted, as first number and count.
fn runs(pages: &mut Vec<u32>) -> impl Iterator<Item = (u32, usize)> {
    pages.sort_unstable();
    pages.dedup();
    pages.chunk_by(|one, next| next - one == 1).map(|run| (run[0], run.len()))
}

impl BalloonHandle {
    /// Asks the driver to lend this many bytes, rounded down to pages. `device` is the balloon's
    /// transport.
    pub fn set_target(&self, bytes: u64, device: &Transport) {
        let pages = u32::try_from(bytes / PAGE).unwrap_or(u32::MAX);
        self.shared.target.store(pages, Ordering::Release);
        device.interrupt().config();
    }

    /// Bytes that the driver has lent.
    pub fn actual(&self) -> u64 {
        u64::from(self.shared.actual.load(Ordering::Acquire)) * PAGE
    }

    /// The statistics that the driver reported last.
    pub fn stats(&self) -> Vec<Stat> {
        self.shared.stats.lock().expect("the lock is not poisoned").clone()
    }

    /// Asks the driver for new statistics. They arrive later.
    pub fn refresh_stats(&self, device: &Transport) {
        self.shared.refresh.store(true, Ordering::Release);
        device.ring(STATS.into());
    }
}

impl VirtioDevice for Balloon {
    fn kind(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn features(&self) -> u64 {
        1 << F_STATS_VQ | 1 << F_DEFLATE_ON_OOM | 1 << F_REPORTING
    }

    fn queue_sizes(&self) -> &[u16] {
        &[128, 128, 64, 64]
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let (target, actual) = (&self.shared.target, &self.shared.actual);
        let mut space = [0; 16];
        space[0..4].copy_from_slice(&target.load(Ordering::Acquire).to_le_bytes());
        space[4..8].copy_from_slice(&actual.load(Ordering::Acquire).to_le_bytes());
        read_space(&space, offset, data);
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        if let (4, Ok(word)) = (offset, data.try_into()) {
            self.shared.actual.store(u32::from_le_bytes(word), Ordering::Release);
        }
    }

    fn handle(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        Some(Arc::new(BalloonHandle { shared: self.shared.clone() }))
    }

    fn activate(&mut self, active: Active) {
        self.active = Some(active);
    }

    fn quiesce(&mut self, _patience: Duration) -> Result<Option<Active>, Hang> {
        Ok(self.active.take())
    }

    fn reset(&mut self) {
        self.shared.actual.store(0, Ordering::Release);
    }

    fn notified(&mut self, index: u16, _ops: &mut EventOps) {
        let Some(active) = &mut self.active else { return };
        // Queues without a negotiated feature have no index (as in Linux and QEMU).
        let stats = active.has(F_STATS_VQ);
        match index {
            INFLATE => Self::inflate(active),
            DEFLATE => active.serve(DEFLATE, |_| Served::Done(0)),
            STATS if stats => self.stats(),
            _ => Self::report(active, index),
        }
    }

    fn save(&self) -> DeviceState {
        DeviceState::Balloon(State {
            target: self.shared.target.load(Ordering::Acquire),
            actual: self.shared.actual.load(Ordering::Acquire),
            refresh: self.shared.refresh.load(Ordering::Acquire),
        })
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Balloon(state) = state else { return Err(RestoreError::kind(&KIND, &state)) };
        self.shared.target.store(state.target, Ordering::Release);
        self.shared.actual.store(state.actual, Ordering::Release);
        self.shared.refresh.store(state.refresh, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_run_in_whichever_order_they_are_named() {
        let mut pages = vec![9, 7, 8, u32::MAX, 3, 8, 4, u32::MAX - 1, 0];
        assert_eq!(runs(&mut pages).collect::<Vec<_>>(), [(0, 1), (3, 2), (7, 3), (u32::MAX - 1, 2)]);
        assert_eq!(runs(&mut Vec::new()).count(), 0);
    }
}
