//! The virtio devices against a driver in this process, without KVM and without a guest. All tests
//! that do not belong to one codec run with both.

#![allow(clippy::duplicate_mod, reason = "the same tests, by either codec")]

/// With virtio-mmio.
#[path = "."]
mod on_mmio {
    use vellum_devices::virtio::transport::Codec;

    const CODEC: Codec = Codec::Mmio;

    mod blk;
    mod misuse;
    mod mmio;
    mod net;
    mod ports;
    mod small;
    mod transport;
    mod user;
    mod vsock;
    mod waiting;
}

/// With a PCI bus.
#[path = "."]
mod on_pci {
    use vellum_devices::virtio::transport::Codec;

    const CODEC: Codec = Codec::Pci;

    mod blk;
    mod misuse;
    mod net;
    mod pci;
    mod ports;
    mod small;
    mod transport;
    mod user;
    mod vsock;
    mod waiting;
}
