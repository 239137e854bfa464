//! Memory of each backing, above 4 GiB, with a dirty log, and of machines that were forked before.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::Value;
use support::env::{Process, TestEnv};
use support::hosts::{huge_files, huge_pages, kvm, real};
use support::results::every_page_is_right;
use support::{Failed, LIMIT, Need, ensure, eventually, test};
use vellum_control::Do;
use vellum_control::client::Client;
use vellum_sys::mmap::{freezable_memfd, memfd};
use vellum_sys::plant;

use crate::many::{kib, mapped};
use crate::{VELLUM, WRITE, fork_into, fork_one, says, stops_right, writes_throughout};

fn planting() -> Need {
    if plant::POSSIBLE { Ok(()) } else { Err(plant::IMPOSSIBLE.into()) }
}

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
    are_right(&env, &dir, 2)
}

/// Restores each of the first points of a snapshot. All their pages must be right.
fn are_right(env: &TestEnv, dir: &Path, points: u32) -> Result<(), Failed> {
    for point in 0..points {
        let json = env.path(&format!("{point}.json"));
        let again =
            env.restore("again", &format!("{} --at {point} --json {}", dir.display(), json.display()))?;
        stops_right(env, "again", again)?;
        ensure(every_page_is_right(&json)?, || format!("point {point} is wrong"))?;
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

/// Pages that differ from the base in long runs are mapped by each new machine, and not copied. They
/// are its own from its first write on. They differ from the base in its forks, until there is a new
/// base, and are in its snapshots.
#[test(kvm())]
fn long_runs_of_pages_are_mapped_and_not_copied() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    // Slow enough that a busy host does not see a quarter of memory written.
    let write = "--workload write,order=sequential,rate=1000,warm";
    let here = env.run("here", &format!("run --memory 64m,slots=3,backing=memfd --passes 0 {write}"))?;
    env.has_written("here", 16_384)?;
    let first = fork_one(&env, "here", "first")?;
    let own = env.done("here")?;
    env.has_written("here", own + 500)?;
    env.ctl("here pause")?;
    let mapped = |pid: u32| Ok::<_, Failed>(mapped(pid, "vellum-fork-pages")? > 0);
    let (one, two) = (fork_one(&env, "here", "one")?, fork_one(&env, "here", "two")?);
    ensure(mapped(one.pid)? && mapped(two.pid)?, || "no run is mapped".into())?;
    env.ctl("one resume")?;
    let own = env.done("one")?;
    env.has_written("one", own + 500)?;
    env.ctl("one pause")?;
    let again = fork_one(&env, "one", "again")?;
    env.ctl("again resume")?;
    env.ctl("one resume")?;
    let dir = env.path("snap");
    let output = env.vellum(&format!("snapshot one {} --downtime 1s --timeout 3s", dir.display()))?;
    ensure(output.status.success(), || format!("{output:?}"))?;
    // More than a quarter of memory.
    let own = env.done("one")?;
    env.has_written("one", own + 5000)?;
    let anew = fork_one(&env, "one", "anew")?;
    let (answer, _) = Client::borrow(&env.socket("one"), &Do::ForkBase {})?;
    ensure(answer["base"] == 1 && !mapped(one.pid)?, || format!("no new base: {answer}"))?;
    env.ctl("two resume")?;
    env.ctl("here resume")?;
    for machine in [first, one, two, again, anew] {
        let own = env.done(&machine.name)?;
        env.has_written(&machine.name, own + 1000)?;
        machine.ends_right()?;
    }
    stops_right(&env, "here", here)?;
    are_right(&env, &dir, 1)
}

/// Memory that a snapshot's files still have is fetched before it is shared. While the order of the
/// faults is recorded, nothing is fetched unasked. A live update refuses such a machine.
#[test(kvm())]
fn memory_that_is_still_being_fetched_is_forked() -> Result<(), Failed> {
    for backing in ["memfd", "anonymous"] {
        let env = TestEnv::new()?;
        let write = "--workload write,order=random,rate=20000,write=80,warm";
        let line = format!("run --cpus 2 --memory 16m,slots=3,backing={backing} --passes 0 {write}");
        let first = env.run("first", &line)?;
        env.has_written("first", 20_000)?;
        let dir = env.path("snap");
        let output = env.vellum(&format!("snapshot first {} --downtime 1s --timeout 3s", dir.display()))?;
        ensure(output.status.success(), || format!("{output:?}"))?;
        stops_right(&env, "first", first)?;
        let from = format!("{} --memory demand,backing={backing} --record=1h", dir.display());
        let here = env.restore("here", &format!("{from} --json {}", env.path("here.json").display()))?;
        let mut client = Client::connect(&env.socket("here"))?;
        let files = [memfd(c"pages", 0, None)?, memfd(c"map", 0, None)?, memfd(c"state", 0, None)?];
        let refused = client.ask_with(&Do::LiveUpdate {}, &files.each_ref().map(AsFd::as_fd));
        let why = refused.err().map(|error| error.to_string()).unwrap_or_default();
        ensure(backing != "memfd" || why.contains("not here yet"), || why.clone())?;
        let there = fork_one(&env, "here", "there")?;
        for name in ["here", "there"] {
            let own = env.done(name)?;
            env.has_written(name, own + 2000)?;
        }
        there.ends_right()?;
        stops_right(&env, "here", here)?;
        ensure(every_page_is_right(&env.path("here.json"))?, || "here has a page that is wrong".into())?;
    }
    Ok(())
}

/// If the host lacks the memory for a new base, the pages that differ are copied. If it lacks that for
/// the copies too, the fork is refused.
#[test(kvm())]
fn without_memory_for_a_new_base_pages_are_copied() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", &format!("run --memory 16m,slots=3,backing=memfd --passes 0 {WRITE}"))?;
    env.has_written("here", 6000)?;
    let forked = fork_one(&env, "here", "there")?;
    let own = env.done("here")?;
    env.has_written("here", own + 20_000)?;
    let mut client = env.listen("here")?;
    let mut fork = |available| -> Result<Value, Failed> {
        let empty = || memfd(c"vellum-test", 0, None);
        let files = [empty()?, empty()?, empty()?, freezable_memfd(c"vellum-test", 16 << 20, None)?];
        fork_into(&mut client, available, &files)
    };
    let refused = fork(Some(1 << 20))?;
    let why = refused["why"].as_str().unwrap_or_default();
    let is_right = why.starts_with("the pages that differ from what it shares are copied, ");
    ensure(is_right && why.ends_with(" MiB, and 1 MiB are available"), || format!("{refused}"))?;
    // A new base takes the old one's size too.
    let copied = fork(Some(20 << 20))?;
    ensure(copied["base"] == 0, || format!("{copied}"))?;
    let made = fork(Some(1 << 30))?;
    ensure(made["base"] == 1, || format!("{made}"))?;
    forked.ends_right()?;
    stops_right(&env, "here", here)
}

/// If the host refuses to map half of memory, the fork fails, and the machine goes on with all of its
/// pages. The next fork makes up for it.
#[test(kvm(), planting())]
fn the_host_refuses_half_of_the_mappings() -> Result<(), Failed> {
    for (backing, why) in [
        ("memfd", "its memory cannot be mapped privately: "),
        ("anonymous", "a new base: "),
        ("thp", "a new base: "),
    ] {
        // The host refuses once.
        let env = TestEnv::planted(Some("second-half-refused"))?;
        let here = env.run(
            "here",
            &format!("run --cpus 2 --memory 64m,slots=3,backing={backing} --passes 0 {WRITE}"),
        )?;
        let writes = || env.has_written("here", env.done("here")? + 6000);
        writes()?;
        says(&env.vellum("fork here --name new")?, 1, why)
            .map_err(|error| format!("{backing}: {error:?}"))?;
        ensure(env.standing("new").is_none(), || "a machine is there".into())?;
        ensure(!env.socket("new").with_extension("log").exists(), || "a file is left".into())?;
        ensure(Client::borrow(&env.socket("here"), &Do::ForkBase {}).is_err(), || "a base".into())?;
        writes()?;
        let forked = [fork_one(&env, "here", "one")?, fork_one(&env, "here", "two")?];
        writes()?;
        for forked in forked {
            let own = env.done(&forked.name)?;
            env.has_written(&forked.name, own + 2000)?;
            forked.ends_right().map_err(|error| format!("{backing}: {error:?}"))?;
        }
        stops_right(&env, "here", here).map_err(|error| format!("{backing}: {error:?}"))?;
    }
    Ok(())
}

/// A fork is cancelled, or the host refuses the rest, while memory shows half of a new base. Neither a
/// snapshot nor the next fork then takes memory for pages that were never written.
#[test(kvm(), planting())]
fn half_of_a_new_base_takes_no_memory_for_untouched_pages() -> Result<(), Failed> {
    const MOST: u64 = 64 << 20;
    for fault in ["held-halfway", "second-half-refused"] {
        let env = TestEnv::planted(Some(fault))?;
        let write = "--workload write,order=random,rate=500";
        let here = env.run("here", &format!("run --memory 256m,slots=3 --passes 0 {write}"))?;
        let pid = here.child.id();
        env.has_written("here", 1000)?;
        let is_cancelled = fault == "held-halfway";
        if is_cancelled {
            let mut client = Process::spawn(&mut env.command("fork here --name new"))?;
            eventually(LIMIT, "memory shows half of a new base", || {
                Ok((mapped(pid, "memfd:vellum-guest")? >= 128 << 20).then_some(()))
            })?;
            client.kill()?;
            eventually(LIMIT, "the fork is over", || {
                Ok((env.standing("here").as_deref() == Some("running")).then_some(()))
            })?;
        } else {
            says(&env.vellum("fork here --name new")?, 1, "a new base: ")?;
        }
        ensure(env.standing("new").is_none(), || "a machine is there".into())?;
        // A fork that is cancelled there goes on until memory has one base.
        let has_base = Client::borrow(&env.socket("here"), &Do::ForkBase {}).is_ok();
        ensure(has_base == is_cancelled, || format!("{fault}: a base: {has_base}"))?;
        let dir = env.path("snap");
        let output = env.vellum(&format!("snapshot here {} --downtime 1s --timeout 3s", dir.display()))?;
        ensure(output.status.success(), || format!("{output:?}"))?;
        let resident = (kib(pid, "RssAnon")? + kib(pid, "RssShmem")?) << 10;
        ensure(resident < MOST, || format!("{fault}: {} MiB are resident", resident >> 20))?;
        let there = fork_one(&env, "here", "there")?;
        let (_, base) = Client::borrow(&env.socket("here"), &Do::ForkBase {})?;
        let base = fs::File::from(base.into_iter().next().ok_or("no base")?).metadata()?.blocks() * 512;
        ensure(base < MOST, || format!("{fault}: the base has {} MiB", base >> 20))?;
        for name in ["here", "there"] {
            env.has_written(name, env.done(name)? + 500)?;
        }
        there.ends_right()?;
        stops_right(&env, "here", here)?;
        are_right(&env, &dir, 1)?;
    }
    Ok(())
}

/// The first fork of memory without a file is refused if the host has too little for a copy.
#[test(kvm())]
fn memory_that_is_copied_must_be_available() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let write = "--workload write,order=random,rate=1000";
    let here = env.run("here", &format!("run --memory 64m,slots=3 --passes 0 {write}"))?;
    env.has_written("here", 1000)?;
    env.ctl("here pause")?;
    let mut client = env.listen("here")?;
    let empty = || memfd(c"vellum-test", 0, None);
    let mut fork = |available| -> Result<Value, Failed> {
        let files = [empty()?, empty()?, empty()?, freezable_memfd(c"vellum-test", 64 << 20, None)?];
        fork_into(&mut client, available, &files)
    };
    let refused = fork(Some(1 << 20))?;
    let why = refused["why"].as_str().unwrap_or_default();
    let is_right =
        why.starts_with("its memory is copied, ") && why.ends_with(" MiB, and 1 MiB are available");
    ensure(is_right, || format!("{refused}"))?;
    // It is not the size of memory that counts.
    let made = fork(Some(63 << 20))?;
    ensure(made["event"] == "forked" && made["base"] == 0, || format!("{made}"))?;
    env.ctl("here resume")?;
    fork_one(&env, "here", "there")?.ends_right()?;
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
        are_right(&env, &dir, 4)?;
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
    for (name, machine) in [("here", Some(here)), ("there", None)] {
        let dir = env.path(&format!("{name}.snap"));
        let output = env.vellum(&format!("snapshot {name} {} --downtime 1s --timeout 3s", dir.display()))?;
        ensure(output.status.success(), || format!("{output:?}"))?;
        let json = env.path(&format!("{name}.restored.json"));
        for how in ["eager", "map"] {
            let host = format!("{} --memory {how} --json {}", dir.display(), json.display());
            let again = env.restore("again", &host)?;
            stops_right(&env, "again", again)?;
            ensure(every_page_is_right(&json)?, || format!("{name}, restored {how}, is wrong"))?;
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
        ensure(every_page_is_right(&env.path("moved.json"))?, || format!("{name}, moved, is wrong"))?;
    }
    there.is_over()
}

/// A machine that was forked, and one that came of a fork, go on in another process with a copy of
/// their memory. Then a descriptor has all of it: they are upgraded without a copy, and forked again.
#[test(kvm())]
fn machines_that_were_forked_are_upgraded() -> Result<(), Failed> {
    for backing in ["memfd", "anonymous"] {
        let env = TestEnv::new()?;
        let line = format!("run --cpus 2 --memory 16m,slots=3,backing={backing} --passes 0 {WRITE}");
        let here = env.run("here", &line)?;
        env.has_written("here", 3000)?;
        let there = fork_one(&env, "here", "there")?;
        for name in ["here", "there"] {
            // What is no Vellum changes nothing.
            let output = env.vellum(&format!("ctl {name} upgrade /bin/false"))?;
            ensure(output.status.code() == Some(1), || format!("{name} on {backing}: {output:?}"))?;
            for _ in 0..2 {
                let own = env.done(name)?;
                env.has_written(name, own + 2000)?;
                let output = env.vellum(&format!("ctl {name} upgrade --downtime 1m {VELLUM}"))?;
                ensure(output.status.success(), || format!("{name} on {backing}: {output:?}"))?;
            }
            let own = env.done(name)?;
            env.has_written(name, own + 2000)?;
        }
        let again = fork_one(&env, "there", "again")?;
        again.ends_right()?;
        there.ends_right()?;
        stops_right(&env, "here", here)?;
    }
    Ok(())
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
