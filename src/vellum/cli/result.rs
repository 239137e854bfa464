//! The targets of a command's result: the terminal, a JSON file, or a form for other programs.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::failure::Failure;
use super::line::word;
use super::output::print;
use vellum_report::output::{Kind, Writer};
use vellum_report::terminal::{Extent, Form as Look};
use vellum_report::view::View;
use vellum_report::{Report, json, terminal};
use vellum_sandbox::user::User;
use vellum_sys::identity;

/// The arguments of every command that has a result.
#[derive(Debug, Args)]
pub struct ResultArgs {
    /// Print all figures and details after the verdict
    #[arg(long)]
    verbose: bool,

    /// Write the result as JSON; `-` is standard output, which then carries nothing else
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Print the result in another form: markdown, to paste into a mail; ktap, as the kernel's
    /// tests print it; junit; kcidb, which needs --origin; json, what --json writes
    #[arg(long, value_name = "FORM", value_enum, hide_possible_values = true)]
    format: Option<Form>,

    /// The submitter's name in KCIDB, as agreed with its operators: a-z, 0-9 and _
    #[arg(long, value_name = "NAME", value_parser = origin, required_if_eq("format", "kcidb"))]
    origin: Option<String>,
}

/// The forms, as typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Form {
    /// All figures, to paste into a mail
    Markdown,
    /// KTAP version 1, as the kernel's tests print it
    Ktap,
    /// JUnit's XML
    Junit,
    /// A submission to KCIDB; needs --origin
    Kcidb,
    /// What --json writes
    Json,
}

impl Form {
    /// The view of this form. `origin` is for KCIDB.
    pub fn view(self, origin: Option<&str>) -> View {
        match self {
            Self::Markdown => View::Markdown,
            Self::Ktap => View::Ktap,
            Self::Junit => View::Junit,
            Self::Kcidb => View::Kcidb { origin: origin.unwrap_or_default().into() },
            Self::Json => View::Json,
        }
    }
}

/// Parses the name of a submitter.
pub fn origin(text: &str) -> Result<String, String> {
    let right = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    match !text.is_empty() && text.chars().all(right) {
        true => Ok(text.into()),
        false => Err("a name of a-z, 0-9 and _, as in example_lab".into()),
    }
}

/// The targets of a result. They are opened before there is a result, because a sandbox may be in
/// force by then.
pub struct Place {
    writer: Option<Writer>,
    /// The requested form.
    pub(super) view: Option<View>,
    verbose: bool,
    width: usize,
}

impl ResultArgs {
    /// The target of another process's result.
    pub fn at(path: Option<PathBuf>) -> Self {
        Self { verbose: false, json: path, format: None, origin: None }
    }

    /// The same with this file, unless it has one.
    pub fn or_at(self, path: Option<PathBuf>) -> Self {
        Self { json: self.json.or(path), ..self }
    }

    /// Whether `--verbose` was given.
    pub fn is_verbose(&self) -> bool {
        self.verbose
    }

    /// The absolute path of the JSON file, for processes in other directories.
    pub fn path(&self) -> Option<PathBuf> {
        let path = self.json.as_ref()?;
        Some(if path.as_os_str() == "-" { path.clone() } else { std::path::absolute(path).ok()? })
    }

    /// Opens the targets, as root on behalf of `user` if there is one.
    pub fn open_as(&self, user: Option<User>) -> Result<Place, Failure> {
        match user {
            Some(User { uid, gid }) => identity::as_user(uid, gid, || self.open()).map_err(Failure::host)?,
            None => self.open(),
        }
    }

    /// Opens the targets.
    pub fn open(&self) -> Result<Place, Failure> {
        let view = self.format.map(|form| form.view(self.origin.as_deref()));
        if view.is_some() && self.json.as_deref() == Some(std::path::Path::new("-")) {
            return Err(Failure::usage(
                "--json - excludes --format: both would go to standard output; --format json does the same as --json -",
            ));
        }
        let open = |path| Writer::open(path, Kind::Results);
        let writer = self.json.as_deref().map(open).transpose().map_err(Failure::usage)?;
        Ok(Place { writer, view, verbose: self.verbose, width: super::report::width() })
    }
}

impl Place {
    /// Writes the results.
    pub fn deliver(self, reports: &[Report]) -> Result<(), Failure> {
        let Self { writer, view, verbose, width } = self;
        if writer.as_ref().is_none_or(|writer| !writer.is_stdout()) {
            // The benchmarks have -v for vCPUs, as the selftests do.
            let more = if word(1).as_deref() == Some("bench") {
                "More: --verbose, --json FILE"
            } else {
                "More: -v, --json FILE"
            };
            let extent = if verbose { Extent::Whole } else { Extent::Short(more) };
            match view {
                Some(view) => print(view.render(reports).map_err(Failure::host)?)?,
                None => print(terminal::render(reports, Look::Text(width), extent))?,
            };
        }
        if let Some(writer) = writer {
            let text = json::text(reports).map_err(Failure::host)?;
            writer.write(&text).map_err(Failure::host)?;
        }
        Ok(())
    }

    /// Closes the targets without a result. No file is left.
    pub fn discard(self) {
        if let Some(writer) = self.writer {
            writer.discard();
        }
    }
}
