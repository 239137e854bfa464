//! Huge pages: the sizes that the host has, the number of free pages, and whether they suffice for
//! a guest's memory.
//!
//! [`check`] is called before any memory is mapped, because a huge page that is missing later
//! causes a SIGBUS. It is a forecast, not a promise: another process may take the pages in between.
//! Code that populates the memory still has to expect failure.

use std::fs;
use std::path::{Path, PathBuf};

use super::cgroup::{self, Process};
use super::topology::{self, Size};
use super::{root_command, sysfs};
use vellum_sys as sys;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// Why there are not enough huge pages, and the command that helps.
#[derive(Debug, thiserror::Error)]
pub enum Shortage {
    /// The kernel has no huge pages of this size.
    #[error(
        "this host has no huge pages of {}{}; choose another backing", Size(*page_size), available(sizes)
    )]
    NoSuchSize {
        /// The requested size, in bytes.
        page_size: u64,
        /// The available sizes, in bytes.
        sizes: Vec<u64>,
    },
    /// The pool is too small.
    #[error(
        "{missing} huge page{} of {} {} missing: {needed} needed, {free} free{}; get them with: {command}{}",
        plural(*missing), Size(*page_size), if *missing == 1 { "is" } else { "are" }, of_nodes(nodes),
        at_boot(*page_size, *needed)
    )]
    Pool {
        /// The page size in bytes.
        page_size: u64,
        /// The number of pages that the guest needs.
        needed: u64,
        /// The number of pages that it could get now.
        free: u64,
        /// `needed - free`.
        missing: u64,
        /// The nodes that this process may allocate from, unless it may use all of them.
        nodes: Option<Vec<u32>>,
        /// The command that adds the missing pages.
        command: String,
    },
    /// A control group's limit is too low.
    #[error(
        "{missing} huge page{} of {} more than the control group allows: {needed} needed, {free} left under {}; raise \
         the limit with: {command}",
        plural(*missing), Size(*page_size), file.display()
    )]
    Cgroup {
        /// The page size in bytes.
        page_size: u64,
        /// The number of pages that the guest needs.
        needed: u64,
        /// The number of pages left under the limit.
        free: u64,
        /// `needed - free`.
        missing: u64,
        /// The file that holds the limit.
        file: PathBuf,
        /// The command that raises the limit.
        command: String,
    },
}

impl Diagnose for Shortage {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::user(Field::Backing).lacking()
    }
}

impl Shortage {
    /// The command that helps, if there is one.
    pub fn command(&self) -> Option<&str> {
        match self {
            Self::NoSuchSize { .. } => None,
            Self::Pool { command, .. } | Self::Cgroup { command, .. } => Some(command),
        }
    }
}

/// The huge pages of one size, on one node or on the whole host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// The page size in bytes.
    pub page_size: u64,
    /// The node; `None` for the whole host.
    pub node: Option<u32>,
    /// The number of pages in the pool.
    pub total: u64,
    /// Pages that are not mapped, including reserved ones.
    pub free: u64,
    /// Free pages that are reserved for existing mappings. The kernel counts them only for the
    /// whole host.
    pub reserved: u64,
    /// Pages that the kernel may still add on demand (`nr_overcommit_hugepages`), for the whole
    /// host only.
    pub on_demand: u64,
}

/// Checks that this process can get `bytes` of guest memory on huge pages of `page_size` bytes. The
/// check covers the nodes that its memory policy and cpuset allow, its control groups' limits, and
/// other processes' reservations.
pub fn check(page_size: u64, bytes: u64) -> Result<(), Shortage> {
    shortages(page_size, bytes).into_iter().next().map_or(Ok(()), Err)
}

/// All shortages for the same request. [`check`] returns the first.
pub(crate) fn shortages(page_size: u64, bytes: u64) -> Vec<Shortage> {
    shortages_under(Path::new("/"), Process::default(), sys::host::bound_nodes(), page_size, bytes)
}

/// The sizes in bytes that the kernel supports, in ascending order.
pub fn sizes() -> Vec<u64> {
    sizes_under(Path::new("/"))
}

/// How many pages of this size this process may have.
pub fn free(page_size: u64) -> u64 {
    free_to(Process::default(), page_size)
}

/// How many pages of this size the process `pid` may have, if it may use the same nodes as this one.
pub fn free_of(pid: u32, page_size: u64) -> u64 {
    free_to(Process::of(pid), page_size)
}

fn free_to(process: Process, page_size: u64) -> u64 {
    // More than any host has. The resulting shortage then says how many there are.
    let shortages = shortages_under(Path::new("/"), process, sys::host::bound_nodes(), page_size, 1 << 62);
    let free = |shortage: &Shortage| match shortage {
        Shortage::Pool { free, .. } | Shortage::Cgroup { free, .. } => *free,
        _ => 0,
    };
    shortages.iter().map(free).min().unwrap_or(u64::MAX)
}

/// The default size in bytes of MAP_HUGETLB; `None` if the kernel has no huge pages.
pub fn default_size() -> Option<u64> {
    topology::meminfo(["Hugepagesize"]).map(|[bytes]| bytes)
}

/// The pools of every size, for the whole host and then for each node.
pub(crate) fn pools() -> Vec<Pool> {
    let root = Path::new("/");
    let nodes = nodes_under(root);
    let pools_of = |size| {
        let of_nodes = nodes.iter().filter_map(move |&node| pool_under(root, size, Some(node)));
        pool_under(root, size, None).into_iter().chain(of_nodes)
    };
    sizes_under(root).into_iter().flat_map(pools_of).collect()
}

fn shortages_under(
    root: &Path,
    process: Process,
    bound: Option<Vec<u32>>,
    page_size: u64,
    bytes: u64,
) -> Vec<Shortage> {
    let needed = bytes.div_ceil(page_size);
    let Some(pool) = pool_under(root, page_size, None) else {
        return vec![Shortage::NoSuchSize { page_size, sizes: sizes_under(root) }];
    };
    let mut shortages = Vec::new();
    let nodes = nodes_under(root);
    let allowed = allowed_nodes(root, &nodes, bound.as_deref());
    // Reservations name no node. So on a subset of the nodes, they are counted against the whole
    // host, and the nodes' free pages are checked separately.
    let everywhere = pool.free.saturating_sub(pool.reserved) + pool.on_demand;
    let on_allowed = match &allowed {
        Some(allowed) => {
            let free = |&node: &u32| pool_under(root, page_size, Some(node)).map_or(0, |pool| pool.free);
            allowed.iter().map(free).sum::<u64>() + pool.on_demand
        }
        None => u64::MAX,
    };
    let free = everywhere.min(on_allowed);
    if needed > free {
        let missing = needed - free;
        // All of them on one allowed node, because the host's own file spreads them over nodes that
        // do not help.
        let node = allowed.as_ref().and_then(|nodes| nodes.first().copied());
        let total = pool_under(root, page_size, node).map_or(0, |pool| pool.total);
        let file = pool_directory(Path::new("/"), page_size, node).join("nr_hugepages");
        let command = root_command(total + missing, &file);
        shortages.push(Shortage::Pool { page_size, needed, free, missing, nodes: allowed, command });
    }
    for limit in cgroup::hugetlb_limits(root, process, page_size) {
        let free = limit.left() / page_size;
        if needed > free {
            let wanted = limit.used.next_multiple_of(page_size).saturating_add(needed * page_size);
            let command = root_command(wanted, &limit.file);
            shortages.push(Shortage::Cgroup {
                page_size,
                needed,
                free,
                missing: needed - free,
                file: limit.file,
                command,
            });
        }
    }
    shortages
}

/// The nodes that this process may allocate from; `None` if it may use every node.
fn allowed_nodes(root: &Path, nodes: &[u32], bound: Option<&[u32]>) -> Option<Vec<u32>> {
    let status = fs::read_to_string(root.join("proc/self/status")).unwrap_or_default();
    let cpuset = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"));
    let cpuset = cpuset.and_then(sysfs::list);
    let is_allowed = |node: &u32| {
        cpuset.as_ref().is_none_or(|list| list.contains(node)) && bound.is_none_or(|list| list.contains(node))
    };
    let allowed: Vec<u32> = nodes.iter().copied().filter(is_allowed).collect();
    (allowed.len() < nodes.len()).then_some(allowed)
}

fn sizes_under(root: &Path) -> Vec<u64> {
    let Ok(entries) = fs::read_dir(root.join("sys/kernel/mm/hugepages")) else { return Vec::new() };
    let size =
        |name: &str| Some(name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok()? * 1024);
    let mut sizes: Vec<u64> =
        entries.flatten().filter_map(|entry| size(entry.file_name().to_str()?)).collect();
    sizes.sort_unstable();
    sizes
}

/// The nodes that have memory; empty if the kernel has no nodes.
fn nodes_under(root: &Path) -> Vec<u32> {
    let list = fs::read_to_string(root.join("sys/devices/system/node/has_memory")).unwrap_or_default();
    sysfs::list(&list).unwrap_or_default()
}

fn pool_directory(root: &Path, page_size: u64, node: Option<u32>) -> PathBuf {
    let name = format!("hugepages-{}kB", page_size / 1024);
    match node {
        Some(node) => root.join(format!("sys/devices/system/node/node{node}/hugepages")).join(name),
        None => root.join("sys/kernel/mm/hugepages").join(name),
    }
}

fn pool_under(root: &Path, page_size: u64, node: Option<u32>) -> Option<Pool> {
    let directory = pool_directory(root, page_size, node);
    let number = |file| fs::read_to_string(directory.join(file)).ok()?.trim().parse::<u64>().ok();
    let on_demand = number("nr_overcommit_hugepages").unwrap_or(0);
    Some(Pool {
        page_size,
        node,
        total: number("nr_hugepages")?,
        free: number("free_hugepages")?,
        reserved: number("resv_hugepages").unwrap_or(0),
        on_demand: on_demand.saturating_sub(number("surplus_hugepages").unwrap_or(0)),
    })
}

fn plural(count: u64) -> &'static str {
    if count == 1 { "" } else { "s" }
}

fn available(sizes: &[u64]) -> String {
    let names: Vec<String> = sizes.iter().map(|&size| Size(size).to_string()).collect();
    if names.is_empty() { String::new() } else { format!(" (it has {})", names.join(", ")) }
}

fn of_nodes(nodes: &Option<Vec<u32>>) -> String {
    let Some(nodes) = nodes else { return String::new() };
    let names: Vec<String> = nodes.iter().map(u32::to_string).collect();
    format!(" on node{} {}, where this process may allocate", plural(names.len() as u64), names.join(","))
}

/// A host that has been up for a while seldom has gigabytes of contiguous memory.
fn at_boot(page_size: u64, needed: u64) -> String {
    if page_size < 1 << 30 {
        return String::new();
    }
    format!(
        " (or, where memory is too fragmented, boot with hugepagesz={}G hugepages={needed})",
        page_size >> 30
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A fake root with a host's files, removed at the end.
    struct Picture(PathBuf);

    impl Picture {
        /// Two nodes with 6 and 2 pages of 2 MiB. Of these 5 and 1 are free, and one free page is
        /// reserved.
        fn new(test: &str) -> Self {
            let root = std::env::temp_dir().join(format!("vellum-hugepages-{}-{test}", std::process::id()));
            let picture = Self(root);
            picture.write("sys/devices/system/node/has_memory", "0-1\n");
            picture.pool("sys/kernel/mm/hugepages", 8, 6);
            picture.write("sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "1\n");
            picture.pool("sys/devices/system/node/node0/hugepages", 6, 5);
            picture.pool("sys/devices/system/node/node1/hugepages", 2, 1);
            picture
        }

        fn pool(&self, directory: &str, total: u64, free: u64) {
            self.write(&format!("{directory}/hugepages-2048kB/nr_hugepages"), &format!("{total}\n"));
            self.write(&format!("{directory}/hugepages-2048kB/free_hugepages"), &format!("{free}\n"));
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn check(&self, bound: Option<Vec<u32>>, mib: u64) -> Result<(), Shortage> {
            shortages_under(&self.0, Process::default(), bound, 2 * MIB, mib * MIB)
                .into_iter()
                .next()
                .map_or(Ok(()), Err)
        }
    }

    impl Drop for Picture {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn promised_pages_are_not_free() {
        let host = Picture::new("promised");
        assert!(host.check(None, 10).is_ok());
        let shortage = host.check(None, 16).unwrap_err();
        let Shortage::Pool { needed: 8, free: 5, missing: 3, nodes: None, command, .. } = &shortage else {
            panic!("{shortage:?}")
        };
        assert!(command.contains("echo 11 ") && command.contains("/sys/kernel/mm/hugepages/"), "{command}");
        assert!(
            shortage
                .to_string()
                .starts_with("3 huge pages of 2 MiB are missing: 8 needed, 5 free; get them with")
        );
    }

    #[test]
    fn pages_on_demand_count() {
        let host = Picture::new("demand");
        host.write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages", "4\n");
        host.write("sys/kernel/mm/hugepages/hugepages-2048kB/surplus_hugepages", "1\n");
        assert!(host.check(None, 16).is_ok());
        assert!(host.check(None, 18).is_err());
    }

    #[test]
    fn memory_policy_and_cpuset_narrow_the_nodes() {
        let host = Picture::new("nodes");
        let shortage = host.check(Some(vec![1]), 4).unwrap_err();
        let Shortage::Pool { free: 1, missing: 1, nodes: Some(nodes), command, .. } = &shortage else {
            panic!("{shortage:?}")
        };
        assert_eq!(nodes, &[1]);
        assert!(command.contains("echo 3 ") && command.contains("/node1/hugepages/"), "{command}");
        assert!(shortage.to_string().contains("1 huge page of 2 MiB is missing"), "{shortage}");
        host.write("proc/self/status", "Name:\tx\nMems_allowed_list:\t0\n");
        assert!(host.check(None, 10).is_ok());
        assert!(host.check(None, 12).is_err());
        assert!(host.check(Some(vec![1]), 2).is_err(), "no node is both in the cpuset and in the policy");
    }

    #[test]
    fn control_groups_of_both_versions_limit() {
        let host = Picture::new("cgroup");
        host.write("proc/self/cgroup", "3:hugetlb:/box/a\n0::/\n");
        host.write("proc/self/mountinfo", "31 2 0:28 /box /cg/h rw - cgroup none rw,hugetlb\n");
        host.write("cg/h/hugetlb.2MB.limit_in_bytes", "8388608\n");
        host.write("cg/h/hugetlb.2MB.usage_in_bytes", "2097152\n");
        assert!(host.check(None, 6).is_ok());
        let shortage = host.check(None, 8).unwrap_err();
        assert!(matches!(shortage, Shortage::Cgroup { needed: 4, free: 3, missing: 1, .. }), "{shortage:?}");
        assert!(shortage.to_string().contains("echo 10485760 "), "{shortage}");

        // A larger pool alone would not help.
        let all = shortages_under(&host.0, Process::default(), None, 2 * MIB, 32 * MIB);
        assert!(matches!(all.as_slice(), [Shortage::Pool { .. }, Shortage::Cgroup { .. }]), "{all:?}");
        let remedies: Vec<_> = all.iter().filter_map(Shortage::command).collect();
        assert!(
            remedies[0].contains("nr_hugepages") && remedies[1].contains("limit_in_bytes"),
            "{remedies:?}"
        );

        host.write("proc/self/cgroup", "0::/a/b\n");
        host.write("proc/self/mountinfo", "31 2 0:28 / /cg2 rw shared:1 - cgroup2 none rw\n");
        host.write("cg2/a/b/hugetlb.2MB.max", "max\n");
        host.write("cg2/a/b/hugetlb.2MB.current", "0\n");
        assert!(host.check(None, 8).is_ok());
        host.write("cg2/a/hugetlb.2MB.rsvd.max", "4194304\n");
        host.write("cg2/a/hugetlb.2MB.rsvd.current", "0\n");
        let Shortage::Cgroup { file, .. } = host.check(None, 8).unwrap_err() else { panic!("not the group") };
        assert!(file.ends_with("cg2/a/hugetlb.2MB.rsvd.max"), "the parent's limit counts too: {file:?}");
    }

    #[test]
    fn a_size_that_the_kernel_lacks_is_named() {
        let host = Picture::new("size");
        let shortages = shortages_under(&host.0, Process::default(), None, 1 << 30, 1 << 30);
        assert_eq!(
            shortages[0].to_string(),
            "this host has no huge pages of 1 GiB (it has 2 MiB); choose another backing"
        );
    }
}
