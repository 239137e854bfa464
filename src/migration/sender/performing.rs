//! Executes the actions of [`Source`](crate::source::Source). The event loop's thread executes
//! those that concern the machine.

use std::time::{Duration, Instant};

use super::{Demand, Done, PERIOD, Said, SenderCommand, SenderEvent, Sending, Serving};
use crate::commit_flag::Ownership as Decided;
use crate::link::Link;
use crate::message::{Message, ZSTD};
use crate::source::{Action, Event, State};
use crate::threads::Orphaned;
use vellum_control::Left;
use vellum_sys::clock::{self, micros};

/// After how long the operator is told that the disks of a guest that is taken back are still
/// locked.
const RETAKING: Duration = Duration::from_secs(1);

impl Sending {
    /// Sends a message. If that fails, the link counts as cut.
    pub(super) fn say(&mut self, message: &Message) {
        if let Some(link) = &mut self.link
            && let Err(error) = link.say(message)
        {
            let event = self.cut(error.to_string());
            self.pending.push(event);
        }
    }

    /// Sends BYE with the input that arrived for the guest since it was paused.
    fn take_leave(&mut self) -> Result<(), Orphaned> {
        let typed = match self.demand(Demand::Typed)? {
            Done::Typed(typed) => typed,
            _ => Vec::new(),
        };
        if self.link.is_none() && !typed.is_empty() {
            tracing::warn!(
                "{} bytes that were typed in the hand-over do not get to the guest: the link was cut",
                typed.len()
            );
        }
        self.link.iter_mut().for_each(|link| link.set_until(None));
        self.say(&Message::Bye { typed });
        Ok(())
    }

    /// Makes a demand and waits for its answer. Other commands are kept for later.
    pub(super) fn demand(&mut self, demand: Demand) -> Result<Done, Orphaned> {
        self.machine.say(Said::Demand(demand))?;
        loop {
            match self.machine.wait()? {
                SenderCommand::Done(done) => return Ok(done),
                told => {
                    let event = self.event(told);
                    self.pending.extend(event);
                }
            }
        }
    }

    pub(super) fn perform(&mut self, action: Action) -> Result<(), Orphaned> {
        match action {
            Action::Send(Message::Bye { .. }) if self.source.state == State::Moved => self.take_leave()?,
            Action::Send(message) => {
                // The deadline was the pass's. A message has none.
                self.link.iter_mut().for_each(|link| link.set_until(None));
                let awaits = matches!(message, Message::Commit { .. } | Message::Query {});
                self.say(&message);
                if awaits {
                    self.waits = Some(Instant::now());
                }
            }
            Action::Offer => {
                let config = self.describe.clone();
                let connections = self.share.of();
                let compression = self.options.compress.then(|| ZSTD.to_owned());
                let (handed, postcopy) = (self.options.hands_over, self.options.postcopies);
                self.say(&Message::Config { config, connections, compression, handed, postcopy });
                self.waits = Some(Instant::now());
            }
            Action::Copy if self.options.hands_over => self.hand_over()?,
            Action::Copy => self.copy()?,
            Action::Finish { attempt } => self.finish(attempt)?,
            Action::Compare { attempt } => {
                self.link.iter_mut().for_each(|link| link.set_until(None));
                self.compare(attempt);
            }
            Action::Resume => {
                self.paused = None;
                self.demand(Demand::Resume)?;
            }
            Action::Release => {
                // All pages have arrived, so the further connections are no longer needed.
                let ahead = self.source.is_ahead();
                if !ahead {
                    self.lanes.cut();
                }
                self.demand(Demand::Release { ahead })?;
            }
            Action::Retake => {
                // A target that lost the race for the commit flag releases the locks when it sees
                // that. The guest does not run while another process has them.
                let mut untold = Some(Instant::now());
                while let Done::Failed(why) = self.demand(Demand::Retake)? {
                    if untold.take_if(|since| since.elapsed() > RETAKING).is_some() {
                        tracing::error!("the guest stays paused until its disks can be locked again: {why}");
                    }
                    std::thread::sleep(PERIOD);
                }
            }
            Action::Commit { attempt } => {
                let decided = self.move_flag(Decided::Open, Decided::Committed);
                if decided == Decided::Committed {
                    self.link.iter_mut().for_each(|link| link.set_until(None));
                    self.say(&Message::Commit { attempt });
                    self.waits = Some(Instant::now());
                } else {
                    self.pending.push(Event::Fenced(decided));
                }
            }
            Action::Settle => {
                let decided = self.move_flag(Decided::Committed, Decided::Withdrawn);
                self.pending.push(Event::Fenced(decided));
            }
            Action::Undo => {
                (self.pass, self.comparing, self.paused) = (None, None, None);
                self.lanes.cut();
                self.serving.iter_mut().for_each(Serving::cut);
                self.throttle.wake();
                self.common.owed.unfollow();
            }
            Action::Serve => {
                // Admits the map of missing pages, which arrives next.
                self.link.iter_mut().for_each(Link::admit);
                self.waits = Some(Instant::now());
                // The guest no longer writes to memory here.
                self.common.owed.unfollow();
                self.throttle.wake();
                self.machine.say(Said::SenderEvent(SenderEvent::Ahead))?;
            }
            Action::Stream => self.stream(),
            Action::Sever => {
                (self.pass, self.streaming) = (None, false);
                let why = self.broken.take().unwrap_or_default();
                tracing::warn!(
                    "the link was cut ({why}), and the target lacks some of the guest's memory; another link goes on"
                );
                self.machine.say(Said::SenderEvent(SenderEvent::Severed(why)))?;
            }
            Action::Reconnect => {
                if let Some(link) = self.link.take() {
                    self.sent_before += link.sent;
                }
                self.machine.say(Said::SenderEvent(SenderEvent::Unconfirmed))?;
            }
            Action::End => {
                let (bytes, spared) = (self.sent(), self.spared());
                let served = self.waited.as_ref().map_or(0, |_| micros(clock::monotonic()));
                let left = Left { passes: self.passes, bytes, spared, served, ..self.left };
                self.machine.say(Said::SenderEvent(SenderEvent::Moved {
                    compared: self.compared,
                    waited: self.waited.take(),
                    left,
                }))?;
            }
            Action::Report(why) => {
                let why = match self.broken.take() {
                    Some(broken) => format!("{why}: {broken}"),
                    None => why,
                };
                self.machine.say(Said::SenderEvent(SenderEvent::Stayed(why)))?;
            }
        }
        Ok(())
    }
}
