//! What this host offers.
//!
//! [`facts`] is the short answer that every result carries. `vellum doctor` asks the long questions.

pub mod facts;

pub use facts::{Facts, Paging};
