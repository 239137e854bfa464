//! Debian in images that are laid out like distributions' cloud images. `vellum run -d IMAGE
//! --login NAME` boots each to a login, and `vellum ssh` reaches it.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use support::env::Process;
use support::{Failed, LIMIT, Need, Scratch, Tests, ensure, eventually, test};
use vellum_control::names;
use vellum_sys::terminal::open_pty;

use crate::guest::{for_this_bed, host, scratch};
use crate::typed::{until, until_any};
use crate::{VELLUM, all_on_a_root, guests, more_than_a_slice};

/// The images, in the laboratory's order (tests/lab/src/hosts/cloud.rs): the disk, its content, and
/// the file that names its kernel.
const IMAGES: [(&str, &str, &str); 4] = [
    ("/dev/vdb", "debian_raw", "/boot/grub/grub.cfg of partition 1"),
    ("/dev/vdc", "debian_compressed", "/boot/grub/grub.cfg of partition 1"),
    ("/dev/vdd", "ubuntu_of_version_2", "/grub/grub.cfg of partition 16"),
    ("/dev/vde", "fedora_with_clusters_of_2_mib", "/grub2/grub.cfg of partition 16"),
];
/// What the guests' command lines get beside the bed's. Messages on the console take two exits a byte,
/// and the kernel's tests of its cryptography much computation. Both are slow on an emulated host.
const SHORT_BOOT: &str = "quiet systemd.show_status=0 cryptomgr.notests";
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

/// The image of hosts with Arm's processors. Its users log in without a password.
const OF_ARM: &str = "/dev/vda";

fn image_of_arm() -> Need {
    guests().and_then(|()| more_than_a_slice())?;
    match cfg!(target_arch = "aarch64") && Path::new(OF_ARM).exists() {
        true => Ok(()),
        false => Err("needs a host of Arm with an image as clouds have them: cargo lab test arm64".into()),
    }
}

/// An image for Arm boots by itself to a login, with the kernel, the initrd and the root that its
/// GRUB menu names.
#[test(image_of_arm())]
fn images_of_clouds_boot_by_themselves_to_a_login_on_arm() -> Result<(), Failed> {
    let before = beginning(OF_ARM)?;
    let (mut master, slave, tty) = open_pty()?;
    host(&["stty", "-F", &tty, "sane"])?;
    let mut command = Command::new("setsid");
    command.args(["-c", VELLUM, "run", "-d", OF_ARM, "--timeout", "7000s"]);
    command.stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave);
    let mut child = Process::spawn(&mut command)?;
    drop(command);
    let said = until(&mut master, "arm login: ")?;
    ensure(said.contains("/boot/grub/grub.cfg of partition 1"), || said.clone())?;
    master.write_all(b"root\r")?;
    until(&mut master, "# ")?;
    master.write_all(
        b"echo x > /made && sync && echo \"$(uname -m) on $(cut -d' ' -f1 /proc/1/comm) $(cat /made).\"\r",
    )?;
    until(&mut master, "aarch64 on init x.")?;
    master.write_all(b"\x01x")?;
    let status = child.wait()?;
    ensure(status.code() == Some(0), || format!("{status:?}"))?;
    ensure(beginning(OF_ARM)? == before, || "the image has changed".into())
}

/// A test for each image.
pub fn add(tests: &mut Tests) {
    for (at, (disk, what, place)) in IMAGES.into_iter().enumerate() {
        let name = format!("images_of_clouds_boot_by_themselves_to_a_login_{what}");
        tests.add(name, images(), move || {
            let before = beginning(disk)?;
            boot(disk, &format!("cloud{at}"), place)?;
            ensure(beginning(disk)? == before, || "the image has changed".into())
        });
    }
}

/// The user of `--login` logs in on the console with the printed password, can use sudo, and can
/// use SSH. SSH refuses a guest with another host key.
fn boot(disk: &str, name: &str, place: &str) -> Result<(), Failed> {
    let (mut master, slave, tty) = open_pty()?;
    host(&["stty", "-F", &tty, "sane"])?;
    let (bed_flags, bed_cmdline) = for_this_bed();
    let cmdline = format!("{SHORT_BOOT} {bed_cmdline}");
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
    let (user, password) = printed(&said)?;
    ensure(user == USER, || said.clone())?;
    log_in(&mut master, USER, &password)?;
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
    is_refused_with_another_key(name)?;
    master.write_all(b"\x01x")?;
    let status = child.wait()?;
    ensure(status.code() == Some(0), || format!("{status:?}"))
}

/// Replaces the known host key of machine `name` for one connection, which must fail.
fn is_refused_with_another_key(name: &str) -> Result<(), Failed> {
    let directory = names::ssh_directory(name)?;
    let known = directory.join("known_hosts");
    let right = fs::read_to_string(&known)?;
    // The login key is of the same type as the host key.
    fs::write(&known, format!("{name} {}", fs::read_to_string(directory.join("key.pub"))?))?;
    let refused = Command::new(VELLUM).args(["ssh", name, "--", "true"]).output()?;
    fs::write(&known, right)?;
    let said = String::from_utf8_lossy(&refused.stderr);
    let is_refused = refused.status.code() == Some(255) && said.contains("Host key verification failed");
    ensure(is_refused, || format!("{refused:?}"))?;
    let reached = Command::new(VELLUM).args(["ssh", name, "--", "true"]).output()?;
    ensure(reached.status.success(), || format!("{reached:?}"))
}

/// `--ssh` gives a shell in the guest and ends with the shell's status. With `--keep`, the next run
/// has the files of this one, and another `--login` adds its user.
#[test(images())]
fn images_of_clouds_are_kept_with_a_user_for_each_login() -> Result<(), Failed> {
    let scratch = scratch()?;
    let name = "kept";
    let known = scratch.path("data/vellum/kept/known_hosts");
    let first = shell_by_ssh(&scratch, name, "ada", "echo kept > file; exit 3", 3)?;
    ensure(first.contains("log in as ada with the password "), || first.clone())?;
    let host_key = fs::read_to_string(&known)?;
    // The password of the second user is new, and the host key is the same.
    let command = "test \"$(sudo cat /home/ada/file) $(id -un)\" = 'kept bob' && exit 4";
    let second = shell_by_ssh(&scratch, name, "bob", command, 4)?;
    ensure(second.contains("log in as bob with the password "), || second.clone())?;
    ensure(fs::read_to_string(&known)? == host_key, || "the host key has changed".into())
}

/// The book's page with the steps of a newcomer.
const PAGE: &str = include_str!("../../docs/src/tutorials/linux-guest.md");

/// The part of the page between `from` and `to`.
fn of_page(from: &str, to: &str) -> Result<&'static str, Failed> {
    let found = PAGE.split_once(from).and_then(|(_, rest)| rest.split_once(to));
    Ok(found.ok_or_else(|| format!("the page has no {from:?}"))?.0)
}

/// A newcomer has installed the packages and downloaded the image, and enters the commands of the
/// page's other steps. They lead to a prompt.
#[test(images())]
fn images_of_clouds_boot_by_the_steps_of_the_page() -> Result<(), Failed> {
    let scratch = scratch()?;
    let downloaded = of_page("curl -LO https://", "\n")?.rsplit('/').next().unwrap_or_default();
    symlink(IMAGES[1].0, scratch.path(downloaded))?;
    let directory = Path::new(VELLUM).parent().unwrap_or(Path::new("/")).display();
    let path = format!("PATH={directory}:$PATH");
    let check = of_page("Check the host: `", "`")?;
    let (bed_flags, bed_cmdline) = for_this_bed();
    let boot = format!("{} {}", of_page("Boot it: `", "`")?, bed_flags.join(" "));
    let boot = format!("{boot} -p '{SHORT_BOOT} {bed_cmdline}'");
    let checked = Command::new("sh").args(["-c", &format!("{path}; {check}")]).output()?;
    ensure(checked.status.success(), || format!("{check}: {checked:?}"))?;
    let (mut master, slave, tty) = open_pty()?;
    host(&["stty", "-F", &tty, "sane"])?;
    let mut command = Command::new("setsid");
    command.args(["-c", "sh", "-c", &format!("{path}; exec {boot}")]).current_dir(scratch.dir());
    command.stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave);
    let mut child = Process::spawn(&mut command)?;
    drop(command);
    let said = until(&mut master, " login: ")?;
    let (user, password) = printed(&said)?;
    log_in(&mut master, &user, &password)?;
    master.write_all(b"echo \"a $(sudo id -un) here.\"\r")?;
    until(&mut master, "a root here.")?;
    master.write_all(b"\x01x")?;
    let status = child.wait()?;
    ensure(status.code() == Some(0), || format!("{status:?}"))
}

/// The user and the password that Vellum has printed.
fn printed(said: &str) -> Result<(String, String), Failed> {
    let words = said.split_once("log in as ").map(|(_, rest)| rest.split_whitespace().collect::<Vec<_>>());
    match words.as_deref() {
        Some([user, "with", "the", "password", password, ..]) => {
            Ok(((*user).to_owned(), (*password).to_owned()))
        }
        _ => Err(said.into()),
    }
}

/// Runs `command` in the shell of `--ssh`, which must end with `status`. Returns the output until
/// the shell's prompt.
fn shell_by_ssh(
    scratch: &Scratch,
    name: &str,
    user: &str,
    command: &str,
    status: i32,
) -> Result<String, Failed> {
    let (mut master, slave, tty) = open_pty()?;
    host(&["stty", "-F", &tty, "sane"])?;
    let (bed_flags, bed_cmdline) = for_this_bed();
    let mut run = Command::new("setsid");
    run.args(["-c", VELLUM, "run", "-d", IMAGES[0].0, "--login", user, "--ssh", "--keep", "--name", name])
        .args(["--timeout", "7000s", "-p", &format!("{SHORT_BOOT} {bed_cmdline}")])
        .args(bed_flags)
        .env("XDG_DATA_HOME", scratch.path("data"))
        .stdin(slave.try_clone()?)
        .stdout(slave.try_clone()?)
        .stderr(slave);
    let mut child = Process::spawn(&mut run)?;
    drop(run);
    let said = until(&mut master, &format!("{user}@{name}:~$ ")).map_err(|error| {
        let (why, console) = (error.message().unwrap_or_default(), console_of(name));
        format!("{why}; the console: {console:?}")
    })?;
    master.write_all(format!("{command}\r").as_bytes())?;
    let ended = child.wait()?;
    ensure(ended.code() == Some(status), || format!("{ended:?} after {said}"))?;
    Ok(said)
}

/// The console of a guest of `--ssh`.
fn console_of(name: &str) -> Result<String, Failed> {
    Ok(fs::read_to_string(names::ssh_directory(name)?.join("console.log"))?)
}

/// Logs in at the prompt. On a busy host a login may time out, and the prompt comes again.
fn log_in(master: &mut File, user: &str, password: &str) -> Result<(), Failed> {
    for _ in 0..10 {
        master.write_all(format!("{user}\r").as_bytes())?;
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
