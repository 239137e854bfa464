//! `cargo bench --bench order` writes `resources/start-up.order`: the functions that run until the
//! first byte of a guest. Run it again if `cargo bench --bench boot` shows that the memory at the
//! first byte has grown. It needs cc and nm.
//!
//! `tests/perf/steps.c` runs the program in single steps, and `nm` gives the function of each
//! instruction. The names of functions contain hashes that change with each build. So all functions
//! whose names differ only in a hash count as one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use support::guests::Code;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/resources/start-up.order");

/// Functions by address: the size of each, and its names.
type Functions = BTreeMap<u64, (u64, Vec<String>)>;

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", output.status);
    String::from_utf8(output.stdout).expect("text")
}

fn number(text: &str) -> u64 {
    u64::from_str_radix(text, 16).expect("a hexadecimal number")
}

/// The functions of `program` by address.
fn functions(program: &Path) -> Functions {
    let mut all = Functions::new();
    for line in output(Command::new("nm").args(["-S", "--defined-only"]).arg(program)).lines() {
        if let [address, size, "t" | "T" | "w" | "W", name] = line.split(' ').collect::<Vec<_>>()[..] {
            let one = all.entry(number(address)).or_default();
            one.0 = one.0.max(number(size));
            one.1.push(name.to_owned());
        }
    }
    all
}

/// `name` with each hash replaced by a star.
fn stem(name: &str) -> String {
    let name = name.split(".llvm.").next().expect("the first part");
    if name.starts_with("_ZN")
        && let Some(end) = name.len().checked_sub(17)
        && name[..end].ends_with("17h")
    {
        return format!("{}*", &name[..end]);
    }
    if !name.starts_with("_R") {
        return name.to_owned();
    }
    // "Cs" and a base-62 number come before the name of a crate.
    let mut parts = name.split("Cs");
    let mut stem = parts.next().expect("the first part").to_owned();
    for part in parts {
        let digits = part.bytes().take_while(u8::is_ascii_alphanumeric).count();
        let (hash, rest) = part.split_at(digits);
        stem += "Cs";
        stem += if rest.starts_with('_') && !hash.is_empty() { "*" } else { hash };
        stem += rest;
    }
    stem + "*"
}

fn main() {
    // `cargo test --benches` only checks that every benchmark works. This one writes to the source
    // tree, which only `cargo bench` should do.
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("skipped: cargo bench --bench order");
        return;
    }
    let scratch = |name: &str| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let steps = scratch("steps");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/perf/steps.c");
    output(Command::new("cc").args(["-O2", "-o"]).arg(&steps).arg(source));
    let kernel = scratch("order-kernel");
    std::fs::write(&kernel, Code::default().print("V").spin().elf64()).expect("the image");
    let vellum = support::perf::floor::installed(
        Path::new(env!("CARGO_BIN_EXE_vellum")),
        Path::new(env!("CARGO_TARGET_TMPDIR")),
    );
    let functions = functions(&vellum);
    let mut executed = BTreeSet::new();
    for arguments in [
        format!("run -m 128 -k {}", kernel.display()),
        "test startup --memory 128m --passes 1 --workload write,stride=64m".into(),
    ] {
        let text = output(Command::new(&steps).arg(&vellum).args(arguments.split(' ')));
        for address in text.lines().map(number) {
            let found = functions.range(..=address).next_back();
            executed.extend(
                found.filter(|(start, (size, _))| address - **start < *size).map(|(start, _)| *start),
            );
        }
    }
    // By stem, the bytes of the functions that have this stem and did not run.
    let mut beside: BTreeMap<String, u64> = BTreeMap::new();
    for (address, (size, names)) in &functions {
        for name in names {
            *beside.entry(stem(name)).or_default() += if executed.contains(address) { 0 } else { *size };
        }
    }
    let names = executed.iter().flat_map(|address| &functions[address].1);
    let mut stems: BTreeSet<(u64, String)> = BTreeSet::new();
    for name in names {
        let stem = stem(name);
        // Functions of the C library may be in sections with two more underscores in the name.
        if !stem.starts_with('_') {
            stems.insert((0, format!("__{stem}")));
        }
        // Stems with the most unused code come last. There, fewer of their pages are used.
        stems.insert((beside[&stem] >> 10, stem));
    }
    let old = std::fs::read_to_string(FILE).expect("the file");
    let head = old.lines().take_while(|line| line.starts_with('#'));
    let lines: Vec<&str> = head.chain(stems.iter().map(|(_, stem)| stem.as_str())).collect();
    std::fs::write(FILE, lines.join("\n") + "\n").expect("the file");
    println!("{} names of {} functions in {FILE}", stems.len(), executed.len());
}
