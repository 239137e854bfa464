//! `cargo lab docs`: builds the book as HTML, with a page for each command, and checks its links
//! and spelling.
//!
//! `docs/` holds the written pages. [`pages`] adds a page for each command from clap's definitions.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Command as Clap;
use support::browser::View;
use support::record::Record;
use vellum::cli;

use crate::artifacts::Programs;
use crate::cache::Cache;
use crate::test::setup;
use crate::test::tally::Tally;
use crate::{Error, Result, artifacts, tool};

/// Its name in the list of skipped tests.
const BED: &str = "docs";
/// The mdBook version that is known to work.
const MDBOOK: &str = "0.5.4";
/// The summary's line after which the commands' pages follow.
const COMMANDS: &str = "- [Commands](reference/commands.md)\n";
/// Correct words that codespell rejects.
const WORDS: &str = "crate,passt";

/// Builds the book into `out` and checks it. The exit status is 0 if nothing failed.
pub fn run(consent: bool, out: &Path) -> Result<u8> {
    let cache = Cache::open()?;
    let mut tally = Tally::new(Record::from_env());
    let lock = cache.lock("docs")?;
    let program = mdbook(&cache)?;
    drop(lock);
    tally.stage(BED, "the book", build(&program, &artifacts::workspace(), out));
    if setup::packages(&["linkchecker"], consent, BED, &mut tally)? {
        tally.stage(BED, "links", links(out));
    }
    if setup::packages(&["codespell"], consent, BED, &mut tally)? {
        let root = artifacts::workspace();
        let mut codespell = Command::new("codespell");
        codespell.args(["-L", WORDS, "docs", "README.md", "CHANGELOG.md", "SECURITY.md"]).current_dir(root);
        tally.stage(BED, "spelling", tool::output(&mut codespell).map(drop));
    }
    tally.show(&format!("lab: docs: {}", out.join("index.html").display()));
    tally.close();
    Ok(tally.status())
}

/// The screenshots of the book: the file, the arguments of the benchmark that the report shows, and
/// the view.
const IMAGES: [(&str, &str, View); 3] = [
    ("report-continuous", CONTINUOUS, View { width: 1100, height: 1240, dark: false }),
    (
        "report-lockstep",
        "bench dirty-log -i 5 -b 128M --repeat 3",
        View { width: 1100, height: 1450, dark: true },
    ),
    ("report-phone", CONTINUOUS, View { width: 400, height: 1240, dark: false }),
];
const CONTINUOUS: &str = "bench dirty-log -b 256M --hot 10%,share=90% --collect continuous --duration 2s";

/// Takes the book's screenshots anew. Measures on this host.
pub fn images() -> Result<()> {
    let vellum = Programs::build()?.vellum;
    let into = artifacts::workspace().join("docs/src/images");
    for (name, command, view) in IMAGES {
        let picture = into.join(name).with_extension("png");
        let made = |kind: &str| picture.with_extension(kind);
        let (result, page) = (made("json"), made("html"));
        let mut bench = Command::new(&vellum);
        tool::output(bench.args(command.split(' ')).arg("--json").arg(&result))?;
        tool::output(Command::new(&vellum).arg("report").arg(&result).arg("--html").arg(&page))?;
        let html = fs::read_to_string(&page).map_err(Error::file("read", &page))?;
        for file in [&result, &page] {
            fs::remove_file(file).map_err(Error::file("remove", file))?;
        }
        // Paths of this machine are nothing for the book.
        let html = html.replace(&result.display().to_string(), &format!("{name}.json"));
        let html = html.replace(&vellum.display().to_string(), "vellum");
        view.screenshot(&html, &picture)
            .map_err(|why| Error::Usage(format!("{name}: {}", why.message().unwrap_or("no screenshot"))))?;
        eprintln!("lab: docs: {}", picture.display());
    }
    Ok(())
}

/// Builds the book of the workspace `root` into `out`, which is emptied first.
pub fn build(mdbook: &Path, root: &Path, out: &Path) -> Result<()> {
    let source = root.join("target/book-source");
    for dir in [&source, out] {
        if dir.exists() {
            fs::remove_dir_all(dir).map_err(Error::file("remove", dir))?;
        }
    }
    copy(&root.join("docs"), &source)?;
    pages(&source.join("src"))?;
    tool::output(Command::new(mdbook).arg("build").arg(&source).arg("-d").arg(out)).map(drop)
}

/// The cached mdBook, if it has the right version.
pub fn installed(cache: &Cache) -> Option<PathBuf> {
    let program = cache.path("cargo/bin/mdbook");
    let version = tool::text(Command::new(&program).arg("--version")).unwrap_or_default();
    (version.trim() == format!("mdbook v{MDBOOK}")).then_some(program)
}

/// mdBook, installed into the cache if need be.
pub fn mdbook(cache: &Cache) -> Result<PathBuf> {
    let program = cache.path("cargo/bin/mdbook");
    if installed(cache).is_none() {
        eprintln!("lab: docs: cargo install mdbook");
        let mut cargo = Command::new(artifacts::cargo());
        cargo.args(["install", "mdbook", "--locked", "--version", MDBOOK, "--no-default-features"]);
        cargo.args(["--features", "search", "--root"]).arg(cache.path("cargo"));
        // Outside the workspace, because its cargo settings are for Vellum's own programs.
        cargo.current_dir("/").env_remove("CARGO_TARGET_DIR").env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1");
        tool::output(&mut cargo)?;
    }
    Ok(program)
}

/// Writes a page for each command below `src` and adds the pages to its summary.
fn pages(src: &Path) -> Result<()> {
    let mut root = cli::command().term_width(100);
    root.build();
    let mut found = Vec::new();
    collect(&root, 1, &mut found);
    let dir = src.join("reference/commands");
    fs::create_dir_all(&dir).map_err(Error::file("create", &dir))?;
    let mut rows = String::from(COMMANDS);
    for (depth, name, help) in found {
        let file = name.replace(' ', "-");
        let page = dir.join(format!("{file}.md"));
        let text = format!("# {name}\n\n```text\n{}\n```\n", help.trim_end());
        fs::write(&page, text).map_err(Error::file("write", &page))?;
        let _ = writeln!(rows, "{:indent$}- [{name}](reference/commands/{file}.md)", "", indent = depth * 2);
    }
    let summary = src.join("SUMMARY.md");
    let text = fs::read_to_string(&summary).map_err(Error::file("read", &summary))?;
    fs::write(&summary, text.replacen(COMMANDS, &rows, 1)).map_err(Error::file("write", &summary))
}

/// Collects the commands below `command`: their depth in the summary, name and help.
fn collect(command: &Clap, depth: usize, into: &mut Vec<(usize, String, String)>) {
    for below in command.get_subcommands().filter(|one| !one.is_hide_set() && one.get_name() != "help") {
        let name = below.get_bin_name().unwrap_or_else(|| below.get_name()).to_owned();
        into.push((depth, name, below.clone().render_long_help().to_string()));
        collect(below, depth + 1, into);
    }
}

/// Checks the book's links. linkchecker drops root's privileges, so it gets a world-readable copy.
fn links(book: &Path) -> Result<()> {
    let dir = std::env::temp_dir().join(format!("vellum-book-{}", std::process::id()));
    let checked = copy(book, &dir).and_then(|()| {
        let mut linkchecker = Command::new("linkchecker");
        tool::output(linkchecker.arg("--no-status").arg(dir.join("index.html"))).map(drop)
    });
    let _ = fs::remove_dir_all(&dir);
    checked
}

/// Copies a directory recursively.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).map_err(Error::file("create", to))?;
    for entry in fs::read_dir(from).map_err(Error::file("read", from))? {
        let path = entry.map_err(Error::file("read", from))?.path();
        let target = to.join(path.file_name().unwrap_or_default());
        if path.is_dir() {
            copy(&path, &target)?;
        } else {
            fs::copy(&path, &target).map_err(Error::file("copy", &path))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_that_the_summary_names() {
        let dir = std::env::temp_dir().join(format!("vellum-pages-{}", std::process::id()));
        copy(&artifacts::workspace().join("docs/src"), &dir).unwrap();
        pages(&dir).unwrap();
        let summary = fs::read_to_string(dir.join("SUMMARY.md")).unwrap();
        assert!(
            summary
                .contains("\n    - [vellum test dirty-log](reference/commands/vellum-test-dirty-log.md)\n")
        );
        let page = fs::read_to_string(dir.join("reference/commands/vellum-run.md")).unwrap();
        fs::remove_dir_all(&dir).unwrap();
        assert!(page.contains("Usage: vellum run") && page.contains("--workload"), "{page}");
    }

    /// The paths in code spans of `line`: those below a directory of the workspace, and in a table
    /// whose first cell is a directory, also those below it.
    fn paths(line: &str) -> Vec<(PathBuf, String)> {
        const TOP: [&str; 6] = ["src/", "tests/", "docs/", "resources/", "guest-agent/", "kernel-patches/"];
        let spans: Vec<&str> = line.split('`').skip(1).step_by(2).collect();
        let row = line
            .strip_prefix("| `")
            .and_then(|_| spans.first())
            .filter(|first| TOP.iter().any(|top| first.starts_with(top)));
        let is_path = |span: &&str| {
            !span.contains([' ', '*', '{', '<'])
                && (span.ends_with(".rs") || span.ends_with('/') || span.contains('/'))
        };
        let found = spans.iter().copied().filter(is_path).filter_map(|span| {
            if TOP.iter().any(|top| span.starts_with(top)) {
                return Some((PathBuf::from(span), span.to_owned()));
            }
            let below = row.filter(|_| span.ends_with(".rs") || span.ends_with('/'))?;
            Some((Path::new(below).join(span), span.to_owned()))
        });
        found.collect()
    }

    #[test]
    fn every_path_that_the_map_names_is_there() {
        assert_eq!(paths("| `src/bench` | `oracle/` | `gone.rs` |").len(), 3);
        assert!(paths("`BASE/NAME`, `a.rs`, src/bench").is_empty());
        let mut named = 0;
        for page in ["ARCHITECTURE.md", "CONTRIBUTING.md"] {
            let text = fs::read_to_string(artifacts::workspace().join(page)).unwrap();
            for (path, written) in text.lines().flat_map(paths) {
                let is_template = written.contains("BASE") || written.contains("NAME");
                assert!(is_template || artifacts::workspace().join(path).exists(), "{page}: {written}");
                named += 1;
            }
        }
        assert!(named > 50, "{named} paths");
    }
}
