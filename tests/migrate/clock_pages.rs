//! Pages of a guest that KVM itself writes: its clocks, and its steal time. KVM writes them after
//! the hand-over and on the side that has the guest, and not earlier or elsewhere. What KVM has
//! written migrates.
//!
//! The guests have a few bytes. They tell KVM the address of a page of each kind, and then count on
//! their serial port or spin.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use support::env::{Machine, TestEnv};
use support::guests::Code;
use support::hosts::{kvm, real};
use support::{Failed, LIMIT, Need, Tests, ensure, eventually, is_caught, test};

use crate::commit_flag::cut_at_commit;
use crate::relay::{held_back, until_fit};
use crate::{ends_with, succeeds, with};

/// KVM's MSRs (Documentation/virt/kvm/x86/msr.rst), and the addresses of the guests' pages.
const MSR_WALL_CLOCK: u32 = 0x4b56_4d00;
const MSR_SYSTEM_TIME: u32 = 0x4b56_4d01;
const MSR_STEAL_TIME: u32 = 0x4b56_4d03;
const WALL: u32 = 0x18_0000;
const TIME: u32 = 0x18_1000;
const STOLEN: u32 = 0x18_2000;
/// The file of the first memslot, which begins at address 0.
const RAM: &str = "ram-0";
/// The version of the wall clock before KVM has written it. It is even, and KVM would not reach it
/// from zero.
const BEFORE: u32 = 1000;
/// The address of the flags in `struct pvclock_vcpu_time_info`, and PVCLOCK_GUEST_STOPPED.
const FLAGS: u64 = TIME as u64 + 29;
const STOPPED: u8 = 1 << 1;

/// Writes an MSR.
fn wrmsr(code: Code, index: u32, value: u32) -> Code {
    // mov ecx, index; mov eax, value; xor edx, edx; wrmsr
    let code = code.bytes(&[0xb9]).bytes(&index.to_le_bytes()).bytes(&[0xb8]).bytes(&value.to_le_bytes());
    code.bytes(&[0x31, 0xd2, 0x0f, 0x30])
}

/// Starts a guest called `name` that uses KVM's clocks and counts, on memory of this backing.
/// Returns also the file of its output.
fn counts(env: &TestEnv, name: &str, backing: &str) -> Result<(Machine, PathBuf), Failed> {
    let (kernel, out) = (env.path("kernel"), env.path(&format!("{name}.out")));
    // mov dword [WALL], BEFORE
    let code =
        Code::default().bytes(&[0xc7, 0x04, 0x25]).bytes(&WALL.to_le_bytes()).bytes(&BEFORE.to_le_bytes());
    let code = wrmsr(wrmsr(code, MSR_WALL_CLOCK, WALL), MSR_SYSTEM_TIME, TIME | 1);
    // mov dx, 0x3f8; next: out dx, al; mov ecx, 256; wait: dec ecx; jnz wait; jmp next
    let code =
        code.bytes(&[0x66, 0xba, 0xf8, 0x03, 0xee, 0xb9, 0, 1, 0, 0, 0xff, 0xc9, 0x75, 0xfc, 0xeb, 0xf4]);
    fs::write(&kernel, code.elf64())?;
    let (kernel, serial) = (kernel.display(), out.display());
    let line = format!("run --kernel {kernel} --memory 32m,backing={backing} --serial file={serial}");
    let machine = env.run(name, &line)?;
    grows(&out)?;
    Ok((machine, out))
}

/// Checks that a guest runs that writes to `out`.
fn grows(out: &PathBuf) -> Result<(), Failed> {
    let len = || fs::metadata(out).map_or(0, |data| data.len());
    let was = len();
    eventually(LIMIT, "it counts", || Ok((len() > was + 16).then_some(())))
}

/// Pauses the machine `name`, so that its guest does not run again, and ends it in a snapshot.
/// Returns how often KVM has written the wall clock, and whether the guest was told that it was
/// stopped.
fn ended(env: &TestEnv, name: &str, machine: Machine) -> Result<(u32, bool), Failed> {
    let dir = env.path(&format!("{name}.snap"));
    succeeds(&env.vellum(&format!("ctl {name} pause"))?)?;
    succeeds(&env.vellum(&format!("snapshot {name} {} --stop --downtime 1m", dir.display()))?)?;
    ends_with(machine, 0)?;
    let (mut version, mut flags) = ([0; 4], [0]);
    let file = File::open(dir.join(RAM))?;
    file.read_exact_at(&mut version, WALL.into())?;
    file.read_exact_at(&mut flags, FLAGS)?;
    // KVM adds one before it writes, and one afterwards.
    let version = u32::from_le_bytes(version);
    let written =
        version.checked_sub(BEFORE).ok_or_else(|| format!("its page was not brought: {version}"))? / 2;
    Ok((written, flags[0] & STOPPED != 0))
}

/// When the target sets the wall clock's MSR, KVM writes to its page, which is still missing. The
/// page is fetched and then written. KVM has two MSRs of that clock, an old and a new one, and
/// writes for each.
#[test(kvm())]
fn a_clock_s_page_that_is_still_to_come_is_brought_and_written() -> Result<(), Failed> {
    for mode in ["postcopy", "hybrid"] {
        let env = TestEnv::new()?;
        let (here, _) = counts(&env, "here", "anonymous")?;
        let far = env.path("far");
        let there = env.receive("there", &format!("--serial file={}", far.display()))?;
        succeeds(&env.migrate("here", "there", &format!("--mode {mode}"))?)?;
        ends_with(here, 15)?;
        grows(&far)?;
        let (written, told) = ended(&env, "there", there)?;
        ensure(written > 1 && told, || format!("{mode}: written {written} times, told: {told}"))?;
    }
    Ok(())
}

/// The target has the guest's memory and dies at COMMIT, so that the guest stays on the source.
/// Returns whether its wall clock was written only once.
fn stays(mistake: Option<&'static str>) -> Result<bool, Failed> {
    let env = TestEnv::planted(mistake)?;
    let (here, out) = counts(&env, "here", "memfd")?;
    let there = env.receive("there", "--serial null")?;
    cut_at_commit(&env, false, Some(there.child.id()))?;
    with(env.migrate("here", "relay", "--liveness 1h --link memfd --downtime 1m")?, 1)?;
    drop(there);
    grows(&out)?;
    Ok(ended(&env, "here", here)?.0 == 1)
}

/// Both processes have the same memory. KVM writes to it only for the process that has the guest.
#[test(kvm())]
fn kvm_writes_to_memory_that_is_handed_over_when_it_has_been() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (here, _) = counts(&env, "here", "memfd")?;
    let far = env.path("far");
    let there = env.receive("there", &format!("--serial file={}", far.display()))?;
    succeeds(&env.migrate("here", "there", "--link memfd --downtime 1m")?)?;
    ends_with(here, 15)?;
    grows(&far)?;
    let (written, told) = ended(&env, "there", there)?;
    ensure(written > 1 && told, || format!("written {written} times, told: {told}"))?;
    ensure(stays(None)?, || "the target has written to memory of a guest that stayed".into())
}

/// Whether guests are told that they were stopped: one that was restored, and one whose migration
/// was cancelled while it was stopped. A guest that was never paused must not be told.
fn is_told(mistake: Option<&'static str>) -> Result<bool, Failed> {
    let env = TestEnv::planted(mistake)?;
    let (first, _) = counts(&env, "first", "anonymous")?;
    let (_, told) = ended(&env, "first", first)?;
    ensure(!told, || "it was told before it was paused".into())?;
    let out = env.path("out");
    let from = env.path("first.snap");
    let line = format!("{} --serial file={}", from.display(), out.display());
    // It is restored paused, as it was saved.
    let restored = env.restore("restored", &line)?;
    succeeds(&env.vellum("ctl restored resume")?)?;
    grows(&out)?;
    let mut all = vec![ended(&env, "restored", restored)?.1];

    let (here, out) = counts(&env, "here", "anonymous")?;
    let there = env.receive("there", "--serial null")?;
    let (client, release) = held_back(&env, until_fit(), "--downtime 1h")?;
    eventually(LIMIT, "it stands still", || {
        Ok((env.standing("there").as_deref() == Some("uncommitted")).then_some(()))
    })?;
    succeeds(&env.vellum("ctl here migrate-cancel")?)?;
    with(client.output()?, 1)?;
    ends_with(there, 1)?;
    drop(release);
    grows(&out)?;
    all.push(ended(&env, "here", here)?.1);
    let same = all.iter().all(|told| *told == all[0]);
    ensure(same, || format!("restored and cancelled: {all:?}"))?;
    Ok(all[0])
}

#[test(real())]
fn a_guest_that_goes_on_is_told_that_it_stood_still() -> Result<(), Failed> {
    ensure(is_told(None)?, || "nobody told it".into())
}

/// Requires a KVM that tells guests how long their vCPUs could not run.
fn steal_time() -> Need {
    const KVM_CPUID_FEATURES: u32 = 0x4000_0001;
    const STEAL_TIME: u32 = 1 << 5;
    kvm()?;
    let kvm = vellum_kvm::vm::open().map_err(|error| error.to_string())?;
    let all = kvm.get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES).map_err(|e| e.to_string())?;
    let offers = |entry: &kvm_bindings::kvm_cpuid_entry2| {
        entry.function == KVM_CPUID_FEATURES && entry.eax & STEAL_TIME != 0
    };
    match all.as_slice().iter().any(offers) {
        true => Ok(()),
        false => Err("needs a KVM that tells stolen time: a kernel with CONFIG_SCHED_INFO".into()),
    }
}

/// Migrates a guest that writes nothing several times. KVM writes to it when its vCPUs are loaded
/// and put. Returns whether the pages were always equal.
fn stolen_moves(mistake: Option<&'static str>) -> Result<bool, Failed> {
    let env = TestEnv::planted(mistake)?;
    let kernel = env.path("kernel");
    let code = wrmsr(Code::default(), MSR_STEAL_TIME, STOLEN | 1);
    fs::write(&kernel, code.print("A").spin().elf64())?;
    let out = env.path("out");
    let line = format!("run --kernel {} --memory 32m --serial file={}", kernel.display(), out.display());
    let mut here = env.run("m0", &line)?;
    eventually(LIMIT, "it has begun", || Ok((fs::metadata(&out)?.len() > 0).then_some(())))?;
    for at in 0..5 {
        let (from, to) = (format!("m{at}"), format!("m{}", at + 1));
        let there = env.receive(&to, "--serial null")?;
        let moved = env.migrate(&from, &to, "--verify --downtime 1m")?;
        if !moved.status.success() {
            let said = String::from_utf8_lossy(&moved.stderr).into_owned();
            ensure(said.contains("the target's memory differs in"), || said.clone())?;
            return Ok(false);
        }
        ends_with(here, 15)?;
        here = there;
    }
    let dir = env.path("snap");
    succeeds(&env.vellum(&format!("snapshot m5 {} --stop --downtime 1m", dir.display()))?)?;
    ends_with(here, 0)?;
    let mut page = [0; 64];
    File::open(dir.join(RAM))?.read_exact_at(&mut page, STOLEN.into())?;
    ensure(page != [0; 64], || "KVM has written nothing there".into())?;
    Ok(true)
}

#[test(steal_time())]
fn what_kvm_writes_when_a_vcpu_is_put_moves_too() -> Result<(), Failed> {
    ensure(stolen_moves(None)?, || "the target's memory differs".into())
}

/// Planted faults that these tests must notice.
pub fn add(tests: &mut Tests) {
    type Right = fn(Option<&'static str>) -> Result<bool, Failed>;
    let planted: [(&str, Need, Right); 3] = [
        ("writing-msrs-early", kvm(), stays),
        ("kvmclock-ctrl-left-out", real(), is_told),
        ("harvest-before-save", steal_time(), stolen_moves),
    ];
    for (mistake, need, is_right) in planted {
        tests.add(format!("planted_{mistake}_is_caught_by_pages_of_kvm_s"), need, move || {
            is_caught(|| is_right(Some(mistake)))
        });
    }
}
