//! `cargo bench --bench disk`: the cost of a read of a qcow2 image compared to one of a raw image.
//!
//! Only [`Image::read`] is timed, which is all that differs between the two. Guest, queue and
//! thread are the same, so the ratio is an upper bound of what a guest sees. Both files have the
//! same 256 MiB and are in the page cache. Clusters have 64 KiB, and none is compressed.
//!
//! The rivals take turns. The benchmark prints the medians in nanoseconds per read, and the median
//! of the ratios of each round with its quartiles. On an emulated host whose clock counts
//! instructions (`cargo lab run svm`) the ratios are of instructions.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use support::perf::floor::quartiles;
use support::{Failed, Random, Scratch, ensure};
use vellum_disk::Image;
use vellum_disk::qcow2::{Named, Qcow2};
use vellum_kvm::arch::layout;
use vellum_kvm::memory::slices::Slices;
use vellum_kvm::memory::{Memory, MemoryConfig};
use vm_memory::{GuestAddress, GuestMemoryBackend};

const BYTES: u64 = 256 << 20;
const ROUNDS: usize = 31;

/// The nanoseconds of each read of `len` bytes at the offsets `at`.
fn reads(image: &Image, memory: &Memory, len: usize, at: &[u64]) -> Result<f64, Failed> {
    let start = Instant::now();
    for &at in at {
        let (mut slices, mut done) = (Slices::default(), 0);
        for slice in memory.guest.get_slices(GuestAddress(0), len) {
            slices.push(slice?);
        }
        while slices.left() > 0 {
            let count = image.read(&mut slices, at + done)?;
            ensure(count > 0, || format!("a read at {at} ends after {done} bytes"))?;
            done += count as u64;
        }
    }
    Ok(start.elapsed().as_nanos() as f64 / at.len() as f64)
}

fn main() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let create =
        |name: &str| File::options().read(true).write(true).create_new(true).open(scratch.path(name));
    let (raw, file) = (create("raw")?, create("qcow2")?);
    Qcow2::create(file.try_clone()?, BYTES)?;
    let mut qcow2 = Qcow2::open(file, true, Named::default())?;
    let mut bytes = vec![0; 1 << 20];
    for at in (0..BYTES).step_by(bytes.len()) {
        bytes.fill((at >> 20) as u8 | 1);
        raw.write_all_at(&bytes, at)?;
        qcow2.write_all_at(&bytes, at)?;
    }
    qcow2.flush()?;
    let images = [Image::raw(raw), Image::Qcow2(Box::new(qcow2))];
    let memory = Memory::map(layout::RAM, MemoryConfig::new(2 << 20))?;
    let mut random = Random::new();
    for (what, len, count) in [("4 KiB at random", 4 << 10, 2000), ("1 MiB in sequence", 1 << 20, 64)] {
        let mut at = 0;
        let (mut each, mut ratios) = ([Vec::new(), Vec::new()], Vec::new());
        for round in 0..=ROUNDS {
            let places: Vec<u64> = (0..count)
                .map(|_| {
                    let blocks = BYTES / len as u64;
                    at = if len == 4 << 10 { random.below(blocks) } else { (at + 1) % blocks };
                    at * len as u64
                })
                .collect();
            let mut took = [0.0; 2];
            for rival in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
                took[rival] = reads(&images[rival], &memory, len, &places)?;
            }
            // The first round maps the memory.
            if round > 0 {
                each.iter_mut().zip(took).for_each(|(each, took)| each.push(took));
                ratios.push(took[1] / took[0]);
            }
        }
        let [raw, qcow2] = each.map(|each| quartiles(each)[0]);
        let [ratio, low, high] = quartiles(ratios);
        println!(
            "{what}: raw {raw:.0} ns, qcow2 {qcow2:.0} ns, ratio {ratio:.3} ({low:.3} to {high:.3}, n={ROUNDS})"
        );
    }
    Ok(())
}
