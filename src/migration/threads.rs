//! Messages between the two threads of one side. The event loop's thread has the machine. The
//! migration's thread has the link. An eventfd wakes each for the other's messages.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// An eventfd for [`pair`], or for another thread that wakes the event loop.
///
/// # Errors
/// No descriptor is left.
pub fn event() -> io::Result<Arc<EventFd>> {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map(Arc::new)
}

/// Both ends of a channel: the migration's thread sends `S` and receives `T`. `wake` wakes the
/// event loop.
///
/// # Errors
/// No descriptor is left.
pub fn pair<S, T>(wake: Arc<EventFd>) -> io::Result<(Mine<S, T>, MachineEnd<S, T>)> {
    let tells = event()?;
    let ((say, said), (tell, told)) = (channel(), channel());
    Ok((Mine { say, wake, told, tells: tells.clone() }, MachineEnd { said, tell, tells }))
}

/// The other thread is gone.
pub struct Orphaned;

/// The end of the migration's thread.
#[derive(Debug)]
pub struct Mine<S, T> {
    say: Sender<S>,
    wake: Arc<EventFd>,
    told: Receiver<T>,
    tells: Arc<EventFd>,
}

impl<S, T> Mine<S, T> {
    /// Sends a message to the event loop's thread.
    pub fn say(&self, what: S) -> Result<(), Orphaned> {
        self.say.send(what).map_err(|_| Orphaned)?;
        // Full only after 2^64 - 2 unread messages.
        let _ = self.wake.write(1);
        Ok(())
    }

    /// The next message, if there is one.
    pub fn heard(&self) -> Result<Option<T>, Orphaned> {
        // Reads the event before the channel, so that a later message wakes again.
        let _ = self.tells.read();
        match self.told.try_recv() {
            Ok(told) => {
                // There may be more.
                let _ = self.tells.write(1);
                Ok(Some(told))
            }
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(Orphaned),
        }
    }

    /// Waits for the next message.
    pub fn wait(&self) -> Result<T, Orphaned> {
        self.told.recv().map_err(|_| Orphaned)
    }

    /// Readable when a message has been sent.
    pub fn descriptor(&self) -> &Arc<EventFd> {
        &self.tells
    }
}

/// The event loop's end.
#[derive(Debug)]
pub struct MachineEnd<S, T> {
    said: Receiver<S>,
    tell: Sender<T>,
    tells: Arc<EventFd>,
}

impl<S, T> MachineEnd<S, T> {
    /// The next message of the migration's thread, if there is one.
    pub fn heard(&self) -> Option<S> {
        self.said.try_recv().ok()
    }

    /// Sends a message to the migration's thread, if it still exists.
    pub fn tell(&self, what: T) {
        if self.tell.send(what).is_ok() {
            let _ = self.tells.write(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_woken_and_knows_when_it_is_alone() {
        let wake = event().unwrap();
        let (mine, machine) = pair::<u32, &str>(wake.clone()).unwrap();
        assert!(wake.read().is_err() && mine.heard().is_ok_and(|told| told.is_none()));
        assert!(mine.say(7).is_ok());
        assert_eq!((wake.read().unwrap(), machine.heard(), machine.heard()), (1, Some(7), None));
        machine.tell("one");
        machine.tell("two");
        for said in ["one", "two"] {
            assert!(mine.tells.read().is_ok(), "not woken for {said}");
            mine.tells.write(1).unwrap();
            assert!(mine.heard().is_ok_and(|told| told == Some(said)));
        }
        drop(machine);
        assert!(mine.heard().is_err() && mine.wait().is_err() && mine.say(8).is_err());
    }
}
