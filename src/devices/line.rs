//! An interrupt that its driver can mask: the eventfd that KVM takes for an edge or a message, and what is owed to the driver meanwhile.
//!
//! Devices signal from their own threads while a vCPU masks and unmasks; none of them takes a lock.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// One interrupt.
pub struct Line {
    /// For KVM_IRQFD, without a resample fd.
    event: EventFd,
    masked: AtomicBool,
    /// It was signalled while it was masked.
    pending: AtomicBool,
}

impl Line {
    /// One that nobody has signalled.
    ///
    /// # Errors
    /// Where the host refuses a descriptor.
    pub fn new(masked: bool) -> io::Result<Self> {
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        Ok(Self { event, masked: AtomicBool::new(masked), pending: AtomicBool::new(false) })
    }

    /// What it writes.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// Signals it, now or as soon as it is unmasked.
    pub fn signal(&self) {
        if self.masked.load(Ordering::SeqCst) {
            self.pending.store(true, Ordering::SeqCst);
            // Whoever unmasks stores that first and looks for what is pending then: one of the two sees what the other has done.
            if self.masked.load(Ordering::SeqCst) || !self.take_pending() {
                return;
            }
        }
        self.write();
    }

    /// Masks or unmasks it; what is pending is sent then.
    pub fn set_masked(&self, masked: bool) {
        self.masked.store(masked, Ordering::SeqCst);
        if !masked && self.take_pending() {
            self.write();
        }
    }

    /// Whether it waits to be unmasked.
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::SeqCst)
    }

    /// What [`Line::is_pending`] was elsewhere.
    pub fn set_pending(&self, pending: bool) {
        self.pending.store(pending, Ordering::SeqCst);
    }

    fn take_pending(&self) -> bool {
        self.pending.swap(false, Ordering::SeqCst)
    }

    fn write(&self) {
        // It fails only where the counter is full, and then the interrupt is on its way already.
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
