//! The debug exit port, with which kvm-unit-tests end.
//!
//! Only multiboot guests get it. The process exits with `(code << 1) | 1`, as with QEMU's
//! isa-debug-exit. The runners of those tests rely on it: 1 is a pass.

use super::{Ending, bus::BusDevice};

/// The port's number. kvm-unit-tests use it.
pub const PORT: u16 = 0xf4;
/// How many ports the device has: the tests write four bytes.
pub const PORTS: u64 = 4;

/// The device. It holds no state.
pub struct DebugExit;

impl BusDevice for DebugExit {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u64, data: &[u8]) -> Option<Ending> {
        Some(Ending::Code(data[0] << 1 | 1))
    }
}

#[test]
fn zero_is_a_pass() {
    assert_eq!(DebugExit.write(0, &[0, 0, 0, 0]), Some(Ending::Code(1)));
    assert_eq!(DebugExit.write(0, &[1, 0, 0, 0]), Some(Ending::Code(3)));
}
