//! `page-table`: what it costs KVM to make, to change and to rebuild the mappings of a region that all vCPUs share.
//!
//! The stages of the KVM selftest kvm_page_table_test. The host has populated memory before, so that KVM's work is
//! measured and not the host's first touch, unless the guest is to do that too, as in the selftest:
//! *create* (one access to each page of the backing's size; even vCPUs write, odd ones read), *update* (with dirty
//! logging on: small pages are written again; of each huge page the first 4 KiB are written, then its second half is
//! read, so that a block becomes a table), and *adjust*, which was once called rebuild (logging off: every 4 KiB page is
//! read, so that tables may become blocks again). *execute*, where it is asked for, comes before *update*: an instruction
//! in each page is executed, which an Arm host has mapped to be written and not to be executed.
//!
//! vCPUs that create the same mapping at once may each do work of which one's is enough. How often they meet is chance,
//! unless their first touches are held until all of them wait for the same page: [`FirstTouch::Together`].

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

/// What to measure.
#[derive(Clone, Debug)]
pub struct Config {
    /// What all benchmarks have.
    pub common: Common,
    /// The memory that all vCPUs share.
    pub region: Region,
    /// When the host's memory is there.
    pub first_touch: FirstTouch,
    /// Once memory is logged, has an instruction in each page of the backing's size executed.
    pub execute: bool,
    /// Where memory starts in the guest's physical address space.
    pub phys_offset: Option<u64>,
}

/// When the host's memory is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstTouch {
    /// Before the guest runs.
    Before,
    /// Once the guest touches it, in *create*.
    Guest,
    /// In *create*, page by page, as soon as every vCPU waits for the page: userfaultfd tells who does.
    Together,
}

/// Where in a page the instruction is that is executed: behind what is written.
const INSTRUCTION: u64 = 16;

/// A row of the tables with which the arm64 stage-2 series was posted (v2, March 2021, Kunpeng 920): backing, bytes,
/// vCPUs.
const SEED: [(&str, Backing, u64, usize); 6] = [
    ("anonymous-1g-80", Backing::Anonymous, 1 << 30, 80),
    ("thp-20g-40", Backing::Thp, 20 << 30, 40),
    ("thp-20g-20", Backing::Thp, 20 << 30, 20),
    ("hugetlb-1g-1g-80", Backing::Hugetlb(1 << 30), 1 << 30, 80),
    ("hugetlb-1g-20g-40", Backing::Hugetlb(1 << 30), 20 << 30, 40),
    ("hugetlb-1g-20g-20", Backing::Hugetlb(1 << 30), 20 << 30, 20),
];

/// Measures.
pub fn run(config: &Config) -> Result<Report, Error> {
    let Region { bytes, backing, vcpus } = config.region;
    config.region.check(backing.best_mapping())?;
    if config.first_touch == FirstTouch::Together && backing == Backing::Thp {
        let why = "thp: its missing pages come as small ones; anonymous or hugetlb-2m would work";
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
    Ok(report)
}

/// Measures every row of the seed's tables, scaled to this host, its 80 vCPUs to `most`; `config` gives what they do not.
pub fn run_seed(config: &Config, most: Option<usize>) -> Result<Report, Error> {
    let mut report = config.common.report("page-table");
    report.ask("preset", "seed");
    describe(&mut report, config);
    // The largest row in a quarter of the available memory, by a power of two; two vCPUs a CPU where the seed had 80.
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
            // What was measured before it stands.
            Err(error) if error.interrupted().is_some() && !report.figures.is_empty() => {
                report.cut_short =
                    Some(format!("interrupted in {label}, which was not measured, nor what comes after it"));
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

/// One round: the seconds of its stages, in their order, and the faults of vCPUs that were held to fault together.
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

/// The figures of `rounds`, under `index` where they are a row of several.
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
        pages.try_for_each(write).expect("its own slots");
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
    // More than one a page of the backing's size, where vCPUs meet mappings that others are about to rebuild; and what the host
    // interrupts is an exit too.
    let exits = || counted.now().get("exits").copied();
    let before = exits();
    let adjust = stage(&guest, |_| Plan::every(PAGE_SIZE, bytes, false))?;
    let adjust_exits = before.and_then(|before| Some(exits()?.saturating_sub(before)));
    // One round's counters stand for all.
    if first {
        let now = counted.now();
        counted.finish(report, &now, index);
    }
    Ok(Stages { create, faults_together, enable, execute, update, disable, adjust, adjust_exits })
}

/// Has every vCPU follow its plan, and returns how long that took until the last was done.
fn stage(guest: &Guest, plan: impl Fn(usize) -> Plan) -> Result<f64, Error> {
    (0..guest.vcpus.len()).for_each(|vcpu| plan(vcpu).program(guest, vcpu));
    let start = Instant::now();
    guest.resume();
    guest.wait_all_rung()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Has `creates` done while each page that is missing comes once every vCPU waits for it. Returns what it returned, and the
/// faults that were answered.
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
            // A handler that fails leaves vCPUs waiting for ever: nothing sensible is left to be done.
            answered.unwrap_or_else(|error| {
                eprintln!("vellum: userfaultfd handler: {error}");
                std::process::exit(1);
            })
        });
        let created = creates();
        if created.is_err() {
            // A vCPU that waits for others which have stopped would not leave KVM_RUN.
            let _ = uffd.unregister(&guest.vm.memory.mapping, 0, guest.vm.memory.mapping.len());
        }
        quit.write(1).map_err(|e| Error::Host("eventfd", e))?;
        let faults = answers.join().expect("the answering thread does not panic");
        Ok((created?, faults))
    })
}

/// Fills each page of `mapping` once `vcpus` threads wait for it, until `quit`; returns how many waits ended by that.
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

/// Switches dirty logging of RAM's memslots, and returns how long that took.
fn logging(guest: &Guest, flags: u32) -> Result<f64, Error> {
    let start = Instant::now();
    guest.vm.memory.slots().iter().try_for_each(|slot| guest.vm.memslots().set(slot, flags))?;
    Ok(start.elapsed().as_secs_f64())
}
