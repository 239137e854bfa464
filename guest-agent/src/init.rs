//! PID 1 of Linux guests: mounts, loads the modules of its image, and does what the host says.
//!
//! Requests come by vsock, and by the console, where each line is one. What follows `--` on the kernel's command line is
//! done first: `-- exec uname -a`, or one request in JSON, and the guest switches itself off afterwards.
//!
//! Where it is not PID 1 it takes one request of tasks that switch, or of processes, as its argument, tells what it measures, and ends:
//! PID 1 starts it so, and on a host one can do it by hand.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;

use crate::serve::Children;
use crate::{
    Argument, Event, LAUNCH, Mounts, PORT, Request, mounts, port, processes, serve, stream, switching, sys,
    work,
};

/// What the kernel calls the first process of a guest, and that calls those of its own program that it starts.
pub const NAME: &str = "/init";

/// Whether this process is the agent of a guest by its name.
pub fn is_agent() -> bool {
    std::env::args_os().next().is_some_and(|name| name == NAME)
}

/// Does PID 1's work until the guest is switched off; as any other process, one request.
pub fn main() -> ExitCode {
    if std::process::id() != 1 {
        return alone();
    }
    if let Err(error) = run() {
        println!("agent: {error}");
    }
    println!("agent: {}", sys::power_off());
    ExitCode::FAILURE
}

/// One request of tasks that switch or of processes, in this process.
fn alone() -> ExitCode {
    let tell = &mut |event| serve::tell(&mut io::stdout().lock(), &event);
    let done = std::env::args().nth(1).ok_or_else(|| io::Error::other("a request is expected")).and_then(
        |request| match serde_json::from_str(&request).map_err(io::Error::other)? {
            Request::LatCtx(work) => switching::lat_ctx(&work, tell),
            Request::Hackbench(work) => switching::hackbench(&work, tell),
            Request::Processes(work) => processes::run(&work, tell),
            _ => Err(io::Error::other("only PID 1 of a guest does that")),
        },
    );
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> io::Result<()> {
    mounts::base()?;
    let mut failed_modules = work::load_modules("order");
    let launch = fs::read(LAUNCH).ok();
    let asked: Option<Mounts> = launch.as_deref().map(serde_json::from_slice).transpose()?;
    if asked.as_ref().is_some_and(|asked| !asked.shares.is_empty()) {
        // Of an archive that is there for guests without shares, too.
        failed_modules.extend(work::load_modules("shares"));
    }
    let beside = mounts::beside_modules();
    mounts::shares(asked.as_ref().map_or(&[], |asked| &asked.shares))?;
    if let Some(tag) = asked.as_ref().and_then(|asked| asked.modules.as_deref())
        && let Err(error) = mounts::modules(tag, &beside)
    {
        // Most commands do without.
        failed_modules.push(format!("for modprobe: {error}"));
    }
    mounts::more();
    let children = Arc::<Children>::default();
    let reaper = children.clone();
    thread::spawn(move || reaper.reap());

    if asked.is_some() {
        return launched(&failed_modules, children);
    }
    let mut console = OpenOptions::new().write(true).open("/dev/console")?;
    let arguments: Vec<Argument> = std::env::args_os().skip(1).map(Argument).collect();
    if let Some(request) = request(&arguments) {
        serve::request(&mut request.as_bytes(), &mut console, &children)?;
        return Ok(());
    }
    listen(&children);
    let requests = File::open("/dev/console")?;
    // A console that is no terminal has nothing to change.
    let _ = sys::uncook(&requests);
    serve::tell(&mut console, &Event::Ready { failed_modules })?;
    serve::every(&mut BufReader::new(requests), &mut console, &children)?;
    // A console that has come to its end leaves the vsock.
    loop {
        thread::park();
    }
}

/// Takes requests by vsock, where the kernel has that.
fn listen(children: &Arc<Children>) {
    if let Ok(socket) = sys::listen_vsock(PORT) {
        let children = children.clone();
        thread::spawn(move || serve::vsock(socket, children));
    }
}

/// Runs the command for which this guest was started: its host waits at [`STREAM_PORT`](crate::STREAM_PORT), or at the other end of a console's
/// port.
fn launched(failed_modules: &[String], children: Arc<Children>) -> io::Result<()> {
    failed_modules.iter().for_each(|failed| println!("agent: module {failed}"));
    if Path::new("/bin/busybox").exists() && !Path::new("/bin/sh").exists() {
        let mut install = std::process::Command::new("/bin/busybox");
        children.run(install.args(["--install", "-s", "/bin"]))?;
    }
    let connection = sys::connect_vsock(crate::STREAM_PORT).or_else(|vsock| {
        port::open().map_err(|port| {
            io::Error::other(format!(
                "no connection to the host by vsock: {vsock}; by a virtio console: {port}"
            ))
        })
    })?;
    listen(&children);
    stream::serve(connection, &children)
}

/// The request that the command line holds, as a line. The kernel passes on whatever it does not know itself, so what
/// comes before the request is not for us.
fn request(arguments: &[Argument]) -> Option<String> {
    let is_request = |text: &str| text == "exec" || text.starts_with('{');
    let start = arguments.iter().position(|word| word.text().is_some_and(is_request))?;
    match &arguments[start..] {
        [word, command @ ..] if word.text() == Some("exec") => {
            let request = crate::Request::Exec { command: command.to_vec() };
            serde_json::to_string(&request).ok()
        }
        json => Some(json.iter().map(Argument::to_string).collect::<Vec<_>>().join(" ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_is_found_behind_words_for_nobody() {
        let request = |line: &str| super::request(&line.split(' ').map(Argument::from).collect::<Vec<_>>());
        assert_eq!(request("noxsave exec ls /").unwrap(), r#"{"do":"exec","command":["ls","/"]}"#);
        assert_eq!(request(r#"x {"do":"facts"}"#).unwrap(), r#"{"do":"facts"}"#);
        assert_eq!(request("noxsave"), None);
    }
}
