//! The fuzz targets: functions of bytes that must not panic. `cargo test` calls them with the
//! corpus in `tests/fuzz/corpus`, and `cargo fuzz` through the crate in `tests/fuzz`.

mod control;
mod dtb;
#[cfg(target_arch = "x86_64")]
mod dump;
mod fleet;
#[cfg(target_arch = "x86_64")]
mod gdb;
mod judge;
#[cfg(target_arch = "x86_64")]
mod keyvalue;
#[cfg(target_arch = "x86_64")]
mod loaders;
mod migration;
mod osimage;
#[cfg(target_arch = "x86_64")]
mod pci;
mod qcow2;
mod report;
mod share;
mod snapshot;
#[cfg(target_arch = "x86_64")]
mod state;
mod virtio;

pub use control::control;
pub use dtb::dtb;
#[cfg(target_arch = "x86_64")]
pub use dump::dump;
pub use fleet::fleet;
#[cfg(target_arch = "x86_64")]
pub use gdb::gdb;
pub use judge::judge;
#[cfg(target_arch = "x86_64")]
pub use keyvalue::keyvalue;
#[cfg(target_arch = "x86_64")]
pub use loaders::loaders;
pub use migration::migration;
pub use osimage::osimage;
#[cfg(target_arch = "x86_64")]
pub use pci::pci;
pub use qcow2::qcow2;
pub use report::report;
pub use share::share;
pub use snapshot::snapshot;
#[cfg(target_arch = "x86_64")]
pub use state::{restored, state};
pub use virtio::virtio;
