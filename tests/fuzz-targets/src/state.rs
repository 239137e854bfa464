//! The state of a machine from a peer or a file: descriptions and sections, restored into an
//! interrupt controller and each device. Sections that only KVM interprets are left out.

use std::sync::Arc;

use serde_json::Value;
use vellum_devices::bus::BusDevice;
use vellum_devices::rtc::{self, Rtc};
use vellum_devices::serial::{self, Serial, ns16550, pl011};
use vellum_devices::virtio::transport::{self, Codec};
use vellum_devices::virtio::{PAUSE_TIMEOUT, pci as virtio_pci};
use vellum_guests::{self as guests, model};
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::arch::fixed::Uart;
use vellum_kvm::arch::ioapic::{self, Ioapic};
use vellum_kvm::memory::{Memory, MemoryConfig};
use vellum_linux as machine;
use vellum_machine::Section;

use super::{pci, virtio};

/// The number of pages of the guest whose model is followed.
const PAGES: u64 = 100;
/// The sections that are neither of virtio devices nor of vCPUs.
const OTHERS: [&str; 7] = ["clock", "cpuid", "irqchip", "serial", "pl011", "rtc", "pci"];

/// The target. The input is a description and an array of sections, each as `[name, version,
/// body]`.
pub fn state(data: &[u8]) {
    let Ok((description, sections)) = serde_json::from_slice::<(Value, Vec<(String, u16, Value)>)>(data)
    else {
        return;
    };
    for (name, _, body) in sections.iter().take(16) {
        restored(name, body);
    }
    let is_device = |name: &str| !name.starts_with("vcpu") && !OTHERS.contains(&name);
    let names: Vec<String> =
        sections.iter().map(|(name, ..)| name.clone()).filter(|name| is_device(name)).collect();
    let section = |(name, version, body): (String, u16, Value)| Section::new(name, version, &body);
    let sections: Vec<Section> = sections.into_iter().map(section).collect();
    let _ = machine::state::Description::from_json(description.clone());
    if let Ok(description) = guests::state::Description::from_json(description) {
        assert!(description.write.stride >= 4096);
    }
    let names = names.iter().map(String::as_str);
    if let Ok(state) = machine::state::State::read(sections.clone(), 1, names.clone()) {
        let again = state.sections(names.clone());
        machine::state::State::read(again, 1, names).expect("what was read can be read again");
    }
    if let Ok(state) = guests::state::State::read(sections, 1, PAGES) {
        let models = state
            .models()
            .iter()
            .map(|model| (model.clone(), model::Reached { done: 1000, written: 1000, seed: 1, shuffle: 1 }))
            .collect();
        model::verify(models, PAGES, |_| guests::stamp::Stamp { writer: 0, epoch: 0, page: 0 });
    }
}

/// Restores a serial port of this kind, whose guest then reads it. Returns whether it accepted the
/// state.
fn is_port(kind: Uart, state: serial::State) -> bool {
    let serial = Serial::new(kind, None).expect("an eventfd");
    let taken = serial.restore(state).is_ok();
    if taken {
        answers(&serial, 0x50);
        serial.save();
    }
    taken
}

/// Restores the part of the machine that the section names. If it accepts the state, it answers its
/// guest and can be saved. Returns whether it accepted.
pub fn restored(name: &str, body: &Value) -> bool {
    match name {
        "irqchip" => {
            // In the format of the section, which names the kind.
            let Some(split) = body.get("Split").cloned() else { return false };
            let Ok(state) = serde_json::from_value::<ioapic::State>(split) else { return false };
            let kvm = ioapic::Kvm { set_routes: Box::new(|_| ()), signal: Box::new(|_| ()) };
            let ioapic = Ioapic::new(kvm);
            ioapic.restore(state);
            for offset in [0, 0x10] {
                ioapic.write(offset, &[0x11, 0, 0, 0]);
                ioapic.read(offset, &mut [0; 4]);
            }
            (0..=u8::MAX).for_each(|vector| ioapic.eoi(vector));
            ioapic.set_line(4, true);
            ioapic.save(&[0; 8]);
            true
        }
        "serial" => {
            let state = serde_json::from_value::<ns16550::State>(body.clone());
            state.is_ok_and(|state| is_port(Uart::Ns16550, serial::State::Ns16550(state)))
        }
        "pl011" => {
            let state = serde_json::from_value::<pl011::State>(body.clone());
            state.is_ok_and(|state| is_port(Uart::Pl011, serial::State::Pl011(state)))
        }
        "rtc" => {
            let Ok(state) = serde_json::from_value::<rtc::State>(body.clone()) else { return false };
            [ClockPolicy::Passes, ClockPolicy::Stands].into_iter().all(|meanwhile| {
                let rtc = Rtc::default();
                let taken = rtc.restore(state.clone(), meanwhile).is_ok();
                if taken {
                    answers(&rtc, 2);
                    rtc.seconds();
                    rtc.save();
                }
                taken
            })
        }
        "pci" => {
            let functions = body.get("functions").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            let memory =
                Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(2 << 20)).expect("2 MiB");
            let memory = Arc::new(memory.guest);
            let read = |state: &Value| serde_json::from_value::<virtio_pci::State>(state.clone()).ok();
            let mut taken = false;
            for state in functions.iter().take(8).filter_map(read) {
                let function = pci::function(&memory, Arc::default());
                if function.restore_function(&state).is_ok() {
                    function.save_function();
                    taken = true;
                }
            }
            taken
        }
        _ => {
            let Ok(state) = serde_json::from_value::<transport::State>(body.clone()) else { return false };
            let key = body["device"].as_object().and_then(|device| device.keys().next());
            let Some(number) = virtio::KEYS.iter().position(|of| Some(*of) == key.map(String::as_str)) else {
                return false;
            };
            let has_ports = body["device"]["console"].get("ports").is_some();
            let number = if has_ports { virtio::PORTS } else { number };
            // Restores it in a device of its kind. A device of another kind rejects it.
            let (mut driver, _wire) = virtio::device(number, Codec::Mmio);
            let taken = driver.device.restore(state.clone()).is_ok();
            if taken {
                driver.device.resume();
                (0..6).for_each(|queue| driver.device.ring(queue));
                driver.run();
                driver.device.describe();
                driver.device.quiesce(PAUSE_TIMEOUT).expect("nothing hangs");
                driver.device.save();
            }
            let (other, _wire) = virtio::device(usize::from(number == 0), Codec::Mmio);
            assert!(other.device.restore(state).is_err());
            taken
        }
    }
}

/// Reads and writes each register of a device.
fn answers(device: &dyn BusDevice, registers: u64) {
    for offset in 0..registers {
        device.read(offset, &mut [0]);
        let _ = device.write(offset, &[0x5a]);
        device.read(offset, &mut [0]);
    }
}
