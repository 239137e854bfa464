//! The I/O APIC on the memory bus. What it does is the interrupt controller's ([`crate::arch::ioapic`]).

use super::{Ending, bus::BusDevice};
use crate::arch::ioapic::Ioapic;

impl BusDevice for Ioapic {
    fn read(&self, offset: u64, data: &mut [u8]) {
        Ioapic::read(self, offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<Ending> {
        Ioapic::write(self, offset, data);
        None
    }
}
