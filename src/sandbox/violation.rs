//! Handles a system call that the thread's kind may not make: the process ends, with one line that
//! says why.
//!
//! Everything here but [`introduce`] runs in a signal handler, under the thread's own filter. It
//! does not allocate or wait for a lock. Its only calls are write, close, the terminal's ioctls and
//! exit_group.

use std::cell::Cell;
use std::fmt::{self, Write};

use super::ThreadKind;
use super::names;
use vellum_sys::{seccomp, terminal};

/// The exit status: 128 + SIGSYS.
pub const EXIT_STATUS: i32 = 128 + libc::SIGSYS;

/// The size of the kernel's own thread names (TASK_COMM_LEN).
const NAME: usize = 16;

thread_local! {
    /// The calling thread's kind and name. It has no initializer or destructor, so a signal handler
    /// may read it.
    static SELF: Cell<Option<(ThreadKind, [u8; NAME])>> = const { Cell::new(None) };
}

/// Records the calling thread's kind and name for [`report`].
pub fn introduce(kind: ThreadKind, name: &str) {
    let mut bytes = [0; NAME];
    let length = name.floor_char_boundary(NAME);
    bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
    SELF.set(Some((kind, bytes)));
}

/// Reports the call and ends the process.
pub fn report(call: seccomp::Trapped) -> ! {
    terminal::restore();
    let mut line = Line { bytes: [0; 256], length: 0 };
    // A line that does not fit is cut off, which is not an error.
    let _ = describe(&mut line, SELF.get(), call);
    seccomp::write_stderr(&line.bytes[..line.length]);
    seccomp::exit_now(EXIT_STATUS)
}

fn describe(
    line: &mut impl Write,
    thread: Option<(ThreadKind, [u8; NAME])>,
    call: seccomp::Trapped,
) -> fmt::Result {
    line.write_str("vellum: sandbox: ")?;
    match &thread {
        Some((kind, name)) => {
            let length = name.iter().position(|&byte| byte == 0).unwrap_or(NAME);
            let name = str::from_utf8(&name[..length]).unwrap_or("?");
            write!(line, "{kind} thread {name}")?;
        }
        // A thread that main has started has main's filter until it introduces itself.
        None => line.write_str("a new thread")?,
    }
    let name = names::of(call.number).unwrap_or("unknown");
    write!(line, " called {name} (system call {}", call.number)?;
    if i64::from(call.number) == libc::SYS_ioctl {
        write!(line, ", request {:#x}", call.second as u32)?;
    }
    line.write_str("), which it may not; killed\n")
}

/// A line of text on the stack.
struct Line {
    bytes: [u8; 256],
    length: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let free = &mut self.bytes[self.length..];
        let length = text.len().min(free.len());
        free[..length].copy_from_slice(&text.as_bytes()[..length]);
        self.length += length;
        if length == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_names_thread_and_call() {
        let mut text = String::new();
        let mut name = [0; NAME];
        name[..5].copy_from_slice(b"vcpu3");
        let call = seccomp::Trapped { number: libc::SYS_ioctl as i32, second: 0x5412 };
        describe(&mut text, Some((ThreadKind::Vcpu, name)), call).unwrap();
        assert_eq!(
            text,
            format!(
                "vellum: sandbox: vcpu thread vcpu3 called ioctl (system call {}, request 0x5412), which it may not; killed\n",
                libc::SYS_ioctl
            )
        );
    }

    #[test]
    fn a_line_is_cut_where_it_is_full() {
        let mut line = Line { bytes: [0; 256], length: 0 };
        assert!(line.write_str(&"x".repeat(300)).is_err());
        assert_eq!(line.length, 256);
    }
}
