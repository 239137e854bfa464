//! Finds virtio devices, disks and consoles: on the first PCI bus through the configuration ports, and on
//! virtio-mmio as listed on the command line (`virtio_mmio.device=SIZE@ADDRESS:IRQ`) or in ACPI's
//! DSDT.

use super::{Service, acpi, boot::boot_of, load, service};
use crate::console::{Output, VIRTIO, of_virtio};
use crate::disk::{add, left_out};
use crate::virtio::Place;

/// The virtio device ID of a disk, and the PCI IDs of transitional and of modern devices.
const DISK: u32 = 2;
const DEVICES: [u32; 2] = [0x1001_1af4, 0x1042_1af4];
const CONSOLES: [u32; 2] = [0x1003_1af4, 0x1043_1af4];
const ADDRESS: u32 = 0xcf8;
const DATA: u32 = 0xcfc;
/// Configuration structures of virtio's capabilities (virtio 1.2, section 4.1.4).
const COMMON: u8 = 1;
const NOTIFY: u8 = 2;
const DEVICE: u8 = 4;
const MAX_PLACES: usize = 16;

/// Finds and starts all disks.
pub(crate) fn find_disks(seed: u64) {
    mmio(|base| {
        if Place::mmio_kind(base) == DISK {
            add(Place::Mmio(base), seed);
        }
    });
    for function in 0..32 * 8 {
        if DEVICES.contains(&config(function, 0)) {
            match place(function) {
                Ok(place) => add(place, seed),
                Err(why) => left_out(function.into(), why),
            }
        }
    }
}

/// Finds and starts a virtio console.
pub(crate) fn find_console() -> Option<Output> {
    let mut output = None;
    mmio(|base| {
        if output.is_none() && Place::mmio_kind(base) == VIRTIO {
            output = of_virtio(Place::Mmio(base));
        }
    });
    let mut functions = (0..32 * 8).filter(|function| CONSOLES.contains(&config(*function, 0)));
    output.or_else(|| functions.find_map(|function| of_virtio(place(function).ok()?)))
}

/// Calls `each` with the addresses of all virtio-mmio devices.
fn mmio(each: impl FnMut(u64)) {
    let mut places = [0; MAX_PLACES];
    let mut count = 0;
    let mut found = |base: u64| {
        if count < MAX_PLACES && base != 0 && base < 1 << 32 && !places[..count].contains(&base) {
            (places[count], count) = (base, count + 1);
        }
    };
    let line = boot_of().command_line();
    for word in line.split(|byte| *byte <= b' ') {
        if let Some(base) = word.strip_prefix(b"virtio_mmio.device=").and_then(address) {
            found(base);
        }
    }
    acpi::virtio_mmio(boot_of().rsdp, found);
    places[..count].iter().copied().for_each(each);
}

/// The address in SIZE@ADDRESS:IRQ.
fn address(text: &[u8]) -> Option<u64> {
    let at = text.iter().position(|byte| *byte == b'@')? + 1;
    let rest = text[at..].strip_prefix(b"0x")?;
    let digits = rest.iter().position(|byte| *byte == b':').unwrap_or(rest.len());
    u64::from_str_radix(core::str::from_utf8(&rest[..digits]).ok()?, 16).ok()
}

fn select(function: u32, register: u32) {
    service(Service::Out32, ADDRESS, u64::from(1 << 31 | function << 8 | register & 0xfc));
}

fn config(function: u32, register: u32) -> u32 {
    select(function, register);
    service(Service::In32, DATA, 0) as u32
}

fn set_config(function: u32, register: u32, value: u32) {
    select(function, register);
    service(Service::Out32, DATA, value.into());
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
    let high = if low >> 1 & 3 == 2 { config(function, register + 4) } else { 0 };
    match low & !15 {
        0 => Err("it has no address"),
        _ if high != 0 => Err("its registers are above 4 GiB"),
        base => Ok(base.into()),
    }
}

fn place(function: u32) -> Result<Place, &'static str> {
    // Enables memory accesses, and DMA by the device.
    let command = config(function, 4) & 0xffff;
    set_config(function, 4, command | 6);
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
    // Registers that answer report at least one queue.
    match load::<u16>(common + 18) {
        0 | 0xffff => Err("its registers do not answer"),
        _ => Ok(Place::Pci { common, notify, stride, device }),
    }
}
