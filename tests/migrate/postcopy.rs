//! A guest that runs on the target before all of its memory is there: on every backing, with cuts,
//! and with either side dying.

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use support::env::{Machine, TestEnv};
use support::hosts::{huge_pages, kvm, real};
use support::{Completion, Failed, LIMIT, Random, Tests, ensure, eventually, is_caught, test};

use vellum_migration::message::Message;
use vellum_migration::wire::{Decoder, Frame, HEADER};
use vellum_sys::mmap::PAGE_SIZE;

use crate::VELLUM;
use crate::relay::next_frame;
use crate::{ends_with, every_page_is_right, moved, numbered, succeeds, with};

/// Starts a guest with this memory, and waits until it has written all of it.
fn writes(env: &TestEnv, memory: &str) -> Result<Machine, Failed> {
    let workload = "--passes 0 --workload write,order=random,rate=20000,write=80,warm";
    let here = env.run("here", &format!("run --cpus 2 --memory {memory} {workload}"))?;
    env.has_written("here", 20_000)?;
    Ok(here)
}

fn stops(env: &TestEnv, name: &str, machine: Machine) -> Result<(), Failed> {
    succeeds(&env.vellum(&format!("ctl {name} stop"))?)?;
    ends_with(machine, 0)?;
    every_page_is_right(&env.path(&format!("{name}.json")))
}

fn receives(env: &TestEnv, name: &str, memory: &str) -> Result<Machine, Failed> {
    env.receive(name, &format!("--memory {memory} --json {}", env.path(&format!("{name}.json")).display()))
}

/// The number of faults that waited for a page, as the source reports it.
fn waited(output: &Output) -> Result<u64, Failed> {
    let moved = moved(output)?;
    let vcpus = moved["waited"]["vcpus_us"].as_array().map(Vec::len);
    ensure(vcpus == Some(2), || format!("not of each vCPU: {moved}"))?;
    Ok(moved["waited"]["faults"].as_u64().ok_or("no faults are told")?)
}

/// Migrates from one backing to another in each way. The guest is then migrated again at once with
/// every page compared, and saved.
fn is_right(from: &str, to: &str) -> Result<(), Failed> {
    for (mode, limits) in [
        ("--mode postcopy", ""),
        ("--mode hybrid", "--downtime 1ms"),
        ("--timeout 100ms,then=postcopy", "--downtime 1ms --bandwidth 20m"),
    ] {
        let env = TestEnv::new()?;
        let here = writes(&env, &format!("32m,slots=3,backing={from}"))?;
        let there = receives(&env, "there", to)?;
        let output = env.migrate("here", "there", &format!("{mode} {limits} --json"))?;
        succeeds(&output)?;
        ends_with(here, 15)?;
        let faults = waited(&output)?;
        ensure(mode != "--mode postcopy" || faults > 0, || "nobody has waited".into())?;
        let last = receives(&env, "last", from)?;
        succeeds(&env.migrate("there", "last", "--verify --downtime 1s --timeout 3s,then=force")?)?;
        ends_with(there, 15)?;
        let dir = env.path("snap");
        succeeds(&env.vellum(&format!("snapshot last {} --downtime 1s --timeout 3s", dir.display()))?)?;
        stops(&env, "last", last)?;
        let json = env.path("again.json");
        let again = env.restore("again", &format!("{} --json {}", dir.display(), json.display()))?;
        stops(&env, "again", again)?;
    }
    Ok(())
}

#[test(real())]
fn anonymous_memory_follows_its_guest() -> Result<(), Failed> {
    is_right("anonymous", "thp")
}

#[test(real())]
fn shared_memory_follows_its_guest() -> Result<(), Failed> {
    is_right("thp", "shmem")?;
    is_right("shmem", "memfd")
}

#[test(real(), huge_pages(2 << 20, 32))]
fn huge_pages_follow_their_guest_and_are_put_together_of_small_ones() -> Result<(), Failed> {
    is_right("anonymous", "hugetlb-2m")?;
    is_right("hugetlb-2m", "memfd")?;
    is_right("shmem", "shared-hugetlb-2m")
}

/// Tests postcopy on every KVM, also over several connections.
#[test(kvm())]
fn a_guest_runs_ahead_of_its_memory() -> Result<(), Failed> {
    for more in ["", "--connections 3"] {
        let env = TestEnv::new()?;
        let here = writes(&env, "8m")?;
        let there = receives(&env, "there", "anonymous")?;
        succeeds(&env.migrate("here", "there", &format!("--mode postcopy {more}"))?)?;
        ends_with(here, 15)?;
        stops(&env, "there", there)?;
    }
    Ok(())
}

/// Memory is fully populated or locked when the last page has arrived.
#[test(real())]
fn memory_that_is_to_be_there_in_full_is_so_in_the_end() -> Result<(), Failed> {
    for memory in ["anonymous,prealloc", "shmem,lock", "memfd,prealloc,lock"] {
        let env = TestEnv::new()?;
        let here = writes(&env, "16m")?;
        let there = receives(&env, "there", memory)?;
        succeeds(&env.migrate("here", "there", "--mode hybrid --downtime 1ms")?)?;
        ends_with(here, 15)?;
        stops(&env, "there", there)?;
    }
    Ok(())
}

/// Restoring a disk reads its rings, in the thread of the event loop and before the guest runs.
/// Pages must already arrive by then.
#[test(real())]
fn a_disk_finds_its_pages_behind_the_guest() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = numbered::here(&env)?;
    let there = env.receive("there", &numbered::devices(&env, "far"))?;
    succeeds(&env.migrate("here", "there", "--mode postcopy")?)?;
    ends_with(here, 15)?;
    numbered::has_printed(&env, "far")?;
    succeeds(&env.vellum("ctl there stop")?)?;
    ends_with(there, 0)?;
    numbered::go_on(&env)
}

/// A relay for any number of connections. It cuts all of them at once after a number of bytes to
/// the target.
pub struct Cutter {
    carried: AtomicU64,
    open: Mutex<Open>,
}

/// The connections that the next cut ends, and the bytes until then.
struct Open {
    left: u64,
    sockets: Vec<UnixStream>,
}

impl Cutter {
    fn new(env: &TestEnv) -> Result<Arc<Self>, Failed> {
        Self::between(&env.path("relay.in"), env.path("there.in"))
    }

    /// Carries connections at `from` to `to`.
    pub fn between(from: &Path, to: PathBuf) -> Result<Arc<Self>, Failed> {
        let listener = UnixListener::bind(from)?;
        let cutter = Arc::new(Self {
            carried: AtomicU64::new(0),
            open: Mutex::new(Open { left: u64::MAX, sockets: Vec::new() }),
        });
        let carrier = cutter.clone();
        std::thread::spawn(move || {
            while let Ok((source, _)) = listener.accept() {
                let Ok(target) = UnixStream::connect(&to) else { continue };
                carrier.carry(&source, &target);
            }
        });
        Ok(cutter)
    }

    fn carry(self: &Arc<Self>, source: &UnixStream, target: &UnixStream) {
        for there in [true, false] {
            let (Ok(here), Ok(far)) = (source.try_clone(), target.try_clone()) else { return };
            let (mut from, mut to) = if there { (here, far) } else { (far, here) };
            if let Ok(own) = from.try_clone() {
                self.open().sockets.push(own);
            }
            let cutter = self.clone();
            std::thread::spawn(move || {
                let mut buffer = vec![0; 16 << 10];
                while let Ok(count @ 1..) = from.read(&mut buffer) {
                    let (pass, cut) = if there { cutter.passes(count) } else { (count, Vec::new()) };
                    let sent = to.write_all(&buffer[..pass]);
                    cut.iter().for_each(|socket| drop(socket.shutdown(Shutdown::Both)));
                    if sent.is_err() || pass < count {
                        break;
                    }
                }
                let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
            });
        }
    }

    /// Counts `count` bytes to the target. Returns how many of them pass, and the connections that
    /// are cut then. Later connections are not among them, however late the cut.
    fn passes(&self, count: usize) -> (usize, Vec<UnixStream>) {
        self.carried.fetch_add(count as u64, Ordering::Relaxed);
        let mut open = self.open();
        if let Some(left) = open.left.checked_sub(count as u64) {
            open.left = left;
            return (count, Vec::new());
        }
        let pass = std::mem::replace(&mut open.left, u64::MAX) as usize;
        (pass, std::mem::take(&mut open.sockets))
    }

    /// Cuts all connections when this many more bytes have gone to the target.
    pub fn after(&self, bytes: u64) {
        self.open().left = bytes;
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().expect("nobody panics with it")
    }
}

/// Waits until both sides are paused. The target may also run: if the last of its memory had
/// arrived, the cut lost only its confirmation.
fn both_are_paused(env: &TestEnv) -> Result<(), Failed> {
    let standings = || ["here", "there"].map(|name| env.standing(name));
    let paused = eventually(LIMIT, "both sides are paused", || {
        let [here, there] = standings();
        let settled = matches!(there.as_deref(), Some("postcopy-paused" | "running"));
        Ok((here.as_deref() == Some("postcopy-paused") && settled).then_some(()))
    });
    paused.map_err(|error| format!("{error:?}: {:?}", standings()).into())
}

fn recovers(env: &TestEnv) -> Result<Output, Failed> {
    env.vellum(&format!("migrate here --recover --to unix:{}", env.path("relay.in").display()))
}

/// The link is cut anywhere, and again during the recovery. Every page is right in the end.
fn survives_cuts(memory: &str, rounds: usize) -> Result<(), Failed> {
    let mut random = Random::new();
    let (mut whole, mut severed, mut again) = (0, 0, 0);
    for round in 0..=rounds {
        let env = TestEnv::new()?;
        let here = writes(&env, "8m")?;
        let there = receives(&env, "there", memory)?;
        let cutter = Cutter::new(&env)?;
        // The first round is not cut, and shows how many bytes there are.
        let cuts = [whole, whole / 2].map(|bytes| random.below(bytes));
        if round > 0 {
            cutter.after(cuts[0]);
        }
        let output = env.migrate("here", "relay", "--mode postcopy")?;
        if round == 0 {
            succeeds(&output)?;
            whole = cutter.carried.load(Ordering::Relaxed);
        }
        let context = |output: &Output| format!("round {round}, cut at {cuts:?} of {whole}: {output:?}");
        if output.status.code() == Some(1)
            && String::from_utf8_lossy(&output.stderr).contains("stays where it is")
        {
            ends_with(there, 1)?;
            succeeds(&env.vellum("ctl here stop")?)?;
            ends_with(here, 0)?;
            continue;
        }
        if output.status.code() == Some(1) {
            ensure(String::from_utf8_lossy(&output.stderr).contains("--recover"), || context(&output))?;
            severed += 1;
            both_are_paused(&env)?;
            cutter.after(cuts[1]);
            let second = recovers(&env)?;
            if second.status.code() == Some(1) {
                again += 1;
                both_are_paused(&env)?;
                let third = recovers(&env)?;
                with(third, 0)?;
            } else {
                ensure(second.status.success(), || context(&second))?;
            }
        }
        ends_with(here, 15)?;
        stops(&env, "there", there)?;
    }
    eprintln!("severed {severed}, and again {again}, of {rounds}");
    ensure(severed > 0, || format!("none of {rounds} was cut behind its hand-over"))
}

#[test(real())]
fn a_link_that_is_cut_and_cut_again_loses_no_page() -> Result<(), Failed> {
    survives_cuts("anonymous", 6)
}

#[test(real())]
fn shared_memory_survives_cuts() -> Result<(), Failed> {
    survives_cuts("memfd", 3)
}

#[test(real(), huge_pages(2 << 20, 8))]
fn huge_pages_survive_cuts() -> Result<(), Failed> {
    survives_cuts("hugetlb-2m", 3)
}

/// A target with all of its memory closes the connection for faulting pages, and the source may see
/// that before COMPLETE, which comes on the first one. It waits for COMPLETE.
#[test(kvm())]
fn a_connection_for_faulting_pages_may_end_before_the_confirmation_arrives() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = writes(&env, "8m")?;
    let there = receives(&env, "there", "anonymous")?;
    let (listener, to) = (UnixListener::bind(env.path("relay.in"))?, env.path("there.in"));
    std::thread::spawn(move || -> std::io::Result<()> {
        let copies = |from: &UnixStream, to: &UnixStream| -> std::io::Result<_> {
            let (mut from, mut to) = (from.try_clone()?, to.try_clone()?);
            Ok(std::thread::spawn(move || drop(std::io::copy(&mut from, &mut to))))
        };
        let (mut source, mut target) = (listener.accept()?.0, UnixStream::connect(&to)?);
        let (faults, of_target) = (listener.accept()?.0, UnixStream::connect(&to)?);
        let _ = (copies(&source, &target)?, copies(&of_target, &faults)?);
        let mut asks = Some(copies(&faults, &of_target)?);
        let mut decoder = Decoder::new(None, PAGE_SIZE as u32);
        loop {
            let (header, raw) = next_frame(&mut target, &mut decoder)?;
            let frame = decoder.payload(&header, &raw[HEADER..]).map_err(std::io::Error::other)?;
            if matches!(frame, Frame::Message(Message::Complete { .. }))
                && let Some(asks) = asks.take()
            {
                faults.shutdown(Shutdown::Write)?;
                // The source closes its side when it has seen that.
                asks.join().map_err(|_| std::io::Error::other("a copy has panicked"))?;
            }
            source.write_all(&raw)?;
        }
    });
    succeeds(&env.migrate("here", "relay", "--mode postcopy")?)?;
    ends_with(here, 15)?;
    stops(&env, "there", there)
}

/// A guest that runs on the target and is cut off from the rest of its memory.
fn severed(env: &TestEnv) -> Result<(Machine, Machine), Failed> {
    let here = env.run(
        "here",
        &format!(
            "run --cpus 2 --memory 16m --passes 0 --workload write,order=random,rate=20000,warm --json {}",
            env.path("here.json").display()
        ),
    )?;
    env.has_written("here", 20_000)?;
    let there = receives(env, "there", "anonymous")?;
    let cutter = Cutter::new(env)?;
    cutter.after(8 << 20);
    with(env.migrate("here", "relay", "--mode postcopy")?, 1)?;
    both_are_paused(env)?;
    Ok((here, there))
}

/// A source that waits to be recovered sleeps.
#[test(real())]
fn a_source_that_waits_to_be_recovered_takes_no_time() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (here, there) = severed(&env)?;
    let taken = || -> Result<u64, Failed> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", here.child.id()))?;
        let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ').skip(11).take(2);
        Ok(fields.map(str::parse::<u64>).sum::<Result<u64, _>>()?)
    };
    // A source that does not sleep takes about as much CPU time as passes. Both are in hundredths
    // of a second.
    let (before, began) = (taken()?, Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    let (took, of) = (taken()? - before, began.elapsed().as_millis() as u64 / 10);
    drop((here, there));
    ensure(took < of / 4, || format!("{took} of {of} hundredths of a second"))
}

/// vCPUs that wait for pages cannot leave the guest before Linux 6.2, so Vellum does not try: a
/// pause is refused with advice, and the machine is recovered.
#[test(kvm())]
fn a_vcpu_that_waits_for_its_page_is_in_nobodys_way() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (here, there) = severed(&env)?;
    // Each vCPU reaches a missing page, and nothing is written any longer.
    let mut events = env.listen("there")?;
    let mut alike = (0, 0);
    eventually(LIMIT, "its vCPUs wait", || {
        if let Some(done) = events.line()?["done"].as_u64() {
            alike = (done, if alike.0 == done { alike.1 + 1 } else { 0 });
        }
        Ok((alike.1 > 3).then_some(()))
    })?;
    let paused = with(env.vellum("ctl there pause")?, 1)?;
    let said = String::from_utf8_lossy(&paused.stderr).into_owned();
    ensure(said.contains("is recovered there") && said.lines().count() == 1, || said.clone())?;
    // The event loop's thread would wait for memory or for a vCPU, and then answer nobody.
    for request in ["ctl there nmi".to_owned(), format!("dump there {}", env.path("core").display())] {
        let said = String::from_utf8(with(env.vellum(&request)?, 1)?.stderr)?;
        ensure(said.contains("has not arrived from the source yet"), || format!("{request}: {said}"))?;
    }
    ensure(env.standing("there").as_deref() == Some("postcopy-paused"), || "it answers no more".into())?;
    succeeds(&recovers(&env)?)?;
    ends_with(here, 15)?;
    stops(&env, "there", there)
}

/// If the target dies, the source has the guest as it was at the hand-over and runs it with
/// --force. If the source dies, the target says that it cannot go on.
#[test(real())]
fn the_death_of_either_side_is_told() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (here, there) = severed(&env)?;
    let paused = env.vellum("ctl there pause")?;
    let refused = String::from_utf8_lossy(&paused.stderr).contains("is recovered there");
    ensure(paused.status.code() == Some(1) && refused, || format!("{paused:?}"))?;
    let cancelled = env.vellum("ctl here migrate-cancel")?;
    ensure(env.standing("here").as_deref() == Some("postcopy-paused"), || format!("{cancelled:?}"))?;
    drop(there);
    succeeds(&env.vellum("ctl here resume --force")?)?;
    eventually(LIMIT, "it runs", || Ok((env.standing("here").as_deref() == Some("running")).then_some(())))?;
    stops(&env, "here", here)?;

    let env = TestEnv::new()?;
    let (here, there) = severed(&env)?;
    drop(here);
    ensure(env.standing("there").as_deref() == Some("postcopy-paused"), || "it does not wait".into())?;
    // The target may be gone before it answers.
    let _ = env.vellum("ctl there stop")?;
    let said = String::from_utf8_lossy(&ends_with(there, 1)?.stderr).into_owned();
    ensure(said.contains("without the source it cannot go on"), || said.clone())
}

/// The source of a postcopy ends when the target has all memory. A client that stops it before is
/// refused, and a signal has to wait.
#[test(real())]
fn a_source_that_is_asked_to_end_sends_all_memory_first() -> Result<(), Failed> {
    for stops_it in [true, false] {
        let env = TestEnv::new()?;
        let (here, there) = severed(&env)?;
        let mut said = String::new();
        if stops_it {
            let refused = with(env.vellum("ctl here stop")?, 1)?;
            said.push_str(&String::from_utf8_lossy(&refused.stderr));
            ensure(said.lines().count() == 1, || said.clone())?;
        } else {
            succeeds(&Command::new("kill").args(["-TERM", &here.child.id().to_string()]).output()?)?;
        }
        // The source answers, so it has heard what asked it to end.
        let standing = env.standing("here");
        ensure(standing.as_deref() == Some("postcopy-paused"), || format!("{standing:?}"))?;
        succeeds(&recovers(&env)?)?;
        said.push_str(&String::from_utf8_lossy(&ends_with(here, 15)?.stderr));
        ensure(said.contains("the target needs what is here of its memory"), || said.clone())?;
        stops(&env, "there", there)?;
    }
    Ok(())
}

/// Invalid combinations are refused, and nothing changes.
#[test(real())]
fn what_cannot_follow_is_refused() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 8m --passes 0")?;
    for (arguments, says) in [
        ("--mode sideways --to unix:x", "hybrid"),
        ("--mode postcopy --verify --to unix:x", "--verify: memory is compared before"),
        ("--recover --to unix:x", "--recover: here is running: nothing to recover"),
        ("--timeout 1s,then=perhaps --to unix:x", "postcopy"),
    ] {
        let output = with(env.vellum(&format!("migrate here {arguments}"))?, 2)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure(said.contains(says), || format!("not {says:?}: {said}"))?;
    }
    ensure(env.standing("here").as_deref() == Some("running"), || "it does not run on".into())?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0).map(drop)
}

/// A target without userfaultfd is a misfit. The message names the remedy, and no page is sent.
#[test(real())]
fn a_target_without_userfaultfd_is_told_the_remedy() -> Result<Completion, Failed> {
    let free = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    let root = Command::new("setpriv").arg("--version").output().is_ok_and(|output| output.status.success());
    let env = TestEnv::new()?;
    let nothing = env.path("nothing");
    fs::write(&nothing, "")?;
    fs::set_permissions(&nothing, fs::Permissions::from_mode(0o000))?;
    // Hides /dev/userfaultfd and takes root's capabilities.
    let hides = format!("mount --bind {} /dev/userfaultfd", nothing.display());
    let hides = if PathBuf::from("/dev/userfaultfd").exists() { hides } else { "true".into() };
    let may = Command::new("unshare").args(["-m", "sh", "-c", &hides]).output();
    if free.trim() != "0" || !root || !may.is_ok_and(|output| output.status.success()) {
        return Ok(Completion::ignored_with("needs root, setpriv(1), and vm.unprivileged_userfaultfd=0"));
    }
    let here = env.run("here", "run --memory 8m --passes 0")?;
    let gone = "-sys_ptrace,-dac_override,-dac_read_search";
    let line = format!(
        "{hides} && exec setpriv --bounding-set {gone} --inh-caps {gone} {VELLUM} receive --liveness 5m --listen unix:{} \"$@\"",
        env.path("there.in").display()
    );
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", &line, "sh"]).env("XDG_RUNTIME_DIR", env.dir()).stdin(Stdio::null());
    let there = env.start("there", &mut command)?;
    let output = with(env.migrate("here", "there", "--mode postcopy")?, 1)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let named = said.contains("postcopy: asked for here") && said.contains("vm.unprivileged_userfaultfd=1");
    ensure(named && said.lines().count() == 1, || said.clone())?;
    ends_with(there, 1)?;
    ensure(env.standing("here").as_deref() == Some("running"), || "it does not run on".into())?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0)?;
    Ok(Completion::Completed)
}

/// Whether a guest migrates by `mode` to a target on `memory` with every page right.
fn comes(mistake: Option<&'static str>, mode: &str, memory: &str) -> Result<bool, Failed> {
    let env = TestEnv::planted(mistake)?;
    let here = writes(&env, "16m")?;
    let there = receives(&env, "there", memory)?;
    // A fault may leave one side waiting.
    let liveness = if mistake.is_some() { "10s" } else { "5m" };
    let output = env.migrate("here", "there", &format!("{mode} --downtime 1ms --liveness {liveness}"))?;
    if !output.status.success() {
        drop(here);
        return Ok(false);
    }
    ends_with(here, 15)?;
    succeeds(&env.vellum("ctl there stop")?)?;
    Ok(there.end()?.status.success())
}

/// Planted faults that these tests must notice.
pub fn add(tests: &mut Tests) {
    let planted = [
        // A page that was sent and written again stays in the page cache.
        ("kept-in-cache", kvm(), "--mode hybrid", "memfd"),
        ("small-copy", kvm().and_then(|()| huge_pages(2 << 20, 8)), "--mode postcopy", "hugetlb-2m"),
    ];
    for (mistake, need, mode, memory) in planted {
        tests.add(format!("planted_{mistake}_is_caught_behind_the_guest"), need, move || {
            ensure(comes(None, mode, memory)?, || "a page is wrong without it".into())?;
            is_caught(|| comes(Some(mistake), mode, memory))
        });
    }
}
