//! In tests: simulates a power loss. Each sector written since its file's last fsync may reach the
//! medium or not.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use vellum_kvm::arch::layout;
use vellum_kvm::memory::slices::Slices;
use vellum_kvm::memory::{Memory, MemoryConfig};
use vellum_sys::mmap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use crate::Image;
use crate::qcow2::Qcow2;

/// A change to a file. The files of an image have numbers.
#[derive(Clone)]
pub(crate) enum Act {
    /// These bytes were written at this offset of this file.
    Write(usize, u64, Vec<u8>),
    /// Everything that was written to this file before is on the medium.
    Sync(usize),
}

/// The changes to files, in order.
pub(crate) type Trace = Arc<Mutex<Vec<Act>>>;

pub(crate) const SECTOR: u64 = 512;
/// The number of sectors of the disk. Their total size is not a multiple of a block.
const SECTORS: u64 = 97;

/// A file with these bytes.
pub(crate) fn file(bytes: &[u8]) -> File {
    let file = mmap::memfd(c"disk", 0, None).unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file
}

/// Bytes that differ from sector to sector.
pub(crate) fn base(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at / 512) as u8 ^ 0x55).collect()
}

pub(crate) fn random(state: &mut u64, below: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state % below
}

/// Guest memory as the source of writes and the target of reads.
pub(crate) struct Guest(Memory);

impl Guest {
    pub(crate) fn new() -> Self {
        Self(Memory::map(layout::RAM, MemoryConfig::new(2 << 20)).unwrap())
    }

    fn slices(&self, len: usize) -> Slices<'_> {
        let mut slices = Slices::default();
        for slice in self.0.guest.get_slices(GuestAddress(0), len) {
            slices.push(slice.unwrap());
        }
        slices
    }

    pub(crate) fn write(&self, image: &mut Image, at: u64, bytes: &[u8]) {
        self.0.guest.write_slice(bytes, GuestAddress(0)).unwrap();
        let (mut data, mut at) = (self.slices(bytes.len()), at);
        while data.left() > 0 {
            at += image.write(&mut data, at).unwrap() as u64;
        }
    }

    /// One call of [`Qcow2::write`].
    pub(crate) fn try_write(&self, image: &mut Qcow2, at: u64, bytes: &[u8]) -> io::Result<usize> {
        self.0.guest.write_slice(bytes, GuestAddress(0)).unwrap();
        image.write(&mut self.slices(bytes.len()), at, bytes.len())
    }

    pub(crate) fn read(&self, image: &Image, at: u64, len: usize) -> Vec<u8> {
        let (mut data, mut at) = (self.slices(len), at);
        while data.left() > 0 {
            at += image.read(&mut data, at).unwrap() as u64;
        }
        let mut bytes = vec![0; len];
        self.0.guest.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        bytes
    }
}

/// Makes random writes, zeroes and flushes on the `image` of `original`; `trace` returns the acts
/// on its files. Then cuts the power at `cuts` places, and drops any of the unflushed sectors.
/// Checks that everything flushed is there, and that each other sector has a content written since
/// the flush, or the flushed one. `again` opens the files with the resulting contents. Before the
/// acts those contents were `begin`.
pub(crate) fn is_survived(
    mut image: Image,
    original: &[u8],
    begin: &[Vec<u8>],
    cuts: usize,
    trace: &dyn Fn(&Image) -> Vec<Act>,
    again: &dyn Fn(Vec<File>) -> Image,
) {
    let clock = || std::time::UNIX_EPOCH.elapsed().map_or(1, |elapsed| elapsed.as_nanos() as u64);
    let seed = std::env::var("VELLUM_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(clock) | 1;
    println!("VELLUM_SEED={seed}");
    let (mut state, guest) = (seed, Guest::new());
    assert_eq!(original.len() as u64, SECTORS * SECTOR);
    // The contents written to each sector since its last flush, after each act. The flushed content
    // comes first.
    let sector = |at: u64, from: &[u8]| from[(at * SECTOR) as usize..][..SECTOR as usize].to_vec();
    let mut allowed: Vec<Vec<Vec<u8>>> = (0..SECTORS).map(|at| vec![sector(at, original)]).collect();
    let mut history = vec![(0, allowed.clone())];
    for step in 0..300u64 {
        let first = random(&mut state, SECTORS);
        let count = 1 + random(&mut state, (SECTORS - first).min(20));
        let (at, len) = (first * SECTOR, (count * SECTOR) as usize);
        let written = match random(&mut state, 10) {
            0 | 1 => {
                image.flush().unwrap();
                allowed.iter_mut().for_each(|sector| drop(sector.drain(..sector.len() - 1)));
                None
            }
            2 => {
                image.zero(at, len as u64, random(&mut state, 2) == 0).unwrap();
                Some(vec![0; len])
            }
            _ => {
                let data: Vec<u8> = (0..len).map(|byte| (byte as u64 / SECTOR + step) as u8).collect();
                guest.write(&mut image, at, &data);
                Some(data)
            }
        };
        if let Some(data) = written {
            for part in 0..count {
                allowed[(first + part) as usize].push(sector(part, &data));
            }
        }
        history.push((trace(&image).len(), allowed.clone()));
        let now: Vec<u8> = allowed.iter().flat_map(|sector| sector.last().unwrap().clone()).collect();
        assert_eq!(guest.read(&image, 0, original.len()), now, "step {step}, seed {seed}");
    }
    let trace = trace(&image);
    for _ in 0..cuts {
        let cut = random(&mut state, trace.len() as u64 + 1) as usize;
        let after: Vec<File> = begin.iter().map(|bytes| file(bytes)).collect();
        for (at, act) in trace[..cut].iter().enumerate() {
            let Act::Write(number, offset, data) = act else { continue };
            let is_synced = trace[at..cut].iter().any(|act| matches!(act, Act::Sync(of) if of == number));
            // A file is at least as long as what was written to it.
            let after = &after[*number];
            let end = after.metadata().unwrap().len().max(offset + data.len() as u64);
            after.set_len(end).unwrap();
            // A write may begin within a sector of the medium.
            let mut rest = &data[..];
            let mut to = *offset;
            while !rest.is_empty() {
                let part = rest.len().min((SECTOR - to % SECTOR) as usize);
                if is_synced || random(&mut state, 2) == 0 {
                    after.write_all_at(&rest[..part], to).unwrap();
                }
                (rest, to) = (&rest[part..], to + part as u64);
            }
        }
        let mut image = again(after);
        let mut found = guest.read(&image, 0, original.len());
        // The contents allowed in the step in which the power was lost, and in the step before.
        let at = history.partition_point(|(acts, _)| *acts < cut);
        let steps = &history[at.saturating_sub(1)..(at + 1).min(history.len())];
        for (number, is) in found.chunks(SECTOR as usize).enumerate() {
            let may = steps.iter().any(|(_, allowed)| allowed[number].iter().any(|may| may == is));
            assert!(
                may,
                "sector {number} begins with {}, and may with {:?}; cut at {cut} of {}, seed {seed}",
                is[0],
                steps
                    .iter()
                    .map(|(_, allowed)| allowed[number].iter().map(|is| is[0]).collect())
                    .collect::<Vec<Vec<u8>>>(),
                trace.len()
            );
        }
        // What is written then overwrites nothing else.
        for step in 0..3 {
            let at = random(&mut state, SECTORS) * SECTOR;
            let data = vec![0xf0 | step; SECTOR as usize];
            guest.write(&mut image, at, &data);
            found[at as usize..][..data.len()].copy_from_slice(&data);
        }
        assert!(
            guest.read(&image, 0, original.len()) == found,
            "a write after the loss at {cut} overwrites something else, seed {seed}"
        );
    }
}
