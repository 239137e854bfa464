//! The ACPI tables of a machine: RSDP, XSDT, FADT, MADT, a DSDT, and MCFG if there is PCI.
//!
//! They use the hardware-reduced profile (ACPI 6.5, 4.1): no PM timer, no SCI, no 8259. So a kernel
//! needs nothing that a split interrupt controller lacks. Power-off uses the sleep control
//! register, reset the i8042's command port. Only the MADT names CPUs; Linux looks for them there.
//! All interrupts are edge-triggered, because irqfds deliver them. Without an SCI, events come
//! through a generic event device (ACPI 6.5, 5.6.9).

use acpi_tables::{
    Aml,
    aml::{
        AddressSpace as Resource, AddressSpaceCacheable, Device, EISAName, IO, Interrupt, Memory32Fixed,
        Method, Name, Notify, Package, Path, ResourceTemplate, Scope,
    },
    fadt::{FADTBuilder, Flags},
    gas::{AccessSize, AddressSpace, GAS},
    mcfg::MCFG,
    rsdp::Rsdp,
    sdt::Sdt,
    xsdt::XSDT,
};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError};

use super::{ioapic, ports};
use crate::arch::fixed::{PciHost, Virtio};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// The address of the RSDP: the start of the ROM area that old kernels search (ACPI 6.5, 5.2.5.1).
pub(crate) const RSDP: u64 = 0xe_0000;
/// The maximum end of the tables.
const END: u64 = 0x10_0000;
/// The local APICs' address after reset (Intel SDM vol. 3, 12.4.1).
const LOCAL_APIC: u32 = 0xfee0_0000;
const OEM_ID: [u8; 6] = *b"VELLUM";
const OEM_TABLE_ID: [u8; 8] = *b"VELLUM  ";
/// FADT `IAPC_BOOT_ARCH`: no VGA.
const BOOT_NO_VGA: u16 = 1 << 2;
/// MADT: processor enabled.
const ENABLED: u32 = 1;

/// Why the tables could not be written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// More devices or vCPUs than fit the area below 1 MiB.
    #[error("ACPI tables of {0} bytes do not fit below 1 MiB; use fewer devices or vCPUs")]
    TooLarge(usize),
    /// There is no RAM for the tables.
    #[error("ACPI tables cannot be written below 1 MiB; use more memory")]
    Memory(#[from] GuestMemoryError),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::TooLarge(_) => ErrorOrigin::USER,
            Self::Memory(_) => ErrorOrigin::user(Field::Memory),
        }
    }
}

/// Writes the tables for vCPUs with the local APIC IDs `apic_ids`, for `virtio` and for a VM
/// generation ID at `vmgenid`, if there is one. Returns the RSDP's address.
///
/// # Errors
/// The tables do not fit, or guest memory has no RAM below 1 MiB.
pub fn write<M: GuestMemoryBackend>(
    memory: &M,
    apic_ids: impl IntoIterator<Item = u32>,
    virtio: &Virtio,
    vmgenid: Option<u64>,
) -> Result<u64, Error> {
    let mut tables = Vec::new();
    let mut place = |table: &dyn Fn(&mut Vec<u8>)| {
        // The RSDP's 36 bytes come first. Each table starts on a 16-byte boundary.
        let at = (RSDP + 36 + tables.len() as u64).next_multiple_of(16);
        tables.resize((at - RSDP - 36) as usize, 0);
        table(&mut tables);
        at
    };
    let dsdt = dsdt(virtio, vmgenid);
    let dsdt = place(&|sink| sink.extend_from_slice(dsdt.as_slice()));
    let fadt = place(&|sink| fadt(dsdt).finalize().to_aml_bytes(sink));
    let madt = madt(apic_ids);
    let madt = place(&|sink| sink.extend_from_slice(madt.as_slice()));
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, 1);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    if let Virtio::Pci(host) = virtio {
        let mut mcfg = MCFG::new(OEM_ID, OEM_TABLE_ID, 1);
        mcfg.add_ecam(host.ecam.start, 0, 0, 0);
        xsdt.add_entry(place(&|sink| mcfg.to_aml_bytes(sink)));
    }
    let xsdt = place(&|sink| xsdt.to_aml_bytes(sink));

    let mut all = Vec::new();
    Rsdp::new(OEM_ID, xsdt).to_aml_bytes(&mut all);
    all.append(&mut tables);
    if all.len() as u64 > END - RSDP {
        return Err(Error::TooLarge(all.len()));
    }
    memory.write_slice(&all, GuestAddress(RSDP))?;
    Ok(RSDP)
}

fn fadt(dsdt: u64) -> FADTBuilder {
    let port = |port: u16| GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, port.into());
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, 1)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        // If set, buttons are not fixed hardware. There are none.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    fadt.iapc_boot_arch = BOOT_NO_VGA.into();
    fadt.reset_reg = port(ports::I8042_COMMAND);
    fadt.reset_value = ports::I8042_RESET;
    fadt.sleep_control_reg = port(ports::SLEEP_CONTROL);
    fadt.sleep_status_reg = port(ports::SLEEP_STATUS);
    fadt
}

fn madt(apic_ids: impl IntoIterator<Item = u32>) -> Sdt {
    // Revision 5: ACPI 6.2 or later. The header is followed by the local APICs' address and flags
    // (no 8259).
    let mut madt = Sdt::new(*b"APIC", 44, 5, OEM_ID, OEM_TABLE_ID, 1);
    madt.write_u32(36, LOCAL_APIC);
    let mut structures = Vec::new();
    for (uid, id) in (0u32..).zip(apic_ids) {
        match u8::try_from(id) {
            // Type 0, processor local APIC. ID 255 is the broadcast.
            Ok(id) if id < u8::MAX => {
                structures.extend_from_slice(&[0, 8, uid as u8, id]);
                structures.extend_from_slice(&ENABLED.to_le_bytes());
            }
            // Type 9, processor local x2APIC.
            _ => {
                structures.extend_from_slice(&[9, 16, 0, 0]);
                structures.extend_from_slice([id, ENABLED, uid].map(u32::to_le_bytes).as_flattened());
            }
        }
    }
    // Type 1, I/O APIC: ID 0, interrupts from GSI 0. ISA interrupts are wired one to one, so there
    // are no overrides.
    structures.extend_from_slice(&[1, 12, 0, 0]);
    structures.extend_from_slice([ioapic::BASE as u32, 0].map(u32::to_le_bytes).as_flattened());
    // Type 4, local APIC NMI: LINT1 of all processors.
    structures.extend_from_slice(&[4, 6, 0xff, 0, 0, 1]);
    madt.append_slice(&structures);
    madt
}

/// The DSDT: legacy devices, virtio devices, the VM generation ID, and the value that `\_S5` writes
/// to the sleep control register.
fn dsdt(virtio: &Virtio, vmgenid: Option<u64>) -> Sdt {
    let mut aml = Vec::new();
    let port = |base: u16, len: u8| IO::new(base, base, 1, len);
    let interrupt = |gsi| Interrupt::new(true, true, false, false, gsi);

    device(
        &mut aml,
        "COM1",
        &EISAName::new("PNP0501"),
        0,
        vec![&port(ports::COM1, ports::COM_PORTS as u8), &interrupt(ports::COM1_GSI)],
    );
    device(
        &mut aml,
        "RTC_",
        &EISAName::new("PNP0B00"),
        0,
        vec![&port(ports::RTC_INDEX, ports::RTC_PORTS as u8)],
    );
    device(&mut aml, "PEVT", &"QEMU0001", 0, vec![&port(ports::PVPANIC, 1)]);
    match virtio {
        Virtio::Mmio(devices) => {
            for (uid, d) in (0u32..).zip(devices) {
                // Linux's own ID for virtio-mmio, see drivers/virtio/virtio_mmio.c. The host bus
                // enumerates devices without a parent.
                let (memory, gsi) =
                    (Memory32Fixed::new(true, d.base as u32, d.size as u32), interrupt(d.gsi));
                device(&mut aml, &format!("V{uid:03X}"), &"LNRO0005", uid, vec![&memory, &gsi]);
            }
        }
        Virtio::Pci(host) => bridge(&mut aml, host),
    }
    if let Some(at) = vmgenid {
        generation(&mut aml, at, &interrupt(ports::GED_GSI));
    }
    let five = ports::SLEEP_S5;
    Name::new("_S5_".into(), &Package::new(vec![&five, &0u8, &0u8, &0u8])).to_aml_bytes(&mut aml);

    // Revision 2: 64-bit integers in AML.
    let mut dsdt = Sdt::new(*b"DSDT", 36, 2, OEM_ID, OEM_TABLE_ID, 1);
    dsdt.append_slice(&aml);
    dsdt
}

/// The host bridge (PCI Firmware 3.3, section 4). It routes no legacy interrupts, because its
/// functions send messages.
fn bridge(aml: &mut Vec<u8>, host: &PciHost) {
    // PCI Express, for the configuration spaces in memory; and PCI, for kernels that know only
    // that.
    let (hid, cid) = (EISAName::new("PNP0A08"), EISAName::new("PNP0A03"));
    let (hid, cid) = (Name::new("_HID".into(), &hid), Name::new("_CID".into(), &cid));
    let [uid, segment, bus] = ["_UID", "_SEG", "_BBN"].map(|name| Name::new(name.into(), &0u8));
    let buses = Resource::new_bus_number(0u16, 0);
    let ports = IO::new(ports::PCI_ADDRESS, ports::PCI_ADDRESS, 1, ports::PCI_PORTS);
    let window = (host.window.start as u32, (host.window.end - 1) as u32);
    let window = Resource::new_memory(AddressSpaceCacheable::NotCacheable, true, window.0, window.1, None);
    let resources = ResourceTemplate::new(vec![&buses, &ports, &window]);
    let resources = Name::new("_CRS".into(), &resources);
    let device = Device::new("PCI0".into(), vec![&hid, &cid, &uid, &segment, &bus, &resources]);
    Scope::new("_SB_".into(), vec![&device]).to_aml_bytes(aml);
}

/// The VM generation ID at `at`, and the event device that reports a new one.
fn generation(aml: &mut Vec<u8>, at: u64, interrupt: &Interrupt) {
    // Guests look for either. The second, from its specification, is longer than ACPI allows for an
    // ID.
    let (hid, cid) = (Name::new("_HID".into(), &"VMGENCTR"), Name::new("_CID".into(), &"VM_Gen_Counter"));
    let (low, high) = (at as u32, (at >> 32) as u32);
    let ddn = Name::new("_DDN".into(), &"VM_Gen_Counter");
    let addr = Name::new("ADDR".into(), &Package::new(vec![&low, &high]));
    let device = Device::new("VGEN".into(), vec![&hid, &cid, &ddn, &addr]);

    let (hid, uid) = (Name::new("_HID".into(), &"ACPI0013"), Name::new("_UID".into(), &0u8));
    let resources = ResourceTemplate::new(vec![interrupt]);
    let resources = Name::new("_CRS".into(), &resources);
    // The event device has one interrupt, so the method ignores its argument, the interrupt's
    // number. 0x80: the ID has changed.
    let vgen = Path::new("\\_SB_.VGEN");
    let notify = Notify::new(&vgen, &0x80u8);
    let event = Method::new("_EVT".into(), 1, true, vec![&notify]);
    let events = Device::new("GED_".into(), vec![&hid, &uid, &resources, &event]);
    Scope::new("_SB_".into(), vec![&device, &events]).to_aml_bytes(aml);
}

fn device(aml: &mut Vec<u8>, name: &str, id: &dyn Aml, uid: u32, resources: Vec<&dyn Aml>) {
    let resources = ResourceTemplate::new(resources);
    let (hid, uid) = (Name::new("_HID".into(), id), Name::new("_UID".into(), &uid));
    let resources = Name::new("_CRS".into(), &resources);
    let device = Device::new(Path::new(name), vec![&hid, &uid, &resources]);
    Scope::new("_SB_".into(), vec![&device]).to_aml_bytes(aml);
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestMemoryMmap;

    use crate::arch::fixed::VirtioMmio;

    use super::*;

    /// Reads the tables like a kernel: from the RSDP down, with a check of every checksum.
    fn walk(memory: &GuestMemoryMmap<()>) -> Vec<([u8; 4], Vec<u8>)> {
        let bytes = |at: u64, len: usize| {
            let mut bytes = vec![0; len];
            memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
            bytes
        };
        let sum = |bytes: &[u8]| bytes.iter().fold(0u8, |a, b| a.wrapping_add(*b));
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
        let table = |at: u64| {
            let header = bytes(at, 36);
            let len = u32::from_le_bytes(header[4..8].try_into().unwrap());
            let table = bytes(at, len as usize);
            assert_eq!(sum(&table), 0, "checksum of {:?}", &header[..4]);
            (header[..4].try_into().unwrap(), table)
        };
        let rsdp = bytes(RSDP, 36);
        assert_eq!((&rsdp[..8], sum(&rsdp[..20]), sum(&rsdp)), (&b"RSD PTR "[..], 0, 0));
        let xsdt = table(number(&rsdp[24..32]));
        let mut tables: Vec<_> = xsdt.1[36..].chunks(8).map(|entry| table(number(entry))).collect();
        tables.push(table(number(&tables[0].1[140..148])));
        tables
    }

    #[test]
    fn a_kernel_finds_every_table_cpu_and_device() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
        let virtio = [
            VirtioMmio { base: 0xd000_0000, size: 0x1000, gsi: 5 },
            VirtioMmio { base: 0xd000_1000, size: 0x1000, gsi: 6 },
        ];
        write(&memory, [0, 1, 0x1ff], &Virtio::Mmio(virtio.into()), None).unwrap();
        let tables = walk(&memory);
        let names: Vec<_> = tables.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, [*b"FACP", *b"APIC", *b"DSDT"]);

        let madt = &tables[1].1[44..];
        assert_eq!(madt[..8], [0, 8, 0, 0, 1, 0, 0, 0]);
        assert_eq!(madt[8..16], [0, 8, 1, 1, 1, 0, 0, 0]);
        assert_eq!(madt[16..32], [9, 16, 0, 0, 0xff, 1, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(madt[32..36], [1, 12, 0, 0]);

        let fadt = &tables[0].1;
        assert_eq!(fadt.len(), 276);
        assert_eq!(
            u32::from_le_bytes(fadt[112..116].try_into().unwrap()),
            1 << 20 | 1 << 10 | 1 << 5 | 1 << 4
        );
        assert_eq!((&fadt[116..128], fadt[128]), (&[1, 8, 0, 1, 0x64, 0, 0, 0, 0, 0, 0, 0][..], 0xfe));

        let dsdt = &tables[2].1;
        let count = |needle: &[u8]| dsdt.windows(needle.len()).filter(|w| *w == needle).count();
        assert_eq!((count(b"LNRO0005"), count(b"QEMU0001"), count(b"V001"), count(b"_S5_")), (2, 1, 1, 1));
        // The second device's memory and interrupt descriptors.
        assert_eq!(count(&[0x86, 9, 0, 1, 0, 0x10, 0, 0xd0, 0, 0x10, 0, 0]), 1);
        assert_eq!(count(&[0x89, 6, 0, 0b11, 1, 6, 0, 0, 0]), 1);
        assert_eq!((count(b"VGEN"), count(b"ACPI0013")), (0, 0));
    }

    #[test]
    fn a_bus_is_found_with_its_configuration_spaces_and_its_window() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
        let host = PciHost {
            ports: Some(ports::PCI_ADDRESS),
            ecam: 0xe000_0000..0xe010_0000,
            window: 0xe800_0000..0xf000_0000,
        };
        write(&memory, [0], &Virtio::Pci(host), None).unwrap();
        let tables = walk(&memory);
        let names: Vec<_> = tables.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, [*b"FACP", *b"APIC", *b"MCFG", *b"DSDT"]);
        // After the header and 8 reserved bytes: the base, the segment, the first and the last bus.
        assert_eq!(tables[2].1[44..], [0, 0, 0, 0xe0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let dsdt = &tables[3].1;
        let count = |needle: &[u8]| dsdt.windows(needle.len()).filter(|w| *w == needle).count();
        assert_eq!((count(b"PCI0"), count(b"LNRO0005")), (1, 0));
        // A 32-bit memory address space descriptor: granularity 0, first and last address, no
        // translation, length.
        let window = [0, 0, 0, 0, 0, 0, 0, 0xe8, 0xff, 0xff, 0xff, 0xef, 0, 0, 0, 0, 0, 0, 0, 8];
        assert_eq!(count(&window), 1);
    }

    #[test]
    fn a_generation_id_is_found_and_its_event_notifies_it() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
        write(&memory, [0], &Virtio::Mmio(Vec::new()), Some(0x1_000d_f010)).unwrap();
        let tables = walk(&memory);
        let dsdt = &tables[2].1;
        let count = |needle: &[u8]| dsdt.windows(needle.len()).filter(|w| *w == needle).count();
        assert_eq!((count(b"VMGENCTR\0"), count(b"VM_Gen_Counter\0"), count(b"ACPI0013\0")), (1, 2, 1));
        // Name (ADDR, Package (2) {low, high}): two 32-bit numbers; 1 has a shorter encoding.
        assert_eq!(count(b"ADDR\x12\x08\x02\x0c\x10\xf0\x0d\x00\x01"), 1);
        assert_eq!(count(&[0x89, 6, 0, 0b11, 1, 9, 0, 0, 0]), 1);
        // Method (_EVT, 1, Serialized) { Notify (\_SB.VGEN, 0x80) }
        assert_eq!(count(b"_EVT\x09\x86\\\x2e_SB_VGEN\x0a\x80"), 1);
    }

    #[test]
    fn tables_that_do_not_fit_are_refused() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
        assert!(matches!(
            write(&memory, 0..20_000, &Virtio::Mmio(Vec::new()), None),
            Err(Error::TooLarge(_))
        ));
    }
}
