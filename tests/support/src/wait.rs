//! Waiting in tests for other processes and threads.

use std::thread;
use std::time::{Duration, Instant};

use vellum_sys::plant::{IMPOSSIBLE, POSSIBLE};

use crate::{Completion, Failed};

/// The time after which an operation hangs, on the slowest and busiest host. An emulated host beside
/// others takes minutes for what takes seconds elsewhere.
pub const LIMIT: Duration = Duration::from_secs(900);

/// The delay between two looks: short compared to the waits, and long enough to leave the CPU to
/// others.
const BETWEEN: Duration = Duration::from_millis(1);

/// Calls `look` until it returns a value. Fails with a message that names `what` when `limit` is
/// over.
pub fn eventually<T>(
    limit: Duration,
    what: &str,
    mut look: impl FnMut() -> Result<Option<T>, Failed>,
) -> Result<T, Failed> {
    let start = Instant::now();
    loop {
        // A look that began before the limit counts, even if this thread got no CPU for long.
        let late = start.elapsed() >= limit;
        if let Some(found) = look()? {
            return Ok(found);
        }
        if late {
            return Err(format!("not within {limit:?}: {what}").into());
        }
        thread::sleep(BETWEEN);
    }
}

/// Repeats a test with a planted fault until it fails. A guest that does not run in a certain
/// moment, as on a busy host, does not meet the fault.
///
/// # Errors
/// It goes right each time, or cannot run.
pub fn is_caught(mut goes_right: impl FnMut() -> Result<bool, Failed>) -> Result<Completion, Failed> {
    if !POSSIBLE {
        return Ok(Completion::ignored_with(IMPOSSIBLE));
    }
    let caught = || Ok((!goes_right()?).then_some(Completion::Completed));
    eventually(LIMIT, "somebody notices the planted fault", caught)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_is_given_and_what_never_comes_is_named() {
        let mut looks = 0;
        let mut third = || {
            looks += 1;
            Ok((looks == 3).then_some(looks))
        };
        assert_eq!(eventually(LIMIT, "a third look", &mut third).unwrap(), 3);
        let never = eventually(Duration::ZERO, "the end of time", || Ok(None::<()>)).unwrap_err();
        assert_eq!(never.message(), Some("not within 0ns: the end of time"));
    }

    #[test]
    fn an_error_ends_the_wait() {
        let error = eventually(LIMIT, "nothing", || Err::<Option<()>, _>("it has ended".into())).unwrap_err();
        assert_eq!(error.message(), Some("it has ended"));
    }
}
