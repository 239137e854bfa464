//! `vellum exec`: a command's streams are bytes, and it does not outlive its client. The guest is
//! that of [`terminal`](crate::terminal).

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Output, Stdio};
use std::thread;

use serde_json::json;
use support::env::{TestEnv, process};
use support::{Failed, LIMIT, Random, ensure, eventually, test};

use crate::VELLUM;
use crate::terminal::Guest;

fn exec(guest: &Guest, flags: &[&str]) -> Command {
    let mut command = Command::new(VELLUM);
    command.arg("exec").args(flags).arg(&guest.control).arg("--").stdin(Stdio::null());
    command
}

/// Runs `command` with `input` on its standard input. Returns its output.
fn fed(command: &mut Command, input: Vec<u8>) -> Result<Output, Failed> {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut stdin = child.stdin.take().ok_or("a pipe")?;
    let writer = thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output()?;
    writer.join().expect("it does not panic")?;
    Ok(output)
}

#[test]
fn what_a_command_reads_and_writes_are_bytes() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let guest = Guest::start(&env)?;
    let mut random = Random::new();
    let data: Vec<u8> = (0..100_000).map(|_| random.below(256) as u8).collect();
    let output = fed(exec(&guest, &[]).args(["sh", "-c", "tee /proc/self/fd/2; exit 7"]), data.clone())?;
    ensure(output.status.code() == Some(7) && output.stdout == data && output.stderr == data, || {
        format!("{}: {} and {} bytes", output.status, output.stdout.len(), output.stderr.len())
    })?;
    let word = OsStr::from_bytes(b"a\xff\xfe");
    let output = exec(&guest, &[]).args(["printf", "%s"]).arg(word).output()?;
    ensure(output.status.success() && output.stdout == word.as_bytes(), || format!("{output:?}"))?;
    // Older clients, and people, send JSON.
    let request = r#"{"do":"exec","command":["printf","a\\377"]}"#;
    let output =
        Command::new(VELLUM).arg("exec").arg(&guest.control).args(["--request", request]).output()?;
    let said = String::from_utf8(output.stdout)?;
    ensure(output.status.success() && said.contains(r#""bytes":[97,255]"#), || said)
}

/// An agent from before words that are not UTF-8, or requests of this kind, were supported.
#[test]
fn an_older_agent_is_said_to_be_one_in_a_line() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let guest = Guest::start(&env)?;
    fs::remove_file(env.path("vsock"))?;
    let listener = UnixListener::bind(env.path("vsock"))?;
    let older = thread::spawn(move || -> std::io::Result<()> {
        for stream in listener.incoming().take(2) {
            let mut stream = stream?;
            let mut lines = BufReader::new(stream.try_clone()?).lines();
            lines.next();
            stream.write_all(b"OK 1\n")?;
            lines.next();
            let message = "unknown variant `launch`, expected one of `exec`";
            writeln!(stream, "{}", json!({"event": "error", "message": message}))?;
        }
        Ok(())
    });
    for flags in [&[][..], &["--detach"]] {
        let output = exec(&guest, flags).arg("true").output()?;
        let said = String::from_utf8(output.stderr)?;
        let right = output.status.code() == Some(14) && said.lines().count() == 1 && said.contains("older");
        ensure(right, || format!("{flags:?}: {}: {said}", output.status))?;
    }
    older.join().expect("it does not panic")?;
    Ok(())
}

#[test]
fn output_that_cannot_be_written_is_a_failure_and_a_reader_that_left_is_none() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let guest = Guest::start(&env)?;
    let full = File::options().write(true).open("/dev/full")?;
    let output = exec(&guest, &[]).args(["echo", "hello"]).stdout(full).output()?;
    let said = String::from_utf8(output.stderr)?;
    let right = output.status.code() == Some(1) && said.lines().count() == 1;
    ensure(right && said.contains("standard output: No space left"), || {
        format!("{}: {said}", output.status)
    })?;
    let (reader, writer) = std::io::pipe()?;
    drop(reader);
    let output = exec(&guest, &[]).args(["echo", "hello"]).stdout(writer).output()?;
    ensure(output.status.success() && output.stderr.is_empty(), || format!("{output:?}"))?;
    let full = File::options().write(true).open("/dev/full")?;
    let status = Command::new(VELLUM).arg("--help").stdout(full).stderr(Stdio::null()).status()?;
    ensure(status.code() == Some(1), || format!("--help: {status}"))
}

/// A shell command that writes its process ID to `pid` in the directory, and goes on with `script`.
fn telling(env: &TestEnv, script: &str) -> [String; 3] {
    let file = env.path("pid");
    ["sh".into(), "-c".into(), format!("echo $$ >{0}.new; mv {0}.new {0}; {script}", file.display())]
}

/// Starts the client of such a command. Returns also the process ID of the command.
fn started(env: &TestEnv, client: &mut Command) -> Result<(Child, u32), Failed> {
    let client = client.stdout(Stdio::null()).spawn()?;
    let file = env.path("pid");
    let read = || fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok());
    let pid = eventually(LIMIT, "the command runs", || Ok(read()))?;
    fs::remove_file(&file)?;
    Ok((client, pid))
}

/// Checks that the command ends if its client is killed.
fn ends_with(env: &TestEnv, client: &mut Command, what: &str) -> Result<(), Failed> {
    let (mut client, pid) = started(env, client)?;
    client.kill()?;
    client.wait()?;
    ends(pid, what)
}

fn ends(pid: u32, what: &str) -> Result<(), Failed> {
    eventually(LIMIT, what, || Ok(process(pid).is_none().then_some(())))
}

#[test]
fn a_command_ends_with_its_client_unless_it_is_detached() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let guest = Guest::start(&env)?;
    for script in ["exec sleep 1000", "trap '' HUP; while :; do sleep 0.1; done"] {
        ends_with(&env, exec(&guest, &[]).args(telling(&env, script)), script)?;
    }
    let silent = telling(&env, "exec sleep 1000");
    let zeros = File::open("/dev/zero")?;
    ends_with(&env, exec(&guest, &[]).args(&silent).stdin(zeros), "one that does not read what it is sent")?;
    let request = json!({"do": "exec", "command": silent}).to_string();
    let mut json = Command::new(VELLUM);
    ends_with(
        &env,
        json.arg("exec").arg(&guest.control).args(["--request", &request]),
        "one asked for in JSON",
    )?;
    let (mut client, pid) = started(&env, exec(&guest, &["--detach"]).args(&silent))?;
    ensure(client.wait()?.success(), || "a client that detaches".into())?;
    ensure(process(pid).is_some(), || "a detached command has ended".into())?;
    // It lives as long as its guest.
    let killed = Command::new("kill").arg(pid.to_string()).status()?;
    ensure(killed.success(), || format!("{killed}"))?;
    ends(pid, "the detached command")?;
    let output = exec(&guest, &["--detach"]).arg("/nonexistent").output()?;
    ensure(output.status.code() == Some(14), || format!("{output:?}"))
}
