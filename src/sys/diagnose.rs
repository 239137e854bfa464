//! Whose fault an error is, and which field of the configuration it is about.
//!
//! An error says what is wrong and what would work. It does not name the flag that a value came from, because one field has
//! other flags in other subcommands: a machine's memory is `--memory` of one and `-b` of the next. Instead it implements
//! [`Diagnose`], and `cli/` puts the flag in front, from a table that each subcommand has.

use std::error::Error;

/// Who can mend it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The user: another command line would have worked.
    User,
    /// The host, or Vellum on it: no other value of a flag would have helped.
    Host,
    /// The guest: what it does is not what its kind of machine allows.
    Guest,
}

/// What can be configured, and so what an error can be about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// What backs guest memory.
    Backing,
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
    /// A device of the guest's, by the key of its kind (`devices/virtio`).
    Device(&'static str),
    /// Whether a disk that is not as it was is taken.
    DiskChanged,
    /// Where a debugger connects.
    Gdb,
    /// Where memory starts in the guest's physical address space.
    GuestAddress,
    /// The page size of the guest's own tables.
    GuestPage,
    /// How much Arm's KVM splits at a time.
    EagerSplit,
    /// The initial RAM disk.
    Initrd,
    /// Which interrupt controllers there are, and where.
    Irqchip,
    /// The kernel image.
    Kernel,
    /// Where a source connects.
    Listen,
    /// Whether guest memory is locked.
    Lock,
    /// How much guest memory.
    Memory,
    /// The machine's name, and with it its control socket.
    Name,
    /// Whether memory comes as somebody wants it.
    OnDemand,
    /// Which faults a userfaultfd handles.
    PageFaults,
    /// Which CPUs vCPUs run on.
    Pin,
    /// Whether guest memory is populated beforehand.
    Prealloc,
    /// How a kernel is entered.
    Protocol,
    /// Entries of a dirty ring.
    RingEntries,
    /// Seccomp and Landlock.
    Sandbox,
    /// What the serial port is.
    Uart,
    /// Where the serial port leads.
    Serial,
    /// Into how many memslots guest memory is cut.
    Slots,
    /// How the dirty log is collected.
    Tracker,
    /// Whose privileges are left.
    User,
}

/// What an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorOrigin {
    /// Who can mend it.
    pub whose: Whose,
    /// The field that it is about, where it is about one.
    pub field: Option<Field>,
    /// Whether this host lacks what was asked for, so that another one may have it: a test is skipped there, and has not failed.
    pub lacking: bool,
}

impl ErrorOrigin {
    /// The host's, and about no field.
    pub const HOST: Self = Self { whose: Whose::Host, field: None, lacking: false };
    /// The user's, and about no field or about several.
    pub const USER: Self = Self { whose: Whose::User, field: None, lacking: false };
    /// The guest's.
    pub const GUEST: Self = Self { whose: Whose::Guest, field: None, lacking: false };

    /// The user's, who gave `field` a value that does not work.
    pub const fn user(field: Field) -> Self {
        Self { whose: Whose::User, field: Some(field), lacking: false }
    }

    /// The host's, which cannot do what `field` asks for.
    pub const fn host(field: Field) -> Self {
        Self { whose: Whose::Host, field: Some(field), lacking: false }
    }

    /// The same, of something that this host lacks.
    pub const fn lacking(self) -> Self {
        Self { lacking: true, ..self }
    }
}

/// An error of any crate.
pub trait Diagnose: Error {
    /// What it is about; an error that passes another one on says what that one says, unless it knows better.
    fn origin(&self) -> ErrorOrigin;

    /// Who can mend it.
    fn whose(&self) -> Whose {
        self.origin().whose
    }

    /// The field that it is about.
    fn field(&self) -> Option<Field> {
        self.origin().field
    }
}
