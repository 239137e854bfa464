//! A process that does not outlive its driver.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::{MAX_CONSOLE, Trouble};
use vellum_sys::signal::{end_with_parent, last};

/// What is read of its messages.
const MAX_SAID: u64 = 64 << 10;
/// What is shown of a line.
const MAX_LINE: usize = 500;
const POLL: Duration = Duration::from_millis(20);

/// A VMM that runs, in a process group of its own.
pub(super) struct Process {
    child: Child,
    ended: Option<ExitStatus>,
    name: String,
    /// The file with its standard error. Its console is beside it (`NAME.log`), if it has one.
    error: PathBuf,
}

impl Process {
    /// Starts `command`, without standard streams but standard error, which goes into the file
    /// `error`.
    pub(super) fn start(command: &mut Command, error: PathBuf) -> Result<Self, Trouble> {
        Self::start_with(command, error, Stdio::null())
    }

    /// The same with a standard output.
    pub(super) fn start_with(command: &mut Command, error: PathBuf, output: Stdio) -> Result<Self, Trouble> {
        let name = command.get_program().to_string_lossy().into_owned();
        Self::spawn(command, error, output).map_err(Trouble::io(&name))
    }

    /// The same, with the error of the system.
    pub(super) fn spawn(command: &mut Command, error: PathBuf, output: Stdio) -> io::Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        end_with_parent(command);
        let streams = command.process_group(0).stdin(Stdio::null()).stdout(output);
        let child = streams.stderr(File::create(&error)?).spawn()?;
        Ok(Self { child, ended: None, name, error })
    }

    /// Runs `command`, which must succeed, as a step of which `what` is the end.
    pub(super) fn succeeds(
        command: &mut Command,
        error: PathBuf,
        output: Stdio,
        limit: Duration,
        what: &str,
    ) -> Result<(), Trouble> {
        let mut process = Self::start_with(command, error, output)?;
        process.succeeded(limit, what)
    }

    /// Waits for its end, which must be a success.
    pub(super) fn succeeded(&mut self, limit: Duration, what: &str) -> Result<(), Trouble> {
        let status = self.end(limit, what)?;
        match status.success() {
            true => Ok(()),
            false => Err(Trouble::failed(format!("{}: {what}: {status}{}", self.name, self.said()))),
        }
    }

    /// Its status, if it has ended. Then what it has started is ended, too. A console that fills the
    /// disk is an error.
    fn status(&mut self) -> Result<Option<ExitStatus>, Trouble> {
        let console = self.error.with_extension("log");
        if fs::metadata(console).is_ok_and(|console| console.len() > MAX_CONSOLE) {
            let mebibytes = MAX_CONSOLE >> 20;
            return Err(Trouble::failed(format!("{}: its console has over {mebibytes} MiB", self.name)));
        }
        // It stays unreaped, so that its ID and its group's are its own.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        let has_ended =
            || waitid(WaitId::Pid(Pid::from_child(&self.child)), options).map(|status| status.is_some());
        if self.ended.is_none() && has_ended().map_err(|error| Trouble::io(&self.name)(error.into()))? {
            // There may be nothing else in its group.
            let _ = self.kill();
            self.ended = Some(self.child.wait().map_err(Trouble::io(&self.name))?);
        }
        Ok(self.ended)
    }

    /// Asks `done` until it has an answer. Fails if the process ends first, or when the time is
    /// over.
    pub(super) fn until<T>(
        &mut self,
        limit: Duration,
        what: &str,
        mut done: impl FnMut() -> Result<Option<T>, Trouble>,
    ) -> Result<T, Trouble> {
        let begun = Instant::now();
        loop {
            if let Some(answer) = done()? {
                return Ok(answer);
            }
            if let Some(status) = self.status()? {
                let name = &self.name;
                return Err(Trouble::failed(format!("{name} ended ({status}) before {what}{}", self.said())));
            }
            wait(begun, limit, what)?;
        }
    }

    /// Kills it and all that it has started, as long as it has not been reaped.
    fn kill(&self) -> rustix::io::Result<()> {
        kill_process_group(Pid::from_child(&self.child), Signal::KILL)
    }

    /// The last line that it has said, if there is one.
    pub(super) fn said(&self) -> String {
        let mut text = Vec::new();
        // Without it, the status is all that is known.
        let _ = File::open(&self.error).and_then(|file| file.take(MAX_SAID).read_to_end(&mut text));
        let text = String::from_utf8_lossy(&text).into_owned();
        let last = text.lines().rfind(|line| !line.trim().is_empty());
        last.map_or(String::new(), |line| format!(": {}", printable(line.trim())))
    }

    /// Waits for its end.
    pub(super) fn ended(&mut self, limit: Duration) -> Result<(), Trouble> {
        self.end(limit, "the machine's end").map(drop)
    }

    /// Waits for its end for this time, also if a signal comes.
    pub(super) fn ends_within(&mut self, limit: Duration) {
        let begun = Instant::now();
        while matches!(self.status(), Ok(None)) && begun.elapsed() < limit {
            thread::sleep(POLL);
        }
    }

    fn end(&mut self, limit: Duration, what: &str) -> Result<ExitStatus, Trouble> {
        let begun = Instant::now();
        loop {
            match self.status()? {
                Some(status) => return Ok(status),
                None => wait(begun, limit, what)?,
            }
        }
    }
}

/// A line of a VMM as it may stand in a message.
pub(super) fn printable(line: &str) -> String {
    line.chars().filter(|c| !c.is_control()).take(MAX_LINE).collect()
}

/// Waits a little, unless the time is over or a signal has come.
pub(super) fn wait(begun: Instant, limit: Duration, what: &str) -> Result<(), Trouble> {
    if let Some(signal) = last() {
        return Err(Trouble::failed(format!("signal {signal} came before {what}")));
    }
    if begun.elapsed() > limit {
        let seconds = limit.as_secs_f64();
        return Err(Trouble::failed(format!("nothing for {seconds} s: {what} did not come")));
    }
    thread::sleep(POLL);
    Ok(())
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended.is_none() {
            // It has not been reaped, so the group is its own.
            let _ = self.kill();
            let _ = self.child.wait();
        }
    }
}
