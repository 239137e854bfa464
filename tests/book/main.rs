//! The commands in README and the book do what the pages say, and the links lead somewhere.
//! `support::page` describes what a page may contain, and `support::book` lists the pages. Those
//! with a Linux guest run in `tests/linux`.

mod links;

use std::fs;
use std::process::ExitCode;

use support::book::{self, PAGES, Page, Place};
use support::hosts;
use support::page;
use support::{Failed, Need, Tests, ensure, test};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

fn main() -> ExitCode {
    let mut tests = Tests::from_args();
    for one in PAGES {
        let need = match one.place {
            Place::Kvm => hosts::real(),
            Place::Slow => hosts::real().and_then(|()| whole_book()),
            Place::Linux | Place::Nowhere => continue,
        };
        tests.add(one.test(), need, move || {
            page::run(one, VELLUM, |dir| {
                // The plan on the page about fleets.
                let plan = page::block(one.text, "toml");
                Ok(plan.map_or(Ok(()), |plan| fs::write(dir.join("nightly.toml"), plan))?)
            })
        });
    }
    tests.run()
}

/// Requires a run of all pages.
fn whole_book() -> Need {
    match std::env::var_os("VELLUM_BOOK").is_some_and(|value| value == "all") {
        true => Ok(()),
        false => Err("is left to cargo lab test --full, or VELLUM_BOOK=all".into()),
    }
}

fn no_need() -> Need {
    Ok(())
}

#[test(no_need())]
fn links_lead_somewhere() -> Result<(), Failed> {
    links::check()
}

#[test(no_need())]
fn pages_name_flags_that_exist() -> Result<(), Failed> {
    book::check_flags("vellum", &mut vellum::cli::command())?;
    let root = vellum::cli::command();
    let wrong = page::unknown_flag(&root, "vellum run --memori 1g -- ls --all");
    ensure(wrong == Some("--memori"), || format!("{wrong:?}"))
}

#[test(no_need())]
fn a_page_that_is_wrong_fails() -> Result<(), Failed> {
    let page = "```console\n$ printf 'a  1\\nb\\nc'\na …\n…\nc\n$ false\n$ echo $?\n1\n```\n\n    true # indented\n\n\
                ```text\n$ no\n```\n";
    let run = |text: &str| {
        // A test's text lives as long as the process.
        let mut page = Page::of_nothing();
        page.text = Box::leak(text.to_owned().into_boxed_str());
        page::run(&page, VELLUM, |_| Ok(()))
    };
    run(page)?;
    for (right, wrong) in [
        ("a …", "b …"),
        ("c\n$ f", "d\n$ f"),
        ("\n…\n", "\n"),
        ("echo $?\n1", "echo 1\n1"),
        ("    true", "    false"),
    ] {
        let page = page.replacen(right, wrong, 1);
        ensure(run(&page).is_err(), || page.clone())?;
    }
    ensure(run("```text\n$ true\n```\n").is_err(), || "a page without commands".into())
}
