//! Disk images with an operating system, made by the tools that distributions use. `vellum disk
//! info` names the kernel that their boot loaders would start, and `vellum run -d` starts it.

mod hostile;
mod machines;

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output, Stdio};

use serde_json::Value;
use support::{Failed, Need, Random, Scratch, Tests, ensure, test, tools};

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
    let (beside, out) = (scratch.path("beside.qcow2"), scratch.path("beside.raw"));
    let data = scratch.path("data");
    let option = format!("data_file={}", data.display());
    run(Command::new("qemu-img").args(["convert", "-O", "qcow2", "-o", &option]).args([&raw, &beside]))?;
    let output = disk(&["convert"], &[&beside, &out])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(output.status.code() == Some(2) && said.contains("`--data-file FILE`"), || format!("{output:?}"))?;
    let output = disk(&["convert", "--data-file"], &[&data, &beside, &out])?;
    ensure(output.status.success(), || format!("{output:?}"))?;
    run(Command::new("qemu-img").arg("compare").arg(&raw).arg(&out))?;
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
