#![no_main]
#[path = "../targets/state.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::state(data));
