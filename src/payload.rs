//! What a session runs: a machine of either kind, the PC with a kernel or a built-in guest, as the process around it sees it.
//!
//! A payload owns vCPUs, memory and devices, and knows nothing of signals, sockets, time limits or the terminal: those are the
//! session's (`session/`), which asks one payload after every turn of its event loop.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use event_manager::MutEventSubscriber;
use serde_json::Value;
use vmm_sys_util::eventfd::EventFd;

use crate::control::Do;
use crate::vm::lifecycle::Exit;

/// Something that the session's event loop serves.
pub type Subscriber = Arc<Mutex<dyn MutEventSubscriber + Send>>;

/// What a payload is, in a few words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outline {
    /// How many vCPUs it has.
    pub vcpus: usize,
    /// Its RAM in bytes.
    pub memory: u64,
    /// What the guest has lent of it, if there is a balloon.
    pub balloon: Option<u64>,
    /// The unix socket that leads to the guest's sockets, if there is one.
    pub vsock: Option<PathBuf>,
}

/// How far a payload has come that knows how far it has to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Pages accessed so far.
    pub done: u64,
    /// Pages to access, where there is an end.
    pub of: Option<u64>,
}

/// A machine that a session runs.
pub trait Payload {
    /// Why it cannot go on.
    type Error: std::error::Error;

    /// What the session's event loop serves for it.
    fn subscribers(&self) -> Vec<Subscriber>;

    /// Descriptors that become readable when [`Payload::poll`] has something to say. `poll` reads them.
    fn wakes(&self) -> Vec<Arc<EventFd>>;

    /// Lets its vCPUs run for the first time.
    ///
    /// # Errors
    /// Where a vCPU's thread never came to be ready.
    fn start(&mut self) -> Result<(), Self::Error>;

    /// How it has ended, once it has.
    ///
    /// # Errors
    /// Where it cannot go on although its guest has not ended.
    fn poll(&mut self) -> Result<Option<Exit>, Self::Error>;

    /// Stops vCPUs, then devices: afterwards nothing of it touches guest memory.
    ///
    /// # Errors
    /// Where something does not stop in time. Everything that had stopped goes on then.
    fn pause(&mut self) -> Result<(), Self::Error>;

    /// Lets devices, then vCPUs go on. After [`Payload::pause`] alone.
    fn resume(&mut self);

    /// Asks the guest to come to its own end. False where it has no way to: then it is over at once.
    fn request_end(&mut self) -> bool;

    /// What it is.
    fn outline(&self) -> Outline;

    /// How far it has come, where it has an idea of that.
    fn progress(&self) -> Option<Progress>;

    /// Does what only this kind of machine can be asked for, with the descriptors that came along.
    ///
    /// # Errors
    /// In words for whoever asked.
    fn ask(&mut self, what: &Do, descriptors: Vec<OwnedFd>) -> Result<Value, String>;

    /// Ends its vCPUs, where there are any left.
    fn stop(&mut self);

    /// Whether what its guest has said has all been read. Where it has not, the event loop goes on for the reader's sake.
    fn flushed(&mut self) -> bool;
}
