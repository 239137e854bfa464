//! The keyboard controller, of which only the reset line is left.
//!
//! vm-superio has one too, which signals through an object of its own; here a write's answer says it.

use super::{Ending, bus::BusDevice};
use vellum_kvm::arch::fixed::I8042_RESET;

/// The controller: no keyboard, no mouse, its buffers always empty.
pub struct I8042;

impl BusDevice for I8042 {
    /// The status: input buffer empty, so that whoever waits for it goes on.
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
