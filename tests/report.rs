//! Result files. Files that are written match the schema. Files that are read are checked. Reading
//! and showing always ends, for any bytes.

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use serde_json::Value;
use vellum_host::Facts;
use vellum_report::output::{Kind, Writer};
use vellum_report::terminal::{Extent, Form};
use vellum_report::{
    Answer, Case, Counter, Histogram, Label, Mark, Premise, Report, Sample, Series, Status, json, terminal,
};
use vellum_sys::mmap::memfd;

fn produced() -> Report {
    let mut report = Report::new("bench example", Facts::collect("on".into()));
    report.ask("bytes", 1u64 << 30);
    report.ask("backing", "thp");
    report.figure("enable_logging", "s", 0.000_231);
    let rounds = (0..).zip([0.5, 0.4, 0.45]).map(|(round, value)| Sample::of_round(round, value));
    report.samples("dirty_memory", "s", rounds.collect());
    report.samples(
        Label::of("rate", "vcpu1"),
        "pages/s",
        vec![Sample { value: 7.0, vcpu: Some(1), ..Sample::default() }],
    );
    report.set_headline("dirty_memory");
    report.answer(Answer::of_test("9 pages checked").fact("first pass", "1 s").next("look"));
    report.cases = vec![
        Case { seconds: Some(0.5), seed: Some(u64::MAX), ..Case::new("ring/thp", Status::Pass) },
        Case::new("ring/shmem", Status::Skip).because("none").mended_by("mount one"),
    ];
    report.cut_short = Some("ended in round 4 of 9".into());
    report.fail(Some("round 2".into()), Premise::Recycled { pages: 3 });
    report.fail(None, Premise::OneCpu);
    report.notes.push("a note".into());
    report.counters.push(Counter { name: "exits".into(), index: None, before: 1, after: u64::MAX });
    report.series.push(Series {
        name: "p".into(),
        index: Some("vcpu0".into()),
        unit: "pages/s".into(),
        points: vec![(0.0, 1.0), (0.5, 2.0)],
    });
    report.marks.push(Mark { name: "collection".into(), start: 0.1, end: 0.2 });
    report.histograms.push(Histogram {
        name: "l".into(),
        index: None,
        unit: "ns".into(),
        buckets: vec![(40.0, 9), (90.0, 1)],
        max: Some(88.5),
    });
    report
}

fn example() -> Value {
    serde_json::from_str(include_str!("data/dirty-log.json")).unwrap()
}

/// The complete result as text.
fn shown(report: &Report, width: usize) -> String {
    terminal::render(std::slice::from_ref(report), Form::Text(width), Extent::Whole)
}

/// A file of this test, which is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("vellum-report-{}-{name}", std::process::id())))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Checks the part of JSON Schema (draft 2020-12) that the schema uses. The test fails on any other
/// keyword.
fn violations(schema: &Value, root: &Value, value: &Value, at: &str, found: &mut Vec<String>) {
    let is = |name: &str| match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "number" => value.is_number(),
        "integer" => value.is_u64() || value.is_i64(),
        other => panic!("unknown type {other}"),
    };
    for (keyword, rule) in schema.as_object().expect("a schema is an object") {
        let mut fail = |why: String| found.push(format!("{at}: {why}"));
        let number = || value.as_f64().zip(rule.as_f64());
        match keyword.as_str() {
            "$schema" | "title" | "description" | "$defs" => {}
            "$ref" => {
                let target =
                    root.pointer(rule.as_str().unwrap().strip_prefix('#').unwrap()).expect("a $ref resolves");
                violations(target, root, value, at, found);
            }
            "type" => match rule {
                Value::String(name) if is(name) => {}
                Value::Array(names) if names.iter().any(|n| is(n.as_str().unwrap())) => {}
                _ => fail(format!("{value} is not {rule}")),
            },
            "const" if value != rule => fail(format!("{value} is not {rule}")),
            "enum" if !rule.as_array().unwrap().contains(value) => fail(format!("{value} is none of {rule}")),
            "const" | "enum" => {}
            "minimum" if number().is_some_and(|(v, m)| v < m) => fail(format!("{value} < {rule}")),
            "maximum" if number().is_some_and(|(v, m)| v > m) => fail(format!("{value} > {rule}")),
            "minimum" | "maximum" => {}
            "minItems" | "maxItems" => {
                let (len, bound) = (value.as_array().map_or(0, Vec::len) as u64, rule.as_u64().unwrap());
                if (keyword == "minItems" && len < bound) || (keyword == "maxItems" && len > bound) {
                    fail(format!("{len} items"));
                }
            }
            "required" => {
                for name in rule.as_array().unwrap() {
                    if value.get(name.as_str().unwrap()).is_none() {
                        fail(format!("lacks {name}"));
                    }
                }
            }
            "properties" => {
                for (name, inner) in value.as_object().into_iter().flatten() {
                    if let Some(rule) = rule.get(name) {
                        violations(rule, root, inner, &format!("{at}.{name}"), found);
                    }
                }
            }
            "additionalProperties" => {
                assert_eq!(rule, &Value::Bool(false));
                for name in value.as_object().into_iter().flatten().map(|(name, _)| name) {
                    if schema["properties"].get(name).is_none() {
                        fail(format!("has {name}"));
                    }
                }
            }
            "items" => {
                for (i, item) in value.as_array().into_iter().flatten().enumerate() {
                    violations(rule, root, item, &format!("{at}[{i}]"), found);
                }
            }
            "oneOf" => {
                let fits = |one: &&Value| {
                    let mut inner = Vec::new();
                    violations(one, root, value, at, &mut inner);
                    inner.is_empty()
                };
                let fitting = rule.as_array().unwrap().iter().filter(fits).count();
                if fitting != 1 {
                    fail(format!("fits {fitting} of oneOf"));
                }
            }
            other => panic!("the schema uses `{other}`, which this check does not know"),
        }
    }
}

fn check(value: &Value) -> Vec<String> {
    let schema = serde_json::from_str(include_str!("../resources/report.schema.json")).unwrap();
    let mut found = Vec::new();
    violations(&schema, &schema, value, "", &mut found);
    found
}

#[test]
fn what_is_written_is_what_the_schema_says() {
    assert_eq!(check(&serde_json::to_value(produced()).unwrap()), [""; 0]);
    assert_eq!(check(&example()), [""; 0]);
}

/// A result of the previous version reads the same as a current one. It has no cases.
#[test]
fn the_last_version_is_read() {
    let old = json::read(Path::new("tests/golden/report-2.json")).unwrap();
    assert_eq!(old, json::read(Path::new("tests/data/dirty-log.json")).unwrap());
    assert_eq!(old[0].all_cases().len(), 1);
    let before = std::fs::read_to_string("tests/golden/report-2.json").unwrap();
    let older = before.replacen("\"schema\": 2", "\"schema\": 1", 1);
    let error = json::parse(older.as_bytes(), Path::new("r.json")).unwrap_err().to_string();
    assert!(error.contains("schema version 1") && error.contains("reads versions 2 to 3"), "{error}");
}

#[test]
fn schema_and_reader_agree_on_what_is_wrong() {
    type Diagnose = (&'static str, fn(&mut Value));
    let faults: &[Diagnose] = &[
        ("lacks \"name\"", |v| drop(v.as_object_mut().unwrap().remove("name"))),
        ("has extra", |v| v["extra"] = 1.into()),
        (".schema", |v| v["schema"] = 1.into()),
        (".host", |v| drop(v["host"].as_object_mut().unwrap().remove("paging"))),
        (".host", |v| drop(v["host"].as_object_mut().unwrap().remove("boot"))),
        (".headline", |v| v["headline"] = "dirty_memory".into()),
        (".invalid[0].premise", |v| v["invalid"] = serde_json::json!([{"premise": {"untold": {}}}])),
        (".invalid[0]", |v| v["invalid"] = serde_json::json!(["the host was idle"])),
        (".figures[4]", |v| v["figures"][4]["samples"][0]["machine"] = (-1).into()),
        (".host.paging", |v| v["host"]["paging"] = "magic".into()),
        (".host.memory", |v| v["host"]["memory"] = (-1).into()),
        (".figures[0]", |v| v["figures"][0]["median"] = 1.into()),
        (".figures[0]", |v| v["figures"][0]["value"] = "fast".into()),
        (".cases[0].status", |v| v["cases"] = serde_json::json!([{"name": "a", "status": "xfail"}])),
        (".cases[0].seconds", |v| {
            v["cases"] = serde_json::json!([{"name": "a", "status": "pass", "seconds": -1}])
        }),
        (".counters[0].after", |v| v["counters"][0]["after"] = 1.5.into()),
        (".series[0].points[0]", |v| v["series"][0]["points"][0] = serde_json::json!([1])),
        (".marks[0]", |v| drop(v["marks"][0].as_object_mut().unwrap().remove("end"))),
        (".histograms[0].unit", |v| v["histograms"][0]["unit"] = Value::Null),
    ];
    for (place, plant) in faults {
        let mut value = example();
        plant(&mut value);
        let found = check(&value);
        assert!(found.iter().any(|f| f.contains(place)), "the schema misses {place}: {found:?}");
        let read = json::parse(value.to_string().as_bytes(), Path::new("x.json"));
        assert!(read.is_err(), "the reader misses {place}");
    }
}

#[test]
fn a_file_is_written_over_and_read_back() {
    let file = Scratch::new("back.json");
    for results in [vec![produced(), produced(), produced()], vec![produced()]] {
        Writer::open(&file.0, Kind::Results).unwrap().write(&json::text(&results).unwrap()).unwrap();
        assert_eq!(json::read(&file.0).unwrap(), results);
    }
    let text = std::fs::read_to_string(&file.0).unwrap();
    assert!(
        text.lines().any(|l| l.trim() == r#"{"name": "enable_logging", "unit": "s", "value": 0.000231},"#),
        "{text}"
    );
}

#[test]
fn a_run_that_never_starts_leaves_the_earlier_result_or_nothing() {
    let file = Scratch::new("discard.json");
    let open = || Writer::open(&file.0, Kind::Results).unwrap();
    open().discard();
    assert!(!file.0.exists());
    open().write(&json::text(&[produced()]).unwrap()).unwrap();
    open().discard();
    assert_eq!(json::read(&file.0).unwrap().len(), 1);
    // The file is opened, then the run fails.
    drop(open());
    assert_eq!(json::read(&file.0).unwrap().len(), 1);
}

#[test]
fn what_is_no_result_is_not_written_over() {
    let file = Scratch::new("disk.img");
    let image = vec![7u8; 4096];
    std::fs::write(&file.0, &image).unwrap();
    for (kind, what) in [(Kind::Results, "Vellum results"), (Kind::Page, "a Vellum page")] {
        let error = Writer::open(&file.0, kind).unwrap_err().to_string();
        assert!(error.contains(what) && error.contains("disk.img"), "{error}");
    }
    assert_eq!(std::fs::read(&file.0).unwrap(), image);
    // A result file is not a page, and may have another version.
    std::fs::write(&file.0, "{\"schema\": 1, \"vellum\": \"0.1.0\"}").unwrap();
    assert!(Writer::open(&file.0, Kind::Page).is_err());
    Writer::open(&file.0, Kind::Results).unwrap().write(&json::text(&[produced()]).unwrap()).unwrap();
    assert_eq!(json::read(&file.0).unwrap().len(), 1);
}

fn vellum(arguments: &[&std::ffi::OsStr]) -> std::process::Output {
    std::process::Command::new(env!("CARGO_BIN_EXE_vellum")).args(arguments).output().unwrap()
}

#[test]
fn a_page_is_not_written_over_what_it_is_made_of() {
    let (file, link) = (Scratch::new("input.json"), Scratch::new("link.json"));
    let text = json::text(&[produced()]).unwrap();
    std::fs::write(&file.0, &text).unwrap();
    std::fs::hard_link(&file.0, &link.0).unwrap();
    for out in [&file.0, &link.0] {
        let output = vellum(&["report".as_ref(), "--html".as_ref(), out.as_ref(), file.0.as_ref()]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("which is read"), "{said}");
    }
    assert_eq!(std::fs::read(&file.0).unwrap(), text);
}

/// A file size limit of 8 KiB, which is less than a page, acts like a full disk.
#[test]
fn what_does_not_fit_leaves_what_was_there() {
    let (file, page) = (Scratch::new("fits.json"), Scratch::new("page.html"));
    std::fs::write(&file.0, json::text(&[produced()]).unwrap()).unwrap();
    let before = format!("{}<p>the page that was there", vellum_report::html::START);
    std::fs::write(&page.0, &before).unwrap();
    let output = std::process::Command::new("sh")
        .args([
            "-c",
            "ulimit -f 8; trap '' XFSZ; exec \"$@\"",
            "sh",
            env!("CARGO_BIN_EXE_vellum"),
            "report",
            "--html",
        ])
        .args([&page.0, &file.0])
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cannot write the result"), "{said}");
    assert_eq!(std::fs::read_to_string(&page.0).unwrap(), before);
}

#[test]
fn names_and_units_of_any_length_can_be_shown() {
    let mut report = produced();
    let long = "n".repeat(70_000);
    report.figure(long.as_str(), &long, 1.0);
    report.figure(Label::of("a", &long), "s", 1.0);
    report.name = long.clone();
    let text = shown(&report, 80);
    assert!(text.contains("nnn…nnn"), "a cell is not cut");
    assert!(text.len() < 400_000, "{} bytes", text.len());
}

#[test]
fn messages_name_the_file_the_fault_and_the_remedy() {
    let other = example().to_string().replacen("\"schema\":3", "\"schema\":7", 1);
    let deep = format!("{{\"schema\":3,\"asked\":{{\"x\":{}{}}}}}", "[".repeat(100_000), "]".repeat(100_000));
    let twice = {
        let mut value = example();
        value["figures"][1]["name"] = value["figures"][0]["name"].clone();
        value.to_string()
    };
    for (content, expected) in [
        ("", "it is empty; the run that writes it did not finish"),
        ("  \n", "it is empty"),
        ("vellum: no such workload", "no JSON object begins at byte 0"),
        ("[1, \"0.1\"]", "no JSON object begins"),
        ("{\"schema\": 2", "EOF while parsing"),
        ("{}", "it has no `schema`"),
        ("{\"schema\": \"1\"}", "its `schema` is not a number"),
        ("{\"schema\": 2}", "missing field"),
        (&other, "schema version 7, written by Vellum 0.1.0; this is Vellum"),
        (&deep, "recursion limit"),
        (&twice, "two figures are called `populate_memory`"),
    ] {
        let message = json::parse(content.as_bytes(), Path::new("r.json")).unwrap_err().to_string();
        assert!(message.starts_with("r.json: ") && message.contains(expected), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }
    let error = |path: &str| json::read(Path::new(path)).unwrap_err().to_string();
    assert!(error("/no/such/file.json").contains("No such file"));
    assert!(error("/proc").contains("a directory but a result file is needed"));
    assert!(error("/dev/zero").contains("a character device"), "{}", error("/dev/zero"));
    let large = memfd(c"large", (64 << 20) + 1, None).unwrap();
    let message = error(&format!("/proc/self/fd/{}", large.as_raw_fd()));
    assert!(message.contains("larger than 64 MiB"), "{message}");
    let error = Writer::open(Path::new("/no/such/directory/r.json"), Kind::Results).unwrap_err().to_string();
    assert!(error.starts_with("/no/such/directory/r.json: cannot write"), "{error}");
}

#[test]
fn spreads_series_and_buckets_out_of_order_are_refused() {
    type Diagnose = (&'static str, fn(&mut Value));
    let faults: &[Diagnose] = &[
        ("not those of its samples", |v| v["figures"][4]["median"] = 1e9.into()),
        ("not those of its samples", |v| v["figures"][4]["samples"][1]["value"] = 1e9.into()),
        ("resolution is not in", |v| v["figures"][4]["resolution"] = 2.into()),
        ("is not one of its figures", |v| v["headline"] = serde_json::json!({"name": "nothing"})),
        ("has an index in its name", |v| v["figures"][0]["name"] = "a[0]".into()),
        ("not in order", |v| v["series"][0]["points"][0][0] = 1e9.into()),
        ("ends before it starts", |v| v["marks"][0]["end"] = (-1).into()),
        ("bounds are not in order", |v| v["histograms"][0]["buckets"][1][0] = 0.into()),
        ("more than 2^64", |v| {
            v["histograms"][0]["buckets"] = serde_json::json!([[1, u64::MAX], [2, 1]]);
        }),
    ];
    for (expected, plant) in faults {
        let mut value = example();
        plant(&mut value);
        let message = json::parse(value.to_string().as_bytes(), Path::new("r.json")).unwrap_err().to_string();
        assert!(message.contains(expected), "{expected}: {message}");
    }
}

#[test]
fn the_text_stands_alone() {
    let mut report = json::read(Path::new("tests/data/dirty-log.json")).unwrap().remove(0);
    report.fail(None, Premise::NoHugePage { backing: "thp".into(), small: Some(512) });
    report.cut_short = Some("interrupted in round 3".into());
    report.host.emulated = true;
    let text = shown(&report, 100);
    for part in [
        "$ vellum bench dirty-log -v 2",
        "backing=thp",
        "seed=1",
        "bed local",
        "EMULATED (times count instructions, not seconds)",
        "Linux 6.12.0-test",
        "kvm_pvm",
        "INVALID  memory is backed by thp, but KVM mapped no huge pages, only 512 pages of 4 KiB",
        "CUT OFF  interrupted in round 3",
        "bytes_per_vcpu=536870912 (512 MiB)",
        "262,144",
        "p99.9",
        "mmu_recycled",
    ] {
        match part {
            "mmu_recycled" => assert!(!text.contains(part), "a counter that did not move is noise"),
            part => assert!(text.contains(part), "{part} is missing in:\n{text}"),
        }
    }
    let widest = text.lines().filter(|l| !l.starts_with("$ ")).map(|l| l.chars().count()).max().unwrap();
    assert!(widest <= 100, "{widest} columns:\n{text}");
    // Text that does not fit beside the rest is shown below it.
    for width in [72, 80, 200] {
        let text = shown(&report, width);
        let widest = text.lines().filter(|l| !l.starts_with("$ ")).map(|l| l.chars().count()).max().unwrap();
        assert!(widest <= width, "{widest} of {width} columns:\n{text}");
        assert!(text.contains("p99.9") && text.contains("clear_dirty_log"), "{text}");
    }
}

#[test]
fn the_corpus_and_its_mutations_do_no_harm() {
    let mut inputs = vec![include_bytes!("data/dirty-log.json").to_vec()];
    for entry in std::fs::read_dir("tests/fuzz/corpus/report").unwrap() {
        inputs.push(std::fs::read(entry.unwrap().path()).unwrap());
    }
    assert!(inputs.len() > 3, "the corpus is missing");
    for input in &inputs {
        fuzz_targets::report(input);
    }
    // The changes keep much of the structure, so that many inputs get past the parser.
    let mut generator = support::Random::new();
    let mut random = |below: usize| generator.below(below as u64) as usize;
    let tokens: [&[u8]; 12] = [
        b"1e308",
        b"-1e308",
        b"0",
        b"-1",
        b"1e-320",
        b"null",
        b"\"\\u001b[2J\"",
        b"[]",
        b"{}",
        b"18446744073709551615",
        b"\"<script>\"",
        b"true",
    ];
    for round in 0..400 {
        let mut input = inputs[round % inputs.len()].clone();
        for _ in 0..=random(3) {
            let numbers: Vec<usize> =
                (1..input.len()).filter(|i| input[i - 1] == b' ' && !b"{[\" ".contains(&input[*i])).collect();
            match (random(4), numbers.is_empty(), input.is_empty()) {
                (_, _, true) => {}
                (0, ..) => {
                    let i = random(input.len());
                    input[i] = random(256) as u8;
                }
                (1, ..) => input.truncate(random(input.len())),
                (_, false, _) => {
                    let start = numbers[random(numbers.len())];
                    let end = start + input[start..].iter().position(|b| b",]}\n".contains(b)).unwrap_or(0);
                    input.splice(start..end, tokens[random(tokens.len())].iter().copied());
                }
                _ => {}
            }
        }
        fuzz_targets::report(&input);
    }
}
