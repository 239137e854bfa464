//! A pseudo-terminal for a command: the guest's counterpart of the user's terminal.

use std::fs::File;
use std::io;
use std::os::unix::fs::{OpenOptionsExt, fchown};
use std::process::Command;

use crate::{Terminal, sys};

/// Gives `command` a terminal like `asked`, owned by `owner`. Returns its master.
pub fn give(command: &mut Command, asked: &Terminal, owner: Option<(u32, u32)>) -> io::Result<File> {
    let open = |path: &str| File::options().read(true).write(true).custom_flags(libc::O_NOCTTY).open(path);
    let pair = || -> io::Result<_> {
        let master = open("/dev/ptmx")?;
        let slave = open(&format!("/dev/pts/{}", sys::unlock_terminal(&master)?))?;
        if let Some((uid, gid)) = owner {
            fchown(&slave, Some(uid), Some(gid))?;
        }
        sys::resize(&master, asked.rows, asked.columns)?;
        Ok((master, slave.try_clone()?, slave.try_clone()?, slave))
    };
    let (master, input, output, errors) = pair().map_err(|error| {
        io::Error::other(format!("no terminal ({error}): does the guest's kernel have CONFIG_UNIX98_PTYS?"))
    })?;
    command.stdin(input).stdout(output).stderr(errors).env("TERM", &asked.kind);
    sys::lead_terminal(command);
    Ok(master)
}
