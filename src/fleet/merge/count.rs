//! Adds a task's result to the sums.

use super::merged::{Alike, HOSTS, KINDS, Kind, MEANS, Merged, NAMED, Tried, short};
use crate::result::Header;
use vellum_report::{Report, Status, printable};

/// The longest reason of a case that is shown, in characters.
const SAID: usize = 400;

/// The most kernels of one host to list. A host may be rebooted between tasks.
const KERNELS: usize = 16;

/// The number of lost pages in a test's result.
pub(super) fn lost(report: &Report) -> f64 {
    let figures = |name: &str| {
        report.figures.iter().filter(|figure| figure.label.name == name).map(|figure| figure.value()).sum()
    };
    match report.name.as_str() {
        "test dirty-log" => figures("pages_lost"),
        name if name.starts_with("test ") => figures("lost"),
        _ => 0.0,
    }
}

/// Counts a run of any attempt: how often its test lost pages on this host and kernel.
pub(super) fn tried(header: &Header, report: &Report, lost: f64, merged: &mut Merged) {
    let of =
        Tried { test: header.test.clone(), node: header.node.clone(), kernel: report.host.kernel.clone() };
    if merged.tried.len() >= HOSTS && !merged.tried.contains_key(&of) {
        merged.too_many = true;
        return;
    }
    let [runs, lossy] = merged.tried.entry(of).or_default();
    *runs += 1;
    *lossy += u64::from(lost > 0.0);
}

/// Adds the result of the attempt that counts.
pub(super) fn count(header: &Header, reports: &[Report], merged: &mut Merged) {
    merged.ended += 1;
    let full = |known: bool, so_many: usize| !known && so_many >= HOSTS;
    if full(merged.vellums.contains_key(&header.vellum), merged.vellums.len())
        || full(merged.hosts.contains_key(&header.node), merged.hosts.len())
    {
        merged.too_many = true;
        return;
    }
    *merged.vellums.entry(header.vellum.clone()).or_default() += 1;
    merged.hosts.entry(header.node.clone()).or_default().tasks += 1;
    for (run, report) in header.runs.iter().zip(reports) {
        cases(header, run.seed, report, merged);
        let emulated = if report.host.emulated { " (emulated)" } else { "" };
        let cpu = format!("{}{emulated}", report.host.cpu);
        match report.name.as_str() {
            "test dirty-log" => events(header, report, &cpu, merged),
            name if name.starts_with("bench ") && report.invalid.is_empty() => {
                figures(header, report, &cpu, merged)
            }
            _ => {}
        }
    }
}

/// Adds the cases of a run.
fn cases(header: &Header, seed: u64, report: &Report, merged: &mut Merged) {
    let lossy = lost(report);
    let host = merged.hosts.entry(header.node.clone()).or_default();
    if host.kernels.len() < KERNELS {
        host.kernels.insert(report.host.kernel.clone());
    }
    host.cpu.clone_from(&report.host.cpu);
    host.lost += lossy;
    for case in report.told_cases() {
        match case.status {
            Status::Pass => host.cases[0] += 1,
            Status::Skip => {
                host.cases[2] += 1;
                let reason = short(case.reason.as_deref().unwrap_or("no reason given"), SAID);
                if merged.skipped.len() < NAMED || merged.skipped.contains_key(&reason) {
                    *merged.skipped.entry(reason).or_default() += 1;
                }
            }
            Status::Fail | Status::Timeout | Status::Crash => {
                host.cases[1] += 1;
                // A case with lost pages is reported as that.
                if lossy == 0.0 {
                    merged.failed.add(|| {
                        let [why, name] = [case.why(), case.name].map(|text| short(&text, SAID));
                        let (node, name, why) = (printable(&header.node), printable(&name), printable(&why));
                        format!("task {} on {node}, seed {seed}, {name}: {why}", header.index)
                    });
                }
            }
        }
    }
}

/// Adds the oracle's events, by tracker and backing.
fn events(header: &Header, report: &Report, cpu: &str, merged: &mut Merged) {
    for figure in &report.figures {
        let Some((tracker, backing)) = figure.label.index.as_deref().and_then(|index| index.split_once('/'))
        else {
            continue;
        };
        let kernel = report.host.kernel.clone();
        let alike = Alike { kernel, tracker: tracker.into(), backing: backing.into(), cpu: cpu.into() };
        if merged.events.len() >= KINDS && !merged.events.contains_key(&alike) {
            merged.too_many = true;
            continue;
        }
        let of = merged.events.entry(alike).or_default();
        match figure.label.name.as_str() {
            "events" => {
                of.events += figure.value();
                merged.hosts.entry(header.node.clone()).or_default().events += figure.value();
            }
            "pages_lost" => of.lost += figure.value(),
            _ => {}
        }
    }
}

/// Adds the figures of a benchmark.
fn figures(header: &Header, report: &Report, cpu: &str, merged: &mut Merged) {
    for figure in &report.figures {
        let kind = Kind {
            test: header.test.clone(),
            figure: figure.label.to_string(),
            unit: figure.unit.clone(),
            kernel: report.host.kernel.clone(),
            cpu: cpu.into(),
        };
        if merged.figures.len() >= KINDS && !merged.figures.contains_key(&kind) {
            merged.too_many = true;
            continue;
        }
        let hosts = merged.figures.entry(kind).or_default();
        if !hosts.contains_key(&header.node) {
            if merged.means >= MEANS {
                merged.too_many = true;
                continue;
            }
            merged.means += 1;
        }
        let mean = hosts.entry(header.node.clone()).or_default();
        mean.count += 1;
        mean.sum += figure.value();
    }
}
