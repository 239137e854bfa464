//! qcow2 images (QEMU, docs/interop/qcow2.txt), based on the crate imago.
//!
//! imago reads and writes the tables. A guest's data goes directly between guest memory and the
//! file wherever the tables map a range to it. Compressed clusters are decompressed first.
//!
//! imago orders its writes so that the image is consistent at each moment if all earlier writes
//! have reached the file. A power loss keeps no order. So `ImageFile` syncs between a table and
//! the writes before it, and before data goes to a cluster that was free.
//!
//! Images are untrusted. [`Header::read`] refuses what imago would have to trust: tables that are
//! larger than the file or than any disk needs, and encryption. Before an image is opened for
//! writing, `check_counts` raises refcounts that are too low, or refuses the image. A backing file or
//! an external data file is opened only if the user names it, because an image could name any file of
//! the host.

mod counts;
mod end;
mod file;
mod header;

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use imago::format::PreallocateMode;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatCreateBuilder, FormatDriverBuilder, Mapping};

use vellum_kvm::memory::slices::Slices;

use crate::extents::Extents;
#[cfg(test)]
use crate::power;
use crate::size_text;
use crate::unpacked::Unpacked;
use counts::check_counts;
use end::check_end;
use file::{ImageFile, Synced, read_or_zero};
pub use header::{Header, MAX_DISK};
use header::{MAGIC, Tables};

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An error of the host.
    #[error("{0}")]
    Host(#[from] io::Error),
    /// A field of the header has an invalid value.
    #[error("its header is damaged: {field} is {value}, {limit}")]
    Header {
        /// The field's name in QEMU's documentation.
        field: &'static str,
        /// The field's value.
        value: u64,
        /// The valid values.
        limit: String,
    },
    /// The disk is too large.
    #[error("a disk of {} in a qcow2 image is not supported: {} is the most", size_text(*.0), size_text(MAX_DISK))]
    Large(u64),
    /// The file ends before a part of the disk, as that of a download that was interrupted.
    #[error(
        "it is cut off: it has {length} bytes, and a part of the disk is at byte {at}; download or copy it again"
    )]
    CutOff {
        /// The file's size in bytes.
        length: u64,
        /// The offset of the part.
        at: u64,
    },
    /// The image is encrypted.
    #[error("it is encrypted; `qemu-img convert` writes it without")]
    Encrypted,
    /// A program ended without closing the image.
    #[error("it was not closed in order; `qemu-img check --repair=all` repairs it")]
    Dirty,
    /// QEMU has marked the image as corrupt.
    #[error("it is marked as corrupt; `qemu-img check --repair=all` may repair it")]
    Corrupt,
    /// A refcount is too low and cannot be raised. A writer would take the cluster as free.
    #[error(
        "its refcounts are too low, so a write could overwrite what is in use: byte {at} is used {used} times and counted {counted} times; `qemu-img check --repair=all` repairs that, and with an overlay or `readonly` nothing is written"
    )]
    Refcount {
        /// The offset of the cluster.
        at: u64,
        /// Its refcount.
        counted: u64,
        /// The number of references.
        used: u64,
    },
    /// A cluster that is written in place is used more than once.
    #[error(
        "its tables have a cluster written in place that is used {used} times, at byte {at}; `qemu-img check --repair=all` repairs that, and with an overlay or `readonly` nothing is written"
    )]
    Shared {
        /// The offset of the cluster.
        at: u64,
        /// The number of references.
        used: u64,
    },
    /// A table names an offset within a cluster.
    #[error("its tables are damaged: {0} is not where a cluster begins; `qemu-img check` says more")]
    Unaligned(u64),
    /// A refcount block is also used as something else.
    #[error("its refcounts at byte {0} are also used as something else; `qemu-img check` says more")]
    Block(u64),
    /// The refcounts count clusters that nothing uses.
    #[error("its refcounts count too much that nothing uses; `qemu-img check --repair=leaks` repairs that")]
    Leaked,
    /// A table is too large to be checked before a write.
    #[error(
        "its {0} cannot be checked before a write, because of the size; with an overlay or `readonly` nothing is written"
    )]
    Unchecked(&'static str),
    /// The image has a feature that is not supported.
    #[error("it has {0}, which is not supported; `qemu-img convert -O qcow2` writes it without")]
    Feature(&'static str),
    /// The image has a backing file, and the user has not named one.
    #[error(
        "it has the backing file {0:?}; an image could name any file of this host, so say which: `backing=FILE`"
    )]
    Backing(String),
    /// The backing file that the user has named has one, too.
    #[error(
        "its backing file has the backing file {0:?}, which is not supported; `qemu-img convert -O qcow2` writes one file of both"
    )]
    Nested(String),
    /// The user has named a backing file, but the image has none.
    #[error("it has no backing file")]
    NoBacking,
    /// The image has an external data file, and the user has not named one.
    #[error("its data is in another file; say which: `data-file=FILE`")]
    DataFile,
    /// The user has named a data file, but the image has none.
    #[error("it has no external data file")]
    NoDataFile,
}

/// The number of clusters whose refcounts are looked at in one call for a free one, besides those that
/// imago has in memory. An image of 1 TiB has 2^24.
const MAX_LOOKED_AT: u64 = 1 << 18;
/// The clusters that imago reads for one write, besides refcounts, are fewer: an L2 table, and those
/// that it copies at either end.
const MIN_READS: u64 = 16;

type Access = Arc<FormatAccess<ImageFile>>;
type Driver = imago::qcow2::Qcow2<ImageFile, Access>;

/// The files of an image that the user has named.
#[derive(Default)]
pub struct Named {
    /// The backing file: raw or qcow2, without a backing file of its own.
    pub backing: Option<File>,
    /// The external data file.
    pub data: Option<File>,
}

/// An open image.
pub struct Qcow2 {
    access: FormatAccess<ImageFile>,
    version: u32,
    /// The number of snapshots inside the image.
    snapshots: u32,
    raised: u64,
    /// The file with the tables, and how many clusters imago may read of it for a write.
    tables: Arc<Synced>,
    most_reads: u64,
    /// The cluster size in bytes.
    cluster: u64,
    unpacked: Unpacked,
    /// The file with the data, and the offsets of its cached clusters. `None` if a backing file has
    /// data too.
    extents: Option<(Arc<File>, RefCell<Extents>)>,
    #[cfg(test)]
    trace: power::Trace,
}

/// imago's access to an image with `header`.
fn access(
    image: Arc<Synced>,
    header: &Header,
    writable: bool,
    backing: Option<File>,
    data: Option<Arc<Synced>>,
) -> Result<FormatAccess<ImageFile>, Error> {
    let mut builder = Driver::builder(ImageFile::of(image, data.clone())).write(writable);
    builder = match (&header.backing, backing) {
        (None, None) => builder.backing(None),
        (Some(_), Some(backing)) => builder.backing(Some(Arc::new(backing_access(backing)?))),
        (Some(name), None) => return Err(Error::Backing(name.clone())),
        (None, Some(_)) => return Err(Error::NoBacking),
    };
    builder = match (header.data_file, data) {
        (false, None) => builder.data_file(None),
        (true, Some(data)) => builder.data_file(Some(ImageFile::of(data, None))),
        (true, None) => return Err(Error::DataFile),
        (false, Some(_)) => return Err(Error::NoDataFile),
    };
    Ok(FormatAccess::new(builder.open(DenyImplicitOpenGate::default())?))
}

fn backing_access(file: File) -> Result<FormatAccess<ImageFile>, Error> {
    let mut magic = [0; 4];
    read_or_zero(&file, &mut magic, 0)?;
    if magic == MAGIC {
        let header = Header::read(&file)?;
        check_end(&file, &header)?;
        return access(Arc::new(Synced::new(file)), &header, false, None, None).map_err(
            |error| match error {
                Error::Backing(name) => Error::Nested(name),
                error => error,
            },
        );
    }
    let raw = imago::raw::Raw::builder(ImageFile::new(file)).open(DenyImplicitOpenGate::default())?;
    Ok(FormatAccess::new(raw))
}

impl Qcow2 {
    /// Opens the image in `file`, with the other files that the user has named.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn open(file: File, writable: bool, named: Named) -> Result<Self, Error> {
        Self::of(Synced::new(file), writable, named)
    }

    fn of(image: Synced, writable: bool, named: Named) -> Result<Self, Error> {
        let file = image.file.clone();
        let header = Header::read(&file)?;
        let raised = match writable {
            // This includes the check of the end.
            true => check_counts(&file, &header)?,
            false => check_end(&file, &header).map(|()| 0)?,
        };
        let each = (header.cluster * 8) >> Tables::read(&file, &header)?.refcount_order;
        #[cfg(test)]
        let trace = image.trace.clone();
        let data = named.data.map(|file| {
            #[cfg_attr(not(test), allow(unused_mut))]
            let mut data = Synced::new(file);
            #[cfg(test)]
            {
                (data.number, data.trace) = (1, trace.clone());
            }
            Arc::new(data)
        });
        let image = Arc::new(image.with_cluster(header.cluster));
        let holder = data.as_ref().unwrap_or(&image).file.clone();
        Ok(Self {
            extents: header.backing.is_none().then(|| (holder, RefCell::new(Extents::new(header.cluster)))),
            #[cfg(test)]
            trace,
            access: access(image.clone(), &header, writable, named.backing, data)?,
            version: header.version,
            snapshots: header.snapshots,
            raised,
            tables: image,
            most_reads: (MAX_LOOKED_AT / each).max(MIN_READS),
            cluster: header.cluster,
            unpacked: Unpacked::new(header.cluster),
        })
    }

    /// Creates and opens an image of a disk of `size` bytes in the empty `file`. Until it is flushed, a
    /// loss of power leaves no image.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn create(file: File, size: u64) -> io::Result<Self> {
        let image = ImageFile::unordered(file.try_clone()?);
        Driver::create_builder(image).size(size).preallocate(PreallocateMode::None).create()?;
        Self::of(Synced::unordered(file), true, Named::default()).map_err(io::Error::other)
    }

    /// Grows the disk to `size` bytes. The new part reads as zeroes.
    ///
    /// # Errors
    /// The kernel's error, or the image cannot grow.
    pub fn grow(&mut self, size: u64) -> io::Result<()> {
        let has_backing = self.extents.is_none();
        let unfit = match self.version {
            2 if self.snapshots > 0 => Some("snapshots, which have no size of their own"),
            2 if has_backing => Some("a backing file, whose old data would appear"),
            _ => None,
        };
        if let Some(why) = unfit {
            let why = format!(
                "it is of version 2 and has {why}; `qemu-img amend` with compat=1.1 makes it version 3"
            );
            return Err(io::Error::new(ErrorKind::Unsupported, why));
        }
        self.forget(0, u64::MAX);
        // What the backing file has beyond the old end must not appear.
        let mode = if has_backing { PreallocateMode::Zero } else { PreallocateMode::None };
        self.access.resize_grow(size, mode)?;
        self.flush()
    }

    /// The version of the image's format.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// How many refcounts were too low and have been raised, as after a loss of power.
    pub fn raised(&self) -> u64 {
        self.raised
    }

    /// The size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.access.size()
    }

    /// Reads from `at` on into the next bytes of `data`, at most `max`. Returns the number of
    /// bytes.
    ///
    /// # Errors
    /// The kernel's error, or the image is damaged there.
    pub fn read(&self, data: &mut Slices<'_>, at: u64, max: usize) -> io::Result<usize> {
        let read = |data: &mut Slices<'_>, file: &File, offset, len| match data.preadv(file, offset, len)? {
            // The file ends before the cluster does.
            0 => Ok(data.zero(len)),
            count => Ok(count),
        };
        let len = data.left().min(max);
        if let Some((file, extents)) = &self.extents
            && let Some(offset) = extents.borrow().find(at, len)
        {
            return read(data, file, offset, len);
        }
        let (mapping, len) = self.access.get_mapping(at, len as u64)?;
        let len = len as usize;
        match mapping {
            Mapping::Raw { storage, offset, .. } => {
                if let Some((_, extents)) = &self.extents {
                    extents.borrow_mut().note(at, len as u64, offset);
                }
                read(data, &storage.own.file, offset, len)
            }
            Mapping::Zero { .. } => Ok(data.zero(len)),
            Mapping::Eof { .. } => Ok(0),
            _ => self.compressed(at, |bytes| data.write(&bytes[..len.min(bytes.len())])),
        }
    }

    /// Calls `with` with the decompressed cluster from `at` to its end.
    fn compressed<T>(&self, at: u64, with: impl FnOnce(&[u8]) -> T) -> io::Result<T> {
        self.unpacked.read(at, self.size(), |bytes, start| self.access.read(bytes, start), with)
    }

    /// Reads exactly `bytes` from `at` on.
    ///
    /// # Errors
    /// The kernel's error, or the image is damaged there.
    pub fn read_exact_at(&self, mut bytes: &mut [u8], mut at: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            let (mapping, len) = self.access.get_mapping(at, bytes.len() as u64)?;
            let part = &mut bytes[..len as usize];
            let count = match mapping {
                Mapping::Raw { storage, offset, .. } => {
                    read_or_zero(&storage.own.file, part, offset)?;
                    part.len()
                }
                Mapping::Zero { .. } => {
                    part.fill(0);
                    part.len()
                }
                Mapping::Eof { .. } => 0,
                _ => self.compressed(at, |cluster| {
                    let count = part.len().min(cluster.len());
                    part[..count].copy_from_slice(&cluster[..count]);
                    count
                })?,
            };
            if count == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            bytes = &mut bytes[count..];
            at += count as u64;
        }
        Ok(())
    }

    /// Whether the bytes from `at` on are known to be zeroes without reading them, and for how many
    /// of the next `len` bytes the answer holds.
    ///
    /// # Errors
    /// The kernel's error, or the image is damaged there.
    pub fn is_hole(&self, at: u64, len: u64) -> io::Result<(bool, u64)> {
        let (mapping, len) = self.access.get_mapping(at, len)?;
        Ok((matches!(mapping, Mapping::Zero { .. }), len))
    }

    /// Drops cached data of `len` bytes from `at` on, which are about to change.
    fn forget(&mut self, at: u64, len: u64) {
        self.unpacked.forget(at, len);
        if let Some((_, extents)) = &mut self.extents {
            extents.get_mut().forget(at, len);
        }
    }

    /// Writes the next bytes of `data` from `at` on, at most `max`. Returns the number of bytes.
    ///
    /// # Errors
    /// The kernel's error, or the image is damaged there. [`ErrorKind::Interrupted`]: no free cluster
    /// was found yet, and the next call looks on.
    pub fn write(&mut self, data: &mut Slices<'_>, at: u64, max: usize) -> io::Result<usize> {
        let len = data.left().min(max) as u64;
        let write = |file: &File, offset, len| {
            let mut done = 0;
            while done < len {
                match data.pwritev(file, offset + done as u64, len - done) {
                    Ok(0) => return Err(ErrorKind::WriteZero.into()),
                    Ok(count) => done += count,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        };
        self.put(at, len, write)
    }

    /// Lets `write` write the first of the `len` bytes from `at` on. It gets the file, the offset and
    /// the number of bytes. Returns that number.
    fn put(
        &mut self,
        at: u64,
        len: u64,
        write: impl FnOnce(&File, u64, usize) -> io::Result<()>,
    ) -> io::Result<usize> {
        self.forget(at, len);
        // Not the rest, which frees clusters: what it cannot free is lost.
        let prepare = || self.access.prepare_data_mapping(at, len, true);
        let mapping = self.tables.limited(self.most_reads, prepare)?;
        let (storage, offset, len) = (mapping.storage(), mapping.offset(), mapping.length());
        storage.own.before_data()?;
        write(&storage.own.file, offset, len as usize)?;
        storage.own.note(offset, len);
        self.access.commit_data_mapping(mapping)?;
        if let Some((_, extents)) = &mut self.extents {
            extents.get_mut().note(at, len, offset);
        }
        Ok(len as usize)
    }

    /// Writes all of `bytes` from `at` on.
    ///
    /// # Errors
    /// The kernel's error, or the image is damaged there.
    pub fn write_all_at(&mut self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.forget(at, bytes.len() as u64);
        self.access.write(bytes, at)
    }

    /// Makes `len` bytes from `at` on read as zeroes, and frees their space if `discard`.
    ///
    /// # Errors
    /// As [`Qcow2::write`].
    pub fn zero(&mut self, at: u64, len: u64, discard: bool) -> io::Result<()> {
        self.forget(at, len);
        let end = at + len;
        // Version 2 has no zero clusters, and imago 0.2.6 fails for a part of a disk's only
        // cluster.
        let (first, last) = match self.version {
            2 => (end, end),
            _ => {
                let first = at.next_multiple_of(self.cluster).min(end);
                let is_end = end == self.size();
                (first, if is_end { end } else { (end - end % self.cluster).max(first) })
            }
        };
        self.write_zeros(at, first)?;
        if first < last && discard {
            self.access.discard_to_zero(first, last - first)?;
        } else if first < last {
            self.access.write_zeroes(first, last - first)?;
        }
        self.write_zeros(last, end)
    }

    /// Writes zeroes from `at` to `end`, except where the range already reads as zeroes.
    fn write_zeros(&mut self, mut at: u64, end: u64) -> io::Result<()> {
        static ZEROS: [u8; 1 << 16] = [0; 1 << 16];
        while at < end {
            let (is_hole, len) = self.is_hole(at, (end - at).min(ZEROS.len() as u64))?;
            if !is_hole {
                let mut done = 0;
                while done < len {
                    done += self.put(at + done, len - done, |file, offset, len| {
                        file.write_all_at(&ZEROS[..len], offset)
                    })? as u64;
                }
            }
            at += len.max(1);
        }
        Ok(())
    }

    /// Syncs what was written, and the tables that map it, to the medium.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn flush(&mut self) -> io::Result<()> {
        self.access.flush()?;
        self.access.sync()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::file::file_size;
    use super::*;
    use crate::Image;
    use crate::power::{Guest, SECTOR, base, file};

    /// Tests images with and without a backing file and a data file, and with several tables of each
    /// kind.
    #[test]
    fn what_was_flushed_outlives_a_loss_of_power() {
        let size = 97 * SECTOR;
        let kinds = [
            (512, false, false),
            (512, true, false),
            (4096, true, false),
            (65536, false, false),
            (512, false, true),
            (4096, true, true),
        ];
        for (cluster, has_backing, has_data) in kinds {
            let (made, data, below) = (file(&[]), file(&[]), file(&base(size as usize)));
            let image = ImageFile::new(made.try_clone().unwrap());
            let mut builder = Driver::create_builder(image).size(size).cluster_size(cluster);
            let mut original = vec![0; size as usize];
            if has_backing {
                builder = builder.backing("below".into(), "raw".into());
                original = base(size as usize);
            }
            if has_data {
                builder = builder.data_file("data".into(), ImageFile::new(data.try_clone().unwrap()));
            }
            builder.create().unwrap();
            let content = |file: &File| {
                let mut bytes = vec![0; file_size(file).unwrap() as usize];
                file.read_exact_at(&mut bytes, 0).unwrap();
                bytes
            };
            let begin = [content(&made), content(&data)];
            let trace = |image: &Image| match image {
                Image::Qcow2(image) => image.trace.lock().unwrap().clone(),
                _ => panic!("it is a qcow2 image"),
            };
            let again = |files: Vec<File>| {
                let [file, data] = files.try_into().unwrap();
                let named = Named {
                    backing: has_backing.then(|| below.try_clone().unwrap()),
                    data: has_data.then_some(data),
                };
                Image::Qcow2(Box::new(Qcow2::open(file, true, named).unwrap()))
            };
            println!("clusters of {cluster} bytes, backing file: {has_backing}, data file: {has_data}");
            power::is_survived(again(vec![made, data]), &original, &begin, 150, &trace, &again);
        }
    }

    /// The backing file is longer than the disk. What it has there never was the disk's.
    #[test]
    fn what_a_disk_grows_by_reads_as_zeroes() {
        let below = file(&base(1 << 20));
        for (cluster, at) in [(512, 70 * 512), (65536, 3 * 65536 + 512)] {
            let made = file(&[]);
            let image = ImageFile::new(made.try_clone().unwrap());
            let builder = Driver::create_builder(image).size(at).cluster_size(cluster);
            builder.backing("below".into(), "raw".into()).create().unwrap();
            let named = || Named { backing: Some(below.try_clone().unwrap()), data: None };
            let mut image = Qcow2::open(made.try_clone().unwrap(), true, named()).unwrap();
            image.grow(1 << 20).unwrap();
            drop(image);
            let image = Qcow2::open(made, true, named()).unwrap();
            let (mut old, mut new) = (vec![0; at as usize], vec![1; (1 << 20) - at as usize]);
            image.read_exact_at(&mut old, 0).unwrap();
            image.read_exact_at(&mut new, at).unwrap();
            assert_eq!(old, base(at as usize), "{cluster}");
            assert!(new.iter().all(|byte| *byte == 0), "{cluster}");
        }
    }

    /// A large image has many clusters before the first free one. A pause does not wait until that is
    /// found.
    #[test]
    fn the_search_for_a_free_cluster_can_be_interrupted() {
        const BLOCKS: u64 = 200;
        let made = file(&[]);
        let image = ImageFile::new(made.try_clone().unwrap());
        Driver::create_builder(image).size(1 << 20).cluster_size(512).create().unwrap();
        let mut first = [0; 8];
        made.read_exact_at(&mut first, 48).unwrap();
        let table = u64::from_be_bytes(first);
        made.read_exact_at(&mut first, table).unwrap();
        // Each block counts 256 clusters, those of the new table and the new blocks among them.
        let (table, blocks) = (256 * 512, 260 * 512);
        let place = |number: u64| blocks + number * 512;
        let entries: Vec<u8> = (1..BLOCKS).flat_map(|number| place(number).to_be_bytes()).collect();
        made.write_all_at(&[&first[..], &entries].concat(), table).unwrap();
        for number in 1..BLOCKS {
            made.write_all_at(&[0, 1].repeat(256), place(number)).unwrap();
        }
        made.write_all_at(&table.to_be_bytes(), 48).unwrap();
        made.write_all_at(&4u32.to_be_bytes(), 56).unwrap();
        made.set_len(BLOCKS * 256 * 512).unwrap();
        let mut image = Qcow2::open(made.try_clone().unwrap(), true, Named::default()).unwrap();
        image.most_reads = 4;
        let guest = Guest::new();
        let mut interrupted = 0;
        let data = base(512);
        // The first block has free clusters.
        for at in (0..1 << 20).step_by(512) {
            loop {
                match guest.try_write(&mut image, at, &data) {
                    Ok(512) => break,
                    Err(error) if error.kind() == ErrorKind::Interrupted => interrupted += 1,
                    other => panic!("{other:?}"),
                }
            }
        }
        assert!(interrupted > 20, "{interrupted}");
        image.flush().unwrap();
        drop(image);
        let image = Qcow2::open(made, true, Named::default()).unwrap();
        assert_eq!(image.raised(), 0);
        let mut found = vec![0; 1 << 20];
        image.read_exact_at(&mut found, 0).unwrap();
        assert_eq!(found, data.repeat(2048));
    }

    /// A conversion that is interrupted leaves no image. A sync for each of its clusters would take
    /// minutes.
    #[test]
    fn a_new_image_is_synced_when_it_is_flushed() {
        let made = file(&[]);
        let mut image = Qcow2::create(made.try_clone().unwrap(), 64 << 20).unwrap();
        for at in 0..64 {
            image.write_all_at(&[at as u8 + 1; 65536], at << 20).unwrap();
        }
        let syncs = |image: &Qcow2| {
            image.trace.lock().unwrap().iter().filter(|act| matches!(act, power::Act::Sync(_))).count()
        };
        assert_eq!(syncs(&image), 0);
        image.flush().unwrap();
        assert_eq!(syncs(&image), 1);
        drop(image);
        let image = Qcow2::open(made, true, Named::default()).unwrap();
        assert_eq!(image.raised(), 0);
        for at in 0..64 {
            let mut bytes = [0; 65536];
            image.read_exact_at(&mut bytes, at << 20).unwrap();
            assert_eq!(bytes, [at as u8 + 1; 65536]);
        }
    }

    /// imago flushes an image when it is dropped.
    #[test]
    fn what_was_not_flushed_is_there_after_an_end_in_order() {
        let made = file(&[]);
        Qcow2::create(made.try_clone().unwrap(), 1 << 20).unwrap();
        let open = || {
            let file = made.try_clone().unwrap();
            Image::Qcow2(Box::new(Qcow2::open(file, true, Named::default()).unwrap()))
        };
        let (guest, data, mut image) = (Guest::new(), base(3 * 512), open());
        guest.write(&mut image, 70_000, &data);
        drop(image);
        assert_eq!(guest.read(&open(), 70_000, data.len()), data);
    }
}
