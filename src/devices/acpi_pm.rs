//! The sleep registers of hardware-reduced ACPI (ACPI 6.5, section 4.8.3.7). Only power-off is
//! implemented.

use super::{Ending, bus::BusDevice};
use vellum_kvm::arch::fixed::SLEEP_S5;

/// SLP_EN. SLP_TYP is in bits 4:2.
const ENABLE: u8 = 1 << 5;

/// The sleep control and status registers. They hold no state: the machine never wakes from a
/// sleep.
pub struct AcpiPm;

impl BusDevice for AcpiPm {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<Ending> {
        let off = offset == 0 && data[0] & ENABLE != 0 && (data[0] >> 2) & 7 == SLEEP_S5;
        off.then_some(Ending::PowerOff)
    }
}

#[test]
fn only_s5_with_the_enable_bit_switches_off() {
    let write = |offset, byte| AcpiPm.write(offset, &[byte]);
    assert_eq!(write(0, 0x34), Some(Ending::PowerOff));
    assert_eq!((write(0, 0x14), write(0, 0x20), write(1, 0x34)), (None, None, None));
}
