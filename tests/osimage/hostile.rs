//! Images that are damaged or hostile, and what is no image. Each is refused in one line, with
//! status 2, and read by a process without rights.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use support::guests::Code;
use support::{Failed, Random, Scratch, ensure, hosts, test, tools};

use crate::machines::with_cloud_init;
use crate::{Files, KERNEL, ROOT, VELLUM, disk, make_tree, makers, run};

/// An image that cannot boot is reported in one line, with status 2, and so is each damaged image.
/// The reader does not hang or exhaust memory.
#[test(makers())]
fn what_does_not_boot_is_said_in_one_line() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let image = disk(&scratch, "gpt", &[(1, "linux", Files::Xfs)])?;
    let refused = Command::new(VELLUM).args(["run", "-d"]).arg(&image).output()?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    let names = said.contains("xfs, which is not read") && said.contains("--kernel FILE");
    ensure(refused.status.code() == Some(2) && names && said.lines().count() == 1, || {
        format!("{refused:?}")
    })?;

    let tree = make_tree(
        &scratch,
        "root",
        &[
            ("boot/vmlinuz-1", KERNEL),
            ("boot/grub/grub.cfg", b"menuentry x {\n linux /boot/vmlinuz-1 ro\n}\n"),
        ],
    )?;
    let esp = make_tree(&scratch, "esp", &[("loader/entries/a.conf", &b"linux /k\n"[..]), ("k", KERNEL)])?;
    let image =
        disk(&scratch, "gpt", &[(1, "uefi", Files::Fat(&esp)), (2, "linux", Files::Ext4(&tree, ROOT))])?;
    let mut original = Vec::new();
    File::open(&image)?.read_to_end(&mut original)?;
    let mut random = Random::new();
    let damaged = scratch.path("damaged");
    let places: Vec<usize> = (0..original.len()).filter(|&at| original[at] != 0).collect();
    let mut answers = [0; 2];
    for _ in 0..200 {
        let mut bytes = original.clone();
        for _ in 0..1 + random.below(8) {
            bytes[places[random.below(places.len() as u64) as usize]] = random.below(256) as u8;
        }
        fs::write(&damaged, &bytes)?;
        let output = Command::new(VELLUM).args(["disk", "info", "--json"]).arg(&damaged).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        match output.status.code() {
            Some(0) => answers[0] += 1,
            Some(2) if said.lines().count() == 1 => answers[1] += 1,
            _ => return Err(format!("{output:?}").into()),
        }
    }
    ensure(answers[0] > 0, || format!("{answers:?}"))
}

/// What cannot be an image, and one that is cut off, is refused in one line that names it, with
/// status 2. Nothing is left behind, not even for a machine that is kept. A name may have spaces.
#[test(makers(), tools::program("qemu-img"))]
fn what_is_no_whole_image_is_refused_in_one_line_and_leaves_nothing() -> Result<(), Failed> {
    let (scratch, home, runtime) = (Scratch::new()?, Scratch::new()?, Scratch::new()?);
    let image = with_cloud_init(&scratch, KERNEL)?;
    let at = |name: &str| scratch.path(name);
    let whole = at("a whole image.qcow2");
    run(Command::new("qemu-img")
        .args(["convert", "-O", "qcow2", "-o", "cluster_size=4k"])
        .args([&image, &whole]))?;
    let bytes = fs::read(&whole)?;
    fs::write(at("cut off.qcow2"), &bytes[..bytes.len() / 2])?;
    fs::write(at("a header.qcow2"), &bytes[..100])?;
    run(Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(at("huge")).arg("1P"))?;
    for (name, backing) in [("over", "a whole image.qcow2"), ("over over", "over")] {
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]).args([at(backing), at(name)]);
        run(&mut create)?;
    }
    run(Command::new("qemu-img").args(["create", "-q", "-f", "vmdk"]).arg(at("vmdk")).arg("1M"))?;
    fs::write(at("empty"), "")?;
    fs::write(at("a text"), "hello")?;
    fs::create_dir(at("a directory"))?;
    run(Command::new("mkfifo").arg(at("a FIFO")))?;
    std::os::unix::fs::symlink("itself", at("itself"))?;
    let there = || -> Result<Vec<PathBuf>, Failed> {
        let names = |dir: &Path| fs::read_dir(dir).map(|all| all.flatten().map(|entry| entry.path()));
        let mut all: Vec<_> = names(scratch.dir())?.chain(names(home.dir())?).collect();
        all.sort();
        Ok(all)
    };
    let before = there()?;
    let out = at("out.raw");
    let refused = |words: &[&str], last: &[&Path], named: &str| {
        let mut command = Command::new(VELLUM);
        command.args(words).args(last).stdin(Stdio::null());
        command.env("XDG_DATA_HOME", home.dir()).env("XDG_RUNTIME_DIR", runtime.dir());
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let is_due = output.status.code() == Some(2) && said.lines().count() == 1 && said.contains(named);
        ensure(is_due, || format!("{words:?} {last:?}: {output:?}"))?;
        let now = there()?;
        ensure(now == before, || format!("{words:?} {last:?} leaves {now:?} of {before:?}"))
    };
    const RUN: [&str; 5] = ["run", "--keep", "--name", "x", "-d"];
    for name in
        ["cut off.qcow2", "a header.qcow2", "empty", "a text", "a directory", "a FIFO", "itself", "none"]
    {
        let path = at(name);
        // What is not read is raw, so `info` describes these two.
        if !["empty", "a text"].contains(&name) {
            refused(&["disk", "info"], &[&path], name)?;
        }
        refused(&["disk", "convert"], &[&path, &out], name)?;
        refused(&RUN, &[&path], name)?;
    }
    for words in [&["disk", "info"][..], &RUN] {
        refused(words, &[&at("huge")], "1024 TiB in a qcow2 image is not supported: 16 TiB")?;
        // Its length cannot be told.
        refused(words, &[Path::new("/proc/version")], "/proc/version: Invalid argument")?;
    }
    // A backing file is named by the user, and has none of its own.
    refused(&["disk", "info"], &[&at("over")], "say which: `--backing FILE`")?;
    refused(&RUN, &[&at("over")], "say which: `backing=FILE`")?;
    let over = at("over").display().to_string();
    refused(
        &["disk", "info", "--backing", &over],
        &[&at("over over")],
        "its backing file has the backing file",
    )?;
    refused(&["disk", "info"], &[&at("vmdk")], "convert it with `qemu-img convert -O raw")?;
    let info = Command::new(VELLUM).args(["disk", "info"]).arg(at("vmdk")).output()?;
    ensure(!String::from_utf8_lossy(&info.stderr).contains("force"), || format!("{info:?}"))?;
    for device in ["/dev/null", "/dev/zero"].map(Path::new) {
        refused(&["disk", "info"], &[device], "neither a file nor a block device")?;
        refused(&["disk", "convert"], &[device, &out], "neither a file nor a block device")?;
        refused(&RUN, &[device], "neither a file nor a block device")?;
    }
    refused(&["disk", "convert"], &[&whole, &at("none/out")], "none/out")?;
    refused(&["disk", "create"], &[&at("none/out"), Path::new("1g")], "none/out")?;
    refused(&["disk", "create"], &[&at("none/"), Path::new("1g")], "none/")?;
    refused(&["disk", "create"], &[&out, Path::new("0")], "512")?;
    refused(&["disk", "create"], &[&at("out.qcow2"), Path::new("17t")], "16 TiB is the most")?;
    let small = format!("{},size=1m", whole.display());
    refused(&RUN, &[Path::new(&small)], "can only be made larger")?;
    refused(&["run", "-d"], &[Path::new(&small)], "can only be made larger")
}

/// An image that is created or converted gets its name when it is whole. A process that is killed
/// before leaves nothing that could be taken for the image.
#[test(tools::program("strace"))]
fn a_copy_has_no_name_before_it_is_whole() -> Result<(), Failed> {
    let (from, to) = (Scratch::new()?, Scratch::new()?);
    let image = from.path("a.raw");
    fs::write(&image, vec![7; 3 << 20])?;
    let there = || fs::read_dir(to.dir()).map(|all| all.flatten().map(|entry| entry.file_name()).collect());
    for name in ["a.qcow2", "b.raw"] {
        for create in [true, false] {
            let path = to.path(name);
            let disk = |program: &mut Command| {
                program.arg(VELLUM).arg("disk").stdin(Stdio::null());
                match create {
                    true => program.arg("create").arg(&path).arg("3m"),
                    false => program.arg("convert").arg(&image).arg(&path),
                };
                program.output()
            };
            let mut strace = Command::new("strace");
            strace.args([
                "-f",
                "-o",
                "/dev/null",
                "-e",
                "trace=linkat",
                "-e",
                "inject=linkat:signal=KILL:error=EIO",
            ]);
            let killed = disk(&mut strace)?;
            let left: Vec<_> = there()?;
            ensure(!killed.status.success() && left.is_empty(), || format!("{left:?} after {killed:?}"))?;
            let made = disk(&mut Command::new("env"))?;
            let mode = fs::metadata(&path)?.permissions().mode();
            // As any new file, which the umask makes private or not.
            let due = fs::metadata(&image)?.permissions().mode();
            ensure(made.status.success() && mode == due, || format!("{made:?}, mode {mode:o}"))?;
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

/// The bytes of an image that are read to detect its format. Only these are read by a process that
/// is not confined.
const MAGIC_BYTES: u64 = 72;
/// The bytes of the header of a qcow2 image.
const HEADER_BYTES: u64 = 104;

/// Fails unless the files named in `images` are read behind a seccomp filter, except for up to
/// `max` bytes at once. `logs` are of strace, one for each thread.
fn are_read_confined(logs: &Path, images: &[&str], max: u64) -> Result<(), Failed> {
    let mut read = vec![0; images.len()];
    for log in fs::read_dir(logs)? {
        let mut is_confined = false;
        for call in fs::read_to_string(log?.path())?.lines() {
            let image = images.iter().position(|image| call.contains(&format!("/{image}>")));
            match image {
                _ if call.starts_with("seccomp(SECCOMP_SET_MODE_FILTER") => is_confined = true,
                Some(image) if is_confined => read[image] += 1,
                Some(_) => {
                    // pread64(FILE, BYTES, COUNT, OFFSET) = RESULT
                    let count = call.rsplit(", ").nth(1).and_then(|count| count.parse::<u64>().ok());
                    ensure(count.is_some_and(|count| count <= max), || call.to_owned())?;
                }
                None => {}
            }
        }
    }
    ensure(!read.contains(&0), || format!("{images:?} were read {read:?} times behind a filter"))
}

/// The tables of a machine's disk and the map of its overlay are read by the disk's thread, behind
/// its seccomp filter.
#[test(hosts::kvm(), tools::program("strace"))]
fn a_machine_reads_its_disks_behind_a_filter() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let (kernel, image, over) = (scratch.path("kernel"), scratch.path("a.qcow2"), scratch.path("a.over"));
    fs::write(&kernel, Code::default().print("runs\n").power_off().elf64())?;
    run(Command::new(VELLUM).args(["disk", "create"]).arg(&image).arg("4m"))?;
    for (at, disk) in [format!("{},overlay={}", image.display(), over.display()), image.display().to_string()]
        .into_iter()
        .enumerate()
    {
        // The first machine makes the overlay. The second reads it.
        for round in 0..2 {
            let logs = scratch.path(&format!("calls{at}{round}"));
            fs::create_dir(&logs)?;
            let mut strace = Command::new("strace");
            strace.args(["-ff", "-y", "-e", "trace=seccomp,read,pread64,preadv", "-o"]).arg(logs.join("log"));
            strace.arg(VELLUM).args(["run", "-m", "64m", "-k"]).arg(&kernel).args(["--disk", &disk]);
            run(strace.stdin(Stdio::null()))?;
            let images = if at == 0 && round == 1 { &["a.qcow2", "a.over"][..] } else { &["a.qcow2"] };
            are_read_confined(&logs, images, HEADER_BYTES)?;
        }
    }
    Ok(())
}

/// The tables of an image are read behind a seccomp filter, in a process without other rights.
#[test(tools::program("strace"))]
fn strangers_images_are_read_by_a_confined_process() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let (image, raw) = (scratch.path("a.qcow2"), scratch.path("a.raw"));
    run(Command::new(VELLUM).args(["disk", "create"]).arg(&image).arg("4m"))?;
    for words in [vec!["info"], vec!["convert"]] {
        let logs = scratch.path(words[0]);
        fs::create_dir(&logs)?;
        let mut strace = Command::new("strace");
        strace.args(["-ff", "-y", "-e", "trace=seccomp,read,pread64,preadv", "-o"]).arg(logs.join("log"));
        strace.arg(VELLUM).arg("disk").args(&words).arg(&image);
        if words == ["convert"] {
            strace.arg(&raw);
        }
        run(&mut strace)?;
        are_read_confined(&logs, &["a.qcow2"], MAGIC_BYTES)?;
    }
    Ok(())
}
