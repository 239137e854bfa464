//! The whole state of a built-in guest except its memory, and the description from which another
//! process makes the same machine.
//!
//! This module says which parts the state has. [`vellum_machine::state`] sets the order in which
//! they are saved and restored.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::control::phase;
use super::guest::{Error, Guest};
use super::model::Model;
use super::run::{BuiltinMachine, RunConfig};
use super::{WriteConfig, journal, program::GuestPage};
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::arch::cpuid::Leaf;
use vellum_kvm::memory::MemoryConfig;
use vellum_kvm::vm::quiesced::Quiesced;
use vellum_machine::section::{self, Section, Sections};
use vellum_machine::state::{self, Place, Processors};

/// The version of the `run` section.
const RUN: u16 = 1;

/// The kind of machine. There is only one here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A guest without an OS.
    BuiltIn,
}

/// The description of a built-in guest. Another process makes the same machine from it, but chooses
/// the backing of the memory itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The kind of machine.
    pub kind: Kind,
    /// The number of vCPUs.
    pub cpus: usize,
    /// The size of the RAM in bytes.
    pub memory: u64,
    /// The memslots of the RAM, followed by the guest's own memslot.
    pub slots: Vec<Place>,
    /// What the guest does.
    pub write: WriteConfig,
    /// The page size of the guest's own tables.
    pub page: GuestPage,
    /// The CPU features that the user asked for, if any.
    pub features: Option<String>,
    /// The CPUID leaves that its first vCPU sees.
    pub cpuid: Vec<Leaf>,
    /// The frequency of its TSCs in kHz.
    pub tsc_khz: u32,
}

impl Description {
    /// Reads a description.
    ///
    /// # Errors
    /// If it does not describe a built-in guest, or describes an impossible one.
    pub fn from_json(value: Value) -> Result<Self, state::Error> {
        let read: Self = serde_json::from_value(value).map_err(state::Error::Description)?;
        match read.write.wrong() {
            None => Ok(read),
            Some(what) => Err(state::Error::Description(serde::de::Error::custom(what))),
        }
    }

    /// Returns the settings for running the same machine. The memory is as in `memory`, except for
    /// its size. No vCPU is pinned, and the run has no time limit.
    ///
    /// # Errors
    /// If the description names unknown CPU features.
    pub fn run(&self, memory: MemoryConfig) -> Result<RunConfig, state::Error> {
        let unknown = |error| state::Error::Description(serde::de::Error::custom(error));
        let cpuid = self.features.as_deref().map(str::parse).transpose().map_err(unknown)?;
        Ok(RunConfig {
            vcpus: self.cpus,
            pins: None,
            memory: MemoryConfig { size: self.memory, slots: 1, ..memory },
            write: self.write.clone(),
            page: self.page,
            cpuid: cpuid.unwrap_or_default(),
            dirty_ring: None,
            duration: None,
            fill: false,
        })
    }

    /// Returns the memslots of the RAM, without the guest's own.
    pub fn ram(&self) -> &[Place] {
        self.slots.split_last().map_or(&[], |(_, ram)| ram)
    }
}

/// The state of a run that is not in the guest's memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Progress {
    /// The model of each vCPU at its start.
    models: Vec<Model>,
    /// The value that each vCPU has rung, or 0 if it is still running.
    rung: Vec<u64>,
}

/// The state of a built-in guest, as far as it can be read without the guest itself.
#[derive(Clone, Debug)]
pub struct State {
    processors: Processors,
    progress: Progress,
}

impl State {
    /// Reads the state of a guest with `cpus` vCPUs and `pages` pages.
    ///
    /// # Errors
    /// If a section is missing, unknown, duplicate, damaged or of another version.
    pub fn read(sections: Vec<Section>, cpus: usize, pages: u64) -> Result<Self, section::Error> {
        let mut sections = Sections::new(sections)?;
        let processors = Processors::take(&mut sections, cpus)?;
        let progress: Progress = sections.take("run", RUN)?;
        sections.end()?;
        let damaged = |what| section::Error::Implausible { name: "run".into(), what };
        if progress.models.len() != cpus || progress.rung.len() != cpus {
            return Err(damaged("another number of vCPUs"));
        }
        if !progress.models.iter().all(|model| model.fits(pages)) {
            return Err(damaged("a model of other memory"));
        }
        Ok(Self { processors, progress })
    }
}

impl State {
    /// Returns the sections that [`Self::read`] reads.
    pub fn sections(&self) -> Vec<Section> {
        let mut sections = self.processors.sections();
        sections.push(Section::new("run", RUN, &self.progress));
        sections
    }

    /// Returns the model of each vCPU at its start.
    pub fn models(&self) -> &[Model] {
        &self.progress.models
    }
}

impl Guest {
    /// Saves the state that KVM keeps of the guest.
    fn processors(&mut self) -> Result<Processors, Error> {
        let (context, cpuid) = (self.context.clone(), self.cpuid.clone());
        let (vm, quiesced) = self.quiesced()?;
        Ok(Processors::save(&quiesced, &vm.fd, &context, cpuid)?)
    }
}

impl BuiltinMachine {
    /// Returns the description of this machine.
    pub fn description(&self) -> Description {
        let (guest, config) = (&self.guest, &self.config);
        let ram = guest.vm.memory.slots().iter();
        Description {
            kind: Kind::BuiltIn,
            cpus: guest.vcpus.len(),
            memory: guest.vm.memory.config.size,
            slots: ram.chain([&guest.slot]).map(Place::from).collect(),
            write: config.write.clone(),
            page: config.page,
            features: config.cpuid.switches().then(|| config.cpuid.to_string()),
            cpuid: guest.cpuid.clone(),
            tsc_khz: (guest.tsc_hz / 1000) as u32,
        }
    }

    pub(super) fn save_state(&mut self) -> Result<Vec<Section>, Error> {
        let processors = self.guest.processors()?;
        let progress = Progress { models: self.models.clone(), rung: self.guest.bell.rung() };
        Ok(State { processors, progress }.sections())
    }

    pub(super) fn restore_state(
        &mut self,
        sections: Vec<Section>,
        meanwhile: ClockPolicy,
    ) -> Result<(), Error> {
        let guest = &mut self.guest;
        guest.ready()?;
        let pages = self.config.memory.size / self.config.write.stride;
        let State { processors, progress } =
            State::read(sections, guest.vcpus.len(), pages).map_err(state::Error::from)?;
        let quiesced = Quiesced::new(&mut guest.vcpus, || ()).map_err(state::Error::from)?;
        let no_devices = || Ok::<_, state::Error>(());
        let tsc = processors.restore(&quiesced, &guest.vm.fd, &guest.context, meanwhile, None, no_devices)?;
        guest.cpuid.clone_from(&processors.cpuid);
        guest.tsc_hz = tsc.map_or(guest.tsc_hz, |khz| u64::from(khz) * 1000);
        self.models = progress.models;
        self.arrived = Some((processors, progress.rung));
        Ok(())
    }

    pub(super) fn commit_state(&mut self) -> Result<(), Error> {
        let Some((processors, rung)) = self.arrived.clone() else {
            return Err(state::Error::NotRestored.into());
        };
        let quiesced = Quiesced::new(&mut self.guest.vcpus, || ()).map_err(state::Error::from)?;
        processors.commit(&quiesced, &self.guest.context)?;
        journal::enter(&self.guest, phase::MOVED);
        self.guest.bell.set_rung(rung);
        self.arrived = None;
        self.goes_on = true;
        Ok(())
    }
}
