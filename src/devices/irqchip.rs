//! Puts the registers of the userspace interrupt controller on the memory bus.
//! [`vellum_kvm::arch::irqchip`] implements them.

use super::{Ending, bus::BusDevice};
use vellum_kvm::arch::irqchip::Irqchip;

impl BusDevice for Irqchip {
    fn read(&self, offset: u64, data: &mut [u8]) {
        Irqchip::read(self, offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<Ending> {
        Irqchip::write(self, offset, data);
        None
    }
}
