//! The machine under test, in whatever process it runs, and the operations that move it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use support::env::{Machine, Process, TestEnv, process};
use support::{Failed, LIMIT, Random, ensure, eventually};
use vellum_control::Do;
use vellum_control::client::Client;

use crate::VELLUM;
use crate::{ends_with, every_page_is_right, succeeds, with};

pub const MIB: u64 = 16;

/// Limits within which a writing guest can be migrated on a busy host.
pub const SOON: &str = "--downtime 1s --timeout 5s,then=force";

/// Where the machine's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// A descriptor has all of it, so another process can be given it.
    ByDescriptor,
    /// It was forked. No descriptor has all of it, and an upgrade copies it.
    AfterFork,
    /// In this process alone, so that it cannot be upgraded.
    ByProcess,
}

/// A fork of the machine, which runs or is paused. It does not outlive its test.
pub struct Fork {
    pub name: String,
    pub pid: u32,
}

impl Drop for Fork {
    fn drop(&mut self) {
        if process(self.pid).is_some() {
            let _ = Command::new("kill").args(["-KILL", &self.pid.to_string()]).status();
        }
    }
}

/// A machine and its state.
pub struct Run {
    pub env: TestEnv,
    pub random: Random,
    /// The name of the machine.
    pub name: String,
    pub machine: Option<Machine>,
    /// The number of names that have been given out.
    names: usize,
    pub memory: Held,
    /// Its forks, which are ended at the end.
    pub forks: Vec<Fork>,
    /// Snapshots whose newest point is restored at the end.
    pub saved: Vec<PathBuf>,
}

impl Run {
    /// Starts a machine that writes. It has a socket for a debugger if `has_gdb`.
    pub fn new(seed: u64, has_gdb: bool) -> Result<Self, Failed> {
        let env = TestEnv::new()?;
        let [json, gdb] = ["m0.json", "m0.gdb"].map(|name| env.path(name));
        let gdb = if has_gdb { format!("--gdb {}", gdb.display()) } else { String::new() };
        let workload = "--passes 0 --workload write,order=random,rate=5000,write=80,warm";
        let machine = env.run(
            "m0",
            &format!(
                "run --cpus 2 --memory {MIB}m,slots=2,backing=memfd {workload} --json {} {gdb}",
                json.display()
            ),
        )?;
        env.has_written("m0", MIB << 8)?;
        Ok(Self {
            env,
            random: Random::of(seed),
            name: "m0".into(),
            machine: Some(machine),
            names: 0,
            memory: Held::ByDescriptor,
            forks: Vec::new(),
            saved: Vec::new(),
        })
    }

    /// A new name.
    pub fn next(&mut self) -> String {
        self.names += 1;
        format!("m{}", self.names)
    }

    pub fn json(&self, name: &str) -> PathBuf {
        self.env.path(&format!("{name}.json"))
    }

    /// A random element.
    pub fn choose<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.random.below(of.len() as u64) as usize]
    }

    /// Runs a command to its end.
    pub fn does(&self, arguments: &str) -> Result<Output, Failed> {
        ends(arguments, self.env.migration_client(arguments)?)
    }

    pub fn status(&self) -> Result<Value, Failed> {
        Ok(Client::connect(&self.env.socket(&self.name))?.ask(&Do::Status {})?)
    }

    pub fn pid(&self) -> Result<u64, Failed> {
        Ok(self.status()?["pid"].as_u64().ok_or("no pid")?)
    }

    /// A target for the machine.
    pub fn receiver(&self, name: &str) -> Result<Machine, Failed> {
        self.env.receive(name, &format!("--memory memfd --json {}", self.json(name).display()))
    }

    /// Records that the machine now runs in `machine` as `name`. The previous process must end with
    /// `status`.
    pub fn is_at(&mut self, name: String, machine: Machine, status: i32) -> Result<(), Failed> {
        if let Some(before) = self.machine.replace(machine) {
            ends_with(before, status)?;
        }
        self.name = name;
        Ok(())
    }

    /// Checks that the machine runs and that its guest writes.
    pub fn goes_on(&self) -> Result<(), Failed> {
        let running = || -> Result<Option<()>, Failed> {
            let state = self.env.standing(&self.name);
            ensure(state.is_some(), || format!("{} does not answer", self.name))?;
            Ok((state.as_deref() == Some("running")).then_some(()))
        };
        let runs = eventually(LIMIT, "it runs", running);
        runs.map_err(|error| format!("{error:?}: {:?}", self.env.standing(&self.name)))?;
        self.env.has_written(&self.name, self.env.done(&self.name)?)
    }

    /// Ends the machine. Checks every page of its guest, and of its restored snapshots.
    pub fn end(mut self) -> Result<(), Failed> {
        succeeds(&self.does(&format!("ctl {} stop", self.name))?)?;
        ends_with(self.machine.take().ok_or("it is gone")?, 0)?;
        every_page_is_right(&self.json(&self.name))?;
        for fork in std::mem::take(&mut self.forks) {
            let name = &fork.name;
            if self.env.standing(name).as_deref() == Some("paused") {
                succeeds(&self.does(&format!("ctl {name} resume"))?)?;
            }
            self.env.has_written(name, self.env.done(name)?)?;
            succeeds(&self.does(&format!("ctl {name} stop"))?)?;
            eventually(LIMIT, "the fork ends", || Ok(process(fork.pid).is_none().then_some(())))?;
            every_page_is_right(&self.json(name)).map_err(|error| format!("fork {name}: {error:?}"))?;
        }
        for dir in std::mem::take(&mut self.saved) {
            let name = self.next();
            let json = self.json(&name);
            let line = format!("restore {} --json {}", dir.display(), json.display());
            let machine = self.env.run(&name, &line)?;
            eventually(LIMIT, "it is restored", || {
                Ok((self.env.standing(&name).as_deref() == Some("running")).then_some(()))
            })?;
            succeeds(&self.does(&format!("ctl {name} stop"))?)?;
            ends_with(machine, 0)?;
            every_page_is_right(&json)?;
        }
        Ok(())
    }
}

/// Waits for the end of a command.
pub fn ends(what: &str, mut process: Process) -> Result<Output, Failed> {
    let ended = eventually(LIMIT, "the command ends", || Ok(process.try_wait()?.map(drop)));
    ended.map_err(|error| format!("{what}: {error:?}"))?;
    Ok(process.output()?)
}

/// A script that runs `first` and then becomes the program under test.
pub fn script(run: &Run, first: &str) -> Result<PathBuf, Failed> {
    let path = run.env.path("build");
    // A new file each time, because a running one cannot be written.
    let _ = fs::remove_file(&path);
    support::executable(&path, format!("#!/bin/sh\n{first}\nexec {VELLUM} \"$@\"\n").as_bytes())?;
    Ok(path)
}

/// Checks that an upgrade is refused because the memory has no descriptor.
pub fn cannot_be_upgraded(run: &Run) -> Result<(), Failed> {
    let refused = with(run.does(&format!("ctl {} upgrade {VELLUM}", run.name))?, 2)?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure(said.contains("backing=memfd"), || said.clone())
}

pub fn upgrade(run: &mut Run) -> Result<(), Failed> {
    if run.memory == Held::ByProcess {
        return cannot_be_upgraded(run);
    }
    let before = run.pid()?;
    let build = run.env.path("other-build");
    if !build.exists() {
        symlink(VELLUM, &build)?;
    }
    succeeds(&run.does(&format!("ctl {} upgrade --downtime 1m {}", run.name, build.display()))?)?;
    is_in_another(run, before)?;
    run.memory = Held::ByDescriptor;
    Ok(())
}

/// Waits until the machine answers in another process than `before`.
pub fn is_in_another(run: &Run, before: u64) -> Result<(), Failed> {
    eventually(LIMIT, "it answers in the new process", || {
        Ok(run.pid().ok().filter(|now| *now != before).map(drop))
    })
}

pub fn migrate(run: &mut Run) -> Result<(), Failed> {
    let ways = [
        "",
        "--connections 3",
        "--verify",
        "--compress zstd",
        "--mode postcopy",
        "--mode hybrid --connections 2",
    ];
    let mut way = run.choose(&ways).to_owned();
    if run.memory == Held::ByDescriptor && run.random.below(4) == 0 {
        way = "--link memfd --downtime 1m".into();
    } else {
        way = format!("{way} {SOON}");
    }
    let name = run.next();
    let there = run.receiver(&name)?;
    let line =
        format!("migrate {} --liveness 5m --to unix:{}.in {way}", run.name, run.env.path(&name).display());
    let output = run.does(&line)?;
    succeeds(&output).map_err(|error| format!("{way}: {error:?}"))?;
    run.memory = Held::ByDescriptor;
    run.is_at(name, there, 15)
}

/// Starts a slow migration.
pub fn slowly(run: &Run, to: &Path) -> Result<Process, Failed> {
    let line = format!("migrate {} --liveness 5m --bandwidth 1m --to unix:{}", run.name, to.display());
    run.env.migration_client(&line)
}
