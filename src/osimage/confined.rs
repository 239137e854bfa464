//! The search in a process of its own. An image comes from a stranger, and what reads it should be
//! able to do no more than that: no files, no network, a minute of a CPU.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::panic::{self, AssertUnwindSafe};
use std::rc::Rc;

use rustix::process::{Resource, Rlimit, Signal, setrlimit};
use serde::{Deserialize, Serialize};

use vellum_sandbox::{Mode, Sandbox, ThreadKind};
use vellum_sys::fork::{Forked, fork};
use vellum_sys::mmap::memfd;

use super::{Boot, Disk, ReadAt, VolumeInfo, find as search};

/// How long the search may take of a CPU. SIGXCPU ends it then, and the status tells so. Emulated
/// hosts are a hundred times slower than others.
const CPU_SECONDS: u64 = 60;
/// The longest answer.
const MAX_ANSWER: u64 = 1 << 20;

/// What an image contains.
#[derive(Debug)]
pub struct Examined {
    /// Its partitions.
    pub volumes: Vec<VolumeInfo>,
    /// What boots, or why nothing does, in words.
    pub boots: Result<Found, String>,
}

/// What boots, with the kernel and the initrd as files in memory.
#[derive(Debug)]
pub struct Found {
    /// What is known of it.
    pub about: About,
    /// The kernel image.
    pub kernel: File,
    /// The initrd.
    pub initrd: Option<File>,
}

/// What is known of what boots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Its name in the boot loader's menu.
    pub title: String,
    /// Where it was found, in words.
    pub place: String,
    /// The kernel's path.
    pub kernel: String,
    /// The initrd's size in bytes.
    pub initrd_bytes: u64,
    /// The command line.
    pub cmdline: String,
    /// The operating system's name, if its root file system can be read.
    pub system: Option<String>,
    /// Whether cloud-init is installed, if that can be told.
    pub has_cloud_init: Option<bool>,
}

/// What the process answers.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    volumes: Vec<VolumeInfo>,
    boots: Result<About, String>,
}

/// Finds what boots in `disk`, in a process that is confined as `mode` says. Called before this
/// process has threads.
///
/// # Errors
/// Why the image cannot be read, in one line.
pub fn find(disk: Rc<dyn ReadAt>, mode: Mode) -> Result<Examined, String> {
    let host = |error: io::Error| format!("its reader: {error}");
    let mut kernel = memfd(c"vellum-kernel", 0, None).map_err(host)?;
    let mut initrd = memfd(c"vellum-initrd", 0, None).map_err(host)?;
    let (answer, output) = io::pipe().map_err(host)?;
    let output = OwnedFd::from(output);
    match fork(&output).map_err(host)? {
        Forked::Child => {
            drop(answer);
            panic::set_hook(Box::new(|_| {}));
            let work = AssertUnwindSafe(|| work(disk, mode, &mut kernel, &mut initrd));
            let said = panic::catch_unwind(work).unwrap_or_else(|_| Err("reading it failed".into()));
            let text = serde_json::to_vec(&said).unwrap_or_default();
            let written = File::from(output).write_all(&text);
            std::process::exit(i32::from(written.is_err()));
        }
        Forked::Parent(child) => {
            drop((output, disk));
            let mut text = Vec::new();
            answer.take(MAX_ANSWER).read_to_end(&mut text).map_err(host)?;
            let status = child.wait().map_err(host)?;
            let said: Result<Answer, String> = serde_json::from_slice(&text).map_err(|_| match status {
                _ if i32::from(status) == 128 + Signal::XCPU.as_raw() => {
                    format!("reading it took more than {CPU_SECONDS} s of a CPU")
                }
                _ => format!("its reader ended with status {status} and no answer: it may be damaged"),
            })?;
            let Answer { volumes, boots } = said.map_err(|why| visible(&why))?;
            for file in [&mut kernel, &mut initrd] {
                file.rewind().map_err(host)?;
            }
            let volumes = volumes.into_iter().map(|volume| VolumeInfo {
                content: visible(&volume.content),
                label: visible(&volume.label),
                ..volume
            });
            let boots = boots.map_err(|why| visible(&why)).map(|about| {
                let about = About {
                    title: visible(&about.title),
                    place: visible(&about.place),
                    kernel: visible(&about.kernel),
                    cmdline: visible(&about.cmdline),
                    system: about.system.as_deref().map(visible),
                    ..about
                };
                let initrd = (about.initrd_bytes > 0).then_some(initrd);
                Found { about, kernel, initrd }
            });
            Ok(Examined { volumes: volumes.collect(), boots })
        }
    }
}

fn work(disk: Rc<dyn ReadAt>, mode: Mode, kernel: &mut File, initrd: &mut File) -> Result<Answer, String> {
    let confine = || -> Result<(), String> {
        // At the second limit the signal would be SIGKILL, which has other reasons, too.
        let limit = Rlimit { current: Some(CPU_SECONDS), maximum: Some(CPU_SECONDS + 1) };
        setrlimit(Resource::Cpu, limit).map_err(|error| error.to_string())?;
        let mut sandbox = Sandbox::new(mode);
        sandbox.process().map_err(|error| error.to_string())?;
        sandbox.enter(ThreadKind::Disk, "image").map_err(|error| error.to_string())
    };
    confine().map_err(|why| format!("the sandbox of its reader: {why}"))?;
    let disk = Disk::open(&disk).map_err(|error| error.to_string())?;
    let boots = search(&disk).and_then(|boot| {
        let written = kernel.write_all(&boot.kernel).and_then(|()| initrd.write_all(&boot.initrd));
        written.map_err(|error| format!("memory for its kernel and initrd: {error}"))?;
        let Boot { title, place, path, initrd, cmdline, system, has_cloud_init, .. } = boot;
        let initrd_bytes = initrd.len() as u64;
        Ok(About { title, place, kernel: path, initrd_bytes, cmdline, system, has_cloud_init })
    });
    Ok(Answer { volumes: disk.infos(), boots })
}

/// An image's text for a terminal: without control characters, and not long.
fn visible(text: &str) -> String {
    let clean = text.chars().map(|char| if char.is_control() { '?' } else { char });
    clean.take(4096).collect()
}
