//! `VALUE,key=value,flag`: the form of every argument that has parts.
//!
//! The first key may be omitted, a key without a value is `on`, and a value with commas goes into
//! brackets: `pin=[0,2-3]`. The error for an unknown key names the nearest known one. Each argument
//! decides what its keys mean.

use std::fmt::Display;
use std::str::FromStr;

/// What is wrong with an argument. clap puts the flag and the whole value in front.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A key that this argument does not have.
    #[error("unknown key '{key}'{meant}: the keys are {known}{first}")]
    UnknownKey {
        /// As typed.
        key: String,
        /// The suggestion from [`meant`].
        meant: String,
        /// All known keys.
        known: String,
        /// How to write the value that needs no key, if it was split by mistake.
        first: String,
    },
    /// The same key is given twice.
    #[error("'{0}' is given twice")]
    Twice(String),
    /// A required key is missing.
    #[error("'{0}=' is missing")]
    Missing(String),
    /// A value that does not parse.
    #[error("{key}={value}: {reason}")]
    Value {
        /// The key.
        key: String,
        /// As typed.
        value: String,
        /// What would have been right.
        reason: String,
    },
    /// A bracket that is not closed, or that is closed before it was opened.
    #[error("the brackets in '{0}' do not match")]
    Brackets(String),
    /// Nothing between two commas.
    #[error("an empty part: remove the stray comma")]
    Empty,
}

/// The parts of one argument, each a key and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyValues {
    parts: Vec<(String, String)>,
}

impl KeyValues {
    /// Splits `text`. A leading value without a key belongs to `first`. `known` lists all keys.
    pub fn parse(text: &str, first: Option<&str>, known: &[&str]) -> Result<Self, Error> {
        let mut parts: Vec<(String, String)> = Vec::new();
        for (index, part) in split(text)?.into_iter().enumerate() {
            if part.is_empty() {
                return Err(Error::Empty);
            }
            let (key, value) = match (part.split_once('='), first) {
                (Some((key, value)), _) => (key, value),
                (None, Some(first)) if index == 0 => (first, part),
                (None, _) => (part, "on"),
            };
            if !known.contains(&key) {
                return Err(Error::UnknownKey {
                    key: key.into(),
                    meant: meant(key, known.iter().copied()),
                    known: known.join(", "),
                    first: bracketed(first.filter(|_| index == 0 || key.contains(['/', '.', ' ']))),
                });
            }
            if parts.iter().any(|(other, _)| other == key) {
                return Err(Error::Twice(key.into()));
            }
            let value = value.strip_prefix('[').and_then(|value| value.strip_suffix(']')).unwrap_or(value);
            parts.push((key.into(), value.into()));
        }
        Ok(Self { parts })
    }

    /// The value of `key` as typed.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.parts.iter().find(|(other, _)| other == key).map(|(_, value)| value.as_str())
    }

    /// The value of `key`, parsed by `read`, whose error says what would have been right.
    pub fn with<T, E: Display>(
        &self,
        key: &str,
        read: impl FnOnce(&str) -> Result<T, E>,
    ) -> Result<Option<T>, Error> {
        let wrong = |value: &str, reason: E| Error::Value {
            key: key.into(),
            value: value.into(),
            reason: reason.to_string(),
        };
        self.text(key).map(|value| read(value).map_err(|reason| wrong(value, reason))).transpose()
    }

    /// The value of `key`, or an error if it is missing.
    pub fn required<T, E: Display>(
        &self,
        key: &str,
        read: impl FnOnce(&str) -> Result<T, E>,
    ) -> Result<T, Error> {
        self.with(key, read)?.ok_or_else(|| Error::Missing(key.into()))
    }

    /// A switch: `on` or `off`.
    pub fn switch(&self, key: &str) -> Result<Option<bool>, Error> {
        self.with(key, |value| match value {
            "on" | "true" | "yes" | "1" => Ok(true),
            "off" | "false" | "no" | "0" => Ok(false),
            _ => Err("on or off"),
        })
    }
}

/// How to write a path with commas, if the value that needs no key is a path.
fn bracketed(first: Option<&str>) -> String {
    first.filter(|first| ["path", "socket"].contains(first)).map_or(String::new(), |first| {
        format!("; a {first} with `,` or `=` in it goes into brackets: {first}=[…]")
    })
}

/// Splits at commas outside brackets.
fn split(text: &str) -> Result<Vec<&str>, Error> {
    let unmatched = || Error::Brackets(text.into());
    let (mut parts, mut start, mut inside) = (Vec::new(), 0, false);
    for (index, byte) in text.bytes().enumerate() {
        match (byte, inside) {
            (b',', false) => {
                parts.push(&text[start..index]);
                start = index + 1;
            }
            (b'[', false) => inside = true,
            (b']', true) => inside = false,
            (b'[', true) | (b']', false) => return Err(unmatched()),
            _ => {}
        }
    }
    if inside {
        return Err(unmatched());
    }
    parts.push(&text[start..]);
    Ok(parts)
}

/// The suffix to an error about an unknown word: a suggested candidate, another program's word
/// translated, or nothing.
pub fn meant<'a>(word: &str, mut candidates: impl Iterator<Item = &'a str> + Clone) -> String {
    const TRANSLATED: [(&str, &str, &str); 2] =
        [("hugepages", "backing", "backing=hugetlb-2m"), ("boot", "count", "the number alone")];
    let translated = TRANSLATED
        .into_iter()
        .find(|(theirs, ours, _)| *theirs == word && candidates.clone().any(|c| c == *ours));
    match (translated, nearest(word, &mut candidates)) {
        (Some((_, _, ours)), _) => format!(" (here it is {ours})"),
        (None, Some(nearest)) => format!(" (did you mean '{nearest}'?)"),
        (None, None) => String::new(),
    }
}

/// The candidate that `word` may stand for: one that starts with it, or one that differs from it by
/// few edits.
fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let slips = |candidate: &str| match candidate.starts_with(word) && word.len() > 1 {
        true => 0,
        false => strsim::osa_distance(word, candidate),
    };
    let near = candidates.map(|candidate| (slips(candidate), candidate)).min()?;
    (near.0 <= (word.chars().count() / 3).max(1)).then_some(near.1)
}

/// One of `names`, or an error that lists them and suggests the nearest.
pub fn one_of<T: Copy>(what: &str, text: &str, names: &[(&str, T)]) -> Result<T, String> {
    names.iter().find(|(name, _)| *name == text).map(|&(_, value)| value).ok_or_else(|| {
        let all = names.iter().map(|(name, _)| *name);
        let known = all.clone().collect::<Vec<_>>().join(", ");
        format!("unknown {what} '{text}'{}: there are {known}", meant(text, all))
    })
}

/// A size with a unit: `k`, `m`, `g` or `t`, in either case, with or without `b` or `ib`. A number
/// without a unit is multiplied by `bare`.
pub fn size(text: &str, bare: u64) -> Result<u64, String> {
    let wrong = || format!("'{text}' is no size: a number with k, m, g or t, as in 512m or 4g");
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let unit = match text[digits..].to_ascii_lowercase().as_str() {
        "" => bare,
        "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        "t" | "tb" | "tib" => 1 << 40,
        _ => return Err(wrong()),
    };
    if digits == 0 {
        return Err(wrong());
    }
    text[..digits]
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(unit))
        .ok_or_else(|| format!("'{text}' is too large: the most is 16777215t"))
}

/// A number in an inclusive range.
pub fn number<T>(text: &str, range: std::ops::RangeInclusive<T>) -> Result<T, String>
where
    T: FromStr + PartialOrd + Display,
{
    text.parse()
        .ok()
        .filter(|number| range.contains(number))
        .ok_or_else(|| format!("'{text}' is no number from {} to {}", range.start(), range.end()))
}

/// A path that is not empty.
pub fn path(text: &str) -> Result<std::path::PathBuf, &'static str> {
    if text.is_empty() { Err("a path is expected") } else { Ok(text.into()) }
}

/// A duration: `10s`, `5m`, `1h`, `250ms`. A number without a unit is in seconds.
pub fn duration(text: &str) -> Result<std::time::Duration, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').len();
    let unit = match &text[digits..] {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => f64::NAN,
    };
    let seconds = text[..digits].parse::<f64>().unwrap_or(f64::NAN) * unit;
    if seconds.is_finite() && seconds > 0.0 && seconds < 1e9 {
        Ok(std::time::Duration::from_secs_f64(seconds))
    } else {
        Err(format!("'{text}' is no duration: a number above 0 with ms, s, m, h or d, as in 30s or 1h"))
    }
}

/// A list of numbers and ranges: `0`, `0-3`, `0,2,5-7`. It has at most 65,536 numbers.
pub fn list(text: &str) -> Result<Vec<usize>, String> {
    let wrong = |part: &str| format!("'{part}' is no number or range, as in 0-3 or [0,2,5-7]");
    let mut numbers = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let read = |text: &str| text.parse::<usize>().map_err(|_| wrong(part));
        let (first, last) = (read(first)?, read(last)?);
        if first > last || last - first >= 65_536 - numbers.len() {
            return Err(wrong(part));
        }
        numbers.extend(first..=last);
    }
    Ok(numbers)
}

/// A guest-physical address, hexadecimal with 0x or decimal.
pub fn address(text: &str) -> Result<u64, String> {
    let hex = text.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok());
    hex.or_else(|| text.parse().ok()).ok_or_else(|| "no address, as in 0x100000000".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: &[&str] = &["size", "backing", "prealloc", "pin"];

    #[test]
    fn the_first_key_may_be_omitted_and_switches_are_bare() {
        let kv = KeyValues::parse("4g,prealloc,pin=[0,2-3]", Some("size"), KEYS).unwrap();
        assert_eq!(kv.text("size"), Some("4g"));
        assert_eq!(kv.switch("prealloc"), Ok(Some(true)));
        assert_eq!(kv.with("pin", list), Ok(Some(vec![0, 2, 3])));
        assert_eq!(kv.switch("backing"), Ok(None));
    }

    #[test]
    fn an_unknown_key_names_the_nearest() {
        let error = KeyValues::parse("4g,baking=thp", Some("size"), KEYS).unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown key 'baking' (did you mean 'backing'?): the keys are size, backing, prealloc, pin"
        );
        let error = KeyValues::parse("4g,hugepages=on", Some("size"), KEYS).unwrap_err();
        assert!(
            error.to_string().starts_with("unknown key 'hugepages' (here it is backing=hugetlb-2m): the"),
            "{error}"
        );
        let error = KeyValues::parse("4g,colour=red", Some("size"), KEYS).unwrap_err();
        assert!(error.to_string().starts_with("unknown key 'colour': the keys are size"), "{error}");
    }

    #[test]
    fn a_path_with_commas_goes_into_brackets() {
        let keys = &["path", "readonly"];
        for text in ["/tmp/a=b.img", "/tmp/a,b.img", "a=b"] {
            let said = KeyValues::parse(text, Some("path"), keys).unwrap_err().to_string();
            assert!(said.ends_with("a path with `,` or `=` in it goes into brackets: path=[…]"), "{said}");
        }
        let kv = KeyValues::parse("path=[/tmp/a=b,c.img],readonly", Some("path"), keys).unwrap();
        assert_eq!(kv.text("path"), Some("/tmp/a=b,c.img"));
        let said = KeyValues::parse("a.img,colour=red", Some("path"), keys).unwrap_err().to_string();
        assert!(said.ends_with("the keys are path, readonly"), "{said}");
    }

    #[test]
    fn malformed_arguments_are_refused() {
        for text in ["", "4g,", "4g,,pin=0", "4g,size=2g", "pin=[0", "pin=0]", "pin=[[0]]"] {
            assert!(KeyValues::parse(text, Some("size"), KEYS).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes() {
        assert_eq!(size("256", 1 << 20), Ok(256 << 20));
        assert_eq!(size("4G", 1), Ok(4 << 30));
        assert_eq!(size("64kib", 1), Ok(64 << 10));
        assert_eq!(size("16777215t", 1), Ok(16_777_215 << 40));
        for text in ["", "g", "-1g", "1x", "1.5g", "99999999999999999999g", "17179869184g", "16777216t"] {
            assert!(size(text, 1).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_and_lists() {
        assert_eq!(duration("250ms"), Ok(std::time::Duration::from_millis(250)));
        assert!(["0", "", "s", "1e9s", "-3s", "nan"].iter().all(|text| duration(text).is_err()));
        assert_eq!(list("0,2,5-7"), Ok(vec![0, 2, 5, 6, 7]));
        assert!(["", "3-1", "a", "0-99999999"].iter().all(|text| list(text).is_err()));
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(text in ".{0,64}") {
            let _ = KeyValues::parse(&text, Some("size"), KEYS);
            let _ = size(&text, 1);
            let _ = duration(&text);
            let _ = list(&text);
        }
    }
}
