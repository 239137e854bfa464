#![no_main]
#[path = "../targets/report.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::report(data));
