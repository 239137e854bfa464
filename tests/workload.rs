//! The `write` workload on real KVM. The model computes what it must have written, and the test
//! compares every page.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use support::faults;
use support::hosts;
use support::hosts::kvm;
use support::{Failed, LIMIT, Need, Tests, ensure, eventually, test};
use vellum_control::Throttling;
use vellum_guests::control::{Control, phase};
use vellum_guests::guest::GuestConfig;
use vellum_guests::model::{self, Model};
use vellum_guests::program::{Code, Privilege, write_code};
use vellum_guests::{Guest, Hot, Order, WriteConfig};
use vellum_kvm::dirty::{self, Method};
use vellum_kvm::memory::{Backing, Memory, MemoryConfig};
use vellum_kvm::vm::counters::Counters;
use vellum_kvm::vm::vcpu::{self, Throttle};
use vellum_migration::plan::{Measured, Plan};

fn main() -> ExitCode {
    faults::plant();
    let mut tests = Tests::from_args();
    tests.add("planted_all-throttled-alike_is_caught", kvm().and(ring()).and(undisturbed()), || {
        faults::caught("all-throttled-alike", "a_vcpu_that_only_reads_keeps_its_time", "of its share")
    });
    let mut case = |name: &str, ram: u64, vcpus: usize, config: WriteConfig| {
        tests.add(name, kvm(), move || run(MemoryConfig::new(ram), vcpus, &config));
    };
    let base = WriteConfig::default();
    let mib = 1 << 20;
    case("sequential_writes_stamp_every_page", 32 * mib, 1, base.clone());
    case("four_vcpus_have_a_region_each", 33 * mib, 4, base.clone());
    case("four_vcpus_share_a_region", 8 * mib, 4, WriteConfig { shared: true, ..base.clone() });
    case("random_order", 32 * mib, 1, WriteConfig { order: Order::Random, seed: 7, ..base.clone() });
    case(
        "shuffled_order_reaches_every_page",
        33 * mib,
        2,
        WriteConfig { order: Order::Shuffled, ..base.clone() },
    );
    case("half_of_the_accesses_read", 16 * mib, 1, WriteConfig { write_percent: 50.0, ..base.clone() });
    let hot = Some(Hot { percent: 10.0, share: 90.0 });
    for order in [Order::Sequential, Order::Random, Order::Shuffled] {
        let name = format!("hot_set_in_{}_order", order.name());
        case(&name, 16 * mib, 1, WriteConfig { hot, order, ..base.clone() });
    }
    case("a_stride_of_two_mebibytes", 64 * mib, 1, WriteConfig { stride: 2 * mib, ..base.clone() });
    case("no_latency", 16 * mib, 1, WriteConfig { latency: false, ..base.clone() });
    for backing in [Backing::Thp, Backing::Shmem, Backing::Memfd] {
        tests.add(format!("backing_{backing}"), kvm(), move || {
            run(MemoryConfig { backing, ..MemoryConfig::new(32 << 20) }, 1, &WriteConfig::default())
        });
    }
    let huge = kvm().and(hosts::huge_pages(2 << 20, 16));
    for backing in [Backing::Hugetlb(2 << 20), Backing::SharedHugetlb(2 << 20)] {
        tests.add(format!("backing_{backing}"), huge.clone(), move || {
            run(MemoryConfig { backing, ..MemoryConfig::new(32 << 20) }, 1, &WriteConfig::default())
        });
    }
    tests.run()
}

#[test(kvm())]
fn writes_above_four_gibibytes() -> Result<(), Failed> {
    let config = WriteConfig { stride: 2 << 20, ..WriteConfig::default() };
    run(MemoryConfig::new(6 << 30), 2, &config)
}

#[test(kvm())]
fn many_memslots() -> Result<(), Failed> {
    run(MemoryConfig { slots: 100, ..MemoryConfig::new(64 << 20) }, 2, &WriteConfig::default())
}

fn build(memory: MemoryConfig, vcpus: usize) -> Result<Guest, Failed> {
    let kvm = vellum_kvm::vm::open()?;
    Ok(Guest::build(&kvm, Memory::map(vellum_kvm::arch::layout::RAM, memory)?, GuestConfig::new(vcpus))?)
}

fn check(guest: &Guest, models: Vec<Model>, stride: u64) -> model::StampVerdict {
    let reached = guest.controls().map(model::Reached::new);
    let pages = guest.vm.memory.config.size / stride;
    model::verify(models.into_iter().zip(reached).collect(), pages, |page| guest.stamp(page, stride))
}

fn run(memory: MemoryConfig, vcpus: usize, config: &WriteConfig) -> Result<(), Failed> {
    let guest = build(memory, vcpus)?;
    let regions = guest.program(config)?;
    let models: Vec<_> = guest.controls().map(Model::new).collect();
    guest.resume();
    guest.wait_all_rung()?;
    for (control, region) in guest.controls().zip(&regions) {
        let done = control.done.load(Ordering::Relaxed);
        ensure(done == config.passes * region.pages, || format!("{done} accesses over {region:?}"))?;
        let measured: u64 = control.latency_snapshot().iter().sum();
        let writes = if config.latency { control.written.load(Ordering::Relaxed) } else { 0 };
        ensure(measured == writes, || format!("{measured} latencies of {writes} writes"))?;
    }
    let verdict = check(&guest, models, config.stride);
    ensure(verdict.wrong == 0 && verdict.checked > 0, || format!("{verdict:?}"))?;
    let everywhere = config.hot.is_none() && config.write_percent == 100.0 && config.order != Order::Random;
    let pages = memory.size / config.stride;
    ensure(!everywhere || verdict.checked == pages, || format!("{} of {pages} pages", verdict.checked))
}

#[test(kvm())]
fn a_planted_fault_is_found() -> Result<(), Failed> {
    let guest = build(MemoryConfig::new(4 << 20), 1)?;
    let config = WriteConfig::default();
    guest.program(&config)?;
    let models: Vec<_> = guest.controls().map(Model::new).collect();
    guest.resume();
    guest.wait_all_rung()?;
    // Page 77 gets its contents of one pass earlier.
    guest.vm.memory.mapping.words()[77 * 512].fetch_sub(1024, Ordering::Relaxed);
    let verdict = check(&guest, models, config.stride);
    ensure(verdict.wrong == 1 && verdict.examples[0].0 == 77, || format!("{verdict:?}"))
}

#[test(kvm())]
fn two_hundred_pauses_while_it_runs() -> Result<(), Failed> {
    let guest = build(MemoryConfig::new(32 << 20), 4)?;
    let config = WriteConfig { passes: 0, shared: true, ..WriteConfig::default() };
    guest.program(&config)?;
    let models: Vec<_> = guest.controls().map(Model::new).collect();
    guest.resume();
    let progress = || guest.controls().map(|control| control.done.load(Ordering::Relaxed)).sum::<u64>();
    let mut took = Vec::new();
    for round in 0..200 {
        took.push(guest.pause()?);
        let stopped_at = progress();
        // No vCPU runs, so nothing may change, however long this thread takes.
        std::thread::yield_now();
        ensure(progress() == stopped_at, || format!("round {round}: progress while paused"))?;
        guest.resume();
        // The guest must really continue. Otherwise the next pause would prove nothing.
        eventually(LIMIT, "the guest goes on", || Ok((progress() != stopped_at).then_some(())))?;
    }
    took.sort();
    println!("200 pauses of 4 vCPUs: p50 {:?}, p99 {:?}, max {:?}", took[100], took[198], took[199]);
    guest.request_stop();
    guest.wait_all_rung()?;
    let verdict = check(&guest, models, config.stride);
    ensure(verdict.wrong == 0, || format!("{verdict:?}"))
}

#[test(kvm())]
fn the_rate_is_kept() -> Result<(), Failed> {
    let guest = build(MemoryConfig::new(8 << 20), 1)?;
    let rate = 20_000;
    guest.program(&WriteConfig { rate: Some(rate), passes: 4, ..WriteConfig::default() })?;
    guest.resume();
    guest.wait_all_rung()?;
    let control = guest.control(0);
    let pages = control.distinct.load(Ordering::Relaxed);
    let last = control.pass_ends[3].load(Ordering::Relaxed);
    let ticks = last - control.started.load(Ordering::Relaxed);
    // Measured by the guest's own clock, it is never faster than requested, whatever the host does.
    let least = (pages - 1) * (guest.tsc_hz / rate) - guest.tsc_hz / 100;
    ensure(ticks >= least, || format!("{pages} pages in {ticks} ticks; at least {least} expected"))
}

/// A warm guest ignores its rate in the first pass only.
#[test(kvm())]
fn a_warm_guest_is_paced_from_its_second_pass_on() -> Result<(), Failed> {
    let guest = build(MemoryConfig::new(8 << 20), 1)?;
    // With pacing, a pass takes longer than an unpaced pass takes on any host.
    let (pages, rate) = (2048, 20);
    guest.program(&WriteConfig { rate: Some(rate), warm: true, passes: 0, ..WriteConfig::default() })?;
    guest.resume();
    let control = guest.control(0);
    let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
    eventually(LIMIT, "it is in its second pass", || Ok((get(&control.distinct) > pages + 3).then_some(())))?;
    guest.request_stop();
    guest.wait_all_rung()?;
    let [begun, warm, end] = [&control.started, &control.pass_ends[0], &control.ended].map(get);
    let interval = guest.tsc_hz / rate;
    ensure(warm - begun < pages * interval, || format!("{} ticks of the first pass", warm - begun))?;
    // Measured by the guest's own clock. Pacing counts from some time in the first pass, and after
    // a stall the guest catches up at once.
    let paced = get(&control.distinct) - pages;
    let least = (paced - 1) * interval * 99 / 100;
    ensure(end - begun >= least, || {
        format!("{paced} pages in {} ticks; at least {least} expected", end - begun)
    })
}

/// The journal records each stall of the guest by the guest's own clock, and the latencies of
/// writes before and after it.
#[test(kvm())]
fn a_journal_knows_when_nothing_was_written() -> Result<(), Failed> {
    let guest = build(MemoryConfig::new(8 << 20), 2)?;
    let config = WriteConfig { passes: 0, journal: Some(Duration::from_millis(1)), ..WriteConfig::default() };
    guest.program(&config)?;
    let models: Vec<_> = guest.controls().map(Model::new).collect();
    let begun = Instant::now();
    guest.resume();
    let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
    let all = |what: fn(&Control) -> bool| guest.controls().all(what).then_some(());
    eventually(LIMIT, "all have written", || Ok(all(|control| control.pass.load(Ordering::Relaxed) > 0)))?;
    guest.pause()?;
    let still = Instant::now();
    std::thread::sleep(Duration::from_millis(30));
    guest.controls().for_each(|control| control.phase.store(phase::LOGGED, Ordering::Relaxed));
    let least = still.elapsed();
    guest.resume();
    eventually(LIMIT, "all know of it", || Ok(all(|control| control.seen.load(Ordering::Relaxed) > 0)))?;
    guest.request_stop();
    guest.wait_all_rung()?;
    for control in guest.controls() {
        let gap = get(&control.entered_gap[1]) as f64 / guest.tsc_hz as f64;
        // There are two clocks, and KVM only knows the frequency of one of them. The guest may also
        // have stalled before, for lack of a CPU.
        let (least, most) = (least.as_secs_f64() * 0.99, begun.elapsed().as_secs_f64() * 1.01);
        ensure((least..most).contains(&gap), || format!("{gap} s, and it stood still for {least} at least"))?;
        ensure(get(&control.gap) >= get(&control.entered_gap[1]), || "the longest gap is shorter".into())?;
        let sums = [0, 1, 2].map(|phase| control.latency_of(phase).iter().sum::<u64>());
        ensure(sums[0] > 0 && sums[1] > 0 && sums[2] == 0, || format!("{sums:?} latencies in each phase"))?;
        let (measured, writes) = (sums.iter().sum::<u64>(), get(&control.written));
        ensure(measured == writes, || format!("{measured} latencies of {writes} writes"))?;
        let slices: Vec<u64> = control.slices.iter().map(get).filter(|&pages| pages > 0).collect();
        let distinct = get(&control.distinct);
        let right =
            slices.is_sorted() && slices.len() > 1 && slices.last().is_some_and(|&last| last <= distinct);
        ensure(right, || format!("{slices:?} of {distinct}"))?;
    }
    let verdict = check(&guest, models, config.stride);
    ensure(verdict.wrong == 0 && verdict.checked > 0, || format!("{verdict:?}"))
}

#[test(kvm())]
fn naps_take_the_time_that_is_asked() -> Result<(), Failed> {
    let guest = build(MemoryConfig::new(8 << 20), 2)?;
    guest.program(&WriteConfig { passes: 0, ..WriteConfig::default() })?;
    guest.resume();
    let throttle = Throttle::new(&guest.vcpus);
    let progress = || guest.controls().map(|control| control.done.load(Ordering::Relaxed)).sum::<u64>();
    let goes_on =
        |from: u64| eventually(LIMIT, "the guest goes on", || Ok((progress() != from).then_some(())));
    goes_on(0)?;
    // Measured by the TSC, so a busy host can only make it longer.
    for milliseconds in [1, 10, 40, 160] {
        let since = tsc();
        throttle.throttle(Duration::from_millis(milliseconds));
        vcpu::flush_all(&guest.vcpus)?;
        goes_on(progress())?;
        let ticks = tsc() - since;
        // The host's clock and its TSC differ by less than one part in a thousand.
        let least = guest.tsc_hz / 1000 * milliseconds * 999 / 1000;
        ensure(ticks >= least, || {
            format!("a nap of {milliseconds} ms took {ticks} ticks of at least {least}")
        })?;
    }
    // A guest that should sleep for an hour does nothing for 50 ms. It can still be paused, and
    // runs when it is resumed.
    throttle.throttle(Duration::from_secs(3600));
    vcpu::flush_all(&guest.vcpus)?;
    let (since, asleep) = (tsc(), progress());
    while tsc() - since < guest.tsc_hz / 20 {
        std::hint::spin_loop();
    }
    ensure(progress() == asleep, || format!("{} accesses in its sleep", progress() - asleep))?;
    guest.pause()?;
    guest.resume();
    goes_on(asleep)
}

#[cfg(target_arch = "x86_64")]
fn tsc() -> u64 {
    // SAFETY: reads a counter that every x86-64 CPU has.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(target_arch = "aarch64")]
fn tsc() -> u64 {
    let ticks: u64;
    // SAFETY: reads the counter that guests read too. Linux lets every program read it.
    unsafe { std::arch::asm!("mrs {ticks}, cntvct_el0", ticks = out(reg) ticks, options(nomem, nostack)) };
    ticks
}

#[test(kvm())]
fn a_page_faults_once_and_never_again() -> Result<(), Failed> {
    let pages = 4096;
    let guest = build(MemoryConfig::new(pages << 12), 1)?;
    let counters = Counters::open(&guest.vm.fd, &guest.vcpus)?;
    let before = counters.read()?;
    guest.program(&WriteConfig::default())?;
    guest.resume();
    guest.wait_all_rung()?;
    let after = counters.read()?;
    let Some(faults) = after.get("pf_taken").map(|after| after - before["pf_taken"]) else {
        return Ok(());
    };
    // The rest are the code, the control block, and tables that KVM shadows. Twice as many faults
    // would mean a read before each write.
    ensure((pages..pages + pages / 8).contains(&faults), || {
        format!("{faults} faults for {pages} pages, 3 passes")
    })
}

/// The same code at another address, with other bytes at its old address, must do the same.
#[test(kvm())]
fn the_code_runs_wherever_it_lies() -> Result<(), Failed> {
    let code = write_code();
    let moved: Vec<u8> = std::iter::repeat_n(0xcc, 0x340).chain(code.bytes.iter().copied()).collect();
    let moved = Code { bytes: moved.leak(), entry: code.entry + 0x340 };
    for code in [code, moved] {
        with(GuestConfig { code, ..GuestConfig::new(1) })?;
    }
    Ok(())
}

#[test(kvm())]
fn the_privileged_variant() -> Result<(), Failed> {
    with(GuestConfig { privilege: Privilege::Kernel, ..GuestConfig::new(1) })
}

fn with(guest: GuestConfig) -> Result<(), Failed> {
    let kvm = vellum_kvm::vm::open()?;
    let guest =
        Guest::build(&kvm, Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(4 << 20))?, guest)?;
    let config = WriteConfig { order: Order::Random, ..WriteConfig::default() };
    guest.program(&config)?;
    let models: Vec<_> = guest.controls().map(Model::new).collect();
    guest.resume();
    guest.wait_all_rung()?;
    let verdict = check(&guest, models, config.stride);
    ensure(verdict.wrong == 0 && verdict.checked > 0, || format!("{verdict:?}"))
}

/// If a thread cannot enter its sandbox, the error must be reported, whether the caller waits for
/// the thread or lets it run at once.
#[test(kvm())]
fn a_vcpu_that_cannot_start_is_an_error() -> Result<(), Failed> {
    let kvm = vellum_kvm::vm::open()?;
    let config =
        || GuestConfig { enter: Arc::new(|_| Err(std::io::Error::other("refused"))), ..GuestConfig::new(2) };
    let waited =
        Guest::build(&kvm, Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(4 << 20))?, config())
            .err();
    let guest = Guest::start(
        &kvm,
        Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(4 << 20))?,
        config(),
    )?;
    guest.program(&WriteConfig::default())?;
    guest.resume();
    let at_once = guest.wait_all_rung().err();
    for error in [waited, at_once] {
        let said = error.map(|error| error.to_string()).unwrap_or_default();
        ensure(said.contains("refused"), || format!("said: {said}"))?;
    }
    Ok(())
}

fn ring() -> Need {
    let Ok((available, _)) = Method::available() else { return Ok(()) };
    let lacks = || format!("needs a KVM with the {} tracker", Method::Ring.name());
    available.contains(&Method::Ring).then_some(()).ok_or_else(lacks)
}

/// A vCPU whose dirty ring is full empties the ring itself and continues. No other thread has to
/// act until the written pages are requested, and then none is missing.
#[test(kvm(), ring())]
fn a_full_ring_stops_nobody_and_loses_nothing() -> Result<(), Failed> {
    let kvm = vellum_kvm::vm::open()?;
    let memory = Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(8 << 20))?;
    let mut guest =
        Guest::build(&kvm, memory, GuestConfig { dirty_ring: Some(1024), ..GuestConfig::new(1) })?;
    // The second tracker continues with the rings as the first one left them.
    for pass in 1..=2 {
        let (vm, quiesced) = guest.quiesced()?;
        let mut tracker = dirty::tracker(Method::Ring, vm, &quiesced, None)?;
        guest.vm.memory.slots().iter().try_for_each(|slot| tracker.track(slot.id()))?;
        tracker.enable(true)?;
        // The total number of passes.
        guest.program(&WriteConfig { passes: pass, ..WriteConfig::default() })?;
        guest.resume();
        guest.wait_all_rung()?;
        let ring = guest.vm.dirty_ring.as_ref().ok_or("no ring")?;
        ensure(ring.relieved() >= pass, || format!("full {} times in {pass} passes", ring.relieved()))?;
        tracker.collect()?;
        let found: u64 =
            tracker.logs().iter().flat_map(|log| log.runs()).map(|run| run.end - run.start).sum();
        ensure(found == 2048, || format!("{found} of 2048 pages in pass {pass}"))?;
        ensure(ring.written()[0] >= 2048 * pass, || format!("{:?} entries", ring.written()))?;
        tracker.enable(false)?;
    }
    Ok(())
}

/// Needs a host without other load, as declared by the user.
fn undisturbed() -> Need {
    match std::env::var("VELLUM_MIGRATION") {
        Ok(all) if all == "all" => Ok(()),
        _ => {
            Err("compares how far vCPUs come, which other work disturbs; VELLUM_MIGRATION=all has it run"
                .into())
        }
    }
}

/// The rings show which of two vCPUs writes. A plan that keeps the guest within the speed of a slow
/// link slows down that vCPU. The other vCPU, which only reads, keeps its time.
#[test(kvm(), ring(), undisturbed())]
fn a_vcpu_that_only_reads_keeps_its_time() -> Result<(), Failed> {
    const PERIOD: Duration = Duration::from_millis(10);
    let kvm = vellum_kvm::vm::open()?;
    let memory = Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(8 << 20))?;
    let mut guest =
        Guest::build(&kvm, memory, GuestConfig { dirty_ring: Some(4096), ..GuestConfig::new(2) })?;
    let write =
        WriteConfig { order: Order::Random, write_percent: 50.0, passes: 0, ..WriteConfig::default() };
    guest.program(&write)?;
    // It draws as the other does, but never below this threshold, so it never writes.
    guest.control(1).write_below.store(0, Ordering::Relaxed);
    let (vm, quiesced) = guest.quiesced()?;
    let mut tracker = dirty::tracker(Method::Ring, vm, &quiesced, None)?;
    guest.vm.memory.slots().iter().try_for_each(|slot| tracker.track(slot.id()))?;
    tracker.enable(true)?;
    let throttle = Throttle::new(&guest.vcpus);
    let progress = || [0, 1].map(|vcpu| guest.control(vcpu).done.load(Ordering::Relaxed));
    // The progress of both vCPUs while `each_period` is called. It ends when both have made
    // progress.
    let run = |each_period: &dyn Fn()| -> Result<[u64; 2], Failed> {
        let before = progress();
        let came = || [0, 1].map(|vcpu| progress()[vcpu] - before[vcpu]);
        for _ in 0..100 {
            each_period();
            std::thread::sleep(PERIOD);
        }
        eventually(LIMIT, "both come far enough", || {
            each_period();
            Ok(came().iter().all(|came| *came > 0).then_some(()))
        })?;
        Ok(came())
    };
    guest.resume();
    let before = tracker.written();
    let free = run(&|| ())?;
    tracker.collect()?;
    let wrote: Vec<u64> = tracker.written().iter().zip(&before).map(|(now, before)| now - before).collect();
    ensure(wrote[0] > 1000 && wrote[1] < wrote[0] / 100, || format!("{wrote:?} pages were written"))?;
    // The link can take one hundredth of what is written.
    let took = Duration::from_secs(1);
    let mut plan = Plan::new(PERIOD, None, None).throttling(Throttling::DirtyLimit);
    plan.wrote(wrote);
    plan.pass_ended(Measured { pages: 2048, bytes: 2048 * 4096, took, dirty: 100 * 2048 }, took);
    let slow = run(&|| throttle.nap_each(|vcpu| Some(PERIOD * plan.taken_from(vcpu) / 100)))?;
    throttle.wake();
    guest.request_stop();
    guest.wait_all_rung()?;
    let share = |[writes, reads]: [u64; 2]| writes as f64 / reads as f64;
    let (taken, left) = ([0, 1].map(|vcpu| plan.taken_from(vcpu)), share(slow) / share(free));
    // If both were slowed down alike, the reader would make a fraction of its progress from before.
    let kept = slow[1] as f64 / free[1] as f64;
    ensure(left < 0.5 && kept > 0.5, || {
        format!(
            "the reader keeps {kept:.2}, the writer {left:.2} of its share: {free:?} {slow:?}, {taken:?} % taken"
        )
    })
}
