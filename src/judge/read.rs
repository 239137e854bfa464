//! Derives a verdict from a console log.
//!
//! The log is hostile: it has passed through a VMM and a serial port, and firmware prints to it
//! too. Lines that are not the image's are skipped. A log is WHOLE only if it contains every line
//! of the image exactly once and in order, with the checksums that follow from [`crate::schedule`].

use crate::schedule::{MAX_RANGES, MAX_VCPUS, PAGE, PHASE, POISON, Range, Schedule, mix};
use crate::sectors;
use crate::words::{DISK, END, FAULT, KINDS, LEFT_OUT, PASS, RAM, REFUSED, REQUESTS, START, SUM};

/// Limits of a log, so that a hostile log takes bounded memory and time.
const MAX_FAULTS: usize = 10_000;
const MAX_LEFT_OUT: usize = 64;
const MAX_DISKS: usize = 4;
/// The maximum address of RAM.
const MAX_RAM: u64 = 1 << 40;
/// The maximum number of steps for the checksums: about a minute.
const MAX_STEPS: u64 = 1 << 33;

/// The first line of the image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// The architecture.
    pub arch: String,
    /// The seed.
    pub seed: u64,
    /// The number of passes. 0 for no end.
    pub passes: u64,
    /// Whether the order is shuffled.
    pub shuffled: bool,
    /// The percentage of the pages that a pass writes.
    pub write: u64,
    /// The hot set: its percentages of the pages and of the writes.
    pub hot: Option<(u64, u64)>,
    /// Whether each pass compares the neighbour's pages. Otherwise only the last one does.
    pub each: bool,
    /// The number of vCPUs that take part.
    pub vcpus: u64,
    /// The number of vCPUs that the machine has.
    pub given: u64,
    /// Whether kvmclock is checked.
    pub kvmclock: bool,
    /// Whether the interrupts of a timer are checked.
    pub timer: bool,
    /// The boot protocol.
    pub boot: String,
}

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The kind, one of [`kinds`].
    pub kind: &'static str,
    /// The vCPU that found it.
    pub vcpu: u64,
    /// The physical address. 0 if the fault has none.
    pub address: u64,
    /// The expected value.
    pub expected: u64,
    /// The value found.
    pub found: u64,
}

/// The content of a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Log {
    /// The first line, if there is one.
    pub start: Option<Start>,
    /// How often the image started.
    pub starts: u64,
    /// RAM that was judged.
    pub ranges: Vec<Range>,
    /// Memory that was not judged, with the reason, in the image's words.
    pub left_out: Vec<String>,
    /// The disks: the transport and the number of sectors of each.
    pub disks: Vec<(String, u64)>,
    /// The last pass that was reported.
    pub pass: Option<u64>,
    /// The faults that were printed one by one.
    pub faults: Vec<Finding>,
    /// The count of each kind at the end, in the order of [`kinds`].
    pub counts: Vec<Option<u64>>,
    sums: Vec<(u64, u64, u64)>,
    answered: Vec<u64>,
    end: Option<bool>,
    refused: Option<String>,
    /// The number of the image's lines that are malformed or come after the end.
    nonsense: u64,
}

/// The result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing was lost.
    Whole,
    /// Something was lost.
    Lost,
    /// The image did not judge, with its reason.
    Refused(String),
    /// The log has no verdict, or one that cannot be true.
    Crashed(String),
}

/// The kinds of fault.
pub fn kinds() -> &'static [&'static str] {
    &KINDS
}

/// The first two words and the last word of the page at `address` after `pass` has written it.
pub fn page(start: &Start, address: u64, pass: u64) -> [u64; 3] {
    let schedule = Schedule { seed: mix(start.seed), ..Schedule::default() };
    [address, pass, schedule.tail(address, pass)]
}

/// Parses a log.
pub fn read(log: &[u8]) -> Log {
    let mut read = Log { counts: vec![None; KINDS.len()], ..Log::default() };
    for line in log.split(|byte| *byte == b'\n') {
        let line = printable(line);
        if read.line(line.trim_end()).is_none() {
            read.nonsense += 1;
        }
    }
    read
}

/// A line without control characters and escape sequences. Firmware prints escape sequences,
/// possibly before the image's first line.
fn printable(line: &[u8]) -> String {
    let mut text = String::new();
    let mut bytes = line.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        if byte == 0x1b {
            if bytes.next_if_eq(&b'[').is_some() {
                while bytes.next_if(|byte| !(0x40..0x7f).contains(byte)).is_some() {}
            }
            bytes.next();
        } else if (0x20..0x7f).contains(&byte) {
            text.push(byte.into());
        }
    }
    text
}

/// Parses a number in one of the image's formats.
fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

fn yes(text: &str) -> Option<bool> {
    match text {
        "yes" => Some(true),
        "no" => Some(false),
        _ => None,
    }
}

/// The value of `key=value` among words.
fn value<'a>(words: &'a str, key: &str) -> Option<&'a str> {
    words.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
}

impl Log {
    /// Parses a line. Returns `None` if it is a malformed line of the image.
    fn line(&mut self, line: &str) -> Option<()> {
        let known = [START, RAM, LEFT_OUT, DISK, REQUESTS, PASS, FAULT, SUM, END, REFUSED, "ok ", "not ok "];
        if !known.iter().any(|start| line.starts_with(start)) {
            return Some(());
        }
        if let Some(rest) = line.strip_prefix(START) {
            self.starts += 1;
            let start = Self::start(rest)?;
            self.start.get_or_insert(start);
            return Some(());
        }
        if let Some(reason) = line.strip_prefix(REFUSED) {
            self.refused.get_or_insert(reason.chars().take(200).collect());
            return Some(());
        }
        if self.start.is_none() || self.end.is_some() {
            return None;
        }
        if let Some(rest) = line.strip_prefix(RAM) {
            let (start, end) = rest.split_once(' ')?;
            let range = Range { start: number(start)?, end: number(end)? };
            let above = self.ranges.last().is_none_or(|last| last.end <= range.start);
            let whole = range.start.is_multiple_of(PAGE) && range.end.is_multiple_of(PAGE);
            let fits = range.start < range.end && range.end <= MAX_RAM && self.ranges.len() < MAX_RANGES;
            (above && whole && fits).then(|| self.ranges.push(range))
        } else if let Some(rest) = line.strip_prefix(LEFT_OUT) {
            (self.left_out.len() < MAX_LEFT_OUT).then(|| self.left_out.push(rest.chars().take(200).collect()))
        } else if let Some(rest) = line.strip_prefix(PASS) {
            let pass = number(rest.split(' ').next()?)?;
            self.pass = self.pass.max(Some(pass));
            Some(())
        } else if let Some(rest) = line.strip_prefix(FAULT) {
            let kind = KINDS.iter().find(|kind| rest.split(' ').next() == Some(**kind))?;
            let of = |key| number(value(rest, key)?);
            let fault = Finding {
                kind,
                vcpu: of("vcpu")?,
                address: of("address")?,
                expected: of("expected")?,
                found: of("found")?,
            };
            (self.faults.len() < MAX_FAULTS).then(|| self.faults.push(fault))
        } else if let Some(rest) = line.strip_prefix(DISK) {
            let mut words = rest.split(' ');
            let at = number(words.next()?)?;
            let how = words.next().filter(|how| ["mmio", "pci"].contains(how))?;
            let sectors = number(value(rest, "sectors")?)?;
            let is_next = at == self.disks.len() as u64 && self.disks.len() < MAX_DISKS;
            is_next.then(|| self.disks.push((how.into(), sectors)))
        } else if let Some(rest) = line.strip_prefix(REQUESTS) {
            let (at, answered) = (number(value(rest, "disk")?)?, number(value(rest, "answered")?)?);
            let is_next = at == self.answered.len() as u64 && self.answered.len() < MAX_DISKS;
            is_next.then(|| self.answered.push(answered))
        } else if let Some(rest) = line.strip_prefix(SUM) {
            let of = |key| number(value(rest, key)?);
            let sum = (of("vcpu")?, of("position")?, of("checksum")?);
            (self.sums.len() < MAX_VCPUS).then(|| self.sums.push(sum))
        } else if let Some(rest) = line.strip_prefix(END) {
            self.end = Some(match rest {
                "WHOLE" => true,
                "LOST" => false,
                _ => return None,
            });
            Some(())
        } else {
            let rest = line.strip_prefix("not ").unwrap_or(line).strip_prefix("ok ")?;
            let mut words = rest.split(' ');
            let (at, kind) = (number(words.next()?)?, words.next()?);
            let at = usize::try_from(at).ok()?.checked_sub(1)?;
            if KINDS.get(at) != Some(&kind) || self.counts[at].is_some() {
                return None;
            }
            let count = if line.starts_with("not ") { number(words.nth(1)?)?.max(1) } else { 0 };
            self.counts[at] = Some(count);
            Some(())
        }
    }

    fn start(words: &str) -> Option<Start> {
        let of = |key| number(value(words, key)?);
        let hot = value(words, "hot")?.split_once(':')?;
        let start = Start {
            arch: words.split(' ').next()?.into(),
            seed: of("seed")?,
            passes: of("passes")?,
            shuffled: match value(words, "order")? {
                "shuffled" => true,
                "sequential" => false,
                _ => return None,
            },
            write: of("write")?,
            hot: Some((number(hot.0)?, number(hot.1)?)).filter(|hot| *hot != (0, 0)),
            each: match value(words, "verify")? {
                "each" => true,
                "end" => false,
                _ => return None,
            },
            vcpus: of("vcpus")?,
            given: of("given")?,
            kvmclock: yes(value(words, "kvmclock")?)?,
            timer: yes(value(words, "timer")?)?,
            boot: value(words, "boot")?.chars().take(20).collect(),
        };
        let percent = |percent: u64| (1..100).contains(&percent);
        let hot = start.hot.is_none_or(|(pages, share)| percent(pages) && percent(share));
        (hot && start.write <= 100 && (1..=MAX_VCPUS as u64).contains(&start.vcpus)).then_some(start)
    }

    /// How the image broke off, if the log says so. It may have reported faults before.
    pub fn stopped(&self) -> Option<String> {
        if let Some(reason) = &self.refused
            && (reason.starts_with("exception") || reason.contains("panicked"))
        {
            return Some(format!("the image stopped: {reason}"));
        }
        (self.starts > 1).then(|| "the image started more than once".into())
    }

    /// The verdict, with the reason.
    pub fn verdict(&self) -> Verdict {
        let crashed = |reason: &str| Verdict::Crashed(reason.into());
        // Faults count whatever the image does then: one that has lost its stack crashes.
        let lost = !self.faults.is_empty() || self.counts.iter().flatten().any(|count| *count > 0);
        if self.start.is_some() && (lost || self.end == Some(false)) {
            return Verdict::Lost;
        }
        if let Some(reason) = self.stopped() {
            return Verdict::Crashed(reason);
        }
        if let Some(reason) = &self.refused {
            return Verdict::Refused(reason.clone());
        }
        match (&self.start, self.end) {
            (None, _) => crashed("the image's first line is missing"),
            (_, None | Some(false)) => crashed("the log ends without a verdict"),
            _ if self.nonsense > 0 => crashed("lines of the image make no sense"),
            _ if self.counts.iter().any(Option::is_none) => crashed("cases are missing"),
            (Some(start), Some(true)) => match self.check(start) {
                Ok(()) => Verdict::Whole,
                Err(reason) => crashed(reason),
            },
        }
    }

    /// Compares positions and checksums with the expected ones.
    fn check(&self, start: &Start) -> Result<(), &'static str> {
        let mut schedule = Schedule {
            seed: mix(start.seed),
            vcpus: start.vcpus,
            shuffled: start.shuffled,
            ..Schedule::default()
        };
        schedule.thresholds(start.write, start.hot);
        let division = schedule.divide(&self.ranges).map_err(|_| "the RAM that it lists is too little")?;
        let pass = start.passes;
        let vcpus: Vec<u64> = self.sums.iter().map(|sum| sum.0).collect();
        if vcpus != (0..start.vcpus).collect::<Vec<_>>() {
            return Err("sums of vCPUs are missing");
        }
        let accesses = division.of(0).iter().map(|segment| segment.count).sum();
        let requests = (u128::from(pass) + 1) * u128::from(sectors::each_pass(accesses)) + 1;
        let all = self.answered.iter().all(|answered| u128::from(*answered) == requests);
        if self.answered.len() != self.disks.len() || !all {
            return Err("requests of a disk are missing");
        }
        let mut steps = 0;
        for (vcpu, position, checksum) in &self.sums {
            if position >> POISON != 0 || *position != ((4 * u128::from(pass) + 3) << PHASE) as u64 {
                return Err("a position is not the last one");
            }
            let mut sum = schedule.checksum(*vcpu, pass);
            let mut add = |who: u64, is_write: bool| {
                for segment in division.of(who as usize) {
                    for index in 0..segment.count {
                        let address = schedule.address(segment, who, pass, index);
                        let was = if pass == 0 {
                            0
                        } else if is_write && schedule.writes(address, pass) {
                            schedule.last_within(address, pass - 1, &mut steps, MAX_STEPS)?
                        } else {
                            schedule.last_within(address, pass, &mut steps, MAX_STEPS)?
                        };
                        sum = sum.rotate_left(7).wrapping_add(schedule.tail(address, was));
                    }
                }
                Some(())
            };
            let other = (vcpu + 1) % start.vcpus;
            let added = add(*vcpu, true).and_then(|()| if pass == 0 { Some(()) } else { add(other, false) });
            if added.is_none() {
                return Err("its checksums are too long to compute");
            }
            if sum != *checksum {
                return Err("a checksum is wrong");
            }
        }
        Ok(())
    }
}
