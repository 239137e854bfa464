//! Finds virtio devices, disks and consoles: on virtio-mmio, and on the first PCI bus.

use crate::arch::{self, load, pci_config as config, set_pci_config as set_config};
use crate::console::{Output, VIRTIO, of_virtio};
use crate::disk::{add, left_out};
use crate::virtio::Place;

/// The virtio device ID of a disk, and the PCI IDs of transitional and of modern devices.
const DISK: u32 = 2;
const DISKS: [u32; 2] = [0x1001_1af4, 0x1042_1af4];
const CONSOLES: [u32; 2] = [0x1003_1af4, 0x1043_1af4];
/// Configuration structures of virtio's capabilities (virtio 1.2, section 4.1.4).
const COMMON: u8 = 1;
const NOTIFY: u8 = 2;
const DEVICE: u8 = 4;

/// Finds and starts all disks.
pub(crate) fn disks(seed: u64) {
    arch::virtio_mmio(|base| {
        if Place::mmio_kind(base) == DISK {
            add(Place::Mmio(base), seed);
        }
    });
    for function in functions(DISKS) {
        match place(function) {
            Ok(place) => add(place, seed),
            Err(why) => left_out(function.into(), why),
        }
    }
}

/// Finds and starts a virtio console.
pub(crate) fn console() -> Option<Output> {
    let mut output = None;
    arch::virtio_mmio(|base| {
        if output.is_none() && Place::mmio_kind(base) == VIRTIO {
            output = of_virtio(Place::Mmio(base));
        }
    });
    output.or_else(|| functions(CONSOLES).find_map(|function| of_virtio(place(function).ok()?)))
}

/// The functions with these IDs. A device has more than one if its header says so.
fn functions(ids: [u32; 2]) -> impl Iterator<Item = u32> {
    let of_slot = |slot: u32| {
        let first = 8 * slot;
        let count = match config(first, 0) {
            u32::MAX => 0,
            _ if byte(first, 0x0e) >> 7 == 1 => 8,
            _ => 1,
        };
        first..first + count
    };
    (0..32).flat_map(of_slot).filter(move |function| ids.contains(&config(*function, 0)))
}

fn byte(function: u32, register: u32) -> u8 {
    (config(function, register) >> (8 * (register & 3))) as u8
}

/// The address in a function's BAR.
fn bar(function: u32, index: u8) -> Result<u64, &'static str> {
    let register = 0x10 + 4 * u32::from(index.min(5));
    let low = config(function, register);
    if low & 1 == 1 {
        return Err("its registers are ports");
    }
    let is_long = low >> 1 & 3 == 2;
    let address = || {
        let high = if is_long { config(function, register + 4) } else { 0 };
        u64::from(config(function, register) & !15) | u64::from(high) << 32
    };
    if address() == 0 {
        // What a BAR keeps of all ones is its size.
        set_config(function, register, u32::MAX);
        let size = !(config(function, register) & !15);
        let base = arch::pci_window(u64::from(size) + 1).unwrap_or(0);
        set_config(function, register, base as u32);
        if is_long {
            set_config(function, register + 4, (base >> 32) as u32);
        }
    }
    match address() {
        0 => Err("it has no address"),
        base if !arch::is_mapped(base) => Err("its registers are above what is mapped"),
        base => Ok(base),
    }
}

fn place(function: u32) -> Result<Place, &'static str> {
    let (mut common, mut notify, mut stride, mut device) = (0, 0, 0, 0);
    let mut at = u32::from(byte(function, 0x34));
    for _ in 0..48 {
        if at < 0x40 {
            break;
        }
        if byte(function, at) == 9 {
            let (kind, index) = (byte(function, at + 3), byte(function, at + 4));
            let offset = u64::from(config(function, at + 8));
            let part = match kind {
                COMMON => &mut common,
                NOTIFY => &mut notify,
                DEVICE => &mut device,
                _ => &mut 0,
            };
            if matches!(kind, COMMON | NOTIFY | DEVICE) && *part == 0 {
                *part = bar(function, index)? + offset;
                if kind == NOTIFY {
                    stride = u64::from(config(function, at + 16));
                }
            }
        }
        at = u32::from(byte(function, at + 1));
    }
    if common == 0 || notify == 0 || device == 0 {
        return Err("it is not a modern one");
    }
    // Enables memory accesses, and DMA by the device.
    let command = config(function, 4) & 0xffff;
    set_config(function, 4, command | 6);
    // Registers that answer report at least one queue.
    match load::<u16>(common + 18) {
        0 | 0xffff => Err("its registers do not answer"),
        _ => Ok(Place::Pci { common, notify, stride, device }),
    }
}
