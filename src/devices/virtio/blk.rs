//! Disk: raw images and block devices (virtio 1.2, section 5.2).
//!
//! One worker thread a disk takes requests from all its queues in turn and answers each before it takes the next, with
//! preadv and pwritev straight between file and guest memory. That is what a reset waits for: one request. The image
//! is locked while it is open (open file description locks, as QEMU does), so that two writers cannot share it.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use vmm_sys_util::fallocate::{FallocateMode, fallocate};

use super::queue::Chain;
use super::slices::Slices;
use super::{Active, DeviceState, RestoreError, VirtioDevice, read_space};
use crate::sys::file::{Lock, lock};
use crate::sys::poll::Readable;

/// The unit of a disk's capacity, whatever its block size.
const SECTOR: u64 = 512;
const QUEUE_SIZE: u16 = 256;
/// More queues than this are of no use to one worker.
const MAX_QUEUES: u16 = 16;
/// The most that one discard or write-zeroes segment covers (32 MiB): it bounds the time of a request.
const MAX_ZERO_SECTORS: u32 = 1 << 16;
/// Segments of one discard or write-zeroes request.
const MAX_ZERO_SEGMENTS: u32 = 16;
/// What a file system without FALLOC_FL_ZERO_RANGE gets written.
static ZEROS: [u8; 1 << 16] = [0; 1 << 16];

/// A disk as the command line or a script describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlkConfig {
    /// The image or block device.
    pub path: PathBuf,
    /// The guest may not write; several read-only users may share the image.
    pub readonly: bool,
    /// What the guest reads as the disk's serial number; at most 20 bytes.
    pub serial: Option<String>,
    /// Request queues, 1 to 16.
    pub queues: u16,
}

impl BlkConfig {
    /// A writable disk with one queue.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        BlkConfig { path: path.into(), readonly: false, serial: None, queues: 1 }
    }
}

/// Why a disk cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum BlkError {
    /// It cannot be opened or measured.
    #[error("disk {path}: {source}; use an image or a block device that exists and that this user can {}", if *.readonly { "read" } else { "write, or add `readonly`" })]
    Open {
        /// How it was to be opened.
        readonly: bool,
        /// Which disk.
        path: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
    /// Somebody else has it.
    #[error("disk {path} is in use already, by another process or another disk of this machine{}", if *.readonly { ", for writing" } else { "; add `readonly` to share it with readers" })]
    Locked {
        /// Which disk.
        path: PathBuf,
        /// How it was to be opened.
        readonly: bool,
    },
    /// It is a directory, a pipe or the like.
    #[error("disk {path} is neither a file nor a block device")]
    Kind {
        /// Which disk.
        path: PathBuf,
    },
    /// It is empty or has half a sector at its end.
    #[error(
        "disk {path} has {size} bytes, which is not a positive multiple of 512: {}",
        if *.size == 0 { "`truncate -s 1g` makes it larger" } else { "`truncate -s %512` pads it" }
    )]
    Size {
        /// Which disk.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// The serial number does not fit.
    #[error("disk serial `{0}` is longer than 20 bytes")]
    Serial(String),
    /// No such number of queues.
    #[error("a disk has 1 to {MAX_QUEUES} queues, not {0}")]
    Queues(u16),
}

/// The device: what its vCPUs see, and the way to the worker.
pub struct Blk {
    config: [u8; 60],
    features: u64,
    sectors: u64,
    queue_sizes: Vec<u16>,
    orders: Option<Sender<Active>>,
    returns: Receiver<Active>,
    stop: Arc<Stop>,
    running: bool,
    worker: Option<JoinHandle<()>>,
}

/// What is saved of a disk: enough to refuse a different one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    sectors: u64,
    readonly: bool,
}

/// An image that is open, locked and sound, and not yet at work.
pub struct Image {
    disk: Disk,
    queues: u16,
}

impl Image {
    /// Opens, locks and measures it.
    pub fn open(config: &BlkConfig) -> Result<Self, BlkError> {
        if config.queues == 0 || config.queues > MAX_QUEUES {
            return Err(BlkError::Queues(config.queues));
        }
        let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
        let serial = config.serial.as_deref().unwrap_or("");
        id.get_mut(..serial.len())
            .ok_or_else(|| BlkError::Serial(serial.into()))?
            .copy_from_slice(serial.as_bytes());
        let (file, size) = open_image(&config.path, config.readonly)?;
        let disk = Disk { file, sectors: size / SECTOR, readonly: config.readonly, write_through: false, id };
        Ok(Image { disk, queues: config.queues })
    }
}

impl Blk {
    /// Starts the worker. Its first act is `enter`, where it gives up what it does not need; the device is there when
    /// that has succeeded.
    pub fn new(
        Image { disk, queues }: Image,
        enter: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let (sectors, readonly) = (disk.sectors, disk.readonly);
        let mut features = 1 << VIRTIO_BLK_F_SEG_MAX | 1 << VIRTIO_BLK_F_BLK_SIZE | 1 << VIRTIO_BLK_F_FLUSH;
        features |= if readonly {
            1 << VIRTIO_BLK_F_RO
        } else {
            1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES
        };
        features |= if queues > 1 { 1 << VIRTIO_BLK_F_MQ } else { 0 };

        let stop =
            Arc::new(Stop { now: AtomicBool::new(false), wake: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)? });
        let (orders, inbox) = channel();
        let (outbox, returns) = channel();
        let (entered, ready) = channel();
        let worker_stop = stop.clone();
        let worker = std::thread::Builder::new().name("disk".into()).spawn(move || {
            let result = enter();
            let failed = result.is_err();
            if entered.send(result).is_ok() && !failed {
                Worker { disk, stop: worker_stop }.work(inbox, outbox);
            }
        })?;
        ready.recv().unwrap_or_else(|_| Err(io::Error::other("the disk's worker is gone")))?;
        Ok(Blk {
            config: config_space(sectors, queues),
            features,
            sectors,
            queue_sizes: vec![QUEUE_SIZE; queues.into()],
            orders: Some(orders),
            returns,
            stop,
            running: false,
            worker: Some(worker),
        })
    }
}

impl Drop for Blk {
    fn drop(&mut self) {
        self.quiesce();
        self.orders = None;
        if let Some(worker) = self.worker.take() {
            // A worker that panicked has said so already.
            let _ = worker.join();
        }
    }
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

    fn activate(&mut self, active: Active) {
        let orders = self.orders.as_ref().expect("the worker lives as long as the device");
        self.running = orders.send(active).is_ok();
    }

    fn quiesce(&mut self) -> Option<Active> {
        if !std::mem::take(&mut self.running) {
            return None;
        }
        self.stop.now.store(true, Ordering::Release);
        let _ = self.stop.wake.write(1);
        let active = self.returns.recv().ok();
        self.stop.now.store(false, Ordering::Release);
        let _ = self.stop.wake.read();
        active
    }

    fn save(&self) -> DeviceState {
        DeviceState::Blk(State {
            sectors: self.sectors,
            readonly: self.features & (1 << VIRTIO_BLK_F_RO) != 0,
        })
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Blk(state) = state else { return Err(RestoreError::kind("disk", &state)) };
        if DeviceState::Blk(state.clone()) != self.save() {
            let value = format!("{} sectors, readonly={}", state.sectors, state.readonly);
            return Err(RestoreError::Field { field: "disk", value, reason: "is not the disk given here" });
        }
        Ok(())
    }
}

/// struct virtio_blk_config up to and including the write-zeroes fields.
fn config_space(sectors: u64, queues: u16) -> [u8; 60] {
    let mut space = [0; 60];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &sectors.to_le_bytes());
    // A request takes two more descriptors, for its header and its status.
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

fn open_image(path: &Path, readonly: bool) -> Result<(File, u64), BlkError> {
    let open_error = |source| BlkError::Open { path: path.into(), readonly, source };
    let kind = std::fs::metadata(path).map_err(open_error)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(BlkError::Kind { path: path.into() });
    }
    let mut file = OpenOptions::new().read(true).write(!readonly).open(path).map_err(open_error)?;
    if !lock(&file, if readonly { Lock::Shared } else { Lock::Exclusive }).map_err(open_error)? {
        return Err(BlkError::Locked { path: path.into(), readonly });
    }
    // Unlike its metadata this is right for block devices too.
    let size = file.seek(SeekFrom::End(0)).map_err(open_error)?;
    if size == 0 || !size.is_multiple_of(SECTOR) {
        return Err(BlkError::Size { path: path.into(), size });
    }
    Ok((file, size))
}

/// The order to give the queues back: looked at between requests, and waking a worker that sleeps.
struct Stop {
    now: AtomicBool,
    wake: EventFd,
}

/// The thread that does the work.
struct Worker {
    disk: Disk,
    stop: Arc<Stop>,
}

impl Worker {
    fn work(mut self, orders: Receiver<Active>, returns: Sender<Active>) {
        while let Ok(mut active) = orders.recv() {
            self.disk.write_through = !active.has(VIRTIO_BLK_F_FLUSH);
            if let Err(error) = self.serve(&mut active) {
                tracing::error!("disk worker: {error}");
            }
            if returns.send(active).is_err() {
                break;
            }
        }
    }

    /// Serves all queues until the stop event.
    fn serve(&mut self, active: &mut Active) -> io::Result<()> {
        let mut bells = Readable::default();
        active
            .queues
            .iter()
            .map(|queue| queue.event())
            .chain([&self.stop.wake])
            .for_each(|e| bells.add(e.as_raw_fd()));
        let mem = active.mem.clone();
        let mut chain = Chain::default();
        loop {
            let mut busy = false;
            for queue in &mut active.queues {
                if self.stop.now.load(Ordering::Acquire) {
                    return Ok(());
                }
                busy |= queue.serve_one(&mem, &mut chain, |chain| self.disk.answer(chain));
            }
            // Every queue must listen before the worker sleeps, so no `any` here.
            if busy || active.queues.iter_mut().fold(false, |news, queue| news | queue.listen(&mem)) {
                continue;
            }
            bells.wait()?;
            for queue in &active.queues {
                let _ = queue.event().read();
            }
        }
    }
}

/// The image, and what a request does to it.
struct Disk {
    file: File,
    sectors: u64,
    readonly: bool,
    /// The driver knows no flush: a write is finished when it is on the medium.
    write_through: bool,
    id: [u8; VIRTIO_BLK_ID_BYTES as usize],
}

/// A request's answer other than VIRTIO_BLK_S_OK.
enum Refusal {
    /// VIRTIO_BLK_S_IOERR
    Failed,
    /// VIRTIO_BLK_S_UNSUPP
    Unsupported,
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        tracing::warn!("disk: {error}");
        Refusal::Failed
    }
}

impl Disk {
    /// Answers one request; the number of bytes written to the guest is the result.
    fn answer(&mut self, chain: &mut Chain<'_>) -> u32 {
        // Without a status byte there is nobody to answer.
        let Some(status) = chain.writable.take_last_byte() else { return 0 };
        let code = match self.execute(chain) {
            Ok(()) => VIRTIO_BLK_S_OK,
            Err(Refusal::Failed) => VIRTIO_BLK_S_IOERR,
            Err(Refusal::Unsupported) => VIRTIO_BLK_S_UNSUPP,
        };
        status.copy_from(&[code as u8]);
        chain.writable.consumed() as u32 + 1
    }

    fn execute(&mut self, chain: &mut Chain<'_>) -> Result<(), Refusal> {
        let header: [u8; 16] = chain.readable.read_array().ok_or(Refusal::Failed)?;
        let kind = u32::from_le_bytes(header[0..4].try_into().expect("4 bytes"));
        let sector = u64::from_le_bytes(header[8..16].try_into().expect("8 bytes"));
        match kind {
            VIRTIO_BLK_T_IN => {
                let data = &mut chain.writable;
                let mut at = self.extent(sector, data.left() as u64)?;
                while data.left() > 0 {
                    at += moved(data.preadv(&self.file, at, usize::MAX))?;
                }
                Ok(())
            }
            VIRTIO_BLK_T_OUT => {
                self.writable()?;
                let data = &mut chain.readable;
                let mut at = self.extent(sector, data.left() as u64)?;
                while data.left() > 0 {
                    at += moved(data.pwritev(&self.file, at, usize::MAX))?;
                }
                self.settle()
            }
            VIRTIO_BLK_T_FLUSH => Ok(self.file.sync_data()?),
            VIRTIO_BLK_T_GET_ID => {
                chain.writable.write(&self.id);
                Ok(())
            }
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
                self.writable()?;
                self.zero(&mut chain.readable, kind == VIRTIO_BLK_T_DISCARD)
            }
            _ => Err(Refusal::Unsupported),
        }
    }

    fn writable(&self) -> Result<(), Refusal> {
        if self.readonly { Err(Refusal::Failed) } else { Ok(()) }
    }

    fn settle(&self) -> Result<(), Refusal> {
        if self.write_through { Ok(self.file.sync_data()?) } else { Ok(()) }
    }

    /// Where `len` bytes at `sector` begin in the file, if they are whole sectors inside the disk.
    fn extent(&self, sector: u64, len: u64) -> Result<u64, Refusal> {
        let end = sector.checked_add(len / SECTOR).ok_or(Refusal::Failed)?;
        if !len.is_multiple_of(SECTOR) || end > self.sectors {
            Err(Refusal::Failed)
        } else {
            Ok(sector * SECTOR)
        }
    }

    /// Discard and write-zeroes: segments of (sector u64, sectors u32, flags u32).
    fn zero(&self, segments: &mut Slices<'_>, discard: bool) -> Result<(), Refusal> {
        let count = segments.left() / 16;
        if !segments.left().is_multiple_of(16) || count == 0 || count > MAX_ZERO_SEGMENTS as usize {
            return Err(Refusal::Failed);
        }
        while let Some(segment) = segments.read_array::<16>() {
            let sector = u64::from_le_bytes(segment[0..8].try_into().expect("8 bytes"));
            let sectors = u32::from_le_bytes(segment[8..12].try_into().expect("4 bytes"));
            let flags = u32::from_le_bytes(segment[12..16].try_into().expect("4 bytes"));
            let unmap = flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
            if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 || discard && unmap {
                return Err(Refusal::Unsupported);
            }
            if sectors > MAX_ZERO_SECTORS {
                return Err(Refusal::Failed);
            }
            let len = u64::from(sectors) * SECTOR;
            let at = self.extent(sector, len)?;
            match (len, discard) {
                (0, _) => {}
                (_, true) => self.allocate(FallocateMode::PunchHole, at, len)?,
                (_, false) => {
                    let mode = if unmap { FallocateMode::PunchHole } else { FallocateMode::ZeroRange };
                    if let Err(Refusal::Unsupported) = self.allocate(mode, at, len) {
                        self.write_zeros(at, len)?;
                    }
                }
            }
        }
        self.settle()
    }

    fn allocate(&self, mode: FallocateMode, at: u64, len: u64) -> Result<(), Refusal> {
        fallocate(&self.file, mode, true, at, len).map_err(|error| match error.errno() {
            libc::EOPNOTSUPP => Refusal::Unsupported,
            _ => io::Error::from(error).into(),
        })
    }

    fn write_zeros(&self, at: u64, len: u64) -> io::Result<()> {
        let (mut at, end) = (at, at + len);
        while at < end {
            let part = (end - at).min(ZEROS.len() as u64) as usize;
            self.file.write_all_at(&ZEROS[..part], at)?;
            at += part as u64;
        }
        Ok(())
    }
}

/// A transfer that makes no progress is one past the end of a file that somebody has truncated.
fn moved(result: io::Result<usize>) -> io::Result<u64> {
    match result {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(0),
        other => other.map(|count| count as u64),
    }
}
