//! The benchmarks and their parts, on real KVM.

use std::path::Path;
use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use support::hosts;
use support::hosts::{kvm, real, slow_if_emulated};
use support::{Completion, Failed, LIMIT, Need, Tests, ensure, eventually, test};
use vellum_bench::{Common, Region, access_tracking, demand_paging, memslot, page_table};
use vellum_guests as guests;
use vellum_guests::guest::GuestConfig;
use vellum_guests::program::Privilege;
use vellum_guests::program::tables_code;
use vellum_guests::tables::{self, Command as Do, perform};
use vellum_guests::touch::{self, Plan};
use vellum_guests::{Guest, WriteConfig};
use vellum_kvm::arch;
use vellum_kvm::memory::{Backing, Memory, MemoryConfig};
use vellum_kvm::vm::counters::Counters;
use vellum_report::{self as report, Figure, Label, Premise, Report, Series, json};
use vellum_sys::mmap::{Mapping, PAGE_SIZE, Source, memfd};
use vellum_sys::page_idle::PageIdle;
use vellum_sys::seccomp;
use vellum_sys::uffd::{BATCH, Mode, Uffd};
use vmm_sys_util::eventfd::EventFd;

fn main() -> ExitCode {
    vellum_sys::heap::keep_to_one();
    Tests::from_args().run()
}

#[test(uffd(Mode::Missing))]
fn missing_pages_are_filled() -> Result<(), Failed> {
    served(Mode::Missing)
}

#[test(uffd(Mode::Minor))]
fn minor_faults_are_mapped() -> Result<(), Failed> {
    served(Mode::Minor)
}

#[test(kvm(), uffd(Mode::Missing))]
fn demand_paging_missing() -> Result<(), Failed> {
    demand_paging(Mode::Missing, Backing::Anonymous)
}

#[test(kvm(), uffd(Mode::Minor))]
fn demand_paging_minor() -> Result<(), Failed> {
    demand_paging(Mode::Minor, Backing::Memfd)
}

fn uffd(mode: Mode) -> Need {
    Uffd::new(mode).map(drop).map_err(|e| format!("needs userfaultfd ({e}): see `vellum doctor`"))
}

fn shadow_paging() -> Need {
    let paging = vellum_host::Facts::collect(String::new()).paging;
    let shadows = paging == vellum_host::Paging::Shadow;
    if shadows {
        Ok(())
    } else {
        Err(format!("needs KVM to shadow page tables; it has {paging:?}: kvm_amd.npt=0"))
    }
}

/// Acts like a kernel before Linux 5.14: a seccomp filter refuses MADV_POPULATE_WRITE to this
/// thread. Emulated hosts run an optimised build of this test, and only an optimiser could remove
/// writes that change nothing.
#[test]
fn memory_is_populated_where_the_kernel_has_no_advice_for_it() -> Result<(), Failed> {
    let when = |code, k, otherwise| libc::sock_filter { code, jt: 0, jf: otherwise, k };
    let load = |offset| when((libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, offset, 0);
    let equal =
        |value, otherwise| when((libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, value, otherwise);
    let end = |action| when((libc::BPF_RET | libc::BPF_K) as u16, action, 0);
    // Offsets in struct seccomp_data (include/uapi/linux/seccomp.h): the number, and the lower half
    // of the third argument.
    let program = [
        load(0),
        equal(libc::SYS_madvise as u32, 3),
        load(16 + 2 * 8),
        equal(libc::MADV_POPULATE_WRITE as u32, 1),
        end(libc::SECCOMP_RET_ERRNO | libc::EINVAL as u32),
        end(libc::SECCOMP_RET_ALLOW),
    ];
    let len = 8 << 20;
    let map = Mapping::new(len, len, Source::Anonymous)?;
    map.words()[512].store(7, Ordering::Relaxed);
    // No other mapping has this advice, so the kernel does not merge this one with a neighbour.
    map.advise(libc::MADV_DONTDUMP)?;
    let done = std::thread::scope(|scope| {
        let filtered = || {
            seccomp::no_new_privileges()?;
            seccomp::install(&program)?;
            let advice = map.advise(libc::MADV_POPULATE_WRITE).map_err(|e| e.raw_os_error());
            map.populate(0, len)?;
            Ok::<_, std::io::Error>(advice)
        };
        scope.spawn(filtered).join().expect("no panic")
    })?;
    ensure(done == Err(Some(libc::EINVAL)), || format!("the filter lets the advice through: {done:?}"))?;
    ensure(map.words()[512].load(Ordering::Relaxed) == 7, || "what was there has changed".into())?;
    let maps = std::fs::read_to_string("/proc/self/smaps")?;
    let start = format!("{:x}-", map.as_ptr() as u64);
    let mut of_map = maps.lines().skip_while(|line| !line.starts_with(&start));
    let anonymous = of_map.find(|line| line.starts_with("Anonymous:")).ok_or("no such mapping")?;
    ensure(anonymous.contains(&format!(" {} kB", len >> 10)), || format!("of {} KiB: {anonymous}", len >> 10))
}

/// Reads a word of every page while another thread serves the faults, three pages at a time.
fn served(mode: Mode) -> Result<(), Failed> {
    let pages = 40u64;
    let uffd = Uffd::new(mode)?;
    let file = memfd(c"vellum-test", pages * PAGE_SIZE, None)?;
    let mapping = Mapping::new(pages * PAGE_SIZE, PAGE_SIZE, Source::Shared(&file))?;
    let alias = Mapping::new(pages * PAGE_SIZE, PAGE_SIZE, Source::Shared(&file))?;
    let expected = 0x0707_0707_0707_0707;
    if mode == Mode::Minor {
        alias.words().iter().for_each(|word| word.store(expected, Ordering::Relaxed));
    }
    uffd.register(&mapping, 0, mapping.len(), mode)?;
    let quit = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
    let source = [7u8; 3 * PAGE_SIZE as usize];
    let answer = || -> std::io::Result<()> {
        let mut addresses = [0; BATCH];
        while uffd.wait(&quit)? {
            let count = uffd.take(&mut addresses)?;
            for address in &addresses[..count] {
                let offset = (address - mapping.as_ptr() as u64) / PAGE_SIZE * PAGE_SIZE;
                let len = (3 * PAGE_SIZE).min(mapping.len() - offset);
                match mode {
                    Mode::Missing => uffd.copy(&mapping, offset, &source[..len as usize], PAGE_SIZE)?,
                    Mode::Minor => uffd.map(&mapping, offset, len, PAGE_SIZE)?,
                }
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let answering = scope.spawn(answer);
        // Backwards, so that batches reach pages that are there already.
        for page in (0..pages as usize).rev() {
            let found = mapping.words()[page * 512 + 5].load(Ordering::Relaxed);
            ensure(found == expected, || format!("page {page} holds {found:#x}"))?;
        }
        quit.write(1)?;
        Ok(answering.join().expect("the answering thread does not panic")?)
    })
}

/// Every page of two vCPUs arrives by a fault of its own, and holds what the guest wrote.
fn demand_paging(mode: Mode, backing: Backing) -> Result<(), Failed> {
    let report = demand_paging::run(&demand_paging::Config {
        common: Common::default(),
        mode,
        single: false,
        delay: Duration::ZERO,
        readers: 1,
        batch: 1,
        region: Region { bytes: 4 << 20, backing, vcpus: 2 },
        overlap: false,
    })?;
    hosts::premises(&report)?;
    let faults = report.find("faults_answered").map(Figure::value);
    ensure(faults == Some(2048.0), || format!("{faults:?} faults for 2048 pages"))?;
    json::check(&report).map_err(Failed::from)
}

/// Each vCPU writes what its plan names, and nothing else.
#[test(kvm())]
fn blocks_are_touched_where_the_plan_says() -> Result<(), Failed> {
    let kvm = vellum_kvm::vm::open()?;
    let config = GuestConfig { code: guests::program::touch_code(), ..GuestConfig::new(2) };
    let guest =
        Guest::build(&kvm, Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(2 << 20))?, config)?;
    let runs = Plan { first: true, offset: 8192, run: 3, ..Plan::every(4096, 1 << 20, true) };
    Plan { block: 32 * 4096, blocks: 8, ..runs }.program(&guest, 0);
    Plan { start: 1 << 20, ..Plan::every(16 * 4096, 1 << 20, true) }.program(&guest, 1);
    guest.resume();
    guest.wait_all_rung()?;
    let words = guest.vm.memory.mapping.words();
    for page in 0..512usize {
        let expected = match page {
            0..256 if page % 32 == 0 => 8 - page as u64 / 32,
            0..256 if (2..5).contains(&(page % 32)) => 5 - page as u64 % 32,
            256.. if page % 16 == 0 => 16 - (page as u64 - 256) / 16,
            _ => 0,
        };
        let found = words[page * 512].load(Ordering::Relaxed);
        ensure(found == expected, || format!("page {page} holds {found}, not {expected}"))?;
    }
    ensure((0..2).all(|vcpu| touch::seconds(&guest, vcpu) > 0.0), || "no time passed".into())
}

/// Neighbouring pages are mapped eight at a time, but with the log on each small page faults on its
/// own.
#[test(kvm())]
fn page_table_stages() -> Result<(), Failed> {
    // With a local APIC the second vCPU would wait for the first to wake it.
    let report = page_table::run(&page_table::Config {
        common: Common { repeat: 2, irqchip: Some(arch::irqchip::Mode::Kernel), ..Common::default() },
        region: Region { bytes: 8 << 20, backing: Backing::Anonymous, vcpus: 2 },
        first_touch: page_table::FirstTouch::Before,
        execute: true,
        phys_offset: Some(1 << 32),
    })?;
    hosts::premises(&report)?;
    let executed = report.figures.iter().find(|figure| figure.label.name == "execute");
    ensure(executed.is_some_and(|figure| figure.samples.len() == 2), || format!("{executed:?}"))?;
    let grown = report.counters.iter().find(|c| c.name == "pf_fixed").map(|c| c.after - c.before);
    ensure(grown >= Some(2048), || format!("{grown:?} faults for 2048 pages that are written while logged"))?;
    json::check(&report).map_err(Failed::from)
}

/// Each page is created while every vCPU waits for it, and once by each of them.
#[test(kvm(), uffd(Mode::Missing))]
fn vcpus_fault_together() -> Result<(), Failed> {
    let report = page_table::run(&page_table::Config {
        common: Common::default(),
        region: Region { bytes: 2 << 20, backing: Backing::Anonymous, vcpus: 3 },
        first_touch: page_table::FirstTouch::Together,
        execute: false,
        phys_offset: None,
    })?;
    hosts::premises(&report)?;
    let faults = report.find("faults_together").map(Figure::value);
    ensure(faults == Some(3.0 * 512.0), || format!("{faults:?} faults for 512 pages and 3 vCPUs"))?;
    json::check(&report).map_err(Failed::from)
}

/// Every test of `memslot` once, with three slots.
#[test(kvm())]
fn memslots_moved_under_a_guest_lose_nothing() -> Result<(), Failed> {
    let report = memslot::run(&memslot::Config {
        common: Common { repeat: 2, ..Common::default() },
        tests: memslot::Test::NAMES.iter().map(|(_, test)| *test).collect(),
        slots: 3,
        bytes: 12 << 20,
        backing: Backing::Anonymous,
        time: Duration::ZERO,
    })?;
    hosts::premises(&report)?;
    let faults = report
        .counters
        .iter()
        .find(|c| c.label() == Label::of("pf_fixed", "map"))
        .map(|c| c.after - c.before);
    ensure(faults >= Some(2 * 3072), || {
        format!("{faults:?} faults for 2 times 3072 pages dropped and written")
    })?;
    json::check(&report).map_err(Failed::from)
}

/// If KVM shadows page tables, a slot has 8 bytes for each of its pages: `struct kvm_rmap_head` in
/// kvm_host.h.
#[test(kvm(), shadow_paging())]
fn a_memslot_takes_what_its_rmaps_need() -> Result<(), Failed> {
    let report = memslot::run(&memslot::Config {
        // Other tests add and remove slots at the same time. The median of many rounds excludes
        // them.
        common: Common { repeat: 25, ..Common::default() },
        tests: vec![memslot::Test::Create],
        slots: 1,
        bytes: 256 << 20,
        backing: Backing::Anonymous,
        time: Duration::ZERO,
    })?;
    let taken = report.find(Label::of("kernel_memory", "create")).ok_or("no figure")?.value();
    let (least, most) = (f64::from(8 << 18), f64::from(4 << 20));
    ensure((least..most).contains(&taken), || format!("a slot takes {taken} bytes for each GiB"))
}

/// After the first of many rounds SIGINT ends a benchmark. The result has the rounds so far, and
/// says so.
#[test(kvm())]
fn an_interrupt_leaves_what_was_measured() -> Result<(), Failed> {
    let mut child = Command::new(env!("CARGO_BIN_EXE_vellum"))
        .args(["bench", "page-table", "-b", "1m", "--repeat", "100000", "--json", "-"])
        .stdout(Stdio::piped())
        .spawn()?;
    // Each round's vCPU is a new thread. When the second one appears, the first round is over.
    let tasks = format!("/proc/{}/task", child.id());
    let vcpu = || {
        let named = |task: &std::fs::DirEntry| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == "vcpu0")
        };
        Some(std::fs::read_dir(&tasks).ok()?.flatten().find(named)?.file_name())
    };
    let mut first = None;
    eventually(LIMIT, "there is a second round's vCPU", || {
        let now = vcpu();
        if first.is_some() && now.is_some() && now != first || child.try_wait()?.is_some() {
            return Ok(Some(()));
        }
        first = first.take().or(now);
        Ok(None)
    })?;
    // SAFETY: the process is a child that has not been waited for, so the number is its own.
    ensure(unsafe { libc::kill(child.id() as i32, libc::SIGINT) } == 0, || "no process to interrupt".into())?;
    let output = child.wait_with_output()?;
    ensure(output.status.code() == Some(130), || format!("{}", output.status))?;
    let results: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let text = results.to_string();
    ensure(text.contains("interrupted in round"), || text.clone())?;
    ensure(text.contains("update_mappings"), || format!("no figures: {text}"))
}

fn migration(arguments: &str) -> Result<(Output, Report), Failed> {
    bench(&format!("migration {arguments}"))
}

/// Runs a benchmark as a user types it.
fn bench(arguments: &str) -> Result<(Output, Report), Failed> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
    command.arg("bench").args(arguments.split(' ')).args(["--json", "-"]);
    let output = command.stdin(Stdio::null()).output()?;
    let reports =
        json::parse(&output.stdout, Path::new("-")).map_err(|error| format!("{error}: {output:?}"))?;
    let report = reports.into_iter().next().ok_or("no result")?;
    Ok((output, report))
}

/// The values of `name` in all rounds.
fn rounds(report: &Report, name: impl Into<Label>) -> Result<Vec<f64>, Failed> {
    let label = name.into();
    let missing = format!("no {label}");
    let values: Vec<f64> = report.find(label).ok_or(missing)?.values().collect();
    Ok(values)
}

/// A guest that writes is forked three times a round. Every figure is there, and no page is wrong.
#[test(real())]
fn a_guest_is_forked_and_measured() -> Result<(), Failed> {
    let (output, report) = bench("fork -b 64m --dirty-rate 1m --around 100ms --changed 100 --repeat 2")?;
    ensure(output.status.success(), || format!("{output:?}"))?;
    hosts::premises(&report)?;
    json::check(&report).map_err(Failed::from)?;
    for name in [
        "pause",
        "later_pause",
        "longest_gap",
        "remap_at_once",
        "command",
        "later_command",
        "later_of_first",
        "busy_before",
        "busy_after",
        "first_write",
        "remapped_after",
        "remapped_first_write",
        "first_write_of_remapped",
    ] {
        let rounds = rounds(&report, name)?;
        ensure(rounds.len() == 2 && rounds.iter().all(|value| *value > 0.0), || {
            format!("{name}: {rounds:?}")
        })?;
    }
    // The later fork copies the pages that were written since the first one, and the guest's own:
    // they are too few for a new base.
    let (first, later) = (rounds(&report, "pages_copied")?, rounds(&report, "later_pages_copied")?);
    ensure(later.iter().all(|pages| *pages >= 100.0), || format!("{first:?}, {later:?} pages"))?;
    // The file becomes the base, and memory shows it without a pause.
    ensure(rounds(&report, "parts")? == [0.0, 0.0], || "pauses for parts of memory".into())?;
    let further = rounds(&report, "further_machine")?;
    ensure(further.len() == 2 && further.iter().all(|bytes| *bytes > 0.0), || format!("{further:?}"))?;
    // The first fork of anonymous memory copies it. It shows the base 16 MiB at a time.
    let (_, report) =
        bench("fork -b 64m -s anonymous --dirty-rate 1m --around 100ms --changed 100 --repeat 1")?;
    let parts = ["parts", "later_parts"].map(|name| rounds(&report, name));
    let [first, later] = parts;
    ensure(first? == [4.0] && later? == [0.0], || "other pauses for parts of memory".into())?;
    ensure(rounds(&report, "parts_pause")?[0] > 0.0, || "they took no time".into())?;
    let refused = bench_refused("fork -s shmem")?;
    ensure(refused.contains("shmem memory cannot be forked: memfd"), || refused.clone())
}

/// The error message of a benchmark that is refused.
fn bench_refused(arguments: &str) -> Result<String, Failed> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
    let output = command.arg("bench").args(arguments.split(' ')).stdin(Stdio::null()).output()?;
    ensure(output.status.code() == Some(2), || format!("{output:?}"))?;
    Ok(String::from_utf8(output.stderr)?)
}

/// A guest migrates between two processes. Every figure is there, and they agree with each other.
#[test(kvm())]
fn a_guest_is_moved_and_measured() -> Result<(), Failed> {
    moved_and_measured(2).map(drop)
}

/// The machines' downtime agrees with the guest's within a twentieth, in at least one of several
/// rounds: a vCPU that waits for a CPU sees more.
#[test(kvm())]
fn the_parts_of_a_move_are_what_the_guest_saw() -> Result<Completion, Failed> {
    let load = std::fs::read_to_string("/proc/loadavg")?;
    let busy = load.split(' ').next().and_then(|load| load.parse::<f64>().ok()).is_none_or(|load| load > 1.0);
    if busy || std::thread::available_parallelism()?.get() < 2 {
        let why = format!("needs two CPUs of which one is idle; the load is {}", load.trim());
        return Ok(Completion::ignored_with(why));
    }
    let mut near = Vec::new();
    for _ in 0..15 {
        near.append(&mut moved_and_measured(1)?);
        if near.iter().any(|(guest, machines)| (machines / guest - 1.0).abs() <= 0.05) {
            return Ok(Completion::Completed);
        }
    }
    Err(format!("what the guest saw, and what the parts are: {near:?}").into())
}

/// The downtime of each round, as the guest and as the machines have measured it.
fn moved_and_measured(vcpus: usize) -> Result<Vec<(f64, f64)>, Failed> {
    let asked = 16u64 << 20;
    let (output, mut report) =
        migration(&format!("-b 8m -v {vcpus} --dirty-rate 16m --around 500ms --repeat 3"))?;
    let status = i32::from(!report.invalid.is_empty());
    ensure(output.status.code() == Some(status), || format!("not status {status}: {output:?}"))?;
    // A busy host may miss the rate. The test checks only that the result says so.
    let missed = |failed: &report::Failed| matches!(failed.premise, Premise::RateMissed { .. });
    let said = report.invalid.iter().filter(|failed| missed(failed)).count();
    report.invalid.retain(|failed| !missed(failed));
    hosts::premises(&report)?;
    let before = rounds(&report, Label::of("progress", "before"))?;
    let off = |pages: &&f64| (*pages * PAGE_SIZE as f64 / asked as f64 - 1.0).abs() > 0.1;
    let off = before.iter().filter(off).count();
    ensure(said == off, || {
        format!("{before:?} pages a second: {off} of them missed the rate, and {said} are said to")
    })?;
    json::check(&report).map_err(Failed::from)?;

    let downtime = rounds(&report, "downtime")?;
    let machines = rounds(&report, "downtime_of_machines")?;
    let names = ["pause", "save", "last_pass", "transfer", "restore", "resume"];
    let parts: Vec<_> = names
        .iter()
        .map(|part| rounds(&report, Label::of("downtime_part", part)))
        .collect::<Result<_, _>>()?;
    ensure(downtime.len() == 3 && parts.iter().all(|part| part.len() == 3), || format!("{parts:?}"))?;
    for round in 0..3 {
        let sum: f64 = parts.iter().map(|part| part[round]).sum();
        ensure((sum - machines[round]).abs() < 1e-6, || format!("{sum} is not {}", machines[round]))?;
        // The guest stands still between these, even on a busy host. The tolerance is for two
        // clocks, one of which KVM knows only by its frequency.
        let still: f64 = parts[1..5].iter().map(|part| part[round]).sum();
        let guest = downtime[round];
        ensure(guest > still * 0.99, || format!("a guest that stood still for {still} s saw {guest}"))?;
    }
    for name in ["downtime_expected", "downtime_estimated", "total_estimated", "bandwidth", "harvest_total"] {
        ensure(rounds(&report, name)?.iter().all(|&value| value > 0.0), || format!("{name} is nothing"))?;
    }
    ensure(rounds(&report, "converged")? == [100.0; 3], || "it has not converged".into())?;
    let (total, passes) = (rounds(&report, "total")?, rounds(&report, "passes")?);
    ensure(total.iter().zip(&machines).all(|(total, machines)| total > machines), || format!("{total:?} s"))?;
    // The first pass has all of the memory, which the guest has filled.
    let (pages, all) = (rounds(&report, Label::of("pass_pages", 1))?, (vcpus * 2048) as f64);
    ensure(pages.iter().all(|&pages| pages >= all), || format!("{pages:?} pages of {all}"))?;
    let of_pass = |name: &str, pass| rounds(&report, Label::of(name, pass)).unwrap_or_default();
    let most = passes.iter().fold(0.0f64, |most, &passes| most.max(passes));
    let sent: f64 = (1..=most as usize).flat_map(|pass| of_pass("pass_bytes", pass)).sum();
    let all: f64 = rounds(&report, "bytes_sent")?.iter().sum();
    ensure(sent <= all && sent > 0.95 * all, || format!("{sent} of {all} bytes in {passes:?} passes"))?;
    for phase in ["before", "during", "after"] {
        let seen = report.histograms.iter().any(|of| of.index.as_deref() == Some(phase) && of.count() > 0);
        // A migration that is immediate has no writes while it is logged.
        ensure(seen || phase == "during", || format!("no latencies {phase}"))?;
    }
    let still = report.marks.iter().find(|mark| mark.name == "standing still").ok_or("no mark")?;
    let points =
        |series: &Series| series.points.iter().any(|(at, _)| (still.start..still.end + 1.0).contains(at));
    ensure(report.series.len() == vcpus && report.series.iter().all(points), || {
        format!("{still:?}: {:?}", report.series)
    })?;
    let kinds = |kind: &str| report.marks.iter().filter(|mark| mark.name == kind).count();
    let marks = (kinds("passes") + kinds("last pass")) as f64;
    ensure(marks == passes[0], || format!("{marks} marks of {} passes", passes[0]))?;
    Ok(downtime.into_iter().zip(machines).collect())
}

/// Each round has the guest's waits for pages beside the fastest possible answer. Before the
/// migration nothing waits.
#[test(slow_if_emulated())]
fn a_guest_whose_memory_follows_it_is_measured() -> Result<Completion, Failed> {
    if vellum_sys::uffd::Uffd::new(vellum_sys::uffd::Mode::Missing).is_err() {
        return Ok(Completion::ignored_with("needs a userfaultfd that sees KVM's faults: vellum doctor"));
    }
    for mode in ["postcopy", "hybrid"] {
        let (output, mut report) =
            migration(&format!("-b 32m --mode {mode} --dirty-rate 64m --around 500ms --repeat 2"))?;
        report.invalid.retain(|failed| !matches!(failed.premise, Premise::RateMissed { .. }));
        hosts::premises(&report)?;
        json::check(&report).map_err(Failed::from)?;
        ensure(report.asked["mode"] == mode, || format!("{output:?}"))?;
        let [ours, bare, ratio] = ["fault_latency_p50", "bare_fault_latency_p50", "fault_latency_ratio"]
            .map(|name| rounds(&report, name));
        let (ours, bare, ratio) = (ours?, bare?, ratio?);
        let quotients = ours.iter().zip(&bare).map(|(ours, bare)| ours / bare);
        let alike = quotients.zip(&ratio).all(|(quotient, ratio)| (quotient - ratio).abs() < 1e-9);
        ensure(ratio.len() == 2 && alike, || format!("{ours:?} by {bare:?} are {ratio:?}"))?;
        ensure(bare.iter().all(|&seconds| seconds > 0.0), || format!("{bare:?}"))?;
        // A hybrid migration may leave no page to wait for. With postcopy all pages may arrive
        // before the guest needs any, but hardly in each round.
        let faults = rounds(&report, "faults")?;
        ensure(mode == "hybrid" || faults.iter().any(|&faults| faults > 0.0), || format!("{faults:?}"))?;
        ensure(rounds(&report, "link_speed")?.iter().all(|&speed| speed > 0.0), || "no speed".into())?;
    }
    Ok(Completion::Completed)
}

/// No guest writes a terabyte per second. The result says so, and the command fails.
#[test(kvm())]
fn a_rate_that_is_missed_makes_a_result_invalid() -> Result<(), Failed> {
    let (output, report) = migration("-b 2m --dirty-rate 1t --around 100ms --repeat 1")?;
    let missed = report.invalid.iter().any(|failed| matches!(failed.premise, Premise::RateMissed { .. }));
    ensure(missed && output.status.code() == Some(1), || format!("{output:?}"))
}

/// Each option of the kernel's selftests, by its letter there and by its name here, and those of
/// page tables.
#[test(kvm())]
fn options_are_what_the_result_says_was_asked() -> Result<(), Failed> {
    let cpus = vellum_sys::host::allowed_cpus()?;
    let cpu = cpus.first().ok_or("no CPU")?;
    for (line, asked) in [
        (
            format!("dirty-log -b 4m -v 2 -i 3 -w 50 -a -o -e -r 7 -x 2 -g -p 0x140000000 -m 4k -c {cpu},{cpu}"),
            r#"{"bytes_per_vcpu": 4194304, "vcpus": 2, "iterations": 3, "write_percent": 50.0, "order": "random",
                "overlap": true, "run_while_disabling": true, "seed": 7, "slots": 2, "tracker": "bitmap",
                "phys_offset": "0x140000000", "guest_page": "4k"}"#,
        ),
        (
            "dirty-log --bytes 4m --vcpus 2 --iterations 3 --write-percent 50 --random --overlap --seed 7 --slots 2 \
             --run-while-disabling --no-manual-protect --phys-offset 0x140000000 --latency off"
                .into(),
            r#"{"bytes_per_vcpu": 4194304, "vcpus": 2, "iterations": 3, "write_percent": 50.0, "order": "random",
                "overlap": true, "run_while_disabling": true, "seed": 7, "slots": 2, "tracker": "bitmap",
                "phys_offset": "0x140000000", "latency": false}"#,
        ),
        (
            format!("dirty-log -b 4m --pin {cpu} --repeat 1"),
            r#"{"vcpus": 1, "slots": 1, "order": "sequential", "overlap": false, "latency": true}"#,
        ),
        ("page-table -b 1m --unpopulated --repeat 1".into(), r#"{"populated": false}"#),
        ("page-table -b 1m --execute --repeat 1".into(), r#"{"populated": true, "execute": true}"#),
    ] {
        asks(&line, asked)?;
    }
    Ok(())
}

/// Checks that the result of the benchmark `line` has these values, a JSON object, among its
/// parameters.
fn asks(line: &str, values: &str) -> Result<(), Failed> {
    let (output, report) = bench(line)?;
    let wanted: serde_json::Map<String, serde_json::Value> = serde_json::from_str(values)?;
    let wrong = wanted.iter().find(|(name, value)| report.asked.get(*name) != Some(*value));
    // A result that is invalid on this host has them too.
    ensure(wrong.is_none(), || format!("{line}: {wrong:?} of {:?}, {output:?}", report.asked))
}

/// The same for benchmarks of shadow paging.
#[test(kvm(), shadow_paging())]
fn options_of_shadow_paging_are_what_the_result_says_was_asked() -> Result<(), Failed> {
    for (line, asked) in [
        (
            "context-switch 2,3 --switches 100 --reads 2 --repeat 1",
            r#"{"tables": [2, 3], "switches": 100, "reads": 2}"#,
        ),
        (
            "rmap-fork 3 --drop newest,any --pages 16 --repeat 1",
            r#"{"drop": ["newest", "any"], "pages": 16}"#,
        ),
        ("rmap-fork --lengths 4,2 --pages 16 --repeat 1", r#"{"lengths": [2, 4], "pages": 16}"#),
    ] {
        asks(line, asked)?;
    }
    Ok(())
}

/// One line that names the flag and what would work, and exit status 2.
#[test(kvm())]
fn what_excludes_each_other_is_one_line() -> Result<(), Failed> {
    for (line, flag, remedy) in [
        ("dirty-log -b 2m --tracker ring --clear-chunk 64", "--clear-chunk 64", "the tracker manual-protect"),
        ("dirty-log -b 2m -g --clear-chunk 64", "--clear-chunk 64", "the tracker manual-protect"),
        ("dirty-log -b 2m --duration 1s", "--duration", "--collect continuous would work"),
        ("dirty-log -b 2m --collect continuous -i 2", "--iterations", "--collect lockstep would work"),
        ("dirty-log -b 1m -s thp", "-b: 1m", "2m would work"),
        ("demand-paging -b 4k -v 60000", "-v 60000", "at most"),
        ("page-table -b 4k", "-b: 4k", "at least 1m"),
        ("memslot -b 16m -s 32 --backing thp", "-s 32", "8 would work"),
        ("demand-paging -b 4t -s hugetlb-2m", "-s hugetlb-2m", "get them with"),
        ("demand-paging -b 4k -v 300", "-b: 4k", "8k would work"),
        ("memslot -b 4t --backing hugetlb-2m", "--backing hugetlb-2m", "get them with"),
        ("memslot -b 3m", "-b: 3m", "4m would work"),
        ("page-table -b 2m -s thp --together", "-s thp", "hugetlb-2m would work"),
        ("page-table -p 0x1000", "-p 0x1000", "0x100000000 would work"),
        ("dirty-log -b 2m -x 3", "-x 3", "2 would work"),
        ("demand-paging -b 1m -u MINOR", "-u MINOR", "shmem or"),
        ("migration -b 3k", "-b: 3k", "4k would work"),
        ("migration -b 2m -v 60000", "-v 60000", "at most"),
        ("migration -b 4t", "-b: this needs 8", "use fewer"),
        ("migration -b 2m --dirty-rate 5k", "--dirty-rate", "1m or more"),
        ("migration -b 2m --pattern hot=10", "--pattern", "order"),
        ("migration -b 2m --pattern random,hot=100", "--pattern", "below 100"),
        ("migration -b 2m --connections 17", "--connections", "1 to 16"),
        ("migration -b 2m -c 70000", "-c", "0 to 65535"),
        ("migration -b 2m --bandwidth 3k", "--bandwidth", "1m or more"),
        ("migration -b 2m --mode sideways", "--mode", "hybrid"),
        ("migration -b 2m --preset sweep --dirty-rate 1m", "--preset", "--dirty-rate"),
    ] {
        let output =
            Command::new(env!("CARGO_BIN_EXE_vellum")).arg("bench").args(line.split(' ')).output()?;
        let said = String::from_utf8(output.stderr)?;
        // What the host lacks is no bad input.
        let status = if remedy == "get them with" { 4 } else { 2 };
        let right = output.status.code() == Some(status) && said.lines().count() == 1;
        ensure(right && said.contains(flag) && said.contains(remedy) && !said.contains("--memory"), || {
            format!("{line}: {}: {said}", output.status)
        })?;
    }
    Ok(())
}

fn page_idle() -> Need {
    PageIdle::open().map(drop).map_err(|e| {
        format!(
            "needs /sys/kernel/mm/page_idle/bitmap ({e}): root, and a kernel with CONFIG_IDLE_PAGE_TRACKING"
        )
    })
}

/// The premises that the benchmark checks itself: marked pages become idle, and touched pages are
/// not idle.
#[test(kvm(), page_idle())]
fn access_tracking_marks_and_unmarks() -> Result<(), Failed> {
    let report = access_tracking::run(&access_tracking::Config {
        common: Common::default(),
        region: Region { bytes: 8 << 20, backing: Backing::Anonymous, vcpus: 2 },
        overlap: false,
    })?;
    hosts::premises(&report)?;
    json::check(&report).map_err(Failed::from)
}

/// What the guest does to its tables, read from its memory. It works wherever KVM runs code at CPL
/// 0.
#[test(kvm())]
fn tables_lead_to_the_same_frames_and_are_cleared() -> Result<(), Failed> {
    let (count, pages) = (3u64, 5u64);
    let kvm = vellum_kvm::vm::open()?;
    let memory = Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(tables::ram(count)))?;
    let config = GuestConfig { code: tables_code(), privilege: Privilege::Kernel, ..GuestConfig::new(1) };
    let guest = Guest::build(&kvm, memory, config)?;
    tables::program(&guest, count, pages);
    let words = guest.vm.memory.mapping.words();
    let word = |gpa: u64| words[gpa as usize / 8].load(Ordering::Relaxed);
    let last_level = |table: u64| tables::MAX_PAGES * 4096 + table * tables::TABLE_BYTES + 3 * 4096;
    for _ in 0..2 {
        perform(&guest, Do::Build)?;
        let entry = word(last_level(2) + 8 * (pages - 1));
        ensure(entry & !0xfff == (pages - 1) * 4096 && entry & 1 == 1, || format!("entry {entry:#x}"))?;
        ensure(word(last_level(2) + 8 * pages) == 0, || "an entry too many".into())?;
        words.iter().take(pages as usize * 512).for_each(|w| w.store(77, Ordering::Relaxed));
        perform(&guest, Do::Touch)?;
        for page in 0..pages {
            ensure(word(page * 4096) == 1, || format!("frame {page} holds {}", word(page * 4096)))?;
        }
        tables::set_switches(&guest, 7, pages);
        perform(&guest, Do::Switch)?;
        perform(&guest, Do::Loop)?;
        perform(&guest, Do::Clear)?;
        ensure((0..count).all(|table| word(last_level(table)) == 0), || "not cleared".into())?;
        ensure(word(last_level(1) - 4096) != 0, || "cleared too much".into())?;
        perform(&guest, Do::Free)?;
        ensure((0..count).all(|table| word(last_level(table) - 4096) == 0), || "not freed".into())?;
    }
    Ok(())
}

#[test(kvm())]
fn counters_tell_what_kvm_mapped() -> Result<(), Failed> {
    let pages = 2048;
    let kvm = vellum_kvm::vm::open()?;
    let guest = Guest::build(
        &kvm,
        Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(pages << 12))?,
        GuestConfig::new(2),
    )?;
    let counters = Counters::open(&guest.vm.fd, &guest.vcpus)?;
    let before = counters.read()?;
    guest.program(&WriteConfig { passes: 1, ..WriteConfig::default() })?;
    guest.resume();
    guest.wait_all_rung()?;
    let after = counters.read()?;
    let grown = |name: &str| after[name] - before[name];
    ensure(grown("pages_4k") >= pages, || format!("{} of {pages} pages mapped", grown("pages_4k")))?;
    ensure(grown("exits") >= 2, || format!("{} exits of 2 vCPUs that rang", grown("exits")))
}
