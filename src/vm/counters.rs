//! KVM's own counters: exits, faults, mappings by size, shadow pages.
//!
//! They come from the binary statistics of the VM and of its vCPUs; where the kernel has none (before 5.14), from
//! debugfs if it is mounted and readable. Open them before the sandbox closes; reading then takes no path.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use kvm_ioctls::VmFd;

use super::vcpu::{self, Vcpu};
use crate::sys;

/// All counters at one time, those of vCPUs summed. Names are KVM's.
pub type Snapshot = BTreeMap<String, u64>;

/// Where the counters of one VM are read.
#[derive(Debug)]
pub struct Counters(Source);

#[derive(Debug)]
enum Source {
    Binary(Vec<Stats>),
    Debugfs(Vec<(String, File)>),
}

/// The binary statistics of a VM or a vCPU: its scalar counters, and where in the file each is.
#[derive(Debug)]
struct Stats {
    file: File,
    counters: Vec<(String, u64)>,
}

/// Why there are no counters.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Neither source is there.
    #[error(
        "this kernel has no binary statistics (KVM_GET_STATS_FD, {binary}), and {} cannot be read ({debugfs}): mount -t debugfs none /sys/kernel/debug, and run as root",
        path.display()
    )]
    None {
        /// What KVM said.
        binary: io::Error,
        /// Where debugfs would have them.
        path: PathBuf,
        /// What the file system said.
        debugfs: io::Error,
    },
    /// The statistics are not what api.rst says.
    #[error("KVM_GET_STATS_FD: {0}")]
    Read(#[source] io::Error),
    /// A vCPU did not answer.
    #[error(transparent)]
    Vcpu(#[from] vcpu::Error),
}

impl Counters {
    /// Opens the counters of `vm` and its `vcpus`, which must be paused.
    pub fn open(vm: &VmFd, vcpus: &[Vcpu]) -> Result<Self, Error> {
        Self::of_vm(vm)?.with_vcpus(vcpus)
    }

    /// Opens the counters of `vm`: all that takes a path.
    pub fn of_vm(vm: &VmFd) -> Result<Self, Error> {
        match sys::kvm::stats_fd(vm) {
            Ok(file) => Ok(Self(Source::Binary(vec![Stats::new(file).map_err(Error::Read)?]))),
            Err(binary) => Self::debugfs(Path::new("/sys/kernel/debug/kvm"), vm, binary),
        }
    }

    /// Adds those of its `vcpus`, which must be paused; debugfs has summed them already.
    pub fn with_vcpus(mut self, vcpus: &[Vcpu]) -> Result<Self, Error> {
        if let Source::Binary(stats) = &mut self.0 {
            for vcpu in vcpus {
                let file = vcpu.with(|fd| sys::kvm::stats_fd(fd))?.map_err(Error::Read)?;
                stats.push(Stats::new(file).map_err(Error::Read)?);
            }
        }
        Ok(self)
    }

    /// A directory a VM, named by its creator and descriptor; vCPUs are summed in it.
    fn debugfs(root: &Path, vm: &VmFd, binary: io::Error) -> Result<Self, Error> {
        let path = root.join(format!("{}-{}", std::process::id(), vm.as_raw_fd()));
        let open = || -> io::Result<Vec<(String, File)>> {
            let mut files = Vec::new();
            for entry in path.read_dir()? {
                let entry = entry?;
                if entry.file_type()?.is_file() {
                    files.push((entry.file_name().to_string_lossy().into_owned(), File::open(entry.path())?));
                }
            }
            Ok(files)
        };
        match open() {
            Ok(files) => Ok(Self(Source::Debugfs(files))),
            Err(debugfs) => Err(Error::None { binary, path, debugfs }),
        }
    }

    /// All counters now. Those of vCPUs that run may lag by what they have not written back.
    pub fn read(&self) -> Result<Snapshot, Error> {
        let mut snapshot = Snapshot::new();
        match &self.0 {
            Source::Binary(all) => {
                for stats in all {
                    for (name, offset) in &stats.counters {
                        let mut word = [0; 8];
                        stats.file.read_exact_at(&mut word, *offset).map_err(Error::Read)?;
                        *snapshot.entry(name.clone()).or_default() += u64::from_ne_bytes(word);
                    }
                }
            }
            Source::Debugfs(files) => {
                for (name, file) in files {
                    let mut text = [0; 32];
                    // Histograms and other prose are in the same directory: what is not one number is none of ours.
                    let Ok(len) = file.read_at(&mut text, 0) else { continue };
                    let number = std::str::from_utf8(&text[..len]).ok().and_then(|t| t.trim().parse().ok());
                    if let Some(number) = number {
                        snapshot.insert(name.clone(), number);
                    }
                }
            }
        }
        Ok(snapshot)
    }
}

impl Stats {
    /// Reads header and descriptors (`struct kvm_stats_header`, `struct kvm_stats_desc`); they never change.
    fn new(file: File) -> io::Result<Self> {
        let words = |offset: u64| -> io::Result<[u32; 6]> {
            let mut bytes = [0; 24];
            file.read_exact_at(&mut bytes, offset)?;
            let word = |i: usize| u32::from_ne_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
            Ok([0, 4, 8, 12, 16, 20].map(word))
        };
        let [_, name_size, count, _, descriptors, data] = words(0)?;
        let mut counters = Vec::new();
        for index in 0..u64::from(count) {
            let at = u64::from(descriptors) + index * (16 + u64::from(name_size));
            let mut bytes = [0; 16];
            file.read_exact_at(&mut bytes, at)?;
            let [flags, size, offset] = [
                u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
                u32::from(u16::from_ne_bytes([bytes[6], bytes[7]])),
                u32::from_ne_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]),
            ];
            let histogram =
                flags & kvm_bindings::KVM_STATS_TYPE_MASK >= kvm_bindings::KVM_STATS_TYPE_LINEAR_HIST;
            if size != 1 || histogram {
                continue;
            }
            let mut name = vec![0; name_size as usize];
            file.read_exact_at(&mut name, at + 16)?;
            let name = name.split(|&b| b == 0).next().unwrap_or_default();
            counters.push((String::from_utf8_lossy(name).into_owned(), u64::from(data) + u64::from(offset)));
        }
        Ok(Self { file, counters })
    }
}
