//! The control socket of a running machine: JSON lines, `{"id","do",…}` answered by `{"id","ok"}` or `{"id","error"}`.
//!
//! A running machine opens no path. What a request needs of files and sockets the client opens, and sends the descriptors
//! with the request's first byte (SCM_RIGHTS, unix(7)), as many as [`Do::descriptors`] says.
//!
//! Here are the words of both sides. [`server`] is the machine's side, on its event loop; [`client`] is what `vellum ctl`
//! and `list` use; [`names`] says where the socket of a named machine is; [`agent`] speaks to the agent in its guest. What
//! a request does to the machine is decided where the machine runs (`machine/`).

pub mod agent;
pub mod client;
pub mod names;
pub mod server;

use serde::{Deserialize, Serialize};

/// The longest request in bytes, its newline included.
pub const MAX_LINE: usize = 64 << 10;

/// A request with the number that its answer carries.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Chosen by the client.
    pub id: u64,
    /// What to do.
    pub what: Do,
}

/// What can be asked. An unknown field is refused rather than ignored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Do {
    /// Stop all vCPUs and devices. The answer comes when they stand still.
    Pause {},
    /// Let them go on.
    Resume {},
    /// The answer is a [`Status`].
    Status {},
    /// End the machine as if it had switched itself off.
    Stop {},
    /// Ask the guest to lend this much of its memory.
    Balloon {
        /// In bytes.
        bytes: u64,
    },
    /// Send [`Event`]s on this connection from now on.
    Events {},
    /// Let what the guest writes to its serial port go to the file, pipe, socket or terminal whose descriptor comes with
    /// this. What has not been read yet goes there too.
    Serial {
        /// Whether a file loses first what it holds.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        truncate: bool,
    },
}

impl Do {
    /// How many descriptors come with it.
    pub fn descriptors(&self) -> usize {
        match self {
            Self::Serial { .. } => 1,
            Self::Pause {}
            | Self::Resume {}
            | Self::Status {}
            | Self::Stop {}
            | Self::Balloon { .. }
            | Self::Events {} => 0,
        }
    }
}

/// A machine in a few words.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Its process.
    pub pid: u32,
    /// `running` or `paused`.
    pub state: String,
    /// How many vCPUs it has.
    pub vcpus: usize,
    /// Its RAM in bytes.
    pub memory: u64,
    /// What the guest has lent of it, if there is a balloon.
    pub balloon: Option<u64>,
    /// The unix socket that leads to the guest's sockets.
    pub vsock: Option<String>,
}

/// What a machine tells those who listen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// It stands still.
    Paused {
        /// How long that took, in microseconds.
        us: u64,
    },
    /// It goes on.
    Resumed {},
    /// How far its workload has come; once a second, from guests without an OS.
    Progress {
        /// Pages accessed so far.
        done: u64,
        /// Pages to access, where there is an end.
        of: Option<u64>,
    },
    /// It has ended.
    Ended {
        /// The exit status of its process.
        status: u8,
    },
}

/// Reads a request; the error has the number to answer with, 0 if the line has none.
pub fn parse(line: &[u8]) -> Result<Request, (u64, String)> {
    let mut fields: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(line).map_err(|error| (0, format!("no JSON object: {error}")))?;
    let id = fields.remove("id").and_then(|id| id.as_u64());
    let id = id.ok_or((0, "`id` must be a number".to_owned()))?;
    let what = serde_json::from_value(fields.into()).map_err(|error| (id, error.to_string()))?;
    Ok(Request { id, what })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_strictly() {
        let request = parse(br#"{"id":7,"do":"balloon","bytes":4096}"#).unwrap();
        assert_eq!(request, Request { id: 7, what: Do::Balloon { bytes: 4096 } });
        for (line, id, says) in [
            (&b"pause"[..], 0, "JSON"),
            (b"[1]", 0, "JSON"),
            (br#"{"do":"pause"}"#, 0, "`id`"),
            (br#"{"id":-1,"do":"pause"}"#, 0, "`id`"),
            (br#"{"id":1,"do":"puase"}"#, 1, "pause"),
            (br#"{"id":1,"do":"pause","now":true}"#, 1, "now"),
            (br#"{"id":1,"do":"balloon"}"#, 1, "bytes"),
            (b"\xff\xfe", 0, "JSON"),
        ] {
            let (number, error) = parse(line).unwrap_err();
            assert!(number == id && error.contains(says), "{error}");
        }
    }
}
