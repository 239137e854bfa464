//! Debian's packages, downloaded by name and unpacked into the cache, never installed.
//!
//! apt does the work, with a state directory of its own. So another suite than this machine's can
//! be read without root and without changing this machine's lists. The mirror is the one that this
//! machine uses. The version that a metapackage resolves to is recorded, so that a bed stays the
//! same until `cargo lab update`.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::architecture::Architecture;
use crate::cache::{self, Cache};
use crate::{Error, Result, tool};

/// Lists older than this are fetched again before use. Without a network the old lists are used.
const FRESH: Duration = Duration::from_secs(24 * 3600);

/// A file beside the lists. Its mtime is the lists' age.
const STAMP: &str = "updated";

/// A package at a version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its version, exactly.
    pub version: String,
}

/// Some suites of Debian, seen through apt.
pub struct Archive {
    state: PathBuf,
    architecture: Architecture,
    suites: &'static [&'static str],
}

impl Archive {
    /// Opens `suites`. They are read together, and the newest version among them wins.
    pub fn open(cache: &Cache, architecture: Architecture, suites: &'static [&'static str]) -> Result<Self> {
        tool::need("apt-get")?;
        let mut name = format!("apt/{}", suites.join("+"));
        if architecture != Architecture::X86 {
            name = format!("{name}-{}", architecture.debian());
        }
        let state = cache.dir(&name)?;
        let _lock = cache.lock("apt")?;
        for part in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(state.join(part)).map_err(Error::file("create", state.join(part)))?;
        }
        fs::write(state.join("status"), "").map_err(Error::file("create", state.join("status")))?;
        let this = Self { state, architecture, suites };
        this.refresh()?;
        Ok(this)
    }

    /// The current version of `name`.
    pub fn resolve(&self, name: &str) -> Result<Package> {
        let fields = self.show(name)?;
        let version = field(&fields, "Version").ok_or_else(|| {
            Error::Package(format!("apt shows no version of {name} in {}", self.suites.join(", ")))
        })?;
        Ok(Package { name: name.to_owned(), version: version.to_owned() })
    }

    /// The package that the metapackage `name` stands for: its dependency with this prefix.
    pub fn resolve_meta(&self, name: &str, prefix: &str) -> Result<Package> {
        let fields = self.show(name)?;
        let depends = field(&fields, "Depends").unwrap_or_default();
        let target = depends
            .split([',', '|'])
            .filter_map(|dependency| dependency.split_whitespace().next())
            .find(|dependency| dependency.starts_with(prefix))
            .ok_or_else(|| Error::Package(format!("{name} depends on no {prefix}…: it says {depends:?}")))?;
        self.resolve(target)
    }

    /// The package of those called `prefix`, a number, and something that ends with `suffix`, with
    /// the largest number.
    pub fn newest(&self, prefix: &str, suffix: &str) -> Result<Package> {
        let names = tool::text(self.apt("apt-cache").args(["pkgnames", prefix]))?;
        let name = newest_of(&names, prefix, suffix).ok_or_else(|| {
            Error::Package(format!("{} of Debian has no {prefix}N…{suffix}", self.suites.join(", ")))
        })?;
        self.resolve(name)
    }

    /// Downloads `package` into `dir`.
    pub fn download(&self, package: &Package, dir: &Path) -> Result<PathBuf> {
        let what = format!("{}={}", package.name, package.version);
        eprintln!("lab: fetching {what}");
        tool::output(self.apt("apt-get").args(["-q", "download", &what]).current_dir(dir)).map_err(|error| {
            let offered = self.offered(&package.name);
            Error::Package(format!(
                "{what} cannot be fetched:\n{}\nThe archive offers {offered}. Without a network try again later: what \
                 is cached stays; where the version has moved, run `cargo lab update`",
                complaints(error)
            ))
        })?;
        let entries = fs::read_dir(dir).map_err(Error::file("read", dir))?;
        entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
            .ok_or_else(|| {
                Error::Package(format!("apt-get download {what} left no .deb in {}", dir.display()))
            })
    }

    /// Downloads the upstream tarball of a source package into `dir`.
    pub fn download_source(&self, name: &str, dir: &Path) -> Result<PathBuf> {
        eprintln!("lab: fetching the source of {name}");
        let fetched = tool::output(
            self.apt("apt-get").args(["-q", "source", "--download-only", name]).current_dir(dir),
        );
        let entries = fs::read_dir(dir).map_err(Error::file("read", dir))?;
        let tarball = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.file_name().is_some_and(|file| file.to_string_lossy().contains(".orig.tar")));
        // apt verifies each file by itself, and only the tarball is needed. A mirror may lack the
        // others.
        match (tarball, fetched) {
            (Some(tarball), _) => Ok(tarball),
            (None, Err(error)) => {
                Err(Error::Package(format!("the source of {name} cannot be fetched: {error}")))
            }
            (None, Ok(_)) => Err(Error::Package(format!("the source of {name} has no upstream tarball"))),
        }
    }

    /// Every version of `name` in these suites, for error messages.
    pub fn offered(&self, name: &str) -> String {
        let listing = tool::text(self.apt("apt-cache").args(["madison", name])).unwrap_or_default();
        // madison lists a version twice if its source package has it too.
        let mut versions: Vec<&str> = Vec::new();
        for version in listing.lines().filter_map(|line| line.split('|').nth(1)).map(str::trim) {
            if !versions.contains(&version) {
                versions.push(version);
            }
        }
        if versions.is_empty() { "no version of it".into() } else { versions.join(", ") }
    }

    fn show(&self, name: &str) -> Result<String> {
        tool::text(self.apt("apt-cache").args(["show", "--no-all-versions", name])).map_err(|error| {
            Error::Package(format!(
                "{} of Debian has no package {name}, which a newer one may have replaced:\n{}",
                self.suites.join(", "),
                complaints(error)
            ))
        })
    }

    fn refresh(&self) -> Result<()> {
        let stamp = self.state.join(STAMP);
        let age = fs::metadata(&stamp).and_then(|meta| meta.modified()).ok().and_then(|at| {
            // If the clock was set back, the age is unknown, and the lists count as old.
            SystemTime::now().duration_since(at).ok()
        });
        if age.is_some_and(|age| age < FRESH) {
            return Ok(());
        }
        let list = self.state.join("sources.list");
        fs::write(&list, sources(&Mirror::discover()?, self.suites)).map_err(Error::file("write", &list))?;
        eprintln!("lab: reading Debian's lists of {}", self.suites.join(", "));
        // By default, an apt that reaches no server prints an error and exits with 0.
        let update = ["-q", "-o", "APT::Update::Error-Mode=any", "update"];
        match tool::output(self.apt("apt-get").args(update)) {
            Ok(_) => fs::write(&stamp, "").map_err(Error::file("write", &stamp)),
            Err(error) if age.is_some() => {
                eprintln!(
                    "lab: the lists of {} stay as they were:\n{}",
                    self.suites.join(", "),
                    complaints(error)
                );
                Ok(())
            }
            Err(error) => Err(Error::Package(format!(
                "Debian's lists cannot be fetched:\n{}\nCheck the network and the mirror in /etc/apt, or name one with \
                 VELLUM_DEBIAN_MIRROR; what is cached already can be used without",
                complaints(error)
            ))),
        }
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let state = self.state.display();
        for option in [
            format!("Dir::Etc::sourcelist={state}/sources.list"),
            "Dir::Etc::sourceparts=/dev/null".into(),
            // This machine's preferences, pins and installed packages do not apply. Only packages
            // of this architecture count, whatever this machine is.
            format!("APT::Architecture={}", self.architecture.debian()),
            format!("APT::Architectures={}", self.architecture.debian()),
            "APT::Default-Release=".into(),
            "Dir::Etc::preferences=/dev/null".into(),
            "Dir::Etc::preferencesparts=/dev/null".into(),
            format!("Dir::State::status={state}/status"),
            format!("Dir::State::Lists={state}/lists"),
            format!("Dir::Cache={state}/cache"),
            // apt's own user may not be able to write to the cache.
            format!("APT::Sandbox::User={}", std::env::var("USER").unwrap_or_else(|_| "root".into())),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".into(),
            // With apt-file installed, apt also fetches Contents files, and fails while a mirror is
            // being updated.
            "Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false".into(),
            "Acquire::Languages=none".into(),
            // The Release file of an old suite has expired by design.
            "Acquire::Check-Valid-Until=false".into(),
            "Acquire::Retries=2".into(),
        ] {
            command.args(["-o", &option]);
        }
        command.env("LC_ALL", "C.UTF-8");
        command
    }
}

/// apt's error lines, without its command line.
fn complaints(error: Error) -> String {
    let Error::Failed { output, .. } = error else { return error.to_string() };
    let errors: Vec<&str> = output.lines().filter(|line| line.starts_with("E:")).collect();
    if errors.is_empty() { output } else { errors.join("\n") }
}

/// Unpacks a package's files.
pub fn unpack(deb: &Path, to: &Path) -> Result<()> {
    tool::output(Command::new("dpkg-deb").arg("-x").args([deb, to])).map(drop)
}

/// Unpacks only the file of a package in the directory `at` whose name begins with `prefix`.
/// Returns its path.
pub fn unpack_only(deb: &Path, at: &str, prefix: &str, to: &Path) -> Result<PathBuf> {
    let mut files = Command::new("dpkg-deb");
    files.arg("--fsys-tarfile").arg(deb).stdout(Stdio::piped());
    let mut files = files.spawn().map_err(Error::file("start", "dpkg-deb"))?;
    let archive = files.stdout.take().map_or_else(Stdio::null, Stdio::from);
    let mut tar = Command::new(tool::need("tar")?);
    let pattern = format!("./{at}/{prefix}*");
    let unpacked = tool::fed(tar.args(["-x", "--wildcards", "-C"]).arg(to).arg(pattern), archive);
    let read = files.wait().map_err(Error::file("wait for", "dpkg-deb"))?;
    unpacked?;
    if !read.success() {
        return Err(Error::Package(format!("{} cannot be read whole: dpkg-deb: {read}", deb.display())));
    }
    let entries = fs::read_dir(to.join(at)).map_err(Error::file("read", to.join(at)))?;
    let found = entries.filter_map(|entry| Some(entry.ok()?.path())).next();
    found.ok_or_else(|| Error::Package(format!("{} holds no {at}/{prefix}…", deb.display())))
}

/// The recorded package of `name`. If there is no record, `resolve` finds it and it is recorded.
pub fn recorded(cache: &Cache, name: &str, resolve: impl FnOnce() -> Result<Package>) -> Result<Package> {
    cache::recorded(&cache.dir("resolved")?.join(format!("{name}.json")), resolve)
}

/// Removes the records and marks the lists as old. The next use asks Debian again. The lists stay,
/// so that the cache can be used without a network.
pub fn forget(cache: &Cache) -> Result<()> {
    let _lock = cache.lock("apt")?;
    let states = cache.dir("apt")?;
    for state in fs::read_dir(&states).map_err(Error::file("read", &states))?.flatten() {
        let stamp = state.path().join(STAMP);
        match fs::File::options().write(true).open(&stamp) {
            Ok(file) => file.set_modified(SystemTime::UNIX_EPOCH).map_err(Error::file("change", &stamp))?,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(Error::file("open", &stamp)(error)),
        }
    }
    let resolved = cache.path("resolved");
    match fs::remove_dir_all(&resolved) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::file("remove", &resolved)(error)),
        _ => Ok(()),
    }
}

/// The address of the mirror that this machine uses.
pub fn mirror() -> Result<String> {
    Ok(Mirror::discover()?.main)
}

/// Where Debian's archives are.
#[derive(Debug, PartialEq)]
struct Mirror {
    main: String,
    security: String,
}

impl Mirror {
    /// The mirror in this machine's apt sources, or the one in `VELLUM_DEBIAN_MIRROR`.
    fn discover() -> Result<Self> {
        if let Ok(main) = std::env::var("VELLUM_DEBIAN_MIRROR") {
            return Ok(Self::beside(main.trim_end_matches('/')));
        }
        let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
        let value = |key: &str| {
            let line = release.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
            line.map(|value| value.trim_matches('"').to_owned())
        };
        let uris = tool::text(Command::new("apt-get").args(["update", "--print-uris"])).unwrap_or_default();
        match (value("ID").as_deref(), value("VERSION_CODENAME")) {
            (Some("debian"), Some(codename)) => Self::among(&uris, &codename),
            _ => None,
        }
        .ok_or_else(|| {
            Error::Package(
                "no Debian mirror in this machine's apt sources: name one with VELLUM_DEBIAN_MIRROR (its address ends in \
                 /debian), and install debian-archive-keyring"
                    .into(),
            )
        })
    }

    /// Finds the mirror in the output of `apt-get update --print-uris`.
    fn among(uris: &str, codename: &str) -> Option<Self> {
        let base = |suite: &str| {
            let end = format!("/dists/{suite}/InRelease'");
            uris.lines().find_map(|line| {
                let quoted = line.split_whitespace().next()?;
                Some(quoted.strip_prefix('\'')?.strip_suffix(&end)?.to_owned())
            })
        };
        let mut mirror = Self::beside(&base(codename)?);
        if let Some(security) = base(&format!("{codename}-security")) {
            mirror.security = security;
        }
        Some(mirror)
    }

    /// By convention, the security archive is beside the main one.
    fn beside(main: &str) -> Self {
        Self { main: main.to_owned(), security: format!("{main}-security") }
    }
}

fn sources(mirror: &Mirror, suites: &[&str]) -> String {
    let keyring = "/usr/share/keyrings/debian-archive-keyring.gpg";
    let line = |suite: &&str| {
        let base = if suite.ends_with("-security") { &mirror.security } else { &mirror.main };
        format!(
            "deb [signed-by={keyring}] {base} {suite} main\ndeb-src [signed-by={keyring}] {base} {suite} main\n"
        )
    };
    suites.iter().map(line).collect()
}

/// The line with the largest number between `prefix` and a rest that ends with `suffix`.
fn newest_of<'a>(names: &'a str, prefix: &str, suffix: &str) -> Option<&'a str> {
    let number = |name: &str| -> Option<u32> {
        let rest = name.strip_prefix(prefix)?.strip_suffix(suffix)?;
        let end = rest.find(|digit: char| !digit.is_ascii_digit()).unwrap_or(rest.len());
        rest[..end].parse().ok()
    };
    names.lines().filter_map(|name| Some((number(name)?, name))).max().map(|(_, name)| name)
}

fn field<'a>(stanza: &'a str, name: &str) -> Option<&'a str> {
    stanza.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_the_one_this_machine_uses() {
        let uris = "'http://m.example/deb/dists/trixie/InRelease' a 0 \n\
                    'http://m.example/deb/dists/trixie-updates/InRelease' b 0 \n\
                    'http://s.example/sec/dists/trixie-security/InRelease' c 0 \n\
                    'http://m.example/deb/dists/trixie/main/binary-amd64/Packages.xz' d 0 \n";
        let mirror = Mirror::among(uris, "trixie").unwrap();
        assert_eq!(
            mirror,
            Mirror { main: "http://m.example/deb".into(), security: "http://s.example/sec".into() }
        );
        assert_eq!(Mirror::among(uris, "bookworm"), None);
        let list = sources(&mirror, &["sid", "bookworm-security"]);
        assert!(list.contains("] http://m.example/deb sid main\n"), "{list}");
        assert!(list.contains("] http://s.example/sec bookworm-security main\n"), "{list}");
    }

    #[test]
    fn the_newest_is_the_largest_number_and_not_the_last_name() {
        let names = "linux-image-7.0.9+deb13-cloud-amd64\nlinux-image-7.0.13+deb13-cloud-amd64\n\
                     linux-image-7.0.14+deb13-cloud-amd64-dbg\nlinux-image-7.0.15+deb13-amd64\n";
        let newest = |prefix| newest_of(names, prefix, "-cloud-amd64");
        assert_eq!(newest("linux-image-7.0."), Some("linux-image-7.0.13+deb13-cloud-amd64"));
        assert_eq!(newest("linux-image-7."), Some("linux-image-7.0.9+deb13-cloud-amd64"));
        assert_eq!(newest("linux-image-7.1."), None);
    }

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let stanza = "Package: x\nInstalled-Version: 9\nVersion: 1.2-3\nDepends: a (= 1), b | c\n";
        assert_eq!(field(stanza, "Version"), Some("1.2-3"));
        assert_eq!(field(stanza, "Source"), None);
    }
}
