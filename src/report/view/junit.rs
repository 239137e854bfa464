//! JUnit XML, limited to what its readers agree on: a suite per result, a test case per case, the
//! figures as properties of the suite.

use std::time::Duration;

use quick_junit::{NonSuccessKind, Property, Report as Document, TestCase, TestCaseStatus, TestSuite};

use super::date;
use crate::case::Status;
use crate::{Report, printable};

/// The document for all results.
pub(super) fn render(results: &[Report]) -> Result<String, quick_junit::SerializeError> {
    let mut document = Document::new("vellum");
    for result in results {
        let name = printable(&result.name).into_owned();
        let mut suite = TestSuite::new(name.as_str());
        if let Some(at) = date(result.at) {
            suite.set_timestamp(at);
        }
        let host = &result.host;
        let about = [
            ("vellum", result.vellum.clone()),
            ("command", result.command.join(" ")),
            ("bed", host.bed.clone()),
            ("kernel", host.kernel.clone()),
            ("cpu", host.cpu.clone()),
        ];
        let figures = result.figures.iter().map(|figure| {
            let value = format!("{} {}", figure.value(), figure.unit);
            (figure.label.to_string(), value.trim_end().to_owned())
        });
        let unfinished = result.unfinished().into_iter().map(|line| ("unfinished".to_owned(), line));
        for (name, value) in
            about.into_iter().map(|(name, value)| (name.to_owned(), value)).chain(figures).chain(unfinished)
        {
            suite.add_property(Property::new(printable(&name).into_owned(), printable(&value).into_owned()));
        }
        for case in result.told_cases() {
            let why = printable(&case.why()).into_owned();
            let bad = |kind, name: &str| {
                let mut status = TestCaseStatus::non_success(kind);
                status.set_type(name).set_message(why.as_str());
                status
            };
            let status = match case.status {
                Status::Pass => TestCaseStatus::success(),
                Status::Fail => bad(NonSuccessKind::Failure, "fail"),
                Status::Timeout => bad(NonSuccessKind::Error, "timeout"),
                Status::Crash => bad(NonSuccessKind::Error, "crash"),
                Status::Skip => {
                    let mut status = TestCaseStatus::skipped();
                    status.set_message(why.as_str());
                    status
                }
            };
            let mut test = TestCase::new(printable(&case.name).into_owned(), status);
            test.set_classname(name.as_str());
            if let Some(seconds) = case.seconds.filter(|seconds| (0.0..1e9).contains(seconds)) {
                test.set_time(Duration::from_secs_f64(seconds));
            }
            if let Some(seed) = case.seed {
                test.add_property(("seed", seed.to_string().as_str()));
            }
            suite.add_test_case(test);
        }
        document.add_test_suite(suite);
    }
    document.to_string()
}
