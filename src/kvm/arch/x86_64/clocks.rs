//! The clocks of a machine that moves: each vCPU's TSC, and the clock that KVM keeps for all of them.
//!
//! Each is saved with the host's real time beside it, and by that goes on elsewhere ([`ClockPolicy`]): forward by the time that has
//! passed, and never backwards. A host whose clock lies behind the other's has no time pass.
//!
//! The TSCs of a machine's vCPUs stay as far from each other as they were, to the tick: KVM keeps each as an offset, and all of
//! them are shifted by what the first one's has to be ([`Tsc::onward`]). A KVM that does not tell offsets (before Linux 5.16) is
//! given values, and takes those that lie within a second of each other for one.

use kvm_bindings::{
    KVM_CAP_ADJUST_CLOCK, KVM_CLOCK_HOST_TSC, KVM_CLOCK_REALTIME, Msrs, kvm_clock_data, kvm_msr_entry,
};
use kvm_ioctls::{VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use super::state::{Error, call};
pub use crate::arch::clock_policy::{ClockPolicy, now};
use vellum_sys::kvm_vcpu;

/// IA32_TIME_STAMP_COUNTER.
pub(super) const MSR_TSC: u32 = 0x10;
/// By how much two TSC frequencies may differ to be the same for KVM (`tsc_tolerance_ppm`, arch/x86/kvm/x86.c).
const TOLERANCE_PPM: u64 = 250;

/// Whether a guest whose TSC has `saved` kHz goes on with it on a host where guests have `here` kHz, and which scales TSCs or not.
/// KVM would take a higher frequency without scaling, and imitate it by jumps.
///
/// # Errors
/// Both frequencies.
pub fn tsc_fits(saved: u32, here: u32, scales: bool) -> Result<(), Error> {
    let apart = u64::from(saved.abs_diff(here));
    if scales || apart * 1_000_000 <= u64::from(here) * TOLERANCE_PPM {
        Ok(())
    } else {
        Err(Error::TscFrequency { saved, here })
    }
}

/// The frequency of a vCPU's TSC in kHz, where KVM tells it.
pub fn khz(vcpu: &VcpuFd) -> Option<u32> {
    vcpu.get_tsc_khz().ok()
}

/// A vCPU's TSC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tsc {
    /// What the guest would have read.
    pub value: u64,
    /// The host's real time then, in nanoseconds.
    pub realtime: u64,
    /// KVM's offset of it from the host's; none where the saving KVM did not tell it.
    pub offset: Option<u64>,
}

/// How the TSCs of all vCPUs of a machine go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Onward {
    /// Each has its saved offset and this much more.
    Shift(u64),
    /// Each is set to its value, and what has passed since.
    Values,
}

impl Tsc {
    /// Reads it.
    ///
    /// # Errors
    /// Where the ioctl fails.
    pub fn save(vcpu: &VcpuFd) -> Result<Self, Error> {
        let before = now();
        let value = get_msr(vcpu, MSR_TSC)?;
        let realtime = before + now().saturating_sub(before) / 2;
        Ok(Self { value, realtime, offset: kvm_vcpu::tsc_offset(vcpu).ok() })
    }

    /// What it is `now`, for a guest whose TSC has `khz`.
    fn later(&self, khz: u32, meanwhile: ClockPolicy, now: u64) -> u64 {
        let ticks = meanwhile.passed(self.realtime, now).as_nanos() * u128::from(khz) / 1_000_000;
        self.value.wrapping_add(ticks as u64)
    }

    /// How this TSC and those of the machine's other vCPUs go on. Asked of the first, whose frequency is set.
    ///
    /// # Errors
    /// Where an ioctl fails.
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

    /// Sets it.
    ///
    /// # Errors
    /// Where the ioctl fails.
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

/// The clock that KVM keeps for all vCPUs of a VM, which a guest with kvmclock reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clock {
    /// Nanoseconds.
    pub nanoseconds: u64,
    /// The host's real time in nanoseconds at that moment, which KVM tells from Linux 5.16 on where the host's clock is the TSC.
    pub realtime: u64,
    /// The host's TSC at that moment, where it is told.
    pub host_tsc: Option<u64>,
}

impl Clock {
    /// Reads it; vCPUs are paused.
    ///
    /// # Errors
    /// Where the ioctl fails.
    pub fn save(vm: &VmFd) -> Result<Self, Error> {
        let before = now();
        let clock = call("KVM_GET_CLOCK", vm.get_clock())?;
        let beside = before + now().saturating_sub(before) / 2;
        let told = |flag, value| (clock.flags & flag != 0).then_some(value);
        Ok(Self {
            nanoseconds: clock.clock,
            realtime: told(KVM_CLOCK_REALTIME, clock.realtime).unwrap_or(beside),
            host_tsc: told(KVM_CLOCK_HOST_TSC, clock.host_tsc),
        })
    }

    /// Sets it, after all vCPUs have been restored.
    ///
    /// # Errors
    /// Where the ioctl fails.
    pub fn restore(&self, vm: &VmFd, meanwhile: ClockPolicy) -> Result<(), Error> {
        let known = vm.check_extension_raw(KVM_CAP_ADJUST_CLOCK.into()) as u32;
        let mut clock = kvm_clock_data { clock: self.nanoseconds, ..Default::default() };
        if meanwhile == ClockPolicy::Passes && known & KVM_CLOCK_REALTIME != 0 {
            // KVM adds what has passed, as `ClockPolicy::passed` does.
            (clock.flags, clock.realtime) = (KVM_CLOCK_REALTIME, self.realtime);
        } else {
            let passed = meanwhile.passed(self.realtime, now()).as_nanos() as u64;
            clock.clock = clock.clock.saturating_add(passed);
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
        // A year at 5 GHz is less than 2^64 ticks, but not its product.
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
