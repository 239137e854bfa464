#![no_main]
#[path = "../targets/control.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::control(data));
