//! A KCIDB submission (schema 5.3 of kcidb-io): a test per case, and a test with a number per
//! figure. Vellum knows only the release and architecture of the tested kernel, so the checkout and
//! build hold no more. The builder of the kernel can add fields under the same ids.

use serde_json::{Map, Value, json};

use super::date;
use crate::case::Status;
use crate::{Report, printable};

/// The schema's version.
const VERSION: (u32, u32) = (5, 3);

/// The submission for all results.
pub(super) fn render(results: &[Report], origin: &str) -> serde_json::Result<String> {
    let (mut checkouts, mut builds, mut tests) = (Map::new(), Map::new(), Vec::new());
    let architecture = std::env::consts::ARCH;
    for (nth, result) in results.iter().enumerate() {
        let kernel = text(&result.host.kernel);
        let checkout = format!("{origin}:{kernel}");
        let build = format!("{checkout}:{architecture}");
        let known =
            json!({"id": checkout, "origin": origin, "comment": format!("the running kernel, {kernel}")});
        checkouts.entry(checkout.clone()).or_insert(known);
        let known = json!({
            "id": build, "checkout_id": checkout, "origin": origin, "architecture": architecture,
            "comment": format!("KVM module: {}", text(result.host.module.as_deref().unwrap_or("none"))),
        });
        builds.entry(build.clone()).or_insert(known);
        let root: Vec<String> = result.name.split_whitespace().map(label).collect();
        let unique = format!("{origin}:{}-{:.0}-{nth}", text(&result.host.boot), result.at * 1e3);
        let environment = json!({
            "comment": text(&result.host.cpu),
            "misc": {"bed": result.host.bed, "emulated": result.host.emulated, "module": result.host.module,
                "paging": result.host.paging, "cpus": result.host.cpus, "memory": result.host.memory},
        });
        let mut add = |path: &[String], status: &str, more: Value| {
            let path = std::iter::once("vellum").chain(root.iter().chain(path).map(String::as_str));
            let path = path.collect::<Vec<_>>().join(".");
            let mut test = json!({
                "id": format!("{unique}-{}", tests.len()), "build_id": build, "origin": origin, "path": path,
                "status": status, "environment": environment,
            });
            if let Some(at) = date(result.at) {
                test["start_time"] = at.to_rfc3339().into();
            }
            if let (Value::Object(test), Value::Object(more)) = (&mut test, more) {
                test.extend(more);
            }
            tests.push(test);
        };
        for case in result.told_cases() {
            let status = match case.status {
                Status::Pass => "PASS",
                Status::Fail => "FAIL",
                Status::Skip => "SKIP",
                Status::Timeout | Status::Crash => "ERROR",
            };
            let path: Vec<String> =
                if case.name == result.name { vec![] } else { case.name.split('/').map(label).collect() };
            let mut more = json!({"misc": {"vellum": result.vellum, "command": result.command,
                "seed": case.seed, "status": case.status}});
            if let Some(seconds) = case.seconds {
                more["duration"] = seconds.into();
            }
            let why = case.why();
            if !why.is_empty() {
                more["comment"] = text(&why).into();
            }
            add(&path, status, more);
        }
        let measured = if result.invalid.is_empty() { "DONE" } else { "ERROR" };
        for figure in &result.figures {
            let mut path = vec!["figures".to_owned(), label(&figure.label.name)];
            path.extend(figure.label.index.as_deref().map(label));
            let mut number = json!({"value": figure.value()});
            if !figure.unit.is_empty() {
                number["unit"] = text(&figure.unit).into();
            }
            add(&path, measured, json!({"number": number, "misc": {"samples": figure.samples.len()}}));
        }
    }
    let values = |map: Map<String, Value>| map.into_iter().map(|(_, value)| value).collect::<Vec<_>>();
    let submission = json!({
        "version": {"major": VERSION.0, "minor": VERSION.1},
        "checkouts": values(checkouts), "builds": values(builds), "tests": tests,
    });
    serde_json::to_string_pretty(&submission).map(|text| text + "\n")
}

fn text(text: &str) -> String {
    printable(text).into_owned()
}

/// Turns a name into a path component: `[a-zA-Z0-9_-]+`.
fn label(part: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    if part.is_empty() { "_".into() } else { part.chars().map(safe).collect() }
}
