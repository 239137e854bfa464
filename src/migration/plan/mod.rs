//! When to send another pass, when to pause the guest for the last one, and when to give up. The
//! plan computes this from the measurements of passes, on the caller's clock.
//!
//! The downtime limit is a cap. If the rest would fit into it, passes continue as long as they pay:
//! as long as each leaves clearly fewer pages than it began with. A guest that writes faster than
//! the link sends never converges unless it is throttled ([`Throttling`]). The timeout then
//! decides.

use std::time::Duration;

use super::pace::Pace;
use vellum_control::{Then, Throttling};
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::plant::{self, Mistake};

/// The measurements of one pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Pages that it had to send.
    pub pages: u64,
    /// Bytes that it sent, counted before compression.
    pub bytes: u64,
    /// How long it took.
    pub took: Duration,
    /// Pages that were written meanwhile.
    pub dirty: u64,
}

impl Measured {
    /// Pages that the guest dirties per second.
    pub fn dirty_rate(&self) -> f64 {
        self.dirty as f64 / self.took.as_secs_f64().max(1e-6)
    }

    /// Bytes per second that the link sends.
    pub fn bandwidth(&self) -> f64 {
        self.bytes as f64 / self.took.as_secs_f64().max(1e-6)
    }
}

/// A forecast from the passes so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// The time from the beginning until the guest runs on the target.
    pub total: Duration,
    /// How long the guest will be paused.
    pub downtime: Duration,
}

/// What follows a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Another pass while the guest runs.
    Again,
    /// The last pass, with the guest paused.
    Converged,
    /// The last pass. The remaining pages follow while the guest runs on the target.
    Ahead,
    /// The guest stays. Contains the reason.
    GiveUp(String),
}

/// The time that pausing, saving and restoring add to the pages of the last pass. An estimate,
/// because no pass measures it.
const OVERHEAD: Duration = Duration::from_millis(5);
/// A pass pays if it leaves less than this share of the pages that it had.
const PAYS: f64 = 0.8;
/// A final pass is never given up before this time, even if the limit is lower: times of
/// milliseconds vary by milliseconds.
const MIN_OVERRUN: Duration = Duration::from_secs(1);
/// The minimum time from the start of a pass to the next, if the pass does not pay and leaves too
/// much for the limit.
const REST: Duration = Duration::from_millis(50);
/// After a final pass that took too long, the guest runs this many times as long as it was paused.
/// The number doubles with each such pass, up to the maximum.
const FIRST_REST: u32 = 2;
const MAX_REST: u32 = 32;
/// After this many final passes that took too long, the guest stays, unless a timeout decides what
/// happens.
const MAX_OVERRUNS: u32 = 10;
/// The longest that the sender waits before it checks for events.
const LOOK: Duration = Duration::from_millis(20);
/// After this many passes the rest is sent, if it fits, even if each pass still pays a little. Long
/// runs of small passes gain nothing.
const MAX_SMALL_PASSES: u32 = 20;

/// The percentage of time that throttling takes from a guest at first, and what each step adds. The
/// guest always keeps a little, so that it stays alive.
const FIRST_STEP: u32 = 20;
const STEP: u32 = 10;
const MAX_TAKEN: u32 = 95;

/// The plan of one migration.
#[derive(Clone, Debug)]
pub struct Plan {
    downtime: Duration,
    timeout: Option<(Duration, Then)>,
    /// The bandwidth of the link in bytes per second. A small pass can only raise it.
    link: f64,
    last: Option<Measured>,
    passes: u32,
    throttling: Throttling,
    /// The percentage of time taken from the guest.
    taken: u32,
    /// The percentage for each vCPU, once the pages that each wrote are known. `taken` is then the
    /// maximum.
    each: Vec<u32>,
    /// How many pages each vCPU wrote in the last pass, if known.
    written: Vec<u64>,
    /// What [`Self::estimate`] returns: the forecast after the first pass.
    estimate: Option<Estimate>,
    /// The cap on bandwidth.
    pace: Pace,
    /// The next pass waits until this time, counted from the beginning.
    rests_until: Duration,
    /// How many final passes were given up because they took too long.
    overruns: u32,
}

impl Plan {
    /// A plan for a machine that may be paused for `downtime`. The migration may take as long as
    /// `timeout` says and use `bandwidth` bytes per second.
    pub fn new(downtime: Duration, timeout: Option<(Duration, Then)>, bandwidth: Option<u64>) -> Self {
        Self {
            downtime,
            timeout,
            link: 0.0,
            last: None,
            passes: 0,
            throttling: Throttling::Off,
            taken: 0,
            each: Vec::new(),
            written: Vec::new(),
            estimate: None,
            pace: Pace::new(bandwidth),
            rests_until: Duration::ZERO,
            overruns: 0,
        }
    }

    /// The same plan with throttling for passes that do not pay.
    pub fn throttling(mut self, throttling: Throttling) -> Self {
        self.throttling = throttling;
        self
    }

    /// The percentage of time to take from the guest while it runs. If vCPUs differ, the maximum.
    pub fn taken(&self) -> u32 {
        self.taken
    }

    /// The percentage of time to take from vCPU `vcpu`.
    pub fn taken_from(&self, vcpu: usize) -> u32 {
        let own = self.each.get(vcpu).filter(|_| !plant::is(Mistake::AllThrottledAlike));
        own.copied().unwrap_or(self.taken)
    }

    /// Sets how many pages each vCPU has written in the pass that has ended. All zero if unknown.
    /// Called before [`Plan::pass_ended`].
    pub fn wrote(&mut self, pages: Vec<u64>) {
        self.written = pages;
    }

    /// The forecast after the first pass. `None` before it, and if no end was in sight.
    pub fn estimate(&self) -> Option<Estimate> {
        self.estimate
    }

    /// Changes the limits that are given.
    pub fn set(&mut self, downtime: Option<Duration>, bandwidth: Option<u64>) {
        self.downtime = downtime.unwrap_or(self.downtime);
        if bandwidth.is_some() {
            self.pace.set(bandwidth);
        }
    }

    /// The last pass.
    pub fn last(&self) -> Option<Measured> {
        self.last
    }

    /// How long a final pass that runs `now` after the beginning may take before it is given up.
    /// `None` if the guest is to move however long that takes.
    pub(crate) fn most_downtime(&self, now: Duration) -> Option<Duration> {
        let forced = matches!(self.timeout, Some((timeout, Then::Force)) if now >= timeout);
        (!forced).then(|| self.downtime.max(MIN_OVERRUN))
    }

    /// A final pass took too long, `now` after the beginning. The guest was paused for `paused`.
    ///
    /// # Errors
    /// The reason why another one is of no use.
    pub(crate) fn overran(&mut self, paused: Duration, now: Duration) -> Result<(), String> {
        self.overruns += 1;
        if self.overruns >= MAX_OVERRUNS && !matches!(self.timeout, Some((_, Then::Force | Then::Postcopy))) {
            let limit = self.downtime.max(MIN_OVERRUN);
            return Err(format!(
                "{} times the guest would have been paused for longer than {limit:?}; a longer downtime may do",
                self.overruns
            ));
        }
        let times = (FIRST_REST << (self.overruns - 1).min(MAX_REST.ilog2())).min(MAX_REST);
        self.rests_until = self.rests_until.max(now + paused * times);
        Ok(())
    }

    /// How long the guest would be paused if the final pass began now. None until a pass has
    /// measured the link.
    pub fn expected_downtime(&self) -> Option<Duration> {
        let last = self.last?;
        if last.dirty == 0 {
            return Some(OVERHEAD);
        }
        self.downtime_for(last.dirty)
    }

    fn downtime_for(&self, pages: u64) -> Option<Duration> {
        let bytes = pages.saturating_mul(PAGE_SIZE) as f64;
        (self.link > 0.0).then(|| OVERHEAD + Duration::from_secs_f64((bytes / self.link).min(1e9)))
    }

    /// Decides what follows a pass with these measurements, `now` after the beginning.
    pub fn pass_ended(&mut self, measured: Measured, now: Duration) -> Decision {
        self.passes += 1;
        self.last = Some(measured);
        // An empty pass does not measure the link.
        if measured.bytes > 0 {
            let small = measured.bytes < 1 << 20;
            self.link = if small { self.link.max(measured.bandwidth()) } else { measured.bandwidth() };
        }
        if self.passes == 1 {
            self.estimate = self.foresee(measured, now);
        }
        // A pass cannot reduce downtime below the time for pausing and one frame.
        let least = self.downtime_for(u64::from(super::wire::MAX_PAGES)).unwrap_or(OVERHEAD);
        let limit = self.downtime.max(least);
        let fits = self.expected_downtime().is_some_and(|expected| expected <= limit);
        let pays = self.passes < MAX_SMALL_PASSES && (measured.dirty as f64) < measured.pages as f64 * PAYS;
        if fits && (!pays || measured.dirty <= u64::from(super::wire::MAX_PAGES)) {
            return Decision::Converged;
        }
        if let Some((timeout, then)) = self.timeout
            && now >= timeout
        {
            return match then {
                Then::Force => Decision::Converged,
                Then::Postcopy => Decision::Ahead,
                Then::Cancel => Decision::GiveUp(self.too_late(timeout)),
            };
        }
        if !pays && !fits {
            self.take_more(measured);
            self.rests_until = self.rests_until.max(now + REST.saturating_sub(measured.took));
        }
        Decision::Again
    }

    /// Increases throttling after a pass that did not pay.
    fn take_more(&mut self, measured: Measured) {
        let all: u64 = self.written.iter().sum();
        match self.throttling {
            Throttling::Off => {}
            Throttling::Steps if self.taken == 0 => self.taken = FIRST_STEP,
            Throttling::Steps => self.taken = (self.taken + STEP).min(MAX_TAKEN),
            Throttling::DirtyLimit => {
                let rate = measured.dirty_rate() * PAGE_SIZE as f64;
                // The unthrottled rate of a vCPU follows from its rate and the time that it had
                // left.
                let free = |rate: f64, taken: u32| rate * 100.0 / f64::from(100 - taken);
                let limited = |free: f64, limit: f64, taken: u32| {
                    let keeps = (limit / free.max(1.0)).min(1.0);
                    ((100.0 * (1.0 - keeps)).ceil() as u32).clamp(taken, MAX_TAKEN)
                };
                let budget = self.link / 2.0;
                if all == 0 {
                    self.taken = limited(free(rate, self.taken), budget, self.taken);
                    return;
                }
                let taken: Vec<u32> = (0..self.written.len()).map(|vcpu| self.taken_from(vcpu)).collect();
                let parts = self.written.iter().map(|pages| rate * *pages as f64 / all as f64);
                let free: Vec<f64> = parts.zip(&taken).map(|(rate, taken)| free(rate, *taken)).collect();
                let limit = limit_of_each(&free, budget);
                let each = free.iter().zip(&taken).map(|(free, taken)| limited(*free, limit, *taken));
                self.each = each.collect();
                self.taken = self.each.iter().copied().max().unwrap_or(0);
            }
        }
    }

    /// The forecast for a guest that keeps writing at the rate of this pass. Each pass is shorter
    /// than the one before by the ratio of the dirty rate to the link's bandwidth, down to the size
    /// of one frame.
    fn foresee(&self, measured: Measured, now: Duration) -> Option<Estimate> {
        let seconds = |bytes: f64| Duration::from_secs_f64((bytes / self.link).min(1e9));
        let bytes = measured.dirty as f64 * PAGE_SIZE as f64;
        if measured.dirty == 0 {
            return Some(Estimate { total: now + OVERHEAD, downtime: OVERHEAD });
        }
        if self.link <= 0.0 {
            return None;
        }
        let ratio = measured.dirty_rate() * PAGE_SIZE as f64 / self.link;
        if ratio < PAYS {
            let least = f64::from(super::wire::MAX_PAGES) * PAGE_SIZE as f64;
            let downtime = OVERHEAD + seconds(bytes.min(least));
            return Some(Estimate { total: now + OVERHEAD + seconds(bytes / (1.0 - ratio)), downtime });
        }
        let downtime = OVERHEAD + seconds(bytes);
        match self.timeout {
            _ if downtime <= self.downtime => Some(Estimate { total: now + downtime, downtime }),
            Some((timeout, Then::Force)) => Some(Estimate { total: timeout.max(now) + downtime, downtime }),
            _ => None,
        }
    }

    /// The reason to give up in the middle of a pass, `now` after the beginning.
    pub fn is_over(&self, now: Duration) -> Option<String> {
        match self.timeout {
            Some((timeout, Then::Cancel)) if now >= timeout => Some(self.too_late(timeout)),
            _ => None,
        }
    }

    fn too_late(&self, timeout: Duration) -> String {
        let mut why = format!("it has not converged within {timeout:?}");
        if let Some(last) = self.last {
            let mib = |bytes: f64| bytes / f64::from(1 << 20);
            why = format!(
                "{why}: {:.1} MiB/s of pages are written anew, and the link takes {:.1} MiB/s",
                mib(last.dirty_rate() * PAGE_SIZE as f64),
                mib(self.link)
            );
        }
        why
    }

    /// Whether to switch to postcopy, also in the middle of a pass, `now` after the beginning.
    pub(crate) fn is_to_follow(&self, now: Duration) -> bool {
        matches!(self.timeout, Some((timeout, Then::Postcopy)) if now >= timeout)
    }

    /// Records that `bytes` have been sent, `now` after the beginning.
    pub fn sent(&mut self, bytes: u64, now: Duration) {
        self.pace.sent(bytes, now);
    }

    /// How long the next block is to wait. It waits for the cap on bandwidth, or because an
    /// immediate pass would gain nothing.
    pub fn holds_back(&self, now: Duration) -> Option<Duration> {
        let timed_out = self.timeout.is_some_and(|(timeout, _)| now >= timeout);
        let rest = if timed_out { Duration::ZERO } else { self.rests_until.saturating_sub(now) };
        let rest = (!rest.is_zero()).then(|| rest.min(LOOK));
        self.pace.holds_back(now).max(rest)
    }
}

/// The limit per vCPU that keeps the sum within `budget`, given what each wants. A vCPU that wants
/// less leaves the rest to the others. Infinite if the budget is enough for all.
fn limit_of_each(wanted: &[f64], budget: f64) -> f64 {
    let mut rising = wanted.to_vec();
    rising.sort_by(f64::total_cmp);
    let (mut left, mut others) = (budget, rising.len());
    for want in rising {
        let limit = left / others as f64;
        if want > limit {
            return limit;
        }
        left -= want;
        others -= 1;
    }
    f64::INFINITY
}

#[cfg(test)]
mod tests;
