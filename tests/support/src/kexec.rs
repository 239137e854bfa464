//! Tests that go on in another kernel.
//!
//! `cargo lab test live-update` gives each such test a host of its own. When the test asks for
//! another kernel ([`into`]), the host's first process starts that by kexec, and there runs the same
//! test again from its beginning. [`past`] tells the test how far it is. All of the host's processes
//! and its memory are lost, unless they were handed over. [`KEPT`] is on a disk and stays.

use std::convert::Infallible;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use crate::Need;

/// The directory that outlives the kernel.
pub const KEPT: &str = "/kept";

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

fn ask(request: &str) -> io::Result<()> {
    let mut connection = UnixStream::connect(SOCKET)?;
    writeln!(connection, "{request}")?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer)?;
    if answer == DONE { Ok(()) } else { Err(io::Error::other(format!("{request}: {answer}"))) }
}
