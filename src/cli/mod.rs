//! The command line: one file a subcommand; arguments only, no work.

pub mod report;
