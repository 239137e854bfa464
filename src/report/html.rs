//! The HTML face: one page that needs nothing but itself, for the screen at the desk and the one in the pocket.
//!
//! No script, no font, no request: a content security policy in the page forbids them, so that a result from elsewhere
//! can be opened without a thought. The pictures come from [`plot`], their colours from `style.css`.

use std::fmt::Write as _;

use super::plot::{self, Plot};
use super::terminal::{self, asked_value, groups, spread_of};
use super::units::{Scale, grouped, humanised};
use super::{Counter, Figure, Histogram, Report, printable};

/// A page with `results` one below the other.
pub fn render(results: &[Report]) -> String {
    let title = match results {
        [only] => format!("{} - Vellum", escape(&only.name)),
        _ => format!("{} results - Vellum", results.len()),
    };
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>{title}</title>\n<style>\n{}</style>\n</head>\n<body>\n",
        include_str!("style.css")
    );
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
    for (i, result) in results.iter().enumerate() {
        article(&mut out, i, result);
    }
    out.push_str("</body>\n</html>\n");
    out
}

/// Text from a result as HTML text or as an attribute's value.
fn escape(text: &str) -> String {
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
    let _ =
        writeln!(out, "<pre class=\"command\">$ {}</pre>", escape(&terminal::command_line(&result.command)));
    for reason in &result.invalid {
        let _ = writeln!(out, "<p class=\"invalid\"><strong>INVALID:</strong> {}</p>", escape(reason));
    }
    for note in &result.notes {
        let _ = writeln!(out, "<p class=\"note\">{}</p>", escape(note));
    }
    out.push_str("<section class=\"facts\">\n<div><h2>Asked</h2><dl>\n");
    for (name, value) in &result.asked {
        let _ = writeln!(out, "<dt>{}</dt><dd>{}</dd>", escape(name), escape(&asked_value(value)));
    }
    out.push_str("</dl></div>\n<div><h2>Host</h2><ul>\n");
    for fact in terminal::host(&result.host) {
        let _ = writeln!(out, "<li>{}</li>", escape(&fact));
    }
    let _ = writeln!(out, "<li>measured by Vellum {}</li>\n</ul></div>\n</section>", escape(&result.vellum));

    let groups = groups(&result.figures);
    out.push_str("<section class=\"plots\">\n");
    let pictures = plot::over_time(&result.series, &result.marks)
        .into_iter()
        .chain(plot::distributions(&result.histograms))
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
    counters(out, &result.counters);
    out.push_str("</section>\n</article>\n");
}

fn figure(out: &mut String, picture: &Plot) {
    let title = escape(&picture.title);
    // plotters sizes the element in pixels; the style sheet lets it shrink, and a reader without eyes gets its title.
    let svg = picture.svg.replacen("<svg ", &format!("<svg role=\"img\" aria-label=\"{title}\" "), 1);
    let _ = writeln!(out, "<figure>\n<figcaption>{title}</figcaption>\n{svg}");
    if picture.legend.len() > 1 {
        out.push_str("<ul class=\"legend\">");
        for (class, text) in &picture.legend {
            let _ = write!(out, "<li><i class=\"{class}\"></i>{}</li>", escape(text));
        }
        out.push_str("</ul>\n");
    }
    out.push_str("</figure>\n");
}

fn head(out: &mut String, cells: &[&str]) {
    out.push_str("<div class=\"scroll\"><table><thead><tr>");
    for cell in cells {
        let _ = write!(out, "<th>{}</th>", escape(cell));
    }
    out.push_str("</tr></thead>\n<tbody>\n");
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

fn plain(out: &mut String, kinds: &[(&str, Vec<&Figure>)]) {
    head(out, &["figure", "value or median", "min", "max", "spread", "n"]);
    for figure in kinds.iter().flat_map(|(_, figures)| figures) {
        let scale = Scale::of(figure.unit(), figure.value());
        let mut cells = vec![figure.name().to_owned(), scale.with_unit(figure.value())];
        if let Figure::Spread { min, max, count, .. } = figure {
            let spread =
                [scale.number(*min), scale.number(*max), spread_of(figure), grouped((*count).into())];
            cells.extend(spread);
        }
        cells.resize(6, String::new());
        row(out, &cells);
    }
    out.push_str(END);
}

fn indexed(out: &mut String, group: &terminal::Group) {
    let scales: Vec<_> = group.kinds.iter().map(|(_, figures)| terminal::common_scale(figures)).collect();
    let names: Vec<_> = group
        .kinds
        .iter()
        .zip(&scales)
        .map(|((base, _), scale)| match scale.unit.as_str() {
            "" => (*base).to_owned(),
            unit => format!("{base}, {unit}"),
        })
        .collect();
    head(out, &std::iter::once("").chain(names.iter().map(String::as_str)).collect::<Vec<_>>());
    for (i, index) in group.indices.iter().enumerate() {
        let cells =
            group.kinds.iter().zip(&scales).map(|((_, figures), scale)| scale.number(figures[i].value()));
        row(out, &std::iter::once(index.unwrap_or("").to_owned()).chain(cells).collect::<Vec<_>>());
    }
    out.push_str(END);
}

fn histograms(out: &mut String, histograms: &[Histogram]) {
    if histograms.is_empty() {
        return;
    }
    head(out, &["distribution", "samples", "p50", "p90", "p99", "p99.9", "max"]);
    for histogram in histograms {
        let mut cells = vec![histogram.name.clone(), grouped(histogram.count().into())];
        cells.extend(
            [0.5, 0.9, 0.99, 0.999, 1.0]
                .map(|q| histogram.quantile(q).map_or("-".into(), |v| humanised(&histogram.unit, v))),
        );
        row(out, &cells);
    }
    out.push_str(END);
}

fn counters(out: &mut String, counters: &[Counter]) {
    if counters.is_empty() {
        return;
    }
    let moved = counters.iter().filter(|c| c.before != c.after).count();
    let _ = writeln!(out, "<details><summary>KVM's counters: {moved} of {} moved</summary>", counters.len());
    head(out, &["counter", "before", "after", "difference"]);
    for counter in counters {
        let difference = i128::from(counter.after) - i128::from(counter.before);
        let cells = [grouped(counter.before.into()), grouped(counter.after.into()), grouped(difference)];
        row(out, &std::iter::once(counter.name.clone()).chain(cells).collect::<Vec<_>>());
    }
    out.push_str(END);
    out.push_str("</details>\n");
}
