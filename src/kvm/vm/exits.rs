//! Reasons for returns from `KVM_RUN`: a count for each, and the latest few for a failure's report.
//! [`super::vcpu`] handles the exits.

use std::ops::AddAssign;

use kvm_ioctls::VcpuExit;

/// Why `KVM_RUN` returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The guest wrote to a port.
    IoOut,
    /// The guest read from a port.
    IoIn,
    /// The guest wrote to an address without memory.
    MmioWrite,
    /// The guest read from an address without memory.
    MmioRead,
    /// The guest halted, and KVM has no local APIC to wait in.
    Hlt,
    /// A triple fault.
    Shutdown,
    /// The guest ended an interrupt of the split I/O APIC.
    IoapicEoi,
    /// The guest read an MSR that the VMM handles.
    Rdmsr,
    /// The guest wrote an MSR that the VMM handles.
    Wrmsr,
    /// A hypercall.
    Hypercall,
    /// The vCPU's dirty ring is full.
    DirtyRingFull,
    /// A signal interrupted the vCPU. The guest is not the cause.
    Interrupted,
    /// KVM could not resolve a fault.
    MemoryFault,
    /// Any other reason.
    Other,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Self; 14] = [
        Self::IoOut,
        Self::IoIn,
        Self::MmioWrite,
        Self::MmioRead,
        Self::Hlt,
        Self::Shutdown,
        Self::IoapicEoi,
        Self::Rdmsr,
        Self::Wrmsr,
        Self::Hypercall,
        Self::DirtyRingFull,
        Self::Interrupted,
        Self::MemoryFault,
        Self::Other,
    ];

    /// The name in output.
    pub fn name(self) -> &'static str {
        match self {
            Self::IoOut => "io_out",
            Self::IoIn => "io_in",
            Self::MmioWrite => "mmio_write",
            Self::MmioRead => "mmio_read",
            Self::Hlt => "hlt",
            Self::Shutdown => "shutdown",
            Self::IoapicEoi => "ioapic_eoi",
            Self::Rdmsr => "rdmsr",
            Self::Wrmsr => "wrmsr",
            Self::Hypercall => "hypercall",
            Self::DirtyRingFull => "dirty_ring_full",
            Self::Interrupted => "interrupted",
            Self::MemoryFault => "memory_fault",
            Self::Other => "other",
        }
    }

    /// The reason of an exit from kvm-ioctls.
    pub fn of(exit: &VcpuExit<'_>) -> Self {
        match exit {
            VcpuExit::IoOut(..) => Self::IoOut,
            VcpuExit::IoIn(..) => Self::IoIn,
            VcpuExit::MmioWrite(..) => Self::MmioWrite,
            VcpuExit::MmioRead(..) => Self::MmioRead,
            VcpuExit::Hlt => Self::Hlt,
            VcpuExit::Shutdown => Self::Shutdown,
            VcpuExit::IoapicEoi(_) => Self::IoapicEoi,
            VcpuExit::X86Rdmsr(_) => Self::Rdmsr,
            VcpuExit::X86Wrmsr(_) => Self::Wrmsr,
            VcpuExit::Hypercall(_) => Self::Hypercall,
            VcpuExit::Unsupported(kvm_bindings::KVM_EXIT_DIRTY_RING_FULL) => Self::DirtyRingFull,
            VcpuExit::Intr => Self::Interrupted,
            VcpuExit::MemoryFault { .. } => Self::MemoryFault,
            _ => Self::Other,
        }
    }
}

/// The number of exits for each reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exits([u64; Reason::ALL.len()]);

impl Exits {
    /// Counts an exit.
    pub fn count(&mut self, reason: Reason) {
        self.0[reason as usize] += 1;
    }

    /// The number of exits for `reason`.
    pub fn of(&self, reason: Reason) -> u64 {
        self.0[reason as usize]
    }

    /// The reasons that occurred, with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (Reason, u64)> {
        Reason::ALL.into_iter().map(|reason| (reason, self.of(reason))).filter(|&(_, count)| count > 0)
    }
}

impl AddAssign for Exits {
    fn add_assign(&mut self, other: Self) {
        Reason::ALL.into_iter().for_each(|reason| self.0[reason as usize] += other.of(reason));
    }
}

/// One of the latest exits.
#[derive(Clone, Copy)]
struct Noted {
    reason: Reason,
    /// The port, address, vector or number of the exit; 0 without one.
    detail: u64,
}

/// The latest exits, for a failure's report.
#[derive(Default)]
pub(super) struct Recent {
    ring: [Option<Noted>; 16],
    count: usize,
}

impl Recent {
    /// Records `exit` and returns its reason.
    pub(super) fn note(&mut self, exit: &VcpuExit<'_>) -> Reason {
        let reason = Reason::of(exit);
        let detail = match exit {
            VcpuExit::IoOut(port, _) | VcpuExit::IoIn(port, _) => u64::from(*port),
            VcpuExit::MmioWrite(address, _) | VcpuExit::MmioRead(address, _) => *address,
            VcpuExit::IoapicEoi(vector) => u64::from(*vector),
            VcpuExit::FailEntry(reason, _) => *reason,
            VcpuExit::Unsupported(reason) => u64::from(*reason),
            _ => 0,
        };
        self.ring[self.count % self.ring.len()] = Some(Noted { reason, detail });
        self.count += 1;
        reason
    }

    /// The exits as text, newest last.
    pub(super) fn describe(&self) -> String {
        let (newer, older) = self.ring.split_at(self.count % self.ring.len());
        let mut text = String::from("last exits, newest last:");
        for noted in older.iter().chain(newer).flatten() {
            text.push_str(&format!(" {}@{:#x}", noted.reason.name(), noted.detail));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_a_place_and_a_name_of_its_own() {
        let mut exits = Exits::default();
        for (nth, reason) in (1..).zip(Reason::ALL) {
            (0..nth).for_each(|_| exits.count(reason));
        }
        let counts: Vec<u64> = exits.iter().map(|(_, count)| count).collect();
        assert_eq!(counts, (1..=Reason::ALL.len() as u64).collect::<Vec<_>>());
        let mut names = Reason::ALL.map(Reason::name).to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Reason::ALL.len());
        let mut twice = exits;
        twice += exits;
        assert!(Reason::ALL.into_iter().all(|reason| twice.of(reason) == 2 * exits.of(reason)));
    }

    #[test]
    fn the_latest_exits_are_told_in_order() {
        let mut recent = Recent::default();
        assert_eq!(recent.describe(), "last exits, newest last:");
        assert_eq!(recent.note(&VcpuExit::IoOut(0x3f8, &[])), Reason::IoOut);
        recent.note(&VcpuExit::Hlt);
        assert_eq!(recent.describe(), "last exits, newest last: io_out@0x3f8 hlt@0x0");
        for address in 0..17 {
            recent.note(&VcpuExit::MmioWrite(address, &[]));
        }
        let text = recent.describe();
        assert!(text.starts_with("last exits, newest last: mmio_write@0x1 "), "{text}");
        assert!(text.ends_with(" mmio_write@0x10"), "{text}");
    }
}
