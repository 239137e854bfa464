//! What this host offers.
//!
//! [`facts`] is the short form that every result carries. [`doctor`] is the long form that `vellum
//! doctor` prints. Both use the other files.

pub mod block;
mod cgroup;
mod cpu;
pub mod cr3_cache;
pub mod density;
pub mod doctor;
pub mod facts;
pub mod hugepages;
pub mod idle;
pub mod kvm;
pub mod live_update;
#[cfg(target_arch = "aarch64")]
mod stage2;
mod sysfs;
pub mod topology;

use std::fmt::Display;
use std::path::Path;

use vellum_sys as sys;

pub use facts::{Facts, Paging};

/// The command that writes `value` into `file`, in the form that this user has to type.
fn root_command(value: impl Display, file: &Path) -> String {
    let file = file.display();
    if sys::host::is_root() {
        format!("echo {value} > {file}")
    } else {
        format!("echo {value} | sudo tee {file}")
    }
}
