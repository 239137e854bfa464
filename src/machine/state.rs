//! The orders in which a machine of either kind is saved and restored, and the state that both
//! kinds have: vCPUs and a clock.
//!
//! Saving happens while the machine is paused. The vCPUs come first, in parallel, each on its own
//! thread; then the clock, the interrupt controller and the devices. No vCPU is queried afterwards,
//! because a query makes KVM write to guest memory (stolen time).
//!
//! Restoring begins with the vCPUs and their local APICs, then the interrupt controller, then the
//! devices. Devices raise their unacknowledged interrupts again; a local APIC that is restored
//! later would lose them. The clock comes last, because KVM compares it with the TSCs of all vCPUs.

use std::sync::{Arc, OnceLock};

use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};

use super::section::{self, Section, Sections};
use vellum_kvm::arch::clocks::{self, Clock, ClockPolicy};
use vellum_kvm::arch::cpuid::Leaf;
use vellum_kvm::arch::irqchip::{self, HeldVectors, Irqchip};
use vellum_kvm::arch::state::{self, Context};
use vellum_kvm::memory::{self, Memory, Slot};
use vellum_kvm::vm::quiesced::Quiesced;
use vellum_kvm::vm::vcpu;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin};
use vellum_sys::plant::{self, Mistake};

/// The versions of the sections that every machine has.
const VCPU: u16 = 1;
const CLOCK: u16 = 1;
const CPUID: u16 = 1;

/// Why a machine cannot be saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A vCPU's state, with its index.
    #[error("vCPU {0}: {1}")]
    State(usize, #[source] state::Error),
    /// The clock's state.
    #[error(transparent)]
    Clock(state::Error),
    /// The interrupt controller's state.
    #[error(transparent)]
    Irqchip(#[from] irqchip::Error),
    /// A vCPU's thread.
    #[error(transparent)]
    Vcpu(#[from] vcpu::Error),
    /// The sections are not this machine's.
    #[error(transparent)]
    Section(#[from] section::Error),
    /// A device's state, with its name.
    #[error("{0}: {1}")]
    Device(String, #[source] Box<dyn std::error::Error + Send + Sync>),
    /// The description is not one of a machine of this kind.
    #[error("the description of the machine: {0}; it is damaged or from another version")]
    Description(#[source] serde_json::Error),
    /// Memory cannot be divided into the described slots.
    #[error("the machine has memory that cannot be here: {0}")]
    Memory(String),
    /// Dividing memory failed.
    #[error(transparent)]
    Slots(#[from] memory::Error),
    /// Nothing has been restored.
    #[error("there is nothing to commit: this machine was not restored")]
    NotRestored,
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Irqchip(error) => error.origin(),
            Self::Slots(error) => error.origin(),
            Self::Section(_) | Self::Device(..) | Self::Description(_) | Self::Memory(_) => ErrorOrigin::USER,
            Self::State(..) | Self::Clock(_) | Self::Vcpu(_) | Self::NotRestored => ErrorOrigin::HOST,
        }
    }
}

/// A memslot in a description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// Its guest-physical address.
    pub gpa: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

impl From<&Slot> for Place {
    fn from(slot: &Slot) -> Self {
        Self { gpa: slot.gpa(), bytes: slot.bytes() }
    }
}

/// Divides `memory`, which has been mapped for it, into the same slots as on the source. The
/// backing may differ.
///
/// # Errors
/// It cannot be divided so.
pub fn cut_like(memory: &mut Memory, places: &[Place]) -> Result<(), Error> {
    let mut cuts = Vec::with_capacity(places.len());
    let mut end = 0u64;
    for place in places {
        end = end.saturating_add(place.bytes);
        cuts.push(end);
    }
    memory.cut_at(&cuts)?;
    let here: Vec<Place> = memory.slots().iter().map(Place::from).collect();
    if here == places {
        Ok(())
    } else {
        let (here, places) = (here.len(), places.len());
        Err(Error::Memory(format!("its {places} slots do not make up RAM as it lies here, in {here}")))
    }
}

/// The state that every machine has: vCPUs and a clock.
#[derive(Clone, Debug)]
pub struct Processors {
    vcpus: Arc<Vec<state::State>>,
    clock: Clock,
    /// CPUID from the machine's description. A KVM may report more for a vCPU than it was given.
    pub cpuid: Vec<Leaf>,
}

/// The name of a vCPU's section: `vcpu0` and so on.
fn vcpu_name(index: usize) -> String {
    format!("vcpu{index}")
}

/// All results, or the error of the first vCPU that has one.
fn first<T>(results: Vec<Result<T, state::Error>>) -> Result<Vec<T>, Error> {
    let named = |(index, result): (usize, Result<T, _>)| result.map_err(|e| Error::State(index, e));
    results.into_iter().enumerate().map(named).collect()
}

impl Processors {
    /// Reads the state from KVM: the vCPUs in parallel, then the clock. `cpuid` comes from the
    /// machine's description.
    ///
    /// # Errors
    /// KVM refuses, or a guest has state that cannot be saved.
    pub fn save(
        quiesced: &Quiesced<'_>,
        vm: &VmFd,
        context: &Context,
        cpuid: Vec<Leaf>,
    ) -> Result<Self, Error> {
        let context = context.clone();
        let mut vcpus = first(quiesced.each(move |fd| state::State::save(fd, &context))?)?;
        if plant::is(Mistake::OldVcpu) {
            static FIRST: OnceLock<state::State> = OnceLock::new();
            if let Some(last) = vcpus.last_mut() {
                *last = FIRST.get_or_init(|| last.clone()).clone();
            }
        }
        Ok(Self { vcpus: Arc::new(vcpus), clock: Clock::save(vm).map_err(Error::Clock)?, cpuid })
    }

    /// Their sections.
    pub fn sections(&self) -> Vec<Section> {
        let vcpus = self.vcpus.iter().enumerate();
        let mut sections: Vec<_> = vcpus.map(|(at, vcpu)| Section::new(vcpu_name(at), VCPU, vcpu)).collect();
        sections.push(Section::new("clock", CLOCK, &self.clock));
        sections.push(Section::new("cpuid", CPUID, &self.cpuid));
        sections
    }

    /// Takes the sections of `cpus` vCPUs and the clock out of `sections`.
    ///
    /// # Errors
    /// A section is missing or damaged.
    pub fn take(sections: &mut Sections, cpus: usize) -> Result<Self, section::Error> {
        let vcpu = |index| sections.take(&vcpu_name(index), VCPU);
        let vcpus = (0..cpus).map(vcpu).collect::<Result<_, _>>()?;
        let (clock, cpuid) = (sections.take("clock", CLOCK)?, sections.take("cpuid", CPUID)?);
        Ok(Self { vcpus: Arc::new(vcpus), clock, cpuid })
    }

    /// The interrupts that the vCPUs hold.
    pub fn held(&self) -> HeldVectors {
        state::held(&self.vcpus)
    }

    /// Restores a machine in the order that the module's head gives. `devices` restores the
    /// devices. Returns the TSC frequency in kHz from now on.
    ///
    /// # Errors
    /// KVM refuses, or the state is not this machine's.
    pub fn restore<E: From<Error>>(
        &self,
        quiesced: &Quiesced<'_>,
        vm: &VmFd,
        context: &Context,
        meanwhile: ClockPolicy,
        irqchip: Option<(&Irqchip, irqchip::State)>,
        devices: impl FnOnce() -> Result<(), E>,
    ) -> Result<Option<u32>, E> {
        let devices_first = plant::is(Mistake::DevicesBeforeLapics);
        let vcpus = || self.restore_vcpus(quiesced, context, meanwhile);
        let mut khz = None;
        if !devices_first {
            khz = vcpus()?;
        }
        if let Some((irqchip, state)) = irqchip {
            irqchip.restore(state).map_err(Error::from)?;
        }
        devices()?;
        if devices_first {
            khz = vcpus()?;
        }
        if !plant::is(Mistake::NoClock) {
            self.clock.restore(vm, meanwhile).map_err(Error::Clock)?;
        }
        Ok(khz)
    }

    fn restore_vcpus(
        &self,
        quiesced: &Quiesced<'_>,
        context: &Context,
        meanwhile: ClockPolicy,
    ) -> Result<Option<u32>, Error> {
        let (states, asked) = (self.vcpus.clone(), context.clone());
        // The first vCPU's TSC tells the others how much time has passed. Its thread does all of
        // its work at once, because waking it twice takes longer than that.
        let first = quiesced.first(move |fd| {
            let onward = states[0].onward(fd, &asked, meanwhile)?;
            states[0].restore(fd, &asked, onward, meanwhile)?;
            Ok((onward, clocks::khz(fd)))
        })?;
        let (onward, khz) = first.map_err(|error| Error::State(0, error))?;
        let results = quiesced.others_their_own(|index| {
            let (states, context) = (self.vcpus.clone(), context.clone());
            move |fd: &_| states[index].restore(fd, &context, onward, meanwhile)
        })?;
        let named = |(index, result): (usize, Result<_, _>)| result.map_err(|e| Error::State(index, e));
        (1..).zip(results).try_for_each(named)?;
        Ok(khz)
    }

    /// Restores the state that makes KVM write to guest memory.
    ///
    /// # Errors
    /// KVM refuses.
    pub fn commit(&self, quiesced: &Quiesced<'_>, context: &Context) -> Result<(), Error> {
        let results = quiesced.each_its_own(|index| {
            let (states, context) = (self.vcpus.clone(), context.clone());
            move |fd: &_| states[index].commit(fd, &context)
        })?;
        first(results).map(drop)
    }
}
