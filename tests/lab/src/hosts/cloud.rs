//! Disk images for guests, laid out as distributions lay out theirs for clouds: a GPT with a BIOS
//! partition and an EFI system partition, /boot apart or not, and what GRUB reads there. The system
//! in them is Debian each time; where its kernel is found is what differs. The image for Arm has
//! busybox instead, because this machine cannot run the programs that install a Debian for Arm.
//!
//! All are made once and kept in the cache.

use std::fs::{self, File, Permissions};
use std::io::{Seek, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::disk::{SUITE, bootstrap, ext4};
use super::guest;
use super::initramfs::Initramfs;
use crate::architecture::Architecture;
use crate::artifacts::{self, Kernel};
use crate::cache::{Cache, code, digest};
use crate::{Error, Result, tool};

/// What the system has beside the essential.
const PACKAGES: &str =
    "systemd-sysv,udev,dbus,cloud-init,ifupdown,isc-dhcp-client,sudo,openssh-server,linux-image-cloud-amd64";
/// The programs of this machine that make the images.
pub const PROGRAMS: [&str; 6] = ["mmdebstrap", "mke2fs", "sfdisk", "mkfs.fat", "mcopy", "qemu-img"];
/// UUIDs of the root file system, and of the one of /boot.
const ROOT: &str = "3c9d6b1e-8f2a-4a53-b1d2-0d4a3a1f7b11";
const BOOT: &str = "7f0e2d94-55aa-4c1b-9e3d-2b8c6a7d9e02";
/// The partition's own UUID, by which Ubuntu's kernels find their root without an initrd.
const ROOT_PARTITION: &str = "0D3F8C2A-1B4E-4F6A-9C7D-5E2B1A0F9D88";
/// Sizes in MiB.
const EFI_MIB: u32 = 64;
const BOOT_MIB: u32 = 512;
const ROOT_MIB: u32 = 2048;

/// How an image is laid out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// /boot in the root file system; GRUB's menu names kernel and initrd.
    Debian,
    /// /boot apart; GRUB's menu has a condition, and the root is a partition.
    Ubuntu,
    /// /boot apart with boot loader entries; GRUB's script has none.
    Fedora,
}

/// The images, in the order of the disks that a host has them as: what tests call them, the layout,
/// and qemu-img's arguments for a qcow2.
const IMAGES: [(&str, Layout, &[&str]); 4] = [
    ("debian.raw", Layout::Debian, &[]),
    ("debian.qcow2", Layout::Debian, &["-c", "-o", "compat=1.1"]),
    ("ubuntu.qcow2", Layout::Ubuntu, &["-o", "compat=0.10"]),
    ("fedora.qcow2", Layout::Fedora, &["-c", "-o", "cluster_size=2M"]),
];

/// What makes the images, for their key.
fn own_code() -> Vec<u8> {
    code(Path::new(file!()), include_bytes!("cloud.rs"))
}

/// The images, made if need be, which takes root.
pub fn images(cache: &Cache) -> Result<Vec<PathBuf>> {
    let source = digest([PACKAGES.as_bytes(), &own_code()]);
    let made = cache.entry(&format!("disk/{SUITE}-cloud-{source}"), |dir| {
        cache.need_mib(6144)?;
        eprintln!("lab: images of {SUITE} as clouds have them, for guests");
        let root = bootstrap(dir, SUITE, PACKAGES)?;
        let fstab = root.join("etc/fstab");
        fs::write(&fstab, format!("UUID={ROOT} / ext4 defaults 0 1\n"))
            .map_err(Error::file("write", &fstab))?;
        for (name, layout, arguments) in IMAGES {
            let image = dir.join(name);
            if arguments.is_empty() {
                make(&image, layout, &root, dir)?;
                continue;
            }
            let raw = dir.join("image");
            make(&raw, layout, &root, dir)?;
            let mut convert = Command::new(tool::need("qemu-img")?);
            convert.args(["convert", "-O", "qcow2"]).args(arguments).arg(&raw).arg(&image);
            tool::output(&mut convert)?;
            fs::remove_file(&raw).map_err(Error::file("remove", &raw))?;
        }
        fs::remove_dir_all(&root).map_err(Error::file("remove", &root))
    })?;
    Ok(IMAGES.iter().map(|(name, ..)| made.join(name)).collect())
}

/// The image for hosts with Arm's processors, made if need be. It is laid out as Debian's.
pub fn image_for_arm(cache: &Cache) -> Result<PathBuf> {
    let kernel = Kernel::debian_for(cache, Architecture::Arm, "6.1")?;
    let source = digest([kernel.package.as_bytes(), &own_code()]);
    let made = cache.entry(&format!("disk/{SUITE}-cloud-arm64-{source}"), |dir| {
        eprintln!("lab: an image for guests of Arm as clouds have them");
        let root = dir.join("root");
        busybox_system(cache, &kernel, &root)?;
        make(&dir.join("debian.raw"), Layout::Debian, &root, dir)?;
        fs::remove_dir_all(&root).map_err(Error::file("remove", &root))
    })?;
    Ok(made.join("debian.raw"))
}

/// The initramfs's first process: it mounts the root that the kernel's command line names.
const INIT: &str = "#!/bin/sh\n\
    mount -t devtmpfs dev /dev; mount -t proc proc /proc\n\
    for module in $(cat /modules/order); do insmod /modules/$module.ko; done\n\
    for word in $(cat /proc/cmdline); do case $word in root=*) root=${word#root=};; esac; done\n\
    until found=$(findfs $root); do sleep 1; done\n\
    mount -t ext4 $found /root && exec switch_root /root /sbin/init\n";
/// busybox's init: a login on the console.
const INITTAB: &str = "::sysinit:/bin/mount -t proc proc /proc\n\
    ::sysinit:/bin/mount -t devtmpfs dev /dev\n\
    ::sysinit:/bin/hostname -F /etc/hostname\n\
    ::respawn:/sbin/getty -L 0 console vt100\n";

/// Makes a system of busybox for Arm in `root`, with Debian's `kernel`. root logs in without a
/// password.
fn busybox_system(cache: &Cache, kernel: &Kernel, root: &Path) -> Result<()> {
    let busybox = artifacts::busybox(cache, Architecture::Arm)?;
    let program = fs::read(&busybox).map_err(Error::file("read", &busybox))?;
    let applets = guest::applets()?;
    let release = kernel.package.split_once(' ').unwrap_or((&kernel.package, "")).0;
    let release = release.trim_start_matches("linux-image-");

    let mut initrd = Initramfs::new();
    initrd.file("/init", 0o755, INIT.as_bytes());
    initrd.file("/bin/busybox", 0o755, &program);
    applets.iter().for_each(|name| initrd.link(&format!("/bin/{name}"), "busybox"));
    ["/dev", "/proc", "/root"].iter().for_each(|path| initrd.directory(path));
    let mut order = String::new();
    for (name, module) in kernel.modules(&guest::modules())? {
        initrd.file(&format!("/modules/{name}.ko"), 0o644, &module);
        order += &format!("{name}\n");
    }
    initrd.file("/modules/order", 0o644, order.as_bytes());

    let image = fs::read(&kernel.image).map_err(Error::file("read", &kernel.image))?;
    let files: [(String, &[u8]); 9] = [
        ("bin/busybox".into(), &program),
        (format!("boot/vmlinuz-{release}"), &image),
        (format!("boot/initrd.img-{release}"), &initrd.finish()),
        ("etc/group".into(), b"root:x:0:\n"),
        ("etc/hostname".into(), b"arm\n"),
        ("etc/inittab".into(), INITTAB.as_bytes()),
        ("etc/os-release".into(), b"PRETTY_NAME=\"busybox on Debian's kernel\"\n"),
        ("etc/passwd".into(), b"root::0:0:root:/root:/bin/sh\n"),
        ("etc/securetty".into(), b"console\n"),
    ];
    let put = |path: &Path, content: &[u8]| {
        fs::create_dir_all(path.parent().unwrap_or(root))?;
        fs::write(path, content)
    };
    for (name, content) in files {
        let path = root.join(name);
        put(&path, content).map_err(Error::file("write", &path))?;
    }
    let rest = || -> std::io::Result<()> {
        fs::set_permissions(root.join("bin/busybox"), Permissions::from_mode(0o755))?;
        for directory in ["dev", "proc", "root", "run", "sbin", "sys", "tmp", "var"] {
            fs::create_dir_all(root.join(directory))?;
        }
        ["sbin/init", "sbin/getty"].iter().try_for_each(|name| symlink("../bin/busybox", root.join(name)))?;
        applets.iter().try_for_each(|name| symlink("busybox", root.join("bin").join(name)))
    };
    rest().map_err(Error::file("fill", root))
}

/// Makes the image `path` of the system in `root`.
fn make(path: &Path, layout: Layout, root: &Path, dir: &Path) -> Result<()> {
    let boot = root.join("boot");
    let release = release(&boot)?;
    let write = |path: PathBuf, text: String| {
        let directory = path.parent().unwrap_or(Path::new("/")).to_owned();
        fs::create_dir_all(&directory)
            .and_then(|()| fs::write(&path, text))
            .map_err(Error::file("write", &path))
    };
    for old in ["grub", "grub2", "loader"] {
        let _ = fs::remove_dir_all(boot.join(old));
    }
    for (name, text) in files(layout, &release) {
        write(boot.join(name), text)?;
    }
    // BIOS, EFI, and then what the layout has.
    let is_apart = layout != Layout::Debian;
    let boot_mib = if is_apart { BOOT_MIB } else { 0 };
    let (boot_at, root_at) = (4 + EFI_MIB, 4 + EFI_MIB + boot_mib);
    // The table's copy is behind the last partition.
    let bytes = u64::from(root_at + ROOT_MIB + 1) << 20;
    File::create(path).and_then(|file| file.set_len(bytes)).map_err(Error::file("create", path))?;
    let filesystem = |from: &Path, uuid: &str, label: &str, at: u32, mib: u32| {
        let offset = format!("offset={}", u64::from(at) << 20);
        let mut command = ext4(from);
        tool::output(command.args(["-U", uuid, "-L", label, "-E", &offset]).arg(path).arg(format!("{mib}M")))
    };
    if is_apart {
        filesystem(&boot, BOOT, "BOOT", boot_at, BOOT_MIB)?;
        let aside = dir.join("boot");
        fs::rename(&boot, &aside).map_err(Error::file("move", &boot))?;
        fs::create_dir(&boot).map_err(Error::file("create", &boot))?;
        let made = filesystem(root, ROOT, "root", root_at, ROOT_MIB);
        fs::remove_dir(&boot).map_err(Error::file("remove", &boot))?;
        fs::rename(&aside, &boot).map_err(Error::file("move", &aside))?;
        made?;
    } else {
        filesystem(root, ROOT, "root", root_at, ROOT_MIB)?;
    }
    efi(path, layout, dir)?;
    let boot_line = format!("16: start={boot_at}MiB, size={BOOT_MIB}MiB, type=linux\n");
    let table = format!(
        "label: gpt\n14: start=1MiB, size=3MiB, type=21686148-6449-6E6F-744E-656564454649\n15: start=4MiB, size={EFI_MIB}MiB, \
         type=uefi\n{}1: start={root_at}MiB, size={ROOT_MIB}MiB, type=linux, uuid={ROOT_PARTITION}\n",
        if is_apart { &boot_line } else { "" }
    );
    partition(path, &table, dir)
}

/// The version of the kernel in `boot`.
fn release(boot: &Path) -> Result<String> {
    let names = fs::read_dir(boot).map_err(Error::file("read", boot))?;
    let names = names.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let release = names.filter_map(|name| Some(name.strip_prefix("vmlinuz-")?.to_owned())).max();
    release.ok_or_else(|| Error::Usage(format!("{} has no kernel", boot.display())))
}

/// What GRUB reads, as the distribution's tools write it: paths below /boot.
fn files(layout: Layout, release: &str) -> Vec<(String, String)> {
    let head = "if [ -s $prefix/grubenv ]; then\n  set have_grubenv=true\n  load_env\nfi\n\
        if [ \"${next_entry}\" ] ; then\n   set default=\"${next_entry}\"\n   set next_entry=\n   save_env next_entry\n\
        else\n   set default=\"0\"\nfi\n\
        if [ x\"${feature_menuentry_id}\" = xy ]; then\n  menuentry_id_option=\"--id\"\nelse\n  menuentry_id_option=\"\"\nfi\n\
        export menuentry_id_option\nfunction load_video {\n  if [ x$feature_all_video_module = xy ]; then\n    insmod all_video\n  fi\n}\n";
    match layout {
        Layout::Debian => vec![(
            "grub/grub.cfg".into(),
            format!(
                "{head}menuentry 'Debian GNU/Linux' --class debian --class os $menuentry_id_option 'gnulinux-simple-{ROOT}' {{\n\
                 \tload_video\n\tinsmod part_gpt\n\tinsmod ext2\n\tsearch --no-floppy --fs-uuid --set=root {ROOT}\n\
                 \techo\t'Loading Linux {release} ...'\n\
                 \tlinux\t/boot/vmlinuz-{release} root=UUID={ROOT} ro  console=tty0 console=ttyS0,115200 consoleblank=0\n\
                 \tinitrd\t/boot/initrd.img-{release}\n}}\n"
            ),
        )],
        Layout::Ubuntu => vec![(
            "grub/grub.cfg".into(),
            format!(
                "{head}menuentry 'Ubuntu' --class ubuntu --class os $menuentry_id_option 'gnulinux-simple-{ROOT}' {{\n\
                 \tload_video\n\tsearch --no-floppy --fs-uuid --set=root {BOOT}\n\
                 \tif [ \"${{initrdfail}}\" = 1 ]; then\n\
                 \t  linux\t/vmlinuz-{release} root=PARTUUID={uuid} ro panic=-1\n\
                 \telse\n\
                 \t  linux\t/vmlinuz-{release} root=PARTUUID={uuid} ro  console=tty1 console=ttyS0\n\
                 \t  initrd\t/initrd.img-{release}\n\
                 \tfi\n}}\n",
                uuid = ROOT_PARTITION.to_lowercase()
            ),
        )],
        Layout::Fedora => vec![
            (
                "grub2/grub.cfg".into(),
                "set pager=1\nif [ -f ${config_directory}/grubenv ]; then\n  load_env -f ${config_directory}/grubenv\n\
                 elif [ -s $prefix/grubenv ]; then\n  load_env\nfi\nif [ \"${next_entry}\" ] ; then\n   set default=\"${next_entry}\"\n\
                 else\n   set default=\"${saved_entry}\"\nfi\n\
                 insmod blscfg\nblscfg\n"
                    .into(),
            ),
            ("grub2/grubenv".into(), format!("# GRUB Environment Block\nsaved_entry=0123-{release}\nkernelopts=root=UUID={ROOT} ro console=tty1 console=ttyS0,115200n8 \n")),
            (
                format!("loader/entries/0123-{release}.conf"),
                format!(
                    "title Fedora Linux ({release}) 40 (Cloud Edition)\nversion {release}\nlinux /vmlinuz-{release}\n\
                     initrd /initrd.img-{release}\noptions $kernelopts\ngrub_users $grub_users\ngrub_arg --unrestricted\ngrub_class fedora\n"
                ),
            ),
            (
                // What a rescue kernel's entry looks like: it is older, and not what boots.
                "loader/entries/0123-0-rescue.conf".into(),
                "title Fedora Linux (0-rescue)\nversion 0-rescue\nlinux /vmlinuz-0-rescue\noptions $kernelopts\n".into(),
            ),
        ],
    }
}

/// Fills the EFI system partition: a script that leads to the other one.
fn efi(path: &Path, layout: Layout, dir: &Path) -> Result<()> {
    let (vendor, uuid, prefix) = match layout {
        Layout::Debian => ("debian", ROOT, "/boot/grub"),
        Layout::Ubuntu => ("ubuntu", BOOT, "/grub"),
        Layout::Fedora => ("fedora", BOOT, "/grub2"),
    };
    let script = dir.join("grub.cfg");
    let text =
        format!("search.fs_uuid {uuid} root \nset prefix=($root)'{prefix}'\nconfigfile $prefix/grub.cfg\n");
    fs::write(&script, text).map_err(Error::file("write", &script))?;
    let fat = dir.join("efi.fat");
    let length = u64::from(EFI_MIB) << 20;
    File::create(&fat).and_then(|file| file.set_len(length)).map_err(Error::file("create", &fat))?;
    tool::output(Command::new(tool::need("mkfs.fat")?).args(["-F", "32", "-n", "UEFI"]).arg(&fat))?;
    for directory in ["::/EFI", &format!("::/EFI/{vendor}")] {
        tool::output(Command::new("mmd").arg("-i").arg(&fat).arg(directory))?;
    }
    let to = format!("::/EFI/{vendor}/grub.cfg");
    tool::output(Command::new(tool::need("mcopy")?).arg("-i").arg(&fat).arg(&script).arg(to))?;
    let mut image = File::options().write(true).open(path).map_err(Error::file("open", path))?;
    let copied = File::open(&fat).and_then(|mut fat| {
        image.seek(std::io::SeekFrom::Start(4 << 20)).and_then(|_| std::io::copy(&mut fat, &mut image))
    });
    copied.map_err(Error::file("write", path))?;
    for file in [script, fat] {
        fs::remove_file(&file).map_err(Error::file("remove", &file))?;
    }
    Ok(())
}

/// Writes a partition table.
fn partition(image: &Path, table: &str, dir: &Path) -> Result<()> {
    let path = dir.join("table");
    let file = || -> std::io::Result<File> {
        let mut file = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
        file.write_all(table.as_bytes())?;
        file.rewind()?;
        Ok(file)
    };
    let file = file().map_err(Error::file("write", &path))?;
    let mut command = Command::new(tool::need("sfdisk")?);
    tool::fed(
        command.args(["--quiet", "--no-reread", "--wipe-partitions", "never"]).arg(image),
        file.into(),
    )?;
    fs::remove_file(&path).map_err(Error::file("remove", &path))
}
