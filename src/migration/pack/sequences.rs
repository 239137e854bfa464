//! A block's sequences section (RFC 8878, 3.1.1.3.2). A sequence is a number of literals and then a
//! copy of earlier bytes. Its codes are written with the format's predefined tables as finite state
//! entropy (4.1), last sequence first.

/// Literals followed by a copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence {
    /// The number of literals, below 128 Ki.
    pub literals: u32,
    /// The length of the copy in bytes, at least 3 and at most 128 Ki.
    pub len: u32,
    /// The distance back to its source, at least 1 and below 2^28.
    pub offset: u32,
}

/// 3.1.1.3.2.2.1 to 3: the expected frequency of each code, of 64, 64 and 32. -1 is less than once.
const LITERALS: [i16; 36] = [
    4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1,
    -1, -1,
];
const COPIES: [i16; 53] = [
    1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1,
];
const OFFSETS: [i16; 29] =
    [1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1];

/// 3.1.1.3.2.1.1: the minimum length of each code, from code 16 on for literals and from code 32 on
/// for copies. A code has as many extra bits as it takes to reach the next code.
const LONG_LITERALS: [u32; 20] =
    [16, 18, 20, 22, 24, 28, 32, 40, 48, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536];
const LONG_COPIES: [u32; 21] = [
    35, 37, 39, 41, 43, 47, 51, 59, 67, 83, 99, 131, 259, 515, 1027, 2051, 4099, 8195, 16_387, 32_771, 65_539,
];

/// A code and its extra bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Code {
    code: usize,
    more: u32,
    bits: u32,
}

/// The code of `length`. Lengths below `long[0]` have a code each, and codes count from the length
/// `least`.
fn code(length: u32, least: u32, long: &[u32]) -> Code {
    let first = long[0];
    if length < first {
        return Code { code: (length - least) as usize, more: 0, bits: 0 };
    }
    let at = long.partition_point(|from| *from <= length) - 1;
    let bits = long.get(at + 1).map_or(16, |next| (next - long[at]).ilog2());
    Code { code: (first - least) as usize + at, more: length - long[at], bits }
}

/// The code of an offset. Offset values 1 to 3 mean repeated offsets (3.1.1.3.2.1.1), so an offset
/// is encoded as its value plus 3.
fn offset(offset: u32) -> Code {
    let value = offset + 3;
    let bits = value.ilog2();
    Code { code: bits as usize, more: value - (1 << bits), bits }
}

/// A bit stream that is read backwards.
struct Bits<'a> {
    out: &'a mut Vec<u8>,
    held: u64,
    count: u32,
}

impl Bits<'_> {
    /// Appends the low `count` bits of `value`, at most 20.
    fn put(&mut self, value: u32, count: u32) {
        self.held |= (u64::from(value) & ((1 << count) - 1)) << self.count;
        self.count += count;
        if self.count >= 32 {
            self.out.extend_from_slice(&(self.held as u32).to_le_bytes());
            self.held >>= 32;
            self.count -= 32;
        }
    }

    /// Ends the stream with a set bit, padded with zeroes to a full byte.
    fn end(mut self) {
        self.put(1, 1);
        let bytes = self.count.div_ceil(8) as usize;
        self.out.extend_from_slice(&self.held.to_le_bytes()[..bytes]);
    }
}

/// The table of one kind of code. States are numbered from the table's size on.
#[derive(Debug)]
struct Table {
    log: u32,
    states: Vec<u32>,
    /// For each code: a number whose sum with the state has, in its upper half, the number of bits
    /// that the transition emits. Then the offset of the code's states in `states`.
    codes: Vec<(u32, i32)>,
}

impl Table {
    fn new(expected: &[i16], log: u32) -> Self {
        let size = 1usize << log;
        let mut high = size;
        let mut cells = vec![0; size];
        // 4.1.1: codes with a frequency below one get the last states. The others are spread over
        // the rest.
        for (code, _) in expected.iter().enumerate().filter(|(_, often)| **often == -1) {
            high -= 1;
            cells[high] = code;
        }
        let mut at = 0;
        for (code, often) in expected.iter().enumerate().filter(|(_, often)| **often > 0) {
            for _ in 0..*often {
                cells[at] = code;
                at = (at + (size >> 1) + (size >> 3) + 3) % size;
                while at >= high {
                    at = (at + (size >> 1) + (size >> 3) + 3) % size;
                }
            }
        }
        let (mut codes, mut starts, mut total) = (Vec::new(), Vec::new(), 0);
        for often in expected {
            let count = i32::from(often.unsigned_abs());
            // As many bits as leave one of the code's `count` states.
            let bits = if count <= 1 { log } else { log - (count as u32 - 1).ilog2() };
            codes.push(((bits << 16).wrapping_sub((count as u32) << bits), total - count));
            starts.push(total as usize);
            total += count;
        }
        let mut states = vec![0; size];
        for (state, code) in cells.into_iter().enumerate() {
            states[starts[code]] = (size + state) as u32;
            starts[code] += 1;
        }
        Self { log, states, codes }
    }

    /// The initial state, from which `code` is read first.
    fn begin(&self, code: usize) -> u32 {
        let (bits, start) = self.codes[code];
        let count = bits.wrapping_add(1 << 15) >> 16;
        let value = (count << 16).wrapping_sub(bits);
        self.states[((value >> count) as i32 + start) as usize]
    }

    /// The state from which `code` is read before `state` is reached. Writes the bits of the
    /// transition.
    fn next(&self, state: u32, code: usize, out: &mut Bits<'_>) -> u32 {
        let (bits, start) = self.codes[code];
        let count = state.wrapping_add(bits) >> 16;
        out.put(state, count);
        self.states[((state >> count) as i32 + start) as usize]
    }
}

/// The tables of all three kinds of code.
#[derive(Debug)]
pub(super) struct Tables {
    literals: Table,
    copies: Table,
    offsets: Table,
}

impl Tables {
    pub fn new() -> Self {
        let (literals, copies) = (Table::new(&LITERALS, 6), Table::new(&COPIES, 6));
        Self { literals, copies, offsets: Table::new(&OFFSETS, 5) }
    }

    /// Appends the section of `sequences` to `out`.
    pub fn write(&self, sequences: &[Sequence], out: &mut Vec<u8>) {
        match sequences.len() as u32 {
            count @ ..128 => out.push(count as u8),
            count @ 128..0x7f00 => out.extend([(count >> 8) as u8 + 128, count as u8]),
            count => {
                out.push(255);
                out.extend(((count - 0x7f00) as u16).to_le_bytes());
            }
        }
        let Some((last, rest)) = sequences.split_last() else { return };
        // All three kinds use the predefined tables.
        out.push(0);
        let codes = |sequence: &Sequence| {
            let literals = code(sequence.literals, 0, &LONG_LITERALS);
            (literals, code(sequence.len, 3, &LONG_COPIES), offset(sequence.offset))
        };
        let mut bits = Bits { out, held: 0, count: 0 };
        let (literals, copy, back) = codes(last);
        let mut of_literals = self.literals.begin(literals.code);
        let mut of_copies = self.copies.begin(copy.code);
        let mut of_offsets = self.offsets.begin(back.code);
        [literals, copy, back].iter().for_each(|code| bits.put(code.more, code.bits));
        for sequence in rest.iter().rev() {
            let (literals, copy, back) = codes(sequence);
            of_offsets = self.offsets.next(of_offsets, back.code, &mut bits);
            of_copies = self.copies.next(of_copies, copy.code, &mut bits);
            of_literals = self.literals.next(of_literals, literals.code, &mut bits);
            [literals, copy, back].iter().for_each(|code| bits.put(code.more, code.bits));
        }
        bits.put(of_copies, self.copies.log);
        bits.put(of_offsets, self.offsets.log);
        bits.put(of_literals, self.literals.log);
        bits.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_format() {
        let literals = |length| code(length, 0, &LONG_LITERALS);
        let copies = |length| code(length, 3, &LONG_COPIES);
        let of = |code, more, bits| Code { code, more, bits };
        assert_eq!([literals(0), literals(15), literals(16)], [of(0, 0, 0), of(15, 0, 0), of(16, 0, 1)]);
        assert_eq!([literals(17), literals(63), literals(64)], [of(16, 1, 1), of(24, 15, 4), of(25, 0, 6)]);
        assert_eq!([literals(127), literals(131_071)], [of(25, 63, 6), of(35, 65_535, 16)]);
        assert_eq!([copies(3), copies(34), copies(36)], [of(0, 0, 0), of(31, 0, 0), of(32, 1, 1)]);
        assert_eq!(
            [copies(130), copies(131), copies(131_074)],
            [of(42, 31, 5), of(43, 0, 7), of(52, 65_535, 16)]
        );
        assert_eq!([offset(1), offset(5), offset(262_144)], [of(2, 0, 2), of(3, 0, 3), of(18, 3, 18)]);
        for (expected, size) in [(&LITERALS[..], 64), (&COPIES[..], 64), (&OFFSETS[..], 32)] {
            assert_eq!(expected.iter().map(|often| often.unsigned_abs()).sum::<u16>(), size);
        }
    }
}
