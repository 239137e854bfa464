//! Opening the images of a disk: formats, locks, overlays, and why an image cannot be used.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{BlkConfig, KIND, MAX_QUEUES};
use crate::virtio::OpenError;
use vellum_disk::format::Format;
use vellum_disk::overlay::{self, Base, Overlay, Place};
use vellum_disk::qcow2::{self, Named, Qcow2};
use vellum_disk::{DiskImage, Image};
use vellum_host::block;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::file::{Lock, is_locked, lock};
use vellum_sys::open;

/// The format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageFormat {
    /// The disk's bytes, one after the other.
    Raw,
    /// QEMU's qcow2.
    Qcow2,
}

/// Why a disk cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum BlkError {
    /// The image cannot be opened or measured.
    #[error("disk {path}: {source}; use an image or a block device that exists and that this user can {}", if *.readonly { "read" } else { "write, or add `readonly`" })]
    Open {
        /// Whether it was to be opened read-only.
        readonly: bool,
        /// The disk's image.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The image is locked by another user.
    #[error("disk {path} is in use by another process or another disk of this machine{}", if *.readonly { ", for writing" } else { "; add `readonly` to share it with readers" })]
    Locked {
        /// The disk's image.
        path: PathBuf,
        /// Whether it was to be opened read-only.
        readonly: bool,
    },
    /// The overlay cannot be used.
    #[error("disk {path}: overlay {over}: {source}")]
    Overlay {
        /// The disk's image.
        path: PathBuf,
        /// The overlay's path.
        over: PathBuf,
        /// What is wrong with the overlay.
        source: overlay::Error,
    },
    /// The host or another program uses the block device, and the guest would write to it.
    #[error(
        "disk {path} is {user}: two writers would destroy it; add `readonly`, or `force` to write to it anyway"
    )]
    Used {
        /// The disk's image.
        path: PathBuf,
        /// The user of the device, in words.
        user: String,
    },
    /// The image is qcow2 and cannot be used.
    #[error("disk {path}: {source}")]
    Qcow2 {
        /// The disk's image.
        path: PathBuf,
        /// What is wrong with the image.
        source: qcow2::Error,
    },
    /// The image is neither raw nor qcow2.
    #[error(
        "disk {path} is a {} image; a disk must be raw or qcow2: convert it with `{}`, or add `force` to use it as raw",
        format.name(),
        format.conversion(path)
    )]
    Format {
        /// The disk's image.
        path: PathBuf,
        /// The format that was found.
        format: Format,
    },
    /// The path is a directory, a pipe or the like.
    #[error("disk {path} is neither a file nor a block device")]
    Kind {
        /// The disk's image.
        path: PathBuf,
    },
    /// The image is empty or ends with a partial sector.
    #[error(
        "disk {path} has {size} bytes, which is not a positive multiple of 512: {}",
        if *.qcow2 { "`size=` makes it larger" } else if *.size == 0 { "`truncate -s 1g` makes it larger" } else { "`truncate -s %512` pads it" }
    )]
    Size {
        /// The disk's image.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
        /// Whether it is a qcow2 image, whose size is that of the disk in it.
        qcow2: bool,
    },
    /// The image cannot have the size that is wanted.
    #[error("disk {path}: it cannot have {wanted} bytes: {why}")]
    Resize {
        /// The disk's image.
        path: PathBuf,
        /// What is wanted.
        wanted: u64,
        /// Why not.
        why: String,
    },
    /// The serial number is too long.
    #[error("disk serial `{0}` is longer than 20 bytes")]
    Serial(String),
    /// The number of queues is out of range.
    #[error("a disk has 1 to {MAX_QUEUES} queues, not {0}")]
    Queues(u16),
}

impl From<BlkError> for OpenError {
    fn from(error: BlkError) -> Self {
        Box::new(error)
    }
}

impl Diagnose for BlkError {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::user(Field::Device(KIND.key))
    }
}

/// Makes the image of a disk larger: from `size` to `wanted` bytes.
pub(super) fn grow(config: &BlkConfig, image: &mut Image, size: u64, wanted: u64) -> Result<(), BlkError> {
    let path = config.path.clone();
    let refuse = |why: String| BlkError::Resize { path: path.clone(), wanted, why };
    if wanted < size {
        return Err(refuse(format!("it has {size}, and a disk can only be made larger")));
    }
    if wanted == size {
        return Ok(());
    }
    match image {
        Image::Raw(file) => {
            let is_file = file.metadata().is_ok_and(|about| about.is_file());
            if !is_file {
                return Err(refuse("a block device keeps its size; an overlay can be larger".into()));
            }
            // The lock comes first: another machine may have the image.
            match lock(file, Lock::Exclusive) {
                Ok(true) => file.set_len(wanted).map_err(|error| refuse(error.to_string())),
                Ok(false) => Err(BlkError::Locked { path: path.clone(), readonly: false }),
                Err(source) => Err(BlkError::Open { readonly: false, path: path.clone(), source }),
            }
        }
        Image::Qcow2(image) => image.grow(wanted).map_err(|error| refuse(error.to_string())),
        Image::Over(_) => unreachable!("an overlay has its size from its beginning"),
    }
}

/// The files of a disk for a reader: open, and locked against writers until they are dropped. Only
/// the format has been read of them, so that a process with fewer rights can read the rest.
pub struct Files {
    config: BlkConfig,
    file: File,
    format: ImageFormat,
    named: Named,
    /// The overlay, if it exists and has been written to.
    over: Option<(PathBuf, File)>,
}

impl Files {
    /// Opens the files of the disk that `config` describes.
    ///
    /// # Errors
    /// A file cannot be opened or locked, or the image's format is not supported.
    pub fn open(config: &BlkConfig) -> Result<Self, BlkError> {
        let reader = BlkConfig { readonly: true, overlay: None, size: None, ..config.clone() };
        let (file, format) = open_image(&reader, false)?;
        lock_or(&file, &config.path, false)?;
        let named = match format {
            ImageFormat::Raw => Named::default(),
            ImageFormat::Qcow2 => open_named(&reader, false)?,
        };
        let over = match &config.overlay {
            Some(Place::File(over)) => open_overlay(config, over)?,
            _ => None,
        };
        Ok(Self { config: reader, file, format, named, over })
    }

    /// The header of a qcow2 image. `None` if the image is raw.
    ///
    /// # Errors
    /// The image cannot be used.
    pub fn header(&self) -> Result<Option<qcow2::Header>, BlkError> {
        match self.format {
            ImageFormat::Raw => Ok(None),
            ImageFormat::Qcow2 => {
                let failed = |source| BlkError::Qcow2 { path: self.config.path.clone(), source };
                qcow2::Header::read(&self.file).map(Some).map_err(failed)
            }
        }
    }

    /// The disk as its guest would see it, with the overlay.
    ///
    /// # Errors
    /// The image or its overlay cannot be used.
    pub fn image(self) -> Result<Image, BlkError> {
        let path = self.config.path;
        let open_error = |source| BlkError::Open { path: path.clone(), readonly: true, source };
        // The second descriptor has the same lock.
        let file = self.file.try_clone().map_err(open_error)?;
        let image = match self.format {
            ImageFormat::Raw => Image::Raw(file),
            ImageFormat::Qcow2 => {
                let failed = |source| BlkError::Qcow2 { path: path.clone(), source };
                Image::Qcow2(Box::new(Qcow2::open(file, false, self.named).map_err(failed)?))
            }
        };
        let Some((over, written)) = self.over else { return Ok(image) };
        let size = image.size().map_err(open_error)?;
        let base = match image {
            Image::Qcow2(image) => Base::Qcow2(image, self.file),
            _ => Base::Raw(self.file),
        };
        let overlay = Overlay::new(base, size, None, written, false);
        let failed = |source| BlkError::Overlay { path: path.clone(), over, source };
        Ok(Image::Over(Box::new(overlay.map_err(failed)?)))
    }
}

/// Locks `file`, which is at `path`, for as long as it is open.
fn lock_or(file: &File, path: &Path, write: bool) -> Result<(), BlkError> {
    let kind = if write { Lock::Exclusive } else { Lock::Shared };
    match lock(file, kind) {
        Ok(true) => Ok(()),
        Ok(false) => Err(BlkError::Locked { path: path.into(), readonly: !write }),
        Err(source) => Err(BlkError::Open { readonly: !write, path: path.into(), source }),
    }
}

/// Opens the overlay `over` for a reader. `None` if it does not exist, or is empty.
fn open_overlay(config: &BlkConfig, over: &Path) -> Result<Option<(PathBuf, File)>, BlkError> {
    let failed = |error: io::Error| BlkError::Overlay {
        path: config.path.clone(),
        over: over.into(),
        source: error.into(),
    };
    let written = match open::for_reading(over, open::Kind::Regular) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        written => written.map_err(failed)?,
    };
    if written.metadata().map_err(failed)?.len() == 0 {
        return Ok(None);
    }
    lock_or(&written, over, false)?;
    Ok(Some((over.into(), written)))
}

/// An image with an overlay over `base`. A shared lock keeps writers away from `base`.
pub(super) fn over(
    config: &BlkConfig,
    base: Base,
    base_file: &File,
    size: u64,
    place: &Place,
) -> Result<(Image, DiskImage), BlkError> {
    let disk = config.path.clone();
    let (over, lasts) = match place {
        Place::File(path) => (path.clone(), true),
        Place::Discard => ("discard".into(), false),
    };
    let failed = |source| BlkError::Overlay { path: disk.clone(), over: over.clone(), source };
    let io = |source: io::Error| failed(source.into());
    if !lock(base_file, Lock::Shared).map_err(io)? {
        return Err(BlkError::Locked { path: disk.clone(), readonly: true });
    }
    let work = |file: File| {
        // Lock before reading: another user may be writing the map. The machine's own lock is on
        // the same open file.
        if !lock(&file, Lock::Exclusive).map_err(io)? {
            return Err(BlkError::Locked { path: over.clone(), readonly: false });
        }
        let path = if lasts { std::path::absolute(&over).map_err(io)? } else { disk.clone() };
        let image = DiskImage { file: file.try_clone().map_err(io)?, path, readonly: false };
        let overlay = Overlay::new(base, size, config.size, file, lasts).map_err(failed)?;
        Ok((Image::Over(Box::new(overlay)), image))
    };
    if lasts { overlay::with_file(&over, io, work) } else { work(overlay::unnamed().map_err(io)?) }
}

/// Opens the image of a disk. With `exclusive`, a block device that the guest writes to is opened
/// with O_EXCL: no file system can be mounted from it meanwhile. That is not possible for a machine
/// that arrives from another Vellum, which still has the device open.
pub(super) fn open_image(config: &BlkConfig, exclusive: bool) -> Result<(File, ImageFormat), BlkError> {
    let (path, readonly) = (config.path.clone(), config.readonly || config.overlay.is_some());
    let open_error = |source| BlkError::Open { path: path.clone(), readonly, source };
    let used = |user| BlkError::Used { path: path.clone(), user };
    let about = std::fs::metadata(&path).map_err(open_error)?;
    let (is_block, kind) = (about.file_type().is_block_device(), about.file_type());
    if !kind.is_file() && !is_block {
        return Err(BlkError::Kind { path });
    }
    let mut options = File::options();
    options.read(true).write(!readonly);
    let guarded = !readonly && !config.force;
    let alone = guarded && exclusive && is_block;
    let opened = open::open(&path, &options, if alone { open::Kind::Exclusive } else { open::Kind::Disk });
    let file = match opened {
        Err(error) if alone && error.raw_os_error() == Some(libc::EBUSY) => {
            return Err(match block::user(&about) {
                Some(user) => used(user),
                None if is_another_machines(&path) => BlkError::Locked { path: path.clone(), readonly },
                None => used("opened exclusively by another program (O_EXCL)".into()),
            });
        }
        opened => opened.map_err(open_error)?,
    };
    if guarded
        && !alone
        && let Some(user) = block::user(&file.metadata().map_err(open_error)?)
    {
        return Err(used(user));
    }
    let format = match config.format {
        Some(format) => format,
        None if config.force => ImageFormat::Raw,
        None => match Format::of(&file).map_err(open_error)? {
            None => ImageFormat::Raw,
            Some(Format::Qcow2) => ImageFormat::Qcow2,
            Some(format) => return Err(BlkError::Format { path, format }),
        },
    };
    Ok((file, format))
}

/// The qcow2 image in `file`, with the backing and data files of `config`.
pub(super) fn open_qcow2(config: &BlkConfig, file: &File) -> Result<Qcow2, BlkError> {
    let writable = !config.readonly && config.overlay.is_none();
    // The lock comes first. Another machine may be writing the tables, and to open an image for
    // writing can change its header.
    lock_or(file, &config.path, writable)?;
    let named = open_named(config, writable)?;
    let failed = |source| BlkError::Qcow2 { path: config.path.clone(), source };
    let file = file.try_clone().map_err(|error| failed(error.into()))?;
    Qcow2::open(file, writable, named).map_err(failed)
}

/// Opens and locks the backing and data files of `config`.
fn open_named(config: &BlkConfig, writable: bool) -> Result<Named, BlkError> {
    let beside = |path: &Option<PathBuf>, write: bool| {
        let Some(path) = path else { return Ok(None) };
        let file = open::open(path, File::options().read(true).write(write), open::Kind::Disk)
            .map_err(|source| BlkError::Open { readonly: !write, path: path.clone(), source })?;
        lock_or(&file, path, write)?;
        Ok(Some(file))
    };
    Ok(Named { backing: beside(&config.backing, false)?, data: beside(&config.data_file, writable)? })
}

/// Whether a machine has this block device, judged by its lock.
fn is_another_machines(path: &Path) -> bool {
    open::for_reading(path, open::Kind::Disk).and_then(|file| is_locked(&file)).unwrap_or(false)
}
