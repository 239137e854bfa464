//! The disks of a saved machine. They are flushed and named in the snapshot, refused if they have
//! changed since, and cloned on request.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use support::env::{Machine, TestEnv};
use support::hosts::{kvm, real};
use support::{Completion, Failed, LIMIT, Tests, ensure, eventually, is_caught, test, tools};

use crate::snapshot::{files, points};
use crate::{ends_with, numbered, succeeds, with};

/// A guest that writes numbers to its disk `disk` and prints them.
struct Writer<'a> {
    env: &'a TestEnv,
    disk: PathBuf,
}

impl Writer<'_> {
    fn devices(&self, serial: &Path) -> String {
        format!("--disk {} --serial file={}", self.disk.display(), serial.display())
    }

    fn start(&self) -> Result<Machine, Failed> {
        let kernel = self.env.path("kernel");
        fs::write(&kernel, numbered::kernel())?;
        fs::write(&self.disk, [0; 512 * numbered::SECTORS as usize])?;
        let devices = self.devices(&self.env.path("out"));
        let line = format!("run --kernel {} --memory 32m {devices}", kernel.display());
        let machine = self.env.run("here", &line)?;
        says_more(&self.env.path("out"))?;
        Ok(machine)
    }

    /// Runs `vellum restore`, which must refuse. Returns its message.
    fn refused(&self, dir: &Path) -> Result<String, Failed> {
        let devices = self.devices(&self.env.path("refused"));
        let mut machine = self.env.migration_client(&format!("restore {} {devices}", dir.display()))?;
        eventually(LIMIT, "it is refused", || Ok(machine.try_wait()?))?;
        let said = String::from_utf8(with(machine.output()?, 2)?.stderr)?;
        ensure(said.lines().count() == 1, || said.clone())?;
        Ok(said)
    }

    /// Restores from `dir`, and stops the machine when it has printed more.
    fn goes_on(&self, dir: &Path, far: &str, more: &str) -> Result<(), Failed> {
        let far = self.env.path(far);
        let machine =
            self.env.restore("again", &format!("{} {} {more}", dir.display(), self.devices(&far)))?;
        says_more(&far)?;
        succeeds(&self.env.vellum("ctl again stop")?)?;
        ends_with(machine, 0).map(drop)
    }
}

/// Waits until so much has been printed to `serial` that each sector was written more than once.
fn says_more(serial: &Path) -> Result<(), Failed> {
    eventually(LIMIT, "it writes", || {
        Ok((fs::metadata(serial)?.len() > 3 * 4 * numbered::SECTORS).then_some(()))
    })
}

fn changed(path: &Path) -> Result<i64, Failed> {
    let data = fs::metadata(path)?;
    Ok(data.mtime() * 1_000_000_000 + data.mtime_nsec())
}

#[test(real())]
fn a_disk_that_has_changed_since_is_refused() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let guest = Writer { env: &env, disk: env.path("disk") };
    let here = guest.start()?;
    let dir = env.path("snap");
    succeeds(&env.vellum(&format!("snapshot here {} --stop", dir.display()))?)?;
    ends_with(here, 0)?;
    let named = points(&env, &dir)?[0]["disks"].clone();
    let path = guest.disk.display().to_string();
    let expected = serde_json::json!([{ "name": "disk0", "path": path, "bytes": 4096, "changed": changed(&guest.disk)? }]);
    ensure(named == expected, || format!("{named}, not {expected}"))?;
    let listed = String::from_utf8(env.vellum(&format!("snapshot list {}", dir.display()))?.stdout)?;
    ensure(listed.contains(&format!("disk0  {path}  4k, last written to at ")), || listed.clone())?;

    // The disk is as it was: no number is missing, and none comes twice.
    guest.goes_on(&dir, "far", "")?;
    let said = [fs::read(env.path("out"))?, fs::read(env.path("far"))?].concat();
    let numbers = said.as_chunks::<4>().0.iter().map(|number| u32::from_le_bytes(*number));
    let wrong = numbers.zip(1..).find(|(number, due)| number != due);
    ensure(wrong.is_none(), || format!("said and due: {wrong:?}"))?;

    // The disk was written since.
    let said = guest.refused(&dir)?;
    let expected = format!("--disk-changed accepts it: disk0 ({path}) has been written to since");
    ensure(said.contains(&expected), || said.clone())?;
    ensure(!env.path("refused").exists() || fs::metadata(env.path("refused"))?.len() == 0, || {
        "it ran".into()
    })?;
    guest.goes_on(&dir, "anyhow", "--disk-changed")?;
    File::options().write(true).open(&guest.disk)?.set_len(8192)?;
    let said = guest.refused(&dir)?;
    ensure(said.contains("disk0"), || said.clone())
}

/// A restore finds at once that another machine uses its disk. It does not wait for pages.
#[test(real())]
fn a_disk_that_is_in_use_is_refused() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let guest = Writer { env: &env, disk: env.path("disk") };
    let here = guest.start()?;
    let dir = env.path("snap");
    succeeds(&env.vellum(&format!("snapshot here {}", dir.display()))?)?;
    let said = guest.refused(&dir)?;
    ensure(said.contains("in use"), || said.clone())?;
    ensure(env.standing("here").as_deref() == Some("running"), || "the other does not run".into())?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0).map(drop)
}

/// If the file system cannot share blocks, there is no snapshot, and no file is left.
#[test(real())]
fn a_disk_that_cannot_be_cloned_is_named() -> Result<Completion, Failed> {
    let elsewhere = Path::new("/dev/shm");
    if !elsewhere.is_dir() {
        return Ok(Completion::ignored_with("needs a file system of its own at /dev/shm"));
    }
    let env = TestEnv::new()?;
    let disk = elsewhere.join(env.dir().file_name().ok_or("a directory has a name")?);
    let guest = Writer { env: &env, disk };
    let result = guest.start().and_then(|here| {
        let dir = env.path("snap");
        let output = with(env.vellum(&format!("snapshot here {} --reflink", dir.display()))?, 1)?;
        let said = String::from_utf8(output.stderr)?;
        let expected = format!("disk0 ({}): it cannot be cloned", guest.disk.display());
        ensure(said.contains(&expected) && said.lines().count() == 1, || said.clone())?;
        ensure(!dir.exists(), || "something is left".into())?;
        ensure(env.standing("here").as_deref() == Some("running"), || "it does not run on".into())?;
        succeeds(&env.vellum("ctl here stop")?)?;
        ends_with(here, 0).map(drop)
    });
    fs::remove_file(&guest.disk)?;
    result.map(|()| Completion::Completed)
}

/// A mount that is unmounted when it is dropped.
struct Mounted(PathBuf);

impl Mounted {
    /// Mounts a file system at `at` whose files can share blocks. `None` if this host cannot.
    fn xfs(image: &Path, at: PathBuf) -> Result<Option<Self>, Failed> {
        File::create(image)?.set_len(320 << 20)?;
        fs::create_dir(&at)?;
        let quiet = |command: &mut Command| {
            let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
            status.is_ok_and(|status| status.success())
        };
        let made = quiet(Command::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(image))
            && quiet(Command::new("mount").args(["-t", "xfs", "-o", "loop"]).arg(image).arg(&at));
        Ok(made.then_some(Self(at)))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// The guest runs on and writes its disk after a snapshot. The restored machine has the clone as it
/// was at the pause, and then writes to it.
#[test(real())]
fn a_clone_is_the_disk_as_it_was_at_the_pause() -> Result<Completion, Failed> {
    if tools::find("mkfs.xfs").is_none() {
        return Ok(Completion::ignored_with(tools::lacks("mkfs.xfs")));
    }
    let env = TestEnv::new()?;
    let Some(mounted) = Mounted::xfs(&env.path("xfs"), env.path("mnt"))? else {
        return Ok(Completion::ignored_with(
            "needs root and a kernel with xfs, for a file system whose files share blocks",
        ));
    };
    let guest = Writer { env: &env, disk: mounted.0.join("disk") };
    let here = guest.start()?;
    let dir = mounted.0.join("snap");
    for point in 0..2 {
        succeeds(&env.vellum(&format!("snapshot here {} --reflink", dir.display()))?)?;
        let name = format!("disk0-{point}");
        ensure(files(&dir)?.contains(&name), || format!("{:?}", files(&dir)))?;
    }
    // The guest prints a number when it has written it.
    let printed = fs::read(env.path("out"))?.len();
    eventually(LIMIT, "the guest writes after the snapshot", || {
        Ok((fs::read(env.path("out"))?.len() > printed + 8).then_some(()))
    })?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0)?;
    ensure(guest.refused(&dir)?.contains("has been written to since"), || "its disk is taken".into())?;
    let clone = Writer { env: &env, disk: dir.join("disk0-1") };
    clone.goes_on(&dir, "far", "")?;
    // The first number after the restore follows those of the clone, not those of the disk at the
    // end.
    let far = fs::read(env.path("far"))?;
    // The pause may have come in the middle of a number. Its rest is printed first.
    let numbers = |from: usize| {
        let (numbers, _) = far.get(from..)?.as_chunks::<4>();
        let [first, next] = [*numbers.first()?, *numbers.get(1)?].map(u32::from_le_bytes);
        (first.checked_add(1) == Some(next)).then_some(first)
    };
    let first = (0..4).find_map(numbers).ok_or("it says nothing that follows")?;
    let out = fs::read(env.path("out"))?;
    ensure((first as usize) < out.len() / 4, || format!("{first} is said first"))?;
    ensure(clone.refused(&dir)?.contains("has been written to since"), || "a clone is taken twice".into())?;
    Ok(Completion::Completed)
}

/// Whether a changed disk is refused, with and without the fault.
fn is_refused(mistake: Option<&'static str>) -> Result<bool, Failed> {
    let env = TestEnv::planted(mistake)?;
    let guest = Writer { env: &env, disk: env.path("disk") };
    let here = guest.start()?;
    let dir = env.path("snap");
    succeeds(&env.vellum(&format!("snapshot here {} --stop", dir.display()))?)?;
    ends_with(here, 0)?;
    fs::write(&guest.disk, [1; 4096])?;
    let devices = guest.devices(&env.path("far"));
    let mut machine = env.migration_client(&format!("restore {} --name again {devices}", dir.display()))?;
    let refused = eventually(LIMIT, "it is refused or runs", || {
        let runs = env.standing("again").as_deref() == Some("running");
        Ok(if machine.try_wait()?.is_some() { Some(true) } else { runs.then_some(false) })
    })?;
    if !refused {
        succeeds(&env.vellum("ctl again stop")?)?;
    }
    let output = with(machine.output()?, if refused { 2 } else { 0 })?;
    let says = String::from_utf8(output.stderr)?.contains("has been written to since");
    ensure(says, || "it does not say that the disk has changed".into())?;
    Ok(refused)
}

/// Planted faults that these tests must notice.
pub fn add(tests: &mut Tests) {
    tests.add("planted_disks-unchecked_is_caught", kvm(), || {
        ensure(is_refused(None)?, || "it is not refused without it".into())?;
        is_caught(|| is_refused(Some("disks-unchecked")))
    });
}
