//! A Linux guest finds its devices on a PCI bus, with an interrupt for each queue that moves between its CPUs, and gives them up and
//! takes them again.

use std::fs;

use harness::{Failed, ensure};

use crate::guest::{Guest, Image, Scratch, noise};

/// Bytes of the disk.
const DISK: usize = 8 << 20;

/// 2 vCPUs, a disk with two queues, entropy and a balloon.
pub fn enumerates(image: &Image, irqchip: &str) -> Result<(), Failed> {
    let scratch = Scratch::new();
    let disk = scratch.path("disk");
    let seed = std::process::id().into();
    eprintln!("seed {seed}");
    fs::write(&disk, noise(seed, DISK))?;
    let disk = format!("{},queues=2", disk.display());
    let flags =
        ["--cpus", "2", "--memory", "320m", "--irqchip", irqchip, "--transport", "pci", "--disk", &disk];
    let mut guest = Guest::start(image, "", &[&flags[..], &["--rng", "--balloon"]].concat())?;
    guest.ready()?;

    // The bridge, the disk, the vsock, entropy and the balloon, by both ways to their configuration spaces: Linux has those in memory
    // only where the memory map reserves them.
    let classes = guest.shell("cat /sys/bus/pci/devices/*/class")?;
    let expected = ["0x060000", "0x018000", "0xff0000", "0xff0000", "0xff0000"];
    ensure(classes.split_whitespace().eq(expected), || format!("it found {classes:?}"))?;
    let said = guest.shell("dmesg | grep -iE 'ecam|mmconfig'")?;
    ensure(said.contains("e0000000"), || format!("it has no ECAM: {said}"))?;
    let drivers = guest.shell("ls -d /sys/bus/pci/drivers/virtio-pci/0000:* | wc -l")?;
    ensure(drivers.trim() == "4", || format!("{drivers} of them have a driver"))?;
    let interrupts = guest.shell("grep -E 'virtio0-req' /proc/interrupts")?;
    ensure(interrupts.lines().count() == 2 && interrupts.contains("MSI"), || interrupts.clone())?;

    let sum = "dd if=/dev/vda iflag=direct bs=64k 2>/dev/null | sha256sum";
    let first = guest.shell("sha256sum < /dev/vda")?;
    // Their vectors are masked and given other messages while they interrupt.
    let moves = "irqs=$(grep virtio0-req /proc/interrupts | cut -d: -f1); \
        (while :; do for irq in $irqs; do for cpu in 1 2; do echo $cpu > /proc/irq/$irq/smp_affinity; done; done; done) & \
        mover=$!; ";
    let again = guest.shell(&format!("{moves}{sum}; kill $mover"))?;
    ensure(again == first, || format!("{first} came as {again} while interrupts moved"))?;
    let counts = guest.shell("grep virtio0-req /proc/interrupts")?;
    let of_cpu = |cpu: usize| -> u64 {
        counts.lines().filter_map(|line| line.split_whitespace().nth(1 + cpu)?.parse::<u64>().ok()).sum()
    };
    ensure(of_cpu(0) > 0 && of_cpu(1) > 0, || format!("no interrupt has moved:\n{counts}"))?;

    // The driver lets go of the disk and takes it again; then the kernel forgets it and looks for it.
    let place = "0000:00:01.0";
    for act in [
        format!(
            "cd /sys/bus/pci/drivers/virtio-pci; echo {place} > unbind; test ! -e /sys/block/vda; echo {place} > bind"
        ),
        format!("echo 1 > /sys/bus/pci/devices/{place}/remove; echo 1 > /sys/bus/pci/rescan"),
    ] {
        guest.shell(&act)?;
        let again = guest.shell(&format!("until test -b /dev/vda; do :; done; {sum}"))?;
        ensure(again == first, || format!("{first} came as {again} after {act}"))?;
    }
    let ended = guest.power_off()?.with(0)?;
    ensure(ended.errors.is_empty(), || format!("vellum had to say: {}", ended.errors))
}
