//! `vellum ssh`, and `vellum run --ssh`: connections to the user that `--login` created in a guest.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;

use super::client;
use super::failure::Failure;
use super::image::Prepared;
use super::kernel::{self, KernelArgs, Ready};
use super::output::say;
use super::run_flags::FLAGS;
use crate::session;
use vellum_control::client::Client;
use vellum_control::{Do, names};
use vellum_devices::console::Target;
use vellum_kvm::memory::MemoryConfig;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_linux as machine;
use vellum_sandbox::Sandbox;
use vellum_sys::fork::{Forked, fork};

/// How long the first attempt to reach the guest's server waits for its banner.
const FIRST_TRY: Duration = Duration::from_secs(2);
/// Later attempts wait by this part of the time since the first one longer. A packet to a guest without
/// a network is lost, and the attempt with it, so none should wait long. But a guest that has taken
/// minutes to boot needs more than [`FIRST_TRY`] to send a banner.
const LONGER: u32 = 4;
/// The delay between attempts.
const PAUSE: Duration = Duration::from_millis(300);

/// Connect to a guest by SSH: one that was started with --login and a name
#[derive(Debug, Args)]
pub(crate) struct SshArgs {
    /// The machine's name
    machine: String,
    /// A command for the guest; without one, a shell
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Runs `vellum ssh`.
pub(crate) fn run(args: &SshArgs) -> Result<Exit, Failure> {
    let name = &args.machine;
    let socket = names::socket(name).map_err(|error| Failure::of(&error, FLAGS))?;
    Client::connect(&socket).map_err(client::failure)?;
    let config = names::ssh_directory(name).map_err(|error| Failure::of(&error, FLAGS))?.join("config");
    if !config.exists() {
        return Err(Failure::usage(format!(
            "{name} was not started for SSH: vellum run --disk IMAGE --login USER --name {name}"
        )));
    }
    // ssh replaces this process, so that the caller sees its exit status and signals.
    let error = ssh(&config, name, &args.command).exec();
    Err(Failure::host(format!("ssh: {error}: apt install openssh-client")))
}

/// Options with which ssh(1) gives up a guest that does not answer.
const ENDS: [&str; 4] = ["-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=5"];

/// The ssh(1) command for machine `name`.
fn ssh(config: &Path, name: &str, command: &[String]) -> Command {
    with_options(config, &[], name, command)
}

/// The same, with options.
fn with_options(config: &Path, options: &[&str], name: &str, command: &[String]) -> Command {
    let mut ssh = Command::new("ssh");
    ssh.arg("-F").arg(config).args(options).arg(name);
    if !command.is_empty() {
        ssh.arg("--").args(command);
    }
    ssh
}

/// Boots the guest in a process of its own, connects to it, and stops it when the connection ends,
/// with its writes on the disk if that is kept. Returns ssh's status.
pub(super) fn beside(
    prepared: &Prepared,
    mut args: KernelArgs,
    name: &str,
    memory: MemoryConfig,
    config: machine::Config,
    process: session::Config,
) -> Result<Exit, Failure> {
    let login = prepared.login.as_ref().and_then(|login| Some((login.config.clone()?, login.port)));
    let (ssh_config, port) = login.ok_or_else(|| {
        Failure::usage(
            "--ssh: the guest cannot be reached: it needs --net user (apt install passt) and ssh-keygen",
        )
    })?;
    let console = ssh_config.with_file_name("console.log");
    if args.serial == Target::Terminal {
        args.serial = format!("file={}", console.display()).parse().map_err(Failure::usage)?;
    }
    let host = |error: io::Error| Failure::host(format!("a pipe: {error}"));
    let (output, child_output) = io::pipe().map_err(host)?;
    let (ready, word) = io::pipe().map_err(host)?;
    let (child_output, word) = (OwnedFd::from(child_output), OwnedFd::from(word));
    let (mode, keeps) = (process.sandbox, args.devices.keeps_writes());
    match fork(&child_output).map_err(|error| Failure::host(format!("fork: {error}")))? {
        Forked::Child => {
            drop((output, ready));
            let told = Ready { word: Some(word), ..Ready::none() };
            kernel::boot(args, prepared.kernel.clone(), memory, config, process, told)
        }
        Forked::Parent(child) => {
            drop((child_output, word));
            Sandbox::client(mode).map_err(|error| Failure::of(&error, FLAGS))?;
            // The read ends when the machine has all that it needs, or has failed and printed why.
            let _ = File::from(OwnedFd::from(ready)).read(&mut [0]);
            let socket = names::socket(name).map_err(|error| Failure::of(&error, FLAGS))?;
            let Ok(mut machine) = Client::connect(&socket) else {
                let status = child.wait().map_err(Failure::host)?;
                return Ok(Exit::Guest(status));
            };
            say(&format!("waiting for the SSH server of {name}; its console is in {}", console.display()));
            let is_up = wait_for_server(port, FIRST_TRY, || Client::connect(&socket).is_ok());
            if !is_up {
                let status = child.wait().map_err(Failure::host)?;
                say(&format!("{name} has ended before its SSH server ran"));
                return Ok(Exit::Guest(status.max(1)));
            }
            let status = ssh(&ssh_config, name, &[]).status();
            // The guest may have been switched off from inside.
            if keeps {
                let _ = with_options(&ssh_config, &ENDS, name, &["sync".into()]).status();
            }
            let _ = machine.ask(&Do::Stop {});
            child.wait().map_err(Failure::host)?;
            let status =
                status.map_err(|error| Failure::host(format!("ssh: {error}: apt install openssh-client")))?;
            Ok(Exit::Guest(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(255)))
        }
    }
}

/// Waits until the server behind `port` sends its banner, as long as the machine `lives`. The first
/// attempt takes at most `first`.
fn wait_for_server(port: u16, first: Duration, lives: impl Fn() -> bool) -> bool {
    let since = Instant::now();
    while lives() {
        if speaks(port, first + since.elapsed() / LONGER).unwrap_or(false) {
            return true;
        }
        // passt accepts a connection at once, and closes it if the guest does not listen.
        std::thread::sleep(PAUSE.min(first));
    }
    false
}

fn speaks(port: u16, patience: Duration) -> io::Result<bool> {
    let mut stream = TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), patience)?;
    stream.set_read_timeout(Some(patience))?;
    // The passt of Debian 12 completes a connection to the guest only with the first bytes for it.
    stream.write_all(b"SSH-2.0-vellum\r\n")?;
    let mut words = [0; 4];
    stream.read_exact(&mut words)?;
    Ok(words == *b"SSH-")
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// A server that answers only who has spoken, and needs many times the first attempt for it, as on
    /// an emulated host.
    #[test]
    fn a_slow_server_is_waited_for() {
        let first = Duration::from_millis(5);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                stream.set_read_timeout(Some(10 * first)).unwrap();
                let heard = stream.read(&mut [0; 64]).is_ok_and(|count| count > 0);
                // The client gives up, or its time is over.
                if heard && stream.read(&mut [0]).is_err() {
                    let _ = stream.write_all(b"SSH-2.0-slow\r\n");
                }
            }
        });
        let attempts = Cell::new(0);
        let lives = || attempts.replace(attempts.get() + 1) < 30;
        assert!(wait_for_server(port, first, lives), "no attempt of {} waited long enough", attempts.get());
    }
}
