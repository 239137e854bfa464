//! What the target's thread receives: connections, their first messages, and the source's frames.
//! Pages and state are taken at once. Every other frame is an [`Event`].

use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use super::{LOOK, MAX_STRANGERS, Place, ReceiverCommand, Receiving};
use crate::bits::Bits;
use crate::commit_flag::CommitFlag;
use crate::fetching::Fetching;
use crate::link::Link;
use crate::message::Message;
use crate::target::{Event, State};
use crate::verify::{self, Comparison};
use crate::wire::Frame;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use vellum_machine::Section;
use vellum_sys::mmap::PAGE_SIZE;

/// The maximum number of sections and of bytes in them. A PC with 255 vCPUs has about 300 sections
/// of 40 KiB each.
const MAX_SECTIONS: usize = 4096;
const MAX_STATE: usize = 256 << 20;

impl Receiving {
    pub(super) fn event(&mut self, told: ReceiverCommand) -> Option<Event> {
        match told {
            ReceiverCommand::Done(_) => None,
            ReceiverCommand::Listen(listener) => {
                self.listener = Some(listener);
                None
            }
            ReceiverCommand::Force => Some(Event::Force),
            ReceiverCommand::Cancel(why) => Some(Event::Cancel(why)),
            ReceiverCommand::Connected(socket) => {
                self.connected = true;
                if let Ok(link) = Link::new(socket, self.session, PAGE_SIZE as u32) {
                    if self.strangers.len() >= MAX_STRANGERS {
                        // A source speaks at once, so the one that has been silent for longest is none.
                        let oldest = (0..MAX_STRANGERS).min_by_key(|at| self.strangers[*at].1);
                        if let Some(at) = oldest {
                            self.strangers.swap_remove(at);
                        }
                    }
                    self.strangers.push((link, Instant::now()));
                }
                None
            }
        }
    }

    /// Whether new connections are accepted now.
    pub(super) fn accepts(&self) -> bool {
        self.refused.is_none_or(|since| since.elapsed() >= LOOK)
    }

    /// Accepts new connections.
    pub(super) fn accept(&mut self) {
        let Some(listener) = self.listener.as_ref().filter(|_| self.accepts()) else { return };
        let mut came = Vec::new();
        while came.len() < MAX_STRANGERS {
            match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => came.push(socket),
                Err(Errno::AGAIN) => break,
                // Without a free descriptor, for one, the listener stays readable.
                Err(_) => {
                    self.refused = Some(Instant::now());
                    break;
                }
            }
        }
        for socket in came {
            self.event(ReceiverCommand::Connected(socket));
        }
    }

    /// Checks the further connections. Their frames are a sign of life, also while pages follow the
    /// guest. While pages arrive, a lost connection is an event. If all have reached the end of the
    /// pass, the barrier is lifted.
    pub(super) fn lanes_are_cut(&mut self) -> Option<Event> {
        let lanes = &mut self.place.as_mut()?.lanes;
        if lanes.have_moved() {
            self.heard = Instant::now();
        }
        if self.target.state != State::Receiving {
            return None;
        }
        match lanes.have_ended(self.barrier.unwrap_or(0)) {
            Ok(true) => self.barrier = None,
            Ok(false) => {}
            Err(why) => return Some(self.cut(why)),
        }
        None
    }

    /// The next message of the source. Pages and state are taken meanwhile.
    pub(super) fn heard(&mut self) -> Option<Event> {
        loop {
            if self.barrier.is_some() {
                return None;
            }
            let link = self.link.as_mut()?;
            let receiving = self.target.state == State::Receiving;
            let behind = self.target.state == State::Running && self.target.lacks();
            let ready = matches!(self.target.state, State::Ready { .. });
            let taken = match link.receive() {
                Ok(None) => return None,
                Ok(Some(Frame::Message(message))) => {
                    self.heard = Instant::now();
                    if let Message::PassEnd { pass, .. } = message {
                        self.barrier = receiving.then_some(pass);
                    }
                    return Some(Event::Said(message));
                }
                Ok(Some(Frame::Run(run, data))) if receiving => match run.check(&self.regions) {
                    Ok(())
                        if self.handed
                            && self.place.as_ref().is_some_and(|place| place.is_ram(run.region)) =>
                    {
                        Err(format!("{run:?} came, which was handed over"))
                    }
                    Ok(()) if self.place.as_ref().is_some_and(|place| !place.lanes.first().holds(&run)) => {
                        Err(format!("{run:?} came, which is another connection's"))
                    }
                    Ok(()) => {
                        self.pages += u64::from(run.pages);
                        self.memory[run.region as usize].take(&run, data);
                        Ok(())
                    }
                    Err(error) => Err(error.to_string()),
                },
                // Pages that are present are not overwritten, whichever connection carries them.
                Ok(Some(Frame::Run(run, data))) if behind && (run.region as usize) < self.memory.len() => {
                    run.check(&self.regions).map_err(|error| error.to_string()).map(|()| {
                        self.memory[run.region as usize].take(&run, data);
                    })
                }
                // All pages were present already.
                Ok(Some(Frame::Run(..))) if self.postcopy.is_some() => Ok(()),
                Ok(Some(Frame::Missing(run, bits))) if receiving => match run.check(&self.regions) {
                    Ok(()) => {
                        if self.lacking.is_empty() {
                            self.lacking = self.regions.iter().map(|pages| Bits::new(*pages)).collect();
                        }
                        self.lacking[run.region as usize].add_at(run.first, &bits);
                        Ok(())
                    }
                    Err(error) => Err(error.to_string()),
                },
                Ok(Some(Frame::Sums(run, sums))) if ready => match run.check(&self.regions) {
                    Ok(()) => {
                        let sums = sums.to_vec();
                        let mut comparison = self.comparison();
                        comparison.take(&run, &sums);
                        self.comparing = Some(comparison);
                        Ok(())
                    }
                    Err(error) => Err(error.to_string()),
                },
                Ok(Some(Frame::Section(section))) if receiving => {
                    self.sections.push(Section {
                        name: section.name.to_owned(),
                        version: section.version,
                        body: section.body.to_vec(),
                    });
                    // More than any machine has: the peer tries to fill this process's memory.
                    let bytes: usize = self.sections.iter().map(|section| section.body.len()).sum();
                    if self.sections.len() > MAX_SECTIONS || bytes > MAX_STATE {
                        Err("the source sends more state than any machine has".to_owned())
                    } else {
                        Ok(())
                    }
                }
                Ok(Some(_)) => Err("the source sent pages or state out of turn".to_owned()),
                Err(error) => Err(error.to_string()),
            };
            self.heard = Instant::now();
            if let Err(why) = taken {
                return Some(self.cut(why));
            }
        }
    }

    /// The comparison so far. The guest is paused.
    pub(super) fn comparison(&mut self) -> Comparison {
        self.comparing.take().unwrap_or_else(|| {
            let touched =
                |place: &Place| verify::touched(&place.ram, place.pagemap.as_deref(), place.memory.iter());
            Comparison::new(self.place.as_ref().map(touched).unwrap_or_default())
        })
    }

    pub(super) fn cut(&mut self, why: String) -> Event {
        self.link = None;
        self.place.iter_mut().for_each(|place| place.lanes.cut());
        // The loss of one connection is the loss of all.
        self.place.iter().filter_map(|place| place.fetching.as_ref()).for_each(Fetching::cut);
        self.broken = Some(why);
        Event::Cut
    }

    /// The first message of a new connection: from a source that begins, or from one that was cut
    /// off.
    pub(super) fn stranger(&mut self) -> Option<Event> {
        let mut at = 0;
        while at < self.strangers.len() {
            let (link, since) = &mut self.strangers[at];
            let said = match link.receive() {
                Ok(None) if since.elapsed() < self.liveness => {
                    at += 1;
                    continue;
                }
                Ok(Some(Frame::Message(message))) => Some(message),
                _ => None,
            };
            let (mut link, _) = self.strangers.swap_remove(at);
            let first = matches!(said, Some(Message::Hello { .. })) && self.session.is_none();
            let again = self.session.is_some() && link.session() == self.session;
            let again = again && matches!(said, Some(Message::Query {} | Message::Abort { .. }));
            if let (Some(Message::Join { connection }), true) = (&said, self.session.is_some())
                && link.session() == self.session
                && Some(*connection) == self.faults_number
            {
                self.joined(link);
                continue;
            }
            if let (Some(Message::Join { connection }), true) = (&said, self.session.is_some())
                && link.session() == self.session
                && self.target.state == State::Receiving
                && let Some(place) = &mut self.place
            {
                // A connection with an unknown or used number is closed.
                place.lanes.join(*connection, link, &self.memory, &self.regions);
                continue;
            }
            if let Some(message) = said.filter(|_| first || again) {
                self.session = link.session();
                if first {
                    // An invalid commit flag is not shared, and WELCOME says so.
                    let mut came = link.take_descriptors().into_iter();
                    let fence = came.next().and_then(|file| CommitFlag::new(file).ok());
                    self.ram = came.next().map(File::from);
                    self.target.fenced = fence.is_some();
                    self.fence = fence.map(Arc::new);
                }
                link.admit();
                link.set_liveness(self.liveness);
                self.link = Some(link);
                self.heard = Instant::now();
                if again {
                    self.pending.push(Event::Said(message));
                    return Some(Event::Linked);
                }
                return Some(Event::Said(message));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::link::LIVENESS;
    use crate::message::{SessionId, VERSION};
    use crate::pages::{Block, Incoming, Outgoing};
    use crate::populating::Populating;
    use crate::receiver::lanes::Lanes;
    use crate::threads;
    use crate::wire::Encoder;
    use serde_json::Value;
    use vellum_kvm::memory::plan::Space;
    use vellum_kvm::memory::{Memory, MemoryConfig};
    use vellum_kvm::vm::vcpu::Throttle;
    use vellum_sys::poll::Poll;

    const SESSION: SessionId = SessionId([3; 16]);

    /// The first connection has sent its share of the missing pages and is silent. Another one
    /// still carries pages.
    #[test]
    fn pages_on_another_connection_are_a_sign_of_life_while_memory_is_missing() {
        let (mine, _machine) = threads::pair(threads::event().unwrap()).unwrap();
        let mut receiving = Receiving::new(mine, LIVENESS);
        let config = Message::Config {
            config: Value::Null,
            connections: 2,
            compression: None,
            handed: false,
            postcopy: true,
        };
        let last = Message::Final { attempt: 1, pages: 0, sections: 0, lacking: Some(1) };
        for event in [
            Event::Said(Message::Hello { versions: [VERSION; 2] }),
            Event::Said(config),
            Event::Judged(Vec::new()),
            Event::Said(last),
            Event::Restored,
            Event::Said(Message::Commit { attempt: 1 }),
            Event::Started,
        ] {
            receiving.target.step(event);
        }
        assert!(receiving.target.state == State::Running && receiving.target.lacks());

        let ram = Memory::map(Space(&[0..1 << 30, 1 << 32..1 << 40]), MemoryConfig::new(4 << 20)).unwrap();
        let slot = ram.slots()[0].clone();
        let link = |socket: UnixStream| Link::new(socket.into(), Some(SESSION), PAGE_SIZE as u32).unwrap();
        let ((_source, first), (mut source, further)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let (mut lanes, lane) = Lanes::new(2).unwrap();
        let memory = Arc::new(vec![Incoming::new(slot.clone(), true)]);
        assert!(lanes.join(1, link(further), &memory, &[slot.pages()].into()));
        lane.into_iter().for_each(|lane| drop(std::thread::spawn(|| lane.run())));

        // The second chunk is the further connection's. Its thread reports the end of the pass
        // after it has taken the page.
        let (mut encoder, mut block) = (Encoder::new(SESSION), Block::new());
        block.fill(&Outgoing::new(slot.clone(), 0, false), 512..513, 1, &mut encoder);
        source.write_all(block.bytes()).unwrap();
        source.write_all(&encoder.message(&Message::PassEnd { pass: 1, pages: 1 })).unwrap();
        let mut poll = Poll::default();
        poll.readable(lanes.descriptor());
        poll.wait(None).unwrap();

        receiving.place = Some(Place {
            memory: vec![slot],
            ram,
            pagemap: None,
            lanes,
            populating: None,
            fetching: None,
            vcpus: Throttle::new(&[]),
        });
        receiving.link = Some(link(first));
        receiving.heard = Instant::now() - 2 * LIVENESS;
        let event = receiving.next();
        assert!(matches!(event, Ok(None)) && receiving.link.is_some(), "{:?}", receiving.broken);
    }

    /// Populating takes longer than the source waits for a message. The source is told that this
    /// side is alive, and an ABORT of the source ends the wait.
    #[test]
    fn a_target_that_populates_memory_says_that_it_is_alive_and_hears_an_abort() {
        let (mine, _machine) = threads::pair(threads::event().unwrap()).unwrap();
        let mut receiving = Receiving::new(mine, LIVENESS);
        let ram = Memory::map(Space(&[0..1 << 30, 1 << 32..1 << 40]), MemoryConfig::new(4 << 20)).unwrap();
        // It never ends.
        let (_said, populating) = Populating::of_a_test();
        receiving.place = Some(Place {
            memory: ram.slots().to_vec(),
            ram,
            pagemap: None,
            lanes: Lanes::new(1).unwrap().0,
            populating: Some(populating),
            fetching: None,
            vcpus: Throttle::new(&[]),
        });
        let (source, target) = UnixStream::pair().unwrap();
        receiving.link = Some(Link::new(target.into(), Some(SESSION), PAGE_SIZE as u32).unwrap());
        let mut source = Link::new(source.into(), Some(SESSION), PAGE_SIZE as u32).unwrap();
        let heard = std::thread::spawn(move || {
            for _ in 0..2 {
                let mut poll = Poll::default();
                poll.readable(source.descriptor());
                poll.wait(None).unwrap();
                let frame = source.receive().unwrap();
                assert!(matches!(&frame, Some(Frame::Message(message)) if *message == Message::ALIVE));
            }
            source.say(&Message::Abort { why: "enough".into() }).unwrap();
            source
        });
        assert!(matches!(receiving.populated(), Ok(Ok(()))));
        assert_eq!(receiving.pending, [Event::Said(Message::Abort { why: "enough".into() })]);
        drop(heard.join().unwrap());
    }
}
