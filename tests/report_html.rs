//! The HTML page in a browser: nothing is cut off, a phone does not scroll sideways, and the dark
//! scheme is dark.
//!
//! The page itself forbids scripts. The test adds a probe script to a copy of it, which measures
//! the layout in headless Chromium. The screenshots stay in the target's tmp directory, to be looked
//! at.

use std::path::Path;
use std::process::ExitCode;

use serde_json::Value;
use support::browser::{View, browser};
use support::{Failed, Tests};
use vellum_report::{Label, Premise, compare, html, json};

fn main() -> ExitCode {
    let views = [
        ("desk_light", 1200, false),
        ("desk_dark", 1200, true),
        ("phone_light", 400, false),
        ("phone_dark", 400, true),
        ("narrow_phone", 360, false),
    ];
    let mut tests = Tests::from_args();
    for (name, width, dark) in views {
        tests.add(name, browser(), move || look(name, View { width, height: 3600, dark }));
    }
    tests.run()
}

/// The script leaves its findings as JSON in the title of the outer page, which `--dump-dom`
/// prints.
const PROBE: &str = r##"<script>
const plots = [...document.querySelectorAll('figure > svg')];
// A comparison has its own colours in the legend, or none.
const css = (e, p) => e && getComputedStyle(e).getPropertyValue(p);
const light = c => { const v = c.match(/[\d.]+/g).map(Number); return (v[0] * 299 + v[1] * 587 + v[2] * 114) / 255000; };
const cut = [];
for (const svg of plots) {
  const frame = svg.getBoundingClientRect();
  for (const text of svg.querySelectorAll('text')) {
    const r = text.getBoundingClientRect();
    if (r.left < frame.left - 1 || r.right > frame.right + 1 || r.top < frame.top - 1 || r.bottom > frame.bottom + 1)
      cut.push(text.textContent.trim());
  }
}
const clash = [];
for (const svg of plots) {
  const all = [...svg.querySelectorAll('text')].filter(t => t.textContent.trim()).map(t => [t.textContent.trim(), t.getBoundingClientRect()]);
  all.forEach(([a, r], i) => all.slice(i + 1).forEach(([b, s]) => {
    if (r.left < s.right - 1 && s.left < r.right - 1 && r.top < s.bottom - 4 && s.top < r.bottom - 4) clash.push(a + ' / ' + b);
  }));
}
const top_of = name => document.querySelector(name).getBoundingClientRect().top;
// A plot is drawn at another size than its view box has.
const drawn = svg => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
const smallest = Math.min(...plots.flatMap(svg => [...svg.querySelectorAll('text')].filter(t => t.textContent.trim()).map(t => parseFloat(css(t, 'font-size')) * drawn(svg))));
// The left axis has the only turned text.
const untitled = plots.filter(svg => !svg.querySelector('text[transform]')).map(svg => svg.getAttribute('aria-label'));
const alike = [];
for (const legend of document.querySelectorAll('.legend')) {
  const dashes = [...legend.querySelectorAll('.key polyline')].map(line => css(line, 'stroke-dasharray'));
  if (new Set(dashes).size < dashes.length) alike.push(legend.textContent);
}
const wide = plots.filter(svg => svg.parentElement.scrollWidth > svg.parentElement.clientWidth).length;
top.document.title = JSON.stringify({
  width: innerWidth, scroll: document.documentElement.scrollWidth, pictures: plots.length, cut, clash, untitled, alike, wide,
  above: top_of('.plots'), below: top_of('.facts'),
  smallest, page: light(css(document.body, 'background-color')), ink: light(css(document.body, 'color')),
  text: light(css(document.querySelector('svg text'), 'fill')),
  line: css(document.querySelector('figure > svg polyline[stroke="#0000F1"][stroke-width="2"]'), 'stroke'),
  legend: css(document.querySelector('.legend .key polyline[stroke="#0000F1"]'), 'stroke'),
  invalid: [...document.querySelectorAll('.invalid, .verdict.fail')].map(e => e.getBoundingClientRect().height),
});
</script></body>"##;

fn look(name: &str, view: View) -> Result<(), Failed> {
    let View { width, dark, .. } = view;
    let mut results = json::read(Path::new("tests/data/dirty-log.json"))?;
    results[0].fail(Some("planted".into()), Premise::OneCpu);
    // Benchmarks have such figures by test and by row. Their names do not fit below the bars.
    for (i, index) in ["map", "unmap_chunked", "move_inactive", "hugetlb-1g-20g-40"].into_iter().enumerate() {
        results[0].figure(Label::of("call_time", index), "s", 0.001 * (i + 1) as f64);
    }
    (0..40).for_each(|i| results[0].figure(Label::of("add", 25 * i), "ns", f64::from(i + 1)));
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("report-html-{name}"));
    std::fs::create_dir_all(&directory)?;
    let found = measured(&directory, view, "page", &html::render(&results))?;

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
    assert!(number("smallest") >= 10.0, "labels are too small to read: {found}");
    assert_eq!(found["untitled"], serde_json::json!([]), "an axis has no title");
    assert_eq!(found["alike"], serde_json::json!([]), "lines differ in their colour only");
    assert_eq!(found["wide"], 0, "a plot scrolls: {found}");
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
    let found = measured(&directory, view, "comparison", &html::comparison(&compare::compare(a, b)?))?;
    let number = |key: &str| found[key].as_f64().unwrap_or(f64::NAN);
    assert!(number("scroll") <= number("width"), "a comparison scrolls sideways: {found}");
    for key in ["cut", "clash", "untitled"] {
        assert_eq!(found[key], serde_json::json!([]), "labels of ratios: {key}");
    }
    assert!(number("smallest") >= 10.0, "labels of ratios are too small to read: {found}");
    assert!(number("pictures") == 1.0 && number("above") < number("below"), "{found}");
    Ok(())
}

/// The findings of the probe about `page`. A screenshot of it stays in `directory`.
fn measured(directory: &Path, view: View, name: &str, page: &str) -> Result<Value, Failed> {
    let policy = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">";
    assert!(page.contains(policy), "the page does not forbid scripts");
    let picture = directory.join(format!("{name}.png"));
    view.screenshot(page, &picture)?;
    assert_eq!(&std::fs::read(&picture)?[1..4], b"PNG");
    let probed = page.replace(policy, "").replace("</body>", PROBE);
    let dom = view.document(&probed, &directory.join(name))?;
    let title =
        dom.split_once("<title>").and_then(|(_, rest)| rest.split_once("</title>")).ok_or("no title")?.0;
    Ok(serde_json::from_str(&title.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))?)
}
