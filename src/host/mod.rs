//! What this host offers.
//!
//! [`facts`] is the short answer that every result carries. `vellum doctor` asks the long questions.

mod cgroup;
mod cpu;
pub mod facts;
pub mod hugepages;
mod sysfs;

use std::fmt::Display;
use std::path::Path;

use crate::sys;

pub use facts::{Facts, Paging};

/// The command that writes `value` into `file`, as this user has to type it.
fn root_command(value: impl Display, file: &Path) -> String {
    let file = file.display();
    if sys::host::is_root() {
        format!("echo {value} > {file}")
    } else {
        format!("echo {value} | sudo tee {file}")
    }
}
