//! Executes the actions of [`Target`](crate::target::Target). The event loop's thread executes
//! those that concern the machine.

use std::sync::Arc;
use std::time::Instant;

use serde_json::Value;

use super::{Demand, Done, LOOK, Offer, Ram, ReceiverCommand, Receiving, Said};
use crate::commit_flag::Ownership;
use crate::message::{Message, Misfit};
use crate::pages::{Incoming, fresh};
use crate::target::{Action, Event};
use crate::threads::Orphaned;
use crate::verify::Comparison;
use vellum_kvm::memory::{self, Slot};
use vellum_sys::mmap::PAGE_SIZE;

impl Receiving {
    fn demand(&mut self, demand: Demand) -> Result<Done, Orphaned> {
        self.machine.say(Said::Demand(demand))?;
        loop {
            match self.machine.wait()? {
                ReceiverCommand::Done(done) => return Ok(done),
                told => {
                    let event = self.event(told);
                    self.pending.extend(event);
                }
            }
        }
    }

    /// Demands that a machine with this configuration be assembled.
    fn judge(
        &mut self,
        config: Value,
        connections: u32,
        handed: bool,
        postcopy: bool,
    ) -> Result<Done, Orphaned> {
        let ram = self.ram.take().filter(|_| handed).map(Ram::Handed);
        self.handed = ram.is_some();
        self.demand(Demand::Judge(Offer { config, connections, ram, postcopy, disks: None }))
    }

    /// Waits until memory is populated, if requested. Meanwhile the source is told that this side is
    /// alive. Ends early if an event arrives, which is kept for later: before FIT, each is the end of
    /// the migration.
    pub(super) fn populated(&mut self) -> Result<Result<(), String>, Orphaned> {
        while let Some(populating) = self.place.as_ref().and_then(|place| place.populating.as_ref())
            && self.pending.is_empty()
        {
            match populating.is_done(LOOK) {
                Ok(false) => self.tell(&Message::ALIVE),
                Ok(true) => self.place.iter_mut().for_each(|place| place.populating = None),
                Err(why) => return Ok(Err(why)),
            }
            while let Some(told) = self.machine.heard()? {
                let event = self.event(told);
                self.pending.extend(event);
            }
            let event = self.heard();
            self.pending.extend(event);
        }
        self.heard = Instant::now();
        Ok(Ok(()))
    }

    /// Sends a message. If that fails, the link counts as cut.
    fn tell(&mut self, message: &Message) {
        if let Some(link) = &mut self.link
            && let Err(error) = link.say(message)
        {
            let event = self.cut(error.to_string());
            self.pending.push(event);
        }
    }

    pub(super) fn perform(&mut self, action: Action) -> Result<(), Orphaned> {
        match action {
            Action::Send(message) => {
                if let Message::Ready { .. } = message {
                    self.machine.say(Said::Uncommitted(true))?;
                }
                self.tell(&message);
            }
            Action::Judge { handed: true, connections, postcopy, .. }
                if self.ram.is_none() || connections != 1 || postcopy =>
            {
                self.pending.push(Event::Judged(vec![not_handed()]));
            }
            Action::Judge { config, connections, handed, postcopy } => {
                match self.judge(config, connections, handed, postcopy)? {
                    Done::Fits(place) => {
                        self.faults_number = postcopy.then_some(connections);
                        self.regions = place.memory.iter().map(Slot::pages).collect();
                        let fresh = fresh(&place.memory);
                        let slots = place.memory.iter().cloned().zip(fresh);
                        self.memory =
                            Arc::new(slots.map(|(slot, fresh)| Incoming::new(slot, fresh)).collect());
                        // Their time begins now, because they had to wait for the judgement.
                        self.strangers.iter_mut().for_each(|(_, since)| *since = Instant::now());
                        self.place = Some(*place);
                        // After FIT the guest may be paused at any time, so populating comes before.
                        let populated = self.populated()?;
                        self.pending.push(match populated {
                            Ok(()) => Event::Judged(Vec::new()),
                            Err(why) => Event::Failed(why),
                        });
                    }
                    Done::Misfits(misfits) => self.pending.push(Event::Judged(misfits)),
                    Done::Failed(why) => self.pending.push(Event::Failed(why)),
                    Done::DiskChanged(_) | Done::Done => {
                        self.pending.push(Event::Failed("nobody judged it".into()));
                    }
                }
            }
            Action::Restore { pages, sections, lacking } => {
                let state = std::mem::take(&mut self.sections);
                let came = self.pages + self.place.as_ref().map_or(0, |place| place.lanes.pages());
                let event = if pages != came || sections as usize != state.len() {
                    Event::Failed(format!(
                        "{} pages and {} parts of the state came, and the source sent {pages} and {sections}",
                        came,
                        state.len()
                    ))
                } else if let Err(why) = lacking.map_or(Ok(()), |pages| self.begin_to_land(pages)) {
                    Event::Failed(why)
                } else {
                    match self.demand(Demand::Restore(state))? {
                        Done::Failed(why) => Event::Failed(why),
                        _ => Event::Restored,
                    }
                };
                self.pending.push(event);
            }
            Action::Compare { attempt, pages } => {
                let mut comparison = self.comparison();
                comparison.finish();
                let Comparison { wrong, first, .. } = comparison;
                let event = if comparison.pages == pages {
                    Event::Compared(Message::Compared { attempt, pages, wrong, first })
                } else {
                    self.cut(format!("sums of {} pages came, and the source sent {pages}", comparison.pages))
                };
                self.pending.push(event);
            }
            Action::Start => {
                let event = match self.demand(Demand::Start(self.fence.clone(), self.gate.clone()))? {
                    Done::Failed(why) => Event::NotStarted(why),
                    _ => Event::Started,
                };
                if event == Event::Started && self.target.lacks() {
                    self.heard = Instant::now();
                    self.machine.say(Said::Lacks(Some(false)))?;
                }
                self.pending.push(event);
            }
            Action::Lack => {
                self.machine.say(Said::Lacks(Some(self.link.is_none())))?;
                self.heard = Instant::now();
                if let Err(error) = self.lack() {
                    let event = self.cut(error.to_string());
                    self.pending.push(event);
                }
            }
            Action::Complete => {
                let waited = self.waited.clone();
                self.tell(&Message::Complete { waited });
            }
            Action::Sever => {
                let left = self
                    .postcopy
                    .as_ref()
                    .map_or(0, |postcopy| postcopy.left() * postcopy.unit() * PAGE_SIZE);
                let why = self.broken.take().unwrap_or_default();
                tracing::warn!(
                    "the link was cut ({why}), and {} of this guest's memory is at the source alone: who wants that waits until the migration \
                     is recovered there; without the source it cannot go on",
                    memory::short_size(left)
                );
                self.machine.say(Said::Severed(why))?;
            }
            Action::Settle => {
                let owner =
                    self.fence.as_ref().map(|fence| fence.step(Ownership::Open, Ownership::Withdrawn));
                self.pending.extend(owner.map(Event::Fenced));
            }
            Action::Withdraw => {
                if let Some(fence) = &self.fence {
                    fence.step(Ownership::Open, Ownership::Withdrawn);
                    fence.step(Ownership::Committed, Ownership::Withdrawn);
                }
            }
            Action::Free => {
                self.memory = Arc::default();
                (self.place, self.comparing, self.postcopy, self.faults) = (None, None, None, None);
                self.demand(Demand::Free)?;
            }
            Action::Report(why) => {
                let why = match self.broken.take() {
                    Some(broken) => format!("{why}: {broken}"),
                    None => why,
                };
                self.machine.say(Said::Gone(why))?;
            }
        }
        Ok(())
    }
}

/// The misfit for RAM that was announced and has not arrived.
fn not_handed() -> Misfit {
    Misfit {
        what: "memory".into(),
        source: "handed over as a descriptor, over one connection".into(),
        target: "not come".into(),
        remedy: "connect the two by a unix socket with nothing in between, or have it copied".into(),
    }
}
