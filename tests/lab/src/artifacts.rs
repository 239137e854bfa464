//! What goes into an emulated host: this workspace's programs, linked statically, and Debian's
//! kernels with their modules.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::architecture::Architecture;
use crate::cache::Cache;
use crate::debian::{self, Archive, Package};
use crate::{Error, Result, tool};

/// The workspace that this laboratory was built from.
pub fn workspace() -> PathBuf {
    let lab = std::env::var_os("CARGO_MANIFEST_DIR").map_or(env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    lab.join("../..").canonicalize().unwrap_or(lab)
}

/// Whether the workspace has uncommitted changes.
pub fn is_uncommitted() -> Result<bool> {
    let changes = tool::text(Command::new("git").args(["status", "--porcelain"]).current_dir(workspace()))?;
    Ok(!changes.trim().is_empty())
}

/// The cargo that started this process.
pub fn cargo() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// A program that cargo built.
#[derive(Clone, Debug)]
pub struct Executable {
    /// The target's name: `vellum`, or an integration test's.
    pub name: String,
    /// `bin`, `test`, ….
    pub kind: String,
    /// Whether this is the target's unit tests.
    pub test: bool,
    /// Its path.
    pub path: PathBuf,
    /// Its package's Cargo.toml.
    pub manifest: PathBuf,
}

impl Executable {
    /// Its package's directory, in which cargo runs tests.
    pub fn package(&self) -> &Path {
        self.manifest.parent().unwrap_or(Path::new("/"))
    }
}

/// Runs cargo with `arguments`, as a user would. Returns the executables.
pub fn build(arguments: &[&str]) -> Result<Vec<Executable>> {
    executables(Command::new(cargo()).args(arguments))
}

/// Runs cargo with `arguments` for static x86-64 programs in the profile for beds. Returns the
/// executables.
pub fn build_static(arguments: &[&str]) -> Result<Vec<Executable>> {
    build_for(Architecture::X86, arguments)
}

/// The same for `architecture`.
pub fn build_for(architecture: Architecture, arguments: &[&str]) -> Result<Vec<Executable>> {
    build_in(BED, architecture, arguments)
}

/// The profile of what runs on emulated hosts, and that of `cargo build`.
const BED: &str = "bed";
const DEV: &str = "dev";

fn build_in(profile: &str, architecture: Architecture, arguments: &[&str]) -> Result<Vec<Executable>> {
    let mut command = Command::new(cargo());
    command.args(arguments).args(["--profile", profile, "--quiet", "--target", architecture.target()]);
    executables(&mut command)
}

fn executables(command: &mut Command) -> Result<Vec<Executable>> {
    command
        .arg("--message-format=json-render-diagnostics")
        .current_dir(workspace())
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    let out = command.output().map_err(Error::file("start", "cargo"))?;
    if !out.status.success() {
        return Err(Error::Failed {
            line: tool::line(command),
            status: out.status.to_string(),
            output: "cargo's own messages stand above".into(),
        });
    }
    let messages = String::from_utf8_lossy(&out.stdout);
    Ok(messages.lines().filter_map(|line| executable(&serde_json::from_str(line).ok()?)).collect())
}

fn executable(message: &Value) -> Option<Executable> {
    Some(Executable {
        path: message.get("executable")?.as_str()?.into(),
        name: message["target"]["name"].as_str()?.to_owned(),
        kind: message["target"]["kind"][0].as_str()?.to_owned(),
        test: message["profile"]["test"].as_bool()?,
        manifest: message["manifest_path"].as_str()?.into(),
    })
}

/// The programs that every emulated host has.
#[derive(Clone, Debug)]
pub struct Programs {
    /// `vellum`.
    pub vellum: PathBuf,
    /// The host's first process.
    pub init: PathBuf,
    /// The laboratory itself. It runs `metal`'s tests in the host.
    pub lab: PathBuf,
    /// Linux guest tasks that switch, for comparisons.
    pub guest_tasks: PathBuf,
    /// Measures the cost of a command in a Linux guest.
    pub guest_commands: PathBuf,
}

impl Programs {
    /// Builds them for hosts of x86-64.
    pub fn build() -> Result<Self> {
        Self::build_for(Architecture::X86)
    }

    /// Builds them for hosts of `architecture`.
    pub fn build_for(architecture: Architecture) -> Result<Self> {
        Self::build_in(BED, architecture)
    }

    /// Builds them as `cargo build` does, in less than two thirds of the time, for hosts on which
    /// nothing is measured and little is run.
    pub fn build_to_try(architecture: Architecture) -> Result<Self> {
        Self::build_in(DEV, architecture)
    }

    fn build_in(profile: &str, architecture: Architecture) -> Result<Self> {
        let bins = ["build", "--package", "vellum", "--package", "lab", "--bins"];
        let built = build_in(profile, architecture, &bins)?;
        let path = |name: &str| {
            let found = built.iter().find(|program| program.name == name).map(|program| program.path.clone());
            found.ok_or_else(|| Error::Usage(format!("cargo built no program called {name}")))
        };
        Ok(Self {
            vellum: path("vellum")?,
            init: path("bed-init")?,
            lab: path("lab")?,
            guest_tasks: path("guest-tasks")?,
            guest_commands: path("guest-commands")?,
        })
    }
}

/// All files below `directories` with `wanted` names.
pub fn files_below(directories: &[PathBuf], wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
    let (mut files, mut left) = (Vec::new(), directories.to_vec());
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(&dir).map_err(Error::file("read", &dir))? {
            let entry = entry.map_err(Error::file("read", &dir))?;
            let path = entry.path();
            match entry.file_type().map_err(Error::file("read", &path))? {
                kind if kind.is_dir() => left.push(path),
                kind if kind.is_file() && wanted(&entry.file_name().to_string_lossy()) => files.push(path),
                _ => {}
            }
        }
    }
    Ok(files)
}

/// The file name of an ELF image with symbols.
pub const SYMBOLS: &str = "vmlinux.symbols";

/// An unpacked Debian kernel.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// `linux-image-6.1.0-56-cloud-amd64 6.1.192-2`, as reports name it.
    pub package: String,
    /// The bzImage, or the Image.
    pub image: PathBuf,
    modules: PathBuf,
    dir: PathBuf,
    suites: &'static [&'static str],
}

/// A Debian kernel: the version that the laboratory uses for it, its metapackage without the
/// architecture, and the suites that have it.
type Offered = (&'static str, &'static str, &'static [&'static str]);

const BOOKWORM: &[&str] = &["bookworm", "bookworm-security"];
/// Tests run on these cloud kernels.
const CLOUD: [Offered; 2] =
    [("6.1", "linux-image-cloud", BOOKWORM), ("6.12", "linux-image-6.12-cloud", BOOKWORM)];
/// Newer cloud kernels. Their names are those of the bases that series are for.
const NEWER: [Offered; 2] =
    [("7.2", "linux-image-cloud", &["sid"]), ("7.3", "linux-image-cloud", &["trixie-backports"])];
/// The suite of those of [`SERIES`] that are not in [`CLOUD`].
const BACKPORTS: &[&str] = &["trixie-backports"];
/// The series of which Debian has cloud kernels, the oldest first.
const SERIES: [&str; 10] = ["6.1", "6.12", "6.16", "6.17", "6.18", "6.19", "7.0", "7.1", "7.2", "7.3"];
/// The generic kernel: it has drivers for real machines, so it has a name of its own.
const GENERIC: Offered = (Kernel::GENERIC, "linux-image", BOOKWORM);
/// The prefix of a kernel package's name, before its version.
const IMAGE: &str = "linux-image-";

/// The files of Debian's package `name` for `architecture`, fetched if need be.
pub fn package(cache: &Cache, architecture: Architecture, name: &str) -> Result<PathBuf> {
    // The record of busybox keeps the name it had before other packages existed.
    let record = format!("{}-{}", name.trim_end_matches("-static"), architecture.debian());
    let package =
        debian::recorded(cache, &record, || Archive::open(cache, architecture, BOOKWORM)?.resolve(name))?;
    let entry = format!("debian/{}_{}_{}", package.name, package.version, architecture.debian());
    cache.entry(&entry, |dir| {
        let deb = Archive::open(cache, architecture, BOOKWORM)?.download(&package, dir)?;
        debian::unpack(&deb, dir)?;
        fs::remove_file(&deb).map_err(Error::file("remove", &deb))
    })
}

/// Debian's static busybox for `architecture`. This machine's own may be of another architecture.
pub fn busybox(cache: &Cache, architecture: Architecture) -> Result<PathBuf> {
    Ok(package(cache, architecture, "busybox-static")?.join("bin/busybox"))
}

impl Kernel {
    /// The laboratory's name for Debian's generic kernel.
    pub const GENERIC: &str = "generic-6.1";

    /// The versions that tests run on.
    pub fn versions() -> impl Iterator<Item = &'static str> {
        CLOUD.iter().map(|(version, ..)| *version)
    }

    /// All versions that a host can be asked for.
    pub fn known() -> impl Iterator<Item = &'static str> {
        CLOUD.iter().chain(&NEWER).map(|(version, ..)| *version)
    }

    /// The series of which Debian has cloud kernels, the oldest first.
    pub fn series() -> impl Iterator<Item = &'static str> {
        SERIES.into_iter()
    }

    /// The newest cloud kernel of that series for x86-64, fetched if need be.
    pub fn newest(cache: &Cache, series: &str) -> Result<Self> {
        if CLOUD.iter().any(|(version, ..)| *version == series) {
            return Self::debian(cache, series);
        }
        let package = debian::recorded(cache, &format!("linux-newest-{series}"), || {
            let archive = Archive::open(cache, Architecture::X86, BACKPORTS)?;
            archive.newest(&format!("{IMAGE}{series}."), "-cloud-amd64")
        })?;
        Self::of(cache, Architecture::X86, package, BACKPORTS)
    }

    /// Debian's cloud kernel of that version for x86-64, fetched if need be.
    pub fn debian(cache: &Cache, version: &str) -> Result<Self> {
        Self::debian_for(cache, Architecture::X86, version)
    }

    /// The same for `architecture`.
    pub fn debian_for(cache: &Cache, architecture: Architecture, version: &str) -> Result<Self> {
        let offered = CLOUD.iter().chain(&NEWER).chain([&GENERIC]).find(|(known, ..)| *known == version);
        let &(_, meta, suites) = offered.ok_or_else(|| {
            let known: Vec<&str> = Self::known().collect();
            Error::Usage(format!("Debian has no cloud kernel {version} here: {} are known", known.join(", ")))
        })?;
        let meta = format!("{meta}-{}", architecture.debian());
        let record = match architecture {
            Architecture::X86 => format!("linux-{version}"),
            Architecture::Arm => format!("linux-{version}-{}", architecture.debian()),
        };
        let package = debian::recorded(cache, &record, || {
            Archive::open(cache, architecture, suites)?.resolve_meta(&meta, IMAGE)
        })?;
        Self::of(cache, architecture, package, suites)
    }

    /// The kernel in `package`, fetched if need be.
    fn of(
        cache: &Cache,
        architecture: Architecture,
        package: Package,
        suites: &'static [&'static str],
    ) -> Result<Self> {
        let name = format!("debian/{}_{}", package.name, package.version);
        let tree = cache.entry(&name, |dir| {
            cache.need_mib(800)?;
            let archive = Archive::open(cache, architecture, suites)?;
            let fetch = |package: &Package| -> Result<()> {
                let deb = archive.download(package, dir)?;
                debian::unpack(&deb, dir)?;
                fs::remove_file(&deb).map_err(Error::file("remove", &deb))
            };
            fetch(&package)?;
            // In newer versions this package is empty. Two others have the kernel and its modules.
            let parts: &[&str] =
                if dir.join("boot").is_dir() { &[] } else { &["linux-binary-", "linux-modules-"] };
            parts.iter().try_for_each(|part| {
                fetch(&Package { name: package.name.replacen(IMAGE, part, 1), ..package.clone() })
            })
        })?;
        let only = |dir: &Path, prefix: &str| {
            let entries = fs::read_dir(dir).map_err(Error::file("read", dir))?;
            let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
            let found =
                paths.find(|path| path.file_name().is_some_and(|f| f.to_string_lossy().starts_with(prefix)));
            found.ok_or_else(|| {
                Error::Package(format!(
                    "{} holds no {prefix}…: remove {} and try again",
                    dir.display(),
                    tree.display()
                ))
            })
        };
        // Newer packages have modules below usr, and the newest ones the image beside them.
        let modules = ["lib/modules", "usr/lib/modules"].map(|path| tree.join(path));
        let modules = only(modules.iter().find(|dir| dir.is_dir()).unwrap_or(&modules[0]), "")?;
        let boot = tree.join("boot");
        let image = only(if boot.is_dir() { &boot } else { &modules }, "vmlinuz")?;
        let package = format!("{} {}", package.name, package.version);
        Ok(Self { package, image, modules, dir: tree, suites })
    }

    /// The directory of the unpacked package.
    pub fn package_dir(&self) -> &Path {
        &self.dir
    }

    /// Its ELF image with symbols and unwind tables, from its debug package, fetched if need be.
    /// The rest of that package is ten times as large and is not kept.
    pub fn symbols(&self, cache: &Cache) -> Result<PathBuf> {
        const THERE: &str = "usr/lib/debug/boot";
        let (name, version) = self.package.split_once(' ').unwrap_or((&self.package, ""));
        let package = Package { name: format!("{name}-dbg"), version: version.to_owned() };
        let entry = cache.entry(&format!("debian/{}_{}", package.name, package.version), |dir| {
            cache.need_mib(2048)?;
            let deb = Archive::open(cache, Architecture::X86, self.suites)?.download(&package, dir)?;
            let image = debian::unpack_only(&deb, THERE, "vmlinux-", dir)?;
            let mut objcopy = Command::new(tool::need("objcopy")?);
            // The kernel's own relocations are for KASLR and would mislead a debugger.
            objcopy.args(["--strip-debug", "--keep-section=.debug_frame", "--remove-relocations=*"]);
            tool::output(objcopy.args([&image, &dir.join(SYMBOLS)]))?;
            fs::remove_file(&deb).map_err(Error::file("remove", &deb))?;
            fs::remove_dir_all(dir.join("usr")).map_err(Error::file("remove", dir.join("usr")))
        })?;
        Ok(entry.join(SYMBOLS))
    }

    /// The modules `names` and their dependencies, in load order. Names that this kernel has built
    /// in or lacks are skipped.
    pub fn modules(&self, names: &[&str]) -> Result<Vec<(String, Vec<u8>)>> {
        modules_in(&self.modules.join("kernel"), names)
    }
}

/// The modules `names` below `dir` and their dependencies, in load order. Missing names are
/// skipped.
pub fn modules_in(dir: &Path, names: &[&str]) -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = BTreeMap::new();
    index(dir, &mut files)?;
    let mut loaded = Vec::new();
    for name in names {
        load(&files, name, &mut loaded)?;
    }
    Ok(loaded)
}

fn load(files: &BTreeMap<String, PathBuf>, name: &str, loaded: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    let name = name.replace('-', "_");
    let Some(path) = files.get(&name).filter(|_| !loaded.iter().any(|(done, _)| *done == name)) else {
        return Ok(());
    };
    let image = if path.extension().is_some_and(|extension| extension == "xz") {
        tool::output(Command::new("xz").arg("-dc").arg(path))?
    } else {
        fs::read(path).map_err(Error::file("read", path))?
    };
    for dependency in dependencies(&image) {
        load(files, &dependency, loaded)?;
    }
    loaded.push((name, image));
    Ok(())
}

/// Every module below `dir`, by its name with `_` for `-`.
fn index(dir: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(Error::file("read", dir))? {
        let path = entry.map_err(Error::file("read", dir))?.path();
        if path.is_dir() {
            index(&path, files)?;
        } else if let Some(name) = path.file_name().and_then(|name| name.to_str())
            && let Some((name, "ko" | "ko.xz")) = name.split_once('.')
        {
            files.insert(name.replace('-', "_"), path);
        }
    }
    Ok(())
}

/// A module's dependencies: `depends=` in its .modinfo section. Debian generates modules.dep only
/// at installation.
fn dependencies(image: &[u8]) -> Vec<String> {
    let mark = b"\0depends=";
    let Some(at) = image.windows(mark.len()).position(|window| window == mark) else { return Vec::new() };
    let value = image[at + mark.len()..].split(|&byte| byte == 0).next().unwrap_or_default();
    let names = String::from_utf8_lossy(value).into_owned();
    names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_names_what_it_needs() {
        let image = b"\x7fELF..license=GPL\0depends=kvm,irqbypass\0retpoline=Y\0";
        assert_eq!(dependencies(image), ["kvm", "irqbypass"]);
        assert!(dependencies(b"alias=x\0depends=\0").is_empty());
    }
}
