//! `vellum report`: results read again, and compared.

use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use super::failure::Failure;
use super::output::print;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_report::output::{Kind, Writer};
use vellum_report::{Report, compare, html, json, terminal};

/// Print results that were written with --json, as tables or as a page with pictures
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct ReportArgs {
    #[command(subcommand)]
    what: Option<ReportCommand>,
    /// Result files; `-` is standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    page: PageArgs,
}

#[derive(Debug, Subcommand)]
enum ReportCommand {
    /// Weigh two results, or two sets of them: ratios with their confidence intervals
    Compare {
        /// A result file, or a directory of them
        a: PathBuf,
        /// ReportCommand to compare it with
        b: PathBuf,
        #[command(flatten)]
        page: PageArgs,
    },
}

#[derive(Debug, Args)]
struct PageArgs {
    /// Write one self-contained page with plots instead of the tables; `-` is standard output
    #[arg(long, value_name = "OUT")]
    html: Option<PathBuf>,
}

/// Does what was asked.
pub fn run(args: &ReportArgs) -> Result<Exit, Failure> {
    match &args.what {
        Some(ReportCommand::Compare { a, b, page }) => {
            let (results_a, results_b) = (set(a)?, set(b)?);
            let (name_a, name_b) = (a.to_string_lossy(), b.to_string_lossy());
            let comparison = compare::compare(
                compare::Side { name: &name_a, results: &results_a },
                compare::Side { name: &name_b, results: &results_b },
            )
            .map_err(Failure::usage)?;
            page.deliver(&[a, b], || html::comparison(&comparison), |width| comparison.text(width))
        }
        None => {
            let mut results = Vec::new();
            for file in &args.files {
                results.extend(json::read(file).map_err(Failure::usage)?);
            }
            let tables = |width| {
                let tables = results.iter().map(|result| terminal::render(result, width));
                tables.collect::<Vec<_>>().join("\n")
            };
            let files: Vec<&PathBuf> = args.files.iter().collect();
            args.page.deliver(&files, || html::render(&results), tables)
        }
    }
}

impl PageArgs {
    /// Writes the page where one was asked for, and prints the tables otherwise.
    fn deliver(
        &self,
        inputs: &[&PathBuf],
        page: impl FnOnce() -> String,
        tables: impl FnOnce(usize) -> String,
    ) -> Result<Exit, Failure> {
        let Some(out) = self.html.as_deref() else {
            return print(tables(width())).map(|_| Exit::PowerOff);
        };
        if let Some(input) = inputs.iter().find(|input| is_same(input, out)) {
            let (out, input) = (out.display(), input.display());
            return Err(Failure::usage(format!(
                "--html {out}: is {input}, which is read; name another file"
            )));
        }
        let writer = Writer::open(out, Kind::Page).map_err(Failure::usage)?;
        writer.write(page().as_bytes()).map_err(Failure::host)?;
        Ok(Exit::PowerOff)
    }
}

/// Whether both are the same file, by whatever names.
fn is_same(a: &Path, b: &Path) -> bool {
    let identity = |path: &Path| std::fs::metadata(path).map(|about| (about.dev(), about.ino()));
    match (identity(a), identity(b)) {
        (Ok(a_file), Ok(b_file)) => a_file == b_file && a != Path::new("-"),
        _ => false,
    }
}

/// The columns of standard output.
pub(super) fn width() -> usize {
    let out = std::io::stdout();
    let columns = out.is_terminal().then(|| vellum_sys::terminal::columns(out.as_fd())).flatten();
    columns.unwrap_or(terminal::WIDTH)
}

fn set(path: &Path) -> Result<Vec<Report>, Failure> {
    json::read_set(path).map_err(Failure::usage)
}
