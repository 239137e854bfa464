//! What only virtio-pci has: a configuration space that says where everything is, vectors, and a
//! BAR that moves.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use support::virtio::driver::*;
use support::virtio::reach::{FUNCTION, WINDOW};
use vellum_devices::bus::BusDevice;
use vellum_devices::pci::Function;
use vellum_devices::pci::host::{Ecam, Host, Ports, Window};
use vellum_devices::virtio::pci::{Kvm, Pci, lines};
use vellum_devices::virtio::rng::Rng;
use virtio_bindings::virtio_mmio::*;

use super::CODEC;

const ENABLE: u32 = 1 << 31;

/// What KVM was told: the messages of vectors, and the addresses of doorbells.
type Reported<T> = Arc<Mutex<Vec<T>>>;

struct Bus {
    function: Arc<Pci>,
    ports: Ports,
    ecam: Ecam,
    window: Window,
    routes: Reported<(usize, u64, u32)>,
    doorbells: Reported<Option<u64>>,
}

/// A bus with an entropy device, before any access.
fn bus() -> Bus {
    let (routes, doorbells) = (Reported::default(), Reported::default());
    let (heard, moved) = (routes.clone(), doorbells.clone());
    let kvm = Kvm {
        route: Box::new(move |vector, message| {
            heard.lock().unwrap().push((vector, message.address, message.data));
        }),
        move_doorbells: Box::new(move |_, at| moved.lock().unwrap().push(at)),
    };
    let device = Box::new(Rng::new().unwrap());
    let lines = lines(&*device).unwrap();
    let function = Arc::new(Pci::new(device, memory(), lines, WINDOW, WINDOW.start as u32, kvm).unwrap());
    let host = Arc::new(Host::new([function.clone() as Arc<dyn Function>], WINDOW));
    Bus {
        function,
        ports: Ports(host.clone()),
        ecam: Ecam(host.clone()),
        window: Window(host),
        routes,
        doorbells,
    }
}

fn double(device: &impl BusDevice, at: u64) -> u32 {
    let mut data = [0; 4];
    device.read(at, &mut data);
    u32::from_le_bytes(data)
}

fn by_ports(ports: &Ports, device: u32, register: u32) -> u32 {
    ports.write(0, &(ENABLE | device << 11 | register).to_le_bytes());
    double(ports, 4)
}

#[test]
fn both_ways_to_a_configuration_space_give_the_same() {
    let bus = bus();
    for device in 0..32 {
        for register in (0..256).step_by(4) {
            let mapped = double(&bus.ecam, u64::from(device) << 15 | u64::from(register));
            assert_eq!(by_ports(&bus.ports, device, register), mapped, "{device} {register:#x}");
            assert_eq!(mapped == u32::MAX, device > 1, "{device} {register:#x}");
        }
    }
    // Reads of bytes and words through the data port return parts of the register. Other functions,
    // other buses and other sizes have no device.
    let double_word = by_ports(&bus.ports, 1, 8).to_le_bytes();
    for (at, expected) in (4..).zip(double_word) {
        let mut byte = [0];
        bus.ports.read(at, &mut byte);
        assert_eq!(byte, [expected]);
    }
    let mut word = [0; 2];
    bus.ports.read(6, &mut word);
    assert_eq!(word, double_word[2..]);
    bus.ports.write(0, &[0; 2]);
    assert_eq!(double(&bus.ports, 0), ENABLE | 1 << 11 | 8, "an address is written as a whole");
    for nobody in [ENABLE | 1 << 16 | 1 << 11, ENABLE | 1 << 11 | 1 << 8, 1 << 11] {
        bus.ports.write(0, &nobody.to_le_bytes());
        assert_eq!(double(&bus.ports, 4), u32::MAX, "{nobody:#x}");
    }
    assert_eq!(double(&bus.ecam, 1 << 15 | 1 << 12), u32::MAX, "another function");
    assert_eq!(double(&bus.ecam, FUNCTION + 0x100), 0, "no extended capabilities");
    let mut across = [0; 4];
    bus.ecam.read(FUNCTION + 0xffe, &mut across);
    assert_eq!(across, [0xff; 4], "beyond the function");
    // A write through one is visible through the other.
    bus.ports.write(0, &(ENABLE | 1 << 11 | 0x3c).to_le_bytes());
    bus.ports.write(4, &[0x5a]);
    assert_eq!(double(&bus.ecam, FUNCTION + 0x3c), 0x5a);
}

#[test]
fn the_capabilities_say_where_everything_is() {
    let bus = bus();
    let read = |at: u32| double(&bus.ecam, FUNCTION + u64::from(at));
    assert_eq!(read(0), 0x1044_1af4);
    assert_eq!(read(8) & 0xff, 1, "a revision of modern devices");
    let (mut at, mut found, mut table) = (read(0x34) & 0xff, HashMap::new(), None);
    while at != 0 {
        let (head, next) = (read(at), read(at) >> 8 & 0xff);
        match head & 0xff {
            9 => drop(found.insert(head >> 24, (read(at + 4) & 0xff, read(at + 8), read(at + 12)))),
            0x11 => table = Some((head >> 16, read(at + 4), read(at + 8))),
            other => panic!("a capability {other:#x}"),
        }
        at = next;
    }
    assert_eq!(table, Some((1, 0x4000, 0x5000)), "two vectors, in BAR 0");
    let parts = [
        (1, (0, 0, 0x38)),
        (2, (0, 0x3000, 4)),
        (3, (0, 0x1000, 1)),
        (4, (0, 0x2000, 0x1000)),
        (5, (0, 0, 0)),
    ];
    assert_eq!(found, HashMap::from(parts));
}

#[test]
fn a_bar_moves_with_its_doorbells_and_goes_where_nobody_reaches_it() {
    let bus = bus();
    let move_to =
        |base: u64| assert!(bus.ecam.write(FUNCTION + 0x10, &(base as u32).to_le_bytes()).is_none());
    let queues = |base: u64| {
        let mut data = [0; 2];
        bus.window.read(base - WINDOW.start + 0x12, &mut data);
        u16::from_le_bytes(data)
    };
    assert_eq!(queues(WINDOW.start), 0xffff, "it decodes nothing yet");
    bus.ecam.write(FUNCTION + 4, &[2, 0]);
    assert_eq!(queues(WINDOW.start), 1);
    move_to(u64::from(u32::MAX));
    assert_eq!(double(&bus.ecam, FUNCTION + 0x10), 0xffff_8000, "32 KiB");
    assert_eq!(queues(WINDOW.start), 0xffff);
    move_to(WINDOW.start + 0x1_8000);
    assert_eq!((queues(WINDOW.start), queues(WINDOW.start + 0x1_8000)), (0xffff, 1));
    // The bridge forwards nothing outside the window: over RAM, over the I/O APIC, and at the edges
    // of the window.
    for outside in [0, 0xfec0_0000, WINDOW.end, WINDOW.end - 0x4000, WINDOW.start - 0x8000] {
        move_to(outside);
        assert_eq!(
            bus.function.bar().map(|bar| bar.0),
            (outside == WINDOW.end - 0x4000).then_some(WINDOW.end - 0x8000)
        );
    }
    bus.ecam.write(FUNCTION + 4, &[0, 0]);
    let bells = |base: u64| Some(base + 0x3000);
    let expected =
        [bells(WINDOW.start), None, bells(WINDOW.start + 0x1_8000), None, bells(WINDOW.end - 0x8000), None];
    assert_eq!(*bus.doorbells.lock().unwrap(), expected);
}

#[test]
fn the_window_in_the_configuration_space_reaches_the_bar() {
    let bus = bus();
    // The last capability has the fields offset, length and data.
    let window = FUNCTION + 0x90;
    assert_eq!(double(&bus.ecam, window) >> 24, 5);
    let reach = |offset: u32, len: u32| {
        bus.ecam.write(window + 8, &offset.to_le_bytes());
        bus.ecam.write(window + 12, &len.to_le_bytes());
    };
    reach(0x12, 2);
    assert_eq!(double(&bus.ecam, window + 16) & 0xffff, 1, "one queue");
    reach(0x14, 1);
    bus.ecam.write(window + 16, &[1]);
    assert_eq!(bus.function.get(vellum_devices::virtio::registers::Register::Status), 1);
    reach(0x3000, 2);
    bus.ecam.write(window + 16, &[0, 0]);
    assert!(bus.function.doorbells()[0].read().is_ok());
    for (offset, len) in
        [(0x7ffe, 4), (0x13, 2), (0x12, 3), (0x12, 0), (0x8000, 1), (u32::MAX, 1), (0, u32::MAX)]
    {
        reach(offset, len);
        bus.ecam.write(window + 16, &[0xff; 4]);
        assert_eq!(double(&bus.ecam, window + 16), u32::MAX, "{offset:#x} {len}: what was written stays");
    }
}

#[test]
fn fewer_vectors_than_queues_and_none() {
    let mut driver = Driver::new(CODEC, Rng::new().unwrap());
    driver.start();
    let interrupt = driver.device.interrupt().clone();
    let signalled =
        || -> Vec<bool> { interrupt.lines().iter().map(|line| line.event().read().is_ok()).collect() };
    let vectors = || interrupt.vectors().collect::<Vec<_>>();
    assert_eq!(vectors(), [0, 1]);
    // All interrupts use one vector.
    interrupt.set_vector(0, 1);
    driver.submit(0, &[writable(BUFFERS, 32)]);
    driver.run();
    assert_eq!(signalled(), [false, true]);
    // A vector that does not exist is refused, and nothing interrupts.
    interrupt.set_vector(0, 2);
    assert_eq!(vectors(), [0xffff, 1]);
    driver.submit(0, &[writable(BUFFERS, 32)]);
    driver.run();
    assert_eq!(signalled(), [false, false]);
    assert_ne!(driver.get(VIRTIO_MMIO_INTERRUPT_STATUS), 0);
    driver.set(VIRTIO_MMIO_STATUS, 0);
    assert_eq!(vectors(), [0xffff, 0xffff]);
}

#[test]
fn a_masked_vector_waits_and_goes_to_a_new_process_with_what_it_owes() {
    let mut driver = Driver::new(CODEC, Rng::new().unwrap());
    driver.start();
    let mask = |driver: &Driver, masked: u32| driver.in_bar(0x400c, &masked.to_le_bytes());
    let pending = |driver: &Driver| driver.of_bar(0x5000, 8)[0];
    let sent = |driver: &Driver| driver.device.interrupt().lines()[0].event().read().is_ok();
    mask(&driver, 1);
    driver.submit(0, &[writable(BUFFERS, 32)]);
    driver.run();
    assert_eq!((pending(&driver), sent(&driver)), (1, false));
    mask(&driver, 0);
    assert_eq!((pending(&driver), sent(&driver)), (0, true));
    mask(&driver, 1);
    driver.submit(0, &[writable(BUFFERS, 32)]);
    driver.run();
    // The driver's settings of the function move to another process.
    let bars = |driver: &Driver| driver.of_bar(0x4000, 8);
    let before = bars(&driver);
    let driver = driver.move_to(Rng::new().unwrap(), |_| ());
    assert_eq!((pending(&driver), sent(&driver), bars(&driver)), (1, false, before));
    assert_eq!(driver.device.interrupt().vectors().collect::<Vec<_>>(), [0, 1]);
    mask(&driver, 0);
    assert_eq!((pending(&driver), sent(&driver)), (0, true));
}

#[test]
fn messages_reach_kvm_when_they_may_be_sent() {
    let bus = bus();
    bus.ecam.write(FUNCTION + 4, &[6, 0]);
    bus.window.write(0x4010, &0xfee0_2000u64.to_le_bytes());
    bus.window.write(0x4018, &0x41u32.to_le_bytes());
    bus.window.write(0x401c, &0u32.to_le_bytes());
    assert!(bus.routes.lock().unwrap().is_empty(), "MSI-X is off");
    bus.ecam.write(FUNCTION + 0x42, &0x8000u16.to_le_bytes());
    assert_eq!(*bus.routes.lock().unwrap(), [(1, 0xfee0_2000, 0x41)]);
    // Through the ports as well, with a write of one byte.
    bus.ports.write(0, &(ENABLE | 1 << 11 | 0x40).to_le_bytes());
    bus.ports.write(7, &[0xc0]);
    assert_eq!(double(&bus.ecam, FUNCTION + 0x40) >> 16, 0xc001);
}

#[test]
fn a_state_of_another_function_is_refused() {
    let bus = bus();
    let mut state = serde_json::to_value(bus.function.save_function()).unwrap();
    state["config"][0] = 1.into();
    let damaged = serde_json::from_value(state.clone()).unwrap();
    let error = bus.function.restore_function(&damaged).unwrap_err().to_string();
    assert!(error.contains("configuration space"), "{error}");
    state["config"][0] = 0xf4.into();
    state["vectors"] = serde_json::json!([0]);
    let damaged = serde_json::from_value(state).unwrap();
    let error = bus.function.restore_function(&damaged).unwrap_err().to_string();
    assert!(error.contains("vector count"), "{error}");
}
