//! The side that the guest moves to, as a pure machine. Whoever drives it carries out the [`Action`]s in their order and brings
//! [`Event`]s.

use super::fence::Word;
use super::message::{Message, Misfit, OLDEST, Standing, VERSION, ZSTD, common_version};
use crate::plant::{self, Mistake};

/// Where the target is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// HELLO is awaited.
    Listening,
    /// CONFIG is awaited.
    Welcomed,
    /// CONFIG is compared with this host and this command line.
    Judging,
    /// Pages and state come in.
    Receiving,
    /// Everything has come, and is restored.
    Restoring {
        /// Which attempt.
        attempt: u32,
    },
    /// Everything is there and paused: READY has been said. After a cut it stays so until somebody decides.
    Ready {
        /// Which attempt.
        attempt: u32,
    },
    /// COMMIT has come: locks are taken, and what was held back is written.
    Starting,
    /// The guest runs here.
    Running,
    /// The guest never ran here and never will; its memory is given back. Stays to say so until the source has understood.
    Gone,
    /// Nobody needs this process any more.
    Ended,
}

/// What happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The source says something.
    Said(Message),
    /// The link is cut, or the source has been silent for too long.
    Cut,
    /// There is a link again.
    Linked,
    /// How the judgement went: every misfit.
    Judged(Vec<Misfit>),
    /// The state is restored.
    Restored,
    /// It cannot be restored.
    Failed(String),
    /// What came of comparing all memory: [`Message::Compared`].
    Compared(Message),
    /// The first vCPU is about to enter the guest.
    Started,
    /// It cannot be started, and no vCPU has entered the guest.
    NotStarted(String),
    /// The operator says that the guest does not run on the source, and takes the blame.
    Force,
    /// The operator does not want it.
    Cancel(String),
    /// What the fence says.
    Fenced(Word),
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message.
    Send(Message),
    /// Compare the configuration with this host; [`Event::Judged`] follows.
    Judge {
        /// What the machine is.
        config: serde_json::Value,
        /// Over how many connections its pages come.
        connections: u32,
        /// Whether its RAM has come as a descriptor.
        handed: bool,
    },
    /// Restore vCPUs, interrupt controller and devices, all but what writes guest memory; [`Event::Restored`] follows.
    Restore {
        /// How many pages the source has sent.
        pages: u64,
        /// How many sections of state.
        sections: u32,
    },
    /// Compare this memory with the sums that have come, of so many pages; [`Event::Compared`] follows.
    Compare {
        /// Of which attempt.
        attempt: u32,
        /// Of how many pages sums were sent.
        pages: u64,
    },
    /// Take locks, write what was held back, and run; [`Event::Started`] follows, before the first vCPU enters the guest.
    Start,
    /// Store in the fence that it never runs here, where nobody has committed; [`Event::Fenced`] follows.
    Settle,
    /// Store in the fence that it never runs here.
    Withdraw,
    /// Give everything back.
    Free,
    /// Tell the operator.
    Report(String),
}

/// The target.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// Where it is.
    pub state: State,
    /// Whether it shares a fence with the source: known before HELLO is heard.
    pub fenced: bool,
}

impl Target {
    /// A target that waits for a source.
    pub fn new() -> Self {
        Self { state: State::Listening, fenced: false }
    }

    /// Whether the guest runs here.
    pub fn has_the_guest(&self) -> bool {
        self.state == State::Running
    }

    /// What follows from `event`.
    pub fn step(&mut self, event: Event) -> Vec<Action> {
        match self.state {
            State::Ready { .. } | State::Starting | State::Running | State::Gone => self.handed_over(event),
            State::Ended => Vec::new(),
            _ => self.before_ready(event),
        }
    }

    fn before_ready(&mut self, event: Event) -> Vec<Action> {
        use Message as M;
        match (&self.state, event) {
            (State::Listening, Event::Said(M::Hello { versions })) => match common_version(versions) {
                Some(version) => {
                    self.state = State::Welcomed;
                    vec![Action::Send(M::Welcome { version, fence: self.fenced })]
                }
                None => self.give_up(format!(
                    "the source speaks versions {} to {} of the wire, and this is version {OLDEST} to {VERSION}",
                    versions[0], versions[1]
                )),
            },
            (State::Welcomed, Event::Said(M::Config { compression: Some(theirs), .. })) if theirs != ZSTD => {
                self.state = State::Ended;
                let misfits = vec![Misfit {
                    what: "compression".into(),
                    source: theirs,
                    target: ZSTD.into(),
                    remedy: "choose that, or none".into(),
                }];
                let why = format!("it does not fit here: {misfits:?}");
                vec![Action::Send(M::Misfit { misfits }), Action::Free, Action::Report(why)]
            }
            (State::Welcomed, Event::Said(M::Config { config, connections, handed, .. })) => {
                self.state = State::Judging;
                vec![Action::Judge { config, connections, handed }]
            }
            (State::Judging, Event::Judged(misfits)) if misfits.is_empty() => {
                self.state = State::Receiving;
                vec![Action::Send(M::Fit {})]
            }
            (State::Judging, Event::Judged(misfits)) => {
                self.state = State::Ended;
                let why = format!("it does not fit here: {misfits:?}");
                vec![Action::Send(M::Misfit { misfits }), Action::Free, Action::Report(why)]
            }
            (State::Receiving, Event::Said(M::PassEnd { .. } | M::Again { .. })) => Vec::new(),
            (State::Receiving, Event::Said(M::Final { attempt, pages, sections })) => {
                self.state = State::Restoring { attempt };
                vec![Action::Restore { pages, sections }]
            }
            (State::Restoring { .. }, Event::Said(M::Again { .. })) => {
                self.state = State::Receiving;
                Vec::new()
            }
            (State::Restoring { attempt }, Event::Restored) => {
                let attempt = *attempt;
                if plant::is(Mistake::TargetRunsAtReady) {
                    self.state = State::Starting;
                    return vec![Action::Send(M::Ready { attempt }), Action::Start];
                }
                self.state = State::Ready { attempt };
                vec![Action::Send(M::Ready { attempt })]
            }
            // The answer to an attempt that was given up meanwhile.
            (State::Receiving, Event::Restored) => Vec::new(),
            (_, Event::Linked) => Vec::new(),
            // Behind an ABORT.
            (_, Event::Said(M::Bye { .. })) => Vec::new(),
            (_, Event::Cut) => {
                self.state = State::Ended;
                vec![Action::Free, Action::Report("the link was cut before everything had come".into())]
            }
            (_, Event::Said(M::Abort { why })) => {
                self.state = State::Ended;
                vec![Action::Free, Action::Report(why)]
            }
            (_, Event::Failed(why) | Event::NotStarted(why) | Event::Cancel(why)) => self.give_up(why),
            (_, Event::Force) => self.give_up("there is nothing to run yet".into()),
            (_, Event::Said(message)) => self.give_up(format!("the source said {message:?} out of turn")),
            (
                _,
                Event::Judged(_) | Event::Restored | Event::Compared(_) | Event::Started | Event::Fenced(_),
            ) => Vec::new(),
        }
    }

    fn handed_over(&mut self, event: Event) -> Vec<Action> {
        use Message as M;
        match (&self.state, event) {
            (State::Ready { attempt: mine }, Event::Said(M::Commit { attempt })) if *mine == attempt => {
                self.state = State::Starting;
                vec![Action::Start]
            }
            (State::Ready { .. }, Event::Said(M::Again { .. })) => {
                self.state = State::Receiving;
                Vec::new()
            }
            (State::Ready { attempt: mine }, Event::Said(M::Compare { attempt, pages }))
                if *mine == attempt =>
            {
                vec![Action::Compare { attempt, pages }]
            }
            (State::Ready { .. }, Event::Compared(answer)) => vec![Action::Send(answer)],
            (State::Ready { .. }, Event::Said(M::Query {})) => status(Standing::Uncommitted),
            (State::Ready { .. }, Event::Said(M::Abort { why }) | Event::Cancel(why)) => {
                self.state = self.gone();
                let mut actions = vec![Action::Withdraw, Action::Free];
                actions.extend(status(Standing::Gone));
                actions.push(Action::Report(why));
                actions
            }
            // Nobody has to be asked, nor may insist: who is first at the fence has the guest.
            (State::Ready { .. }, Event::Cut) if self.fenced => vec![Action::Settle],
            (State::Ready { .. }, Event::Force) if self.fenced => Vec::new(),
            (State::Ready { .. }, Event::Fenced(Word::Committed)) => {
                self.state = State::Starting;
                vec![Action::Start]
            }
            (State::Ready { .. }, Event::Fenced(Word::Withdrawn)) => {
                self.state = State::Ended;
                vec![Action::Free, Action::Report("the link was cut before the hand-over".into())]
            }
            (State::Ready { .. }, Event::Force) => {
                self.state = State::Starting;
                vec![Action::Start]
            }
            (State::Starting, Event::Started) => {
                self.state = State::Running;
                vec![Action::Send(M::Done {})]
            }
            (State::Starting, Event::NotStarted(why)) => {
                self.state = self.gone();
                let refused = Action::Send(M::Refused { why: why.clone() });
                vec![Action::Withdraw, Action::Free, refused, Action::Report(why)]
            }
            (State::Running, Event::Said(M::Commit { .. })) => vec![Action::Send(M::Done {})],
            (State::Running, Event::Said(M::Query {} | M::Abort { .. })) => status(Standing::Ran),
            (State::Gone, Event::Said(M::Query {} | M::Abort { .. } | M::Commit { .. })) => {
                status(Standing::Gone)
            }
            (State::Gone, Event::Said(M::Bye { .. })) => {
                self.state = State::Ended;
                Vec::new()
            }
            // Cuts decide nothing here, and what comes twice does nothing.
            _ => Vec::new(),
        }
    }

    /// Where a target is that will never run it: by the fence the source sees that, and needs nobody to say it.
    fn gone(&self) -> State {
        if self.fenced { State::Ended } else { State::Gone }
    }

    /// Nothing has been said that would let the source give the guest away: it keeps it.
    fn give_up(&mut self, why: String) -> Vec<Action> {
        self.state = State::Ended;
        vec![Action::Send(Message::Abort { why: why.clone() }), Action::Free, Action::Report(why)]
    }
}

impl Default for Target {
    fn default() -> Self {
        Self::new()
    }
}

fn status(standing: Standing) -> Vec<Action> {
    vec![Action::Send(Message::Status { standing })]
}
