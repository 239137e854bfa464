//! Debian's Slurm, unpacked into the cache for the tests of fleets. It is not installed, so no
//! service starts.

use std::fs;
use std::path::PathBuf;

use super::tally::Tally;
use crate::architecture::Architecture;
use crate::cache::Cache;
use crate::debian::{self, Archive};
use crate::{Error, Result};

/// The variable that tells a test program where it is.
pub const VARIABLE: &str = "VELLUM_SLURM";

/// The daemons, the clients, and their libraries besides the C library. Installed packages would
/// also add /etc, users and services.
const PACKAGES: [&str; 14] = [
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "libdbus-1-3",
    "libhwloc15",
    "libjson-c5",
    "libltdl7",
    "liblz4-1",
    "libmunge2",
    "libnuma1",
    "libreadline8",
    "libyaml-0-2",
    "liblua5.1-0",
];

/// The name of its version's record.
const RECORD: &str = "slurmctld";

const SUITES: &[&str] = &["bookworm", "bookworm-security"];

/// The tools that make namespaces.
pub const TOOLS: [&str; 3] = ["unshare", "ip", "mount"];

/// Its directory, if it exists.
pub fn find() -> Option<PathBuf> {
    let cache = Cache::open().ok()?;
    let record = fs::read(cache.path(&format!("resolved/{RECORD}.json"))).ok()?;
    let package: debian::Package = serde_json::from_slice(&record).ok()?;
    Some(cache.path(&name(&package))).filter(|dir| dir.is_dir())
}

fn name(package: &debian::Package) -> String {
    format!("debian/slurm-wlm_{}", package.version)
}

/// Fetches it. The test program reports if it is missing.
pub fn prepare(tally: &mut Tally) {
    if let Err(error) = fetch() {
        tally.show(&format!("lab: without Slurm: {error}"));
    }
}

fn fetch() -> Result<PathBuf> {
    let cache = Cache::open()?;
    let archive = || Archive::open(&cache, Architecture::X86, SUITES);
    let package = debian::recorded(&cache, RECORD, || archive()?.resolve(RECORD))?;
    cache.entry(&name(&package), |dir| {
        cache.need_mib(100)?;
        let archive = archive()?;
        PACKAGES.iter().try_for_each(|part| {
            let deb = archive.download(&archive.resolve(part)?, dir)?;
            debian::unpack(&deb, dir)?;
            fs::remove_file(&deb).map_err(Error::file("remove", &deb))
        })
    })
}
