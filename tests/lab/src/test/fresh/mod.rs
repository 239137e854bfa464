//! `cargo lab fresh`: runs the README's two commands, as printed there, on a fresh machine.
//!
//! The machine is a Debian in a directory ([`chroot`]) with what the README asks for, and with this
//! machine's client configuration ([`carried`]), without which it could fetch nothing. Toolchain,
//! crates and the laboratory's cache are fetched anew each time.

mod carried;

use std::fs;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;

use crate::cache::Cache;
use crate::hosts::doctor;
use crate::test::setup;
use crate::{Error, Result, artifacts, chroot, tool};

/// The README's requirements, git for the clone, and rustup's requirement.
const PACKAGES: [&str; 4] = ["ca-certificates", "gcc", "git", "libc6-dev"];

/// The clone's path on the machine.
const CLONE: &str = "/root/vellum";
/// PATH with rustup's programs, as rustup sets it for a user.
const PATH: &str = "/root/.cargo/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The disk space for the first command alone and for both.
const NEED_MIB: [u64; 2] = [6 << 10, 32 << 10];

/// After a signal, a command has this long to clean up.
const GRACE: Duration = Duration::from_secs(60);

/// The last command.
#[derive(Clone, Copy, Debug, Default, PartialEq, ValueEnum)]
pub enum Until {
    /// After the README's first command, which builds Vellum and runs a guest
    Build,
    /// After its second, which runs all tests
    #[default]
    Test,
}

/// The options of [`run`].
pub struct Options {
    /// The values of RUSTUP_AUTO_INSTALL. Each gets a machine.
    pub auto_install: Vec<bool>,
    /// The last command.
    pub until: Until,
}

/// The README's commands.
#[derive(Debug, PartialEq)]
struct Commands {
    /// Needed if rustup installs nothing by itself.
    toolchain: String,
    /// Builds and runs a guest.
    build: String,
    /// Runs all tests.
    test: String,
}

impl Commands {
    /// Reads the commands in the section for beginners.
    fn of(readme: &str) -> Result<Self> {
        let section = readme.split("\n## ").find_map(|section| section.strip_prefix("Start here\n"));
        let lines = section.unwrap_or_default().lines().filter_map(|line| line.strip_prefix("    "));
        let first = |start: &str| {
            let found = lines.clone().find(|line| line.starts_with(start)).map(|line| line.trim().to_owned());
            found.ok_or_else(|| Error::Usage(format!("README.md, \"Start here\": no command `{start}…`")))
        };
        Ok(Self {
            toolchain: first("rustup ")?,
            build: first("cargo run ")?,
            test: first("cargo lab test ")?,
        })
    }
}

/// The time of each step, and the failures.
#[derive(Default)]
struct Account {
    steps: Vec<String>,
    failures: Vec<String>,
}

impl Account {
    /// Runs a step and records it. An error means that the machine cannot continue.
    fn step(&mut self, machine: &str, what: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
        println!("lab: fresh: {machine}: {what}");
        let begun = Instant::now();
        let done = work();
        let verdict = if done.is_ok() { "" } else { ", FAILED" };
        let line = format!("{:7.1} s  {machine}: {what}{verdict}", begun.elapsed().as_secs_f64());
        println!("lab: fresh: {}", line.trim_start());
        self.steps.push(line);
        done.inspect_err(|error| self.failures.push(format!("{machine}: {what}: {error}")))
    }
}

/// Runs everything. The exit code is 0 if nothing failed.
pub fn run(options: &Options) -> Result<u8> {
    if !setup::is_root() {
        return Err(Error::Usage(
            "fresh: a Debian of its own needs root: sudo env PATH=\"$PATH\" cargo lab fresh".into(),
        ));
    }
    let readme = artifacts::workspace().join("README.md");
    let commands = Commands::of(&fs::read_to_string(&readme).map_err(Error::file("read", &readme))?)?;
    let rustup = tool::find("rustup").ok_or_else(|| {
        Error::Usage("fresh: rustup is not in the PATH, and is what the fresh machine begins with".into())
    })?;
    let cache = Cache::open()?;
    cache.need_mib(NEED_MIB[usize::from(options.until == Until::Test)])?;
    if artifacts::is_uncommitted()? {
        eprintln!("lab: fresh: there are changes that are in no commit, and so not in this");
    }
    let kvm = doctor::kvm();
    if let Err(why) = &kvm {
        println!(
            "lab: fresh: {why}. The guest of `{}` and the tests on this machine's KVM are skipped",
            commands.build
        );
    }
    let _lock = cache.lock("fresh")?;
    let _signals = setup::Signals::catch();
    let mut account = Account::default();
    for &auto_install in &options.auto_install {
        let name = format!("RUSTUP_AUTO_INSTALL={}", u8::from(auto_install));
        // Left over if an earlier run was killed.
        let root = cache.dir("scratch")?.join("fresh");
        remove(&root)?;
        let mut machine = Machine { name, root, rustup: &rustup, auto_install, account: &mut account };
        // The account has the error.
        let _ = machine.through(&cache, &commands, options.until, kvm.is_ok());
        remove(&machine.root)?;
        setup::check_interrupted()?;
    }
    println!("\n{}", account.steps.join("\n"));
    if account.failures.is_empty() {
        println!("passed");
        return Ok(0);
    }
    account.failures.iter().for_each(|failure| println!("FAILED: {failure}"));
    Ok(1)
}

/// A fresh machine.
struct Machine<'a> {
    name: String,
    root: PathBuf,
    rustup: &'a Path,
    auto_install: bool,
    account: &'a mut Account,
}

impl Machine<'_> {
    /// Makes the machine and runs the commands on it.
    fn through(&mut self, cache: &Cache, commands: &Commands, until: Until, kvm: bool) -> Result<()> {
        let root = self.root.clone();
        self.step("a Debian", || {
            chroot::unpack(&chroot::archive(cache, &PACKAGES)?, &root)?;
            carried::files(&root)
        })?;
        self.inside("its certificates", "/", "update-ca-certificates")?;
        self.step("git clone", || {
            let clone = root.join(CLONE.trim_start_matches('/'));
            let mut git = Command::new("git");
            git.args(["clone", "--quiet", "--no-hardlinks"]).arg(artifacts::workspace()).arg(clone);
            tool::output(&mut git).map(drop)
        })?;
        let init = root.join("tmp/rustup-init");
        fs::copy(self.rustup, &init).map_err(Error::file("copy", self.rustup))?;
        self.inside("rustup", "/tmp", "./rustup-init -y --no-modify-path --default-toolchain none")?;
        fs::remove_file(&init).map_err(Error::file("remove", &init))?;
        if !self.auto_install {
            self.inside(&commands.toolchain, CLONE, &commands.toolchain)?;
        }
        match self.inside(&commands.build, CLONE, &commands.build) {
            // Without KVM the guest cannot start. The command says so and exits with an error.
            Err(Error::Failed { .. }) if !kvm && self.is_built() => {
                self.account.failures.pop();
            }
            ended => ended?,
        }
        if until == Until::Test {
            self.inside(&commands.test, CLONE, &commands.test)?;
        }
        Ok(())
    }

    fn is_built(&self) -> bool {
        let program = Path::new(CLONE).join("target/x86_64-unknown-linux-musl/release/vellum");
        self.root.join(program.strip_prefix("/").unwrap_or(&program)).is_file()
    }

    fn step(&mut self, what: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
        setup::check_interrupted()?;
        self.account.step(&self.name, what, work)
    }

    /// A step that is a shell command in the machine's directory `dir`.
    fn inside(&mut self, what: &str, dir: &str, line: &str) -> Result<()> {
        let mut command = chroot::command(&self.root, dir, &["sh", "-c", line])?;
        command.envs(carried::variables(std::env::vars_os()));
        command.envs([("HOME", "/root"), ("PATH", PATH), ("LC_ALL", "C.UTF-8")]);
        command.env("RUSTUP_AUTO_INSTALL", if self.auto_install { "1" } else { "0" });
        // With this, a skipped test is a failure if --setup could have installed what it needs.
        command.env("CI", "true");
        self.step(what, || watched(&mut command, line))
    }
}

/// Runs `command`. A signal to this process also ends it.
fn watched(command: &mut Command, line: &str) -> Result<()> {
    command.stdin(std::process::Stdio::null()).process_group(0);
    let mut child = tool::bound(command, libc::SIGKILL).spawn().map_err(Error::file("start", line))?;
    setup::child(child.id());
    let ended = wait(&mut child);
    setup::child(0);
    let status = ended.map_err(Error::file("wait for", line))?;
    setup::check_interrupted()?;
    match status {
        Some(status) if status.success() => Ok(()),
        Some(status) => {
            Err(Error::Failed { line: line.to_owned(), status: status.to_string(), output: String::new() })
        }
        None => Err(Error::Failed {
            line: line.to_owned(),
            status: "it did not stop".into(),
            output: String::new(),
        }),
    }
}

/// Waits for the end of `child`. If it does not end after a signal, kills it with all of its
/// processes.
fn wait(child: &mut Child) -> std::io::Result<Option<std::process::ExitStatus>> {
    let mut asked = None;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if setup::check_interrupted().is_err() {
            let since: &mut Instant = asked.get_or_insert_with(Instant::now);
            if since.elapsed() > GRACE {
                break;
            }
        }
        thread::sleep(Duration::from_millis(100));
    }
    // The first process in the namespace. All others die with it, and hold files until then.
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).unwrap_or_default();
    child.kill()?;
    child.wait()?;
    while children.split_whitespace().any(|pid| Path::new("/proc").join(pid).exists()) {
        thread::sleep(Duration::from_millis(10));
    }
    Ok(None)
}

fn remove(root: &Path) -> Result<()> {
    match fs::remove_dir_all(root) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::file("remove", root)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str) -> String {
        fs::read_to_string(artifacts::workspace().join(name)).unwrap()
    }

    #[test]
    fn the_commands_are_the_readmes_and_ci_runs_the_second() {
        let commands = Commands::of(&file("README.md")).unwrap();
        assert_eq!(commands.toolchain, "rustup toolchain install");
        assert!(commands.build.starts_with("cargo run --release -- run"), "{commands:?}");
        assert_eq!(file(".ci/run").lines().last(), Some(commands.test.as_str()));
        let error = Commands::of("# V\n\n## Start here\n\n    cargo run -- run\n\n## More\n\n    rustup x\n")
            .unwrap_err();
        assert!(error.to_string().contains("`rustup …`"), "{error}");
    }

    #[test]
    fn ci_installs_nothing_before_them() {
        let script = file(".ci/run");
        for word in ["rustup ", "apt-get", "pip ", "curl", "cargo install"] {
            let calls = script.lines().find(|line| !line.starts_with('#') && line.contains(word));
            assert_eq!(calls, None, "{word}");
        }
    }

    #[test]
    fn the_toolchain_has_every_target_that_the_laboratory_builds_for() {
        use crate::architecture::Architecture;
        let named = file("rust-toolchain.toml");
        for architecture in [Architecture::X86, Architecture::Arm] {
            assert!(named.contains(&format!("\"{}\"", architecture.target())), "{named}");
        }
    }
}
