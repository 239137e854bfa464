//! QEMU's migration streams, and its snapshot files, which have the same form: what is in them, and
//! how a test changes them. What is planted in them stands in `qemu.rs`.

use std::collections::BTreeMap;
use std::ops::Range;

use support::{Failed, ensure};
use vellum_judge::read::{Start, page};

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// The image's seed.
pub const SEED: u64 = 1;

/// The names of the block of RAM, of the machines `pc` and `virt`.
const BLOCKS: [&str; 2] = ["pc.ram", "mach-virt.ram"];

/// A migration stream of QEMU (`docs/devel/migration` and `migration/ram.c` in QEMU), with the
/// changes that are to be made to it.
pub struct Stream {
    pub bytes: Vec<u8>,
    /// The copies of each page of [`BLOCKS`], in order.
    pub pages: BTreeMap<u64, Vec<Copy>>,
    /// The state of each device, by its name and instance.
    pub devices: BTreeMap<(String, u32), Range<usize>>,
    /// Whether the stream has its end.
    pub is_whole: bool,
    pub changes: BTreeMap<usize, (usize, Vec<u8>)>,
}

/// A copy of a page in a stream.
#[derive(Clone, Debug)]
pub struct Copy {
    record: Range<usize>,
    /// Where the content is. A page of zeroes has none.
    content: Option<Range<usize>>,
    /// Whether the record takes its block from the record before.
    continues: bool,
}

/// Why the parser stopped.
enum Stop {
    /// The stream is not there any further.
    Short,
    Wrong(String),
}

/// The parser's position.
struct Parser<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Parser<'a> {
    pub fn take(&mut self, count: usize) -> Result<&'a [u8], Stop> {
        let bytes = self.bytes.get(self.at..self.at + count).ok_or(Stop::Short)?;
        self.at += count;
        Ok(bytes)
    }

    pub fn number(&mut self, bytes: usize) -> Result<u64, Stop> {
        Ok(self.take(bytes)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    pub fn name(&mut self) -> Result<String, Stop> {
        let length = self.number(1)? as usize;
        Ok(String::from_utf8_lossy(self.take(length)?).into_owned())
    }
}

/// Kinds of section.
const END_OF_FILE: u64 = 0;
const START: u64 = 1;
const PART: u64 = 2;
const END: u64 = 3;
const FULL: u64 = 4;
const FOOTER: u8 = 0x7e;
/// Flags of a record of RAM, in the bits below the address.
const ZERO: u64 = 0x02;
const SIZES: u64 = 0x04;
const CONTENT: u64 = 0x08;
const LAST: u64 = 0x10;
const CONTINUE: u64 = 0x20;

impl Stream {
    /// Parses a stream, which may be cut.
    pub fn new(bytes: Vec<u8>) -> Result<Self, Failed> {
        let mut stream = Self {
            bytes: Vec::new(),
            pages: BTreeMap::new(),
            devices: BTreeMap::new(),
            is_whole: false,
            changes: BTreeMap::new(),
        };
        match stream.parse(&bytes) {
            Ok(()) => stream.is_whole = true,
            Err(Stop::Short) => {}
            Err(Stop::Wrong(why)) => return Err(why.into()),
        }
        stream.bytes = bytes;
        Ok(stream)
    }

    fn parse(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        // The section of RAM is the first one. The configuration before it does not say its length.
        let begins = |window: &[u8]| window[0] == START as u8 && window[5..] == *b"\x03ram";
        let at = bytes.windows(9).position(begins).ok_or(Stop::Short)?;
        let mut parser = Parser { bytes, at };
        let mut block = String::new();
        loop {
            let kind = parser.number(1)?;
            if kind == END_OF_FILE {
                return Ok(());
            }
            let section = parser.number(4)?;
            let mut device = (String::new(), 0);
            if [START, FULL].contains(&kind) {
                device = (parser.name()?, parser.number(4)? as u32);
                parser.number(4)?;
            }
            match kind {
                START | PART | END => self.ram(&mut parser, &mut block)?,
                FULL => {
                    let length = length(&bytes[parser.at..], section)?;
                    self.devices.insert(device, parser.at..parser.at + length);
                    parser.at += length;
                }
                _ => return Err(Stop::Wrong(format!("a section of kind {kind} at {}", parser.at))),
            }
            let footer = parser.take(5)?;
            if footer[0] != FOOTER || footer[1..] != (section as u32).to_be_bytes() {
                return Err(Stop::Wrong(format!("section {section} has no footer at {}", parser.at)));
            }
        }
    }

    /// The records of a section of RAM.
    fn ram(&mut self, parser: &mut Parser, block: &mut String) -> Result<(), Stop> {
        loop {
            let start = parser.at;
            let number = parser.number(8)?;
            let (address, flags) = (number & !0xfff, number & 0xfff);
            match flags & !CONTINUE {
                LAST => return Ok(()),
                SIZES => {
                    let mut left = address;
                    while left > 0 {
                        parser.name()?;
                        left = left.saturating_sub(parser.number(8)?);
                    }
                }
                ZERO | CONTENT => {
                    let continues = flags & CONTINUE != 0;
                    if !continues {
                        *block = parser.name()?;
                    }
                    let content = parser.at;
                    let has_content = flags & CONTENT != 0;
                    parser.take(if has_content { PAGE } else { 1 })?;
                    if BLOCKS.contains(&block.as_str()) {
                        let content = has_content.then(|| content..content + PAGE);
                        let copy = Copy { record: start..parser.at, content, continues };
                        self.pages.entry(address).or_default().push(copy);
                    }
                }
                _ => return Err(Stop::Wrong(format!("a record with flags {flags:#x} at {start}"))),
            }
        }
    }

    /// The copies of a page.
    pub fn copies(&self, address: u64) -> Result<&[Copy], Failed> {
        let copies = self.pages.get(&address).map(Vec::as_slice);
        copies.filter(|copies| !copies.is_empty()).ok_or_else(|| format!("no page {address:#x}").into())
    }

    pub fn content(&self, copy: &Copy) -> Vec<u8> {
        copy.content.clone().map_or(vec![0; PAGE], |content| self.bytes[content].to_vec())
    }

    /// The content of a page at the end of the stream.
    pub fn newest(&self, address: u64) -> Result<Vec<u8>, Failed> {
        let copies = self.copies(address)?;
        Ok(self.content(&copies[copies.len() - 1]))
    }

    /// The content of a page at the start of the stream, if it has changed.
    pub fn earlier(&self, address: u64) -> Result<Option<Vec<u8>>, Failed> {
        let earlier = self.content(&self.copies(address)?[0]);
        Ok((earlier != self.newest(address)?).then_some(earlier))
    }

    /// An older content of a stamped page: from the stream, or as the pass before has left it.
    pub fn older(&self, address: u64) -> Result<Vec<u8>, Failed> {
        if let Some(earlier) = self.earlier(address)? {
            return Ok(earlier);
        }
        let mut page = self.newest(address)?;
        let pass = u64::from_le_bytes(page[8..16].try_into()?);
        let start = Start { seed: SEED, ..Start::default() };
        let [first, second, last] = self::page(&start, address, pass - 1).map(u64::to_le_bytes);
        page[..8].copy_from_slice(&first);
        page[8..16].copy_from_slice(&second);
        page[PAGE - 8..].copy_from_slice(&last);
        Ok(page)
    }

    pub fn change(&mut self, range: Range<usize>, bytes: Vec<u8>) {
        self.changes.insert(range.start, (range.end, bytes));
    }

    /// The last copy of a page gets this content.
    pub fn put(&mut self, address: u64, page: Vec<u8>) -> Result<(), Failed> {
        let copy = self.copies(address)?.last().and_then(|copy| copy.content.clone());
        self.change(copy.ok_or("a page of zeroes")?, page);
        Ok(())
    }

    /// The last copy of a page is a page of zeroes.
    pub fn zero(&mut self, address: u64) -> Result<(), Failed> {
        let copy = self.copies(address)?.last().filter(|copy| copy.continues).cloned();
        let record = [&(address | ZERO | CONTINUE).to_be_bytes()[..], &[0]].concat();
        self.change(copy.ok_or("the page names a block")?.record, record);
        Ok(())
    }

    /// The stream has no copy of a page, or not the last one.
    pub fn drop_copies(&mut self, address: u64, which: &str) -> Result<(), Failed> {
        let copies = self.copies(address)?;
        let dropped = if which == "all" { copies } else { &copies[copies.len() - 1..] }.to_vec();
        ensure(dropped.iter().all(|copy| copy.continues), || "the page names a block".into())?;
        for copy in dropped {
            self.change(copy.record, Vec::new());
        }
        Ok(())
    }

    /// A device's state.
    pub fn device(&self, name: &str, instance: u32) -> Result<Range<usize>, Failed> {
        let range = self.devices.get(&(name.into(), instance)).cloned();
        range.ok_or_else(|| format!("no {name} {instance}: {:?}", self.devices.keys()).into())
    }

    /// The stream with its changes.
    pub fn changed(&self) -> Vec<u8> {
        let (mut bytes, mut at) = (Vec::new(), 0);
        for (start, (end, change)) in &self.changes {
            bytes.extend(&self.bytes[at..*start]);
            bytes.extend(change);
            at = *end;
        }
        bytes.extend(&self.bytes[at..]);
        bytes
    }
}

/// The length of a device's state, which the stream does not tell: up to the footer of its section,
/// which the next section or the end of the file follows.
fn length(bytes: &[u8], section: u64) -> Result<usize, Stop> {
    let footer = [&[FOOTER][..], &(section as u32).to_be_bytes()].concat();
    // The end of the file has a description in JSON behind it, with its length, or nothing. A state
    // may contain anything, also what looks like a footer and a zero.
    let follows = |rest: &[u8]| match rest {
        [0] => true,
        [0, 6, a, b, c, d, json @ ..] => json.len() == u32::from_be_bytes([*a, *b, *c, *d]) as usize,
        [4, _, _, _, _, length, name @ ..] => {
            name.get(..usize::from(*length)).is_some_and(|name| name.is_ascii())
        }
        _ => false,
    };
    let ends = |at: &usize| bytes[*at..].starts_with(&footer) && follows(&bytes[at + 5..]);
    (0..bytes.len()).find(ends).ok_or(Stop::Short)
}
