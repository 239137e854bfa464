//! Other projects' programs that validate Vellum's output: packages of PyPI at fixed versions in a
//! virtual environment, Debian's lava-common, and the KTAP parser of the kernel's source. All are
//! in one cache entry.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::setup;
use super::tally::Tally;
use crate::architecture::Architecture;
use crate::cache::{Cache, digest};
use crate::debian::{self, Archive};
use crate::hosts::doctor;
use crate::kernel::Base;
use crate::kernel::tree::Tree;
use crate::{Error, Result, tool};

/// The variable that tells test programs where they are.
pub const VARIABLE: &str = "VELLUM_READERS";

/// Packages of PyPI. lava-common needs the last two.
const PINNED: [&str; 6] = [
    "junitparser==5.0.3",
    "kcidb-io==141",
    "tap.py==3.2.1",
    "tmt==1.78.0",
    "PyYAML==6.0.4",
    "voluptuous==0.13.1",
];

/// The base whose source has the KTAP parser.
const KERNEL: &str = "6.12";

fn name() -> String {
    format!("readers/{}", digest(PINNED.iter().map(|pin| pin.as_bytes())))
}

/// Their directory, if it exists.
pub fn find() -> Option<PathBuf> {
    let dir = Cache::open().ok()?.path(&name());
    dir.is_dir().then_some(dir)
}

/// Fetches them if need be. Test programs report what is missing.
pub fn prepare(tally: &mut Tally) {
    if let Err(error) = fetch() {
        tally.show(&format!("lab: without the readers of other projects: {error}"));
    }
}

fn fetch() -> Result<()> {
    if find().is_some() {
        return Ok(());
    }
    let mut lacking = doctor::missing(&["tar", "xz"]);
    // python3-venv has no program to look for. The venv module needs its ensurepip.
    let ensurepip = Command::new("python3").args(["-c", "import ensurepip"]).output();
    if !ensurepip.is_ok_and(|output| output.status.success()) {
        lacking.insert("python3-venv");
    }
    if !lacking.is_empty() && setup::is_root() {
        setup::install(&lacking)?;
    }
    let cache = Cache::open()?;
    cache.need_mib(512)?;
    let tree = Tree::open(&cache, Base::named(KERNEL)?)?;
    cache.entry(&name(), |dir| {
        environment(dir)?;
        let (from, to) = (tree.source.join("tools/testing/kunit"), dir.join("kunit"));
        fs::create_dir(&to).map_err(Error::file("create", &to))?;
        for file in ["kunit_parser.py", "kunit_printer.py"] {
            fs::copy(from.join(file), to.join(file)).map_err(Error::file("copy", from.join(file)))?;
        }
        let archive = Archive::open(&cache, Architecture::X86, &["bookworm", "bookworm-security"])?;
        let deb = archive.download(&archive.resolve("lava-common")?, dir)?;
        debian::unpack(&deb, &dir.join("lava"))?;
        fs::remove_file(&deb).map_err(Error::file("remove", &deb))
    })?;
    Ok(())
}

/// Makes the virtual environment. It is moved when it is complete, so its programs must be called
/// as modules: their first lines name the original path.
fn environment(dir: &Path) -> Result<()> {
    eprintln!("lab: installing {}", PINNED.join(" "));
    let venv = dir.join("venv");
    tool::output(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    let pip = |arguments: &[&str]| {
        let mut command = Command::new(venv.join("bin/python"));
        command.args(["-m", "pip", "--quiet", "--disable-pip-version-check", "install"]).args(arguments);
        tool::output(&mut command).map(drop)
    };
    pip(&PINNED)
}
