//! The side that has the guest, as a pure machine: what it does next follows from where it is and what happens, and from nothing
//! else. Whoever drives it carries out the [`Action`]s in their order and brings [`Event`]s.

use super::commit_flag::Ownership;
use super::message::{COMPRESSES, HANDS_OVER, Message, Misfit, POSTCOPIES, Standing, ZSTD};
use vellum_sys::plant::{self, Mistake};

/// Where the source is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// HELLO has been sent.
    Greeting,
    /// CONFIG has been sent.
    Offering,
    /// Passes over memory, while the guest runs.
    Copying,
    /// The guest is paused, the last pages and the state are under way, READY is awaited.
    Finishing,
    /// Both sides stand still and compare their memory.
    Comparing,
    /// COMMIT has been sent. The guest may run on the target.
    Committing,
    /// The link was cut after COMMIT: nobody here knows whether the guest runs on the target.
    Unconfirmed {
        /// Whether the operator wants it back.
        withdraw: bool,
    },
    /// The guest runs on the target, which lacks some of its memory: that is sent.
    Serving,
    /// The link was cut meanwhile: both stand still until there is another.
    Severed,
    /// The guest runs on the target. This process ends.
    Moved,
    /// The guest runs here, as before.
    Stayed,
}

/// What happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The target says something.
    Said(Message),
    /// The link is cut, or the target has been silent for too long.
    Cut,
    /// There is a link again.
    Linked,
    /// The plan says that the rest can be sent while the guest stands still.
    Converged,
    /// The plan says that the guest is to run on the target before the rest is sent.
    Ahead,
    /// The final pass takes too long.
    Overrun,
    /// The operator does not want it any more, or its time is over, or the guest has ended by itself.
    Cancel(String),
    /// The operator says that the guest does not run on the target, and takes the blame.
    Force,
    /// What the fence says.
    Fenced(Ownership),
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message.
    Send(Message),
    /// Send the machine's configuration.
    Offer,
    /// Switch the dirty log on, and send passes over memory.
    Copy,
    /// Pause the guest, save its state, harvest for the last time, and send all of it and FINAL.
    Finish {
        /// The number that FINAL carries.
        attempt: u32,
    },
    /// Send the sums of all pages, and COMPARE.
    Compare {
        /// The number that COMPARE carries.
        attempt: u32,
    },
    /// Let the guest run on: it had been paused for the final pass.
    Resume,
    /// The guest runs on the target: have the pages that it asks for sent, and wait for the map of those that it lacks.
    Serve,
    /// Send all that the target lacks by its map.
    Stream,
    /// The target waits for pages and there is no link to it: tell the operator.
    Sever,
    /// Give up locks and addresses that the target needs in order to run the guest.
    Release,
    /// Take them again, once the target has given them up.
    Retake,
    /// Store in the fence that it is committed, and then say COMMIT; [`Event::Fenced`] follows where that comes too late.
    Commit {
        /// The number that COMMIT carries.
        attempt: u32,
    },
    /// Take it back by the fence, where the target has not run it; [`Event::Fenced`] follows.
    Settle,
    /// Switch the dirty log and the throttle off: everything is as it was before.
    Undo,
    /// Get a link to the target again.
    Reconnect,
    /// End the process: the guest has moved.
    End,
    /// Tell the operator why it stays.
    Report(String),
}

/// The source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// Where it is.
    pub state: State,
    attempt: u32,
    verifies: bool,
    compresses: bool,
    /// Whether RAM is handed over, and not copied.
    hands_over: bool,
    /// Whether the guest may have to run on the target before all of its memory is there, and whether this attempt has it so.
    postcopies: bool,
    ahead: bool,
    /// Whether the link was cut after COMMIT, and there was no other.
    cut: bool,
    /// Whether it has a fence to offer; then whether the target shares it.
    fenced: bool,
}

impl Source {
    /// A source that has said HELLO.
    pub fn new() -> Self {
        Self {
            state: State::Greeting,
            attempt: 1,
            verifies: false,
            compresses: false,
            hands_over: false,
            postcopies: false,
            ahead: false,
            cut: false,
            fenced: false,
        }
    }

    /// The same source, which has all memory compared before it commits.
    pub fn verifying(mut self, verifies: bool) -> Self {
        self.verifies = verifies;
        self
    }

    /// The same source, whose pages are to be compressed.
    pub(crate) fn compressing(mut self, compresses: bool) -> Self {
        self.compresses = compresses;
        self
    }

    /// The same source, whose RAM is handed over as a descriptor.
    pub(crate) fn handing_over(mut self, hands_over: bool) -> Self {
        self.hands_over = hands_over;
        self
    }

    /// The same source, whose guest may have to run on the target before all of its memory is there.
    pub fn postcopying(mut self, postcopies: bool) -> Self {
        self.postcopies = postcopies;
        self
    }

    /// Whether the guest runs, or is to run, on the target before all of its memory is there.
    pub fn is_ahead(&self) -> bool {
        self.ahead
    }

    /// The same source, which has a fence to offer.
    pub fn fenced(mut self, offers: bool) -> Self {
        self.fenced = offers;
        self
    }

    /// What follows from `event`.
    pub fn step(&mut self, event: Event) -> Vec<Action> {
        match self.state {
            State::Greeting | State::Offering | State::Copying | State::Finishing | State::Comparing => {
                self.before_commit(event)
            }
            State::Committing | State::Unconfirmed { .. } => self.after_commit(event),
            State::Serving | State::Severed => self.behind(event),
            State::Moved => match event {
                // The target has not heard BYE, and asks to hear it.
                Event::Said(
                    Message::Done {} | Message::Status { standing: Standing::Ran } | Message::Complete { .. },
                ) => {
                    vec![Action::Send(Message::BYE)]
                }
                _ => Vec::new(),
            },
            State::Stayed => Vec::new(),
        }
    }

    fn before_commit(&mut self, event: Event) -> Vec<Action> {
        use Message as M;
        match (&self.state, event) {
            (State::Greeting, Event::Said(M::Welcome { version, .. }))
                if self.compresses && version < COMPRESSES =>
            {
                let why = format!(
                    "compression: {ZSTD} here, none there, which speaks version {version} of the wire; choose no compression, or give the \
                     target a Vellum that has it"
                );
                self.stay(why.clone(), Some(M::Abort { why }))
            }
            // Two that have the same memory must never both run it, whatever becomes of their link.
            (State::Greeting, Event::Said(M::Welcome { version, fence }))
                if self.hands_over && (version < HANDS_OVER || !fence) =>
            {
                let there = match version < HANDS_OVER {
                    true => format!("the target speaks version {version} of the wire, which cannot take it"),
                    false => "the target has not got the descriptors that came with the first message".into(),
                };
                let why = format!(
                    "memory is to be handed over, and {there}; choose no such link, or give both a Vellum that has it and nothing in \
                     between"
                );
                self.stay(why.clone(), Some(M::Abort { why }))
            }
            (State::Greeting, Event::Said(M::Welcome { version, .. }))
                if self.postcopies && version < POSTCOPIES =>
            {
                let why = format!(
                    "the target speaks version {version} of the wire, which has no postcopy; choose precopy, or give the target a Vellum \
                     that has it"
                );
                self.stay(why.clone(), Some(M::Abort { why }))
            }
            (State::Greeting, Event::Said(M::Welcome { fence, .. })) => {
                self.fenced &= fence;
                self.state = State::Offering;
                vec![Action::Offer]
            }
            (State::Offering, Event::Said(M::Fit {})) => {
                self.state = State::Copying;
                vec![Action::Copy]
            }
            (State::Offering, Event::Said(M::Misfit { misfits })) => {
                let why = match &misfits[..] {
                    [] => "the target says that it does not fit, and gives no reason".into(),
                    misfits => misfits.iter().map(Misfit::to_string).collect::<Vec<_>>().join("\n"),
                };
                self.stay(why, None)
            }
            (State::Copying, Event::Converged) => {
                self.state = State::Finishing;
                vec![Action::Finish { attempt: self.attempt }]
            }
            (State::Copying, Event::Ahead) if self.postcopies => {
                self.state = State::Finishing;
                self.ahead = true;
                vec![Action::Finish { attempt: self.attempt }]
            }
            (State::Finishing, Event::Said(M::Ready { attempt })) if attempt == self.attempt => {
                // What is not there yet cannot be compared.
                if self.verifies && !self.ahead {
                    self.state = State::Comparing;
                    return vec![Action::Compare { attempt }];
                }
                self.commit()
            }
            (State::Comparing, Event::Said(M::Compared { attempt, wrong: 0, .. }))
                if attempt == self.attempt =>
            {
                self.commit()
            }
            (State::Comparing, Event::Said(M::Compared { attempt, pages, wrong, first }))
                if attempt == self.attempt =>
            {
                let first: Vec<String> = first.iter().map(|address| format!("{address:#x}")).collect();
                let dots = if wrong > first.len() as u64 { " …" } else { "" };
                let why = format!(
                    "the target's memory differs in {wrong} of {pages} pages that were compared, at guest address {}{dots}",
                    first.join(" ")
                );
                self.stay(why.clone(), Some(M::Abort { why }))
            }
            // What is sent while the guest stands still is little then, and has no limit.
            (State::Finishing, Event::Overrun) if !self.ahead => {
                self.state = State::Copying;
                self.attempt += 1;
                vec![Action::Resume, Action::Send(M::Again { attempt: self.attempt }), Action::Copy]
            }
            // What is still under way of an attempt that was given up, and what the plan says too late.
            (_, Event::Said(M::Ready { .. }) | Event::Overrun | Event::Converged | Event::Linked)
            | (_, Event::Ahead | Event::Fenced(_)) => Vec::new(),
            (_, Event::Cut) => self.stay("the link was cut before the hand-over".into(), None),
            (_, Event::Cancel(why)) => {
                let abort = M::Abort { why: why.clone() };
                self.stay(why, Some(abort))
            }
            (_, Event::Force) => {
                let why = "the operator took it back".to_owned();
                self.stay(why.clone(), Some(M::Abort { why }))
            }
            (_, Event::Said(M::Abort { why } | M::Refused { why })) => self.stay(why, None),
            (_, Event::Said(M::Status { standing: Standing::Gone })) => {
                let why = "the target has given it up".to_owned();
                self.stay(why.clone(), Some(M::Abort { why }))
            }
            (_, Event::Said(message)) => {
                let why = format!("the target said {} out of turn", message.name());
                self.stay(why.clone(), Some(M::Abort { why }))
            }
        }
    }

    fn after_commit(&mut self, event: Event) -> Vec<Action> {
        use Message as M;
        let withdraw = self.state == State::Unconfirmed { withdraw: true };
        match event {
            Event::Cut => self.cut = true,
            Event::Linked => self.cut = false,
            _ => {}
        }
        match event {
            Event::Said(M::Done {} | M::Status { standing: Standing::Ran }) => self.ran(),
            Event::Said(M::Refused { why }) => self.take_back(why, Some(M::BYE)),
            Event::Said(M::Status { standing: Standing::Gone }) => {
                self.take_back("the target has given it up".into(), Some(M::BYE))
            }
            Event::Said(M::Status { standing: Standing::Uncommitted }) => {
                if withdraw {
                    return vec![Action::Send(M::Abort { why: "the operator took it back".into() })];
                }
                self.state = State::Committing;
                vec![Action::Send(M::Commit { attempt: self.attempt })]
            }
            Event::Fenced(Ownership::Ran) => self.ran(),
            Event::Fenced(Ownership::Withdrawn) => {
                let why = "the target has not run it and never will".to_owned();
                self.take_back(why, Some(M::BYE))
            }
            // Nobody has to be asked: who is first at the fence has the guest.
            Event::Cut | Event::Cancel(_) | Event::Force if self.fenced => vec![Action::Settle],
            Event::Cut => {
                self.state = State::Unconfirmed { withdraw };
                vec![Action::Reconnect]
            }
            Event::Linked => vec![Action::Send(M::Query {})],
            Event::Cancel(_) if self.state == State::Committing => {
                // Too late to take back by ourselves: the target is asked first.
                self.state = State::Unconfirmed { withdraw: true };
                vec![Action::Send(M::Query {})]
            }
            Event::Cancel(_) => {
                self.state = State::Unconfirmed { withdraw: true };
                Vec::new()
            }
            Event::Force => self.take_back("the operator took it back".into(), None),
            Event::Said(_) | Event::Converged | Event::Ahead | Event::Overrun | Event::Fenced(_) => {
                Vec::new()
            }
        }
    }

    /// The guest runs on the target.
    fn ran(&mut self) -> Vec<Action> {
        if !self.ahead {
            self.state = State::Moved;
            return vec![Action::Send(Message::BYE), Action::End];
        }
        if self.cut {
            self.state = State::Severed;
            return vec![Action::Serve, Action::Sever];
        }
        self.state = State::Serving;
        vec![Action::Serve]
    }

    /// The guest runs on the target, and what the target lacks is here alone: nothing but that it lacks nothing any more ends this
    /// side.
    fn behind(&mut self, event: Event) -> Vec<Action> {
        use Message as M;
        match event {
            Event::Said(M::Complete { .. }) => {
                self.state = State::Moved;
                vec![Action::Send(M::BYE), Action::End]
            }
            Event::Said(M::Lacking { .. }) if self.state == State::Serving => vec![Action::Stream],
            Event::Cut if self.state == State::Serving => {
                self.state = State::Severed;
                vec![Action::Sever]
            }
            Event::Linked => {
                self.state = State::Serving;
                vec![Action::Send(M::Query {})]
            }
            // As it was when it stood still for the hand-over: whoever says this knows that the target is gone.
            Event::Force if self.state == State::Severed => {
                self.take_back("the operator took it back, as it was at the hand-over".into(), None)
            }
            _ => Vec::new(),
        }
    }

    fn commit(&mut self) -> Vec<Action> {
        self.state = State::Committing;
        // Released first: the target takes them when it hears COMMIT.
        let attempt = self.attempt;
        let say =
            if self.fenced { Action::Commit { attempt } } else { Action::Send(Message::Commit { attempt }) };
        let mut actions = vec![Action::Release, say];
        if plant::is(Mistake::SourceRunsAfterCommit) {
            actions.push(Action::Resume);
        }
        actions
    }

    /// Nothing has been handed over: the guest runs on.
    fn stay(&mut self, why: String, last: Option<Message>) -> Vec<Action> {
        let paused = matches!(self.state, State::Finishing | State::Comparing);
        self.state = State::Stayed;
        // A target that is ready answers ABORT, and stays until it hears that nobody needs it.
        let last = last.into_iter().flat_map(|abort| [abort, Message::BYE]);
        let mut actions: Vec<Action> = last.map(Action::Send).collect();
        actions.push(Action::Undo);
        if paused {
            actions.push(Action::Resume);
        }
        actions.push(Action::Report(why));
        actions
    }

    /// The target will never run it: it runs here again.
    fn take_back(&mut self, why: String, last: Option<Message>) -> Vec<Action> {
        self.state = State::Stayed;
        let mut actions = vec![Action::Retake, Action::Undo, Action::Resume];
        if plant::is(Mistake::LocksNotRetaken) {
            actions.remove(0);
        }
        actions.extend(last.map(Action::Send));
        actions.push(Action::Report(why));
        actions
    }
}

impl Default for Source {
    fn default() -> Self {
        Self::new()
    }
}
