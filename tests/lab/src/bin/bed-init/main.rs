//! The first process of an emulated host. It mounts file systems, loads KVM, runs the job and
//! reports the result on the results line. It is static, so the host needs no C library.
//! `lab::hosts::wire` defines the protocol.

mod kexec;
mod systemd;

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kexec::Progress;
use lab::hosts::kexec::{KEPT, KEXECS, PROGRAM};
use lab::hosts::parameter;
use lab::hosts::wire::{Boot, Exit, Frame, JOB_PATH, Job, OUT_DIR};

fn main() -> ExitCode {
    let mut arguments = std::env::args();
    let name = arguments.next().unwrap_or_default();
    if Path::new(&name).file_name().is_some_and(|name| name == PROGRAM) {
        return kexec::ask(&arguments.collect::<Vec<_>>());
    }
    // SAFETY: getpid has no preconditions.
    let ended = match (unsafe { libc::getpid() }, arguments.next().as_deref()) {
        (1, _) => run(),
        (_, Some(systemd::SERVICE)) => job().and_then(|job| work(&job, Vec::new())),
        _ => {
            eprintln!(
                "bed-init is the first process of an emulated host: use `cargo lab run svm -- COMMAND`"
            );
            return ExitCode::from(2);
        }
    };
    if let Err(error) = ended {
        eprintln!("bed-init: {error}");
    }
    // SAFETY: sync and reboot take no pointers. If both reboots fail, the laboratory ends the
    // emulator.
    unsafe {
        libc::sync();
        libc::reboot(libc::RB_POWER_OFF);
        libc::reboot(libc::RB_AUTOBOOT);
    }
    loop {
        std::thread::park();
    }
}

fn run() -> io::Result<()> {
    let mut complaints = Vec::new();
    for (kind, at) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("devpts", "/dev/pts"),
        ("tmpfs", "/dev/shm"),
        ("tmpfs", "/tmp"),
        ("tmpfs", "/run"),
        ("tmpfs", OUT_DIR),
        ("debugfs", "/sys/kernel/debug"),
        ("tracefs", "/sys/kernel/tracing"),
        ("hugetlbfs", "/dev/hugepages"),
    ] {
        if let Err(error) = mount(kind, at) {
            // A kernel without one of them is still a host. A command that needs it fails by
            // itself.
            complaints.push(format!("{at} ({kind}): {error}"));
        }
    }
    let job = job()?;
    for module in &job.modules {
        if let Err(error) = load(module, &job.parameters) {
            complaints.push(format!("{module}: {error}"));
        }
    }
    if job.races
        && let Err(error) = hold_kvm()
    {
        complaints.push(format!("machines that hold KVM's code as it is: {error}"));
    }
    let _ = fs::write("/proc/sys/kernel/hostname", &job.bed);
    if let Err(error) = loopback_up() {
        complaints.push(format!("lo: {error}"));
    }
    if let Some(replaced) = &job.replaced {
        // Without it the job's progress is unknown.
        kexec::mount(replaced)?;
    }
    if let Some(shown) = &job.root {
        let moved = on_disk(shown, &job);
        if job.systemd {
            return moved.and_then(|()| systemd::become_it());
        }
        if let Err(error) = moved.and_then(|()| surroundings()) {
            complaints.push(format!("a root on a disk: {error}"));
        }
    }
    work(&job, complaints)
}

fn job() -> io::Result<Job> {
    serde_json::from_slice(&fs::read(JOB_PATH)?).map_err(io::Error::other)
}

/// Runs the job on a host that is ready but for these complaints.
fn work(job: &Job, complaints: Vec<String>) -> io::Result<()> {
    let refused: Vec<String> = job.parameters.iter().filter_map(|p| parameter::refused(p)).collect();
    if job.shell {
        complaints.iter().chain(&refused).for_each(|complaint| eprintln!("bed-init: {complaint}"));
        return shell(job);
    }
    let line = Arc::new(Line { port: Mutex::new(results_port(&job.results)?), pipes: Mutex::default() });
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned();
    let boot = Boot { kernel, kvm: Path::new("/dev/kvm").exists(), complaints, refused };
    line.send(&Frame::Boot(boot))?;
    let progress = Arc::new(Mutex::new(Progress::default()));
    if let Some(replaced) = job.replaced.clone() {
        let before = Progress::read()?;
        *progress.lock().expect("no thread panics with it") = before;
        match job.systemd {
            // The command ends with the host that it has shut down.
            true => Progress { kexecs: before.kexecs + 1, ..before }.write()?,
            false => kexec::serve(replaced, Arc::clone(&progress), Arc::clone(&line))?,
        }
    }
    let done = *progress.lock().expect("no thread panics with it");
    for (index, command) in job.commands.iter().enumerate().skip(done.command) {
        let kexecs = if index == done.command { done.kexecs } else { 0 };
        *progress.lock().expect("no thread panics with it") = Progress { command: index, kexecs };
        let exit = execute(job, command, kexecs, &line)?;
        line.send(&Frame::Exit(exit))?;
    }
    return_files(Path::new(OUT_DIR), "", &line)?;
    line.send(&Frame::Done)?;
    line.drained().map(drop)
}

/// The results line, and the pipes whose content goes there.
struct Line {
    port: Mutex<File>,
    pipes: Mutex<Vec<OwnedFd>>,
}

impl Line {
    fn lock(&self) -> MutexGuard<'_, File> {
        self.port.lock().expect("no thread panics with the port")
    }

    fn send(&self, frame: &Frame) -> io::Result<()> {
        frame.write(&mut *self.lock())
    }

    /// Waits until the other end has everything. The line is slower than this process: bytes queued
    /// in the driver would be lost with the kernel. The line is idle while the lock is held.
    fn drained(&self) -> io::Result<MutexGuard<'_, File>> {
        loop {
            let port = self.lock();
            let pipes = self.pipes.lock().expect("no thread panics with the pipes");
            let left = pipes.iter().map(queued).sum::<io::Result<usize>>()?;
            drop(pipes);
            if left == 0 {
                // SAFETY: the descriptor is open, and tcdrain takes nothing else.
                return match unsafe { libc::tcdrain(port.as_raw_fd()) } {
                    0 => Ok(port),
                    _ => Err(io::Error::last_os_error()),
                };
            }
            drop(port);
            std::thread::yield_now();
        }
    }
}

/// The bytes in a pipe.
fn queued(pipe: &OwnedFd) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: FIONREAD writes an int, and `bytes` is one.
    match unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD as libc::Ioctl, &mut bytes) } {
        0 => Ok(bytes as usize),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Mounts `kind` at `at`. Files that the initramfs has there stay visible, such as a clone's test
/// programs in /tmp.
fn mount(kind: &str, at: &str) -> io::Result<()> {
    fs::create_dir_all(at)?;
    let shipped = fs::read_dir(at)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
    if kind != "tmpfs" || shipped.is_empty() {
        return mount_with(kind, kind, at, 0);
    }
    let aside = format!("/shipped{at}");
    fs::create_dir_all(&aside)?;
    mount_with(at, "none", &aside, libc::MS_BIND)?;
    mount_with(kind, kind, at, 0)?;
    for name in shipped {
        let name = name.to_string_lossy();
        let (from, to) = (format!("{aside}/{name}"), format!("{at}/{name}"));
        if fs::metadata(&from)?.is_dir() { fs::create_dir(&to) } else { File::create(&to).map(drop) }?;
        mount_with(&from, "none", &to, libc::MS_BIND)?;
    }
    Ok(())
}

fn mount_with(source: &str, kind: &str, at: &str, flags: libc::c_ulong) -> io::Result<()> {
    let c = |text: &str| CString::new(text).map_err(io::Error::from);
    let (source, kind, at) = (c(source)?, c(kind)?, c(at)?);
    // SAFETY: the strings are NUL-terminated and outlive the call; the data pointer may be null.
    match unsafe { libc::mount(source.as_ptr(), at.as_ptr(), kind.as_ptr(), flags, std::ptr::null()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes the disk the root, with the mounts and the directories and files in `shown` of the old root.
fn on_disk(shown: &[(String, String)], job: &Job) -> io::Result<()> {
    const DISK: &str = "/disk";
    fs::create_dir_all(DISK)?;
    mount_with("/dev/vda", "ext4", DISK, 0)?;
    for at in ["/proc", "/sys", "/dev", "/tmp", "/run", OUT_DIR]
        .into_iter()
        .chain(job.replaced.as_ref().map(|_| KEPT))
    {
        fs::create_dir_all(format!("{DISK}{at}"))?;
        mount_with(at, "none", &format!("{DISK}{at}"), libc::MS_MOVE)?;
    }
    for (from, to) in shown {
        let to = format!("{DISK}{to}");
        let is_directory = fs::metadata(from)?.is_dir();
        if !is_directory && job.systemd {
            // As if installed: systemd would unmount a file that is mounted, and fail while it is used.
            if !fs::exists(&to)? {
                fs::copy(from, &to)?;
            }
            continue;
        }
        if is_directory { fs::create_dir_all(&to) } else { File::create(&to).map(drop) }?;
        mount_with(from, "none", &to, libc::MS_BIND | libc::MS_REC)?;
    }
    std::env::set_current_dir(DISK)?;
    mount_with(".", "none", "/", libc::MS_MOVE)?;
    std::os::unix::fs::chroot(".")?;
    std::env::set_current_dir("/")
}

/// Mounts a directory with nodev, and adds a default route through an interface that drops
/// everything.
fn surroundings() -> io::Result<()> {
    mount_with("tmpfs", "tmpfs", "/mnt", libc::MS_NODEV)?;
    // Loading the module already creates dummy0.
    for line in [
        "link add nowhere type dummy",
        "address add 192.0.2.1/24 dev nowhere",
        "link set nowhere up",
        "route add default via 192.0.2.2",
    ] {
        let output = Command::new("/bin/ip").args(line.split(' ')).output()?;
        if !output.status.success() {
            return Err(io::Error::other(format!(
                "ip {line}: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            )));
        }
    }
    Ok(())
}

/// Loads one module with its own parameters out of `parameters`.
fn load(path: &str, parameters: &[String]) -> io::Result<()> {
    let stem = Path::new(path).file_stem().unwrap_or_default().to_string_lossy().replace('-', "_");
    let own: Vec<&str> = parameters
        .iter()
        .filter_map(|parameter| {
            parameter.split_once('.').filter(|(module, _)| module.replace('-', "_") == stem).map(|p| p.1)
        })
        .collect();
    let image = fs::read(path)?;
    let own = CString::new(own.join(" "))?;
    // SAFETY: the image and the parameters are valid for the lengths given and outlive the call.
    let result = unsafe {
        libc::syscall(libc::SYS_init_module, image.as_ptr(), image.len() as libc::c_ulong, own.as_ptr())
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Creates VMs that stay. KVM's static keys flip when the first VM comes or the last one goes,
/// which patches the kernel's code under running CPUs. QEMU may then continue in stale code
/// (`lab::hosts::svm`). With these VMs each key flips once, now. The keys are preempt_notifier_key
/// in the scheduler, and KVM's apic_hw_disabled, apic_sw_disabled and kvm_has_noapic_vcpu.
#[cfg(target_arch = "x86_64")]
#[expect(clippy::disallowed_methods, reason = "neither of them has memory")]
fn hold_kvm() -> io::Result<()> {
    const APIC_ENABLED: u64 = 1 << 11;
    let kvm = vellum_kvm::vm::open().map_err(io::Error::other)?;
    let with_apic = kvm.create_vm()?;
    with_apic.create_irq_chip()?;
    let vcpu = with_apic.create_vcpu(0)?;
    let mut sregs = vcpu.get_sregs()?;
    sregs.apic_base &= !APIC_ENABLED;
    vcpu.set_sregs(&sregs)?;
    let without = kvm.create_vm()?;
    let other = without.create_vcpu(0)?;
    std::mem::forget((with_apic, vcpu, without, other));
    Ok(())
}

/// Only QEMU's x86-64 processors continue in stale code.
#[cfg(not(target_arch = "x86_64"))]
fn hold_kvm() -> io::Result<()> {
    Ok(())
}

/// Brings up the loopback interface, which starts down and which tests use.
fn loopback_up() -> io::Result<()> {
    // SAFETY: socket takes no pointers.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: ifreq is plain data, for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo\0") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: SIOCSIFFLAGS reads an ifreq, and `request` is one.
    let result = unsafe { libc::ioctl(socket, libc::SIOCSIFFLAGS as libc::Ioctl, &request) };
    let error = io::Error::last_os_error();
    // SAFETY: the socket is ours and is not used again.
    unsafe { libc::close(socket) };
    if result == 0 { Ok(()) } else { Err(error) }
}

/// The results line's port in raw mode, so no byte is changed.
fn results_port(name: &str) -> io::Result<File> {
    let path = Path::new("/dev").join(name);
    let port = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(path)?;
    // SAFETY: termios is plain data, for which all zeroes is a value.
    let mut settings: libc::termios = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and `settings` is a writable termios for each of these calls.
    let result = unsafe {
        libc::tcgetattr(port.as_raw_fd(), &mut settings);
        libc::cfmakeraw(&mut settings);
        settings.c_cflag = settings.c_cflag & !libc::CBAUD | libc::B115200;
        libc::tcsetattr(port.as_raw_fd(), libc::TCSANOW, &settings)
    };
    if result == 0 { Ok(port) } else { Err(io::Error::last_os_error()) }
}

fn prepare(job: &Job, command: &mut Command) {
    command
        .current_dir(OUT_DIR)
        .env_clear()
        .env("PATH", "/bin:/sbin:/usr/bin:/usr/local/bin")
        .env("HOME", "/tmp")
        .env("TERM", "linux")
        .env("XDG_RUNTIME_DIR", "/run")
        .env("RUST_BACKTRACE", "1")
        .env("VELLUM_BED", &job.bed)
        .envs(job.env.iter().map(|(name, value)| (name, value)));
}

fn execute(job: &Job, words: &[String], kexecs: u32, line: &Arc<Line>) -> io::Result<Exit> {
    let (program, arguments) = words.split_first().ok_or_else(|| io::Error::other("an empty command"))?;
    let mut command = Command::new(program);
    prepare(job, command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()));
    command.process_group(0);
    if let Some(replaced) = &job.replaced {
        command.env(KEXECS, kexecs.to_string());
        if !job.systemd {
            // As an operator does it: `vellum live-update save` wants a loaded kernel.
            kexec::load(&support::kexec::after(kexecs)?, &replaced.command_line)?;
        }
    }
    let (before, idle_before) = (Instant::now(), idle()?);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            line.send(&Frame::Stderr(format!("{program}: {error}\n").into_bytes()))?;
            return Ok(Exit { code: 127, seconds: 0.0, idle: 0.0 });
        }
    };
    let stdout = child.stdout.take().map(|from| forward(from, line, Frame::Stdout)).transpose()?;
    let stderr = child.stderr.take().map(|from| forward(from, line, Frame::Stderr)).transpose()?;
    let status = child.wait()?;
    let seconds = before.elapsed().as_secs_f64();
    let idle = idle()?.saturating_sub(idle_before).as_secs_f64() / seconds / cpus();
    // Processes that the command left behind would keep its output open, perhaps for ever. SAFETY:
    // kill takes no pointers. The child was the first process of its group.
    unsafe { libc::kill(-(child.id() as libc::pid_t), libc::SIGKILL) };
    for reader in [stdout, stderr].into_iter().flatten() {
        reader.join().map_err(|_| io::Error::other("a reader panicked"))??;
    }
    line.pipes.lock().expect("no thread panics with the pipes").clear();
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    Ok(Exit { code, seconds, idle })
}

fn forward(
    mut from: impl Read + AsFd + Send + 'static,
    line: &Arc<Line>,
    frame: fn(Vec<u8>) -> Frame,
) -> io::Result<std::thread::JoinHandle<io::Result<()>>> {
    line.pipes.lock().expect("no thread panics with the pipes").push(from.as_fd().try_clone_to_owned()?);
    let line = Arc::clone(line);
    Ok(std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        loop {
            wait_for(&from)?;
            // Bytes are in the pipe or on the line whenever the line can be locked.
            let mut port = line.lock();
            match from.read(&mut buffer)? {
                0 => return Ok(()),
                n => frame(buffer[..n].to_vec()).write(&mut *port)?,
            }
        }
    }))
}

/// Waits until a pipe has bytes or no writer.
fn wait_for(pipe: &impl AsFd) -> io::Result<()> {
    let mut poll = libc::pollfd { fd: pipe.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    loop {
        // SAFETY: `poll` is one pollfd.
        match unsafe { libc::poll(&mut poll, 1, -1) } {
            -1 => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => (),
                error => return Err(error),
            },
            _ => return Ok(()),
        }
    }
}

/// Idle time since boot, summed over CPUs.
fn idle() -> io::Result<Duration> {
    vellum_host::idle::since_boot()
        .ok_or_else(|| io::Error::other("neither /proc/timer_list nor /proc/stat has idle times"))
}

fn cpus() -> f64 {
    std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64)
}

fn return_files(dir: &Path, prefix: &str, line: &Line) -> io::Result<()> {
    let mut entries = fs::read_dir(dir)?.collect::<io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        let kind = entry.file_type()?;
        if kind.is_dir() {
            return_files(&entry.path(), &format!("{name}/"), line)?;
        } else if kind.is_file() {
            let mut file = File::open(entry.path())?;
            let mut part = vec![0; 64 << 10];
            // An empty file is one empty part.
            loop {
                let n = file.read(&mut part)?;
                line.send(&Frame::File(name.clone(), part[..n].to_vec()))?;
                if n == 0 {
                    break;
                }
            }
        }
    }
    Ok(())
}

/// A shell on the console, with job control.
fn shell(job: &Job) -> io::Result<()> {
    let console = OpenOptions::new().read(true).write(true).open(Path::new("/dev").join(&job.console))?;
    let mut command = Command::new("/bin/sh");
    prepare(job, command.arg("-l"));
    command.stdin(console.try_clone()?).stdout(console.try_clone()?).stderr(console);
    // SAFETY: setsid and ioctl are async-signal-safe. Nothing else runs between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::setsid();
            match libc::ioctl(0, libc::TIOCSCTTY, 0) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        });
    }
    command.spawn()?.wait()?;
    io::stdout().flush()
}
