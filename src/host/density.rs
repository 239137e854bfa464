//! How many machines fit on this host beside their guests' pages, and what runs out first.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::cgroup::{self, Process};
use super::topology;
use vellum_sys::identity;

/// What a machine takes.
#[derive(Clone, Copy)]
struct Need {
    /// Bytes of its processes and of the kernel, beside the guest's pages.
    memory: u64,
    /// Threads. Linux counts each as a task, with a process number.
    tasks: u64,
    /// Open files.
    files: u64,
}

/// What a machine takes without vCPUs. A sandboxed machine is two processes: its own, and the guard
/// of its sockets. This and the following are measured by `tests/fork/many.rs`
/// (`a_machine_takes_no_more_than_is_told`, and the kernel's memory by a control group in
/// `the_kernel_takes_no_more_for_a_machine_than_is_told`), rounded up.
const MACHINE: Need = Need { memory: 3584 << 10, tasks: 5, files: 38 };

/// What each vCPU takes more.
const VCPU: Need = Need { memory: 512 << 10, tasks: 1, files: 2 };

/// What each process that serves a device takes.
const SERVER: Need = Need { memory: 2 << 20, tasks: 2, files: 16 };

/// Bytes that KVM keeps for each GiB of guest memory. Where it has shadow page tables, that is 8 for
/// each page's reverse map, 2 for its write tracking, and some for larger pages: 2,568 KiB by the
/// control group of a machine with 1 and of one with 8 GiB, on Linux 6.18.
const PER_GIB: u64 = 2624 << 10;

/// A machine of which the needs are asked.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Its vCPUs.
    pub vcpus: u64,
    /// The processes that serve its devices: of a shared directory, and of a network without a tap.
    pub servers: u64,
    /// The bytes of its memory.
    pub memory: u64,
}

impl Default for Shape {
    fn default() -> Self {
        Self { vcpus: 1, servers: 0, memory: 256 << 20 }
    }
}

impl Shape {
    fn need(self) -> Need {
        let sum = |of: fn(Need) -> u64| of(MACHINE) + self.vcpus * of(VCPU) + self.servers * of(SERVER);
        let memory = sum(|need| need.memory) + (self.memory * PER_GIB).div_ceil(1 << 30);
        Need { memory, tasks: sum(|need| need.tasks), files: sum(|need| need.files) }
    }
}

/// Something that machines use up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// Its name, with a unit.
    pub name: &'static str,
    /// What limits it.
    pub limit: String,
    /// How much is left.
    pub left: u64,
    /// How much one machine takes.
    pub each: u64,
}

impl Resource {
    /// How many machines there is enough for.
    pub fn machines(&self) -> u64 {
        self.left / self.each
    }
}

/// What machines of this shape use up. Without /proc, some of it is missing.
pub fn resources(shape: Shape) -> Vec<Resource> {
    resources_under(Path::new("/"), shape.need(), identity::effective().0)
}

/// The limit on the tasks of the user `uid`, and how many tasks it has. Root has no such limit.
fn tasks_of(root: &Path, uid: u32) -> Option<(u64, u64)> {
    let limits = fs::read_to_string(root.join("proc/self/limits")).ok().filter(|_| uid != 0)?;
    let most = limits.lines().find_map(|line| line.strip_prefix("Max processes"))?;
    let most = most.split_whitespace().next()?.parse().ok()?;
    let own = fs::read_dir(root.join("proc")).ok()?.filter_map(|entry| {
        let entry = entry.ok().filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok())?;
        let is_own = entry.metadata().ok()?.uid() == uid;
        is_own.then(|| fs::read_dir(entry.path().join("task")).map_or(0, |tasks| tasks.count() as u64))
    });
    Some((most, own.sum()))
}

fn resources_under(root: &Path, need: Need, uid: u32) -> Vec<Resource> {
    let sysctl = |name: &str| fs::read_to_string(root.join("proc/sys").join(name.replace('.', "/"))).ok();
    let numbers =
        |text: String| -> Vec<u64> { text.split_whitespace().filter_map(|word| word.parse().ok()).collect() };
    let number = |name: &str| numbers(sysctl(name)?).first().copied();
    let memory = topology::memory_under(root, Process::default());
    let limit = memory.limited_by.as_ref().map_or("memory".into(), |file| file.display().to_string());
    let (left, each) = (memory.available >> 20, need.memory.div_ceil(1 << 20));
    let mut all = vec![Resource { name: "MiB of memory", limit, left, each }];
    if memory.available == 0 {
        all.clear();
    }
    // /proc/loadavg has the number of tasks behind a slash (proc_loadavg(5)).
    let tasks = fs::read_to_string(root.join("proc/loadavg"))
        .ok()
        .and_then(|text| text.split_whitespace().nth(3)?.split_once('/')?.1.parse::<u64>().ok());
    for name in ["kernel.threads-max", "kernel.pid_max"] {
        if let (Some(most), Some(tasks)) = (number(name), tasks) {
            let left = most.saturating_sub(tasks);
            all.push(Resource { name: "threads", limit: name.into(), left, each: need.tasks });
        }
    }
    if let Some((most, tasks)) = tasks_of(root, uid) {
        let left = most.saturating_sub(tasks);
        all.push(Resource { name: "threads", limit: "ulimit -u".into(), left, each: need.tasks });
    }
    if let Some(limit) = cgroup::pids_limit(root) {
        let (left, limit) = (limit.left(), limit.file.display().to_string());
        all.push(Resource { name: "threads", limit, left, each: need.tasks });
    }
    // Open, unused, most.
    if let Some([open, _, most]) = sysctl("fs.file-nr").map(numbers).as_deref() {
        let left = most.saturating_sub(*open);
        all.push(Resource { name: "open files", limit: "fs.file-max".into(), left, each: need.files });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_told_of_every_limit() {
        let root = std::env::temp_dir().join(format!("vellum-density-{}", std::process::id()));
        let files = [
            ("proc/meminfo", "MemTotal: 4096000 kB\nMemAvailable:    2048000 kB\n"),
            ("proc/loadavg", "0.20 0.18 0.12 1/100 11206\n"),
            ("proc/sys/kernel/threads-max", "1300\n"),
            ("proc/sys/kernel/pid_max", "32768\n"),
            ("proc/sys/fs/file-nr", "1000\t0\t65000\n"),
            ("proc/self/cgroup", "0::/user\n"),
            ("sys/fs/cgroup/user/cgroup.procs", ""),
            ("sys/fs/cgroup/user/pids.max", "max\n"),
            ("sys/fs/cgroup/user/pids.current", "50\n"),
            ("sys/fs/cgroup/pids.max", "650\n"),
            ("sys/fs/cgroup/pids.current", "50\n"),
            ("proc/self/limits", "Max processes             1000                 2000       processes\n"),
            ("proc/17/task/17/comm", ""),
            ("proc/17/task/18/comm", ""),
        ];
        for (name, text) in files {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        // Root has no limit of its own, so another user is taken for the owner.
        let owner = fs::metadata(root.join("proc/17")).unwrap().uid();
        let need = Shape::default().need();
        let found = resources_under(&root, need, 0);
        assert_eq!(tasks_of(&root, 0), None);
        if owner != 0 {
            assert_eq!(tasks_of(&root, owner), Some((1000, 2)));
        }
        assert_eq!(tasks_of(&root, owner + 1), Some((1000, 0)));
        let left: Vec<_> = found.iter().map(|resource| (resource.name, resource.left)).collect();
        let expected = [
            ("MiB of memory", 2000),
            ("threads", 1200),
            ("threads", 32668),
            ("threads", 600),
            ("open files", 64000),
        ];
        assert_eq!(left, expected);
        let first = found.iter().min_by_key(|resource| resource.machines()).unwrap();
        assert_eq!(first.machines(), 600 / need.tasks);
        assert!(first.limit.ends_with("sys/fs/cgroup/pids.max"), "{first:?}");
        assert_eq!(resources_under(&root.join("nothing"), need, 0), []);
        fs::remove_dir_all(root).unwrap();
    }
}
