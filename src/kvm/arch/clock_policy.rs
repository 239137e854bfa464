//! The time between saving a machine and restoring it: the part of its clocks that all
//! architectures share.

use std::time::Duration;

use vellum_sys::clock;

/// Whether the time between saving and restoring counts for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockPolicy {
    /// It counts, by the hosts' real time: a migration.
    Passes,
    /// It does not count: a snapshot.
    Stands,
}

impl ClockPolicy {
    /// The guest's time from real time `then` to `now`, both in nanoseconds.
    pub fn passed(self, then: u64, now: u64) -> Duration {
        match self {
            Self::Passes => Duration::from_nanos(now.saturating_sub(then)),
            Self::Stands => Duration::ZERO,
        }
    }
}

/// The host's real time in nanoseconds.
pub fn now() -> u64 {
    clock::realtime().as_nanos() as u64
}

/// A reading whose width is at most this is near enough, in nanoseconds.
const NEAR: u64 = 20_000;

/// How often a clock is read if readings are wider.
const ATTEMPTS: usize = 5;

/// Reads a clock, and the host's real time of the reading, in nanoseconds. This thread may lose its
/// CPU in between, and a guest takes a clock that has jumped against its others for unstable. So of
/// a few readings the one counts that took the least time.
///
/// # Errors
/// Those of `read`.
pub fn timed<T, E>(mut read: impl FnMut() -> Result<T, E>) -> Result<(T, u64), E> {
    nearest(now, &mut read)
}

fn nearest<T, E>(
    mut now: impl FnMut() -> u64,
    read: &mut impl FnMut() -> Result<T, E>,
) -> Result<(T, u64), E> {
    let mut attempt = || {
        let before = now();
        let value = read()?;
        let width = now().saturating_sub(before);
        Ok((width, (value, before + width / 2)))
    };
    let mut best = attempt()?;
    for _ in 1..ATTEMPTS {
        if best.0 <= NEAR {
            break;
        }
        let other = attempt()?;
        if other.0 < best.0 {
            best = other;
        }
    }
    Ok(best.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reading_that_took_the_least_time_counts() {
        let told = |times: &[u64]| {
            let (mut times, mut reads) = (times.iter().copied(), 0);
            let now = || times.next().expect("no more readings than needed");
            nearest(now, &mut || {
                reads += 1;
                Ok::<_, ()>(reads)
            })
        };
        assert_eq!(told(&[100, 100 + NEAR]), Ok((1, 100 + NEAR / 2)));
        // The first is interrupted, the second is near.
        assert_eq!(told(&[0, 1_000_000, 1_000_000, 1_000_100]), Ok((2, 1_000_050)));
        // All are wide, and the third is the nearest. Real time may be set back in between.
        assert_eq!(told(&[0, 900_000, 0, 800_000, 0, 100_000, 0, 700_000, 0, 600_000]), Ok((3, 50_000)));
    }
}
