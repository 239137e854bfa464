//! The bus maps addresses to devices.
//!
//! The bus is built once and never changes, so vCPUs look up devices without a lock. A device with
//! state has its own mutex. It holds that mutex neither across blocking I/O nor while it takes
//! another mutex.

use std::ops::Range;
use std::sync::Arc;

use super::Ending;

/// A device on a bus. Offsets are relative to the device's first address. `data` has the length of
/// the access. The bus has checked that the access lies within the device.
pub trait BusDevice: Send + Sync {
    /// Handles a read by the guest: fills `data`.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Handles a write by the guest. Returns an [`Ending`] if the write ends the machine.
    fn write(&self, offset: u64, data: &[u8]) -> Option<Ending>;
}

/// Devices by address. x86-64 has two buses: ports and memory.
#[derive(Default)]
pub struct Bus {
    /// Sorted, without overlaps.
    devices: Vec<(Range<u64>, Arc<dyn BusDevice>)>,
}

/// Two devices claim the same addresses.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device at {0:#x}..{1:#x} overlaps another; this is a bug in the machine's address map")]
pub struct Overlap(u64, u64);

impl Bus {
    /// Adds `device` at `base..base + len`.
    ///
    /// # Errors
    /// The range overlaps a device, is empty or wraps around.
    pub fn add(&mut self, base: u64, len: u64, device: Arc<dyn BusDevice>) -> Result<(), Overlap> {
        let end = base.checked_add(len).filter(|end| *end > base).ok_or(Overlap(base, base))?;
        let at = self.devices.partition_point(|(range, _)| range.end <= base);
        if self.devices.get(at).is_some_and(|(range, _)| range.start < end) {
            return Err(Overlap(base, end));
        }
        self.devices.insert(at, (base..end, device));
        Ok(())
    }

    fn find(&self, address: u64, len: usize) -> Option<(&dyn BusDevice, u64)> {
        let at = self.devices.partition_point(|(range, _)| range.end <= address);
        let (range, device) = self.devices.get(at)?;
        let inside = range.contains(&address) && range.end - address >= len as u64;
        inside.then(|| (&**device, address - range.start))
    }

    /// Handles a read by the guest. As on a PC, all bits are set if there is no device or the
    /// access reaches beyond its end.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match self.find(address, data.len()) {
            Some((device, offset)) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Handles a write by the guest. A write without a device is dropped.
    pub fn write(&self, address: u64, data: &[u8]) -> Option<Ending> {
        let (device, offset) = self.find(address, data.len())?;
        device.write(offset, data)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    struct Recorder(Mutex<Vec<(u64, usize)>>);
    impl BusDevice for Recorder {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }
        fn write(&self, offset: u64, data: &[u8]) -> Option<Ending> {
            self.0.lock().unwrap().push((offset, data.len()));
            Some(Ending::Reset)
        }
    }

    #[test]
    fn an_access_reaches_exactly_the_device_that_holds_all_of_it() {
        let device = Arc::new(Recorder(Mutex::default()));
        let mut bus = Bus::default();
        bus.add(0x100, 8, device.clone()).unwrap();
        bus.add(0x108, 8, device.clone()).unwrap();
        bus.add(0x0, 1, device.clone()).unwrap();
        let read = |address| {
            let mut data = [0; 4];
            bus.read(address, &mut data);
            data[0]
        };
        assert_eq!(
            (read(0x104), read(0x105), read(0xfe), read(0x110), read(u64::MAX)),
            (4, 0xff, 0xff, 0xff, 0xff)
        );
        assert_eq!(bus.write(0x108, &[0; 2]), Some(Ending::Reset));
        assert_eq!(bus.write(0x10f, &[0; 2]), None);
        assert_eq!(*device.0.lock().unwrap(), [(0, 2)]);
    }

    #[test]
    fn devices_may_not_overlap() {
        let device = Arc::new(Recorder(Mutex::default()));
        let mut bus = Bus::default();
        bus.add(0x100, 8, device.clone()).unwrap();
        for (base, len) in [(0x100, 1), (0xf8, 9), (0x107, 1), (0x0, 0x1000), (0x200, 0), (u64::MAX, 2)] {
            assert!(bus.add(base, len, device.clone()).is_err(), "{base:#x} {len}");
        }
        bus.add(0xf8, 8, device).unwrap();
    }
}
