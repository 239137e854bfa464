//! `cargo bench --bench order`: writes `resources/start-up.order`, the functions that run until a guest's first byte. To be run again where
//! `cargo bench --bench boot` shows that memory at the first byte has grown. It needs cc and nm.
//!
//! `tests/perf/steps.c` runs the program step by step; `nm` says which functions its instructions are of. The names of functions carry
//! hashes that change with each build, so that all functions that differ in a hash alone count as one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use support::guests::Code;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/resources/start-up.order");

/// A function: its size, and its names.
type Functions = BTreeMap<u64, (u64, Vec<String>)>;

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", output.status);
    String::from_utf8(output.stdout).expect("text")
}

fn number(text: &str) -> u64 {
    u64::from_str_radix(text, 16).expect("a hexadecimal number")
}

/// The functions of `program`, by their addresses.
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

/// `name` with a star for each hash in it.
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
    // Cs and a number in base 62 stand before a crate's name.
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
    // `cargo test --benches` asks every benchmark whether it works; this one writes into the source, which only `cargo bench` is to do.
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
    // How much comes along that did not run.
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
        // The sections of the C library's functions have the names that C leaves to it.
        if !stem.starts_with('_') {
            stems.insert((0, format!("__{stem}")));
        }
        // Those with the most beside them come last, where fewer of their pages are used.
        stems.insert((beside[&stem] >> 10, stem));
    }
    let old = std::fs::read_to_string(FILE).expect("the file");
    let head = old.lines().take_while(|line| line.starts_with('#'));
    let lines: Vec<&str> = head.chain(stems.iter().map(|(_, stem)| stem.as_str())).collect();
    std::fs::write(FILE, lines.join("\n") + "\n").expect("the file");
    println!("{} names of {} functions in {FILE}", stems.len(), executed.len());
}
