//! Where the control socket of a machine with a name is: in the user's runtime directory.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::identity::effective;

/// Why a name leads nowhere.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be part of a path.
    #[error(
        "`{0}` is no machine's name: 1 to 64 letters, digits, `-`, `_` and `.`, the first of them no `.` and no `-`"
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
    /// Others may write to it.
    #[error("{path} has mode {mode:04o}: others could pass for your machines there; chmod 700 {path}")]
    Open {
        /// The directory.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::user(Field::Name)
    }
}

/// Where the directory is. Nothing is made, and nothing is said of whether it is there.
///
/// XDG_RUNTIME_DIR counts where it is this user's, or is not there yet: root with another user's environment (sudo) would lock that user
/// out with what it makes there, and could be shown machines that are none of root's.
fn place() -> PathBuf {
    let (own, _) = effective();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let others = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|metadata| metadata.uid() != own);
    match runtime.filter(|path| !others(path)) {
        Some(runtime) => runtime.join("vellum"),
        None if own == 0 => "/run/vellum".into(),
        None => PathBuf::from(format!("/tmp/vellum-{own}")),
    }
}

/// Whether nobody else can put a socket into the directory `path`; false where it is not there.
fn is_private(path: &Path) -> Result<bool, Error> {
    // Anybody can make a directory in /tmp beforehand.
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(source) => return Err(Error::Directory { path: path.into(), source }),
    };
    if metadata.uid() != effective().0 || !metadata.is_dir() {
        return Err(Error::Foreign(path.into()));
    }
    match metadata.mode() & 0o7777 {
        mode if mode & 0o022 != 0 => Err(Error::Open { path: path.into(), mode }),
        _ => Ok(true),
    }
}

/// The directory, of mode 0700, made if it is not there: for those who put a socket there.
///
/// # Errors
/// Where it cannot be made, or others could put sockets there.
pub fn make_directory() -> Result<PathBuf, Error> {
    let path = place();
    if !is_private(&path)? {
        let error = |source| Error::Directory { path: path.clone(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(error)?;
        is_private(&path)?;
    }
    Ok(path)
}

fn check(name: &str) -> Result<(), Error> {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > 64 || name.starts_with(['.', '-']) || !name.bytes().all(sound) {
        return Err(Error::Name(name.into()));
    }
    Ok(())
}

/// The socket that the machine `name` is to have; its directory is made.
///
/// # Errors
/// As [`make_directory`], and where it is no name.
pub fn own_socket(name: &str) -> Result<PathBuf, Error> {
    check(name)?;
    Ok(make_directory()?.join(format!("{name}.sock")))
}

/// The socket of the machine `name`, whether there is one or not.
///
/// # Errors
/// Where others could have put it there, and where it is no name.
pub fn socket(name: &str) -> Result<PathBuf, Error> {
    check(name)?;
    let path = place();
    is_private(&path)?;
    Ok(path.join(format!("{name}.sock")))
}

/// What the user typed: a path if it has a slash, else a name.
pub fn find(target: &str) -> Result<PathBuf, Error> {
    if target.contains('/') { Ok(target.into()) } else { socket(target) }
}

/// All names with a socket, sorted.
pub fn all() -> Result<Vec<(String, PathBuf)>, Error> {
    let path = place();
    if !is_private(&path)? {
        return Ok(Vec::new());
    }
    let entries = std::fs::read_dir(&path).map_err(|source| Error::Directory { path, source })?;
    let named = |path: PathBuf| Some((Path::new(path.file_name()?).file_stem()?.to_str()?.to_owned(), path));
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut names: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|end| end == "sock")).filter_map(named).collect();
    names.sort();
    Ok(names)
}
