#![no_main]
#[path = "../targets/dump.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::dump(data));
