//! Prints a merged result as text or as a page. Names come from untrusted results, so each is
//! escaped.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::merge::{Events, Lines, Loss, Merged, interval, short};
use vellum_report::html::{escape, head_of_page, table};
use vellum_report::printable;
use vellum_report::units::{grouped, humanised};

/// A table: title, heads and rows.
struct Table {
    title: String,
    heads: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

/// The merged result as an HTML page.
pub fn html(merged: &Merged) -> String {
    let mut out = head_of_page(&format!("fleet {}", merged.plan));
    let _ = writeln!(
        out,
        "<main>\n<article>\n<h1>fleet {}</h1>\n<p class=\"verdict {}\">{}</p>",
        escape(&merged.plan),
        if merged.all_losses == 0 { "plain" } else { "fail" },
        escape(&summary(merged))
    );
    for loss in &merged.losses {
        let [who, how, again] = shown(loss, &|text| escape(text), "\n$ ");
        let _ = writeln!(
            out,
            "<div class=\"invalid\"><p><strong>LOST</strong> on <strong>{who}</strong> {how}</p>\n<pre class=\"command\">$ {again}</pre></div>"
        );
    }
    for line in wrong(merged) {
        let _ = writeln!(out, "<p class=\"invalid\">{}</p>", escape(&line));
    }
    for line in noted(merged) {
        let _ = writeln!(out, "<p class=\"note\">{}</p>", escape(&line));
    }
    out.push_str("<section class=\"tables\">\n");
    for one in tables(merged) {
        table(&mut out, &one.title, &one.heads, &one.rows);
    }
    out.push_str("</section>\n</article>\n</main>\n</body>\n</html>\n");
    out
}

/// The merged result as text for a terminal.
pub fn text(merged: &Merged) -> String {
    let mut out = format!("fleet {}: {}\n", printable(&merged.plan), summary(merged));
    for loss in &merged.losses {
        let [who, how, again] = shown(loss, &|text| printable(text).into_owned(), "\n         $ ");
        let _ = writeln!(out, "LOST     on {who} {how}\n         $ {again}");
    }
    for line in wrong(merged).into_iter().chain(noted(merged)) {
        let _ = writeln!(out, "{}", printable(&line));
    }
    for table in tables(merged) {
        let _ = writeln!(out, "\n{}", printable(&table.title));
        // The last column is a sentence, so it may be longer.
        let most = |at: usize| if at + 1 == table.heads.len() { 120 } else { 48 };
        let cells = |row: &Vec<String>| {
            row.iter().enumerate().map(|(at, cell)| short(&printable(cell), most(at))).collect()
        };
        let shown: Vec<Vec<String>> = std::iter::once(table.heads.iter().map(ToString::to_string).collect())
            .chain(table.rows.iter().map(cells))
            .collect();
        let width =
            |at: usize| shown.iter().map(|row: &Vec<String>| row[at].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..table.heads.len()).map(width).collect();
        for row in shown {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            let _ = writeln!(out, "  {}", cells.collect::<Vec<_>>().join("  ").trim_end());
        }
    }
    out
}

/// The host of a lost page, how it was lost, and the command to try it again. `harmless` escapes
/// each name, and `between` joins the lines of the command.
fn shown(loss: &Loss, harmless: &dyn Fn(&str) -> String, between: &str) -> [String; 3] {
    let Loss { node, kernel, test, seed, attempt, what, again } = loss;
    let [kernel, test, what] = [kernel, test, what].map(|text| harmless(text));
    let again = again.lines().map(harmless).collect::<Vec<_>>().join(between);
    [harmless(node), format!("(Linux {kernel}), {test} with seed {seed}, attempt {attempt}: {what}"), again]
}

fn summary(merged: &Merged) -> String {
    let hosts = merged.hosts.len();
    format!(
        "{} of {} tasks have a result, on {hosts} host{}; {}",
        grouped(merged.ended.into()),
        grouped(merged.tasks.into()),
        if hosts == 1 { "" } else { "s" },
        match merged.all_losses {
            0 if !merged.has_tested() => "nothing was tested".to_owned(),
            0 if merged.ended < merged.tasks => "no pages were lost in these, the rest is unknown".to_owned(),
            0 => "no pages were lost".to_owned(),
            1 => "1 RUN LOST PAGES".to_owned(),
            n => format!("{n} RUNS LOST PAGES"),
        }
    )
}

/// Lines that need attention.
fn wrong(merged: &Merged) -> Vec<String> {
    let mut lines = Vec::new();
    if merged.all_losses > merged.losses.len() as u64 {
        lines.push(format!("LOST     {} more runs", merged.all_losses - merged.losses.len() as u64));
    }
    add(&mut lines, "FAILED", &merged.failed);
    add(&mut lines, "VANISHED", &merged.vanished);
    if merged.all_missing > 0 {
        let ranges = merged
            .missing
            .iter()
            .map(|(from, to)| if from == to { from.to_string() } else { format!("{from}-{to}") });
        let mut ranges: Vec<String> = ranges.take(20).collect();
        if merged.missing.len() > 20 {
            ranges.push("…".into());
        }
        lines.push(format!("MISSING  {} tasks: {}", merged.all_missing, ranges.join(",")));
    }
    add(&mut lines, "REFUSED", &merged.refused);
    if merged.vellums.len() > 1 {
        let each = merged.vellums.iter().map(|(vellum, results)| format!("{results} by {vellum}"));
        lines.push(format!(
            "MIXED    results of several Vellum versions: {}",
            each.collect::<Vec<_>>().join(", ")
        ));
    }
    if merged.too_many {
        lines.push("REFUSED  too many hosts or kinds of figures; the rest is left out".into());
    }
    lines
}

/// Lines for information.
fn noted(merged: &Merged) -> Vec<String> {
    let mut lines = Vec::new();
    add(&mut lines, "requeued", &merged.requeued);
    add(&mut lines, "doubled", &merged.doubled);
    lines.extend(merged.skipped.iter().map(|(reason, count)| format!("skipped  {count} cases: {reason}")));
    lines
}

fn add(lines: &mut Vec<String>, name: &str, what: &Lines) {
    lines.extend(what.first.iter().map(|line| format!("{name:<8} {line}")));
    let more = what.count - what.first.len() as u64;
    if more > 0 {
        lines.push(format!("{name:<8} {more} more"));
    }
}

fn tables(merged: &Merged) -> Vec<Table> {
    let mut tables = Vec::new();
    let hosts = merged.hosts.iter().map(|(name, host)| {
        let kernels: Vec<&str> = host.kernels.iter().map(String::as_str).collect();
        let numbers = [host.tasks, host.cases[0], host.cases[1], host.cases[2]].map(|n| grouped(n.into()));
        let tail = [host.lost, host.events].map(|n| grouped(n as i128));
        [name.clone(), kernels.join(", "), host.cpu.clone()].into_iter().chain(numbers).chain(tail).collect()
    });
    tables.push(Table {
        title: "Hosts".into(),
        heads: vec!["host", "kernel", "CPU", "tasks", "passed", "failed", "skipped", "pages lost", "events"],
        rows: hosts.collect(),
    });
    // For tests that lost pages somewhere: how often, for each host and kernel.
    let lossy: BTreeSet<&str> =
        merged.tried.iter().filter(|(_, [_, lost])| *lost > 0).map(|(of, _)| of.test.as_str()).collect();
    if !lossy.is_empty() {
        let rows =
            merged.tried.iter().filter(|(of, _)| lossy.contains(of.test.as_str())).map(|(of, runs)| {
                let [runs, lost] = runs.map(|n| grouped(n.into()));
                vec![of.test.clone(), of.node.clone(), of.kernel.clone(), lost, runs]
            });
        tables.push(Table {
            title: "How often pages were lost".into(),
            heads: vec!["test", "host", "kernel", "runs that lost pages", "runs"],
            rows: rows.collect(),
        });
    }
    if !merged.events.is_empty() {
        let rows = merged.events.iter().map(|(alike, events)| {
            let said = bound(events);
            let [kernel, tracker, backing, cpu] =
                [&alike.kernel, &alike.tracker, &alike.backing, &alike.cpu].map(String::clone);
            vec![kernel, cpu, tracker, backing, grouped(events.events as i128), said]
        });
        tables.push(Table {
            title: "The oracle's events, summed over equal configurations".into(),
            heads: vec!["kernel", "CPU", "tracker", "backing", "events", "conclusion for these hosts"],
            rows: rows.collect(),
        });
    }
    let mut figures: Vec<Vec<String>> = Vec::new();
    for (kind, hosts) in &merged.figures {
        let name = [&kind.test, &kind.figure, &kind.kernel, &kind.cpu].map(String::clone);
        match interval(hosts) {
            Some((mean, half)) => {
                let said =
                    format!("{} ± {} (95 %)", humanised(&kind.unit, mean), humanised(&kind.unit, half));
                figures.push(name.into_iter().chain([format!("{} hosts", hosts.len()), said]).collect());
            }
            None => figures.extend(hosts.iter().map(|(node, mean)| {
                let value = humanised(&kind.unit, mean.sum / mean.count as f64);
                name.iter()
                    .cloned()
                    .chain([node.clone(), format!("{value} (mean of {})", mean.count)])
                    .collect()
            })),
        }
    }
    if !figures.is_empty() {
        tables.push(Table {
            title: "Figures: per host if there are few, otherwise over all hosts".into(),
            heads: vec!["test", "figure", "kernel", "CPU", "host", "value"],
            rows: figures,
        });
    }
    tables
}

fn bound(events: &Events) -> String {
    match events.bound() {
        Some(rate) => format!(
            "no pages lost in {} events: below {rate:.1e} per event at 95 %",
            grouped(events.events as i128)
        ),
        None if events.lost > 0.0 => format!("{} pages LOST", grouped(events.lost as i128)),
        None => "nothing".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::merge::Host;
    use super::*;

    #[test]
    fn a_lost_page_comes_first_and_no_name_does_harm() {
        let bad = "<script>alert(1)</script>\u{1b}[2J$(id)";
        let mut merged = Merged { plan: "n".into(), tasks: 2, ended: 1, all_losses: 1, ..Merged::default() };
        merged.losses.push(Loss {
            node: bad.into(),
            kernel: bad.into(),
            test: "a".into(),
            seed: 7,
            attempt: 0,
            what: bad.into(),
            again: "try 7".into(),
        });
        merged.hosts.insert(bad.into(), Host::default());
        merged.skipped.insert(bad.into(), 3);
        for shown in [html(&merged), text(&merged)] {
            assert!(!shown.contains('\u{1b}'), "{shown}");
            let (lost, hosts) = (shown.find("LOST<").or(shown.find("LOST  ")), shown.find("Hosts"));
            assert!(lost.is_some() && lost < hosts, "{shown}");
            assert!(shown.contains("try 7"));
        }
        assert!(!html(&merged).contains("<script"));
    }
}
