//! The HTML page in a browser: nothing is cut off, a phone does not scroll sideways, and the dark
//! scheme is dark.
//!
//! The page itself forbids scripts. The test adds a probe script to a copy of it, which measures
//! the layout in headless Chromium. The screenshots stay in the target's tmp directory for
//! inspection.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use serde_json::Value;
use support::{Failed, Tests, tools};
use vellum_report::{Label, Premise, compare, html, json};

fn main() -> ExitCode {
    let views = [
        ("desk_light", 1200, false),
        ("desk_dark", 1200, true),
        ("phone_light", 390, false),
        ("phone_dark", 390, true),
    ];
    let mut tests = Tests::from_args();
    for (name, width, dark) in views {
        let browser = tools::find("chromium").ok_or_else(|| tools::lacks("chromium"));
        tests.add(name, browser.clone().map(drop), move || look(&browser?, name, width, dark));
    }
    tests.run()
}

/// The script leaves its findings as JSON in the title of the outer page, which `--dump-dom`
/// prints.
const PROBE: &str = r#"<script>
// A comparison has its own colours in the legend, or none.
const css = (e, p) => e && getComputedStyle(e).getPropertyValue(p);
const light = c => { const v = c.match(/[\d.]+/g).map(Number); return (v[0] * 299 + v[1] * 587 + v[2] * 114) / 255000; };
const cut = [];
for (const svg of document.querySelectorAll('svg')) {
  const frame = svg.getBoundingClientRect();
  for (const text of svg.querySelectorAll('text')) {
    const r = text.getBoundingClientRect();
    if (r.left < frame.left - 1 || r.right > frame.right + 1 || r.top < frame.top - 1 || r.bottom > frame.bottom + 1)
      cut.push(text.textContent.trim());
  }
}
const clash = [];
for (const svg of document.querySelectorAll('svg')) {
  const all = [...svg.querySelectorAll('text')].filter(t => t.textContent.trim()).map(t => [t.textContent.trim(), t.getBoundingClientRect()]);
  all.forEach(([a, r], i) => all.slice(i + 1).forEach(([b, s]) => {
    if (r.left < s.right - 1 && s.left < r.right - 1 && r.top < s.bottom - 4 && s.top < r.bottom - 4) clash.push(a + ' / ' + b);
  }));
}
const top_of = name => document.querySelector(name).getBoundingClientRect().top;
const smallest = Math.min(...[...document.querySelectorAll('svg text')].filter(t => t.textContent.trim()).map(t => t.getBoundingClientRect().height));
top.document.title = JSON.stringify({
  width: innerWidth, scroll: document.documentElement.scrollWidth, pictures: document.querySelectorAll('svg').length, cut, clash,
  above: top_of('.plots'), below: top_of('.facts'),
  smallest, page: light(css(document.body, 'background-color')), ink: light(css(document.body, 'color')),
  text: light(css(document.querySelector('svg text'), 'fill')),
  line: css(document.querySelector('svg polyline[stroke-width="2"]'), 'stroke'),
  legend: css(document.querySelector('.legend .c0'), 'background-color'),
  invalid: [...document.querySelectorAll('.invalid, .verdict.fail')].map(e => e.getBoundingClientRect().height),
});
</script></body>"#;

fn look(browser: &Path, name: &str, width: u32, dark: bool) -> Result<(), Failed> {
    let mut results = json::read(Path::new("tests/data/dirty-log.json"))?;
    results[0].fail(Some("planted".into()), Premise::OneCpu);
    // Benchmarks have such figures by test and by row. Their names do not fit below the bars.
    for (i, index) in ["map", "unmap_chunked", "move_inactive", "hugetlb-1g-20g-40"].into_iter().enumerate() {
        results[0].figure(Label::of("call_time", index), "s", 0.001 * (i + 1) as f64);
    }
    (0..40).for_each(|i| results[0].figure(Label::of("add", 25 * i), "ns", f64::from(i + 1)));
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("report-html-{name}"));
    std::fs::create_dir_all(&directory)?;
    let found = measured(browser, &directory, width, dark, &html::render(&results))?;

    let number = |key: &str| found[key].as_f64().unwrap_or(f64::NAN);
    assert_eq!(number("width"), f64::from(width), "{found}");
    assert!(number("scroll") <= number("width"), "the page scrolls sideways: {found}");
    assert!(number("pictures") >= 5.0, "pictures are missing: {found}");
    assert_eq!(found["cut"], serde_json::json!([]), "labels are cut off");
    assert_eq!(found["clash"], serde_json::json!([]), "labels stand on each other");
    assert!(
        number("above") < 500.0 && number("above") < number("below"),
        "the pictures do not come first: {found}"
    );
    assert!(number("smallest") >= 9.0, "labels are too small to read: {found}");
    assert!(found["invalid"][0].as_f64() > Some(15.0), "INVALID is not to be seen: {found}");
    assert!((number("page") - number("ink")).abs() > 0.6, "no contrast: {found}");
    assert_eq!(number("page") < 0.5, dark, "the page is not as dark as asked: {found}");
    assert!(
        (number("text") - number("ink")).abs() < 0.05,
        "the pictures' text is in another colour: {found}"
    );
    assert_eq!(found["line"], found["legend"], "the legend names another colour than the line has");
    let mut other = results.clone();
    let moved = other[0].figures.iter_mut().filter(|figure| figure.unit == "s");
    moved.flat_map(|figure| &mut figure.samples).for_each(|sample| sample.value *= 1.5);
    let [a, b] =
        [("a.json", &results), ("b.json", &other)].map(|(name, results)| compare::Side { name, results });
    let found = measured(browser, &directory, width, dark, &html::comparison(&compare::compare(a, b)?))?;
    let number = |key: &str| found[key].as_f64().unwrap_or(f64::NAN);
    assert!(number("scroll") <= number("width"), "a comparison scrolls sideways: {found}");
    assert_eq!(
        (&found["cut"], &found["clash"]),
        (&serde_json::json!([]), &serde_json::json!([])),
        "labels of ratios"
    );
    assert!(number("pictures") == 1.0 && number("above") < number("below"), "{found}");
    Ok(())
}

/// The findings of the probe about `page`.
fn measured(browser: &Path, directory: &Path, width: u32, dark: bool, page: &str) -> Result<Value, Failed> {
    let file = directory.join("page.html");
    std::fs::write(&file, page)?;
    let policy = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">";
    assert!(page.contains(policy), "the page does not forbid scripts");
    // A window cannot be as narrow as a phone, but a frame can.
    let framed = directory.join("framed.html");
    let inner =
        page.replace(policy, "").replace("</body>", PROBE).replace('&', "&amp;").replace('"', "&quot;");
    std::fs::write(
        &framed,
        format!(
            "<title></title><body style=\"margin:0\"><iframe srcdoc=\"{inner}\" style=\"border:0\" width={width} height=3000>"
        ),
    )?;

    let picture = directory.join("page.png");
    chromium(browser, directory, width, dark, &[&format!("--screenshot={}", picture.display())], &framed)?;
    assert_eq!(&std::fs::read(&picture)?[1..4], b"PNG");
    let dom = chromium(browser, directory, width, dark, &["--dump-dom"], &framed)?;
    let title =
        dom.split_once("<title>").and_then(|(_, rest)| rest.split_once("</title>")).ok_or("no title")?.0;
    Ok(serde_json::from_str(&title.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))?)
}

fn chromium(
    browser: &Path,
    directory: &Path,
    width: u32,
    dark: bool,
    what: &[&str],
    page: &Path,
) -> Result<String, Failed> {
    let profile = directory.join("profile");
    let scheme = if dark { 0 } else { 1 };
    let output = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--hide-scrollbars",
        ])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .arg(format!("--blink-settings=preferredColorScheme={scheme}"))
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("--window-size={width},2600"))
        .args(what)
        .arg(format!("file://{}", page.display()))
        .stdin(Stdio::null())
        .output()?;
    let _ = std::fs::remove_dir_all(&profile);
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)).into()),
    }
}
