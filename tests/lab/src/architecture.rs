//! The architectures whose hosts are emulated: what cargo and Debian call them.

/// An architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// x86-64.
    X86,
    /// Arm, 64 bits.
    Arm,
}

impl Architecture {
    /// The target of static programs. It is named here although `.cargo/config.toml` has it, because cargo lets CARGO_BUILD_TARGET win.
    pub fn target(self) -> &'static str {
        match self {
            Self::X86 => "x86_64-unknown-linux-musl",
            Self::Arm => "aarch64-unknown-linux-musl",
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
