#![no_main]
#[path = "../targets/snapshot.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::snapshot(data));
