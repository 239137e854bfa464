//! `vellum live-update`: machines that outlive their host's kernel.
//!
//! What needs no other kernel is tested here on any host: a test holds what a session would. A
//! machine is saved, its process ends, and a new one is started with the same memory. The tests on
//! hosts that do replace their kernel are those of `cargo lab test live-update`.

use std::fs::{self, File, Permissions};
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode, Output, Stdio};

use serde_json::{Value, json};
use support::env::{Machine, Process, TestEnv};
use support::hosts::kvm;
use support::results::every_page_is_right;
use support::{Completion, Failed, LIMIT, Need, Tests, ensure, eventually, is_caught, test};
use vellum_control::client::Client;
use vellum_control::{Do, Event};
use vellum_judge::image::{Format, image};
use vellum_judge::read::{Finding, Log, Verdict, read};
use vellum_migration::commit_flag::{CommitFlag, Ownership};
use vellum_migration::live_update::{self, HostSide, List};
use vellum_migration::snapshot::Files;
use vellum_migration::snapshot::manifest::Point;
use vellum_sys::mmap::memfd;
use vellum_sys::program::detached_with;

support::vellum!();

fn main() -> ExitCode {
    let mut tests = Tests::from_args();
    add_planted(&mut tests);
    tests.run()
}

const WRITE: &str = "--memory 64m,backing=memfd --workload write,order=random,rate=20000,write=80 --passes 0";

/// A machine that is saved, as a session has it.
struct Saved {
    /// The machine runs on if this is closed.
    _client: Client,
    memory: File,
    files: [File; 3],
    point: Point,
}

/// Saves the machine `name`.
fn save(env: &TestEnv, name: &str) -> Result<Saved, Failed> {
    let (mut client, files, memory) = begin(env, name)?;
    client.ask(&Do::LiveUpdatePause {})?;
    let point = eventually(LIMIT, "it is saved", || match serde_json::from_value(client.event_of(None)?)? {
        Event::Preserved { written, .. } => Ok(Some(Point::of(0, false, written))),
        Event::NotPreserved { why } => Err(why.into()),
        _ => Ok(None),
    })?;
    Ok(Saved { _client: client, memory, files, point })
}

/// Begins to save the machine `name`.
fn begin(env: &TestEnv, name: &str) -> Result<(Client, [File; 3], File), Failed> {
    let mut client = env.listen(name)?;
    let files = [memfd(c"pages", 0, None)?, memfd(c"map", 0, None)?, memfd(c"state", 0, None)?];
    client.ask_with(&Do::LiveUpdate {}, &files.each_ref().map(AsFd::as_fd))?;
    let (_, memory) = Client::borrow(&env.socket(name), &Do::LiveUpdateMemory {})?;
    let memory = memory.into_iter().next().ok_or("no memory came")?.into();
    Ok((client, files, memory))
}

/// A machine's process that was started with what was saved, and its flag.
struct Started {
    process: Process,
    waits: UnixStream,
    flag: CommitFlag,
}

/// Starts the machine `name` from what was saved.
fn start(env: &TestEnv, name: &str, saved: &Saved, more: &str) -> Result<Started, Failed> {
    let [waits, theirs] = <[UnixStream; 2]>::from(UnixStream::pair()?);
    let file = CommitFlag::file()?;
    let flag = CommitFlag::new(OwnedFd::from(file.try_clone()?))?;
    flag.step(Ownership::Open, Ownership::Committed);
    let [ram, map, state] = saved.files.each_ref().map(AsRawFd::as_raw_fd);
    let files = [ram, map, state, saved.memory.as_raw_fd()];
    let list = json!({
        "point": saved.point, "files": files, "flag": file.as_raw_fd(), "waits": theirs.as_raw_fd(),
        "log": null, "devices": [], "limit": null, "lock": false
    });
    let inherited = memfd(c"list", 0, None)?;
    serde_json::to_writer(&inherited, &list)?;
    let number = inherited.as_raw_fd();
    let mut command =
        env.command(&format!("live-update restore --name {name} --serial null --child {number} {more}"));
    let descriptors = files.into_iter().chain([file.as_raw_fd(), theirs.as_raw_fd(), number]);
    detached_with(&mut command, descriptors.collect());
    let process = Process::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()))?;
    Ok(Started { process, waits, flag })
}

impl Started {
    fn runs(&self) -> Result<(), Failed> {
        ensure((&self.waits).read(&mut [0])? == 1, || "it does not run".into())?;
        ensure(self.flag.step(Ownership::Ran, Ownership::Ran) == Ownership::Ran, || {
            "nothing tells that it has run".into()
        })
    }
}

/// Saves a guest, ends its process, and lets it go on in another. Returns whether all of its pages
/// were right at its end.
fn goes_on(line: &str, planted: Option<&'static str>) -> Result<bool, Failed> {
    let env = TestEnv::planted(planted)?;
    let machine = env.run("here", &format!("run {line}"))?;
    env.has_written("here", 2000)?;
    let saved = save(&env, "here")?;
    ends_without_running(&env, "here", machine, &saved)?;
    let json = env.path("result.json");
    let more = format!("--json {}", json.display());
    let again = start(&env, "here", &saved, &more)?;
    again.runs()?;
    let done = env.done("here")?;
    env.has_written("here", done)?;
    env.ctl("here stop")?;
    let output = again.process.output()?;
    ensure(output.status.success() || planted.is_some(), || format!("{output:?}"))?;
    every_page_is_right(&json)
}

/// Ends the process of a machine that is saved. Its memory does not change.
fn ends_without_running(env: &TestEnv, name: &str, machine: Machine, saved: &Saved) -> Result<(), Failed> {
    let before = content(&saved.memory)?;
    env.ctl(&format!("{name} resume"))?;
    env.ctl(&format!("{name} stop"))?;
    let output = machine.end()?;
    // Its result waits: the guest is in the middle of its work.
    ensure(String::from_utf8_lossy(&output.stdout).contains("the guest was saved"), || {
        format!("{output:?}")
    })?;
    ensure(content(&saved.memory)? == before, || "its memory has changed since it was saved".into())
}

fn content(memory: &File) -> Result<Vec<u8>, Failed> {
    let mut bytes = Vec::new();
    // A position of its own.
    File::open(vellum_sys::file::path_of(memory))?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[test(kvm())]
fn a_guest_goes_on_in_another_process() -> Result<(), Failed> {
    for line in [
        WRITE.to_owned(),
        WRITE.replace("64m", "256m,slots=4") + " --cpus 4",
        WRITE.replace("64m", "64m,lock"),
        format!("{WRITE} --dirty-ring"),
    ] {
        ensure(goes_on(&line, None)?, || format!("{line}: a page is wrong"))?;
    }
    Ok(())
}

fn add_planted(tests: &mut Tests) {
    if vellum_sys::plant::POSSIBLE {
        let caught =
            || -> Result<Completion, Failed> { is_caught(|| goes_on(WRITE, Some("page-after-save"))) };
        tests.add("planted_page-after-save_is_caught", kvm(), caught);
        let caught = || -> Result<(), Failed> {
            let log = is_judged(Some("no-clock"))?;
            let back = |fault: &Finding| fault.kind == "kvmclock-back" && fault.found < fault.expected;
            ensure(log.faults.iter().any(back), || format!("{log:?}"))
        };
        tests.add("planted_no-clock_is_caught", judge(), caught);
    }
}

/// The image of `vellum judge`, which watches its clocks, goes on in another process to its end.
/// Returns its log.
fn is_judged(planted: Option<&'static str>) -> Result<Log, Failed> {
    let env = TestEnv::planted(planted)?;
    let [elf, before, after] = ["judge.elf", "before.log", "after.log"].map(|name| env.path(name));
    fs::write(&elf, image(Format::Elf))?;
    let mut command = env.command("run --cpus 2 --memory 16m,backing=memfd");
    command.arg("--kernel").arg(&elf).args(["--cmdline", "passes=40 rate=8000 seed=5 report=500ms"]);
    command.args(["--serial", &format!("file={}", before.display())]);
    let machine = env.start("here", &mut command)?;
    eventually(LIMIT, "the image has passed", || {
        Ok((read(&fs::read(&before)?).pass > Some(2)).then_some(()))
    })?;
    let saved = save(&env, "here")?;
    env.ctl("here stop")?;
    machine.end()?;
    let again = start(&env, "here", &saved, &format!("--serial file={}", after.display()))?;
    again.runs()?;
    again.process.output()?;
    Ok(read(&[fs::read(&before)?, fs::read(&after)?].concat()))
}

#[test(judge())]
fn clocks_go_on() -> Result<(), Failed> {
    let log = is_judged(None)?;
    ensure(log.verdict() == Verdict::Whole, || format!("{log:?}"))
}

/// The image of `vellum judge` is for x86-64.
fn judge() -> Need {
    kvm()?;
    match cfg!(target_arch = "x86_64") {
        true => Ok(()),
        false => Err("the image that watches its clocks is for x86-64".into()),
    }
}

/// If its client goes, whether before or after the pause, the guest goes on where it is.
#[test(kvm())]
fn without_its_client_a_machine_runs_on() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine = env.run("here", &format!("run {WRITE}"))?;
    for is_paused in [false, true] {
        env.has_written("here", 2000)?;
        if is_paused {
            let saved = save(&env, "here")?;
            ensure(env.standing("here").as_deref() == Some("live-updating"), || {
                format!("{:?}", env.standing("here"))
            })?;
            let done = env.done("here")?;
            // Nothing else can be done with it meanwhile, and nobody else can end the operation.
            let refused = env.vellum(&format!("snapshot here {}", env.path("s").display()))?;
            let said = String::from_utf8_lossy(&refused.stderr).into_owned();
            ensure(said.contains("another operation is under way (live-update for process "), || said)?;
            let others = Client::connect(&env.socket("here"))?.ask(&Do::LiveUpdatePause {});
            ensure(others.is_err(), || "another client has paused it".into())?;
            // The restored machine would know nothing of these.
            for lost in [Do::Balloon { bytes: 1 << 20 }, Do::Nmi {}, Do::Sysrq { key: 'h' }] {
                let refused =
                    Client::connect(&env.socket("here"))?.ask(&lost).map_err(|error| error.to_string());
                let is_told = refused.as_ref().is_err_and(|why| why.contains("saved for a live update"));
                ensure(is_told, || format!("{lost:?}: {refused:?}"))?;
            }
            ensure(env.done("here")? == done, || "it runs".into())?;
            drop(saved);
        } else {
            drop(begin(&env, "here")?);
        }
        eventually(LIMIT, "it runs on", || {
            Ok((env.standing("here").as_deref() == Some("running")).then_some(()))
        })?;
        let done = env.done("here")?;
        env.has_written("here", done + 2000)?;
    }
    env.ctl("here stop")?;
    let output = machine.end()?;
    ensure(output.status.success(), || format!("{output:?}"))
}

/// What is damaged is refused, and the memory is as it was: the next attempt goes right.
#[test(kvm())]
fn what_is_refused_has_not_run() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine = env.run("here", &format!("run {WRITE}"))?;
    env.has_written("here", 2000)?;
    let mut saved = save(&env, "here")?;
    ends_without_running(&env, "here", machine, &saved)?;
    let before = content(&saved.memory)?;
    let right = saved.point.clone();
    for (crc, more, says) in [(1, "", "damaged"), (0, "--rng", "rng")] {
        saved.point.state_crc = right.state_crc ^ crc;
        let refused = start(&env, "here", &saved, more)?;
        let output = refused.process.output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure(!output.status.success() && said.contains(says), || said)?;
        let step = refused.flag.step(Ownership::Committed, Ownership::Withdrawn);
        ensure(step == Ownership::Withdrawn, || format!("{step:?}"))?;
    }
    ensure(content(&saved.memory)? == before, || "a refusal has changed its memory".into())?;
    saved.point = right;
    let again = start(&env, "here", &saved, "")?;
    again.runs()?;
    env.ctl("here stop")?;
    let output = again.process.output()?;
    ensure(output.status.success(), || format!("{output:?}"))
}

/// The memory of a machine that is forked, of huge pages, or of its process alone.
#[test(kvm())]
fn memory_that_no_kernel_preserves_is_refused() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    for (backing, says) in [("anonymous", "its memory is anonymous"), ("shmem", "its memory is shmem")] {
        let machine = env.run("here", &format!("run --memory 16m,backing={backing} --passes 0"))?;
        let refused = begin(&env, "here")
            .map(drop)
            .expect_err("it cannot be preserved")
            .message()
            .unwrap_or_default()
            .to_owned();
        ensure(refused.contains(says), || refused)?;
        env.ctl("here stop")?;
        machine.end()?;
    }
    let machine = env.run("here", "run --memory 16m,backing=memfd --passes 0")?;
    let forked = env.vellum("fork here --name there")?;
    ensure(forked.status.success(), || format!("{forked:?}"))?;
    let refused = begin(&env, "here")
        .map(drop)
        .expect_err("it cannot be preserved")
        .message()
        .unwrap_or_default()
        .to_owned();
    ensure(refused.contains("its memory was forked"), || refused)?;
    env.ctl("there stop")?;
    env.ctl("here stop")?;
    machine.end()?;
    Ok(())
}

/// A host whose kernel has no orchestrator.
fn no_orchestrator() -> Need {
    match fs::exists(vellum_sys::liveupdate::DEVICE) {
        Ok(true) => Err("needs a kernel without /dev/liveupdate".into()),
        _ => Ok(()),
    }
}

#[test(no_orchestrator())]
fn a_host_that_cannot_is_one_line_with_what_would_help() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    for line in ["live-update save --all", "live-update restore", "live-update restore web --give-up"] {
        let output = env.vellum(line)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let right = output.status.code() == Some(1) && said.lines().count() == 1;
        ensure(right && said.contains("kho=on liveupdate=on"), || format!("{line}: {output:?}"))?;
    }
    let none = env.vellum("live-update save --all --if-any --detach")?;
    ensure(none.status.success() && [&none.stdout, &none.stderr].iter().all(|said| said.is_empty()), || {
        format!("{none:?}")
    })?;
    let status = env.vellum("live-update status --json")?;
    let said: Value = serde_json::from_slice(&status.stdout)?;
    ensure(status.status.code() == Some(1) && said["available"] == false, || format!("{status:?}"))?;
    for (line, says) in [
        ("live-update save", "<MACHINE>"),
        ("live-update save web --if-any", "cannot be used with"),
        ("live-update save web --session a/b", "a session's name"),
        ("live-update restore --name other", "of which machine?"),
        ("live-update restore --give-up", "MACHINE"),
        ("live-update restore --serial file=x", "--serial file: of which machine?"),
        ("live-update restore a b --json x", "--json: of which machine?"),
    ] {
        let output = env.vellum(line)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure(output.status.code() == Some(2) && said.contains(says), || format!("{line}: {output:?}"))?;
    }
    Ok(())
}

/// What is wrong with several machines and with the command line is one line, before anything is done.
#[test(kvm())]
fn a_save_tells_all_that_is_wrong_at_once() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machines = [("one", "anonymous"), ("two", "shmem")]
        .map(|(name, backing)| env.run(name, &format!("run --memory 16m,backing={backing} --passes 0")));
    let output = env.vellum("live-update save --all --if-any --check --kernel /nothing --json /nothing/x")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    for what in [
        "--kernel /nothing: ",
        "one: its memory is anonymous",
        "two: its memory is shmem",
        "--json /nothing/x: ",
    ] {
        ensure(said.contains(what), || format!("{what}: {said}"))?;
    }
    ensure(said.lines().count() == 1, || said.clone())?;
    let output = env.vellum("live-update save --all --hand-over /nothing --not-loaded")?;
    let other = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(other.contains("--hand-over /nothing: "), || other.clone())?;
    let is_loaded =
        fs::read_to_string("/sys/kernel/kexec_loaded").map(|text| text.trim() != "0").unwrap_or(true);
    ensure(said.contains("no kernel is loaded") != is_loaded, || said)?;
    ensure(!other.contains("no kernel is loaded"), || other)?;
    for (machine, name) in machines.into_iter().zip(["one", "two"]) {
        ensure(env.standing(name).as_deref() == Some("running"), || format!("{name} does not run"))?;
        env.ctl(&format!("{name} stop"))?;
        machine?.end()?;
    }
    Ok(())
}

/// `command` with the file of notes in the test's directory.
fn noted(env: &TestEnv, mut command: Command) -> Result<Output, Failed> {
    Ok(command.env("XDG_DATA_HOME", env.dir()).current_dir(env.dir()).output()?)
}

/// Runs a command that must end with `status` and say `what`.
fn says(env: &TestEnv, line: &str, status: i32, what: &str) -> Result<(), Failed> {
    let output = noted(env, env.command(line))?;
    let said = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned();
    ensure(output.status.code() == Some(status) && said.contains(what), || {
        format!("{line}: not {status}, `{what}`: {output:?}")
    })
}

/// Runs a command that must say `what`. Its status depends on whether this host has an orchestrator.
fn tells(env: &TestEnv, line: &str, what: &str) -> Result<(), Failed> {
    let output = noted(env, env.command(line))?;
    let said = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned();
    ensure(said.contains(what), || format!("{line}: not `{what}`: {output:?}"))
}

/// Starts a keeper of the session `test`, as a save does that is cancelled after the machine's process
/// has ended. The client that it would tell has ended too.
fn keeper(env: &TestEnv, command: Command, name: &str, saved: &Saved) -> Result<Process, Failed> {
    keeper_of(env, command, name, saved, HostSide::default())
}

/// The same of a machine that has more of its host.
fn keeper_of(
    env: &TestEnv,
    mut command: Command,
    name: &str,
    saved: &Saved,
    host: HostSide,
) -> Result<Process, Failed> {
    let (memory, position) = live_update::marked(&saved.memory)?;
    let host = HostSide { serial: "null".into(), sandbox: "on".into(), ..host };
    let line = ["vellum", "run", "--append", "it's one word"].map(Into::into).into();
    let machine = live_update::Saved {
        name: name.into(),
        line,
        host,
        position,
        point: saved.point.clone(),
        files: Default::default(),
    };
    let [ram, map, state] = [&saved.files[0], &saved.files[1], &saved.files[2]].map(File::try_clone);
    let files = Files { ram: ram?, map: map?, state: state?, clones: Vec::new() };
    let (record, mut list) =
        (memfd(c"record", 0, None)?, List { vellum: "test".into(), machines: vec![machine] });
    live_update::write(&record, &mut list, &[files])?;
    let (waits, inherited) = (UnixStream::pair()?.1, memfd(c"list", 0, None)?);
    let saved = json!({ "record": record.as_raw_fd(), "memory": [memory.as_raw_fd()] });
    serde_json::to_writer(&inherited, &json!({ "waits": waits.as_raw_fd(), "saved": saved }))?;
    let descriptors = [&record, &memory, &inherited].map(AsRawFd::as_raw_fd);
    let child = inherited.as_raw_fd().to_string();
    command.args(["live-update", "restore", "--session", "test", "--keeper", "--child", &child]);
    command.env("XDG_RUNTIME_DIR", env.dir()).env("XDG_DATA_HOME", env.dir()).current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    detached_with(&mut command, descriptors.into_iter().chain([waits.as_raw_fd()]).collect());
    let keeper = Process::spawn(&mut command)?;
    let socket = env.path("vellum/live-update-test.keeper");
    eventually(LIMIT, "the keeper listens", || Ok(UnixStream::connect(&socket).is_ok().then_some(())))?;
    Ok(keeper)
}

/// A keeper outlives the client that started it and a new version of its program. A save is refused
/// meanwhile. What it starts has the client's directory.
#[test(kvm())]
fn a_machine_is_kept_until_it_has_run() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine = env.run("here", &format!("run {WRITE}"))?;
    env.has_written("here", 2000)?;
    let saved = save(&env, "here")?;
    ends_without_running(&env, "here", machine, &saved)?;
    says(&env, "live-update status --machine here", 0, "here may be started")?;
    let program = env.path("program");
    support::executable(&program, &fs::read(VELLUM)?)?;
    let keeper = keeper(&env, Command::new(&program), "here", &saved)?;
    // As the package manager does.
    fs::remove_file(&program)?;
    drop(saved);
    says(
        &env,
        "live-update restore --session test --print",
        0,
        "here: vellum run --append 'it'\\''s one word'\n",
    )?;
    says(
        &env,
        "live-update status --machine here",
        1,
        "is kept: vellum live-update restore --session test here",
    )?;
    says(&env, "live-update status --machine other", 0, "other may be started")?;
    tells(&env, "live-update save --all --check", "not restored yet: here of session test")?;
    says(&env, "live-update restore --session test here other", 2, "other: no machine of this name is kept")?;
    says(&env, "live-update restore --session test here --rng", 2, "kept: here")?;
    let restore = "live-update restore --session test here --name there --json result.json";
    says(&env, restore, 0, "there runs, process ")?;
    says(&env, "live-update status --machine here", 0, "here may be started")?;
    says(&env, "live-update status --machine there", 1, "there runs")?;
    let has_log = |name: &str| env.path(&format!("vellum/{name}.log")).exists();
    ensure(has_log("there") && !has_log("here"), || "its messages are not under its new name".into())?;
    let output = keeper.output()?;
    ensure(output.status.success(), || format!("{output:?}"))?;
    let line = started_as(&env, "there")?;
    ensure(line.contains(r#"--started-as=["vellum","run","--append","it's one word"]"#), || line)?;
    let done = env.done("there")?;
    env.has_written("there", done + 2000)?;
    env.ctl("there stop")?;
    let json = env.path("result.json");
    eventually(LIMIT, "it ends", || Ok(fs::read(&json).is_ok_and(|text| !text.is_empty()).then_some(())))?;
    ensure(every_page_is_right(&json)?, || "a page is wrong".into())
}

fn root() -> Need {
    if vellum_sys::host::is_root() { Ok(()) } else { Err("needs root: sudo -E cargo test".into()) }
}

/// A machine that has dropped root has named its result's file and its devices. Root opens neither with
/// more rights than the machine's user has; what root names itself, it opens.
#[test(kvm().and(root()))]
fn what_a_machine_that_has_dropped_root_names_is_opened_as_its_user() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine = env.run("here", &format!("run {WRITE}"))?;
    env.has_written("here", 2000)?;
    let saved = save(&env, "here")?;
    ends_without_running(&env, "here", machine, &saved)?;
    let private = env.path("private");
    fs::create_dir(&private)?;
    fs::set_permissions(&private, Permissions::from_mode(0o700))?;
    let result = private.join("result.json");
    let host = HostSide { user: Some((65534, 65533)), result: Some(result.clone()), ..HostSide::default() };
    let keeper = keeper_of(&env, Command::new(VELLUM), "here", &saved, host)?;
    drop(saved);
    says(
        &env,
        "live-update restore --session test here",
        2,
        "private/result.json: cannot write: Permission denied",
    )?;
    ensure(!result.exists(), || "root has made it".into())?;
    let own = format!("live-update restore --session test here --json {}", result.display());
    says(&env, &own, 0, "here runs, process ")?;
    let output = keeper.output()?;
    ensure(output.status.success(), || format!("{output:?}"))?;
    env.ctl("here stop")?;
    // The file has its length before its content.
    let is_whole = |text: Vec<u8>| serde_json::from_slice::<Value>(&text).is_ok();
    eventually(LIMIT, "it ends", || Ok(fs::read(&result).is_ok_and(is_whole).then_some(())))?;
    ensure(every_page_is_right(&result)?, || "a page is wrong".into())
}

/// The command line of the machine's process.
fn started_as(env: &TestEnv, name: &str) -> Result<String, Failed> {
    let status: Value = serde_json::from_str(&env.ctl(&format!("{name} status"))?)?;
    let line = fs::read(format!("/proc/{}/cmdline", status["pid"]))?;
    Ok(String::from_utf8_lossy(&line).replace('\0', " "))
}

/// After a kexec that has lost the machines, a restore says which, once.
#[test]
fn machines_that_a_kexec_has_lost_are_named() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let restore = "live-update restore --if-any --session test";
    says(&env, restore, 0, "")?;
    fs::create_dir_all(env.path("vellum"))?;
    let note = env.path("vellum/live-update-test.json");
    let write = |format: u32, boot: &str, holder: u32| {
        let text = json!({
            "vellum": "9.9", "format": format, "boot": boot, "holder": holder, "machines": ["web", "db"]
        });
        fs::write(&note, text.to_string())
    };
    write(live_update::VERSION + 1, "another", 1)?;
    for _ in 0..2 {
        says(&env, restore, 1, "Vellum 9.9 has saved web, db in format")?;
    }
    write(live_update::VERSION, "another", 1)?;
    says(&env, "live-update status --machine db", 1, "db was saved and has not been restored")?;
    tells(&env, "live-update status", "saved before this boot, and not restored yet: web, db")?;
    says(&env, restore, 1, "lost: web, db")?;
    says(&env, "live-update status --machine db", 0, "db may be started")?;
    says(&env, restore, 0, "")?;
    // In this boot, they are saved as long as a process holds that.
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    write(live_update::VERSION, boot.trim(), std::process::id())?;
    says(&env, restore, 0, "")?;
    says(&env, "live-update status --machine db", 1, "db was saved")?;
    write(live_update::VERSION, boot.trim(), u32::MAX)?;
    says(&env, "live-update status --machine db", 0, "db may be started")
}
