//! `vellum report`: results read again, and compared.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use crate::report::{compare, html, json, terminal};

/// Print results that were written with --json, as tables or as a page with pictures
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct ReportArgs {
    #[command(subcommand)]
    what: Option<What>,
    /// Result files; `-` is standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Write one self-contained page with plots instead of the tables; `-` is standard output
    #[arg(long, value_name = "OUT")]
    html: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Weigh two results, or two sets of them: ratios with their confidence intervals
    Compare {
        /// A result file, or a directory of them
        a: PathBuf,
        /// What to compare it with
        b: PathBuf,
    },
}

/// Why nothing was reported.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file is not what it should be, or cannot be written.
    #[error(transparent)]
    File(#[from] json::Error),
    /// The two have no ratio.
    #[error(transparent)]
    Compare(#[from] compare::Error),
    /// The terminal or the pipe is gone.
    #[error("standard output: {0}")]
    Output(#[from] io::Error),
}

/// Does what was asked.
pub fn run(args: &ReportArgs) -> Result<(), Error> {
    let text = match &args.what {
        Some(What::Compare { a, b }) => {
            let (results_a, results_b) = (json::read_set(a)?, json::read_set(b)?);
            let (name_a, name_b) = (a.to_string_lossy(), b.to_string_lossy());
            compare::compare(
                compare::Side { name: &name_a, results: &results_a },
                compare::Side { name: &name_b, results: &results_b },
            )?
        }
        None => {
            let mut results = Vec::new();
            for file in &args.files {
                results.extend(json::read(file)?);
            }
            match &args.html {
                Some(out) => return write_page(out, &html::render(&results)),
                None => results.iter().map(terminal::render).collect::<Vec<_>>().join("\n"),
            }
        }
    };
    print(&text)
}

fn print(text: &str) -> Result<(), Error> {
    Ok(json::allow_broken_pipe(io::stdout().lock().write_all(text.as_bytes()))?)
}

fn write_page(out: &Path, page: &str) -> Result<(), Error> {
    if out == Path::new("-") {
        return print(page);
    }
    std::fs::write(out, page).map_err(|source| json::Error::Create { path: out.into(), source }.into())
}
