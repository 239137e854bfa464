//! The I/O APIC of the split interrupt controller (82093AA data sheet). KVM has the local APICs.
//!
//! A pin's redirection entry is an MSI. KVM gets those of all unmasked pins as GSI routes, so an
//! irqfd reaches the guest without passing through here. A line driven by [`Ioapic::set_line`] does
//! pass. Level-triggered pins keep their remote IRR until KVM reports the guest's end of interrupt
//! ([`Ioapic::eoi`]), and fire again if the line is still asserted then. An edge that arrives while
//! its pin is masked is neither sent nor held, as in hardware (data sheet, 3.2.4, interrupt mask).
//! With KVM's own I/O APIC an irqfd raises and lowers its line at once, which has the same effect.

use std::sync::{Mutex, MutexGuard};

use serde::{Deserialize, Serialize};

/// The guest-physical address of the registers.
pub const BASE: u64 = 0xfec0_0000;
/// Bytes of address space.
pub const SIZE: u64 = 0x1000;
/// The number of interrupt inputs: GSIs 0 to 23.
pub const PINS: usize = 24;
/// The register select and window registers.
const SELECT: u64 = 0x00;
const WINDOW: u64 = 0x10;
/// Version 0x11, and the number of the last redirection entry.
const VERSION: u32 = 0x11 | (PINS as u32 - 1) << 16;
/// Redirection entry bits: those that the guest cannot write (delivery status, remote IRR), trigger
/// mode and mask.
const REMOTE_IRR: u64 = 1 << 14;
const READ_ONLY: u64 = 1 << 12 | REMOTE_IRR;
const LEVEL: u64 = 1 << 15;
const MASKED: u64 = 1 << 16;
/// The target address of MSIs (Intel SDM vol. 3, 12.11.1).
pub(crate) const MSI_BASE: u32 = 0xfee0_0000;
/// The address bits that identify an MSI.
const MSI_AREA: u64 = !0xf_ffff;

/// An interrupt message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Msi {
    /// The low half of the address. The high half is zero.
    pub address: u32,
    /// The data.
    pub data: u32,
}

impl Msi {
    /// The message of a device's write to `address`; `None` if no local APIC takes it.
    pub fn at(address: u64, data: u32) -> Option<Self> {
        (address & MSI_AREA == u64::from(MSI_BASE)).then_some(Self { address: address as u32, data })
    }

    /// The message of a redirection entry (Intel SDM vol. 3, 12.11.1 and 12.11.2).
    fn of(entry: u64) -> Self {
        let destination = (entry >> 56) as u32;
        let logical = (entry >> 11 & 1) as u32;
        // Vector, delivery mode and trigger mode have the same positions in the message. The level
        // is always asserted.
        let data = (entry as u32 & 0x87ff) | 1 << 14;
        Self { address: MSI_BASE | destination << 12 | logical << 2, data }
    }
}

/// Vectors, a bit each.
pub type Vectors = [u32; 8];

/// The message of each pin, by GSI; `None` for a masked pin.
pub type Routes = [Option<Msi>; PINS];

/// What the controller needs from KVM.
pub struct Kvm {
    /// Sets the messages of unmasked pins as GSI routes: `KVM_SET_GSI_ROUTING`.
    pub set_routes: Box<dyn Fn(&Routes) + Send + Sync>,
    /// Sends a message now: `KVM_SIGNAL_MSI`.
    pub signal: Box<dyn Fn(Msi) + Send + Sync>,
}

/// The I/O APIC.
pub struct Ioapic {
    kvm: Kvm,
    state: Mutex<State>,
}

/// The state that a migration carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    select: u8,
    id: u8,
    redirection: [u64; PINS],
    /// The asserted lines, a bit a pin.
    lines: u32,
}

impl Ioapic {
    /// The reset state: every pin masked.
    pub fn new(kvm: Kvm) -> Self {
        Self { kvm, state: Mutex::new(State { select: 0, id: 0, redirection: [MASKED; PINS], lines: 0 }) }
    }

    /// Changes a line.
    pub fn set_line(&self, pin: usize, asserted: bool) {
        let mut state = self.lock();
        let was_asserted = state.lines & (1 << pin) != 0;
        if asserted {
            state.lines |= 1 << pin;
        } else {
            state.lines &= !(1 << pin);
        }
        if asserted && (state.redirection[pin] & LEVEL != 0 || !was_asserted) {
            self.deliver(&mut state, pin);
        }
    }

    /// A guest has ended level-triggered interrupt `vector`: `KVM_EXIT_IOAPIC_EOI`.
    pub fn eoi(&self, vector: u8) {
        let mut state = self.lock();
        let before = state.routes();
        let ended = |entry: u64| entry & LEVEL != 0 && entry as u8 == vector;
        state.redirection.iter_mut().filter(|entry| ended(**entry)).for_each(|entry| *entry &= !REMOTE_IRR);
        self.reroute(&state, &before);
        for pin in 0..PINS {
            if ended(state.redirection[pin]) && state.lines & (1 << pin) != 0 {
                self.deliver(&mut state, pin);
            }
        }
    }

    /// Saves the state for [`Ioapic::restore`]. `held` are the vectors that local APICs have
    /// requested or in service. A level-triggered interrupt whose vector is not held was ended by
    /// its guest. KVM notes that in the vCPU and reports it ([`Ioapic::eoi`]) when the vCPU next
    /// enters the guest. In another process that report would be lost.
    pub fn save(&self, held: &Vectors) -> State {
        let mut state = self.lock().clone();
        let is_held = |vector: u8| held[usize::from(vector / 32)] >> (vector % 32) & 1 != 0;
        let ended = |entry: u64| entry & LEVEL != 0 && !is_held(entry as u8);
        state.redirection.iter_mut().filter(|entry| ended(**entry)).for_each(|entry| *entry &= !REMOTE_IRR);
        state
    }

    /// Restores what [`Ioapic::save`] returned. Sets KVM's routes. A pin whose interrupt was ended
    /// with its line asserted fires again.
    pub fn restore(&self, new: State) {
        let mut state = self.lock();
        *state = new;
        (self.kvm.set_routes)(&state.routes());
        for pin in 0..PINS {
            if state.redirection[pin] & LEVEL != 0 && state.lines & (1 << pin) != 0 {
                self.deliver(&mut state, pin);
            }
        }
    }

    fn reroute(&self, state: &State, before: &Routes) {
        let routes = state.routes();
        if routes != *before {
            (self.kvm.set_routes)(&routes);
        }
    }

    fn deliver(&self, state: &mut State, pin: usize) {
        let entry = &mut state.redirection[pin];
        if *entry & (MASKED | REMOTE_IRR) != 0 {
            return;
        }
        if *entry & LEVEL != 0 {
            *entry |= REMOTE_IRR;
        }
        (self.kvm.signal)(Msi::of(*entry));
    }

    fn write_register(&self, state: &mut State, value: u32) {
        let select = usize::from(state.select);
        match select {
            0x00 => state.id = (value >> 24) as u8 & 0xf,
            0x10.. if (select - 0x10) / 2 < PINS => {
                let pin = (select - 0x10) / 2;
                let before = state.routes();
                let entry = &mut state.redirection[pin];
                let (shift, half) = if select & 1 == 0 { (0, 0xffff_ffff) } else { (32, 0xffff_ffff << 32) };
                let written = (u64::from(value) << shift) & half & !READ_ONLY;
                *entry = (*entry & (!half | READ_ONLY)) | written;
                if *entry & LEVEL == 0 {
                    // Only level-triggered pins have a remote IRR.
                    *entry &= !REMOTE_IRR;
                }
                let pending = *entry & LEVEL != 0 && state.lines & (1 << pin) != 0;
                self.reroute(state, &before);
                if pending {
                    self.deliver(state, pin);
                }
            }
            _ => {}
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no one panics while holding the I/O APIC")
    }
}

impl State {
    /// The messages of unmasked pins, and of masked pins whose interrupt the guest has not ended:
    /// KVM uses the routes of level-triggered interrupts to decide which EOIs to report. No irqfd
    /// drives such a pin.
    fn routes(&self) -> Routes {
        let routed = |entry: u64| entry & MASKED == 0 || entry & REMOTE_IRR != 0;
        self.redirection.map(|entry| routed(entry).then(|| Msi::of(entry)))
    }

    fn register(&self) -> u32 {
        let select = usize::from(self.select);
        match select {
            // The identification and arbitration registers.
            0x00 | 0x02 => u32::from(self.id) << 24,
            0x01 => VERSION,
            0x10.. if (select - 0x10) / 2 < PINS => {
                (self.redirection[(select - 0x10) / 2] >> (32 * (select & 1))) as u32
            }
            _ => 0,
        }
    }
}

/// The registers' guest interface.
impl Ioapic {
    /// Handles a read by the guest.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let state = self.lock();
        let value = match offset {
            SELECT => u32::from(state.select),
            WINDOW => state.register(),
            _ => 0,
        };
        data.fill(0);
        let n = data.len().min(4);
        data[..n].copy_from_slice(&value.to_le_bytes()[..n]);
    }

    /// Handles a write by the guest.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let mut bytes = [0; 4];
        let n = data.len().min(4);
        bytes[..n].copy_from_slice(&data[..n]);
        let mut state = self.lock();
        match offset {
            SELECT => state.select = bytes[0],
            WINDOW => self.write_register(&mut state, u32::from_le_bytes(bytes)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Default)]
    struct Recorder {
        routes: Mutex<Vec<Routes>>,
        signalled: Mutex<Vec<Msi>>,
    }

    fn ioapic() -> (Ioapic, Arc<Recorder>) {
        let seen = Arc::new(Recorder::default());
        let (a, b) = (seen.clone(), seen.clone());
        let kvm = Kvm {
            set_routes: Box::new(move |routes| a.routes.lock().unwrap().push(*routes)),
            signal: Box::new(move |msi| b.signalled.lock().unwrap().push(msi)),
        };
        (Ioapic::new(kvm), seen)
    }

    fn write(ioapic: &Ioapic, register: u8, value: u32) {
        ioapic.write(SELECT, &[register]);
        ioapic.write(WINDOW, &value.to_le_bytes());
    }

    fn read(ioapic: &Ioapic, register: u8) -> u32 {
        ioapic.write(SELECT, &[register]);
        let mut data = [0; 4];
        ioapic.read(WINDOW, &mut data);
        u32::from_le_bytes(data)
    }

    fn vectors(all: &[u8]) -> Vectors {
        let mut bits = [0; 8];
        all.iter().for_each(|vector| bits[usize::from(vector / 32)] |= 1 << (vector % 32));
        bits
    }

    /// Programs `pin` for APIC 2: vector 0x31, with `flags`.
    fn program(ioapic: &Ioapic, pin: u8, flags: u32) {
        write(ioapic, 0x11 + 2 * pin, 2 << 24);
        write(ioapic, 0x10 + 2 * pin, 0x31 | flags);
    }

    const TO_2: Msi = Msi { address: 0xfee0_2000, data: 0x4031 };
    const LEVEL_TO_2: Msi = Msi { address: 0xfee0_2000, data: 0xc031 };

    #[test]
    fn kvm_gets_new_routes_only_when_they_have_changed() {
        let (ioapic, seen) = ioapic();
        for pin in 0..PINS as u8 {
            write(&ioapic, 0x10 + 2 * pin, MASKED as u32);
        }
        assert!(seen.routes.lock().unwrap().is_empty());
        program(&ioapic, 5, 0);
        assert_eq!(seen.routes.lock().unwrap().len(), 1);
        assert_eq!(seen.routes.lock().unwrap()[0][5], Some(TO_2));
        // Logical destination, lowest priority.
        write(&ioapic, 0x1a, 0x31 | 1 << 11 | 1 << 8);
        assert_eq!(seen.routes.lock().unwrap()[1][5], Some(Msi { address: 0xfee0_2004, data: 0x4131 }));
        write(&ioapic, 0x1a, 0x31 | MASKED as u32);
        assert_eq!(seen.routes.lock().unwrap()[2], [None; PINS]);
    }

    #[test]
    fn an_asserted_level_fires_again_after_each_end_of_interrupt() {
        let (ioapic, seen) = ioapic();
        program(&ioapic, 7, LEVEL as u32);
        ioapic.set_line(7, true);
        ioapic.set_line(7, true);
        assert_eq!(*seen.signalled.lock().unwrap(), [LEVEL_TO_2]);
        assert_ne!(u64::from(read(&ioapic, 0x1e)) & REMOTE_IRR, 0);
        ioapic.eoi(0x32);
        assert_eq!(seen.signalled.lock().unwrap().len(), 1, "another vector's EOI");
        ioapic.eoi(0x31);
        assert_eq!(seen.signalled.lock().unwrap().len(), 2);
        ioapic.set_line(7, false);
        ioapic.eoi(0x31);
        assert_eq!(seen.signalled.lock().unwrap().len(), 2);
        assert_eq!(u64::from(read(&ioapic, 0x1e)) & REMOTE_IRR, 0);
    }

    #[test]
    fn a_masked_level_waits_and_a_masked_edge_is_lost() {
        let (ioapic, seen) = ioapic();
        program(&ioapic, 7, (LEVEL | MASKED) as u32);
        program(&ioapic, 8, MASKED as u32);
        ioapic.set_line(7, true);
        ioapic.set_line(8, true);
        assert!(seen.signalled.lock().unwrap().is_empty());
        program(&ioapic, 7, LEVEL as u32);
        program(&ioapic, 8, 0);
        assert_eq!(*seen.signalled.lock().unwrap(), [LEVEL_TO_2]);
        ioapic.set_line(8, false);
        ioapic.set_line(8, true);
        assert_eq!(*seen.signalled.lock().unwrap(), [LEVEL_TO_2, TO_2]);
    }

    #[test]
    fn a_level_that_is_masked_in_service_keeps_its_route_until_its_end_and_fires_when_unmasked() {
        let (ioapic, seen) = ioapic();
        program(&ioapic, 7, LEVEL as u32);
        ioapic.set_line(7, true);
        write(&ioapic, 0x1e, 0x31 | (LEVEL | MASKED) as u32);
        assert_eq!(seen.routes.lock().unwrap().last().unwrap()[7], Some(LEVEL_TO_2));
        ioapic.eoi(0x31);
        assert_eq!(seen.routes.lock().unwrap().last().unwrap()[7], None);
        assert_eq!(seen.signalled.lock().unwrap().len(), 1);
        write(&ioapic, 0x1e, 0x31 | LEVEL as u32);
        assert_eq!(*seen.signalled.lock().unwrap(), [LEVEL_TO_2, LEVEL_TO_2]);
    }

    #[test]
    fn state_moves_to_another_controller_with_its_routes() {
        let (ioapic, _) = ioapic();
        program(&ioapic, 7, LEVEL as u32);
        ioapic.set_line(7, true);
        let (copy, seen) = self::ioapic();
        let state = ioapic.save(&vectors(&[0x31]));
        copy.restore(serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap());
        assert_eq!(seen.routes.lock().unwrap()[0][7], Some(LEVEL_TO_2));
        assert!(seen.signalled.lock().unwrap().is_empty(), "the guest has it already");
        copy.eoi(0x31);
        assert_eq!(*seen.signalled.lock().unwrap(), [LEVEL_TO_2]);
    }

    #[test]
    fn an_end_that_kvm_has_not_reported_yet_is_known_by_the_local_apics() {
        let (ioapic, _) = ioapic();
        program(&ioapic, 7, LEVEL as u32);
        ioapic.set_line(7, true);
        for (lowered, fires) in [(false, vec![LEVEL_TO_2]), (true, vec![])] {
            ioapic.set_line(7, !lowered);
            let (copy, seen) = self::ioapic();
            copy.restore(ioapic.save(&vectors(&[0x30])));
            assert_eq!(*seen.signalled.lock().unwrap(), fires);
            let waits = u64::from(read(&copy, 0x1e)) & REMOTE_IRR != 0;
            assert_eq!(waits, !lowered);
        }
        // Here the EOI has not happened yet.
        assert_ne!(u64::from(read(&ioapic, 0x1e)) & REMOTE_IRR, 0);
    }

    #[test]
    fn registers_that_are_not_there_read_zero_and_read_only_bits_stay() {
        let (ioapic, seen) = ioapic();
        assert_eq!(
            (read(&ioapic, 1), read(&ioapic, 0x40), read(&ioapic, 0xff), read(&ioapic, 3)),
            (0x17_0011, 0, 0, 0)
        );
        write(&ioapic, 0xff, u32::MAX);
        write(&ioapic, 0x10, (REMOTE_IRR | LEVEL) as u32);
        assert_eq!(read(&ioapic, 0x10), LEVEL as u32);
        ioapic.write(WINDOW, &[1, 2, 3, 4, 5, 6, 7, 8]);
        ioapic.write(0x123, &[1]);
        assert!(seen.signalled.lock().unwrap().is_empty());
    }
}
