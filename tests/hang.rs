//! A disk request that hangs: the machine reports it, and everything else goes on.
//!
//! The request really blocks in the kernel. It reads into a page of guest memory that userfaultfd
//! holds back. The server of a network file system that is gone looks the same, but is harder to
//! have in a test.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use support::faults;
use support::virtio::disk::{HEADER, Image, STATUS, blk, header};
use support::virtio::driver::*;
use support::{Failed, Need, Tests, ensure, eventually, test};
use vellum_devices::virtio::PAUSE_TIMEOUT;
use vellum_devices::virtio::blk::BlkConfig;
use vellum_devices::virtio::registers::Register;
use vellum_devices::virtio::transport::Codec;
use vellum_kvm::memory::{Memory, MemoryConfig};
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::uffd::{BATCH, Mode, Uffd};
use virtio_bindings::virtio_blk::VIRTIO_BLK_T_IN;
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_STATUS;
use vmm_sys_util::eventfd::EventFd;

/// The page that is held back.
const HELD: u64 = MIDDLE;

fn main() -> ExitCode {
    faults::plant();
    let mut tests = Tests::from_args();
    tests.add("planted_no-quiesce_is_caught", userfaultfd(), || {
        faults::caught("no-quiesce", "a_request_that_hangs_is_named_and_the_disk_goes_on", "it hangs")
    });
    tests.run()
}

fn userfaultfd() -> Need {
    let have = Uffd::new(Mode::Missing).map(drop);
    have.map_err(|e| format!("needs userfaultfd: {e}; vm.unprivileged_userfaultfd=1 or root allows it"))
}

/// A disk that reads into the page that is held back.
struct Hanging {
    driver: Driver,
    memory: Memory,
    uffd: Uffd,
    image: Image,
}

impl Hanging {
    fn new(name: &str) -> Result<Self, Failed> {
        let memory = Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(MEMORY_END))?;
        let uffd = Uffd::new(Mode::Missing)?;
        let offset = memory.offset_of(HELD).ok_or("the page is memory")?;
        uffd.register(&memory.mapping, offset, PAGE_SIZE, Mode::Missing)?;
        let image = Image::new(name, &[7; 4096]);
        let mut driver =
            Driver::on(Codec::Mmio, blk(&BlkConfig::new(&image.0)), Arc::new(memory.guest.clone()));
        driver.start();
        header(&driver, VIRTIO_BLK_T_IN, 1);
        driver.submit(0, &[readable(HEADER, 16), writable(HELD, 512), writable(STATUS, 1)]);
        // The kernel has reached the page. From now on the request hangs.
        uffd.wait(&EventFd::new(0)?)?;
        uffd.take(&mut [0; BATCH])?;
        Ok(Self { driver, memory, uffd, image })
    }

    /// Lets the request complete.
    fn release(&self) -> Result<(), Failed> {
        let offset = self.memory.offset_of(HELD).ok_or("the page is memory")?;
        Ok(self.uffd.copy(&self.memory.mapping, offset, &[0; PAGE_SIZE as usize], PAGE_SIZE)?)
    }
}

#[test(userfaultfd())]
fn a_request_that_hangs_is_named_and_the_disk_goes_on() -> Result<(), Failed> {
    let mut disk = Hanging::new("named")?;
    let hang = disk.driver.device.quiesce(Duration::from_millis(1)).expect_err("it hangs");
    let path = disk.image.0.display();
    ensure(hang.what == format!("a read of 512 bytes at sector 1 of {path}"), || hang.to_string())?;
    // The request completes, and later ones are served normally.
    disk.release()?;
    ensure(disk.driver.wait_used(0).1 == 513, || "the request is lost".into())?;
    header(&disk.driver, VIRTIO_BLK_T_IN, 2);
    disk.driver.submit(0, &[readable(HEADER, 16), writable(HELD, 512), writable(STATUS, 1)]);
    ensure(disk.driver.wait_used(0).1 == 513, || "the disk does not go on".into())?;
    disk.driver.device.quiesce(PAUSE_TIMEOUT)?;
    Ok(())
}

#[test(userfaultfd())]
fn a_reset_waits_for_the_request_until_the_machine_is_over() -> Result<(), Failed> {
    let disk = Hanging::new("reset")?;
    let before = disk.driver.status();
    std::thread::scope(|scope| {
        let device = &disk.driver.device;
        scope.spawn(|| device.set(Register::Status, 0));
        disk.driver.device.abandon();
    });
    ensure(disk.driver.status() == before, || "reset although a request may still write".into())?;
    disk.release()?;
    disk.driver.set(VIRTIO_MMIO_STATUS, 0);
    ensure(disk.driver.status() == 0, || "not reset although nothing hangs".into())
}

/// A pause must not wait for a vCPU that waits for the reset.
#[test(userfaultfd())]
fn a_reset_that_waits_too_long_is_told_without_the_device() -> Result<(), Failed> {
    let disk = Hanging::new("waits")?;
    std::thread::scope(|scope| {
        let device = &disk.driver.device;
        scope.spawn(|| device.set(Register::Status, 0));
        let hang = eventually(10 * PAUSE_TIMEOUT, "the hang", || Ok(device.hang()));
        let released = disk.release();
        let said = hang?.what.starts_with("a read of 512 bytes at sector 1 of ");
        ensure(said, || "it names something else".into()).and(released)
    })?;
    ensure(disk.driver.status() == 0, || "not reset although nothing hangs".into())?;
    ensure(disk.driver.device.hang().is_none(), || "it still hangs".into())
}

#[test(userfaultfd())]
fn a_machine_ends_although_a_disk_hangs() -> Result<(), Failed> {
    let Hanging { driver, memory, uffd, image } = Hanging::new("end")?;
    driver.device.quiesce(Duration::from_millis(1)).expect_err("it hangs");
    drop(driver);
    // The request's target memory stays mapped as long as it hangs.
    ensure(Arc::strong_count(&memory.mapping) > 1, || "unmapped under a request".into())?;
    drop((uffd, image));
    Ok(())
}
