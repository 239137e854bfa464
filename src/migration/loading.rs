//! The thread that restores a snapshot. A [`receiver`](super::receiver) makes a machine from a
//! link; this thread makes it from the files of [`crate::snapshot`], with the same demands.

use std::cmp::Reverse;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::commit_flag::CommitFlag;
use super::fetching::{Fetching, Work};
use super::fit;
use super::pages::fresh;
use super::receiver::{Demand, Done, Offer, Place, Ram, ReceiverCommand, Said};
use super::threads::{Mine, Orphaned};
use crate::snapshot::layer::{Layers, Reader};
use crate::snapshot::manifest::Point;
use crate::snapshot::source::{Chosen, Source, read_state};
use crate::snapshot::working_set::WorkingSet;
use crate::snapshot::{Error, Files};
use vellum_kvm::memory::short_size;
use vellum_sys::mmap::{PAGE_SIZE, Pages, host_page};
use vellum_sys::sigbus;

/// How often a cancellation is checked while memory is populated.
const LOOK: Duration = Duration::from_millis(100);

/// The maximum number of pages whose maps are read before it is known that the machine can be made
/// here. These are the pages of 1 TiB. A map that is one hole takes a few MiB for them.
const BEFOREHAND: u64 = 1 << 28;

/// So many pages in a row are mapped from the files of a fork. Fewer cost less to copy: a mapping
/// takes as long as the copy of three pages, and memory of the kernel's own.
const MAPPED_PAGES: u64 = 16;

/// The most runs of pages that a fork maps. Each is up to two more mappings of the process, which may
/// have some 65,000 (vm.max_map_count).
const MAX_MAPPED_RUNS: usize = 5_000;

/// Why no machine is made.
enum End {
    /// The event loop's thread is gone.
    Orphaned,
    /// The machine cannot be made here.
    Refused(String),
    /// Its disks have changed.
    DiskChanged(String),
    /// Its TSC would have another frequency.
    OtherTsc(String),
    /// The host or the operator prevents it.
    Gone(String),
}

impl From<Orphaned> for End {
    fn from(_: Orphaned) -> Self {
        Self::Orphaned
    }
}

impl From<Error> for End {
    fn from(error: Error) -> Self {
        Self::Refused(error.to_string())
    }
}

/// How memory is restored from a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// All of it is read and verified before the guest runs.
    Eager,
    /// The files are mapped as guest memory. The kernel reads a page on first access and shares it
    /// with every process that maps it.
    Map {
        /// How many more mappings this process can have.
        mappings: u64,
    },
    /// Pages are fetched on demand, and the rest in the background ([`fetching`](super::fetching)).
    Demand {
        /// Whether the recorded working set is fetched first.
        prefetch: bool,
    },
    /// It shows the base of a fork already. Of what differs from that, pages that are many in a row are
    /// mapped. The others are read, and each is compared with its sum.
    Base,
}

/// What a machine is made of.
#[derive(Debug)]
pub enum Origin {
    /// A snapshot.
    Snapshot {
        /// Its files.
        source: Box<Source>,
        /// Which point, or the newest.
        point: Option<u32>,
        /// How its memory comes.
        way: Way,
    },
    /// A fork of a machine of this host.
    Fork(Box<Forked>),
    /// A machine that the kernel before this one has handed over.
    Preserved(Box<Preserved>),
}

/// A fork.
#[derive(Debug)]
pub struct Forked {
    /// What is in the files.
    pub point: Point,
    /// What differs from the base, and the state.
    pub files: Files,
    /// What the memory of the machine was, for the most part. Nobody writes to it.
    pub base: File,
}

impl Forked {
    /// What there is to read, and the base.
    fn chosen(self) -> Result<(Chosen, File), Error> {
        let Self { point, files, base } = self;
        let (machine, sections) = read_state(&point, &files)?;
        Ok((Chosen { machine, sections, layers: vec![(point, files)], working_set: None }, base))
    }
}

/// A machine that was saved for a live update of the host's kernel.
#[derive(Debug)]
pub struct Preserved {
    /// Its state, the pages of memory that is not RAM, and its RAM as the base.
    pub forked: Forked,
    /// Tells whether the machine has run. It runs once.
    pub flag: CommitFlag,
}

/// The thread.
pub(crate) struct Loading {
    way: Way,
    machine: Mine<Said, ReceiverCommand>,
    origin: Option<Origin>,
    /// Tells whether the machine has run, if it must not run twice.
    flag: Option<Arc<CommitFlag>>,
}

impl Loading {
    /// Makes the machine of `origin`.
    pub fn new(machine: Mine<Said, ReceiverCommand>, origin: Origin) -> Self {
        let way = match &origin {
            Origin::Snapshot { way, .. } => *way,
            Origin::Fork(_) | Origin::Preserved(_) => Way::Base,
        };
        Self { way, machine, origin: Some(origin), flag: None }
    }

    /// Runs until the machine runs, or until restoring fails.
    pub fn run(mut self) {
        let said = match self.load() {
            Ok(()) => Said::Over,
            Err(End::Orphaned) => return,
            Err(End::Refused(why)) => Said::Refused(why),
            Err(End::DiskChanged(why)) => Said::DiskChanged(why),
            Err(End::OtherTsc(why)) => Said::OtherTsc(why),
            Err(End::Gone(why)) => Said::Gone(why),
        };
        // If it fails, the event loop's thread is gone.
        let _ = self.machine.say(said).and_then(|()| self.machine.say(Said::Over));
    }

    /// Ends at once. Contains the reason.
    pub(crate) fn fail(self, why: String) {
        let _ = (self.machine.say(Said::Gone(why)), self.machine.say(Said::Over));
    }

    fn load(&mut self) -> Result<(), End> {
        let (chosen, ram, from) = match self.origin.take() {
            Some(Origin::Snapshot { source, point, .. }) => (source.choose(point)?, None, "the snapshot"),
            Some(Origin::Fork(forked)) => {
                let (chosen, base) = forked.chosen()?;
                (chosen, Some(Ram::Base(base)), "the machine")
            }
            Some(Origin::Preserved(preserved)) => {
                let Preserved { forked, flag } = *preserved;
                self.flag = Some(Arc::new(flag));
                let (chosen, ram) = forked.chosen()?;
                (chosen, Some(Ram::Handed(ram)), "the machine")
            }
            None => return Ok(()),
        };
        let disks = chosen.layers.last().map(|(point, _)| point.disks.clone()).unwrap_or_default();
        let offer = Offer { disks: Some(disks), ram, ..Offer::new(chosen.machine) };
        self.machine.say(Said::Demand(Demand::Judge(offer)))?;
        // Maps are read while the machine is being made. If they have too many pages, they are read
        // only once the machine is known to have as many.
        let told: Vec<(u32, u64)> =
            chosen.layers.iter().map(|(point, _)| (point.number, point.pages)).collect();
        let all = told.iter().fold(0, |all: u64, (_, pages)| all.saturating_add(*pages));
        let (now, later) =
            if all <= BEFOREHAND { (chosen.layers, Vec::new()) } else { (Vec::new(), chosen.layers) };
        let now = readers(now);
        let mut place = match self.answer()? {
            Done::Fits(place) => *place,
            Done::Misfits(misfits) => {
                // The remedies are for the operator of a migration, who has another target.
                let is_saved = self.way != Way::Base || self.flag.is_some();
                let each = misfits.iter().map(|misfit| {
                    let (what, there, here) = (&misfit.what, &misfit.source, &misfit.target);
                    let remedy = &misfit.remedy;
                    match is_saved {
                        false => format!("{what}: {from} has {there}, and the new one {here}: {remedy}"),
                        true => format!("{what}: {from} has {there}, and this host {here}"),
                    }
                });
                let why = each.collect::<Vec<_>>().join("; ");
                return Err(match misfits.iter().all(|misfit| misfit.what == fit::TSC) {
                    true => End::OtherTsc(why),
                    false => End::Refused(why),
                });
            }
            _ => return Err(End::Gone("the machine cannot be made".into())),
        };
        let pages = place.memory.iter().map(|slot| slot.pages()).sum();
        if let Some((number, has)) = told.iter().find(|(_, has)| *has != pages) {
            let what = format!("point {number} has {has} pages, and its machine {pages}");
            return Err(End::Refused(format!("{what}; it is damaged")));
        }
        let mut layers = now?;
        layers.extend(readers(later)?);
        let layers = Layers(layers);
        if let Way::Map { mappings } = self.way {
            show(&place, &layers, mappings)?;
        }
        let mapped = match (self.way, &self.flag) {
            (Way::Base, None) => map_layer(&place, &layers)?,
            _ => Vec::new(),
        };
        self.fill(&place, &layers, &mapped)?;
        if let (Way::Demand { prefetch }, Some(fetching)) = (self.way, place.fetching.take()) {
            let first = match (prefetch, &chosen.working_set) {
                (true, Some(file)) => Some(WorkingSet::read(file, pages)?),
                (true, None) => return Err(End::Refused("no restore of this snapshot was recorded".into())),
                (false, _) => None,
            };
            place.fetching = Some(fetch(&place, layers, first, fetching)?);
        }
        if let Some(populating) = &place.populating {
            while !populating.is_done(LOOK).map_err(End::Gone)? {
                self.hear()?;
            }
        }
        self.demand(Demand::Restore(chosen.sections))?;
        self.demand(Demand::Start(self.flag.clone(), None))?;
        if let Some(fetching) = place.fetching {
            fetching.runs();
            fetching.is_over().map(Said::Fetched).map_or(Ok(()), |said| self.machine.say(said))?;
        }
        Ok(())
    }

    /// Writes the snapshot's pages into new memory, but those that are `mapped`, which ascend.
    fn fill(&self, place: &Place, layers: &Layers, mapped: &[Range<u64>]) -> Result<(), End> {
        let mut mapped = mapped.iter().peekable();
        // As long as the longest run. Most ways read few pages. The heap keeps what it had once, and
        // the pages of a long buffer would be those of each machine.
        let mut buffer = Vec::new();
        let mut first = 0;
        for (slot, fresh) in place.memory.iter().zip(fresh(&place.memory)) {
            let end = first + slot.pages();
            let mut at = first;
            if fresh && !matches!(self.way, Way::Eager | Way::Base) {
                first = end;
                continue;
            }
            while let Some((run, from)) = layers.next(at..end) {
                self.hear()?;
                while mapped.next_if(|mapped| mapped.end <= run.start).is_some() {}
                if let Some(mapped) = mapped.peek().filter(|mapped| mapped.start < run.end) {
                    // A mapping begins with the run of its pages.
                    at = mapped.end;
                    continue;
                }
                at = run.end;
                let offset = slot.offset() + (run.start - first) * PAGE_SIZE;
                let len = ((run.end - run.start) * PAGE_SIZE) as usize;
                if buffer.len() < len {
                    buffer.resize(len, 0);
                }
                let bytes = &mut buffer[..len];
                match from {
                    Some(layer) => {
                        layer.read(run, bytes)?;
                        // If it fails, each page faults instead.
                        let _ = slot.mapping().populate(offset, bytes.len() as u64);
                    }
                    // Memory that was just made is zero, unless it shows a base.
                    None if fresh && self.way != Way::Base => continue,
                    None => bytes.fill(0),
                }
                slot.mapping().copy_from(offset, bytes);
            }
            first = end;
        }
        Ok(())
    }

    fn demand(&self, what: Demand) -> Result<Done, End> {
        self.machine.say(Said::Demand(what))?;
        self.answer()
    }

    fn answer(&self) -> Result<Done, End> {
        loop {
            match self.machine.wait()? {
                ReceiverCommand::Done(Done::Failed(why)) => return Err(End::Refused(why)),
                ReceiverCommand::Done(Done::DiskChanged(why)) => return Err(End::DiskChanged(why)),
                ReceiverCommand::Cancel(why) => return Err(End::Gone(why)),
                ReceiverCommand::Done(done) => return Ok(done),
                _ => {}
            }
        }
    }

    /// Checks for a cancellation.
    fn hear(&self) -> Result<(), End> {
        while let Some(told) = self.machine.heard()? {
            if let ReceiverCommand::Cancel(why) = told {
                return Err(End::Gone(why));
            }
        }
        Ok(())
    }
}

/// The number of pages that each new machine of a fork has copies of, unless its memory is huge pages
/// of the pool. It maps the others that differ from the base. Its memory begins with RAM, of `ram`
/// pages. A memslot that ends in the middle of a long run may add a few.
///
/// # Errors
/// The map of `files` is not that of `point`.
pub fn copied(point: &Point, files: [&File; 2], ram: u64) -> Result<u64, Error> {
    let [pages, map] = files;
    let pages = pages.try_clone().map_err(Error::io("the pages", "another descriptor of them"))?;
    let layer = Layers(vec![Reader::new(pages, map, &point.label(), point.pages, point.map_crc)?]);
    let (mut copied, mut long, mut at) = (0, Vec::new(), 0);
    for end in [ram.min(point.pages), point.pages] {
        while let Some((run, from)) = layer.next_of(at..end, u64::MAX) {
            at = run.end;
            copied += run.end - run.start;
            if from.is_some() && run.end <= ram && run.end - run.start >= MAPPED_PAGES {
                long.push(run.end - run.start);
            }
        }
        at = end;
    }
    long.sort_unstable_by_key(|pages| Reverse(*pages));
    Ok(copied - long.iter().take(MAX_MAPPED_RUNS).sum::<u64>())
}

/// Maps the long runs of pages that differ from the base. Returns the machine's pages that are
/// mapped.
fn map_layer(place: &Place, layers: &Layers) -> Result<Vec<Range<u64>>, End> {
    let [layer] = &layers.0[..] else { return Ok(Vec::new()) };
    let whole = |at: u64| at.is_multiple_of(host_page());
    let (file, name) = layer.file();
    if place.ram.config.backing.pages() == Pages::Pool {
        return Ok(Vec::new());
    }
    let mut runs = content(place, layers);
    runs.retain(|(at, run, _)| {
        let (start, end) = (run.start * PAGE_SIZE, run.end * PAGE_SIZE);
        run.end - run.start >= MAPPED_PAGES && whole(*at) && whole(start) && whole(end)
    });
    // The longest save most.
    if runs.len() > MAX_MAPPED_RUNS {
        runs.sort_unstable_by_key(|(_, run, _)| Reverse(run.end - run.start));
        runs.truncate(MAX_MAPPED_RUNS);
        runs.sort_unstable_by_key(|(at, ..)| *at);
    }
    if runs.is_empty() {
        return Ok(Vec::new());
    }
    let ranges: Vec<_> = runs
        .iter()
        .map(|(at, run, _)| (*at, (run.end - run.start) * PAGE_SIZE, run.start * PAGE_SIZE))
        .collect();
    let mapped = place.ram.map_layer(file, &ranges);
    let mapped = mapped.map_err(|error| End::Gone(format!("{name}: mapping it: {error}")))?;
    // The others are copied.
    Ok(runs.into_iter().take(mapped).map(|(_, run, _)| run).collect())
}

/// Opens layers and reads their maps.
fn readers(layers: Vec<(Point, Files)>) -> Result<Vec<Reader>, Error> {
    let each = layers
        .into_iter()
        .map(|(point, files)| Reader::new(files.ram, &files.map, &point.label(), point.pages, point.map_crc));
    each.collect()
}

/// The snapshot's content in RAM: the offset in RAM's mapping, the machine's pages, and the layer
/// that has them.
fn content<'a>(place: &Place, layers: &'a Layers) -> Vec<(u64, Range<u64>, &'a Reader)> {
    let (mut first, mut runs) = (0, Vec::new());
    for (slot, fresh) in place.memory.iter().zip(fresh(&place.memory)) {
        let end = first + slot.pages();
        let mut at = first;
        while let Some((run, from)) = layers.next_of(at..end, u64::MAX).filter(|_| fresh) {
            at = run.end;
            // New memory is zero already.
            runs.extend(from.map(|layer| (slot.offset() + (run.start - first) * PAGE_SIZE, run, layer)));
        }
        first = end;
    }
    runs
}

/// Starts to fetch pages of the files into RAM on demand.
fn fetch(
    place: &Place,
    layers: Layers,
    first: Option<WorkingSet>,
    mut fetching: Fetching,
) -> Result<Fetching, End> {
    let content = content(place, &layers);
    if content.iter().any(|(at, run, _)| *at != run.start * PAGE_SIZE) {
        return Err(End::Gone("its memory does not begin with RAM, in one piece".into()));
    }
    // Reports of touched memory include the pages that have not been fetched yet.
    let will_be = content.iter().map(|(at, run, _)| *at..at + (run.end - run.start) * PAGE_SIZE);
    let _ = place.ram.shown.set(will_be.collect());
    let (mapping, page) = (place.ram.mapping.clone(), place.ram.config.backing.page_size());
    fetching.begin(Work { mapping, page, layers, first }).map_err(End::Gone)?;
    Ok(fetching)
}

/// Maps the files' pages over RAM.
fn show(place: &Place, layers: &Layers, mappings: u64) -> Result<(), End> {
    let runs = content(place, layers);
    check(runs.len() as u64, mappings).map_err(End::Refused)?;
    let whole = |at: u64| at.is_multiple_of(host_page());
    let of_pages = |(at, run, _): &&(u64, Range<u64>, _)| {
        whole(*at) && whole(run.start * PAGE_SIZE) && whole(run.end * PAGE_SIZE)
    };
    if let Some((_, run, _)) = runs.iter().find(|piece| !of_pages(piece)) {
        let (start, page) = (run.start * PAGE_SIZE, short_size(host_page()));
        return Err(End::Refused(format!(
            "what it has at {start:#x} does not begin and end on pages of this host, which have {page}: have memory read"
        )));
    }
    let mut shown = Vec::with_capacity(runs.len());
    for (at, run, layer) in runs {
        let bytes = (run.end - run.start) * PAGE_SIZE;
        let (file, name) = layer.file();
        let mapped = place.ram.mapping.show(at, bytes, file, run.start * PAGE_SIZE);
        mapped.map_err(|error| End::Gone(format!("{name}: mapping it: {error}")))?;
        shown.push(at..at + bytes);
    }
    for layer in &layers.0 {
        let (file, name) = layer.file();
        let kept = file.try_clone().and_then(|kept| Ok((file.metadata()?.len(), kept)));
        let (len, kept) = kept.map_err(|error| End::Gone(format!("{name}: {error}")))?;
        sigbus::watch(kept, len, name);
    }
    // No other caller sets it: the machine was made for this.
    let _ = place.ram.shown.set(shown);
    Ok(())
}

/// Checks that this many pieces of files fit into a process that can have `mappings` more mappings.
fn check(pieces: u64, mappings: u64) -> Result<(), String> {
    // Each piece may split the mapping around it.
    match (2 * pieces).checked_sub(mappings) {
        None | Some(0) => Ok(()),
        Some(missing) => Err(format!(
            "its pages lie in {pieces} pieces, and this process can have {mappings} mappings more: raise vm.max_map_count by {missing}, merge \
             the points, or have memory read"
        )),
    }
}

#[test]
fn more_pieces_than_mappings_are_refused_with_what_is_missing() {
    assert_eq!((check(0, 0), check(500, 1000)), (Ok(()), Ok(())));
    assert!(
        check(501, 1000).unwrap_err().contains(
            "501 pieces, and this process can have 1000 mappings more: raise vm.max_map_count by 2,"
        )
    );
}
