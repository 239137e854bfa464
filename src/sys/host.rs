//! System calls that describe the host and this process's share of it.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// `uname -r`.
pub fn kernel_release() -> String {
    let mut name = MaybeUninit::<libc::utsname>::zeroed();
    // SAFETY: `name` is writable and of the size that uname(2) fills; zeroed bytes are a valid utsname.
    let name = unsafe {
        libc::uname(name.as_mut_ptr());
        name.assume_init()
    };
    let release = name.release.map(|c| c.to_ne_bytes()[0]);
    CStr::from_bytes_until_nul(&release).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The host's memory in bytes.
pub fn total_memory() -> u64 {
    let mut info = MaybeUninit::<libc::sysinfo>::zeroed();
    // SAFETY: `info` is writable and of the size that sysinfo(2) fills; zeroed bytes are a valid sysinfo.
    let info = unsafe {
        libc::sysinfo(info.as_mut_ptr());
        info.assume_init()
    };
    #[allow(clippy::unnecessary_cast, reason = "the fields' widths differ between C libraries")]
    (info.totalram as u64).saturating_mul(info.mem_unit as u64)
}

/// The CPUs that this thread may run on, rising.
pub fn allowed_cpus() -> io::Result<Vec<usize>> {
    // The kernel refuses a mask shorter than its own: 8192 CPUs are its maximum on x86-64 (NR_CPUS).
    let mut mask = [0u64; 128];
    // SAFETY: the kernel writes at most `size_of_val(&mask)` bytes into `mask`, which any bits make valid. Called
    // directly because libc's wrapper takes a type that ends at 1024 CPUs.
    let written =
        unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, size_of_val(&mask), mask.as_mut_ptr()) };
    let words = usize::try_from(written).map_err(|_| io::Error::last_os_error())? / 8;
    let set = |cpu: &usize| mask[cpu / 64] >> (cpu % 64) & 1 == 1;
    Ok((0..words * 64).filter(set).collect())
}

/// True where this process acts as root.
pub fn is_root() -> bool {
    // SAFETY: geteuid takes nothing, touches no memory and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// The memory nodes that this thread's policy binds it to (numactl --membind); `None` where it binds to none.
pub fn bound_nodes() -> Option<Vec<u32>> {
    // 1024 nodes are the kernel's maximum (CONFIG_NODES_SHIFT up to 10).
    let mut mask = [0u64; 16];
    let mut mode: libc::c_int = 0;
    // SAFETY: the kernel writes one int to `mode` and `maxnode - 1` bits to `mask` (mm/mempolicy.c,
    // copy_nodes_to_user), which are all that it has.
    let failed = unsafe {
        libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, mask.as_mut_ptr(), 1024 + 1, 0usize, 0usize)
    };
    // The upper bits are mode flags. An error means a kernel without NUMA, or a container that forbids the question.
    let binds = failed == 0 && mode & 0xff == libc::MPOL_BIND;
    let set = |node: &u32| mask[*node as usize / 64] >> (node % 64) & 1 == 1;
    binds.then(|| (0..1024).filter(set).collect())
}

/// How many bytes this process may lock in memory; `None` for no limit.
pub fn memlock_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is writable and of the type that getrlimit(2) fills.
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    (limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Whether this user may have a userfaultfd that sees the kernel's faults, by the system call.
pub fn userfaultfd() -> io::Result<()> {
    // SAFETY: the call takes flags only and makes a new descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
    close_new(fd)
}

/// The same by `/dev/userfaultfd` (Linux 6.1), which asks for the node's permission instead of privileges.
pub fn userfaultfd_by_device() -> io::Result<()> {
    /// `_IO(0xAA, 0)`, include/uapi/linux/userfaultfd.h.
    const USERFAULTFD_IOC_NEW: u32 = 0xaa00;
    let device = File::options().read(true).write(true).open("/dev/userfaultfd")?;
    // SAFETY: the request takes flags only and makes a new descriptor.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW as _, libc::O_CLOEXEC) };
    close_new(fd.into())
}

fn close_new(fd: libc::c_long) -> io::Result<()> {
    let fd = RawFd::try_from(fd).ok().filter(|&fd| fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel has just made it, and nobody else owns it.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    Ok(())
}

/// A table of `len` times `value`, whose length a file tells: where the allocator refuses, it is an error, and the process goes on. Who may
/// call sysinfo(2) asks [`check_room`] first.
///
/// # Errors
/// How much memory it would take.
pub fn table<T: Clone>(value: T, len: u64) -> io::Result<Vec<T>> {
    let bytes = len.saturating_mul(size_of::<T>() as u64);
    let mut table = Vec::new();
    if len > isize::MAX as u64 || table.try_reserve_exact(len as usize).is_err() {
        return Err(no_room(bytes));
    }
    table.resize(len as usize, value);
    Ok(table)
}

/// Whether this host has memory for a table of so many bytes and for all else.
///
/// # Errors
/// Where the table would take more than half of it.
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
