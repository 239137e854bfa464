//! Messages, state and pages as bytes, and back. No I/O: whoever reads a link reads a header, allocates at most what
//! [`Header::len`] says, which the header's kind has bounded, and hands the payload over.
//!
//! A frame is a header and a payload, everything in little-endian order:
//!
//! ```text
//! header, 48 bytes                                  payload of each kind
//!   0  "VLMG"                                         message   JSON of a Message
//!   4  u16 kind                                       section   u16 length of the name, u16 version, the name, JSON
//!   6  u16 0                                          pages     a run (24 bytes), then the pages
//!   8  u32 bytes of payload                           zeroes    a run
//!  12  u32 CRC32C of the payload                      sums      a run, then the sum of each page, 8 bytes
//!  16  u64 number of the frame on its connection    run, 24 bytes
//!  24  the session, 16 bytes                          0  u32 region
//!  40  u32 0                                          4  u32 pass
//!  44  u32 CRC32C of the 44 bytes before              8  u64 first page of the region
//!                                                    16  u32 pages
//!                                                    20  u32 0
//! missing, from version 3 on: a run, then a bit a page in words of 64, set where the page is missing; the rest of the last word is 0
//! wanted, from version 3 on: a run
//! packed, from version 2 on: a run, u32 CRC32C of what the payload would be as `pages`, u32 0, the pages as a frame of Zstandard
//! ```
//!
//! Frames are numbered on each connection from 0: one that is lost, repeated or out of its place is an error of the link, as is
//! one whose sums are wrong. What a peer sends is hostile: every length is checked here, every page against the regions of the
//! machine ([`Run::check`]).

use crc_fast::CrcAlgorithm::Crc32Iscsi;
use crc_fast::{Digest, checksum};

use super::message::{Message, SessionId};
use super::pack::Unpacker;

/// Bytes of a header.
pub const HEADER: usize = 48;
/// Bytes of a run.
pub const RUN: usize = 24;
/// The most pages that one frame carries; as bytes of 4 KiB pages they stay in the cache between being copied, summed and sent.
pub const MAX_PAGES: u32 = 64;
/// Bytes of the sum of one page, and the most sums that one frame carries.
pub const SUM: usize = 8;
/// As above.
pub(crate) const MAX_SUMS: u32 = 512;
/// Bytes between a run and its packed pages: the sum of both as they are restored.
pub(crate) const PACKED: usize = 8;

/// The most pages of which one frame says whether they are missing.
pub const MAX_MAPPED: u32 = 1 << 15;

const MAGIC: [u8; 4] = *b"VLMG";

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A [`Message`].
    Message,
    /// A part of the machine's state.
    Section,
    /// A [`Run`] and its pages.
    Pages,
    /// A [`Run`] of pages that are all zero.
    Zeroes,
    /// A [`Run`] and a sum of each of its pages, to be compared.
    Sums,
    /// A [`Run`] and its pages [compressed](super::pack).
    Packed,
    /// A [`Run`] and which of its pages are missing, a bit each.
    Missing,
    /// A [`Run`] of pages that somebody waits for.
    Wanted,
}

impl Kind {
    const ALL: [(u16, Self); 8] = [
        (1, Self::Message),
        (2, Self::Section),
        (3, Self::Pages),
        (4, Self::Zeroes),
        (5, Self::Sums),
        (6, Self::Packed),
        (7, Self::Missing),
        (8, Self::Wanted),
    ];

    fn number(self) -> u16 {
        Self::ALL.iter().find(|(_, kind)| *kind == self).map_or(0, |(number, _)| *number)
    }

    /// The most bytes of payload.
    pub fn most(self, page: u32) -> u32 {
        match self {
            // A list of misfits is the longest.
            Self::Message => 1 << 20,
            // vCPUs take some 40 KiB each; the largest machine has hundreds.
            Self::Section => 64 << 20,
            Self::Pages => RUN as u32 + MAX_PAGES * page,
            Self::Zeroes | Self::Wanted => RUN as u32,
            Self::Missing => RUN as u32 + MAX_MAPPED / 8,
            Self::Sums => RUN as u32 + MAX_SUMS * SUM as u32,
            // Those that do not get shorter go as they are.
            Self::Packed => (RUN + PACKED) as u32 + MAX_PAGES * page,
        }
    }
}

/// Why bytes are no frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Something else speaks.
    #[error("the peer does not speak Vellum's migration protocol")]
    Magic,
    /// A header that was changed on its way.
    #[error("a header's checksum is wrong: the link has changed it")]
    HeaderSum,
    /// A payload that was changed on its way.
    #[error("the checksum of a payload of {0} bytes is wrong: the link has changed it")]
    PayloadSum(usize),
    /// A frame that is not the next.
    #[error("frame {found} came where frame {expected} was due: one was lost, or came twice")]
    Sequence {
        /// Which was due.
        expected: u64,
        /// Which came.
        found: u64,
    },
    /// Another migration's.
    #[error("a frame of migration {found:?} came on a link of {expected:?}")]
    Session {
        /// Which was due.
        expected: SessionId,
        /// Which came.
        found: SessionId,
    },
    /// No kind of this version.
    #[error("a frame is of kind {0}, which this version does not know")]
    Kind(u16),
    /// More than its kind allows.
    #[error("a frame of {kind:?} has {len} bytes, where {most} are allowed")]
    TooLong {
        /// What it carries.
        kind: Kind,
        /// How long it is.
        len: u32,
        /// How long it may be.
        most: u32,
    },
    /// A payload that contradicts itself.
    #[error("a payload of {0:?} is malformed: {1}")]
    Malformed(Kind, String),
    /// Pages that the machine does not have.
    #[error("pages {first} to {last} of region {region} came, and the machine has {has}")]
    Outside {
        /// The region that was named.
        region: u32,
        /// The first page.
        first: u64,
        /// The page behind the last.
        last: u64,
        /// How many pages that region has; 0 where there is no such region.
        has: u64,
    },
}

/// What precedes a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the payload is.
    pub kind: Kind,
    /// Its bytes, at most [`Kind::most`].
    pub len: u32,
    sum: u32,
    sequence: u64,
    session: SessionId,
}

impl Header {
    fn bytes(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&self.kind.number().to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.sum.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..40].copy_from_slice(&self.session.0);
        let sum = sum(&bytes[..44]);
        bytes[44..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }
}

fn sum(bytes: &[u8]) -> u32 {
    checksum(Crc32Iscsi, bytes) as u32
}

fn word<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("the caller has checked the length")
}

/// The CRC32C of a payload that is made part by part.
#[derive(Clone, Debug)]
pub struct Sum(Digest);

impl Sum {
    /// Of no bytes.
    pub fn new() -> Self {
        Self(Digest::new(Crc32Iscsi))
    }

    /// `part` follows what has been added so far.
    pub fn add(&mut self, part: &[u8]) {
        self.0.update(part);
    }

    /// What has been added up.
    pub fn finish(&self) -> u32 {
        self.0.finalize() as u32
    }
}

impl Default for Sum {
    fn default() -> Self {
        Self::new()
    }
}

/// One connection's sending half: numbers the frames.
#[derive(Clone, Debug)]
pub struct Encoder {
    session: SessionId,
    next: u64,
}

impl Encoder {
    /// A connection of `session` on which nothing has been sent.
    pub fn new(session: SessionId) -> Self {
        Self { session, next: 0 }
    }

    /// Makes the frames that follow frames of `session`: a target learns it with the first frame that comes.
    pub fn set_session(&mut self, session: SessionId) {
        self.session = session;
    }

    /// The header of the next frame, whose payload is `parts` one after the other.
    pub fn header(&mut self, kind: Kind, parts: &[&[u8]]) -> [u8; HEADER] {
        let mut sum = Sum::new();
        parts.iter().for_each(|part| sum.add(part));
        self.header_of(kind, parts.iter().map(|part| part.len()).sum::<usize>() as u32, &sum)
    }

    /// The header of the next frame, whose payload has `len` bytes and this sum: for those who have summed it already.
    pub(crate) fn header_of(&mut self, kind: Kind, len: u32, sum: &Sum) -> [u8; HEADER] {
        let sequence = self.next;
        self.next += 1;
        Header { kind, len, sum: sum.finish(), sequence, session: self.session }.bytes()
    }

    /// `message` as a frame.
    pub fn message(&mut self, message: &Message) -> Vec<u8> {
        let payload = serde_json::to_vec(message).expect("plain data");
        let mut frame = self.header(Kind::Message, &[&payload]).to_vec();
        frame.extend_from_slice(&payload);
        frame
    }

    /// Sums of the pages of `run` as a frame.
    pub fn sums(&mut self, run: &Run, sums: &[u8]) -> Vec<u8> {
        let run = run.bytes();
        [&self.header(Kind::Sums, &[&run, sums])[..], &run, sums].concat()
    }

    /// Which pages of `run` are missing as a frame, a bit each.
    pub fn missing(&mut self, run: &Run, bits: &[u64]) -> Vec<u8> {
        let (run, bits) = (run.bytes(), bits.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>());
        [&self.header(Kind::Missing, &[&run, &bits])[..], &run, &bits].concat()
    }

    /// That somebody waits for the pages of `run` as a frame.
    pub fn wanted(&mut self, run: &Run) -> Vec<u8> {
        let run = run.bytes();
        [&self.header(Kind::Wanted, &[&run])[..], &run].concat()
    }

    /// A part of the state as a frame.
    pub fn section(&mut self, section: &Section<'_>) -> Vec<u8> {
        let mut payload = Vec::with_capacity(4 + section.name.len() + section.body.len());
        payload.extend_from_slice(&(section.name.len() as u16).to_le_bytes());
        payload.extend_from_slice(&section.version.to_le_bytes());
        payload.extend_from_slice(section.name.as_bytes());
        payload.extend_from_slice(section.body);
        let mut frame = self.header(Kind::Section, &[&payload]).to_vec();
        frame.append(&mut payload);
        frame
    }
}

/// One connection's receiving half: knows which frame is next.
#[derive(Clone, Debug)]
pub struct Decoder {
    session: Option<SessionId>,
    next: u64,
    page: u32,
    unpacker: Unpacker,
}

impl Decoder {
    /// A connection on which nothing has come. Its first frame says which session it is of, unless `session` does. Pages are of
    /// `page` bytes.
    pub fn new(session: Option<SessionId>, page: u32) -> Self {
        Self { session, next: 0, page, unpacker: Unpacker::new() }
    }

    /// The session, once it is known.
    pub fn session(&self) -> Option<SessionId> {
        self.session
    }

    /// Reads the header of the next frame.
    ///
    /// # Errors
    /// Where it is none, or not the next of this session. The link is of no use afterwards.
    pub fn header(&mut self, bytes: &[u8; HEADER]) -> Result<Header, Error> {
        if bytes[..4] != MAGIC {
            return Err(Error::Magic);
        }
        if u32::from_le_bytes(word(bytes, 44)) != sum(&bytes[..44]) {
            return Err(Error::HeaderSum);
        }
        let number = u16::from_le_bytes(word(bytes, 4));
        let kind = Kind::ALL.iter().find(|(known, _)| *known == number);
        let kind = kind.map(|(_, kind)| *kind).ok_or(Error::Kind(number))?;
        if bytes[6..8] != [0; 2] || bytes[40..44] != [0; 4] {
            return Err(Error::Malformed(kind, "a reserved field of its header is not 0".into()));
        }
        let header = Header {
            kind,
            len: u32::from_le_bytes(word(bytes, 8)),
            sum: u32::from_le_bytes(word(bytes, 12)),
            sequence: u64::from_le_bytes(word(bytes, 16)),
            session: SessionId(word(bytes, 24)),
        };
        let expected = *self.session.get_or_insert(header.session);
        if header.session != expected {
            return Err(Error::Session { expected, found: header.session });
        }
        if header.sequence != self.next {
            return Err(Error::Sequence { expected: self.next, found: header.sequence });
        }
        let most = kind.most(self.page);
        if header.len > most {
            return Err(Error::TooLong { kind, len: header.len, most });
        }
        self.next += 1;
        Ok(header)
    }

    /// Reads the payload that belongs to `header`.
    ///
    /// # Errors
    /// Where it was changed on its way, or contradicts itself.
    pub fn payload<'a>(&'a mut self, header: &Header, payload: &'a [u8]) -> Result<Frame<'a>, Error> {
        if payload.len() != header.len as usize || sum(payload) != header.sum {
            return Err(Error::PayloadSum(payload.len()));
        }
        let malformed = |what: String| Error::Malformed(header.kind, what);
        match header.kind {
            Kind::Message => serde_json::from_slice(payload)
                .map(|message: Message| Frame::Message(message.shown()))
                .map_err(|error| malformed(error.to_string())),
            Kind::Section => section(payload).map(Frame::Section).map_err(malformed),
            Kind::Pages | Kind::Zeroes | Kind::Sums | Kind::Wanted => {
                let (run, data) = run(payload).map_err(malformed)?;
                let each = match header.kind {
                    Kind::Pages => u64::from(self.page),
                    Kind::Sums => SUM as u64,
                    _ => 0,
                };
                if data.len() as u64 != u64::from(run.pages) * each {
                    return Err(malformed(format!("{} bytes for {} pages", data.len(), run.pages)));
                }
                Ok(match header.kind {
                    Kind::Pages => Frame::Run(run, Some(data)),
                    Kind::Sums => Frame::Sums(run, data),
                    Kind::Wanted => Frame::Wanted(run),
                    _ => Frame::Run(run, None),
                })
            }
            Kind::Missing => {
                let (run, data) = run(payload).map_err(malformed)?;
                let words = data.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
                let bits: Vec<u64> = words.collect();
                if run.pages > MAX_MAPPED || data.len() as u64 != u64::from(run.pages.div_ceil(64)) * 8 {
                    return Err(malformed(format!(
                        "{} bytes for a bit each of {} pages",
                        data.len(),
                        run.pages
                    )));
                }
                let beyond = bits.last().map_or(0, |last| last & !(u64::MAX >> ((64 - run.pages % 64) % 64)));
                if beyond != 0 || !run.first.is_multiple_of(64) {
                    return Err(malformed("a bit of no page, or a first page that is none of 64".into()));
                }
                Ok(Frame::Missing(run, bits))
            }
            Kind::Packed => {
                let (run, data) = run(payload).map_err(malformed)?;
                let Some((head, packed)) = data.split_first_chunk::<PACKED>() else {
                    return Err(malformed(format!("{} bytes behind a run", data.len())));
                };
                if run.pages > MAX_PAGES || head[4..] != [0; 4] {
                    return Err(malformed(format!("{} pages, or a reserved field that is not 0", run.pages)));
                }
                let bytes = run.pages as usize * self.page as usize;
                let pages = self.unpacker.unpack(packed, bytes).map_err(malformed)?;
                let mut restored = Sum::new();
                [&payload[..RUN], pages].into_iter().for_each(|part| restored.add(part));
                if restored.finish() != u32::from_le_bytes(word(head, 0)) {
                    return Err(Error::PayloadSum(RUN + bytes));
                }
                Ok(Frame::Run(run, Some(pages)))
            }
        }
    }
}

/// A frame's payload.
#[derive(Debug, PartialEq)]
pub enum Frame<'a> {
    /// A message.
    Message(Message),
    /// A part of the state.
    Section(Section<'a>),
    /// Pages with their content; all zero where there is none.
    Run(Run, Option<&'a [u8]>),
    /// Pages with a sum of each.
    Sums(Run, &'a [u8]),
    /// Pages, and which of them are missing, a bit each: as many words as they need, and no bit beyond them.
    Missing(Run, Vec<u64>),
    /// Pages that somebody waits for.
    Wanted(Run),
}

impl Frame<'_> {
    /// What it is, for whoever did not expect it.
    pub fn name(&self) -> String {
        match self {
            Self::Message(message) => message.name(),
            Self::Section(_) => "a part of the state".into(),
            Self::Run(..) => "pages".into(),
            Self::Sums(..) => "sums of pages".into(),
            Self::Missing(..) => "pages that are missing".into(),
            Self::Wanted(_) => "pages that it waits for".into(),
        }
    }
}

/// A part of the state: which, in which version, and its JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section<'a> {
    /// Its name: `vcpu0`, `irqchip`, `disk1`.
    pub name: &'a str,
    /// The version that its fields are of.
    pub version: u16,
    /// The state.
    pub body: &'a [u8],
}

fn section(payload: &[u8]) -> Result<Section<'_>, String> {
    if payload.len() < 4 {
        return Err(format!("{} bytes", payload.len()));
    }
    let (len, version) = (u16::from_le_bytes(word(payload, 0)), u16::from_le_bytes(word(payload, 2)));
    let (name, body) =
        payload[4..].split_at_checked(len.into()).ok_or_else(|| format!("a name of {len} bytes"))?;
    let name = std::str::from_utf8(name).map_err(|error| format!("its name: {error}"))?;
    Ok(Section { name, version, body })
}

/// Pages of one region of memory, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Which region, by its place in the configuration.
    pub region: u32,
    /// In which pass over memory they are sent, from 1.
    pub pass: u32,
    /// The first, from the region's start.
    pub first: u64,
    /// How many, at least one.
    pub pages: u32,
}

impl Run {
    /// As it stands in a payload.
    pub fn bytes(&self) -> [u8; RUN] {
        let mut bytes = [0; RUN];
        bytes[..4].copy_from_slice(&self.region.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.pass.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.first.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.pages.to_le_bytes());
        bytes
    }

    /// Checks it against `regions`, the pages of each.
    ///
    /// # Errors
    /// Where it is not inside of one.
    pub fn check(&self, regions: &[u64]) -> Result<(), Error> {
        let has = regions.get(self.region as usize).copied().unwrap_or(0);
        let last = self.first.saturating_add(self.pages.into());
        if last > has {
            return Err(Error::Outside { region: self.region, first: self.first, last, has });
        }
        Ok(())
    }
}

fn run(payload: &[u8]) -> Result<(Run, &[u8]), String> {
    if payload.len() < RUN {
        return Err(format!("{} bytes", payload.len()));
    }
    let run = Run {
        region: u32::from_le_bytes(word(payload, 0)),
        pass: u32::from_le_bytes(word(payload, 4)),
        first: u64::from_le_bytes(word(payload, 8)),
        pages: u32::from_le_bytes(word(payload, 16)),
    };
    if payload[20..RUN] != [0; 4] {
        return Err("a reserved field is not 0".into());
    }
    if run.pages == 0 || run.pass == 0 {
        return Err("no pages, or of no pass".into());
    }
    Ok((run, &payload[RUN..]))
}

#[cfg(test)]
mod tests;
