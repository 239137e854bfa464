//! Vellum's laboratory: everything that needs more than this host and a Rust toolchain.
//!
//! It is six programs behind one command line (`main.rs`), each in its own directory: [`hosts`]
//! boots emulated hosts, [`mod@test`] runs tests on this machine and on hosts, [`kernel`] builds
//! host kernels and checks the series of kernel-patches, [`compare`] measures two kernels,
//! [`history`] runs the same commands on every kernel of Debian's, and [`release`] makes the
//! package. They share the modules beside them: [`debian`] fetches packages
//! without installing them, [`artifacts`] builds with cargo, [`cache`] keeps fetched and built
//! files, [`tool`] runs other programs. `README.md` says where a change belongs.
//!
//! The laboratory depends on `vellum`, never the reverse. Plain `cargo test` runs only its unit
//! tests: no network, no emulator, no installation.

pub mod architecture;
pub mod artifacts;
pub mod cache;
pub mod chroot;
pub mod compare;
pub mod debian;
pub mod docs;
pub mod error;
pub mod form;
pub mod history;
pub mod hosts;
pub mod kernel;
pub mod lanes;
pub mod release;
pub mod test;
pub mod tool;

pub use error::{Error, Result};
