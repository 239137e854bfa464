//! The configuration space of a function: its bytes, and which bits of them a guest can write (PCI
//! 3.0, section 6.1).
//!
//! This module only changes bits. The function handles the effects of a write. The space has 256
//! bytes; the extended space beyond them reads as zero.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Bytes of a configuration space that are implemented.
pub const SIZE: usize = 256;

/// The offset of the command register.
pub(crate) const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const CACHE_LINE: usize = 0x0c;
const LATENCY: usize = 0x0d;
/// The offset of the first base address register. The others are zero.
pub(crate) const BAR: usize = 0x10;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
/// The offset of the first capability, directly after the header.
const FIRST_CAPABILITY: usize = 0x40;

/// Memory space enable, a bit of the command register. Writable beside it are bus master and
/// interrupt disable; there is no legacy interrupt to disable.
pub(crate) const MEMORY_SPACE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;
const INTERRUPT_DISABLE: u16 = 1 << 10;
/// Status register: there is a capability list.
const HAS_CAPABILITIES: u16 = 1 << 4;

/// The identity of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID, assigned by the vendor.
    pub device: u16,
    /// Class, subclass and programming interface: the upper three bytes of the class register.
    pub class: u32,
    /// Revision ID.
    pub revision: u8,
    /// Subsystem vendor ID and subsystem ID.
    pub subsystem: [u16; 2],
}

/// A configuration space.
#[derive(Clone, Debug)]
pub struct Config {
    bytes: [u8; SIZE],
    /// The bits that a guest can write.
    writable: [u8; SIZE],
    /// The offset of the last next-capability pointer. The next capability fills it.
    last: usize,
    end: usize,
}

/// The state that a migration carries: all bytes. Restoring compares those bits that the guest
/// cannot write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State(Vec<u8>);

impl Config {
    /// The header of a function with this identity, without BARs and capabilities.
    pub fn new(identity: Identity) -> Self {
        let (bytes, writable) = ([0; SIZE], [0; SIZE]);
        let mut config = Self { bytes, writable, last: CAPABILITIES, end: FIRST_CAPABILITY };
        config.put(0x00, &identity.vendor.to_le_bytes());
        config.put(0x02, &identity.device.to_le_bytes());
        config.put(0x08, &(identity.class << 8 | u32::from(identity.revision)).to_le_bytes());
        config.put(0x2c, identity.subsystem.map(u16::to_le_bytes).as_flattened());
        let command = MEMORY_SPACE | BUS_MASTER | INTERRUPT_DISABLE;
        config.permit(COMMAND, &command.to_le_bytes());
        for byte in [CACHE_LINE, LATENCY, INTERRUPT_LINE] {
            config.permit(byte, &[0xff]);
        }
        config
    }

    /// Adds a 32-bit, non-prefetchable memory BAR at `base`. `size` is a power of two of at least 4
    /// KiB.
    pub(crate) fn add_bar(&mut self, size: u32, base: u32) {
        assert!(
            size.is_power_of_two() && size >= 0x1000 && base.is_multiple_of(size),
            "a BAR's size is a power of two of at least 4 KiB, and its base is aligned"
        );
        self.put(BAR, &base.to_le_bytes());
        self.permit(BAR, &(!(size - 1)).to_le_bytes());
    }

    /// Adds a capability with this ID. `body` follows the next pointer. Returns the capability's
    /// offset.
    pub(crate) fn add_capability(&mut self, id: u8, body: &[u8]) -> usize {
        let at = self.end;
        self.put(self.last, &[at as u8]);
        self.put(at, &[id, 0]);
        self.put(at + 2, body);
        self.put(STATUS, &HAS_CAPABILITIES.to_le_bytes());
        self.last = at + 1;
        self.end = (at + 2 + body.len()).next_multiple_of(4);
        at
    }

    /// Makes these bits writable for the guest, from offset `at`.
    pub(crate) fn permit(&mut self, at: usize, bits: &[u8]) {
        self.writable[at..at + bits.len()].copy_from_slice(bits);
    }

    /// Stores bytes, whether or not the guest can write them.
    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Reads 16 bits at `at`.
    pub fn word(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    /// Reads 32 bits at `at`.
    pub fn double(&self, at: usize) -> u32 {
        u32::from(self.word(at)) | u32::from(self.word(at + 2)) << 16
    }

    /// Handles a read by the guest. Bytes beyond the end are zero.
    pub fn read(&self, offset: u16, data: &mut [u8]) {
        for (at, byte) in (usize::from(offset)..).zip(data) {
            *byte = self.bytes.get(at).copied().unwrap_or(0);
        }
    }

    /// Handles a write by the guest. Read-only bits keep their value.
    pub fn write(&mut self, offset: u16, data: &[u8]) {
        for (at, new) in (usize::from(offset)..).zip(data) {
            if let (Some(byte), Some(writable)) = (self.bytes.get_mut(at), self.writable.get(at)) {
                *byte = *byte & !writable | new & writable;
            }
        }
    }

    /// The BAR's address, while the function decodes memory.
    pub fn base(&self) -> Option<u64> {
        // The low four bits give the type of the BAR.
        let base = self.double(BAR) & !0xf;
        (self.word(COMMAND) & MEMORY_SPACE != 0).then_some(base.into())
    }

    /// Saves the state for [`Config::restore`].
    pub fn save(&self) -> State {
        State(self.bytes.to_vec())
    }

    /// Restores what [`Config::save`] returned. Returns false if the state is of another function.
    pub fn restore(&mut self, state: &State) -> bool {
        let fixed = |bytes: &[u8]| -> Vec<u8> {
            bytes.iter().zip(&self.writable).map(|(byte, writable)| byte & !writable).collect()
        };
        match <[u8; SIZE]>::try_from(&state.0[..]) {
            Ok(bytes) if fixed(&bytes) == fixed(&self.bytes) => {
                self.bytes = bytes;
                true
            }
            _ => false,
        }
    }
}

/// Whether an access of `len` bytes at `offset` touches `field`.
pub fn touches(offset: u16, len: usize, field: &Range<usize>) -> bool {
    let start = usize::from(offset);
    start < field.end && field.start < start + len
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        let mut config = Config::new(Identity {
            vendor: 0x1af4,
            device: 0x1042,
            class: 0x01_0000,
            revision: 1,
            subsystem: [0x1af4, 0x42],
        });
        config.add_bar(0x8000, 0xe800_0000);
        config
    }

    fn read(config: &Config, at: u16) -> u32 {
        let mut data = [0xaa; 4];
        config.read(at, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn a_bar_tells_its_size_and_moves_by_it() {
        let mut config = config();
        config.write(0x10, &u32::MAX.to_le_bytes());
        assert_eq!(read(&config, 0x10), 0xffff_8000);
        config.write(0x10, &0xe801_8abcu32.to_le_bytes());
        assert_eq!((read(&config, 0x10), config.base()), (0xe801_8000, None));
        config.write(0x04, &[0xff, 0xff]);
        assert_eq!((read(&config, 0x04) as u16, config.base()), (0x0406, Some(0xe801_8000)));
        for other in [0x14, 0x18, 0x1c, 0x20, 0x24, 0x30] {
            config.write(other, &u32::MAX.to_le_bytes());
            assert_eq!(read(&config, other), 0);
        }
    }

    #[test]
    fn capabilities_are_a_list_and_what_is_beyond_the_end_is_zero() {
        let mut config = config();
        assert_eq!(read(&config, 0x04) >> 16 & 0x10, 0);
        let (first, second) = (config.add_capability(0x11, &[0; 10]), config.add_capability(9, &[16; 14]));
        assert_eq!((first, second), (0x40, 0x4c));
        assert_eq!(
            (read(&config, 0x34), read(&config, 0x40), read(&config, 0x4c)),
            (0x40, 0x4c11, 0x1010_0009)
        );
        assert_eq!(read(&config, 0x04) >> 16 & 0x10, 0x10);
        config.write(0xfe, &[1; 4]);
        assert_eq!((read(&config, 0xfe), read(&config, 0x100), read(&config, 0xffd)), (0, 0, 0));
    }

    #[test]
    fn a_state_of_another_function_is_refused() {
        let mut config = config();
        config.write(4, &[6, 0]);
        let state = config.save();
        let mut other = self::config();
        assert!(other.restore(&state));
        assert_eq!(other.base(), Some(0xe800_0000));
        other.add_capability(9, &[0; 2]);
        assert!(!other.restore(&state) && !other.restore(&State(vec![0; 10])));
    }
}
