//! Derives a verdict from a console log.
//!
//! The log is hostile: it has passed through a VMM and a serial port, and firmware prints to it
//! too. Lines that are not the image's are skipped. A log is WHOLE only if it has the first line,
//! each range of RAM, each case, each processor's checksum as it follows from [`crate::schedule`],
//! and the end, each of them once; if no line of the image makes no sense; and if its progress never
//! goes back.

use std::fmt;

use crate::schedule::{MAX_RANGES, MAX_VCPUS, PAGE, PHASE, POISON, Range, Schedule, mix};
use crate::sectors;
use crate::words::{DISK, END, FAULT, KINDS, LEFT_OUT, PASS, RAM, REFUSED, REQUESTS, SKIP, START, SUM};

/// The finding of this reader that the progress went back. The image cannot see that by itself.
pub const WENT_BACK: &str = "went-back";

/// The kinds that a machine may be unable to show.
const MAY_SKIP: [&str; 7] =
    ["clock-jump", "kvmclock-back", "kvmclock-jump", "timer", "disk-data", "disk-ring", "disk-lost"];

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

/// How far the first processor was when it reported its progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Progress {
    /// The pass.
    pub pass: u64,
    /// The phase of the pass: 0 writes, 1 compares the neighbour's pages, 2 and 3 end the pass.
    pub phase: u64,
    /// The accesses in the phase.
    pub accesses: u64,
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pass, phase, accesses } = self;
        write!(f, "access {accesses} of phase {phase} of pass {pass}")
    }
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
    /// The last progress that was reported.
    progress: Option<Progress>,
    /// The first report that is behind the one before it, after that one: the whole machine went
    /// back, or two copies of it ran.
    pub went_back: Option<(Progress, Progress)>,
    /// The faults that were printed one by one.
    pub faults: Vec<Finding>,
    /// The count of each kind at the end, in the order of [`kinds`].
    pub counts: Vec<Option<u64>>,
    /// The reason why a kind was not checked, in the image's words, in the same order.
    pub skipped: Vec<Option<String>>,
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
    let of_kinds = (vec![None; KINDS.len()], vec![None; KINDS.len()]);
    let mut read = Log { counts: of_kinds.0, skipped: of_kinds.1, ..Log::default() };
    for line in log.split(|byte| *byte == b'\n') {
        let line = printable(line);
        if read.line(line.trim_end()).is_none() {
            read.nonsense += 1;
        }
    }
    read
}

/// The first progress that a console reports, which need not have the image's first line. `None` if
/// it reports none.
pub(crate) fn first_progress(console: &[u8]) -> Option<Progress> {
    let mut lines = console.split(|byte| *byte == b'\n').map(printable);
    lines.find_map(|line| Some(progress(line.trim_end().strip_prefix(PASS)?)?.0))
}

/// The progress in the rest of a line, and the number of passes.
fn progress(words: &str) -> Option<(Progress, u64)> {
    let (pass, rest) = words.split_once(" of ")?;
    let of = |key| number(value(rest, key)?);
    // The last word: without it, the numbers before may be cut.
    of("faults")?;
    let progress = Progress { pass: number(pass)?, phase: of("phase")?, accesses: of("accesses")? };
    Some((progress, number(rest.split(' ').next()?)?))
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
            } else if bytes.next_if_eq(&b']').is_some() {
                // A command to the terminal, up to BEL or ESC and a backslash.
                while bytes.next_if(|byte| ![0x07, 0x1b].contains(byte)).is_some() {}
                bytes.next_if_eq(&0x1b);
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
        // Others may print such lines before the image starts and after it ends. But a fault counts
        // wherever it stands, and a second end is none of theirs.
        if (self.start.is_none() || self.end.is_some()) && !line.starts_with(FAULT) && !line.starts_with(END)
        {
            return Some(());
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
            let (progress, passes) = progress(rest)?;
            let of = self.start.as_ref().map(|start| start.passes);
            let is_possible =
                Some(passes) == of && (passes == 0 || progress.pass <= passes) && progress.phase < 4;
            if let Some(before) = self.progress.filter(|before| *before > progress) {
                self.went_back.get_or_insert((before, progress));
            }
            (self.progress, self.pass) = (Some(progress), Some(progress.pass));
            is_possible.then_some(())
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
            // Each timer has interrupted its processor at least at the end.
            let is_alive = of("interrupts")? > 0 || self.start.as_ref().is_some_and(|start| !start.timer);
            (self.sums.len() < MAX_VCPUS && is_alive).then(|| self.sums.push(sum))
        } else if let Some(rest) = line.strip_prefix(END) {
            let is_first = self.end.is_none();
            self.end = Some(match rest {
                "WHOLE" => self.end.unwrap_or(true),
                "LOST" => false,
                _ => return None,
            });
            is_first.then_some(())
        } else {
            let rest = line.strip_prefix("not ").unwrap_or(line).strip_prefix("ok ")?;
            let (rest, skipped) = rest.split_once(SKIP).map_or((rest, None), |(rest, why)| (rest, Some(why)));
            let mut words = rest.split(' ');
            let (at, Some(kind)) = (words.next()?, words.next().filter(|kind| KINDS.contains(kind))) else {
                // What the VMM or its firmware prints.
                return Some(());
            };
            let at = usize::try_from(number(at)?).ok()?.checked_sub(1)?;
            if KINDS.get(at) != Some(&kind) || self.counts[at].is_some() {
                return None;
            }
            let count = if line.starts_with("not ") { number(words.nth(1)?)?.max(1) } else { 0 };
            self.counts[at] = Some(count);
            self.skipped[at] = skipped.map(|why| why.chars().take(200).collect());
            // The image checks the others on every machine.
            (skipped.is_none() || MAY_SKIP.contains(&kind)).then_some(())
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

    /// The memory that each vCPU alone writes, and that all write in turn: each range with the
    /// vCPU's number or `None`. Empty if the log has not listed it.
    pub fn parts(&self) -> Vec<(Range, Option<usize>)> {
        let mut parts = Vec::new();
        if let Some(start) = &self.start
            && let Ok(division) =
                (Schedule { vcpus: start.vcpus, ..Schedule::default() }).divide(&self.ranges)
        {
            for vcpu in 0..start.vcpus as usize {
                parts.extend(division.of(vcpu).iter().filter(|part| vcpu == 0 || part.shared == 0).map(
                    |part| {
                        let range = Range { start: part.base, end: part.base + part.count * part.stride };
                        (range, (part.shared == 0).then_some(vcpu))
                    },
                ));
            }
        }
        parts
    }

    /// The bytes of each range of memory that was left out.
    pub(crate) fn left_out_bytes(&self) -> impl Iterator<Item = u64> {
        self.left_out.iter().filter_map(|line| {
            let mut words = line.split(' ').map(number);
            let (start, end) = (words.next()??, words.next()??);
            Some(end.saturating_sub(start))
        })
    }

    /// The first loss: a fault, or a step back of the whole machine. Empty without one.
    pub fn loss(&self) -> String {
        match (self.faults.first(), self.went_back) {
            (Some(fault), _) => {
                format!(" {} at {:#x}, seen by vCPU {}", fault.kind, fault.address, fault.vcpu)
            }
            (None, Some((before, after))) => format!(" {WENT_BACK}: {after} came after {before}"),
            (None, None) => String::new(),
        }
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
        if self.start.is_some() && (lost || self.went_back.is_some() || self.end == Some(false)) {
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
        if start.passes == 0 {
            return Err("a run without an end has one");
        }
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
