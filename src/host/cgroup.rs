//! Limits that control groups set on memory, huge pages and tasks, in versions 1 and 2
//! (`Documentation/admin-guide/cgroup-v2.rst`, "Memory", "HugeTLB" and "PID").

use std::fs;
use std::path::{Path, PathBuf};

use super::sysfs;

/// One limit that applies to a process.
#[derive(Debug)]
pub struct Limit {
    /// The file that holds it.
    pub file: PathBuf,
    /// Bytes or tasks allowed.
    pub limit: u64,
    /// Bytes or tasks used.
    pub used: u64,
}

impl Limit {
    /// What is left under it.
    pub fn left(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

/// A process, by its name in /proc.
#[derive(Clone, Copy, Debug, Default)]
pub struct Process(Option<u32>);

impl Process {
    /// The process with this number.
    pub fn of(pid: u32) -> Self {
        Self(Some(pid))
    }

    fn directory(self, root: &Path) -> PathBuf {
        let name = self.0.map_or_else(|| "self".to_owned(), |pid| pid.to_string());
        root.join("proc").join(name)
    }
}

/// The memory limit that leaves the least, among the group of the process and its visible ancestors.
/// The page cache does not count as used, because the kernel reclaims it first. `root` is `/`, or a
/// fake root for tests.
pub fn memory_limit(root: &Path, process: Process) -> Option<Limit> {
    let (directory, version) = group_of(root, process, "memory")?;
    let (limit, used, files) = match version {
        Version::One => {
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ["total_active_file ", "total_inactive_file "])
        }
        Version::Two => ("memory.max", "memory.current", ["active_file ", "inactive_file "]),
    };
    let limits = directory.groups().filter_map(|group| {
        let file = group.join(limit);
        // Without a limit, version 1 has the largest possible number of pages here, and version 2
        // has no number.
        let limit = number(&file).filter(|&limit| limit < 1 << 62)?;
        let used = number(&group.join(used))?;
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let field =
            |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        let cache: u64 = files.into_iter().filter_map(field).sum();
        Some(Limit { file, limit, used: used.saturating_sub(cache) })
    });
    limits.min_by_key(Limit::left)
}

/// The limit on this process's tasks that leaves the fewest, as [`memory_limit`].
pub fn pids_limit(root: &Path) -> Option<Limit> {
    let (directory, _) = group_of(root, Process::default(), "pids")?;
    let limits = directory.groups().filter_map(|group| {
        let file = group.join("pids.max");
        // Without a limit it has `max`, which is no number.
        Some(Limit { limit: number(&file)?, used: number(&group.join("pids.current"))?, file })
    });
    limits.min_by_key(Limit::left)
}

/// Every limit on huge pages of `page_size` bytes, from the group of the process up to its highest
/// visible ancestor. `root` is `/`, or a fake root for tests.
pub fn hugetlb_limits(root: &Path, process: Process, page_size: u64) -> Vec<Limit> {
    let Some((directory, version)) = group_of(root, process, "hugetlb") else { return Vec::new() };
    let size = size_name(page_size);
    // `rsvd` limits reservations: beyond it mmap fails. The other limits faults: beyond it an
    // access raises SIGBUS.
    let pairs = match version {
        Version::One => [
            (format!("hugetlb.{size}.limit_in_bytes"), format!("hugetlb.{size}.usage_in_bytes")),
            (format!("hugetlb.{size}.rsvd.limit_in_bytes"), format!("hugetlb.{size}.rsvd.usage_in_bytes")),
        ],
        Version::Two => [
            (format!("hugetlb.{size}.max"), format!("hugetlb.{size}.current")),
            (format!("hugetlb.{size}.rsvd.max"), format!("hugetlb.{size}.rsvd.current")),
        ],
    };
    let mut limits = Vec::new();
    for group in directory.groups() {
        for (limit, used) in &pairs {
            let file = group.join(limit);
            // Version 2 has `max` here without a limit. That is not a number, so it is skipped.
            if let (Some(limit), Some(used)) = (number(&file), number(&group.join(used))) {
                limits.push(Limit { file, limit, used });
            }
        }
    }
    limits
}

#[derive(Clone, Copy, PartialEq)]
enum Version {
    One,
    Two,
}

struct Directory {
    mount: PathBuf,
    own: PathBuf,
}

impl Directory {
    /// The group and its visible ancestors.
    fn groups(&self) -> impl Iterator<Item = &Path> {
        self.own.ancestors().take_while(|group| group.starts_with(&self.mount))
    }
}

/// The directory of the process's group in the hierarchy that has `controller`.
fn group_of(root: &Path, process: Process, controller: &str) -> Option<(Directory, Version)> {
    let groups = sysfs::whole(&process.directory(root).join("cgroup"))?;
    let entry = |version| {
        groups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            let wanted = match version {
                Version::One => controllers.split(',').any(|name| name == controller),
                Version::Two => controllers.is_empty(),
            };
            wanted.then(|| path.to_owned())
        })
    };
    let (path, version) = entry(Version::One)
        .map(|path| (path, Version::One))
        .or_else(|| Some((entry(Version::Two)?, Version::Two)))?;
    // Try the usual place first: the kernel takes longer to list the mounts than for everything
    // else here.
    let mount = match version {
        Version::One => root.join("sys/fs/cgroup").join(controller),
        Version::Two => root.join("sys/fs/cgroup"),
    };
    let own = mount.join(path.trim_start_matches('/'));
    if own.join("cgroup.procs").exists() {
        return Some((Directory { own, mount }, version));
    }
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).ok()?;
    // proc_pid_mountinfo(5): id parent major:minor root mount-point options … - type source
    // super-options
    let (mounted, at) = mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut right = right.split(' ');
        let (kind, options) = (right.next()?, right.nth(1)?);
        let wanted = match version {
            Version::One => kind == "cgroup" && options.split(',').any(|name| name == controller),
            Version::Two => kind == "cgroup2",
        };
        let mut left = left.split(' ').skip(3);
        wanted.then_some((left.next()?, left.next()?))
    })?;
    let mount = root.join(at.trim_start_matches('/'));
    // A container may see only its own part of the hierarchy. The mount's root is then a prefix of
    // the path.
    let own = path.strip_prefix(mounted).unwrap_or(&path).trim_start_matches('/').to_owned();
    Some((Directory { own: mount.join(own), mount }, version))
}

/// A page size in the form that `hugetlb_cgroup.c` uses in file names.
fn size_name(bytes: u64) -> String {
    match bytes {
        1_073_741_824.. => format!("{}GB", bytes >> 30),
        1_048_576.. => format!("{}MB", bytes >> 20),
        _ => format!("{}KB", bytes >> 10),
    }
}

fn number(path: &Path) -> Option<u64> {
    sysfs::whole(path)?.trim().parse().ok()
}
