//! Builds an image: sources, configuration, make. The image is kept under a key of all its inputs.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use vellum::session::progress::Heartbeat;

use super::series::{self, Series};
use super::tree::Tree;
use super::variants::{DEBUG, EXPLORE, EXPLORE_ARM, GUEST, MODULES, VARIANTS};
use super::{Base, CROSS_PROGRAMS, PROGRAMS};
use crate::architecture::Architecture;
use crate::cache::{Cache, digest};
use crate::hosts::doctor;
use crate::hosts::{Emulated, HostKernel, Request};
use crate::{Error, Result, artifacts, tool};

/// One version of gcc for all kernels, because another version would change results.
pub const COMPILER: &str = "gcc-12";

/// A built kernel.
#[derive(Clone, Debug)]
pub struct Image {
    /// `5.10.223-1+pte-list-desc`, as reports name it.
    pub label: String,
    /// Its architecture.
    pub architecture: Architecture,
    /// Holds `bzImage` (on Arm: `Image`), `vmlinux`, `config`, `label` and, with the variant
    /// [`MODULES`], `modules`.
    pub dir: PathBuf,
    /// `5.10.223-1/pte-list-desc-KEY`: results about the image are cached under this name.
    pub name: String,
}

impl Image {
    /// The file that boots.
    pub fn file(&self) -> PathBuf {
        self.dir.join(target(self.architecture))
    }

    /// The parts of its build tree that a guest's launcher looks for, if the variant is [`GUEST`].
    pub fn tree(&self) -> PathBuf {
        self.dir.join("tree")
    }

    /// A host that boots it, of the bed for its architecture.
    pub fn host(&self) -> Request {
        Request { host: Emulated::of(self.architecture), ..Request::new(HostKernel::Image(self.file())) }
    }
}

/// The target of make, and the file that it makes below `arch/NAME/boot`.
pub fn target(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::X86 => "bzImage",
        Architecture::Arm => "Image",
    }
}

/// A configuration: the fragments to merge, and their object directory.
pub struct Config {
    architecture: Architecture,
    name: String,
    fragments: Vec<PathBuf>,
    /// The fragments of which every line must be in force.
    asked: Vec<PathBuf>,
}

impl Config {
    /// The configuration of `base` for x86, with `variant` (one of [`VARIANTS`]) on top. It
    /// includes this base's own fragments for the variant and for measurements.
    pub fn new(base: &Base, variant: Option<&str>) -> Result<Self> {
        Self::new_for(Architecture::X86, base, variant)
    }

    /// The same for `architecture`.
    pub fn new_for(architecture: Architecture, base: &Base, variant: Option<&str>) -> Result<Self> {
        let dir = directory();
        if let Some(unknown) = variant.filter(|variant| !VARIANTS.contains(variant)) {
            return Err(Error::Usage(format!("--variant {unknown}: {} are known", VARIANTS.join(", "))));
        }
        if let Some(lacking) = variant.filter(|variant| !Self::known(base, variant)) {
            let known: Vec<&str> =
                VARIANTS.into_iter().filter(|variant| Self::known(base, variant)).collect();
            return Err(Error::Usage(format!(
                "--variant {lacking}: {} has {} alone (resources/kernel)",
                base.name,
                known.join(", ")
            )));
        }
        // Neither a kernel that checks itself nor one in user space is measured.
        let measured = (!matches!(variant, Some(DEBUG | EXPLORE | EXPLORE_ARM))).then_some("measured");
        let mut fragments = Vec::new();
        let mut asked = Vec::new();
        let own = architecture.kernel();
        for part in [own].into_iter().chain(measured).chain(variant) {
            let of_part = fragments_of(&dir, part, base);
            // Fragments of an architecture contain symbols that only some bases have.
            asked.extend((part != own).then(|| of_part.clone()).into_iter().flatten());
            fragments.extend(of_part);
        }
        let name = variant.map_or(own.to_owned(), |variant| format!("{own}-{variant}"));
        Ok(Self { architecture, name, fragments, asked })
    }

    /// Whether `base` has the variant: whether a fragment exists for it.
    pub fn known(base: &Base, variant: &str) -> bool {
        !fragments_of(&directory(), variant, base).is_empty()
    }

    /// Lines of [`Self::asked`] that a kernel's configuration lacks. A debug kernel without its
    /// checks would find nothing.
    fn missing(&self, dotconfig: &str) -> Result<Vec<String>> {
        let read = |path: &PathBuf| fs::read_to_string(path).map_err(Error::file("read", path));
        let texts = self.asked.iter().map(read).collect::<Result<Vec<_>>>()?;
        let wanted = in_the_end(texts.iter().flat_map(|text| text.lines()));
        Ok(wanted.into_iter().filter(|line| !in_force(line, dotconfig)).map(str::to_owned).collect())
    }

    /// The object directory of this configuration. A changed configuration gets another directory,
    /// because a change would rebuild all objects, and changing it back would do so again.
    pub fn objects(&self, tree: &Tree) -> Result<PathBuf> {
        let text = self.text()?;
        Ok(tree.home.join(format!("build-{}-{}", self.name, digest([text.as_slice()]))))
    }

    /// The fragments' text.
    pub fn text(&self) -> Result<Vec<u8>> {
        let read = |path: &PathBuf| fs::read(path).map_err(Error::file("read", path));
        Ok(self.fragments.iter().map(read).collect::<Result<Vec<_>>>()?.concat())
    }
}

fn directory() -> PathBuf {
    artifacts::workspace().join("resources/kernel")
}

/// The fragments of `part` for `base`: the one for every base, then the base's own.
fn fragments_of(dir: &Path, part: &str, base: &Base) -> Vec<PathBuf> {
    let names = [format!("{part}.config"), format!("{part}-{}.config", base.name)];
    names.map(|name| dir.join(name)).into_iter().filter(|path| path.is_file()).collect()
}

/// The lines of fragments about symbols. Of those about one symbol the last one counts.
fn in_the_end<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let symbol = |line: &'a str| {
        let from = line.find("CONFIG_")?;
        line[from..].split(['=', ' ']).next()
    };
    let mut wanted: Vec<&str> = Vec::new();
    for line in lines.filter(|line| symbol(line).is_some()) {
        wanted.retain(|earlier| symbol(earlier) != symbol(line));
        wanted.push(line);
    }
    wanted
}

/// Whether a configuration has a fragment's line. A symbol that it does not contain is not set.
fn in_force(line: &str, dotconfig: &str) -> bool {
    match line.strip_prefix("# ").and_then(|line| line.strip_suffix(" is not set")) {
        Some(symbol) => {
            let set = format!("{symbol}=");
            !dotconfig.lines().any(|got| got.starts_with(&set))
        }
        None => dotconfig.lines().any(|got| got == line),
    }
}

/// The image of `base` with `series`, built if need be. It is for Arm if all series are for Arm
/// only.
pub fn build(cache: &Cache, base: &Base, series: &[Series], variant: Option<&str>) -> Result<Image> {
    build_for(cache, series::architecture(series)?, base, series, variant)
}

/// The same for `architecture`.
pub fn build_for(
    cache: &Cache,
    architecture: Architecture,
    base: &Base,
    series: &[Series],
    variant: Option<&str>,
) -> Result<Image> {
    require_tools_for(architecture)?;
    let config = Config::new_for(architecture, base, variant)?;
    let patches = series::stacked(series);
    let names: Vec<&str> = series.iter().map(|series| series.name.as_str()).chain(variant).collect();
    let tree = Tree::open(cache, base)?;
    let label = std::iter::once(tree.package.version.as_str())
        .chain(names.iter().copied())
        .collect::<Vec<_>>()
        .join("+");
    let mut parts = vec![config.text()?, toolchain_for(architecture)?.into()];
    for patch in &patches {
        let text = fs::read(patch).map_err(Error::file("read", patch))?;
        parts.push(change(&text).to_vec());
    }
    let key = digest(parts.iter().map(Vec::as_slice));
    let name = format!("{}-{key}", if names.is_empty() { "pristine".into() } else { names.join("+") });
    let dir = cache.entry(&format!("kernel/{}/image/{name}", tree.package.version), |out| {
        // The tree can hold one set of patches at a time.
        let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
        cache.need_mib(2048)?;
        tree.carry(&patches)?;
        let objects = config.objects(&tree)?;
        configure(&tree, &config, &objects)?;
        let image = target(architecture);
        let modules = matches!(variant, Some(GUEST | MODULES)).then_some("modules");
        let targets: Vec<&str> = [image].into_iter().chain(modules).collect();
        make(&tree, architecture, &objects, &targets, &label)?;
        keep(&objects, architecture, out, &label)?;
        match variant {
            Some(GUEST) => keep_tree(&objects, &out.join("tree")),
            Some(MODULES) => keep_modules(&objects, &out.join("modules")),
            _ => Ok(()),
        }
    })?;
    Ok(Image { label, architecture, dir, name: format!("{}/{name}", tree.package.version) })
}

/// The compiler and the linker for x86, with their versions.
pub fn toolchain() -> Result<String> {
    toolchain_for(Architecture::X86)
}

/// The same for `architecture`.
pub fn toolchain_for(architecture: Architecture) -> Result<String> {
    let first = |program: &str| -> Result<String> {
        let said = tool::text(Command::new(format!("{}{program}", architecture.prefix())).arg("--version"))?;
        Ok(said.lines().next().unwrap_or_default().to_owned())
    };
    Ok(format!("{}; {}", first(COMPILER)?, first("ld")?))
}

/// The part of a patch that changes the tree. A new message alone rebuilds nothing.
pub fn change(patch: &[u8]) -> &[u8] {
    const FIRST: &[u8] = b"\ndiff --git ";
    let first = patch.windows(FIRST.len()).position(|window| window == FIRST);
    &patch[first.unwrap_or(0)..]
}

/// Fails with the names of all missing packages.
pub fn require_tools() -> Result<()> {
    require_tools_for(Architecture::X86)
}

/// The same for kernels of `architecture`.
pub fn require_tools_for(architecture: Architecture) -> Result<()> {
    let programs = match architecture {
        Architecture::X86 => PROGRAMS.to_vec(),
        Architecture::Arm => [PROGRAMS, CROSS_PROGRAMS].concat(),
    };
    match doctor::install_line(&doctor::missing(&programs)) {
        None => Ok(()),
        Some(line) => Err(Error::Package(format!("building kernels lacks Debian's packages: {line}"))),
    }
}

/// Configures `objects` for `config`, unless that has been done.
pub fn configure(tree: &Tree, config: &Config, objects: &Path) -> Result<()> {
    let (stamp, wanted) = (objects.join(".fragments"), config.text()?);
    if fs::read(&stamp).is_ok_and(|present| present == wanted) {
        return Ok(());
    }
    fs::create_dir_all(objects).map_err(Error::file("create", objects))?;
    tool::output(command_for(tree, config.architecture, objects).arg("tinyconfig"))?;
    let dotconfig = objects.join(".config");
    let mut merge = Command::new(tree.source.join("scripts/kconfig/merge_config.sh"));
    merge.args(["-m", "-O"]).arg(objects).arg(&dotconfig).args(&config.fragments).current_dir(&tree.source);
    tool::output(&mut merge)?;
    tool::output(command_for(tree, config.architecture, objects).arg("olddefconfig"))?;
    let got = fs::read_to_string(&dotconfig).map_err(Error::file("read", &dotconfig))?;
    let needed = match config.architecture {
        Architecture::X86 => ["CONFIG_KVM_AMD=", "CONFIG_SERIAL_8250_CONSOLE=y"],
        Architecture::Arm => ["CONFIG_KVM=y", "CONFIG_SERIAL_AMBA_PL011_CONSOLE=y"],
    };
    if !needed.iter().all(|symbol| got.contains(symbol)) {
        return Err(Error::Package(format!(
            "{} {} does not take the configuration in resources/kernel: {} lacks KVM or the console",
            tree.package.name,
            tree.package.version,
            dotconfig.display()
        )));
    }
    let missing = config.missing(&got)?;
    if !missing.is_empty() {
        return Err(Error::Package(format!(
            "{} {} does not take {} ({}): a dependency is missing from resources/kernel",
            tree.package.name,
            tree.package.version,
            missing.join(", "),
            config.name
        )));
    }
    fs::write(&stamp, wanted).map_err(Error::file("write", &stamp))
}

/// `make` in the tree for x86, with everything that determines its output.
pub fn command(tree: &Tree, objects: &Path) -> Command {
    command_for(tree, Architecture::X86, objects)
}

/// The same for `architecture`.
pub fn command_for(tree: &Tree, architecture: Architecture, objects: &Path) -> Command {
    let mut command = Command::new("make");
    let prefix = architecture.prefix();
    command
        .arg("-C")
        .arg(&tree.source)
        .arg(format!("O={}", objects.display()))
        .args([
            &format!("ARCH={}", architecture.kernel()),
            &format!("CC={prefix}{COMPILER}"),
            &format!("HOSTCC={COMPILER}"),
        ])
        // Only the code may differ between the kernels of a comparison.
        .env("KBUILD_BUILD_TIMESTAMP", "1970-01-01")
        .env("KBUILD_BUILD_USER", "vellum")
        .env("KBUILD_BUILD_HOST", "lab")
        .env("KBUILD_BUILD_VERSION", "1")
        .env("LC_ALL", "C");
    if !prefix.is_empty() {
        command.arg(format!("CROSS_COMPILE={prefix}"));
    }
    remember(&mut command, tree);
    command
}

/// Lets the compilers that `command` runs keep what they made beside `tree`, if ccache is there.
pub fn remember(command: &mut Command, tree: &Tree) {
    if let Some(path) = remembering(std::env::var_os("PATH").as_deref()) {
        command.env("PATH", path).env("CCACHE_DIR", tree.home.join("ccache"));
    }
}

/// A PATH on which compilers are links to ccache, if Debian's ccache is installed. A file that one
/// series changes and the next one changes back is then compiled once. make's command lines do not
/// change, so ccache causes no rebuilds. It tells compilers apart by itself.
fn remembering(path: Option<&OsStr>) -> Option<OsString> {
    const LINKS: &str = "/usr/lib/ccache";
    Path::new(LINKS).join(COMPILER).exists().then(|| {
        let mut with_links = OsString::from(LINKS);
        with_links.push(":");
        with_links.push(path.unwrap_or(OsStr::new("/usr/bin:/bin")));
        with_links
    })
}

fn make(
    tree: &Tree,
    architecture: Architecture,
    objects: &Path,
    targets: &[&str],
    label: &str,
) -> Result<()> {
    tree.date_for(objects)?;
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let mut make = command_for(tree, architecture, objects);
    watched(make.arg(format!("-j{jobs}")).args(targets), label)
}

/// The interval of progress lines without a terminal. Watchdogs that end silent jobs wait for
/// minutes.
const BEAT: Duration = Duration::from_secs(30);

/// Runs `make` and shows progress: continuously on a terminal, elsewhere a line every [`BEAT`].
pub fn watched(make: &mut Command, label: &str) -> Result<()> {
    let stderr = std::io::stderr();
    watched_by(make, label, stderr.is_terminal(), BEAT, stderr)
}

fn watched_by(
    make: &mut Command,
    label: &str,
    is_terminal: bool,
    every: Duration,
    out: impl Write + Send + 'static,
) -> Result<()> {
    // Counting make's steps in advance would take a pass of its own. Progress shows the current
    // file instead.
    let progress = if is_terminal { ProgressBar::new_spinner() } else { ProgressBar::hidden() };
    progress.set_style(
        ProgressStyle::with_template("{spinner} {prefix} {elapsed} {pos} steps: {msg}")
            .expect("a fixed template"),
    );
    progress.set_prefix(label.to_owned());
    progress.enable_steady_tick(Duration::from_millis(200));
    eprintln!("lab: building {label} (cold: some 10 minutes of CPU time; after a change: seconds)");
    let beats = (!is_terminal).then(|| {
        progress.set_message(label.to_owned());
        Heartbeat::start_on("lab", progress.clone(), every, out)
    });
    let mut steps = 0;
    let built = tool::lines(make, |line| {
        progress.inc(1);
        steps += 1;
        let line = line.trim();
        progress.set_message(match is_terminal {
            true => line.to_owned(),
            false => format!("building {label}, {steps} steps: {line}"),
        });
    });
    drop(beats);
    progress.finish_and_clear();
    built
}

fn keep(objects: &Path, architecture: Architecture, out: &Path, label: &str) -> Result<()> {
    let image = target(architecture);
    let built = format!("arch/{}/boot/{image}", architecture.kernel());
    for (from, to) in [(built.as_str(), image), ("vmlinux", "vmlinux"), (".config", "config")] {
        let from = objects.join(from);
        fs::copy(&from, out.join(to)).map_err(Error::file("copy", &from))?;
    }
    fs::write(out.join("label"), label).map_err(Error::file("write", out.join("label")))
}

/// Keeps the modules in make's modules.order, which lists `kernel/…/NAME.ko` up to 6.1 and
/// `…/NAME.o` since.
fn keep_modules(objects: &Path, to: &Path) -> Result<()> {
    let order = objects.join("modules.order");
    let text = fs::read_to_string(&order).map_err(Error::file("read", &order))?;
    fs::create_dir_all(to).map_err(Error::file("create", to))?;
    for line in text.lines() {
        let from = objects.join(line.strip_prefix("kernel/").unwrap_or(line)).with_extension("ko");
        let to = to.join(from.file_name().unwrap_or_default());
        fs::copy(&from, &to).map_err(Error::file("copy", &from))?;
    }
    Ok(())
}

/// Keeps the kernel, its configuration and its modules at their paths below the object directory.
fn keep_tree(objects: &Path, to: &Path) -> Result<()> {
    let order = objects.join("modules.order");
    let text = fs::read_to_string(&order).map_err(Error::file("read", &order))?;
    let modules = text.lines().map(|line| Path::new(line).with_extension("ko"));
    let beside =
        ["arch/x86/boot/bzImage", ".config", "modules.order", "modules.builtin", "modules.builtin.modinfo"];
    for file in beside.iter().map(PathBuf::from).chain(modules) {
        let (from, to) = (objects.join(&file), to.join(&file));
        let parent = to.parent().unwrap_or(&to);
        fs::create_dir_all(parent).map_err(Error::file("create", parent))?;
        fs::copy(&from, &to).map_err(Error::file("copy", &from))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::variants::LIVE_UPDATE;
    use super::*;

    /// Collects progress lines. It ends the build when a line names the build's step.
    struct Said {
        text: String,
        end: fs::File,
    }

    impl Write for Said {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.text.push_str(&String::from_utf8_lossy(bytes));
            if self.text.contains("s: building k, 1 steps: CC a.o") {
                self.end.write_all(b"\n")?;
            }
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_build_without_a_terminal_says_that_it_lives() {
        let fifo = std::env::temp_dir().join(format!("vellum-lab-build-{}", std::process::id()));
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let end = fs::File::options().read(true).write(true).open(&fifo).unwrap();
        let mut build = Command::new("sh");
        build.args(["-c", "echo '  CC a.o'; exec timeout 300 head -n 1 \"$0\""]).arg(&fifo);
        let said = Said { text: String::new(), end };
        let built = watched_by(&mut build, "k", false, Duration::from_millis(10), said);
        fs::remove_file(fifo).unwrap();
        built.unwrap();
    }

    #[test]
    fn what_is_not_set_is_looked_at_too() {
        let dotconfig = "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_AB=y\n";
        let lines = [
            "CONFIG_A=y",
            "CONFIG_B=y",
            "# CONFIG_A is not set",
            "# CONFIG_B is not set",
            "# CONFIG_C is not set",
        ];
        assert_eq!(lines.map(|line| in_force(line, dotconfig)), [true, false, false, true, true]);
    }

    #[test]
    fn a_bases_own_fragment_overrides_the_one_for_all() {
        let lines = ["# CONFIG_A is not set", "CONFIG_AB=y", "# about it", "CONFIG_B=y", "CONFIG_A=y"];
        assert_eq!(in_the_end(lines.into_iter()), ["CONFIG_AB=y", "CONFIG_B=y", "CONFIG_A=y"]);
    }

    #[test]
    fn a_base_has_the_variants_that_have_a_fragment_for_it() {
        let [old, .., new] = &super::super::BASES;
        for variant in VARIANTS {
            assert_eq!(Config::known(old, variant), !["pti", LIVE_UPDATE].contains(&variant), "{variant}");
            assert_eq!(Config::known(new, variant), !["gvt", "pti"].contains(&variant), "{variant}");
        }
        let error = Config::new(new, Some("gvt")).err().unwrap().to_string();
        assert!(error.contains("--variant gvt: 7.3 has") && error.contains("i386"), "{error}");
        let fragments = |variant| Config::new(old, Some(variant)).unwrap().fragments;
        let last = |variant| fragments(variant).last().unwrap().file_name().unwrap().to_owned();
        assert_eq!([last("i386"), last("preempt")], ["i386-5.10.config", "preempt.config"]);
    }

    #[test]
    fn a_message_is_no_part_of_a_change() {
        let patch = |message: &str, line: &str| {
            format!("Subject: x\n\n{message}\n---\n f | 1 +\n\ndiff --git a/f b/f\n+{line}\n")
        };
        let [one, polished, other] =
            [("a", "1"), ("b\nc", "1"), ("a", "2")].map(|(message, line)| patch(message, line));
        assert_eq!(change(one.as_bytes()), change(polished.as_bytes()));
        assert_ne!(change(one.as_bytes()), change(other.as_bytes()));
        // A text without such a line is taken whole.
        assert_eq!(change(b"--- a/f\n"), b"--- a/f\n");
    }
}
