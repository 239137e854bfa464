//! The protocol from an emulated host to the laboratory: frames on a serial port of their own.
//!
//! The kernel may print to the console, which is another port, at any time. This port carries only
//! frames: magic, kind, length, checksum, payload. A serial line is what QEMU, Bochs and every
//! kernel have in common. The other direction is a file: the [`Job`] in the initramfs.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

use super::kexec::Replaced;

/// The job's path in the initramfs.
pub const JOB_PATH: &str = "/job.json";

/// The job's working directory in the host. Files in it are returned.
pub const OUT_DIR: &str = "/out";

/// The host's job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// The bed's name, for `VELLUM_BED`.
    pub bed: String,
    /// The console's port, by its name below /dev.
    pub console: String,
    /// The results line's port, by its name below /dev.
    pub results: String,
    /// Modules to load in this order, by their paths in the initramfs.
    pub modules: Vec<String>,
    /// Module parameters as on the kernel's command line: `kvm_amd.npt=0`.
    pub parameters: Vec<String>,
    /// Commands to run in sequence, whatever their exit codes.
    pub commands: Vec<Vec<String>>,
    /// Environment of all commands.
    pub env: Vec<(String, String)>,
    /// Whether two CPUs race ([`Pace::Races`](super::Pace::Races)).
    pub races: bool,
    /// Set if the root is on a disk: the directories and files of the initramfs to show there, by
    /// their old and new paths.
    pub root: Option<Vec<(String, String)>>,
    /// Whether systemd becomes the first process, and runs the commands as a service.
    pub systemd: bool,
    /// Set if another kernel can take the host's place.
    pub replaced: Option<Replaced>,
    /// An interactive shell on the console instead of commands.
    pub shell: bool,
}

/// A command's exit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Exit {
    /// The exit code: 128+n if signal n killed it, 127 if it could not be started.
    pub code: i32,
    /// Seconds from start to end on the host's clock, which counts instructions under icount.
    pub seconds: f64,
    /// The fraction of that time in which the host's CPUs were idle, 0 to 1.
    pub idle: f64,
}

/// The host's description of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Boot {
    /// `uname -r`.
    pub kernel: String,
    /// Whether /dev/kvm exists.
    pub kvm: bool,
    /// Failed loads and mounts.
    pub complaints: Vec<String>,
    /// Module parameters that are not in force, and why.
    pub refused: Vec<String>,
}

/// A message.
#[derive(Clone, Debug, PartialEq)]
pub enum Frame {
    /// The host is up. A host whose kernel is replaced says so of each kernel.
    Boot(Boot),
    /// A command's standard output.
    Stdout(Vec<u8>),
    /// A command's standard error.
    Stderr(Vec<u8>),
    /// A command ended.
    Exit(Exit),
    /// A file from [`OUT_DIR`], by its path relative to it. Large files come in parts, in order.
    File(String, Vec<u8>),
    /// The job is done.
    Done,
}

const MAGIC: [u8; 4] = *b"VLB\x01";
/// The largest payload. A larger length is noise.
const MAX: usize = 1 << 20;

impl Frame {
    /// Writes the frame with one write.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let json = |value: Result<Vec<u8>, serde_json::Error>| value.map_err(io::Error::other);
        let (kind, payload) = match self {
            Frame::Boot(boot) => (b'B', json(serde_json::to_vec(boot))?),
            Frame::Stdout(bytes) => (b'O', bytes.clone()),
            Frame::Stderr(bytes) => (b'E', bytes.clone()),
            Frame::Exit(exit) => (b'X', json(serde_json::to_vec(exit))?),
            Frame::File(name, bytes) => (b'F', [name.as_bytes(), b"\0", bytes].concat()),
            Frame::Done => (b'D', Vec::new()),
        };
        if payload.len() > MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a frame larger than its limit"));
        }
        let mut frame = Vec::with_capacity(payload.len() + 13);
        frame.extend(MAGIC);
        frame.push(kind);
        frame.extend((payload.len() as u32).to_le_bytes());
        frame.extend(checksum(kind, &payload).to_le_bytes());
        frame.extend(payload);
        to.write_all(&frame)
    }

    /// Reads the next frame. Skips bytes before its magic, because a BIOS may write first. `None`
    /// at the end.
    pub fn read(from: &mut impl Read) -> io::Result<Option<Self>> {
        let mut window = [0; 4];
        while window != MAGIC {
            let mut byte = [0];
            if from.read(&mut byte)? == 0 {
                return Ok(None);
            }
            window.rotate_left(1);
            window[3] = byte[0];
        }
        let mut head = [0; 9];
        from.read_exact(&mut head)?;
        let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
        if length > MAX {
            return Err(bad(format!("a frame of {length} bytes")));
        }
        let mut payload = vec![0; length];
        from.read_exact(&mut payload)?;
        if head[5..] != checksum(head[0], &payload).to_le_bytes() {
            return Err(bad(format!("a frame of {length} bytes with a wrong checksum")));
        }
        let json = |error: serde_json::Error| bad(format!("a frame that is no JSON: {error}"));
        Ok(Some(match head[0] {
            b'B' => Frame::Boot(serde_json::from_slice(&payload).map_err(json)?),
            b'O' => Frame::Stdout(payload),
            b'E' => Frame::Stderr(payload),
            b'X' => Frame::Exit(serde_json::from_slice(&payload).map_err(json)?),
            b'F' => {
                let split =
                    payload.iter().position(|&b| b == 0).ok_or_else(|| bad("a file without a name"))?;
                let name = String::from_utf8_lossy(&payload[..split]).into_owned();
                Frame::File(name, payload[split + 1..].to_vec())
            }
            b'D' => Frame::Done,
            kind => return Err(bad(format!("a frame of unknown kind {kind:#x}"))),
        }))
    }
}

fn bad(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the results line carried {}", what.into()))
}

/// FNV-1a, 32 bits. It detects a dropped or repeated byte, which is all that a serial line does.
fn checksum(kind: u8, payload: &[u8]) -> u32 {
    let bytes = std::iter::once(&kind).chain(payload);
    bytes.fold(0x811c_9dc5, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames() -> Vec<Frame> {
        vec![
            Frame::Boot(Boot { kernel: "6.1".into(), kvm: true, complaints: vec![], refused: vec![] }),
            Frame::Stdout(b"a\0\n\xff".to_vec()),
            Frame::Stderr(MAGIC.to_vec()),
            Frame::File("dir/result.json".into(), b"{}\0".to_vec()),
            Frame::Exit(Exit { code: 12, seconds: 0.5, idle: 0.001 }),
            Frame::Done,
        ]
    }

    #[test]
    fn frames_survive_the_line_and_noise_before_it() {
        let mut line = b"BIOS says VLVL hello\r\n".to_vec();
        frames().iter().for_each(|frame| frame.write(&mut line).unwrap());
        let mut from = line.as_slice();
        let read: Vec<Frame> = std::iter::from_fn(|| Frame::read(&mut from).unwrap()).collect();
        assert_eq!(read, frames());
    }

    #[test]
    fn a_dropped_byte_is_noticed() {
        let mut line = Vec::new();
        Frame::Stdout(b"hello world".to_vec()).write(&mut line).unwrap();
        Frame::Done.write(&mut line).unwrap();
        for at in 4..line.len() - 13 {
            let mut broken = line.clone();
            broken.remove(at);
            let mut from = broken.as_slice();
            assert!(Frame::read(&mut from).is_err(), "byte {at} was dropped unnoticed");
        }
    }
}
