//! Finds the operating system in a disk image: the kernel, initrd and command line that its boot
//! loader would use. A cloud image then boots without firmware and without a separate kernel file.
//!
//! [`find`] reads the partition table ([`partitions`]) and the file systems ([`filesystem`]). Then
//! it tries, in this order: GRUB's script ([`grub`]), the entries and unified kernels of
//! systemd-boot ([`bls`], [`uki`]), and the newest kernel of /boot ([`newest`]).
//!
//! Images are hostile. Callers use [`confined::find`], which runs [`find`] in a separate process
//! that can neither open files nor reach the network.
//!
//! Image formats are in `vellum_disk`, and the boot protocols of kernels in `vellum_kvm`.

pub mod bls;
pub mod confined;
pub mod filesystem;
pub mod grub;
mod newest;
pub mod partitions;
mod payload;
pub mod uki;
mod version;

use std::io;
use std::rc::Rc;

use serde::{Deserialize, Serialize};
use vellum_disk::{Image, size_text};

use filesystem::FileSystem;
use partitions::{Origin, Partition};

/// The maximum size of a configuration file in bytes.
const MAX_CONFIG: u64 = 4 << 20;
/// The maximum size of a kernel in bytes.
const MAX_KERNEL: u64 = 512 << 20;
/// The maximum size of all initrds together in bytes.
const MAX_INITRD: u64 = 2 << 30;

/// A disk, or a part of one.
pub trait ReadAt {
    /// Its size in bytes.
    fn size(&self) -> u64;

    /// Fills `bytes` from offset `at`.
    ///
    /// # Errors
    /// The host's error, or the range is not inside.
    fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()>;
}

impl ReadAt for Vec<u8> {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        let from = usize::try_from(at).ok().and_then(|at| self.get(at..at.checked_add(bytes.len())?));
        bytes.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

impl ReadAt for Image {
    fn size(&self) -> u64 {
        Image::size(self).unwrap_or(0)
    }

    fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        Image::read_exact_at(self, bytes, at)
    }
}

/// A kernel and what it needs to boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    /// Its title in the boot loader's menu, or the kernel's file name.
    pub title: String,
    /// Where it was found, as text.
    pub place: String,
    /// The kernel's path.
    pub path: String,
    /// The kernel image.
    pub kernel: Vec<u8>,
    /// The initrd, or empty. Several initrds are concatenated, as boot loaders do.
    pub initrd: Vec<u8>,
    /// The command line.
    pub cmdline: String,
    /// The operating system's name, if its root file system can be read.
    pub system: Option<String>,
    /// Whether cloud-init is installed, if the root file system can be read.
    pub has_cloud_init: Option<bool>,
}

/// An entry of a boot loader's configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Its title in the menu.
    pub title: String,
    /// The kernel: the partition's index in [`Disk::volumes`], and the path.
    pub kernel: (usize, String),
    /// The initrds, in the same form.
    pub initrds: Vec<(usize, String)>,
    /// The command line.
    pub cmdline: String,
}

/// A partition, or a disk without partitions, with its file system.
pub struct Volume {
    /// Its location.
    pub partition: Partition,
    /// Its file system, or a description of other content.
    pub content: Result<FileSystem, String>,
}

impl Volume {
    /// Its name in messages.
    fn name(&self) -> String {
        match self.partition.number {
            0 => "the disk".into(),
            number => format!("partition {number}"),
        }
    }
}

/// A disk with its opened file systems.
pub struct Disk {
    /// Its partitions, in the order of the table.
    pub volumes: Vec<Volume>,
}

impl Disk {
    /// Reads the partition table and the superblocks.
    ///
    /// # Errors
    /// The host's error.
    pub fn open(disk: &Rc<dyn ReadAt>) -> io::Result<Self> {
        let volumes = partitions::read(&**disk)?.into_iter().map(|partition| {
            let content = FileSystem::open(disk, &partition);
            Volume { partition, content }
        });
        Ok(Self { volumes: volumes.collect() })
    }

    /// The file systems that can be read, with their indices.
    pub fn readable(&self) -> impl Iterator<Item = (usize, &Volume, &FileSystem)> {
        let volumes = self.volumes.iter().enumerate();
        volumes.filter_map(|(at, volume)| Some((at, volume, volume.content.as_ref().ok()?)))
    }

    /// Reads a file of at most `max` bytes.
    ///
    /// # Errors
    /// The reason, as text with the partition and the path.
    pub fn read(&self, (at, path): &(usize, String), max: u64) -> Result<Vec<u8>, String> {
        let volume = self.volumes.get(*at).ok_or("there is no such partition")?;
        let say = |why: &str| format!("{path} of {}: {why}", volume.name());
        let files = volume.content.as_ref().map_err(|what| say(&format!("it is {what}")))?;
        files.read(path, max).map_err(|why| say(&why))
    }

    /// The root file system, if it can be read.
    fn root(&self) -> Option<(&Volume, &FileSystem)> {
        let is_root = |files: &FileSystem| {
            ["/etc/os-release", "/usr/lib/os-release", "/etc/fstab"].iter().any(|path| files.exists(path))
        };
        self.readable().find(|(_, _, files)| is_root(files)).map(|(_, volume, files)| (volume, files))
    }

    /// A description of its volumes, for output.
    pub fn infos(&self) -> Vec<VolumeInfo> {
        let info = |volume: &Volume| {
            let (content, label) = match &volume.content {
                Ok(files) => (files.kind().into(), files.label()),
                Err(what) => (what.clone(), String::new()),
            };
            let Partition { number, start, len, .. } = volume.partition;
            VolumeInfo { number, start, bytes: len, content, label }
        };
        self.volumes.iter().map(info).collect()
    }

    /// The content of the disk, for a message.
    fn describe(&self) -> String {
        let parts = self.volumes.iter().map(|volume| {
            let content = match &volume.content {
                Ok(files) => files.kind().into(),
                Err(what) => what.clone(),
            };
            format!("{} ({}) is {content}", volume.name(), size_text(volume.partition.len))
        });
        parts.collect::<Vec<_>>().join(", ")
    }
}

/// The description of a partition, for output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeInfo {
    /// Its number in Linux. 0 for a disk without partitions.
    pub number: u32,
    /// The offset of its start in bytes.
    pub start: u64,
    /// Its size in bytes.
    pub bytes: u64,
    /// Its file system, or a description of other content.
    pub content: String,
    /// The file system's label.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub label: String,
}

/// The ways to boot that failed, each with the reason.
type Refused = Vec<String>;

/// Finds the kernel that boots.
///
/// # Errors
/// The content of the disk and why each way to boot failed, as text.
pub fn find(disk: &Disk) -> Result<Boot, String> {
    if disk.volumes.is_empty() {
        return Err("no kernel was found in it: it is smaller than a sector".into());
    }
    let mut refused = Refused::new();
    let ways = [grub::entries, bls::entries, uki::entries, newest::entries];
    for way in ways {
        for (place, entry) in way(disk, &mut refused) {
            match load(disk, place, &entry) {
                Ok(boot) => return Ok(boot),
                Err(why) => refused.push(why),
            }
        }
    }
    refused.insert(0, disk.describe());
    Err(format!("no kernel was found in it: {}", refused.join("; ")))
}

fn load(disk: &Disk, place: String, entry: &Entry) -> Result<Boot, String> {
    let file = disk.read(&entry.kernel, MAX_KERNEL)?;
    let (kernel, mut initrd, mut cmdline) = match uki::parse(&file) {
        Some(unified) => (unified.kernel.to_vec(), unified.initrd.to_vec(), unified.cmdline),
        None => (file, vec![], None),
    };
    let kernel = payload::unpack(kernel).map_err(|why| format!("{}: {why}", entry.kernel.1))?;
    for file in &entry.initrds {
        initrd.extend(disk.read(file, MAX_INITRD - initrd.len() as u64)?);
    }
    if !entry.cmdline.is_empty() || cmdline.is_none() {
        cmdline = Some(entry.cmdline.clone());
    }
    let root = disk.root();
    Ok(Boot {
        title: entry.title.clone(),
        place,
        path: entry.kernel.1.clone(),
        kernel,
        initrd,
        cmdline: cmdline.unwrap_or_default(),
        system: root.and_then(|(_, files)| system(files)),
        has_cloud_init: root.map(|(_, files)| {
            ["/etc/cloud/cloud.cfg", "/usr/bin/cloud-init"].iter().any(|path| files.exists(path))
        }),
    })
}

/// PRETTY_NAME of os-release(5).
fn system(files: &FileSystem) -> Option<String> {
    let text = ["/etc/os-release", "/usr/lib/os-release"]
        .iter()
        .find_map(|path| files.read(path, MAX_CONFIG).ok())?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
    Some(name.trim_matches(['"', '\'']).to_owned()).filter(|name| !name.is_empty())
}

/// The parameter `root=` for a root file system on `partition`, if the image does not specify one.
fn root_parameter(partition: &Partition) -> String {
    match &partition.origin {
        Origin::Gpt { id, .. } => format!("root=PARTUUID={id}"),
        Origin::Mbr { disk, .. } => format!("root=PARTUUID={disk:08x}-{:02x}", partition.number),
        Origin::Whole => "root=/dev/vda".into(),
    }
}
