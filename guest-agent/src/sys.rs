//! System calls that the standard library lacks. All `unsafe` code of the agent is here.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The kernel's name for the first process of a guest. PID 1 also gives this name to further
/// processes of its own program.
pub const NAME: &str = "/init";

fn check(result: i64) -> io::Result<i64> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// mount(2) of a file system without a device.
pub fn mount(kind: &str, target: &str) -> io::Result<()> {
    mount_from(kind, kind, target, 0, "")
}

/// mount(2).
pub fn mount_from(
    source: &str,
    kind: &str,
    target: &str,
    flags: libc::c_ulong,
    options: &str,
) -> io::Result<()> {
    let [source, kind, target, options] = [source, kind, target, options].map(CString::new);
    let (source, kind, target, options) = (source?, kind?, target?, options?);
    // SAFETY: all strings are NUL-terminated and outlive the call.
    let result = unsafe {
        libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, options.as_ptr().cast())
    };
    check(result.into()).map(drop)
}

/// finit_module(2).
pub fn load_module(file: &File) -> io::Result<()> {
    // SAFETY: the parameters are an empty string.
    check(unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) }).map(drop)
}

/// fallocate(2).
pub fn allocate(file: &File, mode: libc::c_int, offset: u64, bytes: u64) -> io::Result<()> {
    let number = |value: u64| libc::off_t::try_from(value).map_err(io::Error::other);
    // SAFETY: a plain system call.
    let result = unsafe { libc::fallocate(file.as_raw_fd(), mode, number(offset)?, number(bytes)?) };
    check(result.into()).map(drop)
}

/// Flushes all disks and powers the machine off.
pub fn power_off() -> io::Error {
    leave(libc::RB_POWER_OFF)
}

/// Flushes all disks and starts the kernel that [`load_kernel`] has loaded.
pub fn start_kernel() -> io::Error {
    leave(libc::RB_KEXEC)
}

fn leave(how: libc::c_int) -> io::Error {
    // SAFETY: plain system calls; PID 1 may make them.
    unsafe {
        libc::sync();
        libc::reboot(how);
    }
    io::Error::last_os_error()
}

/// kexec_file_load(2), for [`start_kernel`] or for a panic.
pub fn load_kernel(kernel: &File, initrd: Option<&File>, params: &str, on_panic: bool) -> io::Result<()> {
    // include/uapi/linux/kexec.h: KEXEC_FILE_ON_CRASH, KEXEC_FILE_NO_INITRAMFS
    let flags: libc::c_ulong = if on_panic { 2 } else { 0 } | if initrd.is_none() { 4 } else { 0 };
    let params = CString::new(params)?;
    let bytes = params.as_bytes_with_nul();
    let initrd = initrd.map_or(-1, AsRawFd::as_raw_fd);
    // SAFETY: the string is NUL-terminated, which its length includes, and outlives the call, as do
    // both files.
    let result = unsafe {
        libc::syscall(KEXEC_FILE_LOAD, kernel.as_raw_fd(), initrd, bytes.len(), bytes.as_ptr(), flags)
    };
    check(result).map(drop)
}

/// The system call's number (arch/x86/entry/syscalls/syscall_64.tbl,
/// include/uapi/asm-generic/unistd.h), which the C library lacks on Arm.
const KEXEC_FILE_LOAD: libc::c_long = if cfg!(target_arch = "x86_64") { 320 } else { 294 };

/// Waits for any child. Returns its PID and its exit code, or 128 plus its signal.
pub fn wait_any() -> io::Result<(u32, i32)> {
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    let pid = check(unsafe { libc::waitpid(-1, &mut status, 0) }.into())?;
    let code = if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) };
    Ok((pid as u32, code))
}

/// Connects to `port` of the host.
pub fn connect_vsock(port: u32) -> io::Result<File> {
    let address = libc::sockaddr_vm {
        svm_family: libc::AF_VSOCK as u16,
        svm_reserved1: 0,
        svm_port: port,
        svm_cid: libc::VMADDR_CID_HOST,
        svm_zero: [0; 4],
    };
    // SAFETY: plain system calls; the new descriptor is owned here, and the address outlives its
    // call with its correct length.
    unsafe {
        let fd = check(libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0).into())?;
        let socket = File::from_raw_fd(fd as i32);
        let size = size_of_val(&address) as u32;
        check(libc::connect(socket.as_raw_fd(), (&raw const address).cast(), size).into())?;
        Ok(socket)
    }
}

/// Brings the loopback interface up.
pub fn loopback_up() -> io::Result<()> {
    // SAFETY: ifreq is plain data, for which all zeroes is valid; it outlives the call.
    unsafe {
        let fd = check(libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0).into())?;
        let socket = OwnedFd::from_raw_fd(fd as i32);
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request).into()).map(drop)
    }
}

/// A vsock socket that listens on `port` for the host.
pub fn listen_vsock(port: u32) -> io::Result<OwnedFd> {
    let address = libc::sockaddr_vm {
        svm_family: libc::AF_VSOCK as u16,
        svm_reserved1: 0,
        svm_port: port,
        svm_cid: libc::VMADDR_CID_ANY,
        svm_zero: [0; 4],
    };
    // SAFETY: a plain system call; the new descriptor is owned here.
    let socket = unsafe {
        OwnedFd::from_raw_fd(check(
            libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0).into(),
        )? as i32)
    };
    // SAFETY: the address outlives the call, and its length is correct.
    let bound =
        unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size_of_val(&address) as u32) };
    check(bound.into())?;
    // SAFETY: a plain system call.
    check(unsafe { libc::listen(socket.as_raw_fd(), 16) }.into())?;
    Ok(socket)
}

/// Accepts a connection.
pub fn accept(socket: &OwnedFd) -> io::Result<File> {
    // SAFETY: no address is requested; the new descriptor is owned here.
    unsafe {
        let fd =
            libc::accept4(socket.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), libc::SOCK_CLOEXEC);
        Ok(File::from_raw_fd(check(fd.into())? as i32))
    }
}

/// Makes a terminal pass on input as typed. In canonical mode it would drop bytes of a line beyond
/// 4095 and handle Ctrl-C itself. Enter still gives a newline, and echo stays on.
pub fn uncook(terminal: &File) -> io::Result<()> {
    // SAFETY: termios is plain data, for which all zeroes is valid.
    let mut settings: libc::termios = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and `settings` outlives the call.
    check(unsafe { libc::tcgetattr(terminal.as_raw_fd(), &mut settings) }.into())?;
    settings.c_lflag &= !(libc::ICANON | libc::ISIG | libc::IEXTEN);
    // SAFETY: as above; the call only reads.
    check(unsafe { libc::tcsetattr(terminal.as_raw_fd(), libc::TCSANOW, &settings) }.into()).map(drop)
}

/// clock_gettime(2), in nanoseconds.
pub fn clock(id: libc::clockid_t) -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call.
    unsafe { libc::clock_gettime(id, &mut time) };
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

/// Makes the kernel's random numbers depend on `seed` from now on, those of every CPU.
pub fn reseed(seed: &[u8]) -> io::Result<()> {
    /// `struct rand_pool_info` of include/uapi/linux/random.h, with the most that fits here.
    #[repr(C)]
    struct Pool {
        bits: libc::c_int,
        bytes: libc::c_int,
        seed: [u8; 64],
    }
    // RNDADDENTROPY and RNDRESEEDCRNG of the same file.
    const ADD: u32 = 0x4008_5203;
    const RESEED: u32 = 0x5207;
    let random = File::open("/dev/urandom")?;
    for part in seed.chunks(64) {
        let bytes = part.len() as libc::c_int;
        let mut pool = Pool { bits: 8 * bytes, bytes, seed: [0; 64] };
        pool.seed[..part.len()].copy_from_slice(part);
        // SAFETY: the kernel reads `bytes` bytes of `seed`, which has as many.
        check(unsafe { libc::ioctl(random.as_raw_fd(), ADD as _, &raw const pool) }.into())?;
    }
    // SAFETY: takes no argument.
    check(unsafe { libc::ioctl(random.as_raw_fd(), RESEED as _) }.into()).map(drop)
}

/// clock_settime(2) of CLOCK_REALTIME, to `ns` nanoseconds.
pub fn set_realtime(ns: u64) -> io::Result<()> {
    let time = libc::timespec { tv_sec: (ns / 1_000_000_000) as _, tv_nsec: (ns % 1_000_000_000) as _ };
    // SAFETY: `time` outlives the call.
    check(unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &time) }.into()).map(drop)
}

/// Forks a child that runs `work` and exits, with status 1 on failure. It ends with its parent. In
/// a process with other threads `work` must not allocate: another thread might hold the allocator's
/// lock.
pub fn fork(work: impl FnOnce() -> io::Result<()>) -> io::Result<libc::pid_t> {
    // SAFETY: the child never returns to its parent's frames: it ends by _exit.
    match check(unsafe { libc::fork() }.into())? {
        0 => {
            let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                // SAFETY: a plain system call.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                work()
            }));
            // SAFETY: a plain system call.
            unsafe { libc::_exit(i32::from(!matches!(worked, Ok(Ok(()))))) }
        }
        child => Ok(child as libc::pid_t),
    }
}

/// Waits for this child. Returns its exit code, or 128 plus its signal.
pub fn wait(child: libc::pid_t) -> io::Result<i32> {
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    check(unsafe { libc::waitpid(child, &mut status, 0) }.into())?;
    Ok(if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) })
}

/// Kills a child that was not waited for.
pub fn kill(child: libc::pid_t) -> io::Result<()> {
    // SAFETY: a plain system call.
    check(unsafe { libc::kill(child, libc::SIGKILL) }.into()).map(drop)
}

/// Signals a process group.
pub fn signal_group(group: u32, signal: libc::c_int) -> io::Result<()> {
    let group = libc::pid_t::try_from(group).map_err(io::Error::other)?;
    // SAFETY: a plain system call.
    check(unsafe { libc::killpg(group, signal) }.into()).map(drop)
}

/// Makes `file` non-blocking.
pub fn set_nonblocking(file: &File) -> io::Result<()> {
    // SAFETY: plain system calls.
    unsafe {
        let flags = check(libc::fcntl(file.as_raw_fd(), libc::F_GETFL).into())?;
        let flags = flags as libc::c_int | libc::O_NONBLOCK;
        check(libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags).into()).map(drop)
    }
}

/// Executes this program as the agent with `request`, and its output discarded. Returns only on
/// failure.
pub fn become_this_program(request: &CString) -> io::Error {
    let name = CString::new(NAME).expect("without a zero");
    let arguments = [name.as_ptr(), request.as_ptr(), std::ptr::null()];
    // SAFETY: the strings are NUL-terminated, the arrays null-terminated, and both outlive the
    // calls.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        if null >= 0 {
            libc::dup2(null, 1);
        }
        libc::execve(c"/proc/self/exe".as_ptr(), arguments.as_ptr(), [std::ptr::null()].as_ptr());
    }
    io::Error::last_os_error()
}

const PAGE: usize = 4096;

/// Private anonymous memory, which children inherit copy-on-write.
pub struct Pages {
    address: *mut libc::c_void,
    count: usize,
}

impl Pages {
    /// mmap(2).
    pub fn map(count: usize) -> io::Result<Self> {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), count * PAGE, protection, flags, -1, 0) };
        if address == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(Self { address, count })
        }
    }

    /// The number of pages.
    pub fn count(&self) -> usize {
        self.count
    }

    fn word(&self, page: usize) -> *mut u64 {
        assert!(page < self.count);
        self.address.wrapping_byte_add(page * PAGE).cast()
    }

    /// Reads the first word of a page.
    pub fn get(&self, page: usize) -> u64 {
        // SAFETY: within the mapping and aligned; if it is not readable the process ends.
        unsafe { self.word(page).read_volatile() }
    }

    /// Writes the first word of a page.
    pub fn set(&self, page: usize, value: u64) {
        // SAFETY: as above; only this thread uses the mapping.
        unsafe { self.word(page).write_volatile(value) }
    }

    /// mprotect(2).
    pub fn protect(&self, protection: libc::c_int) -> io::Result<()> {
        // SAFETY: the mapping is owned, and there are no references into it.
        check(unsafe { libc::mprotect(self.address, self.count * PAGE, protection) }.into()).map(drop)
    }

    /// Whether read(2) can write to the first page. The pipe must have a byte.
    pub fn is_written_from(&self, pipe: &impl AsRawFd) -> bool {
        // SAFETY: the kernel checks whether it may write there.
        unsafe { libc::read(pipe.as_raw_fd(), self.address, 1) == 1 }
    }

    /// Whether write(2) can read the first page.
    pub fn is_read_into(&self, pipe: &impl AsRawFd) -> bool {
        // SAFETY: the kernel checks whether it may read there.
        unsafe { libc::write(pipe.as_raw_fd(), self.address, 1) == 1 }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is owned, and there are no references into it.
        unsafe { libc::munmap(self.address, self.count * PAGE) };
    }
}

/// Pins this thread, and the children it forks, to the current CPU.
pub fn stay_on_this_cpu() -> io::Result<()> {
    // SAFETY: cpu_set_t is plain data, for which all zeroes is valid.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: plain system calls; CPU_SET stays within the set, which outlives the second call.
    let result = unsafe {
        let cpu = check(libc::sched_getcpu().into())?;
        libc::CPU_SET(cpu as usize, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set)
    };
    check(result.into()).map(drop)
}

/// Waits until `file` is readable, without reading.
pub fn wait_readable(file: &File) -> io::Result<()> {
    wait_either([file.as_raw_fd()]).map(drop)
}

/// Waits until one of them is readable or has ended. Returns which.
pub fn wait_either<const N: usize>(descriptors: [RawFd; N]) -> io::Result<[bool; N]> {
    poll(descriptors.map(|fd| (fd, libc::POLLIN)))
}

/// Waits until the other end of one of them is closed. Returns which.
pub fn wait_for_end<const N: usize>(descriptors: [RawFd; N]) -> io::Result<[bool; N]> {
    poll(descriptors.map(|fd| (fd, libc::POLLRDHUP)))
}

/// Waits until `file` is writable, or the other end of `connection` is closed. Returns which.
pub fn wait_writable(file: &impl AsRawFd, connection: &impl AsRawFd) -> io::Result<[bool; 2]> {
    poll([(file.as_raw_fd(), libc::POLLOUT), (connection.as_raw_fd(), libc::POLLRDHUP)])
}

fn poll<const N: usize>(descriptors: [(RawFd, libc::c_short); N]) -> io::Result<[bool; N]> {
    let mut polls = descriptors.map(|(fd, events)| libc::pollfd { fd, events, revents: 0 });
    loop {
        // SAFETY: the array has N structures and outlives the call.
        match check(unsafe { libc::poll(polls.as_mut_ptr(), N as libc::nfds_t, -1) }.into()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map(|_| polls.map(|poll| poll.revents != 0)),
        }
    }
}

/// Unlocks the slave of the pseudo-terminal `master`. Returns its number in /dev/pts.
pub fn unlock_terminal(master: &File) -> io::Result<u32> {
    let (mut number, unlocked) = (0u32, 0i32);
    // SAFETY: both calls take a pointer to an int, which outlives them.
    unsafe {
        check(libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK as _, &raw const unlocked).into())?;
        check(libc::ioctl(master.as_raw_fd(), libc::TIOCGPTN as _, &raw mut number).into())?;
    }
    Ok(number)
}

/// Sets a terminal's size. Its foreground process group gets SIGWINCH.
pub fn resize(terminal: &File, rows: u16, columns: u16) -> io::Result<()> {
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the call reads a winsize, which outlives it.
    check(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ as _, &raw const size) }.into())
        .map(drop)
}

/// Makes the started `command` lead a session whose controlling terminal is its standard input.
pub fn lead_terminal(command: &mut Command) {
    let lead = || {
        // SAFETY: system calls that take numbers; descriptor 0 is the terminal by then.
        check(unsafe { libc::setsid() }.into())
            .and_then(|_| check(unsafe { libc::ioctl(0, libc::TIOCSCTTY as _, 0) }.into()))
            .map(drop)
    };
    // SAFETY: between fork and exec it makes only these two system calls, and neither allocates nor
    // locks.
    unsafe { command.pre_exec(lead) };
}
