//! The names of 64-bit Arm's boot protocols. The loaders are in [`super::boot`].

/// A boot protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Protocol {
    /// Enter an Image at its first instruction.
    #[value(name = "image")]
    Image,
    /// Load a flat binary without a header 512 KiB above a multiple of 2 MiB, and enter it at its
    /// first byte; the device tree lies behind it
    #[value(name = "flat")]
    Flat,
}

impl std::fmt::Display for Protocol {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Image => "image",
            Self::Flat => "flat",
        })
    }
}
