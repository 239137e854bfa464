//! What this host offers.
//!
//! [`facts`] is the short answer that every result carries. `vellum doctor` asks the long questions.

mod cpu;
pub mod facts;
mod sysfs;

pub use facts::{Facts, Paging};
