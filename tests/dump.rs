//! `vellum dump`: a machine's memory as a core dump. Here are built-in guests, whose memory the
//! tests know. Kernels are in tests/linux.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, ExitCode};

use serde_json::Value;
use support::env::TestEnv;
use support::hosts::{kvm, slow_if_emulated};
use support::{Failed, LIMIT, Tests, ensure, eventually, test, tools};

support::vellum!();

fn main() -> ExitCode {
    Tests::from_args().run()
}

/// The segments of an ELF file: each with its type, offset, address, physical address, size in the
/// file and in memory.
fn segments(file: &File) -> Result<Vec<(u32, [u64; 5])>, Failed> {
    let mut head = [0; 4096];
    file.read_exact_at(&mut head, 0)?;
    let half = |at: usize| usize::from(u16::from_le_bytes([head[at], head[at + 1]]));
    let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
    let is_core = head[..6] == *b"\x7fELF\x02\x01" && half(16) == 4 && half(54) == 56;
    ensure(is_core, || "no ELF core of 64 bits".into())?;
    let (start, count) = (word(32) as usize, half(56));
    let segment = |at: usize| {
        let kind = u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
        (kind, [8, 16, 24, 32, 40].map(|offset| word(at + offset)))
    };
    Ok((0..count).map(|index| segment(start + index * 56)).collect())
}

#[test(kvm())]
fn a_running_guest_is_dumped_and_goes_on() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine =
        env.start("d", &mut env.command("run --memory 64m --passes 0 -c 2 --workload write,region=shared"))?;
    let core = env.path("core");
    let output = env.vellum(&format!("dump d {}", core.display()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure(output.status.success() && said.contains("without VMCOREINFO"), || format!("{output:?}"))?;
    let file = File::open(&core)?;
    let about = file.metadata()?;
    ensure(about.permissions().mode() & 0o777 == 0o600, || format!("{:o}", about.permissions().mode()))?;
    let segments = segments(&file)?;
    let (notes, loads) = segments.split_first().ok_or("no segments")?;
    ensure(notes.0 == 4 && loads.iter().all(|(kind, _)| *kind == 1), || format!("{segments:?}"))?;
    let bytes: u64 = loads.iter().map(|(_, [.., bytes])| bytes).sum();
    ensure(bytes == 64 << 20, || format!("{bytes} bytes of RAM"))?;
    ensure(loads.iter().all(|(_, [offset, ..])| offset.is_multiple_of(4096)), || format!("{loads:?}"))?;
    let status: Value = serde_json::from_str(&env.ctl("d status")?)?;
    ensure(status["state"] == "running", || format!("{status}"))?;
    // The registers of two vCPUs, in notes of `CORE`.
    let [offset, _, _, len, _] = notes.1;
    let mut notes = vec![0; len as usize];
    file.read_exact_at(&mut notes, offset)?;
    let cores = notes.windows(8).filter(|window| *window == b"CORE\0\0\0\0").count();
    ensure(cores == 2, || format!("{cores} vCPUs"))?;
    env.ctl("d stop")?;
    let output = machine.end()?;
    ensure(output.status.success(), || format!("{output:?}"))
}

/// The dump equals the memory of a paused guest, byte by byte. Untouched memory is a hole.
#[test(slow_if_emulated())]
fn a_dump_is_what_is_in_memory_and_sparse() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let run = "run --memory 256m,backing=memfd --passes 0 --workload write,hot=1,share=100";
    let machine = env.start("d", &mut env.command(run))?;
    env.has_written("d", 100)?;
    env.ctl("d pause")?;
    let (first, second) = (env.path("first"), env.path("second"));
    for core in [&first, &second] {
        let output = env.vellum(&format!("dump d {}", core.display()))?;
        ensure(output.status.success(), || format!("{output:?}"))?;
    }
    let status: Value = serde_json::from_str(&env.ctl("d status")?)?;
    ensure(status["state"] == "paused", || format!("it was paused: {status}"))?;
    let (file, about) = (File::open(&first)?, fs::metadata(&first)?);
    ensure(about.len() > 256 << 20 && about.blocks() * 512 < 64 << 20, || {
        format!("{} bytes in {} blocks", about.len(), about.blocks())
    })?;
    // The memory itself, through the machine's descriptor.
    let memory = memory_of(machine.child.id())?;
    let mut full = 0;
    for (_, [offset, _, physical, bytes, _]) in segments(&file)?.into_iter().skip(1) {
        let mut pages = [vec![0; 1 << 20], vec![0; 1 << 20]];
        for at in (0..bytes).step_by(1 << 20) {
            file.read_exact_at(&mut pages[0], offset + at)?;
            memory.read_exact_at(&mut pages[1], physical + at)?;
            ensure(pages[0] == pages[1], || format!("at {:#x}", physical + at))?;
            full += pages[0].iter().filter(|byte| **byte != 0).count();
        }
    }
    ensure(full > 0, || "memory is empty".into())?;
    ensure(fs::read(&first)? == fs::read(&second)?, || "two dumps of a paused guest differ".into())?;
    env.ctl("d stop")?;
    machine.end().map(drop)
}

/// The file behind the memory of a machine with `backing=memfd`, whose RAM is below any gap.
fn memory_of(pid: u32) -> Result<File, Failed> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let path = entry.path();
        let named = fs::read_link(&path).is_ok_and(|name| name.to_string_lossy().contains("memfd:"));
        if named && fs::metadata(&path).is_ok_and(|about| about.len() == 256 << 20) {
            return Ok(File::open(path)?);
        }
    }
    Err("the machine has no file of its memory".into())
}

#[test(kvm(), tools::program("readelf"))]
fn readelf_reads_it() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine = env.endless("d")?;
    let core = env.path("core");
    let output = env.vellum(&format!("dump d {}", core.display()))?;
    ensure(output.status.success(), || format!("{output:?}"))?;
    let output = Command::new("readelf").args(["-W", "-h", "-l", "-n"]).arg(&core).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let good = ["CORE (Core file)", "NOTE", "LOAD", "NT_PRSTATUS"].iter().all(|word| said.contains(word));
    ensure(good && output.stderr.is_empty(), || format!("{output:?}"))?;
    env.ctl("d stop")?;
    machine.end().map(drop)
}

#[test(kvm())]
fn a_dump_that_cannot_be_is_one_line_and_leaves_nothing() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine = env.endless("d")?;
    let there = env.path("there");
    fs::write(&there, "kept")?;
    let refused = |arguments: &str, status: i32, says: &str| {
        let output = env.vellum(arguments)?;
        let said = String::from_utf8_lossy(&output.stderr);
        let good = output.status.code() == Some(status) && said.lines().count() == 1 && said.contains(says);
        ensure(good, || format!("{arguments}: {output:?}"))
    };
    refused(&format!("dump d {}", there.display()), 2, "it is there already")?;
    refused("dump d /nonexistent/core", 2, "/nonexistent/core")?;
    refused(&format!("dump nobody {}", env.path("x").display()), 2, "vellum list")?;
    ensure(fs::read_to_string(&there)? == "kept", || "a file was overwritten".into())?;
    ensure(!env.path("x").exists(), || "a file is left behind".into())?;
    refused("ctl d nmi", 1, "built-in guest")?;
    refused("ctl d sysrq c", 1, "built-in guest")?;
    refused("ctl d sysrq lots", 2, "a letter or a digit")?;
    refused("run -k x --on-panic dmup", 2, "dump=FILE")?;
    // A full disk is reported, and the machine runs on.
    if let Some(full) = small(env.dir()) {
        let output = env.vellum(&format!("dump d {}", full.0.join("core").display()))?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure(output.status.code() == Some(1) && said.contains("No space"), || format!("{output:?}"))?;
        ensure(fs::read_dir(&full.0)?.next().is_none(), || "something is left behind".into())?;
    }
    eventually(LIMIT, "it goes on", || {
        let status: Value = serde_json::from_str(&env.ctl("d status")?)?;
        Ok((status["state"] == "running").then_some(()))
    })?;
    env.ctl("d stop")?;
    machine.end().map(drop)
}

/// A file system of 64 KiB, unmounted when it is dropped.
struct Small(std::path::PathBuf);

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// Mounts one below `dir`. `None` if this process may not mount.
fn small(dir: &Path) -> Option<Small> {
    let path = dir.join("small");
    fs::create_dir(&path).ok()?;
    let mounted =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "none"]).arg(&path).output().ok()?;
    mounted.status.success().then_some(Small(path))
}
