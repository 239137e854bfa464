//! Emulated hosts: a [`Request`] goes in, the host boots, runs its commands, and an [`Outcome`] comes back.
//!
//! What differs between beds is the emulator: [`svm`] is QEMU, [`vmx`] is Bochs. Everything else is
//! here: the initramfs, the results line, the time limit, and the serial log's tail when it goes wrong.

pub mod svm;
pub mod vmx;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::artifacts::{Kernel, Programs};
use crate::cache::Cache;
use crate::initramfs::Initramfs;
use crate::tool::{self, Tail};
use crate::wire::{Boot, Exit, Frame, JOB_PATH, Job};
use crate::{Error, Result, doctor};

/// The kernel of an emulated host.
#[derive(Clone, Debug)]
pub enum HostKernel {
    /// One of Debian's, with KVM as modules.
    Debian(Kernel),
    /// A bzImage with KVM built in.
    Image(PathBuf),
}

impl HostKernel {
    /// Its bzImage.
    pub fn image(&self) -> &Path {
        match self {
            HostKernel::Debian(kernel) => &kernel.image,
            HostKernel::Image(path) => path,
        }
    }
}

/// Hosts that an emulator gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Emulated {
    /// QEMU emulating AMD's SVM
    Svm,
    /// Bochs emulating Intel's VMX
    Vmx,
}

impl Emulated {
    /// The name that results carry.
    pub fn name(self) -> &'static str {
        match self {
            Self::Svm => "svm",
            Self::Vmx => "vmx",
        }
    }

    /// What its clock takes for one instruction: QEMU's `-icount shift=1`, Bochs's `ips`.
    pub fn nanoseconds_per_instruction(self) -> f64 {
        match self {
            Self::Svm => 2.0,
            Self::Vmx => 1e9 / vmx::IPS as f64,
        }
    }

    /// `svm npt=0`, `vmx ept=1 pml`: a host as figures and messages name it.
    pub fn label(self, second_stage: bool, pml: bool) -> String {
        let pml = if pml { " pml" } else { "" };
        format!("{} {}={}{pml}", self.name(), self.module().1, u8::from(second_stage))
    }

    /// KVM's module, and its parameter for the second stage.
    fn module(self) -> (&'static str, &'static str) {
        match self {
            Self::Svm => ("kvm_amd", "npt"),
            Self::Vmx => ("kvm_intel", "ept"),
        }
    }
}

/// How many CPUs an emulated host has, and what its clock goes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// One CPU, whose clock counts instructions: for figures, and for tests with limits of their own.
    Counted,
    /// One CPU in real time: for Linux guests.
    Real,
    /// Two CPUs at once in real time: for races.
    Races,
}

/// How labels name a host of [`Pace::Races`].
pub const AT_ONCE: &str = "two CPUs at once";

/// What is asked of an emulated host.
#[derive(Clone, Debug)]
pub struct Request {
    /// The processor that is emulated.
    pub bed: Emulated,
    /// On `vmx`, a processor with page-modification logging.
    pub pml: bool,
    /// Its kernel.
    pub kernel: HostKernel,
    /// KVM uses the second stage (NPT, EPT), or shadows the guest's tables.
    pub second_stage: bool,
    /// Its CPUs and their clock.
    pub pace: Pace,
    /// Its memory in MiB.
    pub memory_mib: u32,
    /// 2 MiB pages reserved at boot.
    pub hugepages: u32,
    /// Module parameters beyond the second stage's: `kvm.eager_page_split=N`.
    pub parameters: Vec<String>,
    /// Files from this machine, and where they are to be in the host.
    pub files: Vec<(PathBuf, String)>,
    /// Directories that are to be in the host.
    pub directories: Vec<String>,
    /// Environment for the commands.
    pub env: Vec<(String, String)>,
    /// The commands.
    pub commands: Vec<Vec<String>>,
    /// The wall-clock limit, boot included.
    pub time_limit: Duration,
}

impl Request {
    /// A host with nothing to do yet.
    pub fn new(kernel: HostKernel) -> Self {
        Self {
            bed: Emulated::Svm,
            pml: false,
            kernel,
            second_stage: true,
            pace: Pace::Counted,
            memory_mib: 2048,
            hugepages: 0,
            parameters: Vec::new(),
            files: Vec::new(),
            directories: Vec::new(),
            env: Vec::new(),
            commands: Vec::new(),
            time_limit: Duration::from_secs(20 * 60),
        }
    }

    /// The host, as messages name it.
    pub fn label(&self) -> String {
        let mut words = vec![self.bed.label(self.second_stage, self.pml)];
        words.extend(self.parameters.iter().cloned());
        words.extend((self.pace == Pace::Races).then(|| AT_ONCE.to_owned()));
        words.join(" ")
    }

    /// Every module parameter, the second stage's first.
    fn all_parameters(&self) -> Vec<String> {
        let (module, second_stage) = self.bed.module();
        let mut all = vec![format!("{module}.{second_stage}={}", u8::from(self.second_stage))];
        if self.bed == Emulated::Vmx {
            // Bochs 3.0's skylake_x announces APIC virtualization that kvm-intel cannot use.
            all.push("kvm_intel.enable_apicv=0".into());
        }
        all.extend(self.parameters.iter().cloned());
        all
    }

    /// The kernel's command line.
    fn command_line(&self) -> String {
        // nokaslr and mitigations=off make two runs the same run.
        let mut line = String::from("console=ttyS0,115200 panic=-1 quiet nokaslr mitigations=off");
        if self.pace != Pace::Counted {
            // Real time on a busy machine: a check that wants timer ticks within a moment would panic.
            line.push_str(" no_timer_check nowatchdog");
        }
        for parameter in self.all_parameters() {
            line.push(' ');
            line.push_str(&parameter);
        }
        if self.hugepages > 0 {
            line.push_str(&format!(" hugepagesz=2M hugepages={}", self.hugepages));
        }
        line
    }
}

/// What one command did.
#[derive(Clone, Debug, Default)]
pub struct Ran {
    /// What it printed.
    pub stdout: Vec<u8>,
    /// What it complained about.
    pub stderr: Vec<u8>,
    /// How it ended; `None` only while it runs.
    pub exit: Option<Exit>,
}

/// What came back.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The host, seen from inside.
    pub boot: Boot,
    /// The commands, in order.
    pub ran: Vec<Ran>,
    /// What they wrote into their working directory, by relative path.
    pub files: BTreeMap<String, Vec<u8>>,
}

impl Outcome {
    /// The first exit code that is not 0.
    pub fn code(&self) -> i32 {
        self.ran.iter().filter_map(|ran| Some(ran.exit.as_ref()?.code)).find(|&code| code != 0).unwrap_or(0)
    }

    /// Writes the files below `dir`. A name from the host is not trusted to stay there.
    pub fn write_files(&self, dir: &Path) -> Result<()> {
        for (name, content) in &self.files {
            let plain = |part| matches!(part, std::path::Component::Normal(_));
            if !Path::new(name).components().all(plain) {
                return Err(Error::Usage(format!(
                    "the host sent a file called {name:?}, which would leave {dir:?}"
                )));
            }
            let path = dir.join(name);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent).map_err(Error::file("create", parent))?;
            }
            fs::write(&path, content).map_err(Error::file("write", &path))?;
        }
        Ok(())
    }
}

/// A directory for one run, removed with it.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // Nothing depends on it: a leftover costs disk space only.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The emulator, ended with the run.
struct Emulator(Child);

impl Drop for Emulator {
    fn drop(&mut self) {
        // It may have ended by itself, and then there is nothing to do.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Names what `bed` lacks on this machine, before anything is fetched or built for it.
pub fn ready(bed: Emulated) -> Result<()> {
    match bed {
        Emulated::Svm => svm::emulator().and_then(|_| busybox()).map(drop),
        Emulated::Vmx => match doctor::install_line(&doctor::missing(vmx::PROGRAMS)) {
            None => Ok(()),
            Some(line) => Err(Error::Package(format!("vmx: what builds and boots Bochs is missing: {line}"))),
        },
    }
}

/// How often a host with two CPUs at once may be started: some die while they boot ([`svm`] says of what), be the kernel what
/// it may. One that always does is its kernel's fault.
const STARTS: u32 = 3;

/// Boots the host, runs the request's commands, and hands every frame to `watch` as it comes.
pub fn run(
    cache: &Cache,
    programs: &Programs,
    request: &Request,
    mut watch: impl FnMut(&Frame),
) -> Result<Outcome> {
    let mut start = 1;
    loop {
        let mut up = false;
        let ended = once(cache, programs, request, |frame| {
            up |= matches!(frame, Frame::Boot(_));
            watch(frame);
        });
        match ended {
            Err(Error::Bed { what, timed_out: false, .. })
                if request.pace == Pace::Races && !up && start < STARTS =>
            {
                eprintln!("lab: {}: {what}; starting it again ({start} of {STARTS})", request.label());
                start += 1;
            }
            ended => return ended,
        }
    }
}

fn once(
    cache: &Cache,
    programs: &Programs,
    request: &Request,
    mut watch: impl FnMut(&Frame),
) -> Result<Outcome> {
    let scratch = scratch(cache)?;
    let job = job(request, false);
    let initrd = pack(&scratch.0, programs, request, &job)?;
    let console = scratch.0.join("console.log");
    let errors = scratch.0.join("emulator.log");
    let fifo = scratch.0.join("results");
    let mut command = match request.bed {
        Emulated::Svm => svm::command(&svm::emulator()?, request, &initrd, &svm::Console::File(&console)),
        Emulated::Vmx => vmx::Bochs::get(cache)?.command(&scratch.0, request, &initrd, &console, &fifo)?,
    };
    let stderr = File::create(&errors).map_err(Error::file("create", &errors))?;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr);
    let now = Instant::now();
    // A limit beyond all time is none that anybody lives to see.
    let deadline = now.checked_add(request.time_limit).unwrap_or(now + Duration::from_secs(365 * 24 * 3600));
    let mut child = Emulator(spawn(&mut command)?);
    let stdout = child.0.stdout.take().expect("stdout is piped");
    let bed = request.bed;

    let fail = |what: String, timed_out: bool| {
        let log = cache.path(&format!("{}-console.log", bed.name()));
        // The log outlives the run only where somebody will want to read it.
        let _ = fs::copy(&console, &log);
        let mut tail = Tail::of_file(&console);
        let said = Tail::of_file(&errors);
        let complaints = said.lines().filter(|line| !line.contains("TCG doesn't support requested feature"));
        complaints.for_each(|line| tail.push_str(&format!("\n{line}")));
        if tail.trim().is_empty() {
            tail = "(empty: a kernel that is told to be quiet says nothing until something is wrong)".into();
        }
        Error::Bed { what, log, tail, timed_out }
    };

    let (to, from) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        let line: Box<dyn Read> = match bed {
            Emulated::Svm => Box::new(stdout),
            // Opening waits for Bochs to open the other end. Should it end before, so does the run, and this with it.
            Emulated::Vmx => match File::open(&fifo) {
                Ok(file) => Box::new(file),
                Err(error) => return drop(to.send(Err(error))),
            },
        };
        let mut line = BufReader::new(line);
        loop {
            let frame = Frame::read(&mut line);
            let last = !matches!(frame, Ok(Some(_)));
            if to.send(frame).is_err() || last {
                return;
            }
        }
    });
    let mut boot = None;
    let mut ran = vec![Ran::default()];
    let mut files = BTreeMap::<String, Vec<u8>>::new();
    loop {
        let patience = deadline.saturating_duration_since(Instant::now()).min(Duration::from_secs(1));
        let frame = match from.recv_timeout(patience) {
            Err(_) if Instant::now() < deadline => match child.0.try_wait() {
                // It ended without closing a line that it never opened.
                Ok(Some(status)) if boot.is_none() && bed == Emulated::Vmx => {
                    return Err(fail(format!("Bochs ended at once ({status})"), false));
                }
                _ => continue,
            },
            Ok(Ok(Some(frame))) => frame,
            Ok(Ok(None)) => {
                let when = if boot.is_some() { "during its commands" } else { "before it was up" };
                return Err(fail(format!("the emulated host ended {when}"), false));
            }
            Ok(Err(error)) => return Err(fail(error.to_string(), false)),
            Err(_) => {
                let limit = request.time_limit.as_secs();
                let what = format!("the emulated host did not finish within {limit} s");
                return Err(fail(what, true));
            }
        };
        watch(&frame);
        let current = ran.last_mut().expect("there is always one");
        match frame {
            Frame::Boot(facts) if !facts.kvm => {
                let why = facts.complaints.join("; ");
                return Err(fail(format!("the emulated host has no /dev/kvm ({why})"), false));
            }
            // What is measured or seen there would be said of another host.
            Frame::Boot(facts) if !facts.refused.is_empty() => {
                return Err(fail(format!("module parameters: {}", facts.refused.join("; ")), false));
            }
            Frame::Boot(facts) => boot = Some(facts),
            Frame::Stdout(bytes) => current.stdout.extend(bytes),
            Frame::Stderr(bytes) => current.stderr.extend(bytes),
            Frame::Exit(exit) => {
                current.exit = Some(exit);
                ran.push(Ran::default());
            }
            Frame::File(name, bytes) => files.entry(name).or_default().extend(bytes),
            Frame::Done => break,
        }
    }
    drop(child);
    // It has nothing to wait for once the emulator is gone; a panic in it would have shown as an early end.
    let _ = reader.join();
    ran.pop();
    if ran.len() != request.commands.len() {
        let what = format!("{} commands ran, and {} ends were heard of", request.commands.len(), ran.len());
        return Err(fail(what, false));
    }
    let boot = boot.ok_or_else(|| fail("the emulated host said nothing of itself".into(), false))?;
    Ok(Outcome { boot, ran, files })
}

/// Boots the host with a shell on this terminal.
pub fn shell(cache: &Cache, programs: &Programs, request: &Request) -> Result<()> {
    if request.bed != Emulated::Svm {
        return Err(Error::Usage(format!(
            "{} has no terminal: cargo lab shell svm, or run a command",
            request.bed.name()
        )));
    }
    let emulator = svm::emulator()?;
    let scratch = scratch(cache)?;
    let initrd = pack(&scratch.0, programs, request, &job(request, true))?;
    eprintln!("lab: Ctrl-A X ends the host at once; `exit` does it properly");
    let mut command = svm::command(&emulator, request, &initrd, &svm::Console::Terminal);
    let status = spawn(&mut command)?.wait().map_err(Error::file("wait for", &emulator))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::Failed { line: tool::line(&command), status: status.to_string(), output: String::new() })
}

fn spawn(command: &mut Command) -> Result<Child> {
    // An emulator without its laboratory would burn a CPU for ever.
    tool::bound(command, libc::SIGKILL).spawn().map_err(Error::file("start", command.get_program()))
}

/// Debian has another busybox too, which needs a libc that no emulated host has.
fn busybox() -> Result<PathBuf> {
    const INTERPRETER: &[u8] = b"/ld-linux-x86-64.so.2\0";
    let path = tool::need("busybox")?;
    let image = fs::read(&path).map_err(Error::file("read", &path))?;
    if image.windows(INTERPRETER.len()).any(|window| window == INTERPRETER) {
        return Err(Error::Missing { program: "a static busybox".into(), package: "busybox-static".into() });
    }
    Ok(path)
}

fn scratch(cache: &Cache) -> Result<Scratch> {
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let runs = cache.dir("runs")?;
    sweep(&runs);
    let n = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let dir = runs.join(format!("{}-{n}", std::process::id()));
    fs::create_dir_all(&dir).map_err(Error::file("create", &dir))?;
    Ok(Scratch(dir))
}

/// Removes what killed laboratories left: directories named after a process that is gone.
fn sweep(runs: &Path) {
    let Ok(entries) = fs::read_dir(runs) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.split('-').next().unwrap_or_default();
        if !Path::new("/proc").join(pid).exists() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn job(request: &Request, shell: bool) -> Job {
    Job {
        bed: request.bed.name().into(),
        modules: Vec::new(),
        parameters: request.all_parameters(),
        commands: request.commands.clone(),
        env: request.env.clone(),
        races: request.pace == Pace::Races,
        shell,
    }
}

/// Packs what the host sees. Our programs are in /bin, together with busybox's.
fn pack(dir: &Path, programs: &Programs, request: &Request, job: &Job) -> Result<PathBuf> {
    let mut image = Initramfs::new();
    image.copy(&programs.init, "/init")?;
    image.copy(&programs.vellum, "/bin/vellum")?;
    let busybox = busybox()?;
    image.copy(&busybox, "/bin/busybox")?;
    for name in tool::text(Command::new(&busybox).arg("--list"))?.lines().filter(|name| *name != "busybox") {
        image.link(&format!("/bin/{name}"), "busybox");
    }
    image.file(
        "/etc/passwd",
        0o644,
        b"root:x:0:0:root:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n",
    );
    image.file("/etc/group", 0o644, b"root:x:0:\nnogroup:x:65534:\n");
    for path in &request.directories {
        image.directory(path);
    }
    for (from, to) in &request.files {
        image.copy(from, to)?;
    }
    let mut job = job.clone();
    if let HostKernel::Debian(kernel) = &request.kernel {
        for (name, module) in kernel.modules(&[
            request.bed.module().0,
            "msr",
            "tun",
            "virtio_pci",
            "virtio_blk",
            "virtio_net",
        ])? {
            let path = format!("/modules/{name}.ko");
            image.file(&path, 0o644, &module);
            job.modules.push(path);
        }
    }
    image.file(JOB_PATH, 0o644, &serde_json::to_vec(&job).expect("a job is plain data"));
    let path = dir.join("initrd");
    let mut file = File::create(&path).map_err(Error::file("create", &path))?;
    file.write_all(&image.finish()).map_err(Error::file("write", &path))?;
    Ok(path)
}
