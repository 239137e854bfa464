//! Another kernel takes the place of this one. `lab::hosts::kexec` says how commands ask for it and
//! what outlives the kernel.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::thread;

use lab::hosts::kexec::{DONE, INITRD, KEPT, KERNELS, Replaced, SOCKET};
use lab::hosts::wire::OUT_DIR;
use serde::{Deserialize, Serialize};
use support::kexec;

use crate::Line;

/// How far the job has come, in a file on the disk.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
pub struct Progress {
    /// The command's index.
    pub command: usize,
    /// The kexecs since its first start.
    pub kexecs: u32,
}

impl Progress {
    const FILE: &str = "/kept/progress";

    /// What the last kernel left. The first kernel finds nothing.
    pub fn read() -> io::Result<Self> {
        match fs::read(Self::FILE) {
            Ok(text) => serde_json::from_slice(&text).map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error),
        }
    }

    pub fn write(&self) -> io::Result<()> {
        fs::write(Self::FILE, serde_json::to_vec(self).map_err(io::Error::other)?)
    }
}

/// Mounts the disk that outlives the kernel, with the directory of returned files.
pub fn mount(replaced: &Replaced) -> io::Result<()> {
    fs::create_dir_all(KEPT)?;
    crate::mount_with(&format!("/dev/{}", replaced.disk), "ext4", KEPT, 0)?;
    let out = format!("{KEPT}{OUT_DIR}");
    fs::create_dir_all(&out)?;
    crate::mount_with(&out, "none", OUT_DIR, libc::MS_BIND)
}

/// Answers requests on the socket, in a thread of its own.
pub fn serve(replaced: Replaced, progress: Arc<Mutex<Progress>>, line: Arc<Line>) -> io::Result<()> {
    let listener = UnixListener::bind(SOCKET)?;
    thread::spawn(move || {
        for connection in listener.incoming() {
            // A connection that fails is the asking command's to notice.
            let _ = connection.and_then(|connection| answer(connection, &replaced, &progress, &line));
        }
    });
    Ok(())
}

fn answer(
    mut connection: UnixStream,
    replaced: &Replaced,
    progress: &Mutex<Progress>,
    line: &Line,
) -> io::Result<()> {
    let mut request = String::new();
    BufReader::new(&connection).read_line(&mut request)?;
    let done = match request.trim_end().split_once(' ') {
        Some(("load", kernel)) => load(kernel, &replaced.command_line),
        None if request == "start\n" => start(progress, line),
        _ => Err(io::Error::other(format!("{request:?} is neither `load NAME` nor `start`"))),
    };
    let answer = done.map_or_else(|error| error.to_string(), |()| DONE.to_owned());
    connection.write_all(answer.as_bytes())
}

/// kexec_file_load(2). For musl on Arm, libc lacks the number (include/uapi/asm-generic/unistd.h).
#[cfg(target_arch = "x86_64")]
const KEXEC_FILE_LOAD: libc::c_long = libc::SYS_kexec_file_load;
#[cfg(target_arch = "aarch64")]
const KEXEC_FILE_LOAD: libc::c_long = 294;

/// Loads the kernel `name`, with this host's own initramfs.
pub fn load(name: &str, command_line: &str) -> io::Result<()> {
    let kernel = format!("{KERNELS}/{name}");
    let kernel =
        File::open(&kernel).map_err(|error| io::Error::new(error.kind(), format!("{kernel}: {error}")))?;
    let initrd = File::open(INITRD)?;
    let command_line = CString::new(command_line)?;
    let length = command_line.as_bytes_with_nul().len();
    // SAFETY: the descriptors are open, and the command line has `length` bytes with its NUL.
    let result = unsafe {
        libc::syscall(
            KEXEC_FILE_LOAD,
            kernel.as_raw_fd(),
            initrd.as_raw_fd(),
            length,
            command_line.as_ptr(),
            0 as libc::c_ulong,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Starts the loaded kernel. Returns only if that fails.
fn start(progress: &Mutex<Progress>, line: &Line) -> io::Result<()> {
    // Nothing that a command has said may be lost with this kernel.
    let port = line.drained()?;
    let before = *progress.lock().expect("no thread panics with it");
    Progress { kexecs: before.kexecs + 1, ..before }.write()?;
    // SAFETY: sync and reboot take no pointers.
    unsafe {
        libc::sync();
        libc::reboot(libc::LINUX_REBOOT_CMD_KEXEC);
    }
    let error = io::Error::last_os_error();
    before.write()?;
    drop(port);
    Err(error)
}

/// The program `bed-kexec`: sends requests, and prints why one failed.
pub fn ask(arguments: &[String]) -> ExitCode {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let asked = match arguments[..] {
        ["load", kernel] => kexec::load(kernel),
        ["start"] => kexec::start().map(drop),
        [kernel] => kexec::into(kernel).map(drop),
        _ => Err(io::Error::other("the form is bed-kexec NAME, bed-kexec load NAME or bed-kexec start")),
    };
    match asked {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bed-kexec: {error}");
            ExitCode::FAILURE
        }
    }
}
