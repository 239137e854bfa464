//! Host kernels, built here: a base from Debian's source packages, pristine or with series from
//! `kernel-patches/`.
//!
//! [`build`] makes an image and keeps it, keyed by everything that went into it. All images of a
//! base come from one source tree and one object directory: a series is written into the tree in
//! place ([`tree`]), touching only the files whose content changes, so that make rebuilds only what
//! depends on them. [`series`] reads `kernel-patches/`, [`bench`](mod@bench) is what shows a
//! series, and [`check`] holds a series to what its directory promises: that its [`objects`]
//! compile, that the image [`boots`], and leaves the kernel's own [`selftests`] as they were, among
//! other things. [`post`] makes mails of one. [`explore`](mod@explore) runs KVM's memory code in
//! user space.

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

/// A kernel that series are written against.
#[derive(Debug, PartialEq)]
pub struct Base {
    /// Its name, which is also its directory in `kernel-patches/`.
    pub name: &'static str,
    /// Debian's source package.
    pub package: &'static str,
    /// Where that is.
    pub suites: &'static [&'static str],
    /// The version, where the suite has stopped moving.
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
    /// By name.
    pub fn named(name: &str) -> Result<&'static Self> {
        BASES.iter().find(|base| base.name == name).ok_or_else(|| {
            let known: Vec<&str> = BASES.iter().map(|base| base.name).collect();
            Error::Usage(format!("no base kernel {name}: {} are known", known.join(", ")))
        })
    }
}

/// What the building of kernels for Arm calls beside that: the compiler, and a C library for the
/// kernel's selftests.
pub const CROSS_PROGRAMS: &[&str] =
    &["aarch64-linux-gnu-gcc-12", "aarch64-linux-gnu-ld", "/usr/aarch64-linux-gnu/include/stdio.h"];

/// What the building of kernels calls, beyond what the emulated hosts need.
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

/// Where the series are.
pub fn series_directory() -> PathBuf {
    artifacts::workspace().join("kernel-patches")
}

/// Says what one step has seen.
fn report(what: &str, seen: &str) {
    println!("{what}: {seen}");
}
