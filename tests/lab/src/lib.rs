//! Vellum's laboratory: everything that needs more than this host and a Rust toolchain.
//!
//! It is five programs behind one command line (`main.rs`), each in a directory of its own:
//! [`hosts`] boots emulated hosts, [`mod@test`] runs tests here and there, [`kernel`] builds host
//! kernels and checks the series of kernel-patches, [`compare`] measures two kernels, and
//! [`release`] makes the package. What they share lies beside them: [`debian`] fetches packages
//! without installing them, [`artifacts`] has cargo build, [`cache`] keeps what was fetched or
//! built, [`tool`] runs other programs. `README.md` says where a new line belongs.
//!
//! The laboratory depends on `vellum`, never the reverse, and nothing here runs under plain
//! `cargo test` except unit tests: no network, no emulator, no installation.

pub mod architecture;
pub mod artifacts;
pub mod cache;
pub mod chroot;
pub mod compare;
pub mod debian;
pub mod docs;
pub mod error;
pub mod form;
pub mod hosts;
pub mod kernel;
pub mod lanes;
pub mod release;
pub mod test;
pub mod tool;

pub use error::{Error, Result};
