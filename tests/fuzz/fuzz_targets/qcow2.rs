#![no_main]
#[path = "../targets/qcow2.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::qcow2(data));
