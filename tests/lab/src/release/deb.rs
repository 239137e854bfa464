//! The Debian package: made by cargo-deb, checked by lintian, and installed into a fresh Debian.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{CARGO_DEB, Checkout, HOST, PROFILE, TARGET, find, held, stage, write_files};
use crate::cache::Cache;
use crate::chroot;
use crate::test::setup;
use crate::test::tally::Tally;
use crate::{Error, Result, artifacts, docs, tool};

/// Makes the package in a clone that has the program. `None` if cargo-deb is missing or fails.
pub fn make(cache: &Cache, setup: bool, clone: &Checkout, tally: &mut Tally) -> Result<Option<PathBuf>> {
    let what = "a Debian package";
    if find(cache, "cargo-deb").is_none() && setup {
        eprintln!("lab: release: cargo install cargo-deb");
        let mut cargo = Command::new(artifacts::cargo());
        cargo
            .args(["install", "cargo-deb", "--locked", "--version", CARGO_DEB, "--root"])
            .arg(cache.path("cargo"));
        // Outside the workspace, because its cargo settings are for Vellum's own programs.
        cargo.current_dir("/").env_remove("CARGO_TARGET_DIR").env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1");
        if let Err(error) = tool::output(&mut cargo) {
            tally.show(&format!("lab: release: {error}"));
        }
    }
    let Some(program) = find(cache, "cargo-deb") else {
        let remedy = format!(
            "cargo-deb is not installed: cargo lab release --setup, or cargo install --locked cargo-deb --version {CARGO_DEB}"
        );
        tally.skip(HOST, what, &remedy);
        return Ok(None);
    };
    let Some(mdbook) = docs::installed(cache).or_else(|| setup.then(|| docs::mdbook(cache).ok()).flatten())
    else {
        tally.skip(
            HOST,
            what,
            "mdBook is not in the lab's cache: cargo lab release --setup, or cargo lab docs",
        );
        return Ok(None);
    };
    let mut made = None;
    stage(tally, what, || {
        docs::build(&mdbook, &clone.dir, &clone.dir.join("target/package/book"))?;
        let manifest = clone.dir.join("Cargo.toml");
        let text = fs::read_to_string(&manifest).map_err(Error::file("read", &manifest))?;
        let who = text.lines().find_map(|line| line.strip_prefix("maintainer = ")).unwrap_or_default();
        let date =
            tool::text(Command::new("git").args(["log", "-1", "--format=%aD"]).current_dir(&clone.dir))?;
        write_files(&clone.dir.join("target/package"), who.trim_matches('"'), date.trim())?;
        let cargo = clone.cargo();
        let mut command = Command::new(program);
        command.envs(cargo.get_envs().filter_map(|(key, value)| Some((key, value?)))).current_dir(&clone.dir);
        let said = tool::text(command.args([
            "--no-build",
            "--strip",
            "--locked",
            "--target",
            TARGET,
            "--profile",
            PROFILE,
            "--package",
            "vellum",
        ]))?;
        made = said.lines().map(str::trim).find(|line| line.ends_with(".deb")).map(PathBuf::from);
        held(made.as_ref().is_some_and(|deb| deb.is_file()), || format!("cargo-deb says {said:?}"))
    });
    Ok(made)
}

/// Checks the package with lintian. resources/debian/lintian-overrides explains each permitted
/// error.
pub fn judge(consent: bool, package: &Path, tally: &mut Tally) -> Result<()> {
    if setup::packages(&["lintian"], consent, HOST, tally)? {
        stage(tally, "lintian has no error", || {
            let said = tool::text(
                Command::new("lintian")
                    .args(["--fail-on", "error", "--allow-root", "--tag-display-limit", "0"])
                    .arg(package),
            )?;
            said.lines().for_each(|line| eprintln!("lab: release: lintian: {line}"));
            Ok(())
        });
    }
    Ok(())
}

/// Installs the package in a fresh Debian, tests it there, and removes it.
pub fn install(
    cache: &Cache,
    consent: bool,
    package: &Path,
    scratch: &Path,
    tally: &mut Tally,
) -> Result<()> {
    let what = "installed in a fresh Debian, and removed without a trace";
    if !setup::is_root() {
        tally.skip(HOST, what, "chroot needs root: run it as root");
        return Ok(());
    }
    if !setup::packages(&["mmdebstrap"], consent, HOST, tally)? {
        return Ok(());
    }
    let made = chroot::archive(cache, &["man-db", "bash-completion"]);
    let tar = match made {
        Ok(tar) => tar,
        Err(error) => {
            tally.skip(HOST, what, &format!("no fresh Debian can be made: {error}"));
            return Ok(());
        }
    };
    stage(tally, what, || {
        let root = scratch.join("root");
        chroot::unpack(&tar, &root)?;
        let name = package.file_name().unwrap_or_default();
        let (inside, before) = (Path::new("/").join(name), files(&root)?);
        fs::copy(package, root.join(name)).map_err(Error::file("copy", package))?;
        let said = inside_of(&root, &["dpkg".as_ref(), "-i".as_ref(), inside.as_os_str()])?;
        held(said.contains("kvm"), || format!("dpkg says nothing of the group kvm: {said}"))?;
        let words = |words: &str| inside_of(&root, &words.split(' ').map(OsStr::new).collect::<Vec<_>>());
        let version = words("vellum --version")?;
        held(version.starts_with("vellum "), || version)?;
        for (page, says) in
            [("vellum", "SYNOPSIS"), ("vellum-run", "hugetlb"), ("vellum-fleet-merge", "SYNOPSIS")]
        {
            let shown = words(&format!("man -P cat {page}"))?;
            held(shown.contains(says), || format!("man {page} shows no {says}: {shown}"))?;
        }
        let bash = "source /usr/share/bash-completion/completions/vellum && complete -p vellum";
        inside_of(&root, &["bash".as_ref(), "-ec".as_ref(), bash.as_ref()])?;
        let listed = words("dpkg -L vellum")?;
        for file in
            ["/usr/bin/vellum", "/usr/share/vellum/report.schema.json", "/usr/share/doc/vellum/CHANGELOG.md"]
        {
            held(listed.lines().any(|line| line == file), || {
                format!("{file} is not in the package: {listed}")
            })?;
        }
        words("dpkg --purge vellum")?;
        fs::remove_file(root.join(name)).map_err(Error::file("remove", &root))?;
        let after = files(&root)?;
        let left: Vec<_> = after.symmetric_difference(&before).collect();
        held(left.is_empty(), || format!("what has come or gone: {left:?}"))
    });
    Ok(())
}

/// Runs a command in the fresh Debian by chroot. Returns both of its streams.
fn inside_of(root: &Path, words: &[&OsStr]) -> Result<String> {
    let mut command = Command::new("chroot");
    command.arg(root).args(words).env_clear();
    command.envs([
        ("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
        ("LC_ALL", "C.UTF-8"),
        ("DEBIAN_FRONTEND", "noninteractive"),
    ]);
    let output = command.output().map_err(Error::file("start", "chroot"))?;
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    held(output.status.success(), || {
        format!("`{}` in a fresh Debian: {}: {said}", tool::line(&command), output.status)
    })?;
    Ok(said)
}

/// All files and directories, without those in which dpkg and man record their own history: dpkg's
/// backups and log, man's index.
fn files(root: &Path) -> Result<BTreeSet<PathBuf>> {
    const KEPT: [&str; 5] = [
        "var/lib/dpkg/status-old",
        "var/lib/dpkg/diversions-old",
        "var/lib/dpkg/lock",
        "var/log",
        "var/cache/man",
    ];
    let mut all = BTreeSet::new();
    let mut open = vec![root.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).map_err(Error::file("read", &dir))? {
            let path = entry.map_err(Error::file("read", &dir))?.path();
            let name = path.strip_prefix(root).unwrap_or(&path).to_owned();
            if KEPT.iter().any(|kept| name.starts_with(kept)) {
                continue;
            }
            if path.is_dir() && !path.is_symlink() {
                open.push(path);
            }
            all.insert(name);
        }
    }
    Ok(all)
}
