//! The 16550 (data sheet PC16550D): vm-superio's registers, with a break added.

use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vm_superio::Trigger;
use vm_superio::serial::{Serial, SerialEvents, SerialState};
use vmm_sys_util::eventfd::EventFd;

use super::output::Output;
use super::{FIFO, RestoreError, fits};

/// The transmit and receive register. With DLAB set it is the low byte of the divisor.
const DATA: u64 = 0;
/// The line status register. Its break bit says that the next byte stands for a line held low.
const LSR: u64 = 5;
const BREAK: u8 = 1 << 4;
/// LCR's divisor latch access bit: the data register becomes the divisor.
const DLAB: u8 = 1 << 7;
/// The number of registers, one byte each.
const REGISTERS: u64 = 8;

/// The port's registers.
pub struct Ns16550 {
    uart: Serial<Irq, Drained, Output>,
    /// How many bytes the guest reads before the break, if one is on its way.
    brk: Option<usize>,
}

/// The state that a migration carries. Registers have the data sheet's names.
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
    /// The index of the received byte that stands for a break.
    #[serde(default, rename = "break", skip_serializing_if = "Option::is_none")]
    brk: Option<usize>,
}

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
        // The write can only fail on overflow, and then the eventfd is signalled anyway.
        let _ = self.0.write(1);
    }
}

impl Ns16550 {
    /// A port in its reset state.
    pub(super) fn new(irq: Arc<EventFd>, drained: Arc<EventFd>, output: Output) -> Self {
        Self { uart: Serial::with_events(Irq(irq), Drained(drained), output), brk: None }
    }

    pub(super) fn output(&mut self) -> &mut Output {
        self.uart.writer_mut()
    }

    pub(super) fn room(&self) -> usize {
        self.uart.fifo_capacity()
    }

    pub(super) fn receive(&mut self, bytes: &[u8]) {
        // The port refuses only when it is full, and the caller respects its room. If the eventfd
        // overflows, it is signalled anyway.
        let _ = self.uart.enqueue_raw_bytes(bytes);
    }

    pub(super) fn send_break(&mut self, key: u8) -> bool {
        if self.brk.is_some() || self.room() < 2 {
            return false;
        }
        self.brk = Some(FIFO - self.room());
        // A break is received as a zero byte.
        self.receive(&[0, key]);
        true
    }

    pub(super) fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if offset >= REGISTERS {
            return;
        }
        data[0] = self.uart.read(offset as u8);
        match (offset, self.brk) {
            (LSR, Some(0)) => data[0] |= BREAK,
            // The guest has read the next byte.
            (DATA, Some(before)) if self.uart.state().line_control & DLAB == 0 => {
                self.brk = before.checked_sub(1);
            }
            _ => {}
        }
    }

    /// Returns the byte that goes out, if any.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Option<u8> {
        if offset >= REGISTERS {
            return None;
        }
        // This fails only if the interrupt's eventfd overflows, and then the interrupt is pending
        // anyway.
        let _ = self.uart.write(offset as u8, data[0]);
        (offset == DATA).then_some(data[0])
    }

    pub(super) fn save(&self) -> State {
        let s = self.uart.state();
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
            brk: self.brk,
        }
    }

    /// A port in this state. Its interrupt is raised if one was pending.
    pub(super) fn restored(
        s: State,
        irq: Arc<EventFd>,
        drained: Arc<EventFd>,
        output: Output,
    ) -> Result<Self, RestoreError> {
        let received = fits(&s.received, s.brk)?;
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
        let uart = Serial::from_state(&state, Irq(irq), Drained(drained), output)
            .map_err(|_| RestoreError::Received(received))?;
        Ok(Self { uart, brk: s.brk })
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    fn port(state: Option<State>) -> Result<Ns16550, RestoreError> {
        let event = || Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let (irq, drained) = (event(), event());
        let output = Output::new(None, drained.clone());
        match state {
            Some(state) => Ns16550::restored(state, irq, drained, output),
            None => Ok(Ns16550::new(irq, drained, output)),
        }
    }

    fn read(port: &mut Ns16550, offset: u64) -> u8 {
        let mut data = [0];
        port.read(offset, &mut data);
        data[0]
    }

    #[test]
    fn a_break_is_told_with_its_byte_and_with_no_other() {
        let mut first = port(None).unwrap();
        first.receive(b"ab");
        assert!(first.send_break(b'c'));
        assert!(!first.send_break(b'd'), "one at a time");
        assert_eq!((read(&mut first, LSR) & BREAK, read(&mut first, DATA)), (0, b'a'));
        // A break is part of the saved state.
        let state = serde_json::from_str(&serde_json::to_string(&first.save()).unwrap()).unwrap();
        let mut copy = port(Some(state)).unwrap();
        let next = |port: &mut _| (read(port, LSR) & BREAK, read(port, LSR) & BREAK, read(port, DATA));
        assert_eq!(next(&mut copy), (0, 0, b'b'));
        assert_eq!(next(&mut copy), (BREAK, BREAK, 0));
        assert_eq!(next(&mut copy), (0, 0, b'c'));
        assert!(copy.send_break(b'd'));
        copy.receive(&[b'x'; 62]);
        assert!(!copy.send_break(b'e'));
        assert!(port(Some(State { brk: Some(FIFO), ..copy.save() })).is_err());
        assert!(port(Some(State { received: vec![0; FIFO + 1], ..copy.save() })).is_err());
        // A saved port without a break has the format of versions before breaks.
        assert!(!serde_json::to_string(&port(None).unwrap().save()).unwrap().contains("break"));
    }

    #[test]
    fn beside_its_registers_there_is_nothing() {
        let mut port = port(None).unwrap();
        port.receive(b"a");
        assert_eq!(port.write(0x100, b"x"), None);
        assert_eq!((read(&mut port, 0x100), read(&mut port, DATA)), (0, b'a'));
    }
}
