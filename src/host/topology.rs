//! CPUs and memory: how many there are, and their topology.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use super::cgroup::{self, Process};
use super::sysfs;
use vellum_sys as sys;

/// The CPUs that this process may use.
#[derive(Debug)]
pub struct Cpus {
    /// Their numbers.
    pub allowed: Vec<usize>,
    /// How many CPUs are online.
    pub online: usize,
    /// The number of physical cores that the allowed CPUs are on; `None` if the kernel does not
    /// report it.
    pub cores: Option<usize>,
}

/// Examines the CPUs.
pub fn cpus() -> Cpus {
    let allowed = sys::host::allowed_cpus().unwrap_or_default();
    let online = fs::read_to_string("/sys/devices/system/cpu/online").ok();
    let online = online.and_then(|list| sysfs::list(&list)).map_or(allowed.len(), |cpus| cpus.len());
    let core = |cpu: &usize| {
        // The threads of one core share this list. It is unique, whereas core numbers repeat from
        // socket to socket.
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

/// A size in bytes, printed with a unit.
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (shift, unit) = match self.0 {
            bytes if bytes >= 1 << 40 && bytes % (1 << 40) == 0 => (40, "TiB"),
            bytes if bytes >= 1 << 30 && bytes % (1 << 30) == 0 => (30, "GiB"),
            bytes if bytes >= 1 << 20 && bytes % (1 << 20) == 0 => (20, "MiB"),
            _ => (10, "KiB"),
        };
        write!(f, "{} {unit}", self.0 >> shift)
    }
}

/// The host's memory in bytes.
#[derive(Debug)]
pub struct HostMemory {
    /// The total.
    pub total: u64,
    /// The memory that this process could get without swapping, by the kernel's estimate; 0 if the
    /// kernel gives none.
    pub available: u64,
    /// The file of the control group's limit, if that limits `available`.
    pub limited_by: Option<PathBuf>,
}

/// Examines the memory.
pub fn memory() -> HostMemory {
    memory_under(Path::new("/"), Process::default())
}

/// The memory that the process `pid` could get.
pub fn memory_of(pid: u32) -> HostMemory {
    memory_under(Path::new("/"), Process::of(pid))
}

pub(super) fn memory_under(root: &Path, process: Process) -> HostMemory {
    let total = sys::host::total_memory();
    let [available] = meminfo_under(root, ["MemAvailable"]).unwrap_or_default();
    match cgroup::memory_limit(root, process) {
        Some(limit) if limit.left() < available => {
            HostMemory { total, available: limit.left(), limited_by: Some(limit.file) }
        }
        _ => HostMemory { total, available, limited_by: None },
    }
}

/// The available memory in bytes in which the kernel can preserve pages (kexec handover). It moves them
/// out of the memory that it keeps for pages that it can move, where its scratch area is. `None` if it
/// is not known.
pub fn preservable() -> Option<u64> {
    preservable_under(Path::new("/"))
}

fn preservable_under(root: &Path) -> Option<u64> {
    let [available] = meminfo_under(root, ["MemAvailable"])?;
    let movable = meminfo_under(root, ["CmaFree"]).map_or(0, |[free]| free);
    let host = available.saturating_sub(movable);
    Some(cgroup::memory_limit(root, Process::default()).map_or(host, |limit| host.min(limit.left())))
}

/// Bytes that the kernel uses in vmalloc areas and in unreclaimable slabs. KVM's allocations for a
/// memslot are of either kind.
pub fn kernel_memory() -> Option<u64> {
    meminfo(["VmallocUsed", "SUnreclaim"]).map(|both| both.iter().sum())
}

/// Fields of /proc/meminfo (proc_meminfo(5)) that are in kB, converted to bytes.
pub(super) fn meminfo<const N: usize>(fields: [&str; N]) -> Option<[u64; N]> {
    meminfo_under(Path::new("/"), fields)
}

fn meminfo_under<const N: usize>(root: &Path, fields: [&str; N]) -> Option<[u64; N]> {
    let text = sysfs::whole(&root.join("proc/meminfo"))?;
    let mut bytes = [0; N];
    for (value, field) in bytes.iter_mut().zip(fields) {
        let of = |line: &str| {
            let kib = line.strip_prefix(field)?.strip_prefix(':')?.trim().strip_suffix(" kB")?;
            kib.trim().parse::<u64>().ok()
        };
        *value = text.lines().find_map(of)? * 1024;
    }
    Some(bytes)
}

impl fmt::Display for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| Size(bytes >> 20 << 20);
        write!(f, "{}, {} of it available", mib(self.total), mib(self.available))?;
        self.limited_by.as_ref().map_or(Ok(()), |file| write!(f, " under {}", file.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fake root of a host with 1000 MiB available, removed at the end.
    struct Picture(PathBuf);

    impl Picture {
        fn new(test: &str) -> Self {
            let root = std::env::temp_dir().join(format!("vellum-memory-{}-{test}", std::process::id()));
            let picture = Self(root);
            picture.write("proc/meminfo", "MemTotal:  2048000 kB\nMemAvailable:  1024000 kB\n");
            picture
        }

        fn write(&self, path: &str, text: impl ToString) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text.to_string()).unwrap();
        }

        fn available(&self) -> (u64, Option<PathBuf>) {
            let memory = memory_under(&self.0, Process::default());
            (memory.available >> 20, memory.limited_by.map(|file| file.strip_prefix(&self.0).unwrap().into()))
        }
    }

    impl Drop for Picture {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn without_a_group_the_host_has_what_it_says() {
        assert_eq!(Picture::new("none").available(), (1000, None));
    }

    #[test]
    fn a_group_of_version_2_and_those_above_it_limit() {
        let host = Picture::new("two");
        host.write("proc/self/cgroup", "0::/a/b\n");
        host.write("proc/self/mountinfo", "31 2 0:28 / /cg rw shared:1 - cgroup2 none rw\n");
        host.write("cg/a/b/memory.max", "max\n");
        host.write("cg/a/b/memory.current", 0);
        assert_eq!(host.available(), (1000, None));
        host.write("cg/a/memory.max", 64 << 20);
        host.write("cg/a/memory.current", 20 << 20);
        host.write(
            "cg/a/memory.stat",
            format!("anon 1\ninactive_file {}\nactive_file {}\n", 8 << 20, 2 << 20),
        );
        assert_eq!(host.available(), (54, Some("cg/a/memory.max".into())));
        // A group with more room than the host has does not matter.
        host.write("cg/a/memory.max", 1u64 << 40);
        assert_eq!(host.available(), (1000, None));
    }

    /// A machine's memory is charged to its own group, and not to that of whoever asks.
    #[test]
    fn each_process_has_the_limits_of_its_group() {
        let host = Picture::new("other");
        host.write("proc/self/cgroup", "0::/a\n");
        host.write("proc/77/cgroup", "0::/b\n");
        host.write("proc/self/mountinfo", "31 2 0:28 / /cg rw shared:1 - cgroup2 none rw\n");
        for (group, mib) in [("a", 200u64), ("b", 100)] {
            host.write(&format!("cg/{group}/memory.max"), mib << 20);
            host.write(&format!("cg/{group}/memory.current"), 0);
        }
        assert_eq!(host.available().0, 200);
        assert_eq!(memory_under(&host.0, Process::of(77)).available >> 20, 100);
        assert_eq!(memory_under(&host.0, Process::of(78)).available >> 20, 1000);
    }

    /// What a control group's limit leaves has nothing to do with where the host's free memory is.
    #[test]
    fn memory_for_pages_that_move_cannot_be_preserved() {
        let host = Picture::new("movable");
        assert_eq!(preservable_under(&host.0), Some(1000 << 20));
        let movable = |kb: u32| {
            host.write("proc/meminfo", format!("MemAvailable: 1024000 kB\nCmaFree: {kb} kB\n"));
        };
        movable(1000 << 10);
        assert_eq!(preservable_under(&host.0), Some(0));
        movable(400 << 10);
        assert_eq!(preservable_under(&host.0), Some(600 << 20));
        host.write("proc/self/cgroup", "0::/a\n");
        host.write("proc/self/mountinfo", "31 2 0:28 / /cg rw shared:1 - cgroup2 none rw\n");
        host.write("cg/a/memory.max", 64 << 20);
        host.write("cg/a/memory.current", 20 << 20);
        assert_eq!(preservable_under(&host.0), Some(44 << 20));
        host.write("proc/meminfo", "MemTotal: 2048000 kB\n");
        assert_eq!(preservable_under(&host.0), None);
    }

    #[test]
    fn a_group_of_version_1_limits() {
        let host = Picture::new("one");
        host.write("proc/self/cgroup", "4:memory:/box/a\n0::/\n");
        host.write("proc/self/mountinfo", "31 2 0:28 /box /cg/m rw - cgroup none rw,memory\n");
        host.write("cg/m/a/memory.limit_in_bytes", 64 << 20);
        host.write("cg/m/a/memory.usage_in_bytes", 16 << 20);
        host.write("cg/m/a/memory.stat", format!("inactive_file 1\ntotal_inactive_file {}\n", 4 << 20));
        // Version 1 has a number here even without a limit.
        host.write("cg/m/memory.limit_in_bytes", 9_223_372_036_854_771_712u64);
        host.write("cg/m/memory.usage_in_bytes", 1u64 << 30);
        assert_eq!(host.available(), (52, Some("cg/m/a/memory.limit_in_bytes".into())));
        // The usual place, which is checked first.
        host.write("sys/fs/cgroup/memory/box/a/cgroup.procs", "");
        host.write("sys/fs/cgroup/memory/box/a/memory.limit_in_bytes", 32 << 20);
        host.write("sys/fs/cgroup/memory/box/a/memory.usage_in_bytes", 0);
        assert_eq!(host.available(), (32, Some("sys/fs/cgroup/memory/box/a/memory.limit_in_bytes".into())));
    }
}
