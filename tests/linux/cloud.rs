//! A Debian as an image of a cloud has it: systemd and cloud-init on ext4 in a GPT, with its own kernel and initrd, under an overlay.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;

use support::{Failed, Need, ensure, test};
use vellum_sys::terminal::open_pty;

use crate::VELLUM;
use crate::all_on_a_root;
use crate::guest::{for_this_bed, host, scratch};
use crate::typed::until;

/// Where the laboratory has its kernel and its initrd, and the disk.
const FILES: &str = "/cloud";
const DISK: &str = "/dev/vdb";

/// Who logs in, by a password, on which machine.
const USER: &str = "seeded";
const PASSWORD: &str = "wax tablet";
const HOSTNAME: &str = "palimpsest";

fn image() -> Need {
    all_on_a_root()?;
    match Path::new(FILES).is_dir() && Path::new(DISK).exists() {
        true => Ok(()),
        false => Err(format!("needs {FILES} and {DISK}, a cloud image: cargo lab test linux")),
    }
}

/// It boots to a login as the user of the seed, who finds the seed's name of the machine and a root that can be written to. The base is as
/// it was.
#[test(image())]
fn a_cloud_image_boots_beside_the_hosts_root() -> Result<(), Failed> {
    let scratch = scratch()?;
    let (user_data, meta_data) = (scratch.path("user-data"), scratch.path("meta-data"));
    let users = format!(
        "#cloud-config\nusers:\n  - name: {USER}\n    shell: /bin/bash\n    lock_passwd: false\n    \
         plain_text_passwd: {PASSWORD}\n"
    );
    fs::write(&user_data, users)?;
    fs::write(&meta_data, format!("instance-id: trial\nlocal-hostname: {HOSTNAME}\n"))?;
    let before = beginning()?;
    let (mut master, slave, name) = open_pty()?;
    host(&["stty", "-F", &name, "sane"])?;
    let (bed_flags, bed_cmdline) = for_this_bed();
    let seed = format!("user-data={},meta-data={}", user_data.display(), meta_data.display());
    let cmdline = format!("root=/dev/vda1 rw systemd.show_status=0 {bed_cmdline}");
    let mut child = Command::new("setsid")
        .args(["-c", VELLUM, "run", "-k", &format!("{FILES}/vmlinuz"), "-i", &format!("{FILES}/initrd.img")])
        .args(["-d", &format!("{DISK},overlay=discard"), "--cloud-init", &seed, "-m", "1g"])
        .args(["--transport", "pci", "--timeout", "7000s", "-p", cmdline.trim()])
        .args(bed_flags)
        .stdin(slave.try_clone()?)
        .stdout(slave.try_clone()?)
        .stderr(slave)
        .spawn()?;
    let said = until(&mut master, " login: ")?;
    ensure(said.ends_with(&format!("{HOSTNAME} login: ")), || said.clone())?;
    master.write_all(format!("{USER}\r").as_bytes())?;
    until(&mut master, "Password: ")?;
    master.write_all(format!("{PASSWORD}\r").as_bytes())?;
    until(&mut master, "$ ")?;
    // What is echoed has another form than what is printed.
    master.write_all(
        b"echo x > ~/made && sync && echo \"$(id -un) on $(findmnt -no FSTYPE /)$(cat ~/made).\"\r",
    )?;
    until(&mut master, &format!("{USER} on ext4x."))?;
    master.write_all(b"\x01x")?;
    let status = child.wait()?;
    ensure(status.code() == Some(0), || format!("{status:?}"))?;
    ensure(beginning()? == before, || "the base has changed".into())
}

/// What a guest that mounts its root and writes changes first: partition table, superblock, and where its journal may be.
fn beginning() -> Result<Vec<u8>, Failed> {
    let mut bytes = vec![0; 8 << 20];
    File::open(DISK)?.read_exact(&mut bytes)?;
    Ok(bytes)
}
