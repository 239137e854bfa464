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

/// Makes paths absolute, so that they name the same files in any working directory.
///
/// # Errors
/// This process's working directory is gone.
pub(crate) fn make_absolute<'a>(paths: impl IntoIterator<Item = &'a mut PathBuf>) -> io::Result<()> {
    paths.into_iter().try_for_each(|path| {
        *path = std::path::absolute(&*path)?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A child of a machine that waits for commands is started in another working directory.
    #[test]
    fn every_path_of_a_written_configuration_is_absolute() {
        let flags: &[(&str, &str, usize)] = &[
            ("disk", "path=rel/a,format=qcow2,backing=rel/b,data-file=rel/c,overlay=rel/d", 4),
            ("net", "user,socket=rel/a", 1),
            ("vsock", "rel/a", 1),
            ("console", "file=rel/a", 1),
            ("share", "path=rel/a,tag=t", 1),
            ("cloud-init", "user-data=rel/a,meta-data=rel/b,network-config=rel/c", 3),
        ];
        for (key, text, paths) in flags {
            let kind = KINDS.iter().find(|kind| kind.key == *key).expect("a kind of device");
            let config = (kind.parse)(text).unwrap_or_else(|why| panic!("--{key} {text}: {why}"));
            let written = config.written().unwrap().to_string();
            assert!(!written.contains("\"rel/"), "--{key} {text}: {written}");
            assert_eq!(written.matches("/rel/").count(), *paths, "--{key} {text}: {written}");
        }
    }
}
