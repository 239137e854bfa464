//! Text for a terminal and Markdown for a mail. [`super::terminal`] and [`super::compare`] choose
//! the content, and [`Page`] writes it in either form.

use std::fmt::Write as _;

use super::answer::{Fact, Verdict};
use super::printable;
use super::table::Table;

/// How a result is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Plain text with this number of columns.
    Text(usize),
    /// Markdown, to paste into a mail or an issue.
    Markdown,
}

/// How much of a result is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent<'a> {
    /// The verdict and the main figures. The text says how to get the rest.
    Short(&'a str),
    /// Everything.
    Whole,
}

/// The smallest and largest width that is used.
const WIDTHS: (usize, usize) = (72, 220);

/// Where the text beside a label begins.
const MARGIN: usize = 9;

/// A text that grows line by line.
pub(crate) struct Page {
    out: String,
    form: Form,
    /// Whether the last line was an item of a list, which Markdown ends with an empty line.
    list: bool,
}

impl Page {
    pub(crate) fn new(form: Form) -> Self {
        let form = match form {
            Form::Text(width) => Form::Text(width.clamp(WIDTHS.0, WIDTHS.1)),
            Form::Markdown => form,
        };
        Self { out: String::new(), form, list: false }
    }

    pub(crate) fn finish(self) -> String {
        self.out
    }

    /// The number of columns. Markdown lines have no limit.
    pub(crate) fn width(&self) -> usize {
        match self.form {
            Form::Text(width) => width,
            Form::Markdown => WIDTHS.1,
        }
    }

    /// Adds an empty line, unless there is one already.
    pub(crate) fn gap(&mut self) {
        self.list = false;
        if !self.out.is_empty() && !self.out.ends_with("\n\n") {
            self.out.push('\n');
        }
    }

    /// Writes a verdict with its details.
    pub(crate) fn verdict(&mut self, verdict: &Verdict) {
        self.answer(verdict);
        self.facts(verdict);
    }

    /// Writes the word and the text of a verdict.
    pub(crate) fn answer(&mut self, verdict: &Verdict) {
        let word = verdict.outcome.map(|word| word.to_string());
        match (self.form, word) {
            (Form::Text(width), word) => {
                let first = word.map_or(String::new(), |word| format!("{word}  "));
                wrapped(&mut self.out, &first, first.len(), &words(&verdict.text), " ", width);
            }
            (Form::Markdown, Some(word)) => {
                self.paragraph(&format!("**{word}** {}", escaped(&printable(&verdict.text))))
            }
            (Form::Markdown, None) => self.paragraph(&escaped(&printable(&verdict.text))),
        }
    }

    /// Writes the other problems of a verdict, the main figures, and what the user can do next.
    pub(crate) fn facts(&mut self, verdict: &Verdict) {
        for (word, reason) in &verdict.reasons {
            self.line(&word.to_string(), &words(reason), " ");
        }
        let name = |fact: &Fact| printable(&fact.name).into_owned();
        let wide = verdict.figures.iter().map(|fact| name(fact).chars().count()).max().unwrap_or(0);
        for fact in &verdict.figures {
            match self.form {
                Form::Text(width) => {
                    let first = format!("  {:<wide$}  ", name(fact));
                    wrapped(&mut self.out, &first, wide + 4, &words(&fact.text), " ", width);
                }
                Form::Markdown => self.line(&name(fact), &words(&fact.text), " "),
            }
        }
        if let Some(next) = &verdict.next {
            self.line("next", &words(next), " ");
        }
    }

    /// Writes a heading with a remark at the right margin.
    pub(crate) fn heading(&mut self, left: &str, right: &str) {
        let (left, right) = (printable(left), printable(right));
        match self.form {
            Form::Text(width) => {
                let gap = width.saturating_sub(left.chars().count() + right.chars().count()).max(2);
                let gap = if right.is_empty() { 0 } else { gap };
                let _ = writeln!(self.out, "{left}{:gap$}{right}", "");
            }
            Form::Markdown => {
                self.gap();
                let right = if right.is_empty() { String::new() } else { format!(" ({})", escaped(&right)) };
                let _ = writeln!(self.out, "### {}{right}\n", escaped(&left));
            }
        }
    }

    /// Writes a command that is quoted already.
    pub(crate) fn command(&mut self, command: &str) {
        match self.form {
            Form::Text(_) => {
                let _ = writeln!(self.out, "$ {command}");
            }
            Form::Markdown => {
                self.gap();
                let _ = writeln!(self.out, "    $ {command}");
                self.gap();
            }
        }
    }

    /// Writes a label at the margin and `items` beside it, wrapped.
    pub(crate) fn line(&mut self, label: &str, items: &[String], separator: &str) {
        match self.form {
            Form::Text(width) => {
                let label =
                    if label.len() < MARGIN { format!("{label:<MARGIN$}") } else { format!("{label}  ") };
                wrapped(&mut self.out, &label, MARGIN, items, separator, width);
            }
            Form::Markdown => {
                if !self.list {
                    self.gap();
                }
                self.list = true;
                let items: Vec<_> = items.iter().map(|item| escaped(item)).collect();
                let _ = writeln!(self.out, "- {}: {}", escaped(label), items.join(separator));
            }
        }
    }

    /// Writes a line of text at the margin, wrapped.
    pub(crate) fn text(&mut self, text: &str) {
        match self.form {
            Form::Text(width) => wrapped(&mut self.out, "", 0, &words(text), " ", width),
            Form::Markdown => self.paragraph(&escaped(&printable(text))),
        }
    }

    pub(crate) fn table(&mut self, table: &Table) {
        match self.form {
            Form::Text(width) => table.print(&mut self.out, width),
            Form::Markdown => {
                self.gap();
                table.markdown(&mut self.out);
                self.gap();
            }
        }
    }

    fn paragraph(&mut self, text: &str) {
        self.gap();
        let _ = writeln!(self.out, "{text}");
    }
}

/// The words of a text, safe to print.
pub(crate) fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(|word| printable(word).into_owned()).collect()
}

/// Appends `first` and `items`, wrapped at `width`. The other lines begin at column `hang`.
fn wrapped(out: &mut String, first: &str, hang: usize, items: &[String], separator: &str, width: usize) {
    out.push_str(first);
    let mut column = first.chars().count();
    let start = column;
    for (i, item) in items.iter().enumerate() {
        let separator = if i + 1 < items.len() { separator } else { "" };
        let needed = item.chars().count() + separator.trim_end().chars().count();
        if column > start.max(hang) && column + needed > width {
            out.truncate(out.trim_end().len());
            let _ = write!(out, "\n{:hang$}", "");
            column = hang;
        }
        let _ = write!(out, "{item}{separator}");
        column += item.chars().count() + separator.chars().count();
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
}

/// Escapes text for Markdown, so that it adds no markup, links or table cells.
pub(super) fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('<', "&lt;").replace("](", "]\\(");
    text.replace('|', "\\|").replace('*', "\\*").replace('`', "\\`")
}
