//! The PL011 (Arm DDI 0183), the serial port of Arm boards.
//!
//! A transmitted byte leaves at once, so the transmit FIFO is always empty. The line has no speed,
//! no errors and no modem. The interrupt is an edge here. It is signalled when an unmasked source
//! becomes active, and again for each further source.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use super::output::Output;
use super::{FIFO, RestoreError, fits};

/// Data register. A received break sets the break and framing error bits.
const DR: u64 = 0x00;
const DR_BREAK: u32 = 1 << 10 | 1 << 8;
/// Receive status: the errors of the last byte read. A write clears them.
const RSR: u64 = 0x04;
/// Flags: receive FIFO empty, receive FIFO full, transmit FIFO empty, and the modem lines, which
/// say that a modem is present.
const FR: u64 = 0x18;
const FR_NOTHING: u32 = 1 << 4;
const FR_FULL: u32 = 1 << 6;
const FR_SENT: u32 = 1 << 7;
const FR_MODEM: u32 = 0b111;
/// Registers that only store what is written: low power, divisors, line control, control, FIFO
/// levels, DMA.
const ILPR: u64 = 0x20;
const IBRD: u64 = 0x24;
const FBRD: u64 = 0x28;
const LCR_H: u64 = 0x2c;
const CR: u64 = 0x30;
const IFLS: u64 = 0x34;
const DMACR: u64 = 0x48;
/// Their implemented bits.
const KEPT: [(u64, u16); 7] =
    [(ILPR, 0xff), (IBRD, 0xffff), (FBRD, 0x3f), (LCR_H, 0xff), (CR, 0xff87), (IFLS, 0x3f), (DMACR, 0x7)];
/// Reset values. CR: receive and transmit enabled, UART disabled. IFLS: half full.
const RESET: [u16; KEPT.len()] = [0, 0, 0, 0, 0x300, 0x12, 0];
/// Interrupt registers: mask (a set bit enables), raw status, masked status, clear.
const IMSC: u64 = 0x38;
const RIS: u64 = 0x3c;
const MIS: u64 = 0x40;
const ICR: u64 = 0x44;
/// Interrupt sources: receive, transmit, receive timeout, break.
const RECEIVED: u16 = 1 << 4;
const SENT: u16 = 1 << 5;
const WAITS: u16 = 1 << 6;
const BROKEN: u16 = 1 << 9;
const SOURCES: u16 = 0x7ff;
/// UARTPeriphID0 to 3 and UARTPCellID0 to 3. Drivers identify a PL011 of revision r1p5 by them.
const IDENTITY: u64 = 0xfe0;
const IDENTITIES: [u8; 8] = [0x11, 0x10, 0x34, 0x00, 0x0d, 0xf0, 0x05, 0xb1];

/// The port's registers.
pub struct Pl011 {
    irq: Arc<EventFd>,
    drained: Arc<EventFd>,
    output: Output,
    received: VecDeque<u8>,
    /// The index of the received byte that stands for a break, if one is on its way.
    brk: Option<usize>,
    kept: [u16; KEPT.len()],
    mask: u16,
    /// Active sources, masked or not: the raw interrupt status.
    asking: u16,
    /// The last byte read was a break.
    was_break: bool,
}

/// The state that a migration carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    received: Vec<u8>,
    #[serde(default, rename = "break", skip_serializing_if = "Option::is_none")]
    brk: Option<usize>,
    /// ILPR, IBRD, FBRD, LCR_H, CR, IFLS, DMACR.
    kept: [u16; KEPT.len()],
    imsc: u16,
    ris: u16,
    was_break: bool,
}

impl Pl011 {
    /// A port in its reset state.
    pub(super) fn new(irq: Arc<EventFd>, drained: Arc<EventFd>, output: Output) -> Self {
        let (received, brk, kept) = (VecDeque::with_capacity(FIFO), None, RESET);
        Self { irq, drained, output, received, brk, kept, mask: 0, asking: 0, was_break: false }
    }

    pub(super) fn output(&mut self) -> &mut Output {
        &mut self.output
    }

    pub(super) fn room(&self) -> usize {
        FIFO - self.received.len()
    }

    pub(super) fn receive(&mut self, bytes: &[u8]) {
        self.received.extend(bytes.iter().take(FIFO - self.received.len()));
        self.ask(RECEIVED | WAITS);
    }

    pub(super) fn send_break(&mut self, key: u8) -> bool {
        if self.brk.is_some() || self.room() < 2 {
            return false;
        }
        self.brk = Some(self.received.len());
        self.receive(&[0, key]);
        self.ask(BROKEN);
        true
    }

    /// Activates these sources.
    fn ask(&mut self, sources: u16) {
        let before = self.asking & self.mask;
        self.asking |= sources;
        self.signal(before);
    }

    /// Signals the interrupt if an unmasked source is active that was not in `before`.
    fn signal(&self, before: u16) {
        if self.asking & self.mask & !before != 0 {
            // The write can only fail on overflow, and then the eventfd is signalled anyway.
            let _ = self.irq.write(1);
        }
    }

    fn take(&mut self) -> u32 {
        let Some(byte) = self.received.pop_front() else { return 0 };
        self.was_break = self.brk == Some(0);
        self.brk = self.brk.and_then(|before| before.checked_sub(1));
        if self.received.is_empty() {
            self.asking &= !(RECEIVED | WAITS);
            let _ = self.drained.write(1);
        }
        u32::from(byte) | if self.was_break { DR_BREAK } else { 0 }
    }

    pub(super) fn read(&mut self, offset: u64, data: &mut [u8]) {
        let value = match offset {
            DR => self.take(),
            RSR => u32::from(self.was_break) * (DR_BREAK >> 8),
            FR => {
                let received = match self.received.len() {
                    0 => FR_NOTHING,
                    FIFO => FR_FULL,
                    _ => 0,
                };
                received | FR_SENT | FR_MODEM
            }
            IMSC => self.mask.into(),
            RIS => self.asking.into(),
            MIS => (self.asking & self.mask).into(),
            IDENTITY..0x1000 => IDENTITIES[(offset - IDENTITY) as usize / 4].into(),
            offset => KEPT.iter().position(|(at, _)| *at == offset).map_or(0, |at| self.kept[at].into()),
        };
        data.fill(0);
        data.iter_mut().zip(value.to_le_bytes()).for_each(|(to, from)| *to = from);
    }

    /// Returns the byte that goes out, if any. Drivers write 8, 16 and 32 bits.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Option<u8> {
        let value = u16::from_le_bytes([data[0], data.get(1).copied().unwrap_or(0)]);
        match offset {
            DR => {
                // The output takes every byte, or counts it as lost.
                let _ = self.output.write(&data[..1]);
                self.ask(SENT);
                return Some(data[0]);
            }
            RSR => self.was_break = false,
            IMSC => {
                let before = self.asking & self.mask;
                self.mask = value & SOURCES;
                self.signal(before);
            }
            ICR => self.asking &= !value,
            offset => {
                if let Some(at) = KEPT.iter().position(|(at, _)| *at == offset) {
                    self.kept[at] = value & KEPT[at].1;
                }
            }
        }
        None
    }

    pub(super) fn save(&self) -> State {
        State {
            received: self.received.iter().copied().collect(),
            brk: self.brk,
            kept: self.kept,
            imsc: self.mask,
            ris: self.asking,
            was_break: self.was_break,
        }
    }

    /// A port in this state. Its interrupt is raised if one was pending.
    pub(super) fn restored(
        s: State,
        irq: Arc<EventFd>,
        drained: Arc<EventFd>,
        output: Output,
    ) -> Result<Self, RestoreError> {
        fits(&s.received, s.brk)?;
        let mut kept = s.kept;
        kept.iter_mut().zip(KEPT).for_each(|(value, (_, bits))| *value &= bits);
        let port = Self {
            received: s.received.into(),
            brk: s.brk,
            kept,
            mask: s.imsc & SOURCES,
            asking: s.ris & SOURCES,
            was_break: s.was_break,
            ..Self::new(irq, drained, output)
        };
        port.signal(0);
        Ok(port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port() -> Pl011 {
        let event = || Arc::new(EventFd::new(libc::EFD_NONBLOCK).unwrap());
        let (irq, drained) = (event(), event());
        Pl011::new(irq, drained.clone(), Output::new(None, drained))
    }

    fn read(port: &mut Pl011, offset: u64) -> u32 {
        let mut data = [0xff; 4];
        port.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn interrupts(port: &Pl011) -> u64 {
        port.irq.read().unwrap_or(0)
    }

    #[test]
    fn an_interrupt_comes_for_what_is_let_through_and_no_more() {
        let mut port = port();
        assert_eq!((read(&mut port, 0xfe0), read(&mut port, 0xffc)), (0x11, 0xb1));
        port.receive(b"ab");
        assert_eq!((interrupts(&port), read(&mut port, MIS)), (0, 0), "all is masked");
        port.write(IMSC, &(RECEIVED | WAITS).to_le_bytes());
        assert_eq!(interrupts(&port), 1);
        port.receive(b"c");
        assert_eq!(interrupts(&port), 0, "the sources ask already");
        let said: Vec<u32> = (0..3).map(|_| read(&mut port, DR)).collect();
        assert_eq!(said, [0x61, 0x62, 0x63]);
        assert_eq!((read(&mut port, RIS), read(&mut port, FR) & FR_NOTHING), (0, FR_NOTHING));
        assert_eq!(port.drained.read().unwrap(), 1);
        port.receive(b"d");
        assert_eq!(interrupts(&port), 1);
        // A driver with more to send waits for the transmit interrupt.
        assert_eq!(port.write(DR, b"x"), Some(b'x'));
        port.write(IMSC, &SENT.to_le_bytes());
        assert_eq!((interrupts(&port), read(&mut port, MIS)), (1, SENT.into()));
        port.write(ICR, &SENT.to_le_bytes());
        assert_eq!(read(&mut port, MIS), 0);
    }

    #[test]
    fn a_break_comes_before_its_key_and_the_state_is_taken_along() {
        let mut port = port();
        port.receive(b"a");
        assert!(port.send_break(b't') && !port.send_break(b'u'));
        port.write(IMSC, &RECEIVED.to_le_bytes());
        port.write(CR, &0xffffu16.to_le_bytes());
        let state = port.save();
        let (irq, drained) = (port.irq.clone(), port.drained.clone());
        assert_eq!(interrupts(&port), 1);
        let mut port =
            Pl011::restored(state.clone(), irq, drained.clone(), Output::new(None, drained)).unwrap();
        assert_eq!((interrupts(&port), port.save()), (1, state), "pending interrupts are raised again");
        assert_eq!(read(&mut port, CR), 0xff87);
        assert_eq!((read(&mut port, DR), read(&mut port, RSR)), (0x61, 0));
        assert_eq!((read(&mut port, DR), read(&mut port, RSR)), (DR_BREAK, DR_BREAK >> 8));
        assert_eq!(read(&mut port, DR), u32::from(b't'));
        let bad = State { received: vec![0; FIFO + 1], ..port.save() };
        let event = || port.irq.clone();
        assert!(Pl011::restored(bad, event(), event(), Output::new(None, event())).is_err());
    }
}
