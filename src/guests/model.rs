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
            self.state = drawn(self.state);
        }
        let high = |a: u64, b: u64| ((u128::from(a) * u128::from(b)) >> 64) as u64;
        let page = if self.is_hot() {
            high(self.state.wrapping_mul(HOT_HASH), self.hot_pages)
        } else {
            let cold = self.pages - self.hot_pages;
            self.hot_pages
                + match self.order {
                    order::RANDOM => high(self.state.wrapping_mul(PAGE_HASH), cold),
                    order::SHUFFLED => self.shuffled(cold),
                    _ => {
                        let page = self.next;
                        self.next = (self.next + 1) % cold;
                        page
                    }
                }
        };
        if !self.is_write() {
            return None;
        }
        self.seq = self.seq.wrapping_add(1);
        Some(Stamp { writer: self.number(), epoch: self.epoch, page: self.first_page + page })
    }

    /// Whether the access with this state goes to the hot set.
    fn is_hot(&self) -> bool {
        self.draw && (self.state & 0xffff_ffff) < self.hot_below
    }

    /// Whether the access with this state is a write.
    fn is_write(&self) -> bool {
        self.state >> 32 < self.write_below
    }

    /// [`Stamp::writer`] of the latest write.
    fn number(&self) -> u64 {
        self.writer.wrapping_add(self.seq)
    }

    /// The next page of the shuffled order.
    fn shuffled(&mut self, cold: u64) -> u64 {
        loop {
            self.shuffle = self.shuffle.wrapping_mul(self.mul).wrapping_add(self.add) & self.mask;
            if self.shuffle < cold {
                return self.shuffle;
            }
        }
    }

    /// The number of accesses up to the latest start of a pass that is not after access `limit`.
    fn pass_before(&self, limit: u64) -> u64 {
        limit.checked_sub(self.left).map_or(0, |rest| self.left + rest / self.pages * self.pages)
    }

    /// The model after its first `from` accesses, of which the last one ends a pass. `None` if that
    /// would take too long.
    fn at(&self, from: u64, reached: Reached, limits: Limits) -> Option<Self> {
        let mut model = self.clone();
        if from == 0 {
            return Some(model);
        }
        model.left = 0;
        let cold = self.pages - self.hot_pages;
        let shuffles = self.order == order::SHUFFLED;
        if !self.draw {
            let writes = if self.is_write() { from } else { 0 };
            model.seq = model.seq.wrapping_add(writes);
            if shuffles {
                model.shuffle_on(from, cold);
            }
            return Some(model);
        }
        let is_mixed = shuffles && self.hot_below > 0;
        if is_mixed && !reached.has_rung(self) {
            if from > limits.counted {
                return None;
            }
            let (writes, in_order) = model.draw_on(from);
            model.seq = model.seq.wrapping_add(writes);
            model.shuffle_on(in_order, cold);
            return Some(model);
        }
        model.state = jumped(self.state, from);
        // What was written, and what was in order, follows from the end.
        let (behind, in_order) = match is_mixed || self.write_below <= u64::from(u32::MAX) {
            true => model.clone().draw_on(reached.done - from),
            false => (0, 0),
        };
        model.seq = match self.write_below <= u64::from(u32::MAX) {
            true => reached.written.wrapping_sub(behind),
            false => self.seq.wrapping_add(from),
        };
        if is_mixed {
            model.shuffle = reached.shuffle & self.mask;
            model.shuffle_back(in_order, cold);
        } else if shuffles {
            model.shuffle_on(from, cold);
        }
        Some(model)
    }

    /// Draws for `accesses`. Returns how many of them were writes, and how many were in order.
    fn draw_on(&mut self, accesses: u64) -> (u64, u64) {
        let (mut writes, mut in_order) = (0, 0);
        for _ in 0..accesses {
            self.state = drawn(self.state);
            writes += u64::from(self.is_write());
            in_order += u64::from(!self.is_hot());
        }
        (writes, in_order)
    }

    /// Takes `count` pages of the shuffled order. A period of the generator has `cold` of them. What
    /// comes before the first one is no part of it.
    fn shuffle_on(&mut self, count: u64, cold: u64) {
        let first = if count < cold { 0 } else { cold };
        (0..first + count % cold).for_each(|_| _ = self.shuffled(cold));
    }

    /// Takes the latest `count` pages of the shuffled order back.
    fn shuffle_back(&mut self, count: u64, cold: u64) {
        // Newton's iteration doubles the number of right bits: 3 of an odd number itself, then 6 to 96.
        let inverse = (0..5).fold(self.mul, |inverse, _| {
            inverse.wrapping_mul(2u64.wrapping_sub(self.mul.wrapping_mul(inverse)))
        });
        let before = |state: u64| state.wrapping_sub(self.add).wrapping_mul(inverse) & self.mask;
        let mut state = self.shuffle;
        for left in (0..count % cold + if count < cold { 0 } else { cold }).rev() {
            state = before(state);
            // The state before the first of them need not be a page.
            while left > 0 && state >= cold {
                state = before(state);
            }
        }
        self.shuffle = state;
    }
}

/// One step of the xorshift generator. It is linear over GF(2).
fn drawn(mut state: u64) -> u64 {
    state ^= state << 13;
    state ^= state >> 7;
    state ^ state << 17
}

/// The generator's state after `steps` steps, in time proportional to their logarithm: by the
/// matrices of 1, 2, 4, … steps, each of which has a column for each bit of the state.
fn jumped(mut state: u64, mut steps: u64) -> u64 {
    let times = |matrix: &[u64; 64], state: u64| {
        (0..64).filter(|bit| state >> bit & 1 == 1).fold(0, |sum, bit| sum ^ matrix[bit])
    };
    let mut matrix: [u64; 64] = std::array::from_fn(|bit| drawn(1 << bit));
    while steps > 0 {
        if steps & 1 == 1 {
            state = times(&matrix, state);
        }
        matrix = matrix.map(|column| times(&matrix, column));
        steps >>= 1;
    }
    state
}

/// How far a vCPU has come, by its control block.
#[derive(Clone, Copy, Debug)]
pub struct Reached {
    /// [`Control::done`].
    pub done: u64,
    /// [`Control::written`]. The numbers of writes at random follow from it. If it is wrong, so is
    /// each stamp that is expected.
    pub written: u64,
    /// [`Control::seed`], which the guest stores when it rings.
    pub seed: u64,
    /// [`Control::shuffle`], which it stores then, too.
    pub shuffle: u64,
}

impl Reached {
    /// What `control` says now.
    pub fn new(control: &Control) -> Self {
        let words = [&control.done, &control.written, &control.seed, &control.shuffle];
        let [done, written, seed, shuffle] = words.map(|word| word.load(Ordering::Relaxed));
        Self { done, written, seed, shuffle }
    }

    /// Whether the vCPU of `model` has rung after its last access.
    fn has_rung(&self, model: &Model) -> bool {
        self.seed == jumped(model.state, self.done)
    }
}

/// How many accesses are looked at, of each vCPU.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// The last accesses that are replayed at first, or two for each page if that is more.
    first: u64,
    /// The most that are replayed, or 64 for each page if that is more.
    most: u64,
    /// The most accesses of which the draws are counted before those that are replayed, if the vCPU
    /// has not rung: it was cut off.
    counted: u64,
}

/// Some seconds.
const LIMITS: Limits = Limits { first: 1 << 22, most: 1 << 31, counted: 1 << 33 };

/// The latest write of a vCPU to each page of its region.
struct Latest {
    first_page: u64,
    epoch: u64,
    /// [`Stamp::writer`] of each page, 0 if its latest write, if any, comes before those that were
    /// replayed.
    writers: Vec<u64>,
    /// [`Stamp::writer`] of the latest write before those that were replayed, 0 if there is none.
    before: u64,
}

impl Latest {
    /// Replays as many of the last accesses as are needed to know the latest write to each page,
    /// up to a limit.
    fn of(model: &Model, reached: Reached, limits: Limits) -> Self {
        let most = limits.most.max(model.pages.saturating_mul(64));
        let mut length = limits.first.max(model.pages.saturating_mul(2));
        loop {
            let from = model.pass_before(reached.done.saturating_sub(length));
            let latest = Self::after(model, from, reached, limits);
            if from == 0 || length >= most || latest.writers.iter().all(|writer| *writer > 0) {
                return latest;
            }
            length = length.saturating_mul(8).min(most);
        }
    }

    /// Replays the accesses after the first `from`, of which the last one ends a pass.
    fn after(model: &Model, from: u64, reached: Reached, limits: Limits) -> Self {
        let (first_page, epoch) = (model.first_page, model.epoch);
        let mut latest = Self { first_page, epoch, writers: vec![0; model.pages as usize], before: 0 };
        let Some(mut model) = model.at(from, reached, limits) else {
            latest.before = model.writer.wrapping_add(reached.written);
            return latest;
        };
        if from > 0 {
            latest.before = model.number();
        }
        for stamp in (from..reached.done).filter_map(|_| model.step()) {
            latest.writers[(stamp.page - first_page) as usize] = stamp.writer;
        }
        latest
    }

    /// [`Stamp::writer`] as in [`writers`](Self::writers), of a page of the region.
    fn writer(&self, page: u64) -> Option<u64> {
        self.writers.get(usize::try_from(page.checked_sub(self.first_page)?).ok()?).copied()
    }

    /// Whether `found` is a stamp of this vCPU from before the accesses that were replayed.
    fn wrote_before(&self, page: u64, found: Stamp) -> bool {
        let is_own = found.writer >> SEQ_BITS == self.before >> SEQ_BITS && found.seq() > 0;
        is_own && found.writer <= self.before && (found.epoch, found.page) == (self.epoch, page)
    }
}

/// The result of checking stamps after a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StampVerdict {
    /// Pages whose stamp was compared.
    pub checked: u64,
    /// Pages that were not written for so long that the number of their latest write was not
    /// computed. They have a stamp that was right once, or none.
    pub unchecked: u64,
    /// Pages without the stamp that this run should have left.
    pub wrong: u64,
    /// The first few of them: page, stamp found, valid stamps.
    pub examples: Vec<(u64, Stamp, Vec<Stamp>)>,
}

/// Compares what `read` finds on each page with what the accesses of each model have left there.
///
/// If vCPUs share pages, any vCPU's last write is valid. The time depends on the number of pages,
/// and hardly on that of accesses.
pub fn verify(models: Vec<(Model, Reached)>, pages: u64, read: impl Fn(u64) -> Stamp) -> StampVerdict {
    verify_within(LIMITS, &models, pages, read)
}

fn verify_within(
    limits: Limits,
    models: &[(Model, Reached)],
    pages: u64,
    read: impl Fn(u64) -> Stamp,
) -> StampVerdict {
    let mut verdict = StampVerdict::default();
    let latest: Vec<_> = models.iter().map(|(model, reached)| Latest::of(model, *reached, limits)).collect();
    for page in 0..pages {
        let of_page = || latest.iter().filter_map(|latest| Some((latest, latest.writer(page)?)));
        if of_page().all(|(latest, writer)| writer == 0 && latest.before == 0) {
            continue;
        }
        let found = read(page);
        let stamp = |(latest, writer): (&Latest, u64)| Stamp { writer, epoch: latest.epoch, page };
        let written = || of_page().filter(|(_, writer)| *writer > 0).map(stamp);
        let is_never_written = found == Stamp::default() && written().next().is_none();
        if written().any(|stamp| stamp == found) {
            verdict.checked += 1;
        } else if of_page().any(|(latest, writer)| {
            writer == 0 && latest.before > 0 && (is_never_written || latest.wrote_before(page, found))
        }) {
            verdict.unchecked += 1;
        } else {
            verdict.checked += 1;
            verdict.wrong += 1;
            if verdict.examples.len() < 4 {
                verdict.examples.push((page, found, written().collect()));
            }
        }
    }
    verdict
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shares of 2^32 that are written and that go to the hot set, and its size.
    fn model(order: u64, pages: u64, written: u64, hot: (u64, u64)) -> Model {
        let mask = pages.next_power_of_two() - 1;
        let model = Model {
            pages,
            first_page: 7,
            order,
            draw: order == order::RANDOM || written < 1 << 32 || hot.1 > 0,
            write_below: written,
            hot_pages: hot.0,
            hot_below: hot.1,
            mul: 0x5851_f42d_4c95_7f2d,
            add: 0x1405_7b7e_f767_814f,
            mask,
            state: 0x1234_5678_9abc_def1,
            shuffle: 3 % pages,
            next: 0,
            left: pages,
            writer: super::super::stamp::writer(2),
            epoch: 5,
            seq: 0,
        };
        assert!(model.fits(pages + 7));
        model
    }

    fn models() -> impl Iterator<Item = Model> {
        let orders = [order::SEQUENTIAL, order::RANDOM, order::SHUFFLED];
        let shares = [(1 << 32, (0, 0)), (1 << 31, (0, 0)), (1 << 32, (9, 3 << 30)), (1 << 30, (9, 1 << 29))];
        orders.into_iter().flat_map(move |order| shares.map(|(written, hot)| model(order, 100, written, hot)))
    }

    /// What the control block says after `done` accesses of the model.
    fn reached(stepped: &Model, done: u64) -> Reached {
        Reached { done, written: stepped.seq, seed: stepped.state, shuffle: stepped.shuffle }
    }

    #[test]
    fn a_model_jumps_to_where_it_steps() {
        for model in models() {
            let mut stepped = model.clone();
            let mut starts = vec![model.clone()];
            for _ in 0..20 {
                (0..100).for_each(|_| _ = stepped.step());
                starts.push(stepped.clone());
            }
            // The second vCPU was cut off.
            for reached in
                [reached(&stepped, 2000), Reached { seed: 0, shuffle: 0, ..reached(&stepped, 2000) }]
            {
                for (pass, start) in (0..).zip(&starts) {
                    let mut jumped = model.at(100 * pass, reached, FEW).unwrap();
                    assert_eq!(jumped.seq, start.seq, "pass {pass} of {model:?}");
                    // Where the order begins anew shows in the next accesses.
                    let mut start = start.clone();
                    let mut same = || assert_eq!(jumped.step(), start.step(), "pass {pass} of {model:?}");
                    (0..300).for_each(|_| same());
                }
            }
            assert_eq!(model.pass_before(1999), 1900);
        }
    }

    const FEW: Limits = Limits { first: 500, most: 20_000, counted: 10_000 };

    /// More accesses than are replayed: a page that has an earlier write is named, if it was written
    /// in those at all.
    #[test]
    fn an_earlier_write_is_wrong_also_after_a_long_run() {
        for model in models() {
            let done = 100_055;
            let mut pages = vec![Stamp::default(); 107];
            let mut earlier = pages.clone();
            let mut stepped = model.clone();
            for stamp in (0..done).filter_map(|_| stepped.step()) {
                let page = stamp.page as usize;
                earlier[page] = std::mem::replace(&mut pages[page], stamp);
            }
            let models = [(model.clone(), reached(&stepped, done))];
            let verdict = |pages: &[Stamp]| verify_within(FEW, &models, 107, |page| pages[page as usize]);
            let right = verdict(&pages);
            let written = pages.iter().filter(|page| **page != Stamp::default()).count() as u64;
            let is_whole = (right.checked, right.unchecked, right.wrong) == (written, 100 - written, 0);
            assert!(written >= 50 && is_whole, "{written} pages, {right:?}: {model:?}");
            for page in (7..107).filter(|page| pages[*page] != Stamp::default()) {
                let mut pages = pages.clone();
                pages[page] = earlier[page];
                let wrong = verdict(&pages);
                assert_eq!((wrong.wrong, wrong.examples[0].0), (1, page as u64), "{model:?}");
            }
        }
    }

    /// A guest can write any number into its block.
    #[test]
    fn any_progress_is_judged_soon() {
        for model in models() {
            for (done, written) in [(u64::MAX, 0), (u64::MAX, u64::MAX), (u64::MAX - 1000, 1 << 63)] {
                let models = [(model.clone(), Reached { done, written, seed: 1, shuffle: 2 })];
                let verdict = verify_within(FEW, &models, 107, |_| Stamp::default());
                assert_eq!(verdict.wrong + verdict.unchecked, 100, "{model:?}");
            }
        }
    }
}
