//! `page-table`: the cost for KVM of creating, changing and rebuilding the mappings of a region
//! that all vCPUs share.
//!
//! The stages of the KVM selftest kvm_page_table_test. Memory is populated in advance, so that
//! KVM's work is measured and not the host's first touch. Optionally the guest does the first
//! touch, as in the selftest.
//! - *create*: one access to each page of the backing's size. Even vCPUs write, odd ones read.
//! - *execute* (optional): executes an instruction in each page. An Arm host has mapped it writable
//!   and not executable.
//! - *update*, with dirty logging: small pages are written again. The first 4 KiB of each huge page
//!   are written and its second half is read, so a block becomes a table.
//! - *adjust* (formerly rebuild), after logging: every 4 KiB page is read, so tables can become
//!   blocks again.
//!
//! vCPUs that create the same mapping at the same time may duplicate work. By default this is up to
//! chance. [`FirstTouch::Together`] holds first touches until all vCPUs wait for the same page.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;
use std::{io, thread};

use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::demand_paging::reported;
use super::region::{check_offset, place, populated};
use super::{Common, Counted, Error, Region, huge_premise, of_rounds};
use vellum_guests::Guest;
use vellum_guests::guest::GuestConfig;
use vellum_guests::program::{COME_BACK, touch_code};
use vellum_guests::touch::{Access, Plan};
use vellum_host::hugepages;
use vellum_kvm::memory::{Backing, Memory, MemoryConfig, short_size};
use vellum_kvm::vm;
use vellum_report::{Label, Premise, Report};
use vellum_sys::diagnose::Field;
use vellum_sys::mmap::{Mapping, PAGE_SIZE, host_page};
use vellum_sys::uffd::{BATCH, Mode, Uffd};

/// The parameters.
#[derive(Clone, Debug)]
pub struct Config {
    /// The common parameters.
    pub common: Common,
    /// The memory that all vCPUs share.
    pub region: Region,
    /// When host memory is populated.
    pub first_touch: FirstTouch,
    /// Whether to run the stage *execute* before *update*.
    pub execute: bool,
    /// The start of memory in the guest's physical address space.
    pub phys_offset: Option<u64>,
}

/// When host memory is populated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstTouch {
    /// Before the guest runs.
    Before,
    /// When the guest touches it, in *create*.
    Guest,
    /// In *create*, page by page, once every vCPU waits for the page, as reported by userfaultfd.
    Together,
}

/// The offset of the instruction in a page, after the data that is written.
const INSTRUCTION: u64 = 16;

/// The rows of the tables posted with the arm64 stage-2 series (v2, March 2021, Kunpeng 920):
/// backing, bytes, vCPUs.
const SEED: [(&str, Backing, u64, usize); 6] = [
    ("anonymous-1g-80", Backing::Anonymous, 1 << 30, 80),
    ("thp-20g-40", Backing::Thp, 20 << 30, 40),
    ("thp-20g-20", Backing::Thp, 20 << 30, 20),
    ("hugetlb-1g-1g-80", Backing::Hugetlb(1 << 30), 1 << 30, 80),
    ("hugetlb-1g-20g-40", Backing::Hugetlb(1 << 30), 20 << 30, 40),
    ("hugetlb-1g-20g-20", Backing::Hugetlb(1 << 30), 20 << 30, 20),
];

/// Runs the benchmark.
pub fn run(config: &Config) -> Result<Report, Error> {
    let Region { bytes, backing, vcpus } = config.region;
    config.region.check(backing.best_mapping())?;
    if config.first_touch == FirstTouch::Together && backing == Backing::Thp {
        let why = "thp: missing pages arrive as small ones; anonymous or hugetlb-2m would work";
        return Err(Error::Asked(Field::Backing, why.into()));
    }
    let mut report = config.common.report("page-table");
    report.ask("bytes", bytes);
    report.ask("backing", backing.to_string());
    report.ask("vcpus", vcpus);
    describe(&mut report, config);
    let rounds = measure(&mut report, config, None)?;
    add(&mut report, None, &rounds);
    report.set_headline("update_mappings");
    report.answer_with_headline("Updating all mappings takes");
    Ok(report)
}

/// Measures every row of `SEED`, scaled to this host, with at most `most` vCPUs. `config` has the
/// other parameters.
pub fn run_seed(config: &Config, most: Option<usize>) -> Result<Report, Error> {
    let mut report = config.common.report("page-table");
    report.ask("preset", "seed");
    describe(&mut report, config);
    // Halves the sizes until the largest row fits into a quarter of the available memory. The rows
    // with 80 vCPUs get two per CPU.
    let most = most.unwrap_or(2 * report.host.cpus as usize);
    let available = vellum_host::topology::memory().available;
    let mut shrink = 1;
    while (20 << 30) / shrink > available / 4 {
        shrink *= 2;
    }
    report.ask("memory_scale", format!("1/{shrink}"));
    report.ask("vcpu_scale", format!("{most}/80"));
    for (label, backing, bytes, vcpus) in SEED {
        let page = backing.best_mapping();
        let bytes = (bytes / shrink / page).max(1) * page;
        let vcpus = (vcpus * most / 80).max(1);
        if let Backing::Hugetlb(size) = backing
            && let Err(shortage) = hugepages::check(size, bytes)
        {
            report.note(format!("{label} was not measured: {shortage}"));
            continue;
        }
        report.ask(&format!("row {label}"), format!("{backing}, {}, {vcpus} vCPUs", short_size(bytes)));
        let region = Region { bytes, backing, vcpus };
        let measured = measure(&mut report, &Config { region, ..config.clone() }, Some(label));
        match measured {
            // The rows measured before remain.
            Err(error) if error.interrupted().is_some() && !report.figures.is_empty() => {
                report.cut_short =
                    Some(format!("interrupted in {label}, which was not measured, nor were later rows"));
                break;
            }
            measured => add(&mut report, Some(label), &measured?),
        }
        if report.cut_short.is_some() {
            break;
        }
    }
    Ok(report)
}

fn describe(report: &mut Report, config: &Config) {
    config.common.ask_page(report);
    report.ask("populated", config.first_touch == FirstTouch::Before);
    if config.first_touch == FirstTouch::Together {
        report.ask("together", true);
    }
    if config.execute {
        report.ask("execute", true);
    }
    if let Some(offset) = config.phys_offset {
        report.ask("phys_offset", format!("{offset:#x}"));
    }
    config.common.ask(report);
}

/// The results of one round: the duration of each stage in seconds, and the faults for which all
/// vCPUs waited.
struct Stages {
    create: f64,
    faults_together: Option<u64>,
    enable: f64,
    execute: Option<f64>,
    update: f64,
    disable: f64,
    adjust: f64,
    adjust_exits: Option<u64>,
}

/// Adds the figures of `rounds`, with `index` for a row of several.
fn add(report: &mut Report, index: Option<&str>, rounds: &[Stages]) {
    let mut put = |name: &str, unit: &str, of: fn(&Stages) -> Option<f64>| {
        let label = Label { name: name.into(), index: index.map(str::to_owned) };
        if rounds.iter().any(|stages| of(stages).is_some()) {
            report.samples(label, unit, of_rounds(rounds, of));
        }
    };
    put("create_mappings", "s", |stages| Some(stages.create));
    put("faults_together", "faults", |stages| stages.faults_together.map(|faults| faults as f64));
    put("enable_logging", "s", |stages| Some(stages.enable));
    put("execute", "s", |stages| stages.execute);
    put("update_mappings", "s", |stages| Some(stages.update));
    put("disable_logging", "s", |stages| Some(stages.disable));
    put("adjust_mappings", "s", |stages| Some(stages.adjust));
    put("adjust_exits", "exits", |stages| stages.adjust_exits.map(|exits| exits as f64));
}

fn measure(report: &mut Report, config: &Config, index: Option<&str>) -> Result<Vec<Stages>, Error> {
    let Region { bytes, backing, .. } = config.region;
    if let Some(offset) = config.phys_offset {
        check_offset(offset, bytes, backing)?;
    }
    config.region.affordable(true)?;
    let mut rounds = Vec::new();
    config.common.each(report, &config.common.rounds(), |report, round| {
        rounds.push(run_round(report, config, index, round.is_first())?);
        Ok(())
    })?;
    Ok(rounds)
}

fn run_round(
    report: &mut Report,
    config: &Config,
    index: Option<&str>,
    first: bool,
) -> Result<Stages, Error> {
    let kvm = vm::open()?;
    let Region { bytes, backing, vcpus } = config.region;
    let memory = MemoryConfig { backing, ..MemoryConfig::new(bytes) };
    let mut memory = match config.first_touch {
        FirstTouch::Before => populated(memory)?,
        FirstTouch::Guest | FirstTouch::Together => Memory::map(vellum_kvm::arch::layout::RAM, memory)?,
    };
    place(&mut memory, config.phys_offset)?;
    let together = config.first_touch == FirstTouch::Together;
    let missing = together.then(|| reported(Mode::Missing, &memory.mapping, 0, bytes)).transpose()?;
    let guest = Guest::build(
        &kvm,
        memory,
        GuestConfig {
            code: touch_code(),
            page: config.common.page(&report.host),
            ..config.common.guest(vcpus)
        },
    )?;
    let page = backing.best_mapping();
    if config.execute {
        let slots = guest.vm.memory.slots().iter();
        let mut pages = slots.flat_map(|slot| (slot.gpa()..slot.gpa() + slot.bytes()).step_by(page as usize));
        let write = |at| guest.vm.memory.guest.write_slice(&COME_BACK, GuestAddress(at + INSTRUCTION));
        pages.try_for_each(write).expect("valid slots");
    }
    let counted = Counted::start(&guest, report);
    let creates = || stage(&guest, |vcpu| Plan::every(page, bytes, vcpu % 2 == 0));
    let (create, faults_together) = match missing {
        Some(uffd) => {
            let (create, faults) = held_until_all_wait(&uffd, &guest, page, creates)?;
            let least = bytes / page * vcpus as u64;
            if faults < least {
                report.fail(index.map(str::to_owned), Premise::NotMissing { faults, least });
            }
            (create, Some(faults))
        }
        None => (creates()?, None),
    };
    huge_premise(report, backing, config.common.page(&report.host), &counted.now());
    let enable = logging(&guest, kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES)?;
    let executes =
        |_| Plan { offset: INSTRUCTION, access: Access::Execute, ..Plan::every(page, bytes, false) };
    let execute = config.execute.then(|| stage(&guest, executes)).transpose()?;
    let update = stage(&guest, |_| match page == host_page() {
        true => Plan::every(page, bytes, true),
        false => Plan {
            blocks: bytes / page,
            block: page,
            first: true,
            offset: page / 2,
            run: page / 2 / PAGE_SIZE,
            ..Plan::every(PAGE_SIZE, bytes, false)
        },
    })?;
    let disable = logging(&guest, 0)?;
    // More exits than one per page of the backing's size mean that vCPUs met mappings under
    // rebuild. Host interrupts also count as exits.
    let exits = || counted.now().get("exits").copied();
    let before = exits();
    let adjust = stage(&guest, |_| Plan::every(PAGE_SIZE, bytes, false))?;
    let adjust_exits = before.and_then(|before| Some(exits()?.saturating_sub(before)));
    // The first round's counters represent all.
    if first {
        let now = counted.now();
        counted.finish(report, &now, index);
    }
    Ok(Stages { create, faults_together, enable, execute, update, disable, adjust, adjust_exits })
}

/// Runs every vCPU through its plan. Returns the time until the last was done.
fn stage(guest: &Guest, plan: impl Fn(usize) -> Plan) -> Result<f64, Error> {
    (0..guest.vcpus.len()).for_each(|vcpu| plan(vcpu).program(guest, vcpu));
    let start = Instant::now();
    guest.resume();
    guest.wait_all_rung()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Runs `creates` while each missing page arrives only when every vCPU waits for it. Returns its
/// result and the number of faults handled.
fn held_until_all_wait(
    uffd: &Uffd,
    guest: &Guest,
    page: u64,
    creates: impl FnOnce() -> Result<f64, Error>,
) -> Result<(f64, u64), Error> {
    let quit = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(|e| Error::Host("eventfd", e))?;
    thread::scope(|scope| {
        let answers = scope.spawn(|| {
            let answered = answer_all(uffd, &guest.vm.memory.mapping, page, guest.vcpus.len(), &quit);
            // If the handler fails, vCPUs wait forever, so the process exits.
            answered.unwrap_or_else(|error| {
                eprintln!("vellum: userfaultfd handler: {error}");
                std::process::exit(1);
            })
        });
        let created = creates();
        if created.is_err() {
            // A vCPU that waits for others that have stopped would not leave KVM_RUN.
            let _ = uffd.unregister(&guest.vm.memory.mapping, 0, guest.vm.memory.mapping.len());
        }
        quit.write(1).map_err(|e| Error::Host("eventfd", e))?;
        let faults = answers.join().expect("the handler does not panic");
        Ok((created?, faults))
    })
}

/// Fills each page of `mapping` once `vcpus` threads wait for it, until `quit`. Returns the number
/// of faults resolved.
fn answer_all(uffd: &Uffd, mapping: &Mapping, page: u64, vcpus: usize, quit: &EventFd) -> io::Result<u64> {
    let zeroes = vec![0; page as usize];
    let base = mapping.as_ptr() as u64;
    let mut waiting: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
    let mut faults = [(0, 0); BATCH];
    let mut answered = 0;
    while uffd.wait(quit)? {
        let count = uffd.take_faults(&mut faults)?;
        for (address, thread) in &faults[..count] {
            let offset = (address - base) / page * page;
            let threads = waiting.entry(offset).or_default();
            threads.insert(*thread);
            if threads.len() == vcpus {
                waiting.remove(&offset);
                uffd.copy(mapping, offset, &zeroes, page)?;
                answered += vcpus as u64;
            }
        }
    }
    Ok(answered)
}

/// Sets the logging flags of RAM's memslots. Returns how long that took.
fn logging(guest: &Guest, flags: u32) -> Result<f64, Error> {
    let start = Instant::now();
    guest.vm.memory.slots().iter().try_for_each(|slot| guest.vm.memslots().set(slot, flags))?;
    Ok(start.elapsed().as_secs_f64())
}
