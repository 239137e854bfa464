//! Untrusted disk images with an operating system: partition tables, file systems, boot loaders'
//! files. Any bytes are bootable, or give an error of one line that says what was found.

use std::rc::Rc;

use vellum_osimage::{Disk, ReadAt, bls, find, grub, uki};

/// The maximum size of a disk in bytes, which bounds the time of a run.
const MAX_DISK: usize = 512 << 10;

/// The target. `cargo fuzz` runs it, and `cargo test` runs it on the corpus.
pub fn osimage(data: &[u8]) {
    let data = &data[..data.len().min(MAX_DISK)];
    // Small inputs are tried as a boot loader's file too.
    if data.len() < 64 << 10 {
        let text = String::from_utf8_lossy(data);
        grub::check(&text);
        let item = bls::parse("entry", &text);
        assert!(item.initrds.iter().all(|initrd| !initrd.contains(' ')));
        if let Some(unified) = uki::parse(data) {
            assert!(unified.kernel.len() <= data.len() && unified.initrd.len() <= data.len());
        }
    }
    let disk: Rc<dyn ReadAt> = Rc::new(data.to_vec());
    let disk = Disk::open(&disk).expect("memory can be read");
    for info in disk.infos() {
        assert!(info.start + info.bytes <= data.len() as u64);
    }
    if let Err(why) = find(&disk) {
        assert!(why.starts_with("no kernel was found"), "{why}");
    }
}
