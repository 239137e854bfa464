//! Dirty logging on real KVM, checked by the oracle; and the oracle, checked by bits that are
//! removed on purpose.

use std::io::ErrorKind;
use std::process::{Command, ExitCode, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use support::hosts;
use support::hosts::kvm;
use support::{Completion, Failed, LIMIT, Need, Tests, ensure, eventually, test};
use vellum_bench::oracle::edges::{self, EdgeVerdict};
use vellum_bench::oracle::judge::Mode;
use vellum_bench::oracle::soak::{self, Config, Tally};
use vellum_bench::{Common, Region, dirty_log};
use vellum_guests::guest::GuestConfig;
use vellum_guests::{Guest, Order, WriteConfig};
use vellum_kvm::dirty::{self, Method};
use vellum_kvm::memory::{Backing, Memory, MemoryConfig, Slot};
use vellum_kvm::vm::quiesced::Quiesced;
use vellum_kvm::vm::{self, Vm};
use vellum_report::answer::Word;
use vellum_report::json;
use vellum_sys::diagnose::{Diagnose, Whose};
use vm_memory::bitmap::Bitmap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

fn main() -> ExitCode {
    let mut tests = Tests::from_args();
    let hugetlb = Backing::Hugetlb(2 << 20);
    for (name, method) in Method::NAMES {
        let need = kvm().and(has(method));
        for backing in [Backing::Anonymous, Backing::Thp, Backing::Shmem, hugetlb] {
            let need = match backing {
                Backing::Hugetlb(page) => need.clone().and(hosts::huge_pages(page, SIZE / page)),
                _ => need.clone(),
            };
            tests
                .add(format!("{name}_loses_no_page_of_{backing}"), need, move || loses_none(method, backing));
        }
        for (kind, mode) in [("running", Mode::Running), ("quiesced", Mode::Quiesced)] {
            tests.add(format!("{name}_injected_losses_are_caught_{kind}"), need.clone(), move || {
                injected(method, mode)
            });
        }
    }
    for (name, method) in Method::NAMES {
        let need = kvm().and(has(method));
        tests.add(format!("bench_finds_every_page_with_{name}"), need, move || bench(method));
    }
    tests.run()
}

const SIZE: u64 = 32 << 20;

fn two_cpus() -> Need {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    if cpus >= 2 { Ok(()) } else { Err("needs two CPUs: on a single one threads need not race".into()) }
}

fn has(method: Method) -> Need {
    let Ok((available, _)) = Method::available() else { return Ok(()) };
    if available.contains(&method) {
        Ok(())
    } else {
        Err(format!("needs a KVM with the {} tracker", method.name()))
    }
}

fn config(method: Method, backing: Backing) -> Config {
    // A new seed every time. A failure prints it.
    let seed = u64::from(std::process::id()) ^ (method as u64) << 32;
    Config {
        methods: vec![method],
        backings: vec![backing],
        size: SIZE,
        vcpus: 2,
        seed,
        events: 40_000,
        duration: None,
        mode: None,
        ring_entries: vm::ring::RING_ENTRIES,
        slot_base: None,
        clear_chunk: None,
        lose: 0,
        left_out: Vec::new(),
        sandbox: Default::default(),
    }
}

fn held(config: &Config) -> Result<Tally, Failed> {
    let mut held = soak::run(config, &mut |_| ())?;
    Ok(held.tallies.remove(0))
}

fn loses_none(method: Method, backing: Backing) -> Result<Completion, Failed> {
    let config = config(method, backing);
    let tally = held(&config)?;
    if backing.best_mapping() > 4096 && tally.only_edges() {
        // The pattern alone is no excuse: the kernel must also lose pages in the directed test.
        let found = edges::probe()?;
        ensure(found == EdgeVerdict::Lost, || {
            format!("seed {}: {found}, but {:?}", config.seed, tally.names)
        })?;
        return Ok(Completion::ignored_with(format!(
            "{found}: {}; kernel-patches/6.12/init-all-set-boundary mends it (seed {})",
            tally.names[0], config.seed
        )));
    }
    ensure(tally.is_clean(), || format!("seed {}: {:?}", config.seed, tally.names))?;
    ensure(tally.events >= config.events, || format!("only {} events", tally.events))?;
    Ok(Completion::Completed)
}

/// The directed test gives the same result twice, and finds nothing worse than known faults.
#[test(kvm(), has(Method::InitiallySet))]
fn initially_set_keeps_the_edges_of_huge_pages() -> Result<Completion, Failed> {
    let found = edges::probe()?;
    let again = edges::probe()?;
    ensure(found == again, || format!("{found}, and then: {again}"))?;
    match found {
        EdgeVerdict::Kept => Ok(Completion::Completed),
        EdgeVerdict::Lost => Ok(Completion::ignored_with(format!(
            "{found}; kernel-patches/6.12/init-all-set-boundary mends it"
        ))),
        EdgeVerdict::Untested(why) => Ok(Completion::ignored_with(why)),
        EdgeVerdict::Others(_) => Err(found.to_string().into()),
    }
}

/// On any kernel, the oracle finds in its first collections what a directed test finds.
#[test(kvm(), has(Method::InitiallySet))]
fn the_oracle_finds_lost_edges_at_once() -> Result<Completion, Failed> {
    let (slot_base, clear_chunk) = (Some(0x0100_1000), Some(64));
    let config = Config { slot_base, clear_chunk, events: 1, ..config(Method::InitiallySet, Backing::Thp) };
    let tally = held(&config)?;
    let found = edges::probe()?;
    let agree = match found {
        EdgeVerdict::Lost => tally.only_edges(),
        _ => tally.is_clean(),
    };
    ensure(agree, || format!("seed {}: {found}, but {:?}", config.seed, tally.names))?;
    match found {
        EdgeVerdict::Untested(why) => Ok(Completion::ignored_with(why)),
        _ => Ok(Completion::Completed),
    }
}

/// The command as a user enters it, with the tracker that works on every kernel.
#[test(kvm(), has(Method::ManualProtect))]
fn the_directed_test_writes_a_result_and_its_status_agrees() -> Result<(), Failed> {
    let (status, [lost, written]) = edges_as_typed(&["--tracker", "manual-protect", "-s", "anonymous"])?;
    ensure(status.success() && lost == 0.0 && written > 0.0, || format!("{status}, lost {lost} of {written}"))
}

/// A kernel that loses pages of a ring with INITIALLY_SET is not Vellum's fault. A status that
/// hides it would be.
#[test(kvm(), has(Method::Ring))]
fn the_directed_test_of_a_ring_has_a_status_that_agrees() -> Result<(), Failed> {
    edges_agree(&["--tracker", "ring"])
}

/// The same for a kernel that loses pages if a signal ends a reset. `vellum doctor` reports it from
/// the same loop.
#[test(kvm(), has(Method::Ring))]
fn the_directed_test_of_interrupted_resets_agrees_with_the_doctor() -> Result<(), Failed> {
    let (status, [lost, written]) = edges_as_typed(&["--tracker", "ring", "--interrupt"])?;
    ensure(status.code() == Some(i32::from(lost > 0.0)) && written > 0.0 && lost <= 64.0, || {
        format!("{status}, lost {lost} of {written}")
    })?;
    let doctor = Command::new(env!("CARGO_BIN_EXE_vellum")).arg("doctor").output()?;
    let said = String::from_utf8(doctor.stdout)?;
    let line = said.lines().find(|line| line.contains("dirty ring  ")).unwrap_or_default();
    ensure(line.starts_with(if lost > 0.0 { "warn" } else { "ok" }), || format!("lost {lost}: {said}"))
}

/// The same for a kernel that loses pages if the mode changes while the log is switched on.
#[test(kvm(), has(Method::InitiallySet), two_cpus())]
fn the_directed_test_of_a_race_has_a_status_that_agrees() -> Result<(), Failed> {
    edges_agree(&["--race", "-s", "anonymous"])
}

/// Both tests and one verdict. The worse one comes first, and the status agrees with it.
#[test(kvm(), has(Method::InitiallySet))]
fn both_tests_end_with_one_verdict() -> Result<(), Failed> {
    let scratch = support::Scratch::new()?;
    let file = scratch.path("both.json");
    let mut vellum = Command::new(env!("CARGO_BIN_EXE_vellum"));
    let output = vellum.args(["test", "--duration", "2s", "--seed", "7", "--json"]).arg(&file).output()?;
    let results = json::read(&file)?;
    let names: Vec<_> = results.iter().map(|result| result.name.as_str()).collect();
    ensure(names == ["test dirty-edges", "test dirty-log"], || format!("{names:?}"))?;
    ensure(results[1].asked["seed"] == 7, || format!("{:?}", results[1].asked))?;
    let lost = results[0].verdict().word == Some(Word::Fail);
    let shown = results[0]
        .answer
        .as_ref()
        .is_some_and(|answer| answer.figures.iter().any(|fact| fact.name == "shown by"));
    ensure(shown == lost, || format!("{:?}", results[0].answer))?;
    let worst = results.iter().map(|result| result.verdict().word).max().flatten();
    let worst = worst.ok_or("no verdict")?;
    let said = String::from_utf8(output.stdout)?;
    ensure(said.starts_with(&format!("{worst}  ")), || format!("{worst}: {said}"))?;
    let status = match worst {
        Word::Pass => 0,
        Word::Fail => 1,
        _ => 4,
    };
    ensure(output.status.code() == Some(status) && output.stderr.is_empty(), || {
        format!("{worst}: {}, {}", output.status, String::from_utf8_lossy(&output.stderr))
    })
}

/// A test that lost pages has failed in every form.
#[test(kvm(), has(Method::InitiallySet))]
fn the_directed_test_says_in_ktap_what_its_status_says() -> Result<(), Failed> {
    let mut vellum = Command::new(env!("CARGO_BIN_EXE_vellum"));
    let output = vellum.args("test dirty-edges --format ktap".split(' ')).output()?;
    let said = String::from_utf8(output.stdout)?;
    let last = said.lines().last().unwrap_or_default();
    ensure(last.starts_with("ok 1") == output.status.success() && last.contains("test_dirty-edges"), || {
        said.clone()
    })
}

fn edges_agree(arguments: &[&str]) -> Result<(), Failed> {
    let (status, [lost, written]) = edges_as_typed(arguments)?;
    ensure(status.code() == Some(i32::from(lost > 0.0)) && written > 0.0, || {
        format!("{status}, lost {lost} of {written}")
    })
}

/// Two mebibytes that begin one page behind a boundary need two huge pages, at any address. If the
/// host has fewer, the message says how many it lacks.
#[test(kvm())]
fn the_directed_test_asks_for_no_more_huge_pages_than_it_uses() -> Result<(), Failed> {
    let mut vellum = Command::new(env!("CARGO_BIN_EXE_vellum"));
    let output =
        vellum.args("test dirty-edges -b 2m -s hugetlb-2m --tracker manual-protect".split(' ')).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let lacks = output.status.code() == Some(4) && said.contains(" 2 needed, ");
    ensure(lacks || output.status.success(), || format!("{output:?}"))
}

/// Runs `vellum test dirty-edges`. Returns its status, the pages lost, and the pages written.
fn edges_as_typed(arguments: &[&str]) -> Result<(ExitStatus, [f64; 2]), Failed> {
    let mut vellum = Command::new(env!("CARGO_BIN_EXE_vellum"));
    let output = vellum.args(["test", "dirty-edges", "-b", "2m", "--json", "-"]).args(arguments).output()?;
    let results = json::parse(&output.stdout, "standard output".as_ref())?;
    let [result] = results.as_slice() else { return Err(format!("{} results", results.len()).into()) };
    ensure(result.host.sandbox.starts_with("on"), || format!("sandbox {}", result.host.sandbox))?;
    let lost = String::from_utf8_lossy(&output.stderr).contains("this kernel's KVM lost them");
    ensure(lost != output.status.success(), || format!("{output:?}"))?;
    let figure = |name: &str| {
        let found = result.figures.iter().find(|figure| figure.label.to_string() == name);
        found.map(|figure| figure.value()).ok_or_else(|| format!("no figure {name}"))
    };
    Ok((output.status, [figure("lost")?, figure("written")?]))
}

/// With more vCPUs than CPUs, and fewer events than a machine has pages.
#[test(kvm())]
fn few_events_end_the_test_however_many_vcpus_there_are() -> Result<(), Failed> {
    let (method, backing) = (Method::Bitmap, Backing::Anonymous);
    let tally = held(&Config { vcpus: 32, events: 10, ..config(method, backing) })?;
    // One machine and few steps. The number of events that one step checks is random.
    ensure(tally.events >= 10 && tally.legs == 1 && tally.collections[0] + tally.collections[1] <= 4, || {
        format!("{tally:?}")
    })
}

/// Starts `vellum ARGUMENTS`, and interrupts it (SIGINT) when it has more than `threads` threads.
/// Returns its output.
fn interrupted(arguments: &str, threads: usize) -> Result<Output, Failed> {
    let mut vellum = Command::new(env!("CARGO_BIN_EXE_vellum"));
    vellum.args(arguments.split(' '));
    let mut child = vellum.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let tasks = format!("/proc/{}/task", child.id());
    let started = eventually(LIMIT, "its vCPUs are there", || {
        let ended = child.try_wait()?.is_some();
        let there = !ended && std::fs::read_dir(&tasks).is_ok_and(|tasks| tasks.count() > threads);
        Ok((ended || there).then_some(there))
    });
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    let ended = eventually(LIMIT, "it ends", || Ok(child.try_wait()?));
    if ended.is_err() {
        child.kill()?;
    }
    let output = child.wait_with_output()?;
    ensure(started? && sent?.success() && ended?.code() == Some(130), || format!("{output:?}"))?;
    Ok(output)
}

/// The signal comes while a machine of the first tracker runs, before the other trackers.
#[test(kvm())]
fn a_signal_ends_the_test_and_the_result_says_so_first() -> Result<(), Failed> {
    let output = interrupted(
        "test dirty-log -c 48 -b 32m --duration 1h --tracker bitmap --tracker manual-protect --json -",
        48,
    )?;
    let results = json::parse(&output.stdout, "standard output".as_ref())?;
    let said = results[0].cut_short.as_deref().unwrap_or("nothing");
    ensure(
        said.starts_with("ended by signal 2 before anything was tested with")
            && said.contains("manual-protect"),
        || said.to_owned(),
    )?;
    ensure(results[0].status().is_bad(), || format!("{:?}", results[0].cases))?;
    let listed = results[0].asked.get("tracker").is_some_and(|tracker| tracker != "bitmap");
    ensure(
        !listed && results[0].figures.iter().all(|figure| figure.label.index.as_deref() == Some("bitmap")),
        || format!("{:?}", results[0]),
    )
}

/// timeout(1) signals its child and then the group, which includes the child. The second signal is
/// sent when the first one has arrived. If a slow host lets a second pass in between, the test ends
/// rightly, so two of the attempts may fail.
#[test(kvm())]
fn a_signal_that_comes_twice_at_once_leaves_the_result() -> Result<(), Failed> {
    let mut failed = Vec::new();
    for _ in 0..8 {
        let mut vellum = Command::new(env!("CARGO_BIN_EXE_vellum"));
        vellum.args("test dirty-log -c 16 -b 32m --duration 1h --tracker bitmap --format ktap".split(' '));
        let mut child = vellum.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let proc = format!("/proc/{}", child.id());
        // SAFETY: takes numbers. The child has not been waited for.
        let term = || unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
        let started = eventually(LIMIT, "its vCPUs are there", || {
            let count = std::fs::read_dir(format!("{proc}/task")).map_or(0, Iterator::count);
            Ok((count > 16).then_some(()))
        });
        term();
        let arrived = || {
            let status = std::fs::read_to_string(format!("{proc}/status"))?;
            Ok::<_, Failed>(status.contains("ShdPnd:\t0000000000000000"))
        };
        while !arrived()? {}
        term();
        if started.is_err() {
            child.kill()?;
        }
        let output = child.wait_with_output()?;
        started?;
        if output.status.code() != Some(143) || !output.stdout.starts_with(b"KTAP version 1\n") {
            failed.push(output);
        }
    }
    ensure(failed.len() <= 2, || format!("{} of 8: {:?}", failed.len(), failed[0]))
}

/// The other forms agree with the JSON.
#[test(kvm())]
fn a_test_that_a_signal_ended_is_not_ok_in_any_form() -> Result<(), Failed> {
    for (form, words) in [
        ("ktap", "\nnot ok 1 test_dirty-log # TIMEOUT ended by signal 2"),
        ("junit", "message=\"ended by signal 2"),
        ("kcidb --origin me", "\"comment\": \"ended by signal 2"),
    ] {
        let test = "test dirty-log -c 8 -b 32m --duration 1h --tracker bitmap --tracker manual-protect";
        let output = interrupted(&format!("{test} --format {form}"), 8)?;
        let text = String::from_utf8(output.stdout)?;
        ensure(text.contains(words), || text.clone())?;
    }
    Ok(())
}

/// The signal comes when the vCPU is there: before the first chunk, or between two of many.
#[test(kvm())]
fn a_signal_ends_the_directed_test_and_it_says_so() -> Result<(), Failed> {
    let output = interrupted("test dirty-edges --tracker manual-protect -s anonymous -b 1g --json -", 1)?;
    let said = match json::parse(&output.stdout, "standard output".as_ref()) {
        Ok(results) => results[0].cut_short.clone().unwrap_or_default(),
        Err(_) => String::from_utf8(output.stderr)?,
    };
    let right = said.contains("interrupted by signal 2") || said.starts_with("ended by signal 2: ");
    ensure(right, || said)
}

#[test(kvm())]
fn the_directed_test_refuses_what_it_cannot_clear() -> Result<(), Failed> {
    for (arguments, remedy) in [
        (&["--tracker", "bitmap"][..], "manual-protect, initially-set and ring"),
        (&["--tracker", "ring,entries=4096"], "leave entries out"),
        (&["--tracker", "manual-protect", "--revoke"], "--revoke: only --tracker initially-set"),
        (&["--tracker", "ring", "--race"], "--race: only --tracker initially-set"),
        (&["--interrupt"], "--tracker ring would work"),
        (&["--tracker", "ring", "--interrupt", "-b", "64m"], "12m would work"),
        (&["--race", "--revoke"], "'--race' cannot be used with '--revoke'"),
    ] {
        let mut vellum = Command::new(env!("CARGO_BIN_EXE_vellum"));
        let output = vellum.args(["test", "dirty-edges"]).args(arguments).output()?;
        let said = String::from_utf8(output.stderr)?;
        let right = output.status.code() == Some(2) && said.lines().count() == 1;
        ensure(right && said.contains("--") && said.contains(remedy), || {
            format!("{arguments:?}: {}: {said}", output.status)
        })?;
    }
    Ok(())
}

fn injected(method: Method, mode: Mode) -> Result<(), Failed> {
    let config = Config { lose: 8, mode: Some(mode), ..config(method, Backing::Anonymous) };
    let tally = held(&config)?;
    let [injected, caught] = tally.injected;
    // Exactly the injected pages are named.
    let right = injected >= 8 && caught == injected && tally.lost == caught && tally.unexplained == 0;
    ensure(right, || format!("seed {}: {injected} injected, {caught} caught: {:?}", config.seed, tally.names))
}

#[test(kvm(), has(Method::Ring))]
fn a_ring_that_overflows_loses_nothing() -> Result<(), Failed> {
    let config = Config { ring_entries: 1024, ..config(Method::Ring, Backing::Anonymous) };
    let tally = held(&config)?;
    ensure(tally.is_clean() && tally.events >= config.events, || format!("seed {}: {tally:?}", config.seed))
}

#[test(kvm(), has(Method::ManualProtect))]
fn a_part_of_the_chunks_is_cleared() -> Result<(), Failed> {
    let slot_base = Some(0x0100_1000);
    let config = Config { clear_chunk: Some(64), slot_base, ..config(Method::ManualProtect, Backing::Thp) };
    let tally = held(&config)?;
    ensure(tally.is_clean() && tally.events >= config.events, || format!("seed {}: {tally:?}", config.seed))
}

/// A machine of 4 MiB in three memslots, its log on, and its tracker.
fn machine(method: Method) -> Result<(Guest, Box<dyn dirty::DirtyTracker>), Failed> {
    machine_in_chunks(method, None)
}

/// The same machine. Its log is cleared this many pages at a time.
fn machine_in_chunks(
    method: Method,
    chunk: Option<u64>,
) -> Result<(Guest, Box<dyn dirty::DirtyTracker>), Failed> {
    let kvm = vm::open()?;
    let memory =
        Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig { slots: 3, ..MemoryConfig::new(4 << 20) })?;
    let mut guest = Guest::build(&kvm, memory, GuestConfig::new(1))?;
    let (vm, quiesced) = guest.quiesced()?;
    let mut tracker = dirty::tracker(method, vm, &quiesced, chunk)?;
    guest.vm.memory.slots().iter().try_for_each(|slot| tracker.track(slot.id()))?;
    tracker.enable(true)?;
    Ok((guest, tracker))
}

/// All dirty pages, counted from the start of RAM.
fn pages(tracker: &dyn dirty::DirtyTracker) -> Vec<u64> {
    let of = |log: &dirty::SlotLog| {
        let first = log.slot().offset() / 4096;
        log.runs().flatten().map(move |page| first + page).collect::<Vec<_>>()
    };
    tracker.logs().iter().flat_map(of).collect()
}

#[test(kvm())]
fn what_the_vmm_writes_is_merged() -> Result<(), Failed> {
    let (guest, mut tracker) = machine(Method::Bitmap)?;
    // The last byte of one memslot and the first of the next.
    let seam = guest.vm.memory.slots()[1].gpa();
    guest.vm.memory.guest.write_slice(&[1, 2], GuestAddress(seam - 1))?;
    tracker.collect()?;
    let page = seam / 4096;
    ensure(pages(&*tracker) == [page - 1, page], || format!("{:?}", pages(&*tracker)))?;
    tracker.collect()?;
    ensure(pages(&*tracker).is_empty(), || "told twice".into())
}

#[test(kvm(), has(Method::ManualProtect))]
fn only_what_was_read_is_cleared() -> Result<(), Failed> {
    let (guest, mut tracker) = machine(Method::ManualProtect)?;
    guest.program(&WriteConfig { passes: 1, ..WriteConfig::default() })?;
    guest.resume();
    guest.wait_all_rung()?;
    tracker.get()?;
    let all = pages(&*tracker).len();
    // Half of the words are left in KVM.
    for log in tracker.logs_mut() {
        log.words.iter_mut().step_by(2).for_each(|word| *word = 0);
    }
    let taken = pages(&*tracker);
    tracker.clear()?;
    tracker.collect()?;
    let left = pages(&*tracker);
    ensure(all == 1024 && taken.len() + left.len() == all, || {
        format!("{all}: {} and {}", taken.len(), left.len())
    })?;
    ensure(left.iter().all(|page| !taken.contains(page)), || "a page in both".into())
}

/// A page that is written before its chunk is cleared is named once. A page that is written
/// afterwards is named again. Pages of other chunks are not lost.
#[test(kvm(), has(Method::InitiallySet))]
fn a_log_is_cleared_chunk_by_chunk() -> Result<(), Failed> {
    for method in [Method::ManualProtect, Method::InitiallySet] {
        let (guest, mut tracker) = machine_in_chunks(method, Some(64))?;
        guest.program(&WriteConfig { passes: 0, lockstep: true, ..WriteConfig::default() })?;
        let write_all = || {
            guest.resume();
            guest.wait_all_rung()
        };
        write_all()?;
        tracker.collect_deferred()?;
        let named = pages(&*tracker).len();
        ensure(named == 1024, || format!("{}: {named} pages were named", method.name()))?;
        // Pages of the first two chunks, the last chunk of a memslot, which is not full, and a
        // memslot that is not tracked.
        let last = tracker.logs()[1].pages();
        ensure(tracker.clear_chunks(0, 3..7)? == (0..64), || "one chunk was to be cleared".into())?;
        ensure(tracker.clear_chunks(1, last - 1..last)?.end == last, || "the last chunk has an end".into())?;
        tracker.clear_chunks(9, 0..64)?;
        let left = pages(&*tracker).len() as u64;
        let part = last - (last - 1) / 64 * 64;
        ensure(left == 1024 - 64 - part, || format!("{left} pages are left to be cleared"))?;
        write_all()?;
        // Pages of two chunks. The first one is clear already and is not cleared again.
        ensure(tracker.clear_chunks(0, 60..70)? == (0..128), || "two chunks hold these pages".into())?;
        tracker.collect_deferred()?;
        let again = pages(&*tracker);
        let cleared_late = |page: &u64| (64..128).contains(page);
        ensure(again.len() == 1024 - 64 && !again.iter().any(cleared_late), || {
            format!("{}: {} pages were named again: {again:?}", method.name(), again.len())
        })?;
    }
    Ok(())
}

/// KVM writes whole words, as many as the slot's size requires. Shorter bitmaps are refused before
/// KVM is asked.
#[test(kvm())]
fn a_bitmap_is_as_long_as_what_kvm_writes() -> Result<(), Failed> {
    const UNTOUCHED: u64 = 0x5a5a_5a5a_5a5a_5a5a;
    let memory = Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(4 << 20))?;
    let vm = Vm::new(&vm::open()?, memory)?;
    for pages in [1, 63, 64, 65, 130, 1000] {
        let slot = Slot::new(9, 1 << 32, &vm.memory.mapping, 0..pages * 4096)?;
        vm.memslots().set(&slot, kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES)?;
        let mut words = vec![UNTOUCHED; slot.bitmap_words() + 8];
        vm.memslots().dirty_log(9, |_| &mut words)?;
        let written = words.iter().take_while(|word| **word != UNTOUCHED).count();
        let rest = words[written..].iter().all(|word| *word == UNTOUCHED);
        ensure(written == slot.bitmap_words() && rest, || format!("{pages} pages: {words:x?}"))?;
        let few = vm.memslots().dirty_log(9, |_| &mut words[..written - 1]);
        ensure(few.is_err_and(|error| error.kind() == ErrorKind::InvalidInput), || {
            format!("{pages} pages: {} words were taken", written - 1)
        })?;
        vm.memslots().delete(9)?;
    }
    let mut none = [0; 64];
    let gone = vm.memslots().dirty_log(9, |_| &mut none);
    ensure(gone.is_err(), || "the log of a slot that is deleted".into())
}

#[test(kvm())]
fn a_slot_made_anew_and_larger_is_followed() -> Result<(), Failed> {
    let (guest, mut tracker) = machine(Method::Bitmap)?;
    let (memory, slots) = (&guest.vm.memory, guest.vm.memslots());
    let small = Slot::new(9, 1 << 32, &memory.mapping, 0..64 * 4096)?;
    slots.set(&small, 0)?;
    tracker.track(9)?;
    tracker.enable(true)?;
    tracker.collect()?;
    slots.delete(9)?;
    ensure(tracker.collect().is_err(), || "a collection of a slot that is deleted".into())?;
    // So large that its bitmap would exceed the small one's buffer by far.
    slots.set(&Slot::new(9, 1 << 32, &memory.mapping, 0..4 << 20)?, kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES)?;
    tracker.collect()?;
    let log = tracker.logs().last().ok_or("no log")?;
    ensure((log.pages(), log.words.len()) == (1024, 16), || format!("{} pages", log.pages()))?;
    tracker.logs_mut().iter_mut().for_each(|log| log.words.truncate(1));
    ensure(tracker.get().is_err(), || "a bitmap of one word for 1024 pages".into())
}

#[test(kvm())]
fn a_vcpu_keeps_the_memory_that_it_runs_on() -> Result<(), Failed> {
    let memory = Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(4 << 20))?;
    let mapping = Arc::downgrade(&memory.mapping);
    let vm = Vm::new(&vm::open()?, memory)?;
    let processor = vm.create_vcpu(0)?;
    drop(vm);
    ensure(mapping.strong_count() > 0, || "memory was unmapped under a vCPU".into())?;
    drop(processor);
    ensure(mapping.strong_count() == 0, || "memory is still mapped, and nobody has it".into())
}

#[test(kvm())]
fn a_tracker_wants_a_machine_that_stands_still() -> Result<(), Failed> {
    let memory = Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(4 << 20))?;
    let mut guest = Guest::build(&vm::open()?, memory, GuestConfig::new(2))?;
    guest.program(&WriteConfig { passes: 0, ..WriteConfig::default() })?;
    guest.resume();
    ensure(guest.quiesced().is_err(), || "it runs".into())?;
    guest.pause()?;
    let (vm, quiesced) = guest.quiesced()?;
    let region = || vm.memory.guest.find_region(GuestAddress(8192)).map(|region| region.bitmap());
    let marked = || region().is_some_and(|slice| slice.dirty_at(8192));
    let write = || vm.memory.guest.write_obj(1u8, GuestAddress(8192));
    write()?;
    ensure(!marked(), || "nobody tracks, and a write is logged".into())?;
    let tracker = dirty::tracker(Method::Bitmap, vm, &quiesced, None)?;
    let second = dirty::tracker(Method::Bitmap, vm, &quiesced, None).err().map(|error| error.to_string());
    ensure(second.as_ref().is_some_and(|why| why.contains("another dirty tracker")), || {
        format!("{second:?}")
    })?;
    write()?;
    ensure(marked(), || "a write after the tracker was made is not logged".into())?;
    drop(tracker);
    // A new tracker does not see what the previous one has left.
    let mut tracker = dirty::tracker(Method::Bitmap, vm, &quiesced, None)?;
    tracker.track(0)?;
    tracker.enable(true)?;
    tracker.collect()?;
    ensure(pages(&*tracker).is_empty(), || format!("{:?}", pages(&*tracker)))
}

#[test(kvm(), has(Method::Ring))]
fn a_ring_excludes_initially_set() -> Result<(), Failed> {
    let kvm = vm::open()?;
    let machine = Vm::with_dirty_ring(
        &kvm,
        Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(4 << 20))?,
        Some(4096),
    )?;
    let quiesced = Quiesced::new(&mut [], || ())?;
    let refused =
        dirty::tracker(Method::InitiallySet, &machine, &quiesced, None).err().map(|error| error.to_string());
    ensure(refused.as_ref().is_some_and(|why| why.contains("lost silently")), || format!("{refused:?}"))?;
    let late = Vm::new(&kvm, Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(4 << 20))?)?;
    ensure(dirty::tracker(Method::Ring, &late, &quiesced, None).is_err(), || {
        "a ring for a machine without one".into()
    })
}

#[test(kvm(), has(Method::Ring))]
fn rings_of_impossible_sizes_are_refused() -> Result<(), Failed> {
    let kvm = vm::open()?;
    for entries in [0, 1, 512, 3000, 1 << 30] {
        let refused = Vm::with_dirty_ring(
            &kvm,
            Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(4 << 20))?,
            Some(entries),
        );
        let why = refused.err().map(|error| error.to_string()).unwrap_or_default();
        ensure(why.contains("would work here"), || format!("{entries}: {why}"))?;
    }
    Ok(())
}

/// 2 vCPUs, 4 MiB each, two passes.
fn bench_config(method: Method) -> dirty_log::Config {
    dirty_log::Config {
        iterations: 2,
        region: Region { bytes: 4 << 20, backing: Backing::Anonymous, vcpus: 2 },
        write_percent: 100.0,
        order: Order::Sequential,
        hot: None,
        overlap: false,
        slots: 4,
        method: Some(method),
        // Fewer entries than the memory has pages, so that the ring fills up.
        ring_entries: 1024,
        chunk: method.is_manual().then_some(128),
        eager_split: None,
        run_while_disabling: true,
        seed: 1,
        phys_offset: Some(1 << 32),
        continuous: None,
        latency: true,
        common: Common { repeat: 2, ..Common::default() },
    }
}

fn bench(method: Method) -> Result<(), Failed> {
    let report = dirty_log::run(&bench_config(method))?;
    hosts::premises(&report)?;
    let figure = |name: &str| {
        let found = report.figures.iter().find(|figure| figure.label.to_string() == name);
        found.map(|figure| figure.values().collect::<Vec<f64>>()).ok_or(format!("no {name}"))
    };
    for iteration in 0..2 {
        let pages = figure(&format!("dirty_pages[{iteration}]"))?;
        // A ring that is harvested while it fills may list a page twice. No tracker may miss one.
        let right = |&pages: &f64| if method == Method::Ring { pages >= 2048.0 } else { pages == 2048.0 };
        ensure(pages.len() == 2 && pages.iter().all(right), || format!("pass {iteration}: {pages:?}"))?;
    }
    for name in ["populate_memory", "enable_logging", "clear_dirty_log_average", "disable_logging"] {
        ensure(figure(name)?.iter().all(|&seconds| seconds > 0.0), || format!("{name} took no time"))?;
    }
    ensure(report.histograms.len() == 4, || format!("{} phases with latencies", report.histograms.len()))
}

/// Every column of the table for which this host has memory, in both schedules.
#[test(kvm(), has(Method::InitiallySet))]
fn bench_shows_lazy_protection_in_one_table() -> Result<(), Failed> {
    let base = dirty_log::Config { ring_entries: 1024, ..bench_config(Method::Bitmap) };
    let base = dirty_log::Config { method: None, phys_offset: None, slots: 1, chunk: None, ..base };
    let base = dirty_log::Config { common: Common::default(), ..base };
    let report = dirty_log::lazy::run(&base)?;
    for column in ["4k", "4k_all_set", "thp", "thp_all_set"] {
        for row in ["write, no log", "enable", "write 1", "collect 2", "logged, sum", "p99 during", "speed 2"]
        {
            let name = format!("{column}[{row}]");
            let found = report.figures.iter().find(|figure| figure.label.to_string() == name);
            ensure(found.is_some_and(|figure| figure.value() > 0.0), || format!("{name}: {found:?}"))?;
        }
    }
    vellum_report::json::check(&report).map_err(Failed::from)?;
    if vellum_sys::host::allowed_cpus()?.len() < 2 {
        return Ok(());
    }
    let continuous = Some(std::time::Duration::from_millis(100));
    let report = dirty_log::lazy::run(&dirty_log::Config { continuous, ..base })?;
    let progress =
        report.figures.iter().find(|figure| figure.label.to_string() == "thp_all_set[progress during]");
    ensure(progress.is_some_and(|figure| figure.value() > 0.0), || format!("{progress:?}"))
}

/// On a busy host a vCPU may not run at all for a while. The duration is then doubled.
#[test(kvm())]
fn bench_continuous_shows_progress_over_time() -> Result<(), Failed> {
    let mut duration = Duration::from_millis(200);
    eventually(LIMIT, "each vCPU makes progress while the log is collected", || {
        let config = dirty_log::Config {
            continuous: Some(duration),
            common: Common::default(),
            phys_offset: None,
            ..bench_config(Method::Bitmap)
        };
        duration *= 2;
        let report = match dirty_log::run(&config) {
            Err(error) if vellum_sys::host::allowed_cpus()?.len() < 2 => {
                return ensure(error.whose() == Whose::User, || error.to_string()).map(Some);
            }
            result => result?,
        };
        let collections = report.figures.iter().find(|figure| figure.label.to_string() == "collections");
        let collections = collections.ok_or("the number of collections is not told")?.value();
        let pictures = (report.marks.is_empty(), report.series.len());
        ensure(pictures == (collections == 0.0, 2), || format!("{collections} collections, {pictures:?}"))?;
        let moved = |series: &vellum_report::Series| series.points.iter().any(|point| point.1 > 0.0);
        Ok((collections > 0.0 && report.series.iter().all(moved)).then_some(()))
    })
}

#[test(kvm())]
fn bench_refuses_what_contradicts_itself() -> Result<(), Failed> {
    let base = || bench_config(Method::Bitmap);
    for (config, remedy) in [
        (dirty_log::Config { region: Region { bytes: 5000, ..base().region }, ..base() }, "; 1m would work"),
        (dirty_log::Config { slots: 3, ..base() }, "; 2 would work"),
        (dirty_log::Config { phys_offset: Some(0x1000), ..base() }, "; 0x100000000 would work"),
        (dirty_log::Config { chunk: Some(64), ..base() }, "the tracker manual-protect would work"),
        (
            dirty_log::Config {
                region: Region { bytes: 512 << 10, backing: Backing::Thp, vcpus: 2 },
                slots: 1,
                ..base()
            },
            "; 2m would work",
        ),
        (
            dirty_log::Config {
                region: Region { bytes: 8192, vcpus: 1 << 16, ..base().region },
                slots: 1,
                ..base()
            },
            "65536: this KVM",
        ),
        (
            dirty_log::Config {
                region: Region { bytes: 1 << 45, vcpus: 1, ..base().region },
                phys_offset: None,
                ..base()
            },
            "is available",
        ),
    ] {
        let error = dirty_log::run(&config).err().ok_or(format!("accepted: {config:?}"))?;
        ensure(error.whose() == Whose::User && error.to_string().contains(remedy), || error.to_string())?;
    }
    Ok(())
}
