//! A disk with an overlay loses power, or its VMM is killed. Flushed data must be there. Each other
//! sector must be old or new.
//!
//! An ext4 of this host runs on a disk through /dev/fuse, which records its writes and flushes. The
//! tests' own driver repeats these on a disk with an overlay. The overlay's file is on such a mount
//! too, so there is a record of the overlay's writes and syncs. Power is lost at any point of that
//! record.

mod killed;
mod lost;

use std::path::PathBuf;
use std::process::ExitCode;

use support::Tests;
use support::share::mount;
use vellum_devices::virtio::blk::BlkConfig;
use vellum_disk::overlay::Place;
use vellum_share::process;

fn main() -> ExitCode {
    let ended = match std::env::args().nth(1).as_deref() {
        Some(process::WORD) => process::serve().map_err(|error| error.to_string()),
        Some(mount::WORD) => mount::carry().map_err(|error| error.message().unwrap_or_default().to_owned()),
        Some(killed::WORD) => killed::write(),
        _ => {
            let mut tests = Tests::from_args();
            // A process that another test starts inherits this one's descriptors until it executes
            // its program. With them it holds the lock of the overlay.
            tests.one_at_a_time();
            return tests.run();
        }
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("power: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A disk with the base `base` and an overlay in the file `over`.
fn overlaid(base: PathBuf, over: PathBuf) -> BlkConfig {
    BlkConfig { overlay: Some(Place::File(over)), ..BlkConfig::new(base) }
}

/// The requests of a driver to a disk.
mod ask {
    use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};

    use support::virtio::disk::{DATA, STATUS, header};
    use support::virtio::driver::{Buf, Driver, readable, writable};

    /// The largest request in bytes.
    pub const MAX_WRITE: usize = 64 << 10;

    fn request(driver: &mut Driver, kind: u32, at: u64, data: &[Buf]) {
        header(driver, kind, at / 512);
        let mut chain = vec![readable(support::virtio::disk::HEADER, 16)];
        chain.extend(data);
        chain.push(writable(STATUS, 1));
        driver.submit(0, &chain);
        driver.wait_used(0);
        assert_eq!(driver.fetch(STATUS, 1), [0], "request {kind} at {at}");
    }

    pub fn write(driver: &mut Driver, at: u64, data: &[u8]) {
        for (number, part) in data.chunks(MAX_WRITE).enumerate() {
            driver.put(DATA, part);
            request(
                driver,
                VIRTIO_BLK_T_OUT,
                at + (number * MAX_WRITE) as u64,
                &[readable(DATA, part.len() as u32)],
            );
        }
    }

    pub fn read(driver: &mut Driver, at: u64, len: usize) -> Vec<u8> {
        let mut all = Vec::with_capacity(len);
        while all.len() < len {
            let part = MAX_WRITE.min(len - all.len());
            request(driver, VIRTIO_BLK_T_IN, at + all.len() as u64, &[writable(DATA, part as u32)]);
            all.extend(driver.fetch(DATA, part));
        }
        all
    }

    pub fn flush(driver: &mut Driver) {
        request(driver, VIRTIO_BLK_T_FLUSH, 0, &[]);
    }
}
