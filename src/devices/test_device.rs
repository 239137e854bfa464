//! What kvm-unit-tests expect beside the [`debug_exit`](super::debug_exit) port: the parts of
//! QEMU's pc-testdev that test interrupt controllers and the emulation of port accesses. Only
//! multiboot guests get it.

use std::sync::Mutex;

use super::{Ending, bus::BusDevice};

/// The port of a 32-bit register that stores what is written.
pub const SCRATCH: u16 = 0xe0;
/// The number of its ports.
pub const SCRATCH_PORTS: u64 = 4;
/// The address of a similar register in memory, for accesses that KVM must emulate.
pub const SCRATCH_MEMORY: u64 = 0xff00_0000;
/// The size of that register in bytes.
pub const SCRATCH_BYTES: u64 = 64 << 10;
/// The first port of the interrupt lines, one port a line from GSI 0 on. A write asserts or
/// deasserts the line.
pub const LINES: u16 = 0x2000;
/// The number of line ports.
pub const LINE_PORTS: u64 = 24;

/// Registers that store what is written to them, in accesses of any size.
pub struct Scratch(Mutex<Vec<u8>>);

impl Scratch {
    /// Zeroed registers of this many bytes.
    pub fn new(bytes: u64) -> Self {
        Self(Mutex::new(vec![0; bytes as usize]))
    }
}

impl BusDevice for Scratch {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let register = self.0.lock().expect("the lock is not poisoned");
        data.iter_mut().zip(&register[offset as usize..]).for_each(|(to, from)| *to = *from);
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<Ending> {
        let mut register = self.0.lock().expect("the lock is not poisoned");
        register[offset as usize..].iter_mut().zip(data).for_each(|(to, from)| *to = *from);
        None
    }
}

/// The interrupt lines. The closure drives one.
pub struct Lines(pub Box<dyn Fn(u32, bool) + Send + Sync>);

impl BusDevice for Lines {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<Ending> {
        (self.0)(offset as u32, data[0] != 0);
        None
    }
}

#[test]
fn scratch_registers_are_written_and_read_in_parts() {
    let scratch = Scratch::new(SCRATCH_PORTS);
    scratch.write(0, &[1, 2, 3, 4]);
    scratch.write(1, &[9]);
    let mut word = [0; 4];
    scratch.read(0, &mut word);
    assert_eq!(word, [1, 9, 3, 4]);
    scratch.write(2, &[7, 8, 6, 5]);
    let mut half = [0; 2];
    scratch.read(2, &mut half);
    assert_eq!(half, [7, 8]);
}
