//! The source side of a migration as a pure state machine. The next step depends only on the state
//! and the event. The driver executes the [`Action`]s in order and delivers [`Event`]s.

use super::commit_flag::Ownership;
use super::message::{COMPRESSES, HANDS_OVER, Message, Misfit, POSTCOPIES, Standing, ZSTD};
use vellum_sys::plant::{self, Mistake};

/// The state of the source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// HELLO has been sent.
    Greeting,
    /// CONFIG has been sent.
    Offering,
    /// Passes over memory are sent while the guest runs.
    Copying,
    /// The guest is paused. The last pages and the state are being sent, and READY is awaited.
    Finishing,
    /// Both sides are paused and compare their memory.
    Comparing,
    /// COMMIT has been sent. The guest may run on the target.
    Committing,
    /// The link dropped after COMMIT. The source does not know whether the guest runs on the
    /// target.
    Unconfirmed {
        /// Whether the operator wants the guest back.
        withdraw: bool,
    },
    /// The guest runs on the target, which lacks some of its memory. The source sends it.
    Serving,
    /// The link dropped while the target lacked memory. Both sides wait for another one.
    Severed,
    /// The guest runs on the target. This process ends.
    Moved,
    /// The guest runs here, as before.
    Stayed,
}

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A message from the target.
    Said(Message),
    /// The link dropped, or the target has been silent for too long.
    Cut,
    /// A new link is available.
    Linked,
    /// The plan decided that the rest fits into the downtime.
    Converged,
    /// The plan decided that the guest is to run on the target before the rest is sent.
    Ahead,
    /// The final pass takes too long.
    Overrun,
    /// The operator cancels, the timeout has expired, or the guest has ended.
    Cancel(String),
    /// The operator asserts that the guest does not run on the target, and takes responsibility.
    Force,
    /// The state of the commit flag.
    Fenced(Ownership),
}

/// An action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message.
    Send(Message),
    /// Send the machine's configuration.
    Offer,
    /// Switch the dirty log on, and send passes over memory.
    Copy,
    /// Pause the guest, save its state, harvest for the last time, and send the pages, the state
    /// and FINAL.
    Finish {
        /// The number that FINAL carries.
        attempt: u32,
    },
    /// Send the checksums of all pages, and COMPARE.
    Compare {
        /// The number that COMPARE carries.
        attempt: u32,
    },
    /// Resume the guest that was paused for the final pass.
    Resume,
    /// The guest runs on the target. Send the pages that it requests, and wait for the map of
    /// missing pages.
    Serve,
    /// Send all pages that are missing on the target according to its map.
    Stream,
    /// The target waits for pages without a link: tell the operator.
    Sever,
    /// Release locks and addresses that the target needs to run the guest.
    Release,
    /// Take them again, as soon as the target has released them.
    Retake,
    /// Set the commit flag to committed, then send COMMIT. If the flag was already decided,
    /// [`Event::Fenced`] follows.
    Commit {
        /// The number that COMMIT carries.
        attempt: u32,
    },
    /// Withdraw the guest in the commit flag unless the target has run it. [`Event::Fenced`]
    /// follows.
    Settle,
    /// Switch off the dirty log and throttling.
    Undo,
    /// Get a new link to the target.
    Reconnect,
    /// End the process: the guest has moved.
    End,
    /// Tell the operator why the guest stays.
    Report(String),
}

/// The source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// The current state.
    pub state: State,
    attempt: u32,
    verifies: bool,
    compresses: bool,
    /// Whether RAM is handed over instead of copied.
    hands_over: bool,
    /// Whether postcopy is allowed. `ahead` says whether this attempt uses it.
    postcopies: bool,
    ahead: bool,
    /// Whether the link dropped after COMMIT and has not been replaced.
    cut: bool,
    /// Whether the source offers a commit flag. After WELCOME, whether the target shares it.
    fenced: bool,
}

impl Source {
    /// A source that has sent HELLO.
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

    /// The same source with a comparison of all memory before COMMIT.
    pub fn verifying(mut self, verifies: bool) -> Self {
        self.verifies = verifies;
        self
    }

    /// The same source with compressed pages.
    pub(crate) fn compressing(mut self, compresses: bool) -> Self {
        self.compresses = compresses;
        self
    }

    /// The same source with RAM handed over as a descriptor.
    pub(crate) fn handing_over(mut self, hands_over: bool) -> Self {
        self.hands_over = hands_over;
        self
    }

    /// The same source with postcopy allowed.
    pub fn postcopying(mut self, postcopies: bool) -> Self {
        self.postcopies = postcopies;
        self
    }

    /// Whether the guest runs, or is to run, on the target before all of its memory is there.
    pub fn is_ahead(&self) -> bool {
        self.ahead
    }

    /// The same source with a commit flag to offer.
    pub fn fenced(mut self, offers: bool) -> Self {
        self.fenced = offers;
        self
    }

    /// Processes `event` and returns the actions.
    pub fn step(&mut self, event: Event) -> Vec<Action> {
        match self.state {
            State::Greeting | State::Offering | State::Copying | State::Finishing | State::Comparing => {
                self.before_commit(event)
            }
            State::Committing | State::Unconfirmed { .. } => self.after_commit(event),
            State::Serving | State::Severed => self.behind(event),
            State::Moved => match event {
                // The target has not received BYE and asks for it.
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
            // Two processes with the same memory must never both run it, even if the link drops.
            // Only the commit flag ensures that.
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
                // Missing memory cannot be compared.
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
            // With postcopy, little is sent during the pause, and no limit applies.
            (State::Finishing, Event::Overrun) if !self.ahead => {
                self.state = State::Copying;
                self.attempt += 1;
                vec![Action::Resume, Action::Send(M::Again { attempt: self.attempt }), Action::Copy]
            }
            // Late messages of an attempt that was given up, and late decisions of the plan.
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
            // No message is needed: the first to change the commit flag has the guest.
            Event::Cut | Event::Cancel(_) | Event::Force if self.fenced => vec![Action::Settle],
            Event::Cut => {
                self.state = State::Unconfirmed { withdraw };
                vec![Action::Reconnect]
            }
            Event::Linked => vec![Action::Send(M::Query {})],
            Event::Cancel(_) if self.state == State::Committing => {
                // Too late to take the guest back without the target: ask it first.
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

    /// The guest runs on the target, and only this side has the missing pages. Only COMPLETE ends
    /// this side.
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
            // The guest returns to its state at the hand-over. The operator asserts that the target
            // is gone.
            Event::Force if self.state == State::Severed => {
                self.take_back("the operator took it back, as it was at the hand-over".into(), None)
            }
            _ => Vec::new(),
        }
    }

    fn commit(&mut self) -> Vec<Action> {
        self.state = State::Committing;
        // Locks are released first: the target takes them on COMMIT.
        let attempt = self.attempt;
        let say =
            if self.fenced { Action::Commit { attempt } } else { Action::Send(Message::Commit { attempt }) };
        let mut actions = vec![Action::Release, say];
        if plant::is(Mistake::SourceRunsAfterCommit) {
            actions.push(Action::Resume);
        }
        actions
    }

    /// Nothing was handed over: the guest continues here.
    fn stay(&mut self, why: String, last: Option<Message>) -> Vec<Action> {
        let paused = matches!(self.state, State::Finishing | State::Comparing);
        self.state = State::Stayed;
        // A ready target answers ABORT and stays until it receives BYE.
        let last = last.into_iter().flat_map(|abort| [abort, Message::BYE]);
        let mut actions: Vec<Action> = last.map(Action::Send).collect();
        actions.push(Action::Undo);
        if paused {
            actions.push(Action::Resume);
        }
        actions.push(Action::Report(why));
        actions
    }

    /// The target will never run the guest: it resumes here.
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
