//! Computes what the guest must have written, with the same policy as the assembly.
//!
//! It replays a vCPU's accesses from its parameters. So every stamp can be checked exactly after a
//! run, and a fast loop with wrong results cannot pass.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use super::control::{Control, flags, order};
use super::stamp::{SEQ_BITS, Stamp};

/// Odd constants that spread the generator's state over 64 bits. The high part of the product then
/// picks a page. The hot set and the rest have different constants, so that the two choices differ.
const HOT_HASH: u64 = 0x9e37_79b9_7f4a_7c15;
const PAGE_HASH: u64 = 0xd134_2543_de82_ef95;

/// A vCPU's parameters and generator states at the start of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    pages: u64,
    first_page: u64,
    order: u64,
    draw: bool,
    write_below: u64,
    hot_pages: u64,
    hot_below: u64,
    mul: u64,
    add: u64,
    mask: u64,
    state: u64,
    shuffle: u64,
    next: u64,
    left: u64,
    writer: u64,
    epoch: u64,
    seq: u64,
}

impl Model {
    /// Reads the parameters of a block that was programmed and has not run yet.
    pub fn new(control: &Control) -> Self {
        let get = |word: &std::sync::atomic::AtomicU64| word.load(Ordering::Relaxed);
        Self {
            pages: get(&control.pages),
            first_page: get(&control.first_page),
            order: get(&control.order),
            draw: get(&control.flags) & flags::DRAW != 0,
            write_below: get(&control.write_below),
            hot_pages: get(&control.hot_pages),
            hot_below: get(&control.hot_below),
            mul: get(&control.shuffle_mul),
            add: get(&control.shuffle_add),
            mask: get(&control.shuffle_mask),
            state: get(&control.seed),
            shuffle: get(&control.shuffle),
            next: 0,
            left: get(&control.pages),
            writer: get(&control.writer),
            epoch: get(&control.epoch),
            seq: get(&control.written),
        }
    }

    /// Checks that a model from another process is valid and its region lies within `pages` pages.
    /// An invalid one could name nonexistent pages, or never reach a page.
    pub fn fits(&self, pages: u64) -> bool {
        let end = self.first_page.checked_add(self.pages);
        let cold = self.pages.wrapping_sub(self.hot_pages);
        // A full-period generator reaches every number up to the mask (Hull and Dobell).
        let full = self.mul & 3 == 1 && self.add & 1 == 1 && self.mask.wrapping_add(1).is_power_of_two();
        end.is_some_and(|end| end <= pages)
            && self.pages > 0
            && self.hot_pages < self.pages
            && self.left <= self.pages
            && self.next < cold
            && full
            && self.mask >= cold - 1
            && self.mask / 2 < cold
            && self.writer.checked_add(self.seq).is_some()
    }

    /// One access. Returns its stamp, or `None` for a read.
    pub fn step(&mut self) -> Option<Stamp> {
        if self.left == 0 {
            (self.left, self.next) = (self.pages, 0);
        }
        self.left -= 1;
        if self.draw {
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
        }
        let high = |a: u64, b: u64| ((u128::from(a) * u128::from(b)) >> 64) as u64;
        let hot = self.draw && (self.state & 0xffff_ffff) < self.hot_below;
        let page = if hot {
            high(self.state.wrapping_mul(HOT_HASH), self.hot_pages)
        } else {
            let cold = self.pages - self.hot_pages;
            self.hot_pages
                + match self.order {
                    order::RANDOM => high(self.state.wrapping_mul(PAGE_HASH), cold),
                    order::SHUFFLED => loop {
                        self.shuffle = self.shuffle.wrapping_mul(self.mul).wrapping_add(self.add) & self.mask;
                        if self.shuffle < cold {
                            break self.shuffle;
                        }
                    },
                    _ => {
                        let page = self.next;
                        self.next = (self.next + 1) % cold;
                        page
                    }
                }
        };
        if self.state >> 32 >= self.write_below {
            return None;
        }
        self.seq += 1;
        Some(Stamp { writer: self.writer + self.seq, epoch: self.epoch, page: self.first_page + page })
    }
}

/// The result of checking stamps after a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StampVerdict {
    /// Pages whose stamp was compared.
    pub checked: u64,
    /// Pages without the stamp that this run should have left.
    pub wrong: u64,
    /// The first few of them: page, stamp found, valid stamps.
    pub examples: Vec<(u64, Stamp, Vec<Stamp>)>,
}

/// Replays `accesses` of each model and compares the result with what `read` finds on each page.
///
/// If vCPUs share pages, any vCPU's last write is valid.
pub fn verify(models: Vec<(Model, u64)>, pages: u64, read: impl Fn(u64) -> Stamp) -> StampVerdict {
    let mut verdict = StampVerdict::default();
    let mut expected: Vec<Vec<Stamp>> = vec![Vec::new(); pages as usize];
    for (mut model, accesses) in models {
        let vcpu = model.writer >> SEQ_BITS;
        for stamp in (0..accesses).filter_map(|_| model.step()) {
            let of_page = &mut expected[stamp.page as usize];
            match of_page.iter_mut().find(|stamp| stamp.writer >> SEQ_BITS == vcpu) {
                Some(old) => *old = stamp,
                None => of_page.push(stamp),
            }
        }
    }
    for (page, expected) in expected.into_iter().enumerate().filter(|(_, expected)| !expected.is_empty()) {
        let found = read(page as u64);
        verdict.checked += 1;
        if !expected.contains(&found) {
            verdict.wrong += 1;
            if verdict.examples.len() < 4 {
                verdict.examples.push((page as u64, found, expected));
            }
        }
    }
    verdict
}
