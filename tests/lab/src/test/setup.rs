//! What `--setup` permits: installing Debian packages, and reserving huge pages during the tests.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};

use support::tools::{self, TOOLS};

use super::tally::Tally;
use crate::cache::Cache;
use crate::hosts::doctor;
use crate::{Error, Result, tool};

const NR_HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";

/// Makes sure that the packages of `programs` are installed. Without permission or root, `host` is
/// skipped with the command that installs them.
pub fn packages(programs: &[&'static str], consent: bool, host: &str, tally: &mut Tally) -> Result<bool> {
    let missing = doctor::missing(programs);
    let Some(line) = doctor::install_line(&missing) else { return Ok(true) };
    if consent && is_root() {
        install(&missing)?;
        return Ok(true);
    }
    let remedy = if consent { "as root: " } else { "cargo lab test --setup, or as root: " };
    tally.skip(host, "the whole bed", &format!("it lacks Debian's packages; {remedy}{line}"));
    Ok(false)
}

pub(crate) fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions.
    unsafe { libc::geteuid() == 0 }
}

/// Installs the tools of [`TOOLS`] that `wanted` selects. A test that lacks one reports it.
pub fn tools(wanted: impl Fn(&str) -> bool, tally: &mut Tally) {
    let lacking = TOOLS.iter().filter(|(name, _)| wanted(name) && tools::find(name).is_none());
    let packages: BTreeSet<&str> = lacking.map(|(_, package)| *package).collect();
    if packages.is_empty() || !is_root() || install(&packages).is_ok() {
        return;
    }
    // A package that is not available must not prevent the others.
    for package in packages {
        if let Err(error) = install(&BTreeSet::from([package])) {
            tally.show(&format!("lab: without {package}: {error}"));
        }
    }
}

/// Whether CI requires that `--setup` is complete: a test that is skipped although `--setup` could
/// have installed what it needs fails.
pub fn is_held_to(consent: bool) -> bool {
    consent && is_root() && std::env::var_os("CI").is_some_and(|ci| ci == "true")
}

pub(super) fn install(packages: &BTreeSet<&str>) -> Result<()> {
    let cache = Cache::open()?;
    let _lock = cache.lock("packages")?;
    // Uses a directory of its own. Another process may empty the system's archive directory before
    // the packages are unpacked.
    let archives = cache.dir("archives")?;
    fs::create_dir_all(archives.join("partial")).map_err(Error::file("create", &archives))?;
    eprintln!("lab: installing {}", packages.iter().copied().collect::<Vec<_>>().join(" "));
    let apt = || {
        let mut command = Command::new("apt-get");
        // Waits for other installers, such as unattended upgrades.
        command.env("DEBIAN_FRONTEND", "noninteractive").args(["-q", "-o", "DPkg::Lock::Timeout=600"]);
        command.arg("-o").arg(format!("Dir::Cache::archives={}", archives.display()));
        command
    };
    // The update may fail because of a lock or no network. Older lists may be enough.
    let lists = tool::output(apt().arg("update"));
    let installed = tool::output(apt().args(["install", "--yes", "--no-install-recommends"]).args(packages));
    installed.or_else(|error| lists.and(Err(error))).map(drop)
}

/// Reserved huge pages. They are released on drop.
pub struct HugePages {
    before: u64,
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Err(error) = fs::write(NR_HUGEPAGES, self.before.to_string()) {
            eprintln!("lab: {NR_HUGEPAGES} could not be set back to {}: {error}", self.before);
        }
    }
}

/// Raises the pool so that `wanted` pages of 2 MiB are free. `None` if that is unnecessary or
/// impossible.
pub fn huge_pages(wanted: u32, tally: &mut Tally) -> Option<HugePages> {
    let read = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let free = read("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")?;
    let short = u64::from(wanted).saturating_sub(free);
    let before = read(NR_HUGEPAGES)?;
    if short == 0 {
        return None;
    }
    match fs::write(NR_HUGEPAGES, (before + short).to_string()) {
        // The kernel reserves what it finds, and says nothing if that is less.
        Ok(()) => {
            let reserved = read(NR_HUGEPAGES).unwrap_or(0);
            if reserved < before + short {
                let why = format!("{reserved} of {} were found: memory is too fragmented", before + short);
                tally.skip("local", "the setup of huge pages", &why);
            }
            Some(HugePages { before })
        }
        Err(error) => {
            let remedy = format!("as root: echo {} > {NR_HUGEPAGES} ({error})", before + short);
            tally.skip("local", "the setup of huge pages", &remedy);
            None
        }
    }
}

static CHILD: AtomicI32 = AtomicI32::new(0);
static SIGNAL: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: libc::c_int) {
    SIGNAL.store(signal, Ordering::SeqCst);
    let child = CHILD.load(Ordering::SeqCst);
    if child > 0 {
        // SAFETY: kill is async-signal-safe. The child leads the group.
        unsafe { libc::kill(-child, signal) };
    }
}

const CAUGHT: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// While this exists, SIGINT, SIGTERM and SIGHUP end the running test program. The laboratory
/// itself ends only after it has cleaned up.
pub struct Signals(());

impl Signals {
    /// Starts catching.
    pub fn catch() -> Self {
        handle(note as *const () as libc::sighandler_t);
        Self(())
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        handle(libc::SIG_DFL);
    }
}

fn handle(how: libc::sighandler_t) {
    for signal in CAUGHT {
        // SAFETY: the handler is the default or `note`, which is async-signal-safe.
        unsafe { libc::signal(signal, how) };
    }
}

/// Sets the process that gets signals, which leads a group of its own. 0 after it has ended.
pub fn child(pid: u32) {
    CHILD.store(pid.cast_signed(), Ordering::SeqCst);
    let signal = SIGNAL.load(Ordering::SeqCst);
    if pid != 0 && signal != 0 {
        // The signal came before the process started.
        note(signal);
    }
}

/// Returns an error if a signal asked to stop.
pub fn check_interrupted() -> Result<()> {
    match SIGNAL.load(Ordering::SeqCst) {
        0 => Ok(()),
        signal => Err(Error::Interrupted(signal)),
    }
}
