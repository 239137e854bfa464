//! The terminal form and the Markdown form of a comparison: what changed, the changed figures, then
//! what was compared.

use super::results::{Comparison, Question};
use super::{Change, FigureVerdict, Weighed};
use crate::answer::{Outcome, Verdict};
use crate::page::{Extent, Form, Page, words};
use crate::printable;
use crate::table::Table;
use crate::terminal::command_line;
use crate::units::{Scale, grouped};

/// Explains the columns, once below all tables.
pub(crate) const METHOD: &str = "\
n counts pairs that were measured in turn, or A/B without pairs. B/A is the ratio of geometric means. Noise means that no \
difference was shown. The interval is Student's on the logarithms (Welch's without pairs), widened by the resolution of the \
values. The headline (*) is tested at 95 % on its own. All other figures share one 95 % level (Holm); each interval uses its \
figure's level.";

/// Tables of compared figures with the explanation of their columns, for callers of
/// [`super::weigh`].
pub struct Tables(Page);

impl Tables {
    /// An empty text, `width` columns wide.
    pub fn new(width: usize) -> Self {
        Self(Page::new(Form::Text(width)))
    }

    /// A line of text above a table.
    pub fn text(&mut self, text: &str) {
        self.0.gap();
        self.0.text(text);
    }

    /// All rows as a table.
    pub fn table(&mut self, rows: &[Weighed]) {
        table(&mut self.0, in_order(rows));
    }

    /// The text with the explanation.
    pub fn finish(mut self) -> String {
        self.0.gap();
        self.0.line("method", &words(METHOD), " ");
        self.0.finish()
    }
}

impl Comparison {
    /// The comparison in this form.
    pub fn render(&self, form: Form, extent: Extent) -> String {
        let mut page = Page::new(form);
        for question in &self.questions {
            page.gap();
            write_question(&mut page, question, extent);
        }
        for alone in &self.alone {
            let (name, command) = (printable(&alone.name), command_line(&alone.command));
            page.line(&format!("only in {}", printable(&alone.side)), &[format!("{name}  $ {command}")], " ");
        }
        page.gap();
        match extent {
            Extent::Short(more) => page.text(more),
            Extent::Whole => page.line("method", &words(METHOD), " "),
        }
        page.finish()
    }
}

impl Question {
    /// Returns the outcome of the comparison.
    pub(crate) fn verdict(&self) -> Verdict {
        let of = |change| self.rows.iter().filter(move |row| row.change() == Some(change)).count();
        let [slower, faster, higher, lower] =
            [Change::Slower, Change::Faster, Change::Higher, Change::Lower].map(of);
        let compared = self.rows.len();
        let counts = [(slower, "slower"), (faster, "faster"), (higher, "higher"), (lower, "lower")];
        let counted: Vec<_> =
            counts.iter().filter(|(n, _)| *n > 0).map(|(n, word)| format!("{n} {word}")).collect();
        let counted = format!("{} of {compared} figures", counted.join(", "));
        let headline = self.rows.iter().find(|row| row.headline);
        let (word, text) = match (slower, faster, higher + lower) {
            (0, 0, 0) if self.rows.iter().any(|row| row.verdict == FigureVerdict::TooFew) => {
                let many = self.rows.iter().map(|row| row.of.least()).max().unwrap_or(0);
                let unit = self.unit;
                let text = match many < self.least {
                    true => format!("{many} {unit} per side, {} are needed to show a difference", self.least),
                    false => format!("{many} {unit} per side do not vary, so more are needed to tell"),
                };
                (Outcome::TooFew, text)
            }
            (0, 0, 0) => (Outcome::Same, format!("no difference was shown in {compared} figures")),
            _ => {
                let word = match (slower, faster) {
                    (0, 0) => Outcome::Differs,
                    (0, _) => Outcome::Faster,
                    (_, _) => Outcome::Slower,
                };
                let first =
                    headline.map_or(String::new(), |row| format!("; {}: {}", row.of.label, verdict(row)));
                (word, counted + &first)
            }
        };
        let warned = |(label, warning): (&str, &super::results::Warning)| {
            let word = match warning.kind {
                "CUT OFF" => Outcome::CutOff,
                "NOT RUN" => Outcome::NotRun,
                _ => Outcome::Invalid,
            };
            (word, format!("{label}, {}", warning.text))
        };
        let sides = ["A", "B"].into_iter().zip(&self.sides);
        let warnings = sides.flat_map(|(label, side)| side.warnings.iter().map(move |w| (label, w)));
        Verdict {
            outcome: Some(word),
            text: format!("{}: {text}", self.name),
            reasons: warnings.map(warned).collect(),
            figures: Vec::new(),
            next: None,
        }
    }
}

fn write_question(page: &mut Page, question: &Question, extent: Extent) {
    page.verdict(&question.verdict());
    page.gap();
    let whole = extent == Extent::Whole;
    let changed = |row: &&Weighed| whole || row.headline || row.change().is_some();
    let shown: Vec<_> = in_order(&question.rows).filter(changed).collect();
    let left = question.rows.len() - shown.len();
    if !shown.is_empty() {
        table(page, shown.into_iter());
    }
    if left > 0 {
        let too_few = question.rows.iter().any(|row| row.verdict == FigureVerdict::TooFew);
        let says = if too_few { "without a verdict" } else { "without a difference" };
        let figures = if left == 1 { "figure" } else { "figures" };
        page.text(&format!("  {left} more {figures} {says}"));
    }
    page.gap();
    for (label, side) in ["A", "B"].into_iter().zip(&question.sides) {
        page.line(label, &[format!("{}: {}", printable(&side.name), side.counted())], " ");
        if whole {
            page.command(&command_line(&side.command));
        }
        if whole && !side.alone.is_empty() {
            page.line(&format!("only in {label}"), &side.alone, ", ");
        }
    }
    for differs in &question.differs {
        page.line("differs", &[format!("{}: A {}, B {}", differs.key, differs.a, differs.b)], " ");
    }
    if whole {
        let both: Vec<String> = question.both.iter().map(|(key, value)| format!("{key}={value}")).collect();
        page.line("both", &both, " ");
    }
    page.line("repeated", &words(&question.repeated()), " ");
}

fn table<'a>(page: &mut Page, rows: impl Iterator<Item = &'a Weighed>) {
    let mut table = Table::with_head(&HEAD).whole();
    rows.for_each(|row| table.row(cells(row)));
    page.table(&table);
}

/// The columns in either form.
pub(crate) const HEAD: [&str; 8] = ["figure", "A", "B", "unit", "B/A", "interval", "n", "verdict"];

/// The headline first, then what is slower, what is faster, other differences, and the rest, each
/// in order of measurement.
pub(crate) fn in_order(rows: &[Weighed]) -> impl Iterator<Item = &Weighed> {
    let mut order: Vec<&Weighed> = rows.iter().collect();
    order.sort_by_key(|row| match row.change() {
        _ if row.headline => 0,
        Some(Change::Slower) => 1,
        Some(Change::Faster) => 2,
        Some(_) => 3,
        None => 4,
    });
    order.into_iter()
}

/// One row of the table in either form.
pub(crate) fn cells(row: &Weighed) -> Vec<String> {
    let (a, b) = row.middles();
    let scale = Scale::of(&row.of.unit, a.abs().max(b.abs()));
    let count = |n: usize| grouped(n as i128);
    let (na, nb) = (row.of.a.len(), row.of.b.len());
    vec![
        format!("{}{}", row.of.label, if row.headline { " *" } else { "" }),
        scale.number(a),
        scale.number(b),
        scale.unit,
        row.ratio.map_or("-".into(), digits),
        row.interval.map_or("-".into(), |(low, high)| format!("{} .. {}", digits(low), digits(high))),
        if row.is_paired() { count(na) } else { format!("{}/{}", count(na), count(nb)) },
        verdict(row),
    ]
}

/// Three decimals for ratios below 100, none above.
fn digits(ratio: f64) -> String {
    match ratio {
        0.001..100.0 => format!("{ratio:.3}"),
        100.0..1e9 => grouped(ratio.round() as i128),
        _ => format!("{ratio:.1e}"),
    }
}

fn verdict(row: &Weighed) -> String {
    let (change, ratio) = match (row.verdict, row.change().zip(row.ratio)) {
        (FigureVerdict::Equal, _) => return "equal".into(),
        (FigureVerdict::Noise, _) => return "noise".into(),
        (FigureVerdict::TooFew, _) => return "too few to say".into(),
        (FigureVerdict::NoRatio, _) | (FigureVerdict::Differs, None) => return "no ratio (zero)".into(),
        (FigureVerdict::Differs, Some(differs)) => differs,
    };
    let far = if ratio < 1.0 { 1.0 / ratio } else { ratio };
    // The second word says whether time or speed changed: a percentage of one is not a percentage
    // of the other.
    let word = match (super::is_time(&row.of.unit), ratio < 1.0) {
        (true, true) => "less time",
        (true, false) => "more time",
        (false, true) => "lower",
        (false, false) => "higher",
    };
    let by = match far {
        2.0.. => format!("{} times", digits_of_times(far)),
        _ => format!("{:.1}% {word}", (ratio - 1.0).abs() * 100.0),
    };
    match change {
        Change::Slower => format!("slower: {by}"),
        Change::Faster => format!("faster: {by}"),
        Change::Higher | Change::Lower if far < 2.0 => by,
        Change::Higher | Change::Lower => format!("{by} {word}"),
    }
}

/// One decimal below 100, none above.
fn digits_of_times(times: f64) -> String {
    if times < 100.0 { format!("{times:.1}") } else { digits(times) }
}

#[cfg(test)]
mod tests {
    use super::super::tests::figure;
    use super::super::{Policy, Unit, weigh};
    use super::*;
    use crate::compare::results::Asked;

    fn question(rows: Vec<Weighed>) -> Question {
        let side = |name: &str| Asked {
            name: name.into(),
            command: vec!["vellum".into()],
            results: 5,
            boots: 5,
            warnings: Vec::new(),
            alone: Vec::new(),
        };
        Question {
            name: "bench x".into(),
            sides: [side("a"), side("b")],
            both: Vec::new(),
            differs: Vec::new(),
            unit: Unit::Boot,
            least: 3,
            rows,
        }
    }

    fn rows() -> Vec<Weighed> {
        let (one, more) = ([1.0, 1.01, 0.99, 1.0], [3.0, 3.01, 2.99, 3.02]);
        let rate = |name, a, b| super::super::Compared { unit: "pages/s".into(), ..figure(name, a, b, true) };
        let count = |name, a, b| super::super::Compared { unit: "exits".into(), ..figure(name, a, b, true) };
        let rows = vec![
            figure("still", &one, &[1.0, 1.0, 1.0, 1.01], true),
            figure("time", &one, &more, true),
            rate("rate", &one, &more),
            count("exits", &one, &more),
            figure("quick", &more, &one, true),
        ];
        weigh(rows, Some(&"time".into()), 3, Policy::REAL)
    }

    #[test]
    fn slower_and_faster_are_told_apart_by_the_unit() {
        let said: Vec<_> = in_order(&rows()).map(|row| (row.of.label.to_string(), verdict(row))).collect();
        let wanted = [
            ("time", "slower: 3.0 times"),
            ("rate", "faster: 3.0 times"),
            ("quick", "faster: 3.0 times"),
            ("exits", "3.0 times higher"),
            ("still", "noise"),
        ];
        assert_eq!(said, wanted.map(|(name, said)| (name.to_owned(), said.to_owned())));
    }

    #[test]
    fn the_short_form_has_the_changed_figures_and_counts_the_others() {
        let comparison = Comparison { questions: vec![question(rows())], alone: Vec::new() };
        let text = comparison.render(Form::Text(100), Extent::Short("More: x"));
        let first = "SLOWER  bench x: 1 slower, 2 faster, 1 higher of 5 figures; time: slower: 3.0 times";
        assert_eq!(text.lines().next(), Some(first), "{text}");
        assert!(!text.contains("still") && text.contains("1 more figure without a difference"), "{text}");
        let whole = comparison.render(Form::Text(100), Extent::Whole);
        assert!(whole.contains("still") && whole.contains("method"), "{whole}");
        let markdown = comparison.render(Form::Markdown, Extent::Short("More: x"));
        assert!(
            markdown.starts_with("**SLOWER** bench x") && markdown.contains("| time \\* |"),
            "{markdown}"
        );
    }

    #[test]
    fn a_limit_counts_what_takes_longer_and_nothing_else() {
        let comparison = |rows| Comparison { questions: vec![question(rows)], alone: Vec::new() };
        let over = |percent| {
            let over = comparison(rows()).slower_than(percent).unwrap();
            over.into_iter().map(|(name, by)| (name, by.round())).collect::<Vec<_>>()
        };
        assert_eq!(over(5.0), [("time".to_owned(), 201.0)]);
        assert_eq!(over(250.0), []);
        let few = |more: Vec<_>| {
            let figures = [vec![figure("t", &[1.0], &[3.0], true)], more].concat();
            comparison(weigh(figures, None, 3, Policy::REAL))
        };
        assert_eq!(few(Vec::new()).slower_than(5.0), None);
        let pages = figure("pages", &[65_536.0], &[65_536.0], true);
        assert_eq!(few(vec![pages.clone()]).slower_than(5.0), None);
        let same = weigh(vec![pages], None, 3, Policy::REAL);
        assert_eq!(comparison(same).slower_than(5.0), Some(Vec::new()));
    }
}
