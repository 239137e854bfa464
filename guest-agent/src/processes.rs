//! Processes that fork, start programs, map, unmap and protect memory concurrently, and check what
//! they have written.
//!
//! Each process's actions and expected content are drawn from its number and the seed. The sum over
//! everything found is the same on every machine. Like [`crate::switching`], it runs in a process
//! of its own. The programs that it starts are this program again.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};

use crate::sys::{self, Pages};
use crate::{Event, Processes, Request};

/// The maximum number of processes, without those that each of them starts.
const MAX_PROCESSES: u64 = 200;
/// The maximum number of areas of a process, and of pages of an area.
const AREAS: usize = 8;
const MAX_PAGES: u64 = 32;
/// The number of steps of a started program.
const SHORT: u64 = 3;

/// What one process has done and found.
#[derive(Clone, Copy, Default)]
struct Done {
    forked: u64,
    started: u64,
    mapped: u64,
    protected: u64,
    wrong: u64,
    sum: u64,
}

impl Done {
    const WORDS: usize = 6;

    fn words(self) -> [u64; Self::WORDS] {
        [self.forked, self.started, self.mapped, self.protected, self.wrong, self.sum]
    }

    fn add(&mut self, words: [u64; Self::WORDS]) {
        let [forked, started, mapped, protected, wrong, sum] = words;
        self.forked += forked;
        self.started += started;
        self.mapped += mapped;
        self.protected += protected;
        self.wrong += wrong;
        // The sum is commutative, because processes end in any order.
        self.sum = self.sum.wrapping_add(sum);
    }
}

/// Runs `work.processes` processes to their end.
pub fn run(work: &Processes, tell: &mut dyn FnMut(Event) -> io::Result<()>) -> io::Result<()> {
    if !(1..=MAX_PROCESSES).contains(&work.processes) {
        return Err(io::Error::other(format!(
            "processes {} is out of range: 1 to {MAX_PROCESSES}",
            work.processes
        )));
    }
    let (mut results, result) = io::pipe().map(|(from, to)| {
        (File::from(std::os::fd::OwnedFd::from(from)), File::from(std::os::fd::OwnedFd::from(to)))
    })?;
    let mut children = Vec::new();
    for number in 0..work.processes {
        children.push(sys::fork(|| {
            let words = process(work, number)?.words();
            // Less than PIPE_BUF, so the write is atomic.
            (&result).write_all(words.map(u64::to_le_bytes).as_flattened())
        })?);
    }
    drop(result);
    let mut all = Done::default();
    for _ in 0..work.processes {
        let mut bytes = [0; 8 * Done::WORDS];
        results.read_exact(&mut bytes)?;
        let mut words = [0; Done::WORDS];
        words
            .iter_mut()
            .zip(bytes.as_chunks().0)
            .for_each(|(word, bytes)| *word = u64::from_le_bytes(*bytes));
        all.add(words);
    }
    for child in children {
        all.wrong += u64::from(sys::wait(child)? != 0);
    }
    let Done { forked, started, mapped, protected, wrong, sum } = all;
    tell(Event::Processes { forked, started, mapped, protected, wrong, sum })
}

/// An area of memory and its stamp.
struct Area {
    pages: Pages,
    stamp: u64,
}

impl Area {
    fn new(pages: u64, stamp: u64) -> io::Result<Self> {
        let area = Self { pages: Pages::map(pages as usize)?, stamp };
        area.write(stamp);
        Ok(area)
    }

    fn write(&self, stamp: u64) {
        (0..self.pages.count()).for_each(|page| self.pages.set(page, stamp ^ page as u64));
    }

    /// Checks each page. Adds wrong pages and the sum to `done`.
    fn look(&self, done: &mut Done) {
        for page in 0..self.pages.count() {
            let found = self.pages.get(page);
            done.wrong += u64::from(found != self.stamp ^ page as u64);
            done.sum = done.sum.rotate_left(5).wrapping_add(found);
        }
    }
}

/// One of the processes.
fn process(work: &Processes, number: u64) -> io::Result<Done> {
    let mut draws = (work.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)) | 1;
    let mut draw = |below: u64| {
        draws ^= draws << 13;
        draws ^= draws >> 7;
        draws ^= draws << 17;
        draws % below
    };
    let (mut done, mut areas) = (Done::default(), [const { None::<Area> }; AREAS]);
    let pipe = io::pipe()?;
    for step in 0..work.steps {
        let stamp = number << 48 | step << 16 | 1 << 8;
        let place = draw(AREAS as u64) as usize;
        match (draw(10), &mut areas[place]) {
            (_, empty @ None) => {
                *empty = Some(Area::new(1 + draw(MAX_PAGES), stamp)?);
                done.mapped += 1;
            }
            (0..3, Some(area)) => {
                area.look(&mut done);
                areas[place] = None;
            }
            (3..5, Some(area)) => {
                protect(area, stamp, &pipe, &mut done)?;
                done.protected += 1;
            }
            (5, _) => {
                fork(&areas, stamp, &mut done)?;
                done.forked += 1;
            }
            // Starting a program is expensive.
            (6, _) if step % 4 == 0 && work.start => {
                start(work.seed ^ stamp, &mut done)?;
                done.started += 1;
            }
            (_, Some(area)) => {
                area.look(&mut done);
                area.stamp = stamp;
                area.write(stamp);
            }
        }
        // Let another process run.
        std::thread::yield_now();
    }
    areas.iter().flatten().for_each(|area| area.look(&mut done));
    Ok(done)
}

/// Removes access to `area`, checks that it is removed, for the kernel too, and restores it.
fn protect(
    area: &mut Area,
    stamp: u64,
    (from, to): &(io::PipeReader, io::PipeWriter),
    done: &mut Done,
) -> io::Result<()> {
    area.pages.protect(libc::PROT_READ)?;
    area.look(done);
    let mut to = to;
    to.write_all(b"*")?;
    // A writable page would take the byte, and a readable one would supply one.
    let taken = area.pages.is_written_from(from);
    area.pages.protect(libc::PROT_NONE)?;
    let given = area.pages.is_read_into(to);
    area.pages.protect(libc::PROT_READ | libc::PROT_WRITE)?;
    area.look(done);
    done.wrong += u64::from(taken) + u64::from(given);
    let mut from = from;
    if !taken || given {
        from.read_exact(&mut [0])?;
    }
    area.stamp = stamp;
    area.write(stamp);
    Ok(())
}

/// Forks a child that checks its parent's content and overwrites it. The parent's content must not
/// change.
fn fork(areas: &[Option<Area>], stamp: u64, done: &mut Done) -> io::Result<()> {
    let child = sys::fork(|| {
        let mut found = Done::default();
        for area in areas.iter().flatten() {
            area.look(&mut found);
            area.write(stamp | 1);
            let own = |page: usize| area.pages.get(page) == (stamp | 1) ^ page as u64;
            found.wrong += u64::from(!(0..area.pages.count()).all(own));
        }
        if found.wrong == 0 { Ok(()) } else { Err(io::Error::other("differs from its parent's content")) }
    })?;
    std::thread::yield_now();
    done.wrong += u64::from(sys::wait(child)? != 0);
    areas.iter().flatten().for_each(|area| area.look(done));
    Ok(())
}

/// Starts this program again, with a few steps of the same.
fn start(seed: u64, done: &mut Done) -> io::Result<()> {
    let work = Processes { processes: 1, steps: SHORT, start: false, seed };
    let request = CString::new(serde_json::to_string(&Request::Processes(work))?)?;
    let child = sys::fork(|| Err(sys::become_this_program(&request)))?;
    done.wrong += u64::from(sys::wait(child)? != 0);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(seed: u64) -> Event {
        let mut events = Vec::new();
        // Tests have threads, and their program is not the agent.
        let work = Processes { processes: 3, steps: 60, start: false, seed };
        run(&work, &mut |event| {
            events.push(event);
            Ok(())
        })
        .unwrap();
        events.remove(0)
    }

    #[test]
    fn what_is_found_depends_on_the_seed_alone() {
        let first = sums(5);
        let Event::Processes { forked: 1.., mapped: 1.., protected: 1.., wrong: 0, sum, .. } = first else {
            panic!("{first:?}")
        };
        assert_eq!(sums(5), first);
        assert!(!matches!(sums(6), Event::Processes { sum: other, .. } if other == sum));
    }
}
