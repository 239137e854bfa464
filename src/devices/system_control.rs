//! A PC's system control port B. Only reads are implemented. With the in-kernel PIT, KVM answers
//! the port itself.

use super::{Ending, bus::BusDevice};

/// Timer 2's output is high (Intel ICH9 datasheet, 13.7.1), so a guest that polls it for a
/// countdown continues. SERR# and IOCHK#, bits 7 and 6, are clear: a kernel looks there for the
/// cause of an NMI, and this board reports none.
const STATUS: u8 = 1 << 5;

/// The port. It holds no state.
pub struct SystemControl;

impl BusDevice for SystemControl {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(STATUS);
    }

    fn write(&self, _offset: u64, _data: &[u8]) -> Option<Ending> {
        None
    }
}
