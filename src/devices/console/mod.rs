//! The host's end of the serial port: its [`target`], and the event loop's part.
//!
//! On a terminal every key goes to the guest, except after the escape key: Ctrl-a x ends the guest,
//! Ctrl-a Ctrl-a (or Ctrl-a a) sends one Ctrl-a.
//!
//! While the machine is being handed over to another process, input is held here
//! ([`Console::hold`]). The guest gets it if it continues here. If the guest has left, the input
//! follows it ([`Console::take_held`]).

mod target;

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use event_manager::{EventOps, Events, MutEventSubscriber};
use vmm_sys_util::{epoll::EventSet, eventfd::EventFd};

use self::target::Untouched;
pub use self::target::{OpenError, Opened, Target, Unfit, check_output};
use super::serial::Serial;
use vellum_sys::poll::Poll;
use vellum_sys::terminal::{self, Keys};

/// Bytes of input held during a hand-over: the size of a terminal's line buffer. Further input
/// stays in the source.
pub(crate) const MAX_HELD: usize = 4096;

/// The descriptors of a serial port's target, handed to the process that takes the machine over.
pub struct HandedConsole {
    /// Takes what the guest writes.
    pub output: Option<File>,
    /// Supplies what the guest reads.
    pub input: Option<File>,
    /// The pseudo-terminal's slave, which keeps it from hanging up.
    pub slave: Option<File>,
    /// Whether the input is a terminal in raw mode.
    pub raw: bool,
}

/// The event loop's part: passes keys to the guest as fast as it takes them, and writes output that
/// had to wait.
pub struct Console {
    serial: Arc<Serial>,
    input: Option<File>,
    /// A second descriptor of the output. The event loop watches it while output waits.
    output: Option<File>,
    /// Replaces `output` once the event loop no longer watches the old descriptor.
    next: Option<File>,
    file: Option<Untouched>,
    slave: Option<File>,
    keys: Keys,
    /// Whether another process was given the descriptors.
    lent: bool,
    /// Input that was read but not yet given to the guest.
    held: VecDeque<u8>,
    /// While the guest is given nothing: how many bytes may be held.
    holds: Option<usize>,
    /// Signalled by Ctrl-a x.
    quit: Arc<EventFd>,
    /// epoll refuses regular files and /dev/null. They never block, so they are read directly.
    pollable: bool,
    watching_input: bool,
    watching_output: bool,
}

const INPUT: u32 = 0;
const OUTPUT: u32 = 1;
const WAKE: u32 = 2;

impl Console {
    /// The console of `serial`, which must write to a duplicate of `opened.output`. A terminal
    /// becomes raw as soon as this process is in its foreground. [`terminal::restore`] undoes that.
    pub fn new(serial: Arc<Serial>, opened: Opened, quit: Arc<EventFd>) -> io::Result<Self> {
        let mut keys = Keys { escape: opened.raw, pending: false };
        if let Some(input) = &opened.input
            && !opened.raw
            && opened.pty.is_none()
            && input.is_terminal()
            && terminal::in_foreground(input.as_fd()).is_some()
        {
            let back = serial.wake().clone();
            terminal::set_raw(input.as_fd(), terminal::Output::Processed, Some(back))?;
            keys.escape = true;
        }
        let Opened { output, input, slave, file, .. } = opened;
        Ok(Self {
            serial,
            input,
            output,
            next: None,
            file,
            slave,
            keys,
            lent: false,
            held: VecDeque::new(),
            holds: None,
            quit,
            pollable: true,
            watching_input: false,
            watching_output: false,
        })
    }

    /// Called when the machine starts: truncates a file.
    pub fn begin(&self) {
        self.file.iter().for_each(Untouched::begin);
    }

    /// Redirects output to `file`, beginning with what waits. The input does not change.
    pub fn lead_to(&mut self, file: File) -> io::Result<()> {
        self.next = Some(file.try_clone()?);
        self.serial.lead_to(file);
        // The write can only fail on overflow, and then the eventfd is signalled anyway.
        let _ = self.serial.wake().write(1);
        Ok(())
    }

    /// Duplicates the target's descriptors for another process. From then on a terminal stays raw
    /// when this console is dropped: the other process may use it by then, and the end of this
    /// process restores it.
    ///
    /// # Errors
    /// A descriptor cannot be duplicated.
    pub fn lend(&mut self) -> io::Result<HandedConsole> {
        self.lent = true;
        let clone = |file: &Option<File>| file.as_ref().map(File::try_clone).transpose();
        Ok(HandedConsole {
            output: clone(if self.next.is_some() { &self.next } else { &self.output })?,
            input: clone(&self.input)?,
            slave: clone(&self.slave)?,
            raw: self.keys.escape,
        })
    }

    /// Holds input from now on: the port's state has been saved, or is about to be.
    pub fn hold(&mut self) {
        self.holds = Some(MAX_HELD);
    }

    /// The guest continues here and gets the held input.
    pub fn go_on(&mut self) {
        if self.holds.take().is_some() {
            // The write can only fail on overflow, and then the eventfd is signalled anyway.
            let _ = self.serial.wake().write(1);
        }
    }

    /// The guest continues elsewhere. Returns the input that it has not been given, and stops
    /// reading.
    pub fn take_held(&mut self) -> Vec<u8> {
        while self.pollable && self.is_readable() && self.read() {}
        self.holds = Some(0);
        self.held.drain(..).collect()
    }

    /// Gives the guest input that was typed before it moved here.
    pub fn give(&mut self, typed: &[u8]) {
        self.held.extend(typed.iter().take(MAX_HELD));
        // The write can only fail on overflow, and then the eventfd is signalled anyway.
        let _ = self.serial.wake().write(1);
    }

    /// Gives the guest as much of the held input as it takes.
    fn give_held(&mut self) {
        if self.holds.is_none() && !self.held.is_empty() {
            let room = self.serial.room().min(self.held.len());
            let bytes: Vec<u8> = self.held.drain(..room).collect();
            self.serial.receive(&bytes);
        }
    }

    /// How many bytes to read now.
    fn room(&self) -> usize {
        match self.holds {
            Some(most) if self.pollable => most.saturating_sub(self.held.len()),
            None if self.held.is_empty() => self.serial.room(),
            // Input that cannot be polled stays in its source.
            _ => 0,
        }
    }

    fn is_readable(&self) -> bool {
        let Some(input) = &self.input else { return false };
        let mut poll = Poll::default();
        poll.readable(input);
        poll.wait(Some(Duration::ZERO)).unwrap_or(false)
    }

    /// Reads once, as much as there is room for. Returns whether anything came.
    fn read(&mut self) -> bool {
        let mut bytes = [0; 64];
        let n = self.room().min(bytes.len());
        let Some(Ok(n @ 1..)) =
            self.input.as_mut().filter(|_| n > 0).map(|input| input.read(&mut bytes[..n]))
        else {
            return false;
        };
        self.press(&mut bytes, n);
        true
    }

    /// Gives typed bytes to the guest, or holds them for it.
    fn press(&mut self, bytes: &mut [u8], n: usize) {
        let (held, serial) = (&mut self.held, &self.serial);
        let quit = match self.holds {
            Some(_) => self.keys.press(bytes, n, |bytes| held.extend(bytes)),
            None => self.keys.press(bytes, n, |bytes| serial.receive(bytes)),
        };
        if quit {
            let _ = self.quit.write(1);
        }
    }

    /// Reads no more than the guest takes. The rest stays in the source.
    fn carry_input(&mut self, ops: &mut EventOps<'_>) {
        self.give_held();
        while self.input.is_some() {
            let room = self.room();
            if room == 0 {
                return self.watch_input(ops, false);
            }
            let Some(input) = &mut self.input else { return };
            let mut bytes = [0; 64];
            let n = room.min(bytes.len());
            match input.read(&mut bytes[..n]) {
                Ok(0) => return self.close_input(ops),
                Ok(n) => {
                    self.press(&mut bytes, n);
                    if self.pollable {
                        return;
                    }
                }
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) =>
                {
                    return;
                }
                // The wake-up eventfd is signalled when this process is in the terminal's
                // foreground again.
                Err(_) if terminal::is_behind() => return self.watch_input(ops, false),
                Err(_) => return self.close_input(ops),
            }
        }
    }

    fn watch_input(&mut self, ops: &mut EventOps<'_>, watch: bool) {
        let Some(input) = &self.input else { return };
        if !self.pollable || watch == self.watching_input {
            return;
        }
        let events = Events::with_data(input, INPUT, EventSet::IN);
        match if watch { ops.add(events) } else { ops.remove(events) } {
            Ok(()) => self.watching_input = watch,
            Err(_) => self.pollable = false,
        }
    }

    /// The input has ended. It leaves the event loop before the descriptor is closed.
    fn close_input(&mut self, ops: &mut EventOps<'_>) {
        self.watch_input(ops, false);
        self.input = None;
    }

    fn carry_output(&mut self, ops: &mut EventOps<'_>) {
        let waiting = !self.serial.flush();
        if let Some(next) = self.next.take() {
            if let Some(output) = self.output.take().filter(|_| self.watching_output) {
                // The descriptor was added, so it can be removed.
                let _ = ops.remove(Events::with_data(&output, OUTPUT, EventSet::OUT));
            }
            (self.output, self.watching_output) = (Some(next), false);
        }
        let Some(output) = &self.output else { return };
        if waiting == self.watching_output {
            return;
        }
        let events = Events::with_data(output, OUTPUT, EventSet::OUT);
        if (if waiting { ops.add(events) } else { ops.remove(events) }).is_ok() {
            self.watching_output = waiting;
        }
    }
}

impl MutEventSubscriber for Console {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        // An eventfd can always be watched.
        let _ = ops.add(Events::with_data(&**self.serial.wake(), WAKE, EventSet::IN));
        self.watch_input(ops, true);
        if !self.pollable {
            self.carry_input(ops);
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        match events.data() {
            WAKE => {
                let _ = self.serial.wake().read();
                self.carry_output(ops);
                self.give_held();
                if self.pollable {
                    self.watch_input(ops, true);
                } else {
                    self.carry_input(ops);
                }
            }
            OUTPUT => self.carry_output(ops),
            _ if events.event_set().intersects(EventSet::IN) => self.carry_input(ops),
            // A hang-up with nothing left to read.
            _ => self.close_input(ops),
        }
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        if self.keys.escape && !self.lent {
            terminal::restore();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn press(keys: &mut Keys, typed: &[u8]) -> (Vec<u8>, bool) {
        let (mut bytes, mut got) = (typed.to_vec(), Vec::new());
        let n = bytes.len();
        let quit = keys.press(&mut bytes, n, |b| got.extend_from_slice(b));
        (got, quit)
    }

    #[test]
    fn the_escape_key_ends_the_guest_or_sends_itself() {
        let mut keys = Keys { escape: true, pending: false };
        assert_eq!(press(&mut keys, b"ls\x01"), (b"ls".to_vec(), false));
        assert_eq!(press(&mut keys, b"x"), (vec![], true));
        assert_eq!(press(&mut keys, b"\x01\x01\x01a\x01q"), (b"\x01\x01q".to_vec(), false));
        let mut none = Keys { escape: false, pending: false };
        assert_eq!(press(&mut none, b"\x01x"), (b"\x01x".to_vec(), false));
    }

    /// A console over a pipe, and the pipe's other end.
    fn piped() -> (Arc<Serial>, Console, io::PipeWriter) {
        let (reader, writer) = io::pipe().unwrap();
        let serial = Arc::new(Serial::new(vellum_kvm::arch::fixed::Uart::default(), None).unwrap());
        let input = Some(File::from(std::os::fd::OwnedFd::from(reader)));
        let opened = Opened { output: None, input, pty: None, slave: None, file: None, raw: false };
        let quit = Arc::new(EventFd::new(0).unwrap());
        (serial.clone(), Console::new(serial, opened, quit).unwrap(), writer)
    }

    /// Reads what the guest has been given.
    fn given(serial: &Serial) -> Vec<u8> {
        let mut got = Vec::new();
        while serial.room() < 64 {
            let mut data = [0];
            super::super::bus::BusDevice::read(serial, 0, &mut data);
            got.push(data[0]);
        }
        got
    }

    #[test]
    fn what_is_typed_while_it_is_held_gets_to_the_guest_here_or_goes_along() {
        let (serial, mut console, mut writer) = piped();
        console.hold();
        io::Write::write_all(&mut writer, &[b'x'; 100]).unwrap();
        assert!(console.is_readable() && console.read() && console.read() && !console.is_readable());
        console.give_held();
        assert_eq!((console.held.len(), given(&serial)), (100, vec![]), "the guest has got it");
        console.go_on();
        let mut got = Vec::new();
        while got.len() < 100 {
            assert_eq!(console.room(), 0, "later input would overtake held input");
            console.give_held();
            got.append(&mut given(&serial));
        }
        assert_eq!(got, [b'x'; 100]);
        // Typed input that was not read yet moves too. Later input stays in the source.
        console.hold();
        io::Write::write_all(&mut writer, b"yes").unwrap();
        assert_eq!(console.take_held(), b"yes");
        io::Write::write_all(&mut writer, b"no").unwrap();
        assert!(!console.read() && console.take_held().is_empty() && given(&serial).is_empty());
        let (there, mut target, _writer) = piped();
        target.give(b"yes");
        target.give_held();
        assert_eq!(given(&there), b"yes");
        console.hold();
        let most = vec![0; 2 * MAX_HELD];
        io::Write::write_all(&mut writer, &most).unwrap();
        assert_eq!(console.take_held().len(), MAX_HELD);
    }

    #[test]
    fn input_goes_on_when_the_guest_has_made_room() {
        let (serial, console, mut writer) = piped();
        let mut manager = event_manager::EventManager::<Box<dyn MutEventSubscriber>>::new().unwrap();
        event_manager::SubscriberOps::add_subscriber(&mut manager, Box::new(console));
        let sent: Vec<u8> = (0..200).collect();
        io::Write::write_all(&mut writer, &sent).unwrap();
        drop(writer);
        let mut got = Vec::new();
        while got.len() < sent.len() {
            manager.run().unwrap();
            // The guest reads everything: the last byte wakes the loop.
            got.append(&mut given(&serial));
        }
        assert_eq!(got, sent);
    }
}
