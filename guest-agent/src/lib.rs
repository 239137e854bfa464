//! The protocol of host and guest: one JSON object a line.
//!
//! The host connects to [`PORT`] of the guest's vsock, sends one [`Request`], and reads [`Event`]s
//! until the guest closes the connection. On the serial port, without vsock, the same lines follow
//! each other.
//!
//! A guest that was started for one command instead connects to [`STREAM_PORT`] of its host, once
//! it is up, and reads one [`Launch`] there, also a line. [`frame`]s follow in both directions. If
//! its kernel has no vsock, the same goes through a virtio console port called [`STREAM_NAME`],
//! after a [`GREETING`].
//!
//! A guest that waits for its command ([`Mounts::waits`]) connects to [`STREAM_PORT`] too, which
//! says that it is up, and closes that. The command comes as a [`Request::Launch`].

mod argument;
pub mod children;
pub mod frame;
pub mod init;
mod lines;
mod mounts;
mod port;
mod processes;
pub mod serve;
pub mod stream;
mod switching;
mod sys;
mod terminal;
mod tie;
mod waiting;
mod work;

use std::ffi::OsStr;

use serde::{Deserialize, Serialize};

pub use argument::Argument;

/// The vsock port on which the agent listens.
pub const PORT: u32 = 1024;
/// The host's vsock port on which the launcher of one command waits for its guest.
pub const STREAM_PORT: u32 = 1025;
/// The name of the virtio console port that is used instead of vsock.
pub const STREAM_NAME: &str = "vellum.stream";
/// The guest's first message on that port.
pub const GREETING: &[u8] = b"OK port\n";
/// The file of an initramfs which says that the guest runs one command. It contains [`Mounts`].
pub const LAUNCH: &str = "/vellum/launch";
/// The directory of an initramfs with files for modprobe. The modules themselves are then mounted
/// as `kernel` beside them.
pub const MODULES: &str = "/vellum/modules";
/// The maximum length of a request in bytes. Longer lines are refused. JSON encodes a byte of an
/// argument as at most six.
pub const MAX_REQUEST: usize = 6 * MAX_ARGUMENTS + (64 << 10);
/// The maximum length of an argument in bytes with its NUL (Linux's MAX_ARG_STRLEN, with 4 KiB
/// pages).
pub const MAX_ARGUMENT: usize = 128 << 10;
/// The maximum total length of arguments and their pointers: a quarter of an 8 MiB stack
/// (fs/exec.c, bprm_stack_limits), minus some for the environment.
pub const MAX_ARGUMENTS: usize = (2 << 20) - (64 << 10);

/// Checks that a guest's Linux can start a command with these arguments.
///
/// # Errors
/// The limit that they exceed.
pub fn check_arguments(command: &[impl AsRef<OsStr>]) -> Result<(), String> {
    let remedy = "put them into a file in a directory that the guest has";
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

/// A request of the host. Unknown fields are refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Run a command with its arguments. The answer ends with [`Event::Exit`].
    Exec {
        /// The program, found by PATH, and its arguments.
        command: Vec<Argument>,
    },
    /// What the guest sees: CPUs, memory, clock source, kernel.
    Facts,
    /// Write to memory, and verify earlier writes.
    Memory(MemoryWork),
    /// Write to a disk or a file, and verify it.
    Disk(DiskWork),
    /// Make part of a block device, or of a file, read as zeros without writing them.
    Zero {
        /// The device or file.
        path: String,
        /// The start of the part, in bytes.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// Also release the space.
        #[serde(default)]
        unmap: bool,
    },
    /// Watch the clocks.
    Clock {
        /// The duration.
        seconds: u64,
    },
    /// Pass a token around a ring of processes: measures context switches.
    LatCtx(LatCtx),
    /// Groups of senders and receivers that all communicate at once.
    Hackbench(Hackbench),
    /// Processes that fork, start programs, map, unmap and protect memory, and check its content.
    Processes(Processes),
    /// Run a command with its standard streams, or with a terminal. [`frame`]s follow instead of
    /// [`Event`]s. Only through vsock.
    Launch(Launch),
    /// Start another kernel in place of this one, bypassing the firmware: now, or when this one
    /// panics.
    Kexec(Kexec),
    /// Power the guest off.
    PowerOff,
}

/// A command with its standard streams.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Launch {
    /// The program, found by PATH, and its arguments. Empty, on a terminal, means the user's shell.
    pub command: Vec<Argument>,
    /// The working directory; `/` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<Argument>,
    /// The user: a number, or a name in the guest's /etc/passwd; root by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Use a terminal for all three streams.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<Terminal>,
    /// The command has no streams and outlives the connection. Status 0 says that it has started.
    #[serde(default, skip_serializing_if = "is_no")]
    pub detached: bool,
    /// What a guest needs first whose memory is a copy of another's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fresh: Option<Fresh>,
}

/// What a copy of a guest gets of its host, so that it differs from the others: random numbers, and
/// the time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fresh {
    /// The host's random bytes, of which the guest's kernel makes its own.
    pub seed: Vec<u8>,
    /// The host's CLOCK_REALTIME, in nanoseconds.
    pub realtime_ns: u64,
}

fn is_no(word: &bool) -> bool {
    !word
}

/// The terminal of the host's user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Terminal {
    /// Its type, as in TERM.
    pub kind: String,
    /// Its rows.
    pub rows: u16,
    /// Its columns.
    pub columns: u16,
}

/// What a guest that runs one command mounts first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mounts {
    /// Directories of the host.
    #[serde(default)]
    pub shares: Vec<Mount>,
    /// The tag of the directory with its kernel's modules. It is mounted as /lib/modules/RELEASE,
    /// or as `kernel` inside that, beside the files in [`MODULES`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modules: Option<String>,
    /// The guest waits for a command that is [fresh](Fresh), and mounts these then.
    #[serde(default, skip_serializing_if = "is_no")]
    pub waits: bool,
}

/// A directory of the host that a guest mounts (virtiofs).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mount {
    /// The device's tag.
    pub tag: String,
    /// The mount point, an absolute path.
    pub place: String,
    /// The guest's access.
    pub access: Access,
}

/// A guest's access to a directory of its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// Read only.
    Ro,
    /// Read and write.
    Rw,
    /// Copy on write: changes stay in the guest's memory (overlayfs).
    Overlay,
}

/// Writes pages of memory at a rate. Each page has a stamp that the next write to it verifies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryWork {
    /// The amount of memory.
    pub mib: u64,
    /// The amount to write per second; 0 for as fast as possible.
    #[serde(default)]
    pub rate_mib: u64,
    /// The order of writes.
    #[serde(default)]
    pub pattern: Pattern,
    /// The duration.
    pub seconds: u64,
    /// The seed of the random order.
    #[serde(default)]
    pub seed: u64,
    /// The work ends sooner if this file exists at the end of a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<String>,
}

/// The order of writes to memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// Page after page, repeatedly.
    #[default]
    Sequential,
    /// A random page each time.
    Random,
    /// Each page once. Then all are verified until the time is over.
    Once,
}

/// Writes stamps to blocks of a disk or a file, flushes them, and reads them back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskWork {
    /// The device or file.
    pub path: String,
    /// The amount to write.
    pub mib: u64,
    /// The number of passes.
    #[serde(default = "default_one")]
    pub passes: u64,
}

/// A ring of processes on one CPU, like lmbench's `lat_ctx -s KIB TASKS`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatCtx {
    /// The number of processes.
    #[serde(default = "two")]
    pub tasks: u64,
    /// Rounds of the token in a measurement.
    #[serde(default = "ten_thousand")]
    pub rounds: u64,
    /// The number of measurements.
    #[serde(default = "five")]
    pub repeat: u64,
    /// The amount that each process reads when it has the token, in KiB.
    #[serde(default)]
    pub kib: u64,
}

/// `hackbench GROUPS`: in each group every sender writes to every receiver.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hackbench {
    /// The number of groups.
    #[serde(default = "default_one")]
    pub groups: u64,
    /// Senders of a group; it has as many receivers.
    #[serde(default = "twenty")]
    pub pairs: u64,
    /// Threads of one process instead of one process each.
    #[serde(default)]
    pub threads: bool,
    /// Pipes instead of unix sockets.
    #[serde(default)]
    pub pipes: bool,
    /// Messages from each sender to each receiver.
    #[serde(default = "hundred")]
    pub messages: u64,
    /// The length of a message.
    #[serde(default = "hundred")]
    pub bytes: u64,
}

/// Processes that change their memory concurrently. They report a sum over what they find, which
/// depends only on these numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Processes {
    /// The number of processes.
    #[serde(default = "twenty")]
    pub processes: u64,
    /// The number of random steps of each.
    #[serde(default = "hundred")]
    pub steps: u64,
    /// Whether they also start programs.
    #[serde(default = "yes")]
    pub start: bool,
    /// The seed.
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

/// A kernel that replaces the running one (kexec_file_load(2)).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kexec {
    /// Its image, a file in the guest.
    pub kernel: String,
    /// Its initramfs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initrd: Option<String>,
    /// Its command line.
    #[serde(default)]
    pub params: String,
    /// Load it into reserved memory (`crashkernel=`) and start it when this kernel panics, instead
    /// of starting it now.
    #[serde(default)]
    pub on_panic: bool,
}

/// An event reported by the guest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// The agent is ready (serial only; an accepted vsock connection says the same).
    Ready {
        /// Modules that could not be loaded, with the reason.
        failed_modules: Vec<String>,
    },
    /// Output of a command. In the text, bytes that are not UTF-8 are replaced.
    Output {
        /// `stdout` or `stderr`.
        stream: String,
        /// The output as text.
        text: String,
        /// The output as bytes, if it is not UTF-8.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        bytes: Vec<u8>,
    },
    /// A command has ended.
    Exit {
        /// Its exit code, or 128 plus its signal.
        code: i32,
    },
    /// The answer to [`Request::Facts`].
    Facts {
        /// CPUs online.
        cpus: u64,
        /// Total memory in KiB.
        memory_kib: u64,
        /// The current clock source.
        clocksource: String,
        /// The kernel's release.
        kernel: String,
    },
    /// A second of writing memory.
    Memory {
        /// The second, from 1.
        second: u64,
        /// 4 KiB pages written in it.
        pages: u64,
        /// The median latency of a write with its verification, in nanoseconds.
        p50_ns: u64,
        /// The 99th percentile.
        p99_ns: u64,
        /// The maximum.
        max_ns: u64,
        /// Pages without their expected stamp, since the beginning.
        wrong: u64,
    },
    /// A pass over a disk.
    Disk {
        /// The pass, from 1.
        pass: u64,
        /// Bytes written and read back.
        bytes: u64,
        /// Nanoseconds of writing and flushing.
        write_ns: u64,
        /// Nanoseconds of reading.
        read_ns: u64,
        /// 4 KiB blocks without their expected stamps.
        wrong: u64,
    },
    /// All processes have ended.
    Processes {
        /// Forked children that checked their memory.
        forked: u64,
        /// Programs started.
        started: u64,
        /// Areas mapped.
        mapped: u64,
        /// How often they removed access to an area.
        protected: u64,
        /// Wrong results.
        wrong: u64,
        /// The sum over everything found.
        sum: u64,
    },
    /// The result of watching the clocks.
    Clock {
        /// How often a clock went back.
        backwards: u64,
        /// The longest time between two readings, in nanoseconds. A pause shows here.
        longest_gap_ns: u64,
        /// How far the wall clock drifted from the monotonic one, in nanoseconds.
        drift_ns: i64,
    },
    /// A measurement of a ring of processes. A context switch took `(ring_ns - own_ns) / switches`.
    LatCtx {
        /// The measurement, from 1.
        repeat: u64,
        /// How often a task passed the token to the next.
        switches: u64,
        /// The total time in nanoseconds.
        ring_ns: u64,
        /// The time of a task that passed the token to itself as often.
        own_ns: u64,
    },
    /// All senders and receivers are done.
    Hackbench {
        /// The number of tasks.
        tasks: u64,
        /// The number of messages.
        messages: u64,
        /// Nanoseconds from the common start to the end of the last task.
        ns: u64,
    },
    /// The request is done.
    Done,
    /// The request has failed or is invalid.
    Error {
        /// The reason.
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
