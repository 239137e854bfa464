//! Cases: the parts of a test or a benchmark and how each ended. The formats for other programs
//! (KTAP, JUnit, KCIDB) are views of this list.

use serde::{Deserialize, Serialize};

use super::Report;

/// How a case ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It passed.
    Pass,
    /// This host cannot run it.
    Skip,
    /// It failed.
    Fail,
    /// It did not finish in time.
    Timeout,
    /// It broke off without a verdict.
    Crash,
}

impl Status {
    /// Whether someone has to act on it.
    pub fn is_bad(self) -> bool {
        matches!(self, Self::Fail | Self::Timeout | Self::Crash)
    }
}

/// One case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// The name, with `/` between the levels: `ring/thp`. Unique within a result.
    pub name: String,
    /// How it ended.
    pub status: Status,
    /// The reason, if it did not pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What would fix it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// Duration in wall-clock seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// The seed of its random numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
}

impl Case {
    /// A case with only a name and a status.
    pub fn new(name: impl Into<String>, status: Status) -> Self {
        Self { name: name.into(), status, reason: None, remedy: None, seconds: None, seed: None }
    }

    /// Sets the reason.
    pub fn because(self, reason: impl Into<String>) -> Self {
        Self { reason: Some(reason.into()), ..self }
    }

    /// Sets the remedy.
    pub fn mended_by(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }

    /// Splits an error message into reason and remedy.
    pub fn explained(self, message: &str) -> Self {
        match message.split_once(": ").or_else(|| message.rsplit_once("; ")) {
            Some((reason, remedy)) => self.because(reason).mended_by(remedy),
            None => self.because(message),
        }
    }

    /// Reason and remedy as one line, or an empty string.
    pub fn why(&self) -> String {
        [&self.reason, &self.remedy].into_iter().flatten().map(String::as_str).collect::<Vec<_>>().join(": ")
    }
}

/// The combined status: the worst one. Skipped only if all are skipped.
pub fn together(statuses: impl IntoIterator<Item = Status>) -> Status {
    let (mut worst, mut passed, mut any) = (Status::Skip, false, false);
    for status in statuses {
        any = true;
        passed |= status == Status::Pass;
        worst = worst.max(status);
    }
    if worst == Status::Skip && (passed || !any) { Status::Pass } else { worst }
}

impl Report {
    /// The cases of this result. A result without cases, as of a benchmark, is one case itself.
    pub fn all_cases(&self) -> Vec<Case> {
        if self.cases.is_empty() { vec![self.as_case()] } else { self.cases.clone() }
    }

    /// Whether the result has only one case, with the result's own name.
    pub(crate) fn is_one_case(&self) -> bool {
        matches!(&self.cases[..], [] | [_]) && self.cases.iter().all(|case| case.name == self.name)
    }

    /// The result as one case, named after the command. It fails if a premise failed.
    pub fn as_case(&self) -> Case {
        let why: Vec<String> = self.invalid.iter().map(ToString::to_string).collect();
        match (why.is_empty(), &self.cut_short) {
            (false, _) => Case::new(&self.name, Status::Fail).because(why.join("; ")),
            (true, Some(rest)) => Case::new(&self.name, Status::Timeout).because(rest),
            (true, None) => Case::new(&self.name, Status::Pass),
        }
    }

    /// The result with all its cases, as one case. It does not pass if the run was cut short or
    /// left something out, even if no case is bad.
    pub fn whole(&self) -> Case {
        let cases = together(self.all_cases().iter().map(|case| case.status));
        let alone = self.as_case();
        if cases.is_bad() || alone.status == Status::Pass && self.not_run.is_empty() {
            return Case { status: cases, ..alone };
        }
        match alone.status {
            Status::Pass => Case::new(&self.name, Status::Skip).because(self.not_run.join("; ")),
            _ => alone,
        }
    }

    /// What the cases do not show, one line each: cut short, not run, invalid.
    pub fn unfinished(&self) -> Vec<String> {
        let cut = self.cut_short.iter().map(|rest| format!("CUT OFF: {rest}"));
        let not_run = self.not_run.iter().map(|what| format!("NOT RUN: {what}"));
        let invalid = self.invalid.iter().map(|failed| format!("INVALID: {failed}"));
        cut.chain(not_run).chain(invalid).collect()
    }

    /// The cases. The whole result follows as the last case if it was cut short, left something out
    /// or is invalid. No case of a result with several cases has the result's name.
    pub fn told_cases(&self) -> Vec<Case> {
        let mut cases = self.all_cases();
        if !self.is_one_case() && !self.unfinished().is_empty() {
            cases.push(self.whole());
        }
        cases
    }

    /// The result's status.
    pub fn status(&self) -> Status {
        self.whole().status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_end_as_the_worst_of_them() {
        use Status::*;
        for (all, whole) in [
            (&[][..], Pass),
            (&[Pass, Skip], Pass),
            (&[Skip, Skip], Skip),
            (&[Pass, Fail, Skip], Fail),
            (&[Fail, Crash, Timeout], Crash),
        ] {
            assert_eq!(together(all.iter().copied()), whole, "{all:?}");
        }
    }

    #[test]
    fn what_was_not_run_is_not_passed() {
        use vellum_host::Facts;
        let mut report = Report::new("t", Facts::collect("off".into()));
        report.cases = vec![Case::new("a", Status::Pass), Case::new("b", Status::Skip)];
        assert_eq!(report.status(), Status::Pass);
        report.not_run = vec!["b: no huge pages".into()];
        assert_eq!((report.status(), report.whole().why().as_str()), (Status::Skip, "b: no huge pages"));
        report.cut_short = Some("ended by signal 15".into());
        assert_eq!((report.status(), report.whole().why().as_str()), (Status::Timeout, "ended by signal 15"));
        report.cases.push(Case::new("c", Status::Fail));
        assert_eq!((report.status(), report.whole().why().as_str()), (Status::Fail, "ended by signal 15"));
    }
}
