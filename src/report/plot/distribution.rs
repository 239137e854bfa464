//! Plots of distributions with the same name and unit, on top of each other, as shares of the
//! samples. Both axes are logarithmic, because the tail matters most.

use std::collections::HashMap;

use plotters::prelude::*;

use super::{Axis, COLOURS, HEIGHT, Key, PICTURES, Plot, Side};
use super::{chart, colour, logarithmic, placeable, svg, whole, words};
use crate::Histogram;
use crate::units::humanised;

/// The number of bars of a distribution.
const BINS: usize = 64;

/// One plot per name and unit.
pub(crate) fn distributions(histograms: &[Histogram]) -> Vec<Plot> {
    let mut kinds: Vec<Vec<&Histogram>> = Vec::new();
    let mut place = HashMap::new();
    for one in histograms.iter().filter(|h| h.count() > 0) {
        let i = *place.entry((&one.name, &one.unit)).or_insert_with(|| {
            kinds.push(Vec::new());
            kinds.len() - 1
        });
        kinds[i].push(one);
    }
    kinds.iter().flat_map(|kind| kind.chunks(COLOURS)).take(PICTURES).filter_map(picture).collect()
}

fn picture(histograms: &[&Histogram]) -> Option<Plot> {
    let bounds =
        || histograms.iter().flat_map(|h| &h.buckets).filter(|b| b.1 > 0).map(|b| b.0).filter(|b| *b > 0.0);
    let (low, high) = (bounds().fold(f64::INFINITY, f64::min), bounds().fold(0.0, f64::max));
    if !placeable(low) || !placeable(high) {
        return None;
    }
    let x = Axis::decades(low, high);
    let shares: Vec<[f64; BINS]> = histograms.iter().map(|histogram| shares(histogram, &x)).collect();
    let smallest = shares.iter().flatten().filter(|s| **s > 0.0).fold(100.0f64, |a, b| a.min(*b));
    let y = Axis::new(10f64.powf((smallest * 0.9).log10().floor()).max(1e-9), 100.0, true);
    let edge = |bin: usize| 10f64.powf(x.from.log10() + bin as f64 / BINS as f64 * (x.to / x.from).log10());
    let unit = &histograms[0].unit;
    let (label_x, label_y) = (|v: &f64| whole(&humanised(unit, *v)), |v: &f64| percent(*v));
    let what = words(&histograms[0].name);
    let title_x = logarithmic(&what, true);
    let svg = svg(HEIGHT, |area| {
        let across = Side { axis: x.clone(), title: &title_x, label: &label_x, grid: true };
        let up = Side { axis: y.clone(), title: "Share, logarithmic", label: &label_y, grid: true };
        let room = up.room();
        let mut chart = chart(area, across, up, room)?;
        for (i, bins) in shares.iter().enumerate() {
            let filled = bins.iter().enumerate().filter(|(_, share)| **share > 0.0);
            chart.draw_series(filled.map(|(bin, share)| {
                Rectangle::new([(edge(bin), y.from), (edge(bin + 1), *share)], colour(i).mix(0.35).filled())
            }))?;
            let outline = bins.iter().enumerate().flat_map(|(bin, s)| {
                let height = s.max(y.from);
                [(edge(bin), height), (edge(bin + 1), height)]
            });
            chart.draw_series(LineSeries::new(outline, colour(i).stroke_width(2)))?;
        }
        Ok(())
    })?;
    let legend = histograms.iter().enumerate().map(|(i, h)| (Key::Line(i), h.label().to_string())).collect();
    Some(Plot { title: format!("{what}: share of the samples"), svg, legend, order: None })
}

/// The percentage of the samples in each bin of `axis`.
fn shares(histogram: &Histogram, axis: &Axis) -> [f64; BINS] {
    let total = histogram.count() as f64;
    let mut bins = [0.0; BINS];
    for &(bound, count) in &histogram.buckets {
        let bin = (axis.position(bound.max(axis.from)) * BINS as f64) as usize;
        bins[bin.min(BINS - 1)] += 100.0 * count as f64 / total;
    }
    bins
}

/// Formats a power of ten as a percentage.
fn percent(value: f64) -> String {
    let decimals = (-value.log10().round()).max(0.0) as usize;
    format!("{value:.decimals$}%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_of_shares_are_all_written_alike() {
        assert_eq!([100.0, 1.0, 0.1, 1e-4].map(percent), ["100%", "1%", "0.1%", "0.0001%"]);
    }

    #[test]
    fn a_distribution_of_any_length_is_gone_through_once() {
        // With quadratic time, a million buckets would take most of an hour.
        let buckets = (1..=1_000_000).map(|i| (f64::from(i), 1)).collect();
        let long = Histogram { name: "l".into(), index: None, unit: "ns".into(), buckets, max: None };
        assert_eq!(distributions(&[long]).len(), 1);
    }
}
