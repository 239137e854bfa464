//! Finds the processors and how to power off, in the ACPI tables. Without ACPI, the processors are
//! in the MP table.

use super::read;

/// The registers for powering off.
#[derive(Clone, Copy)]
pub(crate) struct Power {
    /// The ports of the PM1 control registers, with the values to write. Port 0: none.
    pub(crate) ports: [(u16, u16); 2],
    /// The port of the sleep control register, with the value to write. Port 0: none.
    pub(crate) sleep: (u16, u8),
}

const MAX_TABLE: u64 = 1 << 20;

/// Calls `found` with each table.
fn tables(rsdp: u64, mut found: impl FnMut(u64)) -> Option<()> {
    let rsdp = if rsdp != 0 && rsdp < 1 << 32 { rsdp } else { scan_bios(0xe_0000, b"RSD PTR ")? };
    if &read::<[u8; 8]>(rsdp) != b"RSD PTR " {
        return None;
    }
    let xsdt = if read::<u8>(rsdp + 15) >= 2 { read::<u64>(rsdp + 24) } else { 0 };
    let (root, size) = if xsdt != 0 { (xsdt, 8) } else { (u64::from(read::<u32>(rsdp + 16)), 4) };
    for at in (36..length(root)).step_by(size) {
        let table = if size == 8 { read::<u64>(root + at) } else { read::<u32>(root + at).into() };
        if table != 0 && table < 1 << 32 {
            found(table);
        }
    }
    Some(())
}

/// Calls `found` with the APIC ID of each processor, and returns how to power off. Returns `None`
/// without ACPI.
pub(crate) fn processors(rsdp: u64, mut found: impl FnMut(u32)) -> Option<Power> {
    let mut power = Power { ports: [(0, 0); 2], sleep: (0, 0) };
    tables(rsdp, |table| match &read::<[u8; 4]>(table) {
        b"APIC" => madt(table, &mut found),
        b"FACP" => power = fadt(table),
        _ => {}
    })?;
    Some(power)
}

/// Calls `found` with the address of each virtio-mmio device: the Memory32Fixed descriptor after
/// the device's ID, which is Linux's.
pub(crate) fn virtio_mmio(rsdp: u64, mut found: impl FnMut(u64)) {
    tables(rsdp, |table| {
        if &read::<[u8; 4]>(table) != b"FACP" {
            return;
        }
        let dsdt = dsdt(table);
        if dsdt == 0 || dsdt >= 1 << 32 {
            return;
        }
        let end = dsdt + length(dsdt);
        for id in dsdt + 36..end.saturating_sub(20) {
            if read::<u8>(id) == b'L' && &read::<[u8; 8]>(id) == b"LNRO0005" {
                let resource = (id + 8..(id + 128).min(end - 12)).find(|at| {
                    read::<[u8; 3]>(*at) == [0x86, 9, 0] && read::<u8>(at + 3) < 2
                });
                if let Some(at) = resource {
                    found(read::<u32>(at + 4).into());
                }
            }
        }
    });
}

/// The 16550 in memory that the SPCR names, with the distance of its registers as a power of two and
/// the bytes of an access.
pub(super) fn serial(rsdp: u64) -> Option<(u64, u32, u32)> {
    let mut serial = None;
    tables(rsdp, |table| {
        // Type 0, 1 or 0x12, and a Generic Address Structure with an address in memory.
        let has_16550 = |table| matches!(read::<u8>(table + 36), 0 | 1 | 0x12) && read::<u8>(table + 40) == 0;
        if &read::<[u8; 4]>(table) != b"SPCR" || length(table) < 52 || !has_16550(table) {
            return;
        }
        let (bits, size, base) = (read::<u8>(table + 41), read::<u8>(table + 43), read::<u64>(table + 44));
        let shift = if bits == 32 { 2 } else { 0 };
        if base != 0 && base % 4 == 0 && base < 1 << 32 {
            serial = Some((base, shift, if size == 3 { 4 } else { 1 }));
        }
    });
    serial
}

fn dsdt(fadt: u64) -> u64 {
    let long = if length(fadt) >= 148 { read::<u64>(fadt + 140) } else { 0 };
    if long != 0 { long } else { read::<u32>(fadt + 40).into() }
}

fn length(table: u64) -> u64 {
    u64::from(read::<u32>(table + 4)).min(MAX_TABLE)
}

fn scan(from: u64, to: u64, signature: &[u8]) -> Option<u64> {
    (from..to)
        .step_by(16)
        .find(|at| signature.iter().enumerate().all(|(i, byte)| read::<u8>(at + i as u64) == *byte))
}

fn madt(table: u64, found: &mut impl FnMut(u32)) {
    let (mut at, end) = (table + 44, table + length(table));
    while at + 8 <= end {
        // Bit 0 of the flags: enabled.
        match read::<u8>(at) {
            0 if read::<u32>(at + 4) & 1 == 1 => found(read::<u8>(at + 3).into()),
            9 if read::<u32>(at + 8) & 1 == 1 => found(read::<u32>(at + 4)),
            _ => {}
        }
        at += u64::from(read::<u8>(at + 1)).max(2);
    }
}

fn fadt(table: u64) -> Power {
    let size = length(table);
    let mut power = Power { ports: [(0, 0); 2], sleep: (0, 0) };
    let sleep = s5(dsdt(table));
    // HW_REDUCED_ACPI: a sleep control register replaces PM1. Only I/O ports are supported.
    if size >= 256 && read::<u32>(table + 112) >> 20 & 1 == 1 {
        if let Some(port) = port(table + 244) {
            // Without `_S5_`, the type that most have.
            let [kind, _] = sleep.unwrap_or([5, 5]);
            power.sleep = (port, (kind & 7) << 2 | 1 << 5);
        }
        return power;
    }
    let Some(sleep) = sleep else { return power };
    // PM1a_CNT_BLK and PM1b_CNT_BLK, and their extended forms, which count where these are 0.
    for (at, extended, which) in [(64, 172, 0), (68, 184, 1)] {
        let short = read::<u32>(table + at) as u16;
        let long = if size >= extended + 12 { port(table + extended) } else { None };
        let port = if short != 0 { short } else { long.unwrap_or(0) };
        power.ports[which] = (port, u16::from(sleep[which] & 7) << 10 | 1 << 13);
    }
    power
}

/// The I/O port of a Generic Address Structure.
fn port(at: u64) -> Option<u16> {
    let address = read::<u64>(at + 4);
    (read::<u8>(at) == 1 && address < 1 << 16).then_some(address as u16)
}

/// SLP_TYPa and SLP_TYPb of `_S5_`. It is a package of small constants, so no AML interpreter is
/// needed.
fn s5(dsdt: u64) -> Option<[u8; 2]> {
    if dsdt == 0 || dsdt >= 1 << 32 {
        return None;
    }
    let end = dsdt + length(dsdt).saturating_sub(16);
    let mut at =
        (dsdt + 36..end).find(|at| &read::<[u8; 4]>(*at) == b"_S5_" && read::<u8>(at + 4) == 0x12)? + 5;
    // Skips the PkgLength of one to four bytes, and the number of elements.
    at += u64::from(read::<u8>(at) >> 6) + 2;
    let mut types = [0; 2];
    for value in &mut types {
        match read::<u8>(at) {
            // BytePrefix.
            0x0a => (*value, at) = (read(at + 1), at + 2),
            // ZeroOp, OneOp.
            small @ 0..=1 => (*value, at) = (small, at + 1),
            _ => return Some(types),
        }
    }
    Some(types)
}

/// Looks for `signature` where firmware leaves tables: in the extended BIOS data area, in the last
/// KiB of base memory, and in the BIOS from `bios` on.
fn scan_bios(bios: u64, signature: &[u8]) -> Option<u64> {
    let ebda = u64::from(read::<u16>(0x40e)) << 4;
    let areas = [(ebda, ebda + 1024), (0x9_fc00, 0xa_0000), (bios, 0x10_0000)];
    let areas = areas.into_iter().filter(|(from, to)| *from >= 0x8_0000 && *to <= 0x10_0000);
    areas.filter_map(|(from, to)| scan(from, to, signature)).next()
}

/// Calls `found` with the APIC ID of each processor in the MP table (MultiProcessor Specification
/// 1.4), if there is one.
pub(crate) fn mp_processors(mut found: impl FnMut(u32)) {
    let Some(pointer) = scan_bios(0xf_0000, b"_MP_") else { return };
    let table = u64::from(read::<u32>(pointer + 4));
    if table == 0 || &read::<[u8; 4]>(table) != b"PCMP" {
        return;
    }
    let mut at = table + 44;
    for _ in 0..read::<u16>(table + 34).min(1024) {
        if read::<u8>(at) == 0 {
            // Usable.
            if read::<u8>(at + 3) & 1 == 1 {
                found(read::<u8>(at + 1).into());
            }
            at += 20;
        } else {
            at += 8;
        }
    }
}
