//! A shared directory: how a test mounts it, and what POSIX says of it.

mod checks;
pub mod mount;
pub mod posix;
mod posix_changes;
