//! The names of what can be put on top of a configuration (`resources/kernel`).

/// What can be put on top of a base's configuration. Some bases lack some of it
/// ([`Config::known`](super::build::Config::known)), and `i386` and `gvt` are to compile alone: no
/// emulated host boots the one, nor has the graphics of the other.
pub const VARIANTS: [&str; 13] = [
    DEBUG,
    EXPLORE,
    "lock-stat",
    MODULES,
    "preempt",
    "werror",
    "i386",
    "gvt",
    "pages-16k",
    "pages-64k",
    GUEST,
    "pti",
    "kexec",
];

/// The variant whose kernel checks itself: lockdep, KASAN, sleeping in atomic context.
pub const DEBUG: &str = "debug";

/// The variant that user space runs, without a boot: [`explore`](super::explore).
pub(crate) const EXPLORE: &str = "explore";

/// The variant whose KVM is modules, which an emulated host loads.
pub const MODULES: &str = "modules";

/// The variant that is a guest, whose modules are built beside it:
/// [`Image::tree`](super::build::Image::tree).
pub const GUEST: &str = "guest";
