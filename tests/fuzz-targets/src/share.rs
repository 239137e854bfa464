//! Requests to the server of a shared directory. It answers any request, does not panic, and does
//! not leave the directory.
//!
//! Each request has two bytes for opcode and node, one for the length of its arguments, and the
//! arguments. Bytes after the last complete one are a raw request, with its header.

use std::fs::{self, File};

use support::Scratch;
use vellum_share::fuse::{Answer, IN_HEADER, OUT_HEADER};
use vellum_share::process::open_root;
use vellum_share::server::Server;
use vellum_share::{Cache, Config};

/// A directory with an entry of each kind, beside a file that no request may change.
fn directory() -> Scratch {
    let scratch = Scratch::new().unwrap();
    fs::create_dir_all(scratch.path("shared/d")).unwrap();
    fs::write(scratch.path("outside"), "untouched").unwrap();
    File::create(scratch.path("shared/f")).unwrap();
    std::os::unix::fs::symlink("../outside", scratch.path("shared/l")).unwrap();
    scratch
}

/// This opcode would fill the disk.
const ALLOCATE: u8 = 43;

/// The target. `cargo fuzz` runs it, and `cargo test` runs it on the corpus.
pub fn share(data: &[u8]) {
    let Some((&first, mut rest)) = data.split_first() else { return };
    let config = Config {
        writable: first & 1 != 0,
        joined: first & 8 != 0,
        cache: [Cache::Auto, Cache::Always, Cache::None][usize::from(first >> 1) % 3],
        ..Config::default()
    };
    let directory = directory();
    let root = open_root(&directory.path("shared")).unwrap();
    let mut server = Server::new(root.into(), config, 64).unwrap();
    let mut answer = Answer::default();
    while let [opcode, node, len, more @ ..] = rest {
        let Some((body, next)) = more.split_at_checked(usize::from(*len)) else { break };
        rest = next;
        if *opcode == ALLOCATE {
            continue;
        }
        let mut request = vec![0; IN_HEADER];
        request[..4].copy_from_slice(&((IN_HEADER + body.len()) as u32).to_ne_bytes());
        request[4] = *opcode;
        request[16] = *node;
        request.extend_from_slice(body);
        let opened = server.answer(&request, &mut answer);
        let error = i32::from_ne_bytes(answer.bytes()[4..8].try_into().unwrap());
        assert!(error <= 0 && error > -4096, "{error}");
        assert!(error == 0 || answer.bytes().len() == OUT_HEADER && opened.is_none());
    }
    server.answer(rest, &mut answer);
    assert_eq!(fs::read(directory.path("outside")).unwrap(), b"untouched");
}
