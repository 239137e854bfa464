//! A stream socket between a process that has taken over a machine and the one that had it before.
//! The user waits for the first process and sends signals to it. It forwards each signal as one
//! byte, and the other returns its exit status. End of file from the first process counts as
//! SIGKILL.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};

use vellum_sys::signal::KILL;
use vellum_sys::socket;

/// This process's end of the socket, if a previous process waits for its exit status.
static OURS: Mutex<Option<Arc<OwnedFd>>> = Mutex::new(None);

fn ours() -> std::sync::MutexGuard<'static, Option<Arc<OwnedFd>>> {
    OURS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on this process reports its exit status on `supervisor`.
pub fn set(supervisor: Arc<OwnedFd>) {
    *ours() = Some(supervisor);
}

/// Another process has taken over and reports on the same socket.
pub fn clear() {
    *ours() = None;
}

/// Reports that this process ends with `status`. Called last.
pub fn report(status: u8) {
    if let Some(supervisor) = ours().take() {
        // The other process may have ended.
        let _ = socket::send_some(&supervisor, &[status]);
    }
}

/// Reads what has arrived: bytes, none yet, or `None` at the end.
fn read(supervisor: &OwnedFd) -> Option<Vec<u8>> {
    let mut bytes = [0; 16];
    match socket::receive_some(supervisor, &mut bytes) {
        Ok(0) => None,
        Ok(count) => Some(bytes[..count].to_vec()),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
            Some(Vec::new())
        }
        Err(_) => None,
    }
}

/// The subscriber of a process that has taken over: it receives signals.
pub(crate) struct SupervisorSocket(pub Arc<OwnedFd>, pub Sender<i32>);

impl MutEventSubscriber for SupervisorSocket {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        // Watching a socket cannot fail.
        let _ = ops.add(Events::new(&self.0.as_raw_fd(), EventSet::IN));
    }

    fn process(&mut self, _: Events, ops: &mut EventOps<'_>) {
        let signals = read(&self.0).unwrap_or_else(|| {
            let _ = ops.remove(Events::empty(&self.0.as_raw_fd()));
            vec![KILL as u8]
        });
        // The receiver lives as long as the event loop.
        for signal in signals {
            let _ = self.1.send(signal.into());
        }
    }
}

/// The subscriber of a forked machine: the socket to its client. The machine sends a byte when it
/// runs, and the client answers with a byte after it has reported that. If the client ends before,
/// nobody knows of the machine, so it ends as after SIGKILL.
pub(crate) struct ClientSocket(pub Arc<OwnedFd>, pub Sender<i32>);

impl MutEventSubscriber for ClientSocket {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        // Watching a socket cannot fail.
        let _ = ops.add(Events::new(&self.0.as_raw_fd(), EventSet::IN));
    }

    fn process(&mut self, _: Events, ops: &mut EventOps<'_>) {
        let said = read(&self.0);
        if said.as_deref() == Some(&[]) {
            return;
        }
        let _ = ops.remove(Events::empty(&self.0.as_raw_fd()));
        if said.is_none() {
            let _ = self.1.send(KILL);
        }
    }
}

/// The subscriber of a process that waits for its successor: it receives the exit status, or `None`
/// if the successor ended without one.
pub(crate) struct SuccessorSocket(pub Arc<OwnedFd>, pub Sender<Option<u8>>);

impl MutEventSubscriber for SuccessorSocket {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        // Watching a socket cannot fail.
        let _ = ops.add(Events::new(&self.0.as_raw_fd(), EventSet::IN));
    }

    fn process(&mut self, _: Events, ops: &mut EventOps<'_>) {
        let said = match read(&self.0).as_deref() {
            Some([]) => return,
            Some([status, ..]) => Some(*status),
            None => {
                let _ = ops.remove(Events::empty(&self.0.as_raw_fd()));
                None
            }
        };
        // The receiver lives as long as the event loop.
        let _ = self.1.send(said);
    }
}
