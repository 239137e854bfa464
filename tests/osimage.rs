//! Disk images with an operating system, made by the tools that distributions use. `vellum disk
//! info` names the kernel that their boot loaders would start, and `vellum run -d` starts it.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output, Stdio};

use serde_json::Value;
use support::env::TestEnv;
use support::guests::Code;
use support::{Failed, Need, Random, Scratch, Tests, ensure, hosts, test, tools};

/// UUIDs of file systems.
const ROOT: &str = "3c9d6b1e-8f2a-4a53-b1d2-0d4a3a1f7b11";
const BOOT: &str = "7f0e2d94-55aa-4c1b-9e3d-2b8c6a7d9e02";

support::vellum!();

fn main() -> ExitCode {
    Tests::from_args().run()
}

/// Writes files below the directory `name` of `scratch`.
fn make_tree(scratch: &Scratch, name: &str, files: &[(&str, &[u8])]) -> Result<PathBuf, Failed> {
    let directory = scratch.path(name);
    for (name, bytes) in files {
        let path = directory.join(name);
        fs::create_dir_all(path.parent().expect("it is below the tree"))?;
        fs::write(path, bytes)?;
    }
    Ok(directory)
}

fn run(command: &mut Command) -> Result<Output, Failed> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    ensure(output.status.success(), || format!("{command:?}: {output:?}"))?;
    Ok(output)
}

/// A file system of 8 MiB.
enum Files<'t> {
    Ext4(&'t Path, &'static str),
    Fat(&'t Path),
    /// The magic number of an unsupported one.
    Xfs,
}

const MIB: u64 = 1 << 20;
const FS: u64 = 8 * MIB;

impl Files<'_> {
    fn make(&self, image: &Path) -> Result<(), Failed> {
        File::create(image)?.set_len(FS)?;
        match self {
            Self::Ext4(tree, uuid) => {
                run(Command::new("mke2fs")
                    .args(["-q", "-F", "-t", "ext4", "-U", uuid, "-d"])
                    .arg(tree)
                    .arg(image))?;
            }
            Self::Fat(tree) => {
                run(Command::new("mkfs.fat").args(["-i", "CAFEBABE"]).arg(image))?;
                for entry in fs::read_dir(tree)? {
                    run(Command::new("mcopy").args(["-s", "-i"]).arg(image).arg(entry?.path()).arg("::"))?;
                }
            }
            Self::Xfs => File::options().write(true).open(image)?.write_all_at(b"XFSB", 0)?,
        }
        Ok(())
    }
}

/// A disk with a partition table `label` and `parts`, each with its partition number.
fn disk(scratch: &Scratch, label: &str, parts: &[(u32, &str, Files<'_>)]) -> Result<PathBuf, Failed> {
    let image = scratch.path("disk.raw");
    let mut file = File::create(&image)?;
    file.set_len((parts.len() as u64 * 9 + 2) * MIB)?;
    let mut table = format!("label: {label}\n");
    for (at, (number, kind, files)) in parts.iter().enumerate() {
        let start = 1 + at as u64 * 9;
        let extra = if *kind == "linux" && label == "gpt" {
            format!(", uuid=0D3F8C2A-1B4E-4F6A-9C7D-5E2B1A0F9D{number:02X}")
        } else {
            String::new()
        };
        table += &format!("{number}: start={}, size={}, type={kind}{extra}\n", start * 2048, FS / 512);
        let part = scratch.path("part");
        files.make(&part)?;
        file.seek(SeekFrom::Start(start * MIB))?;
        std::io::copy(&mut File::open(part)?, &mut file)?;
    }
    let mut sfdisk = Command::new("sfdisk");
    let sfdisk = sfdisk.args(["--quiet", "--wipe-partitions", "never"]).arg(&image);
    let mut child = sfdisk.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    child.stdin.take().expect("a pipe").write_all(table.as_bytes())?;
    ensure(child.wait()?.success(), || format!("sfdisk refuses {table}"))?;
    Ok(image)
}

fn info(image: &Path) -> Result<Value, Failed> {
    let output = run(Command::new(VELLUM).args(["disk", "info", "--json"]).arg(image))?;
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn makers() -> Need {
    ["mke2fs", "mkfs.fat", "mcopy", "sfdisk"].into_iter().try_for_each(tools::program)
}

const KERNEL: &[u8] = b"a kernel";
const INITRD: &[u8] = b"an initrd";

/// Checks what boots: the kernel's path, the command line, and whether there is an initrd.
fn boots(image: &Path, kernel: &str, cmdline: &str, initrd: bool) -> Result<Value, Failed> {
    let info = info(image)?;
    let found = &info["boots"]["Ok"];
    let is = |key: &str, expected: &str| found[key].as_str() == Some(expected);
    let has = found["initrd_bytes"].as_u64() == Some(if initrd { INITRD.len() as u64 } else { 0 });
    ensure(is("kernel", kernel) && is("cmdline", cmdline) && has, || format!("{info:#}"))?;
    Ok(info)
}

#[test(makers())]
fn debian_has_its_menu_beside_its_kernel() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let menu = format!(
        "if [ -s $prefix/grubenv ]; then\n  load_env\nfi\nif [ \"${{next_entry}}\" ] ; then\n set default=\"${{next_entry}}\"\nelse\n \
         set default=\"0\"\nfi\nif [ x\"${{feature_menuentry_id}}\" = xy ]; then\n menuentry_id_option=\"--id\"\nfi\n\
         menuentry 'Debian GNU/Linux' --class debian $menuentry_id_option 'simple' {{\n\
         \tsearch --no-floppy --fs-uuid --set=root {ROOT}\n\tlinux\t/boot/vmlinuz-6.1.0-18 root=UUID={ROOT} ro  quiet\n\
         \tinitrd\t/boot/initrd.img-6.1.0-18\n}}\n\
         submenu 'Advanced' $menuentry_id_option 'advanced' {{\n\tmenuentry 'old' --id old {{\n\t\tlinux /boot/vmlinuz-6.1.0-9 old=1\n\t}}\n}}\n"
    );
    let files: &[(&str, &[u8])] = &[
        ("boot/vmlinuz-6.1.0-18", KERNEL),
        ("boot/vmlinuz-6.1.0-9", KERNEL),
        ("boot/initrd.img-6.1.0-18", INITRD),
        ("boot/grub/grub.cfg", menu.as_bytes()),
        ("etc/os-release", b"NAME=x\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n"),
        ("usr/bin/cloud-init", b""),
    ];
    let tree = make_tree(&scratch, "root", files)?;
    let efi = format!(
        "search.fs_uuid {ROOT} root hd0,gpt1\nset prefix=($root)'/boot/grub'\nconfigfile $prefix/grub.cfg\n"
    );
    let esp = make_tree(&scratch, "esp", &[("EFI/debian/grub.cfg", efi.as_bytes())])?;
    let parts = [(15, "uefi", Files::Fat(&esp)), (1, "linux", Files::Ext4(&tree, ROOT))];
    let image = disk(&scratch, "gpt", &parts)?;
    let cmdline = format!("root=UUID={ROOT} ro quiet");
    let found = boots(&image, "/boot/vmlinuz-6.1.0-18", &cmdline, true)?;
    let about = &found["boots"]["Ok"];
    ensure(about["system"] == "Debian GNU/Linux 12 (bookworm)" && about["has_cloud_init"] == true, || {
        format!("{found:#}")
    })?;
    // An entry of the submenu is chosen for the next boot.
    fs::write(tree.join("boot/grub/grubenv"), "# GRUB Environment Block\nnext_entry=advanced>old\n#####")?;
    let image = disk(&scratch, "gpt", &[(1, "linux", Files::Ext4(&tree, ROOT))])?;
    boots(&image, "/boot/vmlinuz-6.1.0-9", "old=1", false)?;
    // The script of the EFI partition leads to that of the root, if only the former is found.
    fs::rename(tree.join("boot/grub"), tree.join("boot/elsewhere"))?;
    let efi = efi.replace("/boot/grub'", "/boot/elsewhere'");
    let esp = make_tree(&scratch, "esp2", &[("EFI/debian/grub.cfg", efi.as_bytes())])?;
    let parts = [(15, "uefi", Files::Fat(&esp)), (1, "linux", Files::Ext4(&tree, ROOT))];
    let image = disk(&scratch, "gpt", &parts)?;
    boots(&image, "/boot/vmlinuz-6.1.0-9", "old=1", false).map(drop)
}

#[test(makers())]
fn ubuntu_has_boot_apart_and_a_root_by_its_partition() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let menu = format!(
        "function gfxmode {{\n set gfxpayload=\"${{1}}\"\n}}\nset linux_gfx_mode=keep\n\
         menuentry 'Ubuntu' --class ubuntu {{\n gfxmode $linux_gfx_mode\n search --no-floppy --fs-uuid --set=root {BOOT}\n\
         if [ \"${{initrdfail}}\" = 1 ]; then\n  linux /vmlinuz-6.8 panic=-1\nelse\n  linux /vmlinuz-6.8 root=PARTUUID=x ro console=tty1 console=ttyS0\n\
         initrd /initrd.img-6.8\nfi\n}}\n"
    );
    let boot = [("vmlinuz-6.8", KERNEL), ("initrd.img-6.8", INITRD), ("grub/grub.cfg", menu.as_bytes())];
    let (boot, root) =
        (make_tree(&scratch, "boot", &boot)?, make_tree(&scratch, "root", &[("etc/fstab", b"")])?);
    let efi = format!("search.fs_uuid {BOOT} root\nset prefix=($root)'/grub'\nconfigfile $prefix/grub.cfg\n");
    let esp = make_tree(&scratch, "esp", &[("EFI/ubuntu/grub.cfg", efi.as_bytes())])?;
    let parts = [
        (15, "uefi", Files::Fat(&esp)),
        (16, "linux", Files::Ext4(&boot, BOOT)),
        (1, "linux", Files::Ext4(&root, ROOT)),
    ];
    let image = disk(&scratch, "gpt", &parts)?;
    let found = boots(&image, "/vmlinuz-6.8", "root=PARTUUID=x ro console=tty1 console=ttyS0", true)?;
    // The final script is named, not the one on the EFI system partition that leads to it.
    let place = &found["boots"]["Ok"]["place"];
    ensure(place == "/grub/grub.cfg of partition 16", || format!("{found:#}"))
}

#[test(makers())]
fn fedora_has_entries_and_a_root_that_is_not_read() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let menu =
        "load_env -f ${config_directory}/grubenv\nset default=\"${saved_entry}\"\ninsmod blscfg\nblscfg\n";
    let environment =
        "# GRUB Environment Block\nsaved_entry=id-6.8.5\nkernelopts=root=UUID=x ro rootflags=subvol=root \n";
    let entry = |version: &str| {
        format!(
            "title Fedora\nversion {version}\nlinux /vmlinuz-{version}\ninitrd /initramfs-{version}.img\noptions $kernelopts a={version}\n"
        )
    };
    let (old, new) = (entry("6.8.5"), entry("6.12.1"));
    let files: &[(&str, &[u8])] = &[
        ("vmlinuz-6.8.5", KERNEL),
        ("vmlinuz-6.12.1", KERNEL),
        ("initramfs-6.8.5.img", INITRD),
        ("initramfs-6.12.1.img", INITRD),
        ("grub2/grub.cfg", menu.as_bytes()),
        ("grub2/grubenv", environment.as_bytes()),
        ("loader/entries/id-6.8.5.conf", old.as_bytes()),
        ("loader/entries/id-6.12.1.conf", new.as_bytes()),
    ];
    let boot = make_tree(&scratch, "boot", files)?;
    let parts = [(2, "linux", Files::Ext4(&boot, BOOT)), (3, "linux", Files::Xfs)];
    let image = disk(&scratch, "gpt", &parts)?;
    let cmdline = |version: &str| format!("root=UUID=x ro rootflags=subvol=root a={version}");
    let found = boots(&image, "/vmlinuz-6.8.5", &cmdline("6.8.5"), true)?;
    ensure(found["partitions"][1]["content"].as_str().is_some_and(|what| what.starts_with("xfs")), || {
        format!("{found:#}")
    })?;
    // Without a choice the newest boots.
    fs::write(boot.join("grub2/grubenv"), environment.replace("saved_entry=id-6.8.5\n", ""))?;
    let image = disk(&scratch, "gpt", &[(2, "linux", Files::Ext4(&boot, BOOT))])?;
    boots(&image, "/vmlinuz-6.12.1", &cmdline("6.12.1"), true).map(drop)
}

#[test(makers())]
fn systemd_boot_has_entries_and_unified_kernels_on_fat() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let entry = "title Arch\nlinux /vmlinuz-linux\ninitrd /initramfs-linux.img\noptions root=LABEL=x rw\n";
    let files: &[(&str, &[u8])] = &[
        ("vmlinuz-linux", KERNEL),
        ("initramfs-linux.img", INITRD),
        ("loader/loader.conf", b"timeout 3\ndefault arch*\n"),
        ("loader/entries/arch.conf", entry.as_bytes()),
        ("loader/entries/zzz.conf", b"title other\nlinux /none\n"),
    ];
    let esp = make_tree(&scratch, "esp", files)?;
    let image = disk(&scratch, "gpt", &[(1, "uefi", Files::Fat(&esp))])?;
    boots(&image, "/vmlinuz-linux", "root=LABEL=x rw", true)?;
    let unified = unified(KERNEL, INITRD, "root=/dev/vda2 rw");
    let esp = make_tree(
        &scratch,
        "esp2",
        &[("EFI/Linux/arch-6.9.efi", &unified), ("EFI/Linux/arch-6.10.efi", &unified)],
    )?;
    let image = disk(&scratch, "gpt", &[(1, "uefi", Files::Fat(&esp))])?;
    boots(&image, "/EFI/Linux/arch-6.10.efi", "root=/dev/vda2 rw", true).map(drop)
}

/// An EFI program with the three sections.
fn unified(kernel: &[u8], initrd: &[u8], cmdline: &str) -> Vec<u8> {
    let sections = [(&b".linux\0\0"[..], kernel), (b".initrd\0", initrd), (b".cmdline", cmdline.as_bytes())];
    let mut file = b"MZ".to_vec();
    file.resize(60, 0);
    file.extend(64u32.to_le_bytes());
    file.extend(b"PE\0\0");
    let mut coff = [0; 20];
    coff[2..4].copy_from_slice(&(sections.len() as u16).to_le_bytes());
    file.extend(coff);
    let mut at = file.len() + 40 * sections.len();
    for (name, bytes) in sections {
        let mut header = [0; 40];
        header[..8].copy_from_slice(name);
        for (offset, value) in [(8, bytes.len()), (16, bytes.len()), (20, at)] {
            header[offset..offset + 4].copy_from_slice(&(value as u32).to_le_bytes());
        }
        file.extend(header);
        at += bytes.len();
    }
    sections.iter().for_each(|(_, bytes)| file.extend(*bytes));
    file
}

#[test(makers())]
fn without_a_boot_loader_the_newest_kernel_boots() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let files: &[(&str, &[u8])] = &[
        ("boot/vmlinuz-6.9.0", KERNEL),
        ("boot/vmlinuz-6.10.0", KERNEL),
        ("boot/initrd.img-6.10.0", INITRD),
        ("etc/fstab", b"# comment\nUUID=f / ext4 defaults 0 1\n/dev/sdb /mnt ext4\n"),
    ];
    let tree = make_tree(&scratch, "root", files)?;
    for label in ["gpt", "dos"] {
        let image = disk(
            &scratch,
            label,
            &[(2, if label == "gpt" { "linux" } else { "83" }, Files::Ext4(&tree, ROOT))],
        )?;
        boots(&image, "/boot/vmlinuz-6.10.0", "root=UUID=f ro", true)?;
    }
    // Neither a partition table nor an fstab.
    fs::write(tree.join("etc/fstab"), "")?;
    let image = scratch.path("whole");
    Files::Ext4(&tree, ROOT).make(&image)?;
    boots(&image, "/boot/vmlinuz-6.10.0", "root=/dev/vda ro", true)?;
    let image = disk(&scratch, "gpt", &[(2, "linux", Files::Ext4(&tree, ROOT))])?;
    boots(&image, "/boot/vmlinuz-6.10.0", "root=PARTUUID=0d3f8c2a-1b4e-4f6a-9c7d-5e2b1a0f9d02 ro", true)
        .map(drop)
}

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
    for device in ["/dev/null", "/dev/zero"].map(Path::new) {
        refused(&["disk", "info"], &[device], "neither a file nor a block device")?;
        refused(&["disk", "convert"], &[device, &out], "neither a file nor a block device")?;
        refused(&RUN, &[device], "neither a file nor a block device")?;
    }
    refused(&["disk", "convert"], &[&whole, &at("none/out")], "none/out")?;
    refused(&["disk", "create"], &[&at("none/out"), Path::new("1g")], "none/out")?;
    refused(&["disk", "create"], &[&out, Path::new("0")], "512")?;
    let small = format!("{},size=1m", whole.display());
    refused(&RUN, &[Path::new(&small)], "can only be made larger")?;
    refused(&["run", "-d"], &[Path::new(&small)], "can only be made larger")
}

/// An image of a system with cloud-init and this kernel.
fn with_cloud_init(scratch: &Scratch, kernel: &[u8]) -> Result<PathBuf, Failed> {
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

#[test(tools::program("qemu-img"))]
fn disks_are_made_and_converted() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let mut random = Random::new();
    let raw = scratch.path("a.raw");
    let file = File::create(&raw)?;
    file.set_len((9 << 20) + 512)?;
    for _ in 0..20 {
        let mut bytes = vec![0; 1 + random.below(100_000) as usize];
        bytes.iter_mut().for_each(|byte| *byte = random.below(256) as u8);
        file.write_all_at(&bytes, random.below(9 << 20))?;
    }
    file.set_len((9 << 20) + 512)?;
    let disk =
        |words: &[&str], paths: &[&Path]| Command::new(VELLUM).arg("disk").args(words).args(paths).output();
    let qcow2 = scratch.path("a.qcow2");
    for (from, to) in [(&raw, &qcow2), (&qcow2, &scratch.path("b.raw")), (&qcow2, &scratch.path("b.qcow2"))] {
        let output = disk(&["convert"], &[from, to])?;
        ensure(output.status.success(), || format!("{output:?}"))?;
        run(Command::new("qemu-img").arg("compare").arg(&raw).arg(to))?;
    }
    run(Command::new("qemu-img").arg("check").arg(&qcow2))?;
    // Existing files are not overwritten.
    let before = fs::read(&qcow2)?;
    for words in [&["convert"][..], &["create"]] {
        let output = match words[0] {
            "convert" => disk(words, &[&raw, &qcow2])?,
            _ => disk(words, &[&qcow2, Path::new("1g")])?,
        };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure(output.status.code() == Some(2) && said.contains("it exists"), || format!("{output:?}"))?;
    }
    ensure(fs::read(&qcow2)? == before, || "it was written over".into())?;
    for (name, format, size) in [("c.qcow2", "qcow2", "3g"), ("c.img", "raw", "3g")] {
        let path = scratch.path(name);
        let output = disk(&["create"], &[&path, Path::new(size)])?;
        ensure(output.status.success(), || format!("{output:?}"))?;
        let told = info(&path)?;
        ensure(told["format"] == format && told["bytes"] == 3u64 << 30, || format!("{told:#}"))?;
    }
    let output = disk(&["create"], &[&scratch.path("odd"), Path::new("1000b")])?;
    ensure(output.status.code() == Some(2) && !scratch.path("odd").exists(), || format!("{output:?}"))
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
