//! A PC's system control port B, of which only the reading is left. With the in-kernel PIT KVM answers it itself.

use super::{Ending, bus::BusDevice};

/// Timer 2's output is high (Intel ICH9 datasheet, 13.7.1): whoever counts down by it goes on. SERR# and IOCHK#, bits 7 and 6, are clear, for
/// a kernel looks there for the reason of a non-maskable interrupt, and this board has none to tell.
const STATUS: u8 = 1 << 5;

/// The port.
pub struct SystemControl;

impl BusDevice for SystemControl {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(STATUS);
    }

    fn write(&self, _offset: u64, _data: &[u8]) -> Option<Ending> {
        None
    }
}
