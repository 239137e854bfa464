//! The arguments of tests and benchmarks besides those of a result: an exit status for other
//! harnesses, and signs of life.

use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use indicatif::ProgressBar;

use super::failure::Failure;
use super::output::print;
use super::result::ResultArgs;
use crate::session::progress::Heartbeat;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_report::{Case, Report};
use vellum_sys::keyvalue;

/// The arguments of every command with a verdict.
#[derive(Debug, Args)]
pub struct JudgedArgs {
    #[command(flatten)]
    result: ResultArgs,

    /// Whose exit statuses to use: vellum, the list below; kselftest, 0 passed, 4 skipped because
    /// this host lacks something, 1 everything else, including tests that were cut short and wrong
    /// command lines
    // `exits_as` reads the words themselves, because it also applies to a wrong command line.
    #[arg(
        long = "exit",
        value_name = "WHOSE",
        value_enum,
        default_value = "vellum",
        hide_possible_values = true
    )]
    _exit: Exits,

    /// Print progress on standard error at this interval, as in 30s
    #[arg(long, value_name = "TIME", value_parser = keyvalue::duration)]
    heartbeat: Option<Duration>,
}

/// Whose exit statuses to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Exits {
    /// The statuses of [`Exit`].
    Vellum,
    /// The statuses of the kernel's selftests (tools/testing/selftests/kselftest.h). 2 and 3 mean
    /// XFAIL and XPASS there.
    Kselftest,
}

impl Exits {
    /// The status of a command that ended with `ended`.
    pub(super) fn status(self, ended: &Result<Exit, Failure>) -> u8 {
        let exit = ended.as_ref().map_or_else(|failure| failure.exit, |exit| *exit);
        let lacking = ended.as_ref().is_err_and(|failure| failure.lacking);
        match self {
            Self::Vellum => exit.code(),
            Self::Kselftest if lacking => 4,
            Self::Kselftest => u8::from(exit.code() != 0),
        }
    }
}

/// The exit statuses that `words` request. The first word is the program's name. The other words
/// may be wrong.
pub(super) fn exits_as(words: &[String]) -> Exits {
    let judged = words.get(1).is_some_and(|word| ["test", "bench", "judge"].contains(&word.as_str()));
    let asked = words.iter().any(|word| word == "--exit=kselftest")
        || words.windows(2).any(|two| two[0] == "--exit" && two[1] == "kselftest");
    if judged && asked { Exits::Kselftest } else { Exits::Vellum }
}

impl JudgedArgs {
    /// Opens the outputs, runs `work` with the progress of `bar`, and delivers its results. Returns
    /// the second value of `work`. If `work` fails, no file is left, and the failure is printed in
    /// the requested form.
    pub fn deliver<T>(
        &self,
        name: &str,
        bar: &ProgressBar,
        work: impl FnOnce() -> Result<(Vec<Report>, T), Failure>,
    ) -> Result<T, Failure> {
        let (place, begun) = (self.result.open()?, Instant::now());
        let beats = self.heartbeat.map(|every| Heartbeat::start(bar.clone(), every));
        let done = work();
        drop(beats);
        let seconds = begun.elapsed().as_secs_f64();
        match done {
            Ok((mut reports, besides)) => {
                for report in &mut reports {
                    if report.cases.is_empty() {
                        report.cases.push(Case { seconds: Some(seconds), ..report.as_case() });
                    }
                }
                place.deliver(&reports)?;
                Ok(besides)
            }
            Err(failure) => {
                // A host that lacks something is not a usage error.
                let exit = if failure.lacking { Exit::NotRun } else { failure.exit };
                let failure = Failure { exit, ..failure };
                let view = place.view.clone();
                place.discard();
                if let Some(view) = view.filter(|_| failure.lacking || failure.exit != Exit::Usage) {
                    print(view.render(&[failure.report(name)]).map_err(Failure::host)?)?;
                }
                Err(failure)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_of_whom_it_is_asked_for() {
        let failure = |exit, lacking| Err(Failure { exit, lacking, message: String::new() });
        for (ended, kselftest) in [
            (Ok(Exit::PowerOff), 0),
            (Ok(Exit::Signal(2)), 1),
            (failure(Exit::Usage, false), 1),
            (failure(Exit::Usage, true), 4),
            (failure(Exit::Error, true), 4),
            (failure(Exit::Error, false), 1),
            (failure(Exit::NotRun, true), 4),
            (failure(Exit::NotRun, false), 1),
        ] {
            assert_eq!(Exits::Kselftest.status(&ended), kselftest, "{ended:?}");
        }
        assert_eq!(Exits::Vellum.status(&failure(Exit::Usage, true)), 2);
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        for line in ["vellum test dirty-log --exit kselftest", "vellum bench --nonsense --exit=kselftest"] {
            assert_eq!(exits_as(&words(line)), Exits::Kselftest, "{line}");
        }
        for line in ["vellum run --exit kselftest", "vellum test dirty-log", "vellum test x --exit vellum"] {
            assert_eq!(exits_as(&words(line)), Exits::Vellum, "{line}");
        }
    }
}
