//! The virtio-mmio transport, version 2 (virtio 1.2, section 4.2). This module only maps offsets to
//! registers. [`Transport`] implements the registers, which PCI shares.

use std::io;
use std::ops::Deref;
use std::sync::Arc;

use virtio_bindings::virtio_mmio::*;

use super::VirtioDevice;
use super::interrupt::Interrupt;
use super::registers::{Half, Register};
use super::transport::Transport;
use crate::Ending;
use crate::bus::BusDevice;
use vellum_kvm::memory::GuestMemory;

/// Bytes of address space of one device.
pub const REGION_SIZE: u64 = 0x1000;
/// The offset of the doorbells. KVM_IOEVENTFD matches the queue's index as 32-bit data.
pub const DOORBELLS: u64 = VIRTIO_MMIO_QUEUE_NOTIFY as u64;

/// "virt".
const MAGIC: u32 = 0x7472_6976;
/// "vllm". Drivers print it and attach no meaning to it.
const VENDOR: u32 = 0x6d6c_6c76;
const CONFIG: u64 = VIRTIO_MMIO_CONFIG as u64;

/// A device on the memory bus. Clones are handles to the same device.
#[derive(Clone)]
pub struct Mmio(Transport);

impl Mmio {
    /// A device in its reset state.
    pub fn new(device: Box<dyn VirtioDevice>, memory: Arc<GuestMemory>) -> io::Result<Self> {
        let interrupt = Interrupt::on_one_line()?;
        Ok(Mmio(Transport::new(device, memory, interrupt)?))
    }
}

impl Deref for Mmio {
    type Target = Transport;

    fn deref(&self) -> &Transport {
        &self.0
    }
}

impl BusDevice for Mmio {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if let Some(offset) = offset.checked_sub(CONFIG) {
            return self.read_config(offset as usize, data);
        }
        data.fill(0);
        // Registers are 32 bits wide (section 4.2.2.2).
        let Ok(word) = <&mut [u8; 4]>::try_from(data) else { return };
        let value = match offset as u32 {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => 2,
            VIRTIO_MMIO_VENDOR_ID => VENDOR,
            VIRTIO_MMIO_INTERRUPT_STATUS => self.interrupt().status(),
            // There are no shared memory regions: the length of each is -1 (section 4.2.2).
            VIRTIO_MMIO_SHM_LEN_LOW | VIRTIO_MMIO_SHM_LEN_HIGH => u32::MAX,
            other => readable(other).map_or(0, |register| self.get(register)),
        };
        *word = value.to_le_bytes();
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<Ending> {
        if let Some(offset) = offset.checked_sub(CONFIG) {
            self.write_config(offset as usize, data);
            return None;
        }
        let word = <[u8; 4]>::try_from(data).ok()?;
        let value = u32::from_le_bytes(word);
        match offset as u32 {
            VIRTIO_MMIO_INTERRUPT_ACK => self.interrupt().acknowledge(value),
            // KVM normally handles these writes through KVM_IOEVENTFD.
            VIRTIO_MMIO_QUEUE_NOTIFY => self.ring(value),
            other => {
                if let Some(register) = writable(other) {
                    self.set(register, value);
                }
            }
        }
        None
    }
}

fn readable(offset: u32) -> Option<Register> {
    Some(match offset {
        VIRTIO_MMIO_DEVICE_ID => Register::DeviceId,
        VIRTIO_MMIO_DEVICE_FEATURES => Register::DeviceFeatures,
        VIRTIO_MMIO_QUEUE_NUM_MAX => Register::QueueSizeMax,
        VIRTIO_MMIO_QUEUE_READY => Register::QueueReady,
        VIRTIO_MMIO_STATUS => Register::Status,
        VIRTIO_MMIO_CONFIG_GENERATION => Register::ConfigGeneration,
        _ => return None,
    })
}

fn writable(offset: u32) -> Option<Register> {
    Some(match offset {
        VIRTIO_MMIO_DEVICE_FEATURES_SEL => Register::DeviceFeaturesSelect,
        VIRTIO_MMIO_DRIVER_FEATURES_SEL => Register::DriverFeaturesSelect,
        VIRTIO_MMIO_DRIVER_FEATURES => Register::DriverFeatures,
        VIRTIO_MMIO_QUEUE_SEL => Register::QueueSelect,
        VIRTIO_MMIO_QUEUE_NUM => Register::QueueSize,
        VIRTIO_MMIO_QUEUE_READY => Register::QueueReady,
        VIRTIO_MMIO_QUEUE_DESC_LOW => Register::QueueDescriptors(Half::Low),
        VIRTIO_MMIO_QUEUE_DESC_HIGH => Register::QueueDescriptors(Half::High),
        VIRTIO_MMIO_QUEUE_AVAIL_LOW => Register::QueueAvailable(Half::Low),
        VIRTIO_MMIO_QUEUE_AVAIL_HIGH => Register::QueueAvailable(Half::High),
        VIRTIO_MMIO_QUEUE_USED_LOW => Register::QueueUsed(Half::Low),
        VIRTIO_MMIO_QUEUE_USED_HIGH => Register::QueueUsed(Half::High),
        VIRTIO_MMIO_STATUS => Register::Status,
        _ => return None,
    })
}
