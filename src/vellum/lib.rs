//! The `vellum` program: its command line ([`cli`]) and the process around a machine ([`session`]).
//!
//! All else is in the crates beside this one. ARCHITECTURE.md has the map.

pub mod cli;
pub mod session;
