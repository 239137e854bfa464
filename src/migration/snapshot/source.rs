//! The directory of a snapshot for readers: opens its files and chooses a point.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use serde_json::Value;

use super::layer::sum;
use super::manifest::{self, Manifest, Point};
use super::{Error, Files, state, working_set};
use vellum_machine::Section;
use vellum_sys::file::{Lock, lock};
use vellum_sys::open::{self, Kind};

/// The maximum number of points in one directory. Each has open files during a restore.
pub(crate) const MAX_POINTS: usize = 300;

/// Opens a regular file of the directory for reading. Does not follow links: with a link, the
/// directory's author could choose any of the host's files as guest memory.
pub(super) fn open(dir: &Path, name: &str) -> Result<File, Error> {
    let path = dir.join(name);
    open::for_reading(&path, Kind::Unlinked).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput => {
            Error::Unfit { file: path.display().to_string(), what: error.to_string() }
        }
        _ => Error::io(&path.display().to_string(), "opening it")(error),
    })
}

pub(super) fn read_manifest(file: &File) -> Result<Manifest, Error> {
    let mut bytes = Vec::new();
    let read = file.take(manifest::MAX_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(Error::io(manifest::NAME, "reading it"))?;
    if bytes.len() as u64 > manifest::MAX_BYTES {
        let what = format!("it has more than {} bytes", manifest::MAX_BYTES);
        return Err(Error::Unfit { file: manifest::NAME.into(), what });
    }
    Manifest::parse(&bytes, manifest::NAME)
}

/// A directory whose files are open but unread. A confined process reads them. Their locks keep
/// others from merging the points meanwhile.
#[derive(Debug)]
pub struct Source {
    manifest: File,
    /// The points by the suffix of their files' names.
    points: HashMap<String, Files>,
    /// The pages that a restore wanted first.
    working_set: Option<File>,
}

/// A point to be restored.
#[derive(Debug)]
pub struct Chosen {
    /// The machine's configuration.
    pub machine: Value,
    /// Its state.
    pub sections: Vec<Section>,
    /// Its layers with their entries in the manifest, the full one first.
    pub layers: Vec<(Point, Files)>,
    /// The pages that a restore wanted first, if they were recorded.
    pub working_set: Option<File>,
}

fn is_missing(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
}

impl Source {
    /// Opens the files in `dir`.
    ///
    /// # Errors
    /// The directory does not contain a snapshot.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        loop {
            let list = match open(dir, manifest::NAME) {
                Err(error) if is_missing(&error) => {
                    let what = format!("it holds no snapshot: there is no {}", manifest::NAME);
                    return Err(Error::Unfit { file: dir.display().to_string(), what });
                }
                list => list?,
            };
            let points = Self::open_points(dir)?;
            // After a concurrent merge, some of these files may be old, and some may be missing.
            let same = open(dir, manifest::NAME).and_then(|again| is_same(&again, &list))?;
            if same {
                let working_set = match open(dir, working_set::NAME) {
                    Err(error) if is_missing(&error) => None,
                    file => Some(file?),
                };
                return Ok(Self { manifest: list, points, working_set });
            }
        }
    }

    fn open_points(dir: &Path) -> Result<HashMap<String, Files>, Error> {
        let entries = fs::read_dir(dir).map_err(Error::io(&dir.display().to_string(), "reading it"))?;
        let mut points = HashMap::new();
        for name in entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()) {
            let Some(label) = name.strip_prefix("ram-") else { continue };
            let number = label.split('.').next().unwrap_or(label);
            let open_all = || -> Result<Files, Error> {
                let [ram, map] = [open(dir, &name)?, open(dir, &format!("map-{label}"))?];
                let state = open(dir, &format!("state-{number}"))?;
                Ok(Files { ram, map, state, clones: Vec::new() })
            };
            match open_all() {
                Ok(files) => {
                    // The lock says that the file is in use. Without it the file can still be read.
                    let _ = lock(&files.ram, Lock::Shared);
                    points.insert(label.to_owned(), files);
                }
                // Left by a writer that died, or missing. Choosing this point reports the error.
                Err(error) if is_missing(&error) => {}
                Err(error) => return Err(error),
            }
            if points.len() > 2 * MAX_POINTS {
                let what = format!("it has more points than {MAX_POINTS}, the most that are possible");
                return Err(Error::Unfit { file: dir.display().to_string(), what });
            }
        }
        Ok(points)
    }

    /// Whether the working set of a restore was recorded.
    pub fn has_working_set(&self) -> bool {
        self.working_set.is_some()
    }

    /// Reads the manifest.
    ///
    /// # Errors
    /// It is damaged.
    pub fn manifest(&self) -> Result<Manifest, Error> {
        read_manifest(&self.manifest)
    }

    /// Point `number`, or the newest, with the machine's configuration. Does not read its pages.
    ///
    /// # Errors
    /// There is no such point, or one of its files is damaged.
    pub fn choose(mut self, number: Option<u32>) -> Result<Chosen, Error> {
        let manifest = self.manifest()?;
        let mut layers = Vec::new();
        for point in manifest.chain(number)? {
            let files = self.points.remove(&point.label()).ok_or_else(|| Error::Unfit {
                file: format!("ram-{}", point.label()),
                what: format!(
                    "there is no such file, or none of map-{} and state-{}, and the list has that point; it is damaged",
                    point.label(),
                    point.number
                ),
            })?;
            layers.push((point.clone(), files));
        }
        let (point, files) = layers.last().expect("a chain has a point");
        let (machine, sections) = read_state(point, files)?;
        Ok(Chosen { machine, sections, layers, working_set: self.working_set })
    }
}

/// Reads what the machine of `point` is, and its state.
///
/// # Errors
/// Where that is not what was written.
pub(crate) fn read_state(point: &Point, files: &Files) -> Result<(Value, Vec<Section>), Error> {
    let name = format!("state-{}", point.number);
    let len = files.state.metadata().map_err(Error::io(&name, "its length"))?.len();
    if len != point.state_bytes || len > state::MAX_BYTES {
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
    state::parse(&bytes, &name)
}

fn is_same(one: &File, other: &File) -> Result<bool, Error> {
    let of = |file: &File| file.metadata().map(|data| (data.dev(), data.ino()));
    of(one).and_then(|one| Ok(one == of(other)?)).map_err(Error::io(manifest::NAME, "what it is"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, Mode, mkfifoat};

    use super::*;

    const NAMES: [&str; 5] = [manifest::NAME, "ram-0", "map-0", "state-0", working_set::NAME];

    /// The author of the directory may have put anything there. Only its own regular files may
    /// become a machine's memory.
    #[test]
    fn links_and_what_is_no_regular_file_are_refused() {
        let root = std::env::temp_dir().join(format!("vellum-source-{}", std::process::id()));
        let dir = root.join("snapshot");
        fs::create_dir_all(&dir).unwrap();
        fs::write(root.join("secret"), "secret").unwrap();
        let fill = || NAMES.iter().for_each(|name| fs::write(dir.join(name), "{}").unwrap());
        fill();
        Source::open(&dir).unwrap();
        for name in NAMES {
            let place = dir.join(name);
            let makes: [(&str, &dyn Fn()); 5] = [
                ("a symbolic link", &|| symlink(root.join("secret"), &place).unwrap()),
                ("a symbolic link", &|| symlink("other", &place).unwrap()),
                ("a symbolic link", &|| symlink("nothing", &place).unwrap()),
                ("a directory", &|| fs::create_dir(&place).unwrap()),
                // Without a program: until it is executed, it has the locks of the directories of other tests.
                ("a FIFO", &|| mkfifoat(CWD, &place, Mode::RUSR | Mode::WUSR).unwrap()),
            ];
            fs::write(dir.join("other"), "{}").unwrap();
            for (what, make) in makes {
                fs::remove_file(&place).unwrap();
                make();
                let error = Source::open(&dir).unwrap_err().to_string();
                assert!(error.contains(&format!("{name}: it is {what}")), "{name}: {error}");
                let _ = fs::remove_file(&place);
                let _ = fs::remove_dir(&place);
                fill();
            }
        }
        // The directory itself may be a link, because the user chose it.
        symlink("snapshot", root.join("link")).unwrap();
        Source::open(&root.join("link")).unwrap();
        fs::remove_dir_all(&root).unwrap();
    }
}
