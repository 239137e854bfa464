//! The configuration ports of PCI, and the places of virtio-mmio devices: those that the command line
//! lists (`virtio_mmio.device=SIZE@ADDRESS:IRQ`), and those in ACPI's DSDT.

use super::{Service, acpi, boot::boot_of, service};

const ADDRESS: u32 = 0xcf8;
const DATA: u32 = 0xcfc;
const MAX_PLACES: usize = 16;

/// Calls `each` with the addresses of all virtio-mmio devices.
pub(crate) fn virtio_mmio(each: impl FnMut(u64)) {
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

/// Reads 32 bits of a function's configuration.
pub(crate) fn pci_config(function: u32, register: u32) -> u32 {
    select(function, register);
    service(Service::In32, DATA, 0) as u32
}

/// Writes 32 bits of a function's configuration.
pub(crate) fn set_pci_config(function: u32, register: u32, value: u32) {
    select(function, register);
    service(Service::Out32, DATA, value.into());
}

/// Firmware or the VMM has assigned all addresses.
pub(crate) fn pci_window(_size: u64) -> Option<u64> {
    None
}
