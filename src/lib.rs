//! Vellum, a lightweight virtual machine monitor for KVM, for people who work on guest memory.

pub mod arch;
pub mod bench;
pub mod cli;
pub mod devices;
pub mod dirty;
pub mod host;
pub mod report;
pub mod sandbox;
pub mod sys;
pub mod vm;
pub mod workload;
