//! The HTML form: one self-contained page for desktop and phone.
//!
//! It has no scripts, fonts or requests, and its content security policy forbids them. A result
//! from someone else is therefore safe to open. A result begins with its verdict, goes on with
//! plots ([`super::plot`]) and figures, and ends with parameters and host. [`comparison`] is the
//! page of a comparison.

mod compare;
#[cfg(test)]
mod contrast;

use std::fmt::Write as _;

use super::answer::{Outcome, Verdict};
use super::plot::{self, Key, Plot};
use super::table::{Group, Kind, cells, common_scale, groups};
use super::terminal::{self, asked_value, percentiles, spread_of};
use super::units::{Scale, grouped};
use super::{Counter, Histogram, Report, printable};

pub use compare::comparison;

/// The start of every page. Only a file that begins like this is overwritten by another page.
pub const START: &str = "<!doctype html>\n<!-- Written by Vellum. -->\n";

/// A page with `results` below each other.
pub fn render(results: &[Report]) -> String {
    let title = match results {
        [only] => only.name.clone(),
        _ => format!("{} results", results.len()),
    };
    let mut out = head_of_page(&title);
    if results.len() > 1 {
        out.push_str("<nav><ol>\n");
        for (i, result) in results.iter().enumerate() {
            let _ = writeln!(
                out,
                "<li><a href=\"#r{i}\">{}</a> <code>{}</code>{}</li>",
                escape(&result.name),
                escape(&terminal::command_line(&result.command)),
                badges(result)
            );
        }
        out.push_str("</ol></nav>\n");
    }
    out.push_str("<main>\n");
    for (i, result) in results.iter().enumerate() {
        article(&mut out, i, result);
    }
    out.push_str("</main>\n</body>\n</html>\n");
    out
}

/// The start of a page: title, policy and style, up to `<body>`.
pub fn head_of_page(title: &str) -> String {
    format!(
        "{START}<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>{} - Vellum</title>\n<style>\n{}</style>\n</head>\n<body>\n",
        escape(title),
        include_str!("style.css")
    )
}

/// Escapes text from a result for HTML text or an attribute value.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in printable(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

fn badges(result: &Report) -> String {
    let mut out = String::new();
    if result.verdict().outcome == Some(Outcome::Fail) {
        out.push_str(" <span class=\"badge bad\">FAIL</span>");
    }
    if result.cut_short.is_some() {
        out.push_str(" <span class=\"badge bad\">CUT OFF</span>");
    }
    if !result.not_run.is_empty() {
        out.push_str(" <span class=\"badge bad\">NOT RUN</span>");
    }
    if !result.invalid.is_empty() {
        out.push_str(" <span class=\"badge bad\">INVALID</span>");
    }
    if result.host.emulated {
        out.push_str(" <span class=\"badge\">emulated: instructions, not seconds</span>");
    }
    out
}

fn article(out: &mut String, i: usize, result: &Report) {
    let _ = writeln!(out, "<article id=\"r{i}\">\n<h1>{}{}</h1>", escape(&result.name), badges(result));
    verdict(out, &result.verdict());
    let _ =
        writeln!(out, "<pre class=\"command\">$ {}</pre>", escape(&terminal::command_line(&result.command)));
    for note in &result.notes {
        let _ = writeln!(out, "<p class=\"note\">{}</p>", escape(note));
    }
    let groups = groups(&result.figures);
    out.push_str("<section class=\"plots\">\n");
    let pictures = plot::over_time(&result.series, &result.marks)
        .into_iter()
        .chain(plot::distributions(&result.histograms))
        .chain(result.headline.as_ref().and_then(|headline| plot::of_headline(&groups, headline)))
        .chain(groups.iter().take(32).flat_map(plot::bars));
    for picture in pictures {
        figure(out, &picture);
    }
    out.push_str("</section>\n<section class=\"tables\">\n");
    for group in &groups {
        match group.indices[0] {
            None => plain(out, &group.kinds),
            Some(_) => indexed(out, group),
        }
    }
    histograms(out, &result.histograms);
    out.push_str("</section>\n<section class=\"facts\">\n<div><h2>Asked</h2><dl>\n");
    for (name, value) in &result.asked {
        let _ = writeln!(out, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(&asked_value(value)));
    }
    out.push_str("</dl></div>\n<div><h2>Host</h2><ul>\n");
    for fact in terminal::host(&result.host) {
        let _ = writeln!(out, "<li>{}</li>", escape(&fact));
    }
    let _ = writeln!(out, "<li>measured by Vellum {}</li>\n</ul></div>\n</section>", escape(&result.vellum));
    counters(out, &result.counters);
    out.push_str("</article>\n");
}

/// Writes the first lines of a result or a comparison.
fn verdict(out: &mut String, verdict: &Verdict) {
    let (class, word) = match verdict.outcome {
        None => ("plain", String::new()),
        Some(word) => {
            let class = match word {
                Outcome::Pass | Outcome::Faster => "pass",
                Outcome::Same | Outcome::TooFew | Outcome::Differs | Outcome::Moved => "plain",
                Outcome::Slower | Outcome::Fail | Outcome::Invalid | Outcome::CutOff | Outcome::NotRun => {
                    "fail"
                }
            };
            (class, format!("<strong>{word}</strong> "))
        }
    };
    let _ = writeln!(out, "<p class=\"verdict {class}\">{word}{}</p>", escape(&verdict.text));
    for (word, reason) in &verdict.reasons {
        let _ = writeln!(out, "<p class=\"invalid\"><strong>{word}:</strong> {}</p>", escape(reason));
    }
    if !verdict.figures.is_empty() {
        out.push_str("<dl class=\"answer\">\n");
        for fact in &verdict.figures {
            let _ = writeln!(out, "<dt>{}</dt><dd>{}</dd>", escape(&fact.name), escape(&fact.text));
        }
        out.push_str("</dl>\n");
    }
    if let Some(next) = &verdict.next {
        let _ = writeln!(out, "<p class=\"note\">{}</p>", escape(next));
    }
}

fn figure(out: &mut String, picture: &Plot) {
    let title = escape(&picture.title);
    // plotters sets the size in pixels, and the style sheet lets it shrink. Screen readers get the
    // title.
    let svg = picture.svg.replacen("<svg ", &format!("<svg role=\"img\" aria-label=\"{title}\" "), 1);
    let _ = writeln!(out, "<figure>\n<figcaption>{title}</figcaption>\n{svg}");
    if picture.legend.len() > 1 {
        out.push_str("<ul class=\"legend\">");
        if let Some(order) = picture.order {
            let _ = write!(out, "<li>{order}</li>");
        }
        for (key, text) in &picture.legend {
            let _ = write!(out, "<li>{}{}</li>", sample(*key), escape(text));
        }
        out.push_str("</ul>\n");
    }
    out.push_str("</figure>\n");
}

/// What stands before a text in a legend. A line has the colour and the dashes of its plot.
fn sample(key: Key) -> String {
    match key {
        Key::Line(i) => format!(
            "<svg class=\"key\" viewBox=\"0 0 40 10\" aria-hidden=\"true\">\
             <polyline points=\"0,5 40,5\" stroke=\"#0000F{i}\" stroke-width=\"2\"/></svg>"
        ),
        Key::Bar(i) => format!("<i class=\"c{i}\"></i>"),
        Key::Span(i) => format!("<i class=\"m{i}\"></i>"),
    }
}

/// The start of a table. A table that is wider than the page scrolls, by the keyboard too.
fn head(out: &mut String, caption: &str, cells: &[&str]) {
    let caption = escape(caption);
    let _ = write!(
        out,
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{caption}\"><table>\
         <caption>{caption}</caption><thead><tr>"
    );
    for cell in cells {
        let _ = write!(out, "<th>{}</th>", escape(cell));
    }
    out.push_str("</tr></thead>\n<tbody>\n");
}

/// A table with a caption. The first cell of a row is its name.
pub fn table(out: &mut String, caption: &str, heads: &[&str], rows: &[Vec<String>]) {
    head(out, caption, heads);
    rows.iter().for_each(|cells| row(out, cells));
    out.push_str(END);
}

fn row(out: &mut String, cells: &[String]) {
    out.push_str("<tr>");
    for (i, cell) in cells.iter().enumerate() {
        let tag = if i == 0 { "th" } else { "td" };
        let _ = write!(out, "<{tag}>{}</{tag}>", escape(cell));
    }
    out.push_str("</tr>\n");
}

const END: &str = "</tbody></table></div>\n";

fn plain(out: &mut String, kinds: &[Kind]) {
    head(out, "Figures", &["figure", "value or median", "min", "max", "spread", "n"]);
    for figure in kinds.iter().flat_map(|kind| &kind.figures) {
        let scale = Scale::of(&figure.unit, figure.value());
        let mut cells = vec![figure.label.to_string(), scale.with_unit(figure.value())];
        if figure.samples.len() > 1 {
            cells.extend([scale.number(figure.min()), scale.number(figure.max()), spread_of(figure)]);
            cells.push(grouped(figure.samples.len() as i128));
        }
        cells.resize(6, String::new());
        row(out, &cells);
    }
    out.push_str(END);
}

fn indexed(out: &mut String, group: &Group) {
    let mut names = vec![String::new()];
    let mut columns = Vec::new();
    for kind in &group.kinds {
        let scale = common_scale(&kind.figures);
        names.push(match scale.unit.as_str() {
            "" => kind.name.to_owned(),
            unit => format!("{} [{unit}]", kind.name),
        });
        columns.push(cells(&scale, &kind.figures));
    }
    head(out, "Figures by part", &names.iter().map(String::as_str).collect::<Vec<_>>());
    for (i, index) in group.indices.iter().enumerate() {
        let cells = columns.iter().map(|column| column[i].clone());
        row(out, &std::iter::once(index.unwrap_or("").to_owned()).chain(cells).collect::<Vec<_>>());
    }
    out.push_str(END);
}

fn histograms(out: &mut String, histograms: &[Histogram]) {
    if histograms.is_empty() {
        return;
    }
    head(out, "Distributions", &["distribution", "samples", "p50", "p90", "p99", "p99.9", "max"]);
    for histogram in histograms {
        let mut cells = vec![histogram.label().to_string(), grouped(histogram.count().into())];
        cells.extend(percentiles(histogram));
        row(out, &cells);
    }
    out.push_str(END);
}

fn counters(out: &mut String, counters: &[Counter]) {
    if counters.is_empty() {
        return;
    }
    let moved = counters.iter().filter(|c| c.before != c.after).count();
    let _ =
        writeln!(out, "<details><summary>KVM's counters: {moved} of {} changed</summary>", counters.len());
    head(out, "KVM's counters", &["counter", "before", "after", "difference"]);
    for counter in counters {
        let numbers = [counter.before.into(), counter.after.into(), counter.grown()].map(grouped);
        row(out, &std::iter::once(counter.label().to_string()).chain(numbers).collect::<Vec<_>>());
    }
    out.push_str(END);
    out.push_str("</details>\n");
}
