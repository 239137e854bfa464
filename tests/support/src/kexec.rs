//! Tests that go on in another kernel.
//!
//! `cargo lab test live-update` gives each such test a host of its own. When the test asks for
//! another kernel ([`go_on`]), the host's first process starts that by kexec, and there runs the same
//! test again from its beginning. [`past`] tells the test how far it is. All of the host's processes
//! and its memory are lost, unless they were handed over. [`KEPT`] is on a disk and stays.

use std::convert::Infallible;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use crate::{Failed, Need};

/// The directory that outlives the kernel.
pub const KEPT: &str = "/kept";

/// The next kernels, each in a file by its name.
pub const KERNELS: &str = "/kept/kernels";

/// The environment variable with the number of kexecs since the test's first start.
pub const KEXECS: &str = "VELLUM_KEXECS";

/// The socket of the host's first process. A connection carries one request, a line, and the answer:
/// [`DONE`] or an error's text. `load NAME` loads a kernel by kexec_file_load(2), and `start` starts
/// the loaded one, which leaves no one to answer.
pub const SOCKET: &str = "/run/kexec";

/// The answer to a request that succeeded.
pub const DONE: &str = "done";

/// A host that another kernel can replace.
pub fn host() -> Need {
    match std::env::var_os(KEXECS) {
        Some(_) => Ok(()),
        None => Err("needs a host that another kernel can replace: cargo lab test live-update".into()),
    }
}

/// The number of kexecs since the test's first start.
pub fn past() -> u32 {
    std::env::var(KEXECS).ok().and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// The kernel that is next. It is loaded when the test begins.
pub fn next() -> io::Result<String> {
    after(past())
}

/// The kernel that runs.
pub fn running() -> io::Result<String> {
    turn(past())
}

/// The kernel after `past` kexecs and one more.
pub fn after(past: u32) -> io::Result<String> {
    turn(past + 1)
}

/// The kernel after `number` kexecs: the host's kernels take turns, and the first is the one that it
/// booted.
fn turn(number: u32) -> io::Result<String> {
    let names = fs::read_dir(KERNELS)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<io::Result<Vec<_>>>()?;
    names.sort();
    match names.len() {
        0 => Err(io::Error::other(format!("{KERNELS} has no kernel"))),
        count => Ok(names.swap_remove(number as usize % count)),
    }
}

/// Loads the kernel `name`.
pub fn load(name: &str) -> io::Result<()> {
    ask(&format!("load {name}"))
}

/// Starts the loaded kernel. Returns only if that fails.
pub fn start() -> io::Result<Infallible> {
    ask("start").and_then(|()| Err(io::Error::other("the kernel was started, and this one still runs")))
}

/// Loads and starts the kernel `name`. Returns only if that fails.
pub fn into(name: &str) -> io::Result<Infallible> {
    load(name).and_then(|()| start())
}

/// Goes on in the [`next`] kernel. Returns only if that fails, with the test's failure.
pub fn go_on() -> Failed {
    match next().and_then(|name| into(&name)) {
        Ok(never) => match never {},
        Err(error) => error.into(),
    }
}

fn ask(request: &str) -> io::Result<()> {
    let mut connection = UnixStream::connect(SOCKET)?;
    writeln!(connection, "{request}")?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer)?;
    if answer == DONE { Ok(()) } else { Err(io::Error::other(format!("{request}: {answer}"))) }
}
