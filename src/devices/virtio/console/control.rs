//! The control messages of a multiport console and its driver (virtio 1.2, section 5.3.6.2). A
//! message has a port's number, an event and its value.
//!
//! The device keeps no queue of messages, because a driver that takes none could make it grow.
//! Instead each port has one bit for each owed message. The message is composed when there is a
//! buffer for it.

use super::port::Port;

/// From the driver: it is ready, if the value is 1.
const DEVICE_READY: u16 = 0;
/// The port exists.
const DEVICE_ADD: u16 = 1;
/// From the driver: it can use the port, if the value is 1.
const PORT_READY: u16 = 3;
/// The port is a console.
const CONSOLE_PORT: u16 = 4;
/// The host's end of the port is open (1) or closed (0). From the driver: the same of the guest's
/// end.
const PORT_OPEN: u16 = 6;
/// The port's name: text after the message.
const PORT_NAME: u16 = 7;

/// The messages that a port may be owed, in the order of sending.
const OWED: [u16; 4] = [DEVICE_ADD, CONSOLE_PORT, PORT_NAME, PORT_OPEN];
/// The length of a message without a name.
const BYTES: usize = 8;

/// Marks `event` as owed.
fn owe(port: &mut Port, event: u16) {
    port.state.owed |= OWED.iter().position(|owed| *owed == event).map_or(0, |at| 1 << at);
}

/// The host's end of `port` was opened or closed: owes the driver a message.
pub fn owe_connection(port: &mut Port) {
    owe(port, PORT_OPEN);
}

/// Handles a message of the driver. Messages with an unknown port or event, and short ones, change
/// nothing.
pub fn hear(message: [u8; BYTES], ports: &mut [Option<Port>]) {
    let [a, b, c, d, e, f, g, h] = message;
    let (id, event, is_so) =
        (u32::from_le_bytes([a, b, c, d]), u16::from_le_bytes([e, f]), u16::from_le_bytes([g, h]) != 0);
    if event == DEVICE_READY {
        if is_so {
            ports.iter_mut().flatten().for_each(|port| owe(port, DEVICE_ADD));
        }
        return;
    }
    let named = usize::try_from(id).ok().and_then(|id| ports.get_mut(id));
    let Some(port) = named.and_then(Option::as_mut) else { return };
    match event {
        PORT_READY if is_so => {
            [CONSOLE_PORT, PORT_NAME, PORT_OPEN].into_iter().for_each(|event| owe(port, event))
        }
        PORT_OPEN => port.state.open = is_so,
        _ => {}
    }
}

/// The next owed message. A named port is not a console; an unnamed port is.
pub fn next(ports: &mut [Option<Port>]) -> Option<Vec<u8>> {
    for (id, port) in ports.iter_mut().enumerate() {
        let Some(port) = port else { continue };
        for (at, event) in OWED.into_iter().enumerate() {
            if port.state.owed & 1 << at == 0 {
                continue;
            }
            port.state.owed &= !(1 << at);
            let value = match (event, &port.name) {
                (CONSOLE_PORT, Some(_)) | (PORT_NAME, None) => continue,
                (PORT_OPEN, Some(_)) => u16::from(port.is_connected()),
                _ => 1,
            };
            let head = [&(id as u32).to_le_bytes()[..], &event.to_le_bytes(), &value.to_le_bytes()];
            let name = port.name.as_deref().filter(|_| event == PORT_NAME).unwrap_or_default();
            return Some([&head.concat(), name.as_bytes()].concat());
        }
    }
    None
}
