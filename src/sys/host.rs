//! System calls that describe the host and this process's share of it.

use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;

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
}
