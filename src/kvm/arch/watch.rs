//! A hardware breakpoint, as a debugger requests it. Each architecture checks whether its processor
//! supports it (`debug::watch`).

/// The accesses that trigger a hardware breakpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Execution.
    Execute,
    /// A write.
    Write,
    /// A read or a write. x86 cannot trigger on reads only.
    Any,
}

/// A hardware breakpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watch {
    /// The linear address.
    pub at: u64,
    /// The number of bytes.
    pub bytes: u64,
    /// The access that triggers it.
    pub access: Access,
}
