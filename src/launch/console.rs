//! What a console's last lines say of a guest that did not get as far as it should.

/// Lines that a report of such a guest shows.
const SHOWN: usize = 20;

/// Whether the kernel has said that it panicked.
pub fn has_panicked(console: &str) -> bool {
    console.contains("Kernel panic - not syncing")
}

/// The last lines.
pub fn tail(console: &str) -> String {
    let lines: Vec<&str> = console.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(SHOWN)..].join("\n")
}

/// What most likely kept the guest from running its command.
pub fn cause(console: &str) -> String {
    const CAUSES: [(&str, &str); 8] = [
        (
            "agent: no connection to the host by vsock",
            "the kernel has neither a virtio-vsock driver nor one for a virtio console: CONFIG_VIRTIO_VSOCKETS, CONFIG_VIRTIO_CONSOLE",
        ),
        (
            "agent: share ",
            "the guest could not mount a directory: has its kernel CONFIG_VIRTIO_FS and CONFIG_OVERLAY_FS, and may its server read it?",
        ),
        (
            "Failed to execute /init (error -8)",
            "the kernel runs no 64-bit ELF programs: CONFIG_BINFMT_ELF, CONFIG_64BIT",
        ),
        ("Initramfs unpacking failed", "the initramfs was not unpacked: has the guest memory enough?"),
        ("Unable to mount root fs", "the kernel has no initramfs: CONFIG_BLK_DEV_INITRD"),
        ("Out of memory", "the guest's memory is used up"),
        ("System is deadlocked on memory", "the guest's memory is used up"),
        ("agent: ", "the guest agent could not go on"),
    ];
    if let Some((_, cause)) = CAUSES.iter().find(|(sign, _)| console.contains(sign)) {
        return (*cause).into();
    }
    if let Some(at) = console.find("Kernel panic - not syncing") {
        return console[at..].lines().next().unwrap_or_default().trim().into();
    }
    match console.lines().rfind(|line| !line.trim().is_empty()) {
        Some(line) => format!("the last that it said was: {}", line.trim()),
        None => {
            "it has said nothing on its serial port: CONFIG_SERIAL_8250_CONSOLE and console=ttyS0 (of a PL011 CONFIG_SERIAL_AMBA_PL011_CONSOLE and console=ttyAMA0)".into()
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
        assert_eq!(cause("Booting\n\n"), "the last that it said was: Booting");
        assert!(!has_panicked("Booting\n"));
        assert_eq!(tail(&"a\n\n".repeat(30)).lines().count(), SHOWN);
    }
}
