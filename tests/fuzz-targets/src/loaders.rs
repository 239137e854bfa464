//! The boot loaders. Any file may be given as a kernel or an initrd. Loading ends with an entry or
//! an error, and loads only into guest memory.

use std::io::Cursor;

use vellum_kvm::arch::boot::{Entry, load};
use vellum_kvm::arch::load::BootRequest;
use vellum_kvm::arch::protocol::Protocol;
use vellum_kvm::arch::tables::Tables;
use vellum_sys::diagnose::Diagnose;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// Addresses that are not RAM.
const RESERVED: std::ops::Range<u64> = 0xe000_0000..0xe010_0000;

/// The target. `cargo fuzz` runs it, and `cargo test` runs it on the corpus.
pub fn loaders(data: &[u8]) {
    let ranges = [(GuestAddress(0), 8 << 20), (GuestAddress(1 << 32), 1 << 20)];
    let memory = GuestMemoryMmap::<()>::from_ranges(&ranges).unwrap();
    for protocol in [None, Some(Protocol::Linux64), Some(Protocol::Multiboot), Some(Protocol::Pvh)] {
        let tables = Tables { rsdp: 0xe_0000, ecam: Some(RESERVED) };
        let request = BootRequest { name: "fuzz", cmdline: "console=ttyS0", protocol, tables: Some(&tables) };
        match load(&memory, &mut Cursor::new(data), Some(&mut Cursor::new(data)), &request) {
            Ok(Entry::Long { rip, .. }) => assert!(memory.address_in_range(GuestAddress(rip)), "{rip:#x}"),
            Ok(Entry::Protected { eip, .. }) => {
                assert!(memory.address_in_range(GuestAddress(eip.into())), "{eip:#x}");
            }
            Err(error) => assert!(error.field().is_some() && !error.to_string().contains('\n')),
        }
    }
}
