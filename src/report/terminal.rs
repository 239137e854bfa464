//! The terminal form and the Markdown form: the verdict, then figures, then details.
//!
//! They have no colours or escape codes, so a pipe, a file and a screen get the same. Text is as
//! wide as the terminal, or [`WIDTH`] columns without one. Columns that do not fit follow below.

use std::collections::HashSet;

use serde_json::Value;

use super::figure::median;
use super::page::{Page, words};
use super::table::{Group, ROWS, Table, cells, common_scale, groups};
use super::units::{Scale, grouped, humanised};
use super::{Counter, Figure, Histogram, Report, Series, printable};
use vellum_host::{Facts, Paging};
use vellum_sys::quote;

pub use super::page::{Extent, Form};

/// Fits a mail and half a screen.
pub const WIDTH: usize = 100;

/// The most notes in a short form.
const NOTES: usize = 4;

/// Renders the results in this form. A short form begins with all verdicts, the worst first.
pub fn render(reports: &[Report], form: Form, extent: Extent) -> String {
    let mut page = Page::new(form);
    match extent {
        Extent::Short(more) => {
            let mut verdicts: Vec<_> = reports.iter().map(|report| (report.verdict(), report)).collect();
            verdicts.sort_by_key(|(verdict, _)| std::cmp::Reverse(verdict.outcome));
            verdicts.iter().for_each(|(verdict, _)| page.answer(verdict));
            for (verdict, report) in &verdicts {
                page.facts(verdict);
                notes(&mut page, &report.notes, NOTES);
            }
            if let Some(report) = reports.first() {
                if form == Form::Markdown {
                    page.command(&command_line(&report.command));
                }
                page.text(&format!("{}.  {more}", in_short(&report.host)));
            }
        }
        Extent::Whole => reports.iter().for_each(|report| whole(&mut page, report)),
    }
    page.finish()
}

fn whole(page: &mut Page, report: &Report) {
    page.gap();
    page.verdict(&report.verdict());
    notes(page, &report.notes, usize::MAX);
    page.gap();
    page.heading(&report.name, &format!("vellum {}", report.vellum));
    page.command(&command_line(&report.command));
    let asked: Vec<_> =
        report.asked.iter().map(|(k, v)| format!("{}={}", printable(k), asked_value(v))).collect();
    page.line("asked", &asked, "  ");
    page.line("host", &host(&report.host), ", ");
    figures(page, &report.figures);
    histograms(page, &report.histograms);
    series(page, report);
    counters(page, &report.counters);
    if !report.invalid.is_empty() {
        page.gap();
        page.line("INVALID", &words("do not trust or quote these figures; see the reasons above"), " ");
    }
}

fn notes(page: &mut Page, notes: &[String], most: usize) {
    for note in notes.iter().take(most) {
        page.line("note", &words(note), " ");
    }
    let more = notes.len().saturating_sub(most);
    if more > 0 {
        page.line("note", &words(&format!("and {more} more notes, in verbose output")), " ");
    }
}

/// The host in a few words.
fn in_short(facts: &Facts) -> String {
    let release = printable(&facts.kernel);
    let version = release.split('-').next().unwrap_or_default();
    let mut words = vec![format!("Linux {version}"), module(facts), paging(facts.paging).into()];
    if facts.emulated {
        words.push("emulated: times count instructions, not seconds".into());
    }
    words.join(", ")
}

fn module(facts: &Facts) -> String {
    printable(facts.module.as_deref().unwrap_or("no KVM")).into_owned()
}

fn paging(paging: Paging) -> &'static str {
    match paging {
        Paging::Ept => "ept",
        Paging::Npt => "npt",
        Paging::Stage2 => "stage 2",
        Paging::Shadow => "shadow paging",
        Paging::Unknown => "paging unknown",
    }
}

/// The command, quoted for a shell.
pub fn command_line(command: &[String]) -> String {
    quote::line(&command.iter().map(|argument| printable(argument).into_owned()).collect::<Vec<_>>())
}

/// A parameter's value. A multiple of 1 MiB is probably a size and is also shown as one.
pub(crate) fn asked_value(value: &Value) -> String {
    match value {
        Value::String(s) => printable(s).into_owned(),
        Value::Number(n) => match n.as_u64() {
            Some(n) if n >= 1 << 20 && n % (1 << 20) == 0 => {
                format!("{n} ({})", humanised("bytes", n as f64))
            }
            _ => n.to_string(),
        },
        other => printable(&other.to_string()).into_owned(),
    }
}

/// The host's facts, the most important first.
pub fn host(facts: &Facts) -> Vec<String> {
    let switch = |on: Option<bool>| on.map_or("-", |on| if on { "Y" } else { "N" });
    let time = match facts.emulated {
        true => "EMULATED (times count instructions, not seconds)",
        false => "real time",
    };
    vec![
        format!("bed {}", printable(&facts.bed)),
        time.into(),
        format!("Linux {}", printable(&facts.kernel)),
        module(facts),
        paging(facts.paging).into(),
        format!("tdp_mmu={}", switch(facts.tdp_mmu)),
        format!("eager_page_split={}", switch(facts.eager_page_split)),
        format!("nx_huge_pages={}", printable(facts.nx_huge_pages.as_deref().unwrap_or("-"))),
        format!("thp={}", printable(facts.thp.as_deref().unwrap_or("-"))),
        format!("{} CPUs", facts.cpus),
        printable(&facts.cpu).into_owned(),
        format!("{:.1} GiB", facts.memory as f64 / (1u64 << 30) as f64),
        format!("sandbox {}", printable(&facts.sandbox)),
    ]
}

fn figures(page: &mut Page, figures: &[Figure]) {
    for group in groups(figures) {
        page.gap();
        match group.indices[0] {
            None => plain_figures(page, &group),
            Some(_) => indexed_figures(page, &group),
        }
    }
}

fn plain_figures(page: &mut Page, group: &Group) {
    let all = || group.kinds.iter().flat_map(|kind| &kind.figures);
    let several = |figure: &&Figure| figure.samples.len() > 1;
    let mut table = match (all().any(several), all().all(several)) {
        (false, _) => Table::with_head(&["figure", "value", "unit"]),
        (true, true) => Table::with_head(&["figure", "median", "unit", "min", "max", "spread", "n"]),
        (true, false) => {
            Table::with_head(&["figure", "value or median", "unit", "min", "max", "spread", "n"])
        }
    };
    for figure in all() {
        let scale = Scale::of(&figure.unit, figure.value());
        let mut row = vec![figure.label.to_string(), scale.number(figure.value()), scale.unit.clone()];
        if several(figure) {
            row.extend([
                scale.number(figure.min()),
                scale.number(figure.max()),
                spread_of(figure),
                grouped(figure.samples.len() as i128),
            ]);
        }
        table.row(row);
    }
    page.table(&table);
}

/// The spread as a percentage, or an empty string.
pub(super) fn spread_of(figure: &Figure) -> String {
    figure.spread().map_or(String::new(), |spread| format!("{:.1}%", 100.0 * spread))
}

fn indexed_figures(page: &mut Page, group: &Group) {
    let head = |name: &str, unit: &str| match unit {
        "" => name.to_owned(),
        unit => format!("{name} [{unit}]"),
    };
    let columns: Vec<Vec<String>> = group
        .kinds
        .iter()
        .map(|kind| {
            let scale = common_scale(&kind.figures);
            std::iter::once(head(kind.name, &scale.unit)).chain(cells(&scale, &kind.figures)).collect()
        })
        .collect();
    let mut table = Table::default();
    let indices = std::iter::once("").chain(group.indices.iter().map(|index| index.unwrap_or("")));
    for (row, index) in indices.enumerate() {
        let cells = columns.iter().map(|column| column[row].clone());
        table.row(std::iter::once(index.to_owned()).chain(cells).collect());
    }
    page.table(&table);
}

fn histograms(page: &mut Page, histograms: &[Histogram]) {
    if histograms.is_empty() {
        return;
    }
    page.gap();
    let mut table = Table::with_head(&["distribution", "samples", "p50", "p90", "p99", "p99.9", "max"]);
    for histogram in histograms {
        let mut row = vec![histogram.label().to_string(), grouped(histogram.count().into())];
        row.extend(percentiles(histogram));
        table.row(row);
    }
    page.table(&table);
}

/// The median, 90 %, 99 %, 99.9 % and the maximum, for the tables of both forms.
pub(super) fn percentiles(histogram: &Histogram) -> impl Iterator<Item = String> {
    let quantiles = [0.5, 0.9, 0.99, 0.999].map(|q| histogram.quantile(q)).into_iter();
    let unit = &histogram.unit;
    quantiles.chain([histogram.max()]).map(|value| value.map_or("-".into(), |v| humanised(unit, v)))
}

fn series(page: &mut Page, report: &Report) {
    if !report.series.is_empty() {
        page.gap();
        let mut table =
            Table::with_head(&["over time", "points", "min", "median", "max", "from start to end"]);
        // The width that the other columns leave.
        let bars = page.width().saturating_sub(68).clamp(8, 64);
        for series in &report.series {
            let values = || series.points.iter().map(|p| p.1);
            let Some(median) = median(values()) else { continue };
            let (min, max) = (values().fold(f64::INFINITY, f64::min), values().fold(f64::MIN, f64::max));
            let scale = Scale::of(&series.unit, max.abs().max(min.abs()));
            table.row(vec![
                series.label().to_string(),
                grouped(series.points.len() as i128),
                scale.number(min),
                scale.number(median),
                scale.with_unit(max),
                sparkline(series, min, max, bars),
            ]);
        }
        page.table(&table);
    }
    if report.marks.is_empty() {
        return;
    }
    let mut seen = HashSet::new();
    let names = report.marks.iter().map(|m| m.name.as_str()).filter(|name| seen.insert(*name));
    page.gap();
    let mut table = Table::with_head(&["span", "times", "median", "longest", "total"]);
    for name in names.take(ROWS) {
        let spans = || report.marks.iter().filter(|m| m.name == name).map(|m| m.end - m.start);
        let (times, total) = (spans().count(), spans().sum());
        let (median, longest) = (median(spans()).unwrap_or_default(), spans().fold(0.0, f64::max));
        let mut row = vec![name.to_owned(), grouped(times as i128)];
        row.extend([median, longest, total].map(|v| humanised("s", v)));
        table.row(row);
    }
    page.table(&table);
}

/// The series as one line of bars. Each bar is the mean of its slot, or a blank if the slot has no
/// points.
fn sparkline(series: &Series, min: f64, max: f64, bars: usize) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let (Some(first), Some(last)) = (series.points.first(), series.points.last()) else {
        return String::new();
    };
    let span = last.0 - first.0;
    // Bars start at zero, so that a dip has its true depth.
    let floor = if min >= 0.0 { 0.0 } else { min };
    let mut columns = vec![(0.0, 0u32); bars];
    for &(t, v) in &series.points {
        let column = if span > 0.0 { ((t - first.0) / span * bars as f64) as usize } else { 0 };
        let column = &mut columns[column.min(bars - 1)];
        column.0 += v;
        column.1 += 1;
    }
    let bar = |&(sum, n): &(f64, u32)| match n {
        0 => ' ',
        _ if max <= floor => BARS[0],
        n => BARS[(((sum / f64::from(n) - floor) / (max - floor) * 8.0) as usize).min(7)],
    };
    columns.iter().map(bar).collect()
}

fn counters(page: &mut Page, counters: &[Counter]) {
    let moved: Vec<_> = counters.iter().filter(|c| c.before != c.after).collect();
    if counters.is_empty() {
        return;
    }
    page.gap();
    let mut table = Table::with_head(&["KVM counter", "before", "after", "difference"]);
    for counter in &moved {
        table.row(vec![
            counter.label().to_string(),
            grouped(counter.before.into()),
            grouped(counter.after.into()),
            grouped(counter.grown()),
        ]);
    }
    page.table(&table);
    let still = counters.len() - moved.len();
    if still > 0 {
        page.text(&format!("  and {still} unchanged"));
    }
}
