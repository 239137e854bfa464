#![no_main]
#[allow(dead_code, reason = "it is a target of its own")]
#[path = "../targets/pci.rs"]
mod pci;
#[path = "../targets/state.rs"]
mod target;
#[allow(dead_code, reason = "it is a target of its own")]
#[path = "../targets/virtio.rs"]
mod virtio;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::state(data));
