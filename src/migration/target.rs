//! The side that the guest moves to, as a pure machine. Whoever drives it carries out the [`Action`]s in their order and brings
//! [`Event`]s.

use super::commit_flag::Ownership;
use super::message::{Message, Misfit, OLDEST, Standing, VERSION, ZSTD, common_version};
use vellum_sys::plant::{self, Mistake};

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
    /// The guest never ran here and never will; its memory is given back. MigrationBlocker to say so until the source has understood.
    Gone,
    /// Nobody needs this process any more.
    Ended,
}

/// What happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The source says something.
    Said(Message),
    /// All memory is there, of which some followed while the guest ran.
    Whole,
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
    Fenced(Ownership),
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
        /// Whether it may have to run before all of them have come.
        postcopy: bool,
    },
    /// Restore vCPUs, interrupt controller and devices, all but what writes guest memory; [`Event::Restored`] follows.
    Restore {
        /// How many pages the source has sent.
        pages: u64,
        /// How many sections of state.
        sections: u32,
        /// Of how many pages the map says that they follow, where it runs before they have come.
        lacking: Option<u64>,
    },
    /// Say which pages are missing here: their map, and [`Message::Lacking`].
    Lack,
    /// Say that none is: [`Message::Complete`].
    Complete,
    /// Pages are missing, and there is no link to the source: tell the operator.
    Sever,
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
    /// Whether the guest runs, or is to run, before all of its memory is there; and whether that is there now.
    ahead: bool,
    whole: bool,
    /// Whether the link is cut.
    cut: bool,
}

impl Target {
    /// A target that waits for a source.
    pub fn new() -> Self {
        Self { state: State::Listening, fenced: false, ahead: false, whole: false, cut: false }
    }

    /// Whether the guest is to run, or runs, while some of its memory is missing here.
    pub fn lacks(&self) -> bool {
        self.ahead && !self.whole
    }

    /// What follows from `event`.
    pub fn step(&mut self, event: Event) -> Vec<Action> {
        match event {
            // The end of one connection after the other.
            Event::Cut if self.cut && self.state == State::Running => return Vec::new(),
            Event::Cut => self.cut = true,
            Event::Linked => self.cut = false,
            _ => {}
        }
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
                let why = does_not_fit(&misfits);
                vec![Action::Send(M::Misfit { misfits }), Action::Free, Action::Report(why)]
            }
            (State::Welcomed, Event::Said(M::Config { config, connections, handed, postcopy, .. })) => {
                self.state = State::Judging;
                vec![Action::Judge { config, connections, handed, postcopy }]
            }
            (State::Judging, Event::Judged(misfits)) if misfits.is_empty() => {
                self.state = State::Receiving;
                vec![Action::Send(M::Fit {})]
            }
            (State::Judging, Event::Judged(misfits)) => {
                self.state = State::Ended;
                let why = does_not_fit(&misfits);
                vec![Action::Send(M::Misfit { misfits }), Action::Free, Action::Report(why)]
            }
            (State::Receiving, Event::Said(M::PassEnd { .. } | M::Again { .. })) => Vec::new(),
            (State::Receiving, Event::Said(M::Final { attempt, pages, sections, lacking })) => {
                self.state = State::Restoring { attempt };
                self.ahead = lacking.is_some();
                vec![Action::Restore { pages, sections, lacking }]
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
            (_, Event::Whole) => {
                self.whole = true;
                Vec::new()
            }
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
            (_, Event::Said(message)) => self.give_up(format!("the source said {} out of turn", message.name())),
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
            // It has never run, and cannot without its source.
            (State::Ready { .. }, Event::Cut) if self.ahead => {
                self.state = self.gone();
                let why = "the link was cut before the hand-over".to_owned();
                vec![Action::Withdraw, Action::Free, Action::Report(why)]
            }
            (State::Ready { .. }, Event::Force) if self.ahead => Vec::new(),
            // Nobody has to be asked, nor may insist: who is first at the fence has the guest.
            (State::Ready { .. }, Event::Cut) if self.fenced => vec![Action::Settle],
            (State::Ready { .. }, Event::Force) if self.fenced => Vec::new(),
            (State::Ready { .. }, Event::Fenced(Ownership::Committed)) => {
                self.state = State::Starting;
                vec![Action::Start]
            }
            (State::Ready { .. }, Event::Fenced(Ownership::Withdrawn)) => {
                self.state = State::Ended;
                vec![Action::Free, Action::Report("the link was cut before the hand-over".into())]
            }
            (State::Ready { .. }, Event::Force) => {
                self.state = State::Starting;
                vec![Action::Start]
            }
            (State::Starting, Event::Started) => {
                self.state = State::Running;
                let mut actions = vec![Action::Send(M::Done {})];
                actions.extend(self.rest());
                if self.cut && self.lacks() {
                    actions.push(Action::Sever);
                }
                actions
            }
            (State::Starting, Event::NotStarted(why)) => {
                self.state = self.gone();
                let refused = Action::Send(M::Refused { why: why.clone() });
                vec![Action::Withdraw, Action::Free, refused, Action::Report(why)]
            }
            (State::Running, Event::Said(M::Commit { .. })) => {
                [Action::Send(M::Done {})].into_iter().chain(self.rest()).collect()
            }
            (State::Running, Event::Said(M::Query {} | M::Abort { .. })) => {
                status(Standing::Ran).into_iter().chain(self.rest()).collect()
            }
            (State::Running, Event::Whole) => {
                self.whole = true;
                vec![Action::Complete]
            }
            (_, Event::Whole) => {
                self.whole = true;
                Vec::new()
            }
            (State::Running, Event::Cut) if self.lacks() => vec![Action::Sever],
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

    /// What is said behind that the guest runs here, where it runs ahead of its memory.
    fn rest(&self) -> Option<Action> {
        self.ahead.then_some(if self.whole { Action::Complete } else { Action::Lack })
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
/// Why it is not taken, in one line.
fn does_not_fit(misfits: &[Misfit]) -> String {
    let each: Vec<_> = misfits.iter().map(|misfit| format!("{}: {}", misfit.what, misfit.remedy)).collect();
    format!("the source's machine does not fit here: {}", each.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_said_in_words() {
        let misfits = vec![Misfit {
            what: "vsock".into(),
            source: "present".into(),
            target: "missing".into(),
            remedy: "give it one".into(),
        }];
        assert_eq!(does_not_fit(&misfits), "the source's machine does not fit here: vsock: give it one");
        assert_eq!(misfits[0].to_string(), "vsock: present here, missing there; give it one");
        assert_eq!(Message::Fit {}.name(), "FIT");
    }
}
