#![no_main]
#[path = "../targets/fleet.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::fleet(data));
