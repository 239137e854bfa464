//! What a process lends of itself to another of its host that is to take its machine over: descriptors, and what they are of.
//!
//! The one that lends goes on as before until the hand-over is decided; then it lets go of all of it. Memory is not among it: that goes
//! with the migration, as its state does.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The version of the list that is written here, and the only one that is read.
pub const VERSION: u32 = 1;

/// The list. Numbers of descriptors count from the first one that is lent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct List {
    /// Its version.
    pub version: u32,
    /// Standard input, output and error.
    pub standard: Vec<usize>,
    /// The control socket.
    pub control: Option<Socket>,
    /// What ties this process to the one that was started first, where it is not that itself.
    #[serde(rename = "tether")]
    pub supervisor: Option<usize>,
    /// The sandbox, as its flag says it.
    pub sandbox: String,
    /// For whom root is given up.
    pub user: Option<(u32, u32)>,
    /// How long the machine may run on, in milliseconds.
    pub limit_ms: Option<u64>,
    /// Where its result goes.
    pub result: Option<PathBuf>,
    /// Whether memory is locked.
    pub lock: bool,
    /// Entries of each vCPU's dirty ring.
    pub dirty_ring: Option<u32>,
    /// The serial port.
    pub serial: Option<Serial>,
    /// Virtio devices, in their order.
    pub devices: Vec<Device>,
}

/// A socket that somebody listens at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Socket {
    /// Its absolute path.
    pub path: PathBuf,
    /// The socket.
    pub descriptor: usize,
}

/// Where a serial port leads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Serial {
    /// What the guest writes goes there.
    pub output: Option<usize>,
    /// What it reads comes from there.
    pub input: Option<usize>,
    /// What keeps a pseudo-terminal from hanging up.
    pub slave: Option<usize>,
    /// Whether the input is a terminal that is raw.
    pub raw: bool,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// The key of its kind.
    pub kind: String,
    /// What was asked for, in that kind's own form.
    pub written: Value,
    /// What it has open.
    pub descriptors: Vec<usize>,
}

/// The list as it grows, and its descriptors.
#[derive(Debug, Default)]
pub struct HandoffFds {
    /// The list.
    pub list: List,
    /// The descriptors.
    pub descriptors: Vec<OwnedFd>,
}

impl HandoffFds {
    /// Adds a descriptor; its number.
    pub fn add(&mut self, descriptor: impl Into<OwnedFd>) -> usize {
        self.descriptors.push(descriptor.into());
        self.descriptors.len() - 1
    }

    /// Adds another descriptor of what this one is of.
    ///
    /// # Errors
    /// Where there is none left.
    pub fn add_copy(&mut self, of: impl AsFd) -> io::Result<usize> {
        Ok(self.add(of.as_fd().try_clone_to_owned()?))
    }
}

/// The longest list that is read, in bytes.
const MAX_LIST: usize = 1 << 20;

impl List {
    /// Reads one that comes with so many descriptors.
    ///
    /// # Errors
    /// In words: where it is none, of another version, or names a descriptor that there is not.
    pub fn parse(bytes: &[u8], descriptors: usize) -> Result<Self, String> {
        if bytes.len() > MAX_LIST {
            return Err(format!("the list of what is handed over has more than {MAX_LIST} bytes"));
        }
        let version: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if version["version"] != VERSION {
            return Err(format!(
                "what is handed over is listed in version {}, and this program reads {VERSION}",
                version["version"]
            ));
        }
        let list: Self = serde_json::from_value(version).map_err(|error| error.to_string())?;
        let serial = list.serial.iter().flat_map(|serial| [serial.output, serial.input, serial.slave]);
        let devices = list.devices.iter().flat_map(|device| device.descriptors.iter().copied());
        let mut all: Vec<usize> =
            serial.flatten().chain(devices).chain(list.standard.iter().copied()).collect();
        all.extend(list.supervisor);
        all.extend(list.control.iter().map(|control| control.descriptor));
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        match all.last() {
            Some(last) if *last >= descriptors => {
                Err(format!("descriptor {last} is named, and {descriptors} came"))
            }
            _ if all.len() != count => Err("a descriptor is named twice".into()),
            _ if list.standard.len() > 3 => Err("there are three standard descriptors".into()),
            _ => Ok(list),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_each_descriptor_once_and_none_that_there_is_not() {
        let list = List {
            version: VERSION,
            standard: vec![0, 1, 2],
            supervisor: Some(3),
            devices: vec![Device { kind: "disk".into(), written: Value::Null, descriptors: vec![4] }],
            ..List::default()
        };
        let bytes = |list: &List| serde_json::to_vec(list).unwrap();
        assert_eq!(List::parse(&bytes(&list), 5).as_ref(), Ok(&list));
        let says = |list: &List, count| List::parse(&bytes(list), count).unwrap_err();
        assert!(says(&list, 4).contains("descriptor 4 is named, and 4 came"));
        assert!(says(&List { supervisor: Some(4), ..list.clone() }, 5).contains("twice"));
        assert!(
            says(&List { version: 2, ..list.clone() }, 5).contains("in version 2, and this program reads 1")
        );
        assert!(says(&List { standard: vec![0, 1, 2, 5], ..list }, 9).contains("three"));
        assert!(List::parse(b"{}", 0).is_err() && List::parse(b"\xff", 0).is_err());
        assert!(List::parse(&vec![b' '; MAX_LIST + 1], 0).unwrap_err().contains("bytes"));
    }
}
