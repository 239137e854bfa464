//! What bed tests share: a test whose bed is missing is `ignored`, with the reason and the remedy in its line.
//!
//! Bed tests have `harness = false` and hand [`trial`]s to libtest-mimic, because libtest can skip only at compile time.
#![allow(dead_code, reason = "each test binary uses its part")]

use libtest_mimic::{Completion, Failed, Trial};

/// Why a test cannot run here, and what to do about it; `Ok` where it can.
pub type Need = Result<(), String>;

/// A KVM that we may use.
pub fn kvm() -> Need {
    vellum::vm::open().map(drop).map_err(|error| format!("needs KVM: {error}"))
}

/// Both, the first reason first.
pub fn both(one: Need, two: Need) -> Need {
    one.and(two)
}

/// `count` free huge pages of `size` bytes.
pub fn huge_pages(size: u64, count: u64) -> Need {
    vellum::host::hugepages::check(size, size * count)
        .map_err(|shortage| format!("needs huge pages: {shortage}"))
}

/// A test that needs something of its host.
pub fn trial(name: &str, need: Need, test: impl FnOnce() -> Result<(), Failed> + Send + 'static) -> Trial {
    match need {
        Ok(()) => Trial::test(name, test),
        Err(reason) => Trial::test(format!("{name} ({reason})"), || Ok(())).with_ignored_flag(true),
    }
}

/// A test that may find out only while it runs that it cannot say anything here.
pub fn ignorable(
    name: &str,
    need: Need,
    test: impl FnOnce() -> Result<Completion, Failed> + Send + 'static,
) -> Trial {
    match need {
        Ok(()) => Trial::ignorable_test(name, test),
        Err(_) => trial(name, need, || Ok(())),
    }
}

/// Fails the test unless a result's premises held; but that an emulated host hardly idles no test of a few mebibytes can
/// promise.
pub fn premises(report: &vellum::report::Report) -> Result<(), Failed> {
    let failed: Vec<&String> = report.invalid.iter().filter(|why| !why.contains("host was idle")).collect();
    ensure(failed.is_empty(), || format!("{failed:?}"))
}

/// Fails the test with a message unless `condition` holds.
pub fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<(), Failed> {
    if condition { Ok(()) } else { Err(message().into()) }
}
