#![no_main]
#[path = "../targets/gdb.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::gdb(data));
