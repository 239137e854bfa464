//! Guests without an operating system: a few hundred bytes of code, a control block for each vCPU, page tables.
//!
//! [`WriteConfig`] says what the `write` workload does; [`guest`] builds a machine around it and runs it; [`control`]
//! and [`stamp`] are the layouts that host and guest share; [`model`] computes what the guest must have written. The
//! code itself is [`program`].

pub mod control;
pub mod guest;
pub mod model;
pub mod program;
pub mod run;
pub mod stamp;
pub mod tables;
pub mod touch;

pub use guest::Guest;

use std::sync::atomic::Ordering;

use control::{Control, flags, order};

/// The workloads that `vellum run --workload` knows, with what they do.
pub const NAMES: [(&str, &str); 1] = [("write", "writes a stamp to page after page")];

/// In which order a workload visits pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Page after page.
    Sequential,
    /// Any page each time (with replacement: a pass touches about 63 % of them).
    Random,
    /// Every page once a pass, in random order.
    Shuffled,
}

impl Order {
    /// The names as typed.
    pub const NAMES: [(&str, Self); 3] =
        [("sequential", Self::Sequential), ("random", Self::Random), ("shuffled", Self::Shuffled)];

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, order)| *order == self).map_or("", |(name, _)| name)
    }
}

/// A subset of the pages that takes a share of the accesses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hot {
    /// Percent of the pages, above 0 and below 100.
    pub percent: f64,
    /// Percent of the accesses, above 0, up to 100.
    pub share: f64,
}

/// What the `write` workload does.
#[derive(Clone, Debug, PartialEq)]
pub struct WriteConfig {
    /// The order of the pages.
    pub order: Order,
    /// The hot set, the first pages of each region.
    pub hot: Option<Hot>,
    /// Percent of the accesses that write; the others read.
    pub write_percent: f64,
    /// Distinct pages written a second and vCPU; `None` for as fast as possible.
    pub rate: Option<u64>,
    /// Passes, each of as many accesses as the region has pages; 0 for no end.
    pub passes: u64,
    /// The seed of all that is random.
    pub seed: u64,
    /// Whether all vCPUs share one region instead of having one each.
    pub shared: bool,
    /// Bytes from one page visited to the next, a multiple of 4096.
    pub stride: u64,
    /// Whether the time of each write is measured.
    pub latency: bool,
    /// Whether vCPUs wait after each pass until they are resumed.
    pub lockstep: bool,
}

impl Default for WriteConfig {
    fn default() -> Self {
        Self {
            order: Order::Sequential,
            hot: None,
            write_percent: 100.0,
            rate: None,
            passes: 3,
            seed: 1,
            shared: false,
            stride: crate::sys::mmap::PAGE_SIZE,
            latency: true,
            lockstep: false,
        }
    }
}

/// The part of guest RAM that one vCPU works on, in strides from the start of RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its first page.
    pub first: u64,
    /// How many pages; at least 1.
    pub pages: u64,
}

/// The share of 2^32 that `percent` is.
fn threshold(percent: f64) -> u64 {
    (percent / 100.0 * 4_294_967_296.0).round() as u64
}

/// One step of splitmix64: a well-mixed number for every `n`, never the same twice.
pub(crate) fn mix(n: u64) -> u64 {
    let z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl WriteConfig {
    /// The region of `vcpu` out of `vcpus`, for `ram` bytes; the last takes what does not divide.
    pub fn region(&self, vcpu: usize, vcpus: usize, ram: u64) -> Region {
        let pages = ram / self.stride;
        if self.shared {
            return Region { first: 0, pages };
        }
        let each = pages / vcpus as u64;
        let first = each * vcpu as u64;
        Region { first, pages: if vcpu + 1 == vcpus { pages - first } else { each } }
    }

    /// How many pages of a region are hot.
    pub fn hot_pages(&self, region: Region) -> u64 {
        self.hot.map_or(0, |hot| {
            let pages = (region.pages as f64 * hot.percent / 100.0).round() as u64;
            pages.clamp(1, (region.pages - 1).max(1)).min(region.pages - 1)
        })
    }

    /// Writes the parameters of `vcpu` into its block; progress is left as it is.
    pub fn program(&self, control: &Control, vcpu: usize, region: Region, ram_va: u64, tsc_hz: u64) {
        let set = |word: &std::sync::atomic::AtomicU64, value: u64| word.store(value, Ordering::Relaxed);
        let hot_pages = self.hot_pages(region);
        let cold = region.pages - hot_pages;
        let seed = mix(self.seed ^ mix(vcpu as u64));
        set(&control.region, ram_va + region.first * self.stride);
        set(&control.pages, region.pages);
        set(&control.stride, self.stride);
        set(&control.first_page, region.first);
        set(&control.passes, if self.passes == 0 { u64::MAX } else { self.passes });
        set(
            &control.order,
            match self.order {
                Order::Sequential => order::SEQUENTIAL,
                Order::Random => order::RANDOM,
                Order::Shuffled => order::SHUFFLED,
            },
        );
        let draw = self.order == Order::Random || self.write_percent < 100.0 || hot_pages > 0;
        let flag = |on: bool, bit: u64| if on { bit } else { 0 };
        set(
            &control.flags,
            flag(self.latency, flags::LATENCY)
                | flag(draw, flags::DRAW)
                | flag(self.lockstep, flags::LOCKSTEP),
        );
        set(&control.write_below, threshold(self.write_percent));
        set(&control.hot_pages, hot_pages);
        set(
            &control.hot_below,
            if hot_pages == 0 { 0 } else { self.hot.map_or(0, |hot| threshold(hot.share)) },
        );
        // Hull and Dobell: a period of 2^n wants an odd increment and a multiplier of 1 modulo 4.
        set(&control.shuffle_mask, cold.next_power_of_two() - 1);
        set(&control.shuffle_mul, (mix(seed) & !3) | 5);
        set(&control.shuffle_add, mix(mix(seed)) | 1);
        set(&control.shuffle, 0);
        set(&control.seed, seed.max(1));
        set(&control.interval, self.rate.map_or(0, |rate| (tsc_hz / rate.max(1)).max(1)));
        // Ten milliseconds: a scheduling delay is caught up, a pause of the whole machine is not.
        set(&control.burst, tsc_hz / 100);
        set(&control.writer, stamp::writer(vcpu));
        set(&control.doorbell, crate::arch::layout::DOORBELL);
        set(&control.stop, 0);
    }
}
