//! The serial port: vm-superio's 16550 on a bus, its interrupt an irqfd, its output somewhere on the host ([`output`]).
//!
//! What the guest writes goes straight to the host while that cannot block; otherwise it waits until the event loop
//! ([`super::console`]) finds that it can go on, so that no reader of the output can stop a vCPU. What has waited too long is
//! lost, and counted.

mod output;

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};
use vm_superio::Trigger;
use vm_superio::serial::{Serial as Uart, SerialEvents, SerialState};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{Ending, bus::BusDevice};
use output::Output;

/// The most chunks that a vCPU writes in a row; the event loop has time for more.
const TURN: usize = 16;
/// What the receive FIFO of vm-superio holds; a saved state may not hold more.
const FIFO: usize = 64;

/// The transmit register, behind DLAB the low byte of the divisor.
const DATA: u64 = 0;

/// The line status register, and its bit of a break: the byte that is next was none, but a line that was held low (16550's data sheet).
const LSR: u64 = 5;
const BREAK: u8 = 1 << 4;
/// LCR's bit by which the data register is the divisor's.
const DLAB: u8 = 1 << 7;

/// What Linux says on its console when it panics.
const PANIC: &[u8] = b"Kernel panic - not syncing";

/// The serial port.
pub struct Serial {
    uart: Mutex<Uart<Irq, Drained, Output>>,
    /// How many bytes the guest reads before it comes to a break, if one is on its way. Locked after the port.
    brk: Mutex<Option<usize>>,
    /// How much of [`PANIC`] was said last; all of it stays so.
    said: AtomicUsize,
    irq: Arc<EventFd>,
    drained: Arc<EventFd>,
}

/// What of it outlives a migration. The registers are named as in the 16550's data sheet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    dll: u8,
    dlm: u8,
    ier: u8,
    iir: u8,
    lcr: u8,
    lsr: u8,
    mcr: u8,
    msr: u8,
    scr: u8,
    received: Vec<u8>,
    /// Which of the received bytes stands for a break.
    #[serde(default, rename = "break", skip_serializing_if = "Option::is_none")]
    brk: Option<usize>,
}

/// A saved state that no port can have had.
#[derive(Debug, thiserror::Error)]
#[error("the saved serial port has received {0} bytes, more than its FIFO holds; the file is damaged")]
pub struct RestoreError(usize);

struct Irq(Arc<EventFd>);
impl Trigger for Irq {
    type E = io::Error;
    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Tells the event loop that the receive FIFO has room again.
struct Drained(Arc<EventFd>);
impl SerialEvents for Drained {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}
    fn in_buffer_empty(&self) {
        // It can only fail by overflowing, and then it is signalled anyway.
        let _ = self.0.write(1);
    }
}

impl Serial {
    /// A port whose output goes to `output`, or nowhere.
    ///
    /// # Errors
    /// Where no eventfd can be had.
    pub fn new(output: Option<File>) -> io::Result<Self> {
        let eventfd = || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map(Arc::new);
        let (irq, drained) = (eventfd()?, eventfd()?);
        let output = Output::new(output, drained.clone());
        let uart = Uart::with_events(Irq(irq.clone()), Drained(drained.clone()), output);
        Ok(Self { uart: Mutex::new(uart), brk: Mutex::new(None), said: AtomicUsize::new(0), irq, drained })
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
        self.lock().fifo_capacity()
    }

    /// Gives `bytes`, at most [`Serial::room`], to the guest.
    pub fn receive(&self, bytes: &[u8]) {
        // The port refuses when it is full, which the caller has excluded, and an eventfd that overflows is signalled.
        let _ = self.lock().enqueue_raw_bytes(bytes);
    }

    /// Gives the guest a break, and then `key`: its kernel obeys that as one of its magic keys (Documentation/admin-guide/sysrq.rst). False
    /// where it has no room, or the guest has not come to an earlier break yet.
    pub fn send_break(&self, key: u8) -> bool {
        let mut uart = self.lock();
        let mut brk = self.brk();
        let before = FIFO - uart.fifo_capacity();
        if brk.is_some() || uart.fifo_capacity() < 2 {
            return false;
        }
        *brk = Some(before);
        drop(brk);
        // A break comes as a zero.
        let _ = uart.enqueue_raw_bytes(&[0, key]);
        true
    }

    /// Whether the guest's kernel has said that it panicked.
    pub fn has_panicked(&self) -> bool {
        self.said.load(Ordering::Relaxed) == PANIC.len()
    }

    /// The guest writes a byte. Linux's words repeat no beginning of theirs, so that a mismatch begins anew.
    fn hear(&self, byte: u8) {
        let said = self.said.load(Ordering::Relaxed);
        if said < PANIC.len() {
            let said = if PANIC[said] == byte { said + 1 } else { usize::from(PANIC[0] == byte) };
            self.said.store(said, Ordering::Relaxed);
        }
    }

    fn brk(&self) -> MutexGuard<'_, Option<usize>> {
        self.brk.lock().expect("no one panics with it")
    }

    /// Lets output go to `file` from now on, beginning with what waits.
    pub fn lead_to(&self, file: File) {
        self.lock().writer_mut().lead_to(file);
    }

    /// Writes what of the output waits, as far as that does not block; whether nothing has to wait for a reader any more.
    pub fn flush(&self) -> bool {
        self.carry(usize::MAX);
        self.lock().writer_mut().is_carried()
    }

    /// How many bytes of output nobody has read: lost, or still waiting.
    pub fn unread(&self) -> u64 {
        self.lock().writer().unread()
    }

    /// Writes so many chunks of output at most, with the port unlocked during each.
    fn carry(&self, most: usize) {
        for _ in 0..most {
            let Some(chunk) = self.lock().writer_mut().take_chunk() else { return };
            let result = chunk.write();
            if !self.lock().writer_mut().wrote(chunk, result) {
                return;
            }
        }
    }

    /// What [`Serial::restore`] needs.
    pub fn save(&self) -> State {
        let (s, brk) = {
            let uart = self.lock();
            (uart.state(), *self.brk())
        };
        State {
            dll: s.baud_divisor_low,
            dlm: s.baud_divisor_high,
            ier: s.interrupt_enable,
            iir: s.interrupt_identification,
            lcr: s.line_control,
            lsr: s.line_status,
            mcr: s.modem_control,
            msr: s.modem_status,
            scr: s.scratch,
            received: s.in_buffer,
            brk,
        }
    }

    /// Takes over what [`Serial::save`] gave, and raises the interrupt if one was pending.
    ///
    /// # Errors
    /// Where the state is not one that `save` can have given.
    pub fn restore(&self, s: State) -> Result<(), RestoreError> {
        let received = s.received.len();
        if received > FIFO || s.brk.is_some_and(|at| at >= received) {
            return Err(RestoreError(received));
        }
        let state = SerialState {
            baud_divisor_low: s.dll,
            baud_divisor_high: s.dlm,
            interrupt_enable: s.ier,
            interrupt_identification: s.iir,
            line_control: s.lcr,
            line_status: s.lsr,
            modem_control: s.mcr,
            modem_status: s.msr,
            scratch: s.scr,
            in_buffer: s.received,
        };
        let mut uart = self.lock();
        let output = std::mem::replace(uart.writer_mut(), Output::new(None, self.drained.clone()));
        *uart = Uart::from_state(&state, Irq(self.irq.clone()), Drained(self.drained.clone()), output)
            .map_err(|_| RestoreError(received))?;
        *self.brk() = s.brk;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Uart<Irq, Drained, Output>> {
        self.uart.lock().expect("no one panics while holding the serial port")
    }
}

impl BusDevice for Serial {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let mut uart = self.lock();
        data[0] = uart.read(offset as u8);
        let mut brk = self.brk();
        match (offset, *brk) {
            (LSR, Some(0)) => data[0] |= BREAK,
            // The byte was read that was next.
            (DATA, Some(before)) if uart.state().line_control & DLAB == 0 => *brk = before.checked_sub(1),
            _ => {}
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<Ending> {
        // It fails where the interrupt's eventfd overflows, and then the interrupt is pending anyway.
        let _ = self.lock().write(offset as u8, data[0]);
        if offset == DATA {
            self.hear(data[0]);
            self.carry(TURN);
            self.lock().writer_mut().tell();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn output_that_nobody_reads_waits_and_then_arrives_in_order() {
        let (mut reader, writer) = io::pipe().unwrap();
        let serial = Serial::new(Some(File::from(std::os::fd::OwnedFd::from(writer)))).unwrap();
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
        let (master, _slave, _) = crate::sys::terminal::open_pty().unwrap();
        let serial = Serial::new(Some(master)).unwrap();
        // More than a pseudo-terminal holds.
        for _ in 0..20_000 {
            serial.write(0, b"x");
        }
        assert!(!serial.flush() && serial.unread() > 0);
    }

    #[test]
    fn a_thread_that_writes_is_not_waited_for() {
        let (reader, writer) = io::pipe().unwrap();
        let serial = Serial::new(Some(File::from(std::os::fd::OwnedFd::from(writer)))).unwrap();
        serial.lock().write(0, b'a').unwrap();
        let chunk = serial.lock().writer_mut().take_chunk().unwrap();
        // Meanwhile the port is free, and what comes stays in order behind the chunk.
        serial.write(0, b"b");
        assert_eq!((serial.flush(), serial.unread()), (true, 2));
        let result = chunk.write();
        assert!(serial.lock().writer_mut().wrote(chunk, result));
        assert_eq!((serial.flush(), serial.unread()), (true, 0));
        drop(serial);
        assert_eq!(io::read_to_string(reader).unwrap(), "ab");
    }

    #[test]
    fn a_reader_that_has_gone_away_stops_nothing() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let serial = Serial::new(Some(File::from(std::os::fd::OwnedFd::from(writer)))).unwrap();
        for _ in 0..3 {
            serial.write(0, b"x");
        }
        assert!(serial.flush());
        assert_eq!(serial.unread(), 3, "every byte that nobody has read");
    }

    #[test]
    fn a_break_is_told_with_its_byte_and_with_no_other() {
        let serial = Serial::new(None).unwrap();
        let read = |serial: &Serial, offset| {
            let mut data = [0];
            serial.read(offset, &mut data);
            data[0]
        };
        serial.receive(b"ab");
        assert!(serial.send_break(b'c'));
        assert!(!serial.send_break(b'd'), "one at a time");
        assert_eq!((read(&serial, 5) & BREAK, read(&serial, 0)), (0, b'a'));
        // It moves with its port.
        let copy = Serial::new(None).unwrap();
        copy.restore(serde_json::from_str(&serde_json::to_string(&serial.save()).unwrap()).unwrap()).unwrap();
        assert_eq!((read(&copy, 5) & BREAK, read(&copy, 0)), (0, b'b'));
        assert_eq!((read(&copy, 5) & BREAK, read(&copy, 5) & BREAK, read(&copy, 0)), (BREAK, BREAK, 0));
        assert_eq!((read(&copy, 5) & BREAK, read(&copy, 0)), (0, b'c'));
        assert!(copy.send_break(b'd'));
        copy.receive(&[b'x'; 62]);
        assert!(!copy.send_break(b'e'));
        let bad = State { brk: Some(64), ..copy.save() };
        assert!(copy.restore(bad).is_err());
        // A saved port without one is as it was before there were breaks.
        assert!(!serde_json::to_string(&Serial::new(None).unwrap().save()).unwrap().contains("break"));
    }

    #[test]
    fn a_panic_is_heard() {
        let serial = Serial::new(None).unwrap();
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
        let serial = Serial::new(None).unwrap();
        serial.write(1, &[1]); // IER: received data
        serial.receive(b"ab");
        serial.irq().read().unwrap();
        serial.write(7, &[0x5a]);
        let copy = Serial::new(None).unwrap();
        copy.restore(serial.save()).unwrap();
        assert!(copy.irq().read().is_ok(), "the pending interrupt is lost");
        let read = |offset| {
            let mut data = [0];
            copy.read(offset, &mut data);
            data[0]
        };
        assert_eq!((read(7), read(0), read(0), read(5) & 1), (0x5a, b'a', b'b', 0));
        assert!(copy.wake().read().is_ok(), "nobody is told that there is room");
        let full = State { received: vec![0; 65], ..serial.save() };
        assert!(copy.restore(full).is_err());
    }
}
