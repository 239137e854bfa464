//! What tests need of a host, beside what `harness` has for all of them.
#![allow(dead_code, reason = "each test binary uses its part")]

use harness::{Failed, Need, ensure};
use vellum::report::Premise;

/// A KVM that we may use.
pub fn kvm() -> Need {
    vellum::vm::open().map(drop).map_err(|error| format!("needs KVM: {error}"))
}

/// `count` free huge pages of `size` bytes.
pub fn huge_pages(size: u64, count: u64) -> Need {
    vellum::host::hugepages::check(size, size * count)
        .map_err(|shortage| format!("needs huge pages: {shortage}"))
}

/// Fails the test unless a result's premises held; but that an emulated host hardly idles no test of a few mebibytes can
/// promise.
pub fn premises(report: &vellum::report::Report) -> Result<(), Failed> {
    let failed = report.invalid.iter().filter(|failed| !matches!(failed.premise, Premise::HostIdled { .. }));
    let failed: Vec<String> = failed.map(|failed| failed.to_string()).collect();
    ensure(failed.is_empty(), || format!("{failed:?}"))
}
