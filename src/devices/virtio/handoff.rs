//! Devices that another process of this host has open, and that this one is to take over: what was asked for there, and the descriptors.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use super::{DeviceConfig, KINDS, Kind, OpenError, VirtioDevice};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin};

/// What was lent is no such device.
#[derive(Debug, thiserror::Error)]
#[error("what was handed over is no {0}: {1}")]
pub struct Unfit(pub &'static str, pub String);

impl Diagnose for Unfit {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::HOST
    }
}

impl Unfit {
    /// Of this kind.
    pub fn boxed(kind: &Kind, what: impl std::fmt::Display) -> OpenError {
        Box::new(Self(kind.key, what.to_string()))
    }
}

/// A device that is taken over where it is opened: once.
#[derive(Debug)]
pub struct HandedDevice {
    config: Arc<dyn DeviceConfig>,
    descriptors: Mutex<Vec<OwnedFd>>,
}

impl HandedDevice {
    /// A device of the kind `key` that was written so, with its descriptors.
    ///
    /// # Errors
    /// Where there is no such kind, or it was written by another version.
    pub fn new(key: &str, written: Value, descriptors: Vec<OwnedFd>) -> Result<Self, String> {
        let kind = KINDS.iter().find(|kind| kind.key == key);
        let kind = kind.ok_or_else(|| format!("a device {key:?}, of which this program knows nothing"))?;
        let config = (kind.read)(written).map_err(|error| format!("{key}: {error}"))?;
        Ok(Self { config, descriptors: Mutex::new(descriptors) })
    }
}

impl DeviceConfig for HandedDevice {
    fn kind(&self) -> &'static Kind {
        self.config.kind()
    }

    fn open(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        self.open_unlocked()
    }

    fn open_unlocked(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        let lent = std::mem::take(&mut *self.descriptors.lock().unwrap_or_else(PoisonError::into_inner));
        self.config.take_over(lent)
    }

    fn written(&self) -> io::Result<Value> {
        self.config.written()
    }
}

/// What is asked for, as another process reads it.
///
/// # Errors
/// Where it has a path that is no text.
pub fn write(config: &impl serde::Serialize) -> io::Result<Value> {
    serde_json::to_value(config).map_err(io::Error::other)
}

/// The same path wherever a process is.
///
/// # Errors
/// Where this one is nowhere.
pub fn absolute(path: &std::path::Path) -> io::Result<PathBuf> {
    std::path::absolute(path)
}
