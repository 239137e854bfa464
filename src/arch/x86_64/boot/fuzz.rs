//! The loaders' fuzz target: a plain function, so that its corpus also runs in `cargo test`.

use std::io::Cursor;

use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::{Protocol, Request, load};

/// Loads `data` as a kernel by every protocol, and as an initrd beside itself. Anything but a panic is right.
pub fn fuzz_load(data: &[u8]) {
    let ranges = [(GuestAddress(0), 8 << 20), (GuestAddress(1 << 32), 1 << 20)];
    let Ok(memory) = GuestMemoryMmap::<()>::from_ranges(&ranges) else { return };
    for protocol in [None, Some(Protocol::Linux64), Some(Protocol::Multiboot), Some(Protocol::Pvh)] {
        let request = Request { name: "fuzz", cmdline: "console=ttyS0", protocol, rsdp: Some(0xe_0000) };
        let _ = load(&memory, &mut Cursor::new(data), Some(&mut Cursor::new(data)), &request);
    }
}
