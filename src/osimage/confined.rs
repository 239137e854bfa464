//! Images are searched and converted in a process of their own. An image comes from a stranger, and
//! what reads it should be able to do no more than that: no files, no network, and for a search a
//! minute of a CPU.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::panic::{self, AssertUnwindSafe};
use std::rc::Rc;

use rustix::process::{Resource, Rlimit, Signal, setrlimit};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use vellum_disk::Image;
use vellum_disk::copy::{Target, copy};
use vellum_sandbox::{Mode, Sandbox, ThreadKind};
use vellum_sys::fork::{Forked, fork};
use vellum_sys::mmap::memfd;

use super::{Boot, Disk, ReadAt, VolumeInfo, find as search};

/// How long the search may take of a CPU. SIGXCPU ends it then, and the status tells so. Emulated
/// hosts are a hundred times slower than others.
const CPU_SECONDS: u64 = 60;
/// How much memory the search may take: twice what the largest kernel and initrd are.
const MEMORY: u64 = 4 << 30;
/// How often the progress of a copy is told.
const STEPS: u64 = 1000;
/// The longest answer.
const MAX_ANSWER: u64 = 1 << 20;

/// What an image contains.
#[derive(Debug)]
pub struct Examined {
    /// The disk's size in bytes.
    pub bytes: u64,
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

/// What an image's reader answers.
#[derive(Debug, Serialize, Deserialize)]
struct Answer<T> {
    bytes: u64,
    volumes: Vec<VolumeInfo>,
    boots: Result<About, String>,
    more: T,
}

/// Why the work on an image has failed, in one line.
#[derive(Debug, Serialize, Deserialize)]
pub enum Failed {
    /// The image cannot be opened.
    Open(String),
    /// It cannot be read, or its copy cannot be written.
    Work(String),
}

impl Failed {
    /// The same with text that a terminal shows.
    fn visible(self) -> Self {
        match self {
            Self::Open(why) => Self::Open(visible(&why)),
            Self::Work(why) => Self::Work(visible(&why)),
        }
    }
}

/// A line from the process.
#[derive(Serialize, Deserialize)]
enum Line<T> {
    /// It has done so many bytes, of so many.
    At(u64, u64),
    /// It ends with an answer.
    End(T),
}

/// Finds what boots in the image that `open` returns, together with `more` about it. `open` and the
/// search run in a process that is confined as `mode` says. Called before this process has threads.
///
/// # Errors
/// Why the image cannot be read, in one line.
pub fn find<T: Serialize + DeserializeOwned>(
    mode: Mode,
    open: impl FnOnce() -> Result<(Image, T), String>,
) -> Result<(Examined, T), Failed> {
    let mut kernel = memfd(c"vellum-kernel", 0, None).map_err(host)?;
    let mut initrd = memfd(c"vellum-initrd", 0, None).map_err(host)?;
    let work = |_: &mut dyn FnMut(u64, u64)| {
        let (image, more) = open().map_err(Failed::Open)?;
        let bytes = image.size().map_err(|error| Failed::Work(error.to_string()))?;
        let disk = Rc::new(image) as Rc<dyn ReadAt>;
        let disk = Disk::open(&disk).map_err(|error| Failed::Work(error.to_string()))?;
        let boots = boots(&disk, &mut kernel, &mut initrd);
        Ok(Answer { bytes, volumes: disk.infos(), boots, more })
    };
    let Answer { bytes, volumes, boots, more } = apart(mode, Some(CPU_SECONDS), work, |_, _| ())?;
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
    Ok((Examined { bytes, volumes: volumes.collect(), boots }, more))
}

/// Copies the image that `open` returns to the one that `target` creates for a disk of its size.
/// All runs in a process that is confined as `mode` says. Called before this process has threads.
/// `progress` gets the bytes that are done, and the disk's size.
///
/// # Errors
/// Why it is not converted, in one line.
pub fn convert(
    mode: Mode,
    open: impl FnOnce() -> Result<Image, String>,
    target: impl FnOnce(u64) -> io::Result<Target>,
    progress: impl FnMut(u64, u64),
) -> Result<(), Failed> {
    let work = |progress: &mut dyn FnMut(u64, u64)| {
        let image = open().map_err(Failed::Open)?;
        let copied = image.size().and_then(|size| {
            let mut shown = 0;
            copy(&image, &mut target(size)?, |at| {
                if at - shown > size / STEPS {
                    shown = at;
                    progress(at, size);
                }
            })
        });
        copied.map_err(|error| Failed::Work(error.to_string()))
    };
    apart(mode, None, work, progress)
}

/// The failure of the process itself.
fn host(error: io::Error) -> Failed {
    Failed::Work(format!("its reader: {error}"))
}

/// Runs `work` in a process that is confined as `mode` says, and returns its result.
fn apart<T: Serialize + DeserializeOwned>(
    mode: Mode,
    cpu_seconds: Option<u64>,
    work: impl FnOnce(&mut dyn FnMut(u64, u64)) -> Result<T, Failed>,
    mut progress: impl FnMut(u64, u64),
) -> Result<T, Failed> {
    let (answer, output) = io::pipe().map_err(host)?;
    let output = OwnedFd::from(output);
    match fork(&output).map_err(host)? {
        Forked::Child => {
            drop(answer);
            panic::set_hook(Box::new(|_| {}));
            let mut output = File::from(output);
            let mut tell = |line: &Line<Result<T, Failed>>| {
                let mut text = serde_json::to_vec(line)?;
                text.push(b'\n');
                output.write_all(&text)
            };
            let work = AssertUnwindSafe(|| {
                let refused = |why| Failed::Work(format!("the sandbox of its reader: {why}"));
                confine(mode, cpu_seconds).map_err(refused)?;
                // If nobody reads the pipe, the parent has ended, and this process is about to.
                work(&mut |at, of| drop(tell(&Line::At(at, of))))
            });
            let failed = |_| Err(Failed::Work("reading it failed".into()));
            let said = panic::catch_unwind(work).unwrap_or_else(failed);
            std::process::exit(i32::from(tell(&Line::End(said)).is_err()));
        }
        Forked::Parent(child) => {
            drop((output, work));
            let mut answer = BufReader::new(answer);
            let end = loop {
                let mut text = Vec::new();
                answer.by_ref().take(MAX_ANSWER).read_until(b'\n', &mut text).map_err(host)?;
                match serde_json::from_slice::<Line<Result<T, Failed>>>(&text) {
                    Ok(Line::At(at, of)) => progress(at, of),
                    Ok(Line::End(said)) => break Some(said),
                    Err(_) => break None,
                }
            };
            drop(answer);
            let status = child.wait().map_err(host)?;
            let said = end.unwrap_or_else(|| {
                Err(Failed::Work(match cpu_seconds {
                    Some(seconds) if i32::from(status) == 128 + Signal::XCPU.as_raw() => {
                        format!("reading it took more than {seconds} s of a CPU")
                    }
                    _ => format!("its reader ended with status {status} and no answer: it may be damaged"),
                }))
            });
            said.map_err(Failed::visible)
        }
    }
}

/// Confines this process.
fn confine(mode: Mode, cpu_seconds: Option<u64>) -> Result<(), String> {
    if let Some(seconds) = cpu_seconds {
        // At the second limit the signal would be SIGKILL, which has other reasons, too.
        let limit = Rlimit { current: Some(seconds), maximum: Some(seconds + 1) };
        setrlimit(Resource::Cpu, limit).map_err(|error| error.to_string())?;
        let limit = Rlimit { current: Some(MEMORY), maximum: Some(MEMORY) };
        setrlimit(Resource::Data, limit).map_err(|error| error.to_string())?;
    }
    let mut sandbox = Sandbox::new(mode);
    sandbox.process().map_err(|error| error.to_string())?;
    sandbox.enter(ThreadKind::Disk, "image").map_err(|error| error.to_string())
}

/// What boots in `disk`, with its kernel and initrd in these files.
fn boots(disk: &Disk, kernel: &mut File, initrd: &mut File) -> Result<About, String> {
    let boot = search(disk)?;
    let written = kernel.write_all(&boot.kernel).and_then(|()| initrd.write_all(&boot.initrd));
    written.map_err(|error| format!("memory for its kernel and initrd: {error}"))?;
    let Boot { title, place, path, initrd, cmdline, system, has_cloud_init, .. } = boot;
    let initrd_bytes = initrd.len() as u64;
    Ok(About { title, place, kernel: path, initrd_bytes, cmdline, system, has_cloud_init })
}

/// An image's text for a terminal: without control characters, and not long.
fn visible(text: &str) -> String {
    let clean = text.chars().map(|char| if char.is_control() { '?' } else { char });
    clean.take(4096).collect()
}
