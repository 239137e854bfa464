//! A disk with an image of its own, and its requests: what tests of disks share.

use std::io::Write;
use std::path::PathBuf;

use vellum_devices::virtio::VirtioDevice;
use vellum_devices::virtio::blk::{Blk, BlkConfig};

use super::driver::*;

pub const HEADER: u64 = BUFFERS;
pub const STATUS: u64 = BUFFERS + 0x100;
pub const DATA: u64 = BUFFERS + 0x1000;

/// An image file that goes away with its test.
pub struct Image(pub PathBuf);

impl Image {
    pub fn new(name: &str, contents: &[u8]) -> Self {
        let path = own_path(name);
        std::fs::File::create(&path).unwrap().write_all(contents).unwrap();
        Image(path)
    }

    pub fn open(&self) -> Driver {
        disk(&BlkConfig::new(&self.0))
    }
}

pub fn blk(config: &BlkConfig) -> Blk {
    let mut disk = Blk::open(config).unwrap();
    disk.start(Box::new(|_| Ok(()))).unwrap();
    disk
}

pub fn disk(config: &BlkConfig) -> Driver {
    Driver::new(blk(config))
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

pub fn header(driver: &Driver, kind: u32, sector: u64) {
    let mut header = [0; 16];
    header[0..4].copy_from_slice(&kind.to_le_bytes());
    header[8..16].copy_from_slice(&sector.to_le_bytes());
    driver.put(HEADER, &header);
    driver.put(STATUS, &[0xff]);
}
