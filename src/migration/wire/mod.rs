//! Messages, state and pages as bytes, and back. No I/O: the reader of a link reads a header and
//! allocates at most [`Header::len`] bytes, which is bounded by the header's kind. It then passes
//! the payload here.
//!
//! A frame is a header and a payload. All numbers are little-endian:
//!
//! ```text
//! header, 48 bytes
//!   0  "VLMG"
//!   4  u16 kind
//!   6  u16 0
//!   8  u32 bytes of payload
//!  12  u32 CRC32C of the payload
//!  16  u64 number of the frame on its connection
//!  24  the session, 16 bytes
//!  40  u32 0
//!  44  u32 CRC32C of the 44 bytes before
//!
//! run, 24 bytes
//!   0  u32 region
//!   4  u32 pass
//!   8  u64 first page of the region
//!  16  u32 pages
//!  20  u32 0
//!
//! payload of each kind
//!   message   JSON of a Message
//!   section   u16 length of the name, u16 version, the name, JSON
//!   pages     a run, then the pages
//!   zeroes    a run
//!   sums      a run, then the checksum of each page, 8 bytes
//!   packed    from version 2 on: a run, u32 CRC32C of the equivalent `pages` payload, u32 0,
//!             the pages as a Zstandard frame
//!   missing   from version 3 on: a run, then a bitmap in 64-bit words; a bit is set where the page
//!             is missing, and unused bits of the last word are 0
//!   wanted    from version 3 on: a run
//! ```
//!
//! Frames are numbered on each connection from 0. A frame that is lost, repeated or out of order is
//! a link error, and so is a wrong checksum. Peers are hostile: this file checks every length, and
//! checks every page against the machine's regions ([`Run::check`]).

use crc_fast::CrcAlgorithm::Crc32Iscsi;
use crc_fast::{Digest, checksum};

use super::message::{Message, SessionId};
use super::pack::Unpacker;

/// The size of a header in bytes.
pub const HEADER: usize = 48;
/// The size of a run in bytes.
pub const RUN: usize = 24;
/// The maximum number of pages in one frame. 64 pages of 4 KiB stay in the cache while they are
/// copied, checksummed and sent.
pub const MAX_PAGES: u32 = 64;
/// The size of one page's checksum in bytes.
pub const SUM: usize = 8;
/// The maximum number of checksums in one frame.
pub(crate) const MAX_SUMS: u32 = 512;
/// Bytes between a run and its packed pages. They contain the checksum of the run and the unpacked
/// pages.
pub(crate) const PACKED: usize = 8;

/// The maximum number of pages in one map of missing pages.
pub const MAX_MAPPED: u32 = 1 << 15;

const MAGIC: [u8; 4] = *b"VLMG";

/// The contents of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A [`Message`].
    Message,
    /// A section of the machine's state.
    Section,
    /// A [`Run`] and its pages.
    Pages,
    /// A [`Run`] of zero pages.
    Zeroes,
    /// A [`Run`] and the checksum of each page, to be compared.
    Sums,
    /// A [`Run`] and its pages [compressed](super::pack).
    Packed,
    /// A [`Run`] and a bitmap of its missing pages.
    Missing,
    /// A [`Run`] of pages that the peer waits for.
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

    /// The maximum size of the payload in bytes.
    pub fn most(self, page: u32) -> u32 {
        match self {
            // A list of misfits is the longest message.
            Self::Message => 1 << 20,
            // A vCPU takes about 40 KiB, and the largest machines have hundreds.
            Self::Section => 64 << 20,
            Self::Pages => RUN as u32 + MAX_PAGES * page,
            Self::Zeroes | Self::Wanted => RUN as u32,
            Self::Missing => RUN as u32 + MAX_MAPPED / 8,
            Self::Sums => RUN as u32 + MAX_SUMS * SUM as u32,
            // Pages that do not shrink are sent uncompressed.
            Self::Packed => (RUN + PACKED) as u32 + MAX_PAGES * page,
        }
    }
}

/// Why bytes are not a valid frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The peer speaks another protocol.
    #[error("the peer does not speak Vellum's migration protocol")]
    Magic,
    /// A corrupted header.
    #[error("a header's checksum is wrong: the link has changed it")]
    HeaderSum,
    /// A corrupted payload.
    #[error("the checksum of a payload of {0} bytes is wrong: the link has changed it")]
    PayloadSum(usize),
    /// A frame out of order.
    #[error("frame {found} came where frame {expected} was due: one was lost, or came twice")]
    Sequence {
        /// The expected number.
        expected: u64,
        /// The received number.
        found: u64,
    },
    /// A frame of another migration.
    #[error("a frame of migration {found:?} came on a link of {expected:?}")]
    Session {
        /// The expected session.
        expected: SessionId,
        /// The received session.
        found: SessionId,
    },
    /// A kind that this version does not know.
    #[error("a frame is of kind {0}, which this version does not know")]
    Kind(u16),
    /// A payload longer than its kind allows.
    #[error("a frame of {kind:?} has {len} bytes, where {most} are allowed")]
    TooLong {
        /// The kind of the frame.
        kind: Kind,
        /// Its length in bytes.
        len: u32,
        /// The maximum length in bytes.
        most: u32,
    },
    /// An inconsistent payload.
    #[error("a payload of {0:?} is malformed: {1}")]
    Malformed(Kind, String),
    /// Pages that the machine does not have.
    #[error("pages {first} to {last} of region {region} came, and the machine has {has}")]
    Outside {
        /// The region of the run.
        region: u32,
        /// The first page.
        first: u64,
        /// The page after the last.
        last: u64,
        /// The number of pages in that region. 0 if there is no such region.
        has: u64,
    },
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The kind of the payload.
    pub kind: Kind,
    /// The size of the payload in bytes, at most [`Kind::most`].
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

/// The CRC32C of a payload that is built in parts.
#[derive(Clone, Debug)]
pub struct Sum(Digest);

impl Sum {
    /// The checksum of no bytes.
    pub fn new() -> Self {
        Self(Digest::new(Crc32Iscsi))
    }

    /// Appends `part`.
    pub fn add(&mut self, part: &[u8]) {
        self.0.update(part);
    }

    /// The checksum of all parts so far.
    pub fn finish(&self) -> u32 {
        self.0.finalize() as u32
    }
}

impl Default for Sum {
    fn default() -> Self {
        Self::new()
    }
}

/// The sending half of one connection. It numbers the frames.
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

    /// Sets the session of later frames. A target learns it from the first frame that arrives.
    pub fn set_session(&mut self, session: SessionId) {
        self.session = session;
    }

    /// The header of the next frame, whose payload consists of `parts`.
    pub fn header(&mut self, kind: Kind, parts: &[&[u8]]) -> [u8; HEADER] {
        let mut sum = Sum::new();
        parts.iter().for_each(|part| sum.add(part));
        self.header_of(kind, parts.iter().map(|part| part.len()).sum::<usize>() as u32, &sum)
    }

    /// The header of the next frame, whose payload has `len` bytes and this checksum. For callers
    /// that have computed it already.
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

    /// The checksums of the pages of `run` as a frame.
    pub fn sums(&mut self, run: &Run, sums: &[u8]) -> Vec<u8> {
        let run = run.bytes();
        [&self.header(Kind::Sums, &[&run, sums])[..], &run, sums].concat()
    }

    /// A bitmap of the missing pages of `run` as a frame.
    pub fn missing(&mut self, run: &Run, bits: &[u64]) -> Vec<u8> {
        let (run, bits) = (run.bytes(), bits.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>());
        [&self.header(Kind::Missing, &[&run, &bits])[..], &run, &bits].concat()
    }

    /// A request for the pages of `run` as a frame.
    pub fn wanted(&mut self, run: &Run) -> Vec<u8> {
        let run = run.bytes();
        [&self.header(Kind::Wanted, &[&run])[..], &run].concat()
    }

    /// A section of the state as a frame.
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

/// The receiving half of one connection. It checks the order of the frames.
#[derive(Clone, Debug)]
pub struct Decoder {
    session: Option<SessionId>,
    next: u64,
    page: u32,
    unpacker: Unpacker,
}

impl Decoder {
    /// A connection on which nothing has arrived. Without `session`, the first frame determines the
    /// session. Pages have `page` bytes.
    pub fn new(session: Option<SessionId>, page: u32) -> Self {
        Self { session, next: 0, page, unpacker: Unpacker::new() }
    }

    /// The session, once it is known.
    pub fn session(&self) -> Option<SessionId> {
        self.session
    }

    /// Parses the header of the next frame.
    ///
    /// # Errors
    /// The header is invalid, or is not the next of this session. The link cannot be used
    /// afterwards.
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

    /// Parses the payload that belongs to `header`.
    ///
    /// # Errors
    /// The payload is corrupted or inconsistent.
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
                    return Err(malformed(
                        "a bit beyond the last page, or a first page that is no multiple of 64".into(),
                    ));
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
    /// A section of the state.
    Section(Section<'a>),
    /// Pages with their content. Without content they are all zero.
    Run(Run, Option<&'a [u8]>),
    /// Pages with a checksum of each.
    Sums(Run, &'a [u8]),
    /// Pages, and a bitmap of the missing ones. The bitmap has exactly the words that it needs, and
    /// no bit beyond the last page.
    Missing(Run, Vec<u64>),
    /// Pages that the peer waits for.
    Wanted(Run),
}

impl Frame<'_> {
    /// A name of the frame for error messages.
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

/// A section of the state: its name, its version and its JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section<'a> {
    /// Its name: `vcpu0`, `irqchip`, `disk1`.
    pub name: &'a str,
    /// The version of its fields.
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

/// Consecutive pages of one memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The index of the region in the configuration.
    pub region: u32,
    /// The pass over memory that sends them, from 1.
    pub pass: u32,
    /// The first page, counted from the start of the region.
    pub first: u64,
    /// The number of pages, at least one.
    pub pages: u32,
}

impl Run {
    /// The run as bytes of a payload.
    pub fn bytes(&self) -> [u8; RUN] {
        let mut bytes = [0; RUN];
        bytes[..4].copy_from_slice(&self.region.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.pass.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.first.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.pages.to_le_bytes());
        bytes
    }

    /// Checks the run against `regions`, which has the number of pages of each.
    ///
    /// # Errors
    /// The run is not inside a region.
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
