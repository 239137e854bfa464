//! Opening the images of a disk: formats, locks, overlays, and why an image cannot be used.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};

use super::{BlkConfig, KIND, MAX_QUEUES, SECTOR};
use crate::virtio::{OpenError, StartError};
use vellum_disk::format::Format;
use vellum_disk::overlay::{self, Base, Overlay, Place};
use vellum_disk::qcow2::{self, Named, Qcow2};
use vellum_disk::{DiskImage, Image, Medium};
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

impl From<BlkError> for StartError {
    fn from(error: BlkError) -> Self {
        Self::Open(error.into())
    }
}

impl Diagnose for BlkError {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::user(Field::Device(KIND.key))
    }
}

impl BlkConfig {
    /// Checks that the image, which has `size` bytes, is not larger than the disk that is wanted.
    ///
    /// # Errors
    /// A disk cannot be made smaller.
    pub fn check_growth(&self, size: u64) -> Result<(), BlkError> {
        match self.size.filter(|&wanted| wanted < size) {
            None => Ok(()),
            Some(wanted) => {
                let why = format!("it has {size}, and a disk can only be made larger");
                Err(cannot_grow(self, wanted, why))
            }
        }
    }
}

/// Checks that an image of `size` bytes can have `wanted`, which is no less. Makes it so large if it
/// is raw.
fn grow(
    config: &BlkConfig,
    format: ImageFormat,
    file: &File,
    size: u64,
    wanted: u64,
) -> Result<(), BlkError> {
    let refuse = |why: String| cannot_grow(config, wanted, why);
    if wanted == size || format == ImageFormat::Qcow2 {
        return Ok(());
    }
    if !file.metadata().is_ok_and(|about| about.is_file()) {
        return Err(refuse("a block device keeps its size; an overlay can be larger".into()));
    }
    // The lock comes first: another machine may have the image.
    lock_or(file, &config.path, true)?;
    file.set_len(wanted).map_err(|error| refuse(error.to_string()))
}

fn cannot_grow(config: &BlkConfig, wanted: u64, why: String) -> BlkError {
    BlkError::Resize { path: config.path.clone(), wanted, why }
}

/// The files of a disk, open and locked. Of their content only the format has been read, and for a
/// machine's disk its size. A thread or a process with fewer rights reads the rest.
pub struct Files {
    config: BlkConfig,
    file: File,
    format: ImageFormat,
    named: Named,
    /// The overlay. A reader has it only if it exists and has been written to.
    over: Option<Over>,
    /// Syncs a raw image, for the guest's requests and for those who save the machine.
    medium: Arc<Medium>,
}

/// The file of an overlay.
struct Over {
    path: PathBuf,
    file: File,
    /// Whether it outlives the machine.
    lasts: bool,
}

impl Files {
    /// Opens the files of the disk that `config` describes for a reader, and locks them against
    /// writers.
    ///
    /// # Errors
    /// A file cannot be opened or locked, or the image's format is not supported.
    pub fn open(config: &BlkConfig) -> Result<Self, BlkError> {
        let reader = BlkConfig { readonly: true, overlay: None, size: None, ..config.clone() };
        let (file, format) = open_image(&reader, false)?;
        lock_or(&file, &config.path, false)?;
        let named = match format {
            ImageFormat::Raw => Named::default(),
            ImageFormat::Qcow2 => open_named(&reader)?,
        };
        let over = match &config.overlay {
            Some(Place::File(over)) => open_overlay(config, over)?,
            _ => None,
        };
        Ok(Self { config: reader, file, format, named, over, medium: Arc::default() })
    }

    /// A raw image that is open.
    pub(super) fn raw(config: BlkConfig, file: File) -> Self {
        let (named, medium) = (Named::default(), Arc::default());
        Self { config, file, format: ImageFormat::Raw, named, over: None, medium }
    }

    /// The files of a machine's disk on the image in `file`, and the disk's size in bytes. A raw
    /// image without an overlay is not locked.
    ///
    /// # Errors
    /// A file cannot be opened or locked, or its header cannot be used.
    pub(super) fn of_machine(
        config: &BlkConfig,
        file: File,
        format: ImageFormat,
    ) -> Result<(Self, u64), BlkError> {
        let mut files = Self { format, ..Self::raw(config.clone(), file) };
        let mut size = match format {
            // Unlike the metadata's size, this is also right for block devices.
            ImageFormat::Raw => {
                (&files.file).seek(SeekFrom::End(0)).map_err(|source| files.open_error(source))?
            }
            ImageFormat::Qcow2 => {
                // The lock comes first. Another machine may be writing the tables.
                lock_or(&files.file, &config.path, files.is_written())?;
                files.named = open_named(config)?;
                files.header()?.map_or(0, |header| header.size)
            }
        };
        config.check_growth(size)?;
        if let (Some(wanted), None) = (config.size, &config.overlay) {
            grow(config, format, &files.file, size, wanted)?;
            size = wanted;
        }
        if size == 0 || !size.is_multiple_of(SECTOR) {
            let qcow2 = format == ImageFormat::Qcow2;
            return Err(BlkError::Size { path: config.path.clone(), size, qcow2 });
        }
        if let Some(place) = &config.overlay {
            let (over, bytes) = over(config, &files.file, size, place)?;
            files.over = Some(over);
            size = bytes;
        }
        Ok((files, size))
    }

    /// Whether the guest writes to the image itself.
    fn is_written(&self) -> bool {
        !self.config.readonly && self.config.overlay.is_none()
    }

    /// The file that the guest's writes go to.
    ///
    /// # Errors
    /// The host's.
    pub(super) fn written(&self) -> io::Result<DiskImage> {
        // Resolve the path now: a sandboxed process cannot ask for its working directory, and the
        // path is stored in snapshots.
        let absolute = |path: &Path| std::path::absolute(path);
        Ok(match &self.over {
            None => DiskImage {
                file: self.file.try_clone()?,
                path: absolute(&self.config.path)?,
                readonly: self.config.readonly,
                overlay: None,
                medium: self.medium.clone(),
            },
            Some(Over { path, file, lasts }) => DiskImage {
                file: file.try_clone()?,
                path: absolute(if *lasts { path } else { &self.config.path })?,
                readonly: false,
                overlay: (!lasts).then(|| AtomicBool::new(true)),
                medium: Arc::default(),
            },
        })
    }

    /// Whether the next start would again tell the format of the image by what the guest writes to it.
    pub(super) fn is_told_by_content(&self) -> bool {
        let BlkConfig { format, force, .. } = self.config;
        self.is_written() && self.format == ImageFormat::Raw && format.is_none() && !force
    }

    /// The image's path, as the user named it.
    pub(super) fn path(&self) -> &Path {
        &self.config.path
    }

    /// Whether the image is qcow2.
    pub(super) fn is_qcow2(&self) -> bool {
        self.format == ImageFormat::Qcow2
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

    /// Reads the disk's tables and maps. Returns the disk as its guest sees it.
    ///
    /// # Errors
    /// The image or its overlay cannot be used.
    pub fn image(self) -> Result<Image, BlkError> {
        let (writable, path) = (self.is_written(), self.config.path.clone());
        // The second descriptor has the same lock.
        let file = self.file.try_clone().map_err(|source| self.open_error(source))?;
        let image = match self.format {
            ImageFormat::Raw => Image::Raw(file, self.medium),
            ImageFormat::Qcow2 => {
                let failed = |source| BlkError::Qcow2 { path: path.clone(), source };
                let mut image = Qcow2::open(file, writable, self.named).map_err(failed)?;
                if image.raised() > 0 {
                    tracing::warn!(
                        "disk {}: {} refcounts were too low, as after a loss of power, and have been raised; `qemu-img check` finds other damage",
                        path.display(),
                        image.raised()
                    );
                }
                if let Some(wanted) = self.config.size.filter(|&size| writable && size > image.size()) {
                    let refuse = |error: io::Error| cannot_grow(&self.config, wanted, error.to_string());
                    image.grow(wanted).map_err(refuse)?;
                }
                Image::Qcow2(Box::new(image))
            }
        };
        let Some(Over { path: over, file: written, lasts }) = self.over else { return Ok(image) };
        let readonly = self.config.readonly;
        let size = image.size().map_err(|source| BlkError::Open { path: path.clone(), readonly, source })?;
        let base = match image {
            Image::Qcow2(image) => Base::Qcow2(image, self.file),
            _ => Base::Raw(self.file),
        };
        let overlay = Overlay::new(base, size, self.config.size, written, lasts);
        let failed = |source| BlkError::Overlay { path, over, source };
        Ok(Image::Over(Box::new(overlay.map_err(failed)?)))
    }

    fn open_error(&self, source: io::Error) -> BlkError {
        BlkError::Open { path: self.config.path.clone(), readonly: self.config.readonly, source }
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
fn open_overlay(config: &BlkConfig, over: &Path) -> Result<Option<Over>, BlkError> {
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
    Ok(Some(Over { path: over.into(), file: written, lasts: false }))
}

/// Opens and locks the overlay of a base of `size` bytes. Returns it with the size of its disk. A
/// shared lock keeps writers away from the base.
fn over(config: &BlkConfig, base: &File, size: u64, place: &Place) -> Result<(Over, u64), BlkError> {
    let disk = config.path.clone();
    let (path, lasts) = match place {
        Place::File(path) => (path.clone(), true),
        Place::Discard => (format!("discard in {}", std::env::temp_dir().display()).into(), false),
        Place::Open(path) => (path.clone(), false),
    };
    let failed = |source| BlkError::Overlay { path: disk.clone(), over: path.clone(), source };
    let io = |source: io::Error| failed(source.into());
    if !lock(base, Lock::Shared).map_err(io)? {
        return Err(BlkError::Locked { path: disk.clone(), readonly: true });
    }
    let work = |file: File| {
        // Lock before reading: another user may be writing the map. The machine's own lock is on
        // the same open file.
        if !lock(&file, Lock::Exclusive).map_err(io)? {
            return Err(BlkError::Locked { path: path.clone(), readonly: false });
        }
        let bytes = overlay::size(base, size, config.size, &file).map_err(failed)?;
        Ok((Over { path: path.clone(), file, lasts }, bytes))
    };
    match place {
        Place::Discard => work(overlay::unnamed().map_err(io)?),
        Place::File(_) | Place::Open(_) => overlay::with_file(&path, io, work),
    }
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

/// Opens and locks the backing and data files of `config`.
fn open_named(config: &BlkConfig) -> Result<Named, BlkError> {
    let writable = !config.readonly && config.overlay.is_none();
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
