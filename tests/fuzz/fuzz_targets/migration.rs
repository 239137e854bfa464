#![no_main]
#[path = "../targets/migration.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::migration(data));
