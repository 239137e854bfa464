//! How a run ends.

/// Why Vellum exits, and its exit status. `vellum run --help` prints this list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The guest powered off, or its workload is done.
    PowerOff,
    /// The VMM or the host failed.
    Error,
    /// The command line or a file is wrong.
    Usage,
    /// A test or benchmark did not run completely: this host lacks something, or the time was over.
    /// It found no failure.
    NotRun,
    /// The guest asked for a reset.
    Reset,
    /// The guest reported a panic.
    Panic,
    /// A triple fault.
    TripleFault,
    /// `KVM_RUN` failed.
    Kvm,
    /// The command that the guest agent ran failed.
    AgentCommand,
    /// The guest has moved to another process.
    Moved,
    /// `--timeout` ran out.
    Timeout,
    /// A signal ended the run.
    Signal(i32),
    /// The guest ended itself with this status through the debug exit port (multiboot guests only).
    Guest(u8),
}

impl Exit {
    /// The process's exit status.
    pub fn code(self) -> u8 {
        match self {
            Self::PowerOff => 0,
            Self::Error => 1,
            Self::Usage => 2,
            Self::NotRun => 4,
            Self::Reset => 10,
            Self::Panic => 11,
            Self::TripleFault => 12,
            Self::Kvm => 13,
            Self::AgentCommand => 14,
            Self::Moved => 15,
            Self::Timeout => 124,
            Self::Signal(signal) => 128 + (signal & 0x7f) as u8,
            Self::Guest(status) => status,
        }
    }
}

/// The list in `--help`.
pub const HELP: &str = "\
Exit status:
  0 power-off, or the workload is done    12 triple fault
  1 VMM or host error, or a failed test   13 KVM error
  2 usage or bad input                    14 not run by the agent
  4 test or bench: not run, or not        15 the guest has moved elsewhere
    all of what was asked for             124 timeout
  10 reset                                128+N ended by signal N
  11 guest panic
A multiboot guest that ends by port 0xf4 chooses its status: (code << 1) | 1.";
