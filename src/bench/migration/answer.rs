//! What a fault on memory that follows its guest costs at least: a userfaultfd, a connection on which the page is asked for, and somebody at
//! its other end who has it. Nothing else is asked, checked or remembered. Beside it a stream of pages comes in by another connection, as
//! memory does that nobody waits for, at half of what that connection can carry.
//!
//! All of it is in this process, and its memory is as small as can be.

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

/// Pages that are waited for.
const FAULTS: u64 = 2000;
/// What comes in at once, and into how much memory, over and over again.
const BLOCK: usize = 128 << 10;
const ROOM: u64 = 64 << 20;
/// How long the connection is measured.
const MEASURED: Duration = Duration::from_millis(300);
/// What asks for a page is as long as a header of the wire.
const ASKING: usize = vellum_migration::wire::HEADER;

/// What was measured.
#[derive(Default)]
pub(super) struct Answer {
    /// Bytes a second that the connection carries, and that are put into memory.
    pub speed: f64,
    /// From when a fault is read until its page is there, in seconds, each.
    pub each: Vec<f64>,
}

/// A connection whose other end sends pages, no faster than a cap, until nobody wants them any more.
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

/// Puts what comes into memory that has nothing there, until the other end is closed or `lasts` is over; how many bytes these were.
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

/// What a connection carries when nothing else goes on.
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

/// Answers each fault on `memory` by asking at `link`; how long each took.
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

/// Measures.
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
        // Whoever still waits, where that has failed, goes on.
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
