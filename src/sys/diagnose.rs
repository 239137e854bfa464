//! Says whose fault an error is, and which field of the configuration it is about.
//!
//! An error says what is wrong and what would work. It does not name the flag that a value came
//! from, because one field has different flags in different subcommands: a machine's memory is
//! `--memory` in one and `-b` in another. Instead it implements [`Diagnose`], and `cli/` puts the
//! flag in front, from each subcommand's table.

use std::error::Error;

/// Who can fix it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The user: a different command line would have worked.
    User,
    /// The host, or Vellum on it: no other value of a flag would have helped.
    Host,
    /// The guest: it did something that its kind of machine does not allow.
    Guest,
}

/// A configurable field that an error can be about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// What backs guest memory.
    Backing,
    /// The file for what lies between two kernels.
    Between,
    /// How many pages one clear of the dirty log covers.
    ClearChunk,
    /// The kernel's command line.
    Cmdline,
    /// When the dirty log is collected.
    Collect,
    /// The CPU model.
    CpuModel,
    /// CPU features.
    Cpuid,
    /// Whether a guest may load CR3 without an exit.
    Cr3Cache,
    /// How many vCPUs.
    Cpus,
    /// A device of the guest, by the key of its kind (`devices/virtio`).
    Device(&'static str),
    /// Whether a disk is accepted although it has changed.
    DiskChanged,
    /// Whether the guest's TSC may have another frequency.
    OtherTsc,
    /// Where a debugger connects.
    Gdb,
    /// The guest-physical address at which memory starts.
    GuestAddress,
    /// The page size of the guest's own page tables.
    GuestPage,
    /// How much Arm's KVM splits at a time.
    EagerSplit,
    /// The initial RAM disk.
    Initrd,
    /// Which interrupt controllers there are, and at which addresses.
    Irqchip,
    /// The kernel image.
    Kernel,
    /// The address that a migration's source connects to.
    Listen,
    /// Whether guest memory is locked.
    Lock,
    /// The size of guest memory.
    Memory,
    /// The machine's name, which also names its control socket.
    Name,
    /// Whether memory is loaded on demand.
    OnDemand,
    /// Which faults a userfaultfd handles.
    PageFaults,
    /// Which CPUs vCPUs run on.
    Pin,
    /// Whether guest memory is populated beforehand.
    Prealloc,
    /// The boot protocol by which a kernel is entered.
    Protocol,
    /// The number of entries of a dirty ring.
    RingEntries,
    /// Seccomp and Landlock.
    Sandbox,
    /// The kind of serial port.
    Uart,
    /// The target of the serial port.
    Serial,
    /// The number of memslots that guest memory is divided into.
    Slots,
    /// How the dirty log is collected.
    Tracker,
    /// The user whose privileges are kept.
    User,
}

/// Who can fix an error, and the field that it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorOrigin {
    /// Who can fix it.
    pub whose: Whose,
    /// The field that the error is about, if any.
    pub field: Option<Field>,
    /// Whether this host lacks what was requested, so that another host may have it. A test is then
    /// skipped instead of failed.
    pub lacking: bool,
}

impl ErrorOrigin {
    /// The host's fault, and about no field.
    pub const HOST: Self = Self { whose: Whose::Host, field: None, lacking: false };
    /// The user's fault, and about no field or about several.
    pub const USER: Self = Self { whose: Whose::User, field: None, lacking: false };
    /// The guest's fault, and about no field.
    pub const GUEST: Self = Self { whose: Whose::Guest, field: None, lacking: false };

    /// The user's fault: `field` has a value that does not work.
    pub const fn user(field: Field) -> Self {
        Self { whose: Whose::User, field: Some(field), lacking: false }
    }

    /// The host's fault: it cannot do what `field` asks for.
    pub const fn host(field: Field) -> Self {
        Self { whose: Whose::Host, field: Some(field), lacking: false }
    }

    /// The same origin, for something that this host lacks.
    pub const fn lacking(self) -> Self {
        Self { lacking: true, ..self }
    }
}

/// An error of any crate.
pub trait Diagnose: Error {
    /// The error's origin. An error that wraps another returns the inner one's origin, unless it
    /// knows better.
    fn origin(&self) -> ErrorOrigin;

    /// Who can fix it.
    fn whose(&self) -> Whose {
        self.origin().whose
    }

    /// The field that the error is about, if any.
    fn field(&self) -> Option<Field> {
        self.origin().field
    }
}
