//! The directory of a snapshot: points are opened, and added so that they are there whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::layer::sum;
use super::manifest::{self, Manifest, Point};
use super::{Error, Files, state};
use crate::payload::Section;
use crate::sys::{file, random};

/// The most points of one directory: each has files open while it is restored.
const MOST_POINTS: u32 = 300;

fn name_of(kind: &str, number: u32) -> String {
    format!("{kind}-{number}")
}

/// Whether a machine may call a device so: it becomes part of a file's name.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// A directory to which a point is being added. No other process can do that meanwhile.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    /// Holds the lock.
    here: File,
    manifest: Manifest,
    /// Whether it is to be removed again unless a point comes into it.
    created: bool,
}

impl Store {
    /// The directory `dir`, which is made where there is none.
    ///
    /// # Errors
    /// Where it holds something else than a snapshot, or somebody writes to it.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let file = dir.display().to_string();
        let created = match fs::DirBuilder::new().mode(0o700).create(dir) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(Error::io(&file, "making this directory")(error)),
        };
        let here = File::open(dir).map_err(Error::io(&file, "opening it"))?;
        let mut chain = [0; 16];
        random::fill(&mut chain).map_err(Error::io(&file, "its identity"))?;
        let manifest = Manifest::new(chain.iter().map(|byte| format!("{byte:02x}")).collect());
        let mut store = Self { dir: dir.to_owned(), here, manifest, created };
        if !file::lock_directory(&store.here).map_err(Error::io(&file, "locking it"))? {
            return Err(Error::Unfit { file, what: "somebody writes a snapshot there".into() });
        }
        match store.file(manifest::NAME) {
            Ok(found) => store.manifest = read_manifest(&found)?,
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                let mut all = fs::read_dir(dir).map_err(Error::io(&file, "reading it"))?;
                if all.next().is_some() {
                    let what = "it is not empty, and holds no snapshot".into();
                    return Err(Error::Unfit { file, what });
                }
            }
            Err(error) => return Err(error),
        }
        if store.manifest.points.len() as u32 >= MOST_POINTS {
            let what =
                format!("it has {MOST_POINTS} points, and no more are possible; use another directory");
            return Err(Error::Unfit { file, what });
        }
        Ok(store)
    }

    fn file(&self, name: &str) -> Result<File, Error> {
        open(&self.dir, name)
    }

    /// What tells it from any other.
    pub fn chain(&self) -> &str {
        &self.manifest.chain
    }

    /// The number of the point that comes next.
    pub fn next(&self) -> u32 {
        self.manifest.points.len() as u32
    }

    /// Files without a name for it, and for so many clones of disks.
    ///
    /// # Errors
    /// Where the file system has none.
    pub fn unnamed(&self, clones: usize) -> Result<Files, Error> {
        let [ram, map, state] = [self.nameless()?, self.nameless()?, self.nameless()?];
        let clones = (0..clones).map(|_| self.nameless()).collect::<Result<_, _>>()?;
        Ok(Files { ram, map, state, clones })
    }

    fn nameless(&self) -> Result<File, Error> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600).custom_flags(libc::O_TMPFILE);
        let what = "making a file without a name (O_TMPFILE), which this file system must have";
        options.open(&self.dir).map_err(Error::io(&self.dir.display().to_string(), what))
    }

    /// Adds `point`, whose files are written and on the disk.
    ///
    /// # Errors
    /// Where a file cannot be named, and the directory is as it was before then; or where the point is there, and the disk does not
    /// promise to keep it.
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
        let named: Vec<_> = named.map(|(kind, file)| (name_of(kind, number), file)).collect();
        self.manifest.points.push(point);
        if let Err(error) = self.name_all(&named) {
            for (name, _) in &named {
                let _ = fs::remove_file(self.dir.join(name));
            }
            return Err(error);
        }
        // The list has the point from here on, and its files stay whatever happens.
        self.created = false;
        self.here.sync_all().map_err(Error::io(manifest::NAME, "the directory"))?;
        Ok(number)
    }

    fn name_all(&self, named: &[(String, &File)]) -> Result<(), Error> {
        for (name, file) in named {
            self.name(file, name)?;
        }
        let list = self.nameless()?;
        let said = |what| Error::io(manifest::NAME, what);
        (&list).write_all(&self.manifest.bytes()).map_err(said("writing it"))?;
        list.sync_all().map_err(said("writing it"))?;
        let new = format!(".{}.new", manifest::NAME);
        self.name(&list, &new)?;
        let renamed = fs::rename(self.dir.join(&new), self.dir.join(manifest::NAME));
        if renamed.is_err() {
            let _ = fs::remove_file(self.dir.join(&new));
        }
        renamed.map_err(said("renaming it"))
    }

    /// Names `file`; what has that name is left of a writer that died, for the list does not have it.
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
            // Nothing came into it.
            let _ = fs::remove_dir(&self.dir);
        }
    }
}

/// Opens a regular file of the directory for reading.
fn open(dir: &Path, name: &str) -> Result<File, Error> {
    let mut options = OpenOptions::new();
    // A pipe would have this wait for ever.
    let opened = options.read(true).custom_flags(libc::O_NONBLOCK).open(dir.join(name));
    let file = opened.map_err(Error::io(&dir.join(name).display().to_string(), "opening it"))?;
    match file.metadata() {
        Ok(data) if data.is_file() => Ok(file),
        Ok(_) => Err(Error::Unfit { file: name.into(), what: "it is no regular file".into() }),
        Err(error) => Err(Error::io(name, "what it is")(error)),
    }
}

fn read_manifest(file: &File) -> Result<Manifest, Error> {
    let mut bytes = Vec::new();
    let read = file.take(manifest::MOST_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(Error::io(manifest::NAME, "reading it"))?;
    if bytes.len() as u64 > manifest::MOST_BYTES {
        let what = format!("it has more than {} bytes", manifest::MOST_BYTES);
        return Err(Error::Unfit { file: manifest::NAME.into(), what });
    }
    Manifest::parse(&bytes, manifest::NAME)
}

/// A directory whose files are open, and of which nothing has been read: what is in them is read by a process that is confined.
#[derive(Debug)]
pub struct Source {
    manifest: File,
    points: Vec<Files>,
}

/// A point that is to be restored.
#[derive(Debug)]
pub struct Chosen {
    /// What the machine is.
    pub machine: Value,
    /// Its state.
    pub sections: Vec<Section>,
    /// Its layers, the full one first, with what the list says of each.
    pub layers: Vec<(Point, Files)>,
}

impl Source {
    /// Opens the files in `dir`.
    ///
    /// # Errors
    /// Where it holds no snapshot.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let list = match open(dir, manifest::NAME) {
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                let what = format!("it holds no snapshot: there is no {}", manifest::NAME);
                return Err(Error::Unfit { file: dir.display().to_string(), what });
            }
            list => list?,
        };
        let mut points = Vec::new();
        for number in 0..MOST_POINTS {
            let ram = match open(dir, &name_of("ram", number)) {
                Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => break,
                ram => ram?,
            };
            let [map, state] = [open(dir, &name_of("map", number))?, open(dir, &name_of("state", number))?];
            points.push(Files { ram, map, state, clones: Vec::new() });
        }
        Ok(Self { manifest: list, points })
    }

    /// What the list says.
    ///
    /// # Errors
    /// Where it is damaged.
    pub fn manifest(&self) -> Result<Manifest, Error> {
        read_manifest(&self.manifest)
    }

    /// Point `number`, or the newest, with what the machine is. Its pages are not read.
    ///
    /// # Errors
    /// Where there is no such point, or a file of it is damaged.
    pub fn choose(self, number: Option<u32>) -> Result<Chosen, Error> {
        let manifest = self.manifest()?;
        let chain = manifest.chain(number)?.to_vec();
        let first = chain[0].number as usize;
        let mut layers = Vec::new();
        for (point, files) in chain.into_iter().zip(self.points.into_iter().skip(first)) {
            layers.push((point, files));
        }
        let missing = |number: u32| Error::Unfit {
            file: name_of("ram", number),
            what: "there is no such file, and the list has that point; it is damaged".into(),
        };
        let (point, files) = layers.last().ok_or_else(|| missing(first as u32))?;
        let wanted = number.unwrap_or(manifest.points.len() as u32 - 1);
        if point.number != wanted {
            return Err(missing(point.number + 1));
        }
        let name = name_of("state", point.number);
        let len = files.state.metadata().map_err(Error::io(&name, "its length"))?.len();
        if len != point.state_bytes || len > state::MOST_BYTES {
            let what = format!("it has {len} bytes, and the list says {}", point.state_bytes);
            return Err(Error::Damaged { file: name, offset: len, what });
        }
        let mut bytes = vec![0; len as usize];
        files.state.read_exact_at(&mut bytes, 0).map_err(Error::io(&name, "reading it"))?;
        let found = sum(&bytes);
        if found != point.state_crc {
            let what = format!("its sum is {found:#010x}, not {:#010x}", point.state_crc);
            return Err(Error::Damaged { file: name, offset: 0, what });
        }
        let (machine, sections) = state::parse(&bytes, &name)?;
        Ok(Chosen { machine, sections, layers })
    }
}
