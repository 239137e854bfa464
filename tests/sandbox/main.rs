//! Tests of the sandbox with real processes. Each test starts this program again as a helper. The
//! helper enters the sandbox as one kind of thread and does one thing. The test checks how it ended
//! and what it printed.

mod limits;
mod privileges;
mod signals;

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::mpsc;

use support::{Failed, Need, Tests, test};
use vellum_sandbox::user::{User, drop_privileges};
use vellum_sandbox::{EXIT_STATUS, Mode, Sandbox, ThreadKind};
use vellum_sys::{host, terminal};

support::vellum!();

const HELPER: &str = "--sandbox-helper";

/// The system call that the C library makes for open(3).
const OPEN: &str = if cfg!(all(target_env = "musl", target_arch = "x86_64")) { "open" } else { "openat" };

/// The actions of a helper, and the name of the forbidden system call that the sandbox should
/// report.
const FORBIDDEN: [(&str, &str); 9] = [
    ("open", OPEN),
    ("socket", "socket"),
    ("exec", "execve"),
    ("executable-memory", "mmap"),
    ("kill", "kill"),
    ("tkill", "tkill"),
    ("signal-another-process", "tgkill"),
    ("bind-another-process", "sched_setaffinity"),
    ("type-into-terminal", "ioctl"),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, kind, action, mode] = &arguments[..]
        && flag == HELPER
    {
        return help(kind, action, mode.parse().unwrap());
    }
    let mut tests = Tests::from_args();
    for kind in ThreadKind::ALL {
        for (action, call) in FORBIDDEN {
            tests.add(format!("{kind}_is_killed_for_{action}"), Ok(()), move || killed(kind, action, call));
        }
        tests.add(format!("{kind}_may_do_its_work"), Ok(()), move || unharmed(kind, "work", Mode::On));
        tests.add(format!("{kind}_may_abort"), Ok(()), move || aborts(kind));
        tests.add(format!("{kind}_is_heard_when_it_panics"), Ok(()), move || panics(kind));
        tests.add(format!("{kind}_is_not_killed_by_log"), Ok(()), move || unharmed(kind, "open", Mode::Log));
        tests.add(format!("{kind}_is_free_when_off"), Ok(()), move || unharmed(kind, "open", Mode::Off));
    }
    tests.run()
}

#[test]
fn only_vcpus_run() -> Result<(), Failed> {
    killed(ThreadKind::Main, "run", "ioctl")?;
    killed(ThreadKind::Disk, "run", "ioctl")?;
    unharmed(ThreadKind::Vcpu, "run", Mode::On)
}

fn root() -> Need {
    if host::is_root() { Ok(()) } else { Err("needs root: run the tests with sudo".into()) }
}

#[test(root())]
fn root_is_dropped_for_good() -> Result<(), Failed> {
    unharmed(ThreadKind::Main, "drop-root", Mode::On)
}

fn helper(kind: ThreadKind, action: &str, mode: Mode) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([HELPER, &kind.to_string(), action, &mode.to_string()]).stdin(Stdio::null());
    command
}

fn said(output: &Output) -> String {
    format!("{}, stderr: {}", output.status, String::from_utf8_lossy(&output.stderr))
}

fn killed(kind: ThreadKind, action: &str, call: &str) -> Result<(), Failed> {
    let output = helper(kind, action, Mode::On).output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let start = format!("vellum: sandbox: {kind} thread test-{kind} called {call} (system call ");
    if output.status.code() != Some(EXIT_STATUS) || stderr.lines().count() != 1 || !stderr.starts_with(&start)
    {
        return Err(said(&output).into());
    }
    Ok(())
}

fn unharmed(kind: ThreadKind, action: &str, mode: Mode) -> Result<(), Failed> {
    let output = helper(kind, action, mode).output()?;
    if output.status.success() && output.stderr.is_empty() { Ok(()) } else { Err(said(&output).into()) }
}

fn aborts(kind: ThreadKind) -> Result<(), Failed> {
    let output = helper(kind, "abort", Mode::On).output()?;
    if output.status.signal() == Some(libc::SIGABRT) { Ok(()) } else { Err(said(&output).into()) }
}

fn panics(kind: ThreadKind) -> Result<(), Failed> {
    for backtrace in ["0", "1", "full"] {
        let output = helper(kind, "panic", Mode::On).env("RUST_BACKTRACE", backtrace).output()?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        let first = stderr.lines().next().unwrap_or_default();
        // Only the first line counts: the helper's main thread panics too when it joins the
        // panicked thread.
        let good = first.starts_with("vellum: thread ") && first.contains("it went wrong; --sandbox off");
        if !good || !first.contains(file!()) || stderr.contains("which it may not") {
            return Err(said(&output).into());
        }
        if output.status.code() != Some(101) {
            return Err(said(&output).into());
        }
    }
    Ok(())
}

#[test]
fn main_may_start_no_process() -> Result<(), Failed> {
    // musl blocks every signal while it forks. So the kernel kills the process without a message.
    if cfg!(target_env = "musl") {
        let output = helper(ThreadKind::Main, "fork", Mode::On).output()?;
        return if output.status.signal() == Some(libc::SIGSYS) { Ok(()) } else { Err(said(&output).into()) };
    }
    killed(ThreadKind::Main, "fork", "clone")
}

#[test]
fn main_may_start_no_thread_in_namespaces_of_its_own() -> Result<(), Failed> {
    killed(ThreadKind::Main, "enter-namespace", "clone")
}

#[test]
fn landlock_denies_what_seccomp_has_not_forbidden_yet() -> Result<(), Failed> {
    let mut sandbox = Sandbox::new(Mode::On);
    // A separate thread, because its Landlock domain lasts as long as the thread.
    let (status, opened) = std::thread::spawn(move || {
        sandbox.process().unwrap();
        (sandbox.status(), File::open("/proc/self/status").map(drop))
    })
    .join()
    .unwrap();
    match (status.as_str(), opened.map_err(|error| error.kind())) {
        ("on (no landlock)", Ok(())) => Ok(()),
        (status, Err(io::ErrorKind::PermissionDenied)) if status.starts_with("on (landlock abi ") => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}

#[test]
fn a_raw_terminal_is_restored() -> Result<(), Failed> {
    let (master, slave, _) = terminal::open_pty()?;
    // The pair starts in raw mode. `stty sane` makes it like a user's terminal.
    let stty = |arguments: &[&str]| {
        let output = Command::new("stty").args(arguments).stdin(slave.try_clone()?).output()?;
        Ok::<_, io::Error>(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    stty(&["sane"])?;
    let before = stty(&["-g"])?;
    let output = helper(ThreadKind::Vcpu, "raw-then-open", Mode::On).stdin(slave.try_clone()?).output()?;
    if output.status.code() != Some(EXIT_STATUS) || stty(&["-g"])? != before {
        return Err(said(&output).into());
    }
    drop(master);
    Ok(())
}

/// The helper enters the sandbox as a VMM does, and then acts.
fn help(kind: &str, action: &str, mode: Mode) -> ExitCode {
    if action == "panic" {
        vellum::cli::say_panics();
    }
    let kind = ThreadKind::ALL.into_iter().find(|known| known.to_string() == kind).unwrap();
    if action == "raw-then-open" {
        terminal::set_raw(io::stdin().as_fd(), terminal::Output::Processed, None).unwrap();
    }
    // Another user may not reach this program: root's home directory is root's alone.
    let file = File::open(std::env::current_exe().unwrap()).unwrap();
    if action == "drop-root" {
        drop_privileges(User { uid: 65534, gid: 65533 }).unwrap();
    }
    let status = action == "drop-root";
    let status = status.then(|| std::fs::read_to_string("/proc/self/status").unwrap());
    let mut sandbox = Sandbox::new(mode);
    // Mode log must allow opening a file, but Landlock can only deny. `process` handles this.
    sandbox.process().unwrap();
    let name = format!("test-{kind}");
    let work = {
        let (action, name) = (action.to_owned(), name.clone());
        move || {
            sandbox.enter(kind, &name).unwrap();
            act(kind, &action, &file, status);
        }
    };
    match kind {
        ThreadKind::Main | ThreadKind::Receiver | ThreadKind::FileServer => work(),
        // The vCPU threads exist before main enters its sandbox.
        ThreadKind::Vcpu => {
            let (ready, entered) = mpsc::sync_channel(0);
            let thread = std::thread::spawn(move || {
                entered.recv().unwrap();
                work();
            });
            sandbox.enter(ThreadKind::Main, "main").unwrap();
            ready.send(()).unwrap();
            thread.join().unwrap();
        }
        // The other threads are started when they are needed, under main's filter.
        ThreadKind::Disk
        | ThreadKind::Migration
        | ThreadKind::Connection
        | ThreadKind::Fetching
        | ThreadKind::Share => {
            // Threads that lock memory belong to a machine that is being received.
            let main = match kind {
                ThreadKind::Migration | ThreadKind::Fetching => ThreadKind::Receiver,
                _ => ThreadKind::Main,
            };
            sandbox.enter(main, "main").unwrap();
            std::thread::Builder::new().name(name).spawn(work).unwrap().join().unwrap();
        }
    }
    ExitCode::SUCCESS
}

fn act(kind: ThreadKind, action: &str, file: &File, status: Option<String>) {
    match action {
        "open" | "raw-then-open" => drop(File::open("/etc/passwd").unwrap()),
        "socket" => drop(UdpSocket::bind("127.0.0.1:0").unwrap()),
        "abort" => std::process::abort(),
        "panic" => panic!("it went wrong"),
        "work" => work(kind, file),
        // Writes to the file that is standard input.
        "write" => {
            let file = File::from(io::stdin().as_fd().try_clone_to_owned().unwrap());
            file.write_all_at(b"written", 0).unwrap();
        }
        "wait" => {
            println!("ready");
            io::stdin().read_to_end(&mut Vec::new()).unwrap();
        }
        "drop-root" => {
            let status = status.unwrap();
            assert!(status.contains("Uid:\t65534\t65534\t65534\t65534\nGid:\t65533\t65533\t65533\t65533\n"));
            assert!(
                status.contains("CapEff:\t0000000000000000\n") && status.contains("Groups:\t \n"),
                "{status}"
            );
        }
        _ => raw(action),
    }
}

/// Does the usual work of each kind of thread, to find a filter that is too strict.
fn work(kind: ThreadKind, file: &File) {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{:?}", std::time::Instant::now()).unwrap();
    // An allocation above malloc's threshold for mmap, which then grows and moves.
    let mut bytes = vec![1u8; 4 << 20];
    bytes.resize(16 << 20, 2);
    assert_eq!(HashMap::from([(1, bytes.len())])[&1], 16 << 20);
    std::thread::sleep(std::time::Duration::from_nanos(1));
    std::thread::yield_now();
    if !matches!(kind, ThreadKind::Vcpu | ThreadKind::Connection) {
        let mut magic = [0; 4];
        file.read_exact_at(&mut magic, 0).unwrap();
        assert_eq!(&magic, b"\x7fELF");
    }
    match kind {
        ThreadKind::Vcpu | ThreadKind::Connection => {}
        // It only calls statx(2) for the size.
        ThreadKind::FileServer => {
            let (nothing, flags) = (rustix::fs::AtFlags::EMPTY_PATH, rustix::fs::StatxFlags::SIZE);
            assert!(rustix::fs::statx(file, c"", nothing, flags).unwrap().stx_size > 0);
        }
        _ => assert!(file.metadata().unwrap().len() > 0),
    }
    if kind == ThreadKind::Main {
        assert_eq!(std::thread::spawn(|| 7).join().unwrap(), 7);
    }
}

fn raw(action: &str) {
    let path = c"/bin/true".as_ptr();
    let none = [std::ptr::null()];
    // SAFETY: the pointers are to valid strings and lists, mappings are new, and nothing here
    // changes memory in use. A forked child only exits.
    unsafe {
        match action {
            "exec" => drop(libc::execve(path, none.as_ptr(), none.as_ptr())),
            "executable-memory" => {
                let protection = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0);
            }
            "kill" => drop(libc::kill(libc::getpid(), 0)),
            "tkill" => drop(libc::syscall(libc::SYS_tkill, libc::gettid(), 0)),
            "signal-another-process" => drop(libc::syscall(libc::SYS_tgkill, 1, 1, 0)),
            "bind-another-process" => drop(libc::syscall(libc::SYS_sched_setaffinity, 1, 0, 0)),
            "enter-namespace" => {
                let flags = libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_THREAD | libc::CLONE_NEWNET;
                libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0);
            }
            "type-into-terminal" => drop(libc::ioctl(0, libc::TIOCSTI as _, c"x".as_ptr())),
            // KVM_RUN on no descriptor. If it is allowed, the error is EBADF.
            "run" => drop(libc::ioctl(-1, 0xae80, 0)),
            "fork" => {
                if libc::fork() == 0 {
                    libc::_exit(0);
                }
            }
            _ => panic!("no such action: {action}"),
        }
    }
}
