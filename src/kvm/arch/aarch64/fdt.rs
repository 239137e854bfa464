//! The device tree (Devicetree Specification 0.4; Linux's Documentation/devicetree/bindings): it
//! tells a kernel its machine, its command line and its initrd.

use std::ops::Range;

use vm_fdt::{Error, FdtWriter};

use super::gic::affinity;
use super::irqchip::Mode;
use super::layout::{
    GENERATION_GSI, GIC_CPU, GIC_CPU_SIZE, GIC_DISTRIBUTOR, GIC_DISTRIBUTOR_SIZE, GIC_REDISTRIBUTOR_SIZE,
    GIC_REDISTRIBUTORS, GIC_TRANSLATION, GIC_TRANSLATION_SIZE, RTC, RTC_SIZE, SERIAL, SERIAL_GSI,
    SERIAL_SIZE,
};
use crate::arch::fixed::{Parts, PciHost, Uart, Virtio};

/// The phandles of the interrupt controller, the clock and the translation service.
const GIC: u32 = 1;
const CLOCK: u32 = 2;
const ITS: u32 = 3;
/// Types of interrupts: shared and private peripheral interrupts.
const SHARED: u32 = 0;
const PRIVATE: u32 = 1;
/// Trigger types.
const EDGE: u32 = 1;
const LEVEL: u32 = 4;
/// The generic timer's private interrupts: secure, non-secure, virtual, hypervisor (Arm BSA, table
/// 11). KVM provides the virtual and the non-secure one.
const TIMERS: [u32; 4] = [13, 14, 11, 10];
/// The largest page size of a guest. Reserved memory is a multiple of it.
const LARGEST_PAGE: u64 = 0x1_0000;

/// What the tree tells beside the machine itself.
pub struct Chosen<'a> {
    /// RAM, in order.
    pub ram: &'a [Range<u64>],
    /// The command line.
    pub cmdline: &'a str,
    /// The initrd's address range.
    pub initrd: Option<&'a Range<u64>>,
    /// Random bytes for the kernel's generators.
    pub seed: &'a [u8],
}

/// Builds the tree of a machine with `parts`.
pub fn build(parts: &Parts<Mode>, told: &Chosen<'_>) -> Result<Vec<u8>, Error> {
    let mut fdt = FdtWriter::new()?;
    let root = fdt.begin_node("")?;
    fdt.property_string("compatible", "linux,dummy-virt")?;
    fdt.property_string("model", "Vellum")?;
    fdt.property_u32("#address-cells", 2)?;
    fdt.property_u32("#size-cells", 2)?;
    fdt.property_u32("interrupt-parent", GIC)?;
    chosen(&mut fdt, told)?;
    for range in told.ram {
        let node = fdt.begin_node(&format!("memory@{:x}", range.start))?;
        fdt.property_string("device_type", "memory")?;
        fdt.property_array_u64("reg", &[range.start, range.end - range.start])?;
        fdt.end_node(node)?;
    }
    processors(&mut fdt, parts.cpus)?;
    controller(&mut fdt, parts)?;
    devices(&mut fdt, parts.uart)?;
    for device in parts.virtio.mmio() {
        let node = fdt.begin_node(&format!("virtio_mmio@{:x}", device.base))?;
        fdt.property_string("compatible", "virtio,mmio")?;
        fdt.property_array_u64("reg", &[device.base, device.size])?;
        fdt.property_array_u32("interrupts", &[SHARED, device.gsi, EDGE])?;
        fdt.property_null("dma-coherent")?;
        fdt.end_node(node)?;
    }
    if let Virtio::Pci(host) = &parts.virtio {
        bridge(&mut fdt, host)?;
    }
    if let Some(at) = parts.vmgenid {
        generation(&mut fdt, at)?;
    }
    fdt.end_node(root)?;
    fdt.finish()
}

fn chosen(fdt: &mut FdtWriter, told: &Chosen<'_>) -> Result<(), Error> {
    let node = fdt.begin_node("chosen")?;
    fdt.property_string("bootargs", told.cmdline)?;
    fdt.property_string("stdout-path", &format!("/serial@{SERIAL:x}"))?;
    fdt.property("rng-seed", told.seed)?;
    if let Some(initrd) = told.initrd {
        fdt.property_u64("linux,initrd-start", initrd.start)?;
        fdt.property_u64("linux,initrd-end", initrd.end)?;
    }
    fdt.end_node(node)
}

fn processors(fdt: &mut FdtWriter, cpus: u32) -> Result<(), Error> {
    let all = fdt.begin_node("cpus")?;
    fdt.property_u32("#address-cells", 1)?;
    fdt.property_u32("#size-cells", 0)?;
    for affinity in (0..cpus.into()).map(affinity) {
        let node = fdt.begin_node(&format!("cpu@{affinity:x}"))?;
        fdt.property_string("device_type", "cpu")?;
        fdt.property_string("compatible", "arm,armv8")?;
        fdt.property_string("enable-method", "psci")?;
        fdt.property_u32("reg", affinity as u32)?;
        fdt.end_node(node)?;
    }
    fdt.end_node(all)?;
    let node = fdt.begin_node("psci")?;
    fdt.property_string_list("compatible", vec!["arm,psci-1.0".into(), "arm,psci-0.2".into()])?;
    fdt.property_string("method", "hvc")?;
    fdt.end_node(node)
}

fn controller(fdt: &mut FdtWriter, parts: &Parts<Mode>) -> Result<(), Error> {
    let distributor = [GIC_DISTRIBUTOR, GIC_DISTRIBUTOR_SIZE];
    let node = fdt.begin_node(&format!("intc@{GIC_DISTRIBUTOR:x}"))?;
    let (compatible, second) = match parts.irqchip {
        Mode::Gicv3 => ("arm,gic-v3", [GIC_REDISTRIBUTORS, u64::from(parts.cpus) * GIC_REDISTRIBUTOR_SIZE]),
        Mode::Gicv2 => ("arm,cortex-a15-gic", [GIC_CPU, GIC_CPU_SIZE]),
    };
    fdt.property_string("compatible", compatible)?;
    fdt.property_u32("#interrupt-cells", 3)?;
    fdt.property_u32("#address-cells", 2)?;
    fdt.property_u32("#size-cells", 2)?;
    fdt.property_null("ranges")?;
    fdt.property_null("interrupt-controller")?;
    fdt.property_array_u64("reg", [distributor, second].as_flattened())?;
    fdt.property_phandle(GIC)?;
    if matches!(parts.virtio, Virtio::Pci(_)) {
        translation(fdt)?;
    }
    fdt.end_node(node)?;

    // GICv2 needs a CPU mask for private interrupts.
    let cpus = if parts.irqchip == Mode::Gicv2 { (1 << parts.cpus.min(8)) - 1 } else { 0 };
    let node = fdt.begin_node("timer")?;
    fdt.property_string("compatible", "arm,armv8-timer")?;
    fdt.property_null("always-on")?;
    let interrupts = TIMERS.map(|number| [PRIVATE, number, cpus << 8 | LEVEL]);
    fdt.property_array_u32("interrupts", interrupts.as_flattened())?;
    fdt.end_node(node)
}

/// The ITS, which takes the devices' messages. Its node is inside the interrupt controller's.
fn translation(fdt: &mut FdtWriter) -> Result<(), Error> {
    let node = fdt.begin_node(&format!("its@{GIC_TRANSLATION:x}"))?;
    fdt.property_string("compatible", "arm,gic-v3-its")?;
    fdt.property_null("msi-controller")?;
    fdt.property_u32("#msi-cells", 1)?;
    fdt.property_array_u64("reg", &[GIC_TRANSLATION, GIC_TRANSLATION_SIZE])?;
    fdt.property_phandle(ITS)?;
    fdt.end_node(node)
}

/// The PCI host bridge (bindings/pci/host-generic-pci.yaml). It routes no legacy interrupts,
/// because its functions send messages. The ITS identifies each by its bus, device and function
/// number.
fn bridge(fdt: &mut FdtWriter, host: &PciHost) -> Result<(), Error> {
    let (ecam, window) = (&host.ecam, &host.window);
    let node = fdt.begin_node(&format!("pcie@{:x}", ecam.start))?;
    fdt.property_string("compatible", "pci-host-ecam-generic")?;
    fdt.property_string("device_type", "pci")?;
    fdt.property_u32("#address-cells", 3)?;
    fdt.property_u32("#size-cells", 2)?;
    fdt.property_array_u32("bus-range", &[0, 0])?;
    fdt.property_array_u64("reg", &[ecam.start, ecam.end - ecam.start])?;
    // 32-bit memory: the address on the bus, the CPU's address, the size.
    let [start, size] = [window.start, window.end - window.start].map(|at| [(at >> 32) as u32, at as u32]);
    let ranges = [&[0x0200_0000][..], &start, &start, &size].concat();
    fdt.property_array_u32("ranges", &ranges)?;
    fdt.property_array_u32("msi-map", &[0, ITS, 0, 0x1_0000])?;
    fdt.property_null("dma-coherent")?;
    fdt.end_node(node)
}

/// The devices of every board.
fn devices(fdt: &mut FdtWriter, uart: Uart) -> Result<(), Error> {
    let node = fdt.begin_node("apb-pclk")?;
    fdt.property_string("compatible", "fixed-clock")?;
    fdt.property_u32("#clock-cells", 0)?;
    fdt.property_u32("clock-frequency", 24_000_000)?;
    fdt.property_string("clock-output-names", "clk24mhz")?;
    fdt.property_phandle(CLOCK)?;
    fdt.end_node(node)?;

    let node = fdt.begin_node(&format!("serial@{SERIAL:x}"))?;
    fdt.property_array_u64("reg", &[SERIAL, SERIAL_SIZE])?;
    match uart {
        Uart::Ns16550 => {
            fdt.property_string("compatible", "ns16550a")?;
            fdt.property_u32("clock-frequency", 1_843_200)?;
        }
        Uart::Pl011 => {
            fdt.property_string_list("compatible", vec!["arm,pl011".into(), "arm,primecell".into()])?;
            fdt.property_array_u32("clocks", &[CLOCK, CLOCK])?;
            fdt.property_string_list("clock-names", vec!["uartclk".into(), "apb_pclk".into()])?;
        }
    }
    fdt.property_array_u32("interrupts", &[SHARED, SERIAL_GSI, EDGE])?;
    fdt.end_node(node)?;

    let node = fdt.begin_node(&format!("rtc@{RTC:x}"))?;
    fdt.property_string_list("compatible", vec!["arm,pl031".into(), "arm,primecell".into()])?;
    fdt.property_array_u64("reg", &[RTC, RTC_SIZE])?;
    fdt.property_u32("clocks", CLOCK)?;
    fdt.property_string("clock-names", "apb_pclk")?;
    fdt.end_node(node)
}

/// The VM generation ID, in memory reserved for it.
fn generation(fdt: &mut FdtWriter, at: u64) -> Result<(), Error> {
    let page = at & !(LARGEST_PAGE - 1);
    let reserved = fdt.begin_node("reserved-memory")?;
    fdt.property_u32("#address-cells", 2)?;
    fdt.property_u32("#size-cells", 2)?;
    fdt.property_null("ranges")?;
    let node = fdt.begin_node(&format!("vmgenid@{page:x}"))?;
    fdt.property_array_u64("reg", &[page, LARGEST_PAGE])?;
    fdt.property_null("no-map")?;
    fdt.end_node(node)?;
    fdt.end_node(reserved)?;
    let node = fdt.begin_node(&format!("rng@{at:x}"))?;
    fdt.property_string("compatible", "microsoft,vmgenid")?;
    fdt.property_array_u64("reg", &[at, 16])?;
    fdt.property_array_u32("interrupts", &[SHARED, GENERATION_GSI, EDGE])?;
    fdt.end_node(node)
}
