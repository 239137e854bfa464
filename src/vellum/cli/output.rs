//! The output of commands: results on standard output, and messages of one line on standard error.

use std::fmt::Display;
use std::io::{self, Write};

use super::failure::Failure;

/// Prints `text`. Returns false if the reader of standard output has closed it, as `| head` does.
pub(super) fn print(text: impl Display) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::host(format!("standard output: {error}"))),
    }
}

/// Prints `message` on standard error, as one line without control characters.
pub(super) fn say(message: &str) {
    // If nothing reads standard error, the exit status still tells of the failure.
    let _ = writeln!(io::stderr(), "vellum: {}", fit(message));
}

/// Shortens a long message in its middle, because its end says what would work. Control characters
/// are escaped.
fn fit(message: &str) -> String {
    const MAX_LENGTH: usize = 2000;
    let shown = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    let count = message.chars().count();
    if count <= MAX_LENGTH {
        return message.chars().map(shown).collect();
    }
    let start: String = message.chars().take(MAX_LENGTH / 2).map(shown).collect();
    let end: String = message.chars().skip(count - MAX_LENGTH / 2).map(shown).collect();
    format!("{start} … ({} characters) … {end}", count - MAX_LENGTH / 2 * 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_cut_in_its_middle_and_shows_control_characters() {
        assert_eq!(fit("a\x1b[31mb — c"), "a\\u{1b}[31mb — c");
        let long = fit(&format!("start {} end", "é".repeat(100_000)));
        assert!(long.starts_with("start éé") && long.ends_with("éé end"), "{long}");
        assert!(long.chars().count() < 2100 && long.contains("(98010 characters)"), "{long}");
    }
}
