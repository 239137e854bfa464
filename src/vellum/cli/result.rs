//! Where a command's result goes: to the terminal as tables, and to a file as JSON where that was asked for.

use std::path::PathBuf;

use clap::Args;

use super::failure::Failure;
use super::output::print;
use vellum_report::output::{Kind, Writer};
use vellum_report::view::View;
use vellum_report::{Report, json, terminal};

/// The argument, for every command that has a result.
#[derive(Debug, Args)]
pub struct ResultArgs {
    /// Write the result as JSON; `-` is standard output, which then carries nothing else
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Where a result goes, opened before there is one: a sandbox may be in force by then.
pub struct Place {
    writer: Option<Writer>,
    width: usize,
}

impl ResultArgs {
    /// Whether the JSON goes to standard output.
    pub fn is_stdout(&self) -> bool {
        self.json.as_deref() == Some(std::path::Path::new("-"))
    }

    /// The same place as that of another process.
    pub fn at(path: Option<PathBuf>) -> Self {
        Self { json: path }
    }

    /// Where it is, wherever a process is.
    pub fn path(&self) -> Option<PathBuf> {
        let path = self.json.as_ref()?;
        Some(if path.as_os_str() == "-" { path.clone() } else { std::path::absolute(path).ok()? })
    }

    /// Opens what is to be written.
    pub fn open(&self) -> Result<Place, Failure> {
        let open = |path| Writer::open(path, Kind::Results);
        let writer = self.json.as_deref().map(open).transpose().map_err(Failure::usage)?;
        Ok(Place { writer, width: super::report::width() })
    }
}

impl Place {
    /// Delivers the result; on the terminal in this form, or as tables.
    pub fn deliver(self, report: &Report, form: Option<&View>) -> Result<(), Failure> {
        let Self { writer, width } = self;
        if writer.as_ref().is_none_or(|writer| !writer.is_stdout()) {
            match form {
                Some(form) => print(form.render(std::slice::from_ref(report)).map_err(Failure::host)?)?,
                None => print(terminal::render(report, width))?,
            };
        }
        if let Some(writer) = writer {
            let text = json::text(std::slice::from_ref(report)).map_err(Failure::host)?;
            writer.write(&text).map_err(Failure::host)?;
        }
        Ok(())
    }

    /// There is none: no file is left behind.
    pub fn discard(self) {
        if let Some(writer) = self.writer {
            writer.discard();
        }
    }
}
