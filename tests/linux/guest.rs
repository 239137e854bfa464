//! A Linux guest under `vellum run`, as a user would start it. The tests have its console, its
//! agent, its control socket and its exit status.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;

use guest_agent::{Event, Request};
use serde_json::Value;
pub use support::linux::for_this_bed;
use support::{Failed, LIMIT, Scratch, ensure, eventually};
use vellum_control::agent;

use crate::VELLUM;

/// The interrupt controllers that machines can have on this host. On Arm it is the host's own.
pub fn irqchips() -> &'static [&'static str] {
    if !cfg!(target_arch = "aarch64") {
        return &["split", "kernel"];
    }
    let interrupts = fs::read_to_string("/proc/interrupts").unwrap_or_default();
    if interrupts.contains("GICv3") { &["gicv3"] } else { &["gicv2"] }
}

/// The clocksource that Linux chooses in the guest.
pub const CLOCKSOURCE: &str = match cfg!(target_arch = "aarch64") {
    true => "arch_sys_counter",
    false => "kvm-clock",
};

/// Ends a guest that hangs, in the host's time. No test checks it.
const TIMEOUT: &str = "900s";

/// A kernel and an initramfs with the guest agent, as `cargo lab guest` makes them.
#[derive(Clone, Debug)]
pub struct Image {
    /// The name of the directory, with which the kernel's release begins, such as `6.1`.
    pub version: String,
    dir: PathBuf,
}

impl Image {
    /// The images below `$VELLUM_GUESTS`, or the reason that there are none.
    pub fn all() -> Result<Vec<Self>, String> {
        let remedy = "cargo lab test linux, or cargo lab guest DIR/6.1 and VELLUM_GUESTS=DIR";
        let dir = std::env::var_os("VELLUM_GUESTS").ok_or(format!("needs a Linux guest: {remedy}"))?;
        let entries = fs::read_dir(&dir).map_err(|error| format!("VELLUM_GUESTS={dir:?}: {error}"))?;
        let image = |dir: PathBuf| {
            let version = dir.file_name()?.to_str()?.to_owned();
            dir.join("vmlinuz").is_file().then_some(Self { version, dir })
        };
        let mut all: Vec<_> = entries.filter_map(|entry| image(entry.ok()?.path())).collect();
        all.sort_by(|a, b| a.version.len().cmp(&b.version.len()).then(a.version.cmp(&b.version)));
        if all.is_empty() { Err(format!("VELLUM_GUESTS={dir:?} holds no guest: {remedy}")) } else { Ok(all) }
    }

    /// The oldest image.
    pub fn oldest() -> Result<Self, String> {
        Ok(Self::all()?.remove(0))
    }

    /// The path of the bzImage.
    pub fn kernel(&self) -> String {
        self.dir.join("vmlinuz").display().to_string()
    }

    /// The path of the ELF image, or how to get it.
    pub fn vmlinux(&self) -> Result<String, String> {
        let path = self.dir.join("vmlinux");
        let missing = || format!("needs {}: cargo lab guest --vmlinux", path.display());
        path.is_file().then(|| path.display().to_string()).ok_or_else(missing)
    }

    /// The path of the ELF image with symbols and unwind tables, or how to get it.
    pub fn symbols(&self) -> Result<String, String> {
        let path = self.dir.join("vmlinux.symbols");
        let missing = || format!("needs {}, a kernel's symbols: cargo lab test linux", path.display());
        path.is_file().then(|| path.display().to_string()).ok_or_else(missing)
    }

    /// The kernel and initramfs of a command's guest.
    pub fn source(&self) -> Source {
        Source { name: self.version.clone(), kernel: self.kernel(), initrd: Some(self.initrd()) }
    }

    /// The path of the initramfs.
    pub fn initrd(&self) -> String {
        self.dir.join("initrd").display().to_string()
    }
}

/// A kernel for a guest of one command.
#[derive(Clone, Debug)]
pub struct Source {
    /// A name such as `6.1`. Tests are named after it.
    pub name: String,
    /// An image, or the directory of an unpacked package or of a built tree.
    pub kernel: String,
    /// The initramfs with its modules, if `kernel` is an image.
    pub initrd: Option<String>,
}

impl Source {
    /// The images, and the directories below `$VELLUM_GUESTS` without an image.
    pub fn all() -> Vec<Self> {
        let images = Image::all().unwrap_or_default();
        images.iter().map(Image::source).chain(Self::directories().filter(|it| !it.has_image())).collect()
    }

    /// The built trees.
    pub fn trees() -> Vec<Self> {
        Self::directories().filter(|it| it.kernel.ends_with("/tree")).collect()
    }

    /// Those with modules for modprobe.
    pub fn with_modules() -> Vec<Self> {
        Self::directories().collect()
    }

    fn directories() -> impl Iterator<Item = Self> {
        let entries = std::env::var_os("VELLUM_GUESTS").and_then(|dir| fs::read_dir(dir).ok());
        let dirs = entries.into_iter().flatten().flatten().map(|entry| entry.path());
        dirs.flat_map(|dir| ["package", "tree"].map(|what| dir.join(what))).filter(|dir| dir.is_dir()).map(
            |dir| {
                let name = dir.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
                Self { name: name.into_owned(), kernel: dir.display().to_string(), initrd: None }
            },
        )
    }

    /// Whether there is an image of this kernel too.
    fn has_image(&self) -> bool {
        Path::new(&self.kernel).with_file_name("vmlinuz").is_file()
    }

    /// The arguments that name it.
    pub fn arguments(&self) -> Vec<&str> {
        let initrd = self.initrd.iter().flat_map(|path| ["--initrd", path]);
        ["--kernel", &self.kernel].into_iter().chain(initrd).collect()
    }
}

/// A new directory for a test.
pub fn scratch() -> Result<Scratch, Failed> {
    Ok(Scratch::within(Path::new(env!("CARGO_TARGET_TMPDIR")))?)
}

/// A unique name for a machine or an interface, of at most 15 bytes.
pub fn short_name(scratch: &Scratch) -> String {
    let name = scratch.dir().file_name().expect("it has one").to_string_lossy();
    format!("l{}", name.trim_start_matches("vellum").replace('-', "."))
}

/// A running guest. It is killed when it is dropped.
pub struct Guest {
    child: Child,
    name: String,
    vsock: PathBuf,
    lines: Receiver<String>,
    console: String,
    errors: Option<JoinHandle<String>>,
    /// Removed with the guest.
    _scratch: Scratch,
}

/// A guest that has ended.
pub struct Ended {
    pub code: Option<i32>,
    pub console: String,
    pub errors: String,
}

impl Guest {
    /// Starts `image` with a name, a vsock and `flags`. Its serial port is on pipes. `cmdline`
    /// follows the defaults.
    pub fn start(image: &Image, cmdline: &str, flags: &[&str]) -> Result<Self, Failed> {
        Self::start_kernel(image, &image.kernel(), cmdline, flags)
    }

    /// Starts it from the ELF image.
    pub fn start_elf(image: &Image, vmlinux: &str, flags: &[&str]) -> Result<Self, Failed> {
        Self::start_kernel(image, vmlinux, "", flags)
    }

    fn start_kernel(image: &Image, kernel: &str, cmdline: &str, flags: &[&str]) -> Result<Self, Failed> {
        let scratch = scratch()?;
        let vsock = scratch.path("vsock").display().to_string();
        let mut all = ["--kernel", kernel, "--vsock", &vsock].map(str::to_owned).to_vec();
        all.extend(flags.iter().map(|flag| (*flag).to_owned()));
        Self::start_as(scratch, image, cmdline, all)
    }

    /// Starts it with all other flags given.
    pub fn start_as(
        scratch: Scratch,
        image: &Image,
        cmdline: &str,
        flags: Vec<String>,
    ) -> Result<Self, Failed> {
        let (name, vsock) = (short_name(&scratch), scratch.path("vsock"));
        let (bed_flags, bed_cmdline) = for_this_bed();
        let cmdline = format!("quiet {bed_cmdline} {cmdline}");
        let own_limit = flags.iter().any(|flag| flag == "--timeout");
        let limit: &[&str] = if own_limit { &[] } else { &["--timeout", TIMEOUT] };
        let mut command = Command::new(VELLUM);
        command
            .args(["run", "--initrd", &image.initrd(), "--name", &name])
            .args(limit)
            .args(["--params", cmdline.trim()])
            .args(bed_flags)
            .args(flags);
        Self::spawn(scratch, command, name, vsock)
    }

    /// Starts `vellum receive` with a vsock and `flags`. Returns also the address for the source.
    pub fn to_come(flags: &[&str]) -> Result<(Self, String), Failed> {
        let scratch = scratch()?;
        let address = format!("unix:{}", scratch.path("in").display());
        Ok((Self::to_come_by(scratch, &address, flags)?, address))
    }

    /// Starts `vellum receive` at this address.
    pub fn to_come_by(scratch: Scratch, address: &str, flags: &[&str]) -> Result<Self, Failed> {
        let (name, vsock) = (short_name(&scratch), scratch.path("vsock"));
        let mut command = Command::new(VELLUM);
        command.args(["receive", "--listen", address, "--name", &name, "--vsock"]).arg(&vsock).args(flags);
        let guest = Self::spawn(scratch, command, name, vsock)?;
        guest.status_when(|status| status["state"] == "waiting")?;
        Ok(guest)
    }

    /// Restores a guest from a snapshot, with a vsock and `flags`. Returns when it runs.
    pub fn restored(dir: &str, flags: &[&str]) -> Result<Self, Failed> {
        let scratch = scratch()?;
        let (name, vsock) = (short_name(&scratch), scratch.path("vsock"));
        let mut command = Command::new(VELLUM);
        command.args(["restore", dir, "--name", &name, "--vsock"]).arg(&vsock).args(flags);
        let mut guest = Self::spawn(scratch, command, name, vsock)?;
        let runs = guest.status_when(|status| status["state"] == "running");
        if let (Err(_), Ok(Some(_))) = (&runs, guest.child.try_wait()) {
            return Err(format!("it ended: {}", guest.wait()?.errors).into());
        }
        runs.map(|_| guest)
    }

    fn spawn(scratch: Scratch, mut command: Command, name: String, vsock: PathBuf) -> Result<Self, Failed> {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (to, lines) = channel();
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        std::thread::spawn(move || {
            let mut line = Vec::new();
            while let Ok(1..) = output.read_until(b'\n', &mut line) {
                // The receiver may be gone. The pipe is drained all the same.
                let _ = to.send(String::from_utf8_lossy(&line).into_owned());
                line.clear();
            }
        });
        let mut stderr = child.stderr.take().expect("piped");
        let errors = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = stderr.read_to_string(&mut text);
            text
        });
        Ok(Self {
            child,
            name,
            vsock,
            lines,
            console: String::new(),
            errors: Some(errors),
            _scratch: scratch,
        })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the agent listens. All of its modules must have loaded.
    pub fn ready(&mut self) -> Result<(), Failed> {
        match self.next_event()? {
            Event::Ready { failed_modules } if failed_modules.is_empty() => Ok(()),
            other => Err(format!("the agent began with {other:?}").into()),
        }
    }

    /// The next event on the console. Other lines are skipped.
    pub fn next_event(&mut self) -> Result<Event, Failed> {
        while let Ok(line) = self.lines.recv() {
            self.console += &line;
            // A kernel message may precede it in the line.
            let event =
                line.find("{\"event\"").and_then(|at| serde_json::from_str(line[at..].trim_end()).ok());
            if let Some(event) = event {
                return Ok(event);
            }
        }
        let ended = self.wait()?;
        Err(format!(
            "it ended with {:?} before the agent said another word:\n{}\n{}",
            ended.code,
            tail(&ended.console),
            ended.errors
        )
        .into())
    }

    /// Adds the console's lines to `so_far` until that contains `wanted`. A line may have begun in
    /// the machine that the guest migrated from.
    pub fn hears(&mut self, so_far: &mut String, wanted: &str) -> Result<(), Failed> {
        while !so_far.contains(wanted) {
            let line = self
                .lines
                .recv()
                .map_err(|_| format!("it ended before it said {wanted}:\n{}", tail(so_far)))?;
            *so_far += &line;
        }
        Ok(())
    }

    /// Types a line on the serial console.
    pub fn type_line(&mut self, line: &str) -> Result<(), Failed> {
        Ok(self
            .child
            .stdin
            .as_mut()
            .ok_or("its input is closed")?
            .write_all(format!("{line}\n").as_bytes())?)
    }

    /// Sends a request to the agent by vsock.
    pub fn ask(&self, request: &Request) -> Result<agent::Answer, Failed> {
        Ok(agent::ask(&self.vsock, request, agent::ANSWER_TIMEOUT)?)
    }

    /// Sends a request that has one event as its answer.
    pub fn ask_one(&self, request: &Request) -> Result<Event, Failed> {
        let mut events = self.ask(request)?.collect::<Result<Vec<_>, _>>()?;
        ensure(events.len() == 1, || format!("{request:?} was answered by {events:?}"))?;
        Ok(events.remove(0))
    }

    /// Runs a shell line in the guest by `vellum exec`, which must exit with 0. Returns its output.
    pub fn shell(&self, line: &str) -> Result<String, Failed> {
        let output = self.vellum(&["exec", &self.name, "--", "sh", "-c", line])?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let complaints = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure(output.status.success(), || {
            format!("`{line}`: {}: {said}{complaints}{}", output.status, self.last_words())
        })?;
        Ok(said)
    }

    /// The console output of a guest that fails, and whether its machine still runs.
    fn last_words(&self) -> String {
        // A process that has ended is a zombie until its parent waits for it.
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
        let gone = stat.rsplit(") ").next().is_none_or(|state| state.starts_with('Z'));
        let said = self.lines.try_iter().collect::<Vec<_>>().join("\n");
        format!("; the machine {}:\n{}", if gone { "has ended" } else { "runs on" }, tail(&said))
    }

    /// Runs `vellum ctl`, which must succeed. Returns its answer, if it prints one.
    pub fn ctl(&self, words: &[&str]) -> Result<Value, Failed> {
        let output = self.vellum(&[&["ctl", &self.name], words].concat())?;
        ensure(output.status.success(), || format!("vellum ctl {words:?}: {output:?}"))?;
        // The answer to a pause is not JSON.
        if words == ["pause"] {
            return Ok(Value::String(String::from_utf8(output.stdout)?));
        }
        if output.stdout.is_empty() { Ok(Value::Null) } else { Ok(serde_json::from_slice(&output.stdout)?) }
    }

    /// Waits until the status is as wanted.
    pub fn status_when(&self, wanted: impl Fn(&Value) -> bool) -> Result<Value, Failed> {
        let mut last = Value::Null;
        let found = eventually(LIMIT, "the status is as wanted", || {
            // There is no answer before its socket exists.
            last = self.ctl(&["status"]).unwrap_or_default();
            Ok(wanted(&last).then(|| last.clone()))
        });
        found.map_err(|failed| format!("{}: {last}", failed.message().unwrap_or_default()).into())
    }

    /// Runs any command of vellum.
    pub fn vellum(&self, words: &[&str]) -> Result<Output, Failed> {
        Ok(Command::new(VELLUM).args(words).stdin(Stdio::null()).output()?)
    }

    /// Sends a signal to the machine's process.
    pub fn signal(&self, name: &str) -> Result<(), Failed> {
        Command::new("kill").args([&format!("-{name}"), &self.pid().to_string()]).status()?;
        Ok(())
    }

    /// The machine's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Powers the guest off by its agent, whose connection then breaks.
    pub fn power_off(&mut self) -> Result<Ended, Failed> {
        match self.ask(&Request::PowerOff)?.next() {
            Some(Err(agent::Error::Closed | agent::Error::Socket { .. })) => self.wait(),
            other => Err(format!("power-off was answered by {other:?}").into()),
        }
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> Result<Ended, Failed> {
        let code = self.child.wait()?.code();
        self.console.extend(self.lines.iter());
        let errors = self.errors.take().map(|thread| thread.join().unwrap_or_default()).unwrap_or_default();
        Ok(Ended { code, console: std::mem::take(&mut self.console), errors })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Ended {
    /// Fails unless it ended with `code`.
    pub fn with(self, code: i32) -> Result<Self, Failed> {
        ensure(self.code == Some(code), || {
            format!("wanted status {code}, got {:?}: {}\n{}", self.code, self.errors, tail(&self.console))
        })?;
        Ok(self)
    }
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

/// Pseudo-random bytes, the same for the same seed (xorshift64).
pub fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(&mut next).take(bytes.div_ceil(8)).flatten().take(bytes).collect()
}

/// Runs a program of this machine, which must exit with 0. Returns its output.
pub fn host(line: &[&str]) -> Result<String, Failed> {
    let output = Command::new(line[0]).args(&line[1..]).output()?;
    ensure(output.status.success(), || format!("{line:?}: {output:?}"))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether this process may create taps, and if not, what would help.
pub fn taps() -> Result<(), String> {
    let root = fs::metadata("/proc/self").is_ok_and(|it| std::os::unix::fs::MetadataExt::uid(&it) == 0);
    match (root, Path::new("/dev/net/tun").exists()) {
        (true, true) => Ok(()),
        (false, _) => Err("needs a tap: run it as root".into()),
        (_, false) => Err("needs a tap: modprobe tun".into()),
    }
}
