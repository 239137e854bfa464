//! Vellum's own log while a machine runs: events of the `tracing` crate, as lines on standard
//! error.
//!
//! The subscriber is our own. Ready-made ones bring registries, filters and formats that cost
//! start-up time. They are not needed here: there are no spans and there is one output.
//!
//! It handles three problems:
//!
//! - The guest's console may have an unfinished line on the same terminal. The log ends that line
//!   first.
//! - The guest may cause the same message again and again. Warnings and errors of one place in the
//!   code are limited to [`MAX_LINES`] in [`WINDOW`]. The next line that is written says how many
//!   were left out.
//! - Standard error may block, as a stopped terminal does. A line is dropped after
//!   [`WRITE_TIMEOUT`], because devices and vCPUs wait for it.

use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal, Write as _};
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use vellum_sys::terminal;

/// The maximum number of warnings or errors of one place in a [`WINDOW`].
pub const MAX_LINES: u32 = 10;
/// The time in which [`MAX_LINES`] may be written.
pub const WINDOW: Duration = Duration::from_secs(10);
/// How long a line waits for standard error.
const WRITE_TIMEOUT: Duration = Duration::from_millis(100);

/// What shares the terminal with the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// The guest's console. Its unfinished line is ended.
    Console,
    /// A progress bar. It is wiped and drawn again below.
    Progress,
}

/// Writes events up to the level `most` from now on. Only the first call has an effect.
pub fn start(most: Level, beside: Beside) {
    let wipes = beside == Beside::Progress && io::stderr().is_terminal();
    let _ = tracing::subscriber::set_global_default(Log::new(most, move |text: &str| to_stderr(text, wipes)));
}

/// Writes `text`, which consists of whole lines.
fn to_stderr(text: &str, wipes: bool) {
    let start = match (wipes, terminal::end_line()) {
        (true, _) => "\r\x1b[K",
        (false, true) => "\n",
        (false, false) => "",
    };
    let stderr = io::stderr();
    if terminal::writable_within(stderr.as_fd(), WRITE_TIMEOUT) {
        // One write call, so that the guest's output does not come between. An error cannot be
        // reported.
        let _ = stderr.lock().write_all(format!("{start}{text}").as_bytes());
    }
}

/// The subscriber. `W` writes lines.
struct Log<W> {
    most: Level,
    write: W,
    bursts: Mutex<Vec<(Identifier, Burst)>>,
}

impl<W> Log<W> {
    fn new(most: Level, write: W) -> Self {
        Self { most, write, bursts: Mutex::new(Vec::new()) }
    }

    /// Returns the number of events of this place that were left out before, if this one is to be
    /// written.
    fn admits(&self, place: Identifier, now: Instant) -> Option<u32> {
        let mut bursts = self.bursts.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let at = bursts.iter().position(|(of, _)| *of == place).unwrap_or_else(|| {
            bursts.push((place, Burst { since: now, written: 0, left_out: 0 }));
            bursts.len() - 1
        });
        bursts[at].1.admits(now)
    }
}

/// The recent events of one place in the code.
struct Burst {
    since: Instant,
    written: u32,
    left_out: u32,
}

impl Burst {
    fn admits(&mut self, now: Instant) -> Option<u32> {
        if now.saturating_duration_since(self.since) >= WINDOW {
            (self.since, self.written) = (now, 0);
        }
        if self.written == MAX_LINES {
            self.left_out += 1;
            return None;
        }
        self.written += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

impl<W: Fn(&str) + 'static> Subscriber for Log<W>
where
    W: Send + Sync,
{
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= self.most
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::from_level(self.most))
    }

    fn event(&self, event: &Event<'_>) {
        let limited = *event.metadata().level() <= Level::WARN;
        let admitted =
            if limited { self.admits(event.metadata().callsite(), Instant::now()) } else { Some(0) };
        let Some(left_out) = admitted else { return };
        let mut line = Line("vellum: ".into());
        event.record(&mut line);
        if left_out > 0 {
            let _ = write!(line.0, " ({left_out} more like it before were left out)");
        }
        line.0.push('\n');
        (self.write)(&line.0);
    }

    // There are no spans.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// An event as text: its message, then its fields.
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(Printable(&mut self.0), "{value:?}"),
            name => write!(Printable(&mut self.0), ", {name}: {value:?}"),
        };
    }
}

/// Escapes control characters except newlines on the way to the terminal, because a guest may have
/// influenced the message.
struct Printable<'a>(&'a mut String);

impl fmt::Write for Printable<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            match c {
                '\n' => self.0.push(c),
                c if c.is_control() => self.0.extend(c.escape_default()),
                c => self.0.push(c),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn lines(most: Level, says: impl FnOnce()) -> String {
        let written = Arc::new(Mutex::new(String::new()));
        let to = written.clone();
        let log = Log::new(most, move |text: &str| to.lock().unwrap().push_str(text));
        tracing::subscriber::with_default(log, says);
        written.lock().unwrap().clone()
    }

    #[test]
    fn an_event_is_a_line_with_its_fields_and_without_control_characters() {
        let error = io::Error::from_raw_os_error(libc::EIO);
        let said = lines(Level::WARN, || {
            tracing::error!(%error, "disk");
            tracing::warn!("a {}", "\x1b[31mred\x07 word");
            tracing::info!("not asked for");
        });
        // The text of EIO differs between C libraries.
        let eio = io::Error::from_raw_os_error(libc::EIO);
        assert_eq!(said, format!("vellum: disk, error: {eio}\nvellum: a \\u{{1b}}[31mred\\u{{7}} word\n"));
    }

    #[test]
    fn what_a_guest_causes_again_and_again_is_limited_and_what_it_cannot_cause_is_not() {
        let said = lines(Level::DEBUG, || {
            for n in 0..3 * MAX_LINES {
                tracing::warn!("broken {n}");
                tracing::debug!("counter {n}");
            }
            tracing::warn!("another place");
        });
        let count = |word: &str| said.lines().filter(|line| line.contains(word)).count() as u32;
        assert_eq!(
            (count("broken"), count("counter"), count("another")),
            (MAX_LINES, 3 * MAX_LINES, 1),
            "{said}"
        );
    }

    #[test]
    fn the_next_window_says_what_was_left_out() {
        let start = Instant::now();
        let mut burst = Burst { since: start, written: 0, left_out: 0 };
        let admitted = (0..MAX_LINES + 7).filter(|_| burst.admits(start).is_some()).count() as u32;
        assert_eq!(admitted, MAX_LINES);
        assert_eq!(burst.admits(start + WINDOW), Some(7));
        assert_eq!(burst.admits(start + WINDOW), Some(0));
    }
}
