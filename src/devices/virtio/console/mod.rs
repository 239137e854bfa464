//! Console (virtio 1.2, section 5.3): bytes in and bytes out, through one or two ports. The second
//! port has a name and is not a console (VIRTIO_CONSOLE_F_MULTIPORT). Then the first port exists
//! only if it is configured.
//!
//! Both ends of a [`port`] are file descriptors opened elsewhere. Input is armed one-shot, because
//! it may be a blocking terminal: it is read once when it is readable, and only if the guest has a
//! buffer. [`control`] has the messages about ports. When either direction of a named port ends at
//! the host, the guest is told that the port is closed. A reader in the guest then gets EOF after
//! all data that was sent.

mod control;
mod port;

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use event_manager::{EventOps, Events};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;

use super::handoff::{self, Unfit};
use super::queue::Served;
use super::{
    Active, DeviceConfig, DeviceState, Hang, Kind, OpenError, RestoreError, VirtioDevice, read_space,
};
use crate::console::{self as host, Target};
use port::{Numbers, Port};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// The device has several ports, and a pair of control queues.
const F_MULTIPORT: u32 = 1;
/// Queues and event data of the console port.
const CONSOLE: Numbers = Numbers { receive: 0, transmit: 1, input: 0, output: 1 };
/// The control queues: to the driver, and from it.
const CONTROL_RECEIVE: u16 = 2;
const CONTROL_TRANSMIT: u16 = 3;
/// Queues and event data of the named port.
const NAMED: Numbers = Numbers { receive: 4, transmit: 5, input: 2, output: 3 };
/// The queue sizes. Without the named port only the first two are used.
const QUEUES: [u16; 6] = [64; 6];

/// The virtio console as a kind of device.
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

/// The configuration of a console: its target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleConfig(pub Target);

/// Why a console cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConsoleError {
    /// The target cannot be opened.
    #[error(transparent)]
    Open(#[from] host::OpenError),
    /// /dev/null cannot be opened.
    #[error("/dev/null: {0}")]
    Null(#[source] io::Error),
    /// The host refuses a descriptor.
    #[error("a socket: {0}")]
    Socket(#[source] io::Error),
}

impl Diagnose for ConsoleError {
    fn origin(&self) -> ErrorOrigin {
        match self {
            ConsoleError::Open(_) => ErrorOrigin::user(Field::Device(KIND.key)),
            ConsoleError::Null(_) | ConsoleError::Socket(_) => ErrorOrigin::host(Field::Device(KIND.key)),
        }
    }
}

impl DeviceConfig for ConsoleConfig {
    fn kind(&self) -> &'static Kind {
        &KIND
    }

    fn written(&self) -> io::Result<Value> {
        let mut written = self.clone();
        if let Target::File(path) = &mut written.0 {
            handoff::make_absolute([path])?;
        }
        handoff::write(&written)
    }

    fn take_over(&self, lent: Vec<OwnedFd>) -> Result<Box<dyn VirtioDevice>, OpenError> {
        let mut lent = lent.into_iter().map(File::from);
        let output = lent.next().ok_or_else(|| Unfit::boxed(&KIND, "no descriptor"))?;
        let input = lent.next();
        let opened = Arc::new(host::Opened::handed_over(None, None, lent.next()));
        Ok(Box::new(Console { opened: Some(opened), ..Console::new(input, output) }))
    }

    fn open(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        match self.console(self.0.open()) {
            Ok(console) => Ok(Box::new(console)),
            Err(error) => Err(Box::new(error)),
        }
    }

    fn open_unlocked(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        match self.console(self.0.open_beside()) {
            Ok(console) => Ok(Box::new(console)),
            Err(error) => Err(Box::new(error)),
        }
    }
}

impl ConsoleConfig {
    fn console(&self, opened: Result<host::Opened, host::OpenError>) -> Result<Console, ConsoleError> {
        let mut opened = opened?;
        let null = || File::options().write(true).open("/dev/null");
        let output = opened.output.take().map_or_else(null, Ok).map_err(ConsoleError::Null)?;
        let input = opened.input.take();
        Ok(Console { opened: Some(Arc::new(opened)), ..Console::new(input, output) })
    }
}

/// A named port that leads to a socket of this process, with or without a console beside it. The
/// other end must be open before the guest looks at the port.
#[derive(Debug)]
pub struct PortConfig {
    /// The port's name in the guest.
    pub name: String,
    /// The port's socket.
    pub end: UnixStream,
    /// The console beside it.
    pub console: Option<ConsoleConfig>,
}

impl DeviceConfig for PortConfig {
    fn kind(&self) -> &'static Kind {
        &KIND
    }

    fn open(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        let open = || -> Result<Console, ConsoleError> {
            let beside = self.console.as_ref().map(|beside| beside.console(beside.0.open())).transpose()?;
            Console::with_port(beside, &self.name, &self.end).map_err(ConsoleError::Socket)
        };
        match open() {
            Ok(console) => Ok(Box::new(console)),
            Err(error) => Err(Box::new(error)),
        }
    }
}

/// The device.
pub struct Console {
    /// The console port, and the named port.
    ports: [Option<Port>; 2],
    /// The console's opened target, kept open. It is also the device's handle.
    opened: Option<Arc<host::Opened>>,
    active: Option<Active>,
}

/// The saved state of a console.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// `sent` of the console port.
    sent: usize,
    /// Both ports, if there is a named port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ports: Option<[port::State; 2]>,
}

impl Console {
    /// A console between the guest and these files. The event loop writes the output, so it must
    /// not block: a pipe, socket or terminal needs O_NONBLOCK, a regular file does not.
    pub fn new(input: Option<File>, output: File) -> Self {
        let console = Port::new(CONSOLE, None, input, output);
        Console { ports: [Some(console), None], opened: None, active: None }
    }

    /// `console`, if given, and a port called `name` between the guest and `end`.
    ///
    /// # Errors
    /// The host has no descriptor left.
    pub fn with_port(console: Option<Self>, name: &str, end: &UnixStream) -> io::Result<Self> {
        let file = || -> io::Result<File> { Ok(OwnedFd::from(end.try_clone()?).into()) };
        let named = Port::new(NAMED, Some(name), Some(file()?), file()?);
        end.set_nonblocking(true)?;
        let console = console.unwrap_or(Console { ports: [None, None], opened: None, active: None });
        let [beside, _] = console.ports;
        Ok(Console { ports: [beside, Some(named)], ..console })
    }

    fn has_named(&self) -> bool {
        self.ports[1].is_some()
    }

    /// Calls `act` for each port and its queues. If that ends a connection, the driver is told.
    fn with_ports(&mut self, ops: &mut EventOps, mut act: impl FnMut(&mut Port, &mut Active, &mut EventOps)) {
        let Some(active) = &mut self.active else { return };
        let several = active.has(F_MULTIPORT);
        for port in self.ports.iter_mut().flatten().filter(|port| several || port.name.is_none()) {
            let was_connected = port.is_connected();
            act(port, active, ops);
            if was_connected && !port.is_connected() {
                control::owe_connection(port);
            }
        }
        if several {
            self.tell();
        }
    }

    /// Sends owed messages while the driver has buffers.
    fn tell(&mut self) {
        let (Some(active), ports) = (&mut self.active, &mut self.ports) else { return };
        active.serve(CONTROL_RECEIVE, |chain| match control::next(ports) {
            // If the driver's buffer is too short, the rest is cut off.
            Some(message) => Served::Done(chain.writable.write(&message) as u32),
            None => Served::Later,
        });
    }

    /// Handles messages of the driver.
    fn hear(&mut self, ops: &mut EventOps) {
        let (Some(active), ports) = (&mut self.active, &mut self.ports) else { return };
        if !active.has(F_MULTIPORT) {
            return;
        }
        active.serve(CONTROL_TRANSMIT, |chain| {
            if let Some(message) = chain.readable.read_array() {
                control::hear(message, ports);
            }
            Served::Done(0)
        });
        self.with_ports(ops, Port::receive);
    }
}

impl VirtioDevice for Console {
    fn kind(&self) -> u32 {
        VIRTIO_ID_CONSOLE
    }

    fn features(&self) -> u64 {
        u64::from(self.has_named()) << F_MULTIPORT
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUES[..if self.has_named() { 6 } else { 2 }]
    }

    /// Columns and rows, 2 bytes each, are not offered. Then the maximum number of ports.
    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let ports = if self.has_named() { self.ports.len() as u8 } else { 0 };
        read_space(&[0, 0, 0, 0, ports, 0, 0, 0], offset, data);
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
        self.ports.iter_mut().flatten().for_each(|port| port.state = port::State::default());
    }

    fn watch(&mut self, ops: &mut EventOps) {
        self.ports.iter_mut().flatten().for_each(|port| port.watch(ops));
    }

    fn notified(&mut self, index: u16, ops: &mut EventOps) {
        match index {
            CONTROL_TRANSMIT => self.hear(ops),
            // Owed messages are sent each time.
            _ => self.with_ports(ops, |port, active, ops| {
                if port.has(index) {
                    port.notified(index, active, ops);
                }
            }),
        }
    }

    fn ready(&mut self, events: Events, ops: &mut EventOps) {
        let data = events.data();
        self.ports.iter_mut().flatten().for_each(|port| port.note(data));
        self.with_ports(ops, |port, active, ops| port.ready(data, active, ops));
    }

    fn lend(&mut self) -> io::Result<Vec<OwnedFd>> {
        let slave = self.opened.as_ref().and_then(|opened| opened.slave());
        let console = self.ports[0].as_ref();
        let input = console.and_then(|port| port.input.as_ref()).map(|input| &input.file);
        let files = [console.map(|port| &port.output), input, slave];
        files.into_iter().flatten().map(|file| Ok(file.try_clone()?.into())).collect()
    }

    fn stays(&self) -> Option<(&'static str, &'static str)> {
        self.has_named().then_some((KIND.key, "the peer of its named port is tied to this process"))
    }

    fn save(&self) -> DeviceState {
        let state = |port: &Option<Port>| port.as_ref().map(|port| port.state.clone()).unwrap_or_default();
        let ports = self.ports.each_ref().map(state);
        DeviceState::Console(State { sent: ports[0].sent, ports: self.has_named().then_some(ports) })
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Console(state) = state else { return Err(RestoreError::kind(&KIND, &state)) };
        let alone = [port::State { sent: state.sent, ..Default::default() }, Default::default()];
        if state.ports.is_some() != self.has_named() {
            return Err(RestoreError::Field {
                field: "ports",
                value: if self.has_named() { "missing" } else { "there" }.into(),
                reason: "belongs to a console with other ports",
            });
        }
        for (port, state) in self.ports.iter_mut().zip(state.ports.unwrap_or(alone)) {
            port.iter_mut().for_each(|port| port.state = state.clone());
        }
        // The host's end may have changed.
        self.ports.iter_mut().flatten().filter(|port| port.name.is_some()).for_each(control::owe_connection);
        Ok(())
    }
}
