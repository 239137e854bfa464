//! Virtio devices and a driver of theirs in this process: no KVM, no guest.

pub mod disk;
pub mod driver;
pub mod reach;
