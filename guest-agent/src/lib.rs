//! What host and guest say to each other: one JSON object a line.
//!
//! The host connects to [`PORT`] of the guest's vsock, sends one [`Request`], and reads [`Event`]s until the guest closes
//! the connection. On the serial port, where there is no vsock, the same lines follow each other.
//!
//! A guest that was started for one command connects to [`STREAM_PORT`] of its host instead, once it is up, and reads one
//! [`Launch`] there, a line too; [`frame`]s follow in both directions. Where its kernel has no vsock the same goes by a port of a virtio
//! console called [`STREAM_NAME`], after a [`GREETING`].

mod argument;
pub mod frame;
pub mod init;
mod mounts;
mod port;
mod processes;
pub mod serve;
pub mod stream;
mod switching;
mod sys;
mod terminal;
mod tie;
mod work;

use std::ffi::OsStr;

use serde::{Deserialize, Serialize};

pub use argument::Argument;

/// The vsock port on which the agent listens.
pub const PORT: u32 = 1024;
/// The host's vsock port on which the launcher of one command waits for its guest.
pub const STREAM_PORT: u32 = 1025;
/// What that port of a virtio console is called which has the same waiting at its other end.
pub const STREAM_NAME: &str = "vellum.stream";
/// What the guest says first on that port.
pub const GREETING: &[u8] = b"OK port\n";
/// The file of an initramfs that says that the guest is there for one command; it holds [`Mounts`].
pub const LAUNCH: &str = "/vellum/launch";
/// The directory of an initramfs with what modprobe is to find beside the modules themselves, which are then in `kernel` there.
pub const MODULES: &str = "/vellum/modules";
/// The longest request, in bytes: a line beyond it is refused. JSON writes a byte of an argument as six at most.
pub const MAX_REQUEST: usize = 6 * MAX_ARGUMENTS + (64 << 10);
/// The longest argument of a command, in bytes with its NUL (Linux's MAX_ARG_STRLEN, of pages of 4 KiB).
pub const MAX_ARGUMENT: usize = 128 << 10;
/// The most that all of them may have, their pointers included: a quarter of a stack of 8 MiB (fs/exec.c, bprm_stack_limits), less what
/// the environment takes.
pub const MAX_ARGUMENTS: usize = (2 << 20) - (64 << 10);

/// Whether a guest's Linux starts a command with these arguments.
///
/// # Errors
/// Which of its limits they are beyond.
pub fn check_arguments(command: &[impl AsRef<OsStr>]) -> Result<(), String> {
    let remedy = "a file in a directory that the guest has can hold them";
    if let Some((nth, long)) =
        (0..).zip(command).find(|(_, argument)| argument.as_ref().len() >= MAX_ARGUMENT)
    {
        let (len, most) = (long.as_ref().len(), MAX_ARGUMENT - 1);
        return Err(format!("argument {nth} has {len} bytes, and Linux takes {most} at most; {remedy}"));
    }
    let all: usize = command.iter().map(|argument| argument.as_ref().len() + 1 + size_of::<usize>()).sum();
    match all > MAX_ARGUMENTS {
        true => {
            Err(format!("all arguments have {all} bytes, and Linux takes {MAX_ARGUMENTS} at most; {remedy}"))
        }
        false => Ok(()),
    }
}

/// What the host asks for. An unknown field is refused rather than ignored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Run a command with its arguments; the answer ends with [`Event::Exit`].
    Exec {
        /// The program, found by PATH, and its arguments.
        command: Vec<Argument>,
    },
    /// What the guest finds: CPUs, memory, clock source, kernel.
    Facts,
    /// Write to memory, and verify what was written before.
    Memory(MemoryWork),
    /// Write to a disk or a file, and verify it.
    Disk(DiskWork),
    /// Make part of a block device, or of a file, read as zeros without writing them.
    Zero {
        /// The device or file.
        path: String,
        /// Where the part begins, in bytes.
        offset: u64,
        /// How long it is.
        bytes: u64,
        /// Give the space back too.
        #[serde(default)]
        unmap: bool,
    },
    /// Watch the clocks.
    Clock {
        /// For how long.
        seconds: u64,
    },
    /// A token that goes round a ring of processes: what a context switch costs.
    LatCtx(LatCtx),
    /// Groups of senders and receivers that all talk at once.
    Hackbench(Hackbench),
    /// Processes that fork, start programs, map, unmap and protect memory, and look at what is in it.
    Processes(Processes),
    /// Run a command with its standard streams, or with a terminal: [`frame`]s follow instead of [`Event`]s. Only by vsock.
    Launch(Launch),
    /// Start another kernel in this one's place, past the firmware: at once, or when this one panics.
    Kexec(Kexec),
    /// Switch the guest off.
    PowerOff,
}

/// A command with its standard streams.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Launch {
    /// The program, found by PATH, and its arguments. Without one, on a terminal, it is the user's shell.
    pub command: Vec<Argument>,
    /// Where it runs; `/` without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<Argument>,
    /// As whom, a number or a name of the guest's /etc/passwd; as root without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// All three streams are a terminal of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<Terminal>,
    /// It has no streams and outlives the connection: its status, 0, says that it has started.
    #[serde(default, skip_serializing_if = "is_no")]
    pub detached: bool,
}

fn is_no(word: &bool) -> bool {
    !word
}

/// A terminal as the host's user has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Terminal {
    /// What it understands, as TERM names it.
    pub kind: String,
    /// Its lines.
    pub rows: u16,
    /// Characters of a line.
    pub columns: u16,
}

/// What a guest that is there for one command mounts before that.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mounts {
    /// Directories of the host's.
    #[serde(default)]
    pub shares: Vec<Mount>,
    /// The tag of the one that has the modules of its kernel: as /lib/modules/RELEASE, or as `kernel` in there, beside the files in
    /// [`MODULES`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modules: Option<String>,
}

/// A directory of the host's that a guest mounts (virtiofs).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mount {
    /// What the device calls it.
    pub tag: String,
    /// Where: an absolute path.
    pub place: String,
    /// What the guest may do with it.
    pub access: Access,
}

/// What a guest may do with a directory of its host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// Read it.
    Ro,
    /// Change it.
    Rw,
    /// Change what it sees of it: the changes stay in the guest's memory (overlayfs).
    Overlay,
}

/// Pages of memory written at a rate, each with a stamp that the next write to it verifies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryWork {
    /// How much memory.
    pub mib: u64,
    /// How much of it to write in a second; 0 for as fast as it goes.
    #[serde(default)]
    pub rate_mib: u64,
    /// In which order.
    #[serde(default)]
    pub pattern: Pattern,
    /// For how long.
    pub seconds: u64,
    /// Of the random order.
    #[serde(default)]
    pub seed: u64,
}

/// The order of writes to memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// Page after page, over and over.
    #[default]
    Sequential,
    /// Any page next.
    Random,
    /// Each page once; then all are verified until the time is over.
    Once,
}

/// Blocks of a disk or a file written with stamps, flushed, and read back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskWork {
    /// The device or file.
    pub path: String,
    /// How much of it.
    pub mib: u64,
    /// How often.
    #[serde(default = "default_one")]
    pub passes: u64,
}

/// A ring of processes on one CPU, as lmbench's `lat_ctx -s KIB TASKS`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatCtx {
    /// How many processes.
    #[serde(default = "two")]
    pub tasks: u64,
    /// How often the token goes round in a measurement.
    #[serde(default = "ten_thousand")]
    pub rounds: u64,
    /// How many measurements.
    #[serde(default = "five")]
    pub repeat: u64,
    /// What each process reads when it has the token, in KiB.
    #[serde(default)]
    pub kib: u64,
}

/// `hackbench GROUPS`: in each group every sender writes to every receiver.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hackbench {
    /// How many groups.
    #[serde(default = "default_one")]
    pub groups: u64,
    /// Senders of a group, and as many receivers.
    #[serde(default = "twenty")]
    pub pairs: u64,
    /// Threads of one process instead of a process each.
    #[serde(default)]
    pub threads: bool,
    /// Pipes instead of unix sockets.
    #[serde(default)]
    pub pipes: bool,
    /// What each sender writes to each receiver.
    #[serde(default = "hundred")]
    pub messages: u64,
    /// The length of a message.
    #[serde(default = "hundred")]
    pub bytes: u64,
}

/// Processes that change their memory all at once; what they find is told as a sum, which depends on these numbers alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Processes {
    /// How many.
    #[serde(default = "twenty")]
    pub processes: u64,
    /// What each does, so many times, drawn.
    #[serde(default = "hundred")]
    pub steps: u64,
    /// Whether they start programs, too.
    #[serde(default = "yes")]
    pub start: bool,
    /// What is drawn from.
    #[serde(default = "default_one")]
    pub seed: u64,
}

fn yes() -> bool {
    true
}

fn default_one() -> u64 {
    1
}

fn two() -> u64 {
    2
}

fn five() -> u64 {
    5
}

fn twenty() -> u64 {
    20
}

fn hundred() -> u64 {
    100
}

fn ten_thousand() -> u64 {
    10_000
}

/// A kernel that takes the place of the one that runs (kexec_file_load(2)).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kexec {
    /// Its image, a file of the guest's.
    pub kernel: String,
    /// Its initramfs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initrd: Option<String>,
    /// Its command line.
    #[serde(default)]
    pub params: String,
    /// Keep it until this kernel panics, in memory that was reserved for it (`crashkernel=`), instead of going there at once.
    #[serde(default)]
    pub on_panic: bool,
}

/// What the guest tells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// The agent is there (serial only: a vsock connection says as much).
    Ready {
        /// Modules that could not be loaded, with the reason.
        failed_modules: Vec<String>,
    },
    /// A command has written this; what is not UTF-8 is replaced in the text.
    Output {
        /// `stdout` or `stderr`.
        stream: String,
        /// What it wrote.
        text: String,
        /// The same where it is not UTF-8.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        bytes: Vec<u8>,
    },
    /// A command has ended.
    Exit {
        /// Its code, or 128 and its signal.
        code: i32,
    },
    /// The answer to [`Request::Facts`].
    Facts {
        /// CPUs online.
        cpus: u64,
        /// Total memory in KiB.
        memory_kib: u64,
        /// The clock source in use.
        clocksource: String,
        /// The kernel's release.
        kernel: String,
    },
    /// A second of writing memory.
    Memory {
        /// Pages of 4 KiB written in it.
        pages: u64,
        /// The latency of a write and its verification, in nanoseconds.
        p50_ns: u64,
        /// As above.
        p99_ns: u64,
        /// As above.
        max_ns: u64,
        /// Pages that did not hold what was written to them, since the beginning.
        wrong: u64,
    },
    /// A pass over a disk.
    Disk {
        /// Which pass, from 1.
        pass: u64,
        /// Bytes written and read back.
        bytes: u64,
        /// Nanoseconds of writing and flushing.
        write_ns: u64,
        /// Nanoseconds of reading.
        read_ns: u64,
        /// Blocks of 4 KiB that did not hold what was written to them.
        wrong: u64,
    },
    /// Processes have come to their end.
    Processes {
        /// How many children they forked that looked at their memory.
        forked: u64,
        /// How many programs they started.
        started: u64,
        /// How many areas they mapped.
        mapped: u64,
        /// How often they took access to one away.
        protected: u64,
        /// What was not as it should be.
        wrong: u64,
        /// Of all that was found.
        sum: u64,
    },
    /// The clocks, watched for a while.
    Clock {
        /// How often a clock went back.
        backwards: u64,
        /// The longest time between two looks, in nanoseconds; a pause shows here.
        longest_gap_ns: u64,
        /// By how much the wall clock left the monotonic one, in nanoseconds.
        drift_ns: i64,
    },
    /// A measurement of a ring of processes. A context switch took `(ring_ns - own_ns) / switches`.
    LatCtx {
        /// Which one, from 1.
        repeat: u64,
        /// How often one task gave the token to the next.
        switches: u64,
        /// How long all of it took, in nanoseconds.
        ring_ns: u64,
        /// The same for a task that gave the token to itself as often.
        own_ns: u64,
    },
    /// All senders and receivers are done.
    Hackbench {
        /// How many there were.
        tasks: u64,
        /// How many messages there were.
        messages: u64,
        /// Nanoseconds from when all might begin until the last one had ended.
        ns: u64,
    },
    /// The request is done.
    Done,
    /// The request has failed, or is none.
    Error {
        /// What is wrong.
        message: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Control characters are the longest in JSON.
    #[test]
    fn what_linux_takes_fits_into_a_request_and_more_is_refused() {
        let one = |len| "\u{1}".repeat(len);
        let most = vec![one(MAX_ARGUMENT - 1); MAX_ARGUMENTS / (MAX_ARGUMENT + 8)];
        assert_eq!(check_arguments(&most), Ok(()));
        let request = Request::Launch(Launch {
            command: most.iter().map(Argument::from).collect(),
            ..Launch::default()
        });
        assert!(serde_json::to_string(&request).unwrap().len() < MAX_REQUEST);
        let long = check_arguments(&["a".into(), one(MAX_ARGUMENT)]).unwrap_err();
        assert!(long.starts_with("argument 1 has 131072 bytes, and Linux takes 131071"), "{long}");
        let many = check_arguments(&[&most[..], &most[..1]].concat()).unwrap_err();
        assert!(many.starts_with("all arguments have"), "{many}");
    }

    #[test]
    fn requests_are_what_people_type() {
        let parse = |text| serde_json::from_str::<Request>(text);
        assert_eq!(
            parse(r#"{"do":"exec","command":["ls"]}"#).unwrap(),
            Request::Exec { command: vec!["ls".into()] }
        );
        assert_eq!(parse(r#"{"do":"power-off"}"#).unwrap(), Request::PowerOff);
        let kexec = Kexec { kernel: "/k".into(), initrd: None, params: String::new(), on_panic: false };
        assert_eq!(parse(r#"{"do":"kexec","kernel":"/k"}"#).unwrap(), Request::Kexec(kexec));
        let Request::Memory(work) =
            parse(r#"{"do":"memory","mib":64,"pattern":"random","seconds":3}"#).unwrap()
        else {
            panic!("memory work")
        };
        assert_eq!((work.mib, work.rate_mib, work.pattern, work.seconds), (64, 0, Pattern::Random, 3));
        let Request::LatCtx(ring) = parse(r#"{"do":"lat-ctx"}"#).unwrap() else { panic!("a ring") };
        assert_eq!((ring.tasks, ring.kib), (2, 0));
        let Request::Hackbench(work) = parse(r#"{"do":"hackbench","groups":5,"pipes":true}"#).unwrap() else {
            panic!("groups")
        };
        assert_eq!((work.groups, work.pairs, work.messages, work.bytes), (5, 20, 100, 100));
        assert_eq!((work.threads, work.pipes), (false, true));
        for wrong in
            [r#"{"do":"exec"}"#, r#"{"do":"memory","mib":1,"seconds":1,"hot":1}"#, r#"{"do":"format"}"#, "{"]
        {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn events_survive_their_line() {
        let event =
            Event::Output { stream: "stdout".into(), text: "two\nlines \u{fffd}".into(), bytes: vec![255] };
        let line = serde_json::to_string(&event).unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), event);
    }
}
