//! Enumerates the hand-over of a migration: every order of messages, cuts, late messages of a cut
//! link, deaths of either side, failures of the target and commands of the operator. Two copies of
//! the guest never run. While both sides live and a link is possible, the guest does not stay
//! stopped.

use std::collections::{HashSet, VecDeque};

use support::faults;
use vellum_migration::commit_flag::Ownership;
use vellum_migration::message::{Message, Misfit, VERSION, Waited};
use vellum_migration::{source, target};

/// How often each fault may still occur.
#[derive(Clone, Debug)]
struct Faults {
    cuts: u8,
    deaths: u8,
    repeats: u8,
    overruns: u8,
    cancels: u8,
    failures: u8,
    /// Memory is compared, and it differs.
    verifies: bool,
    differs: bool,
    /// Both sides are on one host.
    fenced: bool,
    /// The guest runs on the target before its memory is there.
    ahead: bool,
}

/// Both sides, the messages between them, and where the guest runs.
#[derive(Clone, Debug)]
struct World {
    source: Option<source::Source>,
    target: Option<target::Target>,
    to_target: VecDeque<Message>,
    to_source: VecDeque<Message>,
    /// Messages to the target on a link that the source knows to be cut. They may still arrive.
    leftovers: VecDeque<Message>,
    linked: bool,
    /// Each side has noticed that the link is cut.
    noticed: [bool; 2],
    /// What the target is doing: checking, restoring, starting.
    pending: Option<target::Event>,
    runs_here: bool,
    runs_there: bool,
    locked_here: bool,
    locked_there: bool,
    /// A page is wrong on the target, which only a comparison shows.
    differs: bool,
    /// The fence, if they share one.
    word: Option<Ownership>,
    /// The source takes its locks as soon as they are free.
    retaking: bool,
    /// The target lacks some of the guest's memory, and the source sends it.
    lacks: bool,
    streams: bool,
    faults: Faults,
}

impl World {
    fn new(faults: Faults) -> Self {
        let mut target = target::Target::new();
        target.fenced = faults.fenced;
        Self {
            source: Some(
                source::Source::new()
                    .verifying(faults.verifies)
                    .fenced(faults.fenced)
                    .postcopying(faults.ahead),
            ),
            target: Some(target),
            to_target: VecDeque::from([Message::Hello { versions: [1, VERSION] }]),
            to_source: VecDeque::new(),
            leftovers: VecDeque::new(),
            linked: true,
            noticed: [false; 2],
            pending: None,
            runs_here: true,
            runs_there: false,
            locked_here: true,
            locked_there: false,
            differs: faults.differs,
            word: faults.fenced.then_some(Ownership::Open),
            retaking: false,
            lacks: false,
            streams: false,
            faults,
        }
    }

    fn key(&self) -> String {
        format!("{self:?}")
    }

    fn source(&mut self, event: source::Event) {
        let Some(source) = &mut self.source else { return };
        let actions = source.step(event);
        let ahead = source.is_ahead();
        for action in actions {
            match action {
                source::Action::Send(message) => self.send_to_target(message),
                source::Action::Offer => {
                    self.send_to_target(Message::Config {
                        config: serde_json::Value::Null,
                        connections: 1,
                        compression: None,
                        handed: false,
                        postcopy: self.faults.ahead,
                    });
                }
                source::Action::Copy => self.send_to_target(Message::PassEnd { pass: 1, pages: 1 }),
                source::Action::Finish { attempt } => {
                    self.runs_here = false;
                    let lacking = ahead.then_some(1);
                    self.send_to_target(Message::Final { attempt, pages: 1, sections: 1, lacking });
                }
                source::Action::Compare { attempt } => {
                    self.send_to_target(Message::Compare { attempt, pages: 1 });
                }
                source::Action::Resume => self.runs_here = true,
                source::Action::Release => self.locked_here = false,
                source::Action::Retake => {
                    let waits = self.word.is_some() && self.locked_there;
                    assert!(waits || !self.locked_there, "the target holds the locks: {self:#?}");
                    (self.locked_here, self.retaking) = (!waits, waits);
                }
                source::Action::Commit { attempt } => {
                    match self.step(Ownership::Open, Ownership::Committed) {
                        Ownership::Committed => self.send_to_target(Message::Commit { attempt }),
                        word => self.source(source::Event::Fenced(word)),
                    }
                }
                source::Action::Settle => {
                    let word = self.step(Ownership::Committed, Ownership::Withdrawn);
                    self.source(source::Event::Fenced(word));
                }
                source::Action::End => {
                    assert!(!self.runs_here, "{self:#?}");
                    assert!(
                        !self.lacks || self.target.is_none(),
                        "the target lacks what is here alone: {self:#?}"
                    );
                }
                source::Action::Stream => self.streams = true,
                source::Action::Sever => {
                    assert!(!self.linked || !self.noticed[0], "it is linked: {self:#?}");
                    self.streams = false;
                }
                source::Action::Serve => {}
                source::Action::Undo | source::Action::Reconnect | source::Action::Report(_) => {}
            }
        }
    }

    fn target(&mut self, event: target::Event) {
        let Some(target) = &mut self.target else { return };
        for action in target.step(event) {
            match action {
                target::Action::Send(message) => {
                    if self.linked {
                        self.to_source.push_back(message);
                    }
                }
                target::Action::Judge { .. } => self.pending = Some(target::Event::Judged(Vec::new())),
                target::Action::Restore { lacking, .. } => {
                    self.lacks = lacking.is_some();
                    self.pending = Some(target::Event::Restored);
                }
                target::Action::Lack => {
                    if self.linked {
                        self.to_source.push_back(Message::Lacking { pages: 1 });
                    }
                }
                target::Action::Complete => {
                    assert!(!self.lacks, "it is not complete: {self:#?}");
                    if self.linked {
                        self.to_source.push_back(Message::Complete { waited: Waited::default() });
                    }
                }
                target::Action::Sever => assert!(self.lacks, "it lacks nothing: {self:#?}"),
                target::Action::Compare { attempt, pages } => {
                    let wrong = u64::from(self.differs);
                    let first = vec![4096; wrong as usize];
                    let answer = Message::Compared { attempt, pages, wrong, first };
                    self.pending = Some(target::Event::Compared(answer));
                }
                // It is too late, and the target does not try to take the locks.
                target::Action::Start if self.word.is_some_and(|word| word != Ownership::Committed) => {
                    self.pending = Some(target::Event::NotStarted("the source has taken it back".into()));
                }
                target::Action::Start => {
                    assert!(!self.differs, "a guest whose memory differs is to run: {self:#?}");
                    assert!(!self.locked_here, "the source holds the locks: {self:#?}");
                    self.locked_there = true;
                    self.pending = Some(target::Event::Started);
                }
                target::Action::Free => {
                    assert!(!self.runs_there, "a guest that runs is freed: {self:#?}");
                    (self.locked_there, self.pending, self.lacks) = (false, None, false);
                    self.locked_here |= std::mem::take(&mut self.retaking);
                }
                target::Action::Settle => {
                    let word = self.step(Ownership::Open, Ownership::Withdrawn);
                    self.target(target::Event::Fenced(word));
                }
                target::Action::Withdraw if self.word.is_some() => {
                    self.step(Ownership::Open, Ownership::Withdrawn);
                    self.step(Ownership::Committed, Ownership::Withdrawn);
                }
                target::Action::Withdraw | target::Action::Report(_) => {}
            }
        }
    }

    fn step(&mut self, from: Ownership, to: Ownership) -> Ownership {
        let word = self.word.as_mut().expect("only with a fence");
        if *word == from {
            *word = to;
        }
        *word
    }

    fn send_to_target(&mut self, message: Message) {
        if self.linked {
            self.to_target.push_back(message);
        }
    }

    fn cut(&mut self) {
        if self.linked {
            self.linked = false;
            self.noticed = [false; 2];
        }
    }

    fn starting(&self) -> bool {
        self.target.as_ref().is_some_and(|target| target.state == target::State::Starting)
    }

    fn finish_pending(&mut self) {
        let Some(mut event) = self.pending.take() else { return };
        if event == target::Event::Started
            && self.word.is_some()
            && self.step(Ownership::Committed, Ownership::Ran) != Ownership::Ran
        {
            event = target::Event::NotStarted("the source has taken it back".into());
        }
        // The target sends Started before the first vCPU enters the guest.
        self.runs_there |= event == target::Event::Started;
        self.target(event);
    }

    /// All possible next worlds.
    fn next(&self) -> Vec<World> {
        let mut next = Vec::new();
        let mut add = |change: &dyn Fn(&mut World)| {
            let mut world = self.clone();
            change(&mut world);
            next.push(world);
        };
        if self.pending.is_some() {
            add(&World::finish_pending);
            if self.faults.failures > 0 {
                add(&|world| {
                    world.faults.failures -= 1;
                    let event = match world.pending.take().expect("it is there") {
                        target::Event::Judged(_) => target::Event::Judged(vec![Misfit {
                            what: "memory".into(),
                            source: "2".into(),
                            target: "1".into(),
                            remedy: "more".into(),
                        }]),
                        target::Event::Restored => target::Event::Failed("no".into()),
                        // A comparison fails only with the link.
                        compared @ target::Event::Compared(_) => compared,
                        _ => target::Event::NotStarted("no".into()),
                    };
                    world.target(event);
                });
            }
        }
        // A target that takes locks and starts vCPUs does not read messages.
        if !self.starting() {
            if !self.to_target.is_empty() {
                add(&World::hear_there);
                if self.faults.repeats > 0 {
                    add(&|world| {
                        world.faults.repeats -= 1;
                        let message = world.to_target[0].clone();
                        world.target(target::Event::Said(message));
                    });
                }
            }
            if !self.leftovers.is_empty() {
                add(&|world| {
                    let message = world.leftovers.pop_front().expect("it is there");
                    world.target(target::Event::Said(message));
                });
                add(&|world| world.leftovers.clear());
            }
            if !self.linked && !self.noticed[1] {
                add(&World::notice_there);
            }
        }
        if !self.to_source.is_empty() {
            add(&World::hear_here);
            if self.faults.repeats > 0 {
                add(&|world| {
                    world.faults.repeats -= 1;
                    let message = world.to_source[0].clone();
                    world.source(source::Event::Said(message));
                });
            }
        }
        if !self.linked && !self.noticed[0] {
            add(&World::notice_here);
        }
        if self.linked && self.faults.cuts > 0 {
            add(&|world| {
                world.faults.cuts -= 1;
                world.cut();
            });
        }
        if self.can_link() {
            add(&World::link);
        }
        if self.can_complete() {
            add(&World::complete);
        }
        if self.source.as_ref().is_some_and(|source| source.state == source::State::Copying) {
            add(&World::pauses);
        }
        if self.faults.overruns > 0 {
            add(&|world| {
                world.faults.overruns -= 1;
                world.source(source::Event::Overrun);
            });
        }
        if self.faults.cancels > 0 {
            add(&|world| {
                world.faults.cancels -= 1;
                world.source(source::Event::Cancel("the operator".into()));
            });
            if !self.starting() {
                add(&|world| {
                    world.faults.cancels -= 1;
                    world.target(target::Event::Cancel("the operator".into()));
                });
            }
        }
        if self.faults.deaths > 0 {
            if self.source.is_some() {
                add(&|world| {
                    world.faults.deaths -= 1;
                    (world.source, world.runs_here, world.locked_here) = (None, false, false);
                    world.retaking = false;
                    world.cut();
                });
            }
            if self.target.is_some() {
                add(&|world| {
                    world.faults.deaths -= 1;
                    (world.target, world.runs_there, world.locked_there) = (None, false, false);
                    world.locked_here |= std::mem::take(&mut world.retaking);
                    world.pending = None;
                    world.leftovers.clear();
                    world.cut();
                });
            }
        }
        next
    }

    fn hear_there(&mut self) {
        let message = self.to_target.pop_front().expect("it is there");
        self.target(target::Event::Said(message));
    }

    fn hear_here(&mut self) {
        let message = self.to_source.pop_front().expect("it is there");
        self.source(source::Event::Said(message));
    }

    /// Unread messages are lost.
    fn notice_here(&mut self) {
        self.noticed[0] = true;
        self.to_source.clear();
        self.source(source::Event::Cut);
    }

    /// Messages that were sent to the target may still arrive, even after there is a new link.
    fn notice_there(&mut self) {
        self.noticed[1] = true;
        self.leftovers = std::mem::take(&mut self.to_target);
        self.target(target::Event::Cut);
    }

    /// The plan starts the final pass.
    fn pauses(&mut self) {
        let event = if self.faults.ahead { source::Event::Ahead } else { source::Event::Converged };
        self.source(event);
    }

    /// Whether all memory that the target lacks can arrive.
    fn can_complete(&self) -> bool {
        let target = self.target.as_ref().is_some_and(|target| target.state == target::State::Running);
        self.lacks && self.streams && self.linked && target && self.source.is_some()
    }

    fn complete(&mut self) {
        self.lacks = false;
        self.target(target::Event::Whole);
    }

    fn can_link(&self) -> bool {
        let severed = self.source.as_ref().is_some_and(|source| source.state == source::State::Severed);
        let lives = self.target.as_ref().is_some_and(|target| target.state == target::State::Running);
        // An operator makes another link, also if the fence has decided.
        if severed && lives {
            return !self.linked && self.noticed == [true; 2];
        }
        let wants = self.source.as_ref().is_some_and(|source| {
            matches!(source.state, source::State::Unconfirmed { .. } | source::State::Committing)
        });
        let listens = self.target.as_ref().is_some_and(|target| target.state != target::State::Ended)
            && !self.starting();
        // With a fence no other link is needed.
        self.word.is_none() && !self.linked && self.noticed == [true; 2] && wants && listens
    }

    fn link(&mut self) {
        self.linked = true;
        self.source(source::Event::Linked);
        self.target(target::Event::Linked);
    }

    /// The final world if no more faults occur.
    fn settle(mut self) -> World {
        loop {
            if self.pending.is_some() {
                self.finish_pending();
            } else if !self.leftovers.is_empty() {
                self.leftovers.clear();
            } else if !self.to_target.is_empty() && self.target.is_some() {
                self.hear_there();
            } else if !self.to_source.is_empty() && self.source.is_some() {
                self.hear_here();
            } else if !self.linked && !self.noticed[0] {
                self.notice_here();
            } else if !self.linked && !self.noticed[1] {
                self.notice_there();
            } else if self.can_link() {
                self.link();
            } else if self.source.as_ref().is_some_and(|s| s.state == source::State::Copying) {
                self.pauses();
            } else if self.can_complete() {
                self.complete();
            } else {
                return self;
            }
        }
    }
}

/// Enumerates all worlds with these faults. Returns their number, and how often the guest ended on
/// the target.
fn enumerate(faults: Faults) -> (usize, usize) {
    faults::plant();
    let mut seen = HashSet::new();
    let mut worlds = vec![World::new(faults)];
    let mut moved = 0;
    while let Some(world) = worlds.pop() {
        if !seen.insert(world.key()) {
            continue;
        }
        assert!(!(world.runs_here && world.runs_there), "two copies run: {world:#?}");
        assert!(!(world.locked_here && world.locked_there), "both hold the locks: {world:#?}");
        let dead = [world.source.is_none(), world.target.is_none()];
        let end = world.clone().settle();
        match dead {
            [false, false] => {
                let state = &end.source.as_ref().expect("it lives").state;
                let asks = matches!(state, source::State::Unconfirmed { .. }) && end.word.is_some();
                assert!(!asks, "{world:#?}\nleads to {end:#?}");
                let target = end.target.as_ref().expect("it lives");
                let forsaken = end.linked && end.runs_here && target.state == target::State::Gone;
                assert!(!forsaken, "nobody sends it away: {world:#?}\nleads to {end:#?}");
                assert!(end.runs_here != end.runs_there, "not one copy runs: {world:#?}\nleads to {end:#?}");
                assert!(!(end.runs_there && end.lacks), "memory never comes: {world:#?}\nleads to {end:#?}");
                moved += usize::from(end.runs_there);
            }
            // If the target dies, a source that has not committed has the guest.
            [false, true] => {
                let state = &end.source.as_ref().expect("it lives").state;
                let unknown = matches!(
                    state,
                    source::State::Unconfirmed { .. } | source::State::Moved | source::State::Severed
                );
                assert!(end.runs_here || unknown, "{world:#?}\nleads to {end:#?}");
                // The fence tells whether the guest ever ran on the target.
                let decided = end.runs_here != (end.word == Some(Ownership::Ran));
                assert!(end.word.is_none() || decided, "{world:#?}\nleads to {end:#?}");
            }
            // If the source dies, a target that was not committed never runs the guest. With a
            // fence it knows that and ends.
            [true, false] => {
                // A target that runs the guest ends too, once the source has heard of it.
                let ended = end.target.as_ref().is_some_and(|target| target.state == target::State::Ended);
                let ended = ended && !end.runs_there;
                assert!(end.word.is_none() || end.runs_there != ended, "{world:#?}\nleads to {end:#?}");
                let committed = matches!(end.word, Some(Ownership::Committed | Ownership::Ran));
                assert!(end.word.is_none() || end.runs_there == committed, "{world:#?}\nleads to {end:#?}");
            }
            [true, true] => {}
        }
        worlds.extend(world.next());
    }
    (seen.len(), moved)
}

const NONE: Faults = Faults {
    cuts: 0,
    deaths: 0,
    repeats: 0,
    overruns: 0,
    cancels: 0,
    failures: 0,
    verifies: false,
    differs: false,
    fenced: false,
    ahead: false,
};

#[test]
fn two_cuts_at_any_message_leave_one_copy() {
    let (worlds, moved) = enumerate(Faults { cuts: 2, overruns: 1, ..NONE });
    assert!(worlds > 500 && moved > 100, "{worlds} worlds, {moved} moved");
}

#[test]
fn a_death_of_either_side_at_any_time() {
    enumerate(Faults { cuts: 1, deaths: 2, ..NONE });
}

#[test]
fn messages_that_come_twice_do_nothing_the_second_time() {
    enumerate(Faults { cuts: 1, repeats: 2, ..NONE });
}

#[test]
fn an_operator_that_cancels_at_any_time_on_either_side() {
    enumerate(Faults { cuts: 2, cancels: 2, ..NONE });
}

#[test]
fn a_target_that_fails_at_any_step() {
    enumerate(Faults { cuts: 1, failures: 1, cancels: 1, overruns: 1, ..NONE });
}

/// Memory is compared before COMMIT. Faults in the meantime leave one copy, and a page that differs
/// leaves it on the source.
#[test]
fn memory_is_compared_before_anything_is_handed_over() {
    for faults in [
        Faults { cuts: 2, overruns: 1, ..NONE },
        Faults { cuts: 1, deaths: 2, ..NONE },
        Faults { cuts: 1, repeats: 2, ..NONE },
        Faults { cuts: 1, cancels: 1, failures: 1, ..NONE },
    ] {
        let (_, moved) = enumerate(Faults { verifies: true, ..faults });
        assert!(moved > 0);
        let (_, moved) = enumerate(Faults { verifies: true, differs: true, ..faults.clone() });
        assert_eq!(moved, 0);
    }
}

/// On one host the fence decides. After a cut no new connection is needed, and if one side dies,
/// the other knows what to do.
#[test]
fn on_one_host_nobody_has_to_ask() {
    for faults in [
        Faults { cuts: 1, overruns: 1, ..NONE },
        Faults { cuts: 1, deaths: 2, ..NONE },
        Faults { cuts: 1, repeats: 2, ..NONE },
        Faults { cuts: 1, cancels: 2, ..NONE },
        Faults { cuts: 1, failures: 1, cancels: 1, overruns: 1, ..NONE },
        Faults { cuts: 1, deaths: 1, cancels: 1, verifies: true, ..NONE },
    ] {
        let (_, moved) = enumerate(Faults { fenced: true, ..faults });
        assert!(moved > 0);
    }
}

/// A guest runs ahead of its memory. After any cut all of that arrives as long as both sides live,
/// and the source stays until it has. If one side dies, the other stays paused, and no copy runs by
/// itself.
#[test]
fn a_guest_ahead_of_its_memory_gets_all_of_it() {
    for faults in [
        Faults { cuts: 3, overruns: 1, ..NONE },
        Faults { cuts: 1, deaths: 2, ..NONE },
        Faults { cuts: 1, repeats: 2, ..NONE },
        Faults { cuts: 2, cancels: 2, ..NONE },
        Faults { cuts: 1, failures: 1, cancels: 1, ..NONE },
    ] {
        for fenced in [false, true] {
            let (_, moved) = enumerate(Faults { ahead: true, fenced, ..faults.clone() });
            assert!(moved > 0);
        }
    }
}

#[test]
fn copies_that_run_too_early_are_caught() {
    for (mistake, says) in [
        ("source-runs-after-commit", "runs_here: true"),
        ("target-runs-at-ready", "the source holds the locks"),
    ] {
        if let Err(error) = faults::caught(mistake, "two_cuts_at_any_message_leave_one_copy", says) {
            panic!("{}", error.message().unwrap_or(mistake));
        }
    }
}
