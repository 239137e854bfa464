//! Emulated hosts: a [`Request`] goes in, the host boots and runs its commands, and an [`Outcome`]
//! comes back.
//!
//! An [`Emulator`] holds the differences between beds. Each bed is a file and a line in [`HOSTS`].
//! The QEMU beds share [`qemu`]. All share [`Request`], [`image`] (the initramfs), and
//! [`run`](self::run()) with the results line and the time limit.

pub mod arm64;
pub mod cloud;
pub mod disk;
pub mod doctor;
pub mod guest;
pub mod image;
pub mod initramfs;
pub mod kexec;
pub mod parameter;
mod progress;
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

/// Every emulated host. The first is the default.
pub static HOSTS: [Emulated; 3] = [svm::HOST, vmx::HOST, arm64::HOST];

/// A program that emulates a host with KVM.
pub trait Emulator: Sync {
    /// Its name on the command line and in results.
    fn name(&self) -> &'static str;

    /// What it emulates, for the command line's help.
    fn about(&self) -> &'static str;

    /// The bed's purpose, for `cargo lab doctor`.
    fn purpose(&self) -> &'static str;

    /// The programs on this machine that the bed needs.
    fn programs(&self) -> &'static [&'static str];

    /// The architecture of its processor.
    fn architecture(&self) -> Architecture {
        Architecture::X86
    }

    /// KVM's modules, if the host's kernel has it as modules.
    fn modules(&self) -> &'static [&'static str];

    /// The name of this second stage: `npt=1`.
    fn mode(&self, second_stage: bool) -> String;

    /// The module parameters for this second stage: `kvm_amd.npt=1`.
    fn parameters(&self, second_stage: bool) -> Vec<String>;

    /// The serial ports' names in the host's kernel.
    fn ports(&self) -> Ports;

    /// The host's clock advances by this for each instruction.
    fn nanoseconds_per_instruction(&self) -> f64;

    /// Whether it has a processor with page-modification logging. The error has the reason and an
    /// alternative.
    fn has_pml(&self) -> std::result::Result<(), &'static str>;

    /// Whether its hosts can run at `pace`. The error has the reason and an alternative.
    fn has_pace(&self, pace: Pace) -> std::result::Result<(), &'static str>;

    /// Whether two CPUs take turns of a few instructions. Lock contention then differs from a real
    /// processor's. The clock still counts instructions.
    fn takes_turns(&self) -> bool {
        false
    }

    /// Fails if this machine lacks something, before anything is fetched or built.
    fn ready(&self) -> Result<()>;

    /// What figures depend on besides this laboratory: the version of an emulator that is installed
    /// on this machine.
    fn version(&self) -> Result<String>;

    /// The command that starts the emulator, and where its host's results arrive.
    fn command(&self, start: &Start) -> Result<(Command, Results)>;

    /// The command for a host with its console on this terminal.
    fn shell(&self, _start: &Start) -> Result<Command> {
        Err(Error::Usage(format!("{} has no terminal: use another bed, or run a command", self.name())))
    }

    /// Whether this line of the emulator's standard error is irrelevant to a host's failure.
    fn is_noise(&self, _line: &str) -> bool {
        false
    }
}

/// Names of serial ports below /dev.
#[derive(Clone, Copy)]
pub struct Ports {
    /// The port of the kernel's console and of shells.
    pub console: &'static str,
    /// The results line's port, which carries only frames.
    pub results: &'static str,
}

/// The arguments of an emulator's start.
pub struct Start<'a> {
    /// Holds what the emulator needs and this machine does not have.
    pub cache: &'a Cache,
    /// The requested host.
    pub request: &'a Request,
    /// The host's initramfs.
    pub initrd: &'a Path,
    /// A directory for this start alone.
    pub dir: &'a Path,
}

impl Start<'_> {
    /// The file for the host's console output.
    pub fn console(&self) -> PathBuf {
        self.dir.join("console.log")
    }
}

/// Where a host's results line arrives.
pub enum Results {
    /// On the emulator's standard output.
    Stdout,
    /// In a FIFO that the emulator opens.
    Fifo(PathBuf),
}

/// One of [`HOSTS`].
#[derive(Clone, Copy)]
pub struct Emulated(&'static dyn Emulator);

impl Emulated {
    /// The first bed with hosts of `architecture`.
    pub fn of(architecture: Architecture) -> Self {
        let bed = HOSTS.into_iter().find(|bed| bed.architecture() == architecture);
        bed.expect("each architecture is that of a bed")
    }

    /// `svm npt=0`, `vmx ept=1 pml`: the host's name in figures and messages.
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
