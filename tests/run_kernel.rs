//! `vellum run --kernel` as a user types it: what comes out of the serial port, exit statuses, and
//! bad input.

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use support::guests::Code;
use support::hosts::{kvm, real};
use support::{Failed, LIMIT, Need, Tests, ensure, eventually, test, tools};
use vellum_sys::host::is_root;
use vellum_sys::open;
use vellum_sys::terminal::open_pty;

fn main() -> ExitCode {
    let mut tests = Tests::from_args();
    for (name, flags, says) in [
        ("a_missing_kernel", &["--kernel", "/nonexistent"][..], "--kernel /nonexistent: No such file"),
        ("a_file_that_is_no_kernel", &["--kernel", "/etc/passwd"], "--kernel /etc/passwd: not a kernel"),
        ("a_directory", &["--kernel", "/etc"], "--kernel /etc: "),
        ("a_missing_initrd", &["--initrd", "/nonexistent"], "--initrd /nonexistent: No such file"),
        ("an_initrd_larger_than_memory", &["--initrd", "LARGE", "-m", "8"], "use more memory"),
        ("a_protocol_that_is_not_there", &["--protocol", "pvh"], "it offers linux64"),
        ("a_feature_that_is_mistyped", &["--cpuid", "-pv-eio"], "did you mean pv-eoi?"),
        ("too_many_vcpus", &["--cpus", "256"], "--cpus 256: a Linux guest can have from 1 to 255"),
        ("a_serial_file_that_cannot_be", &["--serial", "file=/nonexistent/x"], "--serial /nonexistent/x: "),
    ] {
        tests.add(format!("{name}_is_one_line_and_status_2"), real(), move || {
            let large = path("large");
            fs::write(&large, vec![0; 9 << 20])?;
            let flags: Vec<_> =
                flags.iter().map(|f| if *f == "LARGE" { large.to_str().unwrap() } else { f }).collect();
            let run = vellum("bad", Code::default().power_off().elf64(), &flags)?;
            fs::remove_file(large)?;
            ensure(String::from_utf8_lossy(&run.stderr).lines().count() == 1, || format!("{run:?}"))?;
            expect(&run, 2, "", says)
        });
    }
    tests.run()
}

#[test(real())]
fn a_byte_on_the_terminal_and_status_0() -> Result<(), Failed> {
    let run = vellum("byte", Code::default().print("V").power_off().elf64(), &["-m", "16"])?;
    expect(&run, 0, "V", "")
}

#[test(real())]
fn kvmtools_flags_are_understood() -> Result<(), Failed> {
    let image = Code::default().print("V").power_off().multiboot();
    let flags = ["--nodefaults", "--network", "mode=none", "--loglevel=warning", "--params", "a -b"];
    expect(&vellum("flags", image, &flags)?, 0, "V", "")
}

#[test(kvm())]
fn a_reset_is_status_10() -> Result<(), Failed> {
    expect(&vellum("reset", Code::default().out(0x64, 0xfe).elf64(), &[])?, 10, "", "")
}

#[test(kvm())]
fn a_panic_is_status_11_with_registers() -> Result<(), Failed> {
    let image = Code::default().print("P").out(0x505, 1).elf64();
    expect(&vellum("panic", image, &[])?, 11, "P", "io_out@0x505")
}

#[test(kvm())]
fn a_triple_fault_is_status_12_with_registers() -> Result<(), Failed> {
    // lidt of a zero limit, then an undefined instruction.
    let image = Code::default().bytes(&[0x0f, 0x01, 0x1d, 2, 0, 0, 0, 0x0f, 0x0b]).bytes(&[0; 10]).elf64();
    // AMD's KVM resets the vCPU before it reports the shutdown (svm.c, shutdown_interception).
    let amd = std::path::Path::new("/sys/module/kvm_amd").exists();
    let rip = if amd { "rip 000000000000fff0" } else { "rip 0000000000100007" };
    expect(&vellum("fault", image, &[])?, 12, "", rip)
}

#[test(real())]
fn a_timeout_is_status_124() -> Result<(), Failed> {
    let image = Code::default().spin().elf64();
    expect(&vellum("timeout", image.clone(), &["--timeout", "100ms"])?, 124, "", "time of --timeout")?;
    expect(&vellum("timeout", image, &["--timeout", "100ms", "--loglevel", "error"])?, 124, "", "")
}

#[test(real())]
fn a_guest_that_prints_nothing_is_told_of() -> Result<(), Failed> {
    let says = "printed nothing for 10 s; its kernel may lack CONFIG_SERIAL_8250_CONSOLE, or console=ttyS0";
    let silent = Code::default().spin().elf64();
    expect(&vellum("silent", silent.clone(), &["--timeout", "11s"])?, 124, "", says)?;
    let heard = Code::default().print("V").spin().elf64();
    for (code, flags) in
        [(heard, &["--timeout", "11s"][..]), (silent, &["--timeout", "11s", "--serial", "null"])]
    {
        let run = vellum("heard", code, flags)?;
        let said = String::from_utf8_lossy(&run.stderr).into_owned();
        ensure(run.status.code() == Some(124) && !said.contains("printed nothing"), || format!("{run:?}"))?;
    }
    Ok(())
}

#[test(kvm())]
fn the_sandbox_lets_a_guest_program_its_io_apic() -> Result<(), Failed> {
    // mov eax, 0xfec00000; mov dword [rax], 0x18; mov dword [rax + 0x10], 0x31: pin 4 is no longer
    // masked.
    let program = [0xb8, 0, 0, 0xc0, 0xfe, 0xc7, 0x00, 0x18, 0, 0, 0, 0xc7, 0x40, 0x10, 0x31, 0, 0, 0];
    let image = Code::default().bytes(&program).print("I").power_off().elf64();
    expect(&vellum("ioapic", image, &[])?, 0, "I", "")
}

#[test(real())]
fn a_bad_kernel_leaves_a_serial_file_alone() -> Result<(), Failed> {
    let file = path("kept");
    fs::write(&file, "earlier output")?;
    let target = format!("file={}", file.display());
    let run = vellum("bad", b"not a kernel at all".to_vec(), &["--serial", &target])?;
    let kept = fs::read_to_string(&file)?;
    fs::remove_file(file)?;
    ensure(kept == "earlier output", || format!("{kept:?}"))?;
    expect(&run, 2, "", "not a kernel")
}

#[test(real())]
fn output_is_not_written_over_what_a_machine_needs() -> Result<(), Failed> {
    let (kernel, other) = (path("needed"), path("disk"));
    let image = Code::default().power_off().elf64();
    fs::write(&kernel, &image)?;
    fs::write(&other, [7; 512])?;
    let [kernel, other] = [&kernel, &other].map(|path| path.to_str().unwrap());
    let needs = ["run", "-k", kernel];
    for flags in [
        &["--serial", &format!("file={kernel}")][..],
        &["--initrd", other, "--serial", &format!("file={other}")],
        &["--initrd", other, "--console", &format!("file={other}")],
        &["--console", &format!("file={kernel}")],
        &["--disk", &format!("{other},readonly"), "--serial", &format!("file={other}")],
        &["--disk", other, "--console", &format!("file={other}")],
    ] {
        let run = Command::new(env!("CARGO_BIN_EXE_vellum"))
            .args(needs)
            .args(flags)
            .stdin(Stdio::null())
            .output()?;
        expect(&run, 2, "", "use another file").map_err(|error| format!("{flags:?}: {error:?}"))?;
        let kept = fs::read(kernel)? == image && fs::read(other)? == [7; 512];
        ensure(kept, || format!("{flags:?}: written over"))?;
    }
    [kernel, other].into_iter().try_for_each(fs::remove_file)?;
    Ok(())
}

#[test(real())]
fn a_command_line_that_is_too_long_is_status_2() -> Result<(), Failed> {
    let run = vellum("long", Code::default().power_off().elf64(), &["-p", &"x".repeat(3000)])?;
    expect(&run, 2, "", "--cmdline 'console=")
}

/// What a user can mistype about files, sockets and interfaces; `DIR` has them all, and the same
/// ones afterwards.
#[test(real())]
fn bad_files_are_one_line_and_leave_nothing_behind() -> Result<(), Failed> {
    // Short, for sockets.
    let dir = std::env::temp_dir().join(format!("vellum-bad-{}", std::process::id()));
    fs::create_dir(&dir)?;
    let at = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let size = |name: &str, bytes| fs::File::create(at(name)).and_then(|file| file.set_len(bytes));
    let kernel = Code::default().power_off().elf64();
    fs::write(at("kernel"), &kernel)?;
    fs::write(at("half"), &kernel[..100])?;
    fs::write(at("noise"), [0x5a; 3000])?;
    fs::write(at("seed"), "#cloud-config\n")?;
    fs::write(at("typo"), "# cloud-config\n")?;
    fs::write(at("log"), "")?;
    fs::write(at("cloud.img"), [&b"QFI\xfb\0\0\0\x03"[..], &[0; 1016]].concat())?;
    // A right header, but for the width of reference counts.
    let made = Command::new(env!("CARGO_BIN_EXE_vellum"))
        .args(["disk", "create", &at("wide.qcow2"), "1m"])
        .status()?;
    ensure(made.success(), || format!("disk create: {made}"))?;
    fs::File::options().write(true).open(at("wide.qcow2"))?.write_all_at(&[9], 99)?;
    fs::write(at("disk.xz"), b"\xfd7zXZ\0")?;
    size("odd", 1000)?;
    size("none", 0)?;
    size("disk", 1 << 20)?;
    size("large", 9 << 20)?;
    ensure(Command::new("mkfifo").arg(at("fifo")).status()?.success(), || "mkfifo".into())?;
    let over = format!("{},overlay={}", at("disk"), at("over"));
    let made = Command::new(env!("CARGO_BIN_EXE_vellum"))
        .args(["run", "-k", &at("kernel"), "--disk", &over])
        .stdin(Stdio::null())
        .status()?;
    ensure(made.success(), || format!("--disk {over}: {made}"))?;
    fs::copy(at("over"), at("short"))?;
    fs::File::options().write(true).open(at("short"))?.set_len(8192)?;
    fs::create_dir(at("closed"))?;
    fs::set_permissions(at("closed"), Permissions::from_mode(0o0))?;
    // Trees in which a kernel was built: of one without a thing that commands need, of one whose
    // modules are not there.
    let fragment = Command::new(env!("CARGO_BIN_EXE_vellum"))
        .args(["run", "-k", &at("kernel"), "--kconfig"])
        .stdin(Stdio::null())
        .output()?;
    let fragment = String::from_utf8(fragment.stdout)?;
    for (tree, from, to) in [
        ("lacks", "CONFIG_DEVTMPFS=y", "# CONFIG_DEVTMPFS is not set"),
        ("modular", "CONFIG_VIRTIO_MMIO=y", "CONFIG_VIRTIO_MMIO=m"),
    ] {
        ensure(fragment.contains(from), || format!("--kconfig: {fragment}"))?;
        fs::create_dir_all(at(&format!("{tree}/arch/x86/boot")))?;
        fs::copy(at("kernel"), at(&format!("{tree}/arch/x86/boot/bzImage")))?;
        fs::write(at(&format!("{tree}/.config")), fragment.replace(from, to))?;
    }
    let live = UnixListener::bind(at("live.sock"))?;
    let contents = || -> Result<Vec<_>, Failed> {
        let mut names = Vec::new();
        for name in fs::read_dir(&dir)? {
            names.push(name?.file_name());
        }
        names.sort();
        Ok(names)
    };
    let before = contents()?;
    for (flags, says) in [
        ("-k DIR/half", "--kernel DIR/half: the kernel is truncated"),
        ("-k DIR/none", "not a kernel"),
        ("-k DIR/fifo", "--kernel DIR/fifo: it is a FIFO, and a regular file is needed"),
        ("-k DIR", "--kernel DIR: not a built kernel tree"),
        ("-k DIR -- true", "--kernel DIR: not a built kernel tree"),
        ("-k DIR/lacks -- true", "its configuration lacks CONFIG_DEVTMPFS; --kconfig prints the fragment"),
        ("-k DIR/lacks/arch/x86/boot/bzImage -- true", "its configuration lacks CONFIG_DEVTMPFS;"),
        (
            "-k DIR/modular -- true",
            "CONFIG_VIRTIO_MMIO as a module, but DIR/modular does not: build the modules",
        ),
        ("-k DIR/modular --transport pci -- true", "lacks CONFIG_PCI_MSI, CONFIG_VIRTIO_PCI;"),
        ("-i DIR", "--initrd DIR: it is a directory, and a regular file is needed"),
        ("-i DIR/fifo", "--initrd DIR/fifo: it is a FIFO"),
        ("-i DIR/large -m 8", "--initrd DIR/large: the initrd's 9437184 bytes do not fit"),
        ("-i DIR/disk", "OK"),
        ("--disk DIR/odd", "DIR/odd has 1000 bytes"),
        ("--disk DIR/none", "DIR/none has 0 bytes"),
        ("--disk DIR/nothing", "DIR/nothing: No such file"),
        ("--disk DIR/fifo", "neither a file nor a block device"),
        ("--disk DIR", "neither a file nor a block device"),
        (
            "--disk DIR/cloud.img",
            "disk DIR/cloud.img: its header is damaged: cluster_bits is 0, and 9 to 21 are possible",
        ),
        ("--disk DIR/cloud.img,readonly", "its header is damaged"),
        ("--disk DIR/cloud.img,overlay=discard", "its header is damaged"),
        ("--disk DIR/wide.qcow2", "disk DIR/wide.qcow2: its header is damaged: refcount_order is 9"),
        (
            "--disk DIR/wide.qcow2,overlay=discard",
            "disk DIR/wide.qcow2: its header is damaged: refcount_order is 9",
        ),
        ("--disk DIR/cloud.img,force", "OK"),
        ("--disk DIR/cloud.img,format=raw", "OK"),
        ("--disk DIR/disk,format=qcow2", "its header is damaged: magic is"),
        ("--disk DIR/disk,format=vmdk", "it is raw or qcow2"),
        ("--disk DIR/disk,format=raw,backing=DIR/none", "a raw image has no other files"),
        ("--disk DIR/disk.xz", "convert it with `xz -dc DIR/disk.xz >DIR/disk.raw`"),
        ("--disk DIR/disk,overlay=DIR/fifo", "overlay DIR/fifo: it is a FIFO"),
        ("--disk DIR/disk --disk DIR/disk", "add `readonly`"),
        ("--disk DIR/disk,overlay=DIR/noise", "overlay DIR/noise: it is no overlay"),
        ("--disk DIR/disk,overlay=DIR/fifo/x", "overlay DIR/fifo/x: Not a directory"),
        ("--disk DIR/disk,overlay=DIR/over", "OK"),
        ("--disk DIR/large,overlay=DIR/over", "overlay DIR/over: it is of another image"),
        ("--disk DIR/disk,overlay=DIR/short", "overlay DIR/short: it is cut short: it has 8192 bytes of"),
        ("--disk DIR/disk,ro,overlay=discard", "a read-only disk has no overlay"),
        ("--disk DIR/disk --disk DIR/disk,overlay=discard", "DIR/disk is in use by"),
        ("--disk DIR/disk,overlay=discard --disk DIR/disk,overlay=discard", "OK"),
        ("--cloud-init user-data=DIR/nothing", "--cloud-init: DIR/nothing: No such file"),
        ("--cloud-init user-data=DIR/noise", "cloud-init ignores user data that begins with"),
        ("--cloud-init user-data=DIR/typo", "did you mean '#cloud-config'?"),
        ("--cloud-init DIR/seed", "unknown key 'DIR/seed'"),
        ("--cloud-init user-data=DIR/none", "OK"),
        ("--cloud-init user-data=DIR/seed,network-config=DIR/seed", "OK"),
        ("--share DIR/nothing,as-root", "--share: directory DIR/nothing: No such file"),
        ("--share DIR/disk,as-root", "--share: directory DIR/disk: Not a directory"),
        ("--share DIR:a,as-root --share DIR:a,ro,as-root", "--share: two of them are called 'a'"),
        (
            "--share DIR/closedWHOM",
            "--share: directory DIR/closed: its server cannot read it: Permission denied",
        ),
        ("--root DIR/nothing,as-root -- true", "--root: directory DIR/nothing: No such file"),
        ("--root DIR/disk,as-root -- true", "--root: directory DIR/disk: Not a directory"),
        ("--root DIR/closedWHOM -- true", "--root: directory DIR/closed: its server cannot read it"),
        ("--root DIR,rw -- true", "unknown key 'rw'"),
        ("--root DIR,as-root", "--root: without a command it is for a terminal"),
        ("--guest-dir /etc", "--guest-dir needs a command"),
        ("--share DIR:a,ro,rw", "rw=on: it excludes ro"),
        ("--share DIR:a,writable", "unknown key 'writable'"),
        ("--share DIR:0123456789012345678901234567890123456,as-root", "has 37 bytes"),
        (
            "--disk DIR/disk,readonly --disk DIR/disk",
            "in use by another process or another disk of this machine",
        ),
        ("--disk DIR/disk,raedonly", "did you mean 'readonly'?"),
        ("--net tap=nosuchtap0", "tap `nosuchtap0` is not there"),
        ("--net tap=name-of-more-than-15-bytes", "1 to 15 bytes"),
        ("--net tap=nosuchtap0,mac=1:2", "02:00:00:00:00:01"),
        ("--vsock DIR/live.sock", "--vsock: socket DIR/live.sock is in use"),
        ("--vsock DIR/disk", "DIR/disk is there and is no socket"),
        ("--vsock DIR/nothing/v.sock", "a directory where this user may write"),
        ("--vsock DIR/v.sock,cid=2", "3 to 4294967294"),
        // What comes before the mistake is taken back.
        ("--vsock DIR/v.sock --name n -k DIR/noise", "--kernel DIR/noise: not a kernel"),
        ("--vsock DIR/v.sock --name n --disk DIR/disk --serial file=DIR", "--serial DIR: cannot be opened"),
        ("--console file=DIR", "--console: DIR: cannot be opened"),
        ("--serial file=DIR/fifo", "it is a FIFO without a reader: start that first"),
        ("--console file=DIR/fifo", "it is a FIFO without a reader"),
        ("--console file=DIR/log --serial file=DIR/log", "DIR/log: is the output of another running machine"),
        ("--name a/b", "--name: `a/b` is not a valid machine name"),
        ("--name live", "--name: socket DIR/vellum/live.sock is in use"),
        ("--timeout never", "30s"),
        ("--irqchip both", "split, kernel"),
        ("--network mode=user", "here it is --net user"),
    ] {
        let whom = if is_root() { ",user=65534:65534" } else { "" };
        let here = |text: &str| text.replace("WHOM", whom).replace("DIR", dir.to_str().unwrap());
        let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
        command.arg("run").env("XDG_RUNTIME_DIR", &dir).stdin(Stdio::null());
        if !flags.contains("-k ") {
            command.args(["-k", &at("kernel")]);
        }
        command.args(here(flags).split(' '));
        let _live =
            flags.contains("--name live").then(|| UnixListener::bind(at("vellum/live.sock"))).transpose()?;
        let run = command.output()?;
        let said = String::from_utf8_lossy(&run.stderr).into_owned();
        let refused = run.status.code() == Some(2) && said.lines().count() == 1 && said.contains(&here(says));
        ensure(refused || says == "OK" && run.status.success(), || format!("{flags}: {run:?}"))?;
        ensure(run.stdout.is_empty(), || format!("{flags}: {run:?}"))?;
        let _ = fs::remove_file(at("vellum/live.sock"));
        // The directory of sockets itself is the user's, once there is one.
        let left: Vec<_> = contents()?.into_iter().filter(|name| *name != "vellum").collect();
        let sockets = fs::read_dir(at("vellum")).map_or(0, Iterator::count);
        ensure(left == before && sockets == 0, || format!("{flags}: left {left:?}, {sockets} sockets"))?;
    }
    drop(live);
    fs::set_permissions(at("closed"), Permissions::from_mode(0o700))?;
    fs::remove_dir_all(dir)?;
    Ok(())
}

/// A guest that says V, then sends back what it receives.
fn echo() -> Vec<u8> {
    Code::default().print("V").echo().elf64()
}

/// The setsid of util-linux; busybox's knows no long options.
fn setsid() -> Need {
    let works =
        Command::new("setsid").args(["--wait", "true"]).output().is_ok_and(|out| out.status.success());
    if works { Ok(()) } else { Err(tools::lacks("setsid")) }
}

/// Reads from `file` until it has given `text`.
fn wait_for(file: &mut impl Read, text: &str) -> Result<(), Failed> {
    let mut got = vec![0; text.len()];
    file.read_exact(&mut got)?;
    ensure(got == text.as_bytes(), || format!("it said {:?}, not {text:?}", String::from_utf8_lossy(&got)))
}

/// Ctrl-c and the end-of-line go through, nothing is echoed but by the guest, and the terminal is
/// as before afterwards.
#[test(kvm(), setsid())]
fn a_terminal_gives_every_key_to_the_guest_but_ctrl_a_x() -> Result<(), Failed> {
    let kernel = path("terminal");
    fs::write(&kernel, echo())?;
    let (mut master, slave, name) = open_pty()?;
    let stty = |arguments: &[&str]| Command::new("stty").args(["-F", &name]).args(arguments).output();
    stty(&["sane"])?;
    let mut child = Command::new("setsid")
        .args(["--ctty", "--wait", env!("CARGO_BIN_EXE_vellum"), "run", "-k", kernel.to_str().unwrap()])
        .stdin(slave.try_clone()?)
        .stdout(slave.try_clone()?)
        .stderr(slave)
        .spawn()?;
    wait_for(&mut master, "V")?;
    master.write_all(b"a\x03\r\x01\x01")?;
    wait_for(&mut master, "a\x03\r\x01")?;
    master.write_all(b"\x01x")?;
    let status = child.wait()?;
    fs::remove_file(kernel)?;
    ensure(status.code() == Some(0), || format!("{status:?}"))?;
    let mode = String::from_utf8(stty(&["-a"])?.stdout)?;
    ensure(mode.contains(" echo ") && mode.contains(" icanon "), || format!("the terminal stays raw: {mode}"))
}

#[test(real())]
fn a_pseudo_terminal_leads_to_the_serial_port() -> Result<(), Failed> {
    let kernel = path("pty");
    fs::write(&kernel, echo())?;
    let mut child = Command::new(env!("CARGO_BIN_EXE_vellum"))
        .args(["run", "--serial", "pty", "-k", kernel.to_str().unwrap()])
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line)?;
    let name = line.trim().strip_prefix("vellum: the serial port is ").ok_or(line.clone())?;
    let mut port = fs::OpenOptions::new().read(true).write(true).open(name)?;
    wait_for(&mut port, "V")?;
    port.write_all(b"pty\r\x03")?;
    wait_for(&mut port, "pty\r\x03")?;
    child.kill()?;
    child.wait()?;
    fs::remove_file(kernel)?;
    Ok(())
}

/// Nothing is read before the guest is over, which has said more than a pipe holds.
#[test(real())]
fn a_slow_reader_gets_all_that_a_guest_has_said() -> Result<(), Failed> {
    const BYTES: u32 = 80_000;
    let kernel = path("slow");
    // mov ecx, BYTES; mov dx, 0x3f8; mov al, 'x'; back: out dx, al; dec ecx; jnz back
    let code = Code::default().bytes(&[0xb9]).bytes(&BYTES.to_le_bytes());
    let code = code.bytes(&[0x66, 0xba, 0xf8, 0x03, 0xb0, b'x', 0xee, 0xff, 0xc9, 0x75, 0xfb]);
    fs::write(&kernel, code.power_off().elf64())?;
    let mut child = Command::new(env!("CARGO_BIN_EXE_vellum"))
        .args(["run", "-k", kernel.to_str().unwrap()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let tasks = format!("/proc/{}/task", child.id());
    let threads = || -> Vec<String> {
        let entries = fs::read_dir(&tasks).into_iter().flatten().flatten();
        entries.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok()).collect()
    };
    // First until the vCPU is there, then until it is gone.
    let vcpu = || threads().iter().any(|name| name.trim() == "vcpu0");
    eventually(LIMIT, "the vCPU is there", || {
        ensure(child.try_wait()?.is_none(), || "it has ended before anybody read".into())?;
        Ok(vcpu().then_some(()))
    })?;
    eventually(LIMIT, "the vCPU is gone", || Ok((!vcpu()).then_some(())))?;
    let mut said = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut said)?;
    let status = child.wait()?;
    fs::remove_file(kernel)?;
    ensure(status.success() && said.len() == BYTES as usize, || format!("{status:?}, {} bytes", said.len()))
}

/// The guest never stops talking. The second reader gets more than the pipe kept when the first one
/// left.
#[test(real())]
fn a_fifo_that_is_read_again_gets_output_again() -> Result<(), Failed> {
    let (kernel, fifo) = (path("talker"), path("fifo"));
    // mov dx, 0x3f8; mov al, 'x'; back: out dx, al; jmp back
    let code = Code::default().bytes(&[0x66, 0xba, 0xf8, 0x03, 0xb0, b'x', 0xee, 0xeb, 0xfd]);
    fs::write(&kernel, code.elf64())?;
    ensure(Command::new("mkfifo").arg(&fifo).status()?.success(), || "mkfifo".into())?;
    let mut first = open::for_reading(&fifo, open::Kind::Input)?;
    open::wait(&first)?;
    let mut child = Command::new(env!("CARGO_BIN_EXE_vellum"))
        .args(["run", "-k", kernel.to_str().unwrap(), "--serial", &format!("file={}", fifo.display())])
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut says = |what: &str| -> Result<(), Failed> {
        let line = lines.next().ok_or("it has ended")??;
        ensure(line.contains(what), || line)
    };
    let heard = (|| {
        eventually(LIMIT, "the machine writes", || match first.read(&mut [0]) {
            Ok(count) => Ok((count > 0).then_some(())),
            Err(error) => Err(error.into()),
        })?;
        drop(first);
        says("serial output is lost until its pipe is read again")?;
        File::open(&fifo)?.read_exact(&mut [0; 200_000])?;
        says("serial output is written again; ")
    })();
    child.kill()?;
    child.wait()?;
    fs::remove_file(kernel)?;
    fs::remove_file(fifo)?;
    heard
}

/// More than the port's FIFO holds, so that it must be carried in parts.
#[test(real())]
fn input_through_a_pipe_reaches_the_guest_in_order() -> Result<(), Failed> {
    let kernel = path("pipe");
    fs::write(&kernel, echo())?;
    let mut child = Command::new(env!("CARGO_BIN_EXE_vellum"))
        .args(["run", "-k", kernel.to_str().unwrap()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let text: String = (0..400).map(|i| char::from(b'!' + i as u8 % 90)).collect();
    let mut output = child.stdout.take().unwrap();
    wait_for(&mut output, "V")?;
    // Closed at once: what is on its way must still arrive.
    child.stdin.take().unwrap().write_all(text.as_bytes())?;
    let arrived = wait_for(&mut output, &text);
    child.kill()?;
    child.wait()?;
    fs::remove_file(kernel)?;
    arrived
}

/// A guest that breaks its device again and again, in the middle of a line on the terminal, where
/// errors are shown too.
#[test(kvm())]
fn a_broken_ring_is_told_and_not_too_often() -> Result<(), Failed> {
    const STATUS: u32 = 0x70;
    // Reset; VIRTIO_F_VERSION_1; FEATURES_OK; queue 0 of 3 entries, which is no power of two;
    // DRIVER_OK.
    let stores =
        [(STATUS, 0), (0x24, 1), (0x20, 1), (STATUS, 0xb), (0x30, 0), (0x38, 3), (0x44, 1), (STATUS, 0xf)];
    // mov eax, address; mov dword [rax], value
    let store = |code: Code, (register, value): (u32, u32)| {
        let address = vellum_kvm::arch::layout::VIRTIO_BASE as u32 + register;
        let code = code.bytes(&[0xb8]).bytes(&address.to_le_bytes());
        code.bytes(&[0xc7, 0x00]).bytes(&value.to_le_bytes())
    };
    let code = (0..30).fold(Code::default().print("half a "), |code, _| stores.into_iter().fold(code, store));
    let kernel = path("broken");
    fs::write(&kernel, code.print("line\n").power_off().elf64())?;
    let (mut reader, writer) = std::io::pipe()?;
    let mut child = Command::new(env!("CARGO_BIN_EXE_vellum"))
        .args(["run", "--rng", "-k", kernel.to_str().unwrap()])
        .stdin(Stdio::null())
        .stdout(writer.try_clone()?)
        .stderr(writer)
        .spawn()?;
    let mut said = String::new();
    reader.read_to_string(&mut said)?;
    let status = child.wait()?;
    fs::remove_file(kernel)?;
    let told = said.lines().filter(|line| line.starts_with("vellum: virtio: ")).count() as u32;
    let whole = said.starts_with("half a \nvellum: ") && said.ends_with("\nline\n");
    ensure(status.success() && whole && told == vellum::session::log::MAX_LINES, || {
        format!("{status}: {said}")
    })
}

fn path(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("{name}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// Runs `image` as the kernel, unless `flags` name another.
fn vellum(name: &str, image: Vec<u8>, flags: &[&str]) -> Result<Output, Failed> {
    let kernel = path(name);
    fs::write(&kernel, image)?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
    command.arg("run").stdin(Stdio::null());
    if !flags.contains(&"--kernel") {
        command.arg("--kernel").arg(&kernel);
    }
    let output = command.args(flags).output()?;
    fs::remove_file(kernel)?;
    Ok(output)
}

fn expect(run: &Output, status: i32, stdout: &str, stderr: &str) -> Result<(), Failed> {
    let as_wanted = run.status.code() == Some(status)
        && run.stdout == stdout.as_bytes()
        && String::from_utf8_lossy(&run.stderr).contains(stderr)
        && (!stderr.is_empty() || run.stderr.is_empty());
    ensure(as_wanted, || format!("wanted status {status}, {stdout:?} and {stderr:?}, got {run:?}"))
}

/// Waits for the guest's byte, so that the signal comes while it runs.
#[test(real())]
fn a_signal_is_status_128_and_its_number() -> Result<(), Failed> {
    let kernel = path("signal");
    fs::write(&kernel, Code::default().print("V").spin().elf64())?;
    let mut child = Command::new(env!("CARGO_BIN_EXE_vellum"))
        .args(["run", "-k", kernel.to_str().unwrap()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    child.stdout.as_mut().unwrap().read_exact(&mut [0])?;
    Command::new("kill").args(["-TERM", &child.id().to_string()]).status()?;
    let status = child.wait()?;
    fs::remove_file(kernel)?;
    ensure(status.code() == Some(128 + 15), || format!("{status:?}"))
}
