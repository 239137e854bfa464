//! Emulated hosts: a [`Request`] goes in, the host boots, runs its commands, and an [`Outcome`]
//! comes back.
//!
//! An [`Emulator`] is all that differs between beds: each is a file of its own and a line in
//! [`HOSTS`]. Those of QEMU share [`qemu`]. All share [`Request`], [`image`] (the initramfs), and
//! [`run`](self::run()) with the results line and the time limit.

pub mod arm64;
pub mod cloud;
pub mod disk;
pub mod doctor;
pub mod guest;
pub mod image;
pub mod initramfs;
pub mod parameter;
mod qemu;
mod request;
mod run;
pub mod svm;
pub mod vmx;
pub mod wire;

use std::fmt;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::ValueEnum;
use clap::builder::PossibleValue;

use crate::architecture::Architecture;
use crate::cache::Cache;
use crate::{Error, Result};
pub use request::{AT_ONCE, HUGEPAGE, HostKernel, Pace, Request, Wire};
pub use run::{Outcome, Ran, run, shell};

/// Every emulated host. The first is the one that is meant where none is named.
pub static HOSTS: [Emulated; 3] = [svm::HOST, vmx::HOST, arm64::HOST];

/// A program that emulates a host with a KVM in it.
pub trait Emulator: Sync {
    /// The name that results carry and the command line takes.
    fn name(&self) -> &'static str;

    /// What is emulated, for the command line's help.
    fn about(&self) -> &'static str;

    /// What the bed is for, for `cargo lab doctor`.
    fn purpose(&self) -> &'static str;

    /// The programs of this machine that the bed calls.
    fn programs(&self) -> &'static [&'static str];

    /// Its processor's.
    fn architecture(&self) -> Architecture {
        Architecture::X86
    }

    /// KVM's modules, where the host's kernel has them as modules.
    fn modules(&self) -> &'static [&'static str];

    /// How a host with this second stage is named: `npt=1`.
    fn mode(&self, second_stage: bool) -> String;

    /// The module parameters that every host with this second stage has: `kvm_amd.npt=1`.
    fn parameters(&self, second_stage: bool) -> Vec<String>;

    /// The serial ports, as the host's kernel calls them.
    fn ports(&self) -> Ports;

    /// What the host's clock takes for one instruction.
    fn nanoseconds_per_instruction(&self) -> f64;

    /// Whether there is a processor with page-modification logging; if not, why, and what to do
    /// instead.
    fn has_pml(&self) -> std::result::Result<(), &'static str>;

    /// Whether hosts can run at `pace`; if not, why, and what to do instead.
    fn has_pace(&self, pace: Pace) -> std::result::Result<(), &'static str>;

    /// Whether two CPUs take turns of a few instructions, so that locks are not waited for as on a
    /// processor. Such a clock counts instructions all the same.
    fn takes_turns(&self) -> bool {
        false
    }

    /// Names what this machine lacks, before anything is fetched or built.
    fn ready(&self) -> Result<()>;

    /// What figures depend on beside this laboratory: the version of an emulator that this machine
    /// brings.
    fn version(&self) -> Result<String>;

    /// The command that starts the emulator, and where its host's results come out.
    fn command(&self, start: &Start) -> Result<(Command, Results)>;

    /// The command for a host whose console is this terminal.
    fn shell(&self, _start: &Start) -> Result<Command> {
        Err(Error::Usage(format!("{} has no terminal: use another bed, or run a command", self.name())))
    }

    /// Whether this line of the emulator's standard error says nothing about a host that failed.
    fn is_noise(&self, _line: &str) -> bool {
        false
    }
}

/// Serial ports by their names below /dev.
#[derive(Clone, Copy)]
pub struct Ports {
    /// Where the kernel and shells speak.
    pub console: &'static str,
    /// The results line, which carries nothing but frames.
    pub results: &'static str,
}

/// What an emulator is started with.
pub struct Start<'a> {
    /// Keeps what the emulator needs and this machine does not bring.
    pub cache: &'a Cache,
    /// The host that is asked for.
    pub request: &'a Request,
    /// What the host boots into.
    pub initrd: &'a Path,
    /// A directory for this start alone.
    pub dir: &'a Path,
}

impl Start<'_> {
    /// The file for what the host says on its console.
    pub fn console(&self) -> PathBuf {
        self.dir.join("console.log")
    }
}

/// Where the results line of a host comes out.
pub enum Results {
    /// At the emulator's standard output.
    Stdout,
    /// In a FIFO that the emulator opens.
    Fifo(PathBuf),
}

/// One of [`HOSTS`].
#[derive(Clone, Copy)]
pub struct Emulated(&'static dyn Emulator);

impl Emulated {
    /// The first bed whose hosts are of `architecture`.
    pub fn of(architecture: Architecture) -> Self {
        let bed = HOSTS.into_iter().find(|bed| bed.architecture() == architecture);
        bed.expect("each architecture is that of a bed")
    }

    /// `svm npt=0`, `vmx ept=1 pml`: a host as figures and messages name it.
    pub fn label(self, second_stage: bool, pml: bool) -> String {
        let pml = if pml { " pml" } else { "" };
        format!("{} {}{pml}", self.name(), self.mode(second_stage))
    }
}

impl Deref for Emulated {
    type Target = dyn Emulator;

    fn deref(&self) -> &Self::Target {
        self.0
    }
}

impl PartialEq for Emulated {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl fmt::Debug for Emulated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl ValueEnum for Emulated {
    fn value_variants<'a>() -> &'a [Self] {
        &HOSTS
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name()).help(self.about()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_beds_apart() {
        let mut names: Vec<_> = HOSTS.iter().map(|bed| bed.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), HOSTS.len());
    }

    #[test]
    fn every_bed_counts_instructions_and_its_parameters_have_the_form_that_is_checked() {
        for bed in HOSTS {
            assert_eq!(bed.has_pace(Pace::Counted), Ok(()), "{bed:?}");
            for parameter in [true, false].into_iter().flat_map(|second_stage| bed.parameters(second_stage)) {
                let (module, _) = parameter.split_once('.').expect("MODULE.NAME=VALUE");
                assert!(parameter.contains('=') && bed.modules().contains(&module), "{parameter}");
            }
        }
    }

    #[test]
    fn hosts_are_named_by_bed_second_stage_and_pml() {
        assert_eq!(svm::HOST.label(false, false), "svm npt=0");
        assert_eq!(vmx::HOST.label(true, true), "vmx ept=1 pml");
    }
}
