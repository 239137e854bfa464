//! `vellum report`: results read again, and compared.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use super::{Failure, print};
use crate::report::{Report, compare, html, json, terminal};
use crate::vm::lifecycle::Exit;

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

/// Does what was asked.
pub fn run(args: &ReportArgs) -> Result<Exit, Failure> {
    let text = match &args.what {
        Some(What::Compare { a, b }) => {
            let (results_a, results_b) = (set(a)?, set(b)?);
            let (name_a, name_b) = (a.to_string_lossy(), b.to_string_lossy());
            compare::compare(
                compare::Side { name: &name_a, results: &results_a },
                compare::Side { name: &name_b, results: &results_b },
            )
            .map_err(Failure::usage)?
        }
        None => {
            let mut results = Vec::new();
            for file in &args.files {
                results.extend(json::read(file).map_err(Failure::usage)?);
            }
            match args.html.as_deref() {
                Some(out) if out != Path::new("-") => {
                    let page = html::render(&results);
                    std::fs::write(out, page)
                        .map_err(|source| json::Error::Create { path: out.into(), source })
                        .map_err(Failure::usage)?;
                    return Ok(Exit::PowerOff);
                }
                Some(_) => html::render(&results),
                None => results.iter().map(terminal::render).collect::<Vec<_>>().join("\n"),
            }
        }
    };
    print(text).map(|_| Exit::PowerOff)
}

fn set(path: &Path) -> Result<Vec<Report>, Failure> {
    json::read_set(path).map_err(Failure::usage)
}
