//! One command with its standard streams on a connection, or with a terminal. Streams are
//! binary-safe, pass EOF in both directions and apply back-pressure. The command ends with the
//! connection, unless it is detached.

use std::fs::File;
use std::io::{self, BufReader, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::children::Children;
use crate::lines::line;
use crate::tie::Tie;
use crate::{Argument, Launch, frame, sys, terminal};

/// Which of a command's outputs have no reader any more.
#[derive(Default)]
struct Closed([AtomicBool; 2]);

/// A running command, and this side of its streams.
struct Running {
    id: u32,
    input: Option<File>,
    outputs: Vec<(u8, File)>,
    /// Signals that the command's terminal has ended, because other processes may keep it open.
    over: Option<(PipeReader, PipeWriter)>,
}

/// Reads a launch from `connection` and runs it. Returns when the other end has the exit status and
/// has closed the connection.
///
/// # Errors
/// The other end has disconnected.
pub fn serve(connection: File, children: &Children) -> io::Result<()> {
    let output = connection.try_clone()?;
    let mut input = BufReader::new(connection);
    let Some(asked) = line(&mut input)? else { return Ok(()) };
    run(serde_json::from_slice(&asked).map_err(io::Error::other), input, output, children)
}

/// Runs the launch in `asked`. `input` comes from the other end, `output` goes to it.
///
/// # Errors
/// The other end has disconnected.
pub fn run(
    asked: io::Result<Launch>,
    mut input: BufReader<File>,
    output: File,
    children: &Children,
) -> io::Result<()> {
    let output = Mutex::new(output);
    let tell =
        |kind, data: &[u8]| frame::write(&mut *output.lock().expect("the lock is not poisoned"), kind, data);
    let started = asked.and_then(|launch| Ok((launch.detached, start(&launch, children)?)));
    let Running { id, input: stdin, outputs, over } = match started {
        Ok((true, running)) => {
            children.detach(running.id);
            tell(frame::EXIT, &0i32.to_le_bytes())?;
            return drain(&mut input);
        }
        Ok((false, running)) => running,
        Err(error) => {
            tell(frame::FAILED, error.to_string().as_bytes())?;
            return drain(&mut input);
        }
    };
    let tie = Arc::new(Tie::new(id));
    let tied = tie.clone();
    let closed = Arc::new(Closed::default());
    let heard = closed.clone();
    let (ended, says) = over.unzip();
    if says.is_some() {
        // The other end learns at once that this end also has a terminal.
        tell(frame::OUTPUT, &[])?;
    }
    let gone = says.as_ref().map(PipeWriter::try_clone).transpose()?;
    // This thread ends with the connection.
    let listener = thread::spawn(move || {
        let listened = listen(&mut input, stdin, &heard);
        // Without the other end the terminal hangs up.
        say(gone);
        tied.pull();
        listened
    });
    let status = thread::scope(|scope| {
        for (kind, pipe) in outputs {
            let (closed, ended, tell) = (&closed.0[usize::from(kind == frame::ERRORS)], &ended, &tell);
            scope.spawn(move || pass_on(pipe, kind, closed, ended.as_ref(), tell));
        }
        let status = children.wait(id);
        say(says);
        status
    });
    tie.loosen();
    tell(frame::EXIT, &status.to_le_bytes())?;
    listener.join().unwrap_or(Ok(()))
}

/// Signals that a terminal has ended.
fn say(over: Option<PipeWriter>) {
    // A closed pipe means that its reader already knows.
    drop(over.map(|mut over| over.write_all(&[0])));
}

fn start(launch: &Launch, children: &Children) -> io::Result<Running> {
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let account = match &launch.user {
        Some(user) => Some(account(user, &passwd).ok_or_else(|| {
            io::Error::other(format!(
                "--guest-user {user}: neither a number nor a name of the guest's /etc/passwd"
            ))
        })?),
        None => None,
    };
    let shell = match (&launch.command[..], &launch.terminal) {
        ([], Some(_)) => Some(shell(account.clone().or_else(|| self::account("0", &passwd)))),
        _ => None,
    };
    let shell = shell.map(Argument::from);
    let (program, arguments) = match &shell {
        Some(shell) => (shell, &[][..]),
        None => launch.command.split_first().ok_or_else(|| io::Error::other("an empty command"))?,
    };
    let mut command = Command::new(program);
    if shell.is_some() {
        // As at a login: the shell then reads its profile.
        command.arg0(format!(
            "-{}",
            program.text().and_then(|path| path.rsplit('/').next()).unwrap_or_default()
        ));
    }
    let stream = || if launch.detached { Stdio::null() } else { Stdio::piped() };
    command.args(arguments).stdin(stream()).stdout(stream()).stderr(stream());
    if launch.terminal.is_none() {
        // A terminal's command leads a session, and thereby a group.
        command.process_group(0);
    }
    command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    let home = account.as_ref().map(|account| &account.home[..]).filter(|home| !home.is_empty());
    command
        .env("HOME", home.unwrap_or("/root"))
        .current_dir(launch.directory.as_ref().map_or("/".as_ref(), |place| &*place.0));
    let owner = account.map(|account| (account.uid, account.gid));
    let master = launch.terminal.as_ref().map(|asked| terminal::give(&mut command, asked, owner));
    let master = master.transpose()?;
    if let Some((uid, gid)) = owner {
        command.uid(uid).gid(gid);
    }
    let started = children.start(&mut command);
    // Only the command keeps the terminal's slave open.
    drop(command);
    let mut child = started.map_err(|error| {
        let place = launch.directory.as_ref().map(|place| format!(" in {place}")).unwrap_or_default();
        io::Error::other(format!("{program}{place}: {error}"))
    })?;
    let id = child.id();
    if launch.detached {
        return Ok(Running { id, input: None, outputs: Vec::new(), over: None });
    }
    if let Some(master) = master {
        let outputs = vec![(frame::OUTPUT, master.try_clone()?)];
        return Ok(Running { id, input: Some(master), outputs, over: Some(io::pipe()?) });
    }
    let file = |stream: Option<OwnedFd>| {
        stream.map(File::from).ok_or_else(|| io::Error::other("a command without its streams"))
    };
    let input = file(child.stdin.take().map(OwnedFd::from))?;
    let outputs = vec![
        (frame::OUTPUT, file(child.stdout.take().map(OwnedFd::from))?),
        (frame::ERRORS, file(child.stderr.take().map(OwnedFd::from))?),
    ];
    Ok(Running { id, input: Some(input), outputs, over: None })
}

/// A user of the guest.
#[derive(Clone, Debug, PartialEq)]
struct Account {
    uid: u32,
    gid: u32,
    home: String,
    shell: String,
}

/// The user with that name or number. A number need not be in /etc/passwd.
fn account(user: &str, passwd: &str) -> Option<Account> {
    let known =
        passwd.lines().map(|line| line.split(':').collect::<Vec<_>>()).find_map(|fields| match fields[..] {
            [name, _, uid, gid, _, home, shell, ..] if name == user || uid == user => Some(Account {
                uid: uid.parse().ok()?,
                gid: gid.parse().ok()?,
                home: home.into(),
                shell: shell.into(),
            }),
            _ => None,
        });
    let unknown = |number| Account { uid: number, gid: number, home: String::new(), shell: String::new() };
    known.or_else(|| user.parse().ok().map(unknown))
}

/// The shell of `account` if it exists, otherwise /bin/sh.
fn shell(account: Option<Account>) -> String {
    let own = account.map(|account| account.shell).filter(|shell| std::path::Path::new(shell).is_file());
    own.unwrap_or_else(|| "/bin/sh".into())
}

/// Handles frames from the host until the end of the connection.
fn listen(input: &mut BufReader<File>, mut stdin: Option<File>, closed: &Closed) -> io::Result<()> {
    let mut data = Vec::new();
    // Non-blocking, so that a command that does not read cannot hide the end of the connection.
    stdin.as_ref().map(sys::set_nonblocking).transpose()?;
    while let Some(kind) = frame::read(input, &mut data)? {
        match (kind, &data[..]) {
            (frame::INPUT, []) => stdin = None,
            // If the command does not read any more, the rest is lost, as in a pipe.
            (frame::INPUT, data) => {
                stdin = stdin.filter(|stdin| give(stdin, data, input.get_ref()).is_ok());
            }
            (frame::CLOSED, [frame::OUTPUT]) => closed.0[0].store(true, Ordering::Relaxed),
            (frame::CLOSED, [frame::ERRORS]) => closed.0[1].store(true, Ordering::Relaxed),
            (frame::RESIZED, &[a, b, c, d]) => {
                let [rows, columns] = [[a, b], [c, d]].map(u16::from_le_bytes);
                // Without a terminal the size is ignored.
                drop(stdin.as_ref().map(|terminal| sys::resize(terminal, rows, columns)));
            }
            _ => return Err(io::Error::other(format!("a frame of unknown kind {kind}"))),
        }
    }
    Ok(())
}

/// Writes `data` to `stdin`, which is non-blocking, until the connection ends.
fn give(mut stdin: &File, mut data: &[u8], connection: &File) -> io::Result<()> {
    while !data.is_empty() {
        if let [false, _] = sys::wait_writable(stdin, connection)? {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        match stdin.write(data) {
            Ok(count) => data = &data[count..],
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Passes a command's output on, until it ends or has no reader any more; then the command's next
/// write fails. `over` signals that a terminal has ended, once all its output was read.
fn pass_on(
    mut pipe: File,
    kind: u8,
    closed: &AtomicBool,
    over: Option<&PipeReader>,
    tell: &impl Fn(u8, &[u8]) -> io::Result<()>,
) {
    let mut buffer = vec![0; frame::MAX];
    loop {
        if let Some(over) = over
            && !matches!(sys::wait_either([pipe.as_raw_fd(), over.as_raw_fd()]), Ok([true, _]))
        {
            return;
        }
        let count = match pipe.read(&mut buffer) {
            Ok(count @ 1..) => count,
            // A terminal's input is the same file, which is non-blocking.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            _ => return,
        };
        if closed.load(Ordering::Relaxed) || tell(kind, &buffer[..count]).is_err() {
            return;
        }
    }
}

fn drain(input: &mut impl Read) -> io::Result<()> {
    io::copy(input, &mut io::sink()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_a_name_or_a_number() {
        let passwd = "root:x:0:0::/:/bin/sh\nnobody:x:65534:65533::/:/bin/sh\n";
        let identity = |user| account(user, passwd).map(|account| (account.uid, account.gid));
        assert_eq!(identity("nobody"), Some((65534, 65533)));
        assert_eq!(identity("65534"), Some((65534, 65533)));
        assert_eq!(identity("7"), Some((7, 7)));
        assert_eq!(identity("nobdy"), None);
        assert_eq!(shell(account("root", passwd)), "/bin/sh");
        assert_eq!(shell(account("nobody", "nobody:x:1:1::/:/no/shell\n")), "/bin/sh");
    }
}
