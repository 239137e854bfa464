//! Counts results over all test hosts, from the test programs' records.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use support::record::{self, Line, Outcome, Record};
use support::tools::SETUP;
use vellum_report::{Case, Report, Status};

use super::clock::Clock;
use crate::{Result, form};

/// This machine as a test host.
pub const LOCAL: &str = "local";

/// The results of all test hosts.
pub struct Tally {
    /// Kept for a laboratory outside that runs this one.
    record: Arc<Record>,
    passed: u64,
    /// The tests that passed on this machine.
    passed_here: Vec<String>,
    failures: Vec<Failure>,
    /// Skipped tests by host and reason.
    skipped: BTreeMap<(String, String), Vec<String>>,
    /// All results as a report, if asked for.
    report: Option<Report>,
    /// Whether a skip that `--setup` could have prevented is a failure.
    held_to_setup: bool,
    /// The times.
    clock: Clock,
}

/// A test that failed.
struct Failure {
    /// The test host and the test.
    what: String,
    /// The test's message.
    why: String,
}

/// At most this many characters of a failure's reason are repeated at the end: half from its start,
/// half from its end.
const REPEATED: usize = 3000;

/// A failure's reason in at most about `REPEATED` characters, indented.
fn repeated(why: &str) -> String {
    let count = why.chars().count();
    let mut text: String = why.chars().take(REPEATED.min(count)).collect();
    if count > REPEATED {
        let half = REPEATED / 2;
        let (first, last) = (why.chars().take(half), why.chars().skip(count - half));
        let left = format!(" [{} characters are above] ", count - 2 * half);
        text = first.chain(left.chars()).chain(last).collect();
    }
    text.lines().map(|line| format!("    {line}\n")).collect()
}

impl Tally {
    /// An empty count, which is also written to `record`.
    pub fn new(record: Record) -> Self {
        Self {
            record: Arc::new(record),
            passed: 0,
            passed_here: Vec::new(),
            failures: Vec::new(),
            skipped: BTreeMap::new(),
            report: None,
            held_to_setup: false,
            clock: Clock::start(),
        }
    }

    /// The same, also kept as cases of a report with this name.
    pub fn kept(record: Record, name: &str) -> Self {
        Self { report: Some(form::report(name)), ..Self::new(record) }
    }

    /// An empty count of the same kind, for what runs beside. [`Tally::add`] adds it.
    pub fn beside(&self) -> Self {
        let report = self.report.as_ref().map(|report| form::report(&report.name));
        let (record, held_to_setup) = (self.record.clone(), self.held_to_setup);
        Self { report, record, held_to_setup, ..Self::new(Record::new(None)) }
    }

    /// Adds what was counted beside. Its lines are printed and recorded.
    pub fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.passed_here.extend(other.passed_here);
        self.failures.extend(other.failures);
        for (key, tests) in other.skipped {
            self.skipped.entry(key).or_default().extend(tests);
        }
        if let (Some(report), Some(other)) = (&mut self.report, other.report) {
            other.cases.into_iter().for_each(|case| form::add(report, case));
        }
        self.clock.add(other.clock);
    }

    /// From now on, a missing tool that `--setup` could have installed is a failure.
    pub fn hold_to_setup(&mut self) {
        self.held_to_setup = true;
    }

    /// Ends a part of the run.
    pub fn lap(&mut self, host: &str, what: &str) {
        self.clock.lap(&format!("{host}: {what}"));
    }

    /// Records the time of something that ran in parallel, in the current part.
    pub fn took(&mut self, host: &str, what: &str, passed: Duration) {
        self.clock.within(format!("{host}: {what}"), passed);
    }

    /// The tests that passed on this machine, by `PROGRAM::TEST`.
    pub fn passed_here(&self) -> &[String] {
        &self.passed_here
    }

    /// Whether a laboratory outside counts these results.
    pub fn is_inner(&self) -> bool {
        self.record.is_kept()
    }

    /// The table of times.
    pub fn times(&self) -> String {
        self.clock.table()
    }

    /// The results as cases, if they were kept.
    pub fn into_report(self) -> Option<Report> {
        let mut report = self.report?;
        if report.cases.is_empty() {
            form::add(&mut report, Case::new("nothing", Status::Skip).because("no test was run"));
        }
        Some(report)
    }

    /// Prints a line. With a record, standard output may be the record, so it goes to standard
    /// error.
    pub fn show(&self, line: &str) {
        if self.record.is_kept() {
            eprintln!("{line}");
        } else {
            println!("{line}");
        }
    }

    /// Counts `lines`, a program's record. An incomplete record is a failure, and so is a failed
    /// program whose record has no failure.
    pub fn program(&mut self, host: &str, program: &str, lines: &str, success: bool) {
        let failures = self.failures.len();
        let prefix = if program.is_empty() { String::new() } else { format!("{program}::") };
        if let Err(why) = self.lines(host, &prefix, lines) {
            self.fail(host, &format!("{program} ({why})"));
        }
        if !success && self.failures.len() == failures {
            self.fail(host, &format!("{program} (it failed, and its record names no failure)"));
        }
    }

    /// Counts `lines`. An error if they are not a complete record.
    pub fn lines(&mut self, host: &str, prefix: &str, lines: &str) -> std::result::Result<(), String> {
        let (mut counted, mut end) = (0, None);
        let (lines, rest) = record::parse(lines);
        for line in lines {
            match line {
                Line::Test { name, outcome, milliseconds } => {
                    self.count(host, &format!("{prefix}{name}"), outcome, milliseconds);
                    counted += 1;
                }
                Line::End(tests) => end = Some(tests),
            }
        }
        rest?;
        match end {
            Some(tests) if tests == counted => Ok(()),
            Some(tests) => Err(format!("{tests} tests ran, and {counted} were counted")),
            None => Err(format!("it did not come to its end; {counted} tests were counted")),
        }
    }

    fn count(&mut self, host: &str, what: &str, outcome: Outcome, milliseconds: u64) {
        let outcome = match outcome {
            // Emulated hosts do not have this machine's tools.
            Outcome::Skipped(why) if self.held_to_setup && host == LOCAL && why.contains(SETUP) => {
                self.show(&format!("{host}: {what}: FAILED: skipped after --setup: {why}"));
                Outcome::Failed(why)
            }
            outcome => outcome,
        };
        if let Some(report) = &mut self.report {
            let case = |status| Case::new(format!("{host}/{what}"), status);
            let case = match &outcome {
                Outcome::Passed => case(Status::Pass),
                Outcome::Failed(why) => case(Status::Fail).because(why),
                Outcome::Skipped(why) => case(Status::Skip).explained(why),
            };
            form::add(report, case);
        }
        match &outcome {
            Outcome::Passed => {
                self.passed += 1;
                // What is no test of a program has blanks in its name.
                if host == LOCAL && !what.contains(char::is_whitespace) {
                    self.passed_here.push(what.to_owned());
                }
            }
            Outcome::Failed(why) => {
                self.failures.push(Failure { what: format!("{host}: {what}"), why: why.clone() });
            }
            Outcome::Skipped(why) => {
                let key = (host.to_owned(), why.clone());
                self.skipped.entry(key).or_default().push(what.to_owned());
            }
        }
        self.clock.test(&format!("{host}: {what}"), Duration::from_millis(milliseconds));
        self.record.write(&Line::Test { name: what.to_owned(), outcome, milliseconds });
    }

    /// A test passed.
    pub fn pass(&mut self, host: &str, what: &str) {
        self.count(host, what, Outcome::Passed, 0);
    }

    /// A test failed. Its message has been shown.
    pub fn fail(&mut self, host: &str, what: &str) {
        self.count(host, what, Outcome::Failed("it stands above".into()), 0);
    }

    /// Shows and counts the result of a step that is not a test program.
    pub fn stage(&mut self, host: &str, what: &str, result: Result<()>) {
        match result {
            Ok(()) => {
                self.show(&format!("{host}: {what}: ok"));
                self.pass(host, what);
            }
            Err(error) => {
                self.show(&format!("{host}: {what}: FAILED\n{error}"));
                self.count(host, what, Outcome::Failed(error.to_string()), 0);
            }
        }
    }

    /// A test was not run.
    pub fn skip(&mut self, host: &str, what: &str, why: &str) {
        self.count(host, what, Outcome::Skipped(why.to_owned()), 0);
    }

    /// Something that tests need could not be made. This is a failure if `--setup` is required to
    /// make it.
    pub fn lack(&mut self, host: &str, what: &str, why: &str) {
        if self.held_to_setup {
            self.show(&format!("{host}: {what}: FAILED: {why}"));
            self.count(host, what, Outcome::Failed(why.to_owned()), 0);
        } else {
            self.skip(host, what, why);
        }
    }

    /// The exit status: 4 if nothing was tested, for example if no test has the name that was asked
    /// for. If a laboratory outside counts, it decides that.
    pub fn status(&self) -> u8 {
        match (self.failed(), self.passed) {
            (0, 0) if !self.record.is_kept() => 4,
            (failed, _) => u8::from(failed > 0),
        }
    }

    /// How many failed.
    pub fn failed(&self) -> usize {
        self.failures.len()
    }

    fn skipped(&self) -> usize {
        self.skipped.values().map(Vec::len).sum()
    }

    /// Prints the skipped tests, the times, the failures with reasons, and the closing line on a
    /// line of its own: readers see the end of a long output, and logs keep it. With a record,
    /// writes the record's end instead.
    pub fn close(&self) {
        if self.record.is_kept() {
            self.record.write(&Line::End(self.passed + (self.failed() + self.skipped()) as u64));
            return;
        }
        if !self.skipped.is_empty() {
            println!("\nSkipped:");
        }
        for ((host, why), names) in &self.skipped {
            println!("  {host}: {}\n    {why}", names.join(", "));
        }
        println!("\n{}", self.times());
        if !self.failures.is_empty() {
            println!("Failed:");
        }
        for Failure { what, why } in &self.failures {
            print!("  {what}\n{}", repeated(why));
        }
        println!("\n{}", self.closing_line());
    }

    fn closing_line(&self) -> String {
        format!("{} passed, {} failed, {} skipped", self.passed, self.failed(), self.skipped())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally() -> Tally {
        Tally::new(Record::new(None))
    }

    fn lines(lines: &[Line]) -> String {
        lines.iter().map(|line| serde_json::to_string(line).unwrap() + "\n").collect()
    }

    fn test(name: &str, outcome: Outcome) -> Line {
        Line::Test { name: name.into(), outcome, milliseconds: 0 }
    }

    fn failed(tally: &Tally) -> Vec<&str> {
        tally.failures.iter().map(|failure| failure.what.as_str()).collect()
    }

    #[test]
    fn a_failure_is_repeated_with_its_reason_unless_that_is_long() {
        let mut tally = tally();
        tally.program("local", "boot", &lines(&sample()), false);
        assert_eq!(repeated(&tally.failures[0].why), "    1 is not 2\n");
        let long = repeated(&format!("first{}\nlast", "é".repeat(2 * REPEATED)));
        assert!(long.starts_with("    firsté") && long.ends_with("é\n    last\n"), "{long}");
        assert!(long.chars().count() < REPEATED + 100 && long.contains(" characters are above] "));
    }

    #[test]
    fn no_test_at_all_has_not_passed() {
        let mut nothing = Tally::kept(Record::new(None), "lab test");
        nothing.program("local", "run", &lines(&[Line::End(0)]), true);
        assert_eq!(nothing.status(), 4);
        nothing.skip("local", "left", "needs KVM");
        assert_eq!(nothing.status(), 4);
        assert_eq!(Tally::kept(Record::new(None), "x").into_report().unwrap().status(), Status::Skip);
        nothing.pass("local", "good");
        assert_eq!(nothing.status(), 0);
        nothing.fail("local", "bad");
        assert_eq!(nothing.status(), 1);
    }

    fn sample() -> Vec<Line> {
        let failed = Outcome::Failed("1 is not 2".into());
        let skipped = Outcome::Skipped("needs KVM".into());
        vec![test("good", Outcome::Passed), test("bad", failed), test("left", skipped), Line::End(3)]
    }

    #[test]
    fn tests_are_counted_by_how_they_ended_and_failures_named() {
        let mut tally = tally();
        tally.program("svm npt=1", "boot", &lines(&sample()), false);
        assert_eq!(tally.closing_line(), "1 passed, 1 failed, 1 skipped");
        assert_eq!(failed(&tally), ["svm npt=1: boot::bad"]);
        let key = ("svm npt=1".to_owned(), "needs KVM".to_owned());
        assert_eq!(tally.skipped[&key], ["boot::left"]);
    }

    #[test]
    fn what_is_counted_beside_is_added() {
        let file = std::env::temp_dir().join(format!("lab-record-beside-{}", std::process::id()));
        let mut tally = Tally::kept(Record::new(Some(file.clone())), "lab test");
        tally.hold_to_setup();
        let mut beside = tally.beside();
        beside.program("svm npt=1", "boot", &lines(&sample()), false);
        beside.lack("linux", "a disk", "mmdebstrap failed");
        tally.pass(LOCAL, "ctl::good");
        tally.add(beside);
        tally.close();
        assert_eq!(tally.closing_line(), "2 passed, 2 failed, 1 skipped");
        assert_eq!(failed(&tally), ["svm npt=1: boot::bad", "linux: a disk"]);
        let record = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(file).unwrap();
        assert_eq!(record::parse(&record).0.last(), Some(&Line::End(5)), "{record}");
        assert_eq!(tally.into_report().unwrap().cases.len(), 5);
    }

    #[test]
    fn after_setup_what_it_could_have_installed_is_no_reason_to_skip() {
        let mut tally = tally();
        let skips = |tally: &mut Tally| {
            tally.skip(LOCAL, "gdb::looks", &support::tools::lacks("gdb"));
            tally.skip(LOCAL, "boot::runs", "needs KVM");
            tally.skip("svm npt=1", "gdb::looks", &support::tools::lacks("gdb"));
            tally.lack("linux", "a disk", "mmdebstrap failed");
        };
        skips(&mut tally);
        assert_eq!(tally.closing_line(), "0 passed, 0 failed, 4 skipped");
        tally.hold_to_setup();
        skips(&mut tally);
        assert_eq!(failed(&tally), ["local: gdb::looks", "linux: a disk"]);
    }

    #[test]
    fn a_test_that_is_not_counted_is_a_failure() {
        let mut planted = sample();
        planted.remove(0);
        let mut tally = tally();
        tally.program("local", "boot", &lines(&planted), false);
        assert_eq!(tally.failures[1].what, "local: boot (3 tests ran, and 2 were counted)");
    }

    #[test]
    fn a_program_that_dies_is_a_failure_however_it_dies() {
        let mut cut = sample();
        cut.truncate(1);
        let mut tally = tally();
        tally.program("local", "boot", &lines(&cut), true);
        assert_eq!(failed(&tally), ["local: boot (it did not come to its end; 1 tests were counted)"]);
        tally.program("local", "mute", &lines(&[Line::End(0)]), false);
        assert!(tally.failures[1].what.contains("names no failure"), "{:?}", failed(&tally));
        let broken = lines(&cut) + "{\"test\":{\"na";
        tally.program("local", "broken", &broken, true);
        assert!(tally.failures[2].what.contains("local: broken"), "{:?}", failed(&tally));
        assert_eq!(tally.closing_line(), "2 passed, 3 failed, 0 skipped");
    }

    #[test]
    fn what_a_laboratory_counts_the_one_outside_counts_again() {
        let file = std::env::temp_dir().join(format!("lab-record-{}", std::process::id()));
        let mut inner = Tally::new(Record::new(Some(file.clone())));
        inner.program("metal", "boot", &lines(&sample()), false);
        inner.skip("metal", "more", "it lacks time");
        inner.close();
        let record = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(file).unwrap();
        let mut outer = tally();
        outer.program("svm npt=0", "", &record, false);
        assert_eq!(outer.closing_line(), "1 passed, 1 failed, 2 skipped");
        assert_eq!(failed(&outer), ["svm npt=0: boot::bad"]);
    }
}
