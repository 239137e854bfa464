//! The keyboard controller, reduced to its reset line.
//!
//! vm-superio's i8042 signals a reset through an object of its own. Here the write itself returns
//! it.

use super::{Ending, bus::BusDevice};
use vellum_kvm::arch::fixed::I8042_RESET;

/// The controller. It has no keyboard and no mouse, and its buffers are always empty.
pub struct I8042;

impl BusDevice for I8042 {
    /// Status: the input buffer is empty, so a guest that polls it continues.
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u64, data: &[u8]) -> Option<Ending> {
        (data[0] == I8042_RESET).then_some(Ending::Reset)
    }
}

#[test]
fn only_the_reset_command_resets() {
    assert_eq!((I8042.write(0, &[I8042_RESET]), I8042.write(0, &[0xff])), (Some(Ending::Reset), None));
}
