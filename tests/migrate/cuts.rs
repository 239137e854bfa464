//! A late or cut link, and the end of one side, most of all during the hand-over.

use std::fs;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};

use support::env::TestEnv;
use support::guests::Code;
use support::hosts::real;
use support::{Failed, LIMIT, Random, ensure, eventually, test};
use vellum_migration::message::Message;
use vellum_migration::wire::{Decoder, Frame, HEADER};
use vellum_sys::mmap::PAGE_SIZE;

use crate::relay::{
    RelayFault, bytes, held_back, held_back_until_again, next_frame, relay, unconfirmed, until_fit,
};
use crate::{ends_with, every_page_is_right, kib, succeeds, with};

/// READY comes too late: the guest runs on, and the next attempt migrates it. Both kinds of machine
/// are then restored twice.
#[test(real())]
fn a_final_pass_that_takes_too_long_is_rolled_back_and_tried_again() -> Result<(), Failed> {
    for pc in [false, true] {
        let env = TestEnv::new()?;
        let (kernel, json) = (env.path("kernel"), env.path("json"));
        fs::write(&kernel, Code::default().spin().elf64())?;
        let (here, there) = match pc {
            false => (
                "run --memory 16m --passes 0 --workload write,rate=2000".into(),
                format!("--json {}", json.display()),
            ),
            true => (
                format!("run --kernel {} --memory 32m --serial null --rng --balloon", kernel.display()),
                "--serial null --rng --balloon".to_owned(),
            ),
        };
        let (here, there) = (env.run("here", &here)?, env.receive("there", &there)?);
        // The source's messages show that the guest was stopped and resumed. Both may happen
        // between two looks at the status on a slow host.
        let (client, release, again) = held_back_until_again(&env, until_fit())?;
        again.recv_timeout(LIMIT)?;
        drop(release);
        with(client.output()?, 0)?;
        ends_with(here, 15)?;
        succeeds(&env.vellum("ctl there stop")?)?;
        ends_with(there, 0)?;
        if !pc {
            every_page_is_right(&json)?;
        }
    }
    Ok(())
}

/// A relay that stops reading from the source when a page of pass `pass` arrives, until the
/// returned sender is dropped. The receiver tells when it has stopped.
fn full_from_pass(env: &TestEnv, pass: u32) -> Result<(Sender<()>, Receiver<()>), Failed> {
    let listener = UnixListener::bind(env.path("relay.in"))?;
    let to = env.path("there.in");
    let ((release, until), (reached, full)) = (channel(), channel());
    std::thread::spawn(move || -> std::io::Result<()> {
        let (mut source, mut target) = (listener.accept()?.0, UnixStream::connect(&to)?);
        let (mut back, mut answers) = (source.try_clone()?, target.try_clone()?);
        std::thread::spawn(move || drop(std::io::copy(&mut answers, &mut back)));
        let mut decoder = Decoder::new(None, PAGE_SIZE as u32);
        let mut reached = Some(reached);
        loop {
            let (header, raw) = next_frame(&mut source, &mut decoder)?;
            let frame = decoder.payload(&header, &raw[HEADER..]).map_err(std::io::Error::other)?;
            if matches!(frame, Frame::Run(run, _) if run.pass == pass)
                && let Some(reached) = reached.take()
            {
                let _ = (reached.send(()), until.recv());
            }
            target.write_all(&raw)?;
        }
    });
    Ok((release, full))
}

/// The target stops reading during the final pass, in the middle of a frame. The guest runs on
/// after the downtime limit, even if the target may be silent for longer. It migrates when the
/// target reads again.
#[test(real())]
fn a_target_that_stops_in_the_final_pass_does_not_hold_the_guest() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    // The guest writes all of its memory in each pass, so that the second pass is the last. Its
    // memory is larger than the sockets' buffers.
    let here = env.run("here", "run --memory 6m --passes 0 --workload write,rate=20000")?;
    let there = env.receive("there", &format!("--json {}", env.path("json").display()))?;
    let (release, full) = full_from_pass(&env, 2)?;
    env.has_written("here", 4 * (6 << 20) / PAGE_SIZE)?;
    let mut events = env.listen("here")?;
    let to = env.path("relay.in");
    let limits = "--bandwidth 4m --downtime 4s --liveness 1h";
    let client = env.migration_client(&format!("migrate here {limits} --to unix:{}", to.display()))?;
    full.recv_timeout(LIMIT)?;
    let paused = env.vellum("ctl here pause")?;
    let refused = String::from_utf8_lossy(&paused.stderr).contains("is being handed over");
    ensure(refused, || format!("this is not the final pass: {paused:?}"))?;
    // The guest is stopped. Old progress events may still arrive, all with the same count.
    let mut stood = None;
    eventually(LIMIT, "it runs on", || {
        let line = events.line()?;
        let done = line["done"].as_u64();
        let Some(done) = done.filter(|_| env.standing("here").as_deref() == Some("migrating")) else {
            return Ok(None);
        };
        Ok((*stood.get_or_insert(done) < done).then_some(()))
    })?;
    drop(release);
    with(client.output()?, 0)?;
    ends_with(here, 15)?;
    succeeds(&env.vellum("ctl there stop")?)?;
    ends_with(there, 0)?;
    every_page_is_right(&env.path("json"))
}

/// Untouched memory is not read, because reading a hole of a file fills it.
#[test(real())]
fn memory_that_was_never_touched_is_not_read() -> Result<(), Failed> {
    for backing in ["memfd", "anonymous"] {
        let env = TestEnv::new()?;
        let kernel = env.path("kernel");
        fs::write(&kernel, Code::default().spin().elf64())?;
        let kernel = kernel.display();
        let line = format!("run --kernel {kernel} --memory 512m,backing={backing} --serial null");
        let (here, there) = (env.run("here", &line)?, env.receive("there", "--serial null")?);
        let pid = here.child.id();
        // The resident part of the guest's memory, and the page tables over it, in KiB. The
        // program's own pages are not counted: they are shared memory too if its file system is in
        // memory.
        let resident = || -> Result<[u64; 2], Failed> {
            let tables = fs::read_to_string(format!("/proc/{pid}/status"))?;
            let maps = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
            let sizes: Vec<u64> = maps.lines().filter_map(|line| kib(line, "Size:")).collect();
            let there: Vec<u64> = maps.lines().filter_map(|line| kib(line, "Rss:")).collect();
            let ram = sizes.iter().zip(there).filter(|(size, _)| **size >= 512 << 10).map(|(_, there)| there);
            Ok([ram.sum(), tables.lines().find_map(|line| kib(line, "VmPTE:")).unwrap_or(0)])
        };
        let before = resident()?;
        let (client, release) = held_back(&env, until_fit(), "--downtime 1h")?;
        eventually(LIMIT, "all has been sent", || {
            Ok((env.standing("there").as_deref() == Some("uncommitted")).then_some(()))
        })?;
        let after = resident()?;
        let grown = after.iter().sum::<u64>().saturating_sub(before.iter().sum());
        // The page tables of all the memory would take 1 MiB.
        ensure(grown < 512, || {
            format!("{backing}: KiB of memory and of page tables: {before:?}, then {after:?}")
        })?;
        drop(release);
        with(client.output()?, 0)?;
        ends_with(here, 15)?;
        succeeds(&env.vellum("ctl there stop")?)?;
        ends_with(there, 0)?;
    }
    Ok(())
}

/// After COMMIT the guest may run on the target. A source that is ended then, in any way, does not
/// run it.
#[test(real())]
fn a_source_that_is_ended_after_commit_leaves_the_guest_to_the_target() -> Result<(), Failed> {
    for signal in [false, true] {
        let env = TestEnv::new()?;
        let here = env.run("here", "run --memory 16m --passes 0")?;
        let there = env.receive("there", &format!("--json {}", env.path("json").display()))?;
        let (client, release) = unconfirmed(&env)?;
        let standing = env.standing("here");
        let paused = env.vellum("ctl here pause")?;
        let refused = String::from_utf8_lossy(&paused.stderr).contains("is being handed over");
        ensure(paused.status.code() == Some(1) && refused, || format!("{paused:?}"))?;
        let said = env.vellum("ctl here resume")?;
        ensure(env.standing("here") == standing, || format!("resumed: {said:?}"))?;
        let ended = if signal {
            let pid = here.child.id().to_string();
            succeeds(&Command::new("kill").args(["-TERM", &pid]).output()?)?;
            ends_with(here, 128 + 15)?
        } else {
            succeeds(&env.vellum("ctl here stop")?)?;
            ends_with(here, 0)?
        };
        let said = String::from_utf8_lossy(&ended.stdout).into_owned();
        ensure(said.contains("may run on the target"), || said.clone())?;
        drop(release);
        with(client.output()?, 1)?;
        succeeds(&env.vellum("ctl there stop")?)?;
        ends_with(there, 0)?;
        every_page_is_right(&env.path("json"))?;
    }
    Ok(())
}

/// The link is cut anywhere, mostly in the hand-over. The guest runs on exactly one side, and every
/// page is right.
#[test(real())]
fn a_link_that_is_cut_leaves_exactly_one_guest() -> Result<(), Failed> {
    let mut generator = Random::new();
    let mut random = move |below: u64| generator.below(below);
    let (mut moved, mut stayed) = (0, 0);
    let mut whole = [0, 0];
    for round in 0..16 {
        let env = TestEnv::new()?;
        let here =
            env.run("here", &format!("run --memory 4m --passes 0 --json {}", env.path("h").display()))?;
        let there = env.receive("there", &format!("--json {}", env.path("t").display()))?;
        // The first round is not cut, and shows how many bytes there are. READY and DONE are the
        // last to come back.
        let done = bytes(&[Message::Done {}]);
        let cut = match round {
            0 => None,
            _ if round % 4 == 0 => Some((false, random(whole[0]))),
            _ if round % 4 == 1 => Some((false, whole[0].saturating_sub(random(400)))),
            // The cut is within DONE: the target runs the guest, and the source has to ask.
            _ if round % 4 == 2 => Some((true, whole[1] - 1 - random(done - 1))),
            _ => Some((true, whole[1].saturating_sub(random(250)))),
        };
        let fault = cut.map_or(RelayFault::None, |(back, after)| RelayFault::Cut { back, after });
        let carried = relay(env.path("relay.in"), env.path("there.in"), fault)?;
        let output = env.migrate("here", "relay", "--liveness 5s --paused")?;
        if round == 0 {
            whole = [0, 1].map(|at| carried[at].load(Ordering::Relaxed));
        }
        let context = || format!("round {round}, cut at {cut:?} of {whole:?}: {output:?}");
        match output.status.code() {
            _ if round % 4 == 2 && output.status.code() != Some(0) => return Err(context().into()),
            Some(0) => {
                moved += 1;
                ends_with(here, 15)?;
                ensure(env.standing("there").as_deref() == Some("paused"), context)?;
                succeeds(&env.vellum("ctl there resume")?)?;
                succeeds(&env.vellum("ctl there stop")?)?;
                ends_with(there, 0)?;
                every_page_is_right(&env.path("t"))?;
            }
            Some(1) => {
                stayed += 1;
                ensure(env.standing("here").as_deref() == Some("paused"), context)?;
                if env.standing("there").as_deref() == Some("uncommitted") {
                    // READY was lost. The target keeps its state until an operator decides.
                    succeeds(&env.vellum("ctl there stop")?)?;
                }
                // The target gives up by itself or is stopped. No machine has arrived.
                ends_with(there, 1)?;
                succeeds(&env.vellum("ctl here resume")?)?;
                succeeds(&env.vellum("ctl here stop")?)?;
                ends_with(here, 0)?;
                every_page_is_right(&env.path("h"))?;
            }
            _ => return Err(context().into()),
        }
    }
    eprintln!("moved {moved}, stayed {stayed}");
    ensure(moved >= 5, || format!("{moved} moved: one that was not cut, and four that had to ask"))
}
