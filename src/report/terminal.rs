//! The terminal face: plain text that stands alone when it is pasted into a mail.
//!
//! What was asked and what the host was come first, then what is wrong with the result if anything is, then the
//! figures. No colours and no terminal codes, so that a pipe, a file and a screen get the same; at most [`WIDTH`]
//! columns unless one name alone is longer.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use serde_json::Value;

use super::units::{FAR, Scale, grouped, humanised};
use super::{Counter, Figure, Histogram, Report, Series, printable};
use crate::host::{Facts, Paging};

/// What fits a mail and half a screen.
pub const WIDTH: usize = 100;

/// Rows of one table before its middle is left out.
const ROWS: usize = 40;

/// The whole result as text.
pub fn render(report: &Report) -> String {
    let mut out = String::new();
    let title = printable(&report.name);
    let version = format!("vellum {}", printable(&report.vellum));
    let gap = WIDTH.saturating_sub(title.chars().count() + version.chars().count()).max(2);
    let _ = writeln!(out, "{title}{:gap$}{version}", "");
    let _ = writeln!(out, "$ {}", command_line(&report.command));
    let asked: Vec<_> =
        report.asked.iter().map(|(k, v)| format!("{}={}", printable(k), asked_value(v))).collect();
    labelled(&mut out, "asked", &asked, "  ");
    labelled(&mut out, "host", &host(&report.host), ", ");
    for reason in &report.invalid {
        labelled(&mut out, "INVALID", &words(reason), " ");
    }
    for note in &report.notes {
        labelled(&mut out, "note", &words(note), " ");
    }
    figures(&mut out, &report.figures);
    histograms(&mut out, &report.histograms);
    series(&mut out, report);
    counters(&mut out, &report.counters);
    if !report.invalid.is_empty() {
        let _ = writeln!(
            out,
            "\nINVALID: these figures must not be trusted or quoted; the reasons stand above them."
        );
    }
    out
}

/// The command as it could be typed again.
pub fn command_line(command: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+,.:/@%[]".contains(c);
    let quoted = |argument: &String| match !argument.is_empty() && argument.chars().all(plain) {
        true => argument.clone(),
        false => format!("'{}'", printable(argument).replace('\'', "'\\''")),
    };
    command.iter().map(quoted).collect::<Vec<_>>().join(" ")
}

/// A parameter's value; a number that is a whole number of MiB is probably a size, and says so beside its digits.
pub fn asked_value(value: &Value) -> String {
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

/// The host's facts, most telling first.
pub fn host(facts: &Facts) -> Vec<String> {
    let paging = match facts.paging {
        Paging::Ept => "ept",
        Paging::Npt => "npt",
        Paging::Stage2 => "stage 2",
        Paging::Shadow => "shadow paging",
        Paging::Unknown => "paging unknown",
    };
    let switch = |on: Option<bool>| on.map_or("-", |on| if on { "Y" } else { "N" });
    let time = match facts.emulated {
        true => "EMULATED (times count instructions and are not seconds)",
        false => "real time",
    };
    vec![
        format!("bed {}", printable(&facts.bed)),
        time.into(),
        format!("Linux {}", printable(&facts.kernel)),
        printable(facts.module.as_deref().unwrap_or("no KVM")).into_owned(),
        paging.into(),
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

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(|w| printable(w).into_owned()).collect()
}

/// A label at the margin and `items` beside it, wrapped.
fn labelled(out: &mut String, label: &str, items: &[String], separator: &str) {
    const MARGIN: usize = 9;
    let _ = write!(out, "{label:<MARGIN$}");
    let mut column = MARGIN;
    for (i, item) in items.iter().enumerate() {
        let separator = if i + 1 < items.len() { separator } else { "" };
        let width = item.chars().count() + separator.trim_end().chars().count();
        if column > MARGIN && column + width > WIDTH {
            out.truncate(out.trim_end().len());
            let _ = write!(out, "\n{:MARGIN$}", "");
            column = MARGIN;
        }
        let _ = write!(out, "{item}{separator}");
        column += item.chars().count() + separator.chars().count();
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
}

/// A table whose first column is flush left and whose others are flush right.
#[derive(Default)]
pub(super) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table that begins with its head.
    pub(super) fn with_head(head: &[&str]) -> Self {
        Self { rows: vec![head.iter().map(|h| (*h).to_owned()).collect()] }
    }

    pub(super) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    pub(super) fn print(&self, out: &mut String) {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows.iter().filter_map(|r| r.get(column)).map(|c| c.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<_> = (0..columns).map(width).collect();
        for (i, row) in self.rows.iter().enumerate() {
            if self.rows.len() > ROWS + 1 && i > ROWS / 2 && i < self.rows.len() - ROWS / 2 {
                if i == ROWS / 2 + 1 {
                    let _ = writeln!(out, "  … {} more in the JSON …", self.rows.len() - 1 - ROWS);
                }
                continue;
            }
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                let pad = width - cell.chars().count();
                let _ = match column {
                    0 => write!(out, "  {cell}{:pad$}", ""),
                    _ => write!(out, "  {:pad$}{cell}", ""),
                };
            }
            out.truncate(out.trim_end_matches(' ').len());
            out.push('\n');
        }
    }
}

/// Figures of the same kinds for the same indices, as one table: a row an index, a column a kind.
pub(super) struct Group<'a> {
    /// The indices in order; a single `None` for figures without.
    pub(super) indices: Vec<Option<&'a str>>,
    /// Kind by kind, a figure for each index.
    pub(super) kinds: Vec<(&'a str, Vec<&'a Figure>)>,
}

/// Sorts figures into [`Group`]s, keeping their order.
pub(super) fn groups(figures: &[Figure]) -> Vec<Group<'_>> {
    let mut kinds: Vec<(&str, Vec<&Figure>)> = Vec::new();
    let mut place = HashMap::new();
    for figure in figures {
        let (base, index) = figure.split_name();
        let key = (base, index.is_some(), figure.unit());
        let i = *place.entry(key).or_insert_with(|| {
            kinds.push((base, Vec::new()));
            kinds.len() - 1
        });
        kinds[i].1.push(figure);
    }
    let mut groups: Vec<Group> = Vec::new();
    let mut place = HashMap::new();
    for (base, members) in kinds {
        let indices: Vec<_> = members.iter().map(|f| f.split_name().1).collect();
        // Figures without an index all belong into one table, whatever their number.
        let indices = if indices[0].is_none() { vec![None] } else { indices };
        let i = *place.entry(indices.clone()).or_insert_with(|| {
            groups.push(Group { indices, kinds: Vec::new() });
            groups.len() - 1
        });
        groups[i].kinds.push((base, members));
    }
    groups
}

fn figures(out: &mut String, figures: &[Figure]) {
    for group in groups(figures) {
        out.push('\n');
        if group.indices[0].is_none() { plain_figures(out, &group) } else { indexed_figures(out, &group) }
    }
}

fn plain_figures(out: &mut String, group: &Group) {
    fn spread(f: &&Figure) -> bool {
        matches!(f, Figure::Spread { .. })
    }
    let all = || group.kinds.iter().flat_map(|(_, figures)| figures);
    let mut table = match (all().any(spread), all().all(spread)) {
        (false, _) => Table::with_head(&["figure", "value", "unit"]),
        (true, true) => Table::with_head(&["figure", "median", "unit", "min", "max", "spread", "n"]),
        (true, false) => {
            Table::with_head(&["figure", "value or median", "unit", "min", "max", "spread", "n"])
        }
    };
    for figure in all() {
        let scale = Scale::of(figure.unit(), figure.value());
        let mut row = vec![
            printable(figure.name()).into_owned(),
            scale.number(figure.value()),
            printable(&scale.unit).into_owned(),
        ];
        if let Figure::Spread { min, max, count, .. } = figure {
            row.extend([
                scale.number(*min),
                scale.number(*max),
                spread_of(figure),
                grouped(i128::from(*count)),
            ]);
        }
        table.row(row);
    }
    table.print(out);
}

/// How far apart the samples lie: (max - min) / median.
pub(super) fn spread_of(figure: &Figure) -> String {
    match figure {
        Figure::Spread { median, min, max, count: 2.., .. } if *median != 0.0 => {
            format!("{:.1}%", 100.0 * (max - min) / median.abs())
        }
        _ => String::new(),
    }
}

/// The scale that suits the largest of `figures`, or the middle of them where they lie far apart, as latencies do; sizes
/// are shown exactly only where every one of them can be.
pub(super) fn common_scale(figures: &[&Figure]) -> Scale {
    let sizes = || figures.iter().map(|f| f.value().abs()).filter(|size| *size > 0.0);
    let (smallest, mut largest) = (sizes().fold(f64::INFINITY, f64::min), sizes().fold(0.0, f64::max));
    if largest > smallest * FAR {
        largest = (largest * smallest).sqrt();
    }
    let unit = figures.first().map_or("", |f| f.unit());
    let scales = figures.iter().map(|f| Scale::of(unit, f.value()));
    match scales.min_by(|a, b| a.divisor.total_cmp(&b.divisor)) {
        Some(smallest) if unit == "bytes" => smallest,
        _ => Scale::of(unit, largest),
    }
}

fn indexed_figures(out: &mut String, group: &Group) {
    let index_width = group.indices.iter().flatten().map(|i| i.chars().count()).max().unwrap_or(0);
    let columns: Vec<Vec<String>> = group
        .kinds
        .iter()
        .map(|(base, figures)| {
            let scale = common_scale(figures);
            let head = match scale.unit.as_str() {
                "" => printable(base).into_owned(),
                unit => format!("{} [{}]", printable(base), printable(unit)),
            };
            let values: Vec<f64> = figures.iter().map(|f| f.value()).collect();
            let cells = scale.column(&values).into_iter().zip(figures).map(|(cell, figure)| match figure {
                Figure::Spread { count: 2.., .. } => format!("{cell} ±{:.0}%", half_spread(figure)),
                _ => cell,
            });
            std::iter::once(head).chain(cells).collect()
        })
        .collect();
    let width = |column: &Vec<String>| 2 + column.iter().map(|c| c.chars().count()).max().unwrap_or(0);
    let mut rest = &columns[..];
    while !rest.is_empty() {
        let mut used = 2 + index_width + width(&rest[0]);
        let mut n = 1;
        while n < rest.len() && used + width(&rest[n]) <= WIDTH {
            used += width(&rest[n]);
            n += 1;
        }
        let (now, later) = rest.split_at(n);
        let mut table = Table::default();
        for row in 0..=group.indices.len() {
            let index = row.checked_sub(1).and_then(|i| group.indices[i]).unwrap_or("");
            let cells = now.iter().map(|column| column[row].clone());
            table.row(std::iter::once(printable(index).into_owned()).chain(cells).collect());
        }
        table.print(out);
        rest = later;
        if !rest.is_empty() {
            out.push('\n');
        }
    }
}

fn half_spread(figure: &Figure) -> f64 {
    match figure {
        Figure::Spread { median, min, max, .. } if *median != 0.0 => 50.0 * (max - min) / median.abs(),
        _ => 0.0,
    }
}

fn histograms(out: &mut String, histograms: &[Histogram]) {
    if histograms.is_empty() {
        return;
    }
    out.push('\n');
    let mut table = Table::with_head(&["distribution", "samples", "p50", "p90", "p99", "p99.9", "max"]);
    for histogram in histograms {
        let mut row = vec![printable(&histogram.name).into_owned(), grouped(histogram.count().into())];
        row.extend([0.5, 0.9, 0.99, 0.999, 1.0].map(|q| {
            histogram
                .quantile(q)
                .map_or("-".into(), |v| printable(&humanised(&histogram.unit, v)).into_owned())
        }));
        table.row(row);
    }
    table.print(out);
}

fn series(out: &mut String, report: &Report) {
    if !report.series.is_empty() {
        out.push('\n');
        let mut table =
            Table::with_head(&["over time", "points", "min", "median", "max", "from start to end"]);
        for series in &report.series {
            let values: Vec<f64> = series.points.iter().map(|p| p.1).collect();
            let Some(figure) = Figure::from_samples("", &series.unit, &values) else { continue };
            let Figure::Spread { median, min, max, .. } = figure else { continue };
            let scale = Scale::of(&series.unit, max.abs().max(min.abs()));
            table.row(vec![
                printable(&series.name).into_owned(),
                grouped(values.len() as i128),
                scale.number(min),
                scale.number(median),
                printable(&scale.with_unit(max)).into_owned(),
                sparkline(series, min, max),
            ]);
        }
        table.print(out);
    }
    if report.marks.is_empty() {
        return;
    }
    let mut seen = HashSet::new();
    let names = report.marks.iter().map(|m| m.name.as_str()).filter(|name| seen.insert(*name));
    out.push('\n');
    let mut table = Table::with_head(&["span", "times", "median", "longest", "total"]);
    for name in names.take(ROWS) {
        let spans: Vec<f64> =
            report.marks.iter().filter(|m| m.name == name).map(|m| m.end - m.start).collect();
        let Some(Figure::Spread { median, max, count, .. }) = Figure::from_samples("", "s", &spans) else {
            continue;
        };
        let mut row = vec![printable(name).into_owned(), grouped(count.into())];
        row.extend([median, max, spans.iter().sum()].map(|v| humanised("s", v)));
        table.row(row);
    }
    table.print(out);
}

/// The series as one line of bars, each the mean of its share of the time; a blank where there is no point.
fn sparkline(series: &Series, min: f64, max: f64) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    const COLUMNS: usize = 32;
    let (Some(first), Some(last)) = (series.points.first(), series.points.last()) else {
        return String::new();
    };
    let span = last.0 - first.0;
    // From zero where zero is near, so that a dip looks as deep as it is.
    let floor = if min >= 0.0 { 0.0 } else { min };
    let mut columns = [(0.0, 0u32); COLUMNS];
    for &(t, v) in &series.points {
        let column = if span > 0.0 { ((t - first.0) / span * COLUMNS as f64) as usize } else { 0 };
        let column = &mut columns[column.min(COLUMNS - 1)];
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

fn counters(out: &mut String, counters: &[Counter]) {
    let moved: Vec<_> = counters.iter().filter(|c| c.before != c.after).collect();
    if counters.is_empty() {
        return;
    }
    out.push('\n');
    let mut table = Table::with_head(&["KVM counter", "before", "after", "difference"]);
    for counter in &moved {
        let difference = i128::from(counter.after) - i128::from(counter.before);
        table.row(vec![
            printable(&counter.name).into_owned(),
            grouped(counter.before.into()),
            grouped(counter.after.into()),
            grouped(difference),
        ]);
    }
    table.print(out);
    let still = counters.len() - moved.len();
    if still > 0 {
        let _ = writeln!(out, "  and {still} that did not move");
    }
}
