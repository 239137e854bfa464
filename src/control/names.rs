//! Where the control socket of a machine with a name is: in the user's runtime directory.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::fault::{Blame, Fault, Field};
use crate::sys::identity::effective;

/// Why a name leads nowhere.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be part of a path.
    #[error(
        "`{0}` is no machine's name: 1 to 64 letters, digits, `-`, `_` and `.`, the first of them no `.`"
    )]
    Name(String),
    /// The directory cannot be made.
    #[error("{path}: {source}; set XDG_RUNTIME_DIR to a directory of this user's")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
    /// It is somebody else's.
    #[error("{0} belongs to another user, who could pass for your machines; set XDG_RUNTIME_DIR")]
    Foreign(PathBuf),
}

impl Fault for Error {
    fn blame(&self) -> Blame {
        Blame::user(Field::Name)
    }
}

/// The directory, of mode 0700, made if it is not there.
pub fn directory() -> Result<PathBuf, Error> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let path = match runtime {
        Some(runtime) => runtime.join("vellum"),
        None if effective().0 == 0 => "/run/vellum".into(),
        None => PathBuf::from(format!("/tmp/vellum-{}", effective().0)),
    };
    let error = |source| Error::Directory { path: path.clone(), source };
    DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(error)?;
    // Anybody can make a directory in /tmp beforehand.
    let metadata = std::fs::symlink_metadata(&path).map_err(error)?;
    if metadata.uid() != effective().0 || !metadata.is_dir() {
        return Err(Error::Foreign(path));
    }
    Ok(path)
}

/// The socket of the machine `name`.
pub fn socket(name: &str) -> Result<PathBuf, Error> {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.bytes().all(sound) {
        return Err(Error::Name(name.into()));
    }
    Ok(directory()?.join(format!("{name}.sock")))
}

/// What the user typed: a path if it has a slash, else a name.
pub fn find(target: &str) -> Result<PathBuf, Error> {
    if target.contains('/') { Ok(target.into()) } else { socket(target) }
}

/// All names with a socket, sorted.
pub fn all() -> Result<Vec<(String, PathBuf)>, Error> {
    let path = directory()?;
    let entries = std::fs::read_dir(&path).map_err(|source| Error::Directory { path, source })?;
    let named = |path: PathBuf| Some((Path::new(path.file_name()?).file_stem()?.to_str()?.to_owned(), path));
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut names: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|end| end == "sock")).filter_map(named).collect();
    names.sort();
    Ok(names)
}
