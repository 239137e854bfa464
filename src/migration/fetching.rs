//! Memory of a machine that is made out of a snapshot, and that comes when somebody wants it. A thread answers the faults of vCPUs, of disks'
//! threads and of the event loop's own (userfaultfd), each with the page of the backing's size that is missing, and in between it brings
//! the rest. When all is there the descriptor is closed, and the memory is like any other.
//!
//! The thread reads files and has the kernel copy: by the mapping it touches nothing of that memory, for it would wait for itself. Nor does it
//! wait for any other thread. So whoever waits for a page, with whatever locks, waits for a file to be read and no longer.
//!
//! Pages that the snapshot has as zero, and such as were here and have been discarded since (a balloon's), are answered alike, with
//! zeroes; of neither is anything brought unasked. A page that is damaged is given to nobody. The event loop's thread may be the one that
//! waits for it, so that only the end of the process is left.
//!
//! The order in which pages are wanted can be [recorded](Recording): nothing is brought unasked meanwhile. The next restore brings
//! those first.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::bits::Bits;
use crate::control::Fetched;
use crate::plant::{self, Mistake};
use crate::sandbox::{Sandbox, ThreadKind};
use crate::snapshot::layer::Layers;
use crate::snapshot::working_set::{Unnamed, WorkingSet};
use crate::sys::mmap::{Mapping, PAGE_SIZE};
use crate::sys::poll::Poll;
use crate::sys::uffd::{BATCH, Mode, Uffd};
use crate::sys::{seccomp, terminal};

/// Bytes that are brought before faults are looked at again: a fault waits for no more than that.
const STEP: u64 = 128 << 10;
/// So many pages that were wanted one after the other are brought in the order in which they lie in the files, while the kernel reads
/// as many more.
const SORTED: usize = 256;
/// How often the clock is looked at while the order is recorded.
const LOOK: Duration = Duration::from_millis(50);

/// What it takes, opened before the sandbox.
#[derive(Debug)]
pub struct Opened {
    /// Where faults arrive.
    pub uffd: Uffd,
    /// The order, where it is recorded.
    pub recording: Option<Recording>,
}

/// The order in which pages are wanted is written down.
#[derive(Debug)]
pub struct Recording {
    /// For how long, from when the machine runs on.
    pub lasts: Duration,
    /// Where to.
    pub file: Unnamed,
}

/// Which memory, and what is to be in it.
#[derive(Debug)]
pub struct Work {
    /// All RAM, which is all zero; its pages are the first of the machine's, in their order.
    pub mapping: Arc<Mapping>,
    /// The size of a page of what backs it, in bytes.
    pub page: u64,
    /// What it becomes.
    pub layers: Layers,
    /// What of it is brought first.
    pub first: Option<WorkingSet>,
}

enum Told {
    Begin(Box<Work>),
    Runs,
}

enum Said {
    Answers(Result<(), String>),
    Over(Fetched),
}

/// The thread, as those who wait for it see it.
#[derive(Debug)]
pub struct Fetching {
    tell: Sender<Told>,
    said: Receiver<Said>,
}

impl Fetching {
    /// Starts the thread, which waits for its work.
    ///
    /// # Errors
    /// Where the host refuses a thread.
    pub fn start(opened: Opened, sandbox: Sandbox) -> Result<Self, String> {
        let ((tell, told), (say, said)) = (channel(), channel());
        let body = move || {
            if let Err(error) = sandbox.enter(ThreadKind::Fetching, "fetching") {
                // Of no consequence where nobody waits for it any more.
                let _ = say.send(Said::Answers(Err(error.to_string())));
                return;
            }
            let Ok(Told::Begin(work)) = told.recv() else { return };
            let thread = Thread::new(opened, *work, told);
            let _ = say.send(Said::Answers(thread.register()));
            match thread.run() {
                Ok(fetched) => drop(say.send(Said::Over(fetched))),
                Err(why) => end(&why),
            }
        };
        let started = std::thread::Builder::new().name("fetching".into()).spawn(body);
        started.map_err(|error| format!("the thread that fetches memory: {error}"))?;
        Ok(Self { tell, said })
    }

    /// Has faults answered from now on, until all is there.
    ///
    /// # Errors
    /// Where the kernel refuses; nothing has changed then.
    pub fn begin(&self, work: Work) -> Result<(), String> {
        let gone = "the thread that fetches memory has failed";
        self.tell.send(Told::Begin(Box::new(work))).map_err(|_| gone)?;
        match self.said.recv() {
            Ok(Said::Answers(result)) => result,
            _ => Err(gone.into()),
        }
    }

    /// The machine runs.
    pub fn runs(&self) {
        // A thread that has ended has brought all.
        let _ = self.tell.send(Told::Runs);
    }

    /// Waits until all is there. It comes, or the process ends.
    pub fn is_over(&self) -> Option<Fetched> {
        self.said.iter().find_map(|said| match said {
            Said::Over(fetched) => Some(fetched),
            Said::Answers(_) => None,
        })
    }
}

/// Ends the process: nobody who waits for a page can be told that there is none.
fn end(why: &str) -> ! {
    terminal::restore();
    seccomp::write_stderr(format!("vellum: the guest's memory cannot be brought: {why}\n").as_bytes());
    seccomp::exit_now(1)
}

/// What the thread has. Pages of what backs memory are counted as units, of so many pages each.
struct Thread {
    uffd: Uffd,
    recording: Option<Recording>,
    mapping: Arc<Mapping>,
    page: u64,
    unit: u64,
    units: u64,
    layers: Layers,
    /// Units that the snapshot has something of, and that were not brought yet.
    missing: Bits,
    /// Up to where the rest has been brought.
    at: u64,
    /// What is brought first, the last of it first, and of that the part that is under way.
    first: Vec<Vec<Range<u64>>>,
    window: Vec<Range<u64>>,
    buffer: Vec<u8>,
    told: Receiver<Told>,
    /// Units in the order in which they were wanted, and which they are.
    order: Vec<u64>,
    wanted: Bits,
    /// Since when the machine has run.
    runs: Option<Instant>,
    began: Instant,
    fetched: Fetched,
}

impl Thread {
    fn new(opened: Opened, work: Work, told: Receiver<Told>) -> Self {
        let Work { mapping, page, layers, first } = work;
        let unit = page / PAGE_SIZE;
        let units = mapping.len() / page;
        let missing = Bits::new(units);
        let mut at = 0;
        while let Some((run, from)) = layers.next_of(at..units * unit, u64::MAX) {
            at = run.end;
            if from.is_some() {
                missing.set(run.start / unit..run.end.div_ceil(unit));
            }
        }
        let step = (STEP / page).max(1);
        let first = first.map(|set| in_order(&set, unit, units, step)).unwrap_or_default();
        Self {
            uffd: opened.uffd,
            recording: opened.recording,
            page,
            unit,
            units,
            layers,
            missing,
            at: 0,
            first,
            window: Vec::new(),
            buffer: vec![0; (step * page) as usize],
            mapping,
            told,
            order: Vec::new(),
            wanted: Bits::new(units),
            runs: None,
            began: Instant::now(),
            fetched: Fetched::default(),
        }
    }

    fn register(&self) -> Result<(), String> {
        let registered = self.uffd.register(&self.mapping, 0, self.mapping.len(), Mode::Missing);
        registered.map_err(|error| format!("userfaultfd for the guest's memory: {error}"))
    }

    fn run(mut self) -> Result<Fetched, String> {
        self.announce(self.first.last());
        loop {
            self.answer()?;
            if self.recording.is_some() {
                self.record()?;
            } else if let Some(run) = self.window.pop() {
                self.supply(run)?;
            } else if let Some(window) = self.first.pop() {
                self.window = window;
                self.announce(self.first.last());
            } else if let Some(run) = self.missing.first_run_of(self.at..self.units, self.step()) {
                self.at = run.end;
                self.bring(run)?;
            } else {
                break;
            }
        }
        self.fetched.us = self.began.elapsed().as_micros() as u64;
        // The descriptor is closed with this: who still waits finds zeroes.
        Ok(self.fetched)
    }

    fn step(&self) -> u64 {
        self.buffer.len() as u64 / self.page
    }

    /// Has the kernel read a part of what is brought first.
    fn announce(&self, window: Option<&Vec<Range<u64>>>) {
        let runs = window.into_iter().flat_map(|window| window.iter().rev());
        self.layers.announce(runs.map(|run| run.start * self.unit..run.end * self.unit));
    }

    /// Answers all who wait.
    fn answer(&mut self) -> Result<(), String> {
        let mut addresses = [0; BATCH];
        loop {
            let taken = self.uffd.take(&mut addresses).map_err(|error| format!("userfaultfd: {error}"))?;
            for address in &addresses[..taken] {
                let unit = (address - self.mapping.as_ptr() as u64) / self.page;
                self.fetched.faults += 1;
                self.supply(unit..unit + 1)?;
                if self.recording.is_some() && self.wanted.first_run(unit..unit + 1).is_none() {
                    self.wanted.set(unit..unit + 1);
                    self.order.push(unit);
                }
            }
            if taken == 0 {
                return Ok(());
            }
        }
    }

    /// What is to be in `run` is there then, or was before.
    fn supply(&mut self, run: Range<u64>) -> Result<(), String> {
        let mut at = run.start;
        while at < run.end {
            let next = self.missing.first_run(at..run.end).unwrap_or(run.end..run.end);
            if next.start > at {
                self.zero(at..next.start)?;
            }
            at = next.end;
            if !next.is_empty() {
                self.bring(next)?;
            }
        }
        Ok(())
    }

    /// Brings `run`, which is missing, one step at most.
    fn bring(&mut self, run: Range<u64>) -> Result<(), String> {
        let pages = run.start * self.unit..run.end * self.unit;
        let all = &mut self.buffer[..((run.end - run.start) * self.page) as usize];
        if self.unit > 1 {
            // Of a huge page the snapshot need not have all.
            all.fill(0);
        }
        let mut at = pages.start;
        while let Some((found, from)) = self.layers.next_of(at..pages.end, u64::MAX) {
            at = found.end;
            let Some(layer) = from else { continue };
            let bytes = [found.start, found.end].map(|page| ((page - pages.start) * PAGE_SIZE) as usize);
            layer.read(found, &mut all[bytes[0]..bytes[1]]).map_err(|error| error.to_string())?;
        }
        let all = if plant::is(Mistake::SmallCopy) { &all[..PAGE_SIZE as usize] } else { &*all };
        let copied = self.uffd.copy(&self.mapping, run.start * self.page, all, self.page);
        copied.map_err(|error| format!("UFFDIO_COPY: {error}"))?;
        // Not before: a fault that comes again is answered with zeroes from here on.
        self.fetched.pages += pages.end - pages.start;
        self.missing.clear(run);
        Ok(())
    }

    fn zero(&mut self, run: Range<u64>) -> Result<(), String> {
        let (offset, len) = (run.start * self.page, (run.end - run.start) * self.page);
        let zeroed = if self.page == PAGE_SIZE {
            self.uffd.zero(&self.mapping, offset, len, self.page)
        } else {
            let zeroes = &mut self.buffer[..len as usize];
            zeroes.fill(0);
            self.uffd.copy(&self.mapping, offset, zeroes, self.page)
        };
        zeroed.map_err(|error| format!("UFFDIO_ZEROPAGE: {error}"))
    }

    /// Waits for faults, until the order has been recorded for long enough, and writes it down then.
    fn record(&mut self) -> Result<(), String> {
        let Some(lasts) = self.recording.as_ref().map(|recording| recording.lasts) else { return Ok(()) };
        if self.runs.is_none() && self.told.try_recv().is_ok() {
            self.runs = Some(Instant::now());
        }
        let left = self.runs.map_or(LOOK, |since| lasts.saturating_sub(since.elapsed()));
        if !left.is_zero() {
            let mut poll = Poll::default();
            poll.readable(self.uffd.descriptor());
            return poll.wait(Some(left.min(LOOK))).map(drop).map_err(|error| format!("poll: {error}"));
        }
        let Some(recording) = self.recording.take() else { return Ok(()) };
        let set = WorkingSet {
            unit: self.unit as u32,
            pages: self.layers.pages(),
            firsts: self.order.drain(..).map(|unit| unit * self.unit).collect(),
        };
        match recording.file.finish(&set) {
            Ok(()) => tracing::info!("the working set of {} pages is recorded", set.firsts.len()),
            // The guest needs none.
            Err(error) => tracing::warn!("the working set is not recorded: {error}"),
        }
        Ok(())
    }
}

/// Runs of units, a step each at most, in the order of `set`: a part of it each, the last first, and in that the last first.
fn in_order(set: &WorkingSet, unit: u64, units: u64, step: u64) -> Vec<Vec<Range<u64>>> {
    let of = |first: &u64| {
        let end = (first + u64::from(set.unit)).div_ceil(unit);
        // Pages of a memslot that is not RAM come otherwise.
        first / unit..end.min(units)
    };
    let runs = |window: &[u64]| {
        let mut window: Vec<u64> = window.iter().flat_map(of).collect();
        window.sort_unstable();
        window.dedup();
        let mut runs: Vec<Range<u64>> = Vec::new();
        for at in window {
            match runs.last_mut() {
                Some(run) if run.end == at && run.end - run.start < step => run.end += 1,
                _ => runs.push(at..at + 1),
            }
        }
        runs.reverse();
        runs
    };
    set.firsts.chunks(SORTED).rev().map(runs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_wanted_is_brought_in_that_order_by_and_large() {
        let set = |unit, firsts| WorkingSet { unit, pages: 4096, firsts };
        let runs = |set: &WorkingSet, unit, step| -> Vec<(u64, u64)> {
            let runs = in_order(set, unit, 4096 / unit, step);
            runs.iter().rev().flat_map(|part| part.iter().rev()).map(|run| (run.start, run.end)).collect()
        };
        assert_eq!(runs(&set(1, vec![9, 3, 2, 3, 4]), 1, 32), [(2, 5), (9, 10)]);
        assert_eq!(runs(&set(1, vec![4, 3, 2, 1]), 1, 2), [(1, 3), (3, 5)]);
        // Recorded with huge pages, and wanted in small ones, and the other way round.
        assert_eq!(runs(&set(4, vec![8, 4]), 1, 32), [(4, 12)]);
        assert_eq!(runs(&set(1, vec![1030, 1, 2, 600]), 512, 1), [(0, 1), (1, 2), (2, 3)]);
        // What lies in different windows is not mixed.
        let far: Vec<u64> = (0..SORTED as u64).map(|at| 2000 + at).chain([5]).collect();
        assert_eq!(runs(&set(1, far), 1, 4096), [(2000, 2000 + SORTED as u64), (5, 6)]);
        // Pages beyond RAM are not fetched.
        assert_eq!(runs(&set(1, vec![4095, 2]), 512, 32), [(0, 1), (7, 8)]);
        assert!(in_order(&set(1, vec![4095]), 1, 4000, 32).concat().is_empty());
    }
}
