//! CPUs and memory: how many, and how they lie.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;

use super::hugepages::Size;
use super::sysfs;
use crate::sys;

/// The CPUs that this process may use.
#[derive(Debug)]
pub struct Cpus {
    /// Their numbers.
    pub allowed: Vec<usize>,
    /// How many CPUs are online.
    pub online: usize,
    /// How many physical cores the allowed ones are on; `None` where the kernel does not say.
    pub cores: Option<usize>,
}

/// Examines the CPUs.
pub fn cpus() -> Cpus {
    let allowed = sys::host::allowed_cpus().unwrap_or_default();
    let online = fs::read_to_string("/sys/devices/system/cpu/online").ok();
    let online = online.and_then(|list| sysfs::list(&list)).map_or(allowed.len(), |cpus| cpus.len());
    let core = |cpu: &usize| {
        // Threads of one core share this list, which is unique where core numbers repeat from socket to socket.
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        sysfs::read(&path, &mut [0; 64]).map(str::to_owned)
    };
    let cores: Option<BTreeSet<String>> = allowed.iter().map(core).collect();
    Cpus { cores: cores.map(|cores| cores.len()), allowed, online }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} online may be used", self.allowed.len(), self.online)?;
        match self.cores {
            Some(1) => write!(f, ", on 1 core"),
            Some(cores) => write!(f, ", on {cores} cores"),
            None => Ok(()),
        }
    }
}

/// Memory in bytes.
#[derive(Debug)]
pub struct Memory {
    /// All of it.
    pub total: u64,
    /// What could be had without swapping, by the kernel's estimate.
    pub available: u64,
}

/// Examines the memory.
pub fn memory() -> Memory {
    let [available] = meminfo(["MemAvailable"]).unwrap_or_default();
    Memory { total: sys::host::total_memory(), available }
}

/// Bytes that the kernel has taken for itself in large pieces and in objects that it cannot give up: what KVM allocates for
/// a memslot is of either kind.
pub fn kernel_memory() -> Option<u64> {
    meminfo(["VmallocUsed", "SUnreclaim"]).map(|both| both.iter().sum())
}

/// Fields of /proc/meminfo (proc_meminfo(5)) that are given in kB, as bytes.
pub(super) fn meminfo<const N: usize>(fields: [&str; N]) -> Option<[u64; N]> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let mut bytes = [0; N];
    for (value, field) in bytes.iter_mut().zip(fields) {
        let of = |line: &str| {
            Some(line.strip_prefix(field)?.strip_prefix(':')?.trim().strip_suffix(" kB")?.trim().to_owned())
        };
        *value = text.lines().find_map(of)?.parse::<u64>().ok()? * 1024;
    }
    Some(bytes)
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| Size(bytes >> 20 << 20);
        write!(f, "{}, {} of it available", mib(self.total), mib(self.available))
    }
}
