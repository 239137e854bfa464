//! The command line. Unknown words are ignored, because VMMs add their own.

use crate::refuse;

/// The largest number of passes: the phase has 35 bits, and a pass has four phases.
pub(crate) const MAX_PASSES: u64 = 1 << 32;

pub(crate) struct Options {
    pub(crate) seed: u64,
    pub(crate) passes: u64,
    pub(crate) shuffled: bool,
    pub(crate) hot: Option<(u64, u64)>,
    pub(crate) write: u64,
    /// Pages per second and processor. 0 for no limit.
    pub(crate) rate: u64,
    pub(crate) each: bool,
    /// The interval of progress lines in milliseconds.
    pub(crate) report: u64,
    /// The largest step of a clock between two readings, in milliseconds.
    pub(crate) clock: Option<u64>,
    /// How late a timer interrupt or a disk's answer may be, in milliseconds.
    pub(crate) late: u64,
}

impl Options {
    pub(crate) fn read(line: &[u8]) -> Self {
        let mut options = Self {
            seed: 1,
            passes: 10,
            shuffled: true,
            hot: None,
            write: 100,
            rate: 0,
            each: true,
            report: 1000,
            clock: None,
            late: 10_000,
        };
        for word in line.split(|byte| *byte <= b' ') {
            let Some(equals) = word.iter().position(|byte| *byte == b'=') else { continue };
            let (key, value) = (&word[..equals], &word[equals + 1..]);
            let done = match key {
                b"seed" => set(&mut options.seed, number(value)),
                b"passes" => set(&mut options.passes, number(value).filter(|passes| *passes <= MAX_PASSES)),
                b"rate" => set(&mut options.rate, number(value)),
                b"write" => set(&mut options.write, number(value).filter(|write| *write <= 100)),
                b"report" => set(&mut options.report, duration(value).filter(|report| *report > 0)),
                b"clock" => set(&mut options.clock, duration(value).map(Some)),
                b"late" => set(&mut options.late, duration(value).filter(|late| *late > 0)),
                b"hot" => set(&mut options.hot, hot(value).map(Some)),
                b"order" => set(&mut options.shuffled, choice(value, b"sequential", b"shuffled")),
                b"verify" => set(&mut options.each, choice(value, b"end", b"each")),
                _ => true,
            };
            if !done {
                refuse(match key {
                    b"seed" => "seed= is not a number",
                    b"passes" => "passes= is not a number up to 4294967296; 0 is for no end",
                    b"rate" => "rate= is not a number of pages a second",
                    b"write" => "write= is not a percentage from 0 to 100",
                    b"report" => "report= is not a duration, as in 1s or 500ms",
                    b"clock" => "clock= is not a duration, as in 1s or 500ms",
                    b"late" => "late= is not a duration, as in 10s or 500ms",
                    b"hot" => "hot= is not PAGES:SHARE, two percentages from 1 to 99",
                    b"order" => "order= is neither sequential nor shuffled",
                    _ => "verify= is neither each nor end",
                });
            }
        }
        options
    }
}

fn set<T>(place: &mut T, value: Option<T>) -> bool {
    value.map(|value| *place = value).is_some()
}

fn choice(value: &[u8], no: &[u8], yes: &[u8]) -> Option<bool> {
    if value == yes {
        Some(true)
    } else if value == no {
        Some(false)
    } else {
        None
    }
}

fn number(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0u64, |sum, byte| match byte {
        b'0'..=b'9' => sum.checked_mul(10)?.checked_add(u64::from(byte - b'0')),
        _ => None,
    })
}

fn duration(text: &[u8]) -> Option<u64> {
    let ms = text.strip_suffix(b"ms").and_then(number);
    ms.or_else(|| number(text.strip_suffix(b"s")?)?.checked_mul(1000)).filter(|ms| *ms < 1 << 32)
}

fn hot(text: &[u8]) -> Option<(u64, u64)> {
    let colon = text.iter().position(|byte| *byte == b':')?;
    let percent = |text| number(text).filter(|value| (1..100).contains(value));
    Some((percent(&text[..colon])?, percent(&text[colon + 1..])?))
}
