//! The order of version numbers (UAPI.10), by which boot loaders sort kernels.

use std::cmp::Ordering;

/// Compares two versions.
pub fn compare(one: &str, two: &str) -> Ordering {
    let keep = |byte: &u8| byte.is_ascii_alphanumeric() || b"~-^.".contains(byte);
    let clean = |text: &str| text.bytes().filter(keep).collect::<Vec<_>>();
    let (one, two) = (clean(one), clean(two));
    let (mut a, mut b) = (&one[..], &two[..]);
    loop {
        // A `~` sorts before the end of the version. The other marks sort after it.
        for mark in *b"~\0-^." {
            if mark == 0 {
                if a.is_empty() || b.is_empty() {
                    return a.len().cmp(&b.len());
                }
                continue;
            }
            match (a.first() == Some(&mark), b.first() == Some(&mark)) {
                (true, false) => return Ordering::Less,
                (false, true) => return Ordering::Greater,
                (true, true) => (a, b) = (&a[1..], &b[1..]),
                (false, false) => {}
            }
        }
        if a.is_empty() && b.is_empty() {
            return Ordering::Equal;
        }
        let digits = a.first().is_some_and(u8::is_ascii_digit) || b.first().is_some_and(u8::is_ascii_digit);
        let (part_a, rest_a) = split(a, digits);
        let (part_b, rest_b) = split(b, digits);
        let order = if digits { number(part_a).cmp(&number(part_b)) } else { part_a.cmp(part_b) };
        if order != Ordering::Equal {
            return order;
        }
        (a, b) = (rest_a, rest_b);
    }
}

/// Splits off the leading run of digits or letters.
fn split(text: &[u8], digits: bool) -> (&[u8], &[u8]) {
    let belongs = |byte: &u8| if digits { byte.is_ascii_digit() } else { byte.is_ascii_alphabetic() };
    text.split_at(text.iter().take_while(|byte| belongs(byte)).count())
}

/// A sort key for a number of any length. Without leading zeroes, the longer number is larger.
fn number(digits: &[u8]) -> (usize, &[u8]) {
    let from = digits.iter().take_while(|&&digit| digit == b'0').count();
    (digits.len() - from, &digits[from..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_versions_are_greater() {
        let ascending = [
            "5.10.0",
            "5.10.0-8",
            "6.1.0-9-amd64",
            "6.1.0-18-amd64",
            "6.1.0-100-amd64",
            "6.8.5-301.fc40.x86_64",
            "6.12~rc1",
            "6.12",
            "6.12.1",
        ];
        for (at, one) in ascending.iter().enumerate() {
            for (other, two) in ascending.iter().enumerate() {
                assert_eq!(compare(one, two), at.cmp(&other), "{one} and {two}");
            }
        }
        assert_eq!(compare("", ""), Ordering::Equal);
        assert_eq!(compare("007", "7"), Ordering::Equal);
    }
}
