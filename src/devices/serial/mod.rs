//! The serial port: vm-superio's 16550 on a bus, its interrupt an irqfd, its output somewhere on the host ([`output`]).
//!
//! What the guest writes goes straight to the host while that cannot block; otherwise it waits until the event loop
//! ([`super::console`]) finds that it can go on, so that no reader of the output can stop a vCPU. What has waited too long is
//! lost, and counted.

mod output;

use std::fs::File;
use std::io;
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

/// The serial port.
pub struct Serial {
    uart: Mutex<Uart<Irq, Drained, Output>>,
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
        Ok(Self { uart: Mutex::new(uart), irq, drained })
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
        let s = self.lock().state();
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
        }
    }

    /// Takes over what [`Serial::save`] gave, and raises the interrupt if one was pending.
    ///
    /// # Errors
    /// Where the state is not one that `save` can have given.
    pub fn restore(&self, s: State) -> Result<(), RestoreError> {
        let received = s.received.len();
        if received > FIFO {
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
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Uart<Irq, Drained, Output>> {
        self.uart.lock().expect("no one panics while holding the serial port")
    }
}

impl BusDevice for Serial {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        data[0] = self.lock().read(offset as u8);
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<Ending> {
        // It fails where the interrupt's eventfd overflows, and then the interrupt is pending anyway.
        let _ = self.lock().write(offset as u8, data[0]);
        if offset == DATA {
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
