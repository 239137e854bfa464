//! A vCPU's state: what a new process needs to carry on, in the order in which KVM can take it.
//!
//! Saving and restoring must happen while every vCPU is out of `KVM_RUN`, after pending I/O has been completed.
//! The order of restoring matters: CPUID comes first (it decides which MSRs exist); SREGS brings the local
//! APIC's base before its registers; the TSC comes before the deadline that is compared with it, and the deadline after
//! the timer's mode; SET_REGS drops pending exceptions, so VCPU_EVENTS comes after it. Saving begins with MP_STATE,
//! because asking for it may process a pending INIT or SIPI and so change the rest.
//!
//! The clock of the whole VM ([`Clock`]) is restored after all vCPUs, whose TSCs it is compared with.

use std::io;

use kvm_bindings::{
    CpuId, KVM_CAP_ADJUST_CLOCK, KVM_CAP_NESTED_STATE, KVM_CLOCK_HOST_TSC, KVM_CLOCK_REALTIME,
    KVM_MAX_CPUID_ENTRIES, KVM_STATE_NESTED_GIF_SET, Msrs, kvm_clock_data, kvm_cpuid_entry2, kvm_debugregs,
    kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_sregs2, kvm_vcpu_events, kvm_xcrs,
};
use kvm_ioctls::{Kvm, KvmNestedStateBuffer, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use crate::fault::{Blame, Fault};
use crate::sys::kvm_vcpu::{self, XSAVE_MAX, XsaveSize};

/// IA32_TIME_STAMP_COUNTER and IA32_TSC_DEADLINE.
const MSR_TSC: u32 = 0x10;
const MSR_TSC_DEADLINE: u32 = 0x6e0;
/// The memory type ranges, which are in no list of KVM's: IA32_MTRR_PHYSBASE0 and its mask, and so on for eight ranges; the fixed
/// ranges of 64, 16 and 4 KiB; IA32_MTRR_DEF_TYPE, which switches them on.
fn mtrrs() -> impl Iterator<Item = u32> {
    (0x200..0x210).chain([0x250, 0x258, 0x259]).chain(0x268..0x270).chain([0x2ff])
}

/// CR4.VMXE and EFER.SVME: the guest has switched on what a hypervisor needs.
const CR4_VMXE: u64 = 1 << 13;
const EFER_SVME: u64 = 1 << 12;
/// More MSRs than KVM has.
const MAX_MSRS: usize = 4096;

/// What of a vCPU outlives a migration. Fields are KVM's structures, in the order of restoring.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    cpuid: Vec<kvm_cpuid_entry2>,
    mp_state: kvm_mp_state,
    tsc_khz: Option<u32>,
    regs: kvm_regs,
    sregs: kvm_sregs,
    /// What SREGS2 has beyond SREGS: flags and the PDPTRs; none where the saving KVM was older than 5.14.
    sregs2: Option<(u64, [u64; 4])>,
    xcrs: kvm_xcrs,
    xsave: Vec<u32>,
    debugregs: kvm_debugregs,
    lapic: Option<kvm_lapic_state>,
    /// (index, value); the TSC first, its deadline last.
    msrs: Vec<(u32, u64)>,
    events: kvm_vcpu_events,
}

/// Why a vCPU's state cannot be saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An ioctl failed.
    #[error("{call} of the vCPU's state: {source}")]
    Ioctl {
        /// Its name.
        call: &'static str,
        /// What KVM said.
        source: io::Error,
    },
    /// KVM refuses an MSR's value.
    #[error(
        "MSR {index:#x} cannot be set to {value:#x}; is the destination's CPU or KVM older than the source's?"
    )]
    Msr {
        /// Its number.
        index: u32,
        /// The saved value.
        value: u64,
    },
    /// The guest runs guests.
    #[error(
        "the guest uses hardware virtualization itself, whose state is not saved; end what runs in it first"
    )]
    Nested,
    /// A state that no vCPU can have had.
    #[error("the saved vCPU has {0}; the file is damaged or from another version")]
    Implausible(&'static str),
}

impl Fault for Error {
    fn blame(&self) -> Blame {
        Blame::HOST
    }
}

fn call<T, E: Into<io::Error>>(call: &'static str, result: Result<T, E>) -> Result<T, Error> {
    result.map_err(|source| Error::Ioctl { call, source: source.into() })
}

/// What of this host's KVM saving and restoring depends on; asked once per machine.
#[derive(Clone, Debug)]
pub struct Context {
    /// The MSRs that KVM can save.
    msrs: Vec<u32>,
    xsave: XsaveSize,
    has_irqchip: bool,
    has_nested: bool,
}

impl Context {
    /// Asks KVM. `has_irqchip`: whether vCPUs have local APICs in KVM.
    ///
    /// # Errors
    /// Where the list of MSRs cannot be had.
    pub fn new(kvm: &Kvm, vm: &VmFd, has_irqchip: bool) -> Result<Self, Error> {
        let mut msrs = call("KVM_GET_MSR_INDEX_LIST", kvm.get_msr_index_list())?.as_slice().to_vec();
        msrs.extend(mtrrs());
        msrs.sort_unstable();
        msrs.dedup();
        let has_nested = vm.check_extension_raw(KVM_CAP_NESTED_STATE.into()) > 0;
        let xsave = call("KVM_CAP_XSAVE2", XsaveSize::of(vm))?;
        Ok(Self { msrs, xsave, has_irqchip, has_nested })
    }
}

impl State {
    /// Reads it from KVM.
    ///
    /// # Errors
    /// Where an ioctl fails.
    pub fn save(vcpu: &VcpuFd, context: &Context) -> Result<Self, Error> {
        let mp_state = call("KVM_GET_MP_STATE", vcpu.get_mp_state())?;
        let sregs = call("KVM_GET_SREGS", vcpu.get_sregs())?;
        if context.has_nested {
            let mut buffer = KvmNestedStateBuffer::empty();
            let data = call("KVM_GET_NESTED_STATE", vcpu.nested_state(&mut buffer))?;
            if is_nested(&sregs, buffer.flags.into(), data.is_some()) {
                return Err(Error::Nested);
            }
        }
        let cpuid = call("KVM_GET_CPUID2", vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES))?;
        Ok(Self {
            cpuid: cpuid.as_slice().to_vec(),
            mp_state,
            tsc_khz: vcpu.get_tsc_khz().ok(),
            regs: call("KVM_GET_REGS", vcpu.get_regs())?,
            sregs,
            sregs2: kvm_vcpu::get_sregs2(vcpu).ok().map(|s| (s.flags, s.pdptrs)),
            xcrs: call("KVM_GET_XCRS", vcpu.get_xcrs())?,
            xsave: call("KVM_GET_XSAVE", kvm_vcpu::get_xsave(vcpu, context.xsave))?,
            debugregs: call("KVM_GET_DEBUGREGS", vcpu.get_debug_regs())?,
            lapic: match context.has_irqchip {
                true => Some(call("KVM_GET_LAPIC", vcpu.get_lapic())?),
                false => None,
            },
            msrs: get_msrs(vcpu, &context.msrs)?,
            events: call("KVM_GET_VCPU_EVENTS", vcpu.get_vcpu_events())?,
        })
    }

    /// Gives it to KVM, to a vCPU that has not run.
    ///
    /// # Errors
    /// Where an ioctl fails, or the state is not one that `save` can have given.
    pub fn restore(&self, vcpu: &VcpuFd, context: &Context) -> Result<(), Error> {
        if self.xsave.len() > XSAVE_MAX / 4 {
            return Err(Error::Implausible("a huge XSAVE area"));
        }
        if self.msrs.len() > MAX_MSRS {
            return Err(Error::Implausible("thousands of MSRs"));
        }
        let cpuid =
            CpuId::from_entries(&self.cpuid).map_err(|_| Error::Implausible("too many CPUID entries"))?;
        call("KVM_SET_CPUID2", vcpu.set_cpuid2(&cpuid))?;
        // Hosts whose TSC cannot be scaled refuse a frequency other than their own; then the guest's clock shows it.
        if let Some(khz) = self.tsc_khz
            && vcpu.get_tsc_khz().ok() != Some(khz)
        {
            call("KVM_SET_TSC_KHZ", vcpu.set_tsc_khz(khz))?;
        }
        call("KVM_SET_MP_STATE", vcpu.set_mp_state(self.mp_state))?;
        call("KVM_SET_REGS", vcpu.set_regs(&self.regs))?;
        match self.sregs2 {
            Some(more) => call("KVM_SET_SREGS2", kvm_vcpu::set_sregs2(vcpu, &self.sregs2(more)))?,
            None => call("KVM_SET_SREGS", vcpu.set_sregs(&self.sregs))?,
        }
        call("KVM_SET_XCRS", vcpu.set_xcrs(&self.xcrs))?;
        call("KVM_SET_XSAVE", kvm_vcpu::set_xsave(vcpu, context.xsave, &self.xsave))?;
        call("KVM_SET_DEBUGREGS", vcpu.set_debug_regs(&self.debugregs))?;
        if let Some(lapic) = &self.lapic {
            call("KVM_SET_LAPIC", vcpu.set_lapic(lapic))?;
        }
        set_msrs(vcpu, &self.msrs)?;
        call("KVM_SET_VCPU_EVENTS", vcpu.set_vcpu_events(&self.events))
    }

    fn sregs2(&self, (flags, pdptrs): (u64, [u64; 4])) -> kvm_sregs2 {
        let s = &self.sregs;
        kvm_sregs2 {
            cs: s.cs,
            ds: s.ds,
            es: s.es,
            fs: s.fs,
            gs: s.gs,
            ss: s.ss,
            tr: s.tr,
            ldt: s.ldt,
            gdt: s.gdt,
            idt: s.idt,
            cr0: s.cr0,
            cr2: s.cr2,
            cr3: s.cr3,
            cr4: s.cr4,
            cr8: s.cr8,
            efer: s.efer,
            apic_base: s.apic_base,
            flags,
            pdptrs,
        }
    }
}

/// Whether the guest uses virtualization, by its registers, the flags of its nested state and whether there is more than flags.
fn is_nested(sregs: &kvm_sregs, flags: u32, data: bool) -> bool {
    let gif = flags & KVM_STATE_NESTED_GIF_SET != 0;
    // Between VMXON and VMXOFF, and under SVM while interrupts are held off altogether, there need not be more.
    data || flags & !KVM_STATE_NESTED_GIF_SET != 0
        || sregs.cr4 & CR4_VMXE != 0
        || sregs.efer & EFER_SVME != 0 && !gif
}

/// The clock that KVM keeps for all vCPUs of a VM, which a guest with kvmclock reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clock {
    /// Nanoseconds.
    pub nanoseconds: u64,
    /// The host's real time in nanoseconds at that moment; none where the saving KVM was older than 5.16, or its host's clock is
    /// not the TSC.
    pub realtime: Option<u64>,
    /// The host's TSC at that moment, where it is told.
    pub host_tsc: Option<u64>,
}

/// What becomes of the time between saving and restoring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meanwhile {
    /// It passes for the guest, too, by the hosts' real time: a migration. Where a host does not tell it, it does not.
    Passes,
    /// The guest goes on where it was: a snapshot.
    Stands,
}

impl Clock {
    /// Reads it; vCPUs are paused.
    ///
    /// # Errors
    /// Where the ioctl fails.
    pub fn save(vm: &VmFd) -> Result<Self, Error> {
        let clock = call("KVM_GET_CLOCK", vm.get_clock())?;
        let told = |flag, value| (clock.flags & flag != 0).then_some(value);
        Ok(Self {
            nanoseconds: clock.clock,
            realtime: told(KVM_CLOCK_REALTIME, clock.realtime),
            host_tsc: told(KVM_CLOCK_HOST_TSC, clock.host_tsc),
        })
    }

    /// Sets it, after all vCPUs have been restored.
    ///
    /// # Errors
    /// Where the ioctl fails.
    pub fn restore(&self, vm: &VmFd, meanwhile: Meanwhile) -> Result<(), Error> {
        let known = vm.check_extension_raw(KVM_CAP_ADJUST_CLOCK.into()) as u32;
        let passes = meanwhile == Meanwhile::Passes && known & KVM_CLOCK_REALTIME != 0;
        let realtime = self.realtime.filter(|_| passes);
        let clock = kvm_clock_data {
            clock: self.nanoseconds,
            flags: if realtime.is_some() { KVM_CLOCK_REALTIME } else { 0 },
            realtime: realtime.unwrap_or(0),
            ..Default::default()
        };
        call("KVM_SET_CLOCK", vm.set_clock(&clock))
    }
}

/// Reads what of `indices` this vCPU has, in the order in which it can be set.
fn get_msrs(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<(u32, u64)>, Error> {
    let mut got = Vec::with_capacity(indices.len());
    let mut rest = indices;
    while !rest.is_empty() {
        let entries: Vec<_> =
            rest.iter().map(|index| kvm_msr_entry { index: *index, ..Default::default() }).collect();
        let mut msrs = Msrs::from_entries(&entries).map_err(|_| Error::Implausible("too many MSRs"))?;
        let n = call("KVM_GET_MSRS", vcpu.get_msrs(&mut msrs))?.min(rest.len());
        got.extend(msrs.as_slice()[..n].iter().map(|e| (e.index, e.data)));
        // KVM stops at the first that this vCPU does not have.
        rest = rest.get(n + 1..).unwrap_or(&[]);
    }
    got.sort_by_key(|(index, _)| match *index {
        MSR_TSC => 0,
        MSR_TSC_DEADLINE => 2,
        _ => 1,
    });
    Ok(got)
}

fn set_msrs(vcpu: &VcpuFd, all: &[(u32, u64)]) -> Result<(), Error> {
    let mut rest = all;
    while let Some(&(index, value)) = rest.first() {
        let entries: Vec<_> =
            rest.iter().map(|&(index, data)| kvm_msr_entry { index, data, ..Default::default() }).collect();
        let msrs = Msrs::from_entries(&entries).map_err(|_| Error::Implausible("too many MSRs"))?;
        let n = call("KVM_SET_MSRS", vcpu.set_msrs(&msrs))?.min(rest.len());
        rest = &rest[n..];
        // Some can be read but not set; that is no loss where the value is there already.
        if let Some(&(index, value)) = rest.first() {
            let entry = kvm_msr_entry { index, ..Default::default() };
            let mut one = Msrs::from_entries(&[entry]).map_err(|_| Error::Implausible("too many MSRs"))?;
            if vcpu.get_msrs(&mut one).ok() != Some(1) || one.as_slice()[0].data != value {
                return Err(Error::Msr { index, value });
            }
            rest = &rest[1..];
        } else if n == 0 {
            return Err(Error::Msr { index, value });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_runs_guests_is_told_by_what_it_has_switched_on() {
        let plain = kvm_sregs::default();
        let svm = kvm_sregs { efer: EFER_SVME, ..plain };
        let vmx = kvm_sregs { cr4: CR4_VMXE, ..plain };
        const GIF: u32 = KVM_STATE_NESTED_GIF_SET;
        assert!(
            !is_nested(&plain, 0, false) && !is_nested(&plain, GIF, false) && !is_nested(&svm, GIF, false)
        );
        assert!(is_nested(&plain, GIF, true) && is_nested(&plain, GIF | 1, false));
        assert!(is_nested(&svm, 0, false) && is_nested(&vmx, 0, false));
    }

    #[test]
    fn unknown_fields_are_refused() {
        let clock = Clock { nanoseconds: 1, realtime: Some(2), host_tsc: None };
        let text = serde_json::to_string(&clock).unwrap();
        assert_eq!(serde_json::from_str::<Clock>(&text).unwrap(), clock);
        assert!(serde_json::from_str::<Clock>(&text.replace('{', "{\"zone\":0,")).is_err());
    }
}
