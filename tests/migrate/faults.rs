//! A link that damages what it carries, at every message and at random bytes, and processes that
//! are killed or stopped at every message. Whatever happens to the migration, the guest never runs
//! on both sides. It runs on one if a side is left that can run it.
//!
//! `VELLUM_MIGRATION=all` tries every message and 200 bytes. Otherwise a random choice of these is
//! tried. `VELLUM_SEED` repeats a run.

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use support::env::{Machine, Process, TestEnv};
use support::guests::Code;
use support::hosts::real;
use support::{Completion, Failed, LIMIT, Random, ensure, eventually, test};
use vellum_migration::wire::HEADER;

/// What is done to a frame or a byte.
#[derive(Clone, Copy, Debug)]
enum Harm {
    None,
    /// Flips this bit of the byte at this offset.
    Flip(u64, u8),
    /// Sends the frame twice.
    Twice(u64),
    /// Delays the frame, by less than the liveness timeout.
    Late(u64),
    /// Cuts the link before the frame.
    Cut(u64),
    /// Sends this signal before the frame: to the target if the flag is set, otherwise to the
    /// source.
    Signal(u64, bool, &'static str),
}

/// The liveness timeout, the delay of a late frame, and how long a process is stopped, which is
/// longer than the timeout.
const LIVENESS: &str = "--liveness 2s";
const LATE: Duration = Duration::from_millis(500);
const STOPPED: Duration = Duration::from_secs(3);

/// The frames and bytes of one direction.
type Counts = [AtomicU64; 2];

fn kill(pid: u32, signal: &str) {
    // The process may have ended.
    let _ = Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).output();
}

/// Carries frames in one direction until an end is gone.
fn carry(mut from: UnixStream, mut to: UnixStream, harm: Harm, counts: &Counts, pids: [u32; 2]) {
    let mut go_on = |at: u64, bytes: u64| -> std::io::Result<(bool, u64)> {
        let mut frame = vec![0; HEADER];
        from.read_exact(&mut frame)?;
        let len = u32::from_le_bytes(frame[8..12].try_into().expect("four bytes"));
        frame.resize(HEADER + len as usize, 0);
        from.read_exact(&mut frame[HEADER..])?;
        let len = frame.len() as u64;
        match harm {
            Harm::Flip(place, bit) if (bytes..bytes + len).contains(&place) => {
                frame[(place - bytes) as usize] ^= 1 << bit;
            }
            Harm::Twice(which) if which == at => to.write_all(&frame)?,
            Harm::Late(which) if which == at => std::thread::sleep(LATE),
            Harm::Cut(which) if which == at => return Ok((false, 0)),
            Harm::Signal(which, there, signal) if which == at => {
                let pid = pids[usize::from(there)];
                kill(pid, signal);
                if signal == "STOP" {
                    std::thread::spawn(move || {
                        std::thread::sleep(STOPPED);
                        kill(pid, "CONT");
                    });
                }
            }
            _ => (),
        }
        to.write_all(&frame)?;
        counts[0].fetch_add(1, Ordering::Relaxed);
        counts[1].fetch_add(len, Ordering::Relaxed);
        Ok((true, len))
    };
    let (mut at, mut bytes) = (0, 0);
    while let Ok((true, len)) = go_on(at, bytes) {
        (at, bytes) = (at + 1, bytes + len);
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// A relay that harms one direction of its first connection.
fn relay(env: &TestEnv, (back, harm): (bool, Harm), pids: [u32; 2]) -> Result<Arc<[Counts; 2]>, Failed> {
    let listener = UnixListener::bind(env.path("relay.in"))?;
    let there: PathBuf = env.path("there.in");
    let counts: Arc<[Counts; 2]> = Arc::default();
    let counted = counts.clone();
    std::thread::spawn(move || {
        let mut harm = harm;
        while let Ok((source, _)) = listener.accept() {
            let Ok(target) = UnixStream::connect(&there) else { continue };
            let harm = std::mem::replace(&mut harm, Harm::None);
            for way in [false, true] {
                let (Ok(here), Ok(there)) = (source.try_clone(), target.try_clone()) else { continue };
                let (from, to) = if way { (there, here) } else { (here, there) };
                let (harm, counted) = (if way == back { harm } else { Harm::None }, counted.clone());
                std::thread::spawn(move || carry(from, to, harm, &counted[usize::from(way)], pids));
            }
        }
    });
    Ok(counts)
}

/// One migration of a guest that counts on both sides.
struct Attempt {
    env: TestEnv,
    here: Machine,
    there: Machine,
}

/// The side that runs the guest.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Runs {
    Here,
    There,
    Nowhere,
}

impl Attempt {
    /// Starts a guest that counts on its serial port, and a target.
    fn new() -> Result<Self, Failed> {
        let env = TestEnv::new()?;
        let kernel = env.path("kernel");
        // mov dx, 0x3f8; xor eax, eax
        // next: out dx, al; inc eax; mov ecx, 4096; wait: dec ecx; jnz wait; jmp next
        let counts = [0x66, 0xba, 0xf8, 0x03, 0x31, 0xc0, 0xee, 0xff, 0xc0, 0xb9, 0, 16, 0, 0, 0xff, 0xc9]
            .into_iter()
            .chain([0x75, 0xfc, 0xeb, 0xf2]);
        fs::write(&kernel, Code::default().bytes(&counts.collect::<Vec<u8>>()).elf64())?;
        let serial = |name: &str| format!("--serial file={}", env.path(name).display());
        let here = format!("run --kernel {} --memory 2m {}", kernel.display(), serial("out"));
        let here = env.run("here", &here)?;
        let there = env.receive("there", &format!("{} {LIVENESS}", serial("far")))?;
        let attempt = Self { env, here, there };
        eventually(LIMIT, "it counts", || Ok((attempt.counted()[0] > 0).then_some(())))?;
        Ok(attempt)
    }

    /// The count on each side.
    fn counted(&self) -> [u64; 2] {
        ["out", "far"].map(|name| fs::metadata(self.env.path(name)).map_or(0, |file| file.len()))
    }

    /// Migrates the guest over a link that does `harm`. Returns where it runs afterwards, and what
    /// the link carried.
    fn migrate(&mut self, harm: (bool, Harm)) -> Result<(Runs, Arc<[Counts; 2]>), Failed> {
        let pids = [self.here.child.id(), self.there.child.id()];
        let counts = relay(&self.env, harm, pids)?;
        let to = self.env.path("relay.in");
        // Without harm a slow peer must not count as gone.
        let liveness = if matches!(harm.1, Harm::None) { "--liveness 5m" } else { LIVENESS };
        let mut client =
            self.env.migration_client(&format!("migrate here {liveness} --to unix:{}", to.display()))?;
        let killed = matches!(harm.1, Harm::Signal(_, _, "KILL"));
        let decided = eventually(LIMIT, "it is decided", || {
            let unconfirmed = self.env.standing("here").as_deref() == Some("handover-unconfirmed");
            Ok((client.try_wait()?.is_some() || (killed && unconfirmed && self.is_over(1)?)).then_some(()))
        });
        decided.map_err(|error| Failed::from(format!("{error:?}: {:?}", self.standings())))?;
        let ends = [self.is_over(0)?, self.is_over(1)?];
        self.check_client(client)?;
        let before = self.counted();
        // A side that can run the guest does. A target that waits for COMMIT and a source that
        // waits for an answer cannot.
        let can = |side: usize| -> bool {
            let name = ["here", "there"][side];
            !ends[side] && matches!(self.env.standing(name).as_deref(), Some("running" | "migrating"))
        };
        if !can(0) && !can(1) {
            return Ok((Runs::Nowhere, counts));
        }
        let runs = eventually(LIMIT, "somebody runs it", || {
            let now = self.counted();
            Ok(match [now[0] > before[0], now[1] > before[1]] {
                [false, false] => None,
                [true, false] => Some(Runs::Here),
                [false, true] => Some(Runs::There),
                [true, true] => return Err("both run it".into()),
            })
        })?;
        Ok((runs, counts))
    }

    fn is_over(&mut self, side: usize) -> Result<bool, Failed> {
        let machine = if side == 0 { &mut self.here } else { &mut self.there };
        Ok(machine.child.try_wait()?.is_some())
    }

    fn standings(&self) -> [Option<String>; 2] {
        ["here", "there"].map(|name| self.env.standing(name))
    }

    /// Checks that the client prints one line with the reason, and one more if the target had to be
    /// asked.
    fn check_client(&self, mut client: Process) -> Result<(), Failed> {
        if client.try_wait()?.is_none() {
            // The client would try to reach the target for a minute.
            return Ok(());
        }
        let output = client.output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let lines: Vec<&str> = said.lines().collect();
        let good = match output.status.code() {
            Some(0) => lines.len() <= 1,
            Some(1) => {
                (1..=2).contains(&lines.len()) && lines.iter().all(|line| line.starts_with("vellum: "))
            }
            _ => false,
        };
        ensure(good, || format!("{output:?}"))
    }

    /// Ends both sides, and checks that the guest's numbers are consecutive. A guest that ran on
    /// both sides would have printed some twice.
    fn check(self, runs: Runs) -> Result<(), Failed> {
        let Self { env, here, there } = self;
        drop((here, there));
        let read = |name: &str| fs::read(env.path(name)).unwrap_or_default();
        let (out, far) = (read("out"), read("far"));
        let whole = [&out[..], &far[..]].concat();
        let wrong = whole.iter().enumerate().find(|(at, byte)| **byte != *at as u8);
        ensure(wrong.is_none(), || {
            format!("{wrong:?} is not the next: {} here, {} there", out.len(), far.len())
        })?;
        ensure(runs != Runs::Here || far.is_empty(), || format!("it has run there, too: {} bytes", far.len()))
    }
}

/// A random choice of at most `most` elements, or all of them if `VELLUM_MIGRATION=all` is set.
fn choice<T>(random: &mut Random, mut of: Vec<T>, most: usize) -> Vec<T> {
    while !everything() && of.len() > most {
        let which = random.below(of.len() as u64) as usize;
        of.swap_remove(which);
    }
    of
}

fn everything() -> bool {
    std::env::var("VELLUM_MIGRATION").is_ok_and(|value| value == "all")
}

/// The frames and bytes of a migration without harm, in each direction.
fn measured() -> Result<[[u64; 2]; 2], Failed> {
    let mut attempt = Attempt::new()?;
    let (runs, counts) = attempt.migrate((false, Harm::None))?;
    ensure(runs == Runs::There, || format!("it runs {runs:?}"))?;
    attempt.check(runs)?;
    let of = |way: usize| [0, 1].map(|what| counts[way][what].load(Ordering::Relaxed));
    Ok([of(0), of(1)])
}

#[test(real())]
fn a_link_that_harms_what_it_carries_leaves_exactly_one_guest() -> Result<(), Failed> {
    let mut random = Random::new();
    let whole = measured()?;
    let ways = [false, true].map(|back| (back, whole[usize::from(back)][0]));
    let messages = ways.into_iter().flat_map(|(back, frames)| (0..frames).map(move |at| (back, at)));
    let harms = [Harm::Twice, Harm::Late, Harm::Cut];
    let harms = messages.flat_map(|(back, at)| harms.map(|harm| (back, harm(at))));
    let mut harms = choice(&mut random, harms.collect(), 10);
    let flips = if everything() { 200 } else { 10 };
    for turn in 0..flips {
        let back = turn % 2 == 1;
        let bytes = whole[usize::from(back)][1];
        // Half of the flips are in the state and in what follows it.
        let first = if turn % 4 < 2 { bytes.saturating_sub(20_000) } else { 0 };
        harms.push((back, Harm::Flip(first + random.below(bytes - first), random.below(8) as u8)));
    }
    let (mut moved, mut stayed) = (0, 0);
    for harm in harms {
        let outcome = Attempt::new().and_then(|mut attempt| {
            let (runs, _) = attempt.migrate(harm)?;
            attempt.check(runs).map(|()| runs)
        });
        match outcome.map_err(|error| Failed::from(format!("{harm:?} of {whole:?}: {error:?}")))? {
            Runs::Here => stayed += 1,
            Runs::There => moved += 1,
            Runs::Nowhere => return Err(format!("{harm:?} of {whole:?}: nobody runs it").into()),
        }
    }
    eprintln!("{moved} moved, {stayed} stayed; frames and bytes of a whole migration: {whole:?}");
    ensure(moved > 0 && stayed > 0, || "it all ends alike".into())
}

#[test(real())]
fn a_process_that_is_killed_or_stopped_anywhere_leaves_at_most_one_guest() -> Result<Completion, Failed> {
    if !everything() {
        return Ok(Completion::ignored_with("takes long; VELLUM_MIGRATION=all has it run"));
    }
    let mut random = Random::new();
    let whole = measured()?;
    let ways = [false, true].map(|back| (back, whole[usize::from(back)][0]));
    let messages = ways.into_iter().flat_map(|(back, frames)| (0..frames).map(move |at| (back, at)));
    let victims = [(false, "KILL"), (true, "KILL"), (false, "STOP"), (true, "STOP")];
    let harms = messages
        .flat_map(|(back, at)| victims.map(|(there, signal)| (back, Harm::Signal(at, there, signal))));
    let mut counts = [0; 3];
    for harm in choice(&mut random, harms.collect(), 8) {
        let outcome = Attempt::new().and_then(|mut attempt| {
            let (runs, _) = attempt.migrate(harm)?;
            let standings = attempt.standings();
            // A process that has stopped answering may not have ended yet.
            let ended = match standings[0] {
                None => Some(eventually(LIMIT, "the source ends", || Ok(attempt.here.child.try_wait()?))?),
                Some(_) => None,
            };
            attempt.check(runs).map(|()| (runs, standings, ended.and_then(|status| status.code())))
        });
        let (runs, standings, moved) =
            outcome.map_err(|error| Failed::from(format!("{harm:?} of {whole:?}: {error:?}")))?;
        counts[runs as usize] += 1;
        // No side may run the guest only if one is gone. Before the hand-over the source has it,
        // and after it an answer is missing.
        let nobody = match harm.1 {
            Harm::Signal(_, false, "KILL") => {
                matches!(standings[1].as_deref(), None | Some("uncommitted" | "incoming" | "waiting"))
            }
            // The hand-over is unconfirmed, or had completed before the target was killed.
            Harm::Signal(_, true, "KILL") => {
                standings[0].as_deref() == Some("handover-unconfirmed") || moved == Some(15)
            }
            _ => false,
        };
        ensure(runs != Runs::Nowhere || nobody, || format!("{harm:?} of {whole:?}: {standings:?}"))?;
    }
    eprintln!("{counts:?} here, there, nowhere");
    Ok(Completion::Completed)
}
