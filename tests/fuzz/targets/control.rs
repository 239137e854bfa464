//! What peers send: the lines of the control socket, and those of the guest agent.

use guest_agent::{Event, Request};
use vellum::control::{Do, parse};

/// The target: `cargo fuzz` feeds it, and so does `cargo test` from the corpus.
pub fn control(data: &[u8]) {
    match parse(data) {
        Ok(request) => {
            // What was understood is said again as it was meant.
            let mut line = serde_json::to_value(&request.what).unwrap();
            line["id"] = request.id.into();
            assert_eq!(parse(line.to_string().as_bytes()), Ok(request));
        }
        Err((_, error)) => assert!(!error.is_empty()),
    }
    let _ = serde_json::from_slice::<Do>(data);
    let _ = serde_json::from_slice::<Request>(data);
    let _ = serde_json::from_slice::<Event>(data);
}
