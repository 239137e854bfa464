#![no_main]
#[path = "../targets/keyvalue.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::keyvalue(data));
