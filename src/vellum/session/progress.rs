//! Progress on a terminal. Nothing is printed if standard error is not a terminal.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use vellum_guests as guests;
use vellum_kvm::arch::layout::RAM;
use vellum_kvm::memory::{self, Memory, MemoryConfig};
use vellum_machine::Progress;
use vellum_report::units::humanised;
use vellum_sys::signal;

/// A bar of `length` steps on a terminal, or a hidden one elsewhere. 0 means that the end is not
/// known.
pub fn bar(length: u64, template: &str) -> ProgressBar {
    let target =
        if io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let rate = |state: &ProgressState, out: &mut dyn fmt::Write| {
        // A failure to draw progress is not reported.
        let _ = out.write_str(&rate(state.per_sec()));
    };
    let style = style.with_key("rate", rate);
    ProgressBar::with_draw_target((length > 0).then_some(length), target).with_style(style)
}

/// Prints lines of progress on standard error as long as it lives, for harnesses that end silent
/// programs.
pub struct Heartbeat {
    over: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeat {
    /// Prints a line at each interval `every`, with the message of `bar`. The bar may be hidden.
    pub fn start(bar: ProgressBar, every: Duration) -> Self {
        Self::start_on("vellum", bar, every, io::stderr())
    }

    /// Like [`Heartbeat::start`], with the name of another program and to `out`.
    pub fn start_on(
        program: &'static str,
        bar: ProgressBar,
        every: Duration,
        mut out: impl Write + Send + 'static,
    ) -> Self {
        let (over, end) = mpsc::channel();
        let begun = Instant::now();
        let thread = thread::spawn(move || {
            // Only the thread that waits for guests handles signals.
            let _blocked = signal::Blocked::all();
            while end.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                let line = format!("{program}: {:.0} s: {}", begun.elapsed().as_secs_f64(), bar.message());
                // The reader may be gone.
                let _ = writeln!(out, "{}", line.trim_end_matches([':', ' ']));
            }
        });
        Self { over: Some(over), thread: Some(thread) }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        drop(self.over.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The bar of a machine that reports progress, or a hidden one.
pub(super) fn of(progress: Option<Progress>, limit: Option<Duration>) -> ProgressBar {
    let Some(Progress { of, .. }) = progress else { return ProgressBar::hidden() };
    bar(of.unwrap_or(0), &template(of.is_some(), limit))
}

/// The template of a machine's bar: pages done, rate, and the time or part that is left.
fn template(has_end: bool, limit: Option<Duration>) -> String {
    let done = "{human_pos} pages  {rate}";
    match limit {
        _ if has_end => format!("{{bar:30}} {{percent:>3}} %  {done}  {{eta}} left"),
        Some(limit) => format!("{{elapsed}} of {} s  {done}", limit.as_secs_f64()),
        None => format!("{{elapsed}}  {done}  (Ctrl-C ends it)"),
    }
}

/// A rate in pages per second, with four significant digits.
fn rate(per_second: f64) -> String {
    humanised("pages/s", per_second)
}

/// The bar of populating memory.
pub fn bytes(what: &str, bytes: u64) -> ProgressBar {
    bar(bytes, &format!("{what} {{bar:30}} {{binary_bytes}} of {{binary_total_bytes}}  {{eta}} left"))
}

/// Maps memory and populates it if requested. Shows a bar. A signal ends it: signals are still
/// pending here, because the event loop does not read them yet.
pub(super) fn map(config: MemoryConfig) -> Result<Memory, memory::Error> {
    let memory = Memory::map(RAM, config)?;
    if config.prealloc {
        let bar = bytes("populating", config.size);
        let signal = || signal::waiting(&signal::ENDING);
        let whole = memory.populate(|bytes| {
            bar.inc(bytes);
            signal().is_none()
        })?;
        bar.finish_and_clear();
        if let Some(signal) = signal().filter(|_| !whole) {
            return Err(memory::Error::Interrupted(signal));
        }
    }
    Ok(memory)
}

/// Fills memory with random numbers. Shows a bar. A signal ends it.
pub(super) fn fill(memory: &Memory) -> Result<(), memory::Error> {
    let bar = bytes("filling", memory.config.size);
    let signal = || signal::waiting(&signal::ENDING);
    let whole = guests::fill(memory, |bytes| {
        bar.inc(bytes);
        signal().is_none()
    });
    bar.finish_and_clear();
    match signal().filter(|_| !whole) {
        Some(signal) => Err(memory::Error::Interrupted(signal)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_has_four_digits_and_a_line_says_what_is_left() {
        assert_eq!(rate(18_463_920.812_2), "18.46 M pages/s");
        let lines = [(true, None), (false, Some(Duration::from_secs(60))), (false, None)];
        for ((has_end, limit), part) in lines.into_iter().zip(["{eta} left", "of 60 s", "Ctrl-C"]) {
            let line = template(has_end, limit);
            assert!(line.contains(part) && ProgressStyle::with_template(&line).is_ok(), "{line}");
        }
    }
}
