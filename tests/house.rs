//! Rooms in one direction: no path in the sources leads from a room to one above it.
//!
//! The order of the rooms is that of the map in the crate's documentation (`src/lib.rs`), from the top floor down. Every path of every
//! file is read, whether in a `use`, in line, or in the arguments of a macro: those that begin with `crate::`, `vellum::` (which
//! is the crate by its name), `super::` or `self::`. Re-exports in the crate's root are followed to the room that they come
//! from; a re-export anywhere else is an arrow of the room that it stands in. Comments and strings are not read.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A path in the sources, from the crate's root.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Found {
    segments: Vec<String>,
    line: usize,
}

/// The rooms in the order of the map, the top floor first.
fn rooms(lib: &str) -> Vec<String> {
    let row = |line: &str| {
        let cell = line.strip_prefix("//! | [`")?.split('`').next()?;
        Some(cell.rsplit('@').next()?.to_owned())
    };
    lib.lines().filter_map(row).collect()
}

/// The path that begins at `tokens[at]`, as segments; and where it ends. A group at its end is left to the caller.
fn path(tokens: &[TokenTree], mut at: usize) -> (Vec<(String, usize)>, usize) {
    let mut segments = Vec::new();
    while let Some(TokenTree::Ident(ident)) = tokens.get(at) {
        segments.push((ident.to_string(), ident.span().start().line));
        at += 1;
        if !is_separator(tokens, at) {
            break;
        }
        at += 2;
    }
    (segments, at)
}

fn is_separator(tokens: &[TokenTree], at: usize) -> bool {
    let colon = |token: Option<&TokenTree>| matches!(token, Some(TokenTree::Punct(p)) if p.as_char() == ':');
    colon(tokens.get(at)) && colon(tokens.get(at + 1))
}

/// Where `first` leads from inside `module`, as segments from the crate's root; `None` for a path of another crate or of a name
/// that a `use` has brought in, whose arrow is that `use`.
fn base(module: &[String], first: &str) -> Option<Vec<String>> {
    match first {
        "crate" | "vellum" => Some(Vec::new()),
        "self" => Some(module.to_vec()),
        "super" => Some(module[..module.len().saturating_sub(1)].to_vec()),
        _ => None,
    }
}

/// All paths of `tokens`, which stand in `module`.
fn walk(tokens: TokenStream, module: &[String], found: &mut Vec<Found>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            // mod name { … }: what stands in it has one more `super`.
            TokenTree::Ident(word) if word == "mod" => {
                if let (Some(TokenTree::Ident(name)), Some(TokenTree::Group(body))) =
                    (tokens.get(at + 1), tokens.get(at + 2))
                {
                    let inner: Vec<String> =
                        module.iter().cloned().chain(std::iter::once(name.to_string())).collect();
                    walk(body.stream(), &inner, found);
                    at += 3;
                } else {
                    at += 1;
                }
            }
            TokenTree::Ident(_) => at = one(&tokens, at, module, found),
            TokenTree::Group(group) => {
                walk(group.stream(), module, found);
                at += 1;
            }
            _ => at += 1,
        }
    }
}

/// The path at `tokens[at]`, with the tree of a `use` behind it; where to go on.
fn one(tokens: &[TokenTree], at: usize, module: &[String], found: &mut Vec<Found>) -> usize {
    let line = tokens[at].span().start().line;
    let (segments, end) = path(tokens, at);
    let Some(mut from) = base(module, &segments[0].0) else { return end.max(at + 1) };
    // `crate`, `self` and `super` are words of the language elsewhere too: pub(crate), &self.
    if segments.len() == 1 && !is_separator(tokens, at + 1) {
        // `use crate as name` hides the crate behind a name.
        if matches!(tokens.get(at + 1), Some(TokenTree::Ident(word)) if word == "as") {
            found.push(Found { segments: vec!["*".into()], line });
        }
        return end.max(at + 1);
    }
    for (segment, _) in &segments[1..] {
        match segment.as_str() {
            "super" => drop(from.pop()),
            "self" => {}
            _ => from.push(segment.clone()),
        }
    }
    tree(tokens, end, from, line, found)
}

/// What follows a path: `{…}` after `::`, `*`, or nothing.
fn tree(tokens: &[TokenTree], at: usize, from: Vec<String>, line: usize, found: &mut Vec<Found>) -> usize {
    let separated = at >= 2 && is_separator(tokens, at - 2);
    match tokens.get(at) {
        Some(TokenTree::Group(group)) if separated && group.delimiter() == Delimiter::Brace => {
            let inner: Vec<TokenTree> = group.stream().into_iter().collect();
            for part in
                inner.split(|token| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ','))
            {
                let Some(first) = part.first() else { continue };
                let (segments, end) = path(part, 0);
                let mut whole = from.clone();
                whole.extend(segments.into_iter().map(|(segment, _)| segment).filter(|s| s != "self"));
                tree(part, end, whole, first.span().start().line, found);
            }
            at + 1
        }
        Some(TokenTree::Punct(star)) if separated && star.as_char() == '*' => {
            let mut segments = from;
            segments.push("*".into());
            found.push(Found { segments, line });
            at + 1
        }
        _ => {
            found.push(Found { segments: from, line });
            at
        }
    }
}

fn paths(source: &str, module: &[String]) -> Vec<Found> {
    let mut found = Vec::new();
    walk(source.parse().expect("the sources are Rust"), module, &mut found);
    found
}

/// The arrows that lead up from `source`, which stands in `module`, as lines that say so.
fn upward(
    source: &str,
    module: &[String],
    rooms: &[String],
    exports: &HashMap<String, String>,
) -> Vec<String> {
    let floor = |room: &str| rooms.iter().position(|other| other == room);
    let Some(mine) = module.first().and_then(|room| floor(room)) else {
        return vec![format!("{module:?} is no room on the map of src/lib.rs")];
    };
    let mut arrows = Vec::new();
    for Found { segments, line } in paths(source, module) {
        let Some(first) = segments.first() else { continue };
        let room = exports.get(first).unwrap_or(first);
        match floor(room) {
            Some(theirs) if theirs >= mine => {}
            Some(_) => arrows.push(format!("line {line}: {} leads up to `{room}`", segments.join("::"))),
            None => arrows.push(format!("line {line}: {} leads to no room", segments.join("::"))),
        }
    }
    arrows
}

/// What the crate's root gives another name than its room: `pub use room::Name`.
fn exports(lib: &str) -> HashMap<String, String> {
    let tokens: Vec<TokenTree> = lib.parse::<TokenStream>().expect("Rust").into_iter().collect();
    let mut exports = HashMap::new();
    for at in 0..tokens.len() {
        if matches!(&tokens[at], TokenTree::Ident(word) if word == "use") {
            let (segments, end) = path(&tokens, at + 1);
            let mut found = Vec::new();
            let whole =
                segments.into_iter().map(|(s, _)| s).filter(|s| s != "self" && s != "crate").collect();
            tree(&tokens, end, whole, 0, &mut found);
            for Found { segments, .. } in found {
                if let (Some(room), Some(name)) = (segments.first(), segments.last()) {
                    exports.insert(name.clone(), room.clone());
                }
            }
        }
    }
    exports
}

/// The module of a file below `src`.
fn module(file: &Path) -> Vec<String> {
    let mut parts: Vec<String> =
        file.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if parts.last().is_some_and(|last| last == "mod") {
        parts.pop();
    }
    parts
}

fn sources(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).expect("a directory of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
}

fn src() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

#[test]
fn no_path_leads_up() {
    let lib = std::fs::read_to_string(src().join("lib.rs")).unwrap();
    let (rooms, exports) = (rooms(&lib), exports(&lib));
    let mut files = Vec::new();
    sources(&src(), &mut files);
    let mut arrows = Vec::new();
    for file in files {
        let name = file.strip_prefix(src()).unwrap();
        // The root and the program stand above all floors.
        if ["lib.rs", "main.rs"].iter().any(|root| name == Path::new(root)) {
            continue;
        }
        let source = std::fs::read_to_string(&file).unwrap();
        let found = upward(&source, &module(name), &rooms, &exports);
        arrows.extend(found.into_iter().map(|arrow| format!("src/{}, {arrow}", name.display())));
    }
    assert!(arrows.is_empty(), "{} arrows lead up:\n{}", arrows.len(), arrows.join("\n"));
}

#[test]
fn the_map_has_every_room_once() {
    let lib = std::fs::read_to_string(src().join("lib.rs")).unwrap();
    let mut rooms = rooms(&lib);
    rooms.sort();
    let mut declared: Vec<String> = lib
        .lines()
        .filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';').map(str::to_owned))
        .collect();
    declared.sort();
    assert_eq!(rooms, declared);
}

/// Each form of a path is planted as an arrow that leads up, and as one that does not.
#[test]
fn every_form_of_a_path_is_read() {
    let rooms: Vec<String> = ["cli", "vm", "sys"].map(String::from).into();
    let exports = exports("pub use cli::Flag; pub use vm::{Vm, ring::Ring};");
    let at = |path: &str| path.split("::").map(String::from).collect::<Vec<_>>();
    let arrows = |module: &str, source: &str| upward(source, &at(module), &rooms, &exports).len();
    for source in [
        "use crate::cli;",
        "use crate::cli::args::Pin;",
        "use crate::{sys, cli::args};",
        "use crate::{sys::{self, code}, cli as other};",
        "pub use crate::cli::Failure;",
        "pub(crate) use crate::cli::Failure;",
        "fn f() { crate::cli::run() }",
        "fn f(x: &crate::cli::Args) -> Option<crate::sys::Fd> { None }",
        "fn f() { println!(\"{}\", crate::cli::NAME) }",
        "fn f() { matches!(x, crate::cli::Kind::A { .. }) }",
        "use super::cli;",
        "fn f() { super::cli::run() }",
        "mod inner { use super::super::cli; }",
        "mod inner { fn f() { super::super::cli::run() } }",
        "use self::super::cli;",
        "use vellum::cli;",
        "use crate::Flag;",
        "fn f(flag: crate::Flag) {}",
        "impl From<crate::cli::Failure> for Error {}",
        "#[derive(Debug)] struct S { #[cfg(x)] f: crate::cli::F }",
        "use crate::*;",
        "use crate as root;",
        "use crate::nowhere;",
    ] {
        assert_eq!(arrows("vm", source), 1, "{source}");
    }
    assert_eq!(arrows("vm::ring", "use super::super::cli;"), 1);
    assert_eq!(arrows("vm::ring", "use super::cli;"), 0, "a module of the room's own");
    for source in [
        "use crate::sys;",
        "use crate::vm::ring;",
        "use crate::{sys, vm::{self, ring}};",
        "use super::sys;",
        "use self::ring::Ring;",
        "mod inner { use super::ring; use super::*; }",
        "// use crate::cli;\n/// [`crate::cli`]\nfn f() { let s = \"crate::cli\"; }",
        "pub(crate) fn f(&self) { self.cli() }",
        "use crate::Ring;",
        "use std::cli::X; use other::cli;",
    ] {
        assert_eq!(arrows("vm", source), 0, "{source}");
    }
}
