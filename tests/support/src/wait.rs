//! How a test waits for something that another process or thread does.

use std::thread;
use std::time::{Duration, Instant};

use crate::Failed;

/// For what takes no time to speak of, on the slowest host: an emulated one takes minutes for what takes seconds elsewhere.
pub const LIMIT: Duration = Duration::from_secs(300);

/// Between two looks: short beside what is waited for, and long enough to leave the CPU to who is waited for.
const BETWEEN: Duration = Duration::from_millis(1);

/// What `look` gives once that is something; a failure that names `what` once `limit` is over.
pub fn eventually<T>(
    limit: Duration,
    what: &str,
    mut look: impl FnMut() -> Result<Option<T>, Failed>,
) -> Result<T, Failed> {
    let start = Instant::now();
    loop {
        // A look that began before the end of the limit counts, however long this thread waited for its CPU.
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
