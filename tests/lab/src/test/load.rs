//! A load for tests: four processes that spin, and a build that is repeated. A test that fails only
//! under load has taken slowness for a fault.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::{Error, Result, artifacts, tool};

/// How many processes spin.
const SPINNING: usize = 4;

/// The load. It ends on drop.
pub struct Load {
    spinning: Vec<Child>,
    over: Arc<AtomicBool>,
    building: Option<JoinHandle<()>>,
}

impl Load {
    /// Puts the load on this machine.
    pub fn put_on() -> Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let mut load = Self { spinning: Vec::new(), over: over.clone(), building: None };
        for _ in 0..SPINNING {
            let mut command = Command::new("sh");
            command.args(["-c", "while :; do :; done"]);
            load.spinning.push(started(&mut command)?);
        }
        load.building = Some(thread::spawn(move || build(&over)));
        Ok(load)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        self.spinning.iter_mut().for_each(end);
        if let Some(building) = self.building.take() {
            let _ = building.join();
        }
    }
}

/// Builds the workspace from scratch until `over`, in a directory of its own, because cargo locks
/// the directory in which tests are built.
fn build(over: &AtomicBool) {
    let dir = artifacts::workspace().join("target/load");
    while !over.load(Ordering::SeqCst) {
        let _ = fs::remove_dir_all(&dir);
        let mut cargo = Command::new(artifacts::cargo());
        cargo.args(["build", "--quiet", "--target-dir"]).arg(&dir).current_dir(artifacts::workspace());
        let Ok(mut child) = started(&mut cargo) else { break };
        let mut ended = None;
        while !over.load(Ordering::SeqCst) && ended.is_none() {
            thread::sleep(Duration::from_millis(200));
            ended = child.try_wait().unwrap_or_default();
        }
        end(&mut child);
        if let Some(status) = ended.filter(|status| !status.success()) {
            eprintln!("lab: the build that should keep this machine busy ended with {status}: cargo build");
            break;
        }
    }
    let _ = fs::remove_dir_all(&dir);
}

/// Starts a process that leads a group and ends with the laboratory.
fn started(command: &mut Command) -> Result<Child> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    tool::bound(command, libc::SIGKILL).spawn().map_err(Error::file("start", command.get_program()))
}

/// Kills a process with its group. cargo's compilers would continue without it.
fn end(child: &mut Child) {
    if matches!(child.try_wait(), Ok(None)) {
        // SAFETY: this signals the group that the process leads. It has not been waited for.
        unsafe { libc::kill(-child.id().cast_signed(), libc::SIGKILL) };
    }
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_on_ends() {
        let mut busy = started(Command::new("sh").args(["-c", "while :; do :; done"])).unwrap();
        assert!(matches!(busy.try_wait(), Ok(None)));
        end(&mut busy);
        assert!(matches!(busy.try_wait(), Ok(Some(_))));
    }
}
