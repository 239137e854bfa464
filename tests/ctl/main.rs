//! Control of running machines: `vellum ctl` and `vellum list`, names, and what remains of a
//! machine that is gone.

mod completions;
mod exec;
mod places;
mod terminal;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::process::{Command, ExitCode, Stdio};

use serde_json::{Value, json};
use support::env::{Machine, TestEnv, process};
use support::guests::Code;
use support::hosts::{kvm, real};
use support::{Failed, LIMIT, Tests, ensure, eventually, test};
use vellum_control::client::{Client, Error};
use vellum_control::{Do, MachineState, Status};

support::vellum!();

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    if words.next().as_deref() == Some(terminal::WORD) {
        return match terminal::agent(words) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("agent: {error}");
                ExitCode::FAILURE
            }
        };
    }
    Tests::from_args().run()
}

#[test]
fn machines_that_are_not_there_are_one_line_and_status_2() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    for (arguments, says) in [
        ("ctl nobody pause", "no machine named `nobody` listens at"),
        ("ctl /nonexistent/x.sock pause", "no machine listens at /nonexistent/x.sock"),
        ("ctl ../x pause", "no machine listens at ../x"),
        ("ctl .hidden pause", "not a valid machine name"),
        ("ctl nobody puase", "unknown command 'puase' of ctl (did you mean 'pause'?)"),
        ("ctl nobody", "pause"),
        ("ctl nobody balloon lots", "512m"),
        ("ctl nobody serial tty", "file=PATH or null"),
        ("ctl nobody serial", "<TO>"),
        ("exec nobody -- true", "vellum list"),
        ("exec nobody", "COMMAND"),
        ("run --name a/b", "--name: `a/b` is not a valid machine name"),
        ("run --name .", "letters, digits"),
        ("run --name=-x", "--name: `-x` is not a valid machine name"),
    ] {
        let output = env.vellum(arguments)?;
        let said = String::from_utf8_lossy(&output.stderr);
        let one_line = said.lines().count() == 1 && output.stdout.is_empty();
        let good = output.status.code() == Some(2) && one_line && said.contains(says);
        ensure(good, || format!("{arguments}: {output:?}"))?;
    }
    let list = env.vellum("list")?;
    ensure(list.status.success() && list.stdout.is_empty() && list.stderr.is_empty(), || format!("{list:?}"))
}

#[test(kvm())]
fn a_built_in_guest_obeys() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine = env.endless("w")?;
    let status: Status = serde_json::from_str(&env.ctl("w status")?)?;
    ensure(status.pid == machine.child.id() && status.vcpus == 1 && status.memory == 16 << 20, || {
        format!("{status:?}")
    })?;
    let list = String::from_utf8(env.vellum("list")?.stdout)?;
    ensure(
        list.lines().count() == 3 && list.starts_with("1 machine: 1 running\n") && list.contains("16m"),
        || list,
    )?;

    for arguments in ["ctl w status", "ctl w events", "list", "doctor", "completions bash"] {
        let (reader, writer) = std::io::pipe()?;
        drop(reader);
        let output = env.command(arguments).stdout(writer).output()?;
        let quiet = output.status.success() && output.stderr.is_empty();
        ensure(quiet, || format!("{arguments}, whose reader has gone: {output:?}"))?;
    }

    env.ctl("w pause")?;
    let status: Status = serde_json::from_str(&env.ctl("w status")?)?;
    ensure(status.state == MachineState::Paused, || format!("{status:?}"))?;
    env.ctl("w resume")?;
    let (kept, fresh) = (env.path("kept"), env.path("fresh"));
    fs::write(&kept, "from before")?;
    for (arguments, says) in [
        ("ctl w balloon 8m", "without a balloon"),
        ("ctl w serial null", "no serial port"),
        (&*format!("ctl w serial file={}", kept.display()), "no serial port"),
        (&*format!("ctl w serial file={}", fresh.display()), "no serial port"),
        ("exec w -- true", "--vsock"),
    ] {
        let output = env.vellum(arguments)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure(!output.status.success() && said.contains(says), || format!("{arguments}: {said}"))?;
    }
    ensure(fs::read_to_string(&kept)? == "from before" && !fresh.exists(), || {
        "a file that was refused".into()
    })?;
    env.ctl("w stop")?;
    let output = machine.end()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure(output.status.code() == Some(0) && said.contains("ended by vellum stop"), || {
        format!("{output:?}")
    })?;
    ensure(said.contains(", 0 wrong") && !env.socket("w").exists(), || said.into_owned())
}

/// A failing test drops its machine like this.
#[test(real())]
fn a_machine_that_is_dropped_is_gone() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine = env.endless("d")?;
    let pid = machine.child.id();
    drop(machine);
    ensure(process(pid).is_none(), || format!("{pid} runs on"))
}

#[test(kvm())]
fn a_paused_built_in_guest_can_be_ended() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine = env.endless("w")?;
    env.ctl("w pause")?;
    env.ctl("w stop")?;
    ensure(machine.end()?.status.success(), || "stop".into())?;
    let machine = env.endless("w")?;
    env.ctl("w pause")?;
    Command::new("kill").args(["-INT", &machine.child.id().to_string()]).status()?;
    let status = machine.end()?.status;
    ensure(status.code() == Some(130), || format!("{status:?}"))
}

/// Pages are written while the machine runs, and none while it is paused.
#[test(real())]
fn progress_is_told_to_who_listens() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine = env.endless("w")?;
    let mut listener = env.listen("w")?;
    let next = |listener: &mut Client, wanted: &str| -> Result<Value, Error> {
        loop {
            let event = listener.line()?;
            if event["event"] == wanted {
                return Ok(event);
            }
        }
    };
    let first = next(&mut listener, "progress")?["done"].as_u64();
    ensure(first > Some(0), || "nothing was done".into())?;
    env.ctl("w pause")?;
    next(&mut listener, "paused")?;
    let (one, two) = (next(&mut listener, "progress")?, next(&mut listener, "progress")?);
    ensure(one == two, || format!("{one} and {two} while it was paused"))?;
    env.ctl("w resume")?;
    ensure(listener.line()?["event"] == "resumed", || "resumed".into())?;
    eventually(LIMIT, "pages go by again", || {
        let now = next(&mut listener, "progress")?;
        Ok((now["done"].as_u64() > two["done"].as_u64()).then_some(()))
    })?;
    env.ctl("w stop")?;
    let ended = next(&mut listener, "ended")?;
    ensure(ended == json!({"event": "ended", "status": 0}), || ended.to_string())?;
    machine.end().map(drop)
}

/// A listener can tell an end from a cut connection: a machine that is killed sends no end.
#[test(real())]
fn a_listener_knows_an_end_from_a_connection_that_is_cut() -> Result<(), Failed> {
    for (killed, status) in [(false, Some(0)), (true, Some(1))] {
        let env = TestEnv::new()?;
        let mut machine = env.endless("w")?;
        let mut events = env.command("ctl w events");
        let mut listener =
            support::env::Process::spawn(events.stdout(Stdio::piped()).stderr(Stdio::piped()))?;
        // It has subscribed once it prints something.
        listener.stdout.as_mut().ok_or("no output")?.read_exact(&mut [0])?;
        if killed {
            machine.child.kill()?;
        } else {
            env.ctl("w stop")?;
        }
        let output = listener.output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let lines = said.lines().count() == usize::from(killed);
        ensure(output.status.code() == status && lines, || format!("killed: {killed}: {output:?}"))?;
        machine.end()?;
    }
    Ok(())
}

/// A guest that prints V, and then sends back what it receives.
fn echo(env: &TestEnv, name: &str) -> Result<Machine, Failed> {
    let image = env.path("echo");
    fs::write(&image, Code::default().print("V").echo().elf64())?;
    let mut command = env.command("run -m 16 -k");
    env.start(name, command.arg(image).stdin(Stdio::piped()))
}

#[test(kvm())]
fn a_kernel_s_guest_obeys() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let mut machine = echo(&env, "k")?;
    let mut listener = env.listen("k")?;
    let child = &mut *machine.child;
    let (Some(input), Some(output)) = (&mut child.stdin, &mut child.stdout) else { panic!() };
    let mut byte = [0];
    output.read_exact(&mut byte)?;
    env.ctl("k pause")?;
    ensure(listener.line()?["event"] == "paused", || "no event".into())?;
    input.write_all(b"x")?;
    env.ctl("k resume")?;
    output.read_exact(&mut byte)?;
    ensure(byte == *b"x", || format!("{byte:?}"))?;
    ensure(listener.line()?["event"] == "resumed", || "no event".into())?;
    env.ctl("k stop")?;
    ensure(listener.line()? == json!({"event": "ended", "status": 0}), || "no event".into())?;
    let output = machine.end()?;
    ensure(output.status.success() && !env.socket("k").exists(), || format!("{output:?}"))
}

/// KVM delivers a 16-byte access to a device as two exits, and a pause may come between them. Both
/// halves must arrive. Here the second half is the I/O APIC's identification. It changes each time
/// and is read back.
#[test(kvm())]
fn a_pause_between_the_halves_of_an_access_loses_neither() -> Result<(), Failed> {
    const PAUSES: u32 = 1000;
    // mov rax, cr4; or eax, 0x200; mov cr4, rax: SSE. mov ebx, 0xfec00000; mov dword [rbx], 0
    let setup = Code::default().bytes(&[0x0f, 0x20, 0xe0, 0x0d, 0, 2, 0, 0, 0x0f, 0x22, 0xe0]);
    let setup = setup.bytes(&[0xbb, 0, 0, 0xc0, 0xfe, 0xc7, 0x03, 0, 0, 0, 0]);
    // mov ebp, 0x200000: the 16 bytes.
    let setup = setup.bytes(&[0xbd, 0, 0, 0x20, 0]);
    // inc edi; mov eax, edi; and eax, 15; shl eax, 24; mov [rbp + 8], eax; movups xmm0, [rbp]
    let mut round = vec![0xff, 0xc7, 0x89, 0xf8, 0x83, 0xe0, 15, 0xc1, 0xe0, 24, 0x89, 0x45, 8];
    round.extend([0x0f, 0x10, 0x45, 0]);
    let right = Code::default().print("R").power_off().0;
    // movups [rbx + 8], xmm0; cmp [rbx + 16], eax; jne wrong
    round.extend([0x0f, 0x11, 0x43, 8, 0x39, 0x43, 16, 0x75, 9 + right.len() as u8]);
    // mov dx, 0x3fd; in al, dx; test al, 1; je round: until something is typed
    round.extend([0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 1, 0x74]);
    round.push((round.len() as u8 + 1).wrapping_neg());
    let image = setup.bytes(&round).bytes(&right).print("W").power_off().elf64();
    let env = TestEnv::new()?;
    let file = env.path("image");
    fs::write(&file, image)?;
    let mut command = env.command("run -m 16 -k");
    let mut machine = env.start("r", command.arg(file).stdin(Stdio::piped()))?;
    let mut client = Client::connect(&env.socket("r"))?;
    for _ in 0..PAUSES {
        if client.ask(&Do::Pause {}).and_then(|_| client.ask(&Do::Resume { force: false })).is_err() {
            return Err(format!("it has ended: {:?}", machine.end()?).into());
        }
    }
    machine.child.stdin.take().ok_or("no input")?.write_all(b"x")?;
    let output = machine.end()?;
    ensure(output.status.success() && output.stdout == b"R", || format!("{output:?}"))
}

/// The machine's own kernel file, and the file of a machine without a serial port, cannot be
/// overwritten.
#[test(real())]
fn kept() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine = echo(&env, "s")?;
    let (image, built_in) = (env.path("echo"), env.endless("b")?);
    let before = fs::read(&image)?;
    let at = image.display();
    let (other, new) = (env.path("other"), env.path("new"));
    fs::write(&other, "earlier")?;
    for (line, status, says) in [
        (format!("ctl s serial file={at}"), 2, "kernel or initial RAM disk"),
        (format!("run --serial file={at} -k {at}"), 2, "kernel or initial RAM disk"),
        (format!("ctl b serial file={}", other.display()), 1, "no serial port"),
        (format!("ctl b serial file={}", new.display()), 1, "no serial port"),
    ] {
        let output = env.vellum(&line)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure(output.status.code() == Some(status) && said.contains(says), || {
            format!("{line}: {output:?}")
        })?;
    }
    ensure(fs::read(&image)? == before && fs::read(&other)? == b"earlier", || "overwritten".into())?;
    ensure(!new.exists(), || "an empty file is left".into())?;
    env.ctl(&format!("s serial file={}", other.display()))?;
    ensure(fs::read(&other)?.is_empty(), || "what was there before is still there".into())?;
    for (name, machine) in [("s", machine), ("b", built_in)] {
        env.ctl(&format!("{name} stop"))?;
        machine.end()?;
    }
    Ok(())
}

#[test(real())]
fn silent() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (stopped, other) = (env.endless("stopped")?, env.endless("z")?);
    let send = |signal: &str| Command::new("kill").args([signal, &stopped.child.id().to_string()]).status();
    send("-STOP")?;
    let patience = std::time::Duration::from_millis(50);
    let asked = Client::connect_within(&env.socket("stopped"), patience)?.ask(&Do::Status {});
    let listed = env.vellum("list")?;
    send("-CONT")?;
    let pid = stopped.child.id() as i32;
    ensure(matches!(asked, Err(Error::Silent { pid: Some(of), .. }) if of == pid), || format!("{asked:?}"))?;
    let text = String::from_utf8(listed.stdout)?;
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let pid = pid.to_string();
    ensure(rows.iter().any(|row| row[..3] == ["stopped", &pid, "silent"]), || text.clone())?;
    ensure(rows.iter().any(|row| row[0] == "z" && row[2] == "running"), || text.clone())?;
    for (name, machine) in [("stopped", stopped), ("z", other)] {
        env.ctl(&format!("{name} stop"))?;
        machine.end()?;
    }
    Ok(())
}

#[test(real())]
fn too_many() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine = env.endless("n")?;
    let mut clients = Vec::new();
    let refused = loop {
        let mut client = Client::connect(&env.socket("n"))?;
        match client.ask(&Do::Status {}) {
            Ok(_) if clients.len() > 100 => return Err("there is no limit".into()),
            Ok(_) => clients.push(client),
            Err(error) => break error,
        }
    };
    ensure(matches!(&refused, Error::Refused(why) if why == "too many clients"), || format!("{refused:?}"))?;
    let output = env.vellum("status n")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure(!output.status.success() && said.contains("too many clients"), || format!("{output:?}"))?;
    drop(clients);
    eventually(LIMIT, "it serves clients again", || {
        Ok(env.vellum("stop n")?.status.success().then_some(()))
    })?;
    machine.end().map(drop)
}

/// The server refuses clients while it has no descriptors for them, and serves them again when it
/// has.
#[test(real())]
fn no_descriptors() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "ulimit -n 32; exec \"$@\"",
        "sh",
        VELLUM,
        "run",
        "--memory",
        "16m",
        "--passes",
        "0",
    ]);
    command.env("XDG_RUNTIME_DIR", env.dir()).stdin(Stdio::null());
    let machine = env.start("n", &mut command)?;
    let mut clients = Vec::new();
    let refused = loop {
        let patience = std::time::Duration::from_secs(5);
        let mut client = Client::connect_within(&env.socket("n"), patience)?;
        match client.ask(&Do::Status {}) {
            Ok(_) if clients.len() > 40 => return Err("there is no limit".into()),
            Ok(_) => clients.push(client),
            Err(error) => break error,
        }
    };
    let told = |error: &Error| matches!(error, Error::Refused(why) if why.contains("ulimit -n"));
    ensure(told(&refused), || format!("{} clients, then {refused:?}", clients.len()))?;
    // An idle client takes the descriptor that was left for an answer. Then there is none for a
    // connection.
    let idle = std::os::unix::net::UnixStream::connect(env.socket("n"))?;
    let turned_away = Client::connect(&env.socket("n"))?.ask(&Do::Status {});
    ensure(turned_away.as_ref().is_err_and(told), || format!("{turned_away:?}"))?;
    drop((clients, idle));
    eventually(LIMIT, "it serves clients again", || {
        Ok(env.vellum("stop n")?.status.success().then_some(()))
    })?;
    let output = machine.end()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure(said.contains("a client was turned away"), || format!("{output:?}"))
}

#[test(real())]
fn large_balloon() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let image = env.path("image");
    fs::write(&image, Code::default().spin().elf64())?;
    let machine = env.start("m", env.command("run -m 16 --balloon -k").arg(image))?;
    let output = env.vellum("ctl m balloon 99999t")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let good = output.status.code() == Some(1) && said.contains("more than its memory of 16m");
    ensure(good, || format!("{output:?}"))?;
    env.ctl("m balloon 4m")?;
    env.ctl("m stop")?;
    machine.end().map(drop)
}

#[test(real())]
fn serial_output_goes_where_ctl_leads_it() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let mut machine = echo(&env, "s")?;
    let child = &mut *machine.child;
    let (Some(input), Some(output)) = (&mut child.stdin, &mut child.stdout) else { panic!() };
    output.read_exact(&mut [0])?;
    let log = env.path("log");
    env.ctl(&format!("s serial file={}", log.display()))?;
    input.write_all(b"to the file")?;
    eventually(LIMIT, "the file has all of it", || {
        Ok((fs::read_to_string(&log)? == "to the file").then_some(()))
    })?;
    // A pipe of this process.
    let (mut reader, writer) = std::io::pipe()?;
    Client::connect(&env.socket("s"))?.ask_with(&Do::Serial { truncate: false }, &[writer.as_fd()])?;
    drop(writer);
    input.write_all(b"to the pipe")?;
    let mut got = [0; 11];
    reader.read_exact(&mut got)?;
    ensure(&got == b"to the pipe", || format!("{got:?}"))?;
    env.ctl("s serial null")?;
    ensure(reader.read(&mut got)? == 0, || "the machine still holds the pipe".into())?;
    env.ctl("s stop")?;
    let output = machine.end()?;
    ensure(output.status.success() && output.stdout.is_empty(), || format!("{output:?}"))
}

#[test(real())]
fn descriptors_that_are_no_output_are_refused() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine = echo(&env, "u")?;
    let place = env.path("file");
    fs::write(&place, "")?;
    let (readable, _writable) = std::io::pipe()?;
    let mut client = Client::connect(&env.socket("u"))?;
    for (what, descriptor, says) in [
        ("a file opened for reading", File::open(&place)?.into(), "not opened for writing"),
        ("the reading end of a pipe", readable.into(), "not opened for writing"),
        ("a directory", File::open(env.dir())?.into(), "not a file"),
    ] {
        match client.ask_with(&Do::Serial { truncate: false }, &[OwnedFd::as_fd(&descriptor)]) {
            Err(Error::Refused(error)) if error.contains(says) => {}
            other => return Err(format!("{what}: {other:?}").into()),
        }
    }
    client.ask(&Do::Stop {})?;
    machine.end().map(drop)
}

#[test(real())]
fn a_name_in_use_is_refused_and_a_stale_one_replaced() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    fs::create_dir(env.path("vellum"))?;
    drop(UnixListener::bind(env.socket("n"))?);
    // `list` removes stale sockets silently.
    let list = env.vellum("list")?;
    ensure(list.stdout.is_empty() && list.stderr.is_empty() && !env.socket("n").exists(), || {
        format!("{list:?}")
    })?;
    drop(UnixListener::bind(env.socket("n"))?);
    let machine = env.endless("n")?;
    let image = env.path("spin");
    fs::write(&image, Code::default().spin().elf64())?;
    for second in ["run --memory 16m --name n".into(), format!("run --name n -k {}", image.display())] {
        let output = env.vellum(&second)?;
        let said = String::from_utf8_lossy(&output.stderr);
        let good = output.status.code() == Some(2) && said.lines().count() == 1;
        ensure(good && said.contains("--name") && said.contains("in use"), || {
            format!("{second}: {output:?}")
        })?;
    }
    // The failed second machine has not removed the first one's socket.
    env.ctl("n stop")?;
    ensure(machine.end()?.status.success() && !env.socket("n").exists(), || "the name is left".into())
}

#[test(real())]
fn a_name_goes_with_its_machine_however_that_ends() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let image = env.path("spin");
    fs::write(&image, Code::default().spin().elf64())?;
    let vsock = env.path("v.sock");
    for guest in [
        "--memory 16m --passes 0".into(),
        format!("-m 16 --vsock {} -k {}", vsock.display(), image.display()),
    ] {
        for sandbox in ["on", "off"] {
            for signal in ["INT", "KILL"] {
                let mut command = env.command(&format!("run {guest} --sandbox {sandbox}"));
                let machine = env.start("e", &mut command)?;
                ensure(env.socket("e").exists(), || "no socket".into())?;
                Command::new("kill")
                    .args([&format!("-{signal}"), &machine.child.id().to_string()])
                    .status()?;
                machine.end()?;
                let left = fs::read_dir(env.path("vellum"))?.count();
                ensure(left == 0 && !vsock.exists(), || {
                    format!("{guest}, {sandbox}, {signal}: {left} left")
                })?;
            }
        }
    }
    Ok(())
}

/// A guest with a kernel and the built-in one get the same requests. Their answers and events are
/// equal except for numbers.
#[test(kvm())]
fn both_kinds_of_machine_answer_alike() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let image = env.path("spin.elf");
    fs::write(&image, Code::default().spin().elf64())?;
    let mut builtin = env.command("run --memory 16m --passes 0");
    let mut kernel = env.command("run --memory 16m --serial null --kernel");
    kernel.arg(&image);
    let mut said = Vec::new();
    for (name, command) in [("builtin", &mut builtin), ("kernel", &mut kernel)] {
        let machine = env.start(name, command)?;
        said.push(conversation(&env.socket(name))?);
        ensure(machine.end()?.status.success(), || format!("{name} ended otherwise"))?;
    }
    ensure(said[0] == said[1], || format!("built-in: {:#?}\nkernel: {:#?}", said[0], said[1]))
}

/// The machine's answers to each request and its events, without the values of numbers. Only a
/// built-in guest has `progress` and `done`.
fn conversation(socket: &std::path::Path) -> Result<Vec<Value>, Failed> {
    let mut listener = Client::connect(socket)?;
    listener.ask(&Do::Events {})?;
    let mut client = Client::connect(socket)?;
    let mut said = Vec::new();
    for what in [
        Do::Status {},
        Do::Pause {},
        Do::Pause {},
        Do::Status {},
        Do::Resume { force: false },
        Do::Resume { force: false },
        Do::Status {},
        Do::Balloon { bytes: 1 << 20 },
        Do::Pause {},
        Do::Stop {},
    ] {
        said.push(match client.ask(&what) {
            Ok(answer) => json!({ "ok": shape(answer) }),
            Err(Error::Refused(why)) => json!({ "error": why.split(':').next() }),
            Err(error) => return Err(error.into()),
        });
    }
    loop {
        let event = listener.line()?;
        if event["event"] != "progress" {
            let ended = event["event"] == "ended";
            said.push(shape(event));
            if ended {
                return Ok(said);
            }
        }
    }
}

/// `value` with every number replaced by 0.
fn shape(value: Value) -> Value {
    match value {
        Value::Number(_) => 0.into(),
        Value::Object(fields) => {
            let common = fields.into_iter().filter(|(key, _)| key != "done");
            common.map(|(key, value)| (key, shape(value))).collect()
        }
        value => value,
    }
}
