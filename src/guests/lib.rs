//! Guests without an operating system: a few hundred bytes of code, a control block for each vCPU,
//! page tables.
//!
//! [`WriteConfig`] configures the `write` workload. [`guest`] builds a machine around it and runs
//! it; its vCPUs ring [`bell`]. [`control`] and [`stamp`] are the layouts shared by host and guest.
//! [`model`] computes what the guest must have written. [`journal`] reads the guest's own record
//! over time. [`program`] has the code.

pub mod bell;
pub mod control;
pub mod error;
pub mod guest;
pub mod journal;
pub mod latency;
pub mod model;
pub mod program;
pub mod run;
pub mod stamp;
pub mod state;
pub mod tables;
pub mod touch;

pub use guest::Guest;

use std::sync::atomic::Ordering;
use std::time::Duration;

use control::{Control, flags, order};
use serde::{Deserialize, Serialize};

use vellum_kvm::memory::Memory;

/// The workloads of `vellum run --workload`, with descriptions.
pub const NAMES: [(&str, &str); 1] = [("write", "writes a stamp to page after page")];

/// The order in which a workload visits pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Page after page.
    Sequential,
    /// A random page each time (with replacement: a pass touches about 63 % of them).
    Random,
    /// Every page once a pass, in random order.
    Shuffled,
}

impl Order {
    /// The names on the command line.
    pub const NAMES: [(&str, Self); 3] =
        [("sequential", Self::Sequential), ("random", Self::Random), ("shuffled", Self::Shuffled)];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, order)| *order == self).map_or("", |(name, _)| name)
    }
}

/// A subset of the pages that gets a share of the accesses.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hot {
    /// Percent of the pages, above 0 and below 100.
    pub percent: f64,
    /// Percent of the accesses, above 0, up to 100.
    pub share: f64,
}

/// The configuration of the `write` workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WriteConfig {
    /// The order of the pages.
    pub order: Order,
    /// The hot set, the first pages of each region.
    pub hot: Option<Hot>,
    /// Percent of the accesses that write. The others read.
    pub write_percent: f64,
    /// Distinct pages written per second and vCPU; `None` for as fast as possible.
    pub rate: Option<u64>,
    /// Passes of as many accesses as the region has pages; 0 for no end.
    pub passes: u64,
    /// The seed of everything random.
    pub seed: u64,
    /// Whether all vCPUs share one region. Otherwise each has its own.
    pub shared: bool,
    /// Bytes from one visited page to the next, a multiple of 4096.
    pub stride: u64,
    /// Whether the duration of each write is measured.
    pub latency: bool,
    /// Whether vCPUs wait after each pass until resumed.
    pub lockstep: bool,
    /// Whether the first pass is as fast as possible, whatever the rate.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub warm: bool,
    /// The approximate duration of a slice of the guest's [journal]; `None` for no journal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub journal: Option<Duration>,
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
            stride: vellum_sys::mmap::PAGE_SIZE,
            latency: true,
            lockstep: false,
            warm: false,
            journal: None,
        }
    }
}

/// The part of guest RAM on which a vCPU works, in strides from the start of RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// The first page.
    pub first: u64,
    /// The number of pages; at least 1.
    pub pages: u64,
}

/// `percent` of 2^32.
fn threshold(percent: f64) -> u64 {
    (percent / 100.0 * 4_294_967_296.0).round() as u64
}

/// One step of splitmix64: a well-mixed number for each `n`, different for each.
pub fn mix(n: u64) -> u64 {
    let z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Fills `memory` with random numbers, except the stamps of pages. `go_on` is called after each
/// chunk with its bytes, and can end this early. Returns whether all of it was filled.
pub fn fill(memory: &Memory, go_on: impl Fn(u64) -> bool) -> bool {
    const CHUNK: usize = 32 << 20;
    let mut numbers = 0u64..;
    memory.mapping.words().chunks(CHUNK / 8).all(|chunk| {
        for (word, number) in chunk.iter().zip(&mut numbers) {
            if number % 512 >= stamp::WORDS {
                word.store(mix(number), Ordering::Relaxed);
            }
        }
        go_on(8 * chunk.len() as u64)
    })
}

impl WriteConfig {
    /// What is invalid, for a configuration that no command line has checked.
    pub fn wrong(&self) -> Option<&'static str> {
        let page = vellum_sys::mmap::PAGE_SIZE;
        let hot = |hot: &Hot| {
            let part = hot.percent > 0.0 && hot.percent < 100.0;
            part && hot.share > 0.0 && hot.share <= 100.0
        };
        if self.stride == 0 || !self.stride.is_multiple_of(page) {
            Some("its stride is not a multiple of 4096")
        } else if !(0.0..=100.0).contains(&self.write_percent) {
            Some("its share of writes is not from 0 to 100 percent")
        } else if self.journal.is_some_and(|slice| slice.is_zero()) {
            Some("the duration of a journal slice is zero")
        } else if !self.hot.as_ref().is_none_or(hot) {
            Some("its hot set is invalid")
        } else {
            None
        }
    }

    /// The region of `vcpu` out of `vcpus`, for `ram` bytes. The last one gets the remainder.
    pub fn region(&self, vcpu: usize, vcpus: usize, ram: u64) -> Region {
        let pages = ram / self.stride;
        if self.shared {
            return Region { first: 0, pages };
        }
        let each = pages / vcpus as u64;
        let first = each * vcpu as u64;
        Region { first, pages: if vcpu + 1 == vcpus { pages - first } else { each } }
    }

    /// The number of hot pages of a region.
    pub fn hot_pages(&self, region: Region) -> u64 {
        self.hot.map_or(0, |hot| {
            let pages = (region.pages as f64 * hot.percent / 100.0).round() as u64;
            pages.clamp(1, (region.pages - 1).max(1)).min(region.pages - 1)
        })
    }

    /// Writes the parameters of `vcpu` to its block. Progress is not changed.
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
                | flag(self.journal.is_some(), flags::JOURNAL)
                | flag(self.lockstep, flags::LOCKSTEP),
        );
        set(&control.write_below, threshold(self.write_percent));
        set(&control.hot_pages, hot_pages);
        set(
            &control.hot_below,
            if hot_pages == 0 { 0 } else { self.hot.map_or(0, |hot| threshold(hot.share)) },
        );
        // Hull and Dobell: a period of 2^n needs an odd increment and a multiplier of 1 modulo 4.
        set(&control.shuffle_mask, cold.next_power_of_two() - 1);
        set(&control.shuffle_mul, (mix(seed) & !3) | 5);
        set(&control.shuffle_add, mix(mix(seed)) | 1);
        set(&control.shuffle, 0);
        set(&control.seed, seed.max(1));
        set(&control.slice_shift, self.journal.map_or(63, |slice| journal::shift(slice, tsc_hz)));
        set(&control.warm, u64::from(self.warm));
        set(&control.interval, self.rate.map_or(0, |rate| (tsc_hz / rate.max(1)).max(1)));
        // Ten milliseconds: a scheduling delay is caught up, a pause of the whole machine is not.
        set(&control.burst, tsc_hz / 100);
        set(&control.writer, stamp::writer(vcpu));
        set(&control.doorbell, vellum_kvm::arch::layout::DOORBELL);
        set(&control.stop, 0);
    }
}
