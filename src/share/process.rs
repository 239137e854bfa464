//! The process that serves a directory, and how the VMM speaks to it.
//!
//! It is this program once more, started while the VMM may still start one: so that it has nothing of the guest's memory, and nothing of
//! the VMM's descriptors but its end of a socket. By that it is told what to serve. It becomes the user that it is to be, gives up all
//! files that do not lie beneath the directory (Landlock), and every system call that it does not need (seccomp), before it reads the
//! first request. It ends with the VMM.
//!
//! A packet is a request, and a packet its answer, with the descriptor of a file that was opened. For a request that
//! has no answer (FORGET) a single zero byte comes back, so that both sides take turns.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{Mode, OFlags};
use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};

use super::Config;
use super::fuse::Answer;
use super::server::{MAX_ANSWER, MAX_REQUEST, Server};
use vellum_sandbox::user::User;
use vellum_sandbox::{self as sandbox, Sandbox, ThreadKind};
use vellum_sys::poll::Poll;
use vellum_sys::{identity, signal, socket};

/// The word of the command line by which this program is the server.
pub const WORD: &str = "serve-share";

/// What stands for an answer where none is expected.
const NONE: [u8; 1] = [0];
/// What stands before the reason where the directory may not be read, which is nobody's fault but of who shares it.
const UNREADABLE: &[u8] = b"unreadable: ";

/// What the server is told first, with the descriptor of the directory.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Task {
    config: Config,
    user: Option<User>,
    confined: bool,
}

/// The VMM's end.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
}

impl Client {
    /// Starts a server of the directory behind `root`, which acts as `user` or as whoever this process is. It is there when this
    /// returns.
    ///
    /// # Errors
    /// Where the host refuses a process, or the server says why it cannot: [`io::ErrorKind::PermissionDenied`] where that is because it
    /// may not read the directory.
    pub fn start(root: &File, config: Config, user: Option<User>, mode: sandbox::Mode) -> io::Result<Self> {
        let (socket, far) = socket::packets()?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("vellum").arg(WORD).stdin(Stdio::from(far)).stdout(Stdio::null());
        // Whoever ends the VMM from a terminal does not mean the server, which the guest may need until its own end.
        command.process_group(0).current_dir("/");
        signal::end_with_parent(&mut command);
        command.spawn()?;
        // The command's own copy of the server's end goes with it: what is left is the server's.
        drop(command);
        let client = Self { socket };
        let task = Task { config, user, confined: mode != sandbox::Mode::Off };
        let task = serde_json::to_vec(&task).map_err(io::Error::other)?;
        socket::send_with(&client.socket, &task, &[root.as_fd()])?;
        let (mut answer, mut descriptors) = (vec![0; MAX_ANSWER], Vec::new());
        let len = receive(&client.socket, &mut answer, &mut descriptors)?;
        match &answer[..len] {
            b"ready" => Ok(client),
            b"" => Err(io::Error::other("its server has ended")),
            why => {
                let text = |why| String::from_utf8_lossy(why).into_owned();
                Err(match why.strip_prefix(UNREADABLE) {
                    Some(why) => io::Error::new(io::ErrorKind::PermissionDenied, text(why)),
                    None => io::Error::other(text(why)),
                })
            }
        }
    }

    /// Has `request` answered: how many bytes of `answer`, which has room for [`MAX_ANSWER`], are the answer, and the descriptor that
    /// came with it.
    ///
    /// # Errors
    /// Where the server has ended, or `request` is longer than any may be.
    pub fn ask(&self, request: &[u8], answer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        if request.len() > MAX_REQUEST {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let sent = socket::send_some(&self.socket, request)?;
        let mut descriptors = Vec::new();
        let len = receive(&self.socket, answer, &mut descriptors)?;
        if len == 0 || sent != request.len() {
            return Err(io::Error::other("the server of the share has ended"));
        }
        Ok((if answer[..len] == NONE { 0 } else { len }, descriptors.pop()))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // It ends with that. A confined process may wait for no other: what is left of it goes with the VMM.
        socket::shut(&self.socket, std::net::Shutdown::Both);
    }
}

/// Waits for a packet.
fn receive(socket: &OwnedFd, buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut ready = Poll::default();
    ready.readable(socket.as_raw_fd());
    loop {
        match socket::receive(socket, buffer, descriptors) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => drop(ready.wait(None)?),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// What the process does: serves the directory that it is told of by its standard input, until that ends.
///
/// # Errors
/// Where it was not started by [`Client::start`].
pub fn serve() -> io::Result<()> {
    // Where processes are listed it is told from its VMM, whose program it is.
    rustix::thread::set_name(c"vellum-share")?;
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    let (mut request, mut descriptors) = (vec![0; MAX_REQUEST], Vec::new());
    let len = receive(&socket, &mut request, &mut descriptors)?;
    let task: Task = serde_json::from_slice(&request[..len]).map_err(io::Error::other)?;
    let root = descriptors.pop().ok_or_else(|| io::Error::other("no directory came along"))?;
    let mut server = match prepare(root, &task) {
        Ok(server) => server,
        Err(why) => return socket::send_some(&socket, why.as_bytes()).map(drop),
    };
    socket::send_some(&socket, b"ready")?;
    let mut answer = Answer::default();
    loop {
        let len = match receive(&socket, &mut request, &mut Vec::new())? {
            0 => return Ok(()),
            len => len,
        };
        let opened = server.answer(&request[..len], &mut answer);
        let bytes = if answer.is_expected() { answer.bytes() } else { &NONE };
        match opened {
            Some(file) => socket::send_with(&socket, bytes, &[file.as_fd()])?,
            None => socket::send_some(&socket, bytes)?,
        };
    }
}

/// Becomes what it is to be, for good.
fn prepare(root: OwnedFd, task: &Task) -> Result<Server, String> {
    if let Some(User { uid, gid }) = task.user {
        identity::become_user(uid, gid)
            .map_err(|error| format!("its server cannot act as {uid}:{gid}: {error}"))?;
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1 << 20);
    let mode = if task.confined { sandbox::Mode::On } else { sandbox::Mode::Off };
    let mut sandbox = Sandbox::new(mode);
    // What it cannot list it cannot serve: said now, and not to the guest.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(&root, c".", flags, Mode::empty()).map_err(|error| {
        let mark = String::from_utf8_lossy(UNREADABLE);
        format!("{mark}its server cannot read it: {}", io::Error::from(error))
    })?;
    let server =
        Server::new(root.try_clone().map_err(|error| error.to_string())?, task.config, limit as usize);
    let server = server.map_err(|error| format!("its server cannot read it: {error}"))?;
    sandbox
        .process_beneath(&root, task.config.writable, kept(task.config))
        .map_err(|error| error.to_string())?;
    sandbox.enter(ThreadKind::FileServer, "share").map_err(|error| error.to_string())?;
    Ok(server)
}

/// What a server that acts as root keeps of root's capabilities: what its guest's root may do beneath the directory, and no more.
fn kept(config: Config) -> CapabilitySet {
    let mut kept = CapabilitySet::DAC_READ_SEARCH;
    if config.writable {
        kept |= CapabilitySet::CHOWN | CapabilitySet::DAC_OVERRIDE | CapabilitySet::FOWNER;
        for (may, needs) in [
            (config.setid, CapabilitySet::FSETID),
            (config.devices, CapabilitySet::MKNOD),
            (config.privileged_xattrs, CapabilitySet::SETFCAP | CapabilitySet::SYS_ADMIN),
        ] {
            kept.set(needs, may);
        }
    }
    kept
}

/// Opens the directory `path`, which says nothing and allows nothing yet.
///
/// # Errors
/// What the kernel says.
pub fn open_root(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = libc::O_PATH | libc::O_DIRECTORY;
    File::options().read(true).custom_flags(flags).open(path)
}
