//! Mistakes that tests plant, to see that they are found: each is one that a migration could make. Here are their names, and which of
//! them is made; where one is made stands [`is`] with its name.
//!
//! A release makes none: without debug assertions [`is`] is the constant `false`, and what hangs on it is not compiled.

use std::sync::atomic::{AtomicU8, Ordering};

/// Whether this program can make mistakes.
pub const POSSIBLE: bool = cfg!(debug_assertions);

/// Why it cannot, where it cannot.
pub const IMPOSSIBLE: &str =
    "needs a program with debug assertions: a release makes no mistakes that tests plant";

/// The variable of the environment that names the mistake to be made, which the command line and test programs look at.
pub const VARIABLE: &str = "VELLUM_PLANT";

/// A mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mistake {
    /// The first dirty page of each collection is forgotten.
    DroppedBit = 1,
    /// Pages are read before the log of them is cleared.
    ReadBeforeClear,
    /// Nothing is collected once the machine stands still.
    NoLastHarvest,
    /// What is collected last is collected before the machine stands still and its state is saved.
    HarvestBeforeSave,
    /// What the VMM itself has written is not collected.
    VmmWritesLeftOut,
    /// The built-in guest's own memslot is not followed.
    OwnSlotLeftOut,
    /// A page that has become zero is never sent.
    ZeroSkipped,
    /// Pages go over another connection from the second pass on.
    ChunkChangesConnection,
    /// The sum of pages is made of guest memory itself, and not of what is sent.
    SumOfLiveMemory,
    /// The source lets the guest run when it has said COMMIT.
    SourceRunsAfterCommit,
    /// The target lets the guest run when it says READY.
    TargetRunsAtReady,
    /// The source does not take the locks of its disks again.
    LocksNotRetaken,
    /// A disk's requests are not waited for.
    NoQuiesce,
    /// Devices are restored before local APICs.
    DevicesBeforeLapics,
    /// The TSC's deadline is restored before the local APIC.
    DeadlineBeforeLapic,
    /// The memory type ranges are not saved.
    NoMtrrs,
    /// The VM's clock is not restored.
    NoClock,
    /// A machine that is restored keeps its VM generation ID.
    VmGenIdUnchanged,
    /// A machine is restored on whatever its disks have become.
    DisksUnchecked,
    /// Memory that shows a file, and that nobody has looked at, is taken for empty.
    ShownLeftOut,
    /// Memory that was untouched at first, and of which the log says nothing, is not looked at again.
    SilenceLeftOut,
    /// Pages of a snapshot are not compared with their sums.
    SumsUnchecked,
    /// As much is brought as a page of the usual size has, where pages are huge.
    SmallCopy,
    /// Pages of a file that follow after the hand-over are taken out of the mapping alone, and stay in the file.
    KeptInCache,
    /// vCPUs that write little are slowed down like those that write much.
    AllThrottledAlike,
    /// What a masked vector owes its driver is not taken along.
    PendingLeftOut,
    /// What a snapshot has taken that came to nothing is not owed to the next one.
    OwedForgotten,
    /// Pages of a snapshot lie where the memslot before theirs has its own.
    LayerOffByASlot,
    /// A guest that goes on is not told that it stood still.
    KvmclockCtrlLeftOut,
    /// MSRs by which KVM writes to guest memory are restored with the others, before the guest is the target's.
    WritingMsrsEarly,
}

impl Mistake {
    /// Their names as they are planted.
    pub const NAMES: [(&str, Self); 30] = [
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
    ];
}

/// The mistake that is made; 0 for none.
static PLANTED: AtomicU8 = AtomicU8::new(0);

/// Whether `mistake` is made here.
#[inline(always)]
pub fn is(mistake: Mistake) -> bool {
    POSSIBLE && PLANTED.load(Ordering::Relaxed) == mistake as u8
}

/// Has `mistake` made from now on, by the whole process.
pub fn plant(mistake: Mistake) {
    PLANTED.store(mistake as u8, Ordering::Relaxed);
}
