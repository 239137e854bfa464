//! Whether this host's kernel can hand machines over to the next one (Live Update Orchestrator,
//! Documentation/core-api/liveupdate.rst), and to which kernel.
//!
//! Two kernels must have the same versions of what they hand over. Neither checks that before the
//! kexec: with another version of the orchestrator the next kernel panics, and with another version of
//! the kexec handover it boots, and memory is lost.

use std::fs;
use std::io;
use std::path::Path;

use super::doctor::Check;
use vellum_sys::host::kernel_release;
use vellum_sys::liveupdate::{DEVICE, Orchestrator};

/// The parameters that both kernels take.
const PARAMETERS: [&str; 2] = ["kho=on", "liveupdate=on"];

/// What kernels hand over, by the names in their images.
const FORMATS: [&str; 3] = ["kho", "luo", "memfd"];

/// The handover versions of a kernel: those of the kexec handover, of the orchestrator, and of memfds.
/// None that is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Versions(pub [Option<String>; 3]);

impl Versions {
    /// The versions in an unpacked kernel image.
    pub fn within(image: &[u8]) -> Self {
        Self(FORMATS.map(|name| string(image, name)))
    }

    /// Those of the running kernel, from debugfs. It tells only the first two.
    ///
    /// # Errors
    /// Why they cannot be read.
    pub fn running() -> Result<Self, String> {
        let directory = Path::new("/sys/kernel/debug/kho/out");
        let read = |name: &str| {
            let file = directory.join(name);
            fs::read(&file).map_err(|error| format!("{}: {error}", file.display()))
        };
        let (handover, orchestrator) = (read("fdt")?, read("sub_fdts/LUO")?);
        Ok(Self([string(&handover, FORMATS[0]), string(&orchestrator, FORMATS[1]), None]))
    }

    /// Takes what is not known here from `image`, which is this kernel's own.
    pub fn fill(&mut self, image: Self) {
        for (here, there) in self.0.iter_mut().zip(image.0) {
            *here = here.take().or(there);
        }
    }

    /// What differs in `next`, or is missing there, in words. What is not known here does not differ.
    pub fn differences(&self, next: &Self) -> Option<String> {
        let told = |version: &Option<String>| version.clone().unwrap_or_else(|| "none".into());
        let differing = self.0.iter().zip(&next.0).zip(FORMATS);
        let differing =
            differing.filter(|((here, there), _)| there.is_none() || here.is_some() && here != there);
        let each: Vec<String> = differing
            .map(|((here, there), name)| match here {
                Some(here) => format!("this kernel hands over in {here}, and that one takes {}", told(there)),
                None => format!("that kernel takes no {name}"),
            })
            .collect();
        (!each.is_empty()).then(|| each.join("; "))
    }
}

/// The string `NAME-vNUMBER` in `bytes`, with the zero that ends it.
fn string(bytes: &[u8], name: &str) -> Option<String> {
    let start = format!("{name}-v");
    let found = bytes.windows(start.len()).enumerate().filter(|(_, window)| *window == start.as_bytes());
    found
        .filter_map(|(at, _)| {
            let digits = &bytes[at + start.len()..bytes.len().min(at + start.len() + 5)];
            let end = digits.iter().position(|byte| !byte.is_ascii_digit())?;
            let is_string = end > 0 && digits[end] == 0;
            is_string.then(|| format!("{start}{}", String::from_utf8_lossy(&digits[..end])))
        })
        .next()
}

/// The bytes of each part of the scratch area, into which the next kernel and its initial RAM disk
/// must fit. None if debugfs does not tell.
pub fn scratch() -> Option<Vec<u64>> {
    let text = fs::read_to_string("/sys/kernel/debug/kho/out/scratch_len").ok()?;
    text.split_whitespace()
        .map(|word| word.trim_start_matches("0x"))
        .map(|word| u64::from_str_radix(word, 16).ok())
        .collect()
}

/// The bytes that a kernel image takes while it starts (Documentation/arch/x86/boot.rst: init_size).
pub fn memory_of(image: &[u8]) -> u64 {
    let is_setup = image.get(0x202..0x206) == Some(b"HdrS");
    let size = image.get(0x260..0x264).filter(|_| is_setup).and_then(|bytes| bytes.try_into().ok());
    size.map_or(0, u32::from_le_bytes).max(image.len() as u32).into()
}

/// The check of `vellum doctor`.
pub fn examine() -> Check {
    const NAME: &str = "live update";
    if Path::new(DEVICE).exists() {
        // A kernel that cannot read what the last one has handed over refuses every open. Who may not
        // open it is not told that.
        if let Err(error) = Orchestrator::open()
            && error.raw_os_error() != Some(libc::EBUSY)
            && error.kind() != io::ErrorKind::PermissionDenied
        {
            return Check::warn(
                NAME,
                format!("no: {DEVICE}: {error}"),
                "this kernel cannot read what the last one has handed over, and dmesg says why; after the next reboot it works again",
            );
        }
        let scratch = scratch().map_or(String::new(), |parts| {
            let parts: Vec<String> = parts.iter().map(|part| format!("{}", part >> 20)).collect();
            format!("; the next kernel and its initramfs fit into {} MiB of scratch area", parts.join(" + "))
        });
        return Check::ok(NAME, format!("{DEVICE} is there{scratch}"));
    }
    let given = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let missing: Vec<&str> =
        PARAMETERS.into_iter().filter(|word| !given.split_whitespace().any(|given| given == *word)).collect();
    let boot = format!("boot it with {}", PARAMETERS.join(" "));
    match config().as_deref().map(|config| config.lines().any(|line| line == "CONFIG_LIVEUPDATE=y")) {
        Some(false) => Check::warn(
            NAME,
            "no: this kernel has no CONFIG_LIVEUPDATE",
            format!("a kernel from 6.19 on with CONFIG_LIVEUPDATE and CONFIG_KEXEC_HANDOVER; {boot}"),
        ),
        Some(true) if !missing.is_empty() => {
            Check::warn(NAME, format!("no: this kernel was started without {}", missing.join(" and ")), boot)
        }
        Some(true) => Check::warn(
            NAME,
            format!("no: there is no {DEVICE}"),
            "dmesg says why: no memory for the scratch area (kho_scratch=), or another handover",
        ),
        None => Check::warn(
            NAME,
            format!("no: there is no {DEVICE}"),
            format!("a kernel from 6.19 on with CONFIG_LIVEUPDATE; {boot}"),
        ),
    }
}

/// The running kernel's configuration, where a distribution puts it.
fn config() -> Option<String> {
    fs::read_to_string(format!("/boot/config-{}", kernel_release())).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_as_strings_alone() {
        let image = b"\0kho-v9-\0-kho-vx\0kho-v4\0..luo-v12\0memfd-v\0memfd-v2\0";
        let found = Versions::within(image);
        assert_eq!(found.0, ["kho-v4", "luo-v12", "memfd-v2"].map(|text| Some(text.to_owned())));
        assert_eq!(Versions::within(b"kho-v4"), Versions::default());
    }

    #[test]
    fn kernels_with_other_versions_are_told() {
        let versions = |texts: [&str; 3]| {
            Versions(texts.map(|text| Some(text.to_owned()).filter(|text| !text.is_empty())))
        };
        let here = versions(["kho-v4", "luo-v5", ""]);
        assert_eq!(here.differences(&versions(["kho-v4", "luo-v5", "memfd-v2"])), None);
        // What debugfs does not tell is in the running kernel's image.
        let mut known = here.clone();
        known.fill(versions(["kho-v3", "luo-v5", "memfd-v2"]));
        assert_eq!(known, versions(["kho-v4", "luo-v5", "memfd-v2"]));
        let differs = known.differences(&versions(["kho-v4", "luo-v5", "memfd-v3"])).unwrap();
        assert_eq!(differs, "this kernel hands over in memfd-v2, and that one takes memfd-v3");
        let differs = here.differences(&versions(["kho-v4", "luo-v6", "memfd-v2"])).unwrap();
        assert_eq!(differs, "this kernel hands over in luo-v5, and that one takes luo-v6");
        assert!(
            here.differences(&Versions::default())
                .unwrap()
                .contains("takes none; that kernel takes no memfd")
        );
    }
}
