//! The kernel configuration that a guest needs, and what a given one lacks.

use std::io::Read;

use super::unpack::unpack;

/// The largest configuration. One with everything enabled has 300 KiB.
const MAX_FILE: u64 = 4 << 20;

/// The configuration in `image`, a kernel with CONFIG_IKCONFIG (kernel/configs.c): gzip data
/// between two marks. For a self-extracting image it searches the payload, if that is gzip, zstd or
/// plain xz.
pub fn within(image: &[u8]) -> Option<String> {
    let kernel = unpacked(image);
    let image = kernel.as_deref().unwrap_or(image);
    let mark = b"IKCFG_ST\x1f\x8b";
    let at = image.windows(mark.len()).position(|window| window == mark)?;
    let mut text = String::new();
    flate2::read::GzDecoder::new(&image[at + 8..]).take(MAX_FILE).read_to_string(&mut text).ok()?;
    text.contains("CONFIG_").then_some(text)
}

/// The kernel that a self-extracting image has, if it is packed by gzip, zstd or plain xz.
pub fn unpacked(image: &[u8]) -> Option<Vec<u8>> {
    compressed_kernel(image).and_then(|packed| unpack(packed.to_vec()).ok())
}

/// The payload of a bzImage (Documentation/arch/x86/boot.rst: setup_sects, payload_offset,
/// payload_length). Except for gzip it ends with the 4-byte length of the unpacked data.
fn compressed_kernel(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    // A value of 0 means 4 sectors of setup code. The boot sector precedes them.
    let sectors = usize::from(if image[0x1f1] == 0 { 4 } else { image[0x1f1] }) + 1;
    let start = word(0x248)?.checked_add(sectors * 512)?;
    let packed = image.get(start..start.checked_add(word(0x24c)?)?)?;
    if packed.starts_with(&[0x1f, 0x8b]) { Some(packed) } else { packed.get(..packed.len().checked_sub(4)?) }
}

/// A symbol, whether it may be a module, and its purpose.
pub type Symbol = (&'static str, bool, &'static str);

/// Needed by all guests.
const NEEDED: [Symbol; 7] = [
    ("BLK_DEV_INITRD", false, "the initramfs"),
    ("BINFMT_ELF", false, "programs"),
    ("64BIT", false, "PID 1, a 64-bit program"),
    ("DEVTMPFS", false, "/dev"),
    ("PROC_FS", false, "/proc"),
    ("SYSFS", false, "/sys"),
    ("TMPFS", false, "/tmp and /run"),
];

/// A PC finds devices through ACPI tables. An Arm board uses a device tree, which its kernels
/// always support.
const TOLD: &[Symbol] =
    if cfg!(target_arch = "aarch64") { &[] } else { &[("ACPI", false, "finding the devices")] };

/// A 16550 from a device tree needs one more driver.
const NS16550: &[Symbol] = if cfg!(target_arch = "aarch64") {
    &[("SERIAL_8250_CONSOLE", false, "the console"), ("SERIAL_OF_PLATFORM", false, "finding the console")]
} else {
    &[("SERIAL_8250_CONSOLE", false, "the console")]
};
const PL011: &[Symbol] = &[("SERIAL_AMBA_PL011_CONSOLE", false, "the console")];

const MMIO: &[Symbol] = &[("VIRTIO_MMIO", true, "the devices' transport")];
/// A PC's bus needs no driver.
const PCI: &[Symbol] = if cfg!(target_arch = "aarch64") {
    &[
        ("PCI_HOST_GENERIC", false, "the devices' bus"),
        ("PCI_MSI", false, "the devices' interrupts"),
        ("VIRTIO_PCI", true, "the devices' transport"),
    ]
} else {
    &[("PCI_MSI", false, "the devices' interrupts"), ("VIRTIO_PCI", true, "the devices' transport")]
};

/// The devices of the machine that depend on the user's choices.
#[derive(Clone, Copy, Debug)]
pub struct Board {
    /// The serial port with the console is a PL011 instead of a 16550.
    pub pl011: bool,
    /// The devices are on a PCI bus instead of virtio-mmio.
    pub pci: bool,
}

impl Board {
    /// The symbols that all guests on this board need.
    pub fn needed(self) -> impl Iterator<Item = &'static Symbol> {
        let (uart, transport) = (if self.pl011 { PL011 } else { NS16550 }, if self.pci { PCI } else { MMIO });
        NEEDED.iter().chain(TOLD).chain(uart).chain(transport)
    }

    /// Dependencies of these symbols that not every kernel has.
    fn depends(self) -> impl Iterator<Item = &'static str> {
        let uart = if self.pl011 { "SERIAL_AMBA_PL011" } else { "SERIAL_8250" };
        let bus = self.pci.then_some("PCI");
        ["TTY", uart].into_iter().chain(bus).chain(["NET", "VSOCKETS", "VIRTIO_MENU", "FUSE_FS"])
    }
}

/// Every guest needs one of these, preferably the first. With the second, it only has the command's
/// streams.
pub(crate) const STREAMS: [Symbol; 2] = [
    ("VIRTIO_VSOCKETS", true, "the command's standard streams"),
    ("VIRTIO_CONSOLE", true, "the command's standard streams, without a vsock"),
];

/// Needed to mount host directories. The last one is for overlays.
pub const SHARED: [Symbol; 2] =
    [("VIRTIO_FS", true, "host directories"), ("OVERLAY_FS", true, "changes to them in the guest's memory")];

/// The value of a symbol: `y`, `m`, or `None`.
fn value<'a>(config: &'a str, symbol: &str) -> Option<&'a str> {
    config.lines().find_map(|line| line.strip_prefix("CONFIG_")?.strip_prefix(symbol)?.strip_prefix('='))
}

/// The symbols of `needed` that the text of a .config lacks.
pub fn lacks<'a>(config: &str, needed: impl IntoIterator<Item = &'a Symbol>) -> Vec<&'static str> {
    let wanted = |(symbol, module, _): &Symbol| {
        let sound = match value(config, symbol) {
            Some("y") => true,
            Some("m") => *module,
            _ => false,
        };
        (!sound).then_some(*symbol)
    };
    needed.into_iter().filter_map(wanted).collect()
}

/// The symbol that makes the kernel ignore the boot loader's command line, if any.
pub fn ignores_command_line(config: &str) -> Option<&'static str> {
    ["CMDLINE_OVERRIDE", "CMDLINE_FORCE"].into_iter().find(|symbol| value(config, symbol) == Some("y"))
}

/// Whether `symbol` is a module. `None` if the configuration lacks it.
pub(crate) fn is_module(config: &str, symbol: &str) -> Option<bool> {
    match value(config, symbol) {
        Some("y") => Some(false),
        Some("m") => Some(true),
        _ => None,
    }
}

/// The symbols of `needed` that are modules.
pub fn modules<'a>(
    config: &str,
    needed: impl IntoIterator<Item = &'a Symbol>,
) -> impl Iterator<Item = &'static str> {
    needed.into_iter().map(|(symbol, ..)| *symbol).filter(move |symbol| value(config, symbol) == Some("m"))
}

/// A configuration fragment for `board`, to use with the kernel's scripts/kconfig/merge_config.sh.
/// It also has the drivers of the other devices.
pub fn fragment(board: Board) -> String {
    let needed = board
        .needed()
        .chain(&STREAMS)
        .chain(&SHARED)
        .map(|(symbol, _, why)| format!("# {why}\nCONFIG_{symbol}=y\n"));
    let depends = board.depends().map(|symbol| format!("CONFIG_{symbol}=y\n"));
    let more = [
        "VIRTIO_BLK",
        "VIRTIO_NET",
        "HW_RANDOM_VIRTIO",
        "VIRTIO_BALLOON",
        "UNIX98_PTYS",
        "SHMEM",
        "TMPFS_XATTR",
    ];
    let more = more.map(|symbol| format!("CONFIG_{symbol}=y\n"));
    let heads = ["# dependencies of these\n".to_owned(), "# other devices and common programs\n".to_owned()];
    let [first, second] = heads;
    needed.chain([first]).chain(depends).chain([second]).chain(more).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_ignores_its_command_line_is_known() {
        let of = ignores_command_line;
        assert_eq!(of("CONFIG_CMDLINE_BOOL=y\nCONFIG_CMDLINE_OVERRIDE=y\n"), Some("CMDLINE_OVERRIDE"));
        assert_eq!(of("CONFIG_CMDLINE_FORCE=y\n"), Some("CMDLINE_FORCE"));
        assert_eq!(of("CONFIG_CMDLINE=\"a\"\n# CONFIG_CMDLINE_FORCE is not set\n"), None);
    }

    #[test]
    fn a_configuration_is_found_in_an_image() {
        use std::io::Write;
        let gzip = |data: &[u8]| {
            let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            packed.write_all(data).unwrap();
            packed.finish().unwrap()
        };
        let text = "# Linux\nCONFIG_ACPI=y\n";
        let mut kernel = b"\x7fELF....IKCFG_ST?".to_vec();
        kernel.extend([&b"IKCFG_ST"[..], &gzip(text.as_bytes()), b"IKCFG_ED"].concat());
        assert_eq!(within(&kernel).as_deref(), Some(text));
        let packed = gzip(&kernel);
        let mut image = vec![0; 2 * 512 + 16];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248] = 16;
        image[0x24c..0x250].copy_from_slice(&(packed.len() as u32).to_le_bytes());
        image.extend(&packed);
        assert_eq!(within(&image).as_deref(), Some(text));
        for end in [0, 0x1f0, 0x204, 0x24b, 2 * 512 + 16] {
            assert_eq!(within(&image[..end]), None, "{end}");
        }
        image[0x248..0x250].fill(0xff);
        assert_eq!(compressed_kernel(&image), None);
        assert_eq!(within(&kernel[..kernel.len() - 20]), None);
    }

    #[test]
    fn the_fragment_lacks_nothing_and_each_missing_line_is_named() {
        for (pl011, pci) in [(false, false), (false, true), (true, false), (true, true)] {
            let board = Board { pl011, pci };
            let whole = fragment(board);
            let needed = || board.needed().chain(&SHARED);
            assert_eq!(lacks(&whole, needed()), [""; 0]);
            for &(symbol, module, _) in needed() {
                let line = format!("CONFIG_{symbol}=y\n");
                assert_eq!(
                    lacks(&whole.replace(&line, &format!("# CONFIG_{symbol} is not set\n")), needed()),
                    [symbol]
                );
                let modular = whole.replace(&line, &format!("CONFIG_{symbol}=m\n"));
                assert_eq!(lacks(&modular, needed()).is_empty(), module, "{symbol}");
                assert_eq!(modules(&modular, needed()).collect::<Vec<_>>(), [symbol]);
            }
        }
    }

    #[test]
    fn a_machine_needs_the_drivers_of_its_own_devices() {
        let needs =
            |pl011, pci, wanted: &str| Board { pl011, pci }.needed().any(|(symbol, ..)| *symbol == wanted);
        assert!(needs(false, false, "SERIAL_8250_CONSOLE") && needs(false, false, "VIRTIO_MMIO"));
        assert!(needs(true, true, "SERIAL_AMBA_PL011_CONSOLE") && needs(true, true, "VIRTIO_PCI"));
        assert!(!needs(true, true, "SERIAL_8250_CONSOLE") && !needs(true, true, "VIRTIO_MMIO"));
    }
}
