//! A port of a console: moves bytes between two queues of the guest and two file descriptors of the
//! host.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileTypeExt;

use event_manager::{EventOps, EventSet, Events};
use serde::{Deserialize, Serialize};

use super::F_MULTIPORT;
use crate::virtio::Active;
use crate::virtio::queue::Served;

/// The maximum number of bytes moved at once. The rest follows.
const MAX_BYTES: usize = 1 << 16;
/// After so many bytes, others of the event loop have their turn.
const MAX_TURN: usize = 1 << 20;

/// A port's two queues, and the event data of its two descriptors.
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
    /// Its name in the guest. A console has none.
    pub name: Option<String>,
    pub input: Option<Input>,
    pub output: File,
    /// The output is watched for room.
    output_watched: bool,
    /// The output has no reader any more, and that was logged.
    lost: bool,
    /// Bytes that the output did not take since a write last succeeded: a file whose disk was full
    /// or that failed, or a FIFO without a reader.
    unwritten: u64,
    /// The state that the guest controls.
    pub state: State,
}

/// The source of what the guest reads.
pub struct Input {
    pub file: File,
    /// There is something to read. Always true for a regular file and /dev/null, which cannot be
    /// polled.
    ready: bool,
    polled: bool,
}

/// The saved state of a port.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// How many bytes of the first request in the transmit queue are already written.
    pub sent: usize,
    /// The port is open in the guest.
    pub open: bool,
    /// The messages that the driver is owed, a bit each ([`super::control`]).
    pub owed: u8,
}

/// What must happen before `output`, which has refused a write, may take another. None if nothing
/// can.
fn recovers(output: &File) -> Option<&'static str> {
    let kind = output.metadata().ok()?.file_type();
    match (kind.is_file(), kind.is_fifo()) {
        (true, _) => Some("its file can be written"),
        (_, true) => Some("its pipe is read"),
        _ => None,
    }
}

impl Port {
    /// A port between the guest and these files.
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

    /// Whether the host's end is connected.
    pub fn is_connected(&self) -> bool {
        self.input.is_some() && !self.lost
    }

    /// Whether queue `index` belongs to this port.
    pub fn has(&self, index: u16) -> bool {
        [self.numbers.receive, self.numbers.transmit].contains(&index)
    }

    /// The driver has made buffers available in queue `index` of this port.
    pub fn notified(&mut self, index: u16, active: &mut Active, ops: &mut EventOps) {
        match index == self.numbers.receive {
            true => self.receive(active, ops),
            false => self.transmit(active, ops),
        }
    }

    /// Notes an event with this data: input may be readable.
    pub fn note(&mut self, data: u32) {
        if let Some(input) = self.input.as_mut().filter(|_| data == self.numbers.input) {
            input.ready = true;
        }
    }

    /// Handles an event with this data, if it belongs to one of the port's descriptors.
    pub fn ready(&mut self, data: u32, active: &mut Active, ops: &mut EventOps) {
        if data == self.numbers.input {
            self.receive(active, ops);
        } else if data == self.numbers.output {
            self.transmit(active, ops);
        }
    }

    /// Passes input to the guest while it has buffers. A multiport driver drops input for a port
    /// that is not open, so that input waits.
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
            // A second read of a pollable file might block.
            input.ready = !input.polled;
            match chain.writable.readv(&input.file, MAX_BYTES) {
                Ok(count @ 1..) => return Served::Done(count as u32),
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                // EOF, or a terminal whose other side has closed.
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

    /// Writes the guest's output while there is room.
    fn transmit(&mut self, active: &mut Active, ops: &mut EventOps) {
        let (sent, output, lost) = (&mut self.state.sent, &self.output, &mut self.lost);
        let unwritten = &mut self.unwritten;
        let (mut full, mut written) = (false, 0);
        active.serve(self.numbers.transmit, |chain| {
            chain.readable.skip(*sent);
            while chain.readable.left() > 0 {
                if written >= MAX_TURN {
                    return Served::NextTurn;
                }
                match chain.readable.writev(output, MAX_BYTES) {
                    Ok(count @ 1..) => {
                        *sent += count;
                        written += count;
                        match std::mem::take(unwritten) {
                            0 => {}
                            lost => tracing::warn!(
                                "virtio console: output is written again; {lost} bytes were lost"
                            ),
                        }
                    }
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                        full = true;
                        return Served::Later;
                    }
                    // The reader is gone: output is dropped, as with an unplugged cable.
                    gone => {
                        // A full disk may have room again, and a FIFO a reader. So each write is
                        // tried, and the bytes of a failed one are dropped.
                        if let Err(error) = &gone
                            && let Some(again) = recovers(output)
                        {
                            if *unwritten == 0 {
                                tracing::warn!("virtio console: output is lost until {again} again: {error}");
                            }
                            *unwritten += chain.readable.left() as u64;
                            break;
                        }
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

    /// Adds the input to the event loop.
    pub fn watch(&mut self, ops: &mut EventOps) {
        if let Some(input) = &mut self.input {
            let events =
                Events::with_data(&input.file, self.numbers.input, EventSet::IN | EventSet::ONE_SHOT);
            input.polled = ops.add(events).is_ok();
            input.ready = !input.polled;
        }
    }
}
