//! The virtio devices against a driver in this process: no KVM, no guest.

mod blk;
mod disk;
mod driver;
mod misuse;
mod net;
mod small;
mod transport;
mod vsock;
mod waiting;
