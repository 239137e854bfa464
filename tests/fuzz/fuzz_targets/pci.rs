#![no_main]
#[path = "../targets/pci.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::pci(data));
