//! How many machines fit on this host beside their guests' pages, and what runs out first.

use std::fs;
use std::path::Path;

use super::cgroup::{self, Process};
use super::topology;

/// What one machine with one vCPU takes. A sandboxed machine is two processes: its own, and the
/// guard of its sockets.
struct Need {
    /// Bytes of its processes and of the kernel, beside the guest's pages.
    memory: u64,
    /// Threads of both processes. Linux counts each as a task, with a process number.
    tasks: u64,
    /// Open files of both processes.
    files: u64,
}

/// Measured by `tests/fork/many.rs` (`a_machine_takes_no_more_than_is_told`), rounded up.
const NEED: Need = Need { memory: 4 << 20, tasks: 6, files: 40 };

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

/// What machines use up. Without /proc, some of it is missing.
pub fn resources() -> Vec<Resource> {
    resources_under(Path::new("/"))
}

fn resources_under(root: &Path) -> Vec<Resource> {
    let sysctl = |name: &str| fs::read_to_string(root.join("proc/sys").join(name.replace('.', "/"))).ok();
    let numbers =
        |text: String| -> Vec<u64> { text.split_whitespace().filter_map(|word| word.parse().ok()).collect() };
    let number = |name: &str| numbers(sysctl(name)?).first().copied();
    let memory = topology::memory_under(root, Process::default());
    let limit = memory.limited_by.as_ref().map_or("memory".into(), |file| file.display().to_string());
    let (left, each) = (memory.available >> 20, NEED.memory >> 20);
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
            all.push(Resource { name: "threads", limit: name.into(), left, each: NEED.tasks });
        }
    }
    if let Some(limit) = cgroup::pids_limit(root) {
        let (left, limit) = (limit.left(), limit.file.display().to_string());
        all.push(Resource { name: "threads", limit, left, each: NEED.tasks });
    }
    // Open, unused, most.
    if let Some([open, _, most]) = sysctl("fs.file-nr").map(numbers).as_deref() {
        let left = most.saturating_sub(*open);
        all.push(Resource { name: "open files", limit: "fs.file-max".into(), left, each: NEED.files });
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
        ];
        for (name, text) in files {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let found = resources_under(&root);
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
        assert_eq!(first.machines(), 600 / NEED.tasks);
        assert!(first.limit.ends_with("sys/fs/cgroup/pids.max"), "{first:?}");
        assert_eq!(resources_under(&root.join("nothing")), []);
        fs::remove_dir_all(root).unwrap();
    }
}
