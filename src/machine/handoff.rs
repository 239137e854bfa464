//! The descriptors that a process lends to another process of its host that takes over its machine,
//! and a list of what they are.
//!
//! The lender continues as before until the hand-over is decided. Then it releases all of them.
//! Memory and state are not among them: the migration transfers both.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The version of the list. It is the only version written and read.
pub const VERSION: u32 = 1;

/// The list. Descriptor numbers count from the first one that is lent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct List {
    /// Its version.
    pub version: u32,
    /// Standard input, output and error.
    pub standard: Vec<usize>,
    /// The control socket.
    pub control: Option<Socket>,
    /// The socket to the process that was started first, if this is not that process itself.
    #[serde(rename = "tether")]
    pub supervisor: Option<usize>,
    /// The sandbox, as in its flag.
    pub sandbox: String,
    /// The user and group that root is dropped for.
    pub user: Option<(u32, u32)>,
    /// The remaining time limit of the machine, in milliseconds.
    pub limit_ms: Option<u64>,
    /// The file for its result.
    pub result: Option<PathBuf>,
    /// Whether memory is locked.
    pub lock: bool,
    /// The number of entries of each vCPU's dirty ring.
    pub dirty_ring: Option<u32>,
    /// The serial port.
    pub serial: Option<Serial>,
    /// Virtio devices, in order.
    pub devices: Vec<Device>,
}

/// A listening socket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Socket {
    /// Its absolute path.
    pub path: PathBuf,
    /// The socket's descriptor.
    pub descriptor: usize,
}

/// The targets of a serial port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Serial {
    /// Where the guest's output goes.
    pub output: Option<usize>,
    /// Where the guest's input comes from.
    pub input: Option<usize>,
    /// The slave of a pseudo-terminal, which keeps it from hanging up.
    pub slave: Option<usize>,
    /// Whether the input is a terminal in raw mode.
    pub raw: bool,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// The key of its kind.
    pub kind: String,
    /// Its configuration, in the kind's own form.
    pub written: Value,
    /// Its open descriptors.
    pub descriptors: Vec<usize>,
}

/// A list in preparation, and its descriptors.
#[derive(Debug, Default)]
pub struct HandoffFds {
    /// The list.
    pub list: List,
    /// The descriptors.
    pub descriptors: Vec<OwnedFd>,
}

impl HandoffFds {
    /// Adds a descriptor. Returns its number.
    pub fn add(&mut self, descriptor: impl Into<OwnedFd>) -> usize {
        self.descriptors.push(descriptor.into());
        self.descriptors.len() - 1
    }

    /// Adds a copy of a descriptor. Returns its number.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn add_copy(&mut self, of: impl AsFd) -> io::Result<usize> {
        Ok(self.add(of.as_fd().try_clone_to_owned()?))
    }
}

/// The maximum length of a list that is read, in bytes.
const MAX_LIST: usize = 1 << 20;

impl List {
    /// Parses a list that arrived with this number of descriptors.
    ///
    /// # Errors
    /// In words: it is not a list, it has another version, or it names a descriptor that did not
    /// arrive.
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
