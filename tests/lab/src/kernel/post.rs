//! `cargo lab post`: makes mails of a series for `git send-email` and `git am`.
//!
//! The patches in `kernel-patches/` have no author. Whoever posts them names themselves and is
//! responsible for them. This module adds the rest of a mail: the recipients from the kernel's
//! MAINTAINERS, the base commit, and, before more than one patch, a cover letter from the file
//! `COVER` beside them (its subject, a blank line, its text).
//!
//! `b4 prep` and `b4 send` do this for commits on a branch of a kernel clone. They cannot start
//! from files without an author on top of a Debian source package, in a series that names those
//! before it. b4 runs checkpatch and get_maintainer, but leaves to its user what this command
//! requires: that checkpatch finds nothing, and that `git am` takes the mails at the base's tag.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::check;
use super::report;
use super::series::Series;
use super::tree::{self, Tree};
use crate::cache::Cache;
use crate::{Error, Result, tool};

/// Who posts, and with which options.
pub struct Poster<'a> {
    /// `Name <address>`.
    pub from: &'a str,
    /// Whether to add a sign-off.
    pub sign_off: bool,
    /// A clone of the kernel's repository that has the base's tag.
    pub linux: Option<&'a Path>,
    /// Whether the mails ask for comments only (RFC).
    pub rfc: bool,
    /// The series' version. 1 is not shown.
    pub version: u32,
}

impl Poster<'_> {
    /// `PATCH`, `RFC PATCH` or `PATCH v2`.
    fn prefix(&self) -> String {
        let rfc = if self.rfc { "RFC " } else { "" };
        let version = if self.version > 1 { format!(" v{}", self.version) } else { String::new() };
        format!("{rfc}PATCH{version}")
    }
}

/// Writes the mails of `series` into `out`, after the kernel's own scripts have accepted it.
pub fn post(cache: &Cache, series: &Series, poster: &Poster, out: &Path) -> Result<()> {
    if !is_address(poster.from) {
        return Err(Error::Usage(format!("--from {}: the form is 'Name <address>'", poster.from)));
    }
    if let Some(commit) = &series.about.upstream {
        return Err(Error::Usage(format!(
            "{}/{} is mainline's {commit}: it is not posted. Ask stable@vger.kernel.org to take that commit, as \
             Documentation/process/stable-kernel-rules.rst says (option 2)",
            series.base.name, series.name
        )));
    }
    let tree = Tree::open(cache, series.base)?;
    let tag = tag(&tree.package.version);
    let scripts = poster.linux.unwrap_or(&tree.source);
    let base = poster.linux.map(|linux| commit(linux, &tag)).transpose()?;
    check::applies(cache, &tree, series)?;
    check::checkpatch(scripts, series, &["--strict"])?;

    fs::create_dir_all(out).map_err(Error::file("create", out))?;
    if fs::read_dir(out).map_err(Error::file("read", out))?.next().is_some() {
        return Err(Error::Usage(format!(
            "--out {}: has files already; name a new directory",
            out.display()
        )));
    }
    let mut recipients = recipients(scripts, &series.patches)?;
    let (authors, unknown) = authors_of_fixed(poster.linux, &series.patches)?;
    let [to, cc] = &mut recipients;
    cc.extend(authors.into_iter().filter(|who| !to.contains(who)));
    cc.dedup();
    for fixed in unknown {
        println!("{}: Cc lacks the author of {fixed}: --linux names no clone that has it", series.name);
    }
    for tree in trees(scripts, &series.patches)? {
        println!("{}: {tree} is a tree of its maintainers: base it there before it is sent", series.name);
    }
    let mut mails = Vec::new();
    for patch in &series.patches {
        let text = fs::read_to_string(patch).map_err(Error::file("read", patch))?;
        let text = addressed(&text, poster, &recipients)
            .ok_or_else(|| Error::Series(format!("{} is no mail of git format-patch", patch.display())))?;
        let mail = out.join(patch.file_name().expect("a patch is a file"));
        write(&mail, &text)?;
        mails.push(mail);
    }
    let (stat, changes) = match poster.linux {
        Some(linux) => {
            let made = applied(linux, &tag, &mails)?;
            report(&series.name, &format!("git am takes the {} patches on {tag}", mails.len()));
            made
        }
        None => {
            let made = applied_to_debians(cache, &tree, series, &tag, &mails)?;
            let (count, version) = (mails.len(), &tree.package.version);
            report(
                &series.name,
                &format!(
                    "git am takes the {count} patches on the files of Debian's {version} that they touch"
                ),
            );
            println!(
                "{}: no base-commit is in the mails: a clone is needed that has {tag} (--linux DIR, after git clone \
                 --depth 1 --branch {tag} of the stable tree)",
                series.name
            );
            made
        }
    };
    for (mail, change) in mails.iter().zip(&changes) {
        let mut text = fs::read_to_string(mail).map_err(Error::file("read", mail))?;
        text = with_change(&text, change)
            .ok_or_else(|| Error::Series(format!("{} changes nothing", mail.display())))?;
        if let (Some(base), 1) = (&base, mails.len()) {
            text.push_str(&format!("\nbase-commit: {base}\n"));
        }
        write(mail, &text)?;
    }
    if mails.len() > 1 {
        let cover = cover_letter(series, poster, &recipients, &stat, base.as_deref())?;
        mails.push(out.join("0000-cover-letter.patch"));
        write(&mails[mails.len() - 1], &cover)?;
    }
    println!("{}: {} mails: git send-email {}/*.patch", series.name, mails.len(), out.display());
    Ok(())
}

/// `Name <user@host>`, the form that git accepts.
fn is_address(from: &str) -> bool {
    from.strip_suffix('>').and_then(|from| from.split_once(" <")).is_some_and(|(name, address)| {
        !name.trim().is_empty() && address.contains('@') && !address.contains(' ')
    })
}

/// `v7.2.13` of `7.2.13-1`.
fn tag(version: &str) -> String {
    format!("v{}", version.split('-').next().unwrap_or(version))
}

/// The commit of `tag` in `linux`.
fn commit(linux: &Path, tag: &str) -> Result<String> {
    let name = format!("{tag}^{{commit}}");
    let hash = tool::text(git(linux).args(["rev-parse", "--verify", "--quiet", &name])).map_err(|_| {
        Error::Usage(format!("--linux {}: no repository that has the tag {tag}", linux.display()))
    })?;
    Ok(hash.trim().to_owned())
}

/// The committer of patches that are applied here. The name does not get into a mail.
const COMMITTER: [&str; 4] = ["-c", "user.name=lab", "-c", "user.email=lab@localhost"];

fn git(repository: &Path) -> Command {
    let mut git = Command::new("git");
    git.arg("-C").arg(repository);
    git
}

/// The To and Cc recipients: maintainers, then reviewers and lists, each once, in the script's
/// order.
fn recipients(source: &Path, patches: &[PathBuf]) -> Result<[Vec<String>; 2]> {
    let ask = |kinds: [&str; 3]| -> Result<Vec<String>> {
        let mut perl = Command::new("perl");
        perl.arg("scripts/get_maintainer.pl").args(["--norolestats", "--nogit", "--nogit-fallback"]);
        perl.args(kinds).args(patches).current_dir(source);
        let said = tool::text(&mut perl)?;
        Ok(said.lines().map(str::trim).filter(|line| line.contains('@')).map(str::to_owned).collect())
    };
    let to = ask(["--m", "--nor", "--nol"])?;
    let mut cc = ask(["--nom", "--r", "--l"])?;
    cc.retain(|who| !to.contains(who));
    Ok([to, cc])
}

/// The maintainers' trees for these files, without Linus Torvalds's.
fn trees(source: &Path, patches: &[PathBuf]) -> Result<Vec<String>> {
    let mut perl = Command::new("perl");
    perl.arg("scripts/get_maintainer.pl").args(["--norolestats", "--nogit", "--nogit-fallback", "--scm"]);
    // The script requires that people are asked for too.
    perl.args(["--m", "--nor", "--nol"]).args(patches).current_dir(source);
    let said = tool::text(&mut perl)?;
    // A tree that matches by a keyword has the keyword appended.
    let urls = said.lines().filter_map(|line| line.trim().strip_prefix("git ")?.split(":Keyword:").next());
    Ok(urls.filter(|url| !url.contains("/torvalds/")).map(str::to_owned).collect())
}

/// The authors of the commits in `Fixes:` that `linux` has, each once, and the names of the other
/// commits.
fn authors_of_fixed(linux: Option<&Path>, patches: &[PathBuf]) -> Result<(Vec<String>, Vec<String>)> {
    let mut fixed = BTreeSet::new();
    for patch in patches {
        let text = fs::read_to_string(patch).map_err(Error::file("read", patch))?;
        let message = text.split("\n---\n").next().unwrap_or_default();
        fixed.extend(message.lines().filter_map(|line| line.strip_prefix("Fixes: ")).map(str::to_owned));
    }
    let (mut authors, mut unknown) = (Vec::new(), Vec::new());
    for name in fixed {
        let hash = name.split_whitespace().next().unwrap_or_default();
        let author = linux.and_then(|linux| {
            tool::text(git(linux).args(["log", "-1", "--format=%aN <%aE>", hash, "--"])).ok()
        });
        match author.map(|author| author.trim().to_owned()).filter(|author| is_address(author)) {
            Some(author) if authors.contains(&author) => {}
            Some(author) => authors.push(author),
            None => unknown.push(name),
        }
    }
    Ok((authors, unknown))
}

/// The From, To and Cc headers.
fn headers(from: &str, [to, cc]: &[Vec<String>; 2]) -> String {
    let mut text = format!("From: {from}\n");
    for (name, who) in [("To", to), ("Cc", cc)] {
        if !who.is_empty() {
            text.push_str(&format!("{name}: {}\n", who.join(",\n ")));
        }
    }
    text
}

/// A patch with its headers and, if asked for, a sign-off.
fn addressed(patch: &str, poster: &Poster, recipients: &[Vec<String>; 2]) -> Option<String> {
    let (first, rest) = patch.split_once('\n').filter(|(first, _)| first.starts_with("From "))?;
    let (message, change) = rest.split_once("\n---\n")?;
    let message = &message.replacen("Subject: [PATCH", &format!("Subject: [{}", poster.prefix()), 1);
    let sign = if poster.sign_off { sign_off(message, poster.from) } else { String::new() };
    Some(format!("{first}\n{}{message}\n{sign}---\n{change}", headers(poster.from, recipients)))
}

/// The sign-off line, after a blank line unless a trailer precedes it.
fn sign_off(message: &str, from: &str) -> String {
    let last = message.lines().next_back().unwrap_or_default();
    let trailer = last.split_once(": ").is_some_and(|(name, _)| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphabetic() || c == '-')
    });
    format!("{}Signed-off-by: {from}\n", if trailer { "" } else { "\n" })
}

fn cover_letter(
    series: &Series,
    poster: &Poster,
    recipients: &[Vec<String>; 2],
    stat: &str,
    base: Option<&str>,
) -> Result<String> {
    let path = series.patches[0].with_file_name("COVER");
    let cover = fs::read_to_string(&path).map_err(Error::file("read", &path))?;
    let (subject, text) = cover
        .split_once("\n\n")
        .ok_or_else(|| Error::Series(format!("{}: its subject, a blank line, its text", path.display())))?;
    let mut first = String::new();
    let mut titles = String::new();
    for patch in &series.patches {
        let mail = fs::read_to_string(patch).map_err(Error::file("read", patch))?;
        if first.is_empty() {
            first = mail.lines().next().unwrap_or_default().to_owned();
        }
        titles.push_str(&format!("  {}\n", title(&mail)));
    }
    let base = base.map_or(String::new(), |base| format!("\nbase-commit: {base}\n"));
    let count = series.patches.len();
    Ok(format!(
        "{first}\n{}Subject: [{} 0/{count}] {subject}\n\n{}\n\n{titles}\n{stat}{base}",
        headers(poster.from, recipients),
        poster.prefix(),
        text.trim_end()
    ))
}

/// A mail's subject with folded lines joined, without the prefix in brackets.
fn title(mail: &str) -> String {
    let mut lines = mail.lines().skip_while(|line| !line.starts_with("Subject: "));
    let mut title = lines.next().unwrap_or_default()["Subject: ".len()..].to_owned();
    for line in lines.take_while(|line| line.starts_with(' ')) {
        title.push_str(line);
    }
    title.split_once("] ").map_or(title.clone(), |(_, title)| title.to_owned())
}

/// `mail` with `change`, as git prints it, instead of its own. A hunk of a series may have less
/// context than git's three lines, so that it applies with another series and without.
fn with_change(mail: &str, change: &str) -> Option<String> {
    let (before, _) = mail.split_once("\ndiff --git ")?;
    Some(format!("{before}\n{change}"))
}

/// Applies the mails to `tag` with git in a work tree of its own. Returns the diffstat of all, and
/// the change of each.
fn applied(linux: &Path, tag: &str, mails: &[PathBuf]) -> Result<(String, Vec<String>)> {
    let mails: Vec<PathBuf> = mails.iter().map(|mail| absolute(mail)).collect::<Result<_>>()?;
    let at = mails[0].with_file_name("tree");
    tool::output(
        git(linux).args(["worktree", "add", "--quiet", "--detach", "--no-checkout"]).arg(&at).arg(tag),
    )?;
    let made = (|| {
        // The work tree needs only the files that the patches touch.
        tool::output(git(&at).args(["sparse-checkout", "set", "--no-cone", "/Makefile"]))?;
        tool::output(git(&at).args(["checkout", "--quiet"]))?;
        tool::output(git(&at).args(COMMITTER).arg("am").args(&mails))?;
        let changes = (0..mails.len()).rev().map(|back| {
            let [from, to] = [back + 1, back].map(|back| format!("HEAD~{back}"));
            // A user's own configuration could print another form.
            tool::text(git(&at).args(["diff-tree", "-p", "--no-ext-diff", "--unified=3", &from, &to]))
        });
        let changes = changes.collect::<Result<_>>()?;
        Ok((tool::text(git(&at).args(["diff", "--stat", "--summary", tag, "HEAD"]))?, changes))
    })();
    let removed = tool::output(git(linux).args(["worktree", "remove", "--force"]).arg(&at));
    made.and_then(|made| removed.map(|_| made))
}

/// The same in a new repository with the files that the patches touch, from Debian's source.
fn applied_to_debians(
    cache: &Cache,
    tree: &Tree,
    series: &Series,
    tag: &str,
    mails: &[PathBuf],
) -> Result<(String, Vec<String>)> {
    let at = absolute(mails[0].parent().unwrap_or(Path::new(".")))?.join("linux");
    fs::create_dir_all(&at).map_err(Error::file("create", &at))?;
    let made = (|| {
        {
            let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
            tree.carry(&[])?;
            let mut files = BTreeSet::from([PathBuf::from("Makefile")]);
            for patch in &series.patches {
                let text = fs::read_to_string(patch).map_err(Error::file("read", patch))?;
                files.extend(tree::paths_in(&text).map_err(|path| tree::outside(patch, &path))?);
            }
            for file in files {
                let (from, to) = (tree.source.join(&file), at.join(&file));
                // A file that a patch adds does not exist yet.
                if from.is_file() {
                    tree::copy(&from, &to)?;
                }
            }
        }
        tool::output(git(&at).args(["init", "--quiet"]))?;
        tool::output(git(&at).args(["add", "--all"]))?;
        tool::output(git(&at).args(COMMITTER).args(["commit", "--quiet", "-m", tag]))?;
        tool::output(git(&at).args(["tag", tag]))?;
        applied(&at, tag, mails)
    })();
    let removed = tree::remove(&at);
    made.and_then(|made| removed.map(|()| made))
}

fn absolute(path: &Path) -> Result<PathBuf> {
    path.canonicalize().map_err(Error::file("find", path))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(Error::file("write", path))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const PATCH: &str = "From 0000 Mon Sep 17 00:00:00 2001\nDate: x\nSubject: [PATCH 2/3] KVM: A title that is\n folded\n\n\
                         Why.\n\nCc: stable@vger.kernel.org\n---\n f | 1 +\n\ndiff --git a/f b/f\n";

    fn poster(sign_off: bool) -> Poster<'static> {
        Poster { from: "A Name <a@b.org>", sign_off, linux: None, rfc: false, version: 1 }
    }

    #[test]
    fn a_mail_says_from_whom_and_to_whom() {
        let to = [vec!["x@y".to_owned()], vec!["list@z".to_owned(), "w@z".to_owned()]];
        let mail = addressed(PATCH, &poster(true), &to).unwrap();
        let head = "From 0000 Mon Sep 17 00:00:00 2001\nFrom: A Name <a@b.org>\nTo: x@y\nCc: list@z,\n w@z\nDate: x\n";
        assert!(mail.starts_with(head), "{mail}");
        assert!(
            mail.contains("stable@vger.kernel.org\nSigned-off-by: A Name <a@b.org>\n---\n f | 1 +"),
            "{mail}"
        );
        assert!(!addressed(PATCH, &poster(false), &to).unwrap().contains("Signed-off-by"));
        assert_eq!(title(&mail), "KVM: A title that is folded");
        assert!(addressed("no mail", &poster(false), &to).is_none());
    }

    #[test]
    fn a_mail_says_what_it_asks_for_and_which_version_it_is() {
        let subject = |rfc, version| {
            let mail =
                addressed(PATCH, &Poster { rfc, version, ..poster(false) }, &Default::default()).unwrap();
            mail.lines().find(|line| line.starts_with("Subject: ")).unwrap().to_owned()
        };
        assert_eq!(subject(false, 1), "Subject: [PATCH 2/3] KVM: A title that is");
        assert_eq!(subject(true, 1), "Subject: [RFC PATCH 2/3] KVM: A title that is");
        assert_eq!(subject(false, 2), "Subject: [PATCH v2 2/3] KVM: A title that is");
        assert_eq!(subject(true, 3), "Subject: [RFC PATCH v3 2/3] KVM: A title that is");
    }

    #[test]
    fn the_author_of_what_is_fixed_gets_a_copy_if_the_clone_has_it() {
        let home = std::env::temp_dir().join(format!("vellum-fixes-{}", std::process::id()));
        let _ = fs::remove_dir_all(&home);
        fs::create_dir_all(&home).unwrap();
        let git = |args: &[&str]| {
            let mut git = git(&home);
            git.args(["-c", "user.name=An Author", "-c", "user.email=n@m.org"]).args(args);
            tool::text(&mut git).unwrap()
        };
        git(&["init", "--quiet"]);
        git(&["commit", "--quiet", "--allow-empty", "-m", "one"]);
        let hash = git(&["rev-parse", "HEAD"])[..12].to_owned();
        let patch = home.join("0001-x.patch");
        let text = format!(
            "From 0\nSubject: [PATCH] x\n\nWhy.\n\nFixes: {hash} (\"one\")\nFixes: 0123456789ab (\"two\")\n---\nFixes: no\n"
        );
        fs::write(&patch, text).unwrap();
        let (authors, unknown) = authors_of_fixed(Some(&home), std::slice::from_ref(&patch)).unwrap();
        assert_eq!(
            (authors, unknown),
            (vec!["An Author <n@m.org>".to_owned()], vec!["0123456789ab (\"two\")".to_owned()])
        );
        let (authors, unknown) = authors_of_fixed(None, &[patch]).unwrap();
        assert_eq!((authors.len(), unknown.len()), (0, 2));
        fs::remove_dir_all(&home).unwrap();
    }

    #[test]
    fn a_sign_off_stands_with_the_trailers_or_alone() {
        assert_eq!(sign_off("Why: it is so.\n\nFixes: 1234", "n"), "Signed-off-by: n\n");
        assert_eq!(sign_off("Why.\n\nIt costs: nothing, as\nwas said.", "n"), "\nSigned-off-by: n\n");
    }

    #[test]
    fn who_posts_has_a_name_and_an_address() {
        assert!(is_address("A Name <a@b.org>"));
        for wrong in ["a@b.org", "A Name", " <a@b.org>", "A Name <b>", "A Name <a@b.org> x"] {
            assert!(!is_address(wrong), "{wrong}");
        }
        assert_eq!(tag("7.2.13-1"), "v7.2.13");
        assert_eq!(tag("6.12.117-1~deb12u1"), "v6.12.117");
    }

    #[test]
    fn git_takes_the_mails_on_the_tag_and_not_elsewhere() {
        let home = std::env::temp_dir().join(format!("vellum-post-{}", std::process::id()));
        let _ = fs::remove_dir_all(&home);
        let linux = home.join("linux");
        fs::create_dir_all(&linux).unwrap();
        let git = |args: &[&str]| {
            let mut git = git(&linux);
            git.args(["-c", "user.name=n", "-c", "user.email=n@m"]).args(args);
            tool::text(&mut git).unwrap()
        };
        git(&["init", "--quiet"]);
        fs::write(linux.join("f"), "1\n2\n3\na\n5\n").unwrap();
        git(&["add", "f"]);
        git(&["commit", "--quiet", "-m", "one"]);
        git(&["tag", "v1.2.3"]);
        fs::write(linux.join("f"), "1\n2\n3\nb\n5\n").unwrap();
        git(&["commit", "--quiet", "-am", "two"]);
        git(&["tag", "v1.2.4"]);
        let change = "From 0000 Mon Sep 17 00:00:00 2001\nSubject: [PATCH] x\n\nWhy.\n---\n f | 2 +-\n\n\
                      diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -3,3 +3,3 @@\n 3\n-a\n+c\n 5\n";
        let mail = home.join("0001-x.patch");
        let mailed = addressed(change, &poster(false), &Default::default()).unwrap();
        fs::write(&mail, mailed).unwrap();
        let mails = [mail];
        assert_eq!(commit(&linux, "v1.2.3").unwrap().len(), 40);
        assert!(commit(&linux, "v1.2.5").unwrap_err().to_string().contains("v1.2.5"));
        let (stat, changes) = applied(&linux, "v1.2.3", &mails).unwrap();
        assert!(stat.contains("1 file changed, 1 insertion(+), 1 deletion(-)"), "{stat}");
        let whole = with_change(&fs::read_to_string(&mails[0]).unwrap(), &changes[0]).unwrap();
        assert!(whole.contains("\n f | 2 +-\n\ndiff --git a/f b/f\n"), "{whole}");
        assert!(whole.ends_with("\n@@ -1,5 +1,5 @@\n 1\n 2\n 3\n-a\n+c\n 5\n"), "{whole}");
        assert!(applied(&linux, "v1.2.4", &mails).is_err());
        assert_eq!(git(&["worktree", "list"]).lines().count(), 1, "a work tree was left");

        // git removes no work tree that is locked.
        let hook = linux.join(".git/hooks/applypatch-msg");
        fs::create_dir_all(hook.parent().unwrap()).unwrap();
        fs::write(&hook, "#!/bin/sh\ngit worktree lock .\necho the hook refuses >&2\nexit 1\n").unwrap();
        fs::set_permissions(&hook, fs::Permissions::from_mode(0o755)).unwrap();
        let error = applied(&linux, "v1.2.3", &mails).unwrap_err().to_string();
        assert!(error.contains("the hook refuses"), "the error of the removal hides git am's: {error}");
        fs::remove_dir_all(&home).unwrap();
    }
}
