//! A vCPU's state, in the order in which KVM can take it.
//!
//! KVM lists the registers of a vCPU (`KVM_GET_REG_LIST`): core and vector registers, system
//! registers, timers, and firmware registers (PSCI's version, mitigations). All are saved by their
//! numbers. Save and restore only while every vCPU is out of `KVM_RUN`, after pending I/O has
//! completed.
//!
//! The counters are restored first, by [`State::onward`]. The machine's vCPUs share an offset from
//! the host's counter, so one vCPU sets it for all.

use kvm_bindings::{
    KVM_CAP_VCPU_EVENTS, RegList, kvm_mp_state, kvm_vcpu_events, kvm_vcpu_events__bindgen_ty_1, kvm_vcpu_init,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use super::clocks::{ClockPolicy, Counter, now, tsc_fits};
use super::cpuid::{MAX_REGISTERS, setup, sysreg};
use super::irqchip::HeldVectors;
use super::state_error::call;
use crate::arch::clock_policy::timed;
use vellum_sys::clock;

pub use super::state_error::Error;

/// The widest register in 64-bit words: a vector register.
const MAX_WORDS: usize = 2;

/// KVM's numbers of the counters. The virtual one has the encoding of its timer's compare value
/// (api.rst, 4.68).
const VIRTUAL_COUNTER: u64 = sysreg(3, 3, 14, 3, 2);
const PHYSICAL_COUNTER: u64 = sysreg(3, 3, 14, 0, 1);

/// The state that a migration carries.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    setup: kvm_vcpu_init,
    mp_state: kvm_mp_state,
    /// The virtual counter, and the physical one if this KVM has it as a register.
    counter: Counter,
    physical: Option<Counter>,
    /// Number and value, as 64-bit words with the lowest first.
    registers: Vec<(u64, Vec<u64>)>,
    events: Option<Events>,
}

/// An SError or external abort that the guest has not taken yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Events {
    serror_pending: u8,
    serror_has_esr: u8,
    external_abort_pending: u8,
    serror_esr: u64,
}

/// KVM capabilities on which saving and restoring depends; queried once a machine.
#[derive(Clone, Debug)]
pub struct Context {
    setup: kvm_vcpu_init,
    has_events: bool,
    /// Whether vCPUs have CR3 caches: never.
    pub has_cr3_cache: bool,
    /// Whether a guest's counter can have another frequency than the host's: never.
    pub scales_tsc: bool,
    /// Whether a guest with another counter frequency is accepted.
    pub allows_other_tsc: bool,
}

impl Context {
    /// Queries KVM.
    ///
    /// # Errors
    /// KVM does not report its vCPUs' parameters.
    pub fn new(_kvm: &Kvm, vm: &VmFd, _has_irqchip: bool) -> Result<Self, Error> {
        let setup = call("KVM_ARM_PREFERRED_TARGET", setup(vm))?;
        let has_events = vm.check_extension_raw(KVM_CAP_VCPU_EVENTS.into()) > 0;
        let (has_cr3_cache, scales_tsc, allows_other_tsc) = (false, false, false);
        Ok(Self { setup, has_events, has_cr3_cache, scales_tsc, allows_other_tsc })
    }
}

/// Proof that one vCPU has set the counters of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Onward;

impl State {
    /// Reads the state from KVM.
    ///
    /// # Errors
    /// An ioctl fails.
    pub fn save(vcpu: &VcpuFd, context: &Context) -> Result<Self, Error> {
        let mp_state = call("KVM_GET_MP_STATE", vcpu.get_mp_state())?;
        let mut list = RegList::new(MAX_REGISTERS).expect("the number is within the limit of the list");
        call("KVM_GET_REG_LIST", vcpu.get_reg_list(&mut list))?;
        let mut registers = Vec::with_capacity(list.as_slice().len());
        let (mut counter, mut physical) = (None, None);
        for &register in list.as_slice() {
            let counters = match register {
                VIRTUAL_COUNTER => Some(&mut counter),
                PHYSICAL_COUNTER => Some(&mut physical),
                _ => None,
            };
            match counters {
                None => registers.push((register, get(vcpu, register)?)),
                Some(place) => {
                    let (value, realtime) = timed(|| get(vcpu, register))?;
                    *place = Some(Counter { value: value[0], hz: clock::counter_hz(), realtime });
                }
            }
        }
        let events = context.has_events.then(|| call("KVM_GET_VCPU_EVENTS", vcpu.get_vcpu_events()));
        Ok(Self {
            setup: context.setup,
            mp_state,
            counter: counter.ok_or(Error::Implausible("no counter"))?,
            physical,
            registers,
            events: events.transpose()?.map(|events| events.into()),
        })
    }

    /// Sets the counters of all vCPUs through the machine's first vCPU.
    ///
    /// # Errors
    /// An ioctl fails, or this host's counter has another frequency.
    pub fn onward(&self, vcpu: &VcpuFd, context: &Context, meanwhile: ClockPolicy) -> Result<Onward, Error> {
        let [saved, here] =
            [self.counter.hz, clock::counter_hz()].map(|hz| u32::try_from(hz / 1000).unwrap_or(u32::MAX));
        if !context.allows_other_tsc {
            tsc_fits(saved, here, context.scales_tsc)?;
        }
        self.set_up(vcpu)?;
        let counters = [(VIRTUAL_COUNTER, Some(self.counter)), (PHYSICAL_COUNTER, self.physical)];
        for (register, counter) in counters {
            let Some(counter) = counter else { continue };
            set(vcpu, register, &[counter.later(meanwhile, now())])?;
        }
        Ok(Onward)
    }

    fn set_up(&self, vcpu: &VcpuFd) -> Result<(), Error> {
        call("KVM_ARM_VCPU_INIT", vcpu.vcpu_init(&self.setup))
    }

    /// Writes the state to a KVM vCPU that has not run. `_onward` comes from the machine's first
    /// vCPU.
    ///
    /// # Errors
    /// An ioctl fails, or the state is invalid.
    pub fn restore(
        &self,
        vcpu: &VcpuFd,
        context: &Context,
        _onward: Onward,
        _meanwhile: ClockPolicy,
    ) -> Result<(), Error> {
        if self.registers.len() > MAX_REGISTERS {
            return Err(Error::Implausible("too many registers"));
        }
        let wide = |(register, value): &(u64, Vec<u64>)| {
            value.len() > MAX_WORDS || value.len() * 8 < kvm_ioctls::reg_size(*register)
        };
        if self.registers.iter().any(wide) {
            return Err(Error::Implausible("a register of another width"));
        }
        if self.registers.iter().any(|(register, _)| matches!(*register, VIRTUAL_COUNTER | PHYSICAL_COUNTER))
        {
            return Err(Error::Implausible("a second counter"));
        }
        self.set_up(vcpu)?;
        for (register, value) in &self.registers {
            set(vcpu, *register, value)?;
        }
        if let (Some(events), true) = (self.events, context.has_events) {
            call("KVM_SET_VCPU_EVENTS", vcpu.set_vcpu_events(&events.into()))?;
        }
        call("KVM_SET_MP_STATE", vcpu.set_mp_state(self.mp_state))
    }

    /// Does nothing: no state was held back.
    ///
    /// # Errors
    /// Never.
    pub fn commit(&self, _vcpu: &VcpuFd, _context: &Context) -> Result<(), Error> {
        Ok(())
    }
}

/// The vCPUs' state on which the interrupt controller depends.
pub fn held(_vcpus: &[State]) -> HeldVectors {}

fn get(vcpu: &VcpuFd, register: u64) -> Result<Vec<u64>, Error> {
    let mut bytes = [0; 8 * MAX_WORDS];
    let size = call("KVM_GET_ONE_REG", vcpu.get_one_reg(register, &mut bytes))?;
    let (words, _) = bytes[..size.next_multiple_of(8)].as_chunks();
    Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
}

/// Sets a register. Many ID registers are read-only; that is no error if they already have the
/// value.
fn set(vcpu: &VcpuFd, register: u64, value: &[u64]) -> Result<(), Error> {
    let bytes: Vec<u8> = value.iter().flat_map(|word| word.to_le_bytes()).collect();
    match vcpu.set_one_reg(register, &bytes) {
        Ok(_) => Ok(()),
        Err(_) if get(vcpu, register).is_ok_and(|there| there == value) => Ok(()),
        Err(error) => Err(Error::Register { register, value: value.to_vec(), error }),
    }
}

impl From<kvm_vcpu_events> for Events {
    fn from(events: kvm_vcpu_events) -> Self {
        let exception = events.exception;
        Self {
            serror_pending: exception.serror_pending,
            serror_has_esr: exception.serror_has_esr,
            external_abort_pending: exception.ext_dabt_pending,
            serror_esr: exception.serror_esr,
        }
    }
}

impl From<Events> for kvm_vcpu_events {
    fn from(events: Events) -> Self {
        let exception = kvm_vcpu_events__bindgen_ty_1 {
            serror_pending: events.serror_pending,
            serror_has_esr: events.serror_has_esr,
            ext_dabt_pending: events.external_abort_pending,
            serror_esr: events.serror_esr,
            ..Default::default()
        };
        Self { exception, ..Default::default() }
    }
}
