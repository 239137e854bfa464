//! The table of a history, as Markdown, and below it what the table is about.

use std::fmt::Write as _;

use vellum_report::units::grouped;

use super::{COMMANDS, Cell, History, Takes};

impl History {
    /// A row for each command on each host, and a column for each series.
    pub(super) fn table(&self) -> String {
        let mut text = String::from("| command | host | counted |");
        self.columns.iter().for_each(|column| text += &format!(" {} |", column.series));
        text += "\n|---|---|---|";
        self.columns.iter().for_each(|_| text += "---:|");
        let mut notes: Vec<(String, Vec<&str>)> = Vec::new();
        for (row, cells) in self.rows.iter().zip(&self.cells) {
            let counted = match (row.takes, cells.iter().find_map(Cell::figure)) {
                (Takes::Headline, Some(figure)) => format!("{}: {}", figure.label, figure.unit),
                (Takes::Headline, None) => "nothing".into(),
                (Takes::Lost, _) => "lost pages".into(),
                (Takes::Failed, _) => "failed scenarios".into(),
            };
            let _ = write!(text, "\n| {} | {} | {counted} |", row.name, row.host);
            for (column, cell) in self.columns.iter().zip(cells) {
                text += &match cell {
                    Cell::Figure(figure) if row.takes != Takes::Headline && figure.value() > 0.0 => {
                        format!(" **{}** |", number(figure.value()))
                    }
                    Cell::Figure(figure) => format!(" {} |", number(figure.value())),
                    Cell::Absent(_) => " – |".into(),
                    Cell::Failed(_) => " **!** |".into(),
                };
                let (Cell::Absent(why) | Cell::Failed(why)) = cell else { continue };
                let note = format!("{}, {}: {why}", row.name, row.host);
                match notes.iter_mut().find(|(known, _)| *known == note) {
                    _ if column.package.is_err() => {}
                    Some((_, of)) => of.push(column.series),
                    None => notes.push((note, vec![column.series])),
                }
            }
        }
        text += "\n\n";
        for (name, run, _) in &COMMANDS {
            let _ = writeln!(text, "- {name}: `{run}`");
        }
        text += "\n";
        for column in &self.columns {
            let _ = match &column.package {
                Ok(package) => writeln!(text, "- {}: {package}", column.series),
                Err(why) => writeln!(text, "- {}: not there: {why}", column.series),
            };
        }
        let _ = writeln!(
            text,
            "\nOne boot of each kernel on each host, by {}. An instruction is {} ns of its clock.",
            self.emulator,
            self.bed.nanoseconds_per_instruction()
        );
        if !notes.is_empty() {
            text += "\nWithout a number:\n\n";
        }
        for (note, of) in notes {
            let _ = writeln!(text, "- {} ({})", note.replace('<', "&lt;"), of.join(", "));
        }
        text
    }
}

/// A count, or a figure with the digits that matter.
fn number(value: f64) -> String {
    match value {
        _ if value.fract() == 0.0 || value >= 100.0 => grouped(value.round() as i128),
        _ => format!("{value:.1}"),
    }
}

impl Cell {
    pub(super) fn figure(&self) -> Option<&vellum_report::Figure> {
        match self {
            Self::Figure(figure) => Some(figure),
            Self::Absent(_) | Self::Failed(_) => None,
        }
    }
}
