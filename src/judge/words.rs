//! The beginnings of the lines that the image prints and that [`crate::read`] understands. All but
//! the verdicts are comments of KTAP.

/// Before anything else, with all options.
pub const START: &str = "# judge 1 ";
/// A range of RAM that is judged.
pub const RAM: &str = "# ram ";
/// A range of RAM that is not.
pub const LEFT_OUT: &str = "# left out ";
/// A disk that is read.
pub const DISK: &str = "# disk ";
/// How many requests a disk has answered, at the end.
pub const REQUESTS: &str = "# requests ";
/// Progress.
pub const PASS: &str = "# pass ";
/// One fault.
pub const FAULT: &str = "# fault ";
/// A processor's position and checksum at the end.
pub const SUM: &str = "# sum ";
/// The last line.
pub const END: &str = "# end ";
/// Nothing was judged.
pub const REFUSED: &str = "Bail out! ";
/// The kinds of fault, in the order of the cases.
pub const KINDS: [&str; 20] = [
    "lost-write",
    "other-address",
    "future",
    "torn",
    "zeroes",
    "foreign",
    "general-registers",
    "vector-registers",
    "msrs",
    "position",
    "image",
    "clock-back",
    "clock-jump",
    "processors",
    "kvmclock-back",
    "kvmclock-jump",
    "timer",
    "disk-data",
    "disk-ring",
    "disk-lost",
];
