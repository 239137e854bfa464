//! The plots of the HTML form: inline SVG, drawn by plotters in placeholder colours.
//!
//! Each colour here is a placeholder. `style.css` selects on the attribute that plotters writes and
//! sets the light and dark colours. Text from a result enters a plot only as an axis label, which
//! plotters escapes. This file has the axes and shared code. Each kind of plot has its own file.

mod bars;
mod distribution;
mod ratios;
mod time;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::printable;
use super::units::{Scale, grouped};

pub(super) use bars::{bars, of_headline};
pub(super) use distribution::distributions;
pub(super) use ratios::ratios;
#[cfg(test)]
pub(super) use time::TINT;
pub(super) use time::over_time;

/// A plot and its legend.
pub(super) struct Plot {
    /// What is plotted.
    pub(super) title: String,
    /// A whole `<svg>` element.
    pub(super) svg: String,
    /// In drawing order.
    pub(super) legend: Vec<(Key, String)>,
    /// How the legend's order is seen in the plot, if readers need it.
    pub(super) order: Option<&'static str>,
}

/// The sample before a text in the legend, with the number of its colour.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Key {
    /// A line, with its dashes.
    Line(usize),
    /// A bar or a shape.
    Bar(usize),
    /// A span of time.
    Span(usize),
}

/// Fits a column on a desktop. A page of 360 pixels shows it at five eighths of its size.
const WIDTH: u32 = 520;
const HEIGHT: u32 = 320;
/// The size of text as plotters counts it. It writes a font size of 1/1.24 of that: 16 pixels, of
/// which 10 are left on such a page.
const TEXT_SIZE: u32 = 20;
/// The approximate width of a character.
const CHARACTER: u32 = 10;
/// The height of a line of text.
const LINE: u32 = 20;
/// The right margin, for half of the last tick's label.
const MARGIN: u32 = 28;
/// The left margin: a turned title reaches a little beyond its place.
const LEFT: u32 = 4;
const TEXT: RGBColor = RGBColor(0, 0, 1);
const GRID: RGBColor = RGBColor(0, 0, 2);
/// The colour of the page below the plot.
const GROUND: RGBColor = RGBColor(0, 0, 3);
/// The most lines or bars in one plot. More cannot be told apart.
const COLOURS: usize = 8;
/// The most plots of one kind on a page. Larger results are for programs.
const PICTURES: usize = 32;

fn colour(i: usize) -> RGBColor {
    RGBColor(0, 0, 0xF0 + (i % COLOURS) as u8)
}

fn mark_colour(i: usize) -> RGBColor {
    RGBColor(0, 1, 0xF0 + (i % 3) as u8)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Failed = DrawingAreaErrorKind<std::io::Error>;
type Chart<'a, 'b> = ChartContext<'b, SVGBackend<'a>, Cartesian2d<Axis, Axis>>;

fn svg(height: u32, draw: impl FnOnce(&Area) -> Result<(), Failed>) -> Option<String> {
    let mut out = String::new();
    {
        let area = SVGBackend::with_string(&mut out, (WIDTH, height)).into_drawing_area();
        // Drawing into a string fails only if a coordinate is out of plotters' range. The plot is
        // left out then. The tables still have the figures.
        draw(&area).and_then(|()| area.present()).ok()?;
    }
    Some(out)
}

/// Larger values cannot be drawn at any scale.
fn placeable(value: f64) -> bool {
    value == 0.0 || (1e-100..1e100).contains(&value.abs())
}

/// A name in words.
fn words(name: &str) -> String {
    let text = name.replace('_', " ");
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// The quantity that a unit measures.
fn quantity(unit: &str) -> String {
    match unit {
        "s" | "ms" | "us" | "µs" | "ns" | "instructions" => "Time".into(),
        "bytes" => "Size".into(),
        "%" => "Share".into(),
        "" => "Number".into(),
        _ => match unit.split_once('/') {
            Some((what, "s")) => format!("{} per second", words(what)),
            _ => words(unit),
        },
    }
}

/// The words with which all names begin, or else end.
fn in_common(names: &[&str]) -> Option<String> {
    let split: Vec<Vec<&str>> = names.iter().map(|name| name.split('_').collect()).collect();
    let first = split.first()?;
    let agree = |at: &dyn Fn(&[&str]) -> Vec<String>| {
        let all: Vec<Vec<String>> = split.iter().map(|words| at(words)).collect();
        let alike = |i: &usize| all.iter().all(|words| words.get(*i) == all[0].get(*i));
        (0..first.len()).take_while(alike).map(|i| all[0][i].clone()).collect::<Vec<String>>()
    };
    let begin = agree(&|words| words.iter().map(|w| (*w).to_owned()).collect());
    let mut end = agree(&|words| words.iter().rev().map(|w| (*w).to_owned()).collect());
    end.reverse();
    [begin, end].into_iter().find(|words| !words.is_empty()).map(|common| words(&common.join("_")))
}

/// The title of a logarithmic axis.
fn logarithmic(title: &str, log: bool) -> String {
    if log { format!("{title}, logarithmic") } else { title.into() }
}

/// An axis title with the unit, if there is one to show.
fn titled(what: &str, scale: &Scale) -> String {
    match scale.unit.is_empty() || scale.unit.eq_ignore_ascii_case(what) {
        true => what.into(),
        false => format!("{what} [{}]", scale.unit),
    }
}

/// The most ticks on an axis.
const TICKS: usize = 6;

/// A linear or logarithmic axis with ticks at round numbers. It terminates for any finite range.
#[derive(Clone)]
struct Axis {
    from: f64,
    to: f64,
    log: bool,
}

impl Axis {
    /// An axis from `from` to `to`. An empty range is widened.
    fn new(from: f64, to: f64, log: bool) -> Self {
        let to = if to > from { to } else { from + from.abs().max(1.0) };
        Self { from, to, log }
    }

    /// An axis over whole powers of ten that covers both ends.
    fn decades(least: f64, most: f64) -> Self {
        Self::new(
            10f64.powf((least * 0.999).log10().floor()),
            10f64.powf((most * 1.001).log10().ceil()),
            true,
        )
    }

    fn ticks(&self) -> Vec<f64> {
        self.key_points(TICKS)
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
        let most = hint.max_num_points().clamp(2, TICKS);
        if self.log {
            let (first, last) = (self.from.log10().ceil() as i32, self.to.log10().floor() as i32);
            let step = ((last - first) as usize / most + 1) as i32;
            return (first..=last).step_by(step.max(1) as usize).map(|e| 10f64.powi(e)).collect();
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

/// An axis, its title and tick labels, and whether it has grid lines.
struct Side<'a> {
    axis: Axis,
    title: &'a str,
    label: &'a dyn Fn(&f64) -> String,
    grid: bool,
}

impl Side<'_> {
    /// The width of the title and the longest label in pixels, at the left of a plot.
    fn room(&self) -> u32 {
        let longest = self.axis.ticks().iter().map(|v| (self.label)(v).chars().count()).max().unwrap_or(0);
        beside(longest)
    }
}

/// The space for an axis title and labels of `characters` at the left of a plot.
fn beside(characters: usize) -> u32 {
    LINE + characters as u32 * CHARACTER + 14
}

/// The height of a plot without what is drawn in it: margin, tick labels and axis title.
const AROUND: u32 = 8 + BELOW;
/// The height of the tick labels and the axis title below a plot.
const BELOW: u32 = 14 + 2 * LINE;

/// Draws both axes with grid, labels and titles. `room` is the space at the left of the plot.
fn chart<'a, 'b>(area: &'b Area<'a>, x: Side, y: Side, room: u32) -> Result<Chart<'a, 'b>, Failed> {
    let mut chart = ChartBuilder::on(area)
        .margin_top(8)
        .margin_left(LEFT)
        .margin_right(MARGIN)
        .x_label_area_size(BELOW)
        .y_label_area_size(room)
        .build_cartesian_2d(x.axis.clone(), y.axis.clone())?;
    let mut mesh = chart.configure_mesh();
    mesh.light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(TEXT)
        .x_desc(x.title)
        .y_desc(y.title)
        .axis_desc_style(("sans-serif", TEXT_SIZE, &TEXT))
        .x_labels(TICKS)
        .y_labels(TICKS)
        .x_label_formatter(x.label)
        .y_label_formatter(y.label)
        .label_style(("sans-serif", TEXT_SIZE, &TEXT));
    if !x.grid {
        mesh.disable_x_mesh();
    }
    if !y.grid {
        mesh.disable_y_mesh();
    }
    mesh.draw()?;
    Ok(chart)
}

/// Draws a result's text at a pixel position.
fn name_at(area: &Area, text: &str, at: (i32, i32), horizontal: HPos, vertical: VPos) -> Result<(), Failed> {
    let style = ("sans-serif", TEXT_SIZE, &TEXT).into_text_style(area).pos(Pos::new(horizontal, vertical));
    area.draw_text(&printable(text), &style, at)
}

/// A tick shows only the number. The axis title has the unit.
fn tick(scale: &Scale, value: f64) -> String {
    let number = value / scale.divisor;
    if number.abs() >= 1000.0 {
        grouped(number.round() as i128)
    } else {
        format!("{}", (number * 1e6).round() / 1e6)
    }
}

/// "10.00 µs" without the trailing zeroes.
fn whole(text: &str) -> String {
    match text.split_once(' ') {
        Some((number, unit)) if number.contains('.') && !number.contains('e') => {
            format!("{} {unit}", number.trim_end_matches('0').trim_end_matches('.'))
        }
        _ => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_a_few_round_ticks_whatever_the_range() {
        for (from, to) in
            [(0.0, 1.0), (0.0, 7.3e9), (-5.0, 3.0), (0.0, 1e-300), (1e15, 1e15 + 1.0), (0.0, f64::MAX)]
        {
            let ticks = Axis::new(from, to, false).ticks();
            assert!(ticks.len() <= TICKS + 1, "{from} {to} {ticks:?}");
        }
        let decades = Axis::new(1.0, 1e5, true).ticks();
        assert_eq!(decades, [1.0, 10.0, 100.0, 1e3, 1e4, 1e5]);
        assert_eq!(Axis::decades(0.002, 30.0).ticks(), [1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0]);
    }

    #[test]
    fn a_picture_is_called_by_what_it_shows() {
        assert_eq!(words("write_latency"), "Write latency");
        assert_eq!(
            (quantity("pages/s"), quantity("ns"), quantity("faults")),
            ("Pages per second".into(), "Time".into(), "Faults".into())
        );
    }
}
