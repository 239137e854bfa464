//! `--verify`: every page is compared while both sides are paused. A wrong page ends the migration.

use std::fs;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use support::env::TestEnv;
use support::guests::Code;
use support::hosts::{kvm, slow_if_emulated};
use support::{Failed, ensure, test};
use vellum_migration::message::Message;
use vellum_migration::wire::{Decoder, Encoder, Frame, HEADER, Kind, RUN};
use vellum_sys::mmap::PAGE_SIZE;

use crate::relay::{Part, changed_back, next_frame};
use crate::{ends_with, every_page_is_right, succeeds, with};

/// The number of compared pages that the migration client prints.
fn compared(said: &[u8]) -> Option<u64> {
    let said = String::from_utf8_lossy(said);
    let words: Vec<&str> = said.split_whitespace().collect();
    let at = words.windows(4).position(|words| words[0] == "compared" && words[2..] == ["pages,", "all"])?;
    words[at + 1].parse().ok()
}

/// Of 1 GiB that is barely touched, only touched pages are compared. Of a guest that writes, those
/// that it has written are.
#[test(slow_if_emulated())]
fn every_page_that_was_touched_is_compared_and_no_other() -> Result<(), Failed> {
    for backing in ["anonymous", "memfd"] {
        let env = TestEnv::new()?;
        let kernel = env.path("kernel");
        fs::write(&kernel, Code::default().spin().elf64())?;
        let line =
            format!("run --kernel {} --memory 1g,backing={backing} --serial null --rng", kernel.display());
        let mut here = env.run("m0", &line)?;
        for hop in 1..3 {
            let name = format!("m{hop}");
            let there = env.receive(&name, &format!("--serial null --rng --memory backing={backing}"))?;
            let output = env.migrate(&format!("m{}", hop - 1), &name, "--verify --downtime 1s")?;
            succeeds(&output)?;
            let pages = compared(&output.stdout);
            ensure(pages.is_some_and(|pages| (1..1000).contains(&pages)), || {
                format!("{backing}: {output:?}")
            })?;
            ends_with(here, 15)?;
            let pid = there.child.id();
            let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
            let held = ["RssAnon:", "RssShmem:"].into_iter().filter_map(|name| {
                let line = status.lines().find_map(|line| line.strip_prefix(name))?;
                line.trim().trim_end_matches(" kB").parse::<u64>().ok()
            });
            let held: u64 = held.sum();
            ensure(held < 64 << 10, || format!("{backing}: the target holds {held} KiB"))?;
            here = there;
        }
        succeeds(&env.vellum("ctl m2 stop")?)?;
        ends_with(here, 0)?;
    }
    let env = TestEnv::new()?;
    let here = env.run(
        "here",
        "run --cpus 2 --memory 16m,slots=3 --passes 0 --workload write,order=random,rate=20000",
    )?;
    let there = env.receive("there", &format!("--json {}", env.path("json").display()))?;
    let output = env.migrate("here", "there", "--verify --downtime 1s")?;
    succeeds(&output)?;
    // The pages that the guest has reached by then.
    let all = (16 << 20) / PAGE_SIZE;
    ensure(compared(&output.stdout).is_some_and(|pages| pages > all / 16), || format!("{output:?}"))?;
    ends_with(here, 15)?;
    succeeds(&env.vellum("ctl there stop")?)?;
    ends_with(there, 0)?;
    every_page_is_right(&env.path("json"))
}

/// A relay that changes one bit of the first page on its way to the target, or zeroes the page if
/// `lose`. All checksums are right.
fn tamper(from: PathBuf, to: PathBuf, lose: bool) -> Result<(), Failed> {
    let listener = UnixListener::bind(from)?;
    std::thread::spawn(move || {
        let Ok((source, _)) = listener.accept() else { return };
        let Ok(target) = UnixStream::connect(&to) else { return };
        let (Ok(mut back), Ok(mut answers)) = (source.try_clone(), target.try_clone()) else { return };
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut answers, &mut back);
        });
        let _ = carry(source, target, lose);
    });
    Ok(())
}

fn carry(mut from: UnixStream, mut to: UnixStream, lose: bool) -> std::io::Result<()> {
    let mut decoder = Decoder::new(None, PAGE_SIZE as u32);
    let mut encoder: Option<Encoder> = None;
    let mut done = false;
    loop {
        let (header, mut raw) = next_frame(&mut from, &mut decoder)?;
        let mut payload = raw.split_off(HEADER);
        let is_frame = decoder.payload(&header, &payload);
        assert!(matches!(
            is_frame,
            Ok(Frame::Message(_) | Frame::Run(..) | Frame::Section(_) | Frame::Sums(..))
        ));
        if header.kind == Kind::Pages && !done {
            done = true;
            if lose {
                payload[RUN..RUN + PAGE_SIZE as usize].fill(0);
            } else {
                payload[RUN + 77] ^= 4;
            }
        }
        let session = decoder.session().expect("a frame has come");
        let encoder = encoder.get_or_insert_with(|| Encoder::new(session));
        to.write_all(&encoder.header(header.kind, &[&payload]))?;
        to.write_all(&payload)?;
    }
}

/// One bit is flipped without a checksum that shows it, or a page arrives as zero. The guest stays
/// and runs on, and the page's address is named.
#[test(kvm())]
fn a_page_that_comes_wrong_is_named_and_the_guest_stays() -> Result<(), Failed> {
    for lose in [false, true] {
        let env = TestEnv::new()?;
        let here =
            env.run("here", &format!("run --memory 8m --passes 0 --json {}", env.path("json").display()))?;
        let there = env.receive("there", "")?;
        tamper(env.path("relay.in"), env.path("there.in"), lose)?;
        let output = with(env.migrate("here", "relay", "--verify --paused")?, 1)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let named =
            said.contains("the target's memory differs in 1 of ") && said.contains("at guest address 0x");
        ensure(named && said.lines().count() == 1, || said.clone())?;
        ensure(env.standing("here").as_deref() == Some("paused"), || format!("{:?}", env.standing("here")))?;
        ends_with(there, 1)?;
        succeeds(&env.vellum("ctl here resume")?)?;
        succeeds(&env.vellum("ctl here stop")?)?;
        ends_with(here, 0)?;
        every_page_is_right(&env.path("json"))?;
    }
    Ok(())
}

/// A target that has compared nothing, names no misfit, or gives a reason with control characters:
/// the client prints one line, and the guest stays.
#[test(kvm())]
fn what_a_target_says_is_neither_believed_nor_shown_unread() -> Result<(), Failed> {
    type Change = fn(&mut Part);
    let answers: [(Change, &str); 3] = [
        (
            |part| {
                if let Part::Message(Message::Compared { pages, .. }) = part {
                    *pages = 0;
                }
            },
            "has compared 0 pages",
        ),
        (
            |part| {
                if let Part::Message(message @ Message::Fit {}) = part {
                    *message = Message::Misfit { misfits: Vec::new() };
                }
            },
            "gives no reason",
        ),
        (
            |part| {
                if let Part::Message(message @ Message::Fit {}) = part {
                    *message = Message::Abort { why: "no\nvellum: \u{202e}moved".into() };
                }
            },
            "no\\nvellum: \\u{202e}moved",
        ),
    ];
    let env = TestEnv::new()?;
    let json = env.path("json");
    let here = env.run("here", &format!("run --memory 8m --passes 0 --json {}", json.display()))?;
    env.has_written("here", 1000)?;
    for (at, (change, says)) in answers.into_iter().enumerate() {
        let there = env.receive(&format!("there{at}"), "")?;
        let [relay, to] = ["relay", "in"].map(|end| env.path(&format!("there{at}.{end}")));
        changed_back(&relay, to, change)?;
        let line = format!("migrate here --liveness 5m --verify --downtime 1m --to unix:{}", relay.display());
        let output = with(env.vellum(&line)?, 1)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure(said.contains(says) && said.lines().count() == 1, || said.clone())?;
        drop(there);
    }
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0)?;
    every_page_is_right(&json)
}
