//! The process that serves a directory, and the VMM's connection to it.
//!
//! The process is a new instance of this program. The VMM starts it before it confines itself. So
//! the process has no guest memory, and of the VMM's descriptors only its end of a socket. The
//! first packet on the socket is its task. Before the first request it switches to its user,
//! restricts itself to the directory (Landlock) and to the system calls that it needs (seccomp). It
//! ends with the VMM.
//!
//! Each request is one packet, and so is each answer, which carries the descriptor of an opened
//! file. A request without an answer (FORGET) gets a single zero byte, so that both sides
//! alternate.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
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

/// The command-line word that makes this program the server.
pub const WORD: &str = "serve-share";

/// Stands for the answer to a request that has none.
const NONE: [u8; 1] = [0];
/// Precedes the error if the directory is not readable, which the user can fix.
const UNREADABLE: &[u8] = b"unreadable: ";

/// The server's task. The directory's descriptor comes with it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Task {
    config: Config,
    user: Option<User>,
    confined: bool,
}

/// The VMM's end of the connection.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
}

impl Client {
    /// Starts a server of the directory `root`, as `user` or as this process's user. It is ready
    /// when this returns.
    ///
    /// # Errors
    /// Fails if the host refuses a process or the server cannot start.
    /// [`io::ErrorKind::PermissionDenied`] means that the server cannot read the directory.
    pub fn start(root: &File, config: Config, user: Option<User>, mode: sandbox::Mode) -> io::Result<Self> {
        let (socket, far) = socket::packets()?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("vellum").arg(WORD).stdin(Stdio::from(far)).stdout(Stdio::null());
        // A terminal's Ctrl-C must not reach the server: the guest may need it until it ends.
        command.process_group(0).current_dir("/");
        signal::end_with_parent(&mut command);
        command.spawn()?;
        // `command` holds a copy of the server's end. Dropped here, so that the server has the only
        // one.
        drop(command);
        let client = Self { socket };
        let task = Task { config, user, confined: mode != sandbox::Mode::Off };
        let task = serde_json::to_vec(&task).map_err(io::Error::other)?;
        socket::send_with(&client.socket, &task, &[root.as_fd()])?;
        let (mut answer, mut descriptors) = (vec![0; MAX_ANSWER], Vec::new());
        let len = receive(&client.socket, &mut answer, &mut descriptors)?;
        match &answer[..len] {
            b"ready" => Ok(client),
            b"" => Err(io::Error::other("its server ended")),
            why => {
                let text = |why| String::from_utf8_lossy(why).into_owned();
                Err(match why.strip_prefix(UNREADABLE) {
                    Some(why) => io::Error::new(io::ErrorKind::PermissionDenied, text(why)),
                    None => io::Error::other(text(why)),
                })
            }
        }
    }

    /// Sends `request` and waits for the answer. Returns the length of the answer in `answer`,
    /// which must have room for [`MAX_ANSWER`], and the descriptor that came with it.
    ///
    /// # Errors
    /// Fails if the server ended or `request` is too long.
    pub fn ask(&self, request: &[u8], answer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        if request.len() > MAX_REQUEST {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let sent = socket::send_some(&self.socket, request)?;
        let mut descriptors = Vec::new();
        let len = receive(&self.socket, answer, &mut descriptors)?;
        if len == 0 || sent != request.len() {
            return Err(io::Error::other("the share's server ended"));
        }
        Ok((if answer[..len] == NONE { 0 } else { len }, descriptors.pop()))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // This ends the server. A confined process cannot wait for another, so the zombie remains
        // until the VMM ends.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }
}

/// Waits for a packet.
fn receive(socket: &OwnedFd, buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut ready = Poll::default();
    ready.readable(socket);
    loop {
        match socket::receive(socket, buffer, descriptors) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => drop(ready.wait(None)?),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// The server's main function: gets its task from standard input and serves until that closes.
///
/// # Errors
/// Fails if the process was not started by [`Client::start`].
pub fn serve() -> io::Result<()> {
    // Tells it apart from its VMM in process lists. Both run the same program.
    rustix::thread::set_name(c"vellum-share")?;
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    let (mut request, mut descriptors) = (vec![0; MAX_REQUEST], Vec::new());
    let len = receive(&socket, &mut request, &mut descriptors)?;
    let task: Task = serde_json::from_slice(&request[..len]).map_err(io::Error::other)?;
    let root = descriptors.pop().ok_or_else(|| io::Error::other("the task has no directory"))?;
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

/// Switches to the user and enters the sandbox.
fn prepare(root: OwnedFd, task: &Task) -> Result<Server, String> {
    if let Some(User { uid, gid }) = task.user {
        identity::become_user(uid, gid)
            .map_err(|error| format!("its server cannot act as {uid}:{gid}: {error}"))?;
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(1 << 20);
    let mode = if task.confined { sandbox::Mode::On } else { sandbox::Mode::Off };
    let mut sandbox = Sandbox::new(mode);
    // The directory must be listable. This reports it now instead of to the guest.
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
    if task.confined && rustix::process::geteuid().is_root() {
        check_landlock(task.config, sandbox.has_landlock())?;
    }
    sandbox.enter(ThreadKind::FileServer, "share").map_err(|error| error.to_string())?;
    Ok(server)
}

/// Checks that something limits a server that runs as root and may write to the directory, should a
/// guest take it over: seccomp allows it to open and change paths.
fn check_landlock(config: Config, has_landlock: bool) -> Result<(), String> {
    if config.writable && !has_landlock {
        return Err("its server would write as root, and this kernel cannot keep it beneath the directory (Landlock, Linux 5.13): name another user with user=UID:GID, or share it read-only".into());
    }
    Ok(())
}

/// The capabilities of a server that runs as root: only what the guest's root may do below the
/// directory.
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

/// Opens the directory `path` with O_PATH, which gives no access to its content.
///
/// # Errors
/// The error of open(2).
pub fn open_root(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = libc::O_PATH | libc::O_DIRECTORY;
    File::options().read(true).custom_flags(flags).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_root_that_writes_needs_landlock() {
        let [reader, writer] = [false, true].map(|writable| Config { writable, ..Config::default() });
        assert!(check_landlock(writer, false).unwrap_err().contains("user=UID:GID"));
        for (config, has_landlock) in [(reader, false), (reader, true), (writer, true)] {
            assert_eq!(check_landlock(config, has_landlock), Ok(()));
        }
    }
}
