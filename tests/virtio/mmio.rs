//! What only virtio-mmio has: the registers that identify it.

use support::virtio::disk::Image;
use support::virtio::reach::Reach;
use vellum_devices::bus::BusDevice;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_mmio::*;

use super::CODEC;

#[test]
fn the_registers_name_a_modern_device() {
    let image = Image::new("registers", &[0; 512]);
    let driver = image.open(CODEC);
    assert_eq!(driver.get(VIRTIO_MMIO_MAGIC_VALUE).to_le_bytes(), *b"virt");
    assert_eq!(driver.get(VIRTIO_MMIO_VERSION), 2);
    assert_eq!(driver.get(VIRTIO_MMIO_DEVICE_ID), 2);
    assert_ne!(driver.offered() & 1 << VIRTIO_F_VERSION_1, 0);
    assert_eq!(driver.get(VIRTIO_MMIO_SHM_LEN_LOW), u32::MAX);
    let Reach::Mmio(mmio) = &driver.reach else { panic!("it is on virtio-mmio") };
    let mut byte = [0xaa];
    mmio.read(0, &mut byte);
    assert_eq!(byte, [0], "registers are 32 bits wide");
    assert_eq!(driver.config(58, 4), [0; 4], "beyond the configuration space");
    assert_eq!(driver.config(0xe00, 8), [0; 8]);
}
