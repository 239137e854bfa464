//! The names of x86-64's boot protocols. The loaders are in [`super::boot`].

/// A boot protocol. The first that an image offers is used, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Protocol {
    /// bzImage, or an ELF vmlinux, at its 64-bit entry (Documentation/arch/x86/boot.rst). A bzImage
    /// offers nothing else; an ELF file uses it if it offers neither of the other two.
    #[value(name = "linux64")]
    Linux64,
    /// Multiboot 1: a header within the first 8 KiB of the image.
    Multiboot,
    /// PVH: an ELF file with a XEN_ELFNOTE_PHYS32_ENTRY note.
    Pvh,
}

impl std::fmt::Display for Protocol {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Linux64 => "linux64",
            Self::Multiboot => "multiboot",
            Self::Pvh => "pvh",
        })
    }
}
