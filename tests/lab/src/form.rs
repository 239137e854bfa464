//! `--format`: reports the outcome of each part in a form for other programs. Standard output then
//! has nothing else.

use std::fs::File;
use std::io::Write;
use std::os::fd::FromRawFd;

use vellum_host::Facts;
use vellum_report::view::View;
use vellum_report::{Case, Report};

use crate::{Error, Result};

/// Standard output, reserved for the report.
pub struct Output {
    view: View,
    out: File,
}

impl Output {
    /// Redirects all further output of this process and its children to standard error.
    pub fn claim(view: View) -> Result<Self> {
        // SAFETY: dup takes a number and gives a descriptor of our own, or an error.
        let out = unsafe { libc::dup(libc::STDOUT_FILENO) };
        // SAFETY: both are numbers. The descriptor that is replaced has been copied, if it was
        // open.
        if out < 0 || unsafe { libc::dup2(libc::STDERR_FILENO, libc::STDOUT_FILENO) } < 0 {
            return Err(Error::file("keep", "standard output")(std::io::Error::last_os_error()));
        }
        // SAFETY: the descriptor is open and has no other owner.
        Ok(Self { view, out: unsafe { File::from_raw_fd(out) } })
    }

    /// Prints `report`.
    pub fn deliver(mut self, report: &Report) -> Result<()> {
        let text = self.view.render(std::slice::from_ref(report)).map_err(Error::Refused)?;
        self.out.write_all(text.as_bytes()).map_err(Error::file("write", "standard output"))
    }
}

/// An empty result of the laboratory's own.
pub fn report(name: &str) -> Report {
    Report::new(name, Facts::collect("off".into()))
}

/// Adds a case under a unique name.
pub fn add(report: &mut Report, case: Case) {
    let taken = |name: &str| report.cases.iter().any(|known| known.name == name);
    let mut name = case.name.clone();
    for number in 2.. {
        if !taken(&name) {
            break;
        }
        name = format!("{} ({number})", case.name);
    }
    report.cases.push(Case { name, ..case });
}

#[cfg(test)]
mod tests {
    use vellum_report::Status;

    use super::*;

    #[test]
    fn cases_of_one_name_stay_apart() {
        let mut all = report("lab test");
        for status in [Status::Pass, Status::Fail, Status::Skip] {
            add(&mut all, Case::new("local/a", status));
        }
        let names: Vec<_> = all.cases.iter().map(|case| case.name.as_str()).collect();
        assert_eq!(names, ["local/a", "local/a (2)", "local/a (3)"]);
        assert!(View::Ktap.render(&[all]).unwrap().contains("not ok 1 lab_test"));
    }
}
