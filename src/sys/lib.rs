//! Linux interfaces that no crate wraps. All `unsafe` beyond guest memory is here.
//!
//! Each file wraps one family of calls in functions that cannot be misused. Policy does not live
//! here.

#[cfg(target_env = "musl")]
mod abort;
pub mod affinity;
pub mod clock;
pub mod cr3_cache;
pub mod diagnose;
pub mod dirty;
pub mod file;
pub mod fork;
pub mod guard;
pub mod heap;
pub mod host;
pub mod identity;
pub mod keyvalue;
pub mod kick;
pub mod kvm;
pub mod kvm_debug;
#[cfg(target_arch = "aarch64")]
pub mod kvm_device;
#[cfg(target_arch = "x86_64")]
pub mod kvm_vcpu;
pub mod liveupdate;
pub mod mmap;
pub mod open;
pub mod page_idle;
pub mod pagemap;
pub mod plant;
pub mod poll;
pub mod program;
pub mod quote;
pub mod random;
pub mod seccomp;
pub mod sigbus;
pub mod signal;
pub mod socket;
pub mod tap;
pub mod terminal;
pub mod uffd;
