//! The page of a comparison: for each question a plot of the ratios, their table, and the
//! differences between the sides.

use std::fmt::Write as _;

use super::{END, escape, figure, head, head_of_page, row, verdict};
use crate::compare::text::{HEAD, METHOD, cells, in_order};
use crate::compare::{Comparison, Question};
use crate::{plot, terminal};

/// The comparison as a page.
pub fn comparison(comparison: &Comparison) -> String {
    let title = comparison.questions.first().map_or("comparison", |question| &question.name);
    let mut out = head_of_page(&format!("{title}, compared"));
    out.push_str("<main>\n");
    for question in &comparison.questions {
        article(&mut out, question);
    }
    for alone in &comparison.alone {
        let command = escape(&terminal::command_line(&alone.command));
        let (side, name) = (escape(&alone.side), escape(&alone.name));
        let _ = writeln!(out, "<p class=\"note\">only in {side}: {name} <code>$ {command}</code></p>");
    }
    let _ = writeln!(out, "<p class=\"note\">{}</p>\n</main>\n</body>\n</html>", escape(METHOD));
    out
}

fn article(out: &mut String, question: &Question) {
    let _ = writeln!(out, "<article>\n<h1>{}, compared</h1>", escape(&question.name));
    verdict(out, &question.verdict());
    for (label, side) in ["A", "B"].into_iter().zip(&question.sides) {
        let command = escape(&terminal::command_line(&side.command));
        let _ = writeln!(
            out,
            "<pre class=\"command\">{label}  {}: {}\n$ {command}</pre>",
            escape(&side.name),
            side.counted()
        );
    }
    let _ = writeln!(out, "<p class=\"note\">Repeated: {}</p>", escape(&question.repeated()));
    out.push_str("<section class=\"plots\">\n");
    if let Some(picture) = plot::ratios(&question.rows) {
        figure(out, &picture);
    }
    out.push_str("</section>\n<section class=\"tables\">\n");
    // The verdict stands first: a phone shows the first columns.
    let mut columns = HEAD;
    columns.rotate_right(1);
    head(out, "Figures, the headline first (*), then what is slower", &columns);
    for weighed in in_order(&question.rows) {
        let mut cells = cells(weighed);
        cells.rotate_right(1);
        row(out, &cells);
    }
    out.push_str(END);
    for (label, side) in ["A", "B"].into_iter().zip(&question.sides) {
        if !side.alone.is_empty() {
            let _ =
                writeln!(out, "<p class=\"note\">only in {label}: {}</p>", escape(&side.alone.join(", ")));
        }
    }
    out.push_str("</section>\n");
    if !question.differs.is_empty() {
        head(out, "What differs between the sides", &["differs", "A", "B"]);
        for differs in &question.differs {
            row(out, &[differs.key.clone(), differs.a.clone(), differs.b.clone()]);
        }
        out.push_str(END);
    }
    out.push_str("<section class=\"facts\">\n<div><h2>Same on both sides</h2><dl>\n");
    for (key, value) in &question.both {
        let _ = writeln!(out, "<dt>{}</dt><dd>{}</dd>", escape(key), escape(value));
    }
    out.push_str("</dl></div>\n</section>\n</article>\n");
}
