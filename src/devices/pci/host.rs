//! The host bridge, through which a guest reaches the functions of the bus.
//!
//! Configuration spaces are reached through ports CF8 and CFC (PCI 3.0, section 3.2.2.3.2) and
//! through ECAM (PCI Express 5.0, section 7.2.2); both show the same values. BARs are reached
//! through a window of the guest-physical address space. Addresses outside the window are not
//! forwarded to the bus. A guest may move a BAR at any time. So the machine's
//! [`Bus`](super::super::bus) has the whole window as one device, and each access asks the
//! functions where their BARs are.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::config::{Config, Identity};
use super::{DEVICES, Function};
use crate::Ending;
use crate::bus::BusDevice;

/// The number of ports from CF8 on.
pub const PORTS: u64 = 8;
/// The offset of the data port. The address register is the 4 bytes before it.
const DATA: u64 = 4;
/// Bytes of ECAM for one bus: 4 KiB a function, eight functions a device.
pub const ECAM_SIZE: u64 = 1 << 20;
/// Bytes of ECAM for one function.
const ECAM_FUNCTION: u64 = 0x1000;

/// Enable bit of the address register.
const ENABLE: u32 = 1 << 31;

/// The bridge, with the functions of its bus.
pub struct Host {
    /// Indexed by device number. Each is function 0 of its device.
    functions: Vec<Arc<dyn Function>>,
    /// The addresses at which BARs can be.
    window: Range<u64>,
    address: AtomicU32,
}

/// The CF8 and CFC ports of a bridge.
pub struct Ports(pub Arc<Host>);
/// The ECAM region of a bridge.
pub struct Ecam(pub Arc<Host>);
/// The BAR window of a bridge.
pub struct Window(pub Arc<Host>);

/// The bridge as a function of its own bus. Kernels that look for a host bridge see by it that
/// there is a PCI bus. The IDs are those of QEMU's generic host bridge (docs/specs/pci-ids). Writes
/// are ignored.
struct Bridge(Config);

impl Function for Bridge {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.0.read(offset, data);
    }

    fn write_config(&self, _offset: u16, _data: &[u8]) -> Option<Ending> {
        None
    }
}

impl Host {
    /// A bridge with `devices` on its bus, from device 1 on. Their BARs lie within `window`.
    pub fn new(devices: impl IntoIterator<Item = Arc<dyn Function>>, window: Range<u64>) -> Self {
        let identity = Identity {
            vendor: 0x1b36,
            device: 0x0008,
            class: 0x06_0000,
            revision: 0,
            subsystem: [0x1af4, 0x1100],
        };
        let bridge: Arc<dyn Function> = Arc::new(Bridge(Config::new(identity)));
        let functions: Vec<_> = std::iter::once(bridge).chain(devices).collect();
        assert!(functions.len() <= DEVICES, "a bus has {DEVICES} devices");
        Self { functions, window, address: AtomicU32::new(0) }
    }

    /// The address register, which migration saves.
    pub fn address(&self) -> u32 {
        self.address.load(Ordering::Relaxed)
    }

    /// Restores what [`Host::address`] returned on save.
    pub fn set_address(&self, address: u32) {
        self.address.store(address & (ENABLE | 0x00ff_fffc), Ordering::Relaxed);
    }

    /// The function with these numbers, if it exists.
    fn function(&self, bus: u32, device: u32, function: u32) -> Option<&dyn Function> {
        let found = self.functions.get(device as usize).filter(|_| bus == 0 && function == 0)?;
        Some(&**found)
    }

    /// The function and register that an access at `offset` from the data port reaches through the
    /// address register.
    fn addressed(&self, offset: u64) -> Option<(&dyn Function, u16)> {
        let address = self.address();
        let function = self.function(address >> 16 & 0xff, address >> 11 & 0x1f, address >> 8 & 7)?;
        (address & ENABLE != 0).then_some((function, (address & 0xfc) as u16 + offset as u16))
    }

    /// The function and register of an access of `len` bytes at `offset` of ECAM.
    fn mapped(&self, offset: u64, len: usize) -> Option<(&dyn Function, u16)> {
        let place = offset as u32;
        let register = place & 0xfff;
        let inside = u64::from(register) + len as u64 <= ECAM_FUNCTION;
        let function = self.function(place >> 20, place >> 15 & 0x1f, place >> 12 & 7)?;
        inside.then_some((function, register as u16))
    }

    /// The function with a BAR at these bytes, and the offset within the BAR. If two BARs overlap,
    /// the first function wins.
    fn behind(&self, offset: u64, len: usize) -> Option<(&dyn Function, u64)> {
        let address = self.window.start + offset;
        self.functions.iter().find_map(|function| {
            let (base, size) = function.bar()?;
            let at = address.checked_sub(base)?;
            (at < size && size - at >= len as u64).then_some((&**function, at))
        })
    }
}

impl BusDevice for Ports {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if offset == 0 && data.len() == 4 {
            return data.copy_from_slice(&self.0.address().to_le_bytes());
        }
        let addressed = offset.checked_sub(DATA).and_then(|offset| self.0.addressed(offset));
        match addressed {
            Some((function, register)) => function.read_config(register, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<Ending> {
        if offset < DATA {
            // The bridge ignores accesses to the address register of another size.
            if let (0, Ok(address)) = (offset, <[u8; 4]>::try_from(data)) {
                self.0.set_address(u32::from_le_bytes(address));
            }
            return None;
        }
        let (function, register) = self.0.addressed(offset - DATA)?;
        function.write_config(register, data)
    }
}

impl BusDevice for Ecam {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.0.mapped(offset, data.len()) {
            Some((function, register)) => function.read_config(register, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<Ending> {
        let (function, register) = self.0.mapped(offset, data.len())?;
        function.write_config(register, data)
    }
}

impl BusDevice for Window {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.0.behind(offset, data.len()) {
            Some((function, at)) => function.read_bar(at, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<Ending> {
        let (function, at) = self.0.behind(offset, data.len())?;
        function.write_bar(at, data)
    }
}
