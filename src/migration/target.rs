//! The target side of a migration as a pure state machine. The driver executes the [`Action`]s in
//! order and delivers [`Event`]s.

use super::commit_flag::Ownership;
use super::message::{Message, Misfit, OLDEST, Standing, VERSION, ZSTD, common_version};
use vellum_sys::plant::{self, Mistake};

/// The state of the target.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// HELLO is awaited.
    Listening,
    /// CONFIG is awaited.
    Welcomed,
    /// CONFIG is compared with this host and this command line.
    Judging,
    /// Pages and state arrive.
    Receiving,
    /// Everything has arrived and is being restored.
    Restoring {
        /// The attempt.
        attempt: u32,
    },
    /// Everything is restored and paused, and READY has been sent. After a lost link this state
    /// lasts until a decision.
    Ready {
        /// The attempt.
        attempt: u32,
    },
    /// COMMIT has arrived. Locks are taken, and deferred writes to guest memory are done.
    Starting,
    /// The guest runs here.
    Running,
    /// The guest never ran here and never will. Its memory is freed. The process stays to report
    /// this until the source has received it.
    Gone,
    /// The process is no longer needed.
    Ended,
}

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A message from the source.
    Said(Message),
    /// All memory has arrived, including what followed while the guest ran.
    Whole,
    /// The link dropped, or the source has been silent for too long.
    Cut,
    /// A new link is available.
    Linked,
    /// The result of judging the configuration: every misfit.
    Judged(Vec<Misfit>),
    /// The state is restored.
    Restored,
    /// The state cannot be restored.
    Failed(String),
    /// The result of comparing all memory: [`Message::Compared`].
    Compared(Message),
    /// The first vCPU is about to enter the guest.
    Started,
    /// The guest cannot be started, and no vCPU has entered it.
    NotStarted(String),
    /// The operator asserts that the guest does not run on the source, and takes responsibility.
    Force,
    /// The operator cancels.
    Cancel(String),
    /// The state of the commit flag.
    Fenced(Ownership),
}

/// An action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message.
    Send(Message),
    /// Compare the configuration with this host. [`Event::Judged`] follows.
    Judge {
        /// The machine's configuration.
        config: serde_json::Value,
        /// The number of connections that carry its pages.
        connections: u32,
        /// Whether its RAM has arrived as a descriptor.
        handed: bool,
        /// Whether the guest may run before all pages have arrived.
        postcopy: bool,
    },
    /// Restore vCPUs, interrupt controller and devices, except for writes to guest memory.
    /// [`Event::Restored`] follows.
    Restore {
        /// How many pages the source has sent.
        pages: u64,
        /// How many sections of state it has sent.
        sections: u32,
        /// With postcopy, the number of pages that follow according to the source's map.
        lacking: Option<u64>,
    },
    /// Send the map of missing pages, and [`Message::Lacking`].
    Lack,
    /// Send [`Message::Complete`]: no page is missing.
    Complete,
    /// Pages are missing, and there is no link to the source: tell the operator.
    Sever,
    /// Compare this memory with the received checksums. [`Event::Compared`] follows.
    Compare {
        /// The attempt.
        attempt: u32,
        /// The number of pages whose checksums were sent.
        pages: u64,
    },
    /// Take locks, do deferred writes, and run. [`Event::Started`] follows before the first vCPU
    /// enters the guest.
    Start,
    /// Withdraw the guest in the commit flag unless the source has committed. [`Event::Fenced`]
    /// follows.
    Settle,
    /// Set the commit flag to withdrawn.
    Withdraw,
    /// Free everything.
    Free,
    /// Tell the operator.
    Report(String),
}

/// The target.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// The current state.
    pub state: State,
    /// Whether it shares a commit flag with the source. Known before HELLO is processed.
    pub fenced: bool,
    /// Whether the guest runs, or is to run, before all of its memory is there. `whole` says
    /// whether all memory has arrived.
    ahead: bool,
    whole: bool,
    /// Whether the link has dropped.
    cut: bool,
}

impl Target {
    /// A target that waits for a source.
    pub fn new() -> Self {
        Self { state: State::Listening, fenced: false, ahead: false, whole: false, cut: false }
    }

    /// Whether the guest runs, or is to run, while some of its memory is missing here.
    pub fn lacks(&self) -> bool {
        self.ahead && !self.whole
    }

    /// Processes `event` and returns the actions.
    pub fn step(&mut self, event: Event) -> Vec<Action> {
        match event {
            // Several connections end one after the other. Only the first end counts.
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
            // BYE after an ABORT.
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
            // The guest has never run here, and cannot run without the source.
            (State::Ready { .. }, Event::Cut) if self.ahead => {
                self.state = self.gone();
                let why = "the link was cut before the hand-over".to_owned();
                vec![Action::Withdraw, Action::Free, Action::Report(why)]
            }
            (State::Ready { .. }, Event::Force) if self.ahead => Vec::new(),
            // No message is needed, and no one can override it: the first to change the commit flag
            // has the guest.
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
            (State::Running, Event::Said(M::Bye { .. })) if !self.lacks() => {
                self.state = State::Ended;
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
            // A lost link decides nothing here, and repeated messages have no effect.
            _ => Vec::new(),
        }
    }

    /// With postcopy, the action that follows the report that the guest runs here.
    fn rest(&self) -> Option<Action> {
        self.ahead.then_some(if self.whole { Action::Complete } else { Action::Lack })
    }

    /// The state of a target that will never run the guest. With a commit flag, the source sees
    /// that there, so this process can end.
    fn gone(&self) -> State {
        if self.fenced { State::Ended } else { State::Gone }
    }

    /// No message has allowed the source to give up the guest: the source keeps it.
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
/// The reasons for a misfit, in one line.
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
