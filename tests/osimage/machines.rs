//! Machines of kernels of a few bytes that are in images: `vellum run -d` finds and runs them.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use support::env::TestEnv;
use support::guests::Code;
use support::{Failed, Scratch, ensure, hosts, test, tools};

use crate::{Files, KERNEL, MIB, ROOT, VELLUM, disk, make_tree, makers, run, unified};

/// An image of a system with cloud-init and this kernel.
pub fn with_cloud_init(scratch: &Scratch, kernel: &[u8]) -> Result<PathBuf, Failed> {
    let files = [("boot/vmlinuz-1", kernel), ("usr/bin/cloud-init", b""), ("etc/fstab", b"")];
    let tree = make_tree(scratch, "root", &files)?;
    disk(scratch, "gpt", &[(1, "linux", Files::Ext4(&tree, ROOT))])
}

/// The second machine with a name is refused before it touches the SSH files of the first. A later
/// machine without a user does not inherit them.
#[test(makers(), hosts::kvm(), tools::program("ssh-keygen"))]
fn a_second_machine_leaves_the_access_of_the_first_alone() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let scratch = Scratch::new()?;
    let kernel = Code::default().print("runs\n").spin().elf64();
    let image = with_cloud_init(&scratch, &kernel)?;
    let run = format!("run -m 64m --serial null -d {}", image.display());
    let access = env.socket("one").with_file_name("one.ssh");
    fs::create_dir_all(&access)?;
    fs::write(access.join("config"), "an earlier machine's")?;
    let _first = env.run("one", &run)?;
    ensure(!access.exists(), || "the access of an earlier machine is still there".into())?;
    let refused = env.vellum("ssh one")?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure(refused.status.code() == Some(2) && said.contains("was not started for SSH"), || said.clone())?;
    fs::create_dir(&access)?;
    fs::write(access.join("config"), "the first machine's")?;
    let refused = env.vellum(&format!("{run} --name one --login me"))?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure(refused.status.code() == Some(2) && said.contains("--name") && said.contains("in use"), || {
        said.clone()
    })?;
    ensure(fs::read(access.join("config"))? == b"the first machine's", || "it was replaced".into())
}

/// A kept machine creates another user when it gets another `--login`, and no user twice.
#[test(makers(), hosts::kvm())]
fn another_login_is_another_instance_of_a_kept_machine() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let kernel = Code::default().print("runs\n").power_off().elf64();
    let image = with_cloud_init(&scratch, &kernel)?;
    let kept = scratch.path("data/vellum/web");
    // What is said, the seed, and the host key, if SSH can reach the guest.
    let start = |user: &str| -> Result<_, Failed> {
        let output = run(Command::new(VELLUM)
            .env("XDG_DATA_HOME", scratch.path("data"))
            .env("XDG_RUNTIME_DIR", scratch.path("run"))
            .args(["run", "-m", "64m", "--keep", "--name", "web", "--login", user, "-d"])
            .arg(&image)
            .stdin(Stdio::null()))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let read = |name: &str| fs::read_to_string(kept.join(name));
        Ok((said, [read("user-data")?, read("meta-data")?], read("host.pub").ok()))
    };
    let (said, first, key) = start("ada")?;
    ensure(said.contains("log in as ada with the password ") && first[0].contains("\"ada\""), || {
        said.clone()
    })?;
    let (said, again, _) = start("ada")?;
    ensure(again == first && said.contains("of the run that created this user"), || said.clone())?;
    let (said, second, same) = start("bob")?;
    let is_new = second[0].contains("\"bob\"") && second[1] != first[1] && said.contains("log in as bob");
    ensure(is_new, || format!("{said}{second:?}"))?;
    ensure(key == same, || format!("{key:?}, then {same:?}"))?;
    // Without its overlay the machine is new.
    fs::remove_file(kept.join("disk.overlay"))?;
    let (_, third, other) = start("bob")?;
    ensure(third != second && (key.is_none() || other != key), || format!("{third:?}"))
}

/// A kernel of a few bytes, which prints something and powers off, in a raw or qcow2 disk under the
/// default overlay: it runs, and the image is unchanged.
#[test(makers(), hosts::kvm(), tools::program("qemu-img"))]
fn the_kernel_in_an_image_runs() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let kernel = Code::default().print("from the image\n").power_off().elf64();
    let tree = make_tree(&scratch, "root", &[("boot/vmlinuz-1", &kernel[..]), ("etc/fstab", b"")])?;
    let image = disk(&scratch, "gpt", &[(1, "linux", Files::Ext4(&tree, ROOT))])?;
    let qcow2 = scratch.path("disk.qcow2");
    run(Command::new("qemu-img").args(["convert", "-c", "-O", "qcow2"]).arg(&image).arg(&qcow2))?;
    for image in [&image, &qcow2] {
        let before = fs::read(image)?;
        for more in [&[][..], &["--keep", "--name", "osimage-keep"]] {
            let output = run(Command::new(VELLUM)
                .env("XDG_DATA_HOME", scratch.path("data"))
                .env("XDG_RUNTIME_DIR", scratch.path("run"))
                .args(["run", "-m", "64m", "-d"])
                .arg(image)
                .args(more)
                .stdin(Stdio::null()))?;
            ensure(output.stdout.ends_with(b"from the image\n"), || format!("{output:?}"))?;
        }
        ensure(fs::read(image)? == before, || "the image has changed".into())?;
        let kept = scratch.path("data/vellum/osimage-keep/disk.overlay");
        ensure(kept.exists(), || "no overlay was kept".into())?;
        fs::remove_file(kept)?;
    }
    // A file that is no kernel is named by its path in the image.
    let tree = make_tree(&scratch, "no-kernel", &[("boot/vmlinuz-1", KERNEL), ("etc/fstab", b"")])?;
    let image = disk(&scratch, "gpt", &[(1, "linux", Files::Ext4(&tree, ROOT))])?;
    let refused = Command::new(VELLUM).args(["run", "-d"]).arg(&image).output()?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    let names = said.contains("/boot/vmlinuz-1: not a kernel") && !said.contains("/proc/");
    ensure(refused.status.code() == Some(2) && names, || format!("{refused:?}"))
}

/// Compresses `bytes`.
fn gzip(bytes: &[u8]) -> Result<Vec<u8>, Failed> {
    let mut gzip = Command::new("gzip").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut input = gzip.stdin.take().expect("a pipe");
    // gzip writes its output when it has read all of a kernel of a few bytes.
    input.write_all(bytes)?;
    drop(input);
    Ok(gzip.wait_with_output()?.stdout)
}

/// Kernels of Arm distributions are compressed by gzip, or are EFI programs with a compressed
/// kernel. Each runs, as a file and in a unified kernel image.
#[test(makers(), hosts::kvm(), tools::program("gzip"))]
fn a_compressed_kernel_runs() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let kernel = gzip(&Code::default().print("unpacked\n").power_off().elf64())?;
    // struct linux_efi_zboot_header, with the payload behind it.
    let mut program = b"MZ\0\0zimg".to_vec();
    program.extend(64u32.to_le_bytes());
    program.extend((kernel.len() as u32).to_le_bytes());
    program.resize(24, 0);
    program.extend(b"gzip");
    program.resize(64, 0);
    program.extend(&kernel);
    for kernel in [&kernel, &program] {
        let unified = unified(kernel, b"", "quiet");
        for (path, bytes) in [("boot/vmlinuz-1", kernel), ("EFI/Linux/one.efi", &unified)] {
            let tree = make_tree(&scratch, "root", &[(path, bytes), ("etc/fstab", b"")])?;
            let image = disk(&scratch, "gpt", &[(1, "linux", Files::Ext4(&tree, ROOT))])?;
            let output =
                run(Command::new(VELLUM).args(["run", "-m", "64m", "-d"]).arg(&image).stdin(Stdio::null()))?;
            ensure(output.stdout.ends_with(b"unpacked\n"), || format!("{path}: {output:?}"))?;
            fs::remove_dir_all(tree)?;
        }
    }
    Ok(())
}

/// `--firmware` enters a PVH image, although the disk has a kernel. A firmware for a processor's
/// reset vector, such as OVMF.fd, is refused.
#[cfg(target_arch = "x86_64")]
#[test(makers(), hosts::kvm())]
fn a_firmware_is_entered_instead_of_the_kernel_in_the_image() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let kernel = Code::default().print("from the image\n").power_off().elf64();
    let tree = make_tree(&scratch, "root", &[("boot/vmlinuz-1", &kernel[..]), ("etc/fstab", b"")])?;
    let image = disk(&scratch, "gpt", &[(1, "linux", Files::Ext4(&tree, ROOT))])?;
    let firmware = scratch.path("firmware");
    run(Command::new(VELLUM).args(["judge", "image", "--format", "elf", "--out"]).arg(&firmware))?;
    let start = |firmware: &Path| {
        let mut command = Command::new(VELLUM);
        command.args(["run", "-m", "64m", "--protocol", "pvh", "-p", "passes=1", "-d"]).arg(&image);
        command.arg("--firmware").arg(firmware).stdin(Stdio::null()).output()
    };
    let entered = start(&firmware)?;
    let said = String::from_utf8_lossy(&entered.stdout).into_owned();
    ensure(
        said.contains(" boot=pvh") && said.contains("# end WHOLE") && !said.contains("from the image"),
        || format!("{entered:?}"),
    )?;
    let reset = scratch.path("OVMF.fd");
    File::create(&reset)?.set_len(MIB)?;
    let refused = start(&reset)?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    let names = said.contains("--firmware") && said.contains("not a kernel") && said.lines().count() == 1;
    ensure(refused.status.code() == Some(2) && names, || said.clone())
}

/// Runs `vellum run -d` with `words` for the image. The environment has an empty PATH, so that no
/// other program is found, and is changed by `change`. Returns what it says, which must be a refusal
/// in one line, or the lines of a guest that ran.
fn said(
    scratch: &Scratch,
    image: &Path,
    words: &[&str],
    change: impl FnOnce(&mut Command),
    status: i32,
) -> Result<String, Failed> {
    let mut command = Command::new(VELLUM);
    command.args(["run", "-m", "64m", "-d"]).arg(image).args(words).stdin(Stdio::null());
    command.env("PATH", scratch.path("nothing"));
    command.env("XDG_DATA_HOME", scratch.path("data")).env("XDG_RUNTIME_DIR", scratch.path("run"));
    change(&mut command);
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let is_due = output.status.code() == Some(status) && (status == 0 || said.lines().count() == 1);
    ensure(is_due, || format!("{words:?}: {output:?}"))?;
    Ok(said)
}

/// `--ssh` is refused before a password is printed and before the guest runs, if it could not
/// connect in the end. Nothing is kept then.
#[test(makers(), hosts::kvm())]
fn ssh_is_refused_at_once_where_it_cannot_be() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let kernel = Code::default().print("runs\n").power_off().elf64();
    let image = with_cloud_init(&scratch, &kernel)?;
    let words = ["--ssh", "--login", "me", "--keep", "--name", "here"];
    for (more, due) in [
        (&[][..], "--ssh: passt is not installed"),
        (&["--network", "mode=none"], "--ssh: the guest needs a network that it is reached by: --net user"),
        (&["--net", "tap=none0"], "--ssh: the guest needs a network that it is reached by: --net user"),
        (&["--net", "user"], "--ssh: ssh is not installed: apt install openssh-client"),
    ] {
        let said = said(&scratch, &image, &[&words[..], more].concat(), |_| {}, 2)?;
        ensure(said.contains(due), || format!("{more:?}: {said}"))?;
        ensure(!scratch.path("data").exists(), || format!("{more:?}: something is kept"))?;
    }
    Ok(())
}

/// A guest that gets no network by default is told of, unless the user wanted none.
#[test(makers(), hosts::kvm())]
fn a_guest_without_a_network_says_why() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let kernel = Code::default().print("runs\n").power_off().elf64();
    let image = with_cloud_init(&scratch, &kernel)?;
    let told = said(&scratch, &image, &[], |_| {}, 0)?;
    ensure(told.contains("the guest has no network: passt is not installed"), || told.clone())?;
    let told = said(&scratch, &image, &["--network", "mode=none"], |_| {}, 0)?;
    ensure(!told.contains("network"), || told.clone())
}

/// An error in a file that `--user-data` names has that flag.
#[test(makers(), hosts::kvm())]
fn an_error_in_user_data_names_its_flag() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let image = with_cloud_init(&scratch, &Code::default().print("runs\n").power_off().elf64())?;
    let typo = scratch.path("typo");
    fs::write(&typo, "#cloud-confg\n")?;
    for (path, due) in [("/nothing/here", "No such file"), (&typo.display().to_string(), "#cloud-config")] {
        let words = ["--network", "mode=none", "--loglevel", "error", "--user-data", path];
        let mut command = Command::new(VELLUM);
        command.args(["run", "-m", "64m", "-d"]).arg(&image).args(words).stdin(Stdio::null());
        let refused = command.output()?;
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        let names = said.contains(&format!("vellum: --user-data: {path}")) && said.contains(due);
        ensure(refused.status.code() == Some(2) && names && !said.contains("--cloud-init"), || said.clone())?;
    }
    Ok(())
}

/// A kept disk is refused with another image, or if the image was written to since. It keeps what it
/// has. Without a directory that outlives a boot, nothing is kept.
#[test(makers(), hosts::kvm())]
fn a_kept_disk_stays_with_its_image() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let kernel = Code::default().print("runs\n").power_off().elf64();
    let image = with_cloud_init(&scratch, &kernel)?;
    let words = ["--keep", "--name", "here", "--network", "mode=none"];
    said(&scratch, &image, &words, |_| {}, 0)?;
    let kept = scratch.path("data/vellum/here/disk.overlay");
    let before = fs::read(&kept)?;
    File::options().write(true).open(&image)?.set_modified(std::time::UNIX_EPOCH)?;
    let told = said(&scratch, &image, &words, |_| {}, 2)?;
    ensure(told.contains("use that image as it was, or another --name"), || told.clone())?;
    ensure(fs::read(&kept)? == before, || "it has changed".into())?;
    let without = |command: &mut Command| {
        command.env_remove("XDG_DATA_HOME").env_remove("HOME");
    };
    let told = said(&scratch, &image, &words, without, 2)?;
    ensure(told.contains("--keep: neither XDG_DATA_HOME nor HOME is set"), || told.clone())
}

/// The flags for the system in an image are refused with a command, whose guest does not boot it.
#[test(makers(), hosts::kvm())]
fn a_command_does_not_boot_the_system_in_an_image() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let kernel = scratch.path("kernel");
    fs::write(&kernel, Code::default().print("runs\n").power_off().elf64())?;
    let image = with_cloud_init(&scratch, KERNEL)?;
    let kernel = kernel.display().to_string();
    for flags in [&["--keep", "--name", "here"][..], &["--login", "me"], &["--user-data", "none"]] {
        let words = [&["-k", &kernel][..], flags, &["--", "true"]].concat();
        let told = said(&scratch, &image, &words, |_| {}, 2)?;
        let due = format!("{} is for the system in a disk image", flags[0]);
        ensure(told.contains(&due), || told.clone())?;
    }
    let told = said(&scratch, &image, &["--", "true"], |_| {}, 2)?;
    ensure(told.contains("--kernel FILE is missing"), || told.clone())
}
