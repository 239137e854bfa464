//! Virtio devices and their driver in this process, without KVM and without a guest.

pub mod disk;
pub mod driver;
pub mod reach;
