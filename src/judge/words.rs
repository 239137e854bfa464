//! The beginnings of the lines that the image prints and [`crate::read`] parses. Except for the
//! results they are comments in KTAP.

/// The first line, with all options.
pub const START: &str = "# judge 1 ";
/// A range of RAM that is judged.
pub const RAM: &str = "# ram ";
/// A range of RAM, or a disk, that is not judged.
pub const LEFT_OUT: &str = "# left out ";
/// A disk that is judged.
pub const DISK: &str = "# disk ";
/// The number of requests that a disk has answered, at the end.
pub const REQUESTS: &str = "# requests ";
/// Progress of the first processor.
pub const PASS: &str = "# pass ";
/// One fault.
pub const FAULT: &str = "# fault ";
/// After a case that was not checked, before the reason.
pub const SKIP: &str = " # SKIP ";
/// A processor's position, its checksum and its timer interrupts at the end.
pub const SUM: &str = "# sum ";
/// The last line.
pub const END: &str = "# end ";
/// The reason why nothing was judged.
pub const REFUSED: &str = "Bail out! ";
/// The kinds of fault, in the order of the test cases.
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
