//! pvpanic (QEMU's docs/specs/pvpanic.rst): the guest reports a kernel panic through one port.

use super::{Ending, bus::BusDevice};

/// The kernel has panicked.
const PANICKED: u8 = 1;
/// The kernel has panicked and starts a crash kernel. The machine must continue.
const CRASH_LOADED: u8 = 1 << 1;

/// The device. It holds no state.
pub struct PvPanic;

impl BusDevice for PvPanic {
    /// The supported events.
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
