//! Plots over time, with spans as bands behind the lines.

use std::collections::HashMap;

use plotters::prelude::*;

use super::{Axis, placeable};
use super::{
    COLOURS, HEIGHT, PICTURES, Plot, Side, WIDTH, chart, colour, mark_colour, svg, tick, titled, whole, words,
};
use crate::units::Scale;
use crate::{Mark, Series};

/// More points than pixels show no more.
const POINTS: usize = 1000;
/// More spans merge into one band.
const MARKS: usize = 2000;
/// The number of span names that get a colour.
const KINDS: usize = 3;

/// One plot per name and unit, with the marks as bands behind the lines.
pub(crate) fn over_time(series: &[Series], marks: &[Mark]) -> Vec<Plot> {
    let mut kinds: Vec<Vec<&Series>> = Vec::new();
    let mut place = HashMap::new();
    for one in series.iter().filter(|s| !s.points.is_empty()) {
        let i = *place.entry((&one.name, &one.unit)).or_insert_with(|| {
            kinds.push(Vec::new());
            kinds.len() - 1
        });
        kinds[i].push(one);
    }
    let pictures = kinds.iter().flat_map(|kind| kind.chunks(COLOURS)).take(PICTURES);
    pictures.filter_map(|lines| picture(lines, marks)).collect()
}

fn picture(lines: &[&Series], marks: &[Mark]) -> Option<Plot> {
    let points = || lines.iter().flat_map(|s| &s.points);
    let least = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::INFINITY, f64::min);
    let most = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::NEG_INFINITY, f64::max);
    let (start, end) = (least(&mut points().map(|p| p.0)), most(&mut points().map(|p| p.0)));
    let (low, high) = (least(&mut points().map(|p| p.1)).min(0.0), most(&mut points().map(|p| p.1)));
    if ![start, end, low, high].into_iter().all(placeable) {
        return None;
    }
    let x = Axis::new(start.min(0.0), end, false);
    let y = Axis::new(low, high + (high - low) * 0.05, false);
    let (time, scale) = (Scale::of("s", x.to), Scale::of(&lines[0].unit, high));
    let mut kinds: Vec<&str> = Vec::new();
    for mark in marks.iter().take(MARKS) {
        if kinds.len() < KINDS && !kinds.contains(&mark.name.as_str()) {
            kinds.push(&mark.name);
        }
    }
    let pixel = (x.to - x.from) / f64::from(WIDTH);
    let (label_x, label_y) = (|v: &f64| whole(&time.with_unit(*v)), |v: &f64| tick(&scale, *v));
    let svg = svg(HEIGHT, |area| {
        let across = Side { axis: x.clone(), label: &label_x, grid: true };
        let up = Side { axis: y.clone(), label: &label_y, grid: true };
        let room = up.room();
        let mut chart = chart(area, across, up, room)?;
        chart.draw_series(marks.iter().take(MARKS).filter_map(|mark| {
            let kind = kinds.iter().position(|k| *k == mark.name)?;
            // A span shorter than a pixel is drawn one pixel wide.
            let end = mark.end.max(mark.start + pixel).min(x.to);
            (mark.start < end).then(|| {
                Rectangle::new(
                    [(mark.start.max(x.from), y.from), (end, y.to)],
                    mark_colour(kind).mix(0.3).filled(),
                )
            })
        }))?;
        for (i, line) in lines.iter().enumerate() {
            chart.draw_series(LineSeries::new(thinned(&line.points), colour(i).stroke_width(2)))?;
        }
        Ok(())
    })?;
    let series = lines.iter().enumerate().map(|(i, s)| (format!("c{i}"), s.label().to_string()));
    let spans = kinds.iter().enumerate().map(|(i, kind)| (format!("m{i}"), (*kind).to_owned()));
    let title = titled(&format!("{} over time", words(&lines[0].name)), &scale);
    Some(Plot { title, svg, legend: series.chain(spans).collect() })
}

/// Reduces the points to about [`POINTS`]. Keeps the lowest and highest of each chunk, so that no
/// dip is lost.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= POINTS {
        return points.to_vec();
    }
    let share = points.len().div_ceil(POINTS / 2);
    let by_value = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
    points
        .chunks(share)
        .flat_map(|chunk| {
            let low = chunk.iter().min_by(by_value).copied().unwrap_or_default();
            let high = chunk.iter().max_by(by_value).copied().unwrap_or_default();
            if low.0 <= high.0 { [low, high] } else { [high, low] }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinning_keeps_the_deepest_dip() {
        let mut points: Vec<_> = (0..100_000).map(|i| (f64::from(i), 100.0)).collect();
        points[77_777].1 = 1.0;
        let thin = thinned(&points);
        assert!(thin.len() <= POINTS + 2);
        assert!(thin.contains(&(77_777.0, 1.0)));
        assert!(thin.is_sorted_by(|a, b| a.0 <= b.0));
    }
}
