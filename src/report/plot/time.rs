//! Plots over time, with spans as lanes above the lines and as a tint behind them.

use std::collections::HashMap;

use plotters::prelude::*;

use super::{Axis, placeable};
use super::{
    COLOURS, HEIGHT, Key, PICTURES, Plot, Side, WIDTH, chart, colour, mark_colour, svg, tick, titled, words,
};
use crate::units::Scale;
use crate::{Mark, Series};

/// More points than pixels show no more.
const POINTS: usize = 1000;
/// More spans merge into one band.
const MARKS: usize = 2000;
/// The number of span names that get a colour and a lane at the top of the plot, and the lanes as
/// the legend names them.
const KINDS: usize = 3;
const LANES: [&str; KINDS] = ["first", "second", "third"];
/// The opacity of the tint below a span.
pub(crate) const TINT: f64 = 0.2;
/// The height of a lane as a part of the range of the lines.
const LANE: f64 = 0.05;

/// One plot per name and unit, with the marks.
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
    let charts = kinds.iter().flat_map(|kind| kind.chunks(COLOURS)).take(PICTURES);
    let both = charts.flat_map(|lines| {
        let zoomed = brief(lines, marks).and_then(|part| picture(lines, marks, Some(part)));
        picture(lines, marks, None).into_iter().chain(zoomed)
    });
    both.collect()
}

/// The time around spans that occur once and are too short to be seen, such as the pause of a
/// migration.
fn brief(lines: &[&Series], marks: &[Mark]) -> Option<(f64, f64)> {
    let times = || lines.iter().flat_map(|s| &s.points).map(|point| point.0);
    let (first, last) = (times().fold(f64::INFINITY, f64::min), times().fold(f64::NEG_INFINITY, f64::max));
    let is_brief = |mark: &&Mark| {
        let alone = marks.iter().filter(|other| other.name == mark.name).count() == 1;
        alone && mark.end - mark.start < (last - first) / 50.0
    };
    let found: Vec<&Mark> = marks.iter().take(MARKS).filter(is_brief).collect();
    let start = found.iter().map(|mark| mark.start).fold(f64::INFINITY, f64::min);
    let end = found.iter().map(|mark| mark.end).fold(f64::NEG_INFINITY, f64::max);
    // Spans that are far apart do not fit into one picture.
    let (length, most) = (end - start, (last - first) / 20.0);
    (length >= 0.0 && length < most).then(|| {
        let around = (2.0 * length).max((last - first) / 100.0);
        ((start - around).max(first), (end + around).min(last))
    })
}

/// The whole time, or a part of it.
fn picture(lines: &[&Series], marks: &[Mark], part: Option<(f64, f64)>) -> Option<Plot> {
    let within = |at: f64| part.is_none_or(|(from, to)| at >= from && at <= to);
    let points = || lines.iter().flat_map(|s| &s.points).filter(|point| within(point.0));
    let least = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::INFINITY, f64::min);
    let most = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::NEG_INFINITY, f64::max);
    let (start, end) = (least(&mut points().map(|p| p.0)), most(&mut points().map(|p| p.0)));
    let (low, high) = (least(&mut points().map(|p| p.1)).min(0.0), most(&mut points().map(|p| p.1)));
    if ![start, end, low, high].into_iter().all(placeable) {
        return None;
    }
    let x = match part {
        Some((from, to)) => Axis::new(from, to, false),
        None => Axis::new(start.min(0.0), end, false),
    };
    let (time, scale) = (Scale::of("s", x.to), Scale::of(&lines[0].unit, high));
    let mut kinds: Vec<&str> = Vec::new();
    for mark in marks.iter().take(MARKS) {
        if kinds.len() < KINDS && !kinds.contains(&mark.name.as_str()) {
            kinds.push(&mark.name);
        }
    }
    // The lanes of the spans lie above the lines.
    let lane = (high - low).max(f64::MIN_POSITIVE) * LANE;
    let y = Axis::new(low, high + (high - low) * 0.05 + lane * kinds.len() as f64, false);
    let pixel = (x.to - x.from) / f64::from(WIDTH);
    let what = words(&lines[0].name);
    let (title_x, title_y) = (titled("Time", &time), titled(&what, &scale));
    let (label_x, label_y) = (|v: &f64| tick(&time, *v), |v: &f64| tick(&scale, *v));
    let svg = svg(HEIGHT, |area| {
        let across = Side { axis: x.clone(), title: &title_x, label: &label_x, grid: true };
        let up = Side { axis: y.clone(), title: &title_y, label: &label_y, grid: true };
        let room = up.room();
        let mut chart = chart(area, across, up, room)?;
        let spans = || {
            marks.iter().take(MARKS).filter_map(|mark| {
                let kind = kinds.iter().position(|k| *k == mark.name)?;
                // A span shorter than a pixel is drawn one pixel wide.
                let end = mark.end.max(mark.start + pixel).min(x.to);
                (mark.start < end && end > x.from).then(|| (kind, mark.start.max(x.from), end))
            })
        };
        // The tint shows what the lines do meanwhile. The lane shows the span where the tint is too
        // weak to be seen.
        chart.draw_series(spans().map(|(kind, start, end)| {
            Rectangle::new([(start, y.from), (end, y.to)], mark_colour(kind).mix(TINT).filled())
        }))?;
        chart.draw_series(spans().map(|(kind, start, end)| {
            let top = y.to - lane * kind as f64;
            Rectangle::new([(start, top - lane * 0.8), (end, top)], mark_colour(kind).filled())
        }))?;
        for (i, line) in lines.iter().enumerate() {
            let shown: Vec<_> = line.points.iter().copied().filter(|point| within(point.0)).collect();
            chart.draw_series(LineSeries::new(thinned(&shown), colour(i).stroke_width(2)))?;
        }
        Ok(())
    })?;
    let series = lines.iter().enumerate().map(|(i, s)| (Key::Line(i), s.label().to_string()));
    let spans = kinds.iter().zip(LANES).enumerate().map(|(i, (kind, lane))| {
        (Key::Span(i), if kinds.len() > 1 { format!("{kind} ({lane} lane)") } else { (*kind).to_owned() })
    });
    let title = match part {
        Some(_) => format!("{what} over time, enlarged"),
        None => format!("{what} over time"),
    };
    Some(Plot { title, svg, legend: series.chain(spans).collect(), order: None })
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
    fn a_brief_span_that_occurs_once_is_enlarged() {
        let points = (0..100).map(|i| (f64::from(i) * 0.02, 1e6)).collect();
        let line = Series { name: "progress".into(), index: None, unit: "pages/s".into(), points };
        let mark = |name: &str, start, end| Mark { name: name.into(), start, end };
        let passes = [mark("passes", 0.5, 0.9), mark("passes", 0.9, 1.0)];
        let pause = [mark("last pass", 1.0, 1.004), mark("standing still", 1.0, 1.006)];
        assert_eq!(over_time(std::slice::from_ref(&line), &passes).len(), 1);
        let plots = over_time(&[line], &[&passes[..], &pause].concat());
        let titles: Vec<&str> = plots.iter().map(|plot| plot.title.as_str()).collect();
        assert_eq!(titles, ["Progress over time", "Progress over time, enlarged"]);
        assert!(plots[1].svg.contains("\n1\n") && !plots[1].svg.contains("\n0\n0\n"), "{}", plots[1].svg);
    }

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
