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
use support::{Failed, LIMIT, Need, Tests, ensure, eventually, test};
use vellum_devices::virtio::PAUSE_TIMEOUT;
use vellum_devices::virtio::blk::BlkConfig;
use vellum_devices::virtio::registers::Register;
use vellum_devices::virtio::transport::Codec;
use vellum_kvm::memory::{Memory, MemoryConfig};
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::uffd::{BATCH, Mode, Uffd};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
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

/// A request may be as long as 4 GiB. A pause waits for one piece of it, and afterwards it begins anew.
#[test(userfaultfd())]
fn a_long_request_is_withdrawn_between_two_pieces() -> Result<(), Failed> {
    const PIECE: u32 = 1 << 20;
    const PAGE: u32 = PAGE_SIZE as u32;
    // Where the thread had not asked before the second piece began, the request is completed.
    for _ in 0..20 {
        let memory = Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(MEMORY_END))?;
        let uffd = Uffd::new(Mode::Missing)?;
        let offset = memory.offset_of(HELD).ok_or("the page is memory")?;
        uffd.register(&memory.mapping, offset, 2 * PAGE_SIZE, Mode::Missing)?;
        let release = |page: u64| {
            uffd.copy(&memory.mapping, offset + page * PAGE_SIZE, &[9; PAGE_SIZE as usize], PAGE_SIZE)
        };
        let image = Image::new("pieces", &vec![7; (PIECE + PAGE) as usize]);
        let mut driver =
            Driver::on(Codec::Mmio, blk(&BlkConfig::new(&image.0)), Arc::new(memory.guest.clone()));
        driver.start();
        header(&driver, VIRTIO_BLK_T_OUT, 0);
        let held = HELD;
        let parts = [(held, PAGE), (0, PIECE - PAGE), (held + PAGE_SIZE, PAGE)];
        let data = parts.map(|(at, len)| readable(at, len));
        driver.submit(0, &[&[readable(HEADER, 16)], &data[..], &[writable(STATUS, 1)]].concat());
        let quit = EventFd::new(0)?;
        // It has reached the first page.
        uffd.wait(&quit)?;
        uffd.take(&mut [0; BATCH])?;
        let both = std::sync::Barrier::new(2);
        let withdrawn = std::thread::scope(|scope| -> Result<bool, Failed> {
            let helper = scope.spawn(|| -> std::io::Result<bool> {
                both.wait();
                release(0)?;
                let second = uffd.wait(&quit)?;
                if second {
                    release(1)?;
                }
                Ok(!second)
            });
            both.wait();
            let quiesced = driver.device.quiesce(LIMIT);
            quit.write(1)?;
            let withdrawn = helper.join().map_err(|_| "it panicked")??;
            quiesced?;
            Ok(withdrawn)
        })?;
        if !withdrawn {
            continue;
        }
        ensure(driver.used_now(0).is_none(), || "it was answered".into())?;
        release(1)?;
        driver.device.resume();
        ensure(driver.wait_used(0).1 == 1, || "the request is lost".into())?;
        let written = std::fs::read(&image.0)?;
        let [first, .., last] = &written[..] else { return Err("the image is empty".into()) };
        return ensure([*first, *last] == [9, 9], || format!("{first} and {last} were written"));
    }
    Err("the request was completed each time".into())
}

/// The event loop asks a device for its state, for example for `vellum list`. It must not wait for a
/// vCPU that waits for the reset.
#[test(userfaultfd())]
fn a_device_answers_while_a_reset_waits() -> Result<(), Failed> {
    let disk = Hanging::new("answers")?;
    let (answered, answer) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let device = &disk.driver.device;
        scope.spawn(|| device.set(Register::Status, 0));
        let hang = eventually(10 * PAUSE_TIMEOUT, "the hang", || Ok(device.hang()));
        scope.spawn(move || {
            for _ in 0..3 {
                let _ = answered.send((device.stays(), device.fork_stays(), device.describe().features));
            }
        });
        let answers: Vec<_> = (0..3).map_while(|_| answer.recv_timeout(LIMIT).ok()).collect();
        let still = device.hang();
        let released = disk.release();
        hang?;
        ensure(answers.len() == 3, || format!("it answered {} times", answers.len())).and(released)?;
        ensure(still.is_some(), || "the reset did not wait".into())
    })
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
