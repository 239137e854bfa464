//! The commands in README and the tutorials do what the pages say, and the links lead somewhere.
//! `page` describes what a page may contain.

mod links;

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::ExitCode;

use support::hosts;
use support::page;
use support::{Failed, Need, Tests, ensure, test};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

/// The pages whose commands only need a KVM.
const PAGES: [(&str, &str); 5] = [
    ("readme", include_str!("../../README.md")),
    ("first_steps", include_str!("../../docs/src/tutorials/first-steps.md")),
    ("dirty_pages", include_str!("../../docs/src/tutorials/dirty-pages.md")),
    ("migrate", include_str!("../../docs/src/tutorials/migrate.md")),
    ("kernel_patch", include_str!("../../docs/src/tutorials/kernel-patch.md")),
];

fn main() -> ExitCode {
    let mut tests = Tests::from_args();
    for (name, text) in PAGES {
        tests.add(name, hosts::real(), move || page::run(name, text, VELLUM, |_| Ok(())));
    }
    let guest = std::env::var_os("VELLUM_GUESTS").map(|dir| PathBuf::from(dir).join("6.1"));
    let need = guest.clone().map(drop).ok_or_else(|| {
        "needs a Linux guest, and a KVM that runs it: cargo lab test linux -- tutorial, or cargo lab guest \
         DIR/6.1 and VELLUM_GUESTS=DIR"
            .to_owned()
    });
    tests.add("linux_guest", hosts::kvm().and(need), move || {
        let page = include_str!("../../docs/src/tutorials/linux-guest.md");
        page::run("linux_guest", page, VELLUM, |dir| {
            Ok(symlink(guest.unwrap_or_default(), dir.join("guest"))?)
        })
    });
    tests.run()
}

fn no_need() -> Need {
    Ok(())
}

#[test(no_need())]
fn links_lead_somewhere() -> Result<(), Failed> {
    links::check()
}

#[test(no_need())]
fn a_page_that_is_wrong_fails() -> Result<(), Failed> {
    let page =
        "```console\n$ printf 'a  1\\nb\\nc'\na …\n…\nc\n$ false\n$ echo $?\n1\n```\n\n```text\n$ no\n```\n";
    let run = |page: &str| page::run("check", page, VELLUM, |_| Ok(()));
    run(page)?;
    for (right, wrong) in [("a …", "b …"), ("c\n$ f", "d\n$ f"), ("\n…\n", "\n"), ("echo $?\n1", "echo 1\n1")]
    {
        let page = page.replacen(right, wrong, 1);
        ensure(run(&page).is_err(), || page.clone())?;
    }
    ensure(run("```text\n$ true\n```\n").is_err(), || "a page without commands".into())
}
