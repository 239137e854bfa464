//! The files of an image, for imago, with the syncs that keep the order of its writes on the
//! medium.

use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use imago::Storage;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::{self, drivers::CommonStorageHelper};
use vmm_sys_util::fallocate::{FallocateMode, fallocate};

use crate::medium::Medium;
#[cfg(test)]
use crate::power::{self, Act};

/// The size of a file or of a block device.
pub(super) fn file_size(file: &File) -> io::Result<u64> {
    (&*file).seek(SeekFrom::End(0))
}

/// Reads from `at` on. Bytes past the end of the file are zero.
pub(super) fn read_or_zero(file: &File, mut bytes: &mut [u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.read_at(bytes, at) {
            Ok(0) => {
                bytes.fill(0);
                return Ok(());
            }
            Ok(count) => {
                bytes = &mut bytes[count..];
                at += count as u64;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Data is copied in sectors. What is written in less is an entry of a table.
const SMALLEST_DATA: usize = 512;

/// A file, with what has to be synced of it.
pub(super) struct Synced {
    pub(super) file: Arc<File>,
    medium: Medium,
    /// Whether the writes must reach the medium in their order. Without it only a sync says that they
    /// have.
    ordered: bool,
    /// How many more clusters imago may read before it must stop, and their size.
    reads: AtomicU64,
    cluster: u64,
    /// Whether there are unsynced writes, and whether a table is among them.
    unsynced: AtomicBool,
    unsynced_table: AtomicBool,
    /// In tests, the number of the file in `trace`, and the writes and syncs, in order.
    #[cfg(test)]
    pub(super) number: usize,
    #[cfg(test)]
    pub(super) trace: power::Trace,
}

impl Synced {
    pub(super) fn new(file: File) -> Self {
        Self {
            file: Arc::new(file),
            medium: Medium::default(),
            ordered: true,
            reads: AtomicU64::new(u64::MAX),
            cluster: 0,
            unsynced: AtomicBool::new(false),
            unsynced_table: AtomicBool::new(false),
            #[cfg(test)]
            number: 0,
            #[cfg(test)]
            trace: power::Trace::default(),
        }
    }

    /// A file that is removed if it is not completed, so that its writes need no order.
    pub(super) fn unordered(file: File) -> Self {
        Self { ordered: false, ..Self::new(file) }
    }

    /// Of an image with this cluster size.
    pub(super) fn with_cluster(self, cluster: u64) -> Self {
        Self { cluster, ..self }
    }

    /// Lets imago read `most` clusters during `work`. Then a read fails with
    /// [`ErrorKind::Interrupted`]: imago looks for a free cluster in one refcount block after the other,
    /// and goes on at the same place next time.
    pub(super) fn limited<T>(&self, most: u64, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.reads.store(most, Ordering::Relaxed);
        let result = work();
        self.reads.store(u64::MAX, Ordering::Relaxed);
        result
    }

    /// Counts a read by imago.
    fn count_read(&self, len: u64) -> io::Result<()> {
        let left = self.reads.load(Ordering::Relaxed);
        if len != self.cluster || left == u64::MAX {
            return Ok(());
        }
        if left == 0 {
            return Err(ErrorKind::Interrupted.into());
        }
        self.reads.store(left - 1, Ordering::Relaxed);
        Ok(())
    }

    /// Syncs earlier writes to the medium.
    fn sync(&self) -> io::Result<()> {
        self.medium.sync(&self.file)?;
        self.unsynced.store(false, Ordering::Relaxed);
        self.unsynced_table.store(false, Ordering::Relaxed);
        #[cfg(test)]
        self.trace.lock().unwrap().push(Act::Sync(self.number));
        Ok(())
    }

    /// Syncs earlier writes, if there are any.
    fn settle(&self) -> io::Result<()> {
        if self.ordered && self.unsynced.load(Ordering::Relaxed) { self.sync() } else { Ok(()) }
    }

    /// Called before data is written, perhaps to a cluster that was free. imago has already written
    /// the table that mapped the cluster to other data. This syncs that table to the medium.
    pub(super) fn before_data(&self) -> io::Result<()> {
        if self.ordered && self.unsynced_table.load(Ordering::Relaxed) { self.sync() } else { Ok(()) }
    }

    /// Records that `len` bytes at `at` have been written.
    #[cfg_attr(not(test), allow(unused_variables))]
    pub(super) fn note(&self, at: u64, len: u64) {
        self.unsynced.store(true, Ordering::Relaxed);
        #[cfg(test)]
        {
            let mut bytes = vec![0; len as usize];
            read_or_zero(&self.file, &mut bytes, at).unwrap();
            self.trace.lock().unwrap().push(Act::Write(self.number, at, bytes));
        }
    }
}

/// A file of an image, for imago. It does not open other files.
pub(super) struct ImageFile {
    pub(super) own: Arc<Synced>,
    /// The external data file, if this is the file of the tables.
    data: Option<Arc<Synced>>,
    helper: CommonStorageHelper,
}

impl ImageFile {
    pub(super) fn new(file: File) -> Self {
        Self::of(Arc::new(Synced::new(file)), None)
    }

    /// As [`Synced::unordered`].
    pub(super) fn unordered(file: File) -> Self {
        Self::of(Arc::new(Synced::unordered(file)), None)
    }

    pub(super) fn of(own: Arc<Synced>, data: Option<Arc<Synced>>) -> Self {
        Self { own, data, helper: CommonStorageHelper::default() }
    }
}

impl fmt::Debug for ImageFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.own.file.fmt(f)
    }
}

impl fmt::Display for ImageFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the image")
    }
}

// The trait's functions are unsafe because they do not order concurrent requests. Each image is
// used by one thread.
impl Storage for ImageFile {
    fn size(&self) -> io::Result<u64> {
        file_size(&self.own.file)
    }

    unsafe fn pure_readv(&self, bufv: IoVectorMut<'_>, mut offset: u64) -> io::Result<()> {
        self.own.count_read(bufv.len())?;
        for mut part in bufv.into_inner() {
            read_or_zero(&self.own.file, &mut part, offset)?;
            offset += part.len() as u64;
        }
        Ok(())
    }

    unsafe fn pure_writev(&self, bufv: IoVector<'_>, mut offset: u64) -> io::Result<()> {
        // This is a table, or a part of a cluster that is copied. imago's order keeps each table
        // consistent with the writes before it. These syncs make the medium keep to that order. The
        // data that a table maps may be in another file.
        if let Some(data) = &self.data {
            data.settle()?;
        }
        self.own.settle()?;
        self.own.unsynced_table.store(true, Ordering::Relaxed);
        for part in bufv.into_inner() {
            // imago takes an entry of the L1 or refcount table that could not be written for written,
            // and never writes it again.
            let is_entry = part.len() < SMALLEST_DATA;
            let lost = |error: &io::Error| {
                if is_entry {
                    self.own.medium.fail(error)
                }
            };
            self.own.file.write_all_at(&part, offset).inspect_err(lost)?;
            self.own.note(offset, part.len() as u64);
            offset += part.len() as u64;
        }
        Ok(())
    }

    unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.own.before_data()?;
        crate::write_zeros(&self.own.file, offset, length, false)?;
        self.own.note(offset, length);
        Ok(())
    }

    unsafe fn pure_discard(&self, offset: u64, length: u64) -> io::Result<()> {
        match fallocate(&self.own.file, FallocateMode::PunchHole, true, offset, length) {
            Err(error) if error.errno() != libc::EOPNOTSUPP => Err(error.into()),
            _ => {
                self.own.note(offset, length);
                Ok(())
            }
        }
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.own.sync()
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.helper
    }

    /// Only grows: a data file may be longer than its disk.
    fn resize(&self, new_size: u64, _: storage::PreallocateMode) -> io::Result<()> {
        match file_size(&self.own.file)? < new_size {
            true => self.own.file.set_len(new_size),
            false => Ok(()),
        }
    }
}
