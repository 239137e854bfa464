//! A vCPU's state, in the order in which KVM can take it.
//!
//! Save and restore only while every vCPU is out of `KVM_RUN`, after pending I/O has completed.
//!
//! The order of restoring matters. CPUID comes first, because it decides which MSRs exist. SREGS
//! sets the local APIC's base before its registers. The TSC comes before the deadline, which is
//! compared with it, and the deadline after the timer's mode. SET_REGS drops pending exceptions, so
//! VCPU_EVENTS comes after it. Saving begins with MP_STATE, because that may process a pending INIT
//! or SIPI and change other state.
//!
//! [`State::restore`] does not touch guest memory. [`State::commit`] restores KVM's own MSRs that
//! make KVM write to guest memory, and the vCPU's page of the CR3 cache, when no other process runs
//! on that memory.
//!
//! Reading the registration of a vCPU's CR3 cache page also empties the page, so that no host
//! address leaves the host. That must happen before memory is saved, or collected for the last
//! time. A destination without CR3 cache drops the registration. It must not be restored later:
//! without a cache the guest cannot tell that it uses the page for something else now.
//!
//! The VM-wide clock ([`super::clocks::Clock`]) is restored after all vCPUs, because it is compared
//! with their TSCs.

use kvm_bindings::{
    CpuId, KVM_CAP_NESTED_STATE, KVM_CAP_TSC_CONTROL, KVM_CAP_XCRS, KVM_MAX_CPUID_ENTRIES,
    KVM_STATE_NESTED_GIF_SET, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_regs, kvm_sregs, kvm_sregs2, kvm_vcpu_events, kvm_xcrs,
};
use kvm_ioctls::{Kvm, KvmNestedStateBuffer, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use super::clocks::{ClockPolicy, MSR_TSC, Onward, Tsc, tsc_fits};
use super::ioapic::Vectors;
use super::irqchip::HeldVectors;
use super::state_error::call;
use vellum_sys::cr3_cache::{self, Registration};
use vellum_sys::kvm_vcpu::{self, XSAVE_MAX, XsaveSize};
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::plant::{self, Mistake};

pub use super::state_error::Error;

/// IA32_TSC_DEADLINE.
const MSR_TSC_DEADLINE: u32 = 0x6e0;
/// The local APIC's in-service and request registers.
const LAPIC_ISR: usize = 0x100;
const LAPIC_IRR: usize = 0x200;
/// The MTRRs, which KVM does not list: IA32_MTRR_PHYSBASE0 and its mask, and so on for eight
/// ranges; the fixed ranges of 64, 16 and 4 KiB; IA32_MTRR_DEF_TYPE, which enables them.
fn mtrrs() -> impl Iterator<Item = u32> {
    (0x200..0x210).chain([0x250, 0x258, 0x259]).chain(0x268..0x270).chain([0x2ff])
}

/// KVM's own MSRs (Documentation/virt/kvm/x86/msr.rst) with the address of guest memory to which
/// KVM writes, when they are set or from then on: wall clock and system time, old numbers and new;
/// asynchronous page faults; steal time; EOI.
const WRITING: [u32; 7] = [0x11, 0x12, 0x4b56_4d00, 0x4b56_4d01, 0x4b56_4d02, 0x4b56_4d03, 0x4b56_4d04];

/// CR4.VMXE and EFER.SVME: the guest has enabled virtualization.
const CR4_VMXE: u64 = 1 << 13;
const EFER_SVME: u64 = 1 << 12;
/// More MSRs than KVM has.
const MAX_MSRS: usize = 4096;

/// The state that a migration carries: KVM's structures, in the order of restoring.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    cpuid: Vec<kvm_cpuid_entry2>,
    mp_state: kvm_mp_state,
    tsc_khz: Option<u32>,
    tsc: Tsc,
    regs: kvm_regs,
    sregs: kvm_sregs,
    /// The additional parts of SREGS2: flags and PDPTRs. None if the saving KVM was older than
    /// 5.14.
    sregs2: Option<(u64, [u64; 4])>,
    xcrs: kvm_xcrs,
    xsave: Vec<u32>,
    debugregs: kvm_debugregs,
    lapic: Option<kvm_lapic_state>,
    /// (index, value), the TSC deadline last.
    msrs: Vec<(u32, u64)>,
    events: kvm_vcpu_events,
    /// The registered page of the CR3 cache, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cr3_cache: Option<Registration>,
}

/// KVM capabilities on which saving and restoring depends; queried once a machine.
#[derive(Clone, Debug)]
pub struct Context {
    /// The MSRs that KVM can save.
    msrs: Vec<u32>,
    xsave: XsaveSize,
    has_irqchip: bool,
    has_nested: bool,
    /// Whether the host's CPU has XSAVE, and thereby XCR0.
    has_xcrs: bool,
    /// Whether the machine's vCPUs have CR3 caches.
    pub has_cr3_cache: bool,
    /// Whether a guest's TSC can have another frequency than the host's.
    pub scales_tsc: bool,
    /// Whether a guest is accepted whose TSC frequency this host cannot provide.
    pub allows_other_tsc: bool,
}

impl Context {
    /// Queries KVM. `has_irqchip` says whether vCPUs have local APICs in KVM.
    ///
    /// # Errors
    /// KVM does not list its MSRs.
    pub fn new(kvm: &Kvm, vm: &VmFd, has_irqchip: bool) -> Result<Self, Error> {
        let mut msrs = call("KVM_GET_MSR_INDEX_LIST", kvm.get_msr_index_list())?.as_slice().to_vec();
        if !plant::is(Mistake::NoMtrrs) {
            msrs.extend(mtrrs());
        }
        msrs.sort_unstable();
        msrs.dedup();
        let has_nested = vm.check_extension_raw(KVM_CAP_NESTED_STATE.into()) > 0;
        let has_xcrs = vm.check_extension_raw(KVM_CAP_XCRS.into()) > 0;
        let xsave = call("KVM_CAP_XSAVE2", XsaveSize::of(vm))?;
        msrs.retain(|index| *index != MSR_TSC);
        let scales_tsc = vm.check_extension_raw(KVM_CAP_TSC_CONTROL.into()) > 0;
        let (has_cr3_cache, allows_other_tsc) = (false, false);
        Ok(Self {
            msrs,
            xsave,
            has_irqchip,
            has_nested,
            has_xcrs,
            has_cr3_cache,
            scales_tsc,
            allows_other_tsc,
        })
    }
}

impl State {
    /// Reads the state from KVM.
    ///
    /// # Errors
    /// An ioctl fails.
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
            tsc: Tsc::save(vcpu)?,
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
            cr3_cache: match context.has_cr3_cache {
                true => call("KVM_GET_CR3_CACHE", cr3_cache::get(vcpu))?,
                false => None,
            },
        })
    }

    /// The vectors that the local APIC has requested or in service (Intel SDM vol. 3, 12.8.4).
    fn vectors(&self) -> Vectors {
        let Some(lapic) = &self.lapic else { return Vectors::default() };
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| lapic.regs[at + byte] as u8));
        // Eight registers of each kind, 16 bytes apart.
        std::array::from_fn(|at| word(LAPIC_ISR + 16 * at) | word(LAPIC_IRR + 16 * at))
    }

    /// Computes how the TSCs of this vCPU and the others continue. Called for the machine's first
    /// vCPU. Sets its TSC frequency.
    ///
    /// # Errors
    /// An ioctl fails, or this host cannot provide that frequency.
    pub fn onward(&self, vcpu: &VcpuFd, context: &Context, meanwhile: ClockPolicy) -> Result<Onward, Error> {
        let khz = self.set_tsc_khz(vcpu, context)?;
        self.tsc.onward(vcpu, khz, meanwhile)
    }

    /// Sets the guest's TSC to its saved frequency, and returns the resulting one. On a host that
    /// cannot scale, with the difference allowed, KVM emulates a higher frequency by jumps. It
    /// refuses a lower one, so the guest's TSC then has the host's.
    fn set_tsc_khz(&self, vcpu: &VcpuFd, context: &Context) -> Result<u32, Error> {
        let here = call("KVM_GET_TSC_KHZ", vcpu.get_tsc_khz())?;
        let khz = self.tsc_khz.unwrap_or(here);
        if khz == here {
            return Ok(here);
        }
        // KVM compares it with what the host's kernel takes for the frequency now. It reports what it
        // was when the module was loaded, before the kernel had refined it.
        let fits = tsc_fits(khz, here, context.scales_tsc);
        match fits.and_then(|()| call("KVM_SET_TSC_KHZ", vcpu.set_tsc_khz(khz))) {
            Ok(()) => Ok(khz),
            Err(_) if context.allows_other_tsc => Ok(vcpu.set_tsc_khz(khz).map_or(here, |()| khz)),
            Err(error) => Err(error),
        }
    }

    /// Writes the state to a KVM vCPU that has not run, except for state that makes KVM write to
    /// guest memory: [`State::commit`] does that. `onward` comes from the machine's first vCPU.
    ///
    /// # Errors
    /// An ioctl fails, or the state is invalid.
    pub fn restore(
        &self,
        vcpu: &VcpuFd,
        context: &Context,
        onward: Onward,
        meanwhile: ClockPolicy,
    ) -> Result<(), Error> {
        if self.xsave.len() > XSAVE_MAX / 4 {
            return Err(Error::Implausible("a huge XSAVE area"));
        }
        if self.msrs.len() > MAX_MSRS {
            return Err(Error::Implausible("thousands of MSRs"));
        }
        if self.msrs.iter().any(|(index, _)| *index == MSR_TSC) {
            return Err(Error::Implausible("a second TSC"));
        }
        if self.cr3_cache.is_some_and(|registered| !is_possible(&registered)) {
            return Err(Error::Implausible("a page of the CR3 cache that no guest can have registered"));
        }
        if self.lapic.is_some() != context.has_irqchip {
            return Err(Error::Implausible("a local APIC that this machine lacks, or lacks one"));
        }
        let cpuid =
            CpuId::from_entries(&self.cpuid).map_err(|_| Error::Implausible("too many CPUID entries"))?;
        call("KVM_SET_CPUID2", vcpu.set_cpuid2(&cpuid))?;
        let khz = self.set_tsc_khz(vcpu, context)?;
        call("KVM_SET_MP_STATE", vcpu.set_mp_state(self.mp_state))?;
        call("KVM_SET_REGS", vcpu.set_regs(&self.regs))?;
        match self.sregs2 {
            Some(more) => call("KVM_SET_SREGS2", kvm_vcpu::set_sregs2(vcpu, &self.sregs2(more)))?,
            None => call("KVM_SET_SREGS", vcpu.set_sregs(&self.sregs))?,
        }
        // A CPU without XSAVE has no XCR0. A guest that fits such a CPU does not see XSAVE, and has
        // never changed its XCR0.
        if context.has_xcrs {
            call("KVM_SET_XCRS", vcpu.set_xcrs(&self.xcrs))?;
        }
        call("KVM_SET_XSAVE", kvm_vcpu::set_xsave(vcpu, context.xsave, &self.xsave))?;
        call("KVM_SET_DEBUGREGS", vcpu.set_debug_regs(&self.debugregs))?;
        // The local APIC's timer and the TSC deadline depend on the TSC.
        self.tsc.restore(vcpu, khz, onward, meanwhile)?;
        let deadline_first = plant::is(Mistake::DeadlineBeforeLapic);
        if deadline_first {
            set_msrs(vcpu, &self.msrs(false))?;
        }
        if let Some(mut lapic) = self.lapic {
            if plant::is(Mistake::TimerLost) {
                // The initial and the current count (Intel SDM volume 3, section 11.5.4).
                [0x380, 0x390].iter().for_each(|at| lapic.regs[*at..at + 4].fill(0));
                // Its vector among those requested.
                let vector = usize::from(lapic.regs[0x320] as u8);
                lapic.regs[0x200 + vector / 32 * 16 + vector % 32 / 8] &= !(1 << (vector % 8));
            }
            call("KVM_SET_LAPIC", vcpu.set_lapic(&lapic))?;
        }
        if !deadline_first {
            set_msrs(vcpu, &self.msrs(false))?;
        }
        if plant::is(Mistake::WritingMsrsEarly) {
            set_msrs(vcpu, &self.msrs(true))?;
        }
        call("KVM_SET_VCPU_EVENTS", vcpu.set_vcpu_events(&self.events))
    }

    /// Gives KVM what [`State::restore`] held back. From now on KVM writes to guest memory.
    ///
    /// # Errors
    /// An ioctl fails.
    pub fn commit(&self, vcpu: &VcpuFd, context: &Context) -> Result<(), Error> {
        if let Some(registered) = self.cr3_cache.filter(|_| context.has_cr3_cache) {
            call("KVM_SET_CR3_CACHE", cr3_cache::set(vcpu, &registered))?;
        }
        set_msrs(vcpu, &self.msrs(true))
    }

    /// The MSRs that make KVM write to guest memory, or the others.
    fn msrs(&self, writing: bool) -> Vec<(u32, u64)> {
        let of = |(index, _): &&(u32, u64)| WRITING.contains(index) == writing;
        self.msrs.iter().filter(of).copied().collect()
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

/// The vCPUs' state on which the interrupt controller depends.
pub fn held(vcpus: &[State]) -> HeldVectors {
    vcpus
        .iter()
        .map(State::vectors)
        .fold(HeldVectors::default(), |all, of| std::array::from_fn(|at| all[at] | of[at]))
}

/// Whether the guest uses virtualization, judged by its registers, the flags of its nested state
/// and whether there is data beyond the flags.
fn is_nested(sregs: &kvm_sregs, flags: u32, data: bool) -> bool {
    let gif = flags & KVM_STATE_NESTED_GIF_SET != 0;
    // Between VMXON and VMXOFF, and with SVM while interrupts are held off completely, there may be
    // no data.
    data || flags & !KVM_STATE_NESTED_GIF_SET != 0
        || sregs.cr4 & CR4_VMXE != 0
        || sregs.efer & EFER_SVME != 0 && !gif
}

/// Whether KVM accepts such a registration, given memory at its address.
fn is_possible(registered: &Registration) -> bool {
    let Registration { gpa, section, section_len } = *registered;
    gpa % PAGE_SIZE == 0
        && (1..=cr3_cache::MAX_SECTION).contains(&section_len)
        && section.checked_add(section_len).is_some()
}

/// Reads those of `indices` that this vCPU has, in an order in which they can be set.
fn get_msrs(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<(u32, u64)>, Error> {
    let mut got = Vec::with_capacity(indices.len());
    let mut rest = indices;
    while !rest.is_empty() {
        let entries: Vec<_> =
            rest.iter().map(|index| kvm_msr_entry { index: *index, ..Default::default() }).collect();
        let mut msrs = Msrs::from_entries(&entries).map_err(|_| Error::Implausible("too many MSRs"))?;
        let n = call("KVM_GET_MSRS", vcpu.get_msrs(&mut msrs))?.min(rest.len());
        got.extend(msrs.as_slice()[..n].iter().map(|e| (e.index, e.data)));
        // KVM stops at the first MSR that this vCPU lacks.
        rest = rest.get(n + 1..).unwrap_or(&[]);
    }
    got.sort_by_key(|(index, _)| *index == MSR_TSC_DEADLINE);
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
        // Some MSRs are read-only. That is no error if they already have the value. An MSR that
        // this KVM lacks is no error if its value was zero, as at reset: kernels differ in the MSRs
        // they list for guests whose CPUID does not use them.
        if let Some(&(index, value)) = rest.first() {
            let entry = kvm_msr_entry { index, ..Default::default() };
            let mut one = Msrs::from_entries(&[entry]).map_err(|_| Error::Implausible("too many MSRs"))?;
            let there = vcpu.get_msrs(&mut one).ok() == Some(1);
            if value != if there { one.as_slice()[0].data } else { 0 } {
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
}
