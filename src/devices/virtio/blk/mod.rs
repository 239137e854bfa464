//! Disk: raw and qcow2 images, and block devices (virtio 1.2, section 5.2).
//!
//! Each disk has one worker thread. It takes requests from all queues in turn, and completes each
//! before it takes the next. preadv and pwritev move data directly between file and guest memory.
//! A reset or a pause waits for one request at most. Of a long request it waits for 1 MiB, or for one
//! segment of zeroes; after a pause that request is served again from its beginning. The image is
//! locked while it is open (open file description locks, as in QEMU), so two writers cannot share it.

mod image;
mod requests;

use std::any::Any;
use std::fs::File;
use std::io;
use std::iter;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

use super::handoff::{self, Unfit};
use super::worker::Worker;
use super::{
    Active, DeviceConfig, DeviceState, Enter, Hang, Kind, OpenError, RestoreError, StartError, VirtioDevice,
    read_space,
};
use image::open_image;
pub use image::{BlkError, Files, ImageFormat};
use requests::{Disk, Id};
use vellum_disk::DiskImage;
use vellum_disk::overlay::Place;
use vellum_sandbox::ThreadKind;
use vellum_sys::file::{Lock, lock, unlock};
use vellum_sys::keyvalue::{self, KeyValues, number, path};

/// The unit of a disk's capacity, whatever its block size.
const SECTOR: u64 = 512;
const QUEUE_SIZE: u16 = 256;
/// One worker gains nothing from more queues.
const MAX_QUEUES: u16 = 16;
/// The maximum size of a discard or write-zeroes segment (32 MiB). It bounds the duration of a
/// request.
const MAX_ZERO_SECTORS: u32 = 1 << 16;
/// The maximum number of segments of a discard or write-zeroes request.
const MAX_ZERO_SEGMENTS: u32 = 16;

/// Why a disk with an overlay cannot move to another process.
const OVERLAY_STAYS: &str = "only this process has the map of its overlay";
/// Why a disk whose host has lost writes cannot move: elsewhere, a flush would succeed.
const LOST_STAYS: &str =
    "the host could not write all that its guest has written; the machine must be started anew";
/// Why a disk on a qcow2 image cannot move to another process.
const QCOW2_STAYS: &str = "only this process has the latest tables of its qcow2 image; a raw image can move";

/// The disk as a kind of device.
pub static KIND: Kind = Kind {
    key: "disk",
    about: "A disk, raw or qcow2: `PATH[,readonly][,overlay=FILE|discard|none][,size=SIZE][,format=raw|qcow2][,backing=FILE][,data-file=FILE][,serial=TEXT][,queues=N][,force]`",
    value: Some("PATH"),
    repeats: true,
    parse: |text| match parse(text) {
        Ok(config) => Ok(Arc::new(config)),
        Err(error) => Err(error.to_string()),
    },
    read: |written| Ok(Arc::new(serde_json::from_value::<BlkConfig>(written)?)),
};

/// The configuration of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlkConfig {
    /// The image or block device.
    pub path: PathBuf,
    /// The guest may not write. Several read-only users may share the image.
    pub readonly: bool,
    /// Where the guest's writes go, if not to the image.
    pub overlay: Option<Place>,
    /// The user has said that writes go to the image, for who would choose an overlay otherwise.
    #[serde(skip)]
    pub into_image: bool,
    /// The size that the disk is grown to, in bytes: the image, or the overlay when it is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// The serial number that the guest reads, at most 20 bytes.
    pub serial: Option<String>,
    /// The number of request queues, 1 to 16.
    pub queues: u16,
    /// The image's format. By default it is detected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<ImageFormat>,
    /// The backing file of a qcow2 image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<PathBuf>,
    /// The external data file of a qcow2 image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_file: Option<PathBuf>,
    /// Use the disk even if another user has it. Without `format` it is used as raw, whatever it
    /// contains.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

impl BlkConfig {
    /// A writable disk with one queue.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        BlkConfig {
            path: path.into(),
            readonly: false,
            overlay: None,
            into_image: false,
            size: None,
            serial: None,
            queues: 1,
            format: None,
            backing: None,
            data_file: None,
            force: false,
        }
    }
}

impl DeviceConfig for BlkConfig {
    fn kind(&self) -> &'static Kind {
        &KIND
    }

    fn written(&self) -> io::Result<Value> {
        let mut written = self.clone();
        let Self { path, overlay, backing, data_file, .. } = &mut written;
        let overlay = overlay.as_mut().and_then(|place| match place {
            Place::File(path) => Some(path),
            Place::Discard | Place::Open(_) => None,
        });
        handoff::make_absolute(iter::once(path).chain(overlay).chain(backing).chain(data_file))?;
        handoff::write(&written)
    }

    fn take_over(&self, lent: Vec<OwnedFd>) -> Result<Box<dyn VirtioDevice>, OpenError> {
        let file = lent.into_iter().next().ok_or_else(|| Unfit::boxed(&KIND, "no descriptor"))?;
        Ok(Box::new(Blk::on(self, file.into(), ImageFormat::Raw)?))
    }

    fn open(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        Ok(Box::new(Blk::open(self)?))
    }

    fn open_unlocked(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        Ok(Box::new(Blk::open_unlocked(self)?))
    }
}

/// Parses the syntax in [`KIND`]. `ro` is kvmtool's spelling.
fn parse(text: &str) -> Result<BlkConfig, keyvalue::Error> {
    let keys = [
        "path",
        "readonly",
        "ro",
        "overlay",
        "size",
        "serial",
        "queues",
        "format",
        "backing",
        "data-file",
        "force",
    ];
    let kv = KeyValues::parse(text, Some("path"), &keys)?;
    let mut config = BlkConfig::new(kv.required("path", path)?);
    config.readonly = kv.switch("readonly")?.or(kv.switch("ro")?).unwrap_or(false);
    let readonly = config.readonly;
    config.overlay = kv.with("overlay", |text| match text {
        _ if readonly => Err("a read-only disk has no overlay; leave one of the two out"),
        "discard" => Ok(Place::Discard),
        "none" => Ok(Place::Discard),
        text => path(text).map(Place::File),
    })?;
    config.into_image = kv.text("overlay") == Some("none");
    if config.into_image {
        config.overlay = None;
    }
    config.size = kv.with("size", |text| match text {
        _ if readonly => Err("a read-only disk cannot grow; leave one of the two out".to_owned()),
        text => keyvalue::size(text, 1 << 20).and_then(|size| match size.is_multiple_of(SECTOR) {
            true => Ok(size),
            false => Err(format!("{size} bytes are not a multiple of {SECTOR}")),
        }),
    })?;
    config.serial = kv.text("serial").map(str::to_owned);
    config.queues = kv.with("queues", |text| number(text, 1..=MAX_QUEUES))?.unwrap_or(1);
    config.force = kv.switch("force")?.unwrap_or(false);
    config.format = kv.with("format", |text| match text {
        "raw" => Ok(ImageFormat::Raw),
        "qcow2" => Ok(ImageFormat::Qcow2),
        _ => Err("it is raw or qcow2"),
    })?;
    let raw = config.format == Some(ImageFormat::Raw) || config.force && config.format.is_none();
    let named = |text: &str| if raw { Err("a raw image has no other files") } else { path(text) };
    config.backing = kv.with("backing", named)?;
    config.data_file = kv.with("data-file", named)?;
    Ok(config)
}

/// The device as its driver sees it, and the handle to its worker.
pub struct Blk {
    config: [u8; 60],
    features: u64,
    state: State,
    queue_sizes: Vec<u16>,
    /// The open files, until the worker starts.
    files: Option<Files>,
    /// The one that the guest writes to: the same open file. It holds this device's lock.
    image: Arc<DiskImage>,
    worker: Option<Worker<Disk>>,
    /// Why the disk cannot move to another process, if so.
    stays: Option<&'static str>,
    /// It was opened before this machine has it, and this process may have read what another host
    /// writes since.
    is_ahead: bool,
    /// The disk is Vellum's own and unknown to the user, not one of the user's disks.
    own: bool,
}

/// The saved state of a disk: enough to refuse a different one, and the serial number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    sectors: u64,
    readonly: bool,
    serial: String,
}

impl Blk {
    /// Opens, locks and measures the image. [`VirtioDevice::start`] starts the worker.
    ///
    /// # Errors
    /// The image cannot be used as a disk.
    pub fn open(config: &BlkConfig) -> Result<Self, BlkError> {
        let (file, format) = open_image(config, true)?;
        let disk = Self::on(config, file, format)?;
        disk.lock()?;
        Ok(disk)
    }

    fn lock(&self) -> Result<(), BlkError> {
        let DiskImage { file, path, readonly, .. } = &*self.image;
        let readonly = *readonly;
        let kind = if readonly { Lock::Shared } else { Lock::Exclusive };
        match lock(file, kind) {
            Ok(true) => Ok(()),
            Ok(false) => Err(BlkError::Locked { path: path.clone(), readonly }),
            Err(source) => Err(BlkError::Open { path: path.clone(), readonly, source }),
        }
    }

    /// A read-only disk of the first `bytes` bytes of `file`. The file belongs to this machine, and
    /// the disk is not one of the user's.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn in_memory(file: File, bytes: u64, name: &str) -> io::Result<Self> {
        let config = BlkConfig { readonly: true, ..BlkConfig::new(name) };
        let files = Files::raw(config, file);
        let image = DiskImage { path: name.into(), ..files.written()? };
        let state = State { sectors: bytes / SECTOR, readonly: true, serial: String::new() };
        Ok(Self { own: true, ..Self::new(files, image, state, 1) })
    }

    /// Like [`Blk::open`], but without a lock until [`VirtioDevice::retake`].
    ///
    /// # Errors
    /// The image cannot be used as a disk.
    pub fn open_unlocked(config: &BlkConfig) -> Result<Self, BlkError> {
        let (file, format) = open_image(config, false)?;
        Ok(Self { is_ahead: true, ..Self::on(config, file, format)? })
    }

    /// A disk on an open image.
    fn on(config: &BlkConfig, file: File, format: ImageFormat) -> Result<Self, BlkError> {
        let (queues, readonly) = (config.queues, config.readonly);
        if queues == 0 || queues > MAX_QUEUES {
            return Err(BlkError::Queues(queues));
        }
        let serial = config.serial.clone().unwrap_or_default();
        id(&serial).ok_or_else(|| BlkError::Serial(serial.clone()))?;
        let (files, size) = Files::of_machine(config, file, format)?;
        let image = files.written().map_err(|source| BlkError::Open {
            path: config.path.clone(),
            readonly,
            source,
        })?;
        let stays = match &config.overlay {
            Some(_) => Some(OVERLAY_STAYS),
            None => files.is_qcow2().then_some(QCOW2_STAYS),
        };
        let state = State { sectors: size / SECTOR, readonly, serial };
        Ok(Self { stays, ..Self::new(files, image, state, queues) })
    }

    fn new(files: Files, image: DiskImage, state: State, queues: u16) -> Self {
        let mut features = 1 << VIRTIO_BLK_F_SEG_MAX | 1 << VIRTIO_BLK_F_BLK_SIZE | 1 << VIRTIO_BLK_F_FLUSH;
        features |= if state.readonly {
            1 << VIRTIO_BLK_F_RO
        } else {
            1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES
        };
        features |= if queues > 1 { 1 << VIRTIO_BLK_F_MQ } else { 0 };
        Blk {
            config: config_space(state.sectors, queues),
            features,
            state,
            queue_sizes: vec![QUEUE_SIZE; queues.into()],
            files: Some(files),
            image: Arc::new(image),
            worker: None,
            stays: None,
            is_ahead: false,
            own: false,
        }
    }
}

/// Drops what this host has cached of a block device, which another host may have written. Files on
/// network file systems are read anew when they are locked, and others have one host.
fn forget_cached(file: &File) {
    if file.metadata().is_ok_and(|data| data.file_type().is_block_device()) {
        vellum_sys::file::will_not_need(file);
    }
}

/// A serial number as the guest reads it, if it fits.
fn id(serial: &str) -> Option<Id> {
    let mut id = Id::default();
    id.get_mut(..serial.len())?.copy_from_slice(serial.as_bytes());
    Some(id)
}

impl VirtioDevice for Blk {
    fn kind(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_space(&self.config, offset, data);
    }

    fn on_event_loop(&self) -> bool {
        false
    }

    fn handle(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        (!self.own).then(|| self.image.clone() as _)
    }

    /// The image comes from a stranger. So the worker reads its tables, which can do no more than
    /// read and write open files.
    fn start(&mut self, enter: Enter) -> Result<(), StartError> {
        let Some(files) = self.files.take() else { return Ok(()) };
        let target = files.path().display().to_string();
        let (State { sectors, readonly, .. }, own) = (self.state.clone(), self.image.clone());
        let begin = move || {
            enter(ThreadKind::Disk)?;
            Ok(Disk::open(files, own, sectors, readonly)?)
        };
        self.worker = Some(Worker::start("disk", target, begin)?);
        Ok(())
    }

    fn activate(&mut self, active: Active) {
        let id = id(&self.state.serial).expect("restore checked its length");
        self.worker.as_ref().expect("the worker starts before the driver runs").give(active, id);
    }

    fn quiesce(&mut self, patience: Duration) -> Result<Option<Active>, Hang> {
        self.worker.as_mut().map_or(Ok(None), |worker| worker.take(patience))
    }

    fn release(&mut self) {
        if let Err(error) = unlock(&self.image.file) {
            tracing::warn!("disk {}: cannot be unlocked: {error}", self.image.path.display());
        }
    }

    fn retake(&mut self) -> Result<(), OpenError> {
        self.lock()?;
        if std::mem::take(&mut self.is_ahead) {
            forget_cached(&self.image.file);
        }
        Ok(())
    }

    fn stays(&self) -> Option<(&'static str, &'static str)> {
        let lost = self.image.has_failed().then_some(LOST_STAYS);
        self.stays.or(lost).map(|why| (KIND.key, why))
    }

    fn is_copied_by_forks(&self) -> bool {
        self.image.overlay.is_some()
    }

    fn lend(&mut self) -> io::Result<Vec<OwnedFd>> {
        Ok(vec![self.image.file.as_fd().try_clone_to_owned()?])
    }

    fn save(&self) -> DeviceState {
        DeviceState::Disk(self.state.clone())
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Disk(state) = state else { return Err(RestoreError::kind(&KIND, &state)) };
        let field = |field, value: String, reason| RestoreError::Field { field, value, reason };
        if (state.sectors, state.readonly) != (self.state.sectors, self.state.readonly) {
            let value = format!("{} sectors, readonly={}", state.sectors, state.readonly);
            return Err(field("disk", value, "is not the disk given here"));
        }
        if id(&state.serial).is_none() {
            return Err(field("serial", format!("{} bytes long", state.serial.len()), "no disk's is"));
        }
        self.state = state;
        Ok(())
    }
}

/// struct virtio_blk_config up to and including the write-zeroes fields.
fn config_space(sectors: u64, queues: u16) -> [u8; 60] {
    let mut space = [0; 60];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &sectors.to_le_bytes());
    // A request needs two more descriptors, for its header and its status.
    put(12, &u32::from(QUEUE_SIZE - 2).to_le_bytes());
    put(20, &(SECTOR as u32).to_le_bytes());
    put(34, &queues.to_le_bytes());
    put(36, &MAX_ZERO_SECTORS.to_le_bytes());
    put(40, &MAX_ZERO_SEGMENTS.to_le_bytes());
    put(44, &1u32.to_le_bytes());
    put(48, &MAX_ZERO_SECTORS.to_le_bytes());
    put(52, &MAX_ZERO_SEGMENTS.to_le_bytes());
    put(56, &[1]);
    space
}
