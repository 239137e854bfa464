//! The question under which KVM came to write-protect huge pages lazily, as one table: where the cost of a dirty log goes on
//! 4 KiB, transparent huge and reserved huge pages, when everything is protected at once (manual protection) and when
//! all pages are dirty at first (initially-all-set).
//!
//! Each column is a machine of its own, measured as [`super`] does. Rows follow the log's life: what the guest pays is in
//! the passes and their latencies, what the host pays is in between.

use std::fmt;

use super::Config;
use crate::bench::Error;
use crate::dirty::Method;
use crate::host::hugepages;
use crate::memory::Backing;
use crate::report::{Histogram, Report, Series};

/// A column: memory and how it is logged.
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

/// Measures every column; `config` gives what they do not.
pub fn run(config: &Config) -> Result<Report, Error> {
    let mut report = config.common.report("dirty-log");
    report.ask("preset", "lazy");
    let mut asked = false;
    config.common.each(&mut report, COLUMNS, |report, column| {
        if let Backing::Hugetlb(size) = column.backing
            && let Err(shortage) = hugepages::check(size, config.region.total(false))
        {
            report.notes.push(format!("{column} was not measured: {shortage}"));
            return Ok(());
        }
        let mut config = Config { method: Some(column.method), ..config.clone() };
        config.region.backing = column.backing;
        let measured = super::run(&config)?;
        if !asked {
            asked = true;
            let same = |name: &str| !["backing", "tracker"].contains(&name);
            report.asked.extend(
                measured.asked.iter().filter(|(name, _)| same(name)).map(|(k, v)| (k.clone(), v.clone())),
            );
        }
        add(report, column.name, &measured, config.continuous.is_some(), config.iterations);
        Ok(())
    })?;
    Ok(report)
}

/// Two figures into one, round by round; none where either is missing, as after an interrupt it may be.
fn each(a: Option<Vec<f64>>, b: Option<Vec<f64>>, of: impl Fn(f64, f64) -> f64) -> Option<Vec<f64>> {
    Some(a?.into_iter().zip(b?).map(|(a, b)| of(a, b)).collect())
}

/// Adds what was measured of one column, with the spread of its rounds.
fn add(report: &mut Report, column: &str, measured: &Report, continuous: bool, iterations: u32) {
    let value = |name: &str| -> Option<Vec<f64>> {
        let figure = measured.figures.iter().find(|figure| figure.name() == name)?;
        Some(figure.samples().into_owned())
    };
    let mut put = |row: &str, unit: &str, rounds: Option<Vec<f64>>| {
        let name = format!("{column}[{row}]");
        match rounds.as_deref() {
            None => {}
            Some([value]) => report.figure(name, unit, *value),
            Some(rounds) => report.spread(name, unit, rounds),
        }
    };
    if continuous {
        for (row, name) in [
            ("enable", "enable_logging"),
            ("get, average", "get_dirty_log_average"),
            ("get, longest", "get_dirty_log_longest"),
            ("clear, average", "clear_dirty_log_average"),
            ("clear, longest", "clear_dirty_log_longest"),
            ("disable", "disable_logging"),
        ] {
            put(row, "s", value(name));
        }
        for phase in ["before", "during", "after"] {
            put(&format!("progress {phase}"), "pages/s", value(&format!("progress[{phase}]")));
        }
        put("collections", "", value("collections"));
    } else {
        let (before, enable, disable) =
            (value("dirty_memory[before]"), value("enable_logging"), value("disable_logging"));
        put("write, no log", "s", before.clone());
        put("enable", "s", enable.clone());
        let mut sum = enable;
        for pass in 0..iterations {
            let write = value(&format!("dirty_memory[{pass}]"));
            let [get, clear] = ["get", "clear"].map(|part| value(&format!("{part}_dirty_log[{pass}]")));
            let collect = each(get, clear, |get, clear| get + clear);
            put(&format!("write {}", pass + 1), "s", write.clone());
            put(&format!("collect {}", pass + 1), "s", collect.clone());
            sum = [write, collect].into_iter().fold(sum, |sum, part| each(sum, part, |sum, part| sum + part));
        }
        put("disable", "s", disable.clone());
        put("logged, sum", "s", each(sum, disable, |sum, disable| sum + disable));
        put("write, after", "s", value("dirty_memory[after]"));
        // The guest's speed in each pass, against that without a log.
        for pass in 0..iterations {
            let write = value(&format!("dirty_memory[{pass}]"));
            let speed = each(before.clone(), write, |before, pass| 100.0 * before / pass);
            put(&format!("speed {}", pass + 1), "%", speed);
        }
    }
    for quantile in ["p50", "p99", "p99.9", "max"] {
        for phase in ["before", "during"] {
            let latency = value(&format!("write_latency_{quantile}[{phase}]"));
            put(&format!("{quantile} {phase}"), "ns", latency);
        }
    }
    for when in ["populated", "logged", "after"] {
        put(&format!("2m mapped, {when}"), "pages", value(&format!("mapped_2m[{when}]")));
    }
    let labelled = |text: &String| format!("{column}: {text}");
    report.invalid.extend(measured.invalid.iter().map(labelled));
    let notes: Vec<String> = measured.notes.iter().map(labelled).collect();
    report.notes.extend(notes);
    let faults = measured.counters.iter().find(|counter| counter.name == "pf_taken");
    if let Some(counter) = faults {
        report.figure(format!("{column}[faults]"), "", counter.after.saturating_sub(counter.before) as f64);
    }
    for histogram in measured.histograms.iter().filter(|histogram| histogram.name.contains("during")) {
        report
            .histograms
            .push(Histogram { name: format!("write_latency_during[{column}]"), ..histogram.clone() });
    }
    for series in &measured.series {
        report.series.push(Series { name: format!("{}_{column}", series.name), ..series.clone() });
    }
}
