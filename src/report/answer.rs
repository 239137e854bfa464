//! The answer of a result, with which every form of the result begins.
//!
//! The code that measured knows what its figures mean and writes an [`Answer`]. [`Report::verdict`]
//! adds whether the result passed. The terminal, Markdown and HTML forms begin with that verdict.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::case::Status;
use super::premise::Premise;
use super::{Case, Figure, Label, Report};

/// The answer of a result in words and main figures.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// One sentence without its full stop: `65,536 pages checked, 0 wrong`.
    pub text: String,
    /// Whether the result passes or fails. A measurement does neither.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub check: bool,
    /// Whether the guest has moved to another process, which has the result.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub elsewhere: bool,
    /// The main figures.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub figures: Vec<Fact>,
    /// What the user can do next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A line of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fact {
    /// The name: `first pass`.
    pub name: String,
    /// The value with its unit and range: `19.3 M pages/s (19.0 to 19.7, n=2)`.
    pub text: String,
}

impl Answer {
    /// The answer of a test.
    pub fn of_test(text: impl Into<String>) -> Self {
        Self { text: text.into(), check: true, ..Self::default() }
    }

    /// The answer of a measurement.
    pub fn of_measurement(text: impl Into<String>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }

    /// Adds a line.
    #[must_use]
    pub fn fact(mut self, name: &str, text: impl Into<String>) -> Self {
        self.figures.push(Fact { name: name.into(), text: text.into() });
        self
    }

    /// Adds a line if it has a value.
    #[must_use]
    pub fn fact_if(self, name: &str, text: Option<String>) -> Self {
        match text {
            Some(text) => self.fact(name, text),
            None => self,
        }
    }

    /// Sets what the user can do next.
    #[must_use]
    pub fn next(self, text: impl Into<String>) -> Self {
        Self { next: Some(text.into()), ..self }
    }
}

/// The outcome of a result or a comparison. The worst is last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// No difference was shown.
    Same,
    /// There are too few results to show a difference.
    TooFew,
    /// Figures differ that are neither times nor rates.
    Differs,
    /// B is faster.
    Faster,
    /// B is slower.
    Slower,
    /// The guest has moved to another process.
    Moved,
    /// The test passed.
    Pass,
    /// This host lacks something.
    NotRun,
    /// The run ended early.
    CutOff,
    /// A premise failed.
    Invalid,
    /// The test failed.
    Fail,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Same => "SAME",
            Self::TooFew => "TOO FEW",
            Self::Differs => "DIFFERS",
            Self::Faster => "FASTER",
            Self::Slower => "SLOWER",
            Self::Moved => "MOVED",
            Self::Pass => "PASS",
            Self::NotRun => "NOT RUN",
            Self::CutOff => "CUT OFF",
            Self::Invalid => "INVALID",
            Self::Fail => "FAIL",
        })
    }
}

/// The first lines of a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// `None` for a measurement that went well.
    pub outcome: Option<Outcome>,
    /// The answer, or the reason why it is missing.
    pub text: String,
    /// Everything else that is wrong with the result.
    pub reasons: Vec<(Outcome, String)>,
    /// The main figures.
    pub figures: Vec<Fact>,
    /// What the user can do next.
    pub next: Option<String>,
}

impl Report {
    /// Sets the answer.
    pub fn answer(&mut self, answer: Answer) {
        self.answer = Some(answer);
    }

    /// Sets an answer of `words` and the headline, if the headline was measured.
    pub fn answer_with_headline(&mut self, words: &str) {
        let label = self.headline.clone();
        if let Some(figure) = label.and_then(|label| self.find(label)) {
            let index = figure.label.index.as_ref().map_or(String::new(), |index| format!(" [{index}]"));
            self.answer = Some(Answer::of_measurement(format!("{words} {}{index}", figure.told())));
        }
    }

    /// A figure's value in words, with its range. `None` if it was not measured.
    pub fn told(&self, label: impl Into<Label>) -> Option<String> {
        self.find(label).map(Figure::told)
    }

    /// Returns the first lines of the result.
    pub fn verdict(&self) -> Verdict {
        let answer = self.answer.clone().unwrap_or_else(|| self.fallback());
        let wrong = |failed: &&super::Failed| matches!(failed.premise, Premise::WrongContents { .. });
        // The only case of an invalid result may say no more than that it is invalid.
        let invalid = |case: &Case| self.cases.len() == 1 && case.why() == self.as_case().why();
        let bad = self.cases.iter().find(|case| {
            matches!(case.status, Status::Fail | Status::Crash) && (self.invalid.is_empty() || !invalid(case))
        });
        let failed = bad.is_some() || self.invalid.iter().any(|failed| wrong(&failed));
        let mut reasons: Vec<(Outcome, String)> = Vec::new();
        reasons.extend(self.invalid.iter().map(|failed| (Outcome::Invalid, failed.to_string())));
        reasons.extend(self.cut_short.iter().map(|rest| (Outcome::CutOff, rest.clone())));
        reasons.extend(self.not_run.iter().map(|what| (Outcome::NotRun, what.clone())));
        let mut figures = answer.figures;
        let (outcome, text) = if failed {
            let why = bad.map(|case| format!("{}: {}", case.name, case.why()));
            let text = if answer.text.is_empty() { why.unwrap_or_default() } else { answer.text };
            (Some(Outcome::Fail), text)
        } else if answer.elsewhere && self.invalid.is_empty() {
            let text = self.cut_short.clone().unwrap_or(answer.text);
            reasons.retain(|(outcome, _)| *outcome != Outcome::CutOff);
            (Some(Outcome::Moved), text)
        } else if !reasons.is_empty() {
            let (outcome, why) = reasons.remove(0);
            if !answer.text.is_empty() {
                figures.insert(0, Fact { name: "so far".into(), text: answer.text });
            }
            (Some(outcome), why)
        } else if self.status() == Status::Skip {
            let why = self.all_cases().into_iter().find(|case| case.status == Status::Skip);
            (Some(Outcome::NotRun), why.map_or(answer.text, |case| format!("{}: {}", case.name, case.why())))
        } else if let Some(case) = self.cases.iter().find(|case| case.status == Status::Timeout) {
            (Some(Outcome::CutOff), format!("{}: {}", case.name, case.why()))
        } else {
            (answer.check.then_some(Outcome::Pass), answer.text)
        };
        Verdict { outcome, text, reasons, figures, next: answer.next }
    }

    /// Returns an answer for a result that has none, because an older Vellum wrote it.
    fn fallback(&self) -> Answer {
        let cases = &self.cases;
        if !cases.is_empty() && !self.is_one_case() {
            let passed = cases.iter().filter(|case| case.status == Status::Pass).count();
            return Answer::of_test(format!("{}: {passed} of {} cases passed", self.name, cases.len()));
        }
        let headline = self.headline.as_ref().and_then(|label| self.find(label.clone()));
        Answer::of_measurement(match headline {
            Some(figure) => format!("{}: {} {}", self.name, figure.label, figure.told()),
            None => self.name.clone(),
        })
    }
}

impl Verdict {
    /// The first line in plain text.
    pub fn line(&self) -> String {
        match self.outcome {
            Some(outcome) => format!("{outcome}  {}", self.text),
            None => self.text.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vellum_host::Facts;

    fn report() -> Report {
        let mut report = Report::new("test t", Facts::collect("off".into()));
        report.answer(Answer::of_test("9 pages checked, 0 wrong"));
        report
    }

    #[test]
    fn the_worst_comes_first_and_nothing_is_left_out() {
        assert_eq!(report().verdict().line(), "PASS  9 pages checked, 0 wrong");
        let mut cut = report();
        cut.cut_short = Some("ended by signal 2".into());
        assert_eq!(cut.verdict().line(), "CUT OFF  ended by signal 2");
        assert_eq!(cut.verdict().figures[0].text, "9 pages checked, 0 wrong");
        cut.fail(None, Premise::OneCpu);
        assert!(cut.verdict().line().starts_with("INVALID  the host has one CPU"), "{:?}", cut.verdict());
        assert_eq!(cut.verdict().reasons, [(Outcome::CutOff, "ended by signal 2".into())]);
        cut.cases = vec![Case::new("a", Status::Fail).because("lost"), Case::new("b", Status::Pass)];
        assert_eq!(cut.verdict().line(), "FAIL  9 pages checked, 0 wrong");
        assert_eq!(cut.verdict().reasons.len(), 2);
    }

    #[test]
    fn wrong_contents_fail_and_a_skip_has_not_passed() {
        let mut wrong = report();
        wrong.fail(None, Premise::WrongContents { wrong: 1, of: 9, example: None });
        assert_eq!(wrong.verdict().outcome, Some(Outcome::Fail));
        let mut skipped = report();
        skipped.cases = vec![Case::new("a", Status::Skip).because("no KVM")];
        assert_eq!(skipped.verdict().line(), "NOT RUN  a: no KVM");
        let mut late = report();
        late.cases =
            vec![Case::new("a", Status::Pass), Case::new("b", Status::Timeout).because("no time was left")];
        assert_eq!(late.verdict().line(), "CUT OFF  b: no time was left");
    }

    #[test]
    fn an_invalid_result_that_has_also_failed_says_so() {
        let mut both = report();
        both.fail(None, Premise::OneCpu);
        assert_eq!(both.verdict().outcome, Some(Outcome::Invalid));
        both.cases = vec![both.as_case()];
        assert_eq!(both.verdict().outcome, Some(Outcome::Invalid));
        both.cases = vec![Case::new(&both.name, Status::Fail).because("1 of 2 pages lost")];
        assert_eq!(both.verdict().outcome, Some(Outcome::Fail));
    }

    #[test]
    fn a_guest_that_has_moved_is_not_cut_off() {
        let mut moved = report();
        moved.cut_short = Some("the guest has moved to another process".into());
        moved.answer.as_mut().unwrap().elsewhere = true;
        assert_eq!(moved.verdict().line(), "MOVED  the guest has moved to another process");
        assert!(moved.verdict().reasons.is_empty());
    }

    #[test]
    fn a_measurement_has_neither_passed_nor_failed() {
        let mut report = Report::new("bench b", Facts::collect("off".into()));
        report.figure("time", "s", 0.5);
        report.set_headline("time");
        assert_eq!(report.verdict().line(), "bench b: time 500.0 ms");
        report.cases = vec![report.as_case()];
        assert_eq!(report.verdict().outcome, None);
    }
}
