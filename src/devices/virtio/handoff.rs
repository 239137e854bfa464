//! Devices that another process of this host has open and this one takes over: their configuration
//! and their descriptors.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use super::{DeviceConfig, KINDS, Kind, OpenError, VirtioDevice};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin};

/// What was handed over cannot be such a device.
#[derive(Debug, thiserror::Error)]
#[error("what was handed over is not a {0}: {1}")]
pub struct Unfit(pub &'static str, pub String);

impl Diagnose for Unfit {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::HOST
    }
}

impl Unfit {
    /// The error for a device of this kind.
    pub(crate) fn boxed(kind: &Kind, what: impl std::fmt::Display) -> OpenError {
        Box::new(Self(kind.key, what.to_string()))
    }
}

/// The configuration that another process wrote of a device of kind `key`.
///
/// # Errors
/// The kind is unknown, or another version wrote the configuration.
pub fn read(key: &str, written: Value) -> Result<Arc<dyn DeviceConfig>, String> {
    let kind = KINDS.iter().find(|kind| kind.key == key);
    let kind = kind.ok_or_else(|| format!("unknown kind of device {key:?}"))?;
    (kind.read)(written).map_err(|error| format!("{key}: {error}"))
}

/// A handed-over device. It can be opened once.
#[derive(Debug)]
pub struct HandedDevice {
    config: Arc<dyn DeviceConfig>,
    descriptors: Mutex<Vec<OwnedFd>>,
}

impl HandedDevice {
    /// A device of kind `key`, from its written configuration and its descriptors.
    ///
    /// # Errors
    /// As [`read`].
    pub fn new(key: &str, written: Value, descriptors: Vec<OwnedFd>) -> Result<Self, String> {
        let config = read(key, written)?;
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

/// Serializes a configuration for another process.
///
/// # Errors
/// A path is not UTF-8.
pub fn write(config: &impl serde::Serialize) -> io::Result<Value> {
    serde_json::to_value(config).map_err(io::Error::other)
}

/// An absolute path, valid in any working directory.
///
/// # Errors
/// This process's working directory is gone.
pub fn absolute(path: &std::path::Path) -> io::Result<PathBuf> {
    std::path::absolute(path)
}
