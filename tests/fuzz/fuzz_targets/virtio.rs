#![no_main]
#[path = "../targets/virtio.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::virtio(data));
