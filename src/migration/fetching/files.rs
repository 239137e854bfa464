//! Memory that is fetched from the files of a snapshot.

use std::ops::Range;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use super::{FetchCommand, Recording};
use crate::bits::Bits;
use crate::postcopy_memory::PostcopyMemory;
use crate::snapshot::layer::Layers;
use crate::snapshot::working_set::WorkingSet;
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::poll::Poll;

/// The number of bytes fetched before faults are checked again. No fault waits longer than that
/// takes.
const STEP: u64 = 128 << 10;
/// The number of wanted pages per window. A window is fetched in the order of the files, while the
/// kernel reads the next one.
const SORTED: usize = 256;
/// How often the clock is checked while the order is recorded.
const LOOK: Duration = Duration::from_millis(50);

/// The state of fetching from files.
pub(super) struct Files {
    recording: Option<Recording>,
    layers: Layers,
    /// The end of the units that have been fetched in the background.
    at: u64,
    /// The windows that are fetched first, in reverse order. `window` is what remains of the
    /// current one.
    first: Vec<Vec<Range<u64>>>,
    window: Vec<Range<u64>>,
    buffer: Vec<u8>,
    told: Receiver<FetchCommand>,
    /// The units in the order in which they were wanted. `wanted` is the set of them.
    order: Vec<u64>,
    wanted: Bits,
    /// When the machine started to run.
    runs: Option<Instant>,
}

/// The units that the snapshot has content for.
pub(super) fn missing(layers: &Layers, unit: u64, units: u64) -> Bits {
    let missing = Bits::new(units);
    let mut at = 0;
    while let Some((run, from)) = layers.next_of(at..units * unit, u64::MAX) {
        at = run.end;
        if from.is_some() {
            missing.set(run.start / unit..run.end.div_ceil(unit));
        }
    }
    missing
}

impl Files {
    /// Fetches `layers` into `postcopy`, `first` before everything else.
    pub fn new(
        postcopy: &PostcopyMemory,
        layers: Layers,
        first: Option<WorkingSet>,
        recording: Option<Recording>,
        told: Receiver<FetchCommand>,
    ) -> Self {
        let (unit, units) = (postcopy.unit(), postcopy.units());
        let page = unit * PAGE_SIZE;
        let step = (STEP / page).max(1);
        let first = first.map(|set| in_order(&set, unit, units, step)).unwrap_or_default();
        let files = Self {
            recording,
            layers,
            at: 0,
            first,
            window: Vec::new(),
            buffer: vec![0; (step * page) as usize],
            told,
            order: Vec::new(),
            wanted: Bits::new(units),
            runs: None,
        };
        files.announce(files.first.last(), unit);
        files
    }

    /// Handles a fault on a unit.
    pub fn supply(&mut self, postcopy: &PostcopyMemory, unit: u64) -> Result<(), String> {
        self.bring_or_zero(postcopy, unit..unit + 1)?;
        if self.recording.is_some() && self.wanted.first_run(unit..unit + 1).is_none() {
            self.wanted.set(unit..unit + 1);
            self.order.push(unit);
        }
        Ok(())
    }

    /// Makes all of `run` present: fetches its missing units, and resolves faults on the others
    /// with zeroes.
    fn bring_or_zero(&mut self, postcopy: &PostcopyMemory, run: Range<u64>) -> Result<(), String> {
        let mut at = run.start;
        while at < run.end {
            let next = postcopy.missing().first_run(at..run.end).unwrap_or(run.end..run.end);
            if next.start > at {
                postcopy.zero(at..next.start)?;
            }
            at = next.end;
            if !next.is_empty() {
                self.bring(postcopy, next)?;
            }
        }
        Ok(())
    }

    /// Fetches a part of the rest, or waits for faults while the order is recorded. Returns false
    /// when all units are present.
    pub fn go_on(&mut self, postcopy: &PostcopyMemory) -> Result<bool, String> {
        let step = self.buffer.len() as u64 / (postcopy.unit() * PAGE_SIZE);
        if self.recording.is_some() {
            self.record(postcopy)?;
        } else if let Some(run) = self.window.pop() {
            self.bring_or_zero(postcopy, run)?;
        } else if let Some(window) = self.first.pop() {
            self.window = window;
            self.announce(self.first.last(), postcopy.unit());
        } else if let Some(run) = postcopy.missing().first_run_of(self.at..postcopy.units(), step) {
            self.at = run.end;
            self.bring(postcopy, run)?;
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    /// Tells the kernel to read a window.
    fn announce(&self, window: Option<&Vec<Range<u64>>>, unit: u64) {
        let runs = window.into_iter().flat_map(|window| window.iter().rev());
        self.layers.announce(runs.map(|run| run.start * unit..run.end * unit));
    }

    /// Fetches `run`, which is missing and at most one step.
    fn bring(&mut self, postcopy: &PostcopyMemory, run: Range<u64>) -> Result<(), String> {
        let unit = postcopy.unit();
        let pages = run.start * unit..run.end * unit;
        let all = &mut self.buffer[..((pages.end - pages.start) * PAGE_SIZE) as usize];
        if unit > 1 {
            // The snapshot may have only parts of a huge page.
            all.fill(0);
        }
        let mut at = pages.start;
        while let Some((found, from)) = self.layers.next_of(at..pages.end, u64::MAX) {
            at = found.end;
            let Some(layer) = from else { continue };
            let bytes = [found.start, found.end].map(|page| ((page - pages.start) * PAGE_SIZE) as usize);
            layer.read(found, &mut all[bytes[0]..bytes[1]]).map_err(|error| error.to_string())?;
        }
        postcopy.put(run, all)
    }

    /// Waits for faults until the order has been recorded for long enough or no unit is missing,
    /// and then writes it.
    fn record(&mut self, postcopy: &PostcopyMemory) -> Result<(), String> {
        let Some(lasts) = self.recording.as_ref().map(|recording| recording.lasts) else { return Ok(()) };
        if self.runs.is_none() {
            match self.told.try_recv() {
                Ok(FetchCommand::Runs) => self.runs = Some(Instant::now()),
                Ok(_) | Err(TryRecvError::Empty) => {}
                // The machine will not run, so there is no order to record.
                Err(TryRecvError::Disconnected) => {
                    self.recording = None;
                    return Ok(());
                }
            }
        }
        let left = self.runs.map_or(LOOK, |since| lasts.saturating_sub(since.elapsed()));
        // Once all units are present, each has been wanted.
        if !left.is_zero() && postcopy.left() > 0 {
            let mut poll = Poll::default();
            poll.readable(postcopy.uffd().descriptor());
            return poll.wait(Some(left.min(LOOK))).map(drop).map_err(|error| format!("poll: {error}"));
        }
        let Some(recording) = self.recording.take() else { return Ok(()) };
        let set = WorkingSet {
            unit: postcopy.unit() as u32,
            pages: self.layers.pages(),
            firsts: self.order.drain(..).map(|unit| unit * postcopy.unit()).collect(),
        };
        match recording.file.finish(&set) {
            Ok(()) => tracing::info!("the working set of {} pages is recorded", set.firsts.len()),
            // The guest does not need it.
            Err(error) => tracing::warn!("the working set is not recorded: {error}"),
        }
        Ok(())
    }
}

/// The windows of `set`, in runs of at most a step of units. Both the windows and the runs in each
/// are in reverse order.
fn in_order(set: &WorkingSet, unit: u64, units: u64, step: u64) -> Vec<Vec<Range<u64>>> {
    let of = |first: &u64| {
        let end = (first + u64::from(set.unit)).div_ceil(unit);
        // Pages of memslots other than RAM are not fetched.
        first / unit..end.min(units)
    };
    let runs = |window: &[u64]| {
        let mut window: Vec<Range<u64>> = window.iter().map(of).collect();
        window.sort_unstable_by_key(|units| units.start);
        let mut runs: Vec<Range<u64>> = Vec::new();
        for Range { start, end } in window {
            // Several entries may share a unit.
            let mut at = start.max(runs.last().map_or(0, |run| run.end));
            while at < end {
                let begun = runs.last_mut().filter(|run| run.end == at && run.end - run.start < step);
                let from = begun.as_ref().map_or(at, |run| run.start);
                at = end.min(from + step);
                match begun {
                    Some(run) => run.end = at,
                    None => runs.push(from..at),
                }
            }
        }
        runs.reverse();
        runs
    };
    set.firsts.chunks(SORTED).rev().map(runs).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use super::*;
    use crate::snapshot::working_set::Unnamed;
    use crate::threads;
    use vellum_sys::mmap::{Mapping, Source};
    use vellum_sys::uffd::{Mode, Uffd};

    /// Only the start of the machine starts the time of the recording. A machine that is ended
    /// before it runs ends the recording, and then the thread.
    #[test]
    fn a_recording_begins_with_the_machine_and_ends_without_it() {
        let Ok(uffd) = Uffd::new(Mode::Missing) else {
            eprintln!("needs a userfaultfd that sees KVM's faults (vellum doctor)");
            return;
        };
        let mapping = Arc::new(Mapping::new(PAGE_SIZE, PAGE_SIZE, Source::Anonymous).unwrap());
        let missing = Bits::new(1);
        missing.set(0..1);
        let postcopy = PostcopyMemory::new(uffd, mapping, PAGE_SIZE, missing, threads::event().unwrap());
        postcopy.register().unwrap();
        let (file, _naming) = Unnamed::create(&std::env::temp_dir()).unwrap();
        let recording = Recording { lasts: Duration::MAX, file };
        let (tell, told) = channel();
        let mut files = Files::new(&postcopy, Layers(Vec::new()), None, Some(recording), told);
        tell.send(FetchCommand::Cut).unwrap();
        assert_eq!((files.go_on(&postcopy), files.runs), (Ok(true), None));
        drop(tell);
        assert_eq!(files.go_on(&postcopy), Ok(true));
        assert_eq!((files.go_on(&postcopy), files.recording.is_none()), (Ok(true), true));
        assert_eq!((files.go_on(&postcopy), postcopy.left()), (Ok(false), 0));
    }

    #[test]
    fn what_was_wanted_is_brought_in_that_order_by_and_large() {
        let set = |unit, firsts| WorkingSet { unit, pages: 4096, firsts };
        let runs = |set: &WorkingSet, unit, step| -> Vec<(u64, u64)> {
            let runs = in_order(set, unit, 4096 / unit, step);
            runs.iter().rev().flat_map(|part| part.iter().rev()).map(|run| (run.start, run.end)).collect()
        };
        assert_eq!(runs(&set(1, vec![9, 3, 2, 3, 4]), 1, 32), [(2, 5), (9, 10)]);
        assert_eq!(runs(&set(1, vec![4, 3, 2, 1]), 1, 2), [(1, 3), (3, 5)]);
        // Recorded with huge pages and fetched in small ones, and the other way round.
        assert_eq!(runs(&set(4, vec![8, 4]), 1, 32), [(4, 12)]);
        assert_eq!(runs(&set(1, vec![1030, 1, 2, 600]), 512, 1), [(0, 1), (1, 2), (2, 3)]);
        // Units of different windows are not mixed.
        let far: Vec<u64> = (0..SORTED as u64).map(|at| 2000 + at).chain([5]).collect();
        assert_eq!(runs(&set(1, far), 1, 4096), [(2000, 2000 + SORTED as u64), (5, 6)]);
        // Pages beyond RAM are not fetched.
        assert_eq!(runs(&set(1, vec![4095, 2]), 512, 32), [(0, 1), (7, 8)]);
        assert!(in_order(&set(1, vec![4095]), 1, 4000, 32).concat().is_empty());
    }
}
