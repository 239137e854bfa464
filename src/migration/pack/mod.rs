//! Compressed pages: a run of pages as one Zstandard frame (RFC 8878) that contains its
//! uncompressed size.
//!
//! The compressor writes a subset of the format: raw literals, and sequences with the format's
//! predefined tables. This is fast, and it cannot fail: the guest chooses the contents of its
//! memory, and no content may end the VMM. Any Zstandard decoder reads the result. The decompressor
//! reads a peer's data. It checks the header before it allocates anything, and it never decodes
//! more than the announced pages.

mod sequences;

use std::io::Read;

use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use self::sequences::{Sequence, Tables};

/// RFC 8878, 3.1.1: the magic number, and the descriptor of a single-segment frame with a size of
/// four bytes and without a checksum.
const MAGIC: [u8; 4] = 0xfd2f_b528_u32.to_le_bytes();
const DESCRIPTOR: u8 = 0xa0;
/// The size of a frame's header in bytes: magic number, descriptor and size.
const HEADER: usize = 9;
/// The maximum uncompressed size of a block in bytes (3.1.1.2.4).
const BLOCK: usize = 128 << 10;
/// Block types.
const RAW: u32 = 0;
const COMPRESSED: u32 = 2;

/// The minimum number of bytes that are worth a sequence, which takes about 30 bits. As many bytes
/// are hashed and compared at once.
const MIN_MATCH: usize = 6;
/// The number of bits of an index into the hash table.
const SEEN: u32 = 14;
/// The step grows by one after every 2^6 misses, so that data without repetition is skipped fast.
const MISSES_BEFORE_SKIPPING: u32 = 6;

/// Compresses pages. One instance serves a connection for its whole life.
#[derive(Debug)]
pub struct Packer {
    tables: Tables,
    /// For each hash, where its bytes were last seen, counted from 1. 0 for nowhere.
    seen: Vec<u32>,
    sequences: Vec<Sequence>,
    literals: Vec<u8>,
    packed: Vec<u8>,
}

impl Packer {
    /// A packer with allocated tables.
    pub fn new() -> Self {
        let (sequences, literals, packed) = (Vec::new(), Vec::new(), Vec::new());
        Self { tables: Tables::new(), seen: vec![0; 1 << SEEN], sequences, literals, packed }
    }

    /// `pages` as one frame if that is shorter by at least an eighth. A smaller gain is not worth
    /// the time of decompression.
    pub fn pack(&mut self, pages: &[u8]) -> Option<&[u8]> {
        let len = u32::try_from(pages.len()).ok()?;
        self.packed.clear();
        self.packed.extend(MAGIC);
        self.packed.push(DESCRIPTOR);
        self.packed.extend(len.to_le_bytes());
        self.seen.fill(0);
        let most = pages.len() - pages.len() / 8;
        let mut from = 0;
        while from < pages.len() {
            let to = pages.len().min(from + BLOCK);
            self.block(pages, from, to);
            if self.packed.len() > most {
                return None;
            }
            from = to;
        }
        (from > 0).then_some(&self.packed)
    }

    /// Appends the bytes from `from` to `to` as a block, which may refer to all bytes before it.
    fn block(&mut self, pages: &[u8], from: usize, to: usize) {
        self.find(pages, from, to);
        let head = self.packed.len();
        self.packed.extend([0; 3]);
        self.section_of_literals();
        self.tables.write(&self.sequences, &mut self.packed);
        let mut kind = COMPRESSED;
        if self.packed.len() - head - 3 >= to - from {
            self.packed.truncate(head + 3);
            self.packed.extend_from_slice(&pages[from..to]);
            kind = RAW;
        }
        let size = (self.packed.len() - head - 3) as u32;
        let last = u32::from(to == pages.len());
        self.packed[head..head + 3].copy_from_slice(&(last | kind << 1 | size << 3).to_le_bytes()[..3]);
    }

    /// Splits the bytes from `from` to `to` into literals and copies of earlier bytes.
    fn find(&mut self, pages: &[u8], from: usize, to: usize) {
        self.sequences.clear();
        self.literals.clear();
        let (mut at, mut rest, mut misses) = (from, from, 0u32);
        while at + 8 <= to {
            let word = load(pages, at);
            // The hash covers the first six bytes (`MIN_MATCH`).
            let hash = ((word << 16).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SEEN)) as usize;
            let before = std::mem::replace(&mut self.seen[hash], at as u32 + 1) as usize;
            let matches = before > 0 && (load(pages, before - 1) ^ word) << 16 == 0;
            if !matches {
                at += 1 + (misses >> MISSES_BEFORE_SKIPPING) as usize;
                misses += 1;
                continue;
            }
            let offset = at + 1 - before;
            let len = MIN_MATCH + alike(&pages[at + MIN_MATCH - offset..to], &pages[at + MIN_MATCH..to]);
            self.literals.extend_from_slice(&pages[rest..at]);
            self.sequences.push(Sequence {
                literals: (at - rest) as u32,
                len: len as u32,
                offset: offset as u32,
            });
            at += len;
            (rest, misses) = (at, 0);
        }
        self.literals.extend_from_slice(&pages[rest..to]);
    }

    /// Raw literals with a size of 20 bits (3.1.1.3.1.1).
    fn section_of_literals(&mut self) {
        let header = 3 << 2 | (self.literals.len() as u32) << 4;
        self.packed.extend_from_slice(&header.to_le_bytes()[..3]);
        self.packed.extend_from_slice(&self.literals);
    }
}

impl Default for Packer {
    fn default() -> Self {
        Self::new()
    }
}

/// The eight bytes at `at`.
fn load(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// The length of the common prefix of `one` and `other`.
fn alike(one: &[u8], other: &[u8]) -> usize {
    let (words, _) = one.as_chunks::<8>();
    let (others, _) = other.as_chunks::<8>();
    let mut same = 0;
    for (word, other) in words.iter().zip(others) {
        let differs = u64::from_le_bytes(*word) ^ u64::from_le_bytes(*other);
        if differs != 0 {
            return same + (differs.trailing_zeros() / 8) as usize;
        }
        same += 8;
    }
    same + one[same..].iter().zip(&other[same..]).take_while(|(one, other)| one == other).count()
}

/// Decompresses pages. One instance serves a connection for its whole life.
pub(crate) struct Unpacker {
    decoder: FrameDecoder,
    pages: Vec<u8>,
}

impl Unpacker {
    /// An unpacker without buffers. They grow with the announced sizes.
    pub fn new() -> Self {
        Self { decoder: FrameDecoder::new(), pages: Vec::new() }
    }

    /// Decompresses the frame `packed` into `len` bytes.
    ///
    /// # Errors
    /// It is not such a frame.
    pub fn unpack(&mut self, packed: &[u8], len: usize) -> Result<&[u8], String> {
        let size = u32::try_from(len).map_err(|_| format!("{len} bytes in a frame"))?;
        // The decoder allocates the size in the header, so the header must match exactly.
        let header = [&MAGIC[..], &[DESCRIPTOR], &size.to_le_bytes()].concat();
        if packed.get(..HEADER) != Some(&header[..]) {
            return Err(format!("no frame of Zstandard of {len} bytes in one segment"));
        }
        let mut rest = packed;
        self.pages.resize(len, 0);
        let wrong = |what: &dyn std::fmt::Display| format!("Zstandard: {what}");
        self.decoder.reset(&mut rest).map_err(|error| wrong(&error))?;
        // Decodes block by block. Each block takes at least three input bytes and yields at most
        // `BLOCK` bytes. Before the end, only bytes beyond the window can be collected, and the
        // window is as long as was announced.
        let one = || BlockDecodingStrategy::UptoBlocks(1);
        while !self.decoder.decode_blocks(&mut rest, one()).map_err(|error| wrong(&error))? {
            if self.decoder.can_collect() > 0 {
                return Err(wrong(&"more than was announced"));
            }
        }
        if self.decoder.can_collect() != len || !rest.is_empty() {
            return Err(wrong(&"not as long as was announced"));
        }
        self.decoder.read_exact(&mut self.pages).map_err(|error| wrong(&error))?;
        Ok(&self.pages)
    }
}

impl Default for Unpacker {
    fn default() -> Self {
        Self::new()
    }
}

/// Between two frames an unpacker holds only buffers.
impl Clone for Unpacker {
    fn clone(&self) -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unpacker").field("pages", &self.pages.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn comes_back(packer: &mut Packer, unpacker: &mut Unpacker, pages: &[u8]) -> Option<usize> {
        let packed = packer.pack(pages)?.to_vec();
        assert_eq!(unpacker.unpack(&packed, pages.len()).unwrap(), pages);
        Some(packed.len())
    }

    #[test]
    fn what_repeats_is_short_and_what_does_not_is_left() {
        let (mut packer, mut unpacker) = (Packer::new(), Unpacker::new());
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u8
        };
        for len in [1, 4096, BLOCK, 64 * 4096] {
            let noise: Vec<u8> = (0..len).map(|_| random()).collect();
            assert_eq!(packer.pack(&noise), None, "{len} bytes of noise");
        }
        for len in [4096, BLOCK - 4096, BLOCK, BLOCK + 4096, 64 * 4096] {
            let same = comes_back(&mut packer, &mut unpacker, &vec![7; len]).unwrap();
            assert!(same < 100, "{len} bytes alike take {same}");
            // A guest's pages: a stamp on each, and the rest empty.
            let mut pages = vec![0; len];
            pages.chunks_mut(4096).for_each(|page| page[..32].fill_with(&mut random));
            let stamped = comes_back(&mut packer, &mut unpacker, &pages).unwrap();
            assert!(stamped < len / 40, "{len} bytes take {stamped}");
            // Random bytes twice, far apart.
            let half: Vec<u8> = (0..len / 2).map(|_| random()).collect();
            let twice = [&half[..], &half[..]].concat();
            let took = comes_back(&mut packer, &mut unpacker, &twice).unwrap();
            assert!(took < len * 5 / 8, "{len} bytes take {took}");
        }
        assert_eq!(packer.pack(&[]), None);
    }

    /// The longest literals and copies, and the codes between them.
    #[test]
    fn lengths_of_every_code_come_back() {
        let (mut packer, mut unpacker) = (Packer::new(), Unpacker::new());
        let mut state = 9u64;
        let mut noise = |len: usize| -> Vec<u8> {
            let next = |state: &mut u64| {
                *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (*state >> 33) as u8
            };
            (0..len).map(|_| next(&mut state)).collect()
        };
        let few =
            [6, 7, 34, 35, 36, 42, 58, 67, 99, 130, 131, 259, 1027, 4099, 16_387, 65_538, 65_539, 100_000];
        for literals in
            (0..40).chain([63, 64, 127, 128, 255, 256, 1023, 4095, 16_384, 65_535, 65_536, 70_000])
        {
            let first = noise(literals);
            for copies in few {
                let mut bytes = first.clone();
                bytes.resize(literals + copies + 1, 0x55);
                bytes.extend(noise(3));
                bytes.resize(bytes.len().max(2 * literals) + 200, 0);
                comes_back(&mut packer, &mut unpacker, &bytes).unwrap();
            }
        }
    }

    #[test]
    fn what_a_peer_sends_is_bounded() {
        let pages = vec![7; 8192];
        let frame = Packer::new().pack(&pages).unwrap().to_vec();
        let unpack = |bytes: &[u8], len: usize| Unpacker::new().unpack(bytes, len).map(<[u8]>::to_vec);
        assert_eq!(unpack(&frame, 8192), Ok(pages));
        // Another length than announced, in either place.
        assert!(unpack(&frame, 4096).is_err() && unpack(&frame, 12_288).is_err());
        for announced in [4096u32, 12_288, u32::MAX] {
            let mut other = frame.clone();
            other[5..9].copy_from_slice(&announced.to_le_bytes());
            assert!(
                unpack(&other, 8192).is_err() && unpack(&other, announced.min(1 << 20) as usize).is_err()
            );
        }
        for len in 0..frame.len() {
            assert!(unpack(&frame[..len], 8192).is_err(), "{len} bytes of it");
        }
        assert!(unpack(&[&frame[..], &frame[..]].concat(), 8192).is_err(), "two frames");
        // A window of 2 GiB, and a long series of empty blocks.
        let mut window = MAGIC.to_vec();
        window.extend([0, 0xa8]);
        assert!(unpack(&window, 8192).is_err());
        let mut empty = frame[..HEADER].to_vec();
        empty.extend([0; 3 * 100]);
        assert!(unpack(&empty, 8192).is_err());
        // Run-length blocks: far more than was announced.
        let mut long = frame[..HEADER].to_vec();
        (0..100).for_each(|_| long.extend((1 << 1 | (BLOCK as u32) << 3).to_le_bytes()));
        assert!(unpack(&long, 8192).is_err());
    }

    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let part = prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..60),
            (any::<u8>(), 0..3000usize).prop_map(|(byte, len)| vec![byte; len]),
            (proptest::collection::vec(any::<u8>(), 1..24), 0..200usize)
                .prop_map(|(word, times)| word.repeat(times)),
        ];
        proptest::collection::vec(part, 0..40).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn what_is_packed_comes_back(pages in bytes()) {
            comes_back(&mut Packer::new(), &mut Unpacker::new(), &pages);
        }

        #[test]
        fn whatever_is_unpacked_ends(change in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8), pages in bytes()) {
            if let Some(packed) = Packer::new().pack(&pages) {
                let mut packed = packed.to_vec();
                change.iter().for_each(|(at, byte)| { let at = at.index(packed.len()); packed[at] = *byte });
                let _ = Unpacker::new().unpack(&packed, pages.len());
            }
        }
    }
}
