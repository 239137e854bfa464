//! Debuggers on a machine's socket: GDB if it is installed, and a client of the tests that sends
//! exact packets.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use serde_json::Value;
use support::env::{Machine, TestEnv};
use support::hosts::{breakpoints, kvm, real, slow_if_emulated};
use support::{Failed, LIMIT, Need, Tests, ensure, eventually, test, tools};
use vellum_guests::program::RAM_VA;

support::vellum!();

fn main() -> ExitCode {
    Tests::from_args().run()
}

/// A client of the protocol.
struct Client(UnixStream);

impl Client {
    fn connect(path: &Path) -> Result<Self, Failed> {
        let stream = eventually(LIMIT, "the debugger's socket", || Ok(UnixStream::connect(path).ok()))?;
        stream.set_read_timeout(Some(LIMIT))?;
        let mut client = Self(stream);
        // Packets are acknowledged by `+` until both sides agree to stop that.
        ensure(client.ask("QStartNoAckMode")? == "OK", || "QStartNoAckMode".into())?;
        client.0.write_all(b"+")?;
        Ok(client)
    }

    fn send(&mut self, packet: &str) -> Result<(), Failed> {
        let sum = packet.bytes().fold(0u8, |sum, byte| sum.wrapping_add(byte));
        Ok(self.0.write_all(format!("${packet}#{sum:02x}").as_bytes())?)
    }

    /// Receives a packet, and expands its run-length encoding.
    fn receive(&mut self) -> Result<String, Failed> {
        let mut byte = [0];
        let mut next = || -> Result<u8, Failed> {
            self.0.read_exact(&mut byte)?;
            Ok(byte[0])
        };
        while next()? != b'$' {}
        let mut text = String::new();
        loop {
            match next()? {
                b'#' => break,
                b'*' => {
                    let count = usize::from(next()? - 29);
                    let last = text.chars().next_back().ok_or("a repetition of nothing")?;
                    text.extend(std::iter::repeat_n(last, count));
                }
                other => text.push(char::from(other)),
            }
        }
        next()?;
        next()?;
        Ok(text)
    }

    fn ask(&mut self, packet: &str) -> Result<String, Failed> {
        self.send(packet)?;
        self.receive()
    }

    /// The general registers and RIP of the vCPU that stopped last.
    fn registers(&mut self) -> Result<Vec<u64>, Failed> {
        let text = self.ask("g")?;
        let bytes = bytes(&text)?;
        Ok(bytes.as_chunks().0.iter().take(17).map(|word| u64::from_le_bytes(*word)).collect())
    }

    fn memory(&mut self, at: u64, len: usize) -> Result<Vec<u8>, Failed> {
        let text = self.ask(&format!("m{at:x},{len:x}"))?;
        bytes(&text)
    }
}

const RIP: usize = 16;

fn bytes(text: &str) -> Result<Vec<u8>, Failed> {
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16);
    let bytes = (0..text.len() / 2).map(|at| byte(at * 2)).collect::<Result<_, _>>();
    bytes.map_err(|_| format!("{text:?} is no hexadecimal").into())
}

/// A built-in guest that waits for its debugger. Returns also the path of the socket.
fn waiting(env: &TestEnv, flags: &str) -> Result<(Machine, PathBuf), Failed> {
    let socket = env.path("gdb");
    let command = format!("run --memory 16m --gdb {},wait {flags}", socket.display());
    Ok((env.start("g", &mut env.command(&command))?, socket))
}

fn state(env: &TestEnv) -> Result<String, Failed> {
    let status: Value = serde_json::from_str(&env.ctl("g status")?)?;
    Ok(status["state"].as_str().unwrap_or_default().to_owned())
}

#[test(kvm())]
fn a_guest_waits_for_its_debugger_and_ends_right_without_it() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (machine, socket) = waiting(&env, "--passes 2")?;
    let mode = fs::metadata(&socket)?.permissions().mode();
    ensure(mode & 0o777 == 0o600, || format!("{mode:o}"))?;
    ensure(state(&env)? == "debugged", || "it runs".into())?;
    let mut client = Client::connect(&socket)?;
    ensure(client.ask("?")?.starts_with("T05"), || "why it stands".into())?;
    let registers = client.registers()?;
    let code = client.memory(registers[RIP], 16)?;
    ensure(code.iter().any(|byte| *byte != 0), || format!("at {:#x}: {code:x?}", registers[RIP]))?;
    // Reading an unmapped address fails.
    ensure(client.ask("m7fffffff0000,8")?.starts_with('E'), || "memory that is not there".into())?;
    // A second debugger is refused.
    let mut second = UnixStream::connect(&socket)?;
    second.set_read_timeout(Some(LIMIT))?;
    ensure(second.read(&mut [0; 16])? == 0, || "a second debugger".into())?;
    ensure(client.ask("D")? == "OK", || "detaching".into())?;
    let output = machine.end()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure(output.status.success() && said.contains(", 0 wrong"), || format!("{output:?}"))?;
    let told = format!("gdb -ex 'target remote {}'", socket.display());
    ensure(String::from_utf8_lossy(&output.stderr).contains(&told), || format!("no {told:?}: {output:?}"))?;
    ensure(!socket.exists(), || "the socket is left behind".into())
}

/// Requires a KVM that delivers a debugger's exceptions. kvm_pvm claims to, but gives the exception
/// of a step to the guest, which has no handler.
fn debugs() -> Need {
    let modules = ["kvm_intel", "kvm_amd"].map(|name| format!("/sys/module/{name}"));
    kvm()?;
    let can = modules.iter().any(|path| Path::new(path).exists());
    can.then_some(()).ok_or_else(|| {
        "needs a KVM that hands a debugger its exceptions, kvm-intel or kvm-amd: cargo lab test svm".into()
    })
}

#[test(debugs())]
fn a_step_goes_one_instruction_on() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (machine, socket) = waiting(&env, "--passes 1")?;
    let mut client = Client::connect(&socket)?;
    for _ in 0..3 {
        let before = client.registers()?[RIP];
        let stopped = client.ask("vCont;s:1")?;
        ensure(stopped.starts_with("T05"), || stopped.clone())?;
        let after = client.registers()?[RIP];
        ensure(before != after && after.abs_diff(before) < 4096, || format!("{before:#x}, then {after:#x}"))?;
    }
    ensure(client.ask("D")? == "OK", || "detaching".into())?;
    ensure(machine.end()?.status.success(), || "its end".into())
}

#[test(kvm())]
fn a_guest_is_interrupted_and_let_go() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (machine, socket) = waiting(&env, "--passes 0")?;
    let mut client = Client::connect(&socket)?;
    client.send("vCont;c")?;
    eventually(LIMIT, "it runs", || Ok((state(&env)? == "running").then_some(())))?;
    client.0.write_all(&[3])?;
    let stopped = client.receive()?;
    ensure(stopped.starts_with("T02"), || stopped)?;
    ensure(state(&env)? == "debugged", || "it runs on".into())?;
    // If the debugger disconnects without detaching, the machine runs on.
    drop(client);
    eventually(LIMIT, "it runs on", || Ok((state(&env)? == "running").then_some(())))?;
    env.ctl("g stop")?;
    ensure(machine.end()?.status.success(), || "its end".into())
}

/// The address of an instruction that the guest executes again and again: where it was interrupted.
fn in_its_loop(env: &TestEnv, client: &mut Client) -> Result<u64, Failed> {
    client.send("vCont;c")?;
    eventually(LIMIT, "it runs", || Ok((state(env)? == "running").then_some(())))?;
    client.0.write_all(&[3])?;
    ensure(client.receive()?.starts_with("T02"), || "interrupting it".into())?;
    Ok(client.registers()?[RIP])
}

/// Sets a breakpoint of this kind in the guest's loop, and lets the guest reach it again.
fn stops_at_a_breakpoint(kind: usize) -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (machine, socket) = waiting(&env, "--passes 0")?;
    let mut client = Client::connect(&socket)?;
    let at = in_its_loop(&env, &mut client)?;
    let set = client.ask(&format!("Z{kind},{at:x},1"))?;
    ensure(set == "OK", || format!("Z{kind} at {at:#x}: {set}"))?;
    // The guest is stopped before the instruction. A step moves past it.
    ensure(client.ask(&format!("z{kind},{at:x},1"))? == "OK", || "taking it out".into())?;
    ensure(client.ask("vCont;s:1")?.starts_with("T05"), || "a step".into())?;
    ensure(client.ask(&format!("Z{kind},{at:x},1"))? == "OK", || "putting it back".into())?;
    let stopped = client.ask("vCont;c")?;
    let word = ["swbreak", "hwbreak"][kind];
    ensure(stopped.contains(word), || format!("Z{kind}: {stopped}"))?;
    ensure(client.registers()?[RIP] == at, || "another place".into())?;
    // Memory shows the original code once the breakpoint is removed.
    ensure(client.ask(&format!("z{kind},{at:x},1"))? == "OK", || "taking it out".into())?;
    ensure(client.memory(at, 1)? != [0xcc], || "the breakpoint is left behind".into())?;
    detached(&env, &mut client)?;
    let output = machine.end()?;
    ensure(output.status.success(), || format!("{output:?}"))
}

/// Detaches from the guest, checks that it runs, and stops the machine.
fn detached(env: &TestEnv, client: &mut Client) -> Result<(), Failed> {
    ensure(client.ask("D")? == "OK", || "detaching".into())?;
    eventually(LIMIT, "it runs on", || Ok((state(env)? == "running").then_some(())))?;
    env.ctl("g stop").map(drop)
}

#[test(debugs(), breakpoints())]
fn a_breakpoint_in_its_code_stops_it() -> Result<(), Failed> {
    stops_at_a_breakpoint(0)
}

#[test(debugs(), breakpoints())]
fn a_breakpoint_in_the_processor_stops_it() -> Result<(), Failed> {
    stops_at_a_breakpoint(1)
}

/// A write to a watched address stops the vCPU after the instruction.
#[test(debugs(), breakpoints())]
fn a_watchpoint_stops_it() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (machine, socket) = waiting(&env, "--passes 0")?;
    let mut client = Client::connect(&socket)?;
    in_its_loop(&env, &mut client)?;
    // The first word of a page in the middle of its memory, which it stamps in each pass.
    let at = RAM_VA + (8 << 20);
    let before = client.memory(at, 8)?;
    ensure(client.ask(&format!("Z2,{at:x},8"))? == "OK", || "a watchpoint".into())?;
    let stopped = client.ask("vCont;c")?;
    ensure(stopped.contains(&format!("watch:{at:x}")), || stopped.clone())?;
    ensure(client.memory(at, 8)? != before, || format!("{before:x?} is still there"))?;
    ensure(client.ask(&format!("z2,{at:x},8"))? == "OK", || "taking it out".into())?;
    detached(&env, &mut client)?;
    let output = machine.end()?;
    ensure(output.status.success(), || format!("{output:?}"))
}

#[test(kvm())]
fn a_user_s_pause_and_a_debugger_s_do_not_undo_each_other() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (machine, socket) = waiting(&env, "--passes 0")?;
    env.ctl("g pause")?;
    let mut client = Client::connect(&socket)?;
    ensure(client.ask("?")?.starts_with("T05"), || "why it stands".into())?;
    client.send("vCont;c")?;
    eventually(LIMIT, "the user has it paused", || Ok((state(&env)? == "paused").then_some(())))?;
    env.ctl("g resume")?;
    ensure(state(&env)? == "running", || "it was resumed".into())?;
    client.0.write_all(&[3])?;
    ensure(client.receive()?.starts_with("T02"), || "interrupting it".into())?;
    env.ctl("g pause")?;
    env.ctl("g resume")?;
    ensure(state(&env)? == "debugged", || "it runs although it is debugged".into())?;
    // The machine can be neither migrated nor saved.
    for arguments in [
        format!("migrate g --to unix:{}", env.path("x").display()),
        format!("snapshot g {}", env.path("s").display()),
    ] {
        let output = env.vellum(&arguments)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure(output.status.code() == Some(2) && said.contains("--gdb"), || {
            format!("{arguments}: {output:?}")
        })?;
    }
    // The machine can be stopped while it is debugged.
    env.ctl("g stop")?;
    ensure(machine.end()?.status.success(), || "its end".into())
}

/// Bytes that do not follow the protocol end only the session.
#[test(real())]
fn a_client_that_is_no_debugger_does_no_harm() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (machine, socket) = waiting(&env, "--passes 0")?;
    for noise in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"$vCont;c:ffffffff#ff$",
        &[0xff; 5000],
        b"$m0,ffffffffffff#5a",
        b"\x03\x03\x03",
    ] {
        let mut client = UnixStream::connect(&socket)?;
        client.set_read_timeout(Some(Duration::from_millis(50)))?;
        client.write_all(noise)?;
        let _ = client.read(&mut [0; 4096]);
        drop(client);
        // The next client is served normally.
        let mut good = eventually(LIMIT, "another client is served", || Ok(Client::connect(&socket).ok()))?;
        ensure(good.ask("?")?.starts_with("T05"), || "why it stands".into())?;
        ensure(good.ask("D")? == "OK", || "detaching".into())?;
    }
    env.ctl("g stop")?;
    ensure(machine.end()?.status.success(), || "its end".into())
}

/// A guest whose code a debugger has changed to an endless loop of two bytes never rings its
/// doorbell.
#[test(slow_if_emulated())]
fn a_guest_that_never_stops_is_cut_off() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (machine, socket) = waiting(&env, "--passes 0")?;
    let mut client = Client::connect(&socket)?;
    let at = in_its_loop(&env, &mut client)?;
    ensure(client.ask(&format!("M{at:x},2:ebfe"))? == "OK", || "writing its code".into())?;
    detached(&env, &mut client)?;
    let output = machine.end()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure(said.contains("has not stopped within"), || format!("{output:?}"))
}

/// A packet's request is bounded, and so is a packet without an end.
#[test(real())]
fn packets_are_bounded() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (machine, socket) = waiting(&env, "--passes 0")?;
    let mut client = Client::connect(&socket)?;
    let all = client.memory(RAM_VA, 1 << 40)?;
    ensure(all.len() == 2048, || format!("{} bytes", all.len()))?;
    // A packet without an end closes the session.
    client.0.write_all(&[&b"$m"[..], &[b'0'; 5000]].concat())?;
    let left = client.0.read_to_end(&mut Vec::new());
    ensure(left.is_ok_and(|count| count == 0), || "an endless packet".into())?;
    // gdbstub takes x for the digit 0, and ignores what follows a second comma.
    for length in ["xfffffff", "fffffff,", "fffffff,9"] {
        let mut client = eventually(LIMIT, "another is served", || Ok(Client::connect(&socket).ok()))?;
        client.send(&format!("m{RAM_VA:x},{length}"))?;
        let mut said = Vec::new();
        client.0.read_to_end(&mut said)?;
        ensure(said.len() <= 16 << 10, || format!("{length}: {} bytes", said.len()))?;
    }
    // More than waits here, from a client that stays and closes nothing.
    let mut flood = eventually(LIMIT, "another is served", || Ok(Client::connect(&socket).ok()))?;
    flood.0.set_write_timeout(Some(LIMIT))?;
    let _ = flood.0.write_all(&[&b"$"[..], &[b'a'; 400_000]].concat());
    let mut good = eventually(LIMIT, "another is served", || Ok(Client::connect(&socket).ok()))?;
    ensure(good.ask("?")?.starts_with("T05"), || "why it stands".into())?;
    drop((flood, good));
    env.ctl("g stop")?;
    ensure(machine.end()?.status.success(), || "its end".into())
}

#[test]
fn bad_places_for_a_debugger_are_one_line() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    fs::write(env.path("file"), "kept")?;
    let file = env.path("file");
    for (value, says) in [
        (file.display().to_string(), "is no socket"),
        ("/nonexistent/gdb".into(), "/nonexistent/gdb"),
        ("x,weit".into(), "did you mean 'wait'"),
    ] {
        let output = env.vellum(&format!("run --memory 16m --gdb {value}"))?;
        let said = String::from_utf8_lossy(&output.stderr);
        let line = said.lines().last().unwrap_or_default();
        ensure(output.status.code() == Some(2) && line.contains(says) && line.contains("--gdb"), || {
            format!("{value}: {output:?}")
        })?;
    }
    ensure(fs::read_to_string(&file)? == "kept", || "a file was touched".into())
}

fn gdb() -> Need {
    tools::program("gdb")
}

/// GDB reads registers by its description, memory and threads, and detaches.
#[test(kvm(), gdb())]
fn gdb_looks_and_detaches() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (machine, socket) = waiting(&env, "--passes 2 -c 2")?;
    let target = format!("target remote {}", socket.display());
    let said =
        gdb_says(&[&target, "info threads", "info registers rip eflags cr3 gs_base", "x/2i $rip", "detach"])?;
    for word in ["vCPU 0", "vCPU 1", "cr3", "gs_base", "mov", "detached"] {
        ensure(said.contains(word), || format!("{word:?} is missing in:\n{said}"))?;
    }
    let output = machine.end()?;
    ensure(output.status.success(), || format!("{output:?}"))
}

/// Runs GDB with these commands. Returns its output.
fn gdb_says(lines: &[&str]) -> Result<String, Failed> {
    let mut command = Command::new("gdb");
    command.args(["-nx", "-batch", "-ex", "set architecture i386:x86-64"]);
    for line in lines {
        command.args(["-ex", line]);
    }
    let output = command.stdin(Stdio::null()).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr))
}

/// GDB steps, too.
#[test(debugs(), gdb())]
fn gdb_steps_and_detaches() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (machine, socket) = waiting(&env, "--passes 2 -c 2")?;
    let target = format!("target remote {}", socket.display());
    let said = gdb_says(&[
        &target,
        "info threads",
        "info registers rip eflags cr3 gs_base",
        "set $before = $rip",
        "stepi",
        "printf \"stepped %d\\n\", $rip != $before",
        "detach",
    ])?;
    for word in ["vCPU 0", "vCPU 1", "cr3", "gs_base", "stepped 1", "detached"] {
        ensure(said.contains(word), || format!("{word:?} is missing in:\n{said}"))?;
    }
    let output = machine.end()?;
    ensure(output.status.success(), || format!("{output:?}"))
}
