//! Whether this host's KVM lets guests load CR3 without an exit, and if not, why.

use kvm_ioctls::Kvm;

use super::{Facts, Paging, sysfs};
use vellum_sys::cr3_cache::CAPABILITY;

/// The location of the patches.
const SERIES: &str = "kernel-patches/6.12/cr3-cache or 5.10/cr3-cache";

/// Why there is no CR3 cache here, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this host has none: {why}; {remedy}")]
pub struct Unavailable {
    /// The reason.
    pub why: String,
    /// The remedy.
    pub remedy: String,
}

/// The number of address spaces that a vCPU can switch among without an exit.
///
/// # Errors
/// There is no CR3 cache.
pub fn entries(kvm: &Kvm) -> Result<u32, Unavailable> {
    match kvm.check_extension_raw(CAPABILITY.into()) {
        entries @ 1.. => Ok(entries as u32),
        _ => {
            let facts = Facts::collect(String::new());
            let parameter =
                sysfs::read("/sys/module/kvm/parameters/cr3_cache", &mut [0; 8]).map(str::to_owned);
            Err(unavailable(facts.module.as_deref(), facts.paging, parameter.as_deref()))
        }
    }
}

/// Why a KVM with `module` and the module parameter `kvm.cr3_cache` has no entries: the first thing
/// that would have to change.
fn unavailable(module: Option<&str>, paging: Paging, parameter: Option<&str>) -> Unavailable {
    let of = |why: String, remedy: String| Unavailable { why, remedy };
    match (module, paging, parameter) {
        (Some("kvm_intel"), Paging::Ept, _) => of(
            "kvm_intel uses EPT, under which loads of CR3 do not exit anyway".into(),
            "load kvm_intel with ept=0 where guests are to be shadowed".into(),
        ),
        (Some("kvm_intel"), _, None) => of(
            "this kernel's KVM does not know of it".into(),
            format!("boot a kernel with the patches in {SERIES}"),
        ),
        (Some("kvm_intel"), _, Some("N" | "n" | "0")) => {
            of("kvm.cr3_cache=N forbids it".into(), "boot with kvm.cr3_cache=Y".into())
        }
        (Some("kvm_intel"), _, Some(_)) => of(
            "the processor has no CR3-target list, as where KVM runs in a guest itself".into(),
            "use a processor whose IA32_VMX_MISC says that it has CR3 targets".into(),
        ),
        (module, ..) => of(
            format!("it takes kvm_intel, and here is {}", module.unwrap_or("no KVM module")),
            format!("use an Intel host with kvm_intel.ept=0 and a kernel with the patches in {SERIES}"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_what_would_have_to_change_first() {
        for (module, paging, parameter, says) in [
            (None, Paging::Unknown, None, "no KVM module"),
            (Some("kvm_pvm"), Paging::Shadow, None, "here is kvm_pvm"),
            (Some("kvm_amd"), Paging::Npt, Some("Y"), "here is kvm_amd"),
            (Some("kvm_intel"), Paging::Ept, None, "uses EPT"),
            (Some("kvm_intel"), Paging::Ept, Some("N"), "uses EPT"),
            (Some("kvm_intel"), Paging::Shadow, None, "does not know of it"),
            (Some("kvm_intel"), Paging::Shadow, Some("N"), "forbids it"),
            (Some("kvm_intel"), Paging::Shadow, Some("Y"), "no CR3-target list"),
        ] {
            let why = unavailable(module, paging, parameter).to_string();
            assert!(why.contains(says), "{module:?} {paging:?} {parameter:?}: {why}");
        }
    }
}
