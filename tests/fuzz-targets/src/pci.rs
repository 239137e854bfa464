//! A PCI bus. A guest writes anything to configuration spaces, BARs and the MSI-X table, in both
//! ways. Nothing panics, both ways to a configuration space agree, and doorbells follow the BAR.
//! The state can be saved and restored.
//!
//! The input consists of operations of 12 bytes each.

use std::sync::{Arc, Mutex};

use vellum_devices::bus::BusDevice;
use vellum_devices::pci::Function;
use vellum_devices::pci::host::{ECAM_SIZE, Ecam, Host, Ports, Window};
use vellum_devices::virtio::balloon::Balloon;
use vellum_devices::virtio::pci::{DOORBELLS, Kvm, Pci, lines};
use vellum_kvm::memory::{GuestMemory, Memory, MemoryConfig};

const WINDOW: std::ops::Range<u64> = 0xe800_0000..0xe810_0000;
const ENABLE: u32 = 1 << 31;

/// A balloon's function: several queues, a writable configuration space, and no resources of the
/// host.
pub fn function(memory: &Arc<GuestMemory>, at: Arc<Mutex<Option<u64>>>) -> Arc<Pci> {
    let device = Box::new(Balloon::new().0);
    let lines = lines(&*device).unwrap();
    let move_doorbells = Box::new(move |_: &[_], base| *at.lock().unwrap() = base);
    let kvm = Kvm { move_doorbells, ..Kvm::none() };
    Arc::new(Pci::new(device, memory.clone(), lines, WINDOW, WINDOW.start as u32, kvm).unwrap())
}

/// The target.
pub fn pci(data: &[u8]) {
    let memory = Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(2 << 20)).unwrap();
    let memory = Arc::new(memory.guest);
    let places: [Arc<Mutex<Option<u64>>>; 2] = Default::default();
    let functions = places.clone().map(|at| function(&memory, at));
    let behind = functions.clone().map(|function| function as Arc<dyn Function>);
    let host = Arc::new(Host::new(behind, WINDOW));
    let (ports, ecam, window) = (Ports(host.clone()), Ecam(host.clone()), Window(host));
    for operation in data.as_chunks::<12>().0.iter().take(256) {
        let word = u32::from_le_bytes(operation[4..8].try_into().unwrap());
        let len = [1, 2, 4, 8][usize::from(operation[1] % 4)];
        let value = &operation[4..4 + len];
        let place = u32::from_le_bytes([operation[2], operation[3], operation[8], 0]);
        let mut read = [0; 8];
        let inside = |size: u64| u64::from(place) % (size - len as u64 + 1);
        match operation[0] % 8 {
            0 => drop(ports.write(0, &(word | ENABLE).to_le_bytes())),
            1 => drop(ports.write(4, &value[..len.min(4)])),
            2 => drop(ecam.write(inside(ECAM_SIZE), value)),
            // The registers of the header and the capabilities of one of the two functions.
            3 => drop(ecam.write(u64::from(1 + place % 2) << 15 | u64::from(operation[8]), value)),
            4 => ecam.read(inside(ECAM_SIZE), &mut read[..len]),
            5 => drop(window.write(inside(WINDOW.end - WINDOW.start), value)),
            6 => window.read(inside(WINDOW.end - WINDOW.start), &mut read[..len]),
            // A part of a BAR, at its current address.
            _ => {
                let function = &functions[usize::from(operation[9] % 2)];
                if let Some((base, _)) = function.bar() {
                    let at =
                        base - WINDOW.start + u64::from(operation[10] % 8) * 0x1000 + u64::from(operation[8]);
                    let _ = window.write(at, value);
                }
            }
        }
    }
    for (device, (function, at)) in (1u32..).zip(functions.iter().zip(&places)) {
        assert_eq!(function.bar().map(|(base, _)| base + DOORBELLS), *at.lock().unwrap());
        for register in (0..0x90).step_by(4) {
            let (mut one, mut other) = ([0; 4], [0; 4]);
            ports.write(0, &(ENABLE | device << 11 | register).to_le_bytes());
            ports.read(4, &mut one);
            ecam.read(u64::from(device) << 15 | u64::from(register), &mut other);
            assert_eq!(one, other, "{device} {register:#x}");
        }
        let saved = function.save_function();
        let text = serde_json::to_string(&saved).unwrap();
        let at = Arc::default();
        let restored = self::function(&memory, Arc::clone(&at));
        restored.restore_function(&serde_json::from_str(&text).unwrap()).expect("what was saved");
        assert_eq!((restored.save_function(), restored.bar()), (saved, function.bar()));
    }
}
