//! Links in README and the book lead to files and headings that exist, and the summary names every
//! page.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use support::{Failed, book, ensure};

/// The targets of the links of a page.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let ends = text.split("](").skip(1);
    ends.filter_map(|rest| rest.split_once(')')).map(|(link, _)| link).filter(|link| !link.contains("://"))
}

/// The anchors of the headings of a page.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    let name = |line: &str| line.trim_start_matches('#').trim().to_lowercase().chars().filter(kept).collect();
    headings
        .map(|line| {
            let name: String = name(line);
            name.replace(' ', "-")
        })
        .collect()
}

/// Checks all pages.
pub fn check() -> Result<(), Failed> {
    let (root, files) = (book::root(), book::files()?);
    let book = root.join("docs/src");
    ensure(files.len() > 10, || format!("{files:?}"))?;
    let summary = fs::read_to_string(book.join("SUMMARY.md"))?;
    for file in &files {
        let text = fs::read_to_string(file)?;
        for link in links(&text) {
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let dir = file.parent().unwrap_or(&root);
            let target = if path.is_empty() { file.clone() } else { dir.join(path) };
            let wrong = || format!("{}: {link} leads nowhere", file.display());
            ensure(target.exists(), wrong)?;
            if !anchor.is_empty() {
                ensure(anchors(&fs::read_to_string(&target)?).contains(anchor), wrong)?;
            }
        }
        if let Ok(page) = file.strip_prefix(&book) {
            let named = summary.contains(&format!("({})", page.display()));
            ensure(named || page == Path::new("SUMMARY.md"), || {
                format!("{} is in no summary", page.display())
            })?;
        }
    }
    Ok(())
}
