//! `vellum fork`: machines that share a running machine's memory until they write to it. At their
//! end, built-in guests report whether each page has what they wrote, both the forks and the
//! machine that was forked.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Output};

use serde_json::Value;
use support::env::{Machine, TestEnv, process};
use support::guests::Code;
use support::hosts::kvm;
use support::results::every_page_is_right;
use support::{Failed, LIMIT, Tests, ensure, eventually, is_caught};
use vellum_control::Do;
use vellum_control::client::Client;
use vellum_kvm::arch::layout;

mod devices;
mod many;
mod memory;
mod refused;

support::vellum!();

fn main() -> ExitCode {
    let mut tests = Tests::from_args();
    add_planted(&mut tests);
    tests.run()
}

/// A fork. It does not outlive its test.
struct Forked<'a> {
    env: &'a TestEnv,
    name: String,
    pid: u32,
}

impl Drop for Forked<'_> {
    fn drop(&mut self) {
        if process(self.pid).is_some() {
            let _ = Command::new("kill").args(["-KILL", &self.pid.to_string()]).status();
        }
    }
}

impl Forked<'_> {
    fn json(&self) -> PathBuf {
        self.env.path(&format!("{}.json", self.name))
    }

    fn is_over(&self) -> Result<(), Failed> {
        eventually(LIMIT, "its process ends", || Ok(process(self.pid).is_none().then_some(())))
    }

    /// Ends the fork. Returns whether all of its pages were right.
    fn end(self) -> Result<bool, Failed> {
        self.env.ctl(&format!("{} stop", self.name))?;
        self.is_over()?;
        every_page_is_right(&self.json())
    }

    /// Ends the fork, whose pages must all be right.
    fn ends_right(self) -> Result<(), Failed> {
        let name = self.name.clone();
        ensure(self.end()?, || format!("{name} has a page that is wrong"))
    }
}

/// Forks `from` into `names`. The arguments `more` name them.
fn fork<'a>(env: &'a TestEnv, from: &str, more: &str) -> Result<Vec<Forked<'a>>, Failed> {
    let output = env.vellum(&format!("fork {from} {more}"))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let runs = said.lines().filter_map(|line| {
        line.split_once(" runs, process ").or_else(|| line.split_once(" is paused, process "))
    });
    let machine = |(name, pid): (&str, &str)| {
        Ok(Forked { env, name: name.to_owned(), pid: pid.parse().map_err(|_| said.clone())? })
    };
    let machines = runs.map(machine).collect::<Result<Vec<_>, Failed>>()?;
    ensure(output.status.success() && !machines.is_empty(), || format!("{output:?}"))?;
    Ok(machines)
}

/// Forks one machine. Its result goes to [`Forked::json`].
fn fork_one<'a>(env: &'a TestEnv, from: &str, name: &str) -> Result<Forked<'a>, Failed> {
    let json = env.path(&format!("{name}.json"));
    let more = format!("--name {name} --json {}", json.display());
    fork(env, from, &more)?.pop().ok_or_else(|| "no machine was forked".into())
}

/// Forks the machine of `client` into `files`, as `vellum fork` does. Returns how that ended.
fn fork_into(client: &mut Client, available: Option<u64>, files: &[File; 4]) -> Result<Value, Failed> {
    client.ask_with(&Do::Fork { overlays: 0, available }, &files.each_ref().map(AsFd::as_fd))?;
    let of = client.last_id();
    loop {
        let line = client.event_of(Some(of))?;
        if ["forked", "not-forked"].iter().any(|event| line["event"] == *event) {
            return Ok(line);
        }
    }
}

fn stop(env: &TestEnv, name: &str, machine: Machine) -> Result<Output, Failed> {
    env.ctl(&format!("{name} stop"))?;
    machine.end()
}

/// Ends the machine `name`. All of its pages must be right.
fn stops_right(env: &TestEnv, name: &str, machine: Machine) -> Result<(), Failed> {
    let output = stop(env, name, machine)?;
    ensure(output.status.success(), || format!("{name}: {output:?}"))
}

/// `all` with `VELLUM_FORK=all`, and otherwise `few`.
fn times(few: usize, all: usize) -> usize {
    if std::env::var("VELLUM_FORK").is_ok_and(|value| value == "all") { all } else { few }
}

/// A guest that writes all the time is forked repeatedly, and some of the forks are forked too.
/// Each fork starts with the memory of the pause, and then writes on its own. With
/// `VELLUM_FORK=all` there are 200 forks.
fn writes_throughout(line: &str) -> Result<(), Failed> {
    let times = times(12, 200);
    let env = TestEnv::new()?;
    let here = env.run("here", &format!("run {line} --passes 0"))?;
    env.has_written("here", 2000)?;
    let mut before: Option<Forked> = None;
    for at in 0..times {
        let name = format!("f{at}");
        let from = before.as_ref().filter(|_| at % 3 == 2).map_or("here", |forked| forked.name.as_str());
        let forked = fork_one(&env, from, &name)?;
        if let Some(before) = before.take() {
            before.ends_right()?;
        }
        // Both machines run on.
        let [own, other] = [env.done(&name)?, env.done("here")?];
        env.has_written(&name, own)?;
        env.has_written("here", other)?;
        before = Some(forked);
    }
    if let Some(before) = before {
        before.ends_right()?;
    }
    stops_right(&env, "here", here)
}

const WRITE: &str = "--workload write,order=random,rate=20000,write=80";

/// Checks that the command exits with `status` and prints `line`.
fn says(output: &Output, status: i32, line: &str) -> Result<(), Failed> {
    let said = String::from_utf8_lossy(&output.stderr);
    let right = output.status.code() == Some(status) && said.contains(line) && said.lines().count() == 1;
    ensure(right, || format!("not {status}, `{line}`: {output:?}"))
}

/// Forks a machine with this fault planted. Returns whether all pages of the source and its forks
/// are right.
fn goes_right(mistake: Option<&'static str>, backing: &str) -> Result<bool, Failed> {
    let env = TestEnv::planted(mistake)?;
    // A faster writer takes long to check.
    let write = "--workload write,order=random,rate=50000,write=80";
    // Memory that is copied comes to show its base in several parts.
    let size = if backing == "anonymous" { 40 } else { 8 };
    let memory = format!("--memory {size}m,slots=3,backing={backing}");
    let here = env.run("here", &format!("run --cpus 2 {memory} --passes 0 {write}"))?;
    env.has_written("here", 8000)?;
    let mut right = true;
    for at in 0..3 {
        // The fork waits while the source writes the same sequence. If both were equally far, each
        // would have the content that the other expects.
        let json = env.path(&format!("f{at}.json"));
        let more = format!("--name f{at} --paused --json {}", json.display());
        let forked = fork(&env, "here", &more)?.pop().ok_or("no machine was forked")?;
        let now = env.done("here")?;
        env.has_written("here", now + 8000)?;
        right &= forked.end()?;
    }
    Ok(stop(&env, "here", here)?.status.success() && right)
}

/// Forks a machine that maps pages of its fork's file, with this fault planted. Returns whether all pages
/// of all machines are right.
fn layers_go_right(mistake: Option<&'static str>) -> Result<bool, Failed> {
    let env = TestEnv::planted(mistake)?;
    let write = "--workload write,order=sequential,rate=1000,warm";
    let here = env.run("here", &format!("run --memory 32m,slots=3,backing=memfd --passes 0 {write}"))?;
    env.has_written("here", 8192)?;
    fork_one(&env, "here", "first")?.ends_right()?;
    let own = env.done("here")?;
    env.has_written("here", own + 300)?;
    env.ctl("here pause")?;
    let one = fork_one(&env, "here", "one")?;
    ensure(many::mapped(one.pid, "vellum-fork-pages")? > 0, || "no run is mapped".into())?;
    let again = fork_one(&env, "one", "again")?;
    env.ctl("here resume")?;
    let mut right = true;
    for machine in [again, one] {
        env.ctl(&format!("{} resume", machine.name))?;
        right &= machine.end()?;
    }
    Ok(stop(&env, "here", here)?.status.success() && right)
}

/// Forks a PC twice with this fault planted. Returns whether all three have another VM generation ID
/// in guest memory. The IDs are read from snapshots.
fn generations_differ(mistake: Option<&'static str>) -> Result<bool, Failed> {
    let env = TestEnv::planted(mistake)?;
    let kernel = env.path("kernel");
    fs::write(&kernel, Code::default().spin().elf64())?;
    let flags = format!("--kernel {} --memory 16m,backing=memfd --serial null", kernel.display());
    let here = env.run("here", &format!("run {flags}"))?;
    let forked = fork(&env, "here", "--count 2 --name f%d --serial null")?;
    let mut ids = Vec::new();
    for name in ["here", "f0", "f1"] {
        let dir = env.path(&format!("{name}.snap"));
        let output = env.vellum(&format!("snapshot {name} {}", dir.display()))?;
        ensure(output.status.success(), || format!("{output:?}"))?;
        let mut id = [0; 16];
        // The first memslot begins at address 0.
        File::open(dir.join("ram-0"))?.read_exact_at(&mut id, layout::VMGENID)?;
        ensure(id != [0; 16], || format!("{name} has none"))?;
        ids.push(id);
    }
    for machine in forked {
        env.ctl(&format!("{} stop", machine.name))?;
        machine.is_over()?;
    }
    stop(&env, "here", here)?;
    ids.sort_unstable();
    ids.dedup();
    Ok(ids.len() == 3)
}

/// Adds the tests of planted faults, which must be caught.
fn add_planted(tests: &mut Tests) {
    for backing in ["memfd", "anonymous"] {
        tests.add(format!("without_a_mistake_all_pages_of_{backing}_are_right"), kvm(), move || {
            ensure(goes_right(None, backing)?, || "a page is wrong".into())
        });
    }
    tests.add("without_a_mistake_a_fork_of_a_fork_is_right", kvm(), || {
        ensure(layers_go_right(None)?, || "a page is wrong".into())
    });
    tests.add("planted_layer-left-out_is_caught", kvm(), || {
        is_caught(|| layers_go_right(Some("layer-left-out")))
    });
    tests.add("without_a_mistake_each_fork_has_a_generation_id_of_its_own", kvm(), || {
        ensure(generations_differ(None)?, || "two machines have the same".into())
    });
    for mistake in ["vmgenid-unchanged", "vmgenid-alike"] {
        tests.add(format!("planted_{mistake}_is_caught"), kvm(), move || {
            is_caught(|| generations_differ(Some(mistake)))
        });
    }
    let of_memfd = ["piece-left-shared", "parted-left-out", "copied-after-resume", "layer-off-by-a-slot"];
    let of_anonymous = ["dropped-bit", "read-before-clear", "part-uncollected"];
    let all = of_memfd.map(|mistake| (mistake, "memfd")).into_iter();
    for (mistake, backing) in all.chain(of_anonymous.map(|mistake| (mistake, "anonymous"))) {
        tests.add(format!("planted_{mistake}_is_caught"), kvm(), move || {
            is_caught(|| goes_right(Some(mistake), backing))
        });
    }
}
