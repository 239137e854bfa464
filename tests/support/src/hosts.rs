//! What tests require of a host.

use crate::{Failed, Need, ensure};
use vellum_report::Premise;

/// A KVM that this process may use.
pub fn kvm() -> Need {
    vellum_kvm::vm::open().map(drop).map_err(|error| format!("needs KVM: {error}"))
}

/// A KVM on a host that is not emulated, for tests that barely depend on KVM.
pub fn real() -> Need {
    kvm()?;
    match vellum_host::Facts::collect(String::new()).emulated {
        true => Err(
            "hardly depends on KVM, and an emulated host takes minutes for it: cargo test does it in seconds"
                .into(),
        ),
        false => Ok(()),
    }
}

/// The environment variable with which an emulated host runs the tests of [`slow_if_emulated`], too.
pub const EMULATED: &str = "VELLUM_EMULATED";

/// A KVM, for tests that take minutes on an emulated host and have the same to find on a real one.
/// An emulated host runs them only in a run of all of its tests.
pub fn slow_if_emulated() -> Need {
    kvm()?;
    let is_short = std::env::var_os(EMULATED).is_none_or(|value| value != "all");
    match vellum_host::Facts::collect(String::new()).emulated && is_short {
        true => Err("takes minutes on an emulated host: cargo test, cargo lab test svm, or --full".into()),
        false => Ok(()),
    }
}

/// A CPU that stops guests at breakpoints.
pub fn breakpoints() -> Need {
    let amd = std::path::Path::new("/sys/module/kvm_amd").exists();
    if amd && vellum_host::Facts::collect(String::new()).emulated {
        return Err(
            "needs a processor that intercepts int3 and obeys DR7 in a guest, which QEMU's SVM does not \
             (target/i386/tcg: raise_interrupt2, helper_vmrun): cargo lab test vmx, or metal"
                .into(),
        );
    }
    Ok(())
}

/// `count` free huge pages of `size` bytes.
pub fn huge_pages(size: u64, count: u64) -> Need {
    vellum_host::hugepages::check(size, size * count)
        .map_err(|shortage| format!("needs huge pages: {shortage}"))
}

/// Transparent huge pages in files in memory, for mappings that ask for them.
pub fn huge_files() -> Need {
    const FILE: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let words = std::fs::read_to_string(FILE).unwrap_or_default();
    match ["[always]", "[within_size]", "[advise]"].iter().any(|word| words.contains(word)) {
        true => Ok(()),
        false => Err(format!("needs transparent huge pages in files in memory: echo advise > {FILE}")),
    }
}

/// Fails the test if a premise of a result did not hold. A test of a few mebibytes cannot ensure
/// that an emulated host rarely idles, so that premise is ignored.
pub fn premises(report: &vellum_report::Report) -> Result<(), Failed> {
    let failed = report.invalid.iter().filter(|failed| !matches!(failed.premise, Premise::HostIdled { .. }));
    let failed: Vec<String> = failed.map(|failed| failed.to_string()).collect();
    ensure(failed.is_empty(), || format!("{failed:?}"))
}
