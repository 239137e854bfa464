//! The registers common to all virtio transports, and what a driver has written to them.
//! [`super::transport`] implements their effects.

use serde::{Deserialize, Serialize};

/// A register of every transport, independent of its offset. Queue registers belong to the selected
/// queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// The device type (section 5).
    DeviceId,
    /// Selects the readable word of the offered features.
    DeviceFeaturesSelect,
    /// The selected word of the offered features.
    DeviceFeatures,
    /// Selects the writable word of the accepted features.
    DriverFeaturesSelect,
    /// The selected word of the accepted features.
    DriverFeatures,
    /// Selects a queue.
    QueueSelect,
    /// The maximum number of entries; 0 if the queue does not exist.
    QueueSizeMax,
    /// The number of entries.
    QueueSize,
    /// Whether the driver has made the queue ready.
    QueueReady,
    /// The address of the descriptor table.
    QueueDescriptors(Half),
    /// The address of the available ring.
    QueueAvailable(Half),
    /// The address of the used ring.
    QueueUsed(Half),
    /// The device status (section 2.1).
    Status,
    /// Counts changes of the configuration space.
    ConfigGeneration,
}

/// Half of a 64-bit register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// Bits 0 to 31.
    Low,
    /// Bits 32 to 63.
    High,
}

/// What the driver has written, in the saved format.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Registers {
    pub status: u32,
    device_features_select: u32,
    driver_features_select: u32,
    pub driver_features: u64,
    pub queue_select: u32,
    pub queues: Vec<QueueRegisters>,
}

/// A queue's registers and, while the device is quiesced, its position in the rings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct QueueRegisters {
    pub size: u16,
    pub ready: bool,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    pub next_available: u16,
    pub next_used: u16,
}

impl Registers {
    /// The reset values, for a device with queues of these maximum sizes.
    pub fn new(sizes: &[u16]) -> Self {
        let queues = sizes.iter().map(|&size| QueueRegisters { size, ..Default::default() });
        Registers { queues: queues.collect(), ..Default::default() }
    }

    /// The word of `features` that the driver has selected to read.
    pub fn offered(&self, features: u64) -> u32 {
        word(features, self.device_features_select)
    }

    fn selected(&mut self) -> Option<&mut QueueRegisters> {
        self.queues.get_mut(self.queue_select as usize)
    }

    /// What the driver has written; 0 for registers that it does not write.
    pub fn get(&self, register: Register) -> u32 {
        match register {
            Register::DeviceFeaturesSelect => return self.device_features_select,
            Register::DriverFeaturesSelect => return self.driver_features_select,
            Register::DriverFeatures => return word(self.driver_features, self.driver_features_select),
            Register::QueueSelect => return self.queue_select,
            _ => {}
        }
        let Some(queue) = self.queues.get(self.queue_select as usize) else { return 0 };
        match register {
            Register::QueueSize => queue.size.into(),
            Register::QueueReady => queue.ready.into(),
            Register::QueueDescriptors(half) => half.of(queue.descriptors),
            Register::QueueAvailable(half) => half.of(queue.available),
            Register::QueueUsed(half) => half.of(queue.used),
            _ => 0,
        }
    }

    /// Handles a write to a register without side effects. `running` means that the device has its
    /// queues.
    pub fn set(&mut self, register: Register, value: u32, running: bool) {
        match register {
            Register::DeviceFeaturesSelect => self.device_features_select = value,
            Register::DriverFeaturesSelect => self.driver_features_select = value,
            Register::DriverFeatures => match self.driver_features_select {
                0 => Half::Low.put(&mut self.driver_features, value),
                1 => Half::High.put(&mut self.driver_features, value),
                _ => {}
            },
            Register::QueueSelect => self.queue_select = value,
            other => self.set_queue(other, value, running),
        }
    }

    fn set_queue(&mut self, register: Register, value: u32, running: bool) {
        let Some(queue) = self.selected() else { return };
        match register {
            // Only a reset changes a queue in use: the device owns it.
            Register::QueueReady if !running => queue.ready = value == 1,
            _ if queue.ready => {}
            Register::QueueSize => queue.size = u16::try_from(value).unwrap_or(0),
            Register::QueueDescriptors(half) => half.put(&mut queue.descriptors, value),
            Register::QueueAvailable(half) => half.put(&mut queue.available, value),
            Register::QueueUsed(half) => half.put(&mut queue.used, value),
            _ => {}
        }
    }
}

/// Word `select` of a feature set. Words from the third on are zero.
fn word(features: u64, select: u32) -> u32 {
    match select {
        0 => Half::Low.of(features),
        1 => Half::High.of(features),
        _ => 0,
    }
}

impl Half {
    fn of(self, value: u64) -> u32 {
        match self {
            Half::Low => value as u32,
            Half::High => (value >> 32) as u32,
        }
    }

    fn put(self, value: &mut u64, word: u32) {
        *value = match self {
            Half::Low => *value & !0xffff_ffff | u64::from(word),
            Half::High => *value & 0xffff_ffff | u64::from(word) << 32,
        };
    }
}
