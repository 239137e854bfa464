//! The programs of other projects that judge what Vellum writes for them: from PyPI, each at a
//! version, in a virtual environment; from Debian, lava-common; and the parser of KTAP out of the
//! kernel's source. All lie in one entry of the cache.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::setup;
use super::tally::Tally;
use crate::architecture::Architecture;
use crate::cache::{Cache, digest};
use crate::debian::{self, Archive};
use crate::kernel::Base;
use crate::kernel::tree::Tree;
use crate::{Error, Result, tool};

/// Which tells a test program where they are.
pub const VARIABLE: &str = "VELLUM_READERS";

/// From PyPI. The last two are lava-common's.
const PINNED: [&str; 6] = [
    "junitparser==5.0.3",
    "kcidb-io==141",
    "tap.py==3.2.1",
    "tmt==1.78.0",
    "PyYAML==6.0.4",
    "voluptuous==0.13.1",
];

/// Whose source has the parser of KTAP.
const KERNEL: &str = "6.12";

fn name() -> String {
    format!("readers/{}", digest(PINNED.iter().map(|pin| pin.as_bytes())))
}

/// Where they are, if they are.
pub fn find() -> Option<PathBuf> {
    let dir = Cache::open().ok()?.path(&name());
    dir.is_dir().then_some(dir)
}

/// Fetches what is missing; what cannot be had the test programs name themselves.
pub fn prepare(tally: &mut Tally) {
    if let Err(error) = fetch() {
        tally.show(&format!("lab: without the readers of other projects: {error}"));
    }
}

fn fetch() -> Result<()> {
    if find().is_some() {
        return Ok(());
    }
    // Its package has no program of its own: the module that makes environments needs it.
    let ensurepip = Command::new("python3").args(["-c", "import ensurepip"]).output();
    if !ensurepip.is_ok_and(|output| output.status.success()) && setup::is_root() {
        setup::install(&BTreeSet::from(["python3-venv"]))?;
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

/// The virtual environment. It is moved when it is whole, so that its programs are called as
/// modules: their first lines name the place where they were installed.
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
