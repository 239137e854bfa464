//! `cargo bench --bench migration` compares how Vellum sends memory with the simplest program that
//! could do it.
//!
//! Memory of 1 GiB, all touched, is sent over a socket pair into memory that is untouched. Vellum
//! uses blocks and frames (`migration/pages/`). The simple sender checksums memory and writes it
//! directly from where it is. The simple receiver reads it directly to its destination and
//! checksums it there. It runs with and without checksums. It is correct only while nothing writes
//! to the memory.
//!
//! Two more comparisons: touched memory that is all zero against a scan for a word that is not
//! zero, and two connections (each with a thread on both sides) against one.
//!
//! The rivals take turns, and so does which one begins. The benchmark prints their medians, and the
//! median and quartiles of the ratio in each round. `-- 256` measures with 256 MiB.

use std::hint::black_box;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crc_fast::CrcAlgorithm::Crc32Iscsi;
use vellum_kvm::memory::Slot;
use vellum_migration::message::SessionId;
use vellum_migration::pages::{Block, Incoming, Outgoing};
use vellum_migration::share::Share;
use vellum_migration::wire::{Decoder, Encoder, Frame, HEADER, Header, Kind, MAX_PAGES};
use vellum_sys::mmap::{Mapping, PAGE_SIZE, Source};

const ROUNDS: usize = 15;
const CHUNK: usize = MAX_PAGES as usize * PAGE_SIZE as usize;
const SESSION: SessionId = SessionId([7; 16]);

fn memory(bytes: u64) -> Slot {
    let mapping = Mapping::new(bytes, 2 << 20, Source::Anonymous).expect("memory");
    // Guest memory without huge pages is the same.
    let _ = mapping.advise(libc::MADV_NOHUGEPAGE);
    Slot::new(0, 0, &Arc::new(mapping), 0..bytes).expect("a slot")
}

/// The memory as bytes, for the rivals.
#[allow(clippy::mut_from_ref, reason = "the rivals take one after the other, each for a part of a round")]
fn bytes(slot: &Slot) -> &mut [u8] {
    // SAFETY: the slot is a part of a mapping that this program made. While the result lives,
    // nothing else writes to it.
    unsafe { std::slice::from_raw_parts_mut(slot.hva() as *mut u8, slot.bytes() as usize) }
}

/// Seconds from the first byte until the receiver has the last one in its memory.
fn timed(
    from: &Slot,
    send: impl FnOnce(&Slot, UnixStream) + Send,
    receive: impl FnOnce(&Slot, UnixStream),
) -> f64 {
    let (here, there) = UnixStream::pair().expect("a socket pair");
    let to = memory(from.bytes());
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| send(from, here));
        receive(&to, there);
    });
    let took = start.elapsed().as_secs_f64();
    assert!(bytes(from) == bytes(&to), "not what was sent");
    took
}

fn vellum_send(from: &Slot, link: UnixStream) {
    send_share(&Outgoing::new(from.clone(), 0, true), Share::new(0, 1), link);
}

fn send_share(outgoing: &Outgoing, share: Share, mut link: UnixStream) {
    let (mut encoder, mut block) = (Encoder::new(SESSION), Block::new());
    let (mut at, pages) = (0, outgoing.slot().pages());
    while let Some(own) = share.next(0, at, pages) {
        let run = own.start..own.end.min(own.start + u64::from(MAX_PAGES));
        at = run.end;
        block.fill(outgoing, run, 1, &mut encoder);
        link.write_all(block.bytes()).expect("the receiver lives");
    }
}

/// Seconds with `connections` connections. Each has a thread on both sides.
fn over(connections: u32, from: &Slot) -> f64 {
    let to = memory(from.bytes());
    let (outgoing, incoming) = (Outgoing::new(from.clone(), 0, true), Incoming::new(to.clone(), true));
    let start = Instant::now();
    std::thread::scope(|scope| {
        for connection in 0..connections {
            let (here, there) = UnixStream::pair().expect("a socket pair");
            let (outgoing, incoming) = (&outgoing, &incoming);
            scope.spawn(move || send_share(outgoing, Share::new(connection, connections), here));
            scope.spawn(move || receive_share(incoming, from.pages(), there));
        }
    });
    let took = start.elapsed().as_secs_f64();
    assert!(bytes(from) == bytes(&to), "not what was sent");
    took
}

fn vellum_receive(to: &Slot, link: UnixStream) {
    receive_share(&Incoming::new(to.clone(), true), to.pages(), link);
}

fn receive_share(incoming: &Incoming, pages: u64, mut link: UnixStream) {
    let mut decoder = Decoder::new(Some(SESSION), PAGE_SIZE as u32);
    // One call reads a payload and the header that follows it.
    let mut buffer = vec![0; HEADER + Kind::Pages.most(PAGE_SIZE as u32) as usize + HEADER];
    let (mut at, mut end) = (0, 0);
    let mut header: Option<Header> = None;
    loop {
        let wanted = header.map_or(HEADER, |header| header.len as usize);
        if end - at < wanted {
            if at > 0 {
                buffer.copy_within(at..end, 0);
                (at, end) = (0, end - at);
            }
            match link.read(&mut buffer[end..]).expect("the sender lives") {
                0 => return,
                some => end += some,
            }
            continue;
        }
        let part = &buffer[at..at + wanted];
        at += wanted;
        match header.take() {
            None => header = Some(decoder.header(part.try_into().expect("as long")).expect("a header")),
            Some(header) => match decoder.payload(&header, part).expect("a payload") {
                Frame::Run(run, data) => {
                    run.check(&[pages]).expect("inside");
                    incoming.take(&run, data);
                }
                other => panic!("{other:?}"),
            },
        }
    }
}

fn sum(bytes: &[u8]) -> [u8; 4] {
    (crc_fast::checksum(Crc32Iscsi, bytes) as u32).to_le_bytes()
}

fn bare_send(sums: bool) -> impl FnOnce(&Slot, UnixStream) {
    move |from, mut link| {
        for chunk in bytes(from).chunks(CHUNK) {
            if sums {
                link.write_all(&sum(chunk)).expect("the receiver lives");
            }
            link.write_all(chunk).expect("the receiver lives");
        }
    }
}

fn bare_receive(sums: bool) -> impl FnOnce(&Slot, UnixStream) {
    move |to, mut link| {
        for chunk in bytes(to).chunks_mut(CHUNK) {
            let mut due = [0; 4];
            if sums {
                link.read_exact(&mut due).expect("the sender lives");
            }
            link.read_exact(chunk).expect("the sender lives");
            assert!(!sums || sum(chunk) == due, "a wrong sum");
        }
    }
}

/// Runs `ours` and `theirs` in turns. Prints the speed of `ours` as a fraction of the speed of
/// `theirs`.
fn compare(what: &str, goal: f64, gib: f64, mut ours: impl FnMut() -> f64, mut theirs: impl FnMut() -> f64) {
    let (mut mine, mut bare, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let (mut one, mut other) = (0.0, 0.0);
        for turn in 0..2 {
            if (round + turn) % 2 == 0 {
                one = ours();
            } else {
                other = theirs();
            }
        }
        mine.push(gib / one);
        bare.push(gib / other);
        ratios.push(other / one);
    }
    for samples in [&mut mine, &mut bare, &mut ratios] {
        samples.sort_by(f64::total_cmp);
    }
    let (half, quarter) = (ROUNDS / 2, ROUNDS / 4);
    println!(
        "  {what}: {:.2} GiB/s against {:.2} GiB/s, ratio {:.3} (quartiles {:.3} to {:.3}, {ROUNDS} rounds); goal {goal}",
        mine[half],
        bare[half],
        ratios[half],
        ratios[quarter],
        ratios[ROUNDS - 1 - quarter],
    );
}

fn main() {
    let mib = std::env::args().find_map(|arg| arg.parse().ok()).unwrap_or(1024u64);
    let size = mib << 20;
    let gib = mib as f64 / 1024.0;
    let from = memory(size);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for word in from.mapping().words() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        word.store(state, Ordering::Relaxed);
    }
    println!("{mib} MiB over a socket pair into fresh memory:");
    let ours = || timed(&from, vellum_send, vellum_receive);
    let bare = |sums| timed(&from, bare_send(sums), bare_receive(sums));
    compare("touched, bare with sums   ", 0.9, gib, ours, || bare(true));
    compare("touched, bare without sums", 0.8, gib, ours, || bare(false));

    compare("two connections, one       ", 0.95, gib, || over(2, &from), || over(1, &from));

    from.mapping().words().iter().for_each(|word| word.store(0, Ordering::Relaxed));
    let outgoing = Outgoing::new(from.clone(), 0, true);
    let (mut encoder, mut block) = (Encoder::new(SESSION), Block::new());
    let ours = || {
        let start = Instant::now();
        let pages = u64::from(MAX_PAGES);
        let skipped: u64 = (0..from.pages())
            .step_by(MAX_PAGES as usize)
            .map(|first| {
                block.fill(&outgoing, first..from.pages().min(first + pages), 1, &mut encoder).skipped
            })
            .sum();
        assert_eq!(skipped, from.pages());
        start.elapsed().as_secs_f64()
    };
    let theirs = || {
        let start = Instant::now();
        let memory = black_box(&*bytes(&from));
        // SAFETY: any bytes are valid words.
        let (head, words, tail) = unsafe { memory.align_to::<u64>() };
        assert!(head.is_empty() && tail.is_empty());
        // Each part has no branch inside, so the compiler generates vector instructions.
        assert!(words.chunks(512).all(|part| part.iter().fold(0, |all, word| all | word) == 0));
        start.elapsed().as_secs_f64()
    };
    compare("touched and zero, bare scan", 0.8, gib, ours, theirs);
}
