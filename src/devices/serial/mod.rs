//! The serial port: a 16550 ([`ns16550`]) or a PL011 ([`pl011`]) on a bus. Its interrupt is an
//! irqfd, its output goes to the host ([`output`]).
//!
//! A guest's write goes directly to the host while that cannot block. Otherwise it waits until the
//! event loop ([`super::console`]) finds the output writable, so a slow reader cannot stop a vCPU.
//! Output beyond the backlog is lost and counted.

pub mod ns16550;
mod output;
pub mod pl011;

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{Ending, bus::BusDevice};
use ns16550::Ns16550;
use output::Output;
use pl011::Pl011;
use vellum_kvm::arch::fixed::Uart;

/// The maximum number of chunks that a vCPU writes in a row. The event loop writes the rest.
const TURN: usize = 16;
/// The size of the receive FIFO, of vm-superio's 16550 and of the PL011. A saved state may not hold
/// more.
const FIFO: usize = 64;

/// The start of Linux's panic message on the console.
const PANIC: &[u8] = b"Kernel panic - not syncing";

/// The serial port.
pub struct Serial {
    registers: Mutex<Registers>,
    /// How many bytes of [`PANIC`] the output has just matched. A full match stays.
    said: AtomicUsize,
    /// Whether the guest has written a byte since this was made.
    heard: AtomicBool,
    irq: Arc<EventFd>,
    drained: Arc<EventFd>,
}

enum Registers {
    Ns16550(Ns16550),
    Pl011(Pl011),
}

/// The state that a migration carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// A 16550's state.
    Ns16550(ns16550::State),
    /// A PL011's state.
    Pl011(pl011::State),
}

/// A saved state that cannot be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// More received bytes than the FIFO holds, or a break outside them.
    #[error("the saved serial port has received {0} bytes and does not fit its FIFO; the file is damaged")]
    Received(usize),
    /// The state is of the other kind of port.
    #[error("the saved serial port is of the other kind; start with that kind")]
    Other,
}

/// The number of bytes a saved port has received. An error if they exceed the FIFO or its break
/// lies beyond them.
fn fits(received: &[u8], brk: Option<usize>) -> Result<usize, RestoreError> {
    let count = received.len();
    match count > FIFO || brk.is_some_and(|at| at >= count) {
        true => Err(RestoreError::Received(count)),
        false => Ok(count),
    }
}

impl Serial {
    /// A port of this kind with output to `output`, or nowhere.
    ///
    /// # Errors
    /// No eventfd can be created.
    pub fn new(kind: Uart, output: Option<File>) -> io::Result<Self> {
        let eventfd = || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map(Arc::new);
        let (irq, drained) = (eventfd()?, eventfd()?);
        let output = Output::new(output, drained.clone());
        let registers = match kind {
            Uart::Ns16550 => Registers::Ns16550(Ns16550::new(irq.clone(), drained.clone(), output)),
            Uart::Pl011 => Registers::Pl011(Pl011::new(irq.clone(), drained.clone(), output)),
        };
        Ok(Self {
            registers: Mutex::new(registers),
            said: AtomicUsize::new(0),
            heard: AtomicBool::new(false),
            irq,
            drained,
        })
    }

    /// The kind of port.
    pub fn kind(&self) -> Uart {
        match &*self.lock() {
            Registers::Ns16550(_) => Uart::Ns16550,
            Registers::Pl011(_) => Uart::Pl011,
        }
    }

    /// The interrupt, for `KVM_IRQFD`: edge triggered.
    pub fn irq(&self) -> &Arc<EventFd> {
        &self.irq
    }

    /// Readable when the receive FIFO has become empty, or when output has begun to wait.
    pub fn wake(&self) -> &Arc<EventFd> {
        &self.drained
    }

    /// How many bytes the receive FIFO takes now.
    pub fn room(&self) -> usize {
        match &*self.lock() {
            Registers::Ns16550(port) => port.room(),
            Registers::Pl011(port) => port.room(),
        }
    }

    /// Gives `bytes`, at most [`Serial::room`], to the guest.
    pub fn receive(&self, bytes: &[u8]) {
        match &mut *self.lock() {
            Registers::Ns16550(port) => port.receive(bytes),
            Registers::Pl011(port) => port.receive(bytes),
        }
    }

    /// Gives the guest a break followed by `key`. Linux takes that as a magic SysRq key
    /// (Documentation/admin-guide/sysrq.rst). Returns false if the FIFO has no room or the guest
    /// has not read an earlier break.
    pub fn send_break(&self, key: u8) -> bool {
        match &mut *self.lock() {
            Registers::Ns16550(port) => port.send_break(key),
            Registers::Pl011(port) => port.send_break(key),
        }
    }

    /// Whether the guest's kernel has reported a panic on the port.
    pub fn has_panicked(&self) -> bool {
        self.said.load(Ordering::Relaxed) == PANIC.len()
    }

    /// Whether the guest has not written a byte yet to output that leads somewhere.
    pub fn is_silent(&self) -> bool {
        !self.heard.load(Ordering::Relaxed) && self.lock().output().leads_somewhere()
    }

    /// Matches a byte of output against [`PANIC`]. Only the first letter of [`PANIC`] can start a
    /// match after a mismatch, because no proper prefix recurs within it.
    fn hear(&self, byte: u8) {
        self.heard.store(true, Ordering::Relaxed);
        let said = self.said.load(Ordering::Relaxed);
        if said < PANIC.len() {
            let said = if PANIC[said] == byte { said + 1 } else { usize::from(PANIC[0] == byte) };
            self.said.store(said, Ordering::Relaxed);
        }
    }

    /// Redirects output to `file`, beginning with what waits.
    pub fn lead_to(&self, file: File) {
        self.lock().output().lead_to(file);
    }

    /// Writes waiting output as far as that does not block. Returns whether no output waits for a
    /// reader any more.
    pub fn flush(&self) -> bool {
        self.carry(usize::MAX);
        self.lock().output().is_carried()
    }

    /// Bytes of output without a reader: lost, or still waiting.
    pub fn unread(&self) -> u64 {
        self.lock().output().unread()
    }

    /// Bytes of output that its file did not take.
    pub fn unwritten(&self) -> u64 {
        self.lock().output().unwritten()
    }

    /// Writes at most this many chunks of output. The port is unlocked during each.
    fn carry(&self, most: usize) {
        for _ in 0..most {
            let Some(chunk) = self.lock().output().take_chunk() else { return };
            let result = chunk.write();
            if !self.lock().output().wrote(chunk, result) {
                return;
            }
        }
    }

    /// Saves the state for [`Serial::restore`].
    pub fn save(&self) -> State {
        match &*self.lock() {
            Registers::Ns16550(port) => State::Ns16550(port.save()),
            Registers::Pl011(port) => State::Pl011(port.save()),
        }
    }

    /// Restores what [`Serial::save`] returned, and raises the interrupt if one was pending.
    ///
    /// # Errors
    /// The state is of the other kind or does not fit the FIFO.
    pub fn restore(&self, state: State) -> Result<(), RestoreError> {
        let mut registers = self.lock();
        let nowhere = Output::new(None, self.drained.clone());
        let output = std::mem::replace(registers.output(), nowhere);
        let (irq, drained) = (self.irq.clone(), self.drained.clone());
        *registers = match (&*registers, state) {
            (Registers::Ns16550(_), State::Ns16550(state)) => {
                Registers::Ns16550(Ns16550::restored(state, irq, drained, output)?)
            }
            (Registers::Pl011(_), State::Pl011(state)) => {
                Registers::Pl011(Pl011::restored(state, irq, drained, output)?)
            }
            _ => return Err(RestoreError::Other),
        };
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Registers> {
        self.registers.lock().expect("no one panics while holding the serial port")
    }
}

impl Registers {
    fn output(&mut self) -> &mut Output {
        match self {
            Self::Ns16550(port) => port.output(),
            Self::Pl011(port) => port.output(),
        }
    }
}

impl BusDevice for Serial {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match &mut *self.lock() {
            Registers::Ns16550(port) => port.read(offset, data),
            Registers::Pl011(port) => port.read(offset, data),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<Ending> {
        let sent = match &mut *self.lock() {
            Registers::Ns16550(port) => port.write(offset, data),
            Registers::Pl011(port) => port.write(offset, data),
        };
        if let Some(byte) = sent {
            self.hear(byte);
            self.carry(TURN);
            self.lock().output().tell();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use rustix::fs::{CWD, MemfdFlags, Mode, SealFlags, fcntl_add_seals, memfd_create, mkfifoat};

    use super::*;

    fn port(output: Option<File>) -> io::Result<Serial> {
        Serial::new(Uart::Ns16550, output)
    }

    #[test]
    fn output_that_nobody_reads_waits_and_then_arrives_in_order() {
        let (mut reader, writer) = io::pipe().unwrap();
        let serial = port(Some(File::from(std::os::fd::OwnedFd::from(writer)))).unwrap();
        // More than a pipe holds (64 KiB).
        let sent: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
        for byte in &sent {
            serial.write(0, &[*byte]);
        }
        assert!(!serial.flush());
        serial.wake().read().unwrap();
        let mut got = Vec::new();
        while !serial.flush() {
            let mut part = [0; 4096];
            let n = reader.read(&mut part).unwrap();
            got.extend(&part[..n]);
        }
        let lost = serial.unread();
        drop(serial);
        reader.read_to_end(&mut got).unwrap();
        assert!(got == sent, "{} bytes of {} arrived", got.len(), sent.len());
        assert_eq!(lost, 0);
    }

    #[test]
    fn output_to_a_terminal_that_is_full_waits_without_blocking() {
        let (master, _slave, _) = vellum_sys::terminal::open_pty().unwrap();
        let serial = port(Some(master)).unwrap();
        // More than a pseudo-terminal holds.
        for _ in 0..20_000 {
            serial.write(0, b"x");
        }
        assert!(!serial.flush() && serial.unread() > 0);
    }

    #[test]
    fn a_thread_that_writes_is_not_waited_for() {
        let (reader, writer) = io::pipe().unwrap();
        let serial = port(Some(File::from(std::os::fd::OwnedFd::from(writer)))).unwrap();
        serial.lock().output().write_all(b"a").unwrap();
        let chunk = serial.lock().output().take_chunk().unwrap();
        // Meanwhile the port is unlocked, and later output stays in order behind the chunk.
        serial.write(0, b"b");
        assert_eq!((serial.flush(), serial.unread()), (true, 2));
        let result = chunk.write();
        assert!(serial.lock().output().wrote(chunk, result));
        assert_eq!((serial.flush(), serial.unread()), (true, 0));
        drop(serial);
        assert_eq!(io::read_to_string(reader).unwrap(), "ab");
    }

    #[test]
    fn a_reader_that_has_gone_away_stops_nothing() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let serial = port(Some(File::from(std::os::fd::OwnedFd::from(writer)))).unwrap();
        for _ in 0..3 {
            serial.write(0, b"x");
        }
        assert!(serial.flush());
        assert_eq!(serial.unread(), 3, "every byte without a reader");
    }

    #[test]
    fn output_to_a_fifo_goes_on_when_it_is_read_again() {
        use vellum_sys::open::{Kind, for_reading, open};
        let path = std::env::temp_dir().join(format!("vellum-serial-fifo-{}", std::process::id()));
        mkfifoat(CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
        let mut first = for_reading(&path, Kind::Input).unwrap();
        let serial = port(Some(open(&path, File::options().append(true), Kind::Output).unwrap())).unwrap();
        let say = |text: &str| text.bytes().for_each(|byte| assert!(serial.write(0, &[byte]).is_none()));
        say("one");
        let mut got = [0; 3];
        first.read_exact(&mut got).unwrap();
        drop(first);
        say("lost");
        assert_eq!((&got, serial.flush(), serial.unread()), (b"one", true, 4));
        let mut second = for_reading(&path, Kind::Input).unwrap();
        say("two");
        second.read_exact(&mut got).unwrap();
        assert_eq!((&got, serial.flush(), serial.unread()), (b"two", true, 4));
        std::fs::remove_file(path).unwrap();
    }

    /// A memfd with a sealed size stands in for a file on a full disk.
    #[test]
    fn output_goes_on_when_its_disk_has_room_again() {
        use std::io::{Seek, SeekFrom};
        let file = File::from(memfd_create("full", MemfdFlags::ALLOW_SEALING).unwrap());
        file.set_len(4).unwrap();
        fcntl_add_seals(&file, SealFlags::GROW).unwrap();
        let mut position = file.try_clone().unwrap();
        position.seek(SeekFrom::End(0)).unwrap();
        let serial = port(Some(file)).unwrap();
        for _ in 0..5 {
            serial.write(0, b"x");
        }
        assert!(serial.flush(), "lost output does not wait");
        assert_eq!((serial.unread(), serial.unwritten()), (0, 5));
        // There is room again.
        position.rewind().unwrap();
        serial.write(0, b"a");
        serial.write(0, b"b");
        assert_eq!((serial.flush(), serial.unread(), serial.unwritten()), (true, 0, 5));
        position.rewind().unwrap();
        let mut content = [0; 4];
        position.read_exact(&mut content).unwrap();
        assert_eq!(&content, b"ab\0\0");
    }

    #[test]
    fn a_panic_is_heard() {
        for kind in [Uart::Ns16550, Uart::Pl011] {
            hears_a_panic(&Serial::new(kind, None).unwrap());
        }
    }

    fn hears_a_panic(serial: &Serial) {
        let say = |text: &str| text.bytes().for_each(|byte| assert!(serial.write(0, &[byte]).is_none()));
        say("KKernel panic - not synKernel panic - not syncin\n");
        assert!(!serial.has_panicked());
        say("[ 1.0] KKernel panic - not syncing: VFS\n");
        assert!(serial.has_panicked());
        say("x");
        assert!(serial.has_panicked());
    }

    #[test]
    fn received_bytes_and_registers_survive_saving_and_raise_their_interrupt_again() {
        let serial = port(None).unwrap();
        serial.write(1, &[1]); // IER: received data
        serial.receive(b"ab");
        serial.irq().read().unwrap();
        serial.write(7, &[0x5a]);
        let copy = port(None).unwrap();
        copy.restore(serial.save()).unwrap();
        assert!(copy.irq().read().is_ok(), "the pending interrupt is lost");
        let read = |offset| {
            let mut data = [0];
            copy.read(offset, &mut data);
            data[0]
        };
        assert_eq!((read(7), read(0), read(0), read(5) & 1), (0x5a, b'a', b'b', 0));
        assert!(copy.wake().read().is_ok(), "no wake-up for free room");
        let other = Serial::new(Uart::Pl011, None).unwrap();
        assert!(matches!(other.restore(serial.save()), Err(RestoreError::Other)));
    }
}
