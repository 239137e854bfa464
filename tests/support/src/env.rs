//! The directory of a test's machines, and how they are started and ended.

use std::fs;
use std::io::{self, Read};
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use crate::{Failed, LIMIT, Scratch, ensure, eventually};
use vellum_control::Do;
use vellum_control::client::Client;

/// The `vellum` program that a test program runs. Cargo gives its path to Vellum's own test
/// programs, and not to libraries.
pub struct Vellum(pub &'static str);

inventory::collect!(Vellum);

/// Defines the constant `VELLUM` in a test program, and gives every [`TestEnv`] the same path. Used
/// once, in `main.rs`.
#[macro_export]
macro_rules! vellum {
    () => {
        const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");
        $crate::inventory::submit! { $crate::env::Vellum(VELLUM) }
    };
}

fn vellum() -> &'static str {
    inventory::iter::<Vellum>.into_iter().next().expect("main.rs has support::vellum!()").0
}

/// A directory for the sockets of a user's machines, and the fault that is planted in them, if any.
pub struct TestEnv {
    scratch: Scratch,
    planted: Option<&'static str>,
}

impl TestEnv {
    /// An empty directory, with no planted fault.
    pub fn new() -> Result<Self, Failed> {
        Self::planted(None)
    }

    /// An empty directory. The fault is planted in its machines, if any.
    pub fn planted(planted: Option<&'static str>) -> Result<Self, Failed> {
        Ok(Self { scratch: Scratch::new()?, planted })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        self.scratch.dir()
    }

    /// The control socket of the machine `name`.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.path(&format!("vellum/{name}.sock"))
    }

    /// `vellum` with these arguments, separated by blanks, and without standard input.
    pub fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(vellum());
        command.args(arguments.split_whitespace()).env("XDG_RUNTIME_DIR", self.dir()).stdin(Stdio::null());
        if let Some(fault) = self.planted {
            command.env(vellum_sys::plant::VARIABLE, fault);
        }
        command
    }

    /// Runs `vellum` to its end.
    pub fn vellum(&self, arguments: &str) -> Result<Output, Failed> {
        Ok(self.command(arguments).output()?)
    }

    /// Runs `vellum ctl`, which must succeed. Returns its output.
    pub fn ctl(&self, arguments: &str) -> Result<String, Failed> {
        let output = self.vellum(&format!("ctl {arguments}"))?;
        ensure(output.status.success() && output.stderr.is_empty(), || format!("{arguments}: {output:?}"))?;
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Starts a built-in guest that runs until it is stopped.
    pub fn endless(&self, name: &str) -> Result<Machine, Failed> {
        self.start(name, &mut self.command("run --memory 16m --passes 0"))
    }

    /// Starts `command` as a machine called `name`, and waits until it answers.
    pub fn start(&self, name: &str, command: &mut Command) -> Result<Machine, Failed> {
        command.args(["--name", name]).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut machine = Machine { child: Process::spawn(command)?, children: Vec::new() };
        let socket = self.socket(name);
        let answers = || Client::connect(&socket).is_ok_and(|mut client| client.ask(&Do::Status {}).is_ok());
        let up = eventually(LIMIT, "the machine answers", || {
            let ended = machine.child.try_wait()?.is_some();
            Ok((ended || answers()).then_some(!ended))
        })?;
        if !up {
            return Err(format!("it has ended: {:?}", machine.child.output()?).into());
        }
        let (children, own) = (children(machine.child.id())?, process(machine.child.id()));
        // A guard has the machine's name until it sets its own.
        machine.children = eventually(LIMIT, "what it has started has names", || {
            let named = children.iter().filter_map(|pid| Some((*pid, process(*pid)?)));
            let named: Vec<(u32, String)> = named.collect();
            Ok(named.iter().all(|(_, name)| Some(name) != own.as_ref()).then_some(named))
        })?;
        Ok(machine)
    }
}

/// Migrations and snapshots.
impl TestEnv {
    /// The path of a file in the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    /// The state of the machine `name`, if it answers.
    pub fn standing(&self, name: &str) -> Option<String> {
        let status = Client::connect(&self.socket(name)).ok()?.ask(&Do::Status {}).ok()?;
        status["state"].as_str().map(str::to_owned)
    }

    /// Starts the machine `name` with these arguments, and waits until it answers.
    pub fn run(&self, name: &str, arguments: &str) -> Result<Machine, Failed> {
        self.start(name, &mut self.command(arguments))
    }

    /// Starts a target called `name`, for [`TestEnv::migrate`].
    pub fn receive(&self, name: &str, more: &str) -> Result<Machine, Failed> {
        let socket = self.path(&format!("{name}.in"));
        self.run(name, &format!("receive --listen unix:{} {}", socket.display(), patient(more)))
    }

    /// Migrates `from` to the target `to`.
    pub fn migrate(&self, from: &str, to: &str, more: &str) -> Result<Output, Failed> {
        let socket = self.path(&format!("{to}.in"));
        self.vellum(&format!("migrate {from} --to unix:{} {}", socket.display(), patient(more)))
    }

    /// Starts a migration client without waiting for it.
    pub fn migration_client(&self, arguments: &str) -> Result<Process, Failed> {
        Ok(Process::spawn(self.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()))?)
    }

    /// Restores a machine from a snapshot, and waits until it runs or is paused.
    pub fn restore(&self, name: &str, arguments: &str) -> Result<Machine, Failed> {
        let machine = self.run(name, &format!("restore {arguments}"))?;
        eventually(LIMIT, "it is restored", || {
            let standing = self.standing(name);
            Ok(standing.filter(|state| state == "running" || state == "paused").map(drop))
        })?;
        Ok(machine)
    }

    /// A client that receives the events of the machine `name`.
    pub fn listen(&self, name: &str) -> Result<Client, Failed> {
        let mut events = Client::connect(&self.socket(name))?;
        events.ask(&Do::Events {})?;
        Ok(events)
    }

    /// Waits until the built-in guest `name` has accessed more than `pages` pages.
    pub fn has_written(&self, name: &str, pages: u64) -> Result<(), Failed> {
        let mut machine = Client::connect(&self.socket(name))?;
        eventually(LIMIT, "the guest has written enough", || {
            Ok((machine.ask(&Do::Status {})?["done"].as_u64() > Some(pages)).then_some(()))
        })
    }

    /// The number of pages that the built-in guest of the machine `name` has accessed so far.
    pub fn done(&self, name: &str) -> Result<u64, Failed> {
        let status = Client::connect(&self.socket(name))?.ask(&Do::Status {})?;
        Ok(status["done"].as_u64().ok_or_else(|| format!("{name} does not say it: {status}"))?)
    }
}

/// Adds a long `--liveness` to the arguments `more` of one side of a migration, unless they set
/// one. If guests keep every CPU busy, KVM can take more than ten seconds to create a VM
/// (synchronize_srcu).
pub fn patient(more: &str) -> String {
    if more.contains("--liveness") { more.to_owned() } else { format!("--liveness 5m {more}") }
}

/// A machine, and the process IDs and names of the processes that it started.
pub struct Machine {
    /// The machine's process.
    pub child: Process,
    children: Vec<(u32, String)>,
}

/// A process that is killed if its test ends first.
pub struct Process(Option<Child>);

impl Process {
    /// Starts `command`.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        Ok(Self(Some(command.spawn()?)))
    }

    /// Waits for its end. Returns its output.
    pub fn output(mut self) -> io::Result<Output> {
        self.0.take().expect("nobody else takes it").wait_with_output()
    }
}

impl Deref for Process {
    type Target = Child;

    fn deref(&self) -> &Child {
        self.0.as_ref().expect("only its end takes it")
    }
}

impl DerefMut for Process {
    fn deref_mut(&mut self) -> &mut Child {
        self.0.as_mut().expect("only its end takes it")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let ended = child.try_wait().ok().flatten();
            // Killing fails if the process has ended already.
            let _ = child.kill();
            let _ = child.wait();
            // A test that drops a running process has failed, and the process's messages may tell
            // why.
            let said = child.stderr.as_mut().map(left_in).unwrap_or_default();
            if !said.is_empty() {
                let ended = ended.map_or_else(|| "was killed".into(), |status| format!("ended by {status}"));
                eprintln!("process {}, which {ended}, said:\n{}", child.id(), said.trim_end());
            }
        }
    }
}

/// The unread content of a pipe. Its other end may still be open.
fn left_in(pipe: &mut ChildStderr) -> String {
    let mut bytes = Vec::new();
    if rustix::io::ioctl_fionbio(&*pipe, true).is_ok() {
        // The error says that the pipe is empty now.
        let _ = pipe.read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Machine {
    /// The process called `name` that the machine started.
    pub fn started(&self, name: &str) -> Option<u32> {
        self.children.iter().find(|(_, is)| is == name).map(|(pid, _)| *pid)
    }

    /// Waits for the end of the machine and of its guard. It must have started no other process.
    pub fn end(self) -> Result<Output, Failed> {
        self.end_with(&["vellum-guard"])
    }

    /// Waits for the end of the machine and of the processes that it started. They must be called
    /// `names`, which are sorted.
    pub fn end_with(self, names: &[&str]) -> Result<Output, Failed> {
        let output = self.child.output()?;
        let mut found: Vec<&str> = self.children.iter().map(|(_, name)| name.as_str()).collect();
        found.sort_unstable();
        ensure(found == names, || format!("it has started {found:?}"))?;
        for (child, name) in &self.children {
            eventually(LIMIT, "what it has started ends", || {
                Ok((process(*child).as_ref() != Some(name)).then_some(()))
            })?;
        }
        Ok(output)
    }
}

/// The name of a process that has not ended.
pub fn process(pid: u32) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = |key: &str| Some(status.lines().find_map(|line| line.strip_prefix(key))?.trim().to_owned());
    (!line("State:")?.starts_with('Z')).then(|| line("Name:"))?
}

/// The processes that the process `of` has started and that have not been waited for.
pub fn children(of: u32) -> Result<Vec<u32>, Failed> {
    let mut children = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // pid (name) state parent …
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
        if parent == Some(&of.to_string()) {
            children.push(pid);
        }
    }
    Ok(children)
}
