//! Tasks that switch: a token that goes around a ring of processes, like lmbench's `lat_ctx`, and
//! groups of senders and receivers, like `hackbench`.
//!
//! Both fork, so they run in a single-threaded process of their own: PID 1 starts this program
//! again with the request as its argument. On a host it can be started by hand in the same way, to
//! measure the same code there. Forked children allocate nothing.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use crate::{Event, Hackbench, LatCtx};

use crate::sys;

type Tell<'a> = &'a mut dyn FnMut(Event) -> io::Result<()>;

/// The maximum number of tasks of a ring, and of all groups. Each uses descriptors, and the default
/// limit of a process is 1024.
const MAX_TASKS: u64 = 400;
/// The maximum number of senders of a group. It has as many receivers.
const MAX_PAIRS: u64 = 100;
/// The maximum length of a message.
const MAX_BYTES: u64 = 4096;

/// A one-way stream.
fn stream(sockets: bool) -> io::Result<(File, File)> {
    let files = |(from, to): (OwnedFd, OwnedFd)| (File::from(from), File::from(to));
    if sockets {
        let (from, to) = UnixStream::pair()?;
        return Ok(files((from.into(), to.into())));
    }
    let (from, to) = io::pipe()?;
    Ok(files((from.into(), to.into())))
}

/// Checks that a number in a request is in range.
fn within(what: &str, value: u64, least: u64, most: u64) -> io::Result<()> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(io::Error::other(format!("{what} {value} is out of range: {least} to {most}")))
}

/// A ring of `work.tasks` processes on one CPU, with this one as the first. A token goes around it
/// `work.rounds` times, and each task that has it reads its working set. The cost of a task that
/// passes the token to itself is subtracted: the pipe, and the cached working set.
pub fn lat_ctx(work: &LatCtx, tell: Tell<'_>) -> io::Result<()> {
    within("tasks", work.tasks, 2, MAX_TASKS)?;
    within("rounds", work.rounds, 1, u64::from(u32::MAX))?;
    within("repeat", work.repeat, 1, 1000)?;
    within("kib", work.kib, 0, 1 << 20)?;
    sys::stay_on_this_cpu()?;
    let set = vec![1u32; (work.kib << 8) as usize];
    let pipes = (0..work.tasks).map(|_| stream(false)).collect::<io::Result<Vec<_>>>()?;
    let mut children = Vec::new();
    for at in 1..pipes.len() {
        children.push(sys::fork(|| {
            let (from, to) = (&pipes[at - 1].0, &pipes[at].1);
            loop {
                hop(from, to, &set)?;
            }
        })?);
    }
    // The token enters at the first pipe, and leaves from the last.
    let (first, last) = (&pipes[0].1, &pipes[pipes.len() - 1].0);
    let round = || -> io::Result<()> {
        pass(first)?;
        take(last)?;
        read(&set);
        Ok(())
    };
    let result = (|| {
        for _ in 0..work.rounds.min(1000) {
            round()?;
        }
        for repeat in 0..work.repeat {
            let began = Instant::now();
            for _ in 0..work.rounds {
                round()?;
            }
            let ring_ns = began.elapsed().as_nanos() as u64;
            let own_ns = alone(work, &set)?;
            let switches = work.rounds * work.tasks;
            tell(Event::LatCtx { repeat: repeat + 1, switches, ring_ns, own_ns })?;
        }
        Ok(())
    })();
    for child in children {
        sys::kill(child)?;
        sys::wait(child)?;
    }
    result
}

/// One task: takes the token, reads its working set, passes the token on.
fn hop(from: &File, to: &File, set: &[u32]) -> io::Result<()> {
    take(from)?;
    read(set);
    pass(to)
}

fn take(mut from: &File) -> io::Result<()> {
    from.read_exact(&mut [0; 4])
}

fn pass(mut to: &File) -> io::Result<()> {
    to.write_all(&[0; 4])
}

fn read(set: &[u32]) {
    std::hint::black_box(set.iter().fold(0u32, |sum, word| sum.wrapping_add(*word)));
}

/// The nanoseconds for as many hops as in a measurement, from this task to itself through as many
/// pipes.
fn alone(work: &LatCtx, set: &[u32]) -> io::Result<u64> {
    let pipes = (0..work.tasks).map(|_| stream(false)).collect::<io::Result<Vec<_>>>()?;
    let began = Instant::now();
    for _ in 0..work.rounds {
        for (from, to) in &pipes {
            pass(to)?;
            take(from)?;
            read(set);
        }
    }
    Ok(began.elapsed().as_nanos() as u64)
}

/// The common start of hackbench's tasks.
struct Start {
    ready: File,
    go: File,
}

impl Start {
    /// Reports that this task is ready, and waits for all. The byte that starts them is never read.
    fn wait(&self) -> io::Result<()> {
        (&self.ready).write_all(b"*")?;
        sys::wait_readable(&self.go)
    }
}

/// `work.groups` groups of `work.pairs` senders and as many receivers. Each sender writes
/// `work.messages` messages to each receiver of its group. Measures from the common start to the
/// end of the last task.
pub fn hackbench(work: &Hackbench, tell: Tell<'_>) -> io::Result<()> {
    within("pairs", work.pairs, 1, MAX_PAIRS)?;
    within("groups times pairs", work.groups.saturating_mul(work.pairs), 1, MAX_TASKS)?;
    within("messages", work.messages, 1, u64::from(u32::MAX))?;
    within("bytes", work.bytes, 1, MAX_BYTES)?;
    let (ready, says) = stream(false)?;
    let (go, mut lets) = stream(false)?;
    let start = Start { ready: says, go };
    let tasks = 2 * work.groups * work.pairs;
    std::thread::scope(|scope| {
        let (mut children, mut threads) = (Vec::new(), Vec::new());
        for _ in 0..work.groups {
            let streams = (0..work.pairs).map(|_| stream(!work.pipes)).collect::<io::Result<Vec<_>>>()?;
            let (sources, sinks): (Vec<File>, Vec<File>) = streams.into_iter().unzip();
            if work.threads {
                let sinks = std::sync::Arc::new(sinks);
                for source in sources {
                    let start = &start;
                    threads.push(scope.spawn(move || receive(work, start, &source)));
                }
                for _ in 0..work.pairs {
                    let (start, sinks) = (&start, sinks.clone());
                    threads.push(scope.spawn(move || send(work, start, &sinks)));
                }
            } else {
                for source in &sources {
                    children.push(sys::fork(|| receive(work, &start, source))?);
                }
                for _ in 0..work.pairs {
                    children.push(sys::fork(|| send(work, &start, &sinks))?);
                }
            }
        }
        (0..tasks).try_for_each(|_| (&ready).read_exact(&mut [0]))?;
        let began = Instant::now();
        lets.write_all(b"*")?;
        let mut failed = 0;
        for child in children {
            failed += u64::from(sys::wait(child)? != 0);
        }
        for thread in threads {
            failed += u64::from(!matches!(thread.join(), Ok(Ok(()))));
        }
        let ns = began.elapsed().as_nanos() as u64;
        if failed > 0 {
            return Err(io::Error::other(format!("{failed} of {tasks} tasks failed")));
        }
        tell(Event::Hackbench { tasks, messages: work.groups * work.pairs * work.pairs * work.messages, ns })
    })
}

fn send(work: &Hackbench, start: &Start, sinks: &[File]) -> io::Result<()> {
    let message = [0; MAX_BYTES as usize];
    start.wait()?;
    for _ in 0..work.messages {
        for mut sink in sinks {
            sink.write_all(&message[..work.bytes as usize])?;
        }
    }
    Ok(())
}

fn receive(work: &Hackbench, start: &Start, mut source: &File) -> io::Result<()> {
    let mut message = [0; MAX_BYTES as usize];
    start.wait()?;
    for _ in 0..work.pairs * work.messages {
        source.read_exact(&mut message[..work.bytes as usize])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(work: impl FnOnce(Tell<'_>) -> io::Result<()>) -> io::Result<Vec<Event>> {
        let mut events = Vec::new();
        work(&mut |event| {
            events.push(event);
            Ok(())
        })?;
        Ok(events)
    }

    #[test]
    fn a_token_goes_round_a_ring_of_processes() {
        for tasks in [2, 5] {
            let work = LatCtx { tasks, rounds: 50, repeat: 2, kib: 4 };
            let events = events(|tell| lat_ctx(&work, tell)).unwrap();
            let [Event::LatCtx { switches, ring_ns, own_ns, .. }, Event::LatCtx { repeat: 2, .. }] =
                events[..]
            else {
                panic!("{events:?}")
            };
            assert_eq!(switches, 50 * tasks);
            assert!(ring_ns > 0 && own_ns > 0);
        }
    }

    #[test]
    fn every_message_comes_by_pipe_and_socket_to_processes_and_threads() {
        for (threads, pipes) in [(false, false), (false, true), (true, false), (true, true)] {
            let work = Hackbench { groups: 2, pairs: 3, threads, pipes, messages: 5, bytes: 100 };
            let events = events(|tell| hackbench(&work, tell)).unwrap();
            let [Event::Hackbench { tasks: 12, messages: 90, ns: 1.. }] = events[..] else {
                panic!("{events:?}")
            };
        }
    }

    #[test]
    fn what_cannot_be_had_is_refused_with_its_range() {
        let ring = LatCtx { tasks: 1, rounds: 1, repeat: 1, kib: 0 };
        let says = events(|tell| lat_ctx(&ring, tell)).unwrap_err().to_string();
        assert_eq!(says, "tasks 1 is out of range: 2 to 400");
        let work =
            Hackbench { groups: u64::MAX, pairs: 20, threads: false, pipes: false, messages: 1, bytes: 1 };
        assert!(
            events(|tell| hackbench(&work, tell)).unwrap_err().to_string().contains("groups times pairs")
        );
    }
}
