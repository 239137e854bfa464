//! Determines what is written when. The image and the host share these functions. The image's loop
//! implements them again in assembly (`run.s` of each architecture in `guest`).
//!
//! Each function depends only on its arguments: the seed, the memory map, and a pass. The file does
//! not use `std`, because it is also part of the image.

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// The maximum number of vCPUs that take part. Their positions must fit into two XMM registers.
pub const MAX_VCPUS: usize = 8;
/// The maximum number of RAM ranges.
pub const MAX_RANGES: usize = 8;
/// The maximum number of RAM ranges of which the largest are judged.
pub const MAX_FOUND: usize = 64;
/// The maximum number of segments of a vCPU: its ranges and the shared pages.
pub const MAX_SEGMENTS: usize = MAX_RANGES + 1;
/// The bit of a position that is set by a fault.
pub const POISON: u32 = 61;
/// The lowest bit of the phase in a position. The bits below are the number of accesses.
pub const PHASE: u32 = 26;
/// Odd numbers that [`Schedule::tail`] multiplies by.
pub const ODD: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xd134_2543_de82_ef95];
/// A threshold of 100 percent.
pub const ALL: u64 = 1 << 32;

/// One step of splitmix64.
pub fn mix(n: u64) -> u64 {
    let z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A range of RAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// The first address.
    pub start: u64,
    /// The address after the last byte.
    pub end: u64,
}

/// Leaves the largest [`MAX_RANGES`] of the first `count` ranges in their order, and calls `dropped`
/// with each of the others. Returns how many are left.
pub fn keep_largest(ranges: &mut [Range], mut count: usize, mut dropped: impl FnMut(Range)) -> usize {
    while count > MAX_RANGES {
        let by_size = ranges.iter().take(count).enumerate().min_by_key(|(_, range)| range.end - range.start);
        let Some((smallest, range)) = by_size else { break };
        dropped(*range);
        ranges.copy_within(smallest + 1..count, smallest);
        count -= 1;
    }
    count
}

/// Pages that a vCPU visits in ascending or in shuffled order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Segment {
    /// The first page's address.
    pub base: u64,
    /// The number of pages visited in a pass.
    pub count: u64,
    /// The distance between the starts of two pages in bytes.
    pub stride: u64,
    /// The smallest power of two that is not below `count`, minus 1. 0 for ascending order.
    pub mask: u64,
    /// A shift for numbers up to `mask`.
    pub shift: u64,
    /// 1 if the pages are shared. In each pass a vCPU then visits another page of each group.
    pub shared: u64,
}

/// The parameters by which pages are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// The seed, after [`mix`].
    pub seed: u64,
    /// The number of vCPUs that take part.
    pub vcpus: u64,
    /// Whether the order is shuffled.
    pub shuffled: bool,
    /// A page is hot if its hash is below this. Hashes are below [`ALL`].
    pub hot_set: u64,
    /// A hot page is written in a pass if the hash of page and pass is below this.
    pub hot: u64,
    /// The same for other pages.
    pub cold: u64,
}

/// Why memory cannot be divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// There are too few pages.
    TooLittle,
    /// The accesses of a vCPU in a phase do not fit into its position.
    TooMuch,
}

/// The segments of each vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// Each vCPU's segments.
    pub segments: [[Segment; MAX_SEGMENTS]; MAX_VCPUS],
    /// The number of segments of each vCPU.
    pub counts: [usize; MAX_VCPUS],
}

impl Schedule {
    /// Sets the thresholds so that a pass writes `write` percent of the pages. A hot set is `hot.0`
    /// percent of the pages, and gets `hot.1` percent of the writes.
    pub fn thresholds(&mut self, write: u64, hot: Option<(u64, u64)>) {
        let of = |part: u64, whole: u64| (ALL / whole.max(1)).saturating_mul(part).min(ALL);
        match hot {
            None => {
                (self.hot_set, self.hot, self.cold) = (0, 0, if write == 100 { ALL } else { of(write, 100) })
            }
            Some((pages, share)) => {
                self.hot_set = of(pages, 100);
                self.hot = of(write * share, pages * 100);
                self.cold = of(write * (100 - share), (100 - pages) * 100);
            }
        }
    }

    /// Whether a pass may skip pages.
    pub fn is_sparse(&self) -> bool {
        self.hot_set != 0 || self.cold != ALL
    }

    /// Whether `pass` writes the page at `address`. Pass 0, the first, writes all.
    pub fn writes(&self, address: u64, pass: u64) -> bool {
        let is_hot = mix(address ^ self.seed) >> 32 < self.hot_set;
        let below = if is_hot { self.hot } else { self.cold };
        pass == 0
            || mix(pass.wrapping_mul(ODD[0]).wrapping_add(address) ^ self.seed) >> 32 < below
            || !self.is_sparse()
    }

    /// The last pass up to `pass` that wrote the page at `address`. Returns `None` once `steps` has
    /// reached `limit`.
    pub fn last_within(&self, address: u64, mut pass: u64, steps: &mut u64, limit: u64) -> Option<u64> {
        loop {
            *steps += 1;
            if *steps > limit {
                return None;
            }
            if self.writes(address, pass) {
                return Some(pass);
            }
            pass -= 1;
        }
    }

    /// The last word of the page at `address` after `pass` has written it. The first word is the
    /// address, the second the pass.
    pub fn tail(&self, address: u64, pass: u64) -> u64 {
        let sum = (pass.wrapping_mul(ODD[0]) ^ address).wrapping_add(self.seed);
        sum.wrapping_mul(ODD[1]).rotate_left(29)
    }

    /// The initial value of a pass's checksum.
    pub fn checksum(&self, vcpu: u64, pass: u64) -> u64 {
        mix(mix((vcpu << 40) ^ pass) ^ self.seed)
    }

    /// The address that `vcpu` visits at `index` of `segment` in `pass`.
    pub fn address(&self, segment: &Segment, vcpu: u64, pass: u64, index: u64) -> u64 {
        let mut base = segment.base;
        if segment.shared == 1 {
            base += (vcpu + self.vcpus - pass % self.vcpus) % self.vcpus * PAGE;
        }
        let multiplier = mix(pass ^ self.seed) | 1;
        let mut at = index;
        if segment.mask == 0 {
            return base + at * segment.stride;
        }
        loop {
            at = at.wrapping_mul(multiplier).wrapping_add(multiplier >> 32) & segment.mask;
            at ^= at >> segment.shift;
            at = at.wrapping_mul(multiplier) & segment.mask;
            if at < segment.count {
                return base + at * segment.stride;
            }
        }
    }

    /// Divides RAM. Each vCPU has its own pages, and the end of the largest range is shared. The
    /// last vCPU also has what is left when the others have as many.
    ///
    /// # Errors
    /// There are fewer than 80 pages for each vCPU, the largest range is too small for the shared
    /// pages, or a vCPU has too many pages.
    pub fn divide(&self, ranges: &[Range]) -> Result<Division, Unfit> {
        let vcpus = self.vcpus;
        let pages = |range: &Range| range.end.saturating_sub(range.start) / PAGE;
        let total: u64 = ranges.iter().map(pages).sum();
        let mut largest = 0;
        for (at, range) in ranges.iter().enumerate() {
            if pages(range) > pages(&ranges[largest]) {
                largest = at;
            }
        }
        let groups = total / (16 * vcpus);
        if ranges.is_empty() || total < 80 * vcpus || pages(&ranges[largest]) < groups * vcpus {
            return Err(Unfit::TooLittle);
        }
        let (own, rest) = ((total - groups * vcpus) / vcpus, (total - groups * vcpus) % vcpus);
        if own + rest + groups >= 1 << PHASE {
            return Err(Unfit::TooMuch);
        }
        let of = |vcpu: usize| if vcpu as u64 + 1 == vcpus { own + rest } else { own };
        let mut division =
            Division { segments: [[Segment::default(); MAX_SEGMENTS]; MAX_VCPUS], counts: [0; MAX_VCPUS] };
        let (mut vcpu, mut missing) = (0, of(0));
        for (at, range) in ranges.iter().enumerate() {
            let mut left = pages(range) - if at == largest { groups * vcpus } else { 0 };
            let mut base = range.start;
            while left > 0 && vcpu < vcpus as usize {
                let count = left.min(missing);
                division.add(vcpu, self.segment(base, count, PAGE, 0));
                (base, left, missing) = (base + count * PAGE, left - count, missing - count);
                if missing == 0 {
                    (vcpu, missing) = (vcpu + 1, of(vcpu + 1));
                }
            }
        }
        let shared = ranges[largest].start + (pages(&ranges[largest]) - groups * vcpus) * PAGE;
        for vcpu in 0..vcpus as usize {
            division.add(vcpu, self.segment(shared, groups, vcpus * PAGE, 1));
        }
        Ok(division)
    }

    fn segment(&self, base: u64, count: u64, stride: u64, shared: u64) -> Segment {
        let mask = if self.shuffled { count.next_power_of_two() - 1 } else { 0 };
        let shift = u64::from((64 - mask.leading_zeros()) / 2).max(1);
        Segment { base, count, stride, mask, shift, shared }
    }
}

impl Division {
    fn add(&mut self, vcpu: usize, segment: Segment) {
        self.segments[vcpu][self.counts[vcpu]] = segment;
        self.counts[vcpu] += 1;
    }

    /// The segments of a vCPU.
    pub fn of(&self, vcpu: usize) -> &[Segment] {
        &self.segments[vcpu][..self.counts[vcpu]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every page of RAM is visited once in a pass, whatever the number of pages and vCPUs.
    #[test]
    fn each_page_is_in_one_segment() {
        for vcpus in 1..=MAX_VCPUS as u64 {
            for pages in 80 * vcpus..80 * vcpus + 40 {
                let schedule = Schedule { seed: mix(pages), vcpus, shuffled: true, ..Schedule::default() };
                // Two ranges, of which the second is the larger one.
                let split = (0x10_0000 / PAGE) + pages / 3;
                let ranges = [
                    Range { start: 0x10_0000, end: split * PAGE },
                    Range { start: 1 << 32, end: (1 << 32) + (pages - pages / 3) * PAGE },
                ];
                let division = schedule.divide(&ranges).unwrap();
                for pass in [0, 1, 7] {
                    let mut visited: Vec<u64> = Vec::new();
                    for vcpu in 0..vcpus {
                        for segment in division.of(vcpu as usize) {
                            let address = |index| schedule.address(segment, vcpu, pass, index);
                            visited.extend((0..segment.count).map(address));
                        }
                    }
                    visited.sort_unstable();
                    let all = |range: &Range| (range.start..range.end).step_by(PAGE as usize);
                    let expected: Vec<u64> = ranges.iter().flat_map(all).collect();
                    assert_eq!(visited, expected, "{vcpus} vCPUs, {pages} pages, pass {pass}");
                }
            }
        }
    }

    #[test]
    fn the_largest_ranges_are_kept_and_the_others_are_named() {
        let range = |at: u64| Range { start: at << 20, end: (at << 20) + ((at * 7) % 11 + 1) * PAGE };
        let mut ranges: Vec<Range> = (1..=11).map(range).collect();
        let mut dropped = Vec::new();
        let kept = keep_largest(&mut ranges, 11, |range| dropped.push((range.end - range.start) / PAGE));
        assert_eq!((kept, dropped), (MAX_RANGES, vec![1, 2, 3]));
        assert!(ranges[..kept].is_sorted_by_key(|range| range.start));
        assert_eq!(keep_largest(&mut ranges, 3, |_| panic!("three fit")), 3);
    }

    #[test]
    fn what_does_not_fit_into_a_position_is_refused() {
        let schedule = Schedule { vcpus: 1, ..Schedule::default() };
        let range = |pages: u64| [Range { start: 1 << 32, end: (1 << 32) + pages * PAGE }];
        assert_eq!(schedule.divide(&range(79)), Err(Unfit::TooLittle));
        assert!(schedule.divide(&range((1 << PHASE) - 1)).is_ok());
        assert_eq!(schedule.divide(&range(1 << PHASE)), Err(Unfit::TooMuch));
    }
}
