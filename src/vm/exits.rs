//! What `KVM_RUN` returned for: a count by reason, and the latest few for the report of a failure. What an exit means is decided
//! elsewhere ([`super::vcpu`]).

use kvm_ioctls::VcpuExit;

/// The index of what ends `KVM_RUN` without a reason of the guest's: a signal.
pub(super) const INTERRUPTED: usize = 11;

/// Exits by reason, in the order of [`Exits::NAMES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exits([u64; Exits::NAMES.len()]);

impl Exits {
    /// The reasons as printed.
    pub const NAMES: [&'static str; 14] = [
        "io_out",
        "io_in",
        "mmio_write",
        "mmio_read",
        "hlt",
        "shutdown",
        "ioapic_eoi",
        "rdmsr",
        "wrmsr",
        "hypercall",
        "dirty_ring_full",
        "interrupted",
        "memory_fault",
        "other",
    ];

    /// Counts one, by its index in [`Exits::NAMES`].
    pub(super) fn count(&mut self, index: usize) {
        self.0[index] += 1;
    }

    fn index(exit: &VcpuExit<'_>) -> usize {
        match exit {
            VcpuExit::IoOut(..) => 0,
            VcpuExit::IoIn(..) => 1,
            VcpuExit::MmioWrite(..) => 2,
            VcpuExit::MmioRead(..) => 3,
            VcpuExit::Hlt => 4,
            VcpuExit::Shutdown => 5,
            VcpuExit::IoapicEoi(_) => 6,
            VcpuExit::X86Rdmsr(_) => 7,
            VcpuExit::X86Wrmsr(_) => 8,
            VcpuExit::Hypercall(_) => 9,
            VcpuExit::Unsupported(kvm_bindings::KVM_EXIT_DIRTY_RING_FULL) => 10,
            VcpuExit::Intr => INTERRUPTED,
            VcpuExit::MemoryFault { .. } => 12,
            _ => 13,
        }
    }

    /// The reasons that occurred, with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Self::NAMES.into_iter().zip(self.0).filter(|&(_, n)| n > 0)
    }

    /// Adds another vCPU's.
    pub fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(mine, theirs)| *mine += theirs);
    }
}

/// The latest exits, for a failure's report: reason by its index in [`Exits::NAMES`], and address or number.
#[derive(Default)]
pub(super) struct Recent {
    ring: [(u8, u64); 16],
    count: usize,
}

impl Recent {
    /// Keeps `exit`; its index in [`Exits::NAMES`].
    pub(super) fn note(&mut self, exit: &VcpuExit<'_>) -> usize {
        let index = Exits::index(exit);
        let number = match exit {
            VcpuExit::IoOut(port, _) | VcpuExit::IoIn(port, _) => u64::from(*port),
            VcpuExit::MmioWrite(address, _) | VcpuExit::MmioRead(address, _) => *address,
            VcpuExit::IoapicEoi(vector) => u64::from(*vector),
            VcpuExit::FailEntry(reason, _) => *reason,
            VcpuExit::Unsupported(reason) => u64::from(*reason),
            _ => 0,
        };
        self.ring[self.count % self.ring.len()] = (index as u8, number);
        self.count += 1;
        index
    }

    /// The exits, newest last.
    pub(super) fn describe(&self) -> String {
        let kept = self.count.min(self.ring.len());
        let mut text = String::from("last exits, newest last:");
        for i in self.count - kept..self.count {
            let (index, number) = self.ring[i % self.ring.len()];
            text.push_str(&format!(" {}@{number:#x}", Exits::NAMES[usize::from(index)]));
        }
        text
    }
}
