//! The pictures of the HTML face: inline SVG, drawn by plotters in placeholder colours.
//!
//! Every colour here is a name and not a colour: `style.css` gives each one its light and its dark form by selecting
//! on the attribute that plotters writes. Text from a result never enters a picture except as an axis label, which
//! plotters escapes.

use std::collections::HashMap;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged};
use plotters::prelude::*;

use super::terminal::{Group, common_scale};
use super::units::{Scale, grouped, humanised};
use super::{Figure, Histogram, Mark, Series, printable};

/// A picture and what its colours stand for.
pub(super) struct Plot {
    /// What is plotted.
    pub(super) title: String,
    /// A whole `<svg>` element.
    pub(super) svg: String,
    /// (CSS class, text), in the order of drawing.
    pub(super) legend: Vec<(String, String)>,
}

/// Wide enough for a column on a desk, and still legible when a phone shrinks it.
const SIZE: (u32, u32) = (520, 300);
const TEXT: RGBColor = RGBColor(0, 0, 1);
const GRID: RGBColor = RGBColor(0, 0, 2);
/// Lines and bars of one picture; more would not be told apart.
const COLOURS: usize = 8;
/// Pictures of one kind on a page; a result with more of them is read by programs.
const PICTURES: usize = 32;
/// More points than pixels show nothing more.
const POINTS: usize = 1000;
/// More spans than this merge into one band on the screen as well.
const MARKS: usize = 2000;

fn colour(i: usize) -> RGBColor {
    RGBColor(0, 0, 0xF0 + (i % COLOURS) as u8)
}

fn mark_colour(i: usize) -> RGBColor {
    RGBColor(0, 1, 0xF0 + (i % 3) as u8)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

fn svg(draw: impl FnOnce(&Area) -> Drawn) -> Option<String> {
    let mut out = String::new();
    {
        let area = SVGBackend::with_string(&mut out, SIZE).into_drawing_area();
        // Drawing into a string fails only where a coordinate is beyond what plotters can place: no picture then, and
        // the tables still hold the figures.
        draw(&area).and_then(|()| area.present()).ok()?;
    }
    Some(out)
}

/// An axis with ticks at round numbers, linear or logarithmic, that no range of finite numbers can hang.
#[derive(Clone)]
struct Axis {
    from: f64,
    to: f64,
    log: bool,
}

impl Axis {
    /// From `from` to `to`; a range that is empty is widened.
    fn new(from: f64, to: f64, log: bool) -> Self {
        let to = if to > from { to } else { from + from.abs().max(1.0) };
        Self { from, to, log }
    }

    fn position(&self, value: f64) -> f64 {
        match self.log {
            true => {
                (value.max(self.from).log10() - self.from.log10()) / (self.to.log10() - self.from.log10())
            }
            false => (value - self.from) / (self.to - self.from),
        }
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        limit.0 + (self.position(*value) * f64::from(limit.1 - limit.0)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        let most = hint.max_num_points().clamp(2, 8);
        if self.log {
            let (first, last) = (self.from.log10().ceil() as i32, self.to.log10().floor() as i32);
            let step = ((last - first) as usize / most + 1) as i32;
            return (first..=last).step_by(step as usize).map(|e| 10f64.powi(e)).collect();
        }
        let rough = (self.to - self.from) / most as f64;
        let power = 10f64.powf(rough.log10().floor());
        let step =
            [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= rough).unwrap_or(rough);
        let first = (self.from / step).ceil();
        (0..=most).map(|i| (first + i as f64) * step).filter(|v| *v <= self.to * (1.0 + 1e-9)).collect()
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.from..self.to
    }
}

impl plotters::coord::ranged1d::ValueFormatter<f64> for Axis {}

/// The two axes with grid and labels; `draw` gets the chart.
fn chart<'a, 'b>(
    area: &'b Area<'a>,
    x: Axis,
    y: Axis,
    x_label: &dyn Fn(&f64) -> String,
    y_label: &dyn Fn(&f64) -> String,
    grid_x: bool,
) -> Result<ChartContext<'b, SVGBackend<'a>, Cartesian2d<Axis, Axis>>, DrawingAreaErrorKind<std::io::Error>> {
    let mut chart = ChartBuilder::on(area)
        .margin_top(8)
        .margin_right(28)
        .x_label_area_size(30)
        .y_label_area_size(64)
        .build_cartesian_2d(x, y)?;
    let mut mesh = chart.configure_mesh();
    mesh.light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(GRID)
        .x_labels(5)
        .y_labels(6)
        .x_label_formatter(x_label)
        .y_label_formatter(y_label)
        .label_style(("sans-serif", 15, &TEXT));
    if !grid_x {
        mesh.disable_x_mesh();
    }
    mesh.draw()?;
    Ok(chart)
}

/// Series of the same kind and unit in one picture each, with the marks as bands behind them.
pub(super) fn over_time(series: &[Series], marks: &[Mark]) -> Vec<Plot> {
    let mut kinds: Vec<Vec<&Series>> = Vec::new();
    let mut place = HashMap::new();
    for one in series.iter().filter(|s| !s.points.is_empty()) {
        let base = one.name.split_once('[').map_or(one.name.as_str(), |(base, _)| base);
        let i = *place.entry((base, one.unit.as_str())).or_insert_with(|| {
            kinds.push(Vec::new());
            kinds.len() - 1
        });
        kinds[i].push(one);
    }
    let pictures = kinds.iter().flat_map(|kind| kind.chunks(COLOURS)).take(PICTURES);
    pictures.filter_map(|lines| time_plot(lines, marks)).collect()
}

fn time_plot(lines: &[&Series], marks: &[Mark]) -> Option<Plot> {
    let points = || lines.iter().flat_map(|s| &s.points);
    let least = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::INFINITY, f64::min);
    let most = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::NEG_INFINITY, f64::max);
    let (start, end) = (least(&mut points().map(|p| p.0)), most(&mut points().map(|p| p.0)));
    let (low, high) = (least(&mut points().map(|p| p.1)).min(0.0), most(&mut points().map(|p| p.1)));
    let x = Axis::new(start.min(0.0), end, false);
    let y = Axis::new(low, high + (high - low) * 0.05, false);
    if !(x.to - x.from).is_finite() || !(y.to - y.from).is_finite() {
        return None;
    }
    let unit = &lines[0].unit;
    let (time, scale) = (Scale::of("s", x.to), Scale::of(unit, high));
    let mut kinds: Vec<&str> = Vec::new();
    for mark in marks.iter().take(MARKS) {
        if kinds.len() < 3 && !kinds.contains(&mark.name.as_str()) {
            kinds.push(&mark.name);
        }
    }
    let width = (x.to - x.from) / f64::from(SIZE.0);
    let picture = svg(|area| {
        let mut chart =
            chart(area, x.clone(), y.clone(), &|v| whole(&time.with_unit(*v)), &|v| tick(&scale, *v), true)?;
        chart.draw_series(marks.iter().take(MARKS).filter_map(|mark| {
            let kind = kinds.iter().position(|k| *k == mark.name)?;
            // A span shorter than a pixel is still there.
            let end = mark.end.max(mark.start + width).min(x.to);
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
    let base = lines[0].name.split_once('[').map_or(lines[0].name.as_str(), |(base, _)| base);
    let mut legend: Vec<_> =
        lines.iter().enumerate().map(|(i, s)| (format!("c{i}"), s.name.clone())).collect();
    legend.extend(kinds.iter().enumerate().map(|(i, k)| (format!("m{i}"), (*k).to_owned())));
    Some(Plot { title: titled(&format!("{base} over time"), &scale), svg: picture, legend })
}

/// A tick is a number alone; its unit stands in the title.
fn tick(scale: &Scale, value: f64) -> String {
    let number = value / scale.divisor;
    if number.abs() >= 1000.0 {
        grouped(number.round() as i128)
    } else {
        format!("{}", (number * 1e6).round() / 1e6)
    }
}

fn titled(what: &str, scale: &Scale) -> String {
    if scale.unit.is_empty() { what.into() } else { format!("{what}, {}", scale.unit) }
}

/// At most [`POINTS`] points, keeping the lowest and the highest of every share so that no dip is lost.
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

/// Distributions of the same kind and unit over each other: the share of samples, both axes logarithmic, since the
/// tail is what people look for.
pub(super) fn distributions(histograms: &[Histogram]) -> Vec<Plot> {
    let mut kinds: Vec<Vec<&Histogram>> = Vec::new();
    let mut place = HashMap::new();
    for one in histograms.iter().filter(|h| h.count() > 0) {
        let base = one.name.split_once('[').map_or(one.name.as_str(), |(base, _)| base);
        let i = *place.entry((base, one.unit.as_str())).or_insert_with(|| {
            kinds.push(Vec::new());
            kinds.len() - 1
        });
        kinds[i].push(one);
    }
    kinds.iter().flat_map(|kind| kind.chunks(COLOURS)).take(PICTURES).filter_map(distribution_plot).collect()
}

fn distribution_plot(histograms: &[&Histogram]) -> Option<Plot> {
    const BINS: usize = 64;
    let bounds =
        || histograms.iter().flat_map(|h| &h.buckets).filter(|b| b.1 > 0).map(|b| b.0).filter(|b| *b > 0.0);
    let (low, high) = (bounds().fold(f64::INFINITY, f64::min), bounds().fold(0.0, f64::max));
    if !low.is_finite() || low < 1e-100 || high > 1e100 {
        return None;
    }
    let x = Axis::new(10f64.powf(low.log10().floor()), 10f64.powf((high * 1.01).log10().ceil()), true);
    let shares: Vec<[f64; BINS]> = histograms
        .iter()
        .map(|histogram| {
            let mut bins = [0.0; BINS];
            for &(bound, count) in &histogram.buckets {
                let bin = (x.position(bound.max(x.from)) * BINS as f64) as usize;
                bins[bin.min(BINS - 1)] += 100.0 * count as f64 / histogram.count() as f64;
            }
            bins
        })
        .collect();
    let smallest = shares.iter().flatten().filter(|s| **s > 0.0).fold(100.0f64, |a, b| a.min(*b));
    let y = Axis::new(10f64.powf((smallest * 0.9).log10().floor()).max(1e-9), 100.0, true);
    let edge = |bin: usize| 10f64.powf(x.from.log10() + bin as f64 / BINS as f64 * (x.to / x.from).log10());
    let unit = &histograms[0].unit;
    let picture = svg(|area| {
        let (label_x, label_y) = (
            |v: &f64| whole(&humanised(unit, *v)),
            |v: &f64| if *v < 1e-3 { format!("{v:.0e}%") } else { format!("{v}%") },
        );
        let mut chart = chart(area, x.clone(), y.clone(), &label_x, &label_y, true)?;
        for (i, bins) in shares.iter().enumerate() {
            let filled = bins.iter().enumerate().filter(|(_, share)| **share > 0.0);
            chart.draw_series(filled.map(|(bin, share)| {
                Rectangle::new([(edge(bin), y.from), (edge(bin + 1), *share)], colour(i).mix(0.35).filled())
            }))?;
            let outline = bins.iter().enumerate().flat_map(|(bin, s)| {
                let height = s.max(y.from);
                [(edge(bin), height), (edge(bin + 1), height)]
            });
            chart.draw_series(LineSeries::new(outline, colour(i).stroke_width(1)))?;
        }
        Ok(())
    })?;
    let base = histograms[0].name.split_once('[').map_or(histograms[0].name.as_str(), |(base, _)| base);
    let legend = histograms.iter().enumerate().map(|(i, h)| (format!("c{i}"), h.name.clone())).collect();
    Some(Plot { title: format!("{base}, share of samples"), svg: picture, legend })
}

/// "10.00 µs" without the zeroes that a tick does not need.
fn whole(text: &str) -> String {
    match text.split_once(' ') {
        Some((number, unit)) if number.contains('.') && !number.contains('e') => {
            format!("{} {unit}", number.trim_end_matches('0').trim_end_matches('.'))
        }
        _ => text.into(),
    }
}

/// Bars that differ by more than this are drawn on a logarithmic scale.
const LOGARITHMIC: f64 = 100.0;

/// A kind of figure, and one for each index.
type Kind<'a> = (&'a str, &'a [&'a Figure]);

/// Figures that come once an iteration, a pass or a vCPU, as bars beside each other; one picture a unit, and another
/// where the size is so different that the bars would not be seen.
pub(super) fn bars(group: &Group) -> Vec<Plot> {
    const MOST: usize = 64;
    if !(2..=MOST).contains(&group.indices.len()) {
        return Vec::new();
    }
    let mut units: Vec<(String, Vec<Kind>)> = Vec::new();
    for (base, figures) in &group.kinds {
        let unit = common_scale(figures).unit;
        match units.iter_mut().find(|(u, kinds)| *u == unit && kinds.len() < COLOURS) {
            Some((_, kinds)) => kinds.push((base, figures)),
            None => units.push((unit, vec![(base, figures)])),
        }
        if units.len() > COLOURS {
            break;
        }
    }
    units.iter().filter_map(|(_, kinds)| bar_plot(group, kinds)).collect()
}

fn bar_plot(group: &Group, kinds: &[Kind]) -> Option<Plot> {
    let all: Vec<&Figure> = kinds.iter().flat_map(|(_, figures)| figures.iter().copied()).collect();
    let top = |f: &&Figure| match f {
        Figure::Spread { max, .. } => *max,
        Figure::Single { value, .. } => *value,
    };
    let high = all.iter().map(top).fold(0.0, f64::max);
    let low = all.iter().map(|f| f.value()).fold(0.0, f64::min);
    let least = all.iter().map(|f| f.value()).filter(|v| *v > 0.0).fold(high, f64::min);
    // Where the least could not be seen beside the most, a bar's height is its order of magnitude.
    let decades = low >= 0.0 && least >= 1e-100 && high <= 1e100 && high > least * LOGARITHMIC;
    let y = match decades {
        true => Axis::new(10f64.powf((least * 0.9).log10().floor()), high * 1.5, true),
        false => Axis::new(low, high + (high - low) * 0.05, false),
    };
    if !(y.to - y.from).is_finite() || all.iter().all(|f| f.value() == 0.0) {
        return None;
    }
    let scale = common_scale(&all);
    let n = group.indices.len();
    let x = Axis::new(0.0, n as f64, false);
    let bar = 0.8 / kinds.len() as f64;
    let every = n.div_ceil(10);
    let picture = svg(|area| {
        let mut chart = chart(area, x, y.clone(), &|_| String::new(), &|v| tick(&scale, *v), false)?;
        for (i, (_, figures)) in kinds.iter().enumerate() {
            let left = |at: usize| at as f64 + 0.1 + bar * i as f64;
            chart.draw_series(figures.iter().enumerate().map(|(at, figure)| {
                let foot = if decades { y.from } else { 0.0 };
                let height = if decades { figure.value().max(foot) } else { figure.value() };
                Rectangle::new([(left(at), foot), (left(at) + bar * 0.94, height)], colour(i).filled())
            }))?;
            // The whisker is the whole spread, least to most.
            chart.draw_series(figures.iter().enumerate().filter_map(|(at, figure)| match figure {
                Figure::Spread { min, max, count: 2.., .. } => {
                    let middle = left(at) + bar * 0.47;
                    let end = |value: f64| (middle, value.max(y.from));
                    Some(PathElement::new([end(*min), end(*max)], TEXT))
                }
                _ => None,
            }))?;
        }
        let style =
            ("sans-serif", 15, &TEXT).into_text_style(area).pos(plotters::style::text_anchor::Pos::new(
                plotters::style::text_anchor::HPos::Center,
                plotters::style::text_anchor::VPos::Top,
            ));
        for (at, index) in group.indices.iter().enumerate().step_by(every) {
            let name = printable(index.unwrap_or("")).chars().take(12).collect::<String>();
            let (left, bottom) = chart.plotting_area().map_coordinate(&(at as f64 + 0.5, y.from));
            area.draw_text(&name, &style, (left, bottom + 8))?;
        }
        Ok(())
    })?;
    let title = match kinds {
        [(base, _)] => (*base).to_owned(),
        _ => kinds.iter().map(|(base, _)| *base).collect::<Vec<_>>().join(", "),
    };
    let legend =
        kinds.iter().enumerate().map(|(i, (base, _))| (format!("c{i}"), (*base).to_owned())).collect();
    let title = titled(&title, &scale);
    let title = if decades { format!("{title}, logarithmic") } else { title };
    Some(Plot { title, svg: picture, legend })
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

    #[test]
    fn axes_have_a_few_round_ticks_whatever_the_range() {
        for (from, to) in
            [(0.0, 1.0), (0.0, 7.3e9), (-5.0, 3.0), (0.0, 1e-300), (1e15, 1e15 + 1.0), (0.0, f64::MAX)]
        {
            let ticks = Axis::new(from, to, false).key_points(6);
            assert!(ticks.len() <= 9, "{from} {to} {ticks:?}");
        }
        let decades = Axis::new(1.0, 1e6, true).key_points(8);
        assert_eq!(decades, [1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6]);
    }
}
