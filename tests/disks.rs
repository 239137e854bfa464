//! Disks that another process on the host uses: a mounted file system, the image behind a loop
//! device, another machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use support::{Failed, Need, Tests, ensure, test};
use vellum_devices::virtio::blk::{Blk, BlkConfig, BlkError};
use vellum_sys::host;

fn main() -> ExitCode {
    Tests::from_args().run()
}

fn call(program: &str, arguments: &[&str]) -> Result<Output, Failed> {
    let output =
        Command::new(program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    ensure(output.status.success(), || format!("{program} {arguments:?}: {output:?}"))?;
    Ok(output)
}

/// A directory with an image that has a file system. Its loop devices and mounts are removed with
/// it.
struct Host {
    dir: PathBuf,
    device: String,
    mounted: bool,
    /// Released last: see [`ALONE`].
    _alone: MutexGuard<'static, ()>,
}

/// A program that one test starts has the locks of another test's disks until it is executed, so
/// that a disk that was closed would be in use. One test runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

impl Host {
    fn new() -> Result<Self, Failed> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("vellum-disks-{}-{next}", std::process::id()));
        fs::create_dir_all(dir.join("mnt"))?;
        let mut host = Self { dir, device: String::new(), mounted: false, _alone: alone };
        let image = host.image().display().to_string();
        fs::File::create(&image)?.set_len(8 << 20)?;
        call("mkfs.ext4", &["-q", &image])?;
        let output = call("losetup", &["--find", "--show", &image])?;
        host.device = String::from_utf8(output.stdout)?.trim().to_owned();
        Ok(host)
    }

    fn image(&self) -> PathBuf {
        self.dir.join("image")
    }

    fn mount(&mut self) -> Result<String, Failed> {
        let at = self.dir.join("mnt").display().to_string();
        call("mount", &[&self.device, &at])?;
        self.mounted = true;
        Ok(at)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if self.mounted {
            let _ = Command::new("umount").arg(self.dir.join("mnt")).status();
        }
        if !self.device.is_empty() {
            let _ = Command::new("losetup").args(["-d", &self.device]).status();
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Requires loop devices and mounts.
fn loops() -> Need {
    if !host::is_root() {
        return Err("needs root: run the tests with sudo".into());
    }
    let works = Host::new().and_then(|mut host| host.mount());
    works.map(drop).map_err(|error| {
        let why = error.message().unwrap_or_default().to_owned();
        format!("needs loop devices and mkfs.ext4: modprobe loop, apt install e2fsprogs ({why})")
    })
}

fn says(path: &Path, change: impl FnOnce(BlkConfig) -> BlkConfig) -> Result<String, Failed> {
    match Blk::open(&change(BlkConfig::new(path))) {
        Err(error) => Ok(error.to_string()),
        Ok(_) => Err(format!("{}: it was taken", path.display()).into()),
    }
}

#[test(loops())]
fn a_mounted_device_and_its_image_are_refused_with_the_mount() -> Result<(), Failed> {
    let mut host = Host::new()?;
    let at = host.mount()?;
    let device = PathBuf::from(&host.device);
    for (path, what) in [
        (device.clone(), format!("is mounted on {at}")),
        (host.image(), format!("is the image behind {}, which is mounted on {at}", host.device)),
    ] {
        let said = says(&path, |config| config)?;
        ensure(said.contains(&what) && said.contains("`force`"), || said.clone())?;
        let said = said.lines().count();
        ensure(said == 1, || format!("{said} lines"))?;
        // Also for a machine that arrives from another process.
        let Err(error) = Blk::open_unlocked(&BlkConfig::new(&path)) else {
            return Err(format!("{}: it was taken", path.display()).into());
        };
        ensure(error.to_string().contains(&what), || error.to_string())?;
        Blk::open(&BlkConfig { readonly: true, ..BlkConfig::new(&path) })
            .map_err(|error| error.to_string())?;
        Blk::open(&BlkConfig { force: true, ..BlkConfig::new(&path) }).map_err(|error| error.to_string())?;
    }
    Ok(())
}

#[test(loops())]
fn a_device_of_a_machine_cannot_be_mounted_or_taken_twice() -> Result<(), Failed> {
    let mut host = Host::new()?;
    let said = says(&host.image(), |config| config)?;
    ensure(said.contains(&format!("{}, which losetup detaches", host.device)), || said)?;
    let device = PathBuf::from(&host.device);
    let disk = Blk::open(&BlkConfig::new(&device)).map_err(|error| error.to_string())?;
    ensure(host.mount().is_err(), || "it was mounted".into())?;
    let twice = Blk::open(&BlkConfig::new(&device));
    ensure(matches!(twice, Err(BlkError::Locked { .. })), || format!("{:?}", twice.err()))?;
    // A machine that is to arrive here opens it while the other one has it.
    Blk::open_unlocked(&BlkConfig::new(&device)).map_err(|error| error.to_string())?;
    drop(disk);
    host.mount().map(drop)
}
