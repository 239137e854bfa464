//! System calls that describe the host and this process's share of it.

use std::io;

/// `uname -r`.
pub fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// The host's memory in bytes.
pub fn total_memory() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(info.mem_unit.into())
}

/// The CPUs that this thread may run on, in ascending order.
pub fn allowed_cpus() -> io::Result<Vec<usize>> {
    // The kernel refuses a mask shorter than its own. Its maximum on x86-64 is 8192 CPUs (NR_CPUS),
    // and the types of libc and rustix end at 1024.
    let mut mask = [0u64; 128];
    // SAFETY: the kernel writes at most `size_of_val(&mask)` bytes into `mask`, and any bits are
    // valid there.
    let written =
        unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, size_of_val(&mask), mask.as_mut_ptr()) };
    let words = usize::try_from(written).map_err(|_| io::Error::last_os_error())? / 8;
    let set = |cpu: &usize| mask[cpu / 64] >> (cpu % 64) & 1 == 1;
    Ok((0..words * 64).filter(set).collect())
}

/// Whether this process has the effective user ID of root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The memory nodes that this thread's policy binds it to (numactl --membind); `None` if it binds
/// to none.
pub fn bound_nodes() -> Option<Vec<u32>> {
    // The kernel's maximum is 1024 nodes (CONFIG_NODES_SHIFT up to 10).
    let mut mask = [0u64; 16];
    let mut mode: libc::c_int = 0;
    // SAFETY: the kernel writes one int to `mode` and `maxnode - 1` bits to `mask` (mm/mempolicy.c,
    // copy_nodes_to_user), which is the size of `mask`.
    let failed = unsafe {
        libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, mask.as_mut_ptr(), 1024 + 1, 0usize, 0usize)
    };
    // The upper bits are mode flags. An error means a kernel without NUMA, or a container that
    // forbids the call.
    let binds = failed == 0 && mode & 0xff == libc::MPOL_BIND;
    let set = |node: &u32| mask[*node as usize / 64] >> (node % 64) & 1 == 1;
    binds.then(|| (0..1024).filter(set).collect())
}

/// How many bytes this process may lock in memory; `None` for no limit.
pub fn memlock_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}

/// A table of `len` times `value`, for a length that comes from a file. If the allocator refuses,
/// this is an error and the process goes on. Callers that may call sysinfo(2) call [`check_room`]
/// first.
///
/// # Errors
/// How much memory the table would take.
pub fn table<T: Clone>(value: T, len: u64) -> io::Result<Vec<T>> {
    let bytes = len.saturating_mul(size_of::<T>() as u64);
    let mut table = Vec::new();
    if len > isize::MAX as u64 || table.try_reserve_exact(len as usize).is_err() {
        return Err(no_room(bytes));
    }
    table.resize(len as usize, value);
    Ok(table)
}

/// Checks that this host has memory for a table of `bytes` bytes besides everything else.
///
/// # Errors
/// The table would take more than half of the host's memory.
pub fn check_room(bytes: u64) -> io::Result<()> {
    if bytes > total_memory() / 2 { Err(no_room(bytes)) } else { Ok(()) }
}

fn no_room(bytes: u64) -> io::Error {
    let what = format!("it takes a table of {} MiB, for which this host has not the memory", bytes >> 20);
    io::Error::new(io::ErrorKind::OutOfMemory, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_procfs() {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        assert_eq!(kernel_release(), release.trim());
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
        let total = meminfo.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap();
        assert_eq!(total_memory(), total * 1024);
        assert!(!allowed_cpus().unwrap().is_empty());
    }

    #[test]
    fn a_table_that_this_host_has_no_room_for_is_refused() {
        assert_eq!(table(7u8, 3).unwrap(), [7; 3]);
        for len in [1 << 55, u64::MAX] {
            let error = table(0u64, len).unwrap_err();
            assert!(error.to_string().contains("it takes a table of"), "{error}");
        }
        assert!(check_room(1 << 20).is_ok() && check_room(u64::MAX).is_err());
    }
}
