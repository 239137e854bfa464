//! Failures of commands, and their messages.

use std::error::Error as StdError;
use std::io;

use super::devices;
use super::flags::Flags;
use vellum_host::Facts;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_report::{Case, Report, Status};
use vellum_sys::diagnose::{Diagnose, Field, Whose};

/// The failure of a command.
#[derive(Debug)]
pub struct Failure {
    /// The exit status.
    pub exit: Exit,
    /// This host lacks what was requested. A test is then skipped.
    pub lacking: bool,
    /// The message, one line.
    pub message: String,
}

impl Failure {
    /// A command that ended with `exit` and did not do what it was asked for.
    pub fn ended(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, lacking: false, message: message.into() }
    }

    /// A test that found nothing wrong but did not run completely, because the host lacks something
    /// or it was cut short.
    pub fn not_run(report: &Report) -> Self {
        let said = |case: Case| format!("{}: {}", case.name, case.why());
        let first = || report.all_cases().into_iter().find(|case| case.status != Status::Pass);
        let lines = report.unfinished();
        let why = if lines.is_empty() { first().map_or(String::new(), said) } else { lines.join("; ") };
        Self {
            exit: Exit::NotRun,
            lacking: report.status() == Status::Skip,
            message: format!("not all that was asked for was tested: {why}"),
        }
    }

    /// The result of a command that failed like this.
    pub(super) fn report(&self, name: &str) -> Report {
        let status = if self.lacking { Status::Skip } else { Status::Crash };
        let mut report = Report::new(name, Facts::collect("off".into()));
        report.cases.push(Case::new(name, status).explained(&self.message));
        report
    }

    /// The same failure with `flag` in front of the message.
    pub(super) fn under(self, flag: &str) -> Self {
        Self { message: format!("{flag}{}", self.message), ..self }
    }

    /// A usage error.
    pub fn usage(error: impl Into<Box<dyn StdError>>) -> Self {
        Self::ended(Exit::Usage, chain(error.into().as_ref()))
    }

    /// The failure for `error`. The message begins with the flag of the field that the error is
    /// about.
    pub fn of(error: &(impl Diagnose + 'static), flags: Flags) -> Self {
        let exit = match error.whose() {
            Whose::User => Exit::Usage,
            Whose::Host | Whose::Guest => Exit::Error,
        };
        let mut named = flags.iter().copied().flatten();
        let flag = error.field().and_then(|field| match field {
            Field::Device(key) => Some(devices::flag(key)),
            field => named.find(|(of, _)| *of == field).map(|(_, flag)| (*flag).to_owned()),
        });
        let message = match flag {
            Some(flag) if flag.ends_with('=') => format!("{flag}{}", chain(error)),
            Some(flag) => format!("{flag} {}", chain(error)),
            None => chain(error),
        };
        Self { exit, lacking: error.origin().lacking, message }
    }

    /// A failure of the VMM or the host.
    pub fn host(error: impl Into<Box<dyn StdError>>) -> Self {
        Self::ended(Exit::Error, chain(error.into().as_ref()))
    }
}

/// The error and its sources in one line. A source is left out if the line contains its text
/// already.
fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let text = source.to_string();
        if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
        next = source.source();
    }
    match out_of_descriptors(error) {
        true => format!("{line}; raise the limit on open files (ulimit -n)"),
        false => line,
    }
}

/// Whether the process ran out of file descriptors, which can happen anywhere. An error of
/// `kvm_ioctls` has no source with the errno: it has the errno itself.
fn out_of_descriptors(error: &(dyn StdError + 'static)) -> bool {
    let io = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
    let kvm = error.downcast_ref::<kvm_ioctls::Error>().map(|error| error.errno());
    io.or(kvm) == Some(libc::EMFILE) || error.source().is_some_and(out_of_descriptors)
}
