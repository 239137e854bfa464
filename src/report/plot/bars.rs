//! Bar charts of figures per iteration, pass or vCPU. The bars are vertical if the indices fit
//! below them, otherwise horizontal with the indices at the left.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use super::{
    AROUND, Area, Axis, CHARACTER, COLOURS, Failed, GROUND, HEIGHT, Key, LEFT, LINE, MARGIN, Plot, Side,
};
use super::{TEXT, WIDTH, beside, chart, colour, in_common, logarithmic, name_at, placeable, quantity, svg};
use super::{tick, titled};
use crate::table::{Group, Kind, common_scale};
use crate::units::Scale;
use crate::{Figure, Label};

/// If the values differ by more than this factor, the scale is logarithmic.
const LOGARITHMIC: f64 = 100.0;
/// The most indices in one plot.
const MAX_BARS: usize = 64;
/// The most characters shown of an index.
const NAME: usize = 18;
/// The space for names below a plot in pixels.
const ACROSS: u32 = WIDTH - LEFT - MARGIN - LINE - 6 * CHARACTER - 14;

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

/// The row of the headline: if the figures beside it measure the same in other cases, as at another
/// dirty rate, they show how it changes.
pub(crate) fn of_headline(groups: &[Group], headline: &Label) -> Option<Plot> {
    let index = headline.index.as_deref()?;
    let has = |kind: &&Kind| kind.figures.iter().any(|figure| figure.label == *headline);
    let group = groups.iter().find(|group| group.kinds.iter().any(|kind| has(&kind)))?;
    // Passes, phases and vCPUs are no figures: what lies beside them is something else.
    let names: Vec<String> = group.indices.iter().map(|index| index.unwrap_or("").to_owned()).collect();
    let row = names.iter().position(|other| other == index).filter(|_| indexed_by(&names) == "Case")?;
    let unit = &group.kinds.iter().find(has)?.figures[row].unit;
    let others: Vec<_> = group.kinds.iter().filter(|kind| kind.figures[row].unit == *unit).collect();
    let figures = others.iter().map(|kind| kind.figures[row]).collect();
    let indices = others.iter().map(|kind| Some(kind.name)).collect();
    bars(&Group { indices, kinds: vec![Kind { name: index, figures }] }).pop()
}

/// What the indices are, for the title of their axis.
fn indexed_by(names: &[String]) -> &'static str {
    const PHASES: [&str; 6] = ["before", "during", "after", "populated", "logged", "warm"];
    let is_phase = |name: &&String| PHASES.contains(&name.as_str());
    let others: Vec<&String> = names.iter().filter(|name| !is_phase(name)).collect();
    let numbers: Vec<u64> = others.iter().filter_map(|name| name.parse().ok()).collect();
    let all_numbers = numbers.len() == others.len();
    let in_a_row = numbers.first().is_some_and(|first| *first == 0 || *first == 1 && numbers.len() > 2)
        && numbers.windows(2).all(|pair| pair[1] == pair[0] + 1);
    match others.is_empty() {
        true => "Phase",
        false if names.iter().all(|name| name.starts_with("vcpu")) => "vCPU",
        false if names.iter().any(|name| name.ends_with("/s")) => "Rate",
        false if all_numbers && in_a_row => "Pass",
        false if all_numbers => "Index",
        false => "Case",
    }
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
        let lying = names.len() as u32 * (widest + 1) * CHARACTER > ACROSS;
        // Numbers may be left out, because their neighbours imply them.
        let counted = names.iter().all(|name| name.parse::<u64>().is_ok());
        Some(Self { kinds, names, scale: common_scale(&all), values, lying: lying && !counted })
    }

    fn plot(&self) -> Option<Plot> {
        let count = self.names.len();
        let slots = Axis::new(0.0, count as f64, false);
        let height = match self.lying {
            true => AROUND + (count * (self.kinds.len() * 10).max(24)).clamp(80, 1600) as u32,
            false => HEIGHT,
        };
        let names: Vec<&str> = self.kinds.iter().map(|kind| kind.name).collect();
        let what = in_common(&names).unwrap_or_else(|| quantity(&self.kinds[0].figures[0].unit));
        let title = logarithmic(&titled(&what, &self.scale), self.values.log);
        let label = |v: &f64| tick(&self.scale, *v);
        let svg = svg(height, |area| {
            let values = Side { axis: self.values.clone(), title: &title, label: &label, grid: true };
            let index = indexed_by(&self.names);
            let slots = Side { axis: slots.clone(), title: index, label: &|_| String::new(), grid: false };
            let names = self.names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
            let (x, y, room) = match self.lying {
                true => (values, slots, beside(names)),
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
                // The whisker goes from the smallest to the largest sample. A line in the ground's
                // colour parts it from the bar.
                for style in [GROUND.stroke_width(5), TEXT.stroke_width(2)] {
                    let sampled = kind.figures.iter().enumerate().filter(|(_, f)| f.samples.len() > 1);
                    chart.draw_series(sampled.map(|(at, figure)| {
                        let (from, to) = self.place(at, i);
                        let middle = (from + to) / 2.0;
                        let ends = [self.point(middle, figure.min()), self.point(middle, figure.max())];
                        PathElement::new(ends, style)
                    }))?;
                }
            }
            let at = |slot: f64| chart.plotting_area().map_coordinate(&self.point(slot, self.values.from));
            self.name(area, at)
        })?;
        let legend = self.kinds.iter().enumerate().map(|(i, kind)| (Key::Bar(i), kind.name.to_owned()));
        let order = if self.lying { "From top to bottom:" } else { "From left to right:" };
        Some(Plot { title: what, svg, legend: legend.collect(), order: Some(order) })
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
        let fit = ACROSS / (widest * CHARACTER);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::groups;

    #[test]
    fn the_axis_of_indices_says_what_they_are() {
        let title = |names: &str| indexed_by(&names.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(title("before during after"), "Phase");
        assert_eq!(title("before 0 1 2 after"), "Pass");
        assert_eq!(title("1 2 3"), "Pass");
        assert_eq!(title("1 2"), "Index");
        assert_eq!(title("0 25 50"), "Index");
        assert_eq!(title("vcpu0 vcpu1"), "vCPU");
        assert_eq!(title("map unmap"), "Case");
        assert_eq!(title("16_MiB/s max"), "Rate");
    }

    #[test]
    fn the_headline_is_drawn_over_the_cases_that_measure_it() {
        let figure = |name: &str, index: &str, value| Figure::once(Label::of(name, index), "s", value);
        let mut figures = Vec::new();
        for (rate, value) in [("16 MiB/s", 0.01), ("64 MiB/s", 0.02)] {
            figures.extend([figure(rate, "downtime", value), figure(rate, "total", 1.0)]);
        }
        let plot = of_headline(&groups(&figures), &Label::of("16 MiB/s", "downtime")).unwrap();
        assert_eq!(plot.title, "Downtime");
        for text in ["16 MiB/s", "64 MiB/s", "Downtime [ms]", "Rate"] {
            assert!(plot.svg.contains(&format!("\n{text}\n")), "{text}: {}", plot.svg);
        }
        assert!(of_headline(&groups(&figures[..2]), &Label::of("16 MiB/s", "downtime")).is_none());
        let passes: Vec<_> = ["get", "clear"]
            .into_iter()
            .flat_map(|name| (0..3).map(move |pass| Figure::once(Label::of(name, pass), "s", 1.0)))
            .collect();
        assert!(of_headline(&groups(&passes), &Label::of("get", 1)).is_none());
    }
}
