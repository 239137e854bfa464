//! Compares in one table where the cost of a dirty log goes, on 4 KiB, transparent huge and
//! reserved huge pages: if everything is write-protected at once (manual protection), and if all
//! pages start dirty (initially-all-set). This question led KVM to write-protect huge pages lazily.
//!
//! Each column is its own machine, measured as [`super`] does. Rows follow the life of the log.
//! Passes and their latencies are the guest's cost, the rows between are the host's.

use std::fmt;

use super::Config;
use super::measured::{Parts, Phase, QUANTILES, Round, When};
use crate::Error;
use crate::of_rounds;
use vellum_guests::latency::BUCKET_RESOLUTION;
use vellum_host::hugepages;
use vellum_kvm::dirty::Method;
use vellum_kvm::memory::Backing;
use vellum_report::{Failed, Figure, Histogram, Label, Report, Series};

/// A column: the memory and the method.
struct Column {
    name: &'static str,
    backing: Backing,
    method: Method,
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

const COLUMNS: [Column; 6] = {
    const fn column(name: &'static str, backing: Backing, method: Method) -> Column {
        Column { name, backing, method }
    }
    let large = Backing::Hugetlb(2 << 20);
    [
        column("4k", Backing::Anonymous, Method::ManualProtect),
        column("4k_all_set", Backing::Anonymous, Method::InitiallySet),
        column("thp", Backing::Thp, Method::ManualProtect),
        column("thp_all_set", Backing::Thp, Method::InitiallySet),
        column("2m", large, Method::ManualProtect),
        column("2m_all_set", large, Method::InitiallySet),
    ]
};

/// Measures all columns. `config` has the other parameters.
pub fn run(config: &Config) -> Result<Report, Error> {
    let mut report = config.common.report("dirty-log");
    report.ask("preset", "lazy");
    let mut asked = false;
    config.common.each(&mut report, &COLUMNS, |report, column| {
        if let Backing::Hugetlb(size) = column.backing
            && let Err(shortage) = hugepages::check(size, config.region.total(false))
        {
            report.note(format!("{column} was not measured: {shortage}"));
            return Ok(());
        }
        let mut config = Config { method: Some(column.method), ..config.clone() };
        config.region.backing = column.backing;
        let mut measured = config.common.report("dirty-log");
        let rounds = super::measure(&mut measured, &config)?;
        if !asked {
            asked = true;
            let same = |name: &str| !["backing", "tracker"].contains(&name);
            report.asked.extend(
                measured.asked.iter().filter(|(name, _)| same(name)).map(|(k, v)| (k.clone(), v.clone())),
            );
        }
        add(report, column.name, measured, &rounds);
        Ok(())
    })?;
    let row = if config.continuous.is_some() { "progress during" } else { "logged, sum" };
    report.set_headline(Label::of("thp_all_set", row));
    Ok(report)
}

/// Adds the results of one column with the samples of its rounds.
fn add(report: &mut Report, column: &'static str, measured: Report, rounds: &[Round]) {
    figures(report, column, rounds);
    let of_column =
        |part: Option<String>| Some(part.map_or(column.into(), |part| format!("{column}, {part}")));
    for Failed { part, premise } in measured.invalid {
        report.fail(of_column(part), premise);
    }
    measured.notes.into_iter().for_each(|note| report.note(format!("{column}: {note}")));
    if let Some(rest) = measured.cut_short {
        report.cut_short = Some(format!("{column}: {rest}"));
    }
    if let Some(counter) = measured.counters.iter().find(|counter| counter.name == "pf_taken") {
        report.figure(Label::of(column, "faults"), "", counter.grown() as f64);
    }
    let Some(first) = rounds.first() else { return };
    if let Some(histogram) = first.latency(Phase::During) {
        let (name, index) = ("write_latency_during".into(), Some(column.into()));
        report.histograms.push(Histogram { name, index, ..histogram.clone() });
    }
    for series in &first.pictures.series {
        report.series.push(Series { name: format!("{}_{column}", series.name), ..series.clone() });
    }
}

fn figures(report: &mut Report, column: &str, rounds: &[Round]) {
    let mut put = |row: &str, unit: &str, of: &dyn Fn(&Round) -> Option<f64>| {
        report.samples(Label::of(column, row), unit, of_rounds(rounds, of));
    };
    let average = |r: &Round, part: fn(Parts) -> f64| {
        r.continuous().map(|c| part(c.total) / c.collections.max(1) as f64)
    };
    put("write, no log", "s", &|r| Some(r.lockstep()?.before));
    put("enable", "s", &|r| Some(r.enable));
    put("get, average", "s", &|r| average(r, |parts| parts.get));
    put("get, longest", "s", &|r| Some(r.continuous()?.longest.get));
    put("clear, average", "s", &|r| average(r, |parts| parts.clear));
    put("clear, longest", "s", &|r| Some(r.continuous()?.longest.clear));
    let passes = rounds.iter().filter_map(Round::lockstep).map(|l| l.passes.len()).max().unwrap_or(0);
    for pass in 0..passes {
        put(&format!("write {}", pass + 1), "s", &|r| Some(r.pass(pass)?.write));
        put(&format!("collect {}", pass + 1), "s", &|r| {
            r.pass(pass).map(|pass| pass.collected.get + pass.collected.clear)
        });
    }
    put("disable", "s", &|r| r.disable);
    put("logged, sum", "s", &|r| {
        let of_pass = r.lockstep()?.passes.iter().map(|p| p.write + p.collected.get + p.collected.clear);
        Some(r.enable + of_pass.sum::<f64>() + r.disable?)
    });
    put("write, after", "s", &|r| r.lockstep()?.after);
    put("progress before", "pages/s", &|r| Some(r.continuous()?.before));
    put("progress during", "pages/s", &|r| Some(r.continuous()?.during));
    put("progress after", "pages/s", &|r| Some(r.continuous()?.after));
    put("collections", "", &|r| Some(r.continuous()?.collections as f64));
    // The guest's speed in each pass, relative to a pass without logging.
    for pass in 0..passes {
        put(&format!("speed {}", pass + 1), "%", &|r| {
            Some(100.0 * r.lockstep()?.before / r.pass(pass)?.write)
        });
    }
    for (name, q) in QUANTILES {
        for phase in [Phase::Before, Phase::During] {
            let samples = of_rounds(rounds, |r| r.latency(phase)?.quantile(q));
            let label = Label::of(column, format_args!("{name} {}", phase.name()));
            report.push(Figure::sampled(label, "ns", samples).resolved_to(BUCKET_RESOLUTION));
        }
    }
    let mut put = |row: String, unit: &str, of: &dyn Fn(&Round) -> Option<f64>| {
        report.samples(Label::of(column, row), unit, of_rounds(rounds, of));
    };
    for phase in [Phase::Before, Phase::During] {
        put(format!("max {}", phase.name()), "ns", &|r| r.latency(phase)?.max());
    }
    for when in [When::Populated, When::Logged, When::After] {
        put(format!("2m mapped, {}", when.name()), "pages", &|r| Some(r.mapped(when)?.large as f64));
    }
}
