//! The disk of a guest that migrates has one writer at a time, and flushed data stays.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use support::env::TestEnv;
use support::hosts::real;
use support::{Failed, LIMIT, Need, ensure, eventually, test};
use vellum_sys::host::is_root;

use crate::relay::unconfirmed;
use crate::{ends_with, numbered, succeeds, with};

/// A target that runs the guest has its disk locked. `resume --force` then changes nothing on the
/// source until the target is gone.
#[test(real())]
fn a_guest_whose_disk_the_target_has_locked_is_not_taken_back() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = numbered::here(&env)?;
    let there = env.receive("there", &numbered::devices(&env, "far"))?;
    let (client, release) = unconfirmed(&env)?;
    numbered::has_printed(&env, "far")?;
    let forced = with(env.vellum("ctl here resume --force")?, 1)?;
    let why = String::from_utf8_lossy(&forced.stderr).into_owned();
    ensure(why.contains("the target still has the guest's disks") && why.lines().count() == 1, || {
        why.clone()
    })?;
    let standing = env.standing("here");
    ensure(standing.as_deref() == Some("handover-unconfirmed"), || format!("{standing:?}"))?;
    let refused = with(env.vellum("ctl here nmi")?, 1)?;
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure(why.contains("is being handed over"), || why.clone())?;
    drop(there);
    let out = env.path("out");
    let before = fs::metadata(&out)?.len();
    succeeds(&env.vellum("ctl here resume --force")?)?;
    eventually(LIMIT, "it goes on here", || Ok((fs::metadata(&out)?.len() > before).then_some(())))?;
    drop((release, client, here));
    Ok(())
}

/// Loop devices on one file: each has a page cache of its own, as hosts have that share a block device.
struct Loops(Vec<String>);

impl Loops {
    fn new(file: &Path, count: usize) -> Result<Self, Failed> {
        let mut loops = Self(Vec::new());
        for _ in 0..count {
            let device = Command::new("losetup").args(["--find", "--show"]).arg(file).output()?;
            ensure(device.status.success(), || format!("losetup: {device:?}"))?;
            loops.0.push(String::from_utf8(device.stdout)?.trim().to_owned());
        }
        Ok(loops)
    }
}

impl Drop for Loops {
    fn drop(&mut self) {
        for device in &self.0 {
            let _ = Command::new("losetup").args(["-d", device]).status();
        }
    }
}

/// Requires loop devices.
fn loops() -> Need {
    if !is_root() {
        return Err("needs root: run the tests with sudo".into());
    }
    let made = TestEnv::new().and_then(|env| {
        fs::write(env.path("file"), [0; 4096])?;
        Loops::new(&env.path("file"), 2)
    });
    made.map(drop).map_err(|error| {
        format!("needs loop devices: modprobe loop ({})", error.message().unwrap_or_default())
    })
}

/// The host of the source has unwritten pages of the device, and that of the target old ones.
/// Nothing of either is left when the guest goes on there.
#[test(real().and(loops()))]
fn a_block_device_of_two_hosts_has_what_was_written_before_the_guest_goes_on() -> Result<(), Failed> {
    const PAGE: usize = 4096;
    let env = TestEnv::new()?;
    let [kernel, disk] = ["kernel", "disk"].map(|name| env.path(name));
    fs::write(&kernel, numbered::without_flushes())?;
    fs::write(&disk, [0; 16 * PAGE])?;
    let loops = Loops::new(&disk, 2)?;
    let devices = |at: usize, serial: &str| {
        format!("--disk {} --serial file={}", loops.0[at], env.path(serial).display())
    };
    let line = format!("run --kernel {} --memory 32m {}", kernel.display(), devices(0, "out"));
    let here = env.run("here", &line)?;
    numbered::has_printed(&env, "out")?;
    // While a device is open, its pages are not written back at once. A write of the guest's host
    // stands for one of the guest.
    let open = |at: usize| fs::OpenOptions::new().read(true).write(true).open(&loops.0[at]);
    let (source, target) = (open(0)?, open(1)?);
    let there = env.receive("there", &devices(1, "far"))?;
    let (mut bytes, written) = ([0; PAGE], [7; PAGE]);
    target.read_exact_at(&mut bytes, 8 * PAGE as u64)?;
    source.write_all_at(&written, 8 * PAGE as u64)?;
    succeeds(&env.migrate("here", "there", "--downtime 1s")?)?;
    ends_with(here, 15)?;
    let image = fs::read(&disk)?;
    let said = fs::read(env.path("out"))?;
    let last = said.as_chunks::<4>().0.iter().map(|number| u32::from_le_bytes(*number)).max();
    let sectors = image.chunks(512).take(numbered::SECTORS as usize);
    let first = |sector: &[u8]| sector.first_chunk().map(|number| u32::from_le_bytes(*number));
    let newest = sectors.filter_map(first).max();
    ensure(last.is_some() && newest >= last, || format!("{newest:?} on the disk, and {last:?} printed"))?;
    target.read_exact_at(&mut bytes, 8 * PAGE as u64)?;
    ensure(bytes == written, || format!("the target's host has {} there", bytes[0]))?;
    succeeds(&env.vellum("ctl there stop")?)?;
    ends_with(there, 0)?;
    numbered::go_on(&env)
}

/// The guest writes numbers to its disk, flushes, and prints each. The target is killed while it
/// writes, with the source still there. No number is missing or printed twice, flushed data is in
/// the image, and older data did not overwrite it.
#[test(real())]
fn a_disk_has_one_writer_and_keeps_what_was_flushed() -> Result<(), Failed> {
    const SECTORS: usize = numbered::SECTORS as usize;
    for irqchip in ["split", "kernel"] {
        let env = TestEnv::new()?;
        let [kernel, disk, out, far] = ["kernel", "disk", "out", "far"].map(|name| env.path(name));
        fs::write(&kernel, numbered::kernel())?;
        fs::write(&disk, [0; 512 * SECTORS])?;
        let devices =
            |serial: &PathBuf| format!("--disk {} --serial file={}", disk.display(), serial.display());
        let line =
            format!("run --kernel {} --memory 32m --irqchip {irqchip} {}", kernel.display(), devices(&out));
        let here = env.run("here", &line)?;
        // Several rounds over the sectors.
        let said = |file: &PathBuf| Ok((fs::metadata(file)?.len() > 4 * 5 * SECTORS as u64).then_some(()));
        eventually(LIMIT, "it writes", || said(&out))?;
        let mut there = env.receive("there", &devices(&far))?;
        let (client, release) = unconfirmed(&env)?;
        let before = fs::read(&out)?;
        eventually(LIMIT, "it writes on", || said(&far))?;
        there.child.kill()?;
        there.child.wait()?;
        ensure(fs::read(&out)? == before, || "the source has run on".into())?;
        let all = [before, fs::read(&far)?].concat();
        let numbers: Vec<u32> =
            all.as_chunks::<4>().0.iter().map(|number| u32::from_le_bytes(*number)).collect();
        let wrong = numbers.iter().zip(1..).find(|(number, due)| **number != *due);
        ensure(wrong.is_none(), || format!("said and due: {wrong:?} of {}", numbers.len()))?;
        let image = fs::read(&disk)?;
        let sectors = image.chunks(512).map(|sector| sector[..4].try_into().map(u32::from_le_bytes));
        let mut written = sectors.collect::<Result<Vec<_>, _>>()?;
        written.sort_unstable();
        // The last number that was printed. The next one may be written too, and the one after it
        // if that number was about to be printed.
        let last = numbers.len() as u32;
        let lap = |end: u32| (end + 1 - SECTORS as u32..=end).collect::<Vec<_>>();
        ensure((last..=last + 2).any(|end| written == lap(end)), || {
            format!("{last} was flushed: {written:?}")
        })?;
        drop((release, client, here));
    }
    Ok(())
}
