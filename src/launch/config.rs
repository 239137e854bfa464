//! What a guest's kernel must have been configured with, and what a configuration lacks of it.

/// A symbol, whether it may be a module, and what for.
pub type Symbol = (&'static str, bool, &'static str);

/// What every such guest needs.
pub const NEEDED: [Symbol; 11] = [
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

/// What a guest needs beside that which mounts directories of the host's, and the last of it for overlays.
pub const SHARED: [Symbol; 2] = [
    ("VIRTIO_FS", true, "directories of the host's"),
    ("OVERLAY_FS", true, "changes to these that stay in the guest's memory"),
];

/// How a configuration has a symbol: `y`, `m`, or not.
fn value<'a>(config: &'a str, symbol: &str) -> Option<&'a str> {
    config.lines().find_map(|line| line.strip_prefix("CONFIG_")?.strip_prefix(symbol)?.strip_prefix('='))
}

/// Which of `needed` the text of a .config lacks.
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

/// Which of `needed` a configuration has as modules.
pub fn modules<'a>(
    config: &str,
    needed: impl IntoIterator<Item = &'a Symbol>,
) -> impl Iterator<Item = &'static str> {
    needed.into_iter().map(|(symbol, ..)| *symbol).filter(move |symbol| value(config, symbol) == Some("m"))
}

/// The fragment that makes a configuration complete, for scripts/kconfig/merge_config.sh of the kernel; the drivers that the other
/// devices have are in it too.
pub fn fragment() -> String {
    let needed = NEEDED.iter().chain(&SHARED).map(|(symbol, _, why)| format!("# {why}\nCONFIG_{symbol}=y\n"));
    let depends = ["TTY", "SERIAL_8250", "NET", "VSOCKETS", "VIRTIO_MENU", "FUSE_FS"]
        .map(|symbol| format!("CONFIG_{symbol}=y\n"));
    let more = [
        "VIRTIO_BLK",
        "VIRTIO_NET",
        "VIRTIO_CONSOLE",
        "HW_RANDOM_VIRTIO",
        "VIRTIO_BALLOON",
        "UNIX98_PTYS",
        "SHMEM",
        "TMPFS_XATTR",
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
        let needed = || NEEDED.iter().chain(&SHARED);
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
