//! The plot of a comparison: each figure's ratio and interval, below each other.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::{AROUND, Axis, Key, Plot, Side, TEXT};
use super::{beside, chart, colour, logarithmic, name_at, placeable, svg};
use crate::compare::text::in_order;
use crate::compare::{Change, FigureVerdict, Weighed};

/// The most figures in one plot.
const MAX_ROWS: usize = 60;
/// How far an interval is drawn from its ratio.
const FAR: f64 = 1e3;
/// The most characters shown of a name.
const NAME: usize = 22;
/// The height of a row in pixels.
const ROW: u32 = 24;

/// Plots the figures that have a ratio and are not equal on both sides, the headline first. `None`
/// if there are none.
pub(crate) fn ratios(rows: &[Weighed]) -> Option<Plot> {
    let span = |row: &Weighed| {
        let ratio = row.ratio.filter(|ratio| placeable(*ratio))?;
        // An end that is too far away to be drawn is shown at the limit.
        let (low, high) = row.interval.unwrap_or((ratio, ratio));
        Some((low.max(ratio / FAR), ratio, high.min(ratio * FAR)))
    };
    let moved = in_order(rows).filter(|row| row.verdict != FigureVerdict::Equal);
    let shown: Vec<_> = moved.filter_map(|row| Some((row, span(row)?))).take(MAX_ROWS).collect();
    let ends = || shown.iter().flat_map(|(_, (low, _, high))| [*low, *high]);
    let (least, most) = (ends().fold(1.0, f64::min) / 1.02, ends().fold(1.0, f64::max) * 1.02);
    if shown.is_empty() || !placeable(least) || !placeable(most) {
        return None;
    }
    let wide = most / least > 20.0;
    let x = if wide { Axis::decades(least, most) } else { Axis::new(least, most, false) };
    let y = Axis::new(0.0, shown.len() as f64, false);
    let names: Vec<String> = shown.iter().map(|(row, _)| shortened(row)).collect();
    let room = beside(names.iter().map(|name| name.chars().count()).max().unwrap_or(0));
    let label = |v: &f64| format!("{}", (v * 1e6).round() / 1e6);
    let title = logarithmic("B/A", wide);
    let svg = svg(AROUND + ROW * shown.len() as u32, |area| {
        let across = Side { axis: x.clone(), title: &title, label: &label, grid: true };
        let down = Side { axis: y.clone(), title: "Figure", label: &|_| String::new(), grid: false };
        let mut chart = chart(area, across, down, room)?;
        let height = |i: usize| (shown.len() - 1 - i) as f64 + 0.5;
        chart.draw_series([PathElement::new([(1.0, y.from), (1.0, y.to)], TEXT)])?;
        for (i, (row, (low, ratio, high))) in shown.iter().enumerate() {
            let (nth, _) = look(row);
            let (colour, at) = (colour(nth), (*ratio, height(i)));
            chart.draw_series([PathElement::new(
                [(*low, height(i)), (*high, height(i))],
                colour.stroke_width(3),
            )])?;
            // The shapes differ too, for readers who cannot see the colours.
            match row.change() {
                Some(Change::Slower) => chart.draw_series([TriangleMarker::new(at, 6, colour.filled())])?,
                None => chart.draw_series([Cross::new(at, 4, colour.stroke_width(2))])?,
                Some(_) => chart.draw_series([Circle::new(at, 4, colour.filled())])?,
            };
        }
        for (i, name) in names.iter().enumerate() {
            let (left, at) = chart.plotting_area().map_coordinate(&(x.from, height(i)));
            name_at(area, name, (left - 8, at), HPos::Right, VPos::Center)?;
        }
        Ok(())
    })?;
    let mut legend: Vec<(Key, String)> = Vec::new();
    for (nth, text) in shown.iter().map(|(row, _)| look(row)) {
        let entry = (Key::Bar(nth), text.to_owned());
        if !legend.contains(&entry) {
            legend.push(entry);
        }
    }
    Some(Plot { title: "B/A with its interval".into(), svg, legend, order: None })
}

/// The colour of a row and its text in the legend.
fn look(row: &Weighed) -> (usize, &'static str) {
    match row.change() {
        Some(Change::Slower) => (1, "▲ slower"),
        Some(Change::Faster) => (2, "● faster"),
        Some(Change::Higher | Change::Lower) => (0, "● differs, neither a time nor a rate"),
        None => (6, "× noise, or too few to say"),
    }
}

fn shortened(row: &Weighed) -> String {
    let name = row.of.label.to_string();
    match name.chars().count() {
        ..=NAME => name,
        _ => name.chars().take(NAME - 1).chain(['…']).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{Compared, Policy, Replicate, weigh};

    fn row(name: &str, unit: &str, a: &[f64], b: &[f64]) -> Compared {
        let side = |values: &[f64]| values.iter().map(|&value| Replicate { value, pair: None }).collect();
        Compared { label: name.into(), unit: unit.into(), resolution: 0.0, a: side(a), b: side(b) }
    }

    #[test]
    fn slower_faster_and_noise_differ_in_colour_and_shape() {
        let (one, ten) = ([1.0, 1.01, 0.99, 1.0], [10.0, 10.1, 9.9, 10.2]);
        let rows = vec![
            row("t", "s", &one, &ten),
            row("r", "pages/s", &one, &ten),
            row("n", "s", &one, &[1.0, 0.98, 1.03, 1.0]),
        ];
        let plot = ratios(&weigh(rows, None, 3, Policy::REAL)).unwrap();
        let legend: Vec<_> = plot.legend.iter().map(|(key, text)| (*key, text.as_str())).collect();
        let expected = [(1, "▲ slower"), (2, "● faster"), (6, "× noise, or too few to say")]
            .map(|(i, t)| (Key::Bar(i), t));
        assert_eq!(legend, expected);
        assert!(plot.svg.contains("<polygon") && plot.svg.contains("<circle"), "{}", plot.svg);
    }
}
