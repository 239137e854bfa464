//! The child processes of PID 1.

use std::collections::{HashMap, HashSet};
use std::io;
use std::process::Command;
use std::sync::{Condvar, Mutex, MutexGuard};

use crate::sys;

/// Child processes and their exit statuses. PID 1 inherits every orphan, so one thread waits for
/// all processes. Others ask here for the status of their child.
#[derive(Default)]
pub struct Children {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The number of running commands.
    running: usize,
    /// Exit statuses that were not asked for yet.
    ended: HashMap<u32, i32>,
    /// Commands whose exit status will not be asked for.
    detached: HashSet<u32>,
}

impl State {
    /// A command has ended, and its status was delivered if wanted.
    fn forget(&mut self) {
        self.running -= 1;
        if self.running == 0 {
            // The remaining statuses belong to orphans.
            self.ended.clear();
        }
    }
}

impl Children {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("the lock is not poisoned")
    }

    /// Reaps processes for ever.
    pub fn reap(&self) -> ! {
        loop {
            let state = self.changed.wait_while(self.lock(), |state| state.running == 0);
            drop(state.expect("the lock is not poisoned"));
            if let Ok((pid, code)) = sys::wait_any() {
                let mut state = self.lock();
                if state.detached.remove(&pid) {
                    state.forget();
                } else {
                    state.ended.insert(pid, code);
                }
                self.changed.notify_all();
            }
        }
    }

    /// Starts a command. [`Children::wait`] returns its exit status.
    pub fn start(&self, command: &mut Command) -> io::Result<std::process::Child> {
        let mut state = self.lock();
        let child = command.spawn()?;
        state.running += 1;
        self.changed.notify_all();
        Ok(child)
    }

    /// Runs a command to its end.
    pub fn run(&self, command: &mut Command) -> io::Result<i32> {
        Ok(self.wait(self.start(command)?.id()))
    }

    /// Waits for the end of `pid`, which [`Children::start`] has started, and returns its exit status.
    pub fn wait(&self, pid: u32) -> i32 {
        let state = self.changed.wait_while(self.lock(), |state| !state.ended.contains_key(&pid));
        let mut state = state.expect("the lock is not poisoned");
        let code = state.ended.remove(&pid).expect("waited for it");
        state.forget();
        code
    }

    /// No caller will wait for the command `pid`.
    pub fn detach(&self, pid: u32) {
        let mut state = self.lock();
        match state.ended.remove(&pid) {
            Some(_) => state.forget(),
            None => drop(state.detached.insert(pid)),
        }
    }
}
