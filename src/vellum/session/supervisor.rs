//! What ties a process to the one whose machine it has taken over, and for which it stands in: a stream socket between the two. Whoever
//! started the first one waits for that and sends signals to it; so these go on over the supervisor, a byte each, and back comes the exit
//! status. A supervisor that ends is as SIGKILL.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};

use vellum_sys::signal::KILL;
use vellum_sys::socket;

/// The end of this process, whose exit status somebody waits for.
static OURS: Mutex<Option<Arc<OwnedFd>>> = Mutex::new(None);

fn ours() -> std::sync::MutexGuard<'static, Option<Arc<OwnedFd>>> {
    OURS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on this process stands in for the one at the other end.
pub fn set(supervisor: Arc<OwnedFd>) {
    *ours() = Some(supervisor);
}

/// Another one does, by the same supervisor.
pub fn clear() {
    *ours() = None;
}

/// This process ends with `status`: its last act.
pub fn report(status: u8) {
    if let Some(supervisor) = ours().take() {
        // Where nobody waits any more nobody is told.
        let _ = socket::send_some(&supervisor, &[status]);
    }
}

/// What has come: some bytes, nothing yet, or the end.
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

/// The event loop's part in the supervisor of a process that stands in for another: signals.
pub(crate) struct SupervisorSocket(pub Arc<OwnedFd>, pub Sender<i32>);

impl MutEventSubscriber for SupervisorSocket {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        // A socket can always be watched.
        let _ = ops.add(Events::new(&self.0.as_raw_fd(), EventSet::IN));
    }

    fn process(&mut self, _: Events, ops: &mut EventOps<'_>) {
        let signals = read(&self.0).unwrap_or_else(|| {
            let _ = ops.remove(Events::empty(&self.0.as_raw_fd()));
            vec![KILL as u8]
        });
        // The receiver lives as long as the loop.
        for signal in signals {
            let _ = self.1.send(signal.into());
        }
    }
}

/// The same in a process that waits for the one which stands in for it: the exit status, or none where that ended without a word.
pub(crate) struct SuccessorSocket(pub Arc<OwnedFd>, pub Sender<Option<u8>>);

impl MutEventSubscriber for SuccessorSocket {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        // As above.
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
        // The receiver lives as long as the loop.
        let _ = self.1.send(said);
    }
}
