//! A Linux guest seen from outside. It is dumped while it runs and when it panics, with VMCOREINFO.
//! It gets an NMI, and SysRq by its serial line.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

use support::{Failed, LIMIT, Need, Scratch, ensure, eventually};

use crate::VELLUM;
use crate::guest::{Guest, Image, Source, for_this_bed, scratch, short_name};
use crate::whole_matrix;

/// Requires a guest, and makedumpfile, which distributions' kdump uses to read dumps.
pub fn makedumpfile() -> Need {
    whole_matrix()?;
    has_makedumpfile()
}

pub fn has_makedumpfile() -> Need {
    support::tools::program("makedumpfile")
}

/// The kernel's log in the dump at `path`. makedumpfile finds it by VMCOREINFO and the page tables
/// alone. It also filters free pages out, which requires the kernel's own page lists.
fn log_in(path: &Path, scratch: &Scratch) -> Result<String, Failed> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (log, small) = (scratch.path(&format!("{name}.log")), scratch.path(&format!("{name}.kdump")));
    for (flags, to) in [(&["--dump-dmesg"][..], &log), (&["-c", "-d", "31"], &small)] {
        let output =
            Command::new("makedumpfile").args(flags).arg(path).arg(to).stdin(Stdio::null()).output()?;
        ensure(output.status.success(), || format!("makedumpfile {flags:?}: {output:?}"))?;
    }
    let (whole, left) = (fs::metadata(path)?.len(), fs::metadata(&small)?.len());
    ensure(left > 0 && left < whole / 4, || format!("{left} bytes of {whole} are left"))?;
    Ok(String::from_utf8_lossy(&fs::read(log)?).into_owned())
}

/// The address of the kernel's text without KASLR.
const TEXT: u64 = 0xffff_ffff_8100_0000;

/// Whether the dump at `path` has VMCOREINFO among its notes.
fn has_vmcoreinfo(path: &Path) -> Result<bool, Failed> {
    let mut head = vec![0; 64 << 10];
    let count = File::open(path)?.read_at(&mut head, 0)?;
    Ok(head[..count].windows(21).any(|window| window == b"VMCOREINFO\0\0OSRELEASE"))
}

/// The guest is dumped while it runs, while it is paused, and when it panics. makedumpfile reads
/// each dump.
pub fn is_dumped(image: &Image) -> Result<(), Failed> {
    let scratch = scratch()?;
    let (running, panic) = (scratch.path("running"), scratch.path("panic"));
    let on_panic = format!("dump={}", panic.display());
    let mut guest = Guest::start(image, "sysrq_always_enabled", &["--cpus", "2", "--on-panic", &on_panic])?;
    guest.ready()?;
    let output = guest.vellum(&["dump", guest.name(), &running.display().to_string()])?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure(output.status.success(), || format!("{output:?}"))?;
    let release = guest.shell("uname -r")?;
    ensure(said.contains(&format!("Linux {},", release.trim())), || said.clone())?;
    // KASLR moves the kernel by a random offset, which the dump contains.
    let text = guest.shell("grep ' _stext$' /proc/kallsyms")?;
    let text = u64::from_str_radix(text.split(' ').next().unwrap_or_default(), 16)?;
    ensure(said.contains(&format!("KASLR {:#x},", text - TEXT)), || format!("{text:#x}: {said}"))?;
    ensure(has_vmcoreinfo(&running)?, || "no VMCOREINFO".into())?;
    let log = log_in(&running, &scratch)?;
    ensure(log.contains("Linux version"), || log.clone())?;
    // A paused guest stays paused.
    let paused = scratch.path("paused");
    guest.ctl(&["pause"])?;
    let output = guest.vellum(&["dump", guest.name(), &paused.display().to_string()])?;
    ensure(output.status.success(), || format!("{output:?}"))?;
    guest.status_when(|status| status["state"] == "paused")?;
    guest.ctl(&["resume"])?;
    ensure(log_in(&paused, &scratch)?.contains("Linux version"), || "no log of the paused guest".into())?;
    for path in [&running, &paused] {
        fs::remove_file(path)?;
    }
    guest.ctl(&["nmi"])?;
    let mut heard = String::new();
    guest.hears(&mut heard, "NMI received")?;
    guest.ctl(&["sysrq", "c"])?;
    let ended = guest.wait()?.with(11)?;
    ensure(ended.console.contains("sysrq: Trigger a crash"), || ended.console.clone())?;
    eventually(LIMIT, "the dump of the panic has its name", || Ok(panic.exists().then_some(())))?;
    ensure(has_vmcoreinfo(&panic)?, || "no VMCOREINFO of the panic".into())?;
    let log = log_in(&panic, &scratch)?;
    ensure(
        log.contains("NMI received") && log.contains("Kernel panic - not syncing: sysrq triggered crash"),
        || log,
    )
}

/// Only the console reports this panic, because the module that reports panics is not loaded yet.
pub fn is_dumped_before_its_modules(image: &Image) -> Result<(), Failed> {
    let scratch = scratch()?;
    let panic = scratch.path("panic");
    let on_panic = format!("dump={}", panic.display());
    let mut guest = Guest::start(image, "rdinit=/nothing", &["--on-panic", &on_panic])?;
    let ended = guest.wait()?.with(10)?;
    ensure(ended.console.contains("Kernel panic - not syncing"), || ended.console.clone())?;
    eventually(LIMIT, "the dump of the panic has its name", || Ok(panic.exists().then_some(())))?;
    ensure(has_vmcoreinfo(&panic)?, || "no VMCOREINFO of the panic".into())?;
    let log = log_in(&panic, &scratch)?;
    ensure(log.contains("Kernel panic - not syncing"), || log)
}

/// The guest of a command is dumped by its machine's name. Its kernel is newer than the
/// makedumpfile that reads its log. (makedumpfile cannot filter pages, because it does not know the
/// layout of that kernel's lists.)
pub fn of_a_tree_is_dumped(kernel: &Source) -> Result<(), Failed> {
    let scratch = scratch()?;
    let (name, dump, log) = (short_name(&scratch), scratch.path("dump"), scratch.path("log"));
    let (bed_flags, cmdline) = for_this_bed();
    let archive = Image::oldest()?.initrd();
    let mut command = Command::new(VELLUM);
    command
        .args(["run", "--name", &name, "--timeout", "900s", "--initrd", &archive])
        .args(kernel.arguments());
    command.args(bed_flags).args(["--params", cmdline, "--", "sh", "-c"]);
    command.arg("uname -r; grep ' _stext$' /proc/kallsyms; cat");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut line = || lines.next().ok_or("it ended early")?.map_err(Failed::from);
    let (release, text) = (line()?, line()?);
    let text = u64::from_str_radix(text.split(' ').next().unwrap_or_default(), 16)?;
    let output = Command::new(VELLUM).args(["dump", &name]).arg(&dump).output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure(output.status.success() && said.contains(&format!("Linux {release},")), || format!("{output:?}"))?;
    ensure(said.contains(&format!("KASLR {:#x},", text - TEXT)), || format!("{text:#x}: {said}"))?;
    ensure(has_vmcoreinfo(&dump)?, || "no VMCOREINFO".into())?;
    let output = Command::new("makedumpfile").arg("--dump-dmesg").args([&dump, &log]).output()?;
    ensure(output.status.success(), || format!("makedumpfile: {output:?}"))?;
    let log = String::from_utf8_lossy(&fs::read(log)?).into_owned();
    ensure(log.contains(&format!("Linux version {release}")), || log)?;
    drop(child.stdin.take());
    let status = child.wait()?;
    ensure(status.success(), || format!("{status}"))
}
