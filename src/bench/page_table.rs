//! `page-table`: what it costs KVM to make, to change and to rebuild the mappings of a region that all vCPUs share.
//!
//! The stages of the KVM selftest kvm_page_table_test. The host has populated memory before, so that KVM's work is
//! measured and not the host's first touch, unless the guest is to do that too, as in the selftest:
//! *create* (one access to each page of the backing's size; even vCPUs write, odd ones read), *update* (with dirty
//! logging on: small pages are written again; of each huge page the first 4 KiB are written, then its second half is
//! read, so that a block becomes a table), and *adjust*, which was once called rebuild (logging off: every 4 KiB page is
//! read, so that tables may become blocks again). *execute*, where it is asked for, comes before *update*: an instruction
//! in each page is executed, which an Arm host has mapped to be written and not to be executed.

use std::time::Instant;

use vm_memory::{Bytes, GuestAddress};

use super::region::{check_offset, place, populated};
use super::{Common, Counted, Error, Region, huge_premise, of_rounds};
use crate::guests::Guest;
use crate::guests::guest::GuestConfig;
use crate::guests::program::{COME_BACK, touch_code};
use crate::guests::touch::{Access, Plan};
use crate::host::hugepages;
use crate::memory::{Backing, Memory, MemoryConfig, short_size};
use crate::report::{Label, Report};
use crate::sys::mmap::PAGE_SIZE;
use crate::vm;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Config {
    /// What all benchmarks have.
    pub common: Common,
    /// The memory that all vCPUs share.
    pub region: Region,
    /// Leaves the host's first touch of memory to the guest, and to *create*.
    pub unpopulated: bool,
    /// Once memory is logged, has an instruction in each page of the backing's size executed.
    pub execute: bool,
    /// Where memory starts in the guest's physical address space.
    pub phys_offset: Option<u64>,
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

/// Measures every row of the seed's tables, scaled to this host; `config` gives what they do not.
pub fn run_seed(config: &Config) -> Result<Report, Error> {
    let mut report = config.common.report("page-table");
    report.ask("preset", "seed");
    describe(&mut report, config);
    // The largest row in a quarter of the available memory, by a power of two; two vCPUs a CPU where the seed had 80.
    let available = crate::host::topology::memory().available;
    let mut shrink = 1;
    while (20 << 30) / shrink > available / 4 {
        shrink *= 2;
    }
    let cpus = report.host.cpus as usize;
    report.ask("memory_scale", format!("1/{shrink}"));
    report.ask("vcpu_scale", format!("{}/80", 2 * cpus));
    for (label, backing, bytes, vcpus) in SEED {
        let page = backing.best_mapping();
        let bytes = (bytes / shrink / page).max(1) * page;
        let vcpus = (vcpus * 2 * cpus / 80).max(1);
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
    report.ask("populated", !config.unpopulated);
    if config.execute {
        report.ask("execute", true);
    }
    if let Some(offset) = config.phys_offset {
        report.ask("phys_offset", format!("{offset:#x}"));
    }
    config.common.ask(report);
}

/// The seconds of one round's stages, in their order.
struct Stages {
    create: f64,
    enable: f64,
    execute: Option<f64>,
    update: f64,
    disable: f64,
    adjust: f64,
}

/// The figures of `rounds`, under `index` where they are a row of several.
fn add(report: &mut Report, index: Option<&str>, rounds: &[Stages]) {
    let mut put = |name: &str, of: fn(&Stages) -> Option<f64>| {
        let label = Label { name: name.into(), index: index.map(str::to_owned) };
        if rounds.iter().any(|stages| of(stages).is_some()) {
            report.samples(label, "s", of_rounds(rounds, of));
        }
    };
    put("create_mappings", |stages| Some(stages.create));
    put("enable_logging", |stages| Some(stages.enable));
    put("execute", |stages| stages.execute);
    put("update_mappings", |stages| Some(stages.update));
    put("disable_logging", |stages| Some(stages.disable));
    put("adjust_mappings", |stages| Some(stages.adjust));
}

fn measure(report: &mut Report, config: &Config, index: Option<&str>) -> Result<Vec<Stages>, Error> {
    let Region { bytes, backing, .. } = config.region;
    if let Some(offset) = config.phys_offset {
        check_offset(offset, bytes, backing)?;
    }
    config.region.affordable(true)?;
    let mut rounds = Vec::new();
    config.common.each(report, &config.common.rounds(), |report, round| {
        rounds.push(one(report, config, index, round.is_first())?);
        Ok(())
    })?;
    Ok(rounds)
}

fn one(report: &mut Report, config: &Config, index: Option<&str>, first: bool) -> Result<Stages, Error> {
    let kvm = vm::open()?;
    let Region { bytes, backing, vcpus } = config.region;
    let memory = MemoryConfig { backing, ..MemoryConfig::new(bytes) };
    let mut memory =
        if config.unpopulated { Memory::map(crate::arch::layout::RAM, memory)? } else { populated(memory)? };
    place(&mut memory, config.phys_offset)?;
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
    let create = stage(&guest, |vcpu| Plan::every(page, bytes, vcpu % 2 == 0))?;
    huge_premise(report, backing, config.common.page(&report.host), &counted.now());
    let enable = logging(&guest, kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES)?;
    let executes =
        |_| Plan { offset: INSTRUCTION, access: Access::Execute, ..Plan::every(page, bytes, false) };
    let execute = config.execute.then(|| stage(&guest, executes)).transpose()?;
    let update = stage(&guest, |_| match page {
        PAGE_SIZE => Plan::every(PAGE_SIZE, bytes, true),
        _ => Plan {
            blocks: bytes / page,
            block: page,
            first: true,
            offset: page / 2,
            run: page / 2 / PAGE_SIZE,
            ..Plan::every(PAGE_SIZE, bytes, false)
        },
    })?;
    let disable = logging(&guest, 0)?;
    let adjust = stage(&guest, |_| Plan::every(PAGE_SIZE, bytes, false))?;
    // One round's counters stand for all.
    if first {
        let now = counted.now();
        counted.finish(report, &now, index);
    }
    Ok(Stages { create, enable, execute, update, disable, adjust })
}

/// Has every vCPU follow its plan, and returns how long that took until the last was done.
fn stage(guest: &Guest, plan: impl Fn(usize) -> Plan) -> Result<f64, Error> {
    (0..guest.vcpus.len()).for_each(|vcpu| plan(vcpu).program(guest, vcpu));
    let start = Instant::now();
    guest.resume();
    guest.wait_all_rung()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Switches dirty logging of RAM's memslots, and returns how long that took.
fn logging(guest: &Guest, flags: u32) -> Result<f64, Error> {
    let start = Instant::now();
    guest.vm.memory.slots().iter().try_for_each(|slot| guest.vm.memslots().set(slot, flags))?;
    Ok(start.elapsed().as_secs_f64())
}
