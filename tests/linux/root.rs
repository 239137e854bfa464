//! A guest of a command with this host's root as its own: it has what commands expect, it may
//! change anything, and nothing changes on the host.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use support::{Failed, ensure};
use vellum_sys::terminal::open_pty;

use crate::VELLUM;
use crate::guest::{Image, Source, for_this_bed, noise, scratch, short_name};
use crate::typed::until;

/// Root has to agree that its files are served as root.
fn host() -> &'static str {
    if vellum_sys::host::is_root() { "host,as-root" } else { "host,overlay" }
}

/// Runs `script` in a guest of `kernel` on this host's root, with `flags` and `input`.
fn run(kernel: &Source, flags: &[&str], script: &str, input: &[u8]) -> Result<Output, Failed> {
    let (bed_flags, cmdline) = for_this_bed();
    let mut command = Command::new(VELLUM);
    command.args(["run", "--timeout", "900s"]).args(kernel.arguments());
    command.args(["--root", host()]).args(flags).args(bed_flags);
    command.args(["--params", cmdline, "--", "sh", "-c", script]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut stdin = child.stdin.take().expect("piped");
    let input = input.to_owned();
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output()?;
    // A guest that fails reads no input.
    let _ = writer.join();
    Ok(output)
}

/// The file systems that selftests expect are mounted, there is entropy, and the root is writable.
pub fn is_the_guests(image: &Image) -> Result<(), Failed> {
    let script = "for place in proc sys dev dev/pts dev/shm tmp run sys/fs/cgroup sys/kernel/debug; do
            grep -q \" /$place \" /proc/mounts || { echo \"no /$place\" >&2; exit 20; }
        done
        grep -q virtio_rng /sys/class/misc/hw_random/rng_current || exit 21
        [ $(($(cat /sys/class/net/lo/flags) & 1)) = 1 ] || exit 22
        [ \"$PWD\" = /etc ] && mkdir /made && echo x > /made/x && rm passwd && [ ! -e /etc/passwd ] || exit 23
        cat; echo no >&2; exit 7";
    let data = noise(23, 300_000);
    let output = run(&image.source(), &["--guest-dir", "/etc"], script, &data)?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure(output.status.code() == Some(7) && errors == "no\n", || format!("{}: {errors}", output.status))?;
    ensure(output.stdout == data, || format!("{} of {} bytes came back", output.stdout.len(), data.len()))?;
    ensure(Path::new("/etc/passwd").exists() && !Path::new("/made").exists(), || "it was changed".into())
}

/// Root in the guest mounts the root a second time, as if it could write to it, and tries to.
/// Another user reads. Every name, mode, owner, time except the access time, and content on this
/// host is unchanged.
pub fn is_as_it_was(kernel: &Source) -> Result<(), Failed> {
    let before = whole()?;
    // The second mount is the same file system, which the agent mounted read-only. Root in the
    // guest can remount it read-write, and does.
    let script = "mkdir /second && mount -t virtiofs /dev/root /second && mount -o remount,rw /second || exit 19
        grep -q '^/dev/root /second virtiofs rw' /proc/mounts && cmp /etc/passwd /second/etc/passwd || exit 20
        ! echo x > /second/new && ! echo x >> /second/etc/passwd && ! rm /second/etc/passwd || exit 21
        ! chmod 777 /second/etc && ! touch /second/etc/passwd && ! ln /second/etc/passwd /second/link || exit 22
        rm -r /etc /bin 2>/dev/null; exit 7";
    let output = run(kernel, &[], script, &[])?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure(output.status.code() == Some(7), || format!("{}: {errors}", output.status))?;
    // The generic kernel has its devices on a PCI bus here, as on most machines that it boots on.
    let on_pci = kernel.name.starts_with("generic");
    let bus: &[&str] = if on_pci { &["--transport", "pci"] } else { &[] };
    let flags = [&["--guest-user", "nobody"], bus].concat();
    let found = if on_pci { "" } else { "! " };
    let script = format!(
        "id -u; cat > /tmp/x && cat /tmp/x && {found}ls /sys/bus/pci/drivers/virtio-pci 2>/dev/null | grep -q 0000:"
    );
    let output = run(kernel, &flags, &script, b"a\0b")?;
    ensure(output.status.success() && output.stdout == b"65534\na\0b", || format!("{output:?}"))?;
    let after = whole()?;
    let differs = |path: &&PathBuf| before.get(*path) != after.get(*path);
    let changed: Vec<_> = before.keys().chain(after.keys()).filter(differs).take(5).collect();
    ensure(before.len() > 100 && changed.is_empty(), || format!("{changed:?} of {}", before.len()))
}

/// modprobe finds modules of an unpacked package, or of a tree in which none was installed, by
/// name, with their dependencies, and by alias. kmod does on this host's root, and busybox in an
/// initramfs. A name that is no module is not found.
pub fn modprobe_finds(kernel: &Source) -> Result<(), Failed> {
    let busybox = Image::oldest()?.initrd();
    let (bed_flags, cmdline) = for_this_bed();
    let script = "modprobe vfat && grep -q ^vfat /proc/modules && grep -q ^fat /proc/modules || exit 20
        modprobe rtnl-link-dummy && grep -q ^dummy /proc/modules || exit 21
        ! modprobe no-such-module 2>/dev/null || exit 22
        ! touch /lib/modules/$(uname -r)/kernel/new 2>/dev/null || exit 23
        exit 7";
    for root in [["--root", host()], ["--initrd", &busybox]] {
        let mut command = Command::new(VELLUM);
        command.args(["run", "--timeout", "900s"]).args(kernel.arguments()).args(root).args(bed_flags);
        let output =
            command.args(["--params", cmdline, "--", "sh", "-c", script]).stdin(Stdio::null()).output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure(output.status.code() == Some(7), || format!("{root:?}: {}: {errors}", output.status))?;
    }
    Ok(())
}

/// Without a command a terminal gets the shell of the guest's root, with the terminal's size. The
/// shell's status is vellum's. Such a machine cannot be saved, and the reason is printed.
pub fn a_shell_has_the_terminal(image: &Image) -> Result<(), Failed> {
    let (mut master, slave, name) = open_pty()?;
    let (bed_flags, cmdline) = for_this_bed();
    crate::guest::host(&["stty", "-F", &name, "sane", "rows", "33", "cols", "77"])?;
    let scratch = scratch()?;
    let machine = short_name(&scratch);
    let mut command = Command::new("setsid");
    command.args([
        "-c",
        VELLUM,
        "run",
        "--kernel",
        &image.kernel(),
        "--initrd",
        &image.initrd(),
        "--name",
        &machine,
    ]);
    command.args(["--timeout", "900s", "--root", host(), "--guest-dir", "/etc"]).args(bed_flags);
    command.args(["--params", cmdline]).env("TERM", "vt220");
    let mut child = command.stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave).spawn()?;
    drop(command);
    until(&mut master, "# ")?;
    let saved = Command::new(VELLUM).args(["snapshot", &machine]).arg(scratch.path("snap")).output()?;
    let errors = String::from_utf8_lossy(&saved.stderr);
    ensure(saved.status.code() == Some(2) && errors.contains("--root"), || format!("{saved:?}"))?;
    master.write_all(b"stty size; tty; echo $TERM.$PWD; exit 5\n")?;
    let said = until(&mut master, "vt220./etc")?;
    ensure(said.contains("33 77") && said.contains("/dev/pts/"), || said)?;
    let status = child.wait()?;
    ensure(status.code() == Some(5), || format!("{status}"))
}

/// The file system at `/`: each path with a hash of its metadata and content.
fn whole() -> Result<BTreeMap<PathBuf, u64>, Failed> {
    let (mut found, mut left) = (BTreeMap::new(), vec![PathBuf::from("/")]);
    let device = fs::symlink_metadata("/")?.dev();
    while let Some(path) = left.pop() {
        let it = fs::symlink_metadata(&path)?;
        // Another file system is mounted there.
        if it.dev() != device {
            continue;
        }
        let mut hasher = DefaultHasher::new();
        let sizes =
            [it.ino(), it.nlink(), it.size(), it.rdev(), it.mode().into(), it.uid().into(), it.gid().into()];
        sizes.into_iter().for_each(|number| hasher.write_u64(number));
        [it.mtime(), it.mtime_nsec(), it.ctime(), it.ctime_nsec()]
            .into_iter()
            .for_each(|time| hasher.write_i64(time));
        if it.is_dir() {
            for entry in fs::read_dir(&path)? {
                left.push(entry?.path());
            }
        } else if it.is_symlink() {
            hasher.write(fs::read_link(&path)?.as_os_str().as_encoded_bytes());
        } else if it.is_file() {
            let (mut file, mut part) = (File::open(&path)?, vec![0; 1 << 20]);
            while let count @ 1.. = file.read(&mut part)? {
                hasher.write(&part[..count]);
            }
        }
        found.insert(path, hasher.finish());
    }
    Ok(found)
}
