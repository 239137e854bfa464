//! pvpanic (QEMU's docs/specs/pvpanic.rst): by one port a guest says that its kernel has panicked.

use super::{Ending, bus::BusDevice};

/// The kernel has panicked.
const PANICKED: u8 = 1;
/// The kernel has panicked and hands over to a crash kernel, which is to be left alone.
const CRASH_LOADED: u8 = 1 << 1;

/// The device.
pub struct PvPanic;

impl BusDevice for PvPanic {
    /// The events that are understood.
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
        data[0] = PANICKED | CRASH_LOADED;
    }

    fn write(&self, _offset: u64, data: &[u8]) -> Option<Ending> {
        (data[0] & PANICKED != 0).then_some(Ending::Panic)
    }
}

#[test]
fn a_crash_kernel_may_run() {
    let write = |byte| PvPanic.write(0, &[byte]);
    assert_eq!((write(PANICKED), write(CRASH_LOADED)), (Some(Ending::Panic), None));
}
