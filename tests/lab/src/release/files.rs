//! The package's files besides the program: a man page per command, completions, and Debian's
//! changelog.

use std::fs;
use std::path::Path;

use clap_complete::Shell;
use vellum::cli;

use crate::{Error, Result};

/// The completions' names, where Debian's shells look for them.
const SHELLS: [(Shell, &str); 3] =
    [(Shell::Bash, "vellum.bash"), (Shell::Zsh, "_vellum"), (Shell::Fish, "vellum.fish")];

/// Writes the files below `dir`: `man`, `completions`, `changelog`. `date` is in RFC 2822's format,
/// `who` in Debian's format for maintainers.
pub fn write(dir: &Path, who: &str, date: &str) -> Result<()> {
    let (man, completions) = (dir.join("man"), dir.join("completions"));
    for dir in [&man, &completions] {
        fs::create_dir_all(dir).map_err(Error::file("create", dir))?;
    }
    clap_mangen::generate_to(cli::command(), &man).map_err(Error::file("write", &man))?;
    for (shell, name) in SHELLS {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut cli::command(), "vellum", &mut script);
        let path = completions.join(name);
        fs::write(&path, script).map_err(Error::file("write", &path))?;
    }
    let changelog = dir.join("changelog");
    fs::write(&changelog, debian(env!("CARGO_PKG_VERSION"), who, date))
        .map_err(Error::file("write", &changelog))
}

/// A changelog in Debian's format: the version, the maintainer and the date. The changes themselves
/// are in CHANGELOG.md.
fn debian(version: &str, who: &str, date: &str) -> String {
    format!(
        "vellum ({version}-1) unstable; urgency=medium\n\n  * What has changed stands in CHANGELOG.md.\n\n -- {who}  {date}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::artifacts;

    #[test]
    fn every_command_has_a_page_and_every_shell_its_completions() {
        let dir = std::env::temp_dir().join(format!("vellum-files-{}", std::process::id()));
        write(&dir, "N <n@example.org>", "Thu, 01 Jan 1970 00:00:00 +0000").unwrap();
        let page = |name: &str| {
            fs::read_to_string(dir.join("man").join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
        };
        assert!(page("vellum.1").contains(".SH NAME") && page("vellum-run.1").contains("hugetlb"));
        for command in cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            page(&format!("vellum-{}.1", command.get_name()));
        }
        assert!(!dir.join("man/vellum-serve-share.1").exists());
        for (_, name) in SHELLS {
            assert!(
                fs::read_to_string(dir.join("completions").join(name)).unwrap().contains("dirty-log"),
                "{name}"
            );
        }
        fs::remove_dir_all(dir).unwrap();
    }

    /// The command line and the schema are the contract. A change of the schema must appear in
    /// CHANGELOG.md.
    #[test]
    fn the_changelog_names_this_version_and_this_schema() {
        let text = fs::read_to_string(artifacts::workspace().join("CHANGELOG.md")).unwrap();
        let schema = format!("schema {}", vellum_report::SCHEMA);
        for wanted in [env!("CARGO_PKG_VERSION"), &schema, "exit status"] {
            assert!(text.contains(wanted), "CHANGELOG.md does not mention {wanted}");
        }
    }

    /// The files that cargo-deb packs exist or are made here.
    #[test]
    fn what_the_package_holds_is_there() {
        let root = artifacts::workspace();
        let manifest: toml::Table = fs::read_to_string(root.join("Cargo.toml")).unwrap().parse().unwrap();
        let deb = &manifest["package"]["metadata"]["deb"];
        let assets = deb["assets"].as_array().unwrap();
        assert!(assets.len() > 5);
        for asset in assets {
            let from = asset[0].as_str().unwrap();
            let made = from == "target/release/vellum" || from.starts_with("target/package/");
            // A pattern names a directory's files.
            let directory = from.split_once("/*").map(|(directory, _)| root.join(directory));
            let is_there =
                directory.map_or_else(|| root.join(from).is_file(), |directory| directory.is_dir());
            assert!(made || is_there, "{from}");
        }
        assert!(root.join(deb["maintainer-scripts"].as_str().unwrap()).join("postinst").is_file());
    }
}
