//! The virtio devices against a driver in this process: no KVM, no guest. Everything that is not a codec's own is tested by both.

#![allow(clippy::duplicate_mod, reason = "the same tests, by either codec")]

/// By virtio-mmio.
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

/// On a PCI bus.
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
