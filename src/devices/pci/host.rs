//! The host bridge: how a guest reaches the functions of the bus.
//!
//! Configuration spaces by the ports CF8 and CFC (PCI 3.0, section 3.2.2.3.2) and by ECAM (PCI Express 5.0, section 7.2.2), of which the
//! values are the same; BARs by a window of the guest-physical address space, beyond which nothing is forwarded to the bus. Where in
//! it a BAR is, its function says at each access: a guest may move it at any time, so that the machine's [`Bus`](super::super::bus) has
//! the whole window as one device.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::config::{Config, Identity};
use super::{DEVICES, Function};
use crate::Ending;
use crate::bus::BusDevice;

/// How many ports there are from CF8 on.
pub const PORTS: u64 = 8;
/// Of them: the address register, 4 bytes, then the data.
const DATA: u64 = 4;
/// Bytes of ECAM, of one bus: 4 KiB a function, eight functions a device.
pub const ECAM_SIZE: u64 = 1 << 20;
/// Bytes of ECAM that a function has.
const ECAM_FUNCTION: u64 = 0x1000;

/// The address register: enabled, and its fields.
const ENABLE: u32 = 1 << 31;

/// The bridge, with all that is on its bus.
pub struct Host {
    /// By device number; each is function 0.
    functions: Vec<Arc<dyn Function>>,
    /// Where BARs can be.
    window: Range<u64>,
    address: AtomicU32,
}

/// The ports of a bridge.
pub struct Ports(pub Arc<Host>);
/// The configuration spaces of a bridge in memory.
pub struct Ecam(pub Arc<Host>);
/// The BARs of a bridge.
pub struct Window(pub Arc<Host>);

/// The bridge as a function of its own bus, by which kernels that look for one see that there is PCI: what QEMU's generic one says
/// (docs/specs/pci-ids). There is nothing that it can be told.
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
    /// A bridge whose bus has `devices` behind it, from device 1 on, with their BARs within `window`.
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

    /// The address register, which outlives a migration.
    pub fn address(&self) -> u32 {
        self.address.load(Ordering::Relaxed)
    }

    /// What [`Host::address`] was elsewhere.
    pub fn set_address(&self, address: u32) {
        self.address.store(address & (ENABLE | 0x00ff_fffc), Ordering::Relaxed);
    }

    /// The function at these numbers, if there is one.
    fn function(&self, bus: u32, device: u32, function: u32) -> Option<&dyn Function> {
        let found = self.functions.get(device as usize).filter(|_| bus == 0 && function == 0)?;
        Some(&**found)
    }

    /// The function and the register that the address register names for an access to the data port at `offset`.
    fn addressed(&self, offset: u64) -> Option<(&dyn Function, u16)> {
        let address = self.address();
        let function = self.function(address >> 16 & 0xff, address >> 11 & 0x1f, address >> 8 & 7)?;
        (address & ENABLE != 0).then_some((function, (address & 0xfc) as u16 + offset as u16))
    }

    /// The function and the register at `offset` of ECAM, of an access of so many bytes.
    fn mapped(&self, offset: u64, len: usize) -> Option<(&dyn Function, u16)> {
        let place = offset as u32;
        let register = place & 0xfff;
        let inside = u64::from(register) + len as u64 <= ECAM_FUNCTION;
        let function = self.function(place >> 20, place >> 15 & 0x1f, place >> 12 & 7)?;
        inside.then_some((function, register as u16))
    }

    /// The function whose BAR has these bytes, and where in it they are. Where two lie over each other it is the first.
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
            // Accesses of another size are not the bridge's.
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
