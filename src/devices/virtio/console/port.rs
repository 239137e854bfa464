//! One port of a console: bytes between a guest's two queues and two file descriptors of the host's.

use std::fs::File;
use std::io;

use event_manager::{EventOps, EventSet, Events};
use serde::{Deserialize, Serialize};

use super::F_MULTIPORT;
use crate::virtio::Active;
use crate::virtio::queue::Served;

/// The most that one request moves; what is left of it follows.
const MAX_BYTES: usize = 1 << 16;

/// Its own numbers: its two queues, and the event data of its two descriptors.
#[derive(Clone, Copy, Debug)]
pub struct Numbers {
    pub receive: u16,
    pub transmit: u16,
    pub input: u32,
    pub output: u32,
}

/// A port.
pub struct Port {
    numbers: Numbers,
    /// What its driver knows it by; none for a console.
    pub name: Option<String>,
    pub input: Option<Input>,
    pub output: File,
    /// The output is watched for room.
    output_watched: bool,
    /// Nobody reads the output any more, and that has been said.
    lost: bool,
    /// Bytes that the file did not take since a write last succeeded, because its disk was full or it failed.
    unwritten: u64,
    /// What its guest has made of it.
    pub state: State,
}

/// Where what its guest reads comes from.
pub struct Input {
    pub file: File,
    /// There is something to read. A regular file and /dev/null cannot be polled and are always so.
    ready: bool,
    polled: bool,
}

/// What is saved of a port.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// What of the first request in the transmit queue is already out.
    pub sent: usize,
    /// Somebody in the guest has it open.
    pub open: bool,
    /// The messages that the driver is to be told yet ([`super::control`]).
    pub owed: u8,
}

impl Port {
    /// Between the guest and these files.
    pub fn new(numbers: Numbers, name: Option<&str>, input: Option<File>, output: File) -> Self {
        let input = input.map(|file| Input { file, ready: false, polled: false });
        let state = State::default();
        Port {
            numbers,
            name: name.map(str::to_owned),
            input,
            output,
            output_watched: false,
            lost: false,
            unwritten: 0,
            state,
        }
    }

    /// Whether there is somebody at the host's end.
    pub fn is_connected(&self) -> bool {
        self.input.is_some() && !self.lost
    }

    /// Whether the queue `index` is one of its own.
    pub fn has(&self, index: u16) -> bool {
        [self.numbers.receive, self.numbers.transmit].contains(&index)
    }

    /// The driver has made buffers available in queue `index`, one of its own.
    pub fn notified(&mut self, index: u16, active: &mut Active, ops: &mut EventOps) {
        match index == self.numbers.receive {
            true => self.receive(active, ops),
            false => self.transmit(active, ops),
        }
    }

    /// There has been an event with this data: there may be something to read.
    pub fn note(&mut self, data: u32) {
        if let Some(input) = self.input.as_mut().filter(|_| data == self.numbers.input) {
            input.ready = true;
        }
    }

    /// One of its descriptors is ready, where the data is of one of these.
    pub fn ready(&mut self, data: u32, active: &mut Active, ops: &mut EventOps) {
        if data == self.numbers.input {
            self.receive(active, ops);
        } else if data == self.numbers.output {
            self.transmit(active, ops);
        }
    }

    /// Gives the guest what has come, as far as it has buffers. A driver of several ports throws away what comes to one that nobody has
    /// open.
    pub fn receive(&mut self, active: &mut Active, ops: &mut EventOps) {
        let is_open = self.state.open || !active.has(F_MULTIPORT);
        let Some(input) = self.input.as_mut().filter(|_| is_open) else { return };
        let mut ended = false;
        active.serve(self.numbers.receive, |chain| {
            if !input.ready || ended {
                return Served::Later;
            }
            if chain.writable.left() == 0 {
                return Served::Done(0);
            }
            // Another read of a file that can be polled might block.
            input.ready = !input.polled;
            match chain.writable.readv(&input.file, MAX_BYTES) {
                Ok(count @ 1..) => return Served::Done(count as u32),
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                // The end, or a terminal whose other side has gone.
                _ => ended = true,
            }
            Served::Later
        });
        if ended {
            if input.polled {
                let _ = ops.remove(Events::empty(&input.file));
            }
            self.input = None;
        } else if input.polled && !input.ready {
            let events =
                Events::with_data(&input.file, self.numbers.input, EventSet::IN | EventSet::ONE_SHOT);
            let _ = ops.modify(events);
        }
    }

    /// Lets out what the guest has written, as far as there is room.
    fn transmit(&mut self, active: &mut Active, ops: &mut EventOps) {
        let (sent, output, lost) = (&mut self.state.sent, &self.output, &mut self.lost);
        let unwritten = &mut self.unwritten;
        let mut full = false;
        active.serve(self.numbers.transmit, |chain| {
            chain.readable.skip(*sent);
            while chain.readable.left() > 0 {
                match chain.readable.writev(output, MAX_BYTES) {
                    Ok(count @ 1..) => {
                        *sent += count;
                        match std::mem::take(unwritten) {
                            0 => {}
                            lost => tracing::warn!(
                                "virtio console: output is written again: {lost} bytes of it were lost"
                            ),
                        }
                    }
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                        full = true;
                        return Served::Later;
                    }
                    // A disk that is full may have room again: each write is tried, and what it had is gone.
                    Err(error) if output.metadata().is_ok_and(|about| about.is_file()) => {
                        if *unwritten == 0 {
                            tracing::warn!(
                                "virtio console: output is lost until its file can be written again: {error}"
                            );
                        }
                        *unwritten += chain.readable.left() as u64;
                        break;
                    }
                    // Nobody reads any more: the guest's words go nowhere, as with a cable pulled out.
                    gone => {
                        if !std::mem::replace(lost, true) {
                            let why =
                                gone.err().map_or("it takes nothing".to_owned(), |error| error.to_string());
                            tracing::warn!("virtio console: output is lost from here on: {why}");
                        }
                        break;
                    }
                }
            }
            *sent = 0;
            Served::Done(0)
        });
        if full {
            let events =
                Events::with_data(&self.output, self.numbers.output, EventSet::OUT | EventSet::ONE_SHOT);
            let watch = if self.output_watched { ops.modify(events) } else { ops.add(events) };
            self.output_watched = watch.is_ok();
        }
    }

    /// Adds its input to the event loop.
    pub fn watch(&mut self, ops: &mut EventOps) {
        if let Some(input) = &mut self.input {
            let events =
                Events::with_data(&input.file, self.numbers.input, EventSet::IN | EventSet::ONE_SHOT);
            input.polled = ops.add(events).is_ok();
            input.ready = !input.polled;
        }
    }
}
