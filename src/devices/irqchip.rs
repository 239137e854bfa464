//! The registers of the interrupt controller that KVM does not have, on the memory bus. What they do is the controller's
//! ([`vellum_kvm::arch::irqchip`]).

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
