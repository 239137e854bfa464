//! KVM's own counters: exits, faults, mappings by size, shadow pages.
//!
//! They come from the binary statistics of the VM and its vCPUs. Kernels before 5.14 have none;
//! then they come from debugfs, if it is mounted and readable. Open them before entering the
//! sandbox. Later reads need no path, with debugfs only for the first [`READINGS`] times.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use kvm_ioctls::{VcpuFd, VmFd};

use super::vcpu::{self, Vcpu};
use vellum_sys as sys;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin};

/// All counters at one time, summed over vCPUs, with KVM's names.
pub type Snapshot = BTreeMap<String, u64>;

/// The source of a VM's counters.
#[derive(Debug)]
pub struct Counters(Source);

#[derive(Debug)]
enum Source {
    Binary(Vec<Stats>),
    Debugfs(Debugfs),
}

/// The directory in which debugfs has one directory for each VM.
const DEBUGFS: &str = "/sys/kernel/debug/kvm";

/// How many readings of debugfs are possible without opening files.
const READINGS: usize = 4;

/// A debugfs file returns its value only to the first read of a descriptor, and does not support
/// pread (simple_attr_open, fs/libfs.c).
#[derive(Debug)]
struct Debugfs {
    dir: PathBuf,
    names: Vec<String>,
    /// Unread descriptors, one set a reading.
    unread: Vec<Vec<File>>,
    taken: AtomicUsize,
}

/// The binary statistics of a VM or a vCPU: its scalar counters, and their indexes in the data.
#[derive(Debug)]
struct Stats {
    file: File,
    counters: Vec<(String, usize)>,
    /// The offset of the data in the file.
    start: u64,
    /// The number of words up to the last counter.
    words: usize,
}

/// Why there are no counters.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Neither source is available.
    #[error(
        "this kernel has no binary statistics (KVM_GET_STATS_FD, {binary}), and {} cannot be read ({debugfs}): mount -t debugfs none /sys/kernel/debug, and run as root",
        path.display()
    )]
    None {
        /// KVM's error.
        binary: io::Error,
        /// The directory in debugfs.
        path: PathBuf,
        /// The file system's error.
        debugfs: io::Error,
    },
    /// The statistics cannot be read, or differ from api.rst.
    #[error("KVM_GET_STATS_FD: {0}")]
    Read(#[source] io::Error),
    /// A vCPU did not answer.
    #[error(transparent)]
    Vcpu(#[from] vcpu::Error),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::None { .. } | Self::Read(_) => ErrorOrigin::HOST,
            Self::Vcpu(error) => error.origin(),
        }
    }
}

impl Counters {
    /// Opens the counters of `vm` and its `vcpus`, which must be paused.
    pub fn open(vm: &VmFd, vcpus: &[Vcpu]) -> Result<Self, Error> {
        let mut counters = Self::of_vm(vm)?;
        for vcpu in vcpus {
            let file = vcpu.with(sys::kvm::stats_fd)?;
            counters.add(file)?;
        }
        Ok(counters)
    }

    /// Opens the counters of `vm`. Only this step opens paths.
    pub fn of_vm(vm: &VmFd) -> Result<Self, Error> {
        match sys::kvm::stats_fd(vm) {
            Ok(file) => Ok(Self(Source::Binary(vec![Stats::new(file).map_err(Error::Read)?]))),
            Err(binary) => Self::debugfs(Path::new(DEBUGFS), vm, binary),
        }
    }

    /// Adds the counters of a vCPU. debugfs has already summed them.
    pub fn add_vcpu(&mut self, vcpu: &VcpuFd) -> Result<(), Error> {
        self.add(sys::kvm::stats_fd(vcpu))
    }

    fn add(&mut self, file: io::Result<File>) -> Result<(), Error> {
        if let Source::Binary(stats) = &mut self.0 {
            stats.push(file.and_then(Stats::new).map_err(Error::Read)?);
        }
        Ok(())
    }

    /// debugfs names a VM's directory by the creator's process ID and the descriptor. It sums
    /// vCPUs.
    fn debugfs(root: &Path, vm: &VmFd, binary: io::Error) -> Result<Self, Error> {
        let path = root.join(name(vm));
        match Debugfs::open(path.clone()) {
            Ok(debugfs) => Ok(Self(Source::Debugfs(debugfs))),
            Err(debugfs) => Err(Error::None { binary, path, debugfs }),
        }
    }

    /// Reads all counters. Those of running vCPUs may lag behind.
    pub fn read(&self) -> Result<Snapshot, Error> {
        let mut snapshot = Snapshot::new();
        match &self.0 {
            Source::Binary(all) => {
                for stats in all {
                    let data = stats.data().map_err(Error::Read)?;
                    for (name, index) in &stats.counters {
                        *snapshot.entry(name.clone()).or_default() += data[*index];
                    }
                }
            }
            Source::Debugfs(debugfs) => debugfs.read(&mut snapshot),
        }
        Ok(snapshot)
    }
}

/// The name of `vm` in debugfs: process ID and descriptor.
pub fn name(vm: &VmFd) -> String {
    format!("{}-{}", std::process::id(), vm.as_raw_fd())
}

/// The debugfs counters with this prefix of another process's VM. `name` is the VM's name in
/// debugfs.
///
/// # Errors
/// They cannot be read.
pub fn of_other(name: &str, prefix: &str) -> io::Result<Snapshot> {
    // The name comes from another process. It must not contain a path.
    if name.contains(|c: char| !c.is_ascii_digit() && c != '-') {
        return Err(io::Error::other("not a VM's name"));
    }
    let debugfs = Debugfs::open(Path::new(DEBUGFS).join(name))?;
    let mut snapshot = Snapshot::new();
    debugfs.read(&mut snapshot);
    snapshot.retain(|name, _| name.starts_with(prefix));
    Ok(snapshot)
}

impl Debugfs {
    fn open(dir: PathBuf) -> io::Result<Self> {
        let mut names = Vec::new();
        for entry in dir.read_dir()? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                names.push(entry.file_name().to_string_lossy().into_owned());
            }
        }
        let all = || names.iter().map(|name| File::open(dir.join(name))).collect::<io::Result<Vec<_>>>();
        let unread = (0..READINGS).map(|_| all()).collect::<io::Result<Vec<_>>>()?;
        Ok(Self { dir, names, unread, taken: AtomicUsize::new(0) })
    }

    fn read(&self, snapshot: &mut Snapshot) {
        let set = self.unread.get(self.taken.fetch_add(1, Ordering::Relaxed));
        for (index, name) in self.names.iter().enumerate() {
            let mut text = [0; 32];
            let len = match set {
                Some(files) => (&files[index]).read(&mut text),
                None => File::open(self.dir.join(name)).and_then(|mut file| file.read(&mut text)),
            };
            // The directory also has histograms and other text. Only files with a single number
            // count.
            let number = len.ok().and_then(|len| std::str::from_utf8(&text[..len]).ok()?.trim().parse().ok());
            if let Some(number) = number {
                snapshot.insert(name.clone(), number);
            }
        }
    }
}

impl Stats {
    /// Reads header and descriptors (`struct kvm_stats_header`, `struct kvm_stats_desc`), which
    /// never change. Uses one read for each, and later one for all data: this runs before every
    /// benchmark run.
    fn new(file: File) -> io::Result<Self> {
        let u32_at = |bytes: &[u8], at: usize| {
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let mut header = [0; 24];
        file.read_exact_at(&mut header, 0)?;
        let [name_size, count, descriptors, data] = [4, 8, 16, 20].map(|at| u32_at(&header, at));
        let each = 16 + name_size as usize;
        let mut bytes = vec![0; each * count as usize];
        file.read_exact_at(&mut bytes, descriptors.into())?;
        let mut counters = Vec::new();
        for descriptor in bytes.chunks_exact(each) {
            let [flags, offset] = [0, 8].map(|at| u32_at(descriptor, at));
            let values = u16::from_ne_bytes([descriptor[6], descriptor[7]]);
            let histogram =
                flags & kvm_bindings::KVM_STATS_TYPE_MASK >= kvm_bindings::KVM_STATS_TYPE_LINEAR_HIST;
            if values != 1 || histogram {
                continue;
            }
            let name = descriptor[16..].split(|&b| b == 0).next().unwrap_or_default();
            counters.push((String::from_utf8_lossy(name).into_owned(), offset as usize / 8));
        }
        let words = counters.iter().map(|(_, index)| index + 1).max().unwrap_or(0);
        Ok(Self { file, counters, start: data.into(), words })
    }

    /// All current values, in the order of the file.
    fn data(&self) -> io::Result<Vec<u64>> {
        let mut bytes = vec![0; self.words * 8];
        self.file.read_exact_at(&mut bytes, self.start)?;
        Ok(bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vellum_sys::mmap;

    /// Statistics in KVM's layout (api.rst, 4.133): a descriptor for each `(name, flags, values)`,
    /// and values of 8 bytes.
    fn statistics(of: &[(&str, u32, u16)], data: &[u64]) -> File {
        const NAME: usize = 48;
        let (descriptors, start) = (24 + NAME, 24 + NAME + of.len() * (16 + NAME));
        let mut bytes = Vec::new();
        for word in [0, NAME as u32, of.len() as u32, 24, descriptors as u32, start as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.resize(descriptors, b'i');
        let mut offset = 0u32;
        for (name, flags, values) in of {
            bytes.extend(flags.to_ne_bytes());
            bytes.extend(0i16.to_ne_bytes());
            bytes.extend(values.to_ne_bytes());
            bytes.extend(offset.to_ne_bytes());
            bytes.extend(0u32.to_ne_bytes());
            let mut padded = name.as_bytes().to_vec();
            padded.resize(NAME, 0);
            bytes.extend(padded);
            offset += u32::from(*values) * 8;
        }
        bytes.extend(data.iter().flat_map(|value| value.to_ne_bytes()));
        let file = mmap::memfd(c"statistics", bytes.len() as u64, None).unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        file
    }

    const PEAK: u32 = kvm_bindings::KVM_STATS_TYPE_PEAK;
    const HISTOGRAM: u32 = kvm_bindings::KVM_STATS_TYPE_LOG_HIST;

    #[test]
    fn scalars_are_read_and_histograms_left_out() {
        let of = [("exits", 0, 1), ("wait_hist", HISTOGRAM, 3), ("peak", PEAK, 1), ("single", HISTOGRAM, 1)];
        let stats = Stats::new(statistics(&of, &[7, 1, 2, 3, 1 << 40, 9])).unwrap();
        let data = stats.data().unwrap();
        let read: Vec<_> = stats.counters.iter().map(|(name, at)| (name.as_str(), data[*at])).collect();
        assert_eq!(read, [("exits", 7), ("peak", 1 << 40)]);
        // Nothing after the last scalar is read.
        assert_eq!(data.len(), 5);
    }

    #[test]
    fn those_of_vcpus_are_summed() {
        let source = |value| Stats::new(statistics(&[("exits", 0, 1)], &[value])).unwrap();
        let only = Stats::new(statistics(&[("pages_2m", 0, 1)], &[3])).unwrap();
        let counters = Counters(Source::Binary(vec![only, source(1), source(41)]));
        assert_eq!(counters.read().unwrap(), [("exits".into(), 42), ("pages_2m".into(), 3)].into());
    }

    #[test]
    fn statistics_that_are_cut_off_are_an_error() {
        let file = statistics(&[("exits", 0, 1)], &[7]);
        let len = file.metadata().unwrap().len();
        file.set_len(len - 8).unwrap();
        let stats = Stats::new(file.try_clone().unwrap()).unwrap();
        assert!(Counters(Source::Binary(vec![stats])).read().is_err());
        file.set_len(30).unwrap();
        assert!(Stats::new(file).is_err());
    }

    #[test]
    fn of_debugfs_what_is_a_number_counts() {
        let dir = std::env::temp_dir().join(format!("vellum-counters-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        for (name, text) in [("exits", "12\n"), ("prose", "a b\n"), ("empty", ""), ("two", "1 2\n")] {
            std::fs::write(dir.join(name), text).unwrap();
        }
        std::fs::create_dir(dir.join("vcpu0")).unwrap();
        let counters = Counters(Source::Debugfs(Debugfs::open(dir.clone()).unwrap()));
        // With the kept descriptors first, and then through the path.
        let all: Vec<_> = (0..READINGS + 1).map(|_| counters.read().unwrap()).collect();
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(all.iter().all(|read| *read == [("exits".into(), 12)].into()), "{all:?}");
        assert_eq!(counters.read().unwrap(), Snapshot::new());
    }
}
