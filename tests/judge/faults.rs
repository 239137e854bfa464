//! Faults planted in Vellum and in snapshots. The image must report the kind of each, with the
//! address if there is one.

use std::fs;

use serde_json::Value;
use support::env::TestEnv;
use support::{Completion, Failed, LIMIT, ensure, eventually, test};
use vellum_judge::read::{Log, Verdict, read};
use vellum_migration::snapshot::layer;
use vellum_sys::plant::{IMPOSSIBLE, POSSIBLE};

use crate::{boots, disk, ends, has_passed, line, logged, moves, succeeds};

/// Faults that a debug build plants: the log ends with LOST, and stale pages are reported with
/// their addresses.
#[test(boots())]
fn pages_that_a_migration_loses_are_named() -> Result<Completion, Failed> {
    if !POSSIBLE {
        return Ok(Completion::ignored_with(IMPOSSIBLE));
    }
    // What is lost depends on timing: some of a vCPU's own pages, or only the array of positions,
    // or nothing, if no vCPU ran between the last pass and the end. Or the stack of an image that
    // is printing, which may then print for ever.
    eventually(LIMIT, "a page is lost and named", || {
        let env = TestEnv::planted(Some("no-last-harvest"))?;
        let mut there = moves(&env, "--downtime 1s --timeout 10s,then=force")?;
        let names = |log: &Log| {
            log.faults.iter().any(|fault| {
                let is_kind = ["lost-write", "position"].contains(&fault.kind);
                is_kind && fault.address >= 1 << 20 && fault.found < fault.expected
            })
        };
        eventually(LIMIT, "it has judged", || {
            let ended = there.child.try_wait()?.is_some();
            let log = logged(&env, &["here.log", "there.log"])?;
            let babbles = fs::metadata(env.path("there.log"))?.len() > 1 << 16;
            Ok((ended || names(&log) || babbles).then_some(()))
        })?;
        // The machine may have ended by itself meanwhile, in any way.
        env.vellum("ctl there stop")?;
        there.end()?;
        let log = logged(&env, &["here.log", "there.log"])?;
        let verdict = log.verdict();
        ensure(verdict != Verdict::Lost || !log.faults.is_empty(), || format!("{log:?}"))?;
        Ok(names(&log).then_some(()))
    })?;
    Ok(Completion::Completed)
}

/// A snapshot's files. A restore that maps them does not verify their checksums.
struct Files {
    env: TestEnv,
    before: Vec<u8>,
    /// The arguments of the machine's devices.
    devices: String,
}

const PAGE: usize = 4096;

/// The CPU time in seconds after which an image that has not judged spins, because it waits for memory
/// of another time. A judgement takes about one.
const FOR_EVER: u64 = 60;

/// The CPU time that a process has used, in seconds (proc_pid_stat(5)).
fn used(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: u64 = fields.get(11..13)?.iter().filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
    // USER_HZ, which every architecture here has.
    Some(ticks / 100)
}

impl Files {
    /// Saves the image at two points: the first in the directory `old`, and the second.
    fn new() -> Result<Self, Failed> {
        Self::of(TestEnv::new()?, "", String::new())
    }

    /// The same in `env`, for an image with more options and a machine with these devices.
    fn of(env: TestEnv, more: &str, devices: String) -> Result<Self, Failed> {
        let cmdline = format!("passes=40 rate=8000 seed=5 report=500ms {more}");
        let mut command = line(&env, 2, "16m", &cmdline, "here.log")?;
        let here = env.start("here", command.args(devices.split_whitespace()))?;
        has_passed(&env, "here.log")?;
        // While the image prints, its stack is in use. It must be able to judge with memory of
        // another time.
        let save = |dir: &str| {
            eventually(LIMIT, "it does not print", || {
                succeeds(env.vellum(&format!("snapshot here {} --paused", env.path(dir).display()))?)?;
                let prints = !fs::read(env.path("here.log"))?.ends_with(b"\n");
                if prints {
                    fs::remove_dir_all(env.path(dir))?;
                    succeeds(env.vellum("ctl here resume")?)?;
                }
                Ok((!prints).then_some(()))
            })
        };
        save("old")?;
        let pass = logged(&env, &["here.log"])?.pass;
        succeeds(env.vellum("ctl here resume")?)?;
        // Waits two passes, so that every part has changed.
        eventually(LIMIT, "two passes are over", || {
            Ok((logged(&env, &["here.log"])?.pass > pass.map(|pass| pass + 2)).then_some(()))
        })?;
        save("new")?;
        succeeds(env.vellum("ctl here stop")?)?;
        ends(here, 0)?;
        let before = fs::read(env.path("here.log"))?;
        Ok(Self { env, before, devices })
    }

    fn state(&self, dir: &str) -> Result<Value, Failed> {
        Ok(serde_json::from_slice(&fs::read(self.env.path(dir).join("state-0"))?)?)
    }

    /// Gives the second point another state.
    fn set_state(&self, state: &Value) -> Result<(), Failed> {
        let (dir, bytes) = (self.env.path("new"), serde_json::to_vec(state)?);
        let mut manifest: Value = serde_json::from_slice(&fs::read(dir.join("manifest.json"))?)?;
        manifest["points"][0]["state_bytes"] = bytes.len().into();
        manifest["points"][0]["state_crc"] = layer::sum(&bytes).into();
        fs::write(dir.join("manifest.json"), serde_json::to_vec(&manifest)?)?;
        fs::write(dir.join("state-0"), bytes)?;
        Ok(())
    }

    fn ram(&self, dir: &str) -> Result<Vec<u8>, Failed> {
        Ok(fs::read(self.env.path(dir).join("ram-0"))?)
    }

    /// Restores the second point with this RAM. Returns the image's log when it has reported all of
    /// `wanted`: a kind, and the page's address if there is one. If nothing is wanted, returns the
    /// log at the image's end.
    fn restored(&self, ram: &[u8], wanted: &[(&str, Option<usize>)]) -> Result<Log, Failed> {
        let log = self.runs_on(ram, wanted)?;
        let right = match wanted {
            [] => log.verdict() == Verdict::Whole,
            _ => log.verdict() == Verdict::Lost && wanted.iter().all(|(kind, at)| finds(&log, kind, *at)),
        };
        ensure(right, || format!("{wanted:x?}: {:?}, {:x?}", log.verdict(), log.faults))?;
        Ok(log)
    }

    /// The start of the range that was left out for this reason.
    fn logged_start(&self, why: &str) -> Result<u64, Failed> {
        let log = read(&self.before);
        let line = log.left_out.iter().find(|line| line.contains(why)).ok_or("not left out")?;
        Ok(u64::from_str_radix(line.split(' ').next().unwrap_or_default().trim_start_matches("0x"), 16)?)
    }

    fn runs_on(&self, ram: &[u8], wanted: &[(&str, Option<usize>)]) -> Result<Log, Failed> {
        self.until(ram, |log| !wanted.is_empty() && wanted.iter().all(|(kind, at)| finds(log, kind, *at)))
    }

    /// Restores the second point with this RAM. Returns the image's log when it is `right`, or at the
    /// image's end.
    fn until(&self, ram: &[u8], right: impl Fn(&Log) -> bool) -> Result<Log, Failed> {
        let dir = self.env.path("new");
        fs::write(dir.join("ram-0"), ram)?;
        let console = self.env.path("restored.log");
        let more = format!("--memory map --serial file={} {}", console.display(), self.devices);
        let line = format!("{} {more}", dir.display());
        let mut restored = self.env.restore("restored", &line)?;
        // It was saved while paused.
        succeeds(self.env.vellum("ctl restored resume")?)?;
        let log = || Ok::<Log, Failed>(read(&[self.before.clone(), fs::read(&console)?].concat()));
        let pid = restored.child.id();
        eventually(LIMIT, "it finds what is wrong", || {
            let ended = restored.child.try_wait()?.is_some();
            let log = log()?;
            // Its log then ends in the middle.
            Ok((ended || right(&log) || used(pid) > Some(FOR_EVER)).then_some(()))
        })?;
        // It may have ended by itself meanwhile. A machine that neither ends nor stops fails below.
        self.env.vellum("ctl restored stop")?;
        ends(restored, 0)?;
        let log = log()?;
        fs::remove_file(&console)?;
        Ok(log)
    }
}

/// The fields of a section of a machine's state.
fn section<'a>(state: &'a mut Value, name: &str) -> Result<&'a mut Value, Failed> {
    let sections = state["sections"].as_array_mut().ok_or("no sections")?;
    let section = sections.iter_mut().find(|section| section["name"] == name);
    section.map(|section| &mut section["fields"]).ok_or_else(|| format!("no section {name}").into())
}

/// A number of 64 bits in a field that is a list of smaller ones, with `bits` each.
fn number(field: &Value, at: usize, bits: usize) -> Result<u64, Failed> {
    let list = field.as_array().and_then(|list| list.get(at..at + 64 / bits)).ok_or("no list")?;
    let parts = list.iter().rev().map(|part| part.as_u64().unwrap_or(0));
    Ok(parts.fold(0, |sum, part| sum << bits | part))
}

fn set_number(field: &mut Value, at: usize, bits: usize, number: u64) {
    for part in 0..64 / bits {
        field[at + part] = (number >> (part * bits) & ((1 << bits) - 1)).into();
    }
}

/// Offsets in `struct kvm_regs` and in `struct kvm_sregs` (arch/x86/include/uapi/asm/kvm.h in
/// Linux), and of the word of 32 bits of XMM15 in the area of XSAVE.
const R12: usize = 96;
const R15: usize = 120;
const FS_BASE: usize = 72;
const XMM15: usize = 100;

/// Whether both processors are in the loop, where their registers have their meaning. While Rust code
/// runs, R12 has something else, and an image whose memory is of another time may crash.
fn is_in_loop(state: &mut Value) -> Result<bool, Failed> {
    for name in ["vcpu0", "vcpu1"] {
        let fields = section(state, name)?;
        if number(&fields["regs"], R12, 8)? >> 26 != number(&fields["xsave"], XMM15, 32)? >> 26 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The image with a state that can be changed, of a snapshot whose processors are in the loop.
fn files_in_loop(more: &str) -> Result<(Files, Value), Failed> {
    eventually(LIMIT, "a snapshot of the loop", || {
        let files = Files::of(TestEnv::new()?, more, String::new())?;
        let mut state = files.state("new")?;
        Ok(is_in_loop(&mut state)?.then_some((files, state)))
    })
}

/// Each part of a vCPU's state that is a pass old, or a clock that is not the one of before, has its
/// own name.
#[test(boots())]
fn parts_of_a_vcpu_s_state_are_named() -> Result<(), Failed> {
    const PASS: u64 = 1 << 28;
    let (files, state) = files_in_loop("clock=600s late=1s")?;
    let ram = files.ram("new")?;
    let ticks = state["machine"]["tsc_khz"].as_u64().ok_or("no frequency")? * 1000;
    for (kind, field, at, bits, change) in [
        ("general-registers", "regs", R12, 8, PASS.wrapping_neg()),
        ("vector-registers", "xsave", XMM15, 32, PASS.wrapping_neg()),
        ("msrs", "sregs", FS_BASE, 8, PASS.wrapping_neg()),
        ("clock-back", "regs", R15, 8, 1 << 45),
        ("clock-jump", "regs", R15, 8, (1000 * ticks).wrapping_neg()),
    ] {
        let mut state = state.clone();
        let field = &mut section(&mut state, "vcpu0")?[field];
        let before = number(field, at, bits)?;
        set_number(field, at, bits, before.wrapping_add(change));
        files.set_state(&state)?;
        let log = files.restored(&ram, &[(kind, None)])?;
        let fault = log.faults.iter().find(|fault| fault.kind == kind);
        ensure(fault.is_some_and(|fault| fault.vcpu == 0 && fault.expected != fault.found), || {
            format!("{fault:?}")
        })?;
    }
    // Kvmclock is 1000 s further than when it was saved.
    let mut changed = state.clone();
    let clock = &mut section(&mut changed, "clock")?["nanoseconds"];
    let before = clock.as_u64().ok_or("no clock")?;
    *clock = (before + 1_000_000_000_000).into();
    files.set_state(&changed)?;
    files.restored(&ram, &[("kvmclock-jump", None)])?;
    // A byte of the image: the head of a bzImage, which nothing runs; and its settings.
    files.set_state(&state)?;
    let settings = files.logged_start("the image's stacks")? as usize - 2 * PAGE;
    for at in [0x10_0600, settings] {
        let mut ram = ram.clone();
        ram[at] ^= 1;
        files.restored(&ram, &[("image", None)])?;
    }
    Ok(())
}

/// The parts of the machine that the argument in `vellum_judge` is about: each vCPU's registers and
/// pages, and what all write. Every proper subset of them is rolled back by some passes. Stacks go
/// with the registers that use them, and the image's own page of positions with the shared memory.
#[test(boots())]
fn every_proper_subset_of_the_parts_that_is_older_is_lost() -> Result<(), Failed> {
    let files = eventually(LIMIT, "two snapshots of the loop", || {
        let (files, _) = files_in_loop("late=1s")?;
        Ok(is_in_loop(&mut files.state("old")?)?.then_some(files))
    })?;
    let (old, new) = (files.ram("old")?, files.ram("new")?);
    let (mut old_state, new_state) = (files.state("old")?, files.state("new")?);
    let parts = read(&files.before).parts();
    let stacks = files.logged_start("the image's stacks")?;
    for subset in 1..(1 << 5) - 1 {
        let is_old = |part: usize| subset >> part & 1 == 1;
        let mut state = new_state.clone();
        let mut ram = new.clone();
        let mut take = |start: u64, end: u64| {
            let range = start as usize..end as usize;
            ram[range.clone()].copy_from_slice(&old[range]);
        };
        for vcpu in 0..2 {
            if is_old(vcpu) {
                let name = format!("vcpu{vcpu}");
                *section(&mut state, &name)? = section(&mut old_state, &name)?.clone();
                let stack = stacks + STACK * vcpu as u64;
                take(stack, stack + STACK);
            }
        }
        for (range, owner) in &parts {
            if is_old(owner.map_or(4, |vcpu| 2 + vcpu)) {
                take(range.start, range.end);
            }
        }
        if is_old(4) {
            take(stacks - PAGE as u64, stacks);
        }
        files.set_state(&state)?;
        // The progress on the console goes back before the image has found a fault.
        let log = files.until(&ram, |log| !log.faults.is_empty())?;
        let what = format!("subset {subset:#07b} of registers 0 and 1, pages 0 and 1, shared memory");
        ensure(log.verdict() == Verdict::Lost && !log.faults.is_empty(), || format!("{what}: {log:?}"))?;
    }
    Ok(())
}

/// Bytes of a processor's stack (`boot.s`).
const STACK: u64 = 32 << 10;

/// Whether the log has a fault of this kind in the page at this address.
fn finds(log: &Log, kind: &str, at: Option<usize>) -> bool {
    let is_at = |address: u64| at.is_none_or(|at| address as usize & !(PAGE - 1) == at);
    log.faults.iter().any(|fault| fault.kind == kind && is_at(fault.address))
}

/// A page, or part of it, is changed. The first fault has the expected kind, and each page is
/// reported.
#[test(boots())]
fn what_is_wrong_with_a_page_is_named() -> Result<(), Failed> {
    let files = Files::new()?;
    let (new, old) = (files.ram("new")?, files.ram("old")?);
    files.restored(&new, &[])?;
    // Pages that vCPU 0 writes, in the middle of its range.
    let (a, b) = (4 << 20, (4 << 20) + 5 * PAGE);
    let page = |ram: &[u8], at: usize| ram[at..at + PAGE].to_vec();
    ensure(page(&new, a) != page(&old, a), || "the page has not changed".into())?;
    let half = |ram: &[u8]| ram[a..a + PAGE / 2].to_vec();
    let shifted = vec![(a + PAGE, new[a..b].to_vec())];
    let changes = [
        ("lost-write", vec![(a, page(&old, a))], vec![a]),
        ("other-address", vec![(a, page(&new, b)), (b, page(&new, a))], vec![a, b]),
        ("other-address", shifted, (1..=5).map(|page| a + page * PAGE).collect()),
        ("torn", vec![(a, half(&old))], vec![a]),
        ("zeroes", vec![(a, vec![0; PAGE])], vec![a]),
        ("foreign", vec![(a, vec![0x5a; PAGE])], vec![a]),
    ];
    for (kind, writes, named) in changes {
        let mut ram = new.clone();
        for (at, bytes) in writes {
            ram[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        let wanted: Vec<_> = named.iter().map(|at| (kind, Some(*at))).collect();
        let log = files.restored(&ram, &wanted)?;
        ensure(log.faults.iter().all(|fault| fault.kind == kind), || format!("{kind}: {:x?}", log.faults))?;
    }
    Ok(())
}

/// All of memory is older than the registers, and the reverse.
#[test(boots())]
fn registers_and_memory_of_two_times_are_named() -> Result<(), Failed> {
    for (is_older, kind) in [(true, "lost-write"), (false, "future")] {
        // If a stack that is in use is of the other time, the image may crash before it can judge.
        eventually(LIMIT, kind, || {
            let files = Files::new()?;
            let ram = files.ram(if is_older { "old" } else { "new" })?;
            if !is_older {
                // The first point's state with the second's memory.
                fs::remove_dir_all(files.env.path("new"))?;
                fs::rename(files.env.path("old"), files.env.path("new"))?;
            }
            let log = files.runs_on(&ram, &[(kind, None), ("position", None)])?;
            let named =
                log.verdict() == Verdict::Lost && finds(&log, kind, None) && finds(&log, "position", None);
            let crashed = matches!(log.verdict(), Verdict::Crashed(_));
            ensure(named || crashed, || format!("{kind}: {:?}, {:x?}", log.verdict(), log.faults))?;
            Ok(named.then_some(()))
        })?;
    }
    Ok(())
}

/// State that is older or newer than memory, and a lost clock value, interrupt or device write.
#[test(boots())]
fn state_that_a_snapshot_loses_is_named() -> Result<Completion, Failed> {
    if !POSSIBLE {
        return Ok(Completion::ignored_with(IMPOSSIBLE));
    }
    for (planted, kinds) in [
        ("old-vcpu", &["future", "position"][..]),
        ("devices-ahead", &["disk-lost"]),
        ("clock-set-back", &["kvmclock-back"]),
        ("timer-lost", &["timer"]),
    ] {
        let wanted: Vec<_> = kinds.iter().map(|kind| (*kind, None)).collect();
        // If a stack that is in use is newer than the registers, the image crashes before it can
        // judge.
        let log = eventually(LIMIT, planted, || {
            let env = TestEnv::planted(Some(planted))?;
            let disk = disk(&env)?;
            let files = Files::of(env, "late=1s", disk)?;
            let log = files.runs_on(&files.ram("new")?, &wanted)?;
            let named = kinds.iter().all(|kind| finds(&log, kind, None));
            let crashed = planted == "old-vcpu" && matches!(log.verdict(), Verdict::Crashed(_));
            // If the machine stands still for a second before it runs on, a clock that was set back
            // has caught up.
            let late = planted == "clock-set-back" && log.verdict() == Verdict::Whole;
            ensure(named || crashed || late, || format!("{planted}: {log:?}"))?;
            Ok(named.then_some(log))
        })?;
        let found = |kind| log.faults.iter().filter(move |fault| fault.kind == kind);
        let right = match planted {
            // The vCPU with old registers takes its own pages for newer ones.
            "old-vcpu" => found("future").all(|fault| fault.vcpu == 1 && fault.found > fault.expected),
            "clock-set-back" => found("kvmclock-back").all(|fault| fault.found < fault.expected),
            _ => kinds.iter().all(|kind| found(kind).all(|fault| fault.address >= 1 << 20)),
        };
        ensure(right, || format!("{planted}: {log:?}"))?;
    }
    Ok(Completion::Completed)
}

#[test(boots())]
fn what_a_device_writes_and_a_migration_loses_is_named() -> Result<Completion, Failed> {
    if !POSSIBLE {
        return Ok(Completion::ignored_with(IMPOSSIBLE));
    }
    // Whether a request ends between the last look at its buffer and the end depends on timing. A
    // ring whose end was lost says that the disk did not answer.
    eventually(LIMIT, "a device's write is lost and named", || {
        let env = TestEnv::planted(Some("vmm-writes-left-out"))?;
        ends(moves(&env, "--downtime 1s --timeout 10s,then=force")?, 0)?;
        let log = logged(&env, &["here.log", "there.log"])?;
        let named = log.faults.iter().any(|fault| {
            ["disk-data", "disk-ring", "disk-lost"].contains(&fault.kind) && fault.address >= 1 << 20
        });
        ensure(named == (log.verdict() == Verdict::Lost), || format!("{log:?}"))?;
        Ok(named.then_some(()))
    })?;
    Ok(Completion::Completed)
}
