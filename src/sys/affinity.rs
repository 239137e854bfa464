//! Binds threads to CPUs. [`super::host::allowed_cpus`] lists the CPUs.

use std::io;

/// Binds the calling thread to one CPU.
pub fn pin(cpu: usize) -> io::Result<()> {
    allow(&[cpu])
}

/// Binds the calling thread, and the threads that it starts from now on, to some CPUs.
pub fn allow(cpus: &[usize]) -> io::Result<()> {
    let mut words = [0u64; 128];
    for cpu in cpus {
        *words.get_mut(cpu / 64).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))? |=
            1 << (cpu % 64);
    }
    // SAFETY: the call is given the mask's length and only reads it.
    let result =
        unsafe { libc::syscall(libc::SYS_sched_setaffinity, 0, size_of_val(&words), words.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
