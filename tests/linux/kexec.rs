//! A Linux guest starts another kernel by kexec, without firmware: at once, and when its kernel
//! panics. Devices and the other CPU stay as the first kernel left them, and the second kernel
//! finds all of them again.

use std::fs;
use std::path::PathBuf;

use guest_agent::{Argument, Event, Kexec, Request};
use support::{Failed, Need, ensure, test};
use vellum_control::agent;

use crate::guest::{Guest, Image, noise, scratch};
use crate::whole::{entropy, is_read, vsock};
use crate::whole_matrix;

/// Marks the second kernel's command line.
const SECOND: &str = "second";

/// On Arm the guests' kernels lack kexec_file_load(2).
fn file_load() -> Need {
    match cfg!(target_arch = "aarch64") {
        true => Err(
            "needs a guest with CONFIG_KEXEC_FILE, which Debian's kernel for Arm lacks: cargo lab test linux"
                .into(),
        ),
        false => Ok(()),
    }
}

/// Starts a guest that has the next kernel and initramfs on disks, and a disk that both kernels
/// read.
fn start(image: &Image, memory: &str, cmdline: &str) -> Result<(Guest, PathBuf), Failed> {
    let scratch = scratch()?;
    let mut flags =
        ["--kernel", &image.kernel(), "--cpus", "2", "--memory", memory, "--rng"].map(str::to_owned).to_vec();
    for (name, mut content) in [
        ("known", noise(1, 4 << 20)),
        ("kernel", fs::read(image.kernel())?),
        ("initrd", fs::read(image.initrd())?),
    ] {
        // A disk has whole sectors.
        content.resize(content.len().next_multiple_of(4096), 0);
        fs::write(scratch.path(name), content)?;
        flags.extend(["--disk".into(), format!("{},readonly", scratch.path(name).display())]);
    }
    flags.extend(["--vsock".into(), scratch.path("vsock").display().to_string()]);
    let known = scratch.path("known");
    let mut guest = Guest::start_as(scratch, image, cmdline, flags)?;
    guest.ready()?;
    for (device, file, bytes) in [("vdb", "kernel", image.kernel()), ("vdc", "initrd", image.initrd())] {
        guest.shell(&format!("head -c {} /dev/{device} > /{file}", fs::metadata(bytes)?.len()))?;
    }
    Ok((guest, known))
}

/// The second kernel: the first one again, with its command line and `more`.
fn next(guest: &Guest, more: &str, on_panic: bool) -> Result<Request, Failed> {
    let params = guest.shell("cat /proc/cmdline")?;
    // The crashing kernel has reserved memory. Its successor needs none.
    let params = params.split_whitespace().filter(|word| !word.starts_with("crashkernel="));
    let params = params.chain([SECOND, more]).collect::<Vec<_>>().join(" ");
    Ok(Request::Kexec(Kexec { kernel: "/kernel".into(), initrd: Some("/initrd".into()), params, on_panic }))
}

/// Checks that the second kernel runs with this number of CPUs, and has every device.
fn has_every_device(guest: &mut Guest, known: &std::path::Path, processors: u64) -> Result<(), Failed> {
    guest.ready()?;
    let params = guest.shell("cat /proc/cmdline")?;
    ensure(params.split_whitespace().any(|word| word == SECOND), || {
        format!("the kernel is another: {params}")
    })?;
    let facts = guest.ask_one(&Request::Facts)?;
    ensure(matches!(facts, Event::Facts { cpus, .. } if cpus == processors), || format!("{facts:?}"))?;
    entropy(guest)?;
    is_read(guest, "/dev/vda", known)?;
    if processors == 2 { vsock(guest) } else { Ok(()) }
}

#[test(whole_matrix(), file_load())]
fn another_kernel_takes_its_place_and_has_every_device() -> Result<(), Failed> {
    let image = &Image::oldest()?;
    let (mut guest, known) = start(image, "512m", "")?;
    let request = next(&guest, "", false)?;
    match guest.ask(&request)?.next() {
        Some(Err(agent::Error::Closed | agent::Error::Socket { .. })) => {}
        other => return Err(format!("kexec was answered by {other:?}").into()),
    }
    has_every_device(&mut guest, &known, 2)?;
    guest.power_off()?.with(0).map(drop)
}

#[test(whole_matrix(), file_load())]
fn a_kernel_that_panics_hands_over_to_one_that_has_its_memory_to_read() -> Result<(), Failed> {
    let image = &Image::oldest()?;
    let (mut guest, known) = start(image, "768m", "crashkernel=256M")?;
    let request = next(&guest, "nr_cpus=1 reset_devices", true)?;
    let events = guest.ask(&request)?.collect::<Result<Vec<_>, _>>()?;
    ensure(events.is_empty(), || format!("a kernel that waits for a panic: {events:?}"))?;
    let command = ["sh", "-c", "echo c > /proc/sysrq-trigger"].map(Argument::from).to_vec();
    let answered = guest.ask(&Request::Exec { command })?.next();
    ensure(!matches!(answered, Some(Ok(Event::Exit { .. }))), || format!("nobody panicked: {answered:?}"))?;
    has_every_device(&mut guest, &known, 1)?;
    // An ELF core of the first kernel's memory (fs/proc/vmcore.c).
    let core = guest.shell("head -c 4 /proc/vmcore | tail -c 3")?;
    ensure(core == "ELF", || format!("/proc/vmcore begins with {core:?}"))?;
    guest.power_off()?.with(0).map(drop)
}
