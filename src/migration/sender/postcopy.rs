//! Postcopy on the source: it announces which pages follow and sends the pages that the target
//! lacks. After a lost link it starts again from the target's map.

use std::os::fd::OwnedFd;
use std::time::Instant;

use super::Sending;
use super::passes::Pass;
use crate::bits::Bits;
use crate::events::{Said, SenderEvent};
use crate::link;
use crate::pending::At;
use crate::share::Share;
use crate::source::{Event, State};
use crate::wire::Run;

impl Sending {
    /// Lets the connection for faulting pages join the migration.
    pub(super) fn join_faults(&mut self) {
        let Some(link) = self.faults.take().map(|socket| self.linked(socket)) else { return };
        let Some(serving) = &mut self.serving else { return };
        if let Err(error) = link.and_then(|link| serving.serve(link)) {
            let event = self.cut(error.to_string());
            self.pending.push(event);
        }
    }

    /// Whether messages of the serving thread are read in this state. In other states its event
    /// must not be polled, because it would stay readable.
    pub(super) fn hears_serving(&self) -> bool {
        matches!(self.source.state, State::Copying | State::Finishing | State::Committing | State::Serving)
    }

    /// The event of a lost connection for faulting pages. Once the guest may run on the target, its
    /// end is none: a target that has all pages closes this connection, and its COMPLETE on the
    /// first one may arrive later, because two connections have no order. The first one then decides
    /// whether the target is lost, and the thread that sends the remaining pages goes on.
    pub(super) fn served(&mut self) -> Option<Event> {
        if !self.hears_serving() {
            return None;
        }
        let serving = self.serving.as_mut()?;
        let why = serving.has_joined().err()?;
        if matches!(self.source.state, State::Committing | State::Serving) {
            // A target that has not closed it learns of its end.
            serving.cut();
            self.unserved = Some(why);
            return None;
        }
        Some(self.cut(why))
    }

    /// Sends the map of deferred pages. Returns their number.
    pub(super) fn send_deferred(&mut self, deferred: &[(u32, Bits)]) -> Result<u64, link::Error> {
        let mut count = 0;
        for (region, bits) in deferred {
            let pages = self.common.owed.outgoing(*region as usize).slot().pages();
            if let Some(link) = &mut self.link {
                link.send_map(*region, bits, pages)?;
            }
            count += bits.count();
        }
        Ok(count)
    }

    /// Adds a part of the target's map of missing pages.
    pub(super) fn lacks(&mut self, run: &Run, bits: &[u64]) -> Result<(), String> {
        let regions: Vec<u64> = self.common.owed.slots().map(|slot| slot.pages()).collect();
        run.check(&regions).map_err(|error| error.to_string())?;
        if self.lacking.is_empty() {
            self.lacking = regions.iter().map(|pages| Bits::new(*pages)).collect();
        }
        self.lacking[run.region as usize].add_at(run.first, bits);
        Ok(())
    }

    /// Starts to send the pages that the target lacks according to its map, even if they have been
    /// sent before.
    pub(super) fn stream(&mut self) {
        for (region, bits) in (0..).zip(std::mem::take(&mut self.lacking)) {
            self.common.owed.owe(region, &bits);
        }
        self.passes += 1;
        self.streaming = true;
        self.waits = None;
        self.link.iter_mut().for_each(|link| link.set_until(None));
        if !self.lanes.is_empty() {
            self.lanes.pass(self.passes, None, false);
        }
        let owed = self.common.owed.count();
        self.pass = Some(Pass::behind(self.passes, self.sent(), self.spared(), owed));
    }

    /// The pass that sends the missing pages has ended. The target has to answer COMPLETE.
    pub(super) fn stream_ends(&mut self) {
        (self.pass, self.streaming) = (None, false);
        self.waits = Some(Instant::now());
    }

    /// Takes new connections to a target that lacks memory.
    pub(super) fn recovered(&mut self, socket: OwnedFd, faults: OwnedFd) -> Option<Event> {
        if self.source.state != State::Severed {
            return None;
        }
        self.lacking.clear();
        self.unserved = None;
        // The further connections were cut with the first and are not replaced. The new connection
        // carries all pages with the whole bandwidth.
        self.share = Share::new(0, 1);
        self.plan.set(None, self.options.bandwidth);
        let serve = |sending: &mut Self| -> Result<(), link::Error> {
            let mut own = sending.linked(socket)?;
            own.admit();
            sending.link = Some(own);
            let link = sending.linked(faults)?;
            sending.serving.as_mut().map_or(Ok(()), |serving| serving.serve(link))
        };
        if let Err(error) = serve(self) {
            tracing::warn!("the new connections to the target are of no use: {error}");
            self.link = None;
            return None;
        }
        if self.machine.say(Said::SenderEvent(SenderEvent::Recovered)).is_err() {
            return None;
        }
        Some(Event::Linked)
    }
}

impl Pass {
    /// A pass that sends `owed_before` pages while the guest runs on the target.
    fn behind(number: u32, sent_before: u64, spared_before: u64, owed_before: u64) -> Self {
        Self {
            number,
            began: Instant::now(),
            sent_before,
            spared_before,
            written: Vec::new(),
            owed_before,
            harvest: std::time::Duration::ZERO,
            at: At::default(),
            last: None,
        }
    }
}
