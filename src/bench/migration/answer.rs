//! The minimal cost of a postcopy fault: a userfaultfd, a connection for the request, and a peer
//! that has the page. Nothing else is requested, checked or stored. Meanwhile a stream of pages
//! arrives on another connection, at half of that connection's bandwidth, like memory that nothing
//! waits for.
//!
//! All of it runs in this process with very little memory.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Scope;
use std::time::{Duration, Instant};

use vellum_migration::pace::Pace;
use vellum_sys::clock;
use vellum_sys::mmap::{Mapping, Source, host_page};
use vellum_sys::poll::Poll;
use vellum_sys::uffd::{BATCH, Mode, Uffd};

/// The number of faults.
const FAULTS: u64 = 2000;
/// The size of a block in the stream, and of the memory that it fills again and again.
const BLOCK: usize = 128 << 10;
const ROOM: u64 = 64 << 20;
/// How long the connection is measured.
const MEASURED: Duration = Duration::from_millis(300);
/// The length of a request: a header of the wire protocol.
const ASKING: usize = vellum_migration::wire::HEADER;

/// The results.
#[derive(Default)]
pub(super) struct Answer {
    /// Bytes per second that the connection carries into memory.
    pub speed: f64,
    /// The time from reading a fault until its page is in place, in seconds, for each fault.
    pub each: Vec<f64>,
}

/// A connection whose peer sends pages, at most at a given rate, until `over`.
fn stream<'scope>(
    scope: &'scope Scope<'scope, '_>,
    cap: Option<u64>,
    over: &'scope AtomicBool,
) -> io::Result<UnixStream> {
    let (mut from, to) = UnixStream::pair()?;
    scope.spawn(move || {
        clock::wait_exactly();
        let (block, began, mut pace) = (vec![1; BLOCK], Instant::now(), Pace::new(cap));
        while !over.load(Ordering::Relaxed) && from.write_all(&block).is_ok() {
            pace.sent(BLOCK as u64, began.elapsed());
            if let Some(wait) = pace.holds_back(began.elapsed()) {
                std::thread::sleep(wait);
            }
        }
    });
    Ok(to)
}

/// Fills empty memory with incoming data until the peer closes the connection or `lasts` expires.
/// Returns the number of bytes.
fn take(mut from: UnixStream, lasts: Option<Duration>) -> io::Result<u64> {
    let (uffd, room) = (Uffd::new(Mode::Missing)?, Mapping::new(ROOM, host_page(), Source::Anonymous)?);
    uffd.register(&room, 0, ROOM, Mode::Missing)?;
    let (mut block, mut bytes, began) = (vec![0; BLOCK], 0, Instant::now());
    while lasts.is_none_or(|lasts| began.elapsed() < lasts) {
        if from.read_exact(&mut block).is_err() {
            break;
        }
        let at = bytes % ROOM;
        if at == 0 {
            room.advise_range(0, ROOM, libc::MADV_DONTNEED)?;
        }
        uffd.copy(&room, at, &block, host_page())?;
        bytes += BLOCK as u64;
    }
    Ok(bytes)
}

/// The bandwidth of an idle connection.
fn speed() -> io::Result<f64> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let to = stream(scope, None, &over)?;
        let began = Instant::now();
        let bytes = take(to, Some(MEASURED));
        over.store(true, Ordering::Relaxed);
        Ok(bytes? as f64 / began.elapsed().as_secs_f64())
    })
}

/// Resolves each fault on `memory` with a request on `link`. Returns the durations.
fn answers(uffd: &Uffd, memory: &Mapping, mut link: UnixStream) -> io::Result<Vec<f64>> {
    let (mut each, mut faults) = (Vec::with_capacity(FAULTS as usize), [(0, 0); BATCH]);
    let mut page = vec![0; host_page() as usize];
    while (each.len() as u64) < FAULTS {
        let mut poll = Poll::default();
        poll.readable(uffd.descriptor());
        poll.wait(None)?;
        let taken = uffd.take_faults(&mut faults)?;
        for (address, _) in &faults[..taken] {
            let since = Instant::now();
            link.write_all(&[0; ASKING])?;
            link.read_exact(&mut page)?;
            let offset = (address - memory.as_ptr() as u64) / host_page() * host_page();
            uffd.copy(memory, offset, &page, host_page())?;
            each.push(since.elapsed().as_secs_f64());
        }
    }
    Ok(each)
}

/// Runs the measurement.
pub(super) fn measure() -> io::Result<Answer> {
    let speed = speed()?;
    let over = AtomicBool::new(false);
    let uffd = Uffd::new(Mode::Missing)?;
    let memory = Arc::new(Mapping::new(FAULTS * host_page(), host_page(), Source::Anonymous)?);
    uffd.register(&memory, 0, memory.len(), Mode::Missing)?;
    let each = std::thread::scope(|scope| {
        let beside = stream(scope, Some((speed / 2.0) as u64), &over)?;
        scope.spawn(move || take(beside, None));
        let (mut serves, link) = UnixStream::pair()?;
        scope.spawn(move || {
            let (mut asked, page) = ([0; ASKING], vec![1; host_page() as usize]);
            while serves.read_exact(&mut asked).is_ok() && serves.write_all(&page).is_ok() {}
        });
        let touched = memory.clone();
        scope.spawn(move || {
            let words = host_page() as usize / 8;
            touched.words().iter().step_by(words).for_each(|word| word.store(1, Ordering::Relaxed));
        });
        let each = answers(&uffd, &memory, link);
        // If that failed, a thread may still wait for a page. This releases it.
        let freed = uffd.unregister(&memory, 0, memory.len());
        over.store(true, Ordering::Relaxed);
        freed.and(each)
    })?;
    Ok(Answer { speed, each })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_is_answered() {
        if Uffd::new(Mode::Missing).is_err() {
            eprintln!("needs a userfaultfd that sees KVM's faults (vellum doctor)");
            return;
        }
        let answer = measure().unwrap();
        assert!(answer.speed > 0.0);
        assert_eq!(answer.each.len() as u64, FAULTS);
    }
}
