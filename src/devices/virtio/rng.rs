//! Entropy (virtio 1.2, section 5.4): fills the guest's buffers from /dev/urandom.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use event_manager::EventOps;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

use super::queue::Served;
use super::{Active, DeviceConfig, DeviceState, Hang, Kind, OpenError, RestoreError, VirtioDevice};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// The maximum number of bytes for one request, so that a request for gigabytes does not hold up
/// the event loop.
const MAX_BYTES: usize = 1 << 16;

/// The entropy source as a kind of device.
pub static KIND: Kind = Kind {
    key: "rng",
    about: "An entropy source",
    value: None,
    repeats: false,
    parse: |_| Ok(Arc::new(RngConfig)),
    read: |written| Ok(Arc::new(serde_json::from_value::<RngConfig>(written)?)),
};

/// The configuration of an entropy source. It has no options.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RngConfig;

/// The host's /dev/urandom cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("/dev/urandom: {0}")]
pub(crate) struct RngError(#[from] io::Error);

impl Diagnose for RngError {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::host(Field::Device(KIND.key))
    }
}

impl DeviceConfig for RngConfig {
    fn kind(&self) -> &'static Kind {
        &KIND
    }

    fn written(&self) -> io::Result<Value> {
        super::handoff::write(self)
    }

    fn open(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        let device = Rng::new().map_err(|error| Box::new(RngError(error)) as OpenError)?;
        Ok(Box::new(device))
    }
}

/// The device.
pub struct Rng {
    source: File,
    active: Option<Active>,
}

/// An entropy source has no state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {}

impl Rng {
    /// Opens the host's source now. The sandbox would forbid it later.
    pub fn new() -> io::Result<Self> {
        Ok(Rng { source: File::open("/dev/urandom")?, active: None })
    }
}

impl VirtioDevice for Rng {
    fn kind(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn queue_sizes(&self) -> &[u16] {
        &[64]
    }

    fn read_config(&self, _offset: usize, data: &mut [u8]) {
        data.fill(0);
    }

    fn activate(&mut self, active: Active) {
        self.active = Some(active);
    }

    fn quiesce(&mut self, _patience: Duration) -> Result<Option<Active>, Hang> {
        Ok(self.active.take())
    }

    fn notified(&mut self, index: u16, _ops: &mut EventOps) {
        let Some(active) = &mut self.active else { return };
        active.serve(index, |chain| {
            let read = chain.writable.readv(&self.source, MAX_BYTES).unwrap_or_else(|error| {
                tracing::warn!("virtio rng: /dev/urandom: {error}");
                // The driver gets an empty buffer back.
                0
            });
            Served::Done(read as u32)
        });
    }

    fn save(&self) -> DeviceState {
        DeviceState::Rng(State {})
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError> {
        match state {
            DeviceState::Rng(State {}) => Ok(()),
            other => Err(RestoreError::kind(&KIND, &other)),
        }
    }
}
