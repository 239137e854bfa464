//! Waiting in tests for other processes and threads.

use std::thread;
use std::time::{Duration, Instant};

use crate::Failed;

/// A limit for fast operations, on the slowest host. An emulated host takes minutes for what takes
/// seconds elsewhere.
pub const LIMIT: Duration = Duration::from_secs(300);

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
