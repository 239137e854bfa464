//! Debian in images that are laid out like distributions' cloud images. `vellum run -d IMAGE
//! --login NAME` boots each to a login, and `vellum ssh` reaches it.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;

use support::env::Process;
use support::{Failed, LIMIT, Need, ensure, eventually, test};
use vellum_sys::terminal::open_pty;

use crate::VELLUM;
use crate::all_on_a_root;
use crate::guest::{for_this_bed, host};
use crate::typed::{until, until_any};

/// The images, in the laboratory's order (tests/lab/src/hosts/cloud.rs): the disk, its content, and
/// the file that names its kernel.
const IMAGES: [(&str, &str, &str); 4] = [
    ("/dev/vdb", "debian, raw", "/boot/grub/grub.cfg of partition 1"),
    ("/dev/vdc", "debian, compressed clusters", "/boot/grub/grub.cfg of partition 1"),
    ("/dev/vdd", "ubuntu, qcow2 of version 2", "/grub/grub.cfg of partition 16"),
    ("/dev/vde", "fedora, clusters of 2 MiB", "/grub2/grub.cfg of partition 16"),
];
/// The user that logs in.
const USER: &str = "seeded";

fn images() -> Need {
    all_on_a_root()?;
    support::tools::program("passt")?;
    support::tools::program("ssh-keygen")?;
    match IMAGES.iter().all(|(disk, ..)| Path::new(disk).exists()) {
        true => Ok(()),
        false => Err("needs images as clouds have them: cargo lab test linux".into()),
    }
}

/// The user of `--login` logs in on the console with the printed password, can use sudo, and can
/// use SSH. The image is unchanged.
#[test(images())]
fn images_of_clouds_boot_by_themselves_to_a_login() -> Result<(), Failed> {
    for (at, (disk, what, place)) in IMAGES.into_iter().enumerate() {
        println!("{what}");
        let before = beginning(disk)?;
        boot(disk, &format!("cloud{at}"), place)
            .map_err(|error| format!("{what}: {}", error.message().unwrap_or("")))?;
        ensure(beginning(disk)? == before, || format!("{what}: the image has changed"))?;
    }
    Ok(())
}

fn boot(disk: &str, name: &str, place: &str) -> Result<(), Failed> {
    let (mut master, slave, tty) = open_pty()?;
    host(&["stty", "-F", &tty, "sane"])?;
    let (bed_flags, bed_cmdline) = for_this_bed();
    let cmdline = format!("systemd.show_status=0 {bed_cmdline}");
    let mut command = Command::new("setsid");
    command
        .args(["-c", VELLUM, "run", "-d", disk, "--login", USER, "--name", name])
        .args(["--timeout", "7000s", "-p", cmdline.trim()])
        .args(bed_flags)
        .stdin(slave.try_clone()?)
        .stdout(slave.try_clone()?)
        .stderr(slave);
    let mut child = Process::spawn(&mut command)?;
    // This process's copy of the slave would keep the terminal open.
    drop(command);
    let said = until(&mut master, " login: ")?;
    ensure(said.contains(place) && said.contains("Debian GNU/Linux"), || said.clone())?;
    ensure(said.ends_with(&format!("{name} login: ")), || said.clone())?;
    let password = said.split_once("with the password ").and_then(|(_, rest)| rest.split_whitespace().next());
    let password = password.ok_or_else(|| said.clone())?.to_owned();
    log_in(&mut master, &password)?;
    // The echoed command differs from its output.
    master.write_all(
        b"echo x > ~/made && sync && echo \"$(id -un) and $(sudo id -un) on $(findmnt -no FSTYPE /)$(cat ~/made).\"\r",
    )?;
    until(&mut master, &format!("{USER} and root on ext4x."))?;
    // The SSH server starts after the login prompt.
    let told = eventually(LIMIT, "the guest is reached by SSH", || {
        let ssh = Command::new(VELLUM).args(["ssh", name, "--", "cat", "made"]).output()?;
        Ok((ssh.status.code() != Some(255)).then_some(ssh))
    })?;
    ensure(told.stdout == b"x\n", || format!("{told:?}"))?;
    master.write_all(b"\x01x")?;
    let status = child.wait()?;
    ensure(status.code() == Some(0), || format!("{status:?}"))
}

/// Logs in at the prompt. On a busy host a login may time out, and the prompt comes again.
fn log_in(master: &mut File, password: &str) -> Result<(), Failed> {
    for _ in 0..10 {
        master.write_all(format!("{USER}\r").as_bytes())?;
        until(master, "Password: ")?;
        master.write_all(format!("{password}\r").as_bytes())?;
        if until_any(master, &["$ ", " login: "])?.ends_with("$ ") {
            return Ok(());
        }
    }
    Err("no login in ten tries".into())
}

/// The part of the disk that a guest changes first when it mounts and writes its root: partition
/// table, superblock, and the probable place of the journal.
fn beginning(disk: &str) -> Result<Vec<u8>, Failed> {
    let mut bytes = Vec::new();
    File::open(disk)?.take(64 << 20).read_to_end(&mut bytes)?;
    Ok(bytes)
}
