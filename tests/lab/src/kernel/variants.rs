//! The variants of a configuration (`resources/kernel`).

/// The variants of a base's configuration. Some bases lack some of them
/// ([`Config::known`](super::build::Config::known)). `i386` and `gvt` are only compiled: no
/// emulated host boots the one or has the graphics of the other.
pub const VARIANTS: [&str; 15] = [
    DEBUG,
    EXPLORE,
    EXPLORE_ARM,
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
    LIVE_UPDATE,
];

/// A kernel that checks itself: lockdep, KASAN, sleeping in atomic context.
pub const DEBUG: &str = "debug";

/// Runs in user space without a boot: [`explore`](super::explore).
pub(crate) const EXPLORE: &str = "explore";

/// The same for arm64.
pub(crate) const EXPLORE_ARM: &str = "explore-arm64";

/// KVM as modules, which an emulated host loads.
pub const MODULES: &str = "modules";

/// A guest's kernel with modules in its build tree: [`Image::tree`](super::build::Image::tree).
pub const GUEST: &str = "guest";

/// A host whose kernel is replaced under its guests.
pub const LIVE_UPDATE: &str = "live-update";
