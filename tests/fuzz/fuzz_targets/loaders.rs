#![no_main]
#[path = "../targets/loaders.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::loaders(data));
