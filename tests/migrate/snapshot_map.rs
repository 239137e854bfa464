//! `vellum restore --memory map`: memory that shows the files of a snapshot.

use std::fs;

use harness::{Completion, Failed, LIMIT, Trials, ensure, eventually, trial};
use vellum::plant::{IMPOSSIBLE, POSSIBLE};

use crate::bed::{kvm, real};
use crate::home::Home;
use crate::{ends_with, every_page_is_right, kib, succeeds, with};

/// Each point of a chain, in slots of which none begins where a layer does, is right; the machine is then moved, saved, and restored again.
#[trial(real())]
fn memory_that_shows_files_is_right_and_moves_and_is_saved() -> Result<(), Failed> {
    let home = Home::new()?;
    let write = "--workload write,order=random,rate=20000,write=80";
    let here = home.run("here", &format!("run --cpus 2 --memory 32m,slots=3 --passes 0 {write}"))?;
    let dir = home.path("snap");
    for point in 0..3u64 {
        home.has_written("here", 20_000 + 4000 * point)?;
        succeeds(
            &home.vellum(&format!("snapshot here {} --follow --downtime 1s --timeout 3s", dir.display()))?,
        )?;
    }
    succeeds(&home.vellum("ctl here stop")?)?;
    ends_with(here, 0)?;
    for point in 0..3 {
        let json = home.path(&format!("{point}.json"));
        let host = format!("{} --at {point} --memory map --json {}", dir.display(), json.display());
        let again = home.restore("again", &host)?;
        let merged = home.vellum(&format!("snapshot merge {}", dir.display()))?;
        let said = String::from_utf8(with(merged, 2)?.stderr)?;
        ensure(said.contains("shows it as memory"), || said.clone())?;
        if point == 0 {
            // At once: most of its pages nobody has looked at.
            succeeds(&home.vellum("ctl again stop")?)?;
            ends_with(again, 0)?;
            every_page_is_right(&json)?;
            continue;
        }
        if point == 1 {
            home.has_written("again", 30_000)?;
        }
        let there = home.receive("there", "")?;
        succeeds(&home.migrate("again", "there", "--verify --downtime 1s --timeout 3s,then=force")?)?;
        ends_with(again, 15)?;
        let last = home.path(&format!("last{point}"));
        succeeds(&home.vellum(&format!("snapshot there {} --stop", last.display()))?)?;
        ends_with(there, 0)?;
        let third = home.restore("third", &format!("{} --memory map", last.display()))?;
        let more = home.path(&format!("more{point}"));
        succeeds(&home.vellum(&format!("snapshot third {} --stop", more.display()))?)?;
        ends_with(third, 0)?;
        let end = home.path(&format!("end{point}.json"));
        let fourth = home.restore(
            "fourth",
            &format!("{} --memory map,backing=thp --json {}", more.display(), end.display()),
        )?;
        home.has_written("fourth", 40_000)?;
        succeeds(&home.vellum("ctl fourth stop")?)?;
        ends_with(fourth, 0)?;
        every_page_is_right(&end)?;
    }
    Ok(())
}

/// What clones of one snapshot have of their own is what they wrote, and not what they have.
#[trial(real())]
fn clones_share_the_pages_that_they_do_not_write() -> Result<(), Failed> {
    let home = Home::new()?;
    let here = home.run("here", "run --memory 64m --passes 0 --workload write,rate=20000,warm")?;
    home.has_written("here", 20_000)?;
    let dir = home.path("snap");
    succeeds(&home.vellum(&format!("snapshot here {} --stop", dir.display()))?)?;
    ends_with(here, 0)?;
    let names: Vec<String> = (0..4).map(|number| format!("clone{number}")).collect();
    let mut clones = Vec::new();
    for name in &names {
        clones.push(home.restore(name, &format!("{} --memory map --paused", dir.display()))?);
    }
    for clone in &clones {
        let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", clone.child.id()))?;
        let own = rollup.lines().find_map(|line| kib(line, "Anonymous:")).ok_or("no such line")?;
        ensure(own < 16 << 10, || format!("{own} KiB of its own: {rollup}"))?;
    }
    for (name, clone) in names.iter().zip(clones) {
        succeeds(&home.vellum(&format!("ctl {name} stop"))?)?;
        ends_with(clone, 0)?;
    }
    Ok(())
}

/// A layer that becomes shorter under a machine ends it with the file's name.
#[trial(real())]
fn a_layer_that_becomes_shorter_is_named() -> Result<(), Failed> {
    let home = Home::new()?;
    let here = home.run("here", "run --memory 32m --passes 0 --workload write,rate=20000")?;
    home.has_written("here", 8192)?;
    let dir = home.path("snap");
    succeeds(&home.vellum(&format!("snapshot here {} --stop", dir.display()))?)?;
    ends_with(here, 0)?;
    let mut again = home.restore("again", &format!("{} --memory map --paused", dir.display()))?;
    fs::File::options().write(true).open(dir.join("ram-0"))?.set_len(0)?;
    succeeds(&home.vellum("ctl again resume")?)?;
    eventually(LIMIT, "it ends", || Ok(again.child.try_wait()?))?;
    let said = String::from_utf8(with(again.end()?, 1)?.stderr)?;
    let line = "ram-0 became shorter while it was mapped: the guest's memory is gone";
    ensure(said.contains(line), || said.clone())
}

/// Whether a machine that shows files has every page right where it moves to at once.
fn moves(mistake: Option<&'static str>) -> Result<bool, Failed> {
    let home = Home::planted(mistake)?;
    let here = home.run("here", "run --memory 16m --passes 0 --workload write,rate=20000,warm")?;
    home.has_written("here", 8192)?;
    let dir = home.path("snap");
    succeeds(&home.vellum(&format!("snapshot here {} --paused --stop", dir.display()))?)?;
    ends_with(here, 0)?;
    let again = home.restore("again", &format!("{} --memory map --paused", dir.display()))?;
    let there = home.receive("there", "")?;
    succeeds(&home.migrate("again", "there", "--downtime 1s --timeout 3s,then=force")?)?;
    ends_with(again, 15)?;
    succeeds(&home.vellum("ctl there stop")?)?;
    Ok(there.end()?.status.success())
}

/// What is planted here, and caught.
pub fn add(trials: &mut Trials) {
    trials.add("planted_shown-left-out_is_caught", kvm(), || match POSSIBLE {
        true => ensure(!moves(Some("shown-left-out"))? && moves(None)?, || "nobody notices".into())
            .map(|()| Completion::Completed),
        false => Ok(Completion::ignored_with(IMPOSSIBLE)),
    });
}
