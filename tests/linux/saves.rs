//! A busy Linux guest is saved and restored in each way. Its data is there, its clocks follow the
//! policy, its devices work, and its random numbers differ each time.

use std::fs;
use std::time::Instant;

use support::{Failed, ensure, eventually};

use crate::guest::{Guest, Image, scratch};
use crate::wires::{Wires, answers_soon};
use crate::work::{self, Clock, count};

/// Data in the guest with a known checksum.
const DATA_MIB: u64 = 16;
/// How memory is restored, and the clock policy.
const WAYS: [(&str, &str); 3] = [("eager", "advance"), ("map", "stand-still"), ("demand", "advance")];

/// A guest with 2 vCPUs is saved while it works, runs on, and is saved again, which ends the
/// machine. Then both points are restored.
pub fn and_restored(image: &Image, irqchip: &str) -> Result<(), Failed> {
    let scratch = scratch()?;
    let [disk, kept, dir] = ["disk", "kept", "saved"].map(|name| scratch.path(name));
    work::empty(&disk)?;
    let wires = Wires::new(&scratch)?;
    let [net, tap] = wires.flags(0);
    let devices = ["--disk".into(), disk.display().to_string(), net, tap, "--rng".into(), "--balloon".into()];
    let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
    let step = |what: &str| eprintln!("linux {} {irqchip} saves: {what}", image.version);

    let flags = [&["--cpus", "2", "--memory", "256m", "--irqchip", irqchip][..], &devices].concat();
    let mut guest = Guest::start(image, "", &flags)?;
    step("boots");
    guest.ready()?;
    wires.up(&guest)?;
    work::begin(&guest, DATA_MIB)?;
    eventually(support::LIMIT, "the disk's writer has begun", || Ok((count(&guest)? > 0).then_some(())))?;
    let into = dir.display().to_string();
    let save = |guest: &Guest, more: &[&str]| {
        let saved = guest.vellum(&[&["snapshot", guest.name(), &into, "--downtime", "5s"], more].concat())?;
        ensure(saved.status.success(), || format!("{saved:?}"))
    };
    step("is saved while it works");
    save(&guest, &["--follow"])?;
    let flushed = count(&guest)?;
    work::is_as_it_was(&guest)?;
    let still = count(&guest)?;
    ensure(still > flushed, || format!("the disk's writer stands still at {still}"))?;
    step("is saved again, and ends");
    let (flushed, before) = (count(&guest)?, Clock::read(&guest)?);
    save(&guest, &["--stop"])?;
    let since = Instant::now();
    guest.wait()?.with(0)?;
    fs::copy(&disk, &kept)?;

    let mut random = Vec::new();
    for (turn, (memory, clock)) in WAYS.into_iter().enumerate() {
        step(&format!("comes back, {memory}"));
        let mut flags = vec!["--memory", memory, "--clock", clock];
        if turn > 0 {
            // The machine that was restored before has written to the disk.
            let vsock = scratch.path("vsock").display().to_string();
            let refused = guest.vellum(&[&["restore", &into, "--vsock", &vsock][..], &devices].concat())?;
            let said = String::from_utf8_lossy(&refused.stderr);
            let right = refused.status.code() == Some(2) && said.contains("--disk-changed");
            ensure(right, || format!("{refused:?}"))?;
            fs::copy(&kept, &disk)?;
            flags.push("--disk-changed");
        }
        flags.extend(&devices);
        let gone = since.elapsed().as_secs_f64();
        let mut back = Guest::restored(&into, &flags)?;
        work::is_as_it_was(&back)?;
        let after = Clock::read(&back)?;
        match clock {
            "advance" => after.agrees_with(&before)?,
            _ => after.stood_still(&before, gone)?,
        }
        random.push(back.shell("head -c 32 /dev/urandom | sha256sum")?);
        // Linux supports VM generation IDs since 5.18, if that is compiled in.
        let knows = !back.shell("ls -d /sys/bus/*/drivers/vmgenid 2>/dev/null; true")?.is_empty();
        let reseeds = back.shell("dmesg | grep -c 'crng reseeded due to virtual machine fork'; true")?;
        eprintln!("vmgenid: {knows}, reseeded {} times", reseeds.trim());
        ensure(!knows || reseeds.trim() != "0", || "its random numbers are those of the snapshot".into())?;
        let went = count(&back)?;
        ensure(went >= flushed, || format!("its disk was at {flushed}, and is at {went}"))?;
        eventually(support::LIMIT, "the disk's writer goes on", || Ok((count(&back)? > went).then_some(())))?;
        answers_soon()?;
        let last = count(&back)?;
        back.ctl(&["stop"])?;
        back.wait()?.with(0)?;
        work::holds(&disk, last)?;
    }
    random.sort();
    random.dedup();
    ensure(random.len() == WAYS.len(), || "two of them have the same random numbers".into())?;
    step("comes back as it was first");
    let mut first = Guest::restored(&into, &[&["--at", "0", "--disk-changed"][..], &devices].concat())?;
    work::is_as_it_was(&first)?;
    ensure(count(&first)? > 0, || "it knows nothing of its disk".into())?;
    first.ctl(&["stop"])?;
    first.wait()?.with(0).map(drop)
}
