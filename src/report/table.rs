//! Tables of the terminal form, and the order of figures in all forms: figures of one name with
//! several indices form a column, and names with the same indices share a table.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::page::escaped;
use super::units::{FAR, Scale};
use super::{Figure, Label, printable};

/// Longer tables leave out rows in the middle.
pub(super) const ROWS: usize = 40;

/// Longer cells are cut in the middle.
const CELL: usize = 56;

/// A table. The first column is aligned left, the others right.
#[derive(Default)]
pub(super) struct Table {
    rows: Vec<Vec<String>>,
    /// Whether to show all rows, no matter how many.
    whole: bool,
}

impl Table {
    /// Creates a table with a header.
    pub(super) fn with_head(head: &[&str]) -> Self {
        let mut table = Self::default();
        table.row(head.iter().map(|h| (*h).to_owned()).collect());
        table
    }

    /// Shows all rows.
    pub(super) fn whole(self) -> Self {
        Self { whole: true, ..self }
    }

    pub(super) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells.iter().map(|cell| elided(&printable(cell))).collect());
    }

    /// Prints the table, at most `width` columns wide. Columns that do not fit follow below, after
    /// the first column again.
    pub(super) fn print(&self, out: &mut String, width: usize) {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let wide = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            2 + cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(wide).collect();
        let mut next = 1;
        loop {
            let first = next;
            let mut used = widths.first().copied().unwrap_or(0);
            while next < columns && (next == first || used + widths[next] <= width) {
                used += widths[next];
                next += 1;
            }
            self.part(out, &widths, first..next);
            if next >= columns {
                return;
            }
            out.push('\n');
        }
    }

    /// Appends the table in Markdown. The first row is its head.
    pub(super) fn markdown(&self, out: &mut String) {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let line = |out: &mut String, row: &[String]| {
            let cells = (0..columns).map(|at| row.get(at).map_or(String::new(), |cell| escaped(cell)));
            let _ = writeln!(out, "| {} |", cells.collect::<Vec<_>>().join(" | "));
        };
        for (i, row) in self.rows.iter().enumerate() {
            match self.place(i) {
                Shown::Yes => line(out, row),
                Shown::Elided => line(out, &[self.elision()]),
                Shown::No => {}
            }
            if i == 0 {
                let rule = (0..columns).map(|column| if column == 0 { " --- " } else { " ---: " });
                let _ = writeln!(out, "|{}|", rule.collect::<Vec<_>>().join("|"));
            }
        }
    }

    /// Whether row `i` is shown, or left out of the middle of a long table.
    fn place(&self, i: usize) -> Shown {
        let left_out =
            !self.whole && self.rows.len() > ROWS + 1 && i > ROWS / 2 && i < self.rows.len() - ROWS / 2;
        match left_out {
            false => Shown::Yes,
            true if i == ROWS / 2 + 1 => Shown::Elided,
            true => Shown::No,
        }
    }

    fn elision(&self) -> String {
        format!("… {} more in the JSON …", self.rows.len() - 1 - ROWS)
    }

    /// Prints the first column and the columns `shown`.
    fn part(&self, out: &mut String, widths: &[usize], shown: std::ops::Range<usize>) {
        for (i, row) in self.rows.iter().enumerate() {
            match self.place(i) {
                Shown::Yes => {}
                Shown::Elided => {
                    let _ = writeln!(out, "  {}", self.elision());
                    continue;
                }
                Shown::No => continue,
            }
            for column in std::iter::once(0).chain(shown.clone()) {
                let cell = row.get(column).map_or("", String::as_str);
                let pad = widths.get(column).map_or(0, |width| width - 2 - cell.chars().count());
                let _ = match column {
                    0 => write!(out, "  {cell}{:pad$}", ""),
                    _ => write!(out, "  {:pad$}{cell}", ""),
                };
            }
            out.truncate(out.trim_end_matches(' ').len());
            out.push('\n');
        }
    }
}

/// Whether a row is shown.
enum Shown {
    Yes,
    /// Rows are left out here, and a line says so.
    Elided,
    No,
}

/// Cuts the middle out of `text` if it is too long for a cell.
fn elided(text: &str) -> String {
    let length = text.chars().count();
    if length <= CELL {
        return text.to_owned();
    }
    let kept = (CELL - 1) / 2;
    text.chars().take(kept).chain(['…']).chain(text.chars().skip(length - kept)).collect()
}

/// Figures whose names have the same indices, as one table: a row per index, a column per name.
pub(super) struct Group<'a> {
    /// The indices in order. Figures without an index have a single `None`.
    pub(super) indices: Vec<Option<&'a str>>,
    /// For each name, a figure for each index.
    pub(super) kinds: Vec<Kind<'a>>,
}

/// The figures of one name and unit.
pub(super) struct Kind<'a> {
    pub(super) name: &'a str,
    pub(super) figures: Vec<&'a Figure>,
}

/// Sorts figures into [`Group`]s, keeping their order.
pub(super) fn groups(figures: &[Figure]) -> Vec<Group<'_>> {
    let mut kinds: Vec<Kind> = Vec::new();
    let mut place = HashMap::new();
    for figure in figures {
        let Label { name, index } = &figure.label;
        let i = *place.entry((name, index.is_some(), &figure.unit)).or_insert_with(|| {
            kinds.push(Kind { name, figures: Vec::new() });
            kinds.len() - 1
        });
        kinds[i].figures.push(figure);
    }
    let mut groups: Vec<Group> = Vec::new();
    let mut place = HashMap::new();
    for kind in kinds {
        let indices: Vec<_> = kind.figures.iter().map(|f| f.label.index.as_deref()).collect();
        // All figures without an index share one table.
        let indices = if indices[0].is_none() { vec![None] } else { indices };
        let i = *place.entry(indices.clone()).or_insert_with(|| {
            groups.push(Group { indices, kinds: Vec::new() });
            groups.len() - 1
        });
        groups[i].kinds.push(kind);
    }
    groups
}

/// The scale of a column or a plot. It suits the largest value, or the smallest if that would have
/// no digits before the point. If the two are far apart, as latencies are, it suits their geometric
/// mean. Sizes in bytes use the smallest unit, so that all are exact.
pub(super) fn common_scale(figures: &[&Figure]) -> Scale {
    let sizes = || figures.iter().map(|f| f.value().abs()).filter(|size| *size > 0.0);
    let (smallest, largest) = (sizes().fold(f64::INFINITY, f64::min), sizes().fold(0.0, f64::max));
    let unit = figures.first().map_or("", |f| f.unit.as_str());
    let exact = figures.iter().map(|f| Scale::of(unit, f.value()));
    if unit == "bytes" {
        return exact.min_by(|a, b| a.divisor.total_cmp(&b.divisor)).unwrap_or(Scale::of(unit, largest));
    }
    if largest > smallest * FAR {
        return Scale::of(unit, (largest * smallest).sqrt());
    }
    let scale = Scale::of(unit, largest);
    if smallest >= scale.divisor { scale } else { Scale::of(unit, smallest) }
}

/// The cells of a column: each figure's value on `scale`, with the range of its samples if they
/// differ.
pub(super) fn cells(scale: &Scale, figures: &[&Figure]) -> Vec<String> {
    let values: Vec<f64> = figures.iter().map(|f| f.value()).collect();
    let columns = scale.column(&values).into_iter().zip(figures);
    let cell = |(cell, figure): (String, &&Figure)| match figure.spread() {
        Some(spread) if spread >= 0.001 => {
            format!("{cell} ({} to {})", scale.number(figure.min()), scale.number(figure.max()))
        }
        _ => cell,
    };
    columns.map(cell).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(table: &Table, width: usize) -> String {
        let mut out = String::new();
        table.print(&mut out, width);
        out
    }

    #[test]
    fn what_does_not_fit_beside_follows_below_with_the_same_rows() {
        let mut table = Table::with_head(&["name", "first", "second", "third"]);
        table.row(["a", "1", "2", "3"].map(str::to_owned).to_vec());
        assert_eq!(printed(&table, 100), "  name  first  second  third\n  a         1       2      3\n");
        let narrow = printed(&table, 24);
        assert_eq!(narrow, "  name  first  second\n  a         1       2\n\n  name  third\n  a         3\n");
        assert!(narrow.lines().all(|line| line.chars().count() <= 24));
    }

    #[test]
    fn a_cell_of_any_length_is_cut_to_one_that_fits() {
        let mut table = Table::with_head(&["name", "x"]);
        table.row(vec![format!("a{}z", "b".repeat(70_000)), "1".into()]);
        let text = printed(&table, 80);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{}", text.len());
        assert!(text.contains("  ab") && text.contains("bz") && text.contains('…'));
    }

    #[test]
    fn a_column_has_the_unit_in_which_its_smallest_has_digits() {
        let of = |values: &[f64]| {
            let figures: Vec<Figure> = values.iter().map(|v| Figure::once("r", "rounds/s", *v)).collect();
            let figures: Vec<&Figure> = figures.iter().collect();
            let scale = common_scale(&figures);
            (scale.unit.clone(), cells(&scale, &figures))
        };
        let words = |cells: &[&str]| cells.iter().map(|c| (*c).to_owned()).collect::<Vec<_>>();
        assert_eq!(of(&[16.74, 1674.0]), ("rounds/s".into(), words(&["16.74", "1,674.00"])));
        assert_eq!(of(&[16_740.0, 1674.0]), ("k rounds/s".into(), words(&["16.740", "1.674"])));
    }
}
