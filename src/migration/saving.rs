//! The thread that writes a snapshot. As in a migration, it makes passes over memory while the
//! guest runs, and then pauses the guest for the last pages and the state. It writes to files
//! ([`crate::snapshot`]) instead of a link. It makes the same demands on the machine
//! ([`events`](super::events)).
//!
//! With dirty tracking since the last point ([`Since`]), the next point has only the pages that
//! changed. If a point fails, the pages that it took are owed to the next point. Dirty bits are
//! dropped only once the snapshot's files have their names.
//!
//! The guest resumes as soon as all pages are copied. The files are synced afterwards. Then the
//! client that provided the files names them and reports it.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::bits::Bits;
use super::events::{Demand, Done, Moving, Progress, Said, SenderCommand, SenderEvent, Written};
use super::pending::{At, PendingPages};
use super::plan::{Decision, Measured, Plan};
use super::share::Share;
use super::since::Since;
use super::threads::{Mine, Orphaned};
use crate::snapshot::layer::{self, Writer};
use crate::snapshot::{Files, disk, state};
use vellum_control::{Disk, Phase, Then};
use vellum_kvm::arch::clocks;
use vellum_kvm::dirty::{self, Method};
use vellum_kvm::memory::{Memory, Slot};
use vellum_machine::{self as machine, Section};
use vellum_sys::pagemap::Pagemap;
use vellum_sys::plant::{self, Mistake};
use vellum_sys::poll::Poll;

/// How long the client may take to name files that are on disk.
const NAMING: Duration = Duration::from_secs(60);
/// How often progress is reported.
const TELLING: Duration = Duration::from_millis(200);

/// The options of a snapshot.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long the guest may be paused: a limit, not a target.
    pub downtime: Duration,
    /// After this time the guest is paused for longer if it writes faster than passes end.
    pub timeout: Duration,
    /// How dirty pages are collected. None for the machine's own method.
    pub method: Option<Method>,
    /// Whether the machine ends at the pause.
    pub stop: bool,
    /// Whether dirty tracking continues after the snapshot.
    pub follow: bool,
}

/// The destination of a snapshot.
pub struct Place {
    /// Its files, which are empty.
    pub files: Files,
    /// The identity of its directory.
    pub chain: String,
    /// The number of the new point.
    pub number: u32,
    /// The machine's disks, which stay where they are.
    pub disks: Vec<machine::Disk>,
}

/// Why a snapshot or a fork fails.
pub(crate) enum End {
    /// The machine is gone.
    Orphaned,
    /// The guest continues as before.
    Failed(String),
}

impl From<Orphaned> for End {
    fn from(_: Orphaned) -> Self {
        Self::Orphaned
    }
}

impl From<dirty::Error> for End {
    fn from(error: dirty::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

pub(crate) fn failed(what: &'static str) -> impl Fn(std::io::Error) -> End {
    move |error| End::Failed(format!("{what}: {error}"))
}

impl Mine<Said, SenderCommand> {
    /// Has the event loop's thread do something.
    pub(crate) fn demand(&self, what: Demand) -> Result<Done, End> {
        self.say(Said::Demand(what))?;
        loop {
            match self.wait()? {
                SenderCommand::Done(Done::Failed(why)) | SenderCommand::Cancel(why) => {
                    return Err(End::Failed(why));
                }
                SenderCommand::Done(done) => return Ok(done),
                _ => {}
            }
        }
    }

    /// Pauses the machine and saves its state.
    pub(crate) fn save(&self) -> Result<Vec<Section>, End> {
        match self.demand(Demand::Save)? {
            Done::Saved(sections) => Ok(sections),
            _ => Err(End::Failed("the machine cannot be saved".into())),
        }
    }

    /// Whether somebody does not want it any more.
    pub(crate) fn is_wanted(&self) -> Result<(), End> {
        while let Some(told) = self.heard()? {
            if let SenderCommand::Cancel(why) = told {
                return Err(End::Failed(why));
            }
        }
        Ok(())
    }
}

/// What of a point was written beside its pages.
pub(crate) struct WrittenDown {
    pub layer: layer::Written,
    pub state_bytes: u64,
    pub state_crc: u32,
}

/// Brings the state and the map to the disk, and the pages.
pub(crate) fn write_down(
    files: &Files,
    describe: &Value,
    sections: &[Section],
    writer: Writer,
) -> Result<WrittenDown, End> {
    let bytes = state::bytes(describe, sections);
    let bytes = bytes.map_err(|error| End::Failed(format!("the state: {error}")))?;
    files.state.write_all_at(&bytes, 0).map_err(failed("writing the state"))?;
    files.state.sync_all().map_err(failed("writing the state"))?;
    let layer = writer.finish(&files.map).map_err(failed("writing the map"))?;
    Ok(WrittenDown { layer, state_bytes: bytes.len() as u64, state_crc: layer::sum(&bytes) })
}

/// The thread.
pub(crate) struct Saving {
    options: Options,
    machine: Mine<Said, SenderCommand>,
    describe: Value,
    ram: Memory,
    pagemap: Option<Arc<Pagemap>>,
    memory: Vec<Slot>,
    place: Place,
    writer: Option<Writer>,
    since: Option<Since>,
    /// Pages that are in the files.
    taken: Vec<Bits>,
    /// When the machine was paused, in nanoseconds since 1970.
    paused: u64,
    /// Whether the point contains all pages.
    full: bool,
    plan: Plan,
    began: Instant,
    told_at: Instant,
    passes: u32,
    bytes: u64,
}

impl Saving {
    /// A snapshot of `what`. With `since`, only of the pages that were written since the last
    /// point.
    ///
    /// # Errors
    /// The files cannot be extended to the required size.
    pub fn new(
        options: Options,
        place: Place,
        what: Moving,
        since: Option<Since>,
        machine: Mine<Said, SenderCommand>,
    ) -> std::io::Result<Self> {
        let now = Instant::now();
        let writer = Writer::new(place.files.ram.try_clone()?, &what.memory)?;
        Ok(Self {
            machine,
            describe: what.describe,
            ram: what.ram,
            pagemap: what.pagemap,
            memory: what.memory,
            place,
            writer: Some(writer),
            full: since.is_none(),
            since,
            taken: Vec::new(),
            paused: 0,
            plan: Plan::new(options.downtime, Some((options.timeout, Then::Force)), None),
            began: now,
            told_at: now,
            passes: 0,
            bytes: 0,
            options,
        })
    }

    /// Runs until the files have their names, the snapshot fails, or the event loop's thread is
    /// gone.
    pub fn run(mut self) {
        let result = self.follow().and_then(|since| {
            let result = self.write(&since);
            self.keep(since, result.is_ok())?;
            result
        });
        let event = match result {
            Ok(()) => SenderEvent::Named,
            Err(End::Failed(why)) => SenderEvent::Stayed(why),
            Err(End::Orphaned) => return,
        };
        // If it fails, the event loop's thread is gone.
        let _ = self.machine.say(Said::SenderEvent(event));
    }

    /// Starts dirty tracking, or continues it from the last point.
    fn follow(&mut self) -> Result<Since, End> {
        if let Some(since) = self.since.take() {
            self.taken = since.owed.none();
            return Ok(since);
        }
        let tracker = match self.machine.demand(Demand::Track(self.options.method))? {
            Done::Tracker(tracker) => tracker,
            _ => return Err(End::Failed("the machine cannot be followed".into())),
        };
        let owed = PendingPages::new(std::mem::take(&mut self.memory));
        let since = Since { method: tracker.method(), owed, chain: String::new(), point: 0, taken: 0 };
        self.taken = since.owed.none();
        since.owed.follow(tracker, &self.ram, self.pagemap.as_deref())?;
        Ok(since)
    }

    /// Returns dirty tracking to the machine if the next point is to have only changed pages.
    fn keep(&mut self, mut since: Since, named: bool) -> Result<(), Orphaned> {
        match named {
            true if self.options.follow => {
                (since.chain, since.point) = (self.place.chain.clone(), self.place.number);
                since.taken = self.paused;
            }
            // The pages taken by this point are owed to the next.
            false if !self.full && !plant::is(Mistake::OwedForgotten) => {
                for (region, taken) in self.taken.iter().enumerate() {
                    since.owed.add(region, &taken.words());
                }
            }
            false if !self.full => {}
            _ => return Ok(()),
        }
        self.machine.say(Said::Kept(Box::new(since)))
    }

    fn write(&mut self, since: &Since) -> Result<(), End> {
        // Finds a file system that cannot clone before the guest is affected.
        disk::clone(&self.place.disks, &self.place.files.clones).map_err(End::Failed)?;
        if !self.full {
            self.collect(since)?;
        }
        while self.pass(since)? == Decision::Again {}
        let sections = self.machine.save()?;
        let taken = clocks::now();
        self.paused = taken;
        // After saving the state: saving a vCPU makes KVM write to guest memory.
        self.collect(since)?;
        self.passes += 1;
        self.copy(since, Phase::Final)?;
        let disks = disk::saved(&self.place.disks, &self.place.files.clones).map_err(End::Failed)?;
        if !self.options.stop {
            self.machine.demand(Demand::Resume)?;
        }
        let written = self.write_down(taken, &sections, disks)?;
        self.machine.say(Said::SenderEvent(SenderEvent::Written(written)))?;
        self.wait_until_named()
    }

    fn collect(&self, since: &Since) -> Result<(), End> {
        Ok(since.owed.collect(&self.ram, self.pagemap.as_deref())?)
    }

    /// One pass over the owed pages. Returns what comes next.
    fn pass(&mut self, since: &Since) -> Result<Decision, End> {
        // Disks are flushed while the guest runs, so little is left to flush in the pause. They are
        // flushed before pages are read, so the pass includes memory that is written meanwhile.
        disk::flush(&self.place.disks).map_err(End::Failed)?;
        let (began, pages, bytes) = (Instant::now(), since.owed.count(), self.bytes);
        self.passes += 1;
        self.copy(since, Phase::Copying)?;
        let took = began.elapsed();
        self.collect(since)?;
        let measured = Measured { pages, bytes: self.bytes - bytes, took, dirty: since.owed.count() };
        match self.plan.pass_ended(measured, self.began.elapsed()) {
            Decision::GiveUp(why) => Err(End::Failed(why)),
            decision => Ok(decision),
        }
    }

    /// Copies all owed pages into the files.
    fn copy(&mut self, since: &Since, phase: Phase) -> Result<(), End> {
        let (all, mut at) = (Share::new(0, 1), At::default());
        loop {
            self.machine.is_wanted()?;
            self.tell(since, phase)?;
            let Some((outgoing, run)) = since.owed.next(&mut at, &all)? else { return Ok(()) };
            // Settled before they are read: a later write makes them owed again.
            since.owed.settle(outgoing, run.clone());
            let region = outgoing.region() as usize;
            self.taken[region].set(run.clone());
            let Some(writer) = &mut self.writer else { return Ok(()) };
            self.bytes +=
                writer.write(region, outgoing.slot(), run.clone()).map_err(failed("writing pages"))?;
            // Only in the first pass. Pages of later passes are synced once at the end, and a
            // paused guest does not wait for the disk.
            if self.passes == 1 {
                writer.write_back(region, run);
            }
        }
    }

    /// Writes and syncs the state, the map and the pages.
    fn write_down(&mut self, taken: u64, sections: &[Section], disks: Vec<Disk>) -> Result<Written, End> {
        let Some(writer) = self.writer.take() else {
            return Err(End::Failed("it is written already".into()));
        };
        let WrittenDown { layer, state_bytes, state_crc } =
            write_down(&self.place.files, &self.describe, sections, writer)?;
        Ok(Written { full: self.full, taken, passes: self.passes, layer, state_bytes, state_crc, disks })
    }

    fn wait_until_named(&mut self) -> Result<(), End> {
        let deadline = Instant::now() + NAMING;
        loop {
            match self.machine.heard()? {
                Some(SenderCommand::Named) => return Ok(()),
                Some(SenderCommand::Cancel(why)) => return Err(End::Failed(why)),
                Some(_) => {}
                None => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        let why = format!("its files were not named within {} s", NAMING.as_secs());
                        return Err(End::Failed(why));
                    }
                    let mut poll = Poll::default();
                    poll.readable(&**self.machine.descriptor());
                    let _ = poll.wait(Some(left));
                }
            }
        }
    }

    fn tell(&mut self, since: &Since, phase: Phase) -> Result<(), Orphaned> {
        if self.told_at.elapsed() < TELLING {
            return Ok(());
        }
        self.told_at = Instant::now();
        let progress = Progress {
            phase,
            pass: self.passes,
            sent: self.bytes,
            spared: 0,
            owed: since.owed.count(),
            measured: self.plan.last(),
            downtime: self.plan.expected_downtime(),
            total: self.plan.estimate().map(|estimate| estimate.total),
            taken: 0,
        };
        self.machine.say(Said::SenderEvent(SenderEvent::Progress(progress)))
    }
}
