//! A hardware breakpoint, as a debugger asks for it. What a processor can look for each architecture says (`debug::watch`).

/// What a hardware breakpoint looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The instruction there.
    Execute,
    /// A write.
    Write,
    /// A read or a write: x86 knows no reads alone.
    Any,
}

/// A hardware breakpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watch {
    /// Its linear address.
    pub at: u64,
    /// How many bytes.
    pub bytes: u64,
    /// What it looks for.
    pub access: Access,
}
