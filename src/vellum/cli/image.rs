//! `vellum run -d IMAGE` without a kernel: boots the operating system in the image.
//! [`vellum_osimage`] finds its kernel. This file adds the other defaults of such a guest.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::devices;
use super::failure::Failure;
use super::kernel::KernelArgs;
use super::login::{self, Kept, Login};
use super::output::say;
use super::run_flags::FLAGS;
use vellum_control::client::Client;
use vellum_control::names;
use vellum_devices::virtio::blk::{self, BlkConfig};
use vellum_devices::virtio::cidata;
use vellum_devices::virtio::net;
use vellum_devices::virtio::rng::{self, RngConfig};
use vellum_devices::virtio::transport::Codec;
use vellum_disk::overlay::Place;
use vellum_kvm::arch::boot::default_cmdline;
use vellum_kvm::arch::irqchip;
use vellum_osimage::confined::{self, Failed};
use vellum_sandbox::Mode;
use vellum_sys::file;
use vellum_sys::program;
use vellum_sys::socket::SocketError;

/// The file of a kept machine's writes.
const OVERLAY: &str = "disk.overlay";

/// A guest whose kernel is known.
pub(super) struct Prepared {
    /// The kernel or firmware.
    pub kernel: PathBuf,
    /// What messages call the kernel and the seed, and what the user calls them.
    names: Vec<(String, String)>,
    /// The user that can log in by SSH.
    pub login: Option<Login>,
    /// Files with paths below /proc/self/fd. They stay open until the machine has opened them.
    _files: Vec<File>,
}

/// The name of a machine that needs one and was given none: that of its image.
pub(super) fn default_name(args: &KernelArgs) -> Option<String> {
    let image = &args.image;
    if !image.keep && !image.ssh {
        return None;
    }
    let stem = args.devices.disk()?.path.file_stem()?.to_str()?;
    let sound = |byte: char| byte.is_ascii_alphanumeric() || "-_.".contains(byte);
    let name: String = stem.chars().map(|byte| if sound(byte) { byte } else { '-' }).take(64).collect();
    Some(name.trim_start_matches(['.', '-']).to_owned()).filter(|name| !name.is_empty())
}

/// Completes `args` for the operating system of the first disk: its kernel unless one is given, an
/// overlay, a network, and the user of `--login`.
pub(super) fn prepare(args: &mut KernelArgs, name: Option<&str>, mode: Mode) -> Result<Prepared, Failure> {
    if let Some(name) = name {
        free(name)?;
    }
    let given = args.kernel.clone().or_else(|| args.image.firmware.clone());
    let needs_disk = args.image.login.is_some() || args.image.keep || args.image.user_data.is_some();
    let Some(mut disk) = args.devices.disk().cloned() else {
        return match given {
            Some(kernel) if !needs_disk => {
                let called = args.image.firmware.as_ref().map(|_| format!("--firmware {}", kernel.display()));
                let names = called.map(|called| named(&kernel, called)).into_iter().collect();
                Ok(Prepared { kernel, names, login: None, _files: Vec::new() })
            }
            _ => Err(Failure::usage("--login, --user-data and --keep need a disk image: --disk IMAGE")),
        };
    };
    let mut files = Vec::new();
    let kept = args.image.keep.then(|| keep(&mut disk, name)).transpose()?;
    let mut names = Vec::new();
    if kept.is_some() {
        names.push(("another overlay".into(), "another --name".into()));
    }
    let is_installed = args.kernel.is_none();
    if is_installed && disk.overlay.is_none() && !disk.readonly && !disk.into_image {
        disk.overlay = Some(Place::Discard);
    }
    if args.image.ssh {
        check_ssh(args, is_installed)?;
    }
    let (kernel, called) = match given {
        Some(kernel) => {
            let called = args.image.firmware.as_ref().map(|_| format!("--firmware {}", kernel.display()));
            (kernel, called)
        }
        None => {
            let found = find(args, &disk, mode, &mut files);
            let (kernel, path) = found.map_err(|failure| rename(&names, failure))?;
            (kernel, Some(format!("--disk {}: {path}", disk.path.display())))
        }
    };
    // What is refused up to here leaves no directory behind.
    if let (Some(_), Some(name)) = (&kept, name) {
        names::make_kept_directory(name).map_err(|error| Failure::of(&error, FLAGS))?;
    }
    args.devices.set_disk(disk);
    if is_installed {
        // PCI devices interrupt by messages, which a GICv2 does not take.
        if args.irqchip.get_or_insert_with(irqchip::Mode::of_host).takes_messages() {
            args.transport.get_or_insert(Codec::Pci);
        }
        if !args.devices.has(&rng::KIND) {
            args.devices.add(RngConfig);
        }
        if args.devices.leaves_network_open() {
            match net::user::check() {
                Ok(()) => args.devices.add(net::parse("user").expect("it is a network")),
                Err(why) => say(&format!("the guest has no network: {why}")),
            }
        }
    }
    let login = match args.image.login.clone() {
        None => None,
        Some(user) => Some(login::prepare(args, &user, name, kept.as_ref(), &mut files)?),
    };
    names.extend(called.map(|called| named(&kernel, called)));
    if let Some(path) = args.image.user_data.clone() {
        args.devices.add(login::seed(path, None));
        names.push((devices::flag(cidata::KIND.key), "--user-data:".into()));
    }
    Ok(Prepared { kernel, names, login, _files: files })
}

/// Checks that `--ssh` will have a network that forwards a port, and its programs. `is_installed` is
/// whether the guest is one that gets a network by default.
fn check_ssh(args: &KernelArgs, is_installed: bool) -> Result<(), Failure> {
    let refuse = |why: &str| Err(Failure::usage(format!("--ssh: {why}")));
    if args.devices.leaves_network_open() {
        match net::user::check() {
            _ if !is_installed => {
                return refuse("the guest needs a network that it is reached by: --net user");
            }
            Err(why) => return refuse(&why.to_string()),
            Ok(()) => {}
        }
    } else if !args.devices.can_forward() {
        return refuse("the guest needs a network that it is reached by: --net user");
    }
    match ["ssh", "ssh-keygen"].into_iter().find(|name| !program::is_installed(name)) {
        Some(missing) => refuse(&format!("{missing} is not installed: apt install openssh-client")),
        None => Ok(()),
    }
}

/// Replaces the names in a message, each by the one that the user knows.
fn rename(names: &[(String, String)], failure: Failure) -> Failure {
    let replace = |message: String, (of, called): &(String, String)| message.replace(of, called);
    Failure { message: names.iter().fold(failure.message, replace), ..failure }
}

/// What messages call `kernel`, and what the user calls it.
fn named(kernel: &Path, called: String) -> (String, String) {
    (format!("--kernel {}", kernel.display()), called)
}

/// Refuses the name of a running machine, because a guest with a user would replace its keys.
/// Removes what an earlier machine of that name left, so that `vellum ssh` does not use it for this
/// one.
fn free(name: &str) -> Result<(), Failure> {
    let socket = names::socket(name).map_err(|error| Failure::of(&error, FLAGS))?;
    if Client::connect(&socket).is_ok() {
        return Err(Failure::usage(format!("--name: {}", SocketError::InUse(socket))));
    }
    let directory = names::ssh_directory(name).map_err(|error| Failure::of(&error, FLAGS))?;
    match std::fs::remove_dir_all(&directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Failure::host(format!("{}: {error}", directory.display())))
        }
        _ => Ok(()),
    }
}

impl Prepared {
    /// Replaces the names in a message by those that the user knows.
    pub fn name(&self, failure: Failure) -> Failure {
        rename(&self.names, failure)
    }
}

/// Gives `disk` an overlay that is kept under the machine's name, in a directory that may not exist.
fn keep(disk: &mut BlkConfig, name: Option<&str>) -> Result<Kept, Failure> {
    if disk.readonly || disk.overlay.is_some() || disk.into_image {
        return Err(Failure::usage(
            "--keep: the disk has `readonly` or `overlay=`, which says where writes go; leave one of the two out",
        ));
    }
    let name = name.ok_or_else(|| Failure::usage("--keep needs a name to keep it under: --name NAME"))?;
    let directory = names::kept_directory(name).map_err(|error| match error {
        names::Error::NoHome => Failure::usage(format!("--keep: {error}")),
        error => Failure::of(&error, FLAGS),
    })?;
    let overlay = directory.join(OVERLAY);
    let has_disk = overlay.exists();
    disk.overlay = Some(Place::File(overlay));
    Ok(Kept { directory, has_disk })
}

/// Finds the kernel of `disk`, and sets the initrd and the command line. Returns the kernel as a
/// path of an open file, and its path in the image.
fn find(
    args: &mut KernelArgs,
    disk: &BlkConfig,
    mode: Mode,
    files: &mut Vec<File>,
) -> Result<(PathBuf, String), Failure> {
    let opened = blk::Files::open(disk).map_err(|error| Failure::of(&error, FLAGS))?;
    let path = disk.path.display();
    let remedy = "; --kernel FILE and --initrd FILE name a kernel that is beside it";
    let open = || {
        let image = opened.image().map_err(|error| Failure::of(&error, FLAGS).message)?;
        Ok((image, ()))
    };
    let (examined, ()) = confined::find(mode, open).map_err(|failed| match failed {
        Failed::Open(why) => Failure::usage(why),
        Failed::Work(why) => Failure::usage(format!("--disk {path}: {why}")),
    })?;
    disk.check_growth(examined.bytes).map_err(|error| Failure::of(&error, FLAGS))?;
    let found = examined.boots.map_err(|why| Failure::usage(format!("--disk {path}: {why}{remedy}")))?;
    let about = found.about;
    if args.image.login.is_some() && about.has_cloud_init == Some(false) {
        let system = about.system.as_deref().unwrap_or("it");
        return Err(Failure::usage(format!(
            "--login: {path}: {system} has no cloud-init, which would make the user; leave --login out, or use an image for clouds"
        )));
    }
    let system = about.system.as_deref().unwrap_or(&about.title);
    say(&format!("{path}: {system}, kernel {}, by {}", about.kernel, about.place));
    if args.initrd.is_none()
        && let Some(initrd) = found.initrd
    {
        args.initrd = Some(held(initrd, files));
    }
    let own = std::mem::take(&mut args.cmdline);
    args.cmdline = vec![about.cmdline];
    args.cmdline.extend(console(&args.cmdline[0], default_cmdline(args.uart)));
    args.cmdline.extend(own);
    Ok((held(found.kernel, files), about.kernel))
}

/// The console of `defaults`, if the last one on the `image`'s command line is another. The last
/// console gets the login.
fn console(image: &str, defaults: &str) -> Option<String> {
    let last =
        |text: &str| text.split_whitespace().rfind(|word| word.starts_with("console=")).map(str::to_owned);
    let ours = last(defaults)?;
    match last(image) {
        Some(theirs) if theirs.split(',').next() != Some(&ours) => Some(ours),
        _ => None,
    }
}

/// Keeps `file` open, and returns a path for it.
fn held(file: File, files: &mut Vec<File>) -> PathBuf {
    let path = file::path_of(&file);
    files.push(file);
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_login_is_on_the_serial_port() {
        let defaults = "console=ttyS0 reboot=k panic=-1";
        for (image, expected) in [
            ("root=/dev/sda1 ro quiet", None),
            ("console=tty0 console=ttyS0,115200n8", None),
            ("console=ttyS0 console=tty0", Some("console=ttyS0")),
            ("console=tty1", Some("console=ttyS0")),
        ] {
            assert_eq!(console(image, defaults).as_deref(), expected, "{image}");
        }
    }
}
