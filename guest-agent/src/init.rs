//! PID 1 of Linux guests: mounts file systems, loads the image's modules, and serves the host's
//! requests.
//!
//! Requests come through vsock, and through the console, one a line. A request after `--` on the
//! kernel's command line is served first: `-- exec uname -a`, or one request in JSON. The guest
//! then powers off.
//!
//! As another process than PID 1, it serves one request of switching tasks or of processes, given
//! as its argument, prints the results, and exits. PID 1 starts it so. On a host it can be started
//! by hand.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;

use crate::children::Children;
use crate::sys::NAME;
use crate::waiting::Waiting;
use crate::{
    Argument, Event, LAUNCH, Mounts, PORT, Request, lines, mounts, port, processes, serve, stream, switching,
    sys, work,
};

/// Whether this process is the agent of a guest, by its name.
pub fn is_agent() -> bool {
    std::env::args_os().next().is_some_and(|name| name == NAME)
}

/// Runs PID 1 until the guest powers off; as any other process, serves one request.
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

/// Serves one request of switching tasks or of processes, in this process.
fn alone() -> ExitCode {
    let tell = &mut |event| lines::tell(&mut io::stdout().lock(), &event);
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
        // The archive also serves guests without shares.
        failed_modules.extend(work::load_modules("shares"));
    }
    if asked.as_ref().is_some_and(|asked| asked.waits) {
        return wait(asked.unwrap_or_default(), &failed_modules);
    }
    if let Some(asked) = &asked {
        failed_modules.extend(mounts::of_command(asked)?);
    }
    mounts::more();
    let children = reaped();
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
    // A console that is not a terminal needs no change.
    let _ = sys::uncook(&requests);
    lines::tell(&mut console, &Event::Ready { failed_modules })?;
    serve::every(&mut BufReader::new(requests), &mut console, &children)?;
    // After the console's EOF, requests still come through vsock.
    loop {
        thread::park();
    }
}

/// The guest's processes, whose ends are waited for from now on.
fn reaped() -> Arc<Children> {
    let children = Arc::<Children>::default();
    let reaper = children.clone();
    thread::spawn(move || reaper.reap());
    children
}

/// Serves requests through vsock, if the kernel has it.
fn listen(children: &Arc<Children>) {
    if let Ok(socket) = sys::listen_vsock(PORT) {
        let children = children.clone();
        thread::spawn(move || serve::vsock(&socket, &children, &Arc::default()));
    }
}

/// Tells the host that this guest is up, and waits for a command with [`crate::Fresh`].
fn wait(mounts: Mounts, failed_modules: &[String]) -> io::Result<()> {
    failed_modules.iter().for_each(|failed| println!("agent: module {failed}"));
    let socket = sys::listen_vsock(PORT)?;
    let children = reaped();
    // The host learns of it when the connection is there. Later connections are to this guest.
    drop(sys::connect_vsock(crate::STREAM_PORT)?);
    serve::vsock(&socket, &children, &Arc::new(Waiting::with(mounts)));
    Ok(())
}

/// Runs the command for which this guest was started. The host waits at
/// [`STREAM_PORT`](crate::STREAM_PORT), or at the other end of a console port.
fn launched(failed_modules: &[String], children: Arc<Children>) -> io::Result<()> {
    failed_modules.iter().for_each(|failed| println!("agent: module {failed}"));
    install_busybox(&children)?;
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

/// Gives a guest with busybox and no shell busybox's programs.
pub(crate) fn install_busybox(children: &Children) -> io::Result<()> {
    if Path::new("/bin/busybox").exists() && !Path::new("/bin/sh").exists() {
        let mut install = std::process::Command::new("/bin/busybox");
        children.run(install.args(["--install", "-s", "/bin"]))?;
    }
    Ok(())
}

/// The request on the command line, as a line. The kernel passes on all parameters that it does not
/// know. So words before the request are ignored.
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
