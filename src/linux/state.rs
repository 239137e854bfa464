//! The PC's whole state except its memory, and its description, from which an equal machine is
//! created.
//!
//! [`vellum_machine::state`] has the order in which parts are saved and restored. This module says
//! which parts there are.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::virtio::{self, PciBus};
use super::{Error, LinuxMachine};
use vellum_control::MigrationBlocker;
use vellum_devices::virtio::transport::{self, Codec};
use vellum_devices::virtio::{RestoreError, pci};
use vellum_devices::vmgenid::VmGenId;
use vellum_devices::{rtc, serial};
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::arch::cpuid::Leaf;
use vellum_kvm::arch::fixed::Uart;
use vellum_kvm::arch::irqchip::{self, Mode};
use vellum_kvm::vm::Vm;
use vellum_kvm::vm::quiesced::Quiesced;
use vellum_kvm::vm::vcpu::Vcpu;
use vellum_machine::section::{self, Section, Sections};
use vellum_machine::state::{self, Place, Processors};

/// The versions of the sections.
const IRQCHIP: u16 = 1;
const SERIAL: u16 = 1;
/// The section of each kind of serial port.
const NS16550: &str = "serial";
const PL011: &str = "pl011";
const RTC: u16 = 1;
const VIRTIO: u16 = 1;
const PCI: u16 = 1;

/// The section of the PCI bus. No device has this name.
const BUS: &str = "pci";

/// The kind of machine. This module describes only one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A PC with a kernel.
    Pc,
}

/// The description of a PC. A process with devices of the same kinds creates an equal PC from it.
/// The devices' targets are that process's own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The kind of machine.
    pub kind: Kind,
    /// The number of vCPUs.
    pub cpus: usize,
    /// The size of RAM in bytes.
    pub memory: u64,
    /// The memslots that RAM is divided into.
    pub slots: Vec<Place>,
    /// The interrupt controller.
    pub irqchip: Mode,
    /// The serial port.
    #[serde(default, skip_serializing_if = "Uart::is_16550")]
    pub uart: Uart,
    /// The CPUID of its first vCPU.
    pub cpuid: Vec<Leaf>,
    /// The frequency of its TSCs in kHz, if KVM reports it.
    pub tsc_khz: Option<u32>,
    /// Whether it has the devices of kvm-unit-tests.
    pub test_devices: bool,
    /// The guest-physical address of its VM generation ID, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmgenid: Option<u64>,
    /// How its guest reaches its virtio devices.
    #[serde(default, skip_serializing_if = "Codec::is_mmio")]
    pub transport: Codec,
    /// Its virtio devices, in the order of their addresses.
    pub devices: Vec<Device>,
}

/// A virtio device in a description.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Its name: `disk0`, `net0`, `vsock`, …
    pub name: String,
    /// Its description.
    pub device: transport::Description,
}

impl Description {
    /// Parses a description.
    ///
    /// # Errors
    /// It is not the description of a PC.
    pub fn from_json(value: Value) -> Result<Self, state::Error> {
        serde_json::from_value(value).map_err(state::Error::Description)
    }
}

/// A PC's state, as far as it can be parsed without the machine.
#[derive(Clone, Debug)]
pub struct State {
    processors: Processors,
    irqchip: irqchip::State,
    serial: serial::State,
    rtc: rtc::State,
    /// The state of the PCI bus, if there is one.
    pci: Option<PciState>,
    /// In the order of the devices.
    virtio: Vec<transport::State>,
}

/// The state of a PCI bus.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PciState {
    /// The address register of the configuration spaces.
    address: u32,
    /// In the order of the devices.
    functions: Vec<pci::State>,
}

impl State {
    /// Parses the state of a PC with this number of vCPUs and virtio devices of these names.
    ///
    /// # Errors
    /// A section is missing, unknown, duplicate, damaged or of another version.
    pub fn read<'a>(
        sections: Vec<Section>,
        cpus: usize,
        devices: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, section::Error> {
        let mut sections = Sections::new(sections)?;
        let state = Self {
            processors: Processors::take(&mut sections, cpus)?,
            irqchip: sections.take("irqchip", IRQCHIP)?,
            serial: match sections.has(PL011) {
                true => serial::State::Pl011(sections.take(PL011, SERIAL)?),
                false => serial::State::Ns16550(sections.take(NS16550, SERIAL)?),
            },
            rtc: sections.take("rtc", RTC)?,
            pci: sections.has(BUS).then(|| sections.take(BUS, PCI)).transpose()?,
            virtio: devices.into_iter().map(|name| sections.take(name, VIRTIO)).collect::<Result<_, _>>()?,
        };
        sections.end()?;
        Ok(state)
    }

    /// The sections that [`Self::read`] parses, for devices of these names.
    pub fn sections<'a>(&self, devices: impl IntoIterator<Item = &'a str>) -> Vec<Section> {
        let mut sections = self.processors.sections();
        sections.push(Section::new("irqchip", IRQCHIP, &self.irqchip));
        sections.push(match &self.serial {
            serial::State::Ns16550(port) => Section::new(NS16550, SERIAL, port),
            serial::State::Pl011(port) => Section::new(PL011, SERIAL, port),
        });
        sections.push(Section::new("rtc", RTC, &self.rtc));
        sections.extend(self.pci.iter().map(|pci| Section::new(BUS, PCI, pci)));
        let devices = devices.into_iter().zip(&self.virtio);
        sections.extend(devices.map(|(name, device)| Section::new(name, VIRTIO, device)));
        sections
    }
}

impl PciBus {
    fn save(&self) -> PciState {
        let functions = self.functions.iter().map(|function| function.save_function()).collect();
        PciState { address: self.host.address(), functions }
    }

    fn restore(&self, state: &PciState) -> Result<(), state::Error> {
        if state.functions.len() != self.functions.len() {
            let what = "another number of functions than there are devices";
            return Err(section::Error::Implausible { name: BUS.into(), what }.into());
        }
        self.host.set_address(state.address);
        let damaged = |error: RestoreError| state::Error::Device(BUS.into(), error.into());
        let mut functions = self.functions.iter().zip(&state.functions);
        functions.try_for_each(|(function, state)| function.restore_function(state).map_err(damaged))
    }
}

impl LinuxMachine {
    /// Its VM, and proof that nothing writes to its memory. The machine must be paused.
    ///
    /// # Errors
    /// A vCPU is not paused, or a device hangs.
    pub fn quiesced(&mut self) -> Result<(&Vm, Quiesced<'_>), Error> {
        let mut stopped = Ok(());
        let quiesced = Quiesced::new(&mut self.vcpus, || stopped = self.virtio.quiesce())?;
        stopped?;
        Ok((&self.vm, quiesced))
    }

    /// Whether this host can give it a TSC frequency other than the host's own.
    pub fn scales_tsc(&self) -> bool {
        self.context.scales_tsc
    }

    /// Allows restoring a guest whose TSC frequency this host cannot provide.
    pub fn allow_other_tsc(&mut self) {
        self.context.allows_other_tsc = true;
    }

    /// Its description.
    pub fn description(&self) -> Description {
        let devices = self.virtio.devices.iter();
        Description {
            kind: Kind::Pc,
            cpus: self.vcpus.len(),
            memory: self.vm.memory.config.size,
            slots: self.vm.memory.slots().iter().map(Place::from).collect(),
            irqchip: self.features.irqchip,
            uart: self.serial.kind(),
            cpuid: self.features.cpuid.clone(),
            tsc_khz: self.features.tsc_khz,
            test_devices: self.features.test_devices,
            vmgenid: self.vmgenid.as_ref().map(VmGenId::at),
            transport: if self.virtio.pci.is_some() { Codec::Pci } else { Codec::Mmio },
            devices: devices
                .map(|wired| Device { name: wired.name.clone(), device: wired.device.describe() })
                .collect(),
        }
    }

    pub(super) fn save_state(&mut self) -> Result<Vec<Section>, Error> {
        let (context, cpuid) = (self.context.clone(), self.features.cpuid.clone());
        let (vm, quiesced) = self.quiesced()?;
        let processors = Processors::save(&quiesced, &vm.fd, &context, cpuid)?;
        // The guest may have mounted a directory since it was asked first. Overlays were there then.
        if let Some(MigrationBlocker { name, why, .. }) = self.virtio.fork_stays() {
            return Err(virtio::Error::Stays(name, why).into());
        }
        let state = State {
            irqchip: self.irqchip.save(&processors.held())?,
            processors,
            serial: self.serial.save(),
            rtc: self.rtc.save(),
            pci: self.virtio.pci.as_ref().map(PciBus::save),
            virtio: self.virtio.devices.iter().map(|wired| wired.device.save()).collect(),
        };
        Ok(state.sections(self.virtio.devices.iter().map(|wired| wired.name.as_str())))
    }

    pub(super) fn restore_state(
        &mut self,
        sections: Vec<Section>,
        meanwhile: ClockPolicy,
    ) -> Result<(), Error> {
        self.vcpus.iter().try_for_each(Vcpu::ready)?;
        let names = self.virtio.devices.iter().map(|wired| wired.name.as_str());
        let State { processors, irqchip, serial, rtc, pci, virtio } =
            State::read(sections, self.vcpus.len(), names).map_err(state::Error::from)?;
        let quiesced = Quiesced::new(&mut self.vcpus, || ())?;
        let devices = || -> Result<(), Error> {
            let damaged = |name: &str, error: Box<dyn std::error::Error + Send + Sync>| {
                state::Error::Device(name.into(), error)
            };
            self.serial.restore(serial).map_err(|error| damaged("serial", error.into()))?;
            self.rtc.restore(rtc, meanwhile).map_err(|error| damaged("rtc", error.into()))?;
            // The bus comes first: devices signal the vectors that their drivers have chosen.
            match (&self.virtio.pci, pci) {
                (None, None) => {}
                (Some(bus), Some(state)) => bus.restore(&state)?,
                (Some(_), None) => return Err(state::Error::from(section::Error::Missing(BUS.into())).into()),
                (None, Some(_)) => return Err(state::Error::from(section::Error::Unknown(BUS.into())).into()),
            }
            for (wired, state) in self.virtio.devices.iter().zip(virtio) {
                wired.device.restore(state).map_err(|error| damaged(&wired.name, error.into()))?;
            }
            Ok(())
        };
        let irqchip = Some((&*self.irqchip, irqchip));
        let tsc = processors.restore(&quiesced, &self.vm.fd, &self.context, meanwhile, irqchip, devices)?;
        self.features.cpuid.clone_from(&processors.cpuid);
        self.features.tsc_khz = tsc;
        self.arrived = Some(processors);
        Ok(())
    }

    pub(super) fn commit_state(&mut self, forked: bool) -> Result<(), Error> {
        let processors = self.arrived.clone().ok_or(state::Error::NotRestored)?;
        self.virtio.retake()?;
        let committed = Quiesced::new(&mut self.vcpus, || ())
            .map_err(state::Error::from)
            .and_then(|quiesced| processors.commit(&quiesced, &self.context))
            .map_err(Error::from)
            .and_then(|()| Ok(self.irqchip.commit()?));
        match committed {
            Ok(false) => {}
            Ok(true) => self.virtio.devices.iter().for_each(|wired| wired.device.interrupt().raise_again()),
            Err(error) => {
                self.virtio.release();
                return Err(error);
            }
        }
        self.arrived = None;
        self.virtio.devices.iter().for_each(|wired| wired.device.arrived(forked));
        Ok(())
    }
}
