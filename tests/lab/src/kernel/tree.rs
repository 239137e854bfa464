//! A base's source tree and the set of patches that it currently has.
//!
//! The pristine content of every file that a patch ever changed is kept beside the tree. To change
//! the set of patches, each of these files is compared with its new content and written only if it
//! differs, so make sees new times on just those files. If this is interrupted, a repetition
//! completes it.
//!
//! Several object directories are built from one tree. A file may change and change back between
//! two builds in one of them. Each directory therefore records the content and time of these files
//! at its last build ([`Tree::date_for`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::Base;
use crate::architecture::Architecture;
use crate::cache::{Cache, digest};
use crate::debian::{self, Archive, Package};
use crate::{Error, Result, tool};

/// An unpacked source tree and the files kept beside it.
pub struct Tree {
    /// The package that it was unpacked from.
    pub package: Package,
    /// The directory of this base at this version.
    pub home: PathBuf,
    /// The sources.
    pub source: PathBuf,
}

/// The suffix, among the pristine contents, of a file that the base does not have.
const ABSENT: &str = ".absent";

/// A file's content and time at the last build in an object directory.
#[derive(Serialize, Deserialize)]
struct TreeState {
    content: String,
    time: SystemTime,
}

impl Tree {
    /// The tree of `base`, fetched and unpacked if need be.
    pub fn open(cache: &Cache, base: &Base) -> Result<Self> {
        let package = Self::package(cache, base)?;
        let key = format!("kernel/{}", package.version);
        let source = cache.entry(&format!("{key}/source"), |dir| {
            // The sources take 1.2 GiB, and an object directory half as much.
            // tar calls it.
            tool::need("xz")?;
            cache.need_mib(4096)?;
            let deb = Archive::open(cache, Architecture::X86, base.suites)?.download(&package, dir)?;
            eprintln!("lab: unpacking {} {}", package.name, package.version);
            let script = format!(
                "set -o pipefail; dpkg-deb --fsys-tarfile '{}' | tar -xO ./usr/src/{}.tar.xz | tar -xJ --strip-components=1",
                deb.display(),
                package.name
            );
            tool::output(Command::new("bash").args(["-c", &script]).current_dir(dir))?;
            fs::remove_file(&deb).map_err(Error::file("remove", &deb))
        })?;
        Ok(Self { home: cache.path(&key), package, source })
    }

    /// The package of `base`.
    pub fn package(cache: &Cache, base: &Base) -> Result<Package> {
        match base.frozen {
            Some(version) => Ok(Package { name: base.package.into(), version: version.into() }),
            None => debian::recorded(cache, base.package, || {
                Archive::open(cache, Architecture::X86, base.suites)?.resolve(base.package)
            }),
        }
    }

    /// Applies exactly `patches`, in this order, to the pristine base.
    pub fn carry(&self, patches: &[PathBuf]) -> Result<()> {
        let touched = self.apply_in_scratch(patches)?;
        let (pristine, scratch) = (self.home.join("pristine"), self.home.join("scratch"));
        let mut known = BTreeSet::new();
        files_below(&pristine, Path::new(""), &mut known)?;
        for path in &touched {
            if !known.contains(path) {
                self.keep_pristine(path)?;
                known.insert(path.clone());
            }
        }
        for path in known {
            let from = if touched.contains(&path) { &scratch } else { &pristine };
            write_if_different(&from.join(&path), &self.source.join(&path))?;
        }
        remove(&scratch)
    }

    /// Sets the times of the files that patches change for a build in `objects`. A file with the
    /// content of that directory's last build gets its old time, any other file the present time.
    pub fn date_for(&self, objects: &Path) -> Result<()> {
        let record = objects.join(".seen");
        let before: Option<BTreeMap<PathBuf, TreeState>> =
            fs::read(&record).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let mut known = BTreeSet::new();
        files_below(&self.home.join("pristine"), Path::new(""), &mut known)?;
        let mut now = BTreeMap::new();
        for path in known {
            let file = self.source.join(&path);
            // A file that neither the base nor these patches have has no time. If a later patch
            // adds it, it is new.
            let Ok(bytes) = fs::read(&file) else {
                now.insert(path, TreeState { content: ABSENT.into(), time: SystemTime::UNIX_EPOCH });
                continue;
            };
            let content = digest([bytes.as_slice()]);
            let time = match before.as_ref().map(|before| before.get(&path)) {
                Some(Some(seen)) if seen.content == content => seen.time,
                // No patch had changed the file at this directory's last build, so its own time
                // says whether one has since.
                Some(None) => modified(&file)?,
                _ => SystemTime::now(),
            };
            let opened = fs::File::options().write(true).open(&file).map_err(Error::file("open", &file))?;
            opened.set_modified(time).map_err(Error::file("date", &file))?;
            now.insert(path, TreeState { content, time });
        }
        // Written before the build: an interrupted build must continue by these times.
        let json = serde_json::to_vec(&now).expect("times and digests are plain data");
        fs::write(&record, json).map_err(Error::file("write", &record))
    }

    /// Applies `patches` without fuzz to copies of the files that they change. Returns the files'
    /// paths.
    fn apply_in_scratch(&self, patches: &[PathBuf]) -> Result<BTreeSet<PathBuf>> {
        let scratch = self.home.join("scratch");
        remove(&scratch)?;
        fs::create_dir_all(&scratch).map_err(Error::file("create", &scratch))?;
        let mut touched = BTreeSet::new();
        for patch in patches {
            let text = fs::read_to_string(patch).map_err(Error::file("read", patch))?;
            for path in paths_in(&text).map_err(|path| outside(patch, &path))? {
                if touched.insert(path.clone()) {
                    let kept = self.home.join("pristine").join(&path);
                    let known = kept.exists() || absent(&kept).exists();
                    let from = if known { kept } else { self.source.join(&path) };
                    if from.exists() {
                        copy(&from, &scratch.join(&path))?;
                    }
                }
            }
            apply(&scratch, patch)?;
        }
        Ok(touched)
    }

    fn keep_pristine(&self, path: &Path) -> Result<()> {
        let (from, to) = (self.source.join(path), self.home.join("pristine").join(path));
        if from.exists() {
            return copy(&from, &to);
        }
        let marker = absent(&to);
        create_parent(&marker)?;
        fs::write(&marker, "").map_err(Error::file("write", &marker))
    }
}

/// Applies one patch below `dir`. The error names the hunks that do not apply.
fn apply(dir: &Path, patch: &Path) -> Result<()> {
    let mut command = Command::new("patch");
    command.args(["-p1", "--fuzz=0", "--batch", "--no-backup-if-mismatch", "--reject-file=-"]);
    // Without --forward, --batch reverts a patch that is already applied and reports success.
    command.args(["--forward", "-d"]);
    let output = command.arg(dir).arg("-i").arg(patch).output();
    let output = output.map_err(|_| Error::Missing { program: "patch".into(), package: "patch".into() })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stdout);
    let mut file = "";
    let mut hunks = Vec::new();
    for line in said.lines() {
        if let Some(name) = line.strip_prefix("patching file ") {
            file = name;
        } else if line.contains("FAILED")
            || line.contains("previously applied")
            || line.contains("can't find file")
        {
            hunks.push(format!("  {file}: {line}"));
        }
    }
    let remedy = if said.contains("previously applied") || said.contains("already exists!") {
        "The base, or a patch before it, has that already: drop it from the series"
    } else {
        "Rebase the series on this version of the base"
    };
    let hunks = if hunks.is_empty() { said.into_owned() } else { hunks.join("\n") };
    Err(Error::Series(format!("{} does not apply without fuzz:\n{hunks}\n{remedy}", patch.display())))
}

/// The files that a patch changes, from its `---` and `+++` lines. The error is a path that would
/// leave the tree.
pub(super) fn paths_in(patch: &str) -> std::result::Result<BTreeSet<PathBuf>, String> {
    let mut paths = BTreeSet::new();
    for line in patch.lines() {
        let Some(name) = line.strip_prefix("--- a/").or_else(|| line.strip_prefix("+++ b/")) else {
            continue;
        };
        let name = name.split('\t').next().unwrap_or(name);
        let path = PathBuf::from(name);
        if !path.components().all(|part| matches!(part, std::path::Component::Normal(_))) {
            return Err(name.to_owned());
        }
        paths.insert(path);
    }
    Ok(paths)
}

pub(super) fn outside(patch: &Path, path: &str) -> Error {
    Error::Series(format!("{} changes {path}, which is outside the tree", patch.display()))
}

fn absent(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ABSENT);
    name.into()
}

/// Collects every file below `root` by its relative path, without the suffix of absent files.
fn files_below(root: &Path, at: &Path, found: &mut BTreeSet<PathBuf>) -> Result<()> {
    let dir = root.join(at);
    let entries = match fs::read_dir(&dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(Error::file("read", &dir))?,
    };
    for entry in entries {
        let entry = entry.map_err(Error::file("read", &dir))?;
        let path = at.join(entry.file_name());
        if entry.path().is_dir() {
            files_below(root, &path, found)?;
        } else {
            let text = path.to_string_lossy();
            found.insert(text.strip_suffix(ABSENT).map_or_else(|| path.clone(), PathBuf::from));
        }
    }
    Ok(())
}

/// Makes `to` the same as `from`, or removes it if `from` does not exist. An equal file keeps its
/// time.
fn write_if_different(from: &Path, to: &Path) -> Result<()> {
    let wanted = if from.exists() { Some(fs::read(from).map_err(Error::file("read", from))?) } else { None };
    let present = fs::read(to).ok();
    match wanted {
        wanted if wanted == present => Ok(()),
        Some(_) => copy(from, to),
        None => fs::remove_file(to).map_err(Error::file("remove", to)),
    }
}

/// Copies through a rename, so that the file is never incomplete. Its time is now.
pub(super) fn copy(from: &Path, to: &Path) -> Result<()> {
    create_parent(to)?;
    let mut name = to.as_os_str().to_owned();
    name.push(".new");
    let new = PathBuf::from(name);
    fs::copy(from, &new).map_err(Error::file("copy", from))?;
    fs::rename(&new, to).map_err(Error::file("write", to))
}

fn create_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(Error::file("create", parent))
}

fn modified(file: &Path) -> Result<SystemTime> {
    fs::metadata(file).and_then(|meta| meta.modified()).map_err(Error::file("read the time of", file))
}

/// Removes a directory or a file, if it exists.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::file("remove", path)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use support::tools::program;

    use super::*;

    const CHANGE: &str = "--- a/dir/one.c\n+++ b/dir/one.c\n@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n";
    const ADD: &str = "--- /dev/null\n+++ b/new.c\n@@ -0,0 +1 @@\n+new\n";

    /// A small tree, and what writes a patch. `None` if patch(1) is not installed, which --setup
    /// does.
    fn tree(name: &str) -> Option<(Tree, impl Fn(&str, &str) -> PathBuf)> {
        if let Err(lacks) = program("patch") {
            eprintln!("skipped: {lacks}");
            return None;
        }
        let home = std::env::temp_dir().join(format!("vellum-tree-{name}-{}", std::process::id()));
        remove(&home).unwrap();
        let source = home.join("source");
        fs::create_dir_all(source.join("dir")).unwrap();
        fs::write(source.join("dir/one.c"), "a\nb\nc\n").unwrap();
        fs::write(source.join("other.c"), "untouched\n").unwrap();
        let patches = home.clone();
        let patch = move |name: &str, text: &str| {
            let path = patches.join(name);
            fs::write(&path, text).unwrap();
            path
        };
        Some((Tree { package: Package { name: "p".into(), version: "1".into() }, home, source }, patch))
    }

    #[test]
    fn a_tree_goes_from_one_series_to_another_and_back() {
        let Some((tree, patch)) = tree("series") else { return };
        let (change, add) = (patch("1.patch", CHANGE), patch("2.patch", ADD));
        let read = |name: &str| fs::read_to_string(tree.source.join(name)).ok();
        tree.carry(&[change.clone(), add]).unwrap();
        assert_eq!((read("dir/one.c").unwrap(), read("new.c")), ("a\nB\nc\n".into(), Some("new\n".into())));
        tree.carry(std::slice::from_ref(&change)).unwrap();
        assert_eq!((read("dir/one.c").unwrap(), read("new.c")), ("a\nB\nc\n".into(), None));
        let time = || fs::metadata(tree.source.join("dir/one.c")).unwrap().modified().unwrap();
        let before = time();
        tree.carry(&[change]).unwrap();
        assert_eq!(time(), before, "an unchanged file was written again");
        tree.carry(&[]).unwrap();
        assert_eq!(read("dir/one.c").unwrap(), "a\nb\nc\n");
        remove(&tree.home).unwrap();
    }

    #[test]
    fn only_what_an_object_directory_has_not_seen_is_new_to_it() {
        let Some((tree, patch)) = tree("dates") else { return };
        let (change, add) = (patch("1.patch", CHANGE), patch("2.patch", ADD));
        let (one, two) = (tree.home.join("one"), tree.home.join("two"));
        fs::create_dir_all(&one).unwrap();
        fs::create_dir_all(&two).unwrap();
        let build = |objects: &Path, patches: &[PathBuf]| {
            tree.carry(patches).unwrap();
            tree.date_for(objects).unwrap();
            modified(&tree.source.join("dir/one.c")).unwrap()
        };
        let pristine = build(&one, &[]);
        let changed = build(&one, std::slice::from_ref(&change));
        assert!(changed > pristine, "another content is new");
        let elsewhere = build(&two, &[]);
        assert!(elsewhere > changed);
        assert_eq!(build(&one, &[change.clone(), add.clone()]), changed, "it saw this content last");
        assert_eq!(build(&two, &[]), elsewhere);
        assert!(build(&one, &[]) > elsewhere, "it saw this content, and another since");
        let new = |objects: &Path, patches: &[PathBuf]| {
            build(objects, patches);
            modified(&tree.source.join("new.c")).ok()
        };
        let other = patch("3.patch", &ADD.replace("+new", "+other"));
        let old = new(&two, std::slice::from_ref(&other));
        new(&one, std::slice::from_ref(&add));
        new(&one, &[]);
        new(&two, &[]);
        assert!(new(&one, &[other]) > old, "it saw the file with another content, then without any");
        remove(&tree.home).unwrap();
    }

    #[test]
    fn a_hunk_that_does_not_apply_is_named_and_changes_nothing() {
        let Some((tree, patch)) = tree("hunk") else { return };
        let wrong = patch("1.patch", &CHANGE.replace("-b", "-x"));
        let error = tree.carry(&[wrong]).unwrap_err().to_string();
        assert!(error.contains("dir/one.c") && error.contains("Hunk #1 FAILED"), "{error}");
        assert_eq!(fs::read_to_string(tree.source.join("dir/one.c")).unwrap(), "a\nb\nc\n");
        let escape = patch("2.patch", "--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n");
        assert!(tree.carry(&[escape]).unwrap_err().to_string().contains("outside the tree"));
        remove(&tree.home).unwrap();
    }

    #[test]
    fn a_patch_that_the_base_has_is_refused_and_not_taken_back() {
        let Some((tree, patch)) = tree("twice") else { return };
        for text in [CHANGE, ADD] {
            let patch = patch("1.patch", text);
            let error = tree.carry(&[patch.clone(), patch]).unwrap_err().to_string();
            assert!(error.contains("has that already"), "{error}");
        }
        remove(&tree.home).unwrap();
    }

    #[test]
    fn fuzz_is_refused() {
        let Some((tree, patch)) = tree("fuzz") else { return };
        let text = "--- a/dir/one.c\n+++ b/dir/one.c\n@@ -1,3 +1,3 @@\n wrong context\n-b\n+B\n c\n";
        assert!(tree.carry(&[patch("1.patch", text)]).is_err());
        remove(&tree.home).unwrap();
    }
}
