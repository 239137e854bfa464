//! `vellum exec --terminal`: a terminal at both ends. The guest is the agent's own code in a
//! process of this test, with a unix socket in place of a vsock.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;

use guest_agent::children::Children;
use guest_agent::serve::connected;
use guest_agent::{Argument, Launch, Request, frame};
use serde_json::{Value, json};
use support::env::TestEnv;
use support::guests::Code;
use support::hosts::real;
use support::{Failed, LIMIT, Need, ensure, eventually, test};
use vellum_sys::terminal::open_pty;

use crate::VELLUM;

/// The command-line word that makes this program such a guest.
pub const WORD: &str = "agent-of-a-guest";

/// Serves `control` as a machine with a vsock does, and `vsock` as its guest does.
pub fn agent(mut paths: impl Iterator<Item = String>) -> io::Result<()> {
    let [control, vsock] = [paths.next(), paths.next()].map(Option::unwrap_or_default);
    let (machine, guest) = (UnixListener::bind(control)?, UnixListener::bind(&vsock)?);
    let children = Arc::<Children>::default();
    let reaper = children.clone();
    std::thread::spawn(move || reaper.reap());
    std::thread::spawn(move || {
        for stream in guest.incoming().flatten() {
            let children = children.clone();
            std::thread::spawn(move || {
                let mut line = Vec::new();
                while line.last() != Some(&b'\n') {
                    let mut byte = [0];
                    (&stream).read_exact(&mut byte)?;
                    line.push(byte[0]);
                }
                (&stream).write_all(b"OK 1\n")?;
                connected(File::from(OwnedFd::from(stream)), &children, &Default::default())
            });
        }
    });
    println!("ready");
    for stream in machine.incoming() {
        answer(&stream?, &vsock)?;
    }
    Ok(())
}

fn answer(stream: &UnixStream, vsock: &str) -> io::Result<()> {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let asked: Value = serde_json::from_str(&line)?;
    let mut stream = stream;
    writeln!(stream, "{}", json!({"id": asked["id"], "ok": {"vsock": vsock}}))
}

/// Such a guest. It ends when it is dropped.
pub struct Guest {
    pub process: Child,
    pub control: PathBuf,
}

impl Guest {
    pub fn start(env: &TestEnv) -> Result<Self, Failed> {
        let [control, vsock] = ["control", "vsock"].map(|name| env.path(name));
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(WORD).args([&control, &vsock]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().ok_or("a pipe")?).read_line(&mut line)?;
        ensure(line == "ready\n", || format!("the guest: {line:?}"))?;
        Ok(Self { process, control })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A user's terminal with `vellum exec --terminal` on it.
struct User {
    master: File,
    name: String,
    id: u32,
    /// Waits for the process and keeps the terminal open until then, so that reads from the master
    /// end only with the process.
    end: JoinHandle<Result<(ExitStatus, String), String>>,
}

impl User {
    fn start(guest: &Guest, command: &[&str]) -> Result<Self, Failed> {
        let (master, slave, name) = open_pty()?;
        let terminal = |arguments: &[&str]| stty(&name, arguments);
        terminal(&["sane"])?;
        terminal(&["rows", "33", "cols", "77"])?;
        let mut line = Command::new("setsid");
        line.args(["-c", VELLUM, "exec", "--terminal"]).arg(&guest.control).arg("--").args(command);
        Self::on((master, slave, name), &mut line)
    }

    /// Starts `line` on this terminal.
    fn on((master, slave, name): (File, File, String), line: &mut Command) -> Result<Self, Failed> {
        let mut process = line
            .env("TERM", "vt220")
            .stdin(slave.try_clone()?)
            .stdout(slave.try_clone()?)
            .stderr(slave.try_clone()?)
            .spawn()?;
        let (id, terminal) = (process.id(), name.clone());
        let end = std::thread::spawn(move || {
            let ended = process.wait().map_err(|error| error.to_string())?;
            let mode = stty(&terminal, &["-a"]).map_err(|failed| format!("{failed:?}"))?;
            drop(slave);
            Ok((ended, mode))
        });
        Ok(Self { master, name, id, end })
    }

    /// Reads until `text` has arrived.
    fn wait_for(&mut self, text: &str) -> Result<(), Failed> {
        let mut said = Vec::new();
        while !said.ends_with(text.as_bytes()) {
            let mut byte = [0];
            self.master.read_exact(&mut byte).map_err(|error| {
                format!("{error} behind {:?}, and no {text:?}", String::from_utf8_lossy(&said))
            })?;
            said.push(byte[0]);
        }
        Ok(())
    }

    fn end(self) -> Result<(ExitStatus, String), Failed> {
        Ok(self.end.join().map_err(|_| "whoever waits for it has panicked")??)
    }

    /// Checks that it has ended with `status`, and that the terminal's mode was restored.
    fn ended(self, status: i32) -> Result<(), Failed> {
        let (ended, mode) = self.end()?;
        ensure(ended.code() == Some(status), || format!("{ended}, and not {status}"))?;
        ensure(mode.contains(" echo ") && mode.contains(" icanon ") && mode.contains(" opost "), || {
            format!("the terminal stays raw: {mode}")
        })
    }
}

fn stty(name: &str, arguments: &[&str]) -> Result<String, Failed> {
    let output = Command::new("stty").args(["-F", name]).args(arguments).output()?;
    ensure(output.status.success(), || format!("stty {arguments:?}: {output:?}"))?;
    // The words, separated by blanks.
    let said = String::from_utf8_lossy(&output.stdout).replace(';', "");
    Ok(format!(" {} ", said.split_whitespace().collect::<Vec<_>>().join(" ")))
}

fn setsid() -> Need {
    match Command::new("setsid").args(["-c", "true"]).stdin(Stdio::null()).output() {
        Ok(_) => Ok(()),
        Err(_) => Err(support::tools::lacks("setsid")),
    }
}

#[test(setsid())]
fn a_terminal_has_its_size_its_keys_and_the_commands_status() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let guest = Guest::start(&env)?;
    let script = "stty size; echo $TERM; tty; until [ \"$(stty size)\" = '40 100' ]; do :; done; echo resized
        trap 'echo interrupted; exit 9' INT; read line; echo \"<$line>\"; cat";
    let mut user = User::start(&guest, &["sh", "-c", script])?;
    user.wait_for("33 77\r\nvt220\r\n/dev/pts/")?;
    let mode = stty(&user.name, &["-a"])?;
    ensure(mode.contains(" -icanon ") && mode.contains(" -opost "), || format!("it is not raw: {mode}"))?;
    stty(&user.name, &["rows", "40", "cols", "100"])?;
    user.wait_for("resized\r\n")?;
    // Ctrl-a and a newline go to the guest, which has its own line editing and echo.
    user.master.write_all(b"ab\x7fc\x01\x01\r")?;
    user.wait_for("<ac\x01>\r\n")?;
    // A shell that is interrupted before it has started cat would still wait for it. Cat has
    // started once it echoes.
    user.master.write_all(b"there\r")?;
    user.wait_for("there\r\nthere\r\n")?;
    user.master.write_all(b"\x03")?;
    user.wait_for("interrupted\r\n")?;
    user.ended(9)
}

/// A process that keeps the terminal open does not delay the end of the client.
#[test(setsid())]
fn a_terminal_is_over_with_its_command() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let guest = Guest::start(&env)?;
    // 64 KiB are still on their way at the end, and a process ignores the hang-up.
    let script = "(trap '' HUP; exec sleep 20) & head -c 65536 /dev/zero | tr '\\0' x; echo end; exit 4";
    let mut user = User::start(&guest, &["sh", "-c", script])?;
    user.wait_for(&format!("{}end\r\n", "x".repeat(65536)))?;
    user.ended(4)?;
    // Without a command there is a shell.
    let mut user = User::start(&guest, &[])?;
    user.master.write_all(b"exit 6\r")?;
    user.wait_for("exit 6")?;
    let (ended, _) = user.end()?;
    ensure(ended.code() == Some(6), || format!("a shell: {ended}"))?;
    User::start(&guest, &["/nonexistent/program"])?.ended(14)
}

#[test(setsid())]
fn a_terminal_is_given_back_at_every_end() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let mut guest = Guest::start(&env)?;
    let on = |guest: &Guest| -> Result<User, Failed> {
        let mut user = User::start(guest, &["sh", "-c", "trap '' INT; echo on; exec sleep 1000"])?;
        user.wait_for("on\r\n")?;
        Ok(user)
    };
    for (signal, status) in [("-TERM", 143), ("-INT", 130), ("-HUP", 129), ("-QUIT", 131)] {
        let user = on(&guest)?;
        let killed = Command::new("kill").args([signal, &user.id.to_string()]).status()?;
        ensure(killed.success(), || format!("kill {signal}: {killed}"))?;
        user.ended(status)?;
    }
    let mut user = on(&guest)?;
    user.master.write_all(b"\x01x")?;
    user.ended(129)?;
    let user = on(&guest)?;
    guest.process.kill()?;
    guest.process.wait()?;
    user.ended(1)
}

/// A shell with job control, which does not restore terminal modes that others change. `line`
/// starts a client whose command prints `interrupted` and exits with 9 if Ctrl-c reaches the guest.
fn in_a_shell(env: &TestEnv, line: &str) -> Result<(Guest, User), Failed> {
    let guest = Guest::start(env)?;
    let (master, slave, name) = open_pty()?;
    stty(&name, &["sane"])?;
    let client = env.path("client");
    let command = "trap 'echo interrupted; exit 9' INT; echo on; while :; do sleep 0.1; done";
    let exec = format!("exec {VELLUM} exec -t {} -- sh -c \"{command}\"\n", guest.control.display());
    std::fs::write(&client, format!("echo $$ >{}\n{exec}", env.path("pid").display()))?;
    let script = line.replace("CLIENT", &format!("sh {}", client.display()));
    let user = User::on((master, slave, name), Command::new("setsid").args(["-c", "sh", "-mc", &script]))?;
    Ok((guest, user))
}

/// Waits until the terminal is raw, or restored.
fn becomes(user: &User, raw: bool) -> Result<(), Failed> {
    let mode = || stty(&user.name, &["-a"]);
    let [part, what] =
        if raw { [" -icanon ", "the terminal is raw"] } else { [" icanon ", "it is as it was"] };
    eventually(LIMIT, what, || Ok(mode()?.contains(part).then_some(())))
}

fn interrupted(mut user: User) -> Result<(), Failed> {
    user.master.write_all(b"\x03")?;
    user.wait_for("interrupted\r\n")?;
    user.ended(9)
}

#[test(setsid())]
fn a_terminal_is_given_back_while_stopped_and_raw_again_afterwards() -> Result<(), Failed> {
    // A process cannot react to SIGSTOP, so the shell restores the terminal.
    for (signal, shell) in [("-TSTP", ""), ("-STOP", "stty sane;")] {
        let env = TestEnv::new()?;
        let line = format!("CLIENT; {shell} echo back; read line; echo \"<$line>\"; fg");
        let (_guest, mut user) = in_a_shell(&env, &line)?;
        user.wait_for("on\r\n")?;
        becomes(&user, true)?;
        let id = std::fs::read_to_string(env.path("pid"))?;
        let sent = Command::new("kill").args([signal, id.trim()]).status()?;
        ensure(sent.success(), || format!("kill {signal}: {sent}"))?;
        user.wait_for("back\r\n")?;
        becomes(&user, false)?;
        user.master.write_all(b"typed\n")?;
        user.wait_for("<typed>\r\n")?;
        becomes(&user, true)?;
        interrupted(user)?;
    }
    Ok(())
}

#[test(setsid())]
fn a_client_in_the_background_leaves_the_terminal_alone_until_it_is_in_front() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (_guest, mut user) = in_a_shell(&env, "CLIENT & read line; echo \"<$line>\"; read line; fg")?;
    user.wait_for("on\r")?;
    ensure(stty(&user.name, &["-a"])?.contains(" icanon "), || "it is raw in the background".into())?;
    // Input goes to the shell, and stops no process.
    user.master.write_all(b"typed\n")?;
    user.wait_for("<typed>\r\n")?;
    user.master.write_all(b"\n")?;
    becomes(&user, true)?;
    interrupted(user)
}

/// The same for the serial port of a machine on this terminal.
#[test(setsid(), real())]
fn a_machines_terminal_is_given_back_while_stopped_and_raw_again_afterwards() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (image, pid) = (env.path("image"), env.path("pid"));
    std::fs::write(&image, Code::default().print("V").echo().elf64())?;
    let run = format!("exec {VELLUM} run -m 16m -k {}", image.display());
    let script = format!("sh -c 'echo $$ >{}; {run}'; echo back; read line; fg", pid.display());
    let terminal = open_pty()?;
    stty(&terminal.2, &["sane"])?;
    let mut user = User::on(terminal, Command::new("setsid").args(["-c", "sh", "-mc", &script]))?;
    user.wait_for("V")?;
    becomes(&user, true)?;
    let id = std::fs::read_to_string(pid)?;
    let sent = Command::new("kill").args(["-TSTP", id.trim()]).status()?;
    ensure(sent.success(), || format!("kill: {sent}"))?;
    user.wait_for("back\r\n")?;
    becomes(&user, false)?;
    user.master.write_all(b"\n")?;
    becomes(&user, true)?;
    // Ctrl-c goes to the guest, and Ctrl-a x ends it.
    user.master.write_all(b"\x03z")?;
    user.wait_for("\x03z")?;
    user.master.write_all(b"\x01x")?;
    user.ended(0)
}

/// The same agent with separate streams, as for the command of `vellum run -k KERNEL -- COMMAND`.
#[test]
fn streams_come_apart_without_a_terminal() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let _guest = Guest::start(&env)?;
    let mut stream = UnixStream::connect(env.path("vsock"))?;
    let command = ["sh", "-c", "cat; echo no >&2; exit 7"].map(Argument::from).to_vec();
    let request = Request::Launch(Launch { command, ..Launch::default() });
    stream.write_all(format!("CONNECT 1024\n{}\n", serde_json::to_string(&request)?).as_bytes())?;
    let data: Vec<u8> = (0..300_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let (mut to, sent) = (stream.try_clone()?, data.clone());
    let writer = std::thread::spawn(move || {
        sent.chunks(frame::MAX).try_for_each(|piece| frame::write(&mut to, frame::INPUT, piece))?;
        frame::write(&mut to, frame::INPUT, &[])
    });
    let mut greeting = [0; 5];
    stream.read_exact(&mut greeting)?;
    let (mut piece, mut outputs) = (Vec::new(), [Vec::new(), Vec::new()]);
    let status = loop {
        match frame::read(&mut stream, &mut piece)?.ok_or("it ended early")? {
            frame::OUTPUT => outputs[0].extend_from_slice(&piece),
            frame::ERRORS => outputs[1].extend_from_slice(&piece),
            frame::EXIT => break i32::from_le_bytes(piece[..].try_into()?),
            other => return Err(format!("a piece of kind {other}").into()),
        }
    };
    writer.join().expect("it does not panic")?;
    let [out, errors] = outputs;
    ensure(status == 7 && errors == b"no\n" && out == data, || {
        format!("status {status}, {} of {} bytes, {errors:?}", out.len(), data.len())
    })
}

#[test]
fn what_is_no_terminal_is_refused() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let guest = Guest::start(&env)?;
    let output = env.vellum(&format!("exec --terminal {} -- true", Path::new(&guest.control).display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure(output.status.code() == Some(2) && said.contains("--terminal: standard input"), || {
        format!("{output:?}")
    })
}
