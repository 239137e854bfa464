//! What cannot be forked.

use std::fs::File;
use std::os::fd::AsFd;

use support::env::TestEnv;
use support::hosts::{huge_pages, kvm};
use support::{Failed, LIMIT, Need, ensure, eventually, test};
use vellum_control::Do;
use vellum_control::client::Client;
use vellum_sys::mmap::{Mapping, PAGE_SIZE, Source, freezable_memfd, freeze, memfd};

use crate::{fork, fork_into, fork_one, says, stops_right};

#[test(kvm())]
fn what_cannot_be_forked_says_why_and_goes_on() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 16m,backing=memfd --passes 0")?;
    let _shared = env.run("shared", "run --memory 16m,backing=shmem --passes 0")?;
    let _locked = env.run("locked", "run --memory 4m,backing=memfd,lock --passes 0")?;
    let gdb = env.path("gdb");
    let debugged = format!("run --memory 4m,backing=memfd --passes 0 --gdb {}", gdb.display());
    let _debugged = env.run("debugged", &debugged)?;
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
        ("fork debugged --name new", 2, "--gdb: debugger: what a debugger plants in its memory"),
        ("fork waits --name new", 2, "waits has not come yet (waiting)"),
        (
            "fork here --count 2 --name n%d --serial file=one",
            2,
            "--serial file=one: with --count it has a %d",
        ),
        ("fork here --count 2 --name n%d --json one", 2, "one: with --count it has a %d"),
        ("fork here --count 2 --name n%d --vsock one", 2, "--vsock: one: with --count it has a %d"),
        ("fork here --count 2 --name n%d --disk one", 2, "--disk: one: with --count it has a %d"),
        ("fork here --name new --net tap=one", 2, "name an address with mac=ADDRESS"),
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

/// The files that a client gives are checked before anything is written to them.
#[test(kvm())]
fn files_that_do_not_fit_are_refused() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    // The first fork of memory without a file copies all of it to the fourth file.
    let here = env.run("here", "run --memory 4m --passes 0")?;
    let mut client = env.listen("here")?;
    let of = |len| freezable_memfd(c"vellum-test", len, None);
    let frozen = of(4 << 20)?;
    freeze(&frozen)?;
    for (next, expected) in [
        (memfd(c"vellum-test", 4 << 20, None)?, "is not sealed as memory is"),
        (frozen, "is not sealed as memory is"),
        (of(2 << 20)?, "is not as long as memory"),
        (File::open("/dev/null")?, "is not as long as memory"),
    ] {
        let files = [memfd(c"pages", 0, None)?, memfd(c"map", 0, None)?, memfd(c"state", 0, None)?, next];
        let said = fork_into(&mut client, None, &files)?;
        let why = said["why"].as_str().unwrap_or_default();
        ensure(said["event"] == "not-forked" && why.contains(expected), || format!("{expected}: {said}"))?;
    }
    let files = (0..5).map(|_| of(0)).collect::<Result<Vec<_>, _>>()?;
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    for (count, overlays) in [(5, 1), (3, 0)] {
        let refused = client.ask_with(&Do::Fork { overlays, available: None }, &files[..count]);
        ensure(refused.is_err(), || format!("{count} files, of which {overlays} are for overlays"))?;
    }
    fork_one(&env, "here", "new")?.ends_right()?;
    stops_right(&env, "here", here)
}

/// Whoever could write to the base is noticed. The machine goes on, and is forked once that is over.
#[test(kvm(), root())]
fn memory_that_others_could_write_to_is_no_base() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 4m,backing=memfd --passes 0 --workload write,rate=1000")?;
    let mut found = std::fs::read_dir(format!("/proc/{}/fd", here.child.id()))?.filter_map(|entry| {
        let path = entry.ok()?.path();
        std::fs::read_link(&path).ok()?.to_string_lossy().contains("memfd:vellum-guest").then_some(path)
    });
    let path = found.next().ok_or("its memory has no descriptor")?;
    let file = File::options().read(true).write(true).open(path)?;
    let mapped = Mapping::new(4 << 20, PAGE_SIZE, Source::Shared(&file))?;
    says(&env.vellum("fork here --name new")?, 1, "another process maps its memory and could write to it")?;
    ensure(Client::borrow(&env.socket("here"), &Do::ForkBase {}).is_err(), || "a base".into())?;
    drop((mapped, file));
    fork_one(&env, "here", "new")?.ends_right()?;
    stops_right(&env, "here", here)
}

fn root() -> Need {
    if vellum_sys::host::is_root() { Ok(()) } else { Err("needs root: sudo -E cargo test".into()) }
}

/// A machine may have dropped root. Its forks drop it too, and root opens nothing that it names.
#[test(kvm(), root())]
fn forks_of_a_machine_that_has_dropped_root_drop_it() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 16m,backing=memfd --passes 0 --user 65534:65533")?;
    says(
        &env.vellum("run --from here -- true")?,
        2,
        "--from here: it runs as user 65534, and root opens nothing",
    )?;
    for (more, expected) in [("", ["65534", "65533"]), ("--user 65532:65531", ["65532", "65531"])] {
        let forked = fork(&env, "here", &format!("--name there {more}"))?.pop().ok_or("no machine")?;
        let status = std::fs::read_to_string(format!("/proc/{}/status", forked.pid))?;
        for (name, id) in ["Uid:", "Gid:"].into_iter().zip(expected) {
            let line = status.lines().find(|line| line.starts_with(name)).ok_or("no such line")?;
            ensure(line.split_whitespace().skip(1).all(|other| other == id), || line.to_owned())?;
        }
        env.ctl("there stop")?;
        forked.is_over()?;
    }
    env.ctl("here stop")?;
    here.end().map(drop)
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
