//! Why a machine cannot be created or run, and whose fault that is.

use std::io;
use std::path::PathBuf;

use super::{MAX_CPUS, virtio};
use vellum_devices::vmgenid;
use vellum_kvm::arch::{boot, gsi, irqchip, regs, tables};
use vellum_kvm::vm::{self, vcpu};
use vellum_machine::state::Error as StateError;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// Why a machine cannot be created or run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be opened.
    #[error("{}: {error}; use a file that exists and that this user can read", path.display())]
    Open {
        /// The field that names the file.
        field: Field,
        /// The file's path.
        path: PathBuf,
        /// The host's error.
        error: io::Error,
    },
    /// The kernel, the initrd or the command line is wrong.
    #[error("{value}: {error}")]
    Boot {
        /// The value at fault.
        value: String,
        /// What is wrong and what would work.
        error: boot::Error,
    },
    /// No vCPUs, or more than there are APIC IDs without interrupt remapping.
    #[error("{0}: a Linux guest can have from 1 to {MAX_CPUS}")]
    Cpus(usize),
    /// The board does not have this kind of serial port.
    #[error("a PC has a 16550 alone; leave it out")]
    Uart,
    /// KVM refuses, or memory is the problem.
    #[error(transparent)]
    Vm(#[from] vm::Error),
    /// Memory.
    #[error(transparent)]
    Memory(#[from] vellum_kvm::memory::Error),
    /// A vCPU's thread.
    #[error(transparent)]
    Vcpu(#[from] vcpu::Error),
    /// CPU features.
    #[error(transparent)]
    Cpuid(#[from] vellum_kvm::arch::cpuid::Error),
    /// The interrupt controller.
    #[error(transparent)]
    Irqchip(#[from] irqchip::Error),
    /// The serial port's or the VM generation ID's interrupt.
    #[error(transparent)]
    Gsi(#[from] gsi::Error),
    /// A virtio device.
    #[error(transparent)]
    Virtio(#[from] virtio::Error),
    /// The VM generation ID.
    #[error(transparent)]
    VmGenId(#[from] vmgenid::Error),
    /// The target of the serial port.
    #[error("{0}")]
    Serial(#[from] vellum_devices::console::OpenError),
    /// The tables that describe the board.
    #[error(transparent)]
    Tables(#[from] tables::Error),
    /// The initial registers.
    #[error(transparent)]
    Regs(#[from] regs::Error),
    /// Two devices have the same address.
    #[error(transparent)]
    Bus(#[from] vellum_devices::bus::Overlap),
    /// Saved state.
    #[error(transparent)]
    State(#[from] StateError),
    /// The host refuses a descriptor, or the terminal refuses its mode.
    #[error("{0}: {1}")]
    Host(&'static str, #[source] io::Error),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Open { field, .. } => ErrorOrigin::user(*field),
            Self::Boot { error, .. } => error.origin(),
            Self::Cpus(_) => ErrorOrigin::user(Field::Cpus),
            Self::Uart => ErrorOrigin::user(Field::Uart),
            Self::Vm(error) => error.origin(),
            Self::Memory(error) => error.origin(),
            Self::Vcpu(error) => error.origin(),
            Self::Cpuid(error) => error.origin(),
            Self::Irqchip(error) => error.origin(),
            Self::Gsi(error) => error.origin(),
            Self::Virtio(error) => error.origin(),
            Self::VmGenId(error) => error.origin(),
            Self::Serial(_) => ErrorOrigin::user(Field::Serial),
            Self::Tables(error) => error.origin(),
            Self::Regs(error) => error.origin(),
            Self::State(error) => error.origin(),
            Self::Bus(_) | Self::Host(..) => ErrorOrigin::HOST,
        }
    }
}
