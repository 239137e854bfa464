//! Finds public items that no other crate uses.
//!
//! `pub` in a library says that another crate needs the item. rustc assumes so, and does not warn
//! about an item that has no user any longer. This test scans every crate in `src/` and fails with
//! its public items whose name occurs in no other crate of the workspace.
//!
//! The scan compares names, not paths, so it misses an item whose name also occurs in a crate that
//! depends on its own. Items of private modules are left out unless they are re-exported: rustc
//! judges those. A type also counts as used if it occurs in the signature of a used item, because
//! it could not be private there. Other items should be `pub(crate)`, for which rustc finds dead
//! ones.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A word, a lifetime or one character of punctuation, and its line.
#[derive(Clone, Debug, PartialEq)]
struct Token {
    text: String,
    line: usize,
}

/// The tokens of Rust source, without comments, character literals, and strings that are not paths.
fn tokens(source: &str) -> Vec<Token> {
    let chars: Vec<char> = source.chars().collect();
    let at = |i: usize| chars.get(i).copied().unwrap_or('\0');
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let (mut i, mut line, mut found) = (0, 1, Vec::new());
    while i < chars.len() {
        let start = i;
        match at(i) {
            '/' if at(i + 1) == '/' => {
                while i < chars.len() && at(i) != '\n' {
                    i += 1;
                }
            }
            '/' if at(i + 1) == '*' => {
                let mut depth = 0;
                loop {
                    match (at(i), at(i + 1)) {
                        ('/', '*') => (depth, i) = (depth + 1, i + 2),
                        ('*', '/') => (depth, i) = (depth - 1, i + 2),
                        _ => i += 1,
                    }
                    if depth == 0 || i >= chars.len() {
                        break;
                    }
                }
            }
            '"' => {
                i += 1;
                while i < chars.len() && at(i) != '"' {
                    i += if at(i) == '\\' { 2 } else { 1 };
                }
                // serde takes functions by their paths in strings.
                let content: String = chars[start + 1..i.min(chars.len())].iter().collect();
                if content.contains("::") && content.chars().all(|c| is_word(c) || c == ':') {
                    let names = content.split("::").map(str::to_owned);
                    found.extend(names.map(|text| Token { text, line }));
                }
                i += 1;
            }
            // A raw string with any prefix: r, br or cr.
            'r' if at(i + 1) == '"' || (at(i + 1) == '#' && matches!(at(i + 2), '"' | '#')) => {
                let hashes = (1..).take_while(|n| at(i + n) == '#').count();
                i += hashes + 2;
                while i < chars.len() && !(at(i) == '"' && (1..=hashes).all(|n| at(i + n) == '#')) {
                    i += 1;
                }
                i += hashes + 1;
            }
            // A character: 'x' or '\…'. Anything else is a lifetime.
            '\'' if at(i + 1) == '\\' => {
                i += 3;
                while i < chars.len() && at(i) != '\'' {
                    i += 1;
                }
                i += 1;
            }
            '\'' if at(i + 2) == '\'' => i += 3,
            '\'' => {
                i += 1;
                while is_word(at(i)) {
                    i += 1;
                }
                found.push(Token { text: "'".into(), line });
            }
            c if is_word(c) => {
                while is_word(at(i)) {
                    // A string's prefix is not a word.
                    let raw = at(i) == 'r' && (at(i + 1) == '"' || (at(i + 1) == '#' && at(i + 2) == '"'));
                    if raw && i > start {
                        break;
                    }
                    i += 1;
                }
                if !matches!(at(i), '"') || i - start > 1 {
                    found.push(Token { text: chars[start..i].iter().collect(), line });
                }
            }
            c => {
                if !c.is_whitespace() {
                    found.push(Token { text: c.into(), line });
                }
                i += 1;
            }
        }
        line += chars[start..i.min(chars.len())].iter().filter(|&&c| c == '\n').count();
    }
    found
}

/// The index after the bracket that closes the one at `open`.
fn behind(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0;
    for (i, token) in tokens.iter().enumerate().skip(open) {
        match token.text.as_str() {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return i + 1;
        }
    }
    tokens.len()
}

/// The first index from `from` on with one of `ends`, outside of nested brackets.
fn find(tokens: &[Token], from: usize, ends: &[&str]) -> usize {
    let mut i = from;
    while i < tokens.len() {
        match tokens[i].text.as_str() {
            text if ends.contains(&text) => return i,
            "{" | "(" | "[" => i = behind(tokens, i),
            _ => i += 1,
        }
    }
    tokens.len()
}

/// `tokens` without items that are compiled only for tests.
fn without_tests(tokens: &[Token]) -> Vec<Token> {
    let is_test = |at: &[Token]| {
        let words: Vec<&str> = at.iter().take(7).map(|token| token.text.as_str()).collect();
        words == ["#", "[", "cfg", "(", "test", ")", "]"]
    };
    let (mut i, mut kept) = (0, Vec::new());
    while i < tokens.len() {
        if !is_test(&tokens[i..]) {
            kept.push(tokens[i].clone());
            i += 1;
            continue;
        }
        while tokens.get(i).is_some_and(|token| token.text == "#") {
            i = behind(tokens, i + 1);
        }
        let is_item = ["pub", "fn", "mod", "use", "impl", "struct", "enum", "const", "static", "type"]
            .contains(&tokens[i].text.as_str());
        let end = find(tokens, i, if is_item { &["{", ";"] } else { &["{", ";", ","] });
        i = match tokens.get(end).map(|token| token.text.as_str()) {
            Some("{") if tokens[i].text == "use" => find(tokens, end, &[";"]) + 1,
            Some("{") => behind(tokens, end),
            _ => end + 1,
        };
    }
    kept
}

/// A public item.
#[derive(Debug)]
struct Item {
    name: String,
    line: usize,
    /// The words that must be public while this is public.
    interface: HashSet<String>,
    /// The type of a method.
    of: Option<String>,
}

/// A file's visibility declarations.
#[derive(Debug, Default)]
struct Declared {
    items: Vec<Item>,
    /// The modules that it declares as public.
    modules: HashSet<String>,
    /// The names that it re-exports.
    reexported: HashSet<String>,
    /// The modules that it re-exports by glob.
    globs: HashSet<String>,
    /// The words that its macros, associated types and generic blocks make visible elsewhere.
    exposed: HashSet<String>,
}

fn words(tokens: &[Token]) -> impl Iterator<Item = String> {
    tokens.iter().map(|token| token.text.clone())
}

/// The words of the public fields in `tokens`, which are separated by commas.
fn public_fields(tokens: &[Token]) -> HashSet<String> {
    let (mut i, mut found) = (0, HashSet::new());
    while i < tokens.len() {
        let mut end = i;
        // Commas in generic arguments do not separate fields.
        let mut angles = 0;
        while end < tokens.len() && !(tokens[end].text == "," && angles <= 0) {
            match tokens[end].text.as_str() {
                "<" => angles += 1,
                ">" if tokens[end - 1].text != "-" => angles -= 1,
                "(" | "[" | "{" => end = behind(tokens, end) - 1,
                _ => {}
            }
            end += 1;
        }
        let field = &tokens[i..end.min(tokens.len())];
        let visible = field.iter().position(|token| token.text == "pub");
        if visible.is_some_and(|at| field.get(at + 1).is_some_and(|next| next.text != "(")) {
            found.extend(words(field));
        }
        i = end + 1;
    }
    found
}

/// The words of the interface of the item of `kind` whose name is at `name`.
fn interface(tokens: &[Token], kind: &str, name: usize) -> HashSet<String> {
    let head = |ends: &[&str]| find(tokens, name + 1, ends);
    match kind {
        "fn" => words(&tokens[name + 1..head(&["{", ";"])]).collect(),
        "const" | "static" => words(&tokens[name + 1..head(&["=", ";"])]).collect(),
        "type" => words(&tokens[name + 1..head(&[";"])]).collect(),
        "struct" | "union" => {
            let body = head(&["{", "(", ";"]);
            let mut found: HashSet<String> = words(&tokens[name + 1..body]).collect();
            if tokens.get(body).is_some_and(|token| token.text != ";") {
                found.extend(public_fields(&tokens[body + 1..behind(tokens, body) - 1]));
            }
            found
        }
        "enum" | "trait" => words(&tokens[name + 1..behind(tokens, head(&["{"]))]).collect(),
        _ => HashSet::new(),
    }
}

fn declared(source: &str) -> Declared {
    let tokens = without_tests(&tokens(source));
    let text = |i: usize| tokens.get(i).map_or("", |token| token.text.as_str());
    let mut declared = Declared::default();
    // The type of the enclosing inherent impl, and its end.
    let mut around: Option<(String, usize)> = None;
    for i in 0..tokens.len() {
        if around.as_ref().is_some_and(|(_, end)| i >= *end) {
            around = None;
        }
        match text(i) {
            "impl" if matches!(text(i.wrapping_sub(1)), "" | "}" | ";" | "]" | "unsafe") => {
                let mut from = i + 1;
                if text(from) == "<" {
                    let mut depth = 0;
                    while from < tokens.len() {
                        match text(from) {
                            "<" => depth += 1,
                            ">" if text(from - 1) != "-" => depth -= 1,
                            _ => {}
                        }
                        from += 1;
                        if depth == 0 {
                            break;
                        }
                    }
                    declared.exposed.extend(words(&tokens[i + 1..from]));
                }
                let body = find(&tokens, from, &["{"]);
                let end = find(&tokens, from, &["<", "{", "where"]);
                around = Some((text(end.saturating_sub(1)).to_owned(), behind(&tokens, body)));
            }
            "type" if text(i.wrapping_sub(1)) != "pub" => {
                declared.exposed.extend(words(&tokens[i + 2..find(&tokens, i, &[";"])]));
            }
            "$" if text(i + 1) == "crate" => {
                let mut at = i + 2;
                while text(at) == ":" && text(at + 1) == ":" {
                    declared.exposed.insert(text(at + 2).to_owned());
                    at += 3;
                }
            }
            "pub" if text(i + 1) != "(" => {
                let mut at = i + 1;
                while matches!(text(at), "async" | "unsafe" | "extern")
                    || (text(at) == "const" && matches!(text(at + 1), "fn" | "unsafe" | "async"))
                {
                    at += 1;
                }
                let kind = text(at);
                match kind {
                    "use" => {
                        let end = find(&tokens, at, &[";"]);
                        let tree = &tokens[at..end];
                        for (n, token) in tree.iter().enumerate() {
                            if token.text == "*" {
                                declared.globs.insert(tree[n - 3].text.clone());
                            } else if tree.get(n + 1).is_none_or(|next| next.text != ":") {
                                declared.reexported.insert(token.text.clone());
                            }
                        }
                    }
                    "fn" | "struct" | "union" | "enum" | "trait" | "const" | "static" | "type" | "mod" => {
                        let name = if text(at + 1) == "mut" { at + 2 } else { at + 1 };
                        if kind == "mod" {
                            declared.modules.insert(text(name).to_owned());
                        }
                        declared.items.push(Item {
                            name: text(name).to_owned(),
                            line: tokens[name].line,
                            interface: interface(&tokens, kind, name),
                            of: around.as_ref().map(|(of, _)| of.clone()),
                        });
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }
    declared
}

/// The Rust files below `dir`, by their paths in it.
fn sources(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut left = vec![dir.to_owned()];
    while let Some(path) = left.pop() {
        if path.is_dir() {
            let is_built = path.join("CACHEDIR.TAG").exists();
            if !is_built {
                left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.insert(path.strip_prefix(dir).unwrap().to_owned(), fs::read_to_string(&path).unwrap());
        }
    }
    found
}

/// The module of the file at `path`, and whether it contains tests.
fn module(path: &Path) -> (Vec<String>, bool) {
    let mut names: Vec<String> =
        path.with_extension("").iter().map(|name| name.to_string_lossy().into_owned()).collect();
    if names.last().is_some_and(|name| name == "mod" || name == "lib") {
        names.pop();
    }
    let holds_tests = names.iter().any(|name| name == "tests");
    (names, holds_tests)
}

/// The public items of a crate whose names are not among the words `elsewhere`: `FILE:LINE NAME`.
fn unused(files: &BTreeMap<PathBuf, String>, elsewhere: &HashSet<String>) -> BTreeSet<String> {
    let mut modules = HashMap::new();
    for (path, source) in files {
        let (module, holds_tests) = module(path);
        if !holds_tests {
            modules.insert(module, (path, declared(source)));
        }
    }
    let all = |part: fn(&Declared) -> &HashSet<String>| -> HashSet<&String> {
        modules.values().flat_map(|(_, declared)| part(declared)).collect()
    };
    let (reexported, globs) = (all(|declared| &declared.reexported), all(|declared| &declared.globs));
    let is_public = |module: &[String]| {
        (1..=module.len()).all(|len| {
            let parent = modules.get(&module[..len - 1]);
            let name = &module[len - 1];
            parent.is_none_or(|(_, declared)| declared.modules.contains(name)) || globs.contains(name)
        })
    };
    let types: HashSet<&String> = modules
        .values()
        .flat_map(|(_, declared)| &declared.items)
        .filter(|item| item.of.is_none())
        .map(|item| &item.name)
        .collect();
    let mut items = Vec::new();
    let mut used = elsewhere.clone();
    for (module, (path, declared)) in &modules {
        used.extend(declared.exposed.iter().cloned());
        let is_public = is_public(module);
        // A method is as public as its type.
        let of = |item: &&Item| item.of.as_ref().unwrap_or(&item.name).clone();
        let exported = |name: &String| types.contains(name) && (is_public || reexported.contains(name));
        let public = declared.items.iter().filter(|item| exported(&of(item)));
        items.extend(public.map(|item| (path, item)));
    }
    loop {
        let before = used.len();
        let (used_items, rest): (Vec<_>, Vec<_>) =
            items.into_iter().partition(|(_, item)| used.contains(&item.name));
        used.extend(used_items.iter().flat_map(|(_, item)| item.interface.iter().cloned()));
        items = rest;
        if used.len() == before {
            break;
        }
    }
    items.iter().map(|(path, item)| format!("{}:{} {}", path.display(), item.line, item.name)).collect()
}

/// The crates in `said` that use `name`, directly or through another crate.
fn users_of<'a>(name: &str, said: &'a BTreeMap<String, HashSet<String>>) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut left = vec![name.to_owned()];
    while let Some(name) = left.pop() {
        // A crate has the name of its directory. The command line's crate is the root's.
        let library = match name.strip_prefix("src/") {
            Some("vellum") => "vellum".to_owned(),
            Some(directory) => format!("vellum_{directory}"),
            None => continue,
        };
        for (user, words) in said {
            if *user != name && words.contains(&library) && found.insert(user.as_str()) {
                left.push(user.clone());
            }
        }
    }
    found
}

#[test]
fn every_public_item_is_used_by_another_crate() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let mut crates = BTreeMap::new();
    // Crates without a library are not judged: programs, and those outside `src/`.
    let mut others = BTreeMap::new();
    for entry in fs::read_dir(root.join("src")).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("src/{}", path.file_name().unwrap().display());
        let mut files = sources(&path);
        let program = files.remove(Path::new("main.rs"));
        others
            .extend(program.map(|program| (format!("{name}/main.rs"), [("main.rs".into(), program)].into())));
        crates.insert(name, files);
    }
    let mut tests = sources(&root.join("tests"));
    for crate_of_its_own in ["lab", "support", "fuzz-targets", "fuzz"] {
        let theirs = tests.extract_if(.., |path, _| path.starts_with(crate_of_its_own)).collect();
        others.insert(format!("tests/{crate_of_its_own}"), theirs);
    }
    others.insert("tests".into(), tests);
    others.insert("guest-agent".into(), sources(&root.join("guest-agent")));
    let of = |files: &BTreeMap<PathBuf, String>| -> HashSet<String> {
        files.values().flat_map(|source| words(&tokens(source)).collect::<Vec<_>>()).collect()
    };
    let said: BTreeMap<String, HashSet<String>> =
        crates.iter().chain(&others).map(|(name, files)| (name.clone(), of(files))).collect();
    let mut found = Vec::new();
    for (name, files) in &crates {
        let users = users_of(name, &said);
        let elsewhere = users.into_iter().filter(|user| user != name).flat_map(|user| said[user].clone());
        found.extend(unused(files, &elsewhere.collect()).into_iter().map(|item| format!("{name}/{item}")));
    }
    assert!(
        found.is_empty(),
        "{} public items are used by no other crate; make them pub(crate) or private:\n{}",
        found.len(),
        found.join("\n")
    );
}

#[test]
fn an_item_that_only_its_own_crate_names_is_found() {
    let lib = "pub mod open;\nmod closed;\npub use closed::Shown;\n/// Used.\npub fn entry() -> Answer { todo!() }\n\
               pub struct Answer { pub inner: Inner, hidden: Hidden }\npub struct Inner;\npub struct Hidden;\n\
               pub(crate) fn own() {}\n#[cfg(test)]\nmod tests { pub fn helper() {} }\n";
    let closed = "pub fn unreachable() {}\npub struct Shown;\nimpl Shown { pub fn idle(&self) {} }\n";
    let open = "pub const fn lone() -> &'static str { \"used\" }\npub trait Used { fn method(&self); }\n";
    let files = [("lib.rs", lib), ("closed.rs", closed), ("open.rs", open)];
    let files = files.map(|(path, source)| (path.into(), source.to_owned())).into();
    let elsewhere = words(&tokens("use it::{entry, Shown, open::Used}; // Hidden lone")).collect();
    let found: Vec<String> = unused(&files, &elsewhere).into_iter().collect();
    assert_eq!(found, ["closed.rs:3 idle", "lib.rs:8 Hidden", "open.rs:1 lone"]);
}

#[test]
fn text_is_no_code() {
    let source = "/* a /* b */ c */ r#\"d \" e\"# b\"f\" 'g' '\\n' '\\'' h<'i> \"j \\\" k\" \"l::m\" n // o";
    let found: Vec<String> = words(&tokens(source)).collect();
    assert_eq!(found, ["h", "<", "'", ">", "l", "m", "n"]);
}
