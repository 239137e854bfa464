//! Vellum's laboratory: everything that needs more than this host and a Rust toolchain.
//!
//! A *bed* is a host kernel with its KVM. `svm` and `vmx` are emulated hosts, booted by this crate from Debian's
//! packages or from a kernel built here; `local` and `metal` are the machine it runs on. Start reading in [`bed`]:
//! a [`wire::Job`] goes in, an [`bed::Outcome`] comes back. [`debian`] fetches packages without installing them,
//! [`cache`] keeps what was fetched or built, [`initramfs`] packs what an emulated host sees, and [`wire`] is what it
//! says to us. `src/bin/bed-init.rs` is that host's first process.
//!
//! The laboratory depends on `vellum`, never the reverse, and nothing here runs under plain `cargo test` except unit
//! tests: no network, no emulator, no installation.

pub mod architecture;
pub mod artifacts;
pub mod bed;
pub mod cache;
pub mod chroot;
pub mod compare;
pub mod debian;
pub mod doctor;
pub mod error;
pub mod form;
pub mod fresh;
pub mod guest;
pub mod initramfs;
pub mod kernel;
pub mod kvm_unit_tests;
pub mod lanes;
pub mod parameter;
pub mod release;
pub mod speed;
pub mod test;
pub mod tool;
pub mod wire;

pub use error::{Error, Result};
