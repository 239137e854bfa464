//! Whether a machine fits on a target. One answer lists everything that the source's machine has
//! and the machine here lacks, before a page is sent. Memory is not compared: it has been mapped by
//! then, or mapping has failed.

use super::message::Misfit;
use vellum_kvm::arch::cpuid::Leaf;
use vellum_kvm::arch::cpuid::model::Level;
use vellum_kvm::arch::{clocks, cpuid};
use vellum_linux::state::Device;

/// The compared parts of a machine.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// The CPUID of its first vCPU.
    pub cpuid: &'a [Leaf],
    /// The frequency of its TSC in kHz, if known.
    pub tsc_khz: Option<u32>,
    /// Its virtio devices.
    pub devices: &'a [Device],
}

/// The type of a block device (virtio 1.2, section 5.2).
const BLOCK: u32 = 2;

/// Which TSC frequencies fit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tsc {
    /// Whether this host can give guests another TSC frequency than its own.
    pub scales: bool,
    /// Whether another frequency is accepted without scaling. The target's operator decides this.
    pub allowed: bool,
}

/// What is said of a TSC with another frequency.
pub(crate) const TSC: &str = "TSC";

/// Every misfit between a machine like `source` and the machine assembled here.
pub fn misfits(source: &Parts<'_>, here: &Parts<'_>, tsc: Tsc) -> Vec<Misfit> {
    let mut found = Vec::new();
    let lacking = cpuid::lacking(source.cpuid, here.cpuid);
    // One misfit for all features: another CPU generation may lack dozens, and one flag is the
    // remedy for all.
    if !lacking.is_empty() {
        let model = Level::without(lacking.iter().copied());
        let model = model.map_or_else(|| "a CPU model".into(), |level| format!("the CPU model {level}"));
        let without: Vec<String> = lacking.iter().map(|feature| format!("-{feature}")).collect();
        let remedy =
            format!("start the guest with {model}, or with {} among its CPU features", without.join(","));
        let features = if lacking.len() == 1 { "CPU feature" } else { "CPU features" };
        found.push(misfit(&format!("{features} {}", lacking.join(", ")), "present", "missing", &remedy));
    }
    if let (Some(theirs), Some(ours)) = (source.tsc_khz, here.tsc_khz)
        && clocks::tsc_fits(theirs, ours, tsc.scales).is_err()
    {
        if tsc.allowed {
            tracing::warn!(
                "the TSC of the guest that comes had {theirs} kHz, and here it has {ours} kHz; a guest that tells time by it will be \
                 wrong"
            );
        } else {
            let remedy = "use a target whose TSC is within 250 ppm of it, or one that scales TSCs, or allow the mismatch there";
            found.push(misfit(TSC, &format!("{theirs} kHz"), &format!("{ours} kHz"), remedy));
        }
    }
    for device in source.devices {
        match here.devices.iter().find(|ours| ours.name == device.name) {
            None => found.push(misfit(&device.name, "present", "missing", "give the target one")),
            Some(ours) => found.extend(of_device(device, ours)),
        }
    }
    let only_here = |ours: &&Device| source.devices.iter().all(|device| device.name != ours.name);
    for ours in here.devices.iter().filter(only_here) {
        found.push(misfit(&ours.name, "missing", "present", "leave it out there"));
    }
    found
}

/// The difference in one device.
fn of_device(source: &Device, here: &Device) -> Option<Misfit> {
    let (theirs, ours) = (&source.device, &here.device);
    let name = &source.name;
    if theirs.kind != ours.kind {
        let [theirs, ours] = [theirs.kind, ours.kind].map(|kind| format!("a device of type {kind}"));
        return Some(misfit(name, &theirs, &ours, "give the target one of the same kind"));
    }
    if theirs.queues != ours.queues {
        let [theirs, ours] = [&theirs.queues, &ours.queues].map(|queues| format!("{} queues", queues.len()));
        return Some(misfit(name, &theirs, &ours, "give the target's as many"));
    }
    // The configuration space of a block device begins with its number of sectors. Trailing zeroes
    // are omitted.
    let sectors = |config: &[u8]| {
        let byte = |at: usize| u64::from(config.get(at).copied().unwrap_or(0)) << (8 * at);
        (0..8).map(byte).sum::<u64>()
    };
    let [there, mine] = [&theirs.config, &ours.config].map(|config| sectors(config));
    if theirs.kind == BLOCK && there != mine {
        let [there, mine] = [there, mine].map(|sectors| format!("{sectors} sectors"));
        return Some(misfit(name, &there, &mine, "give the target the same disk"));
    }
    let lacking = theirs.features & !ours.features;
    (lacking != 0).then(|| {
        let (theirs, ours) = (format!("features {:#x}", theirs.features), format!("{:#x}", ours.features));
        misfit(name, &theirs, &ours, "give the target's the same options, such as being writable")
    })
}

fn misfit(what: &str, source: &str, target: &str, remedy: &str) -> Misfit {
    let [what, source, target, remedy] = [what, source, target, remedy].map(str::to_owned);
    Misfit { what, source, target, remedy }
}

// The test names x86-64 CPU features.
#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use vellum_devices::virtio::transport::Description;

    fn device(name: &str, kind: u32, features: u64, queues: usize, config: &[u8]) -> Device {
        let device = Description { kind, features, queues: vec![256; queues], config: config.to_vec() };
        Device { name: name.to_owned(), device }
    }

    fn leaf(function: u32, ecx: u32) -> Leaf {
        Leaf { function, ecx, ..Default::default() }
    }

    #[test]
    fn all_that_does_not_fit_is_in_one_answer() {
        let there = [leaf(1, 1 << 28 | 1 << 0 | 1 << 27 | 1 << 25)];
        let devices = [
            device("disk0", BLOCK, 7, 1, &[0, 8]),
            device("disk1", BLOCK, 7, 1, &[0, 8]),
            device("disk2", BLOCK, 7, 2, &[0, 8]),
            device("rng", 4, 1, 1, &[]),
            device("net0", 1, 3, 2, &[1, 2, 3, 4, 5, 6]),
        ];
        let source = Parts { cpuid: &there, tsc_khz: Some(2_000_000), devices: &devices };
        let scales = |scales| Tsc { scales, allowed: false };
        assert_eq!(misfits(&source, &source, scales(false)), []);
        let here = [leaf(1, 1 << 0)];
        let ours = [
            device("disk0", BLOCK, 5, 1, &[0, 8]),
            device("disk1", BLOCK, 7, 1, &[0, 9]),
            device("disk2", BLOCK, 7, 1, &[0, 8]),
            // Another MAC address is not a misfit: the guest's arrives with its state.
            device("net0", 1, 3, 2, &[6, 5, 4, 3, 2, 1]),
            device("console", 3, 1, 2, &[]),
        ];
        let target = Parts { cpuid: &here, tsc_khz: Some(2_001_000), devices: &ours };
        let found = misfits(&source, &target, scales(false));
        let what: Vec<&str> = found.iter().map(|misfit| misfit.what.as_str()).collect();
        assert_eq!(what, ["CPU features aes, avx", "TSC", "disk0", "disk1", "disk2", "rng", "console"]);
        assert!(misfits(&source, &target, scales(true)).iter().all(|misfit| misfit.what != "TSC"));
        assert!(found.iter().all(|misfit| !misfit.remedy.is_empty() && misfit.source != misfit.target));
        let tsc = |source: u32, here: u32, allowed| {
            let [source, here] =
                [source, here].map(|khz| Parts { cpuid: &[], tsc_khz: Some(khz), devices: &[] });
            misfits(&source, &here, Tsc { scales: false, allowed })
        };
        // A higher and a lower frequency, with both settings. KVM accepts a higher one and emulates
        // it by jumps.
        for (source, here) in [(2_000_000, 2_001_000), (2_001_000, 2_000_000)] {
            let found = tsc(source, here, false);
            let [one] = &found[..] else { panic!("{found:?}") };
            assert_eq!(
                (one.source.clone(), one.target.clone()),
                (format!("{source} kHz"), format!("{here} kHz"))
            );
            assert_eq!(tsc(source, here, true), []);
        }
        assert_eq!(tsc(2_000_400, 2_000_000, false), []);
    }
}
