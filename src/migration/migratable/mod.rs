//! A machine that can leave: a machine together with the migration that moves it to another
//! process. This is the event loop's side of a migration. It executes the demands of the
//! [`sender`](super::sender)'s thread. [`leaving`] begins a migration.
//!
//! A machine can be paused for several reasons at once: the user paused it, a migration is in its
//! final pass, the target may run it, its debugger has stopped it ([`debugged`]), or it is being
//! dumped ([`dumping`]). It resumes when no reason is left.

mod arriving;
mod debugged;
mod dumping;
mod error;
mod leaving;
mod machine;
mod operation;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

pub use self::error::Error;
use self::operation::AtMostOne;
pub use self::operation::OnPanic;
use super::events::{Demand, Done, Said, SenderCommand, SenderEvent};
use super::since::Since;
use super::threads;
use vellum_control::operation::{Kind, News};
use vellum_control::{Event, Left};
use vellum_kvm::dirty::{self, DirtyTracker, Method};
use vellum_machine::gdb::Debugger;
use vellum_machine::{Machine, SaveState, Section};
use vellum_sandbox::Sandbox;
use vellum_sys::clock;
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::pagemap::Pagemap;

/// Why a machine is paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PauseReasons {
    user: bool,
    migration: bool,
    unconfirmed: bool,
    debugger: bool,
    dump: bool,
}

impl PauseReasons {
    fn any(self) -> bool {
        self.user || self.migration || self.unconfirmed || self.debugger || self.dump
    }
}

/// The name of the section that says whether the user had paused the machine.
pub(super) const HELD: &str = "held";
/// The version of that section.
pub(super) const HELD_VERSION: u16 = 1;

/// The part of [`PauseReasons`] that moves with the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HeldState {
    pub user: bool,
}

/// A machine that can leave.
pub struct MigratableMachine<P> {
    // Dropped first: its thread uses the machine's memory.
    operation: AtMostOne,
    /// The machine.
    pub machine: P,
    held: PauseReasons,
    /// Whether its vCPUs have been started.
    begun: bool,
    wake: Arc<EventFd>,
    served: bool,
    news: Vec<News>,
    sandbox: Sandbox,
    /// Tells which pages of its memory were touched. The memory was empty when this process mapped
    /// it.
    pagemap: Option<Arc<Pagemap>>,
    /// Dirty tracking since its last snapshot, if enabled.
    since: Option<Box<Since>>,
    moved: bool,
    /// The descriptor that connects this process to the one that replaces it, if its machine has
    /// moved to such a process.
    successor: Option<OwnedFd>,
    /// The machine ended in a snapshot.
    stopped: bool,
    /// Its guest is to end if it returns from a target that needs what is here of its memory.
    ends: bool,
    /// Its debugger, if one may connect.
    debugger: Option<Debugger>,
    /// Where to dump it if its guest panics.
    on_panic: Option<OnPanic>,
}

/// Why the source of a postcopy cannot be ended.
const NEEDED: &str = "the guest is handed over, and the target needs what is here of its memory";

/// The maximum length of a reported reason, in bytes.
const MAX_REASON: usize = 2000;

/// CLOCK_MONOTONIC in microseconds.
pub(super) fn now() -> u64 {
    clock::micros(clock::monotonic())
}

impl<P: SaveState> MigratableMachine<P> {
    /// A machine whose threads enter `sandbox`. The sandbox forbids opening a `pagemap`, so it is
    /// passed in.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(machine: P, sandbox: Sandbox, pagemap: Option<Arc<Pagemap>>) -> io::Result<Self> {
        let wake = threads::event()?;
        let (operation, held, news) = (AtMostOne::default(), PauseReasons::default(), Vec::new());
        let (begun, served, moved, stopped) = (false, false, false, false);
        let since = None;
        Ok(Self {
            operation,
            machine,
            held,
            begun,
            wake,
            served,
            news,
            sandbox,
            pagemap,
            since,
            moved,
            successor: None,
            stopped,
            ends: false,
            debugger: None,
            on_panic: None,
        })
    }

    /// Whether its guest runs or may run elsewhere. Its state is then unknown here.
    pub fn is_elsewhere(&self) -> bool {
        self.moved || self.stopped || self.held.unconfirmed
    }

    /// Whether it has ended in a snapshot, in the middle of its work.
    pub fn is_saved(&self) -> bool {
        self.stopped
    }

    /// Sets whether the machine stays paused when it first starts, until it is resumed.
    pub(super) fn arrive_paused(&mut self, paused: bool) {
        self.held.user = paused;
    }

    /// Executes the thread's demands and passes on its events.
    fn serve(&mut self) {
        while let Some(leaving) = self.operation.leaving() {
            // Checked before the messages, so that all messages of an ended thread are there.
            let (ended, keeps_log) = (leaving.has_ended(), leaving.keeps_log);
            let Some(said) = leaving.thread_end.as_ref().and_then(threads::MachineEnd::heard) else {
                // A thread that ends without a message could not enter its sandbox or has panicked.
                // After COMMIT, only the operator knows what that means.
                if ended && !self.held.unconfirmed {
                    self.stay("its thread has failed".into());
                }
                return;
            };
            match said {
                Said::Demand(demand) => {
                    let done = self.answer(demand);
                    if let Some(leaving) = self.operation.leaving() {
                        leaving.tell(SenderCommand::Done(done));
                    }
                }
                Said::SenderEvent(event) => self.hear(event),
                Said::Kept(since) => self.since = keeps_log.then_some(since),
            }
        }
    }

    fn answer(&mut self, demand: Demand) -> Done {
        match demand {
            Demand::Track(method) => {
                let stood = self.stands();
                if !stood && let Err(error) = self.machine.pause() {
                    return Done::Failed(error.to_string());
                }
                let distrusted = self.operation.leaving().is_some_and(|leaving| leaving.distrust.is_some());
                let tracker = self.follow(method, distrusted);
                if !stood {
                    self.machine.resume();
                }
                if let (Some(leaving), Ok(tracker)) = (self.operation.leaving_mut(), &tracker) {
                    leaving.tracker = Some(tracker.method());
                }
                tracker.map_or_else(|error| Done::Failed(error.to_string()), Done::Tracker)
            }
            Demand::Pause => {
                if !self.stands()
                    && let Err(error) = self.machine.pause()
                {
                    return Done::Failed(error.to_string());
                }
                self.held.migration = true;
                Done::Done
            }
            Demand::Save => {
                if let Some(leaving) = self.operation.leaving_mut() {
                    leaving.paused = Some(Instant::now());
                }
                let pausing = now();
                if !self.stands()
                    && let Err(error) = self.machine.pause()
                {
                    return Done::Failed(error.to_string());
                }
                self.held.migration = true;
                let paused = now();
                match self.machine.save() {
                    Ok(mut sections) => {
                        if let Some(leaving) = self.operation.leaving_mut() {
                            leaving.steps = [pausing, paused, now()];
                        }
                        let held = HeldState { user: self.held.user };
                        sections.push(Section::new(HELD, HELD_VERSION, &held));
                        Done::Saved(sections)
                    }
                    Err(error) => Done::Failed(error.to_string()),
                }
            }
            Demand::Resume => {
                self.go_on();
                if let Some(leaving) = self.operation.leaving_mut() {
                    leaving.stood = leaving.paused.map(|since| since.elapsed());
                }
                Done::Done
            }
            Demand::Release { ahead } => {
                // COMMIT is sent next. From here on the guest may run on the target. Only the
                // target or the operator can allow it to run here.
                self.held.unconfirmed = true;
                if let Some(leaving) = self.operation.leaving_mut() {
                    leaving.needed = ahead;
                }
                self.machine.release();
                Done::Done
            }
            Demand::Typed => Done::Typed(self.machine.take_typed()),
            Demand::Retake => match self.machine.retake() {
                Ok(()) => Done::Done,
                Err(error) => Done::Failed(error.to_string()),
            },
        }
    }

    /// The migration no longer pauses the machine.
    fn go_on(&mut self) {
        if self.held.migration || self.held.unconfirmed {
            (self.held.migration, self.held.unconfirmed) = (false, false);
            if !self.stands() {
                self.machine.resume();
            }
            if std::mem::take(&mut self.ends) {
                self.machine.request_end();
            }
        }
    }

    /// Whether a target may run the guest that has some of its memory here alone.
    fn is_needed(&self) -> bool {
        self.held.unconfirmed && self.operation.leaving().is_some_and(|leaving| leaving.needed)
    }

    /// The requested tracker, or the best that the machine has. INITIALLY_SET costs the guest
    /// least, but some kernels lose pages with it (kernel-patches/FAULTS.md).
    fn follow(
        &mut self,
        method: Option<Method>,
        distrusted: bool,
    ) -> Result<Box<dyn DirtyTracker>, dirty::Error> {
        if let Some(method) = method {
            return self.machine.track(method);
        }
        if self.machine.info().dirty_ring.is_some() {
            return self.machine.track(Method::Ring);
        }
        let best = if distrusted { Method::ManualProtect } else { Method::InitiallySet };
        let mut tracker = self.machine.track(best);
        for method in [Method::ManualProtect, Method::Bitmap] {
            match tracker {
                Err(dirty::Error::Absent { .. }) => tracker = self.machine.track(method),
                done => return done,
            }
        }
        tracker
    }

    fn hear(&mut self, event: SenderEvent) {
        match event {
            SenderEvent::Progress(progress) => {
                let pages = |pages: u64| pages.saturating_mul(PAGE_SIZE);
                self.tell(Event::Migrating {
                    phase: progress.phase,
                    pass: progress.pass,
                    sent: progress.sent,
                    spared: progress.spared,
                    left: pages(progress.owed),
                    dirty_rate: progress.measured.map(|m| m.dirty_rate() as u64 * PAGE_SIZE),
                    bandwidth: progress.measured.map(|m| m.bandwidth() as u64),
                    expected_downtime_ms: progress.downtime.map(|time| time.as_millis() as u64),
                    expected_total_ms: progress.total.map(|time| time.as_millis() as u64),
                    throttle_percent: progress.taken,
                });
            }
            SenderEvent::Written(written) => {
                let stood = self.operation.leaving().and_then(|leaving| leaving.stood);
                let tracker = self.operation.leaving().and_then(|leaving| leaving.tracker);
                self.tell(Event::Snapshot {
                    us: stood.map(|time| time.as_micros() as u64),
                    full: written.full,
                    passes: written.passes,
                    written: written.into(),
                    tracker: tracker.map(|method| method.name().to_owned()),
                });
            }
            SenderEvent::Named => {
                self.stopped = self.operation.leaving().is_some_and(|leaving| leaving.stop);
                self.tell(Event::SnapshotOver {});
                self.operation.end();
            }
            SenderEvent::Forked { parts: (parts, time), base, written } => {
                let stood = self.operation.leaving().and_then(|leaving| leaving.stood);
                self.tell(Event::Forked {
                    us: stood.map_or(0, |time| time.as_micros() as u64),
                    parts,
                    parts_us: time.as_micros() as u64,
                    base,
                    written: written.into(),
                });
                self.operation.end();
            }
            SenderEvent::Preserved(written) => {
                if let Some(leaving) = self.operation.leaving_mut() {
                    leaving.preserved = true;
                    let us = leaving.paused.map_or(0, |since| since.elapsed().as_micros() as u64);
                    self.tell(Event::Preserved { us, written: written.into() });
                }
            }
            SenderEvent::Pass(pass) => self.tell(Event::Pass(pass)),
            SenderEvent::Unconfirmed => self.tell(Event::Unconfirmed {}),
            SenderEvent::Ahead => {
                if let Some(leaving) = self.operation.leaving_mut() {
                    let us = leaving.paused.map_or(0, |since| since.elapsed().as_micros() as u64);
                    leaving.ahead = Some(us);
                    self.tell(Event::Ahead { us });
                }
            }
            SenderEvent::Severed(why) => {
                if let Some(leaving) = self.operation.leaving_mut() {
                    leaving.severed = true;
                }
                self.tell(Event::Severed { why });
            }
            SenderEvent::Recovered => {
                if let Some(leaving) = self.operation.leaving_mut() {
                    leaving.severed = false;
                }
            }
            SenderEvent::Stayed(why) => self.stay(why),
            SenderEvent::Moved { compared, waited, left } => {
                let paused = self.operation.leaving().and_then(|leaving| leaving.paused);
                let us = paused.map_or(0, |since| since.elapsed().as_micros() as u64);
                let us = self.operation.leaving().and_then(|leaving| leaving.ahead).unwrap_or(us);
                let tracker = self.operation.leaving().and_then(|leaving| leaving.tracker);
                let tracker = tracker.map(|method| method.name().to_owned());
                let tracker_why =
                    self.operation.leaving().and_then(|leaving| leaving.distrust).map(str::to_owned);
                let dirty_ring = self.machine.info().dirty_ring;
                let [pausing, paused, saved] =
                    self.operation.leaving().map_or([0; 3], |leaving| leaving.steps);
                let left = Left { pausing, paused, saved, ..left };
                self.tell(Event::Moved { us, compared, tracker, tracker_why, dirty_ring, waited, left });
                self.moved = true;
                self.successor = self.operation.leaving_mut().and_then(|leaving| leaving.successor.take());
                self.operation.end();
            }
        }
    }

    /// The operation has failed.
    fn stay(&mut self, why: String) {
        let why = brief(why);
        let event = match self.operation.kind() {
            Some(Kind::Snapshot) => {
                tracing::warn!("no snapshot: {why}");
                Event::NoSnapshot { why }
            }
            Some(Kind::Fork) => {
                tracing::warn!("no fork: {why}");
                Event::NotForked { why }
            }
            Some(Kind::LiveUpdate) => {
                tracing::warn!("no live update: {why}");
                self.machine.ram().mapping.keep(false);
                Event::NotPreserved { why }
            }
            _ => {
                tracing::warn!("the guest stays here: {why}");
                Event::Stayed { why }
            }
        };
        self.tell(event);
        self.operation.end();
        self.go_on();
    }

    /// Ends an operation that has a thread, for this reason.
    fn call_off(&mut self, why: &str) {
        if self.operation.leaving().is_some() {
            self.stay(why.into());
        }
    }
}

impl<P: Machine> MigratableMachine<P> {
    /// Whether it does not run: paused, or not started.
    fn stands(&self) -> bool {
        self.held.any() || !self.begun
    }

    /// Starts or resumes it, unless there is a reason to pause.
    fn let_run(&mut self) -> Result<(), P::Error> {
        if self.held.any() {
            return Ok(());
        }
        if std::mem::replace(&mut self.begun, true) {
            self.machine.resume();
            return Ok(());
        }
        self.machine.start()
    }
}

/// Shortens a reason: a target may send one of a megabyte.
fn brief(mut why: String) -> String {
    let len = why.len();
    if len > MAX_REASON {
        why.truncate(why.floor_char_boundary(MAX_REASON));
        why.push_str(&format!("… ({len} bytes in all)"));
    }
    why
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_of_a_megabyte_is_told_in_a_line_that_any_client_takes() {
        assert_eq!(brief("it was cancelled".into()), "it was cancelled");
        // Characters of three bytes. None is split.
        let told = brief("\u{20ac}".repeat(1 << 19));
        assert!(told.len() < 2 * MAX_REASON && told.ends_with("\u{20ac}… (1572864 bytes in all)"), "{told}");
    }
}
