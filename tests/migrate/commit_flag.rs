//! Two processes of one host share a fence. If the link is lost around COMMIT, with or without one
//! of the processes, the fence decides where the guest runs, without a new connection.

use std::io::Write;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::time::Duration;

use support::env::TestEnv;
use support::hosts::real;
use support::{Failed, LIMIT, ensure, eventually, test};
use vellum_migration::message::Message;
use vellum_migration::wire::{Decoder, Frame, HEADER};
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::poll::Poll;
use vellum_sys::socket;

use crate::relay::next_frame;
use crate::{ends_with, every_page_is_right, succeeds};

/// A relay that also passes on the fence. It cuts the link at COMMIT, which it delivers if
/// `deliver`. Before that it kills `victim`.
pub fn cut_at_commit(env: &TestEnv, deliver: bool, victim: Option<u32>) -> Result<(), Failed> {
    let listener = UnixListener::bind(env.path("relay.in"))?;
    let to = env.path("there.in");
    std::thread::spawn(move || -> std::io::Result<()> {
        let (mut source, mut target) = (listener.accept()?.0, UnixStream::connect(&to)?);
        // A second connection is refused.
        drop(listener);
        let (mut back, mut answers) = (source.try_clone()?, target.try_clone()?);
        std::thread::spawn(move || drop(std::io::copy(&mut answers, &mut back)));
        let mut poll = Poll::default();
        poll.readable(&source);
        poll.wait(Some(Duration::from_secs(60)))?;
        let (mut first, mut fence) = (vec![0; 4096], Vec::new());
        let count = socket::receive(&source, &mut first, &mut fence)?;
        first.truncate(count);
        let fence: Vec<_> = fence.iter().map(AsFd::as_fd).collect();
        assert!((1..=2).contains(&fence.len()), "HELLO brings the fence, and RAM where that is handed over");
        socket::send(&target, &first, &fence)?;
        let mut decoder = Decoder::new(None, PAGE_SIZE as u32);
        let hello = first.first_chunk().expect("a whole header");
        assert_eq!(decoder.header(hello).expect("a header").len as usize, count - HEADER);
        loop {
            let (header, raw) = next_frame(&mut source, &mut decoder)?;
            let frame = decoder.payload(&header, &raw[HEADER..]).map_err(std::io::Error::other)?;
            let commit = matches!(frame, Frame::Message(Message::Commit { .. }));
            if let Some(victim) = victim.filter(|_| commit) {
                let _ = Command::new("kill").args(["-KILL", &victim.to_string()]).status();
            }
            if !commit || deliver {
                target.write_all(&raw)?;
            }
            if commit {
                let _ = (source.shutdown(Shutdown::Both), target.shutdown(Shutdown::Both));
                return Ok(());
            }
        }
    });
    Ok(())
}

/// The link is cut at COMMIT, which is lost or delivered. Exactly one side has the guest at once,
/// and every page is right.
#[test(real())]
fn a_link_that_is_lost_at_commit_is_decided_by_the_fence() -> Result<(), Failed> {
    for deliver in [false, true] {
        let env = TestEnv::new()?;
        let here =
            env.run("here", &format!("run --memory 8m --passes 0 --json {}", env.path("h").display()))?;
        let there = env.receive("there", &format!("--json {}", env.path("t").display()))?;
        cut_at_commit(&env, deliver, None)?;
        let output = env.migrate("here", "relay", "--liveness 1h --json")?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure(!said.contains("unconfirmed"), || said.clone())?;
        let (json, last) = match output.status.code() {
            Some(0) => {
                ends_with(here, 15)?;
                ("t", ("there", there))
            }
            Some(1) => {
                ends_with(there, 1)?;
                ("h", ("here", here))
            }
            _ => return Err(format!("{output:?}").into()),
        };
        let (name, machine) = last;
        ensure(env.standing(name).as_deref() == Some("running"), || format!("{:?}", env.standing(name)))?;
        succeeds(&env.vellum(&format!("ctl {name} stop"))?)?;
        ends_with(machine, 0)?;
        every_page_is_right(&env.path(json))?;
    }
    Ok(())
}

/// The source dies after it has committed, and COMMIT is lost: the target runs the guest.
#[test(real())]
fn a_source_that_dies_at_commit_leaves_the_guest_to_the_target() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 8m --passes 0")?;
    let there = env.receive("there", &format!("--json {}", env.path("t").display()))?;
    cut_at_commit(&env, false, Some(here.child.id()))?;
    let output = env.migrate("here", "relay", "--liveness 1h")?;
    ensure(output.status.code() == Some(1), || format!("{output:?}"))?;
    eventually(LIMIT, "the target runs it", || {
        Ok((env.standing("there").as_deref() == Some("running")).then_some(()))
    })?;
    drop(here);
    succeeds(&env.vellum("ctl there stop")?)?;
    ends_with(there, 0)?;
    every_page_is_right(&env.path("t"))
}

/// The target dies before it has run the guest: the source runs on, although it has committed.
#[test(real())]
fn a_target_that_dies_at_commit_leaves_the_guest_to_the_source() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", &format!("run --memory 8m --passes 0 --json {}", env.path("h").display()))?;
    let there = env.receive("there", "")?;
    cut_at_commit(&env, false, Some(there.child.id()))?;
    let output = env.migrate("here", "relay", "--liveness 1h")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(output.status.code() == Some(1) && said.contains("stays where it is"), || format!("{output:?}"))?;
    ensure(env.standing("here").as_deref() == Some("running"), || format!("{:?}", env.standing("here")))?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0)?;
    every_page_is_right(&env.path("h"))
}
