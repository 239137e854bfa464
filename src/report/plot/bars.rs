//! Bar charts of figures per iteration, pass or vCPU. The bars are vertical if the indices fit
//! below them, otherwise horizontal with the indices at the left.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::{Area, Axis, CHARACTER, COLOURS, Failed, HEIGHT, MARGIN, Plot, Side, TEXT, WIDTH};
use super::{chart, colour, in_common, name_at, placeable, quantity, svg, tick, titled};
use crate::Figure;
use crate::table::{Group, Kind, common_scale};
use crate::units::Scale;

/// If the values differ by more than this factor, the scale is logarithmic.
const LOGARITHMIC: f64 = 100.0;
/// The most indices in one plot.
const MAX_BARS: usize = 64;
/// The most characters shown of an index.
const NAME: usize = 18;

/// One plot per unit. Values of very different size get another, because the bars would not be
/// visible.
pub(crate) fn bars(group: &Group) -> Vec<Plot> {
    if !(2..=MAX_BARS).contains(&group.indices.len()) {
        return Vec::new();
    }
    let mut units: Vec<(String, Vec<&Kind>)> = Vec::new();
    for kind in &group.kinds {
        let unit = common_scale(&kind.figures).unit;
        match units.iter_mut().find(|(u, kinds)| *u == unit && kinds.len() < COLOURS) {
            Some((_, kinds)) => kinds.push(kind),
            None => units.push((unit, vec![kind])),
        }
        if units.len() > COLOURS {
            break;
        }
    }
    units.iter().filter_map(|(_, kinds)| Bars::new(group, kinds)?.plot()).collect()
}

/// The bars of one plot.
struct Bars<'a> {
    kinds: &'a [&'a Kind<'a>],
    names: Vec<String>,
    scale: Scale,
    values: Axis,
    lying: bool,
}

impl<'a> Bars<'a> {
    fn new(group: &Group, kinds: &'a [&'a Kind<'a>]) -> Option<Self> {
        let all: Vec<&Figure> = kinds.iter().flat_map(|kind| kind.figures.iter().copied()).collect();
        let high = all.iter().map(|f| f.max()).fold(0.0, f64::max);
        let low = all.iter().map(|f| f.min()).fold(0.0, f64::min);
        let least = all.iter().map(|f| f.value()).filter(|v| *v > 0.0).fold(high, f64::min);
        if ![low, high, least].into_iter().all(placeable) || all.iter().all(|f| f.value() == 0.0) {
            return None;
        }
        // If the smallest bar would be invisible beside the largest, the scale is logarithmic.
        let values = match low >= 0.0 && high > least * LOGARITHMIC {
            true => Axis::new(10f64.powf((least * 0.9).log10().floor()), high * 1.5, true),
            false => Axis::new(low, high + (high - low) * 0.05, false),
        };
        let name = |index: &Option<&str>| index.unwrap_or("").chars().take(NAME).collect::<String>();
        let names: Vec<String> = group.indices.iter().map(name).collect();
        let widest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0) as u32;
        let lying = names.len() as u32 * (widest + 1) * CHARACTER > WIDTH - 2 * MARGIN - 40;
        // Numbers may be left out, because their neighbours imply them.
        let counted = names.iter().all(|name| name.parse::<u64>().is_ok());
        Some(Self { kinds, names, scale: common_scale(&all), values, lying: lying && !counted })
    }

    fn plot(&self) -> Option<Plot> {
        let count = self.names.len();
        let slots = Axis::new(0.0, count as f64, false);
        let height = match self.lying {
            true => 38 + (count * self.kinds.len().max(2) * 10).clamp(80, 1200) as u32,
            false => HEIGHT,
        };
        let label = |v: &f64| tick(&self.scale, *v);
        let svg = svg(height, |area| {
            let values = Side { axis: self.values.clone(), label: &label, grid: true };
            let slots = Side { axis: slots.clone(), label: &|_| String::new(), grid: false };
            let names = self.names.iter().map(|name| name.chars().count()).max().unwrap_or(0) as u32;
            let (x, y, room) = match self.lying {
                true => (values, slots, names * CHARACTER + 14),
                false => {
                    let room = values.room();
                    (slots, values, room)
                }
            };
            let mut chart = chart(area, x, y, room)?;
            for (i, kind) in self.kinds.iter().enumerate() {
                chart.draw_series(kind.figures.iter().enumerate().map(|(at, figure)| {
                    let (from, to) = self.place(at, i);
                    let corners = [self.point(from, self.foot()), self.point(to, figure.value())];
                    Rectangle::new(corners, colour(i).filled())
                }))?;
                // The whisker goes from the smallest to the largest sample.
                chart.draw_series(
                    kind.figures.iter().enumerate().filter(|(_, f)| f.samples.len() > 1).map(
                        |(at, figure)| {
                            let (from, to) = self.place(at, i);
                            let middle = (from + to) / 2.0;
                            let ends = [self.point(middle, figure.min()), self.point(middle, figure.max())];
                            PathElement::new(ends, TEXT)
                        },
                    ),
                )?;
            }
            let at = |slot: f64| chart.plotting_area().map_coordinate(&self.point(slot, self.values.from));
            self.name(area, at)
        })?;
        let names: Vec<&str> = self.kinds.iter().map(|kind| kind.name).collect();
        let title = in_common(&names).unwrap_or_else(|| quantity(&self.kinds[0].figures[0].unit));
        let title = titled(&title, &self.scale);
        let title = if self.values.log { format!("{title}, logarithmic") } else { title };
        let legend = self.kinds.iter().enumerate().map(|(i, kind)| (format!("c{i}"), kind.name.to_owned()));
        Some(Plot { title, svg, legend: legend.collect() })
    }

    /// The value at which bars begin.
    fn foot(&self) -> f64 {
        if self.values.log { self.values.from } else { 0.0 }
    }

    /// The extent of a bar across the slot of index `at`.
    fn place(&self, at: usize, kind: usize) -> (f64, f64) {
        let width = 0.8 / self.kinds.len() as f64;
        // Horizontal bars are read from the top, so the first is the topmost.
        let (at, kind) = match self.lying {
            true => (self.names.len() - 1 - at, self.kinds.len() - 1 - kind),
            false => (at, kind),
        };
        let from = at as f64 + 0.1 + width * kind as f64;
        (from, from + width * 0.94)
    }

    fn point(&self, slot: f64, value: f64) -> (f64, f64) {
        let value = value.max(self.values.from);
        if self.lying { (value, slot) } else { (slot, value) }
    }

    /// Writes the indices beside their bars, as many as fit.
    fn name(&self, area: &Area, at: impl Fn(f64) -> (i32, i32)) -> Result<(), Failed> {
        let widest = self.names.iter().map(|name| name.chars().count() as u32 + 1).max().unwrap_or(1);
        let fit = (WIDTH - 2 * MARGIN - 40) / (widest * CHARACTER);
        let every = if self.lying { 1 } else { self.names.len().div_ceil(fit.max(1) as usize) };
        for (i, name) in self.names.iter().enumerate().step_by(every) {
            let slot = if self.lying { self.names.len() - 1 - i } else { i };
            let (x, y) = at(slot as f64 + 0.5);
            match self.lying {
                true => name_at(area, name, (x - 8, y), HPos::Right, VPos::Center)?,
                false => name_at(area, name, (x, y + 8), HPos::Center, VPos::Top)?,
            }
        }
        Ok(())
    }
}
