//! The cache of fetched and built files: `$XDG_CACHE_HOME/vellum`, or `~/.cache/vellum`.
//!
//! An entry appears whole or not at all: it is made in a scratch directory and renamed. Its maker
//! holds a lock, so two laboratories on one machine do not make an entry twice. The next maker
//! removes what a killed one left.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// The cache's root.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

/// A held lock; released when dropped or when the process ends, however it ends.
#[derive(Debug)]
pub struct Lock(#[allow(dead_code, reason = "held for its lifetime")] File);

impl Cache {
    /// The user's cache, created if need be.
    pub fn open() -> Result<Self> {
        let base = match (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
            (Some(dir), _) if !dir.is_empty() => PathBuf::from(dir),
            (_, Some(home)) => PathBuf::from(home).join(".cache"),
            _ => return Err(Error::Usage("neither XDG_CACHE_HOME nor HOME is set: set one".into())),
        };
        Self::at(base.join("vellum"))
    }

    /// A cache at `root`.
    pub fn at(root: PathBuf) -> Result<Self> {
        fs::create_dir_all(&root).map_err(Error::file("create", &root))?;
        Ok(Self { root })
    }

    /// Where `name` is or would be.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// A directory that is kept but is not an entry. Its content may be incomplete at any time and
    /// records that itself.
    pub fn dir(&self, name: &str) -> Result<PathBuf> {
        let dir = self.path(name);
        fs::create_dir_all(&dir).map_err(Error::file("create", &dir))?;
        Ok(dir)
    }

    /// Waits for the lock called `name`.
    pub fn lock(&self, name: &str) -> Result<Lock> {
        let path = self.dir("locks")?.join(name.replace('/', ","));
        let file = File::create(&path).map_err(Error::file("create", &path))?;
        // Children inherit the lock, because a make may outlive a killed laboratory for a moment
        // and still write. SAFETY: the descriptor is open, and fcntl takes no pointer here.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFD, 0) };
        if file.try_lock().is_err() {
            eprintln!("lab: another laboratory works on {name}; waiting for it");
            file.lock().map_err(Error::file("lock", &path))?;
        }
        Ok(Lock(file))
    }

    /// Returns the entry `name`. If it does not exist, `make` makes it in an empty directory.
    pub fn entry(&self, name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let path = self.path(name);
        if path.exists() {
            return Ok(path);
        }
        let _lock = self.lock(name)?;
        if path.exists() {
            return Ok(path);
        }
        let scratch = self.dir("scratch")?.join(name.replace('/', ","));
        match fs::remove_dir_all(&scratch) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::file("remove", &scratch)(error));
            }
            _ => (),
        }
        fs::create_dir_all(&scratch).map_err(Error::file("create", &scratch))?;
        let made = make(&scratch);
        if let Err(error) = made {
            // A half-made entry is useless. If it cannot be removed now, the next maker removes it.
            let _ = fs::remove_dir_all(&scratch);
            return Err(error);
        }
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(Error::file("create", parent))?;
        }
        fs::rename(&scratch, &path).map_err(Error::file("move into place", &path))?;
        Ok(path)
    }

    /// Refuses to start work that the disk has no room for.
    pub fn need_mib(&self, need_mib: u64) -> Result<()> {
        let path = CString::new(self.root.as_os_str().as_bytes()).expect("paths hold no NUL");
        // SAFETY: statvfs is plain data, for which all zeroes is a value.
        let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: `path` is NUL-terminated and `stat` is writable; both outlive the call.
        if unsafe { libc::statvfs(path.as_ptr(), &mut stat) } != 0 {
            return Err(Error::file("examine", &self.root)(std::io::Error::last_os_error()));
        }
        let free_mib = (stat.f_bavail * stat.f_frsize) >> 20;
        if free_mib < need_mib {
            return Err(Error::DiskFull { path: self.root.clone(), free_mib, need_mib });
        }
        Ok(())
    }
}

/// The value that `file` keeps. Without one, `make` makes it, and `file` keeps it from now on. A
/// partial file does not parse, so it counts as missing.
pub(crate) fn recorded<T: Serialize + DeserializeOwned>(
    file: &Path,
    make: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if let Some(value) = fs::read(file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
        return Ok(value);
    }
    let value = make()?;
    let json = serde_json::to_vec(&value).expect("what is recorded is plain data");
    fs::write(file, json).map_err(Error::file("write", file))?;
    Ok(value)
}

/// The lines of `text` that are code, for a key of what the text makes. A line that is only a
/// comment makes nothing. The language follows from the name of the `file`: C or Rust, else one
/// whose comments begin with `#` and a blank.
pub fn code(file: &Path, text: &[u8]) -> Vec<u8> {
    let slashes = ["c", "h", "rs"].iter().any(|known| file.extension().is_some_and(|own| own == *known));
    let (mut code, mut inside) = (Vec::with_capacity(text.len()), false);
    for line in text.split(|byte| *byte == b'\n') {
        let words = line.trim_ascii();
        let comment = if slashes && (inside || words.starts_with(b"/*")) {
            let end = words.windows(2).position(|both| both == b"*/");
            inside = end.is_none();
            end.is_none_or(|end| end + 2 == words.len())
        } else if slashes {
            words.starts_with(b"//")
        } else {
            words == b"#" || words.starts_with(b"# ")
        };
        if !comment && !words.is_empty() {
            code.extend_from_slice(line);
            code.push(b'\n');
        }
    }
    code
}

/// A short name for content: FNV-1a, 64 bits. Only an adversary could cause a collision, and the
/// cache is private.
pub fn digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut eat = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    for part in parts {
        part.iter().for_each(|&byte| eat(byte));
        // Lengths are hashed too, so that ["ab", "c"] is not ["a", "bc"].
        part.len().to_le_bytes().into_iter().for_each(&mut eat);
    }
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn temporary(name: &str) -> Cache {
        let dir = std::env::temp_dir().join(format!("vellum-lab-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        Cache::at(dir).unwrap()
    }

    #[test]
    fn an_entry_is_made_once_and_whole() {
        let cache = temporary("entry");
        let failed = cache.entry("a/b", |dir| {
            fs::write(dir.join("half"), "x").unwrap();
            Err(Error::Usage("planted".into()))
        });
        assert!(failed.is_err() && !cache.path("a/b").exists());
        let made = cache.entry("a/b", |dir| {
            assert!(!dir.join("half").exists(), "left over from the failure");
            fs::write(dir.join("whole"), "y").map_err(Error::file("write", dir))
        });
        assert!(made.unwrap().join("whole").exists());
        cache.entry("a/b", |_| panic!("made twice")).unwrap();
        fs::remove_dir_all(cache.path("")).unwrap();
    }

    #[test]
    fn a_full_disk_is_named_before_the_work_begins() {
        let cache = temporary("disk");
        cache.need_mib(0).unwrap();
        let error = cache.need_mib(u64::MAX).unwrap_err().to_string();
        assert!(error.contains("MiB free") && error.contains("XDG_CACHE_HOME"), "{error}");
        fs::remove_dir_all(cache.path("")).unwrap();
    }

    #[test]
    fn a_value_is_made_once_and_again_after_half_a_write() {
        let cache = temporary("recorded");
        let file = cache.path("value");
        assert!(recorded(&file, || Err::<u32, _>(Error::Usage("planted".into()))).is_err());
        assert_eq!(recorded(&file, || Ok(vec![1, 2])).unwrap(), [1, 2]);
        assert_eq!(recorded(&file, || -> Result<Vec<i32>> { panic!("made twice") }).unwrap(), [1, 2]);
        fs::write(&file, "[1,").unwrap();
        assert_eq!(recorded(&file, || Ok(vec![3])).unwrap(), [3]);
        fs::remove_dir_all(cache.path("")).unwrap();
    }

    #[test]
    fn a_comment_changes_no_key_and_code_does() {
        let of = |name: &str, text: &str| String::from_utf8(code(Path::new(name), text.as_bytes())).unwrap();
        let rust = "//! What it is.\n\nconst A: u8 = 1; // one\n    /// More.\n    fn f() {}\n";
        assert_eq!(of("a.rs", rust), "const A: u8 = 1; // one\n    fn f() {}\n");
        let c = "/* One. */\n#include <a.h>\n/*\n * Two\n *a = 0;\n */\n/* x */ int b;\n\t*b = 1;\n";
        assert_eq!(of("a.c", c), "#include <a.h>\n/* x */ int b;\n\t*b = 1;\n");
        let shell = "#!/bin/sh\n# Why.\n#\ncat <<end\n#define A\nend\n";
        assert_eq!(of("build", shell), "#!/bin/sh\ncat <<end\n#define A\nend\n");
    }

    #[test]
    fn digests_tell_boundaries_apart() {
        assert_ne!(digest([&b"ab"[..], b"c"]), digest([&b"a"[..], b"bc"]));
    }
}
