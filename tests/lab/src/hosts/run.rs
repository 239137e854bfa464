//! One run of an emulated host: starts it, reads its frames until it is done or its time is over,
//! and ends it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::progress::Progress;
use super::{Pace, Request, Results, Start, image, kexec};
use crate::artifacts::Programs;
use crate::cache::Cache;
use crate::hosts::wire::{Boot, Exit, Frame};
use crate::tool::{self, Tail};
use crate::{Error, Result};

/// One command's output and exit.
#[derive(Clone, Debug, Default)]
pub struct Ran {
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
    /// Its exit. `None` only while it runs.
    pub exit: Option<Exit>,
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The host's description of itself.
    pub boot: Boot,
    /// The commands, in order.
    pub ran: Vec<Ran>,
    /// The files that they wrote into their working directory, by relative path.
    pub files: BTreeMap<String, Vec<u8>>,
}

impl Outcome {
    /// The first exit code that is not 0.
    pub fn code(&self) -> i32 {
        self.ran.iter().filter_map(|ran| Some(ran.exit.as_ref()?.code)).find(|&code| code != 0).unwrap_or(0)
    }

    /// Writes the files below `dir`. Refuses names from the host that would leave `dir`.
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

/// A directory for one run, removed at its end. A lock on it tells others that the run goes on.
struct Scratch(PathBuf, #[allow(dead_code, reason = "held for its lifetime")] File);

impl Scratch {
    fn new(cache: &Cache) -> Result<Self> {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        // Laboratories that lock nothing have theirs in `runs`.
        let runs = cache.dir("running")?;
        sweep(&runs);
        loop {
            let n = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let dir = runs.join(format!("{}-{n}", std::process::id()));
            fs::create_dir_all(&dir).map_err(Error::file("create", &dir))?;
            let own = match File::open(&dir) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                own => own.map_err(Error::file("open", &dir))?,
            };
            own.lock().map_err(Error::file("lock", &dir))?;
            // Before it was locked, another laboratory may have taken it for one that was left.
            if dir.exists() {
                return Ok(Self(dir, own));
            }
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A directory that stays costs only disk space.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// How often a host with two CPUs is started. Some die while they boot, whatever their kernel
/// ([`super::svm`] has the reason). If every start fails, the kernel is at fault.
const STARTS: u32 = 3;

/// Boots the host, runs the request's commands, and passes every frame to `watch`.
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
            Err(Error::Host { what, timed_out: false, .. })
                if request.pace == Pace::Races && !up && start < STARTS =>
            {
                eprintln!("lab: {}: {what}; starting it again ({start} of {STARTS})", request.label());
                start += 1;
            }
            ended => return ended,
        }
    }
}

/// Boots the host once and reads its frames to the end.
fn once(cache: &Cache, programs: &Programs, request: &Request, watch: impl FnMut(&Frame)) -> Result<Outcome> {
    let scratch = Scratch::new(cache)?;
    let initrd = image::pack(cache, &scratch.0, programs, request, false)?;
    let request = &with_kept(request, &initrd, &scratch.0)?;
    let start = Start { cache, request, initrd: &initrd, dir: &scratch.0 };
    let mut host = Host::start(&start)?;
    host.hear(watch).map_err(|end| last_words(&start, end))
}

/// Boots the host with a shell on this terminal.
pub fn shell(cache: &Cache, programs: &Programs, request: &Request) -> Result<()> {
    let scratch = Scratch::new(cache)?;
    let initrd = image::pack(cache, &scratch.0, programs, request, true)?;
    let request = &with_kept(request, &initrd, &scratch.0)?;
    let mut command = request.host.shell(&Start { cache, request, initrd: &initrd, dir: &scratch.0 })?;
    eprintln!("lab: Ctrl-A X ends the host at once; `exit` does it properly");
    let status = spawn(&mut command)?.wait().map_err(Error::file("wait for", command.get_program()))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::Failed { line: tool::line(&command), status: status.to_string(), output: String::new() })
}

/// The host with the disk that outlives its kernel, if another can take its place.
fn with_kept(request: &Request, initrd: &Path, dir: &Path) -> Result<Request> {
    let mut request = request.clone();
    if !request.next.is_empty() {
        request.disks.push(kexec::disk(&request, initrd, dir)?);
    }
    Ok(request)
}

/// The emulator's process. It is killed at the end of the run.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Why a host has no result.
struct End {
    what: String,
    timed_out: bool,
}

impl From<String> for End {
    fn from(what: String) -> Self {
        Self { what, timed_out: false }
    }
}

/// A running host.
struct Host<'a> {
    request: &'a Request,
    emulator: Process,
    /// Where bytes go to the results line of a host whose time does not count instructions.
    line: Option<ChildStdin>,
    frames: Receiver<io::Result<Option<Frame>>>,
    progress: Progress,
    /// The host's time at its last frame.
    heard: Duration,
}

impl<'a> Host<'a> {
    fn start(start: &Start<'a>) -> Result<Self> {
        let (mut command, results) = start.request.host.command(start)?;
        let errors = errors(start);
        let stderr = File::create(&errors).map_err(Error::file("create", &errors))?;
        // A byte that comes from outside would make counted time differ between runs.
        let stdin = if start.request.pace == Pace::Counted { Stdio::null() } else { Stdio::piped() };
        command.stdin(stdin).stdout(Stdio::piped()).stderr(stderr);
        let mut emulator = Process(spawn(&mut command)?);
        let line = emulator.0.stdin.take();
        let stdout = emulator.0.stdout.take().expect("stdout is piped");
        let frames = match results {
            Results::Stdout => frames(move || Ok(stdout)),
            // Opening waits for the emulator to open the other end. If the emulator ends first, the
            // run ends too.
            Results::Fifo(path) => frames(move || File::open(path)),
        };
        let progress = Progress::of(emulator.0.id());
        Ok(Self { request: start.request, emulator, line, frames, progress, heard: Duration::ZERO })
    }

    /// Passes every frame to `watch` until the host is done.
    fn hear(&mut self, mut watch: impl FnMut(&Frame)) -> std::result::Result<Outcome, End> {
        let mut heard = Heard::default();
        loop {
            let frame = self.next_frame(heard.boot.is_some())?;
            watch(&frame);
            if heard.take(frame)? {
                return Ok(heard.outcome(self.request.commands.len())?);
            }
        }
    }

    /// Fails if the host has had more time than it may have.
    fn check_limits(&mut self) -> std::result::Result<(), End> {
        let had = self.progress.had();
        let over = |what: String| Err(End { what, timed_out: true });
        if had >= self.request.time_limit {
            return over(format!(
                "the emulated host did not finish within {} s of its own time",
                self.request.time_limit.as_secs()
            ));
        }
        match self.request.silence_limit.filter(|&limit| had - self.heard >= limit) {
            None => Ok(()),
            Some(limit) => {
                over(format!("the emulated host said nothing within {} s of its own time", limit.as_secs()))
            }
        }
    }

    fn next_frame(&mut self, up: bool) -> std::result::Result<Frame, End> {
        loop {
            self.check_limits()?;
            match self.frames.recv_timeout(Duration::from_secs(1)) {
                Ok(Ok(Some(frame))) => {
                    self.heard = self.progress.had();
                    return Ok(frame);
                }
                Ok(Ok(None)) | Err(RecvTimeoutError::Disconnected) => {
                    let when = if up { "during its commands" } else { "before it was up" };
                    return Err(format!("the emulated host ended {when}").into());
                }
                Ok(Err(error)) => return Err(error.to_string().into()),
                // The host may have lost the interrupt of its timer ([`super::svm`]). An emulator that has
                // ended closes the frames too.
                Err(RecvTimeoutError::Timeout) if up => {
                    if let Some(mut line) = self.line.as_ref() {
                        let _ = line.write_all(&[0]);
                    }
                }
                // An emulator that ends before it opens its FIFO never closes the line.
                Err(RecvTimeoutError::Timeout) => {
                    if let Ok(Some(status)) = self.emulator.0.try_wait() {
                        return Err(format!("the emulator ended at once ({status})").into());
                    }
                }
            }
        }
    }
}

/// Reads frames from `open`'s line in a thread of its own. The last item is `None` or an error.
fn frames<R: Read>(
    open: impl FnOnce() -> io::Result<R> + Send + 'static,
) -> Receiver<io::Result<Option<Frame>>> {
    let (to, from) = mpsc::channel();
    thread::spawn(move || {
        let mut line = match open() {
            Ok(line) => BufReader::new(line),
            Err(error) => return drop(to.send(Err(error))),
        };
        loop {
            let frame = Frame::read(&mut line);
            let last = !matches!(frame, Ok(Some(_)));
            if to.send(frame).is_err() || last {
                return;
            }
        }
    });
    from
}

/// What a host has reported so far.
#[derive(Default)]
struct Heard {
    boot: Option<Boot>,
    ran: Vec<Ran>,
    /// The output of the running command.
    current: Ran,
    files: BTreeMap<String, Vec<u8>>,
}

impl Heard {
    /// Processes a frame. Returns true if it was the last one. An error ends the run.
    fn take(&mut self, frame: Frame) -> std::result::Result<bool, String> {
        match frame {
            Frame::Boot(boot) if !boot.kvm => {
                return Err(format!("the emulated host has no /dev/kvm ({})", boot.complaints.join("; ")));
            }
            // Results from a host with other parameters would be attributed to the wrong host.
            Frame::Boot(boot) if !boot.refused.is_empty() => {
                return Err(format!("module parameters: {}", boot.refused.join("; ")));
            }
            Frame::Boot(boot) => self.boot = Some(boot),
            Frame::Stdout(bytes) => self.current.stdout.extend(bytes),
            Frame::Stderr(bytes) => self.current.stderr.extend(bytes),
            Frame::Exit(exit) => {
                self.ran.push(Ran { exit: Some(exit), ..std::mem::take(&mut self.current) });
            }
            Frame::File(name, bytes) => self.files.entry(name).or_default().extend(bytes),
            Frame::Done => return Ok(true),
        }
        Ok(false)
    }

    /// The result of `commands` commands.
    fn outcome(self, commands: usize) -> std::result::Result<Outcome, String> {
        if self.ran.len() != commands {
            return Err(format!("{commands} commands ran, and {} ends were heard of", self.ran.len()));
        }
        let boot = self.boot.ok_or("the emulated host said nothing of itself")?;
        Ok(Outcome { boot, ran: self.ran, files: self.files })
    }
}

/// The file for the emulator's own messages.
fn errors(start: &Start) -> PathBuf {
    start.dir.join("emulator.log")
}

/// The error of a run that ended early, with the end of its console. The whole console log is kept.
fn last_words(start: &Start, end: End) -> Error {
    let host = start.request.host;
    let log = start.cache.path(&format!("{}-console.log", host.name()));
    // The log outlives only a failed run. Without it, the tail in the error remains.
    let _ = fs::copy(start.console(), &log);
    let mut tail = Tail::of_file(&start.console());
    let said = Tail::of_file(&errors(start));
    said.lines().filter(|line| !host.is_noise(line)).for_each(|line| tail.push_str(&format!("\n{line}")));
    if tail.trim().is_empty() {
        tail = "(empty: a kernel that is told to be quiet says nothing until something is wrong)".into();
    }
    Error::Host { what: end.what, log, tail, timed_out: end.timed_out }
}

fn spawn(command: &mut Command) -> Result<Child> {
    // If the laboratory dies, its emulator must not use a CPU for ever.
    tool::bound(command, libc::SIGKILL).spawn().map_err(Error::file("start", command.get_program()))
}

/// Removes directories of killed laboratories: nobody holds a lock on them.
fn sweep(runs: &Path) {
    let Ok(entries) = fs::read_dir(runs) else { return };
    for entry in entries.flatten() {
        if File::open(entry.path()).is_ok_and(|dir| dir.try_lock().is_ok()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot(kvm: bool, refused: &[&str]) -> Frame {
        let refused = refused.iter().map(|text| (*text).to_owned()).collect();
        Frame::Boot(Boot { kernel: "6.1".into(), kvm, complaints: vec!["no such module".into()], refused })
    }

    fn exit(code: i32) -> Frame {
        Frame::Exit(Exit { code, seconds: 0.5, idle: 0.0 })
    }

    fn heard(frames: impl IntoIterator<Item = Frame>) -> std::result::Result<Heard, String> {
        let mut heard = Heard::default();
        for frame in frames {
            heard.take(frame)?;
        }
        Ok(heard)
    }

    #[test]
    fn output_belongs_to_the_command_that_ran_and_a_file_in_parts_is_one_file() {
        let out = |text: &[u8]| Frame::Stdout(text.to_vec());
        let part = |text: &[u8]| Frame::File("f".into(), text.to_vec());
        let frames =
            [boot(true, &[]), out(b"a"), out(b"b"), exit(0), out(b"c"), exit(3), part(b"x"), part(b"y")];
        let mut heard = heard(frames).unwrap();
        assert_eq!(heard.take(Frame::Done), Ok(true));
        let outcome = heard.outcome(2).unwrap();
        assert_eq!(
            (outcome.ran[0].stdout.as_slice(), outcome.ran[1].stdout.as_slice()),
            (&b"ab"[..], &b"c"[..])
        );
        assert_eq!((outcome.code(), outcome.files["f"].as_slice()), (3, &b"xy"[..]));
    }

    #[test]
    fn a_host_without_kvm_or_with_other_parameters_ends_the_run() {
        let why = |frame| heard([frame]).err().unwrap();
        assert!(why(boot(false, &[])).contains("no /dev/kvm (no such module)"));
        assert!(why(boot(true, &["kvm.x=1: it is N"])).contains("kvm.x=1: it is N"));
    }

    #[test]
    fn a_directory_that_a_killed_run_left_goes_whoever_has_its_process_id_now() {
        let root = std::env::temp_dir().join(format!("vellum-sweep-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let cache = Cache::at(root.clone()).unwrap();
        let running = Scratch::new(&cache).unwrap();
        // Process 1 exists always.
        let left = cache.dir("running/1-0").unwrap();
        let next = Scratch::new(&cache).unwrap();
        assert!(running.0.exists() && next.0.exists() && !left.exists());
        drop((running, next));
        assert_eq!(fs::read_dir(cache.path("running")).unwrap().count(), 0);
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn an_end_that_was_not_heard_of_is_an_error() {
        let error = heard([boot(true, &[]), exit(0)]).unwrap().outcome(2).unwrap_err();
        assert_eq!(error, "2 commands ran, and 1 ends were heard of");
        assert!(heard([exit(0)]).unwrap().outcome(1).unwrap_err().contains("said nothing of itself"));
    }
}
