//! Frames of a migration's peer, until one is invalid.

use std::sync::{Arc, OnceLock};

use vellum_kvm::memory::Slot;
use vellum_migration::message::Message;
use vellum_migration::verify::{Comparison, MAX_TOLD};
use vellum_migration::wire::{Decoder, Frame, HEADER, MAX_MAPPED, MAX_PAGES, SUM};
use vellum_sys::mmap::{Mapping, PAGE_SIZE, Source};

const PAGE: u32 = 4096;
/// Pages of each region of the machine.
const REGIONS: [u64; 2] = [100, 7];

/// The comparison of a machine with memory in which every second page was touched.
fn compare() -> Comparison {
    static MEMORY: OnceLock<Vec<Slot>> = OnceLock::new();
    let memory = MEMORY.get_or_init(|| {
        let bytes = REGIONS.iter().sum::<u64>() * PAGE_SIZE;
        let mapping = Arc::new(Mapping::new(bytes, PAGE_SIZE, Source::Anonymous).expect("there is memory"));
        let middle = REGIONS[0] * PAGE_SIZE;
        let slot = |id, part| Slot::new(id, 1 << 20, &mapping, part).expect("it is a slot");
        vec![slot(0, 0..middle), slot(1, middle..bytes)]
    });
    let touched = |slot: &Slot| (slot.clone(), vec![0x5555_5555_5555_5555; slot.bitmap_words()]);
    Comparison::new(memory.iter().map(touched).collect())
}

/// The target. A changed byte would fail at the first checksum, so the input is also read with
/// correct checksums.
pub fn migration(data: &[u8]) {
    read(data);
    let mut mended = data.to_vec();
    mend(&mut mended);
    read(&mended);
}

fn read(mut data: &[u8]) {
    let mut decoder = Decoder::new(None, PAGE);
    let mut comparison = None;
    while let Some((head, rest)) = data.split_first_chunk::<HEADER>() {
        let Ok(header) = decoder.header(head) else { return };
        assert!(header.len <= header.kind.most(PAGE), "an allocation without a bound");
        let Some((payload, rest)) = rest.split_at_checked(header.len as usize) else { return };
        match decoder.payload(&header, payload) {
            Ok(Frame::Run(run, content)) => {
                assert!(
                    run.pages > 0
                        && content.is_none_or(|content| content.len() <= (MAX_PAGES * PAGE) as usize)
                );
                if run.check(&REGIONS).is_ok() {
                    let end = run.first + u64::from(run.pages);
                    assert!(end <= REGIONS[run.region as usize], "a page outside of memory");
                }
            }
            Ok(Frame::Sums(run, sums)) => {
                assert_eq!(sums.len(), run.pages as usize * SUM);
                if run.check(&REGIONS).is_ok() {
                    comparison.get_or_insert_with(compare).take(&run, sums);
                }
            }
            Ok(Frame::Missing(run, bits)) => {
                assert!(run.pages <= MAX_MAPPED && bits.len() == run.pages.div_ceil(64) as usize);
                let set: u32 = bits.iter().map(|word| word.count_ones()).sum();
                assert!(set <= run.pages, "a bit of no page");
            }
            Ok(Frame::Message(Message::Compare { .. })) => {
                if let Some(mut all) = comparison.take() {
                    all.finish();
                    assert!(all.wrong >= all.first.len() as u64 && all.first.len() <= MAX_TOLD);
                }
            }
            Ok(_) => {}
            Err(_) => return,
        }
        data = rest;
    }
}

/// Corrects the checksums and numbers of all complete frames.
fn mend(mut data: &mut [u8]) {
    let sum = |bytes: &[u8]| crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32;
    let mut next = 0u64;
    while let Some((head, rest)) = data.split_first_chunk_mut::<HEADER>() {
        let len = u32::from_le_bytes([head[8], head[9], head[10], head[11]]) as usize;
        let Some((payload, rest)) = rest.split_at_mut_checked(len) else { return };
        head[12..16].copy_from_slice(&sum(payload).to_le_bytes());
        head[16..24].copy_from_slice(&next.to_le_bytes());
        let own = sum(&head[..44]);
        head[44..].copy_from_slice(&own.to_le_bytes());
        next += 1;
        data = rest;
    }
}
