//! `cargo lab release`: the checks before a release, and its package.
//!
//! Everything is made from clones of a commit, so uncommitted files have no influence: two builds
//! in two directories, which must be identical; licences and sources, checked by cargo-deny; a list
//! of its parts by cargo-cyclonedx; and a Debian package ([`files`] makes its files besides the
//! program, [`deb`] tests it). A step whose tool is missing is skipped with the remedy.

mod deb;
mod files;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use support::record::Record;

pub use files::write as write_files;

use crate::cache::Cache;
use crate::test::tally::Tally;
use crate::{Error, Result, artifacts, tool};

/// Its name in the count.
const HOST: &str = "release";

/// The release's target.
const TARGET: &str = "x86_64-unknown-linux-musl";

/// The release's profile.
const PROFILE: &str = "dist";

/// The cargo-deb version that is known to work.
const CARGO_DEB: &str = "3.8.0";

/// The options of [`run`].
pub struct Options {
    /// Permission to install Debian packages, and cargo-deb into the cache.
    pub setup: bool,
    /// A prebuilt program to pack.
    pub prebuilt: Option<PathBuf>,
    /// Where the package and the list go.
    pub out: PathBuf,
}

/// A clone of the commit, with its build directory.
struct Checkout {
    dir: PathBuf,
}

impl Checkout {
    fn make(dir: PathBuf) -> Result<Self> {
        let mut git = Command::new("git");
        git.args(["clone", "--quiet", "--shared"]).arg(artifacts::workspace()).arg(&dir);
        tool::output(&mut git)?;
        Ok(Self { dir })
    }

    /// Builds the program. The paths of the clone and of crates are replaced, because they would
    /// make builds differ and reveal directories.
    fn build(&self) -> Result<()> {
        let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
        let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
        let flags = [(self.dir.clone(), "/vellum"), (home.unwrap_or_default(), "/cargo")];
        let flags = flags.map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display()));
        let mut cargo = self.cargo();
        cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
        cargo.args([
            "build",
            "--profile",
            PROFILE,
            "--locked",
            "--package",
            "vellum",
            "--bin",
            "vellum",
            "--target",
            TARGET,
        ]);
        tool::lines(&mut cargo, |_| ())
    }

    /// Cargo in the clone, without the settings of the cargo that started this process.
    fn cargo(&self) -> Command {
        let mut cargo = Command::new(artifacts::cargo());
        cargo.current_dir(&self.dir).env("CARGO_TARGET_DIR", self.dir.join("target"));
        cargo.env_remove("RUSTFLAGS").env_remove("CARGO_MANIFEST_DIR");
        cargo
    }

    fn program(&self) -> PathBuf {
        self.dir.join("target").join(TARGET).join(PROFILE).join("vellum")
    }
}

/// Runs all steps. The exit status is 0 if none failed.
pub fn run(options: &Options) -> Result<u8> {
    let cache = Cache::open()?;
    cache.need_mib(4096)?;
    let mut tally = Tally::new(Record::from_env());
    let scratch = cache.dir("scratch")?.join(format!("release-{}", std::process::id()));
    let _lock = cache.lock("release")?;
    fs::create_dir_all(&scratch).map_err(Error::file("create", &scratch))?;
    // What was counted is told in any case.
    if let Err(error) = stages(&cache, options, &scratch, &mut tally) {
        tally.stage("release", "the run", Err(error));
    }
    let _ = fs::remove_dir_all(&scratch);
    tally.close();
    Ok(u8::from(tally.failed() > 0))
}

fn stages(cache: &Cache, options: &Options, scratch: &Path, tally: &mut Tally) -> Result<()> {
    if artifacts::is_uncommitted()? {
        tally.show("lab: release: there are changes that are in no commit, and so not in this");
    }
    fs::create_dir_all(&options.out).map_err(Error::file("create", &options.out))?;
    let one = Checkout::make(scratch.join("one"))?;
    match &options.prebuilt {
        None => builds(&one, scratch, tally)?,
        Some(file) => {
            let to = one.program();
            let dir = to.parent().unwrap_or(scratch);
            fs::create_dir_all(dir).map_err(Error::file("create", dir))?;
            fs::copy(file, &to).map_err(Error::file("copy", file))?;
            tally.skip(
                HOST,
                "two builds compared",
                "--prebuilt names a program that is not built here: leave it out",
            );
        }
    }
    let one = &one;
    subcommand(
        cache,
        tally,
        one,
        "deny",
        "licences, sources and bans",
        &["check", "licenses", "sources", "bans"],
    )?;
    let list = ["--format", "json", "--manifest-path", "Cargo.toml"];
    if subcommand(cache, tally, one, "cyclonedx", "the list of what is in it (SBOM)", &list)? {
        keep(&one.dir.join("vellum.cdx.json"), &options.out)?;
    }
    if let Some(package) = deb::make(cache, options.setup, one, tally)? {
        let package = keep(&package, &options.out)?;
        deb::judge(options.setup, &package, tally)?;
        deb::install(cache, options.setup, &package, scratch, tally)?;
        tally.show(&format!("lab: release: {}", package.display()));
    }
    Ok(())
}

/// Builds twice, and compares and runs the programs.
fn builds(one: &Checkout, scratch: &Path, tally: &mut Tally) -> Result<()> {
    let two = Checkout::make(scratch.join("elsewhere/two"))?;
    for (checkout, which) in [(one, "first"), (&two, "second")] {
        eprintln!("lab: release: the {which} of two builds");
        checkout.build()?;
    }
    stage(tally, "two builds are the same, byte for byte", || alike(&one.program(), &two.program()));
    stage(tally, "the program says its version and its commit", || {
        let head = ["rev-parse", "--short=12", "HEAD"];
        let commit = tool::text(Command::new("git").args(head).current_dir(&one.dir))?;
        let said = tool::text(Command::new(one.program()).arg("--version"))?;
        held(said.trim().ends_with(&format!(" ({})", commit.trim())), || said)
    });
    Ok(())
}

/// Runs a stage and counts it.
fn stage(tally: &mut Tally, what: &str, work: impl FnOnce() -> Result<()>) {
    let done = work();
    tally.stage(HOST, what, done);
}

fn held(condition: bool, why: impl FnOnce() -> String) -> Result<()> {
    if condition { Ok(()) } else { Err(Error::Refused(why())) }
}

fn alike(one: &Path, two: &Path) -> Result<()> {
    let read = |path: &Path| fs::read(path).map_err(Error::file("read", path));
    let (a, b) = (read(one)?, read(two)?);
    let first = a.iter().zip(&b).position(|(a, b)| a != b);
    held(a == b, || format!("{} and {} bytes, which differ first at {first:?}", a.len(), b.len()))
}

/// Runs a cargo subcommand if it is installed. Returns whether it succeeded.
fn subcommand(
    cache: &Cache,
    tally: &mut Tally,
    clone: &Checkout,
    name: &str,
    what: &str,
    arguments: &[&str],
) -> Result<bool> {
    let program = format!("cargo-{name}");
    let Some(program) = find(cache, &program) else {
        tally.skip(HOST, what, &format!("{program} is not installed: cargo install --locked {program}"));
        return Ok(false);
    };
    let failed = tally.failed();
    stage(tally, what, || {
        let mut command = Command::new(program);
        let cargo = clone.cargo();
        command.envs(cargo.get_envs().filter_map(|(key, value)| Some((key, value?))));
        tool::output(command.current_dir(&clone.dir).arg(name).args(arguments)).map(drop)
    });
    Ok(tally.failed() == failed)
}

/// Finds a program on the PATH or in the cache.
fn find(cache: &Cache, program: &str) -> Option<PathBuf> {
    let own = cache.path("cargo/bin").join(program);
    tool::find(program).or_else(|| Some(own).filter(|own| own.is_file()))
}

/// Copies a file to `out`. Returns its new path.
fn keep(file: &Path, out: &Path) -> Result<PathBuf> {
    let to = out.join(file.file_name().unwrap_or_default());
    fs::copy(file, &to).map_err(Error::file("copy", file))?;
    Ok(to)
}
