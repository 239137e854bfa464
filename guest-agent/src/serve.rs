//! Requests: reads a line, executes it, reports events.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufRead, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::children::Children;
use crate::lines::{line, tell};
use crate::sys::NAME;
use crate::tie::{self, Tie};
use crate::waiting::Waiting;
use crate::{Argument, Event, Kexec, MAX_REQUEST, Request, sys, work};

/// Reads one request and answers it.
pub fn request(
    input: &mut impl BufRead,
    output: &mut (impl Write + Send),
    children: &Children,
) -> io::Result<()> {
    line(input)?.map_or(Ok(()), |line| answer(&line, output, None, children))
}

/// Reads requests to the end of `input`, and answers each.
pub fn every(
    input: &mut impl BufRead,
    output: &mut (impl Write + Send),
    children: &Children,
) -> io::Result<()> {
    while let Some(line) = line(input)? {
        answer(&line, output, None, children)?;
        if line.len() > MAX_REQUEST && !line.ends_with(b"\n") {
            // The rest of the line is not a request.
            input.skip_until(b'\n')?;
        }
    }
    Ok(())
}

/// Executes the request in `line`. Started commands end with `connection`, if the request has its
/// own.
fn answer(
    line: &[u8],
    output: &mut (impl Write + Send),
    connection: Option<&File>,
    children: &Children,
) -> io::Result<()> {
    let output = Mutex::new(output);
    let tell = |event: Event| tell(&mut **output.lock().expect("the lock is not poisoned"), &event);
    let result = if line.len() > MAX_REQUEST {
        Err(io::Error::other(format!("a request has at most {MAX_REQUEST} bytes")))
    } else {
        // A serial line may carry any bytes. Invalid UTF-8 is not a valid request either.
        serde_json::from_str(&typed(&String::from_utf8_lossy(line)))
            .map_err(io::Error::other)
            .and_then(|request| perform(request, &tell, connection, children))
    };
    match result {
        Ok(()) => tell(Event::Done),
        Err(error) => tell(Event::Error { message: error.to_string() }),
    }
}

/// Applies Backspace and Ctrl-C as typed by a user: JSON contains neither byte.
fn typed(line: &str) -> Cow<'_, str> {
    if !line.contains(['\x03', '\x08', '\x7f']) {
        return line.into();
    }
    let mut meant = String::new();
    for c in line.chars() {
        match c {
            '\x03' => meant.clear(),
            '\x08' | '\x7f' => drop(meant.pop()),
            c => meant.push(c),
        }
    }
    meant.into()
}

fn perform(
    request: Request,
    tell: &(impl Fn(Event) -> io::Result<()> + Sync),
    connection: Option<&File>,
    children: &Children,
) -> io::Result<()> {
    match request {
        Request::Exec { command } => exec(&command, tell, connection, children),
        Request::Facts => tell(work::facts()?),
        Request::Memory(work) => work::memory(&work, &mut |event| tell(event)),
        Request::Disk(work) => work::disk(&work, &mut |event| tell(event)),
        Request::Zero { path, offset, bytes, unmap } => work::zero(&path, offset, bytes, unmap),
        Request::Clock { seconds } => work::clock(seconds, &mut |event| tell(event)),
        Request::LatCtx(_) | Request::Hackbench(_) | Request::Processes(_) => {
            apart(&request, tell, connection, children)
        }
        Request::Launch(_) => {
            Err(io::Error::other("a command with its streams needs a connection of its own: vsock"))
        }
        Request::Kexec(kexec) => load_kernel(&kexec),
        Request::PowerOff => Err(sys::power_off()),
    }
}

/// Returns if the kernel is loaded for a panic, or could not be started.
fn load_kernel(kexec: &Kexec) -> io::Result<()> {
    let open = |path: &String| File::open(path).map_err(|error| io::Error::other(format!("{path}: {error}")));
    let (kernel, initrd) = (open(&kexec.kernel)?, kexec.initrd.as_ref().map(open).transpose()?);
    sys::load_kernel(&kernel, initrd.as_ref(), &kexec.params, kexec.on_panic)
        .map_err(|error| io::Error::other(format!("{}: kexec_file_load: {error}", kexec.kernel)))?;
    if kexec.on_panic { Ok(()) } else { Err(sys::start_kernel()) }
}

fn exec(
    command: &[Argument],
    tell: &(impl Fn(Event) -> io::Result<()> + Sync),
    connection: Option<&File>,
    children: &Children,
) -> io::Result<()> {
    let (program, arguments) = command.split_first().ok_or_else(|| io::Error::other("an empty command"))?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.process_group(0);
    let (ended, over) = tie::over()?;
    let mut child =
        children.start(&mut command).map_err(|error| io::Error::other(format!("{program}: {error}")))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let tie = Tie::new(child.id());
    let code = thread::scope(|scope| {
        if let Some(connection) = connection {
            scope.spawn(|| tie.watch(connection, &ended));
        }
        let outputs = [
            scope.spawn(|| pass_on("stdout", stdout, tell)),
            scope.spawn(|| pass_on("stderr", stderr, tell)),
        ];
        let code = children.wait(child.id());
        outputs.into_iter().for_each(|output| drop(output.join()));
        tie.loosen();
        drop(over);
        code
    });
    tell(Event::Exit { code })
}

/// Runs `request`, which forks, in another process of this program, and passes its events on.
fn apart(
    request: &Request,
    tell: &(impl Fn(Event) -> io::Result<()> + Sync),
    connection: Option<&File>,
    children: &Children,
) -> io::Result<()> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0(NAME).arg(serde_json::to_string(request)?).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let (ended, over) = tie::over()?;
    let mut child = children.start(&mut command)?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let tie = Tie::new(child.id());
    let (mut told, mut said) = (Ok(()), String::new());
    let code = thread::scope(|scope| {
        if let Some(connection) = connection {
            scope.spawn(|| tie.watch(connection, &ended));
        }
        for line in stdout.into_iter().flat_map(|pipe| io::BufReader::new(pipe).lines()) {
            // Read the output to its end even without a listener, or the process would never end.
            told = std::mem::replace(&mut told, Ok(())).and_then(|()| tell(serde_json::from_str(&line?)?));
        }
        // A few words at most, at the end.
        let heard = stderr.map_or(Ok(0), |mut pipe| pipe.read_to_string(&mut said));
        let code = children.wait(child.id());
        tie.loosen();
        drop(over);
        heard.map(|_| code)
    })?;
    match code {
        0 => told,
        code => Err(io::Error::other(format!("{} (status {code})", said.trim()))),
    }
}

/// Passes a command's output on until it ends. Without a listener the command gets a closed pipe.
fn pass_on(stream: &str, pipe: Option<impl Read>, tell: &impl Fn(Event) -> io::Result<()>) {
    let Some(mut pipe) = pipe else { return };
    let mut buffer = [0; 4096];
    let mut kept = 0;
    while let Ok(count @ 1..) = pipe.read(&mut buffer[kept..]) {
        let filled = kept + count;
        // An incomplete character waits for its remaining bytes.
        let whole = match std::str::from_utf8(&buffer[..filled]) {
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            _ => filled,
        };
        let text = String::from_utf8_lossy(&buffer[..whole]);
        let bytes = if matches!(text, Cow::Owned(_)) { buffer[..whole].to_vec() } else { Vec::new() };
        if tell(Event::Output { stream: stream.into(), text: text.into_owned(), bytes }).is_err() {
            return;
        }
        buffer.copy_within(whole..filled, 0);
        kept = filled - whole;
    }
}

/// Serves each connection in a thread of its own.
pub fn vsock(socket: &OwnedFd, children: &Arc<Children>, waiting: &Arc<Waiting>) {
    while let Ok(connection) = sys::accept(socket) {
        let (children, waiting) = (children.clone(), waiting.clone());
        thread::spawn(move || {
            // A host that has disconnected is not an error.
            let _ = connected(connection, &children, &waiting);
        });
    }
}

/// Serves one connection: a request, or a command with its streams.
///
/// # Errors
/// The host has disconnected.
pub fn connected(connection: File, children: &Children, waiting: &Waiting) -> io::Result<()> {
    let mut output = connection.try_clone()?;
    let watched = connection.try_clone()?;
    let mut input = io::BufReader::new(connection);
    let Some(line) = line(&mut input)? else { return Ok(()) };
    match serde_json::from_slice(&line) {
        Ok(Request::Launch(launch)) => waiting.launch(launch, input, output, children),
        _ => answer(&line, &mut output, Some(&watched), children),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backspace_takes_a_character_back_and_ctrl_c_the_line() {
        assert_eq!(typed("{\"a\x7f\x08}\n"), "{}\n");
        assert_eq!(typed("nonsense\x03{}\n"), "{}\n");
        assert_eq!(typed("\x7f{}\n"), "{}\n");
    }

    /// The events that answer `input`. An empty request yields `error`.
    fn answers(input: &[u8]) -> Vec<String> {
        let mut output = Vec::new();
        every(&mut &*input, &mut output, &Children::default()).unwrap();
        String::from_utf8(output).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_line_that_is_too_long_is_refused_once_and_the_next_is_answered() {
        let mut input = vec![b'x'; MAX_REQUEST + 1];
        input.extend(b"{\"do\":\"facts\"}\n{\"do\":\"clock\",\"seconds\":0}\n");
        let said = answers(&input);
        assert!(said[0].contains(&format!("at most {MAX_REQUEST} bytes")), "{said:?}");
        assert!(said[1..].iter().all(|line| !line.contains("facts")) && said.len() >= 2, "{said:?}");
    }

    #[test]
    fn bytes_that_are_no_text_are_an_error_and_not_the_end() {
        let said = answers(b"\xff\xfe\n\n");
        assert_eq!(said.iter().filter(|line| line.contains("\"error\"")).count(), 2, "{said:?}");
    }
}
