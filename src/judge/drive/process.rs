//! A process that does not outlive its driver.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::Trouble;
use vellum_sys::signal::{end_with_parent, last};

/// What is read of its messages.
const MAX_SAID: u64 = 64 << 10;
const POLL: Duration = Duration::from_millis(20);

/// A VMM that runs.
pub(super) struct Process {
    child: Child,
    name: String,
    /// The file with its standard error.
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
        end_with_parent(command);
        let file = File::create(&error).map_err(Trouble::io("its messages"))?;
        let streams = command.stdin(Stdio::null()).stdout(output).stderr(file);
        let child = streams.spawn().map_err(Trouble::io(&name))?;
        Ok(Self { child, name, error })
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
            if let Some(status) = self.child.try_wait().map_err(Trouble::io(&self.name))? {
                let name = &self.name;
                return Err(Trouble::failed(format!("{name} ended ({status}) before {what}{}", self.said())));
            }
            wait(begun, limit, what)?;
        }
    }

    /// The last line that it has said, if there is one.
    fn said(&self) -> String {
        let mut text = Vec::new();
        // Without it, the status is all that is known.
        let _ = File::open(&self.error).and_then(|file| file.take(MAX_SAID).read_to_end(&mut text));
        let text = String::from_utf8_lossy(&text).into_owned();
        let last = text.lines().rfind(|line| !line.trim().is_empty());
        last.map_or(String::new(), |line| format!(": {}", line.trim()))
    }

    /// Waits for its end.
    pub(super) fn ended(&mut self, limit: Duration) -> Result<(), Trouble> {
        let begun = Instant::now();
        while self.child.try_wait().map_err(Trouble::io(&self.name))?.is_none() {
            wait(begun, limit, "the machine's end")?;
        }
        Ok(())
    }
}

/// Waits a little, unless the time is over or a signal has come.
pub(super) fn wait(begun: Instant, limit: Duration, what: &str) -> Result<(), Trouble> {
    if last().is_some() {
        return Err(Trouble::failed(format!("interrupted before {what}")));
    }
    if begun.elapsed() > limit {
        return Err(Trouble::failed(format!("nothing for {} s: {what} did not come", limit.as_secs())));
    }
    thread::sleep(POLL);
    Ok(())
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
