//! An interrupt that its driver can mask: the eventfd that KVM turns into an edge or a message, and
//! a pending flag for a signal that came while it was masked.
//!
//! Devices signal from their own threads while a vCPU masks and unmasks. Neither takes a lock.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// One interrupt line.
pub struct Line {
    /// For KVM_IRQFD, without a resample fd.
    event: EventFd,
    masked: AtomicBool,
    /// The line was signalled while masked.
    pending: AtomicBool,
}

impl Line {
    /// A line that is not signalled.
    ///
    /// # Errors
    /// The host refuses a descriptor.
    pub fn new(masked: bool) -> io::Result<Self> {
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        Ok(Self { event, masked: AtomicBool::new(masked), pending: AtomicBool::new(false) })
    }

    /// The eventfd that a signal writes.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// Signals the line: now, or when it is unmasked.
    pub fn signal(&self) {
        if self.masked.load(Ordering::SeqCst) {
            self.pending.store(true, Ordering::SeqCst);
            // `set_masked` stores the mask first and then looks for a pending signal. Here the
            // pending flag is stored first and then the mask is read again. So at least one side
            // sees the other's store.
            if self.masked.load(Ordering::SeqCst) || !self.take_pending() {
                return;
            }
        }
        self.write();
    }

    /// Masks or unmasks the line. Unmasking sends a pending signal.
    pub(crate) fn set_masked(&self, masked: bool) {
        self.masked.store(masked, Ordering::SeqCst);
        if !masked && self.take_pending() {
            self.write();
        }
    }

    /// Whether a signal waits for the line to be unmasked.
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::SeqCst)
    }

    /// Restores what [`Line::is_pending`] returned on save.
    pub(crate) fn set_pending(&self, pending: bool) {
        self.pending.store(pending, Ordering::SeqCst);
    }

    fn take_pending(&self) -> bool {
        self.pending.swap(false, Ordering::SeqCst)
    }

    fn write(&self) {
        // The write fails only if the counter is full, and then the interrupt is already on its
        // way.
        let _ = self.event.write(1);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_masked_line_is_signalled_once_it_is_unmasked() {
        let line = Line::new(true).unwrap();
        line.signal();
        line.signal();
        assert!(line.is_pending() && line.event().read().is_err());
        line.set_masked(false);
        assert_eq!((line.is_pending(), line.event().read().unwrap()), (false, 1));
        line.set_masked(true);
        line.set_masked(false);
        assert!(line.event().read().is_err(), "nothing was signalled meanwhile");
        line.signal();
        assert_eq!(line.event().read().unwrap(), 1);
    }

    #[test]
    fn what_is_signalled_while_the_mask_changes_is_not_lost() {
        let line = Line::new(true).unwrap();
        for _ in 0..2000 {
            line.set_masked(true);
            thread::scope(|scope| {
                scope.spawn(|| line.signal());
                scope.spawn(|| line.set_masked(false));
            });
            assert_eq!((line.event().read().ok(), line.is_pending()), (Some(1), false));
        }
    }
}
