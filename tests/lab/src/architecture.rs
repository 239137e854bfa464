//! The architectures whose hosts are emulated: what cargo and Debian call them.

use clap::ValueEnum;
use serde::Deserialize;

/// An architecture. The command line and files call it as the kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum, Deserialize)]
pub enum Architecture {
    /// x86-64.
    #[serde(rename = "x86")]
    X86,
    /// Arm, 64 bits.
    #[value(name = "arm64")]
    #[serde(rename = "arm64")]
    Arm,
}

impl Architecture {
    /// The target of static programs. `.cargo/config.toml` names it too, but cargo lets
    /// CARGO_BUILD_TARGET override that.
    pub fn target(self) -> &'static str {
        match self {
            Self::X86 => "x86_64-unknown-linux-musl",
            Self::Arm => "aarch64-unknown-linux-musl",
        }
    }

    /// The name in the kernel's make, and the directory of its configuration fragments.
    pub fn kernel(self) -> &'static str {
        match self {
            Self::X86 => "x86",
            Self::Arm => "arm64",
        }
    }

    /// The prefix of its compilers' names in Debian on an x86-64 machine.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::X86 => "",
            Self::Arm => "aarch64-linux-gnu-",
        }
    }

    /// Debian's name for it.
    pub fn debian(self) -> &'static str {
        match self {
            Self::X86 => "amd64",
            Self::Arm => "arm64",
        }
    }
}
