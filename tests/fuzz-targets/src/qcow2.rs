//! Untrusted qcow2 images. Any bytes are an image or give an error of one line, and requests to an
//! image end.

use std::fs::File;
use std::os::unix::fs::FileExt;

use vellum_disk::qcow2::{Named, Qcow2};
use vellum_sys::mmap::memfd;

/// The maximum size of a file in bytes, which bounds the time of a run.
const MAX_FILE: usize = 256 << 10;

fn file(data: &[u8]) -> File {
    let file = memfd(c"qcow2", 0, None).expect("a file");
    file.write_all_at(data, 0).expect("there is memory");
    file
}

/// The target. `cargo fuzz` runs it, and `cargo test` runs it on the corpus.
pub fn qcow2(data: &[u8]) {
    let data = &data[..data.len().min(MAX_FILE)];
    for writable in [false, true] {
        match Qcow2::open(file(data), writable, Named::default()) {
            Err(error) => {
                assert!(!error.to_string().contains('\n') || error.to_string().contains('"'), "{error}")
            }
            Ok(mut image) => requests(&mut image, writable),
        }
    }
}

fn requests(image: &mut Qcow2, writable: bool) {
    let (size, mut bytes) = (image.size(), [0; 1536]);
    for at in [0, 512, 4096, 12 << 10, size / 2, size.saturating_sub(1536)] {
        if at + 1536 > size {
            continue;
        }
        let _ = image.is_hole(at, 1536);
        let _ = image.read_exact_at(&mut bytes, at);
        if writable {
            let _ = image.write_all_at(&bytes, at);
            let _ = image.zero(at, 512, at == 0);
        }
    }
    if writable {
        let _ = image.flush();
    }
}
