//! The passes of a migration: collect dirty pages, send the pages owed, measure what was written
//! meanwhile, and finally send the state. The [`plan`](crate::plan) decides what comes next.

use std::time::{Duration, Instant};

use super::{PERIOD, Sending};
use crate::bits::Bits;
use crate::events::{Demand, Done, Said, SenderEvent};
use crate::message::Message;
use crate::pending::At;
use crate::plan::{Decision, Measured};
use crate::snapshot::disk;
use crate::source::{Event, State};
use crate::threads::Orphaned;
use crate::verify::{self, Sums};
use crate::wire;
use vellum_control::{self as control, Mode};
use vellum_kvm::dirty;
use vellum_kvm::memory::Slot;
use vellum_machine::Section;
use vellum_sys::clock::{self, micros};
use vellum_sys::plant::{self, Mistake};
use vellum_sys::poll::Poll;

/// The current pass.
pub(super) struct Pass {
    pub(super) number: u32,
    pub(super) began: Instant,
    pub(super) sent_before: u64,
    pub(super) spared_before: u64,
    /// How many pages each vCPU had written when it began, if known.
    pub(super) written: Vec<u64>,
    pub(super) owed_before: u64,
    /// How long the collection of the owed pages took.
    pub(super) harvest: Duration,
    pub(super) at: At,
    /// Set in the final pass: the attempt, and the state that follows the pages.
    pub(super) last: Option<Last>,
}

/// The end of a migration's passes: the attempt, the state that follows the pages, and with
/// postcopy the pages that follow while the guest runs on the target.
pub(super) struct Last {
    attempt: u32,
    sections: Vec<Section>,
    deferred: Option<Vec<(u32, Bits)>>,
}

impl Sending {
    /// Starts or continues dirty tracking and begins a pass. Before the first pass, all connections
    /// join.
    pub(super) fn copy(&mut self) -> Result<(), Orphaned> {
        self.pass = None;
        if self.joining.is_none() && (!self.lanes.is_empty() || self.serving.is_some()) {
            self.joining = Some(true);
            self.lanes.join();
            self.join_faults();
            return Ok(());
        }
        if self.options.mode == Mode::Postcopy {
            // No memory is sent before the guest, so no dirty tracking is needed.
            self.pending.push(Event::Ahead);
            return Ok(());
        }
        // Pages left by a pass that was given up stay owed.
        if let Err(why) = self.lanes.stop() {
            let event = self.cut(why);
            self.pending.push(event);
            return Ok(());
        }
        if !self.common.owed.is_followed() {
            let tracker = match self.demand(Demand::Track(self.options.method))? {
                Done::Tracker(tracker) => tracker,
                Done::Failed(why) => return self.give_up_for(why),
                _ => return self.give_up_for("the machine cannot be followed".into()),
            };
            let since = Instant::now();
            if let Err(error) = self.common.owed.follow(tracker, &self.ram, self.pagemap.as_deref()) {
                return self.give_up_for(error.to_string());
            }
            self.harvest += since.elapsed();
        } else if let Err(error) = self.collect() {
            return self.give_up_for(error.to_string());
        }
        self.begin(None);
        Ok(())
    }

    pub(super) fn give_up_for(&mut self, why: String) -> Result<(), Orphaned> {
        self.pending.push(Event::Cancel(why));
        Ok(())
    }

    /// Adds the pages written since the last collection to those owed.
    fn collect(&mut self) -> Result<(), dirty::Error> {
        let since = Instant::now();
        self.common.owed.collect(&self.ram, self.pagemap.as_deref())?;
        self.harvest += since.elapsed();
        Ok(())
    }

    pub(super) fn sent(&self) -> u64 {
        self.sent_before + self.link.as_ref().map_or(0, |link| link.sent) + self.lanes.bytes()
    }

    pub(super) fn spared(&self) -> u64 {
        self.spared + self.lanes.spared()
    }

    fn begin(&mut self, last: Option<Last>) {
        self.passes += 1;
        if last.is_none() {
            // Little is left to flush in the pause then. Flushing here would keep this thread from
            // the target.
            disk::begin_flush(&self.disks);
        }
        let until = if last.is_some() { self.until() } else { None };
        if let Some(link) = &mut self.link {
            link.set_until(until);
        }
        if !self.lanes.is_empty() {
            self.lanes.pass(self.passes, until, last.is_some());
        }
        self.pass = Some(Pass {
            number: self.passes,
            began: Instant::now(),
            sent_before: self.sent(),
            spared_before: self.spared(),
            written: self.common.owed.written(),
            owed_before: self.common.owed.count(),
            harvest: std::mem::take(&mut self.harvest),
            at: At::default(),
            last,
        });
    }

    /// Pauses the guest and begins the final pass.
    pub(super) fn finish(&mut self, attempt: u32) -> Result<(), Orphaned> {
        self.pass = None;
        self.paused = Some(Instant::now());
        self.left.converged = self.plan.most_downtime(self.began.elapsed()).is_some();
        self.left.expected_downtime = self.plan.expected_downtime().map(micros);
        self.left.estimated_downtime = self.plan.estimate().map(|estimate| micros(estimate.downtime));
        self.left.estimated_total = self.plan.estimate().map(|estimate| micros(estimate.total));
        let early = plant::is(Mistake::HarvestBeforeSave);
        if early {
            let _ = self.collect();
        }
        if early || plant::is(Mistake::NoLastHarvest) {
            // A vCPU is sure to write meanwhile.
            std::thread::sleep(PERIOD * 10);
        }
        let sections = match self.demand(Demand::Save)? {
            Done::Saved(sections) => sections,
            Done::Failed(why) => return self.give_up_for(why),
            _ => return self.give_up_for("the machine cannot be saved".into()),
        };
        // A process on another host reads the disks past this host's page cache. Memory is handed
        // over within one host.
        if !self.options.hands_over
            && let Err(why) = disk::flush(&self.disks)
        {
            return self.give_up_for(why);
        }
        // After saving the state: saving a vCPU makes KVM write to guest memory.
        let skipped = plant::is(Mistake::NoLastHarvest) || plant::is(Mistake::HarvestBeforeSave);
        if !skipped && let Err(error) = self.collect() {
            return self.give_up_for(error.to_string());
        }
        if self.options.hands_over {
            self.common.owed.owe_all_but(&self.ram);
        } else if !self.common.owed.is_followed() {
            self.common.owed.owe_touched(&self.ram, self.pagemap.as_deref());
        }
        let deferred = self.source.is_ahead().then(|| self.common.owed.defer());
        self.begin(Some(Last { attempt, sections, deferred }));
        Ok(())
    }

    /// Sends one block of the pass, or ends it.
    pub(super) fn go_on(&mut self) -> Result<Option<Event>, Orphaned> {
        let Some(pass) = &mut self.pass else { return Ok(None) };
        let paused = pass.last.is_some();
        let taken = if self.streaming { 0 } else { self.plan.taken() };
        if !paused && taken > 0 && self.napped.elapsed() >= PERIOD {
            self.napped = Instant::now();
            let from = |vcpu: usize| self.plan.taken_from(vcpu);
            self.throttle.nap_each(|vcpu| (from(vcpu) > 0).then(|| PERIOD * from(vcpu) / 100));
        }
        if !paused && let Some(wait) = self.plan.holds_back(self.began.elapsed()) {
            let mut poll = Poll::default();
            poll.readable(&**self.machine.descriptor());
            let _ = poll.wait(Some(if taken > 0 { wait.min(PERIOD) } else { wait }));
            return Ok(None);
        }
        let common = self.common.clone();
        let next = match common.owed.next(&mut pass.at, &self.share.in_pass(pass.number)) {
            Ok(next) => next,
            Err(error) => return Ok(Some(Event::Cancel(error.to_string()))),
        };
        let Some((outgoing, run)) = next else {
            if self.lanes.is_empty() {
                return self.pass_ends();
            }
            return match self.lanes.are_done() {
                Ok(true) if self.lanes.are_short() => {
                    self.go_on_or_overrun();
                    Ok(None)
                }
                Ok(true) => self.pass_ends(),
                Ok(false) => {
                    self.wait_for(PERIOD);
                    Ok(None)
                }
                Err(why) => Ok(Some(self.cut(why))),
            };
        };
        let Some(link) = &mut self.link else { return Ok(None) };
        common.owed.settle(outgoing, run.clone());
        let taken = self.block.fill(outgoing, run, pass.number, link.encoder());
        let before = link.sent;
        if let Err(error) = link.send(self.block.bytes()) {
            return Ok(Some(self.cut(error.to_string())));
        }
        let bytes = link.sent - before;
        self.pages += taken.pages + taken.zeroes;
        self.spared += taken.spared;
        self.plan.sent(bytes, self.began.elapsed());
        Ok(None)
    }

    /// A further connection ran out of time in a final pass. The pass overruns ([`Self::late`])
    /// unless its limit was raised meanwhile. In that case the rest is sent.
    fn go_on_or_overrun(&mut self) {
        let until = self.until();
        if until.is_some_and(|until| Instant::now() >= until) {
            return;
        }
        let Some(pass) = &self.pass else { return };
        self.lanes.pass(pass.number, until, pass.last.is_some());
        self.link.iter_mut().for_each(|link| link.set_until(until));
    }

    fn pass_ends(&mut self) -> Result<Option<Event>, Orphaned> {
        let Some(pass) = self.pass.take() else { return Ok(None) };
        if self.streaming {
            self.stream_ends();
        }
        let pages = self.pages;
        self.say(&Message::PassEnd { pass: pass.number, pages });
        let bytes = self.sent() - pass.sent_before;
        let ended = clock::monotonic();
        let mut told = control::Pass {
            pass: pass.number,
            last: pass.last.is_some(),
            began: micros(ended.saturating_sub(pass.began.elapsed())),
            ended: micros(ended),
            pages: pass.owed_before,
            bytes,
            dirty: 0,
            harvest: micros(pass.harvest),
            clear: micros(self.common.owed.longest_clear()),
        };
        if let Some(last) = pass.last {
            self.left.sent = told.ended;
            self.machine.say(Said::SenderEvent(SenderEvent::Pass(told)))?;
            return Ok(self.end(&last));
        }
        if self.source.state == State::Serving {
            self.machine.say(Said::SenderEvent(SenderEvent::Pass(told)))?;
            return Ok(None);
        }
        // The pages written meanwhile decide whether another pass pays.
        if let Err(error) = self.collect() {
            return Ok(Some(Event::Cancel(error.to_string())));
        }
        let measured = Measured {
            pages: pass.owed_before,
            // The link's capacity in bytes of memory, which is more than its bytes when pages are
            // compressed.
            bytes: bytes + self.spared() - pass.spared_before,
            took: pass.began.elapsed(),
            dirty: self.common.owed.count(),
        };
        told.dirty = measured.dirty;
        let written = self.common.owed.written();
        self.plan.wrote(written.iter().zip(&pass.written).map(|(now, before)| now - before).collect());
        self.machine.say(Said::SenderEvent(SenderEvent::Pass(told)))?;
        let decision = self.plan.pass_ended(measured, self.began.elapsed());
        Ok(match decision {
            Decision::Again if self.options.mode == Mode::Hybrid => Some(Event::Ahead),
            Decision::Ahead => Some(Event::Ahead),
            Decision::Again => {
                self.begin(None);
                None
            }
            Decision::Converged => Some(Event::Converged),
            Decision::GiveUp(why) => Some(Event::Cancel(why)),
        })
    }

    /// All pages are sent: sends the state and FINAL.
    fn end(&mut self, last: &Last) -> Option<Event> {
        let Last { attempt, sections, deferred } = last;
        let lacking = match deferred.as_ref().map(|deferred| self.send_deferred(deferred)).transpose() {
            Ok(lacking) => lacking,
            Err(error) => return Some(self.cut(error.to_string())),
        };
        for Section { name, version, body } in sections {
            let link = self.link.as_mut()?;
            if let Err(error) = link.section(&wire::Section { name, version: *version, body }) {
                return Some(self.cut(error.to_string()));
            }
        }
        let (pages, sections) = (self.pages + self.lanes.pages(), sections.len() as u32);
        self.say(&Message::Final { attempt: *attempt, pages, sections, lacking });
        self.waits = Some(Instant::now());
        None
    }

    /// Starts a comparison of both sides' memory while both are paused.
    pub(super) fn compare(&mut self, attempt: u32) {
        let memory = verify::touched(&self.ram, self.pagemap.as_deref(), self.common.owed.slots());
        // Until all checksums have been sent, no answer is valid.
        self.to_compare = u64::MAX;
        self.comparing = Some((attempt, Sums::new(memory)));
    }

    /// Sends the checksums of the next pages, or COMPARE at the end.
    pub(super) fn go_on_comparing(&mut self) -> Option<Event> {
        let (attempt, sums) = self.comparing.as_mut()?;
        let link = self.link.as_mut()?;
        let sent = match sums.next_run() {
            Some((run, sums)) => {
                let frame = link.encoder().sums(&run, sums);
                link.send(&frame)
            }
            None => {
                let (attempt, pages) = (*attempt, sums.pages);
                (self.comparing, self.to_compare) = (None, pages);
                // The target has compared the received checksums and now reads the rest of its
                // memory. The time limit for its answer starts when that should be done, at a
                // second per GiB.
                let gib = self.common.owed.slots().map(Slot::bytes).sum::<u64>().div_ceil(1 << 30);
                self.waits = Some(Instant::now() + Duration::from_secs(gib));
                link.say(&Message::Compare { attempt, pages })
            }
        };
        sent.err().map(|error| self.cut(error.to_string()))
    }
}
