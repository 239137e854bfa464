//! The clocks of a machine that moves: the counter of the generic timer, which all vCPUs share (Arm
//! DDI 0487, D12).
//!
//! The counter is saved with the host's real time. From that it continues on another host
//! ([`ClockPolicy`]): it advances by the time that has passed, and never goes back. KVM stores each
//! vCPU's counter as an offset from the host's. Setting the counter of one vCPU sets the offset of
//! all. Its frequency is the host's and cannot be scaled.

use kvm_ioctls::{VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use super::state_error::Error;
pub use crate::arch::clock_policy::{ClockPolicy, now};
use vellum_sys::clock;

/// Checks that a guest whose counter has `saved` kHz can run on a host where it has `here` kHz.
/// `scales` is false on all Arm hosts.
///
/// # Errors
/// Both frequencies, if they differ.
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
    /// The value that the guest would have read.
    pub value: u64,
    /// The frequency in Hz.
    pub hz: u64,
    /// The host's real time at the reading, in nanoseconds.
    pub realtime: u64,
}

impl Counter {
    /// The value at real time `now`.
    pub fn later(&self, meanwhile: ClockPolicy, now: u64) -> u64 {
        let passed = meanwhile.passed(self.realtime, now).as_nanos();
        let ticks = passed * u128::from(self.hz) / 1_000_000_000;
        self.value.wrapping_add(ticks as u64)
    }
}

/// The VM-wide clock of KVM. Arm has none besides the vCPUs' counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clock {}

impl Clock {
    /// Returns an empty state.
    ///
    /// # Errors
    /// Never.
    pub fn save(_vm: &VmFd) -> Result<Self, Error> {
        Ok(Self {})
    }

    /// Does nothing.
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
