//! `vellum fork`: machines that share a running machine's memory until they write to it. At their
//! end, built-in guests report whether each page has what they wrote, both the forks and the
//! machine that was forked.

use std::fs;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Output, Stdio};

use serde_json::Value;
use support::env::{Machine, TestEnv, children, process};
use support::guests::Code;
use support::hosts::{huge_files, huge_pages, kvm, real};
use support::{Completion, Failed, LIMIT, Random, Tests, ensure, eventually, test};
use vellum_control::Do;
use vellum_control::client::Client;
use vellum_sys::mmap::memfd;
use vellum_sys::plant::{IMPOSSIBLE, POSSIBLE};

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
        is_right(&self.json())
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
    let runs = said.lines().filter_map(|line| line.split_once(" runs, process "));
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

/// Reads the result of a built-in guest that has ended. Returns whether all of its pages are right.
fn is_right(path: &PathBuf) -> Result<bool, Failed> {
    let text = fs::read_to_string(path)?;
    let result: Value = serde_json::from_str(&text)?;
    let figure = |name: &str| {
        let figures = result["figures"].as_array()?;
        figures.iter().find(|figure| figure["name"] == name)?["value"].as_f64()
    };
    ensure(figure("pages_checked") > Some(0.0), || text.clone())?;
    Ok(figure("wrong_stamps") == Some(0.0))
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

#[test(kvm())]
fn one_vcpu_writes_throughout() -> Result<(), Failed> {
    writes_throughout(&format!("--memory 32m,slots=3,backing=memfd {WRITE}"))
}

#[test(real())]
fn four_vcpus_write_throughout() -> Result<(), Failed> {
    writes_throughout(&format!("--cpus 4 --memory 16m,slots=3,backing=memfd {WRITE}"))
}

#[test(kvm(), huge_pages(2 << 20, 80))]
fn a_guest_on_huge_pages_writes_throughout() -> Result<(), Failed> {
    writes_throughout(&format!("--cpus 2 --memory 32m,slots=3,backing=shared-hugetlb-2m {WRITE}"))
}

#[test(real())]
fn a_guest_with_dirty_rings_writes_throughout() -> Result<(), Failed> {
    writes_throughout(&format!("--cpus 2 --memory 16m,backing=memfd --dirty-ring {WRITE}"))
}

/// The first fork copies memory that no file backs, while the guest writes to it.
#[test(kvm())]
fn a_guest_on_anonymous_memory_writes_throughout() -> Result<(), Failed> {
    writes_throughout(&format!("--cpus 2 --memory 32m,slots=3,backing=anonymous {WRITE}"))
}

#[test(kvm())]
fn a_guest_on_transparent_huge_pages_writes_throughout() -> Result<(), Failed> {
    writes_throughout(&format!("--memory 32m,slots=3,backing=thp {WRITE}"))
}

/// The same where the copy has huge pages too.
#[test(kvm(), huge_files())]
fn a_guest_on_huge_pages_of_a_file_writes_throughout() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", &format!("run --cpus 2 --memory 64m,backing=thp --passes 0 {WRITE}"))?;
    env.has_written("here", 16_384)?;
    // Huge pages of files are few on a host, and no other test makes them.
    let before = huge_pages_of_files()?;
    let forked = fork_one(&env, "here", "there")?;
    let made = huge_pages_of_files()?.saturating_sub(before);
    ensure(made >= 32 << 20, || format!("{made} bytes of the copy are huge pages"))?;
    let again = fork_one(&env, "there", "again")?;
    for name in ["here", "there", "again"] {
        let own = env.done(name)?;
        env.has_written(name, own + 20_000)?;
    }
    again.ends_right()?;
    forked.ends_right()?;
    stops_right(&env, "here", here)
}

/// The bytes of this host's files in memory that are in huge pages.
fn huge_pages_of_files() -> Result<u64, Failed> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("ShmemHugePages:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(kib.ok_or("no ShmemHugePages")? << 10)
}

/// Anonymous memory of a guest with dirty rings, and of one whose log a snapshot has left on.
#[test(real())]
fn the_copy_of_memory_uses_the_log_that_there_is() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let flags = format!("--cpus 2 --memory 16m,slots=3 --passes 0 {WRITE}");
    let rings = env.run("rings", &format!("run --dirty-ring {flags}"))?;
    let followed = env.run("followed", &format!("run {flags}"))?;
    let dir = env.path("snap");
    let save = || {
        let line = format!("snapshot followed {} --follow --downtime 1s --timeout 3s", dir.display());
        let output = env.vellum(&line)?;
        ensure(output.status.success(), || format!("{output:?}"))
    };
    env.has_written("followed", 3000)?;
    save()?;
    for (name, machine) in [("rings", rings), ("followed", followed)] {
        env.has_written(name, 6000)?;
        let first = fork_one(&env, name, "first")?;
        let second = fork_one(&env, name, "second")?;
        if name == "followed" {
            save()?;
        }
        first.ends_right()?;
        second.ends_right()?;
        stops_right(&env, name, machine)?;
    }
    for point in 0..2 {
        let json = env.path(&format!("{point}.json"));
        let again =
            env.restore("again", &format!("{} --at {point} --json {}", dir.display(), json.display()))?;
        stops_right(&env, "again", again)?;
        ensure(is_right(&json)?, || format!("point {point} is wrong"))?;
    }
    Ok(())
}

/// If a guest has written to most of its memory since the last fork, the next fork makes a new
/// base. All machines are right, whichever base they have.
#[test(kvm())]
fn much_that_differs_makes_a_new_base() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here =
        env.run("here", &format!("run --cpus 2 --memory 16m,slots=3,backing=memfd --passes 0 {WRITE}"))?;
    let mut machines = Vec::new();
    for base in 0..4 {
        let before = env.done("here")?;
        env.has_written("here", before + 6000)?;
        machines.push(fork_one(&env, "here", &format!("f{base}"))?);
        let (answer, _) = Client::borrow(&env.socket("here"), &Do::ForkBase {})?;
        ensure(answer["base"] == base, || format!("not base {base}: {answer}"))?;
    }
    // Directly after a fork, little differs.
    env.ctl("here pause")?;
    machines.push(fork_one(&env, "here", "last")?);
    machines.push(fork_one(&env, "here", "again")?);
    let (answer, _) = Client::borrow(&env.socket("here"), &Do::ForkBase {})?;
    ensure(answer["base"].as_u64() <= Some(4), || format!("a new base for nothing: {answer}"))?;
    env.ctl("here resume")?;
    for machine in machines {
        machine.ends_right()?;
    }
    stops_right(&env, "here", here)
}

/// Memory below and above the gap.
#[test(real())]
fn memory_above_4_gib_is_forked() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let write = "--workload write,order=random,rate=5000";
    let here =
        env.run("here", &format!("run --cpus 2 --memory 5g,slots=3,backing=memfd --passes 0 {write}"))?;
    env.has_written("here", 3000)?;
    let first = fork_one(&env, "here", "first")?;
    env.has_written("first", 6000)?;
    let second = fork_one(&env, "first", "second")?;
    env.has_written("second", 9000)?;
    first.ends_right()?;
    second.ends_right()?;
    stops_right(&env, "here", here)
}

/// A machine is forked while its dirty pages are tracked. The log stays right from then on.
#[test(real())]
fn a_log_of_dirty_pages_stays_right() -> Result<(), Failed> {
    for tracker in ["bitmap", "manual-protect", "initially-set"] {
        let env = TestEnv::new()?;
        let here = env.run("here", &format!("run --memory 16m,slots=3,backing=memfd --passes 0 {WRITE}"))?;
        let dir = env.path("snap");
        let save = |name: &str| {
            let more = format!("--follow --tracker {tracker} --downtime 1s --timeout 3s");
            let output = env.vellum(&format!("snapshot {name} {} {more}", dir.display()))?;
            ensure(output.status.success(), || format!("{output:?}")).map(|()| output)
        };
        env.has_written("here", 3000)?;
        save("here")?;
        let mut forked = Vec::new();
        for at in 1..4 {
            forked.push(fork_one(&env, "here", &format!("f{at}"))?);
            env.has_written("here", 3000 * (at + 1))?;
            let said = String::from_utf8(save("here")?.stdout)?;
            ensure(!said.contains("whole"), || said.clone())?;
        }
        for machine in forked {
            machine.ends_right()?;
        }
        stops_right(&env, "here", here)?;
        for point in 0..4 {
            let json = env.path(&format!("{point}.json"));
            let again =
                env.restore("again", &format!("{} --at {point} --json {}", dir.display(), json.display()))?;
            stops_right(&env, "again", again)?;
            ensure(is_right(&json)?, || format!("point {point} is wrong"))?;
        }
    }
    Ok(())
}

/// After a fork, no file has all of a machine's memory. The machine that was forked and the fork
/// can both migrate and be saved: their memory is copied page by page, including private pages.
#[test(kvm())]
fn machines_that_were_forked_move_and_are_saved() -> Result<(), Failed> {
    move_and_are_saved("memfd")
}

#[test(kvm())]
fn machines_whose_memory_was_copied_move_and_are_saved() -> Result<(), Failed> {
    move_and_are_saved("thp")
}

fn move_and_are_saved(backing: &str) -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let memory = format!("--memory 16m,slots=3,backing={backing}");
    let here = env.run("here", &format!("run --cpus 2 {memory} --passes 0 {WRITE}"))?;
    env.has_written("here", 3000)?;
    let there = fork_one(&env, "here", "there")?;
    for name in ["here", "there"] {
        let own = env.done(name)?;
        env.has_written(name, own + 2000)?;
    }
    let moves = "--verify --downtime 1s --timeout 3s,then=force";
    // Operations that would hand over the memory's file are refused with the reason, and the
    // machine runs on.
    let there_in = env.receive("nobody", "")?;
    let refused = env.migrate("here", "nobody", "--link memfd")?;
    says(&refused, 2, "the memory of here was forked, and no descriptor has all of it")?;
    drop(there_in);
    let upgrade = env.vellum(&format!("ctl here upgrade {VELLUM}"))?;
    says(&upgrade, 2, "the memory of here was forked, and no descriptor has all of it")?;
    for (name, machine) in [("here", Some(here)), ("there", None)] {
        let dir = env.path(&format!("{name}.snap"));
        let output = env.vellum(&format!("snapshot {name} {} --downtime 1s --timeout 3s", dir.display()))?;
        ensure(output.status.success(), || format!("{output:?}"))?;
        let json = env.path(&format!("{name}.restored.json"));
        for how in ["eager", "map"] {
            let host = format!("{} --memory {how} --json {}", dir.display(), json.display());
            let again = env.restore("again", &host)?;
            stops_right(&env, "again", again)?;
            ensure(is_right(&json)?, || format!("{name}, restored {how}, is wrong"))?;
            fs::remove_file(&json)?;
        }
        let last = format!("{name}2");
        let target = env.receive(&last, &format!("--json {}", env.path("moved.json").display()))?;
        let output = env.migrate(name, &last, moves)?;
        ensure(output.status.success(), || format!("{output:?}"))?;
        if let Some(machine) = machine {
            machine.end()?;
        }
        stops_right(&env, &last, target)?;
        ensure(is_right(&env.path("moved.json"))?, || format!("{name}, moved, is wrong"))?;
    }
    there.is_over()
}

/// A dump has the pages that the guest has written since the fork, which are not in the base.
#[test(real())]
fn a_dump_of_a_machine_that_was_forked_has_its_own_pages() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 16m,backing=memfd --passes 0 --workload write,rate=2000")?;
    env.has_written("here", 300)?;
    let _forked = fork_one(&env, "here", "forked")?;
    // Sequential writes go to untouched memory.
    let first = env.done("here")?;
    env.has_written("here", first + 1000)?;
    env.ctl("here pause")?;
    let core = env.path("core");
    let output = env.vellum(&format!("dump here {}", core.display()))?;
    ensure(output.status.success(), || format!("{output:?}"))?;
    let dump = fs::read(&core)?;
    let pages = |bytes: &[u8]| bytes.chunks(4096).filter(|page| page.iter().any(|byte| *byte != 0)).count();
    let written = env.done("here")?;
    ensure(pages(&dump) as u64 >= written.min(4096), || format!("{} pages of {written}", pages(&dump)))?;
    env.ctl("here resume")?;
    stops_right(&env, "here", here)
}

/// A directory that the guest has not mounted has a server of its own in each machine. The list has
/// each fork below the machine that it came from, and what memory it occupies.
#[test(real())]
fn a_machine_with_a_directory_is_forked_and_listed() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (kernel, shared) = (env.path("kernel"), env.path("shared"));
    fs::write(&kernel, Code::default().spin().elf64())?;
    fs::create_dir(&shared)?;
    let as_root = if vellum_sys::host::is_root() { ",as-root" } else { "" };
    let share = format!("--serial null --share {}:data{as_root}", shared.display());
    let here =
        env.run("here", &format!("run --kernel {} --memory 16m,backing=memfd {share}", kernel.display()))?;
    // In the order of names the machine comes last.
    let first = fork(&env, "here", &format!("--name b {share}"))?;
    let second = fork(&env, "b", &format!("--name a {share}"))?;
    let list = String::from_utf8(env.vellum("list --memory")?.stdout)?;
    let lines: Vec<&str> = list.lines().skip(2).collect();
    let begins = ["here ", "  b ", "    a "].iter().zip(&lines).all(|(name, line)| line.starts_with(name));
    ensure(begins && lines.len() == 3, || list.clone())?;
    for line in lines {
        let figures: Vec<f64> = line
            .split_whitespace()
            .rev()
            .take(3)
            .filter_map(|word| word.trim_end_matches('m').parse().ok())
            .collect();
        let [part, private, shared] = figures[..] else { return Err(list.into()) };
        // All three map the program and the page that the guest runs on.
        ensure(shared > 0.0 && 0.0 < private && private < part && part < private + shared, || list.clone())?;
    }
    let list = String::from_utf8(env.vellum("list --memory --json")?.stdout)?;
    let listed = list.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let of = |name: &str| listed.iter().find(|status| status["name"] == name).ok_or_else(|| list.clone());
    ensure(of("a")?["forked_from"] == of("b")?["pid"], || list.clone())?;
    ensure(of("here")?["forked_from"].is_null(), || list.clone())?;
    ensure(of("a")?["resident"]["private"].as_u64() > Some(0), || list.clone())?;
    for machine in second.into_iter().chain(first) {
        env.ctl(&format!("{} stop", machine.name))?;
        machine.is_over()?;
    }
    env.ctl("here stop")?;
    here.end_with(&["vellum-guard", "vellum-share"]).map(drop)
}

/// The overlay of a disk is copied. Each new machine has one of its own, and says so if it has none.
#[test(kvm())]
fn a_machine_with_an_overlay_is_forked() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (kernel, base, other) = (env.path("kernel"), env.path("base"), env.path("other"));
    fs::write(&kernel, Code::default().spin().elf64())?;
    fs::write(&base, vec![7; 1 << 20])?;
    fs::write(&other, vec![7; 1 << 19])?;
    let disk = |overlay: &str| format!("--serial null --disk {}{overlay}", base.display());
    let file = env.path("file");
    let run = |name, overlay: &str| {
        env.run(name, &format!("run --kernel {} --memory 16m {}", kernel.display(), disk(overlay)))
    };
    let here = run("here", ",overlay=discard")?;
    let named = format!(",overlay={}", file.display());
    let made = [
        fork(&env, "here", &format!("--name first {}", disk(",overlay=discard")))?,
        fork(&env, "here", &format!("--name second {}", disk(&named)))?,
        fork(&env, "first", &format!("--name third {}", disk(",overlay=discard")))?,
    ];
    ensure(fs::read(&file)?.starts_with(b"VLMOVER\n"), || "the copy is no overlay".into())?;
    let another = format!("--serial null --disk {},overlay=discard", other.display());
    for (line, says_that) in [
        (
            format!("fork here --name new {}", disk("")),
            "--disk: disk0 has an overlay: give the new machine one",
        ),
        (format!("fork here --name new {}", disk(&named)), "has content already"),
        (format!("fork here --name new {another}"), "it is of another base"),
        (
            format!("fork second --name new {}", disk(",overlay=discard")),
            "--disk: disk0: only this process has the map of its overlay; a machine with one cannot be forked",
        ),
    ] {
        says(&env.vellum(&line)?, 2, says_that)?;
    }
    for machine in made.into_iter().flatten() {
        env.ctl(&format!("{} stop", machine.name))?;
        machine.is_over()?;
    }
    env.ctl("here stop")?;
    here.end()?;
    ensure(fs::read(&base)? == vec![7; 1 << 20], || "the image was written to".into())
}

/// What is said of a machine after its start is in a file beside its socket, which is gone with the
/// machine if nothing was said.
#[test(kvm())]
fn what_is_said_of_a_forked_machine_is_kept() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let kernel = env.path("kernel");
    fs::write(&kernel, Code::default().spin().elf64())?;
    let flags = format!("--kernel {} --memory 16m,backing=memfd --serial null", kernel.display());
    let here = env.run("here", &format!("run {flags}"))?;
    let log = |name: &str| env.socket(name).with_extension("log");
    for (name, by, said) in [("ends", "stop", ""), ("fails", "nmi", "triple fault on vCPU 0")] {
        let forked = fork(&env, "here", &format!("--name {name} --serial null"))?;
        ensure(log(name).exists(), || "there is no file".into())?;
        env.ctl(&format!("{name} {by}"))?;
        for machine in forked {
            machine.is_over()?;
        }
        match said {
            "" => eventually(LIMIT, "its file is removed", || Ok((!log(name).exists()).then_some(())))?,
            said => {
                let text = fs::read_to_string(log(name))?;
                ensure(text.contains(said), || text.clone())?;
            }
        }
    }
    env.ctl("here stop")?;
    here.end().map(drop)
}

/// A PC with devices: in each machine, the serial port continues without a lost byte.
#[test(kvm())]
fn a_pc_is_forked_with_its_devices() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let kernel = env.path("kernel");
    // mov dx, 0x3f8; xor eax, eax
    // next: out dx, al; inc eax; mov ecx, 256; wait: dec ecx; jnz wait; jmp next
    let counts = [0x66, 0xba, 0xf8, 0x03, 0x31, 0xc0, 0xee, 0xff, 0xc0, 0xb9, 0, 1, 0, 0, 0xff, 0xc9]
        .into_iter()
        .chain([0x75, 0xfc, 0xeb, 0xf2]);
    fs::write(&kernel, Code::default().bytes(&counts.collect::<Vec<u8>>()).elf64())?;
    let devices = |name: &str| format!("--rng --balloon --serial file={}", env.path(name).display());
    let here = env.run(
        "here",
        &format!("run --kernel {} --memory 32m,backing=memfd {}", kernel.display(), devices("here.out")),
    )?;
    let counts = |name: &str| {
        let path = env.path(name);
        eventually(LIMIT, "it counts", || Ok(fs::read(&path).ok().filter(|bytes| bytes.len() > 600)))
    };
    counts("here.out")?;
    // The refusal names the missing device, and no machine is left behind.
    let refused = env.vellum("fork here --name there --serial null")?;
    says(&refused, 2, "--rng: here has rng: give the new machine one too")?;
    let refused = env.vellum(&format!("fork here --name there --vsock v {}", devices("there.out")))?;
    says(&refused, 2, "--vsock: here has no vsock: leave it out")?;
    for name in ["there", "then"] {
        let forked = fork(&env, "here", &format!("--name {name} {}", devices(&format!("{name}.out"))))?;
        let counted = counts(&format!("{name}.out"))?;
        let wrong = counted.windows(2).find(|two| two[1] != two[0].wrapping_add(1));
        ensure(wrong.is_none(), || format!("{wrong:?} in what {name} has counted"))?;
        for forked in forked {
            env.ctl(&format!("{name} stop"))?;
            forked.is_over()?;
        }
    }
    let output = stop(&env, "here", here)?;
    ensure(output.status.success(), || format!("{output:?}"))?;
    let counted = fs::read(env.path("here.out"))?;
    let wrong = counted.iter().enumerate().find(|(at, byte)| **byte != *at as u8);
    ensure(wrong.is_none(), || format!("{wrong:?} of {}", counted.len()))
}

/// Many forks at once: each is a machine of its own, and is listed.
#[test(real())]
fn many_are_made_at_once() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 16m,backing=memfd --passes 0 --workload write,rate=1000")?;
    env.has_written("here", 1000)?;
    let json = env.path("w%d.json");
    let machines = fork(&env, "here", &format!("--count 20 --name w%d --paused --json {}", json.display()))?;
    ensure(machines.len() == 20, || format!("{} machines", machines.len()))?;
    let list = String::from_utf8(env.vellum("list")?.stdout)?;
    for (number, machine) in machines.into_iter().enumerate() {
        ensure(machine.name == format!("w{number}"), || machine.name.clone())?;
        ensure(env.standing(&machine.name).as_deref() == Some("paused"), || machine.name.clone())?;
        ensure(list.contains(&format!("{} ", machine.name)), || list.clone())?;
        env.ctl(&format!("{} resume", machine.name))?;
        machine.ends_right()?;
    }
    stops_right(&env, "here", here)
}

/// Clients that fork one machine, or want one name, at the same time. One of each two wins, and the
/// other is answered in one line. The machines that run have their own files, and nothing is left of
/// the others.
#[test(kvm())]
fn clients_at_once_are_answered() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let run = |name| env.run(name, "run --memory 4m,backing=memfd --passes 0 --workload write,rate=1000");
    let (one, two) = (run("one")?, run("two")?);
    let files = || {
        let entries = fs::read_dir(env.path("vellum"))?;
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let mut names = names.collect::<Result<Vec<_>, Failed>>()?;
        names.sort();
        Ok::<_, Failed>(names)
    };
    let refusals = ["is in use: another process listens there", "a machine of this name runs already"];
    for _ in 0..10 {
        let start = |(from, name): (&str, &'static str)| {
            let json = env.path(&format!("{from}-{name}.json"));
            let line = format!("fork {from} --name {name} --json {}", json.display());
            let client = env.command(&line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
            Ok::<_, Failed>((client, name, json))
        };
        let clients = [("one", "same"), ("two", "same"), ("one", "own")].map(start);
        let (mut won, mut expected) = (Vec::new(), vec!["one.sock".to_owned(), "two.sock".to_owned()]);
        for client in clients {
            let (client, name, json) = client?;
            let output = client.wait_with_output()?;
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            if let Some(pid) = said.split("runs, process ").nth(1).and_then(|rest| rest.lines().next()) {
                let pid = pid.parse().map_err(|_| said.clone())?;
                won.push((Forked { env: &env, name: name.to_owned(), pid }, json));
                expected.extend([format!("{name}.log"), format!("{name}.sock")]);
                continue;
            }
            let said = String::from_utf8_lossy(&output.stderr);
            let busy = said.contains("another operation is under way (fork for process ");
            let answered = busy || (name == "same" && refusals.iter().any(|line| said.contains(line)));
            ensure(answered && said.lines().count() == 1, || format!("{output:?}"))?;
        }
        let names: Vec<&str> = won.iter().map(|(forked, _)| forked.name.as_str()).collect();
        // The second machine is forked for one name only.
        ensure(matches!(names[..], ["same"] | ["same", "own"]), || format!("{names:?}"))?;
        expected.sort();
        eventually(LIMIT, "only the machines' files are there", || Ok((files()? == expected).then_some(())))?;
        for (forked, json) in won {
            let number = |path: PathBuf| fs::metadata(path).map(|about| (about.dev(), about.ino()));
            let log = number(env.socket(&forked.name).with_extension("log"))?;
            let own = number(format!("/proc/{}/fd/2", forked.pid).into())?;
            ensure(own == log, || format!("{} writes to another file", forked.name))?;
            env.ctl(&format!("{} stop", forked.name))?;
            forked.is_over()?;
            ensure(is_right(&json)?, || format!("{} has a page that is wrong", forked.name))?;
        }
        eventually(LIMIT, "nothing is left", || Ok((files()? == ["one.sock", "two.sock"]).then_some(())))?;
    }
    stops_right(&env, "one", one)?;
    stops_right(&env, "two", two)
}

/// Many forks of one machine are there at once. Each writes 1,000 pages more, and all pages of all of
/// them are checked. With `VELLUM_FORK=all` there are 1,000 forks of a guest with 256 MiB, or as many
/// as half of the available memory is enough for.
#[test(real())]
fn many_are_there_at_once_and_write() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (count, memory) = (times(16, 1000), times(16, 256));
    // On a busy host, a fork writes more than 1,000 pages before it is paused.
    let most = vellum_host::topology::memory().available / 2 / (16 << 20);
    let count = count.min(most as usize);
    println!("{count} forks");
    let write = "--workload write,order=random,rate=2000";
    let line = format!("run --memory {memory}m,slots=3,backing=memfd --passes 0 {write}");
    let here = env.run("here", &line)?;
    env.has_written("here", memory as u64 * 32)?;
    env.ctl("here pause")?;
    let own = env.done("here")?;
    let json = env.path("m%d.json");
    let line = format!("--count {count} --name m%d --paused --json {}", json.display());
    let machines = fork(&env, "here", &line)?;
    ensure(machines.len() == count, || format!("{} machines", machines.len()))?;
    // A few run at a time, because a CPU is shared by all that run.
    for some in machines.chunks(8) {
        some.iter().try_for_each(|machine| env.ctl(&format!("{} resume", machine.name)).map(drop))?;
        for machine in some {
            env.has_written(&machine.name, own + 1000)?;
            env.ctl(&format!("{} pause", machine.name))?;
        }
    }
    machines.into_iter().try_for_each(Forked::ends_right)?;
    stops_right(&env, "here", here)
}

/// What a process has of the kernel: descriptors, threads and mappings.
fn held(pid: u32) -> Result<[usize; 3], Failed> {
    let entries = |name: &str| Ok::<_, Failed>(fs::read_dir(format!("/proc/{pid}/{name}"))?.count());
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?.lines().count();
    Ok([entries("fd")?, entries("task")?, maps])
}

/// A field of `/proc/PID/status`, in KiB.
fn kib(pid: u32, field: &str) -> Result<u64, Failed> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let value = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
    Ok(value.ok_or_else(|| format!("no {field}"))?)
}

/// Many forks one after another leave nothing in the machine that is forked. With `VELLUM_FORK=all`
/// there are 10,000.
#[test(real())]
fn forks_in_a_row_leave_nothing() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here =
        env.run("here", "run --memory 16m,slots=3,backing=memfd --passes 0 --workload write,rate=1000")?;
    env.has_written("here", 2000)?;
    env.ctl("here pause")?;
    let pid = here.child.id();
    let one = |name: &str| fork_one(&env, "here", name)?.ends_right();
    // What is allocated once is there afterwards.
    (0..3).try_for_each(|at| one(&format!("first{at}")))?;
    let (before, resident) = (held(pid)?, kib(pid, "RssAnon")?);
    for at in 0..times(20, 10_000) {
        one(&format!("f{at}"))?;
        fs::remove_file(env.path(&format!("f{at}.json")))?;
    }
    // Connections of the last clients are closed soon.
    eventually(LIMIT, "nothing is left", || Ok((held(pid)? == before).then_some(())))?;
    let now = kib(pid, "RssAnon")?;
    ensure(now <= resident + 512, || format!("{now} KiB are resident, and {resident} were"))?;
    env.ctl("here resume")?;
    stops_right(&env, "here", here)
}

/// Machines that are killed leave no socket, no file and no process, and the others go on.
#[test(real())]
fn machines_that_are_killed_leave_nothing() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", &format!("run --memory 16m,backing=memfd --passes 0 {WRITE}"))?;
    env.has_written("here", 3000)?;
    let mut random = Random::new();
    for round in 0..times(3, 100) {
        let json = env.path(&format!("r{round}_%d.json"));
        let line = format!("--count 6 --name r{round}_%d --json {}", json.display());
        let (mut killed, mut left) = (Vec::new(), Vec::new());
        for machine in fork(&env, "here", &line)? {
            // A fork of a fork is killed as well.
            if random.below(2) == 0 {
                let name = format!("{}f", machine.name);
                killed.push(fork_one(&env, &machine.name, &name)?);
            }
            let which = if random.below(2) == 0 { &mut killed } else { &mut left };
            which.push(machine);
        }
        let mut guards = Vec::new();
        for machine in &killed {
            guards.extend(children(machine.pid)?);
            let status = Command::new("kill").args(["-KILL", &machine.pid.to_string()]).status()?;
            ensure(status.success(), || format!("{status}"))?;
        }
        for machine in killed {
            machine.is_over()?;
            let socket = env.socket(&machine.name);
            let files = [socket.with_extension("log"), socket];
            eventually(LIMIT, "its files are removed", || {
                Ok(files.iter().all(|file| !file.exists()).then_some(()))
            })?;
        }
        eventually(LIMIT, "guards end", || {
            Ok(guards.iter().all(|pid| process(*pid).is_none()).then_some(()))
        })?;
        left.into_iter().try_for_each(Forked::ends_right)?;
    }
    stops_right(&env, "here", here)
}

/// `vellum doctor` and `vellum fork` assume what a machine takes. It takes no more than that.
#[test(real())]
fn a_machine_takes_no_more_than_is_told() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 256m,backing=memfd --passes 0 --workload write,rate=1000")?;
    env.has_written("here", 1000)?;
    let machines = fork(&env, "here", "--count 8 --name m%d --paused")?;
    for machine in &machines {
        let (mut tasks, mut files, mut memory) = (0, 0, 0);
        for pid in children(machine.pid)?.into_iter().chain([machine.pid]) {
            let [fds, threads, _] = held(pid)?;
            (files, tasks) = (files + fds as u64, tasks + threads as u64);
            // Its stacks and page tables belong to it alone.
            memory += kib(pid, "RssAnon")? + kib(pid, "VmPTE")? + threads as u64 * 16;
        }
        for resource in vellum_host::density::resources() {
            let takes = match resource.name {
                "threads" => tasks,
                "open files" => files,
                _ => memory.div_ceil(1024),
            };
            ensure(takes <= resource.each, || format!("{takes} {}, not {}", resource.name, resource.each))?;
        }
    }
    for machine in machines {
        env.ctl(&format!("{} stop", machine.name))?;
        machine.is_over()?;
    }
    stops_right(&env, "here", here)
}

/// Checks that the command exits with `status` and prints `line`.
fn says(output: &Output, status: i32, line: &str) -> Result<(), Failed> {
    let said = String::from_utf8_lossy(&output.stderr);
    let right = output.status.code() == Some(status) && said.contains(line) && said.lines().count() == 1;
    ensure(right, || format!("not {status}, `{line}`: {output:?}"))
}

#[test(kvm())]
fn what_cannot_be_forked_says_why_and_goes_on() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 16m,backing=memfd --passes 0")?;
    let _shared = env.run("shared", "run --memory 16m,backing=shmem --passes 0")?;
    let _locked = env.run("locked", "run --memory 4m,backing=memfd,lock --passes 0")?;
    let _waits = env.receive("waits", "")?;
    let refused = Client::borrow(&env.socket("here"), &Do::ForkBase {});
    ensure(refused.is_err(), || "a base that nobody has made".into())?;
    for (line, status, line_says) in [
        ("fork nobody --name new", 2, "no machine named `nobody` listens"),
        ("fork here", 2, "--name NEW"),
        ("fork here --name here", 2, "--name here: a machine of this name runs already"),
        ("fork here --name .new", 2, "`.new` is not a valid machine name"),
        ("fork here --count 2 --name new", 2, "--name new: with --count it has a %d"),
        ("fork here --count 0 --name new%d", 2, "--count"),
        ("fork here --count 2", 2, "--name"),
        ("fork shared --name new", 2, "the memory of shared is shmem, which others cannot share"),
        ("fork locked --name new", 1, "its memory is locked"),
        ("fork waits --name new", 2, "the memory of waits is unknown"),
        ("fork here --name new --rng", 2, "--rng: here has no rng: leave it out"),
        ("fork here --name new --disk nothing.img", 2, "--disk: here has no disk"),
        ("run --from nobody -- true", 2, "no machine named `nobody` listens"),
        ("run --from here -- true", 2, "--from here: this machine does not wait for commands"),
        ("run --from here --memory 1g -- true", 2, "a fork is like the machine that it is made of"),
        ("run --kernel k --zygote z -- true", 2, "its forks run the commands"),
        (
            "run --kernel k --memory 64m,backing=shmem --zygote z",
            2,
            "memory of backing shmem cannot be forked",
        ),
    ] {
        says(&env.vellum(line)?, status, line_says)?;
    }
    // Any other operation is refused meanwhile.
    let mut client = Client::connect(&env.socket("here"))?;
    let files = [memfd(c"pages", 0, None)?, memfd(c"map", 0, None)?, memfd(c"state", 0, None)?];
    let snapshot: Do = serde_json::from_value(serde_json::json!({
        "do": "snapshot", "downtime_ms": 1000, "timeout_ms": 1000, "chain": "none", "number": 0
    }))?;
    client.ask_with(&snapshot, &files.each_ref().map(AsFd::as_fd))?;
    says(&env.vellum("fork here --name new")?, 1, "another operation is under way (snapshot for process ")?;
    drop(client);
    eventually(LIMIT, "the snapshot is given up", || {
        Ok((env.standing("here").as_deref() == Some("running")).then_some(()))
    })?;
    fork_one(&env, "here", "new")?.ends_right()?;
    stops_right(&env, "here", here)
}

/// If the pool lacks huge pages for all forks, the error comes before the first fork.
#[test(kvm(), huge_pages(2 << 20, 16))]
fn too_few_huge_pages_are_said_before_the_first() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 32m,backing=shared-hugetlb-2m --passes 0")?;
    let refused = env.vellum("fork here --count 9999 --name w%d")?;
    says(&refused, 1, "9999 machines take 160000 huge pages of 2m, and ")?;
    ensure(env.standing("w0").is_none(), || "the first is there".into())?;
    stops_right(&env, "here", here)
}

/// If the client is killed during a fork, no unreported machine stays, and the source runs on.
#[test(real())]
fn whoever_is_killed_leaves_nothing_behind() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", &format!("run --cpus 2 --memory 32m,backing=memfd --passes 0 {WRITE}"))?;
    env.has_written("here", 3000)?;
    let mut random = Random::new();
    for at in 0..times(20, 500) {
        let mut command = env.command(&format!("fork here --count 3 --name k{at}_%d"));
        let mut client = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        std::thread::sleep(std::time::Duration::from_micros(random.below(60_000)));
        client.kill()?;
        client.wait()?;
        let mut said = String::new();
        if let Some(stdout) = &mut client.stdout {
            stdout.read_to_string(&mut said)?;
        }
        // The forks that the client has reported run on. The others end.
        eventually(LIMIT, "it forks no more", || {
            Ok((env.standing("here").as_deref() == Some("running")).then_some(()))
        })?;
        for number in 0..3 {
            let name = format!("k{at}_{number}");
            if said.contains(&format!("{name} runs, ")) {
                // The client may have been killed between reporting a machine and the note of that
                // here.
                env.vellum(&format!("ctl {name} stop"))?;
            }
        }
        let sockets = |name: &str| env.socket(name).exists();
        eventually(LIMIT, "nothing is left", || {
            Ok((0..3).all(|number| !sockets(&format!("k{at}_{number}"))).then_some(()))
        })?;
    }
    fork_one(&env, "here", "last")?.ends_right()?;
    stops_right(&env, "here", here)
}

/// Forks a machine with this fault planted. Returns whether all pages of the source and its forks
/// are right.
fn goes_right(mistake: Option<&'static str>, backing: &str) -> Result<bool, Failed> {
    let env = TestEnv::planted(mistake)?;
    // A faster writer takes long to check.
    let write = "--workload write,order=random,rate=50000,write=80";
    let memory = format!("--memory 8m,slots=3,backing={backing}");
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

/// Adds the tests of planted faults, which must be caught.
fn add_planted(tests: &mut Tests) {
    for backing in ["memfd", "anonymous"] {
        tests.add(format!("without_a_mistake_all_pages_of_{backing}_are_right"), kvm(), move || {
            ensure(goes_right(None, backing)?, || "a page is wrong".into())
        });
    }
    let of_memfd = ["piece-left-shared", "parted-left-out", "copied-after-resume", "layer-off-by-a-slot"];
    let of_anonymous = ["dropped-bit", "read-before-clear"];
    let all = of_memfd.map(|mistake| (mistake, "memfd")).into_iter();
    for (mistake, backing) in all.chain(of_anonymous.map(|mistake| (mistake, "anonymous"))) {
        tests.add(format!("planted_{mistake}_is_caught"), kvm(), move || match POSSIBLE {
            true => ensure(!goes_right(Some(mistake), backing)?, || "nobody notices".into())
                .map(|()| Completion::Completed),
            false => Ok(Completion::ignored_with(IMPOSSIBLE)),
        });
    }
}
