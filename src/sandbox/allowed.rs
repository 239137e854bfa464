//! The system calls that each kind of thread may make.
//!
//! The lists include the calls that the C library and the standard library make on their own, for
//! glibc and musl. rustix makes its calls itself, and the same ones on every architecture: ppoll
//! for poll, unlinkat for unlink. Only a file server's list has calls that take a path. No list has
//! one that makes a socket or runs a program.
//!
//! A call that is missing here shows up in the kernel's log with `--sandbox log`, and with `on` in
//! the line that ends the process. A superfluous entry shows up in `strace -f --decode-pids=comm`
//! of the tests: no thread makes that call after its seccomp(2).

use libc::*;

use super::ThreadKind;
use super::bpf::{Allow, Rule};
use super::ioctls;

/// The rules for a thread of this kind.
pub fn by(kind: ThreadKind) -> Vec<Rule> {
    let mut rules = base();
    // A thread's filter applies on top of the one of the thread that started it. So main may also
    // make the calls that disk and migration threads need.
    let lists: &[&[c_long]] = match kind {
        ThreadKind::Vcpu => &[],
        ThreadKind::Disk => &[FILES],
        ThreadKind::Migration => &[FILES, SOCKETS, ACCEPTS, LOCKS],
        ThreadKind::Connection => &[SOCKETS],
        ThreadKind::Fetching => &[READS, SOCKETS, LOCKS],
        ThreadKind::Main => &[FILES, SOCKETS, EVENTS, MAIN, MAIN_HERE],
        ThreadKind::Receiver => &[FILES, SOCKETS, EVENTS, MAIN, MAIN_HERE, ASSEMBLY, READS, LOCKS],
        ThreadKind::Share => &[FILES, SOCKETS],
        ThreadKind::FileServer => &[FILES, SOCKETS, TREES],
    };
    rules.extend(lists.iter().flat_map(|list| *list).map(|&call| any(call)));
    rules.push(requests(kind));
    rules.push(commands(kind));
    if !matches!(kind, ThreadKind::Vcpu | ThreadKind::FileServer) {
        rules.extend(stat_of_descriptors());
    }
    if matches!(kind, ThreadKind::Main | ThreadKind::Receiver) {
        // A new thread binds itself to CPUs. It may not bind other threads.
        rules.push(one_of(SYS_sched_setaffinity, 0, &[0]));
        rules.extend(new_threads());
        rules.extend(sockets_left_behind());
    }
    rules
}

/// The rules for the guard of a machine's names (`sys/guard.rs`). It waits, checks whether a socket
/// has a listener, and names and removes files.
pub fn by_guard() -> Vec<Rule> {
    let calls = [
        SYS_ppoll,
        SYS_newfstatat,
        SYS_connect,
        SYS_close,
        SYS_linkat,
        SYS_unlinkat,
        SYS_renameat,
        SYS_exit_group,
    ];
    let mut rules: Vec<Rule> = calls.into_iter().map(any).collect();
    rules.push(one_of(SYS_socket, 0, &[AF_UNIX as u32]));
    // Debug builds check that a descriptor is open before they close it.
    rules.push(one_of(SYS_fcntl, 1, &[F_GETFD as u32]));
    rules
}

fn any(call: c_long) -> Rule {
    Rule { number: call as u32, allow: Allow::Any }
}

fn one_of(call: c_long, argument: u8, values: &[u32]) -> Rule {
    Rule { number: call as u32, allow: Allow::OneOf(argument, values.to_vec()) }
}

fn requests(kind: ThreadKind) -> Rule {
    use ioctls::*;
    let lists: &[&[u32]] = match kind {
        ThreadKind::Vcpu => &[RUN, RINGS, DEVICES, VCPU_STATE, VCPU_STATE_HERE],
        ThreadKind::Disk | ThreadKind::Share => &[DEVICES],
        ThreadKind::FileServer => &[],
        ThreadKind::Connection => &[CLEARS, FAULTS],
        ThreadKind::Fetching => &[FAULTS],
        ThreadKind::Migration => &[RINGS, MEMORY, CLONES, MACHINE, MACHINE_HERE, FAULTS],
        ThreadKind::Main => {
            &[RINGS, DEVICES, VCPU_STATE, VCPU_STATE_HERE, MEMORY, CLONES, MACHINE, MACHINE_HERE, DESCRIPTORS]
        }
        // It starts vCPU threads, and the thread that resolves page faults.
        ThreadKind::Receiver => &[
            RUN,
            RINGS,
            DEVICES,
            VCPU_STATE,
            VCPU_STATE_HERE,
            MEMORY,
            CLONES,
            MACHINE,
            MACHINE_HERE,
            DESCRIPTORS,
            ASSEMBLY,
            ASSEMBLY_HERE,
            FAULTS,
        ],
    };
    let mut values = lists.concat();
    values.extend(TERMINAL_RESTORE);
    one_of(SYS_ioctl, 1, &values)
}

/// The fcntl commands. Debug builds check that a descriptor is open before they close it.
fn commands(kind: ThreadKind) -> Rule {
    let mut commands = vec![F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC];
    if matches!(kind, ThreadKind::Main | ThreadKind::Receiver) {
        // The locks of a machine's disks move to the process where the machine continues.
        commands.push(F_OFD_SETLK);
    }
    if matches!(kind, ThreadKind::Main | ThreadKind::Receiver | ThreadKind::Migration) {
        // For a migration's fence or a machine's memory that arrives from another process; and for
        // memory that is created for a machine or becomes the base of a fork.
        commands.extend([F_GET_SEALS, F_ADD_SEALS]);
    }
    one_of(SYS_fcntl, 1, &commands.iter().map(|&command| command as u32).collect::<Vec<_>>())
}

/// What any thread needs to live, wait, allocate, log and end.
fn base() -> Vec<Rule> {
    let mut rules: Vec<Rule> = BASE.iter().map(|&call| any(call)).collect();
    // Executable memory would defeat all of this.
    let no_exec = |call: c_long| Rule { number: call as u32, allow: Allow::Without(2, PROT_EXEC as u32) };
    rules.extend([no_exec(SYS_mmap), no_exec(SYS_mprotect)]);
    // abort(3) resets SIGABRT. glibc installs handlers for its own two real-time signals when the
    // first thread starts. SIGSYS keeps its handler.
    rules.push(one_of(SYS_rt_sigaction, 0, &[SIGABRT as u32, 32, 33]));
    // Only threads of this process: this is how vCPUs are kicked and how abort raises its signal
    // (`sys/abort.rs`). tkill and kill take any process.
    rules.push(one_of(SYS_tgkill, 0, &[std::process::id()]));
    // Only the calling thread's CPUs.
    rules.push(one_of(SYS_sched_getaffinity, 0, &[0]));
    // Names of threads and of memory, and exact waits.
    rules.push(one_of(SYS_prctl, 0, &[PR_SET_NAME as u32, PR_SET_VMA as u32, PR_SET_TIMERSLACK as u32]));
    rules
}

const BASE: &[c_long] = &[
    SYS_read,
    SYS_write,
    SYS_readv,
    SYS_writev,
    SYS_close,
    SYS_futex,
    SYS_munmap,
    SYS_mremap,
    SYS_madvise,
    SYS_brk,
    SYS_rt_sigreturn,
    SYS_rt_sigprocmask,
    SYS_sigaltstack,
    SYS_restart_syscall,
    SYS_exit,
    SYS_exit_group,
    SYS_clock_gettime,
    SYS_clock_nanosleep,
    SYS_nanosleep,
    SYS_sched_yield,
    SYS_getpid,
    SYS_gettid,
    SYS_getrandom,
    SYS_ppoll,
    // For the start of a thread, which runs with the filter of the thread that started it.
    SYS_set_robust_list,
    SYS_rseq,
];

/// Calls on open files.
const FILES: &[c_long] = &[
    SYS_pread64,
    SYS_pwrite64,
    SYS_preadv,
    SYS_pwritev,
    SYS_lseek,
    SYS_ftruncate,
    SYS_fallocate,
    SYS_fsync,
    SYS_fdatasync,
    SYS_sync_file_range,
];

/// Reading pages of open files.
const READS: &[c_long] = &[SYS_pread64, SYS_fadvise64, SYS_fsync];

/// Calls on directories, beneath the one that Landlock allows. Only this list has calls that take a
/// path.
const TREES: &[c_long] = &[
    SYS_openat,
    SYS_openat2,
    SYS_statx,
    SYS_fstatfs,
    SYS_readlinkat,
    SYS_getdents64,
    SYS_mkdirat,
    SYS_mknodat,
    SYS_symlinkat,
    SYS_linkat,
    SYS_unlinkat,
    SYS_renameat2,
    SYS_fchmodat,
    SYS_fchownat,
    SYS_utimensat,
    SYS_copy_file_range,
    SYS_getxattr,
    SYS_listxattr,
    SYS_setxattr,
    SYS_removexattr,
];

/// Accepting a connection on a socket that already listens: a source reconnects after its link was
/// cut.
const ACCEPTS: &[c_long] = &[SYS_accept4];

/// Locking memory, once all of it has arrived.
const LOCKS: &[c_long] = &[SYS_mlock2, SYS_munlock];

/// Connected sockets, which also pass descriptors.
const SOCKETS: &[c_long] =
    &[SYS_recvfrom, SYS_recvmsg, SYS_sendto, SYS_sendmsg, SYS_shutdown, SYS_getsockopt, SYS_setsockopt];

/// The event loop.
const EVENTS: &[c_long] = &[SYS_accept4, SYS_epoll_ctl, SYS_epoll_pwait, SYS_eventfd2];

/// The calls of a thread before it installs its own filter. capset(2) changes only the caller's
/// capabilities.
const MAIN: &[c_long] = &[SYS_seccomp, SYS_capget, SYS_capset];

/// Mapping guest memory, for a machine that is created after the sandbox is active.
const ASSEMBLY: &[c_long] = &[SYS_memfd_create, SYS_fstatfs, SYS_mlock2, SYS_mlock, SYS_sysinfo];

#[cfg(target_arch = "x86_64")]
const MAIN_HERE: &[c_long] = &[SYS_epoll_wait];
#[cfg(target_arch = "aarch64")]
const MAIN_HERE: &[c_long] = &[];

/// Allows new threads, with the flags that glibc and musl (with `CLONE_DETACHED`) use, but no
/// processes or namespaces. A filter cannot read the flags of clone3, which are in memory. So
/// clone3 fails with ENOSYS, and the C libraries fall back to clone.
fn new_threads() -> [Rule; 2] {
    let memory = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM;
    let flags = (memory | CLONE_SETTLS | CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID) as u32;
    [
        Rule { number: SYS_clone3 as u32, allow: Allow::Fail(ENOSYS as u16) },
        one_of(SYS_clone, 0, &[flags, flags | CLONE_DETACHED as u32]),
    ]
}

/// Without a sandbox, a listener removes its unix socket's name. Here the call fails, and the name
/// stays until this process has ended and its guard (`sys/guard.rs`) removes it.
fn sockets_left_behind() -> Vec<Rule> {
    let calls = [
        SYS_unlinkat,
        #[cfg(target_arch = "x86_64")]
        SYS_unlink,
    ];
    calls.map(|call| Rule { number: call as u32, allow: Allow::Fail(EPERM as u16) }).into()
}

/// The size and type of a descriptor, by the forms of stat that glibc and musl use for it. A filter
/// sees the flag, but not whether the path is empty. So a thread can learn which paths exist, but
/// not what the files contain.
fn stat_of_descriptors() -> [Rule; 3] {
    let of_descriptor = |call: c_long, argument| Rule {
        number: call as u32,
        allow: Allow::With(argument, AT_EMPTY_PATH as u32),
    };
    [any(SYS_fstat), of_descriptor(SYS_newfstatat, 3), of_descriptor(SYS_statx, 2)]
}
