//! `vellum bench dirty-log`.

use std::time::Duration;

use support::hosts;
use support::hosts::kvm;
use support::{Failed, LIMIT, ensure, eventually, test};
use vellum_bench::{Common, Region, dirty_log};
use vellum_guests::Order;
use vellum_kvm::dirty::Method;
use vellum_kvm::memory::Backing;
use vellum_sys::diagnose::{Diagnose, Whose};

use crate::has;

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

pub fn bench(method: Method) -> Result<(), Failed> {
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
