//! The directory of a snapshot for writers: adds or merges points. Each operation takes effect
//! completely or not at all.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::manifest::{self, Manifest, Point};
use super::source::{self, MAX_POINTS};
use super::{Error, Files};
use vellum_sys::open::{self, Kind};
use vellum_sys::{file, random};

/// Whether this is a valid name of a disk. It becomes part of a file's name.
fn is_name(name: &str) -> bool {
    let number = name.strip_prefix("disk").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Whether a writer that died before its first point was listed may have left this entry.
fn is_left_of_the_first(entry: &fs::DirEntry) -> bool {
    let name = entry.file_name();
    let known = name.to_str().is_some_and(|name| match name.strip_suffix("-0") {
        Some(kind) => matches!(kind, "ram" | "map" | "state") || is_name(kind),
        None => name == new_list(),
    });
    known && entry.file_type().is_ok_and(|kind| kind.is_file())
}

/// The name of a manifest that is not in force yet.
fn new_list() -> String {
    format!(".{}.new", manifest::NAME)
}

/// A directory that is locked for adding a point.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    /// Holds the lock.
    here: File,
    manifest: Manifest,
    /// Whether the directory was created here. It is removed again unless a point is added.
    created: bool,
}

impl Store {
    /// Opens the directory `dir`, or creates it.
    ///
    /// # Errors
    /// It contains something other than a snapshot, or another process writes to it.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let file = dir.display().to_string();
        let created = match fs::DirBuilder::new().mode(0o700).create(dir) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(Error::io(&file, "making this directory")(error)),
        };
        let here = open::for_reading(dir, Kind::Directory).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => Error::Unfit { file: file.clone(), what: error.to_string() },
            _ => Error::io(&file, "opening it")(error),
        })?;
        let mut chain = [0; 16];
        random::fill(&mut chain).map_err(Error::io(&file, "its identity"))?;
        let manifest = Manifest::new(chain.iter().map(|byte| format!("{byte:02x}")).collect());
        let mut store = Self { dir: dir.to_owned(), here, manifest, created };
        if !file::lock_directory(&store.here).map_err(Error::io(&file, "locking it"))? {
            return Err(Error::Unfit { file, what: "another process writes a snapshot there".into() });
        }
        match source::open(dir, manifest::NAME) {
            Ok(found) => store.manifest = source::read_manifest(&found)?,
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                let mut all = fs::read_dir(dir).map_err(Error::io(&file, "reading it"))?;
                // Files of a writer that died before there was a manifest are removed below or
                // replaced.
                if let Some(other) = all.find(|entry| !entry.as_ref().is_ok_and(is_left_of_the_first)) {
                    let name = other.map(|entry| entry.file_name()).unwrap_or_default();
                    let what = format!("it holds no snapshot, and is not empty: there is {}", name.display());
                    return Err(Error::Unfit { file, what });
                }
            }
            Err(error) => return Err(error),
        }
        store.sweep();
        Ok(store)
    }

    /// Checks that another point can be added.
    ///
    /// # Errors
    /// The directory is full.
    pub fn check_room(&self) -> Result<(), Error> {
        if self.manifest.points.len() < MAX_POINTS {
            return Ok(());
        }
        let what = format!(
            "it has {MAX_POINTS} points, and no more are possible: merge some, or use another directory"
        );
        Err(Error::Unfit { file: self.dir.display().to_string(), what })
    }

    /// The identity of the directory.
    pub fn chain(&self) -> &str {
        &self.manifest.chain
    }

    /// When the newest point was taken, in nanoseconds since 1970. None without points.
    pub fn newest(&self) -> Option<u64> {
        self.manifest.points.last().map(|point| point.taken)
    }

    /// The number of the next point.
    pub fn next(&self) -> u32 {
        self.manifest.points.last().map_or(0, |point| point.number + 1)
    }

    /// Creates unnamed files for a point, and for `clones` clones of disks.
    ///
    /// # Errors
    /// The file system does not support unnamed files.
    pub fn unnamed(&self, clones: usize) -> Result<Files, Error> {
        let [ram, map, state] = [self.nameless()?, self.nameless()?, self.nameless()?];
        let clones = (0..clones).map(|_| self.nameless()).collect::<Result<_, _>>()?;
        Ok(Files { ram, map, state, clones })
    }

    pub(super) fn nameless(&self) -> Result<File, Error> {
        let what = "making a file of the snapshot";
        file::unnamed(&self.dir).map_err(Error::io(&self.dir.display().to_string(), what))
    }

    /// Adds `point`, whose files are written and on disk.
    ///
    /// # Errors
    /// If a file cannot be named, the directory is unchanged. If only the final sync of the
    /// directory fails, the point has been added but may not survive a crash.
    pub fn add(mut self, files: &Files, mut point: Point) -> Result<u32, Error> {
        let number = self.next();
        point.number = number;
        let named = [("ram", &files.ram), ("map", &files.map), ("state", &files.state)];
        if let Some(disk) = point.disks.iter().find(|disk| !is_name(&disk.name)) {
            let what = format!("{:?} is no disk's name", disk.name);
            return Err(Error::Unfit { file: manifest::NAME.into(), what });
        }
        let clones = point.disks.iter().map(|disk| disk.name.as_str()).zip(&files.clones);
        let named = named.into_iter().chain(clones);
        let named: Vec<_> = named.map(|(kind, file)| (format!("{kind}-{number}"), file)).collect();
        self.manifest.points.push(point);
        if let Err(error) = self.name_all(&named) {
            for (name, _) in &named {
                let _ = fs::remove_file(self.dir.join(name));
            }
            return Err(error);
        }
        // From here on the manifest lists the point, and its files stay whatever happens.
        self.created = false;
        self.here.sync_all().map_err(Error::io(manifest::NAME, "the directory"))?;
        Ok(number)
    }

    /// Replaces the points from `first` up to `merged` with `merged`, whose pages and map are
    /// written and on disk.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub fn replace(mut self, first: u32, merged: Point, ram: &File, map: &File) -> Result<(), Error> {
        let named =
            [("ram", ram), ("map", map)].map(|(kind, file)| (format!("{kind}-{}", merged.label()), file));
        self.manifest.points.retain(|point| !(first..=merged.number).contains(&point.number));
        let at = self.manifest.points.partition_point(|point| point.number < merged.number);
        self.manifest.points.insert(at, merged);
        if let Err(error) = self.name_all(&named) {
            for (name, _) in &named {
                let _ = fs::remove_file(self.dir.join(name));
            }
            return Err(error);
        }
        self.here.sync_all().map_err(Error::io(manifest::NAME, "the directory"))?;
        self.sweep();
        Ok(())
    }

    /// Removes files that the manifest does not list: those of a writer that died, and those merged
    /// into another point. Failures are ignored.
    fn sweep(&self) {
        let _ = fs::remove_file(self.dir.join(new_list()));
        let Ok(all) = fs::read_dir(&self.dir) else { return };
        let listed = |kind: &str, label: &str| {
            let mut points = self.manifest.points.iter();
            match kind {
                "ram" | "map" => points.any(|point| point.label() == label),
                "state" => points.any(|point| point.number.to_string() == label),
                // Another machine may use a clone as its disk by now.
                _ => true,
            }
        };
        for name in all.filter_map(|entry| entry.ok()?.file_name().into_string().ok()) {
            let Some((kind, label)) = name.split_once('-') else { continue };
            let is_label = label.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
            if is_label && !listed(kind, label) {
                let _ = fs::remove_file(self.dir.join(&name));
            }
        }
    }

    fn name_all(&self, named: &[(String, &File)]) -> Result<(), Error> {
        for (name, file) in named {
            self.name(file, name)?;
        }
        let list = self.nameless()?;
        let said = |what| Error::io(manifest::NAME, what);
        (&list).write_all(&self.manifest.bytes()).map_err(said("writing it"))?;
        list.sync_all().map_err(said("writing it"))?;
        let new = new_list();
        self.name(&list, &new)?;
        let renamed = fs::rename(self.dir.join(&new), self.dir.join(manifest::NAME));
        if renamed.is_err() {
            let _ = fs::remove_file(self.dir.join(&new));
        }
        renamed.map_err(said("renaming it"))
    }

    /// Names `file`. An existing file of that name is not listed, so a writer that died has left
    /// it, and it is removed.
    fn name(&self, file: &File, name: &str) -> Result<(), Error> {
        let path = self.dir.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::io(name, "removing what a writer left that died")(error))
            }
            _ => file::name(file, &path).map_err(Error::io(name, "naming it")),
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if self.created {
            // No point was added.
            let _ = fs::remove_dir(&self.dir);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_first_writer_left_that_died_is_no_obstacle_and_anything_else_is() {
        let dir = std::env::temp_dir().join(format!("vellum-store-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir(&dir).unwrap();
        let left = ["ram-0", "map-0", "state-0", ".manifest.json.new"];
        let there = || {
            let mut names: Vec<_> =
                fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        let fill = || left.iter().for_each(|name| fs::write(dir.join(name), "left").unwrap());
        for other in ["notes", "ram-1", "ram-0.1", "disk-0", "manifest.json.new"] {
            fill();
            fs::write(dir.join(other), "mine").unwrap();
            let before = there();
            let said = Store::open(&dir).unwrap_err().to_string();
            assert!(said.contains(&format!("is not empty: there is {other}")), "{said}");
            assert_eq!(there(), before);
            fs::remove_file(dir.join(other)).unwrap();
        }
        fs::create_dir(dir.join("disk0-0")).unwrap();
        assert!(Store::open(&dir).unwrap_err().to_string().contains("there is disk0-0"));
        fs::remove_dir(dir.join("disk0-0")).unwrap();
        // Another machine may use a clone as its disk by now.
        fs::write(dir.join("disk0-0"), "clone").unwrap();
        assert_eq!(Store::open(&dir).unwrap().next(), 0);
        assert_eq!(there(), ["disk0-0"]);
        fs::remove_dir_all(dir).unwrap();
    }
}
