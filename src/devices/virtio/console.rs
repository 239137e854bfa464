//! Console (virtio 1.2, section 5.3): one port, bytes in and bytes out.
//!
//! Both ends are file descriptors that somebody else opened. Input is armed for one event at a time: it may be a
//! blocking terminal, which is read once when it says that it can be, and only while the guest has a buffer for it.

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use event_manager::{EventOps, EventSet, Events};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;

use super::lent::{self, Unfit};
use super::queue::Served;
use super::{Active, DeviceConfig, DeviceState, Hang, Kind, OpenError, RestoreError, VirtioDevice};
use crate::devices::console::{self as host, Target};
use crate::fault::{Blame, Fault, Field};

const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;
/// Event data of the two file descriptors.
const INPUT: u32 = 0;
const OUTPUT: u32 = 1;
/// The most that one request moves; what is left of it follows.
const MAX_BYTES: usize = 1 << 16;

/// What a virtio console is.
pub static KIND: Kind = Kind {
    key: "console",
    about: "A virtio console beside the serial port: file=PATH, pty or null",
    value: Some("WHERE"),
    repeats: false,
    parse: |text| match text.parse() {
        Ok(Target::Terminal) | Err(_) => {
            Err("use file=PATH, pty or null; the terminal is the serial port's".into())
        }
        Ok(target) => Ok(Arc::new(ConsoleConfig(target))),
    },
    read: |written| Ok(Arc::new(serde_json::from_value::<ConsoleConfig>(written)?)),
};

/// A console, and where it leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleConfig(pub Target);

/// Why there is no console.
#[derive(Debug, thiserror::Error)]
pub enum ConsoleError {
    /// Where it leads cannot be opened.
    #[error(transparent)]
    Open(#[from] host::OpenError),
    /// Nowhere is not there.
    #[error("/dev/null: {0}")]
    Null(#[source] io::Error),
}

impl Fault for ConsoleError {
    fn blame(&self) -> Blame {
        match self {
            ConsoleError::Open(_) => Blame::user(Field::Device(KIND.key)),
            ConsoleError::Null(_) => Blame::host(Field::Device(KIND.key)),
        }
    }
}

impl DeviceConfig for ConsoleConfig {
    fn kind(&self) -> &'static Kind {
        &KIND
    }

    fn written(&self) -> io::Result<Value> {
        lent::write(&match &self.0 {
            Target::File(path) => Self(Target::File(lent::absolute(path)?)),
            target => Self(target.clone()),
        })
    }

    fn take_over(&self, lent: Vec<OwnedFd>) -> Result<Box<dyn VirtioDevice>, OpenError> {
        let mut lent = lent.into_iter().map(File::from);
        let output = lent.next().ok_or_else(|| Unfit::boxed(&KIND, "no descriptor"))?;
        let input = lent.next();
        let opened = Arc::new(host::Opened::lent(None, None, lent.next()));
        Ok(Box::new(Console { opened: Some(opened), ..Console::new(input, output) }))
    }

    fn open(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        let open = || -> Result<Console, ConsoleError> {
            let mut opened = self.0.open()?;
            let null = || File::options().write(true).open("/dev/null");
            let output = opened.output.take().map_or_else(null, Ok).map_err(ConsoleError::Null)?;
            let input = opened.input.take();
            Ok(Console { opened: Some(Arc::new(opened)), ..Console::new(input, output) })
        };
        match open() {
            Ok(console) => Ok(Box::new(console)),
            Err(error) => Err(Box::new(error)),
        }
    }
}

/// The device.
pub struct Console {
    input: Option<Input>,
    output: File,
    /// The output is watched for room.
    output_watched: bool,
    /// What of the first request in the transmit queue is already out.
    sent: usize,
    /// Output has been lost, and that has been said.
    lost: bool,
    /// Where it leads, kept open: the handle on the device.
    opened: Option<Arc<host::Opened>>,
    active: Option<Active>,
}

struct Input {
    file: File,
    /// There is something to read. A regular file and /dev/null cannot be polled and are always so.
    ready: bool,
    polled: bool,
}

/// What is saved of a console.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    sent: usize,
}

impl Console {
    /// A console between the guest and these files. The output should not block (a file does not; a pipe, a socket or
    /// a terminal should have O_NONBLOCK), for it is written on the event loop.
    pub fn new(input: Option<File>, output: File) -> Self {
        let input = input.map(|file| Input { file, ready: false, polled: false });
        Console { input, output, output_watched: false, sent: 0, lost: false, opened: None, active: None }
    }

    fn receive(&mut self, ops: &mut EventOps) {
        let (Some(active), Some(input)) = (&mut self.active, &mut self.input) else { return };
        let mut ended = false;
        active.serve(RECEIVE, |chain| {
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
            let _ = ops.modify(Events::with_data(&input.file, INPUT, EventSet::IN | EventSet::ONE_SHOT));
        }
    }

    fn transmit(&mut self, ops: &mut EventOps) {
        let Some(active) = &mut self.active else { return };
        let (sent, output, lost) = (&mut self.sent, &self.output, &mut self.lost);
        let mut full = false;
        active.serve(TRANSMIT, |chain| {
            chain.readable.skip(*sent);
            while chain.readable.left() > 0 {
                match chain.readable.writev(output, MAX_BYTES) {
                    Ok(count @ 1..) => *sent += count,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                        full = true;
                        return Served::Later;
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
            let events = Events::with_data(&self.output, OUTPUT, EventSet::OUT | EventSet::ONE_SHOT);
            let watch = if self.output_watched { ops.modify(events) } else { ops.add(events) };
            self.output_watched = watch.is_ok();
        }
    }
}

impl VirtioDevice for Console {
    fn kind(&self) -> u32 {
        VIRTIO_ID_CONSOLE
    }

    fn queue_sizes(&self) -> &[u16] {
        &[64, 64]
    }

    fn read_config(&self, _offset: usize, data: &mut [u8]) {
        data.fill(0);
    }

    fn handle(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        self.opened.clone().map(|opened| opened as Arc<dyn Any + Send + Sync>)
    }

    fn activate(&mut self, active: Active) {
        self.active = Some(active);
    }

    fn quiesce(&mut self, _patience: Duration) -> Result<Option<Active>, Hang> {
        Ok(self.active.take())
    }

    fn reset(&mut self) {
        self.sent = 0;
    }

    fn watch(&mut self, ops: &mut EventOps) {
        if let Some(input) = &mut self.input {
            let events = Events::with_data(&input.file, INPUT, EventSet::IN | EventSet::ONE_SHOT);
            input.polled = ops.add(events).is_ok();
            input.ready = !input.polled;
        }
    }

    fn notified(&mut self, index: u16, ops: &mut EventOps) {
        match index {
            RECEIVE => self.receive(ops),
            _ => self.transmit(ops),
        }
    }

    fn ready(&mut self, events: Events, ops: &mut EventOps) {
        match events.data() {
            INPUT => {
                if let Some(input) = &mut self.input {
                    input.ready = true;
                }
                self.receive(ops);
            }
            _ => self.transmit(ops),
        }
    }

    fn lend(&mut self) -> io::Result<Vec<OwnedFd>> {
        let slave = self.opened.as_ref().and_then(|opened| opened.slave());
        let files = [Some(&self.output), self.input.as_ref().map(|input| &input.file), slave];
        files.into_iter().flatten().map(|file| Ok(file.try_clone()?.into())).collect()
    }

    fn save(&self) -> DeviceState {
        DeviceState::Console(State { sent: self.sent })
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Console(state) = state else { return Err(RestoreError::kind(&KIND, &state)) };
        self.sent = state.sent;
        Ok(())
    }
}
