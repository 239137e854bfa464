//! `vellum report`: prints and compares results.

use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};

use super::failure::Failure;
use super::output::print;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_report::output::{Kind, Writer};
use vellum_report::terminal::{Extent, Form};
use vellum_report::{Report, compare, html, json, terminal};
use vellum_sys::keyvalue;

/// Print results written with --json, or compare two of them
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true, after_help = EXAMPLES)]
pub struct ReportArgs {
    #[command(subcommand)]
    what: Option<ReportCommand>,
    /// Result files; `-` is standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    page: PageArgs,
}

const EXAMPLES: &str = "\
Examples:
  vellum report result.json                        verdict, figures, details
  vellum report result.json --html result.html     with plots
  vellum report result.json --format markdown      to paste into a mail
  vellum report compare before.json after.json     what changed";

#[derive(Debug, Subcommand)]
enum ReportCommand {
    Compare(CompareArgs),
}

/// Compare two results, or two sets of them: which figures changed, and by how much
#[derive(Debug, Args)]
#[command(after_help = COMPARE_EXAMPLES)]
struct CompareArgs {
    /// A result file, or a directory of them
    a: PathBuf,
    /// The results to compare it with
    b: PathBuf,

    /// Fail if a time grows, or a rate falls, so that the same work takes more than PCT percent
    /// longer, and by more than noise. The exit status is then 1. It is 4 if there are too few
    /// results to tell
    #[arg(long, value_name = "PCT", value_parser = |text: &str| keyvalue::number(text, 0.0..=1e6))]
    fail_if_slower: Option<f64>,

    /// Print all figures, including those without a difference
    #[arg(long)]
    verbose: bool,

    #[command(flatten)]
    page: PageArgs,
}

const COMPARE_EXAMPLES: &str = "\
Examples:
  vellum report compare before.json after.json
  vellum report compare before/ after/ --fail-if-slower 5    status 1 if something is slower by 5 %

Exit status: 0 compared; 1 slower than allowed; 2 usage or bad input; 4 too few results to tell";

#[derive(Debug, Args)]
struct PageArgs {
    /// Write one self-contained page with plots instead; `-` is standard output
    #[arg(long, value_name = "OUT")]
    html: Option<PathBuf>,

    /// Print Markdown, to paste into a mail
    #[arg(long, value_name = "FORM", value_enum, conflicts_with = "html")]
    format: Option<PageForm>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PageForm {
    Markdown,
}

/// Runs `vellum report`.
pub fn run(args: &ReportArgs) -> Result<Exit, Failure> {
    match &args.what {
        Some(ReportCommand::Compare(args)) => compare_sets(args),
        None => {
            let mut results = Vec::new();
            for file in &args.files {
                results.extend(json::read(file).map_err(Failure::usage)?);
            }
            let files: Vec<&PathBuf> = args.files.iter().collect();
            let text = |form| terminal::render(&results, form, Extent::Whole);
            args.page.deliver(&files, || html::render(&results), text)?;
            Ok(Exit::PowerOff)
        }
    }
}

fn compare_sets(args: &CompareArgs) -> Result<Exit, Failure> {
    let CompareArgs { a, b, fail_if_slower, verbose, page } = args;
    let (results_a, results_b) = (set(a)?, set(b)?);
    let (name_a, name_b) = (a.to_string_lossy(), b.to_string_lossy());
    let comparison = compare::compare(
        compare::Side { name: &name_a, results: &results_a },
        compare::Side { name: &name_b, results: &results_b },
    )
    .map_err(Failure::usage)?;
    let extent = if *verbose { Extent::Whole } else { Extent::Short("More: -v, --html FILE") };
    page.deliver(&[a, b], || html::comparison(&comparison), |form| comparison.render(form, extent))?;
    let Some(percent) = *fail_if_slower else { return Ok(Exit::PowerOff) };
    match comparison.slower_than(percent) {
        None => {
            let why = "too few results to tell whether anything is slower";
            Err(Failure::ended(Exit::NotRun, format!("--fail-if-slower {percent}: {why}")))
        }
        Some(over) if over.is_empty() => Ok(Exit::PowerOff),
        Some(over) => {
            let named = over.iter().map(|(name, by)| format!("{name} by {by:.1} %"));
            let named = named.collect::<Vec<_>>().join(", ");
            Err(Failure::ended(Exit::Error, format!("--fail-if-slower {percent}: slower: {named}")))
        }
    }
}

impl PageArgs {
    /// Writes the page if it was requested, otherwise prints the text.
    fn deliver(
        &self,
        inputs: &[&PathBuf],
        page: impl FnOnce() -> String,
        text: impl FnOnce(Form) -> String,
    ) -> Result<(), Failure> {
        let Some(out) = self.html.as_deref() else {
            let form = match self.format {
                Some(PageForm::Markdown) => Form::Markdown,
                None => Form::Text(width()),
            };
            return print(text(form)).map(drop);
        };
        if let Some(input) = inputs.iter().find(|input| is_same(input, out)) {
            let (out, input) = (out.display(), input.display());
            return Err(Failure::usage(format!(
                "--html {out}: is {input}, which is read; name another file"
            )));
        }
        let writer = Writer::open(out, Kind::Page).map_err(Failure::usage)?;
        writer.write(page().as_bytes()).map_err(Failure::host)
    }
}

/// Whether both paths lead to the same file.
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
