//! One command with its standard streams on a connection, binary-safe, with flow control and ends both ways.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::serve::{Children, line};
use crate::{Launch, frame};

/// Which of a command's outputs somebody at the other end still reads.
#[derive(Default)]
struct Closed([AtomicBool; 2]);

/// Reads what to run from `connection`, runs it, and returns when the other end has heard how it ended and closed the connection.
pub fn serve(connection: File, children: &Children) -> io::Result<()> {
    let output = Arc::new(Mutex::new(connection.try_clone()?));
    let mut input = BufReader::new(connection);
    let Some(asked) = line(&mut input)? else { return Ok(()) };
    let tell =
        |kind, data: &[u8]| frame::write(&mut *output.lock().expect("nobody panics with it"), kind, data);
    let started =
        serde_json::from_slice(&asked).map_err(io::Error::other).and_then(|launch| start(&launch, children));
    let mut child = match started {
        Ok(child) => child,
        Err(error) => {
            tell(frame::FAILED, error.to_string().as_bytes())?;
            return drain(&mut input);
        }
    };
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let closed = Arc::new(Closed::default());
    let heard = closed.clone();
    // Ends with the connection.
    let listener = thread::spawn(move || listen(&mut input, stdin, &heard));
    thread::scope(|scope| {
        scope.spawn(|| pass_on(stdout, frame::OUTPUT, &closed.0[0], &tell));
        scope.spawn(|| pass_on(stderr, frame::ERRORS, &closed.0[1], &tell));
    });
    tell(frame::EXIT, &children.wait(child.id()).to_le_bytes())?;
    listener.join().unwrap_or(Ok(()))
}

fn start(launch: &Launch, children: &Children) -> io::Result<std::process::Child> {
    let (program, arguments) =
        launch.command.split_first().ok_or_else(|| io::Error::other("an empty command"))?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    command.env("HOME", "/root").current_dir(launch.directory.as_deref().unwrap_or("/"));
    if let Some(user) = &launch.user {
        let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
        let (uid, gid) = identity(user, &passwd).ok_or_else(|| {
            io::Error::other(format!(
                "--guest-user {user}: neither a number nor a name of the guest's /etc/passwd"
            ))
        })?;
        command.uid(uid).gid(gid);
    }
    children.start(&mut command).map_err(|error| {
        let place = launch.directory.as_ref().map(|place| format!(" in {place}")).unwrap_or_default();
        io::Error::other(format!("{program}{place}: {error}"))
    })
}

/// The numbers of a user and of the user's group.
fn identity(user: &str, passwd: &str) -> Option<(u32, u32)> {
    let known =
        passwd.lines().map(|line| line.split(':').collect::<Vec<_>>()).find_map(|fields| match fields[..] {
            [name, _, uid, gid, ..] if name == user || uid == user => {
                Some((uid.parse().ok()?, gid.parse().ok()?))
            }
            _ => None,
        });
    known.or_else(|| user.parse().ok().map(|number| (number, number)))
}

/// What comes from the host, to the end of the connection.
fn listen(input: &mut impl Read, mut stdin: Option<ChildStdin>, closed: &Closed) -> io::Result<()> {
    let mut data = Vec::new();
    while let Some(kind) = frame::read(input, &mut data)? {
        match (kind, &data[..]) {
            (frame::INPUT, []) => stdin = None,
            // A command that reads no more loses the rest, as in a pipe.
            (frame::INPUT, data) => stdin = stdin.filter(|mut stdin| stdin.write_all(data).is_ok()),
            (frame::CLOSED, [frame::OUTPUT]) => closed.0[0].store(true, Ordering::Relaxed),
            (frame::CLOSED, [frame::ERRORS]) => closed.0[1].store(true, Ordering::Relaxed),
            _ => return Err(io::Error::other(format!("a piece of kind {kind}"))),
        }
    }
    Ok(())
}

/// What a command writes, until it ends or nobody reads it: the command's next write to the pipe fails then.
fn pass_on(
    pipe: Option<impl Read>,
    kind: u8,
    closed: &AtomicBool,
    tell: &impl Fn(u8, &[u8]) -> io::Result<()>,
) {
    let Some(mut pipe) = pipe else { return };
    let mut buffer = vec![0; frame::MAX];
    while let Ok(count @ 1..) = pipe.read(&mut buffer) {
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
        assert_eq!(identity("nobody", passwd), Some((65534, 65533)));
        assert_eq!(identity("65534", passwd), Some((65534, 65533)));
        assert_eq!(identity("7", passwd), Some((7, 7)));
        assert_eq!(identity("nobdy", passwd), None);
    }
}
