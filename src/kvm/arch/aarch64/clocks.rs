//! The clocks of a machine that moves: the generic timer's counter, which all vCPUs share (Arm DDI 0487, D12).
//!
//! It is saved with the host's real time beside it, and by that goes on elsewhere ([`ClockPolicy`]): forward by the time that has
//! passed, and never backwards. KVM keeps each vCPU's counter as an offset from the host's, and what sets the counter of one vCPU
//! sets the offset of all of them. Its frequency is the host's: nothing scales it.

use kvm_ioctls::{VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use super::state::Error;
pub use crate::arch::clock_policy::{ClockPolicy, now};
use vellum_sys::clock;

/// Whether a guest whose counter has `saved` kHz goes on with it on a host where it has `here` kHz. `scales`: no host does.
///
/// # Errors
/// Both frequencies.
pub fn tsc_fits(saved: u32, here: u32, scales: bool) -> Result<(), Error> {
    if scales || saved == here { Ok(()) } else { Err(Error::Frequency { saved, here }) }
}

/// The frequency of a vCPU's counter in kHz.
pub fn khz(_vcpu: &VcpuFd) -> Option<u32> {
    u32::try_from(clock::counter_hz() / 1000).ok()
}

/// The counter of a machine's vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counter {
    /// What the guest would have read.
    pub value: u64,
    /// Its frequency in Hz.
    pub hz: u64,
    /// The host's real time then, in nanoseconds.
    pub realtime: u64,
}

impl Counter {
    /// What it is `now`.
    pub fn later(&self, meanwhile: ClockPolicy, now: u64) -> u64 {
        let passed = meanwhile.passed(self.realtime, now).as_nanos();
        let ticks = passed * u128::from(self.hz) / 1_000_000_000;
        self.value.wrapping_add(ticks as u64)
    }
}

/// The clock that KVM keeps for a VM: none beside its vCPUs' counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clock {}

impl Clock {
    /// There is nothing to read.
    ///
    /// # Errors
    /// Never.
    pub fn save(_vm: &VmFd) -> Result<Self, Error> {
        Ok(Self {})
    }

    /// There is nothing to set.
    ///
    /// # Errors
    /// Never.
    pub fn restore(&self, _vm: &VmFd, _meanwhile: ClockPolicy) -> Result<(), Error> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_passes_by_real_time_and_never_backwards() {
        let counter = Counter { value: 1000, hz: 62_500_000, realtime: 5_000_000_000 };
        assert_eq!(counter.later(ClockPolicy::Passes, 6_000_000_000), 62_501_000);
        assert_eq!(counter.later(ClockPolicy::Stands, 6_000_000_000), 1000);
        assert_eq!(counter.later(ClockPolicy::Passes, 4_000_000_000), 1000);
        let year = 365 * 86_400_000_000_000;
        assert_eq!(
            counter.later(ClockPolicy::Passes, 5_000_000_000 + year),
            1000 + 365 * 86_400 * 62_500_000
        );
    }
}
