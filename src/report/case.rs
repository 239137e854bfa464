//! Cases: what a test or a benchmark consists of, each with how it ended. Every format that other programs read is a view of this one list.

use serde::{Deserialize, Serialize};

use super::Report;

/// How a case ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It held.
    Pass,
    /// It could not be tried here.
    Skip,
    /// What it tests does not hold.
    Fail,
    /// It was not over in its time.
    Timeout,
    /// It broke off, and says nothing of what it tests.
    Crash,
}

impl Status {
    /// Whether the one who reads it has something to do.
    pub fn is_bad(self) -> bool {
        matches!(self, Self::Fail | Self::Timeout | Self::Crash)
    }
}

/// One case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Its name, with `/` between the levels of a hierarchy: `ring/thp`. Unique within a result.
    pub name: String,
    /// How it ended.
    pub status: Status,
    /// Why, where it did not pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What would change that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// How long it took, by the clock on the wall.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// The seed of what was random in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
}

impl Case {
    /// One that ended so, of which nothing else is known.
    pub fn new(name: impl Into<String>, status: Status) -> Self {
        Self { name: name.into(), status, reason: None, remedy: None, seconds: None, seed: None }
    }

    /// The same, with a reason.
    pub fn because(self, reason: impl Into<String>) -> Self {
        Self { reason: Some(reason.into()), ..self }
    }

    /// The same, with a remedy.
    pub fn mended_by(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }

    /// The same, with what a message says is wrong as the reason, and what it says would work as the remedy.
    pub fn explained(self, message: &str) -> Self {
        match message.split_once(": ").or_else(|| message.rsplit_once("; ")) {
            Some((reason, remedy)) => self.because(reason).mended_by(remedy),
            None => self.because(message),
        }
    }

    /// Reason and remedy as one line; empty where there is neither.
    pub fn why(&self) -> String {
        [&self.reason, &self.remedy].into_iter().flatten().map(String::as_str).collect::<Vec<_>>().join(": ")
    }
}

/// How several cases ended together: as the worst of them, and as skipped where all are.
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
    /// The cases of this result: a result without any, as a benchmark's, is one of its own.
    pub fn all_cases(&self) -> Vec<Case> {
        if self.cases.is_empty() { vec![self.as_case()] } else { self.cases.clone() }
    }

    /// Whether the result is one case, by its own name.
    pub fn is_one_case(&self) -> bool {
        matches!(&self.cases[..], [] | [_]) && self.cases.iter().all(|case| case.name == self.name)
    }

    /// The result as one case, named after what ran: it failed where a premise did.
    pub fn as_case(&self) -> Case {
        let why: Vec<String> = self.invalid.iter().map(ToString::to_string).collect();
        match (why.is_empty(), &self.cut_short) {
            (false, _) => Case::new(&self.name, Status::Fail).because(why.join("; ")),
            (true, Some(rest)) => Case::new(&self.name, Status::Timeout).because(rest),
            (true, None) => Case::new(&self.name, Status::Pass),
        }
    }

    /// All of it as one case, after its cases. A result passes only where all that was asked for was run: one that was cut short or
    /// left something out does not, even if none of its cases is bad.
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

    /// Why the cases alone do not tell how it ended, a line each: that it was cut short, what was not run, what is invalid.
    pub fn unfinished(&self) -> Vec<String> {
        let cut = self.cut_short.iter().map(|rest| format!("CUT OFF: {rest}"));
        let not_run = self.not_run.iter().map(|what| format!("NOT RUN: {what}"));
        let invalid = self.invalid.iter().map(|failed| format!("INVALID: {failed}"));
        cut.chain(not_run).chain(invalid).collect()
    }

    /// The cases, and the whole as the last of them where it says what none of them does. No case of a result with several is named
    /// after it.
    pub fn told_cases(&self) -> Vec<Case> {
        let mut cases = self.all_cases();
        if !self.is_one_case() && !self.unfinished().is_empty() {
            cases.push(self.whole());
        }
        cases
    }

    /// How all of it ended.
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
