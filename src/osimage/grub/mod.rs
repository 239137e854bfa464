//! GRUB's configuration. grub.cfg is a script. The commands that decide what boots are executed;
//! commands for the display do nothing.

mod parse;
mod run;

use std::collections::BTreeMap;

use super::{Disk, Entry, MAX_CONFIG, Refused};

/// The directories in which distributions have the script. GRUB's `prefix` is that directory.
const PREFIXES: [&str; 4] = ["/boot/grub", "/boot/grub2", "/grub", "/grub2"];

/// The entries of each script of the disk. The default of a script comes before its other entries.
pub fn entries(disk: &Disk, refused: &mut Refused) -> Vec<(String, Entry)> {
    let (mut scripts, mut stubs) = (Vec::new(), Vec::new());
    for (at, volume, files) in disk.readable() {
        for prefix in PREFIXES {
            let path = format!("{prefix}/grub.cfg");
            if files.exists(&path) {
                scripts.push((at, prefix.to_owned(), path, volume));
            }
        }
        // The EFI system partition has a script that finds and runs the one above.
        for vendor in files.names("/EFI") {
            let prefix = format!("/EFI/{vendor}");
            let path = format!("{prefix}/grub.cfg");
            if files.exists(&path) {
                stubs.push((at, prefix, path, volume));
            }
        }
    }
    let mut found = Vec::new();
    for (at, prefix, path, volume) in scripts.into_iter().chain(stubs) {
        let place = format!("{path} of {}", volume.name());
        match script(disk, at, &prefix, &path) {
            Ok(entries) => found.extend(entries.into_iter().map(|entry| (place.clone(), entry))),
            Err(why) => refused.push(format!("{place}: {why}")),
        }
    }
    found
}

fn script(disk: &Disk, at: usize, prefix: &str, path: &str) -> Result<Vec<Entry>, String> {
    let text = disk.read(&(at, path.to_owned()), MAX_CONFIG)?;
    let mut script = run::Script::new(disk, at, prefix);
    script.run(&String::from_utf8_lossy(&text))?;
    script.entries()
}

/// Parses GRUB's environment block: lines of `name=value`.
fn environment(text: &str) -> BTreeMap<String, String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// Parses `text` as a script, for a fuzz target.
pub fn check(text: &str) {
    let _ = parse::parse(text);
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::ReadAt;

    /// The titles and command lines that a script has on an empty disk.
    fn menu(text: &str) -> Result<Vec<(String, String)>, String> {
        let disk: Rc<dyn ReadAt> = Rc::new(vec![0; 4096]);
        let disk = Disk::open(&disk).unwrap();
        let mut script = run::Script::new(&disk, 0, "/boot/grub");
        script.run(text)?;
        Ok(script.entries()?.into_iter().map(|entry| (entry.title, entry.cmdline)).collect())
    }

    #[test]
    fn the_default_may_be_in_a_submenu() {
        // Distributions assign this variable without `set`.
        let text = "set default='s>b'\noption=\"--id\"\nmenuentry one {\n linux /k one\n}\n\
            submenu Other $option s {\n menuentry a { linux /k a; }\n menuentry 'b' { linux /k b; }\n}\n";
        let found = menu(text).unwrap();
        assert_eq!(found[0], ("b".into(), "b".into()), "{found:?}");
    }

    #[test]
    fn scripts_end() {
        for text in ["while true; do x; done", "function f { f; }\nf", "menuentry a { configfile /x; }"] {
            assert!(menu(text).is_err(), "{text}");
        }
        let not = "! ".repeat(100_000);
        assert!(menu(&format!("{not}true")).is_err());
        menu(&format!("if [ {not} x ]; then y; fi\nmenuentry x {{ linux /k; }}")).unwrap();
    }

    /// A value of 64 KiB, a million times in one command.
    #[test]
    fn a_script_takes_no_memory_that_it_does_not_have() {
        let double = "set a=\"$a$a\"\n".repeat(15);
        let text = format!("set a=xx\n{double}linux /k {}\n", "$a".repeat(1_000_000));
        let why = menu(&text).unwrap_err();
        assert_eq!(why, "a command is longer than 1048576 bytes");
    }

    #[test]
    fn words_of_a_variable_are_apart_unless_quoted() {
        let text = "set o='ro  quiet'\nset e=\nmenuentry x { linux /k $o \"$o\" $e \"$e\" a${o}b; }";
        assert_eq!(menu(text).unwrap()[0].1, "ro quiet ro  quiet  aro quietb");
    }
}
