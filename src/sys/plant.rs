//! Planted faults: mistakes that tests make on purpose, to check that other tests find them. Each
//! is a mistake that a migration, a snapshot or a device could make. This module has their names and
//! the one that is planted. Code that makes a mistake calls [`is`] with its name.
//!
//! A release makes none: without debug assertions [`is`] is the constant `false`, and the code that
//! depends on it is not compiled.

use std::sync::atomic::{AtomicU8, Ordering};

/// Whether this program can make mistakes.
pub const POSSIBLE: bool = cfg!(debug_assertions);

/// Why it cannot.
pub const IMPOSSIBLE: &str =
    "needs a program with debug assertions: a release makes no mistakes that tests plant";

/// The environment variable that names the mistake to plant. The command line and test programs
/// read it.
pub const VARIABLE: &str = "VELLUM_PLANT";

/// A planted mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mistake {
    /// The first dirty page of each collection is dropped.
    DroppedBit = 1,
    /// Pages are read before their log is cleared.
    ReadBeforeClear,
    /// Nothing is collected after the machine has paused.
    NoLastHarvest,
    /// The last collection happens before the machine pauses and its state is saved.
    HarvestBeforeSave,
    /// Pages that the VMM itself has written are not collected.
    VmmWritesLeftOut,
    /// The built-in guest's own memslot is not tracked.
    OwnSlotLeftOut,
    /// A page that has become all zeroes is never sent.
    ZeroSkipped,
    /// From the second pass on, pages are sent over a different connection.
    ChunkChangesConnection,
    /// The checksum of pages is computed from live guest memory instead of the bytes that are sent.
    SumOfLiveMemory,
    /// The source resumes the guest after it has sent COMMIT.
    SourceRunsAfterCommit,
    /// The target runs the guest when it sends READY.
    TargetRunsAtReady,
    /// The source does not take its disks' locks again.
    LocksNotRetaken,
    /// A disk's pending requests are not waited for.
    NoQuiesce,
    /// Devices are restored before local APICs.
    DevicesBeforeLapics,
    /// The TSC deadline is restored before the local APIC.
    DeadlineBeforeLapic,
    /// The memory type range registers are not saved.
    NoMtrrs,
    /// The VM's clock is not restored.
    NoClock,
    /// A restored machine keeps its VM generation ID.
    VmGenIdUnchanged,
    /// A machine is restored without a check that its disks are unchanged.
    DisksUnchecked,
    /// Memory that maps a file, and that was never accessed, is treated as empty.
    ShownLeftOut,
    /// Memory that was untouched at first is not checked again, although the log never covered it.
    SilenceLeftOut,
    /// Pages of a snapshot are not compared with their checksums.
    SumsUnchecked,
    /// With huge pages, only a page of the usual size is fetched.
    SmallCopy,
    /// Pages of a file that postcopy is to bring are removed from the mapping, but stay in the
    /// file.
    KeptInCache,
    /// vCPUs that write little are throttled as much as those that write a lot.
    AllThrottledAlike,
    /// The pending interrupt of a masked vector is not migrated.
    PendingLeftOut,
    /// Dirty pages that a failed snapshot has collected are not added to the next snapshot.
    OwedForgotten,
    /// Pages of a snapshot are placed at the memslot before their own.
    LayerOffByASlot,
    /// A resumed guest is not told that it was paused.
    KvmclockCtrlLeftOut,
    /// MSRs that make KVM write to guest memory are restored with the others, before the target
    /// owns the guest.
    WritingMsrsEarly,
    /// Each machine that is restored or forked from one gets the same VM generation ID.
    VmGenIdAlike,
    /// The host refuses to map the second half of memory that is forked.
    SecondHalfRefused,
    /// The last piece of memory that is forked does not part from its file.
    PieceLeftShared,
    /// The first pages that have parted from a fork's base are not copied.
    PartedLeftOut,
    /// A machine that is forked goes on before what has parted from the base is copied.
    CopiedAfterResume,
    /// The last vCPU's state is the one that was saved first.
    OldVcpu,
    /// Devices are saved as if they had looked at one more request.
    DevicesAhead,
    /// The VM's clock is restored a second behind where it was saved.
    ClockSetBack,
    /// The timers of local APICs are restored as if they had expired, without their interrupt.
    TimerLost,
    /// A page is written after a machine was saved for a live update.
    PageAfterSave,
    /// A fork goes on from the middle of a new base only when it is cancelled.
    HeldHalfway,
    /// What the guest has written before a part of memory shows a new base is not collected.
    PartUncollected,
    /// A new machine forgets the first run of pages that it maps from the file of its fork.
    LayerLeftOut,
}

impl Mistake {
    /// The mistakes by the names that `VARIABLE` takes.
    pub const NAMES: [(&str, Self); 43] = [
        ("dropped-bit", Self::DroppedBit),
        ("read-before-clear", Self::ReadBeforeClear),
        ("no-last-harvest", Self::NoLastHarvest),
        ("harvest-before-save", Self::HarvestBeforeSave),
        ("vmm-writes-left-out", Self::VmmWritesLeftOut),
        ("own-slot-left-out", Self::OwnSlotLeftOut),
        ("zero-skipped", Self::ZeroSkipped),
        ("chunk-changes-connection", Self::ChunkChangesConnection),
        ("sum-of-live-memory", Self::SumOfLiveMemory),
        ("source-runs-after-commit", Self::SourceRunsAfterCommit),
        ("target-runs-at-ready", Self::TargetRunsAtReady),
        ("locks-not-retaken", Self::LocksNotRetaken),
        ("no-quiesce", Self::NoQuiesce),
        ("devices-before-lapics", Self::DevicesBeforeLapics),
        ("deadline-before-lapic", Self::DeadlineBeforeLapic),
        ("no-mtrrs", Self::NoMtrrs),
        ("no-clock", Self::NoClock),
        ("vmgenid-unchanged", Self::VmGenIdUnchanged),
        ("disks-unchecked", Self::DisksUnchecked),
        ("shown-left-out", Self::ShownLeftOut),
        ("silence-left-out", Self::SilenceLeftOut),
        ("sums-unchecked", Self::SumsUnchecked),
        ("small-copy", Self::SmallCopy),
        ("kept-in-cache", Self::KeptInCache),
        ("all-throttled-alike", Self::AllThrottledAlike),
        ("pending-left-out", Self::PendingLeftOut),
        ("owed-forgotten", Self::OwedForgotten),
        ("layer-off-by-a-slot", Self::LayerOffByASlot),
        ("kvmclock-ctrl-left-out", Self::KvmclockCtrlLeftOut),
        ("writing-msrs-early", Self::WritingMsrsEarly),
        ("vmgenid-alike", Self::VmGenIdAlike),
        ("second-half-refused", Self::SecondHalfRefused),
        ("piece-left-shared", Self::PieceLeftShared),
        ("parted-left-out", Self::PartedLeftOut),
        ("copied-after-resume", Self::CopiedAfterResume),
        ("old-vcpu", Self::OldVcpu),
        ("devices-ahead", Self::DevicesAhead),
        ("clock-set-back", Self::ClockSetBack),
        ("timer-lost", Self::TimerLost),
        ("page-after-save", Self::PageAfterSave),
        ("held-halfway", Self::HeldHalfway),
        ("part-uncollected", Self::PartUncollected),
        ("layer-left-out", Self::LayerLeftOut),
    ];
}

/// The planted mistake; 0 for none.
static PLANTED: AtomicU8 = AtomicU8::new(0);

/// Whether `mistake` is planted.
#[inline(always)]
pub fn is(mistake: Mistake) -> bool {
    POSSIBLE && PLANTED.load(Ordering::Relaxed) == mistake as u8
}

/// Plants `mistake` in the whole process from now on.
pub fn plant(mistake: Mistake) {
    PLANTED.store(mistake as u8, Ordering::Relaxed);
}
