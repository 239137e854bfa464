//! `cargo lab history`: the same commands on a kernel of each series that Debian packages. One
//! table and one picture show what each kernel lost, and how many instructions each command took.
//!
//! Nothing is built. What a boot gave is kept in the cache, under a key of everything that it
//! depends on. So a stopped history continues, and one with another Vellum starts anew. A kernel
//! that cannot be had and a command that fails are named.

mod picture;
mod table;

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vellum_report::{Case, Figure, Label, Report, Status, json};

use crate::architecture::Architecture;
use crate::artifacts::{Kernel, Programs};
use crate::cache::{Cache, digest, recorded};
use crate::compare::boot::{IDLE_LIMIT, in_instructions};
use crate::hosts::{self, Emulated, HostKernel, Outcome, Request};
use crate::kernel::bench::{Bench, by_host};
use crate::{Error, Result, form, lanes};

/// What a history covers.
pub struct Options {
    /// The oldest series.
    pub from: String,
    /// The newest series.
    pub to: String,
    /// The hosts.
    pub bed: Emulated,
    /// Where the table and the picture go.
    pub out: PathBuf,
}

/// What is taken of a command's results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takes {
    /// The sum of its figures called `lost`.
    Lost,
    /// The number of its cases that are not passed.
    Failed,
    /// Its headline, in instructions.
    Headline,
}

/// A command that runs on each kernel: its name in the table, its line, and what is taken of it.
type Command = (&'static str, &'static str, Takes);

/// The commands.
const COMMANDS: [Command; 15] = [
    ("oracle", "vellum test dirty-log --memory 16m --events 5k --seed 1 -s anonymous -s thp", Takes::Lost),
    ("dirty-edges", "vellum test dirty-edges", Takes::Lost),
    ("dirty-edges revoked", "vellum test dirty-edges --revoke", Takes::Lost),
    ("dirty-edges ring", "vellum test dirty-edges --tracker ring", Takes::Lost),
    ("dirty-edges reset", "vellum test dirty-edges --tracker ring --interrupt", Takes::Lost),
    ("judge", "vellum judge run --vmm vellum -m 16m --scenario snapshot --scenario migrate", Takes::Failed),
    ("dirty-log", "vellum bench dirty-log -b 32m -s anonymous -i 3", Takes::Headline),
    ("page-table", "vellum bench page-table -b 32m -s anonymous", Takes::Headline),
    ("access-tracking", "vellum bench access-tracking -b 16m", Takes::Headline),
    ("demand-paging", "vellum bench demand-paging -b 16m", Takes::Headline),
    ("memslot", "vellum bench memslot map -b 64m -l 200ms", Takes::Headline),
    ("context-switch", "vellum bench context-switch 4", Takes::Headline),
    ("rmap-fork", "vellum bench rmap-fork 500", Takes::Headline),
    (
        "migration",
        "vellum bench migration -b 16m --dirty-rate max --around 100ms --repeat 1",
        Takes::Headline,
    ),
    ("fork", "vellum bench fork -b 16m --dirty-rate max --around 100ms --repeat 1", Takes::Headline),
];

/// The hosts: whether they have a second stage, and what they change in KVM. With huge pages that
/// are not split in advance, a kernel may lose pages that it keeps otherwise. Without a second
/// stage, KVM splits none in advance.
const HOSTS: [(bool, &[&str]); 3] = [(true, &[]), (true, &["kvm.eager_page_split=0"]), (false, &[])];

/// A command on a host: a row of the table.
struct Row {
    /// The command's name.
    name: &'static str,
    takes: Takes,
    bench: Bench,
    /// `npt=1 kvm.eager_page_split=0`.
    host: String,
}

/// All rows. Only what may lose pages runs with huge pages that are not split in advance.
fn rows(bed: Emulated) -> Vec<Row> {
    let of_host = |(second_stage, parameters): (bool, &'static [&'static str])| {
        let commands = COMMANDS
            .into_iter()
            .filter(move |(.., takes)| parameters.is_empty() || *takes != Takes::Headline);
        commands.map(move |(name, run, takes)| Row {
            name,
            takes,
            bench: Bench {
                parameters: parameters.iter().map(|&parameter| parameter.to_owned()).collect(),
                ..Bench::plain(&format!("{run} --json {{json}}"), second_stage)
            },
            host: [&[bed.mode(second_stage).as_str()], parameters].concat().join(" "),
        })
    };
    let mut rows: Vec<Row> = HOSTS.into_iter().flat_map(of_host).collect();
    // What was lost comes first.
    rows.sort_by_key(|row| row.takes == Takes::Headline);
    rows
}

/// A kernel.
struct Column {
    series: &'static str,
    /// The package with its version, or why there is none.
    package: std::result::Result<String, String>,
}

/// What one command gave on one kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Gave {
    reports: Vec<Report>,
    code: i32,
    /// The host's idle share meanwhile.
    idle: f64,
    /// The last line of its standard error.
    said: String,
}

/// The value of one cell of the table, or why it has none.
#[derive(Clone, Debug, PartialEq)]
enum Cell {
    /// The figure, which is a count of losses or a cost.
    Figure(Figure),
    /// The command could not run or measure.
    Absent(String),
    /// It failed by something that is not counted.
    Failed(String),
}

/// A whole history.
struct History {
    bed: Emulated,
    emulator: String,
    columns: Vec<Column>,
    rows: Vec<Row>,
    /// A cell for each column of each row.
    cells: Vec<Vec<Cell>>,
}

/// The series from `from` to `to`.
fn series(from: &str, to: &str) -> Result<Vec<&'static str>> {
    let all: Vec<&str> = Kernel::series().collect();
    let at = |flag: &str, name: &str| {
        all.iter().position(|known| *known == name).ok_or_else(|| {
            Error::Usage(format!("{flag} {name}: no such series here; there are {}", all.join(", ")))
        })
    };
    match (at("--from", from)?, at("--to", to)?) {
        (first, last) if first <= last => Ok(all[first..=last].to_vec()),
        _ => Err(Error::Usage(format!("--from {from}: is newer than --to {to}; swap them"))),
    }
}

/// Runs the commands on each kernel, and writes the table and the picture.
pub fn run(cache: &Cache, options: &Options) -> Result<Report> {
    let series = series(&options.from, &options.to)?;
    let bed = options.bed;
    if bed.architecture() != Architecture::X86 {
        return Err(Error::Usage(format!(
            "--bed {}: the judge's image is for x86-64; use svm or vmx",
            bed.name()
        )));
    }
    bed.ready()?;
    let programs = Programs::build()?;
    let kernels: Vec<std::result::Result<Kernel, String>> = series
        .iter()
        .map(|series| match Kernel::newest(cache, series) {
            Err(Error::Package(why)) => Ok(Err(first_line(&why))),
            kernel => kernel.map(Ok),
        })
        .collect::<Result<_>>()?;
    let column = |(series, kernel): (&'static str, &std::result::Result<Kernel, String>)| Column {
        series,
        package: kernel.as_ref().map(|kernel| kernel.package.clone()).map_err(Clone::clone),
    };
    let columns: Vec<Column> = series.into_iter().zip(&kernels).map(column).collect();
    let rows = rows(bed);
    let groups = by_host(&rows.iter().map(|row| &row.bench).collect::<Vec<_>>());
    let boots: Vec<(usize, &[&Bench])> =
        (0..columns.len()).flat_map(|column| groups.iter().map(move |group| (column, &group[..]))).collect();
    let gave = lanes::side_by_side(&boots, |&(column, group)| match &kernels[column] {
        Ok(kernel) => boot(cache, &programs, bed, kernel, group),
        Err(why) => Ok(Err(why.clone())),
    })?;
    let cell = |row: &Row, column: usize| {
        let of_row = |(of, group): &(usize, &[&Bench])| {
            let index = group.iter().position(|bench| **bench == row.bench)?;
            (*of == column).then_some(index)
        };
        let found = boots.iter().zip(&gave).find_map(|(boot, gave)| Some((of_row(boot)?, gave)));
        match found.map(|(index, gave)| gave.as_ref().map(|gave| gave.get(index))) {
            Some(Ok(Some(gave))) => taken(row.takes, gave, bed.nanoseconds_per_instruction()),
            Some(Err(why)) => Cell::Absent(why.clone()),
            Some(Ok(None)) | None => Cell::Absent("it did not run".into()),
        }
    };
    let cells = rows.iter().map(|row| (0..columns.len()).map(|column| cell(row, column)).collect()).collect();
    let history = History { bed, emulator: bed.version()?, columns, rows, cells };
    history.deliver(&options.out)?;
    Ok(history.report())
}

/// Boots `kernel` for the commands of `group`, unless an earlier history has done so. If the host
/// does not get to its end, returns why.
fn boot(
    cache: &Cache,
    programs: &Programs,
    bed: Emulated,
    kernel: &Kernel,
    group: &[&Bench],
) -> Result<std::result::Result<Vec<Gave>, String>> {
    let mut request = Request { host: bed, ..Request::new(HostKernel::Debian(kernel.clone())) };
    group[0].describe_host(&mut request);
    // The time limit is for one command.
    request.time_limit *= u32::try_from(group.len()).unwrap_or(u32::MAX);
    request.commands = (0..).zip(group).map(|(index, bench)| bench.command(&result(index))).collect();
    let label = format!("{} on {}", kernel.package, request.label());
    let file =
        cache.dir("history/boots")?.join(format!("{}.json", key(programs, &request, &kernel.package)?));
    let mut done_before = true;
    let gave = recorded(&file, || {
        done_before = false;
        eprintln!("lab: {label}: {} commands", group.len());
        Ok(gave(&hosts::run(cache, programs, &request, |_| ())?))
    });
    if done_before {
        eprintln!("lab: {label}: done before");
    }
    match gave {
        Ok(gave) => Ok(Ok(gave)),
        Err(Error::Host { what, .. }) => {
            eprintln!("lab: {label}: {what}");
            Ok(Err(what))
        }
        Err(error) => Err(error),
    }
}

/// The name of a command's result.
fn result(index: usize) -> String {
    format!("{index}.json")
}

/// A key of everything that a boot's figures depend on.
fn key(programs: &Programs, request: &Request, package: &str) -> Result<String> {
    let nanoseconds = request.host.nanoseconds_per_instruction();
    let what =
        format!("{package} {} {} {nanoseconds} {:?}", request.label(), request.memory_mib, request.commands);
    let mut parts = vec![what.into_bytes(), request.host.version()?.into_bytes()];
    for program in [&programs.vellum, &programs.init] {
        parts.push(fs::read(program).map_err(Error::file("read", program))?);
    }
    Ok(digest(parts.iter().map(Vec::as_slice)))
}

/// What each command of a boot gave.
fn gave(outcome: &Outcome) -> Vec<Gave> {
    let of = |(index, ran): (usize, &hosts::Ran)| {
        let bytes = outcome.files.get(&result(index));
        let reports = bytes.and_then(|bytes| json::parse(bytes, Path::new(&result(index))).ok());
        let stderr = String::from_utf8_lossy(&ran.stderr).into_owned();
        let last = stderr.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or_default();
        let (code, idle) = ran.exit.as_ref().map_or((-1, 0.0), |exit| (exit.code, exit.idle));
        Gave { reports: reports.unwrap_or_default(), code, idle, said: last.to_owned() }
    };
    outcome.ran.iter().enumerate().map(of).collect()
}

/// Takes the cell's figure of what a command gave.
fn taken(takes: Takes, gave: &Gave, nanoseconds: f64) -> Cell {
    let why = || match gave.said.as_str() {
        "" => format!("it ended with {}", gave.code),
        said => said.to_owned(),
    };
    let figures = || gave.reports.iter().flat_map(|report| &report.figures);
    let sum: Option<f64> = match takes {
        Takes::Lost => {
            let lost = figures().filter(|figure| figure.label.name == "lost").map(Figure::value);
            lost.reduce(|sum, more| sum + more)
        }
        Takes::Failed => {
            // A case that crashed or was not in time lost nothing that is known.
            let cases = gave.reports.iter().flat_map(|report| &report.cases);
            cases.map(|case| f64::from(u8::from(case.status == Status::Fail))).reduce(|sum, more| sum + more)
        }
        Takes::Headline => return cost(gave, nanoseconds).unwrap_or_else(|| Cell::Absent(why())),
    };
    let unit = if takes == Takes::Lost { "pages" } else { "scenarios" };
    match (sum, gave.code) {
        // A verdict is about more than what is counted.
        (Some(sum), code) if code == 0 || sum > 0.0 => Cell::Figure(Figure::once("lost", unit, sum)),
        (_, NOT_RUN) => Cell::Absent(why()),
        _ => Cell::Failed(why()),
    }
}

/// The exit status of a test that this host cannot run.
const NOT_RUN: i32 = 4;

/// A benchmark's headline, in instructions. A rate becomes the instructions for one of what it
/// counts. `None` if the command did not measure.
fn cost(gave: &Gave, nanoseconds: f64) -> Option<Cell> {
    let report = gave.reports.first().filter(|_| gave.code == 0)?;
    if let Some(why) = report.invalid.first() {
        return Some(Cell::Absent(format!("it calls its result invalid: {why}")));
    }
    if gave.idle > IDLE_LIMIT {
        let percent = IDLE_LIMIT * 100.0;
        return Some(Cell::Absent(format!(
            "its host idles for more than {percent:.0} % of the time, which would count as instructions"
        )));
    }
    let headline = report.find(report.headline.clone()?)?;
    let figure = in_instructions(headline.clone(), nanoseconds);
    Some(match figure.unit.strip_suffix("s/s") {
        Some(one) => {
            let each = 1e9 / nanoseconds / figure.value();
            Cell::Figure(Figure::once(figure.label.clone(), &format!("instructions per {one}"), each))
        }
        None => Cell::Figure(Figure::once(figure.label.clone(), &figure.unit, figure.value())),
    })
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim_end_matches(':').to_owned()
}

/// What stands around the table in a page.
const MARKS: [&str; 2] = ["<!-- cargo lab history writes this. -->\n", "<!-- Its end. -->\n"];

/// The page with another table, or a page with this table alone.
fn renewed(page: &str, table: &str) -> String {
    let [first, last] = MARKS;
    let around = page.split_once(first).and_then(|(before, rest)| Some((before, rest.split_once(last)?.1)));
    let (before, after) = around.unwrap_or_default();
    format!("{before}{first}\n{table}\n{last}{after}")
}

impl History {
    /// Prints the table, and writes it and the picture to `out`. The text around the table in a page
    /// that is there stays.
    fn deliver(&self, out: &Path) -> Result<()> {
        fs::create_dir_all(out).map_err(Error::file("create", out))?;
        let table = self.table();
        let page = out.join("history.md");
        let before = fs::read_to_string(&page).unwrap_or_default();
        for (path, content) in [(page, renewed(&before, &table)), (out.join("history.svg"), self.picture())] {
            fs::write(&path, content).map_err(Error::file("write", &path))?;
        }
        println!("{table}\nKept in {}", out.display());
        Ok(())
    }

    /// A case and a figure for each command on each kernel.
    fn report(&self) -> Report {
        let mut report = form::report("lab history");
        report.ask("bed", self.bed.name());
        report.ask("emulator", self.emulator.clone());
        for (at, column) in self.columns.iter().enumerate() {
            match &column.package {
                Ok(package) => report.note(format!("{}: {package}", column.series)),
                Err(why) => form::add(&mut report, Case::new(column.series, Status::Skip).because(why)),
            }
            for (row, cells) in self.rows.iter().zip(&self.cells).filter(|_| column.package.is_ok()) {
                let name = format!("{}, {}", row.name, row.host);
                let case = |status| Case::new(format!("{}/{}/{}", column.series, row.host, row.name), status);
                form::add(
                    &mut report,
                    match &cells[at] {
                        Cell::Figure(figure) if row.takes == Takes::Headline || figure.value() == 0.0 => {
                            case(Status::Pass)
                        }
                        Cell::Figure(figure) => {
                            case(Status::Fail).because(format!("{} {} lost", figure.value(), figure.unit))
                        }
                        Cell::Absent(why) => case(Status::Skip).because(why),
                        Cell::Failed(why) => case(Status::Fail).because(why),
                    },
                );
                if let Cell::Figure(figure) = &cells[at] {
                    let label = Label::of(name, column.series);
                    report.push(Figure { label, ..figure.clone() });
                }
            }
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use vellum_report::Premise;

    use super::*;
    use crate::hosts::wire::{Boot, Exit};
    use crate::hosts::{Ran, svm};

    fn report(figures: &[(&str, &str, f64)], headline: Option<&str>) -> Report {
        let mut report = form::report("x");
        figures.iter().for_each(|(name, unit, value)| report.figure(*name, unit, *value));
        headline.into_iter().for_each(|name| report.set_headline(name));
        report
    }

    fn ended(code: i32, reports: Vec<Report>) -> Gave {
        Gave { reports, code, idle: 0.0, said: "vellum: why".into() }
    }

    fn value(cell: &Cell) -> Option<f64> {
        cell.figure().map(Figure::value)
    }

    #[test]
    fn series_are_named_and_in_order() {
        assert_eq!(series("6.1", "6.16").unwrap(), ["6.1", "6.12", "6.16"]);
        for (from, to, says) in
            [("6.2", "7.3", "--from 6.2"), ("6.1", "8", "--to 8"), ("7.3", "6.1", "is newer than")]
        {
            let error = series(from, to).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn each_host_runs_all_its_commands_in_one_boot() {
        let rows = rows(svm::HOST);
        let groups = by_host(&rows.iter().map(|row| &row.bench).collect::<Vec<_>>());
        assert_eq!(groups.len(), HOSTS.len());
        let split = |row: &&Row| row.bench.parameters.is_empty();
        assert!(rows.iter().filter(|row| !split(row)).all(|row| row.takes != Takes::Headline));
        assert_eq!(rows.iter().filter(split).count(), 2 * COMMANDS.len());
        let hosts: Vec<&str> = rows.iter().map(|row| row.host.as_str()).collect();
        assert!(hosts.contains(&"npt=1 kvm.eager_page_split=0"), "{hosts:?}");
    }

    #[test]
    fn what_a_command_gave_is_its_result_its_status_and_its_last_line() {
        let exit = |code, idle| Some(Exit { code, seconds: 1.0, idle });
        let ran = [
            Ran { stderr: b"begins\nvellum: why\n\n".to_vec(), exit: exit(1, 0.5), ..Ran::default() },
            Ran { exit: exit(0, 0.0), ..Ran::default() },
        ];
        let text = json::text(&[report(&[("lost", "pages", 3.0)], None)]).unwrap();
        let files = [("0.json".to_owned(), text), ("1.json".to_owned(), b"{".to_vec())].into();
        let boot = Boot { kernel: "6.1".into(), kvm: true, complaints: Vec::new(), refused: Vec::new() };
        let gave = gave(&Outcome { boot, ran: ran.to_vec(), files });
        assert_eq!((gave[0].code, gave[0].idle, gave[0].said.as_str()), (1, 0.5, "vellum: why"));
        assert_eq!(value(&taken(Takes::Lost, &gave[0], 2.0)), Some(3.0));
        assert!(gave[1].reports.is_empty(), "half a result is none");
        assert_eq!(taken(Takes::Lost, &gave[1], 2.0), Cell::Failed("it ended with 0".into()));
    }

    #[test]
    fn a_loss_is_a_number_and_another_failure_is_none() {
        let lost = |values: &[f64], code| {
            let figures: Vec<_> = values.iter().map(|&value| ("lost", "pages", value)).collect();
            taken(Takes::Lost, &ended(code, vec![report(&figures, None)]), 2.0)
        };
        assert_eq!(value(&lost(&[0.0, 0.0], 0)), Some(0.0));
        assert_eq!(value(&lost(&[3.0, 4.0], 1)), Some(7.0));
        assert_eq!(lost(&[0.0], 1), Cell::Failed("vellum: why".into()));
        assert_eq!(lost(&[], NOT_RUN), Cell::Absent("vellum: why".into()));
        assert_eq!(lost(&[], 0), Cell::Failed("vellum: why".into()), "it has counted nothing");
        let failed = |statuses: &[Status], code| {
            let mut report = report(&[], None);
            report.cases.extend(statuses.iter().map(|status| Case::new("a", *status)));
            taken(Takes::Failed, &ended(code, vec![report]), 2.0)
        };
        assert_eq!(value(&failed(&[Status::Pass, Status::Pass], 0)), Some(0.0));
        assert_eq!(value(&failed(&[Status::Fail, Status::Pass, Status::Crash], 1)), Some(1.0));
        assert_eq!(failed(&[Status::Pass, Status::Timeout], 1), Cell::Failed("vellum: why".into()));
        assert_eq!(failed(&[], 1), Cell::Failed("vellum: why".into()));
    }

    #[test]
    fn a_headline_is_in_instructions_or_missing() {
        let of = |unit, change: fn(&mut Gave)| {
            let report = report(&[("other", "s", 9.0), ("a", unit, 4.0)], Some("a"));
            let mut gave = ended(0, vec![report]);
            change(&mut gave);
            taken(Takes::Headline, &gave, 2.0)
        };
        let cost = |cell: Cell| cell.figure().map(|figure| (figure.unit.clone(), figure.value()));
        assert_eq!(cost(of("ns", |_| ())), Some(("instructions".into(), 2.0)));
        assert_eq!(cost(of("pages/s", |_| ())), Some(("instructions per page".into(), 1.25e8)));
        let absent = |cell, says: &str| matches!(&cell, Cell::Absent(why) if why.contains(says));
        assert!(absent(of("ns", |gave| gave.idle = 0.02), "idles for more than 1 %"));
        assert!(absent(of("ns", |gave| gave.code = 1), "vellum: why"));
        let invalid = of("ns", |gave| {
            gave.reports[0].fail(None, Premise::NothingToMeasureBy { figure: "a".into() });
        });
        assert!(absent(invalid, "calls its result invalid"));
    }

    /// A history with two kernels and one that is missing. The newer one loses three pages in one
    /// command, and fails in another.
    fn history() -> History {
        let rows = rows(svm::HOST);
        let lost = |lost| ended(i32::from(lost > 0.0), vec![report(&[("lost", "pages", lost)], None)]);
        let cell = |row: &Row, newer: bool| match (row.takes, row.name) {
            (Takes::Headline, "fork") => Cell::Absent("it idles".into()),
            (Takes::Headline, _) => {
                let cost = if newer { 14_690.0 } else { 12_345.0 };
                taken(Takes::Headline, &ended(0, vec![report(&[("a", "ns", cost)], Some("a"))]), 1.0)
            }
            (Takes::Lost, "oracle") => taken(Takes::Lost, &lost(if newer { 3.0 } else { 0.0 }), 2.0),
            (Takes::Lost, _) => taken(Takes::Lost, &lost(0.0), 2.0),
            (Takes::Failed, _) if newer => taken(Takes::Failed, &ended(1, Vec::new()), 2.0),
            (Takes::Failed, _) => Cell::Figure(Figure::once("lost", "scenarios", 0.0)),
        };
        let missing = || Cell::Absent("no such package".into());
        let cells = rows.iter().map(|row| vec![cell(row, false), missing(), cell(row, true)]).collect();
        let column = |series, package: std::result::Result<&str, &str>| Column {
            series,
            package: package.map(str::to_owned).map_err(str::to_owned),
        };
        let columns = vec![
            column("6.1", Ok("linux 6.1.2")),
            column("6.16", Err("no such package")),
            column("7.3", Ok("linux 7.3.4")),
        ];
        History { bed: svm::HOST, emulator: "an emulator".into(), columns, rows, cells }
    }

    #[test]
    fn a_table_has_what_was_lost_and_what_is_missing() {
        let text = history().table();
        for line in [
            "| command | host | counted | 6.1 | 6.16 | 7.3 |",
            "| oracle | npt=1 | lost pages | 0 | – | **3** |",
            "| dirty-edges | npt=0 | lost pages | 0 | – | 0 |",
            "| judge | npt=1 | failed scenarios | 0 | – | **!** |",
            "| dirty-log | npt=0 | a: instructions | 12,345 | – | 14,690 |",
            "| fork | npt=1 | nothing | – | – | – |",
            "- 6.16: not there: no such package",
            "- 7.3: linux 7.3.4",
            "- judge, npt=1: vellum: why (7.3)",
            "- fork, npt=1: it idles (6.1, 7.3)",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }

    #[test]
    fn the_text_around_a_table_stays() {
        let page = renewed("", "old");
        assert_eq!(page, format!("{}\nold\n{}", MARKS[0], MARKS[1]));
        assert_eq!(renewed(&format!("a {page} b"), "new"), format!("a {} b", renewed("", "new")));
    }

    #[test]
    fn a_picture_has_what_was_lost_and_a_plot_of_each_cost() {
        let svg = history().picture();
        assert!(svg.contains("fill=\"#b00000\">3</text>"), "{svg}");
        assert!(svg.contains(">dirty-log</text>") && svg.contains(">1.19</text>"), "{svg}");
        assert!(!svg.contains(">fork</text>"), "a plot without a point: {svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn a_result_has_a_case_and_a_figure_for_each_command() {
        let report = history().report();
        let status = |name: &str| report.cases.iter().find(|case| case.name == name).map(|case| case.status);
        assert_eq!(status("7.3/npt=1/oracle"), Some(Status::Fail));
        assert_eq!(status("6.1/npt=1/oracle"), Some(Status::Pass));
        assert_eq!(status("7.3/npt=1/judge"), Some(Status::Fail));
        assert_eq!(status("7.3/npt=1/dirty-log"), Some(Status::Pass));
        assert_eq!(status("7.3/npt=1/fork"), Some(Status::Skip));
        assert_eq!(status("6.16"), Some(Status::Skip));
        let cost = report.find(Label::of("dirty-log, npt=1", "7.3")).unwrap();
        assert_eq!((cost.unit.as_str(), cost.value()), ("instructions", 14_690.0));
    }
}
