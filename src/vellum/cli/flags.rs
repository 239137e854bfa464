//! Maps fields of the configuration to flags. Each subcommand has its own table beside its
//! arguments. [`vellum_sys::diagnose`] says which field an error is about.

use vellum_sys::diagnose::Field;

/// The flags of a subcommand, in parts because subcommands share groups of flags. The text of an
/// error follows the flag: after `=` or a blank if it begins with the value, otherwise after a
/// colon.
pub type Flags = &'static [&'static [(Field, &'static str)]];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::{Path, PathBuf};

    use super::Flags;
    use crate::cli::{bench, command, fork, receive, restore, run_flags, test};

    /// All tables, by subcommand as typed.
    fn tables() -> Vec<(&'static str, Flags)> {
        let own = [
            ("run", run_flags::FLAGS),
            ("receive", receive::FLAGS),
            ("restore", restore::FLAGS),
            ("fork", fork::FLAGS),
        ];
        own.into_iter().chain(bench::TABLES).chain(test::TABLES).collect()
    }

    /// All flags of `command` and its subcommands, as typed.
    fn flags_of(command: &clap::Command) -> BTreeSet<String> {
        let long = command.get_arguments().filter_map(|arg| arg.get_long_and_visible_aliases()).flatten();
        let short = command.get_arguments().filter_map(clap::Arg::get_short);
        let own = long.map(|long| format!("--{long}")).chain(short.map(|short| format!("-{short}")));
        own.chain(command.get_subcommands().flat_map(flags_of)).collect()
    }

    #[test]
    fn tables_name_flags_that_there_are() {
        for (words, flags) in tables() {
            let root = command();
            let command =
                words.split(' ').fold(&root, |command, word| command.find_subcommand(word).unwrap());
            let known = flags_of(command);
            let named: Vec<_> = flags.iter().copied().flatten().collect();
            for (at, (field, flag)) in named.iter().enumerate() {
                let option = flag.trim_end_matches([':', '=']).split(' ').next().unwrap();
                assert!(known.contains(option), "{words}: {flag}");
                assert!(named[..at].iter().all(|(other, _)| other != field), "{words}: {field:?} twice");
            }
        }
    }

    /// The string literals of Rust source, as written.
    fn literals(source: &str) -> Vec<&str> {
        let (mut found, mut rest) = (Vec::new(), source);
        while let Some(at) = rest.find(['"', '/', '\'', 'r']) {
            let from = &rest[at..];
            let skip = if from.starts_with("//") {
                from.find('\n').unwrap_or(from.len())
            } else if from.starts_with("/*") {
                from.find("*/").map_or(from.len(), |end| end + 2)
            } else if from.starts_with("r#\"") {
                let end = from.find("\"#").unwrap_or(from.len() - 2) + 2;
                found.push(&from[..end]);
                end
            } else if from.starts_with('"') {
                let mut end = 1;
                while let Some(next) = from[end..].find(['"', '\\']) {
                    end += next + 1;
                    if from.as_bytes()[end - 1] == b'"' {
                        break;
                    }
                    end += 1;
                }
                found.push(&from[..end]);
                end
            } else if from.starts_with("'\"'") {
                3
            } else if from.starts_with("'\\") {
                4
            } else {
                1
            };
            rest = &from[skip..];
        }
        found
    }

    /// The first of `flags` in `literal`. A word behind the name of another program is not ours.
    fn named<'a>(literal: &str, flags: &'a BTreeSet<String>) -> Option<&'a String> {
        const PROGRAMS: [&str; 12] = [
            "cat", "dmesg", "grep", "id", "ls", "mknod", "modprobe", "mount", "prlimit", "sbatch",
            "truncate", "ulimit",
        ];
        let mut program = false;
        for word in literal.split(|c: char| c.is_whitespace() || "\"`()[]'=,".contains(c)) {
            let ends = word.ends_with([';', ':', '.']);
            let word = word.trim_end_matches([';', ':', '.']);
            if let Some(flag) = flags.get(word).filter(|_| !program) {
                return Some(flag);
            }
            program = !ends && (PROGRAMS.contains(&word) || program && word.starts_with('-'));
        }
        None
    }

    fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            match path.extension() {
                _ if path.is_dir() => sources(&path, found),
                Some(extension) if extension == "rs" => found.push(path),
                _ => {}
            }
        }
    }

    /// The same field has different flags in different subcommands, so code outside `cli/` names no
    /// flag.
    #[test]
    fn flags_are_named_by_the_command_line_alone() {
        let (root, flags) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), flags_of(&command()));
        let mut files = Vec::new();
        sources(&root, &mut files);
        files.retain(|file| !file.starts_with(root.join("vellum/cli")));
        // GRUB's commands have flags of their own.
        files.retain(|file| !file.ends_with("osimage/grub/run.rs"));
        // The judge drives other VMMs and the compiler, which have command lines of their own.
        files.retain(|file| !file.starts_with(root.join("judge/drive")) && !file.ends_with("judge/build.rs"));
        assert!(files.len() > 50, "only {} files were found", files.len());
        let mut wrong = Vec::new();
        for file in files {
            let source = std::fs::read_to_string(&file).unwrap();
            let at = |literal| {
                named(literal, &flags).map(|flag| format!("{}: {flag} in {literal}", file.display()))
            };
            wrong.extend(literals(&source).into_iter().filter_map(at));
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    #[test]
    fn a_flag_is_found_wherever_it_stands() {
        let flags = flags_of(&command());
        let found = |source: &str| {
            literals(source).into_iter().filter_map(|text| named(text, &flags).cloned()).collect::<Vec<_>>()
        };
        for source in [
            r#"f("--memory: too small")"#,
            r#"f("use more --memory, or less")"#,
            r#"f("a `--memory`")"#,
            r#"let c = '"'; f("\"quoted\" --memory")"#,
            r#"let c = '\''; f("(--memory)")"#,
            "f(\"two\nlines --memory=\")",
        ] {
            assert_eq!(found(source), ["--memory"], "{source}");
        }
        assert_eq!(found(r#"f("-b {}: no multiple")"#), ["-b"]);
        assert_eq!(found(r#"f("raise it (ulimit -l unlimited), not -s 3")"#), ["-s"]);
        for source in
            ["// \"--memory\"\nf()", r#"f("--device /dev/kvm, mount -t debugfs")"#, "f('-')", "use --memory;"]
        {
            assert_eq!(found(source), [""; 0], "{source}");
        }
    }
}
