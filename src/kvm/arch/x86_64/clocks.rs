//! The clocks of a machine that moves: each vCPU's TSC, and the VM-wide clock of KVM.
//!
//! Each is saved with the host's real time. From that it continues on another host
//! ([`ClockPolicy`]): it advances by the time that has passed, and never goes back. If the other
//! host's real time is behind, no time passes.
//!
//! The TSCs of a machine's vCPUs keep their exact distances. KVM stores each as an offset, and all
//! are shifted by the same amount, computed for the first ([`Tsc::onward`]). A KVM that does not
//! report offsets (before Linux 5.16) gets values. It treats values that are within a second of
//! each other as synchronized.

use kvm_bindings::{
    KVM_CAP_ADJUST_CLOCK, KVM_CLOCK_HOST_TSC, KVM_CLOCK_REALTIME, Msrs, kvm_clock_data, kvm_msr_entry,
};
use kvm_ioctls::{VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use super::state_error::{Error, call};
use crate::arch::clock_policy::timed;
pub use crate::arch::clock_policy::{ClockPolicy, now};
use vellum_sys::kvm_vcpu;
use vellum_sys::plant::{self, Mistake};

/// IA32_TIME_STAMP_COUNTER.
pub(super) const MSR_TSC: u32 = 0x10;
/// KVM treats TSC frequencies as equal up to this difference (`tsc_tolerance_ppm`,
/// arch/x86/kvm/x86.c).
const TOLERANCE_PPM: u64 = 250;

/// Checks that a guest whose TSC has `saved` kHz can run on a host where guests have `here` kHz.
/// `scales` says whether the host scales TSCs. Without scaling KVM would accept a higher frequency,
/// and emulate it by jumps.
///
/// # Errors
/// Both frequencies, if they do not fit.
pub fn tsc_fits(saved: u32, here: u32, scales: bool) -> Result<(), Error> {
    let apart = u64::from(saved.abs_diff(here));
    if scales || apart * 1_000_000 <= u64::from(here) * TOLERANCE_PPM {
        Ok(())
    } else {
        Err(Error::TscFrequency { saved, here })
    }
}

/// The frequency of a vCPU's TSC in kHz, if KVM reports it.
pub fn khz(vcpu: &VcpuFd) -> Option<u32> {
    vcpu.get_tsc_khz().ok()
}

/// A vCPU's TSC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tsc {
    /// The value that the guest would have read.
    pub value: u64,
    /// The host's real time at the reading, in nanoseconds.
    pub realtime: u64,
    /// KVM's offset from the host's TSC; None if the saving KVM did not report it.
    pub offset: Option<u64>,
}

/// How the TSCs of all vCPUs of a machine continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Onward {
    /// Each gets its saved offset plus this shift.
    Shift(u64),
    /// Each is set to its value plus the time since.
    Values,
}

impl Tsc {
    /// Reads the TSC.
    ///
    /// # Errors
    /// The ioctl fails.
    pub fn save(vcpu: &VcpuFd) -> Result<Self, Error> {
        let (value, realtime) = timed(|| get_msr(vcpu, MSR_TSC))?;
        Ok(Self { value, realtime, offset: kvm_vcpu::tsc_offset(vcpu).ok() })
    }

    /// The value at real time `now`, for a guest whose TSC has `khz`.
    fn later(&self, khz: u32, meanwhile: ClockPolicy, now: u64) -> u64 {
        let ticks = meanwhile.passed(self.realtime, now).as_nanos() * u128::from(khz) / 1_000_000;
        self.value.wrapping_add(ticks as u64)
    }

    /// Computes how this TSC and those of the machine's other vCPUs continue. Called for the first
    /// vCPU, after its frequency is set.
    ///
    /// # Errors
    /// An ioctl fails.
    pub fn onward(&self, vcpu: &VcpuFd, khz: u32, meanwhile: ClockPolicy) -> Result<Onward, Error> {
        let here = Self::save(vcpu)?;
        Ok(match (self.offset, here.offset) {
            (Some(saved), Some(offset)) => {
                let ahead = self.later(khz, meanwhile, here.realtime).wrapping_sub(here.value);
                Onward::Shift(offset.wrapping_add(ahead).wrapping_sub(saved))
            }
            _ => Onward::Values,
        })
    }

    /// Sets the TSC.
    ///
    /// # Errors
    /// The ioctl fails.
    pub fn restore(
        &self,
        vcpu: &VcpuFd,
        khz: u32,
        onward: Onward,
        meanwhile: ClockPolicy,
    ) -> Result<(), Error> {
        match (onward, self.offset) {
            (Onward::Shift(by), Some(saved)) => {
                let result = kvm_vcpu::set_tsc_offset(vcpu, saved.wrapping_add(by));
                call("KVM_SET_DEVICE_ATTR of KVM_VCPU_TSC_OFFSET", result)
            }
            _ => set_msr(vcpu, MSR_TSC, self.later(khz, meanwhile, now())),
        }
    }
}

fn get_msr(vcpu: &VcpuFd, index: u32) -> Result<u64, Error> {
    let entry = kvm_msr_entry { index, ..Default::default() };
    let mut msrs = Msrs::from_entries(&[entry]).expect("one entry fits");
    match call("KVM_GET_MSRS", vcpu.get_msrs(&mut msrs))? {
        1 => Ok(msrs.as_slice()[0].data),
        _ => Err(Error::Absent { index }),
    }
}

fn set_msr(vcpu: &VcpuFd, index: u32, data: u64) -> Result<(), Error> {
    let entry = kvm_msr_entry { index, data, ..Default::default() };
    let msrs = Msrs::from_entries(&[entry]).expect("one entry fits");
    match call("KVM_SET_MSRS", vcpu.set_msrs(&msrs))? {
        1 => Ok(()),
        _ => Err(Error::Msr { index, value: data }),
    }
}

/// The VM-wide clock of KVM, which a guest with kvmclock reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clock {
    /// The clock in nanoseconds.
    pub nanoseconds: u64,
    /// The host's real time at that moment in nanoseconds. KVM reports it from Linux 5.16 on, if
    /// the host's clocksource is the TSC.
    pub realtime: u64,
    /// The host's TSC at that moment, if reported.
    pub host_tsc: Option<u64>,
}

impl Clock {
    /// Reads the clock, with paused vCPUs.
    ///
    /// # Errors
    /// The ioctl fails.
    pub fn save(vm: &VmFd) -> Result<Self, Error> {
        let (clock, beside) = timed(|| call("KVM_GET_CLOCK", vm.get_clock()))?;
        let told = |flag, value| (clock.flags & flag != 0).then_some(value);
        Ok(Self {
            nanoseconds: clock.clock,
            realtime: told(KVM_CLOCK_REALTIME, clock.realtime).unwrap_or(beside),
            host_tsc: told(KVM_CLOCK_HOST_TSC, clock.host_tsc),
        })
    }

    /// Sets the clock, after all vCPUs have been restored.
    ///
    /// # Errors
    /// The ioctl fails.
    pub fn restore(&self, vm: &VmFd, meanwhile: ClockPolicy) -> Result<(), Error> {
        let known = vm.check_extension_raw(KVM_CAP_ADJUST_CLOCK.into()) as u32;
        let mut clock = kvm_clock_data { clock: self.nanoseconds, ..Default::default() };
        if meanwhile == ClockPolicy::Passes && known & KVM_CLOCK_REALTIME != 0 {
            // KVM adds the time passed, like `ClockPolicy::passed`.
            (clock.flags, clock.realtime) = (KVM_CLOCK_REALTIME, self.realtime);
        } else {
            let passed = meanwhile.passed(self.realtime, now()).as_nanos() as u64;
            clock.clock = clock.clock.saturating_add(passed);
        }
        if plant::is(Mistake::ClockSetBack) {
            (clock.flags, clock.clock) = (0, self.nanoseconds.saturating_sub(1_000_000_000));
        }
        call("KVM_SET_CLOCK", vm.set_clock(&clock))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_passes_by_real_time_and_never_backwards() {
        let tsc = Tsc { value: 1000, realtime: 5_000_000, offset: None };
        assert_eq!(tsc.later(2_000_000, ClockPolicy::Passes, 5_000_500), 2000);
        assert_eq!(tsc.later(2_000_000, ClockPolicy::Stands, 5_000_500), 1000);
        assert_eq!(tsc.later(2_000_000, ClockPolicy::Passes, 4_000_000), 1000);
        // A year at 5 GHz is less than 2^64 ticks, but the product before the division is not.
        let year = 365 * 86400 * 1_000_000_000;
        assert_eq!(tsc.later(5_000_000, ClockPolicy::Passes, 5_000_000 + year), 1000 + 5 * year);
    }

    #[test]
    fn frequencies_that_kvm_takes_for_the_same_fit_and_others_where_they_are_scaled() {
        assert!(
            tsc_fits(2_000_500, 2_000_000, false).is_ok() && tsc_fits(1_999_500, 2_000_000, false).is_ok()
        );
        for saved in [2_000_501, 1_999_499] {
            let error = tsc_fits(saved, 2_000_000, false).unwrap_err().to_string();
            assert!(error.contains(&saved.to_string()) && error.contains("2000000"), "{error}");
            assert!(tsc_fits(saved, 2_000_000, true).is_ok());
        }
    }

    #[test]
    fn unknown_fields_are_refused() {
        let clock = Clock { nanoseconds: 1, realtime: 2, host_tsc: None };
        let text = serde_json::to_string(&clock).unwrap();
        assert_eq!(serde_json::from_str::<Clock>(&text).unwrap(), clock);
        assert!(serde_json::from_str::<Clock>(&text.replace('{', "{\"zone\":0,")).is_err());
    }
}
