//! Many forks: at once, in a row, by several clients, and killed. `VELLUM_FORK=all` makes more.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;
use support::cgroup::{Group, memory_group};
use support::env::{TestEnv, children, process};
use support::hosts::{kvm, real};
use support::results::every_page_is_right;
use support::{Failed, LIMIT, Random, ensure, eventually, test};
use vellum_control::Do;
use vellum_control::client::Client;
use vellum_host::density::Shape;

use crate::{Forked, VELLUM, WRITE, fork, fork_one, says, stops_right, times};

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

/// With `--json`, the command prints a line for the fork, and one for each machine.
#[test(kvm())]
fn a_fork_is_told_as_json() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    // Slow enough that a busy host does not see a quarter of memory written, which would be a new base.
    let line = "run --memory 16m,backing=memfd --passes 0 --workload write,order=sequential,rate=200,warm";
    let here = env.run("here", line)?;
    env.has_written("here", 4096)?;
    // Makes the base, from which the others differ.
    fork_one(&env, "here", "before")?.ends_right()?;
    let mut client = env.listen("here")?;
    for (more, state) in
        [("--count 2 --name j%d --json", "running"), ("--json - --name j9 --paused", "paused")]
    {
        let own = env.done("here")?;
        env.has_written("here", own + 100)?;
        let output = env.vellum(&format!("fork here {more}"))?;
        env.ctl("here pause")?;
        ensure(output.status.success() && output.stderr.is_empty(), || format!("{output:?}"))?;
        let text = String::from_utf8(output.stdout)?;
        let lines = text.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
        let event = loop {
            let event = client.event_of(None)?;
            if event["event"] == "forked" {
                break event;
            }
        };
        let (first, rest) = lines.split_first().ok_or("no line")?;
        let pages = [&event["present"], &event["zero"]].map(|pages| pages.as_u64().unwrap_or_default());
        let mut expected = serde_json::json!({
            "line": "fork", "machine": "here", "pause_us": event["us"], "base": 0,
            "shared_bytes": 16 << 20, "copied_bytes": 0
        });
        ensure(!rest.is_empty(), || text.clone())?;
        for line in rest {
            let name = line["name"].as_str().ok_or("no name")?.to_owned();
            let pid = line["pid"].as_u64().ok_or("no process")? as u32;
            ensure(line["line"] == "machine" && line["state"] == state, || text.clone())?;
            let status = Client::connect(&env.socket(&name))?.ask(&Do::Status {})?;
            ensure(status["pid"] == pid && status["state"] == state, || format!("{status}"))?;
            // The guest writes page after page. A machine maps these, and copies the others.
            let mapped = mapped(pid, "vellum-fork-pages")?;
            expected["copied_bytes"] = ((pages[0] + pages[1]) * 4096 - mapped).into();
            ensure(*first == expected && mapped > 0, || format!("{text}, not {expected}"))?;
            let machine = Forked { env: &env, name, pid };
            env.ctl(&format!("{} stop", machine.name))?;
            machine.is_over()?;
        }
        env.ctl("here resume")?;
    }
    // What cannot be forked is told as without it.
    says(&env.vellum("fork here --json --name here")?, 2, "a machine of this name runs already")?;
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
            ensure(every_page_is_right(&json)?, || format!("{} has a page that is wrong", forked.name))?;
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

/// The bytes that a process maps privately of files of this name.
pub(crate) fn mapped(pid: u32, name: &str) -> Result<u64, Failed> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let length = |line: &str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        Some(u64::from_str_radix(end, 16).ok()? - u64::from_str_radix(start, 16).ok()?)
    };
    let is_private = |line: &&str| line.contains(" rw-p ") && line.contains(name);
    Ok(maps.lines().filter(is_private).filter_map(length).sum())
}

/// Long runs of pages, which machines share, do not count as copies of each.
#[test(kvm(), memory_group())]
fn pages_that_are_mapped_need_no_room_for_copies() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let write = "--workload write,order=sequential,rate=8000";
    let here = env.run("here", &format!("run --memory 512m,backing=memfd --passes 0 {write}"))?;
    env.has_written("here", 1000)?;
    fork_one(&env, "here", "first")?.ends_right()?;
    // Less than a quarter of memory.
    let own = env.done("here")?;
    env.has_written("here", own + 12_000)?;
    env.ctl("here pause")?;
    const COUNT: usize = 6;
    let differ = (env.done("here")? - own) * 4096;
    let group = Group::new()?;
    group.limit(differ * (COUNT as u64 - 1))?;
    let mut command = group.command(VELLUM);
    command.args(["fork", "here", "--count", &COUNT.to_string(), "--name", "c%d", "--paused", "--json"]);
    let output = command.env("XDG_RUNTIME_DIR", env.dir()).output()?;
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines = lines.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let machine = |line: &Value| {
        Some(Forked { env: &env, name: line["name"].as_str()?.into(), pid: line["pid"].as_u64()? as u32 })
    };
    let machines: Vec<Forked> = lines.iter().filter_map(machine).collect();
    ensure(output.status.success() && machines.len() == COUNT, || format!("{output:?}"))?;
    for machine in machines {
        ensure(mapped(machine.pid, "vellum-fork-pages")? > 0, || "no run is mapped".into())?;
        env.ctl(&format!("{} stop", machine.name))?;
        machine.is_over()?;
    }
    env.ctl("here resume")?;
    stops_right(&env, "here", here)
}

/// What a process has of the kernel: descriptors, threads and mappings.
fn held(pid: u32) -> Result<[usize; 3], Failed> {
    let entries = |name: &str| Ok::<_, Failed>(fs::read_dir(format!("/proc/{pid}/{name}"))?.count());
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?.lines().count();
    Ok([entries("fd")?, entries("task")?, maps])
}

/// The processes that were started in this environment.
fn processes(env: &TestEnv) -> Result<Vec<u32>, Failed> {
    let variable = format!("XDG_RUNTIME_DIR={}\0", env.dir().display());
    let is_own = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.windows(variable.len()).any(|part| part == variable.as_bytes())
    };
    let pids = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mut own: Vec<u32> = pids.filter(is_own).collect();
    own.sort();
    Ok(own)
}

/// A field of `/proc/PID/status`, in KiB.
pub(crate) fn kib(pid: u32, field: &str) -> Result<u64, Failed> {
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
    // Connections of the last clients are closed soon. One that was still open at the first reading
    // is in it, so there may be fewer.
    eventually(LIMIT, &format!("nothing is left but {before:?}"), || {
        Ok(held(pid)?.iter().zip(before).all(|(now, before)| *now <= before).then_some(()))
    })?;
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
    a_machine_takes_no_more(&env, 1)?;
    a_machine_takes_no_more(&env, 8)
}

fn a_machine_takes_no_more(env: &TestEnv, vcpus: u64) -> Result<(), Failed> {
    let write = "--passes 0 --workload write,rate=1000";
    let here = env.run("here", &format!("run --cpus {vcpus} --memory 256m,backing=memfd {write}"))?;
    env.has_written("here", 1000)?;
    let machines = fork(env, "here", "--count 8 --name m%d --paused")?;
    for machine in &machines {
        let (mut tasks, mut files, mut memory) = (0, 0, 0);
        for pid in children(machine.pid)?.into_iter().chain([machine.pid]) {
            let [fds, threads, _] = held(pid)?;
            (files, tasks) = (files + fds as u64, tasks + threads as u64);
            // Its stacks and page tables belong to it alone.
            memory += kib(pid, "RssAnon")? + kib(pid, "VmPTE")? + threads as u64 * 16;
        }
        let shape = Shape { vcpus, servers: 0, memory: 256 << 20 };
        for resource in vellum_host::density::resources(shape) {
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
    stops_right(env, "here", here)
}

/// The kernel's own memory of machines, which their control group is charged for, and what each has of
/// its own, are no more than is told. This is so for each size: KVM keeps some for each GiB.
#[test(real(), memory_group())]
fn the_kernel_takes_no_more_for_a_machine_than_is_told() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    const COUNT: u64 = 4;
    let mut all = Vec::new();
    for gib in [1, 8] {
        let here = env.run(
            "here",
            &format!("run --memory {gib}g,backing=memfd --passes 0 --workload write,rate=1000"),
        )?;
        env.has_written("here", 1000)?;
        let group = Group::new()?;
        let mut command = group.command(VELLUM);
        command.args(["fork", "here", "--count", &COUNT.to_string(), "--name", "m%d", "--paused", "--json"]);
        let output = command.env("XDG_RUNTIME_DIR", env.dir()).output()?;
        ensure(output.status.success(), || format!("{output:?}"))?;
        let lines = String::from_utf8(output.stdout)?;
        let lines = lines.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
        let machine = |line: &Value| {
            Some(Forked { env: &env, name: line["name"].as_str()?.into(), pid: line["pid"].as_u64()? as u32 })
        };
        let machines: Vec<Forked> = lines.iter().filter_map(machine).collect();
        let kernel = group.kernel()? / COUNT;
        let mut own = 0;
        for machine in &machines {
            for pid in children(machine.pid)?.into_iter().chain([machine.pid]) {
                own += (kib(pid, "RssAnon")? << 10) / COUNT;
            }
        }
        let shape = Shape { vcpus: 1, servers: 0, memory: gib << 30 };
        let told = vellum_host::density::resources(shape);
        let told = told.iter().find(|resource| resource.name == "MiB of memory").ok_or("no memory")?.each;
        println!(
            "{gib} GiB: {} KiB of the kernel, {} KiB of its own; told: {told} MiB",
            kernel >> 10,
            own >> 10
        );
        ensure(machines.len() as u64 == COUNT && kernel + own <= told << 20, || {
            format!("{gib} GiB: {kernel} and {own} bytes, not {told} MiB")
        })?;
        all.push((kernel, told << 20));
        for machine in machines {
            env.ctl(&format!("{} stop", machine.name))?;
            machine.is_over()?;
        }
        stops_right(&env, "here", here)?;
    }
    // Rounded to MiB.
    let [(small, told_small), (large, told_large)] = all[..] else { return Err("two sizes".into()) };
    ensure(large.saturating_sub(small) <= told_large - told_small + (1 << 20), || format!("{all:?}"))
}

/// If the client is killed during a fork, no unreported machine stays, and the source runs on.
#[test(real())]
fn whoever_is_killed_leaves_nothing_behind() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", &format!("run --cpus 2 --memory 32m,backing=memfd --passes 0 {WRITE}"))?;
    env.has_written("here", 3000)?;
    let mut random = Random::new();
    let before = processes(&env)?;
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
            let are_gone = (0..3).all(|number| !sockets(&format!("k{at}_{number}")));
            Ok((are_gone && processes(&env)? == before).then_some(()))
        })?;
    }
    fork_one(&env, "here", "last")?.ends_right()?;
    stops_right(&env, "here", here)
}

/// If a machine cannot start in the middle of `--count`, those before it run on, and the line says how
/// many. The machines after it do not run. The source goes on.
#[test(kvm())]
fn a_failure_in_the_middle_keeps_the_machines_before_it() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", &format!("run --memory 16m,backing=memfd --passes 0 {WRITE}"))?;
    env.has_written("here", 3000)?;
    let before = processes(&env)?;
    // The first of a group of machines that start together, one inside it, and its last.
    for (nth, fails) in [8, 11, 15, 0].into_iter().enumerate() {
        let json = |number: u32| env.path(&format!("n{nth}_{number}.json"));
        // A result cannot go where a directory is.
        fs::create_dir(json(fails))?;
        let name = |number: u32| format!("n{nth}_{number}");
        let pattern = env.path(&format!("n{nth}_%d.json"));
        let output =
            env.vellum(&format!("fork here --count 20 --name n{nth}_%d --json {}", pattern.display()))?;
        let (said, told) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
        let pids = said.lines().filter_map(|line| line.split_once(" runs, process ")?.1.parse().ok());
        let machine = |(number, pid)| Forked { env: &env, name: name(number), pid };
        let machines: Vec<Forked> = (0..).zip(pids).map(machine).collect();
        let some = if fails > 0 { format!("; {fails} of 20 run") } else { String::new() };
        let right = output.status.code() == Some(2)
            && told.lines().count() == 1
            && told.contains(&format!("{}: ", name(fails)))
            && told.trim_end().ends_with(&some);
        ensure(right && machines.len() == fails as usize, || format!("{fails}: {said}{told}"))?;
        for number in fails..20 {
            let socket = env.socket(&name(number));
            let are_gone = || Ok((!socket.exists() && !socket.with_extension("log").exists()).then_some(()));
            eventually(LIMIT, "nothing is left of those that do not run", are_gone)?;
        }
        for machine in machines {
            let own = env.done(&machine.name)?;
            env.has_written(&machine.name, own)?;
            machine.ends_right()?;
        }
        eventually(LIMIT, "no process is left", || Ok((processes(&env)? == before).then_some(())))?;
    }
    fork_one(&env, "here", "last")?.ends_right()?;
    stops_right(&env, "here", here)
}

/// If the machine that is forked is killed meanwhile, the client says so in one line, or its machines
/// run on. Nothing else is left.
#[test(kvm())]
fn a_machine_that_is_killed_while_it_is_forked_leaves_nothing() -> Result<(), Failed> {
    let mut random = Random::new();
    for at in 0..times(8, 200) {
        let env = TestEnv::new()?;
        // The first fork of anonymous memory copies all of it, and a fork of a memfd little.
        let backing = if at % 2 == 0 { "anonymous" } else { "memfd" };
        let memory = format!("--memory 64m,slots=3,backing={backing}");
        let here = env.run("here", &format!("run --cpus 2 {memory} --passes 0 {WRITE},warm"))?;
        env.has_written("here", 16_384)?;
        let json = env.path("k%d.json");
        let line = format!("fork here --count 3 --name k%d --json {}", json.display());
        let mut client = env.migration_client(&line)?;
        eventually(LIMIT, "it is forked, or was", || {
            let forks = env.standing("here").as_deref() == Some("forking");
            Ok((forks || client.try_wait()?.is_some()).then_some(()))
        })?;
        // Any moment of the fork is as good.
        std::thread::sleep(std::time::Duration::from_micros(random.below(150_000)));
        let status = Command::new("kill").args(["-KILL", &here.child.id().to_string()]).status()?;
        ensure(status.success(), || format!("{status}"))?;
        here.child.output()?;
        let output = client.output()?;
        let (said, told) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
        println!("{backing}: {}", if output.status.success() { "forked before" } else { told.trim_end() });
        let pids = said.lines().filter_map(|line| line.split_once(" runs, process ")?.1.parse().ok());
        let machines: Vec<Forked> = (0..)
            .zip(pids)
            .map(|(number, pid)| Forked { env: &env, name: format!("k{number}"), pid })
            .collect();
        match output.status.code() {
            Some(0) => ensure(machines.len() == 3 && told.is_empty(), || format!("{said}{told}"))?,
            Some(1) => ensure(machines.is_empty() && told.lines().count() == 1, || format!("{said}{told}"))?,
            _ => return Err(format!("{said}{told}").into()),
        }
        for machine in machines {
            let own = env.done(&machine.name)?;
            env.has_written(&machine.name, own + 2000)?;
            machine.ends_right()?;
        }
        let is_gone = || {
            Ok((processes(&env)?.is_empty() && fs::read_dir(env.path("vellum"))?.count() == 0).then_some(()))
        };
        eventually(LIMIT, "nothing is left", is_gone)?;
    }
    Ok(())
}
