//! A disk with an image of its own, and its requests, for tests of disks.

use std::io::Write;
use std::path::PathBuf;

use vellum_devices::virtio::VirtioDevice;
use vellum_devices::virtio::blk::{Blk, BlkConfig};

use vellum_devices::virtio::transport::Codec;

use super::driver::*;

/// The address of a request's header.
pub const HEADER: u64 = BUFFERS;
/// The address of a request's status.
pub const STATUS: u64 = BUFFERS + 0x100;
/// The address of a request's data.
pub const DATA: u64 = BUFFERS + 0x1000;

/// An image file that is removed when it is dropped.
pub struct Image(pub PathBuf);

impl Image {
    /// A new file with these contents.
    pub fn new(name: &str, contents: &[u8]) -> Self {
        let path = own_path(name);
        std::fs::File::create(&path).unwrap().write_all(contents).unwrap();
        Image(path)
    }

    /// A disk with this image, and its driver.
    pub fn open(&self, codec: Codec) -> Driver {
        disk(codec, &BlkConfig::new(&self.0))
    }
}

/// A started block device.
pub fn blk(config: &BlkConfig) -> Blk {
    let mut disk = Blk::open(config).unwrap();
    disk.start(Box::new(|_| Ok(()))).unwrap();
    disk
}

/// A started block device, and its driver.
pub fn disk(codec: Codec, config: &BlkConfig) -> Driver {
    Driver::new(codec, blk(config))
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Writes the header of a request, and a status that no device writes.
pub fn header(driver: &Driver, kind: u32, sector: u64) {
    let mut header = [0; 16];
    header[0..4].copy_from_slice(&kind.to_le_bytes());
    header[8..16].copy_from_slice(&sector.to_le_bytes());
    driver.put(HEADER, &header);
    driver.put(STATUS, &[0xff]);
}
