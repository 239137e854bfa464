//! Progress on a terminal. In a pipe nothing is said.

use std::io::{self, IsTerminal};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::arch::layout::RAM;
use crate::memory::{self, Memory, MemoryConfig};
use crate::payload::Progress;

/// A bar of `length` steps (0 where the end is not known) on a terminal; hidden elsewhere.
pub fn bar(length: u64, template: &str) -> ProgressBar {
    let target =
        if io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target((length > 0).then_some(length), target).with_style(style)
}

/// The bar of a payload that tells how far it has come; hidden for one that does not.
pub(super) fn of(progress: Option<Progress>, limit: Option<Duration>) -> ProgressBar {
    let Some(Progress { of, .. }) = progress else { return ProgressBar::hidden() };
    let template = match (of, limit) {
        (Some(_), _) => "{bar:30} {percent:>3} %  {human_pos} pages  {per_sec}  {eta} left",
        (None, Some(_)) => "{elapsed_precise}  {human_pos} pages  {per_sec}",
        (None, None) => "{elapsed_precise}  {human_pos} pages  {per_sec}  (Ctrl-C ends it)",
    };
    bar(of.unwrap_or(0), template)
}

/// The bar of populating memory.
pub fn bytes(what: &str, bytes: u64) -> ProgressBar {
    bar(bytes, &format!("{what} {{bar:30}} {{binary_bytes}} of {{binary_total_bytes}}  {{eta}} left"))
}

/// Maps memory, and populates it where that is asked for, with a bar.
pub(super) fn map(config: MemoryConfig) -> Result<Memory, memory::Error> {
    let memory = Memory::map(RAM, config)?;
    if config.prealloc {
        let bar = bytes("populating", config.size);
        memory.populate(|bytes| bar.inc(bytes))?;
        bar.finish_and_clear();
    }
    Ok(memory)
}
