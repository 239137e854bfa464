//! A split virtqueue for devices: complete, checked requests come out, used lengths go back.
//!
//! `virtio-queue` implements the rings. This module adds what that leaves to its users. A chain
//! that loops, has an index beyond the table or an address outside memory is an error, not a
//! shorter chain. Buffers are [`Slices`], which requests reuse. No guest can keep the event loop in
//! one queue. A violation by the driver ends in DEVICE_NEEDS_RESET ([`Interrupt::needs_reset`]),
//! and the queue stops until the driver resets the device.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::{Error as RingError, Queue, QueueOwnedT, QueueT};
use vm_memory::{GuestAddress, GuestMemoryBackend};
use vmm_sys_util::eventfd::EventFd;

use super::interrupt::Interrupt;
use vellum_kvm::memory::GuestMemory;
use vellum_kvm::memory::slices::Slices;

/// How a driver broke the rules of a ring. Each of them stops the device until a reset.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueueError {
    /// The ring itself is invalid.
    #[error("queue {queue}: {source}")]
    Ring {
        /// The queue.
        queue: u16,
        /// virtio-queue's error.
        source: RingError,
    },
    /// A chain loops, is longer than the queue, has no buffer, or leaves its table.
    #[error("queue {queue}: the chain at descriptor {head} loops, is too long, or leaves its table")]
    Chain {
        /// The queue.
        queue: u16,
        /// The chain's first descriptor.
        head: u16,
    },
    /// A readable buffer follows a writable one.
    #[error("queue {queue}: the chain at descriptor {head} has a readable buffer after a writable one")]
    Order {
        /// The queue.
        queue: u16,
        /// The chain's first descriptor.
        head: u16,
    },
    /// A buffer is outside guest memory.
    #[error("queue {queue}: {len:#x} bytes at {addr:#x} are not all guest memory")]
    Address {
        /// The queue.
        queue: u16,
        /// The buffer's guest-physical address.
        addr: u64,
        /// Its length in bytes.
        len: u32,
    },
}

/// A request: readable buffers, then writable ones.
#[derive(Default)]
pub struct Chain<'m> {
    head: u16,
    /// The driver's data for the device.
    pub readable: Slices<'m>,
    /// Buffers for the device's answer.
    pub writable: Slices<'m>,
}

/// The result of serving a request.
pub enum Served {
    /// It is finished. The device wrote this many bytes to the writable buffers.
    Done(u32),
    /// It cannot be served now: it stays in the ring, with all requests behind it.
    Later,
    /// The device has worked long enough at a stretch. The request stays in the ring until others
    /// of the event loop have had their turn.
    NextTurn,
}

/// A ready queue, its doorbell and its device's interrupt.
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

    /// Its index among the device's queues.
    pub fn index(&self) -> u16 {
        self.index
    }

    /// The eventfd that the driver's notifications write.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// The device's position in the rings: (next available, next used).
    pub(super) fn position(&self) -> (u16, u16) {
        (self.queue.next_avail(), self.queue.next_used())
    }

    /// Serves the available requests, at most one queue length. If more are left, it rings the
    /// queue's own doorbell, so that other queues get their turn. Raises one interrupt at the end,
    /// if the driver wants it.
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
                let served = serve(&mut chain);
                let Served::Done(len) = served else {
                    self.queue.go_to_previous_position();
                    if matches!(served, Served::NextTurn) {
                        self.ring_doorbell();
                    }
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

    /// Takes the next request into `chain`. Returns false if there is none.
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

        // The iterator ends alike at a chain's end and at an invalid descriptor. Only the last
        // descriptor's NEXT flag tells them apart.
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

    /// Serves one request and raises its interrupt. If `serve` returns `None`, the request stays in the
    /// ring. Returns false if there is none, or the device waits for a reset.
    pub(crate) fn serve_one<'m>(
        &mut self,
        mem: &'m GuestMemory,
        chain: &mut Chain<'m>,
        serve: impl FnOnce(&mut Chain<'m>) -> Option<u32>,
    ) -> bool {
        if self.interrupt.is_broken() {
            return false;
        }
        let served = match self.pop(mem, chain) {
            Ok(true) => match serve(chain) {
                Some(len) => self.push(mem, chain.head, len).and_then(|()| self.signal(mem)).map(|()| true),
                None => {
                    self.queue.go_to_previous_position();
                    Ok(true)
                }
            },
            other => other,
        };
        served.unwrap_or_else(|error| {
            self.interrupt.needs_reset(&error);
            false
        })
    }

    /// Asks the driver to notify of new requests. Returns true if some have arrived meanwhile.
    pub fn listen(&mut self, mem: &GuestMemory) -> bool {
        !self.interrupt.is_broken()
            && self.queue.enable_notification(mem).unwrap_or_else(|error| {
                self.interrupt.needs_reset(&self.ring(error));
                false
            })
    }

    /// Asks the driver to notify once it has made more than `offered` requests available, even if
    /// some of them are not served yet. Returns true if it already has.
    pub(crate) fn listen_beyond(&mut self, mem: &GuestMemory, offered: u16) -> bool {
        // With VIRTIO_F_EVENT_IDX, the event index normally is that of the next request to serve.
        // The driver has already passed that one and would not notify of the awaited request.
        let next = self.queue.next_avail();
        self.queue.set_next_avail(offered);
        let more = self.listen(mem);
        self.queue.set_next_avail(next);
        more
    }

    /// How many requests the driver has made available since the queue was set up, modulo 2^16.
    /// None if its ring cannot be read.
    pub fn offered(&self, mem: &GuestMemory) -> Option<u16> {
        self.queue.avail_idx(mem, Ordering::Acquire).ok().map(|index| index.0)
    }

    /// Makes the device look at this queue again, as if the driver had notified it.
    pub(crate) fn ring_doorbell(&self) {
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
