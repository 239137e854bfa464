//! One connection of a migration: a stream socket that carries frames ([`super::wire`]) in both
//! directions. It does not interpret them. A peer that neither reads nor writes for [`LIVENESS`] is
//! considered gone.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::bits::Bits;
use super::message::{Message, SessionId};
use super::wire::{self, Decoder, Encoder, Frame, HEADER, Header, Kind, MAX_MAPPED, Run, Section};
use vellum_sys::poll::Poll;
use vellum_sys::socket;
use vmm_sys_util::eventfd::EventFd;

/// How long a peer may be silent when it has to act, unless the user sets another time.
pub const LIVENESS: Duration = Duration::from_secs(10);

/// The maximum number of descriptors with the first message: a commit flag and a machine's RAM.
const MAX_DESCRIPTORS: usize = 2;

/// Why a connection cannot be used any longer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The peer or the network has closed the connection.
    #[error("the other side has closed the connection")]
    Closed,
    /// A system call has failed.
    #[error("the connection: {0}")]
    Io(#[source] io::Error),
    /// The peer reads nothing.
    #[error("the other side has taken nothing for {0:?}")]
    Silent(Duration),
    /// The received bytes are not a frame, or not the expected one.
    #[error(transparent)]
    Wire(#[from] wire::Error),
    /// Pages or state from a peer that may only send messages.
    #[error("the other side sent pages or state out of turn")]
    OutOfTurn,
    /// The sending thread was told to give up.
    #[error("given up in the middle of a frame")]
    GivenUp,
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::Closed,
            _ => Self::Io(error),
        }
    }
}

/// Tells a thread that is blocked in the middle of a frame to give up.
#[derive(Clone, Debug, Default)]
pub struct GiveUp(Arc<AtomicBool>);

impl GiveUp {
    /// From now on no link with this flag waits for its peer. This takes effect at once if the
    /// thread is woken ([`Link::set_give_up`]).
    pub fn now(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn is_asked(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A connection. Dropping it closes it.
#[derive(Debug)]
pub struct Link {
    socket: OwnedFd,
    encoder: Encoder,
    decoder: Decoder,
    /// Received bytes. Those from `taken` to `filled` have not been processed.
    input: Vec<u8>,
    taken: usize,
    filled: usize,
    /// The header of the current frame, once it has been parsed.
    header: Option<Header>,
    /// How many bytes are read at once when a header is due.
    at_once: usize,
    liveness: Duration,
    give_up: GiveUp,
    /// Wakes a thread that has to check `give_up`.
    wake: Option<Arc<EventFd>>,
    /// No send waits for the peer beyond this time.
    until: Option<Instant>,
    /// Bytes that were unsent at that time. They are sent before anything else.
    rest: Vec<u8>,
    /// Whether the peer has closed the connection, so that the last send was lost.
    closed: bool,
    /// Descriptors that arrived with messages before the link was admitted.
    descriptors: Vec<OwnedFd>,
    /// Whether pages and state are accepted, which are much larger than messages.
    admitted: bool,
    /// Bytes sent so far.
    pub sent: u64,
}

impl Link {
    /// A link over a connected socket. `session` is the session of its frames. Without it, the
    /// first frame that arrives determines the session.
    ///
    /// # Errors
    /// The socket is not a stream socket.
    pub fn new(socket: OwnedFd, session: Option<SessionId>, page: u32) -> Result<Self, Error> {
        socket::prepare_stream(&socket, LIVENESS)?;
        Ok(Self {
            socket,
            encoder: Encoder::new(session.unwrap_or(SessionId([0; 16]))),
            decoder: Decoder::new(session, page),
            input: vec![0; HEADER],
            taken: 0,
            filled: 0,
            header: None,
            at_once: HEADER,
            liveness: LIVENESS,
            give_up: GiveUp::default(),
            wake: None,
            until: None,
            rest: Vec::new(),
            closed: false,
            descriptors: Vec::new(),
            admitted: false,
            sent: 0,
        })
    }

    /// Sets how long the peer may be silent.
    pub(crate) fn set_liveness(&mut self, liveness: Duration) {
        self.liveness = liveness;
        socket::set_liveness(&self.socket, liveness);
    }

    /// Accepts pages and state from now on. Until then a peer cannot make this process allocate
    /// more than a message needs.
    pub(crate) fn admit(&mut self) {
        self.admitted = true;
    }

    /// From now on, reads up to `bytes` bytes at once, so that a frame of that size takes one
    /// system call. Before the caller polls the descriptor, it must check [`Link::has_more`].
    pub(crate) fn read_ahead(&mut self, bytes: usize) {
        self.at_once = bytes.max(HEADER);
    }

    /// Whether bytes have been read that [`Link::receive`] has not returned yet. Polling the
    /// descriptor does not report them.
    pub(crate) fn has_more(&self) -> bool {
        self.taken < self.filled
    }

    /// Lets a blocked [`Link::send`] end when `give_up` is set and `wake` becomes readable.
    pub(crate) fn set_give_up(&mut self, give_up: GiveUp, wake: Arc<EventFd>) {
        (self.give_up, self.wake) = (give_up, Some(wake));
    }

    /// Sets the time until which [`Link::send`] waits for a peer that reads nothing. Unsent bytes
    /// are kept and sent first next time, so the current frame is not lost.
    pub(crate) fn set_until(&mut self, until: Option<Instant>) {
        self.until = until;
    }

    /// Duplicates the socket's descriptor, so that another thread can shut it down.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn duplicate(&self) -> io::Result<OwnedFd> {
        self.socket.try_clone()
    }

    /// The session of its frames, once it is known.
    pub fn session(&self) -> Option<SessionId> {
        self.decoder.session()
    }

    /// The encoder, which numbers the sent frames.
    pub fn encoder(&mut self) -> &mut Encoder {
        &mut self.encoder
    }

    /// The descriptor, for polling.
    pub fn descriptor(&self) -> &OwnedFd {
        &self.socket
    }

    /// Sends a message.
    ///
    /// # Errors
    /// As [`Link::send`].
    pub fn say(&mut self, message: &Message) -> Result<(), Error> {
        let frame = self.encoder.message(message);
        self.send(&frame)
    }

    /// Sends the first message with descriptors. They arrive only over a Unix socket.
    ///
    /// # Errors
    /// As [`Link::send`].
    pub(crate) fn say_with(
        &mut self,
        message: &Message,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), Error> {
        let frame = self.encoder.message(message);
        let sent = socket::send_with(&self.socket, &frame, descriptors)?;
        self.sent += sent as u64;
        self.send(&frame[sent..])
    }

    /// Takes the descriptors that arrived with the first message.
    pub(crate) fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.descriptors)
    }

    /// Sends a section of the state.
    ///
    /// # Errors
    /// As [`Link::send`].
    pub fn section(&mut self, section: &Section<'_>) -> Result<(), Error> {
        let frame = self.encoder.section(section);
        self.send(&frame)
    }

    /// Sends the map of the missing pages in memslot `region`, which has `pages` pages. Parts
    /// without missing pages are not sent.
    ///
    /// # Errors
    /// As [`Link::send`].
    pub(crate) fn send_map(&mut self, region: u32, bits: &Bits, pages: u64) -> Result<(), Error> {
        let words = bits.words();
        for (at, words) in (0..).step_by(MAX_MAPPED as usize).zip(words.chunks(MAX_MAPPED as usize / 64)) {
            if words.iter().all(|word| *word == 0) {
                continue;
            }
            let run = Run { region, pass: 1, first: at, pages: (pages - at).min(MAX_MAPPED.into()) as u32 };
            let frame = self.encoder.missing(&run, words);
            self.send(&frame)?;
        }
        Ok(())
    }

    /// Sends whole frames, or as much of them as the peer takes [in time](Link::set_until).
    ///
    /// A peer that closed the link may have sent its reason before. The first failure for this
    /// reason is therefore not reported here. [`Link::receive`] returns the peer's last messages
    /// and then the error.
    ///
    /// # Errors
    /// The peer is gone, or reads nothing for too long.
    pub fn send(&mut self, bytes: &[u8]) -> Result<(), Error> {
        match self.send_or_keep(bytes) {
            Err(Error::Closed) if !self.closed => {
                self.closed = true;
                Ok(())
            }
            result => result,
        }
    }

    fn send_or_keep(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if !self.rest.is_empty() {
            let rest = std::mem::take(&mut self.rest);
            let sent = self.push(&rest)?;
            if sent < rest.len() {
                self.rest = [&rest[sent..], bytes].concat();
                return Ok(());
            }
        }
        let sent = self.push(bytes)?;
        self.rest.extend_from_slice(&bytes[sent..]);
        Ok(())
    }

    /// Whether the kernel has taken all bytes.
    pub(crate) fn is_sent(&self) -> bool {
        self.rest.is_empty()
    }

    /// Sends as much of `bytes` as the peer takes. Returns how much that was.
    fn push(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        let (mut done, mut wake) = (0, self.wake.as_deref());
        while done < bytes.len() {
            match socket::send_some(&self.socket, &bytes[done..]) {
                Ok(count) => {
                    done += count;
                    self.sent += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
                    if left.is_some_and(|left| left.is_zero()) {
                        return Ok(done);
                    }
                    let patience = left.map_or(self.liveness, |left| left.min(self.liveness));
                    let mut poll = Poll::default();
                    poll.writable(self.descriptor());
                    wake.iter().for_each(|wake| poll.readable(*wake));
                    if !poll.wait(Some(patience))? && !poll.is_ready(self.descriptor()) {
                        if patience < self.liveness {
                            continue;
                        }
                        return Err(Error::Silent(self.liveness));
                    }
                    if wake.is_some_and(|wake| poll.is_ready(wake)) {
                        if self.give_up.is_asked() {
                            return Err(Error::GivenUp);
                        }
                        // The event stays readable until its thread reads it, which is after this
                        // frame.
                        wake = None;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(done)
    }

    /// The next frame, or `None` if it has not arrived completely.
    ///
    /// # Errors
    /// The peer is gone, or the received bytes are not a frame.
    pub fn receive(&mut self) -> Result<Option<Frame<'_>>, Error> {
        let (header, payload) = loop {
            let due = self.header.map_or(HEADER, |header| header.len as usize);
            if self.filled - self.taken >= due {
                let part = self.taken..self.taken + due;
                self.taken = part.end;
                match self.header.take() {
                    Some(header) => break (header, part),
                    None => {
                        let bytes = self.input[part].try_into().expect("as many as a header has");
                        let header = self.decoder.header(bytes)?;
                        if !self.admitted && header.kind != Kind::Message {
                            return Err(Error::OutOfTurn);
                        }
                        self.header = Some(header);
                        continue;
                    }
                }
            }
            if self.taken == self.filled {
                (self.taken, self.filled) = (0, 0);
            }
            // Reads no more than the payload, so that large payloads need not be moved.
            let most = if self.admitted && self.header.is_none() { self.at_once } else { due };
            if self.input.len() < self.taken + most {
                self.input.copy_within(self.taken..self.filled, 0);
                (self.taken, self.filled) = (0, self.filled - self.taken);
                // Grows to the announced size, which is bounded by the kind of the frame.
                self.input.resize(self.input.len().max(most), 0);
            }
            let mut came = Vec::new();
            let buffer = &mut self.input[self.filled..self.taken + most];
            let received = match self.admitted {
                true => socket::receive_some(&self.socket, buffer),
                false => socket::receive(&self.socket, buffer, &mut came),
            };
            // Surplus descriptors are closed.
            came.truncate(MAX_DESCRIPTORS - self.descriptors.len());
            self.descriptors.append(&mut came);
            match received {
                Ok(0) => return Err(Error::Closed),
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return if self.closed { Err(Error::Closed) } else { Ok(None) };
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        };
        // Replies use the session of the first frame.
        if let Some(session) = self.decoder.session() {
            self.encoder.set_session(session);
        }
        Ok(Some(self.decoder.payload(&header, &self.input[payload])?))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    const SESSION: SessionId = SessionId([3; 16]);

    fn pair() -> (UnixStream, Link) {
        let (there, here) = UnixStream::pair().unwrap();
        (there, Link::new(here.into(), None, 4096).unwrap())
    }

    #[test]
    fn frames_come_whole_however_they_are_cut() {
        let (mut there, mut link) = pair();
        let frame = Encoder::new(SESSION).message(&Message::Hello { versions: [1, 1] });
        for part in frame.chunks(7) {
            assert!(link.receive().unwrap().is_none());
            there.write_all(part).unwrap();
        }
        let hello = Message::Hello { versions: [1, 1] };
        assert_eq!(link.receive().unwrap(), Some(Frame::Message(hello)));
        assert_eq!(link.session(), Some(SESSION));
        drop(there);
        assert!(matches!(link.receive(), Err(Error::Closed)));
    }

    /// Bytes read ahead are returned wherever a frame ends in them. No frame is returned before it
    /// is complete.
    #[test]
    fn what_is_read_ahead_is_not_lost() {
        let mut encoder = Encoder::new(SESSION);
        let bodies: Vec<Vec<u8>> = (0..40).map(|at: u8| vec![at; usize::from(at) * 97]).collect();
        let all: Vec<u8> = bodies
            .iter()
            .flat_map(|body| encoder.section(&Section { name: "vcpu0", version: 1, body }))
            .collect();
        for at_once in [HEADER, 100, 1000, 8192] {
            for part in [1, 13, HEADER, 1000, 7777, all.len()] {
                let (mut there, mut link) = pair();
                link.admit();
                link.read_ahead(at_once);
                let mut came = Vec::new();
                for bytes in all.chunks(part) {
                    there.write_all(bytes).unwrap();
                    while let Some(frame) = link.receive().unwrap() {
                        let Frame::Section(section) = frame else { panic!("{frame:?}") };
                        came.push(section.body.to_vec());
                    }
                }
                assert_eq!((came, link.has_more()), (bodies.clone(), false), "{at_once} {part}");
            }
        }
    }

    /// A header alone would make the other side allocate the announced size.
    #[test]
    fn nobody_sends_state_who_was_not_admitted() {
        let body = vec![0; 1 << 20];
        let frame = Encoder::new(SESSION).section(&Section { name: "vcpu0", version: 1, body: &body });
        for admitted in [false, true] {
            let (mut there, mut link) = pair();
            if admitted {
                link.admit();
            }
            there.write_all(&frame[..HEADER]).unwrap();
            let received = link.receive().map(|frame| frame.is_some());
            assert_eq!(matches!(received, Err(Error::OutOfTurn)), !admitted, "{received:?}");
            assert_eq!(link.input.len() > HEADER, admitted);
        }
    }

    #[test]
    fn a_peer_that_takes_nothing_is_given_up() {
        let (_there, mut link) = pair();
        link.set_liveness(Duration::from_millis(1));
        let all = vec![0; 64 << 20];
        assert!(matches!(link.send(&all), Err(Error::Silent(_))));
    }

    #[test]
    fn the_last_words_of_a_peer_are_heard_by_one_who_speaks() {
        let (mut there, mut link) = pair();
        let abort = Message::Abort { why: "the disk is gone".into() };
        there.write_all(&Encoder::new(SESSION).message(&abort)).unwrap();
        drop(there);
        link.say(&Message::Query {}).unwrap();
        assert_eq!(link.receive().unwrap(), Some(Frame::Message(abort)));
        assert!(matches!(link.receive(), Err(Error::Closed)));
        assert!(matches!(link.say(&Message::Query {}), Err(Error::Closed)));
    }

    /// A peer that reads nothing for a while loses nothing that was sent meanwhile.
    #[test]
    fn what_is_not_taken_in_time_goes_first_later() {
        use std::io::Read;
        let (mut there, mut link) = pair();
        link.set_until(Some(Instant::now()));
        let all: Vec<u8> = (0..8u32 << 20).map(|at| (at / 7) as u8).collect();
        link.send(&all[..6 << 20]).unwrap();
        link.send(&all[6 << 20..7 << 20]).unwrap();
        assert!(link.sent < 6 << 20, "{}", link.sent);
        link.set_until(None);
        let reader = std::thread::spawn(move || {
            let mut came = vec![0; 8 << 20];
            there.read_exact(&mut came).unwrap();
            came
        });
        link.send(&all[7 << 20..]).unwrap();
        assert!(reader.join().unwrap() == all && link.sent == 8 << 20);
    }
}
