//! The registers that every virtio transport has, and what a driver has written into them. What they do is
//! [`super::transport`]'s.

use serde::{Deserialize, Serialize};

/// A register that every transport has, wherever it has it. Those of a queue are of the one that is selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// The device type (section 5).
    DeviceId,
    /// Which word of the offered features can be read.
    DeviceFeaturesSelect,
    /// That word.
    DeviceFeatures,
    /// Which word of the accepted features can be written.
    DriverFeaturesSelect,
    /// That word.
    DriverFeatures,
    /// Which queue is selected.
    QueueSelect,
    /// The most entries that it can have; 0 where there is no such queue.
    QueueSizeMax,
    /// The entries that it has.
    QueueSize,
    /// Whether the driver has made it ready.
    QueueReady,
    /// The address of its descriptor table.
    QueueDescriptors(Half),
    /// The address of its available ring.
    QueueAvailable(Half),
    /// The address of its used ring.
    QueueUsed(Half),
    /// The device status (section 2.1).
    Status,
    /// How often the configuration space has changed.
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

/// What the driver has written, as it is saved.
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

/// One queue's registers and, while the device is quiesced, its place in the rings.
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
    /// After a reset, of a device with queues of these sizes at most.
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

    /// What the driver has written; 0 for registers that it has no part in.
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

    /// The driver writes a register that does nothing by itself. `running` is a device that has its queues.
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
            // A queue in use changes only by a reset: its device has it.
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

/// Word `select` of a feature set; all but the first two are empty.
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
