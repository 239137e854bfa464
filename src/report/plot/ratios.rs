//! The plot of a comparison: each figure's ratio and interval, below each other.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::{Axis, CHARACTER, Plot, Side, TEXT, chart, colour, name_at, placeable, svg};
use crate::compare::text::in_order;
use crate::compare::{FigureVerdict, Weighed};

/// The most figures in one plot.
const MAX_ROWS: usize = 60;
/// The most characters shown of a name.
const NAME: usize = 26;

/// Plots the figures that have a ratio and are not equal on both sides, the headline first. `None`
/// if there are none.
pub(crate) fn ratios(rows: &[Weighed]) -> Option<Plot> {
    let span = |row: &Weighed| {
        let ratio = row.ratio.filter(|ratio| placeable(*ratio))?;
        let (low, high) = row.interval.unwrap_or((ratio, ratio));
        // Intervals are cut, because one of several orders of magnitude would squeeze all others.
        Some((low.max(ratio / 4.0), ratio, high.min(ratio * 4.0)))
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
    let room = names.iter().map(|name| name.chars().count()).max().unwrap_or(0) as u32 * CHARACTER + 14;
    let label = |v: &f64| format!("{}", (v * 1e6).round() / 1e6);
    let svg = svg(46 + 18 * shown.len() as u32, |area| {
        let across = Side { axis: x.clone(), label: &label, grid: true };
        let down = Side { axis: y.clone(), label: &|_| String::new(), grid: false };
        let mut chart = chart(area, across, down, room)?;
        let height = |i: usize| (shown.len() - 1 - i) as f64 + 0.5;
        chart.draw_series([PathElement::new([(1.0, y.from), (1.0, y.to)], TEXT)])?;
        for (i, (row, (low, ratio, high))) in shown.iter().enumerate() {
            let colour = colour(if row.verdict == FigureVerdict::Differs { 1 } else { 0 });
            chart.draw_series([PathElement::new(
                [(*low, height(i)), (*high, height(i))],
                colour.stroke_width(2),
            )])?;
            chart.draw_series([Circle::new((*ratio, height(i)), 4, colour.filled())])?;
        }
        for (i, name) in names.iter().enumerate() {
            let (left, at) = chart.plotting_area().map_coordinate(&(x.from, height(i)));
            name_at(area, name, (left - 8, at), HPos::Right, VPos::Center)?;
        }
        Ok(())
    })?;
    let legend = vec![
        ("c1".to_owned(), "differs".to_owned()),
        ("c0".to_owned(), "noise, or too few to say".to_owned()),
    ];
    let title = if wide { "B/A with its interval, logarithmic" } else { "B/A with its interval" };
    Some(Plot { title: title.into(), svg, legend })
}

fn shortened(row: &Weighed) -> String {
    let name = row.of.label.to_string();
    match name.chars().count() {
        ..=NAME => name,
        _ => name.chars().take(NAME - 1).chain(['…']).collect(),
    }
}
