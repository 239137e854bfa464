//! A split virtqueue as the devices see it: whole, checked requests come out, used lengths go back.
//!
//! `virtio-queue` keeps the rings; this file adds what it leaves to its users: a chain that is cut short by a loop, an
//! index off the table or an address outside memory is an error here and not a shorter chain, buffers come as
//! [`Slices`] that requests reuse, and no guest can keep the event loop in one queue. Whatever a driver may not do
//! ends in DEVICE_NEEDS_RESET ([`Interrupt::needs_reset`]) and a queue that stands still until the driver resets it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::{Error as RingError, Queue, QueueOwnedT, QueueT};
use vm_memory::{GuestAddress, GuestMemoryBackend};
use vmm_sys_util::eventfd::EventFd;

use super::interrupt::Interrupt;
use vellum_kvm::memory::GuestMemory;
use vellum_kvm::memory::slices::Slices;

/// How a driver broke the rules of the ring; all of them cost it the device until it resets it.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The rings themselves.
    #[error("queue {queue}: {source}")]
    Ring {
        /// Which queue.
        queue: u16,
        /// What virtio-queue found.
        source: RingError,
    },
    /// A chain that loops, is longer than the queue, has no buffer, or leaves its table.
    #[error("queue {queue}: the chain at descriptor {head} loops, is too long, or leaves its table")]
    Chain {
        /// Which queue.
        queue: u16,
        /// The chain's first descriptor.
        head: u16,
    },
    /// A readable buffer after a writable one.
    #[error("queue {queue}: the chain at descriptor {head} has a readable buffer after a writable one")]
    Order {
        /// Which queue.
        queue: u16,
        /// The chain's first descriptor.
        head: u16,
    },
    /// A buffer outside guest memory.
    #[error("queue {queue}: {len:#x} bytes at {addr:#x} are not all guest memory")]
    Address {
        /// Which queue.
        queue: u16,
        /// Guest physical address of the buffer.
        addr: u64,
        /// Its length in bytes.
        len: u32,
    },
}

/// One request: its readable buffers, then its writable ones.
#[derive(Default)]
pub struct Chain<'m> {
    head: u16,
    /// What the driver wrote for the device.
    pub readable: Slices<'m>,
    /// Where the device answers.
    pub writable: Slices<'m>,
}

/// What became of a request.
pub enum Served {
    /// It is finished; the device wrote this many bytes into the writable buffers.
    Done(u32),
    /// It cannot be served now: it stays in the ring, and so do all behind it.
    Later,
}

/// A ready queue, its doorbell, and the interrupt that its device raises.
pub struct VirtQueue {
    index: u16,
    queue: Queue,
    event: Arc<EventFd>,
    interrupt: Arc<Interrupt>,
}

impl VirtQueue {
    pub(super) fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    pub(super) fn new(index: u16, queue: Queue, event: Arc<EventFd>, interrupt: Arc<Interrupt>) -> Self {
        VirtQueue { index, queue, event, interrupt }
    }

    /// Its place among the device's queues.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// The eventfd that the driver's notifications write.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// Where the device stands in the rings: (next available, next used).
    pub(super) fn position(&self) -> (u16, u16) {
        (self.queue.next_avail(), self.queue.next_used())
    }

    /// EventSources what the driver has made available, one queue length at most; whatever is left then rings the
    /// queue's own doorbell, so that a busy queue takes its turn with the others. One interrupt at the end if the
    /// driver wants it.
    pub fn serve<'m>(&mut self, mem: &'m GuestMemory, serve: impl FnMut(&mut Chain<'m>) -> Served) {
        if self.interrupt.is_broken() {
            return;
        }
        if let Err(error) = self.try_serve(mem, serve) {
            self.interrupt.needs_reset(&error);
        }
    }

    fn try_serve<'m>(
        &mut self,
        mem: &'m GuestMemory,
        mut serve: impl FnMut(&mut Chain<'m>) -> Served,
    ) -> Result<(), QueueError> {
        let mut chain = Chain::default();
        let (mut budget, mut used) = (self.queue.size(), false);
        'ring: loop {
            self.queue.disable_notification(mem).map_err(|e| self.ring(e))?;
            while self.pop(mem, &mut chain)? {
                let Served::Done(len) = serve(&mut chain) else {
                    self.queue.go_to_previous_position();
                    break 'ring;
                };
                self.push(mem, chain.head, len)?;
                used = true;
                budget -= 1;
                if budget == 0 {
                    self.ring_doorbell();
                    break 'ring;
                }
            }
            if !self.queue.enable_notification(mem).map_err(|e| self.ring(e))? {
                break;
            }
        }
        if used { self.signal(mem) } else { Ok(()) }
    }

    /// Takes the next request into `chain`; false if there is none.
    fn pop<'m>(&mut self, mem: &'m GuestMemory, chain: &mut Chain<'m>) -> Result<bool, QueueError> {
        chain.readable.clear();
        chain.writable.clear();
        let (queue, size) = (self.index, self.queue.size());
        let next = match self.queue.iter(mem) {
            Ok(mut ring) => ring.next(),
            Err(e) => return Err(self.ring(e)),
        };
        let Some(descriptors) = next else { return Ok(false) };
        let head = descriptors.head_index();
        chain.head = head;

        // The iterator ends alike at a chain's end and at anything it refuses: only the last descriptor's NEXT flag
        // tells the two apart.
        let (mut count, mut complete) = (0, false);
        for descriptor in descriptors {
            count += 1;
            complete = !descriptor.has_next();
            if count > size {
                return Err(QueueError::Chain { queue, head });
            }
            let (addr, len) = (descriptor.addr(), descriptor.len());
            if len == 0 {
                continue;
            }
            let slices = if descriptor.is_write_only() {
                &mut chain.writable
            } else if chain.writable.left() > 0 {
                return Err(QueueError::Order { queue, head });
            } else {
                &mut chain.readable
            };
            for slice in mem.get_slices(addr, len as usize) {
                slices.push(slice.map_err(|_| QueueError::Address { queue, addr: addr.0, len })?);
            }
        }
        if complete { Ok(true) } else { Err(QueueError::Chain { queue, head }) }
    }

    /// EventSources one request, with its interrupt; false if there is none, or the device waits for a reset.
    pub fn serve_one<'m>(
        &mut self,
        mem: &'m GuestMemory,
        chain: &mut Chain<'m>,
        serve: impl FnOnce(&mut Chain<'m>) -> u32,
    ) -> bool {
        if self.interrupt.is_broken() {
            return false;
        }
        let served = match self.pop(mem, chain) {
            Ok(true) => {
                let len = serve(chain);
                self.push(mem, chain.head, len).and_then(|()| self.signal(mem)).map(|()| true)
            }
            other => other,
        };
        served.unwrap_or_else(|error| {
            self.interrupt.needs_reset(&error);
            false
        })
    }

    /// Asks the driver to notify of new requests; true if some have come meanwhile.
    pub fn listen(&mut self, mem: &GuestMemory) -> bool {
        !self.interrupt.is_broken()
            && self.queue.enable_notification(mem).unwrap_or_else(|error| {
                self.interrupt.needs_reset(&self.ring(error));
                false
            })
    }

    /// Asks the driver to notify once it has made more than `offered` requests available, of which some may not be served yet; true if
    /// it has already.
    pub fn listen_beyond(&mut self, mem: &GuestMemory, offered: u16) -> bool {
        // Where notifications go by numbers (VIRTIO_F_EVENT_IDX), the number asked for is that of the next request to be served: the
        // driver has passed that one, and would say nothing of the one that is waited for.
        let next = self.queue.next_avail();
        self.queue.set_next_avail(offered);
        let more = self.listen(mem);
        self.queue.set_next_avail(next);
        more
    }

    /// How many requests the driver has ever made available, modulo 2^16; none where its ring cannot be read.
    pub fn offered(&self, mem: &GuestMemory) -> Option<u16> {
        self.queue.avail_idx(mem, Ordering::Acquire).ok().map(|index| index.0)
    }

    /// Makes the device look at this queue again as if the driver had notified it.
    pub fn ring_doorbell(&self) {
        // A full counter means that the doorbell is already ringing.
        let _ = self.event.write(1);
    }

    fn push(&mut self, mem: &GuestMemory, head: u16, len: u32) -> Result<(), QueueError> {
        self.queue.add_used(mem, head, len).map_err(|e| self.ring(e))
    }

    fn signal(&mut self, mem: &GuestMemory) -> Result<(), QueueError> {
        if self.queue.needs_notification(mem).map_err(|e| self.ring(e))? {
            self.interrupt.queue(self.index);
        }
        Ok(())
    }

    fn ring(&self, source: RingError) -> QueueError {
        QueueError::Ring { queue: self.index, source }
    }
}

/// Whether `len` bytes at `addr` are guest memory.
pub(super) fn is_memory(mem: &GuestMemory, addr: u64, len: usize) -> bool {
    mem.check_range(GuestAddress(addr), len)
}
