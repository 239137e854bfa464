//! Finds the cause of a failed boot in the console's output.

/// The number of last lines to show.
const SHOWN: usize = 20;

/// Whether the kernel has reported a panic.
pub fn has_panicked(console: &str) -> bool {
    console.contains("Kernel panic - not syncing")
}

/// The last lines that are not blank.
pub fn tail(console: &str) -> String {
    let lines: Vec<&str> = console.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(SHOWN)..].join("\n")
}

/// The most likely reason why the guest did not run its command.
pub fn cause(console: &str) -> String {
    const CAUSES: [(&str, &str); 8] = [
        (
            "agent: no connection to the host by vsock",
            "the kernel has no driver for virtio-vsock or a virtio console: CONFIG_VIRTIO_VSOCKETS, CONFIG_VIRTIO_CONSOLE",
        ),
        (
            "agent: share ",
            "the guest could not mount a directory: check CONFIG_VIRTIO_FS and CONFIG_OVERLAY_FS, and that the share's server can read it",
        ),
        (
            "Failed to execute /init (error -8)",
            "the kernel cannot run 64-bit ELF programs: CONFIG_BINFMT_ELF, CONFIG_64BIT",
        ),
        (
            "Initramfs unpacking failed",
            "the initramfs could not be unpacked: the guest may have too little memory",
        ),
        ("Unable to mount root fs", "the kernel does not support an initramfs: CONFIG_BLK_DEV_INITRD"),
        ("Out of memory", "the guest ran out of memory"),
        ("System is deadlocked on memory", "the guest ran out of memory"),
        ("agent: ", "the guest agent failed"),
    ];
    if let Some((_, cause)) = CAUSES.iter().find(|(sign, _)| console.contains(sign)) {
        return (*cause).into();
    }
    if let Some(at) = console.find("Kernel panic - not syncing") {
        return console[at..].lines().next().unwrap_or_default().trim().into();
    }
    match console.lines().rfind(|line| !line.trim().is_empty()) {
        Some(line) => format!("its last line was: {}", line.trim()),
        None => {
            "no output on its serial port: check CONFIG_SERIAL_8250_CONSOLE and console=ttyS0 (for a PL011 CONFIG_SERIAL_AMBA_PL011_CONSOLE and console=ttyAMA0)".into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_found_in_what_kernels_say() {
        let panic = "[    0.9] Kernel panic - not syncing: Attempted to kill init! exitcode=0x0000000b\n[    0.9] CPU: 0\n";
        assert!(has_panicked(panic));
        assert_eq!(cause(panic), "Kernel panic - not syncing: Attempted to kill init! exitcode=0x0000000b");
        let root =
            "[    1.2] Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0)\n";
        assert!(cause(root).contains("CONFIG_BLK_DEV_INITRD"), "{}", cause(root));
        assert!(cause("").contains("CONFIG_SERIAL_8250_CONSOLE"));
        assert_eq!(cause("Booting\n\n"), "its last line was: Booting");
        assert!(!has_panicked("Booting\n"));
        assert_eq!(tail(&"a\n\n".repeat(30)).lines().count(), SHOWN);
    }
}
