//! Lines from peers: those of the control socket, those of the guest agent, and the list of a
//! process that hands its machine over.

use guest_agent::{Event, Request};
use vellum_control::{Do, parse};
use vellum_devices::virtio::handoff::HandedDevice;
use vellum_machine::handoff::List;

/// The target. `cargo fuzz` runs it, and `cargo test` runs it on the corpus.
pub fn control(data: &[u8]) {
    match parse(data) {
        Ok(request) => {
            // A parsed request is written and parsed again without a change.
            let mut line = serde_json::to_value(&request.what).unwrap();
            line["id"] = request.id.into();
            assert_eq!(parse(line.to_string().as_bytes()), Ok(request));
        }
        Err((_, error)) => assert!(!error.is_empty()),
    }
    if let Ok(list) = List::parse(data, 8) {
        assert_eq!(List::parse(&serde_json::to_vec(&list).unwrap(), 8).as_ref(), Ok(&list));
        for device in list.devices {
            assert!(
                HandedDevice::new(&device.kind, device.written, Vec::new())
                    .map_or_else(|error| !error.is_empty(), |_| true)
            );
        }
    }
    let _ = serde_json::from_slice::<Do>(data);
    let _ = serde_json::from_slice::<Request>(data);
    let _ = serde_json::from_slice::<Event>(data);
}
