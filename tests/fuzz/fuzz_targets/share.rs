#![no_main]
#[path = "../targets/share.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::share(data));
