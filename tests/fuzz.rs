//! Runs every fuzz target on its corpus, and on random changes to it. `cargo fuzz` searches for
//! longer.
//!
//! A target is a plain function in `fuzz-targets`. `fuzz` is the crate that `cargo fuzz` needs. It
//! also has the corpus.

use std::path::Path;

use support::Random;

type Target = fn(&[u8]);

/// Targets, by the name of their corpus directory.
const TARGETS: &[(&str, Target)] = &[
    #[cfg(target_arch = "x86_64")]
    ("loaders", fuzz_targets::loaders),
    ("control", fuzz_targets::control),
    ("dtb", fuzz_targets::dtb),
    ("fleet", fuzz_targets::fleet),
    #[cfg(target_arch = "x86_64")]
    ("dump", fuzz_targets::dump),
    #[cfg(target_arch = "x86_64")]
    ("gdb", fuzz_targets::gdb),
    ("judge", fuzz_targets::judge),
    #[cfg(target_arch = "x86_64")]
    ("keyvalue", fuzz_targets::keyvalue),
    ("migration", fuzz_targets::migration),
    ("osimage", fuzz_targets::osimage),
    ("qcow2", fuzz_targets::qcow2),
    ("report", fuzz_targets::report),
    ("share", fuzz_targets::share),
    #[cfg(target_arch = "x86_64")]
    ("pci", fuzz_targets::pci),
    ("snapshot", fuzz_targets::snapshot),
    #[cfg(target_arch = "x86_64")]
    ("state", fuzz_targets::state),
    ("virtio", fuzz_targets::virtio),
];

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(name);
    let entries = std::fs::read_dir(&directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display()));
    let files: Vec<_> = entries.map(|entry| std::fs::read(entry.unwrap().path()).unwrap()).collect();
    assert!(!files.is_empty(), "{} is empty", directory.display());
    files
}

#[test]
fn every_target_survives_its_corpus() {
    for (name, target) in TARGETS {
        corpus(name).iter().for_each(|input| target(input));
    }
}

#[test]
fn every_target_survives_changes_to_its_corpus() {
    let mut numbers = Random::new();
    let mut random = |below: usize| numbers.below(below as u64) as usize;
    for (name, target) in TARGETS {
        for mut input in corpus(name) {
            for _ in 0..300 {
                match random(4) {
                    0 => input.truncate(random(input.len() + 1).max(16)),
                    1 => input.extend_from_within(..random(input.len() + 1).min(64)),
                    // Extreme values find more than random ones.
                    2 if !input.is_empty() => {
                        let at = random(input.len());
                        let end = input.len().min(at + [1, 2, 4, 8][random(4)]);
                        input[at..end].fill([0, 0xff, 0x7f, 0x80][random(4)]);
                    }
                    _ if !input.is_empty() => {
                        let at = random(input.len());
                        input[at] ^= 1 << random(8);
                    }
                    _ => {}
                }
                target(&input);
            }
        }
    }
}

/// The lock file of the `fuzz` crate must list all of its dependencies. Otherwise a build would
/// change it.
#[test]
fn the_lock_file_knows_what_the_library_depends_on() {
    let read = |name: &str| -> toml::Table {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        text.parse().unwrap()
    };
    let lock = read("tests/fuzz/Cargo.lock");
    let packages = lock["package"].as_array().unwrap();
    for (library, manifest) in [
        ("vellum", "Cargo.toml"),
        ("support", "tests/support/Cargo.toml"),
        ("fuzz-targets", "tests/fuzz-targets/Cargo.toml"),
    ] {
        let locked = packages.iter().find(|package| package["name"].as_str() == Some(library)).unwrap();
        let locked = locked["dependencies"].as_array().unwrap();
        let locked: Vec<&str> = locked.iter().filter_map(|name| name.as_str()?.split(' ').next()).collect();
        let ours = read(manifest);
        let ours = ours["dependencies"].as_table().unwrap().keys();
        let missing: Vec<&String> = ours.filter(|name| !locked.contains(&name.as_str())).collect();
        assert!(missing.is_empty(), "cargo metadata in tests/fuzz writes {missing:?} into its Cargo.lock");
    }
}

#[cfg(target_arch = "x86_64")]
mod state {
    use serde_json::Value;

    /// The corpus must be valid for each device, so that random changes start from there.
    #[test]
    fn each_device_takes_the_state_of_the_corpus() {
        for (file, sections) in [("devices", 11), ("pc-pci", 9)] {
            let path = format!("{}/tests/fuzz/corpus/state/{file}", env!("CARGO_MANIFEST_DIR"));
            let (_, all): (Value, Vec<(String, u16, Value)>) =
                serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
            let taken: Vec<&str> = all
                .iter()
                .filter(|(name, _, body)| fuzz_targets::restored(name, body))
                .map(|(name, ..)| name.as_str())
                .collect();
            assert_eq!(taken.len(), sections, "{taken:?}");
        }
    }
}
