//! What a guest's kernel must have been configured with, and what a configuration lacks of it.

/// A symbol, whether it may be a module, and what for.
pub const NEEDED: [(&str, bool, &str); 11] = [
    ("BLK_DEV_INITRD", false, "the initramfs"),
    ("BINFMT_ELF", false, "programs"),
    ("64BIT", false, "PID 1, a 64-bit program"),
    ("ACPI", false, "the devices' places"),
    ("DEVTMPFS", false, "/dev"),
    ("PROC_FS", false, "/proc"),
    ("SYSFS", false, "/sys"),
    ("TMPFS", false, "/tmp and /run"),
    ("SERIAL_8250_CONSOLE", false, "the console"),
    ("VIRTIO_MMIO", true, "the devices' transport"),
    ("VIRTIO_VSOCKETS", true, "the command's standard streams"),
];

/// How a configuration has a symbol: `y`, `m`, or not.
fn value<'a>(config: &'a str, symbol: &str) -> Option<&'a str> {
    config.lines().find_map(|line| line.strip_prefix("CONFIG_")?.strip_prefix(symbol)?.strip_prefix('='))
}

/// The symbols that `config`, the text of a .config, lacks.
pub fn lacks(config: &str) -> Vec<&'static str> {
    let wanted = |(symbol, module, _): &(&'static str, bool, &str)| {
        let sound = match value(config, symbol) {
            Some("y") => true,
            Some("m") => *module,
            _ => false,
        };
        (!sound).then_some(*symbol)
    };
    NEEDED.iter().filter_map(wanted).collect()
}

/// The symbols that a configuration has as modules and that a guest cannot be without.
pub fn modules(config: &str) -> impl Iterator<Item = &'static str> {
    NEEDED.iter().map(|(symbol, ..)| *symbol).filter(move |symbol| value(config, symbol) == Some("m"))
}

/// The fragment that makes a configuration complete, for scripts/kconfig/merge_config.sh of the kernel; the drivers that the other
/// devices have are in it too.
pub fn fragment() -> String {
    let needed = NEEDED.iter().map(|(symbol, _, why)| format!("# {why}\nCONFIG_{symbol}=y\n"));
    let depends =
        ["TTY", "SERIAL_8250", "NET", "VSOCKETS", "VIRTIO_MENU"].map(|symbol| format!("CONFIG_{symbol}=y\n"));
    let more = [
        "VIRTIO_BLK",
        "VIRTIO_NET",
        "VIRTIO_CONSOLE",
        "HW_RANDOM_VIRTIO",
        "VIRTIO_BALLOON",
        "UNIX98_PTYS",
        "SHMEM",
    ];
    let more = more.map(|symbol| format!("CONFIG_{symbol}=y\n"));
    let heads =
        ["# what these depend on\n".to_owned(), "# other devices, and what commands expect\n".to_owned()];
    let [first, second] = heads;
    needed.chain([first]).chain(depends).chain([second]).chain(more).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fragment_lacks_nothing_and_each_missing_line_is_named() {
        let whole = fragment();
        assert_eq!(lacks(&whole), [""; 0]);
        for (symbol, module, _) in NEEDED {
            let line = format!("CONFIG_{symbol}=y\n");
            assert_eq!(lacks(&whole.replace(&line, &format!("# CONFIG_{symbol} is not set\n"))), [symbol]);
            let modular = whole.replace(&line, &format!("CONFIG_{symbol}=m\n"));
            assert_eq!(lacks(&modular).is_empty(), module, "{symbol}");
            assert_eq!(modules(&modular).collect::<Vec<_>>(), [symbol]);
        }
    }
}
