//! Host kernels, built here: a base from Debian's source packages, pristine or with series from
//! `kernel-patches/`.
//!
//! [`build`] makes an image and keeps it under a key of all its inputs. All images of a base come
//! from one source tree and one object directory. A series is written into the tree in place
//! ([`tree`]). Only files whose content changes are touched, so make rebuilds only what depends on
//! them. [`series`] reads `kernel-patches/`, and [`bench`](mod@bench) defines a series' commands.
//! [`check`] runs a series' checks: among others that its [`objects`] compile, that its image
//! [`boots`], and that the kernel's own [`selftests`] end as before. [`post`] makes mails of a
//! series. [`explore`](mod@explore) runs KVM's memory code in user space.

pub mod bench;
pub mod boots;
pub mod build;
pub mod check;
pub mod complaints;
pub mod deb;
pub mod explore;
pub mod objects;
pub mod post;
pub mod selftests;
pub mod series;
pub mod tree;
pub mod variants;

use std::path::PathBuf;

use crate::{Error, Result, artifacts};

/// A kernel that series are for.
#[derive(Debug, PartialEq)]
pub struct Base {
    /// The base's name and its directory in `kernel-patches/`.
    pub name: &'static str,
    /// Debian's source package.
    pub package: &'static str,
    /// The suites that have the package.
    pub suites: &'static [&'static str],
    /// The fixed version, if the suite no longer changes.
    pub frozen: Option<&'static str>,
}

/// Every base.
pub const BASES: [Base; 4] = [
    Base { name: "5.10", package: "linux-source-5.10", suites: &["bullseye"], frozen: Some("5.10.223-1") },
    Base {
        name: "6.12",
        package: "linux-source-6.12",
        suites: &["bookworm", "bookworm-security"],
        frozen: None,
    },
    Base { name: "7.2", package: "linux-source-7.2", suites: &["sid"], frozen: None },
    Base { name: "7.3", package: "linux-source-7.3", suites: &["trixie-backports"], frozen: None },
];

impl Base {
    /// The base `name`.
    pub fn named(name: &str) -> Result<&'static Self> {
        BASES.iter().find(|base| base.name == name).ok_or_else(|| {
            let known: Vec<&str> = BASES.iter().map(|base| base.name).collect();
            Error::Usage(format!("no base kernel {name}: {} are known", known.join(", ")))
        })
    }
}

/// Additional needs of kernels for Arm: a compiler, and a C library for the kernel's selftests.
pub const CROSS_PROGRAMS: &[&str] =
    &["aarch64-linux-gnu-gcc-12", "aarch64-linux-gnu-ld", "/usr/aarch64-linux-gnu/include/stdio.h"];

/// What building kernels needs besides the emulated hosts' programs.
pub const PROGRAMS: &[&str] = &[
    "apt-get",
    "dpkg-deb",
    "tar",
    "xz",
    "make",
    "gcc-12",
    "ld",
    "flex",
    "bison",
    "bc",
    "perl",
    "patch",
    "/usr/include/libelf.h",
];

/// The directory of the series.
pub fn series_directory() -> PathBuf {
    artifacts::workspace().join("kernel-patches")
}

/// Prints a check's result.
fn report(what: &str, seen: &str) {
    println!("{what}: {seen}");
}
