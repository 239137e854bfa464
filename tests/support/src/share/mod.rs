//! Shared directories: mounting one in a test, and the checks of POSIX.

mod checks;
pub mod mount;
pub mod posix;
mod posix_changes;
