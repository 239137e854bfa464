//! The picture of a history, as SVG: above, the losses of each kernel; below, a plot of each
//! command's cost, as a ratio to the oldest kernel that has one.

use std::fmt::Write as _;

use super::{COMMANDS, Cell, History, Row, Takes};

/// As wide as the plots of a report, with the same text: a phone shows it at five eighths of its
/// size.
const WIDTH: f64 = 520.0;
const TEXT: f64 = 16.0;
/// The height of a line of text.
const LINE: f64 = 22.0;
/// The room at the left for the names of commands, and for a plot's axis.
const NAMES: f64 = 170.0;
const AXIS: f64 = 60.0;
const RIGHT: f64 = 24.0;
const PLOT: f64 = 110.0;
/// The least part of a ratio that a plot covers above and below 1.
const LEAST: f64 = 0.02;
/// A line for each host, in colours and dashes that differ for all readers.
const STYLES: [(&str, &str); 2] = [("#0072b2", ""), ("#d55e00", "6 4")];

/// An SVG that grows downwards.
struct Drawing {
    body: String,
    y: f64,
}

impl Drawing {
    fn text(&mut self, x: f64, y: f64, anchor: &str, more: &str, words: &str) {
        let words = words.replace('&', "&amp;").replace('<', "&lt;");
        let _ = writeln!(
            self.body,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\"{more}>{words}</text>"
        );
    }

    /// A line of its own.
    fn heading(&mut self, words: &str) {
        self.y += LINE * 1.4;
        self.text(8.0, self.y, "start", " font-weight=\"bold\"", words);
    }

    fn line(&mut self, points: &[(f64, f64)], stroke: &str, dashes: &str) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            self.body,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{stroke}\" stroke-width=\"2\" \
             stroke-dasharray=\"{dashes}\"/>",
            points.join(" ")
        );
    }
}

impl History {
    pub(super) fn picture(&self) -> String {
        let mut drawing = Drawing { body: String::new(), y: 0.0 };
        let mut host = None;
        for (row, cells) in self.losses() {
            if host != Some(&row.host) {
                drawing.heading(&format!("Lost pages and failed scenarios, {}", row.host));
                drawing.y += LINE;
                for (at, column) in self.columns.iter().enumerate() {
                    drawing.text(self.x(NAMES, at), drawing.y, "middle", "", column.series);
                }
                host = Some(&row.host);
            }
            drawing.y += LINE;
            drawing.text(8.0, drawing.y, "start", "", row.name);
            for (at, cell) in cells.iter().enumerate() {
                let (more, words) = match cell {
                    Cell::Figure(figure) if figure.value() > 0.0 => {
                        (" font-weight=\"bold\" fill=\"#b00000\"", figure.value().to_string())
                    }
                    Cell::Figure(_) => ("", "0".into()),
                    Cell::Absent(_) => ("", "–".into()),
                    Cell::Failed(_) => (" font-weight=\"bold\" fill=\"#b00000\"", "!".into()),
                };
                drawing.text(self.x(NAMES, at), drawing.y, "middle", more, &words);
            }
        }
        if self.rows.iter().any(|row| row.takes == Takes::Headline) {
            drawing.heading("Instructions, as a ratio to the oldest kernel");
            self.legend(&mut drawing);
        }
        for (name, ..) in COMMANDS.iter().filter(|(.., takes)| *takes == Takes::Headline) {
            self.plot(&mut drawing, name);
        }
        let height = drawing.y + LINE;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" \
             font-family=\"sans-serif\" font-size=\"{TEXT}\">\n\
             <title>What each kernel lost, and how many instructions each command took</title>\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{}</svg>\n",
            drawing.body
        )
    }

    fn losses(&self) -> impl Iterator<Item = (&Row, &Vec<Cell>)> {
        self.rows.iter().zip(&self.cells).filter(|(row, _)| row.takes != Takes::Headline)
    }

    /// Where a series is, beside `left` of room.
    fn x(&self, left: f64, column: usize) -> f64 {
        let steps = (self.columns.len().max(2) - 1) as f64;
        left + 20.0 + (WIDTH - RIGHT - left - 20.0) * column as f64 / steps
    }

    /// The hosts that have a line in plots.
    fn hosts(&self) -> Vec<&str> {
        let mut hosts: Vec<&str> = Vec::new();
        for row in self.rows.iter().filter(|row| row.takes == Takes::Headline) {
            if !hosts.contains(&row.host.as_str()) {
                hosts.push(&row.host);
            }
        }
        hosts
    }

    fn legend(&self, drawing: &mut Drawing) {
        drawing.y += LINE;
        for (at, (host, (stroke, dashes))) in self.hosts().into_iter().zip(STYLES).enumerate() {
            let (x, y) = (AXIS + 160.0 * at as f64, drawing.y);
            drawing.line(&[(x, y - 5.0), (x + 40.0, y - 5.0)], stroke, dashes);
            drawing.text(x + 50.0, y, "start", "", host);
        }
    }

    /// The plot of one command: a line for each host.
    fn plot(&self, drawing: &mut Drawing, name: &str) {
        let ratios: Vec<Vec<(usize, f64)>> =
            self.hosts().into_iter().map(|host| self.ratios(name, host)).collect();
        let all = || ratios.iter().flatten().map(|(_, ratio)| *ratio);
        if all().next().is_none() {
            return;
        }
        drawing.heading(name);
        let (low, high) = (all().fold(1.0 - LEAST, f64::min), all().fold(1.0 + LEAST, f64::max));
        let top = drawing.y + LINE * 0.6;
        let y = |ratio: f64| top + (high - ratio) / (high - low) * PLOT;
        // The label of 1 is left out where it would cover another.
        let labels = [low, high, 1.0];
        let shown = labels.iter().enumerate().filter(|(at, ratio)| {
            *at < 2 || labels[..2].iter().all(|end| (y(**ratio) - y(*end)).abs() >= LINE)
        });
        for (_, &ratio) in shown {
            drawing.text(AXIS - 6.0, y(ratio) + 5.0, "end", "", &format!("{ratio:.2}"));
        }
        drawing.line(&[(AXIS, y(1.0)), (WIDTH - RIGHT / 2.0, y(1.0))], "#999", "1 3");
        for (line, (stroke, dashes)) in ratios.iter().zip(STYLES) {
            let points: Vec<(f64, f64)> =
                line.iter().map(|&(at, ratio)| (self.x(AXIS, at), y(ratio))).collect();
            drawing.line(&points, stroke, dashes);
            for (x, y) in points {
                let _ = writeln!(
                    drawing.body,
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{stroke}\"/>"
                );
            }
        }
        drawing.y = top + PLOT + LINE;
        for (at, column) in self.columns.iter().enumerate() {
            drawing.text(self.x(AXIS, at), drawing.y, "middle", "", column.series);
        }
    }

    /// The costs of a command on a host, with their columns, as ratios to the first.
    fn ratios(&self, name: &str, host: &str) -> Vec<(usize, f64)> {
        let is_it = |(row, _): &(&Row, &Vec<Cell>)| row.name == name && row.host == host;
        let Some((_, cells)) = self.rows.iter().zip(&self.cells).find(is_it) else { return Vec::new() };
        let values = cells.iter().enumerate().filter_map(|(at, cell)| Some((at, cell.figure()?.value())));
        let values: Vec<(usize, f64)> = values.collect();
        let first = values.first().map_or(1.0, |(_, value)| *value);
        values.into_iter().map(|(at, value)| (at, value / first)).collect()
    }
}
