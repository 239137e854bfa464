//! The disks of a saved machine. They are not part of a point. The point names them and records
//! what detects later changes.
//!
//! Disks are flushed while the machine is paused. If the host fails later, they have what the guest
//! believes to be written. If the file system can share blocks between files, they can be cloned at
//! that moment without a copy.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use vellum_control::Disk;
use vellum_machine as machine;
use vellum_sys::clock;
use vellum_sys::file::{begin_write_back, clone_into, copy_into};

/// The longest tick of the clock that file systems use for timestamps (CONFIG_HZ=100).
const TICK: Duration = Duration::from_millis(10);

/// Detects changes of a disk: its size in bytes, and the time of its last write in nanoseconds
/// since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    bytes: u64,
    changed: Option<i64>,
}

impl Mark {
    fn of(mut file: &File) -> io::Result<Self> {
        let data = file.metadata()?;
        // Unlike the metadata, this is right for block devices too. No one else uses the file's
        // position.
        let bytes = file.seek(SeekFrom::End(0))?;
        let time = || data.mtime().saturating_mul(1_000_000_000).saturating_add(data.mtime_nsec());
        Ok(Self { bytes, changed: data.is_file().then(time) })
    }

    /// Waits until a write would get another timestamp.
    fn settle(self) {
        let Some(changed) = self.changed.and_then(|changed| u64::try_from(changed).ok()) else { return };
        let since = clock::realtime().checked_sub(Duration::from_nanos(changed));
        // A time in the future comes from another host, as on a network file system.
        if let Some(left) = since.and_then(|since| TICK.checked_sub(since)) {
            thread::sleep(left);
        }
    }
}

fn said<'a>(disk: &'a machine::Disk, what: &'static str) -> impl Fn(io::Error) -> String + 'a {
    move |error| format!("{} ({}): {what}: {error}", disk.name, disk.image.path.display())
}

/// Flushes the guest's writes to the medium. An overlay that ends with its machine need not survive
/// the host.
///
/// # Errors
/// A disk cannot be flushed. The error names it.
pub fn flush(disks: &[machine::Disk]) -> Result<(), String> {
    let mut written = disks.iter().filter(|disk| lasts(disk));
    written.try_for_each(|disk| disk.image.sync().map_err(said(disk, "flushing it")))
}

/// Starts to write back what [`flush`] would flush, and does not wait for it.
pub(crate) fn begin_flush(disks: &[machine::Disk]) {
    for disk in disks.iter().filter(|disk| lasts(disk)) {
        begin_write_back(&disk.image.file, 0, 0);
    }
}

fn lasts(disk: &machine::Disk) -> bool {
    !disk.image.readonly && disk.image.overlay.is_none()
}

/// Clones the disks into `clones`, which has one file for each disk, or none.
///
/// # Errors
/// A disk cannot be cloned. The error names it.
pub fn clone(disks: &[machine::Disk], clones: &[File]) -> Result<(), String> {
    let what = "it cannot be cloned into the snapshot, which takes a file system that both are on and whose files share blocks, as those \
                of Btrfs and XFS do";
    disks
        .iter()
        .zip(clones)
        .try_for_each(|(disk, to)| clone_into(&disk.image.file, to).map_err(said(disk, what)))
}

/// Flushes the disks, clones them if there are clones, and describes them. Their machine must be
/// paused.
///
/// # Errors
/// A disk fails. The error names it.
pub fn saved(disks: &[machine::Disk], clones: &[File]) -> Result<Vec<Disk>, String> {
    flush(disks)?;
    clone(disks, clones)?;
    let mut all = Vec::with_capacity(disks.len());
    for (at, disk) in disks.iter().enumerate() {
        let cloned = |file: &File| -> io::Result<Mark> {
            file.sync_all()?;
            Mark::of(file)
        };
        let mark = Mark::of(&disk.image.file).map_err(said(disk, "what it is"))?;
        let clone = clones.get(at).map(cloned).transpose().map_err(said(disk, "its clone"))?;
        // Nobody else writes to an overlay that ends with its machine.
        if disk.image.overlay.is_none() {
            mark.settle();
        }
        all.push(Disk {
            name: disk.name.clone(),
            path: disk.image.path.display().to_string(),
            bytes: mark.bytes,
            changed: mark.changed,
            clone_changed: clone.and_then(|mark| mark.changed),
        });
    }
    Ok(all)
}

/// The same for a fork: `copies` has an empty file for each disk with an overlay that a fork copies.
///
/// # Errors
/// A disk fails. The error names it.
pub fn forked(disks: &[machine::Disk], copies: &[File]) -> Result<Vec<Disk>, String> {
    let mut all = saved(disks, &[])?;
    let overlays = disks.iter().zip(&mut all).filter_map(|(disk, saved)| {
        disk.image.overlay.as_ref().map(|is_whole| (disk, is_whole.load(Ordering::Acquire), saved))
    });
    for ((disk, is_whole, saved), copy) in overlays.zip(copies) {
        if !is_whole {
            return Err(said(disk, "its overlay")(io::Error::other("its map cannot be written")));
        }
        let mark = copy_into(&disk.image.file, copy).and_then(|()| Mark::of(copy));
        saved.clone_changed = mark.map_err(said(disk, "copying its overlay"))?.changed;
    }
    Ok(all)
}

/// How the disks in `here`, of a machine that is to continue, differ from their saved description.
/// One line for all of them, or None.
///
/// # Errors
/// A disk cannot be examined. The error names it.
pub fn differences(then: &[Disk], here: &[machine::Disk]) -> Result<Option<String>, String> {
    let mut all = Vec::new();
    for disk in here {
        let Some(was) = then.iter().find(|was| was.name == disk.name) else { continue };
        let is = Mark::of(&disk.image.file).map_err(said(disk, "what it is"))?;
        let known = [was.changed, was.clone_changed];
        // A block device has no time of the last write.
        let unchanged = is.changed.is_none() || known.contains(&is.changed) || was.changed.is_none();
        let what = match is.bytes == was.bytes {
            true if unchanged => continue,
            true => "has been written to since the machine was saved, or is another".to_owned(),
            false => format!("has {} bytes, and had {} when the machine was saved", is.bytes, was.bytes),
        };
        all.push(format!("{} ({}) {what}", disk.name, disk.image.path.display()));
    }
    Ok((!all.is_empty()).then(|| all.join("; ")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    use super::*;
    use vellum_disk::DiskImage;

    fn disk(name: &str) -> machine::Disk {
        let path = std::env::temp_dir().join(format!("{}-{name}", std::process::id()));
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        file.set_len(4096).unwrap();
        std::fs::remove_file(&path).unwrap();
        let image = DiskImage { file, path, readonly: false, overlay: None, medium: Arc::default() };
        machine::Disk { name: "disk0".into(), image: Arc::new(image) }
    }

    #[test]
    fn a_disk_that_is_written_to_or_longer_differs() {
        let disks = [disk("differs.img")];
        disks[0].image.file.write_all_at(&[1], 0).unwrap();
        let then = saved(&disks, &[]).unwrap();
        assert_eq!((then[0].bytes, then[0].changed.is_some()), (4096, true));
        assert_eq!(differences(&then, &disks).unwrap(), None);
        // At once: the same clock tick would hide the write.
        disks[0].image.file.write_all_at(&[2], 0).unwrap();
        let said = differences(&then, &disks).unwrap().unwrap();
        assert!(said.starts_with("disk0 (/") && said.contains("written to since"), "{said}");
        disks[0].image.file.set_len(8192).unwrap();
        let said = differences(&then, &disks).unwrap().unwrap();
        assert!(said.contains("has 8192 bytes, and had 4096"), "{said}");
    }

    #[test]
    fn what_cannot_be_cloned_is_named() {
        let disks = [disk("uncloned.img")];
        let elsewhere = vellum_sys::mmap::memfd(c"clone", 0, None).unwrap();
        let said = saved(&disks, &[elsewhere]).unwrap_err();
        assert!(said.starts_with("disk0 (/") && said.contains("cannot be cloned"), "{said}");
    }
}
