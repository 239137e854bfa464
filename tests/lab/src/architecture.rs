//! The architectures whose hosts are emulated: what cargo and Debian call them.

use clap::ValueEnum;

/// An architecture. The command line and files call it as the kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub enum Architecture {
    /// x86-64.
    X86,
    /// Arm, 64 bits.
    #[value(name = "arm64")]
    Arm,
}

impl Architecture {
    /// The target of static programs. It is named here although `.cargo/config.toml` has it,
    /// because cargo lets CARGO_BUILD_TARGET win.
    pub fn target(self) -> &'static str {
        match self {
            Self::X86 => "x86_64-unknown-linux-musl",
            Self::Arm => "aarch64-unknown-linux-musl",
        }
    }

    /// What the kernel's make calls it, and the fragments of its configuration.
    pub fn kernel(self) -> &'static str {
        match self {
            Self::X86 => "x86",
            Self::Arm => "arm64",
        }
    }

    /// What the names of its compilers begin with, as Debian has them on a machine of x86-64.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::X86 => "",
            Self::Arm => "aarch64-linux-gnu-",
        }
    }

    /// What Debian calls it.
    pub fn debian(self) -> &'static str {
        match self {
            Self::X86 => "amd64",
            Self::Arm => "arm64",
        }
    }
}
