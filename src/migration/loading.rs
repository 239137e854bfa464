//! The thread that reads a snapshot: it makes the machine of [`crate::snapshot`]'s files that a [`receiver`](super::receiver) makes of
//! what comes over a link, and has the same things done with it.

use std::time::Duration;

use super::pages::fresh;
use super::receiver::{Demand, Done, Place, Said, Told};
use super::threads::{Mine, Orphaned};
use crate::snapshot::Error;
use crate::snapshot::layer::{AT_ONCE, Layers, Reader};
use crate::snapshot::source::Source;
use crate::sys::mmap::PAGE_SIZE;

/// How often somebody who does not want it any more is looked for, while memory is populated.
const LOOK: Duration = Duration::from_millis(100);

/// Why no machine comes of it.
enum End {
    /// The event loop's thread is gone.
    Orphaned,
    /// It cannot be made here.
    Refused(String),
    /// Its disks are not as they were.
    DiskChanged(String),
    /// The host or the operator does not let it.
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

/// The thread.
pub struct Loading {
    machine: Mine<Said, Told>,
    source: Option<Source>,
    point: Option<u32>,
}

impl Loading {
    /// Of `source` point `point`, or the newest.
    pub fn new(machine: Mine<Said, Told>, source: Source, point: Option<u32>) -> Self {
        Self { machine, source: Some(source), point }
    }

    /// Goes on until the machine runs or cannot.
    pub fn run(mut self) {
        let said = match self.load() {
            Ok(()) => Said::Over,
            Err(End::Orphaned) => return,
            Err(End::Refused(why)) => Said::Refused(why),
            Err(End::DiskChanged(why)) => Said::DiskChanged(why),
            Err(End::Gone(why)) => Said::Gone(why),
        };
        // Nobody is left to hear it where this fails.
        let _ = self.machine.say(said).and_then(|()| self.machine.say(Said::Over));
    }

    fn load(&mut self) -> Result<(), End> {
        let Some(source) = self.source.take() else { return Ok(()) };
        let chosen = source.choose(self.point)?;
        let place = match self.demand(Demand::Judge(chosen.machine, 1))? {
            Done::Fits(place) => place,
            Done::Misfits(misfits) => {
                let each = misfits.iter().map(|misfit| {
                    let (what, there, here) = (&misfit.what, &misfit.source, &misfit.target);
                    format!("{what}: the snapshot has {there}, and this host {here}")
                });
                return Err(End::Refused(each.collect::<Vec<_>>().join("; ")));
            }
            _ => return Err(End::Gone("the machine cannot be made".into())),
        };
        let disks = chosen.layers.last().map(|(point, _)| point.disks.clone()).unwrap_or_default();
        self.demand(Demand::Claim(disks))?;
        let pages = place.memory.iter().map(|slot| slot.pages()).sum();
        let mut layers = Vec::new();
        for (point, files) in chosen.layers {
            if point.pages != pages {
                let what =
                    format!("point {} has {} pages, and its machine {pages}", point.number, point.pages);
                return Err(End::Refused(format!("{what}; it is damaged")));
            }
            layers.push(Reader::new(files.ram, &files.map, &point.label(), pages, point.map_crc)?);
        }
        self.fill(&place, &Layers(layers))?;
        if let Some(populating) = &place.populating {
            while !populating.is_done(LOOK).map_err(End::Gone)? {
                self.hear()?;
            }
        }
        self.demand(Demand::Restore(chosen.sections))?;
        self.demand(Demand::Start(None)).map(drop)
    }

    /// Writes the pages of the snapshot into memory that was just made.
    fn fill(&self, place: &Place, layers: &Layers) -> Result<(), End> {
        let mut buffer = vec![0; (AT_ONCE * PAGE_SIZE) as usize];
        let mut first = 0;
        for (slot, fresh) in place.memory.iter().zip(fresh(&place.memory)) {
            let end = first + slot.pages();
            let mut at = first;
            while let Some((run, from)) = layers.next(at..end) {
                self.hear()?;
                at = run.end;
                let offset = slot.offset() + (run.start - first) * PAGE_SIZE;
                let bytes = &mut buffer[..((run.end - run.start) * PAGE_SIZE) as usize];
                match from {
                    Some(layer) => {
                        layer.read(run, bytes)?;
                        // Of no consequence where it fails: then each page faults.
                        let _ = slot.mapping().populate(offset, bytes.len() as u64);
                    }
                    None if fresh => continue,
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
        loop {
            match self.machine.wait()? {
                Told::Done(Done::Failed(why)) => return Err(End::Refused(why)),
                Told::Done(Done::DiskChanged(why)) => return Err(End::DiskChanged(why)),
                Told::Cancel(why) => return Err(End::Gone(why)),
                Told::Done(done) => return Ok(done),
                _ => {}
            }
        }
    }

    /// Whether somebody does not want it any more.
    fn hear(&self) -> Result<(), End> {
        while let Some(told) = self.machine.heard()? {
            if let Told::Cancel(why) = told {
                return Err(End::Gone(why));
            }
        }
        Ok(())
    }
}
