//! The control sockets of named machines, in the user's runtime directory.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::identity::effective;

/// Why a name has no socket.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not a valid name.
    #[error(
        "`{0}` is not a valid machine name: use 1 to 64 letters, digits, `-`, `_` and `.`; the first must not be `.` or `-`"
    )]
    Name(String),
    /// The directory cannot be created.
    #[error("{path}: {source}; set XDG_RUNTIME_DIR to a directory that you own")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The directory belongs to another user.
    #[error("{0} belongs to another user, who could impersonate your machines; set XDG_RUNTIME_DIR")]
    Foreign(PathBuf),
    /// The environment names no directory that outlives a boot.
    #[error("neither XDG_DATA_HOME nor HOME is set, and kept machines are below one of them")]
    NoHome,
    /// Other users can write to the directory.
    #[error("{path} has mode {mode:04o}: other users could impersonate your machines; chmod 700 {path}")]
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

/// The directory's path. It may not exist.
///
/// XDG_RUNTIME_DIR is used only if this user owns it or it does not exist yet. With sudo, root may
/// have another user's environment: root would create files there that lock that user out, and
/// could see that user's machines as its own.
fn place() -> PathBuf {
    place_of(effective().0, std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from))
}

/// The directory of root's logins (pam_systemd(8)). It ends with the last of them, and root's services
/// do not have it.
const LOGINS_OF_ROOT: &str = "/run/user/0";

fn place_of(own: u32, runtime: Option<PathBuf>) -> PathBuf {
    let others = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|metadata| metadata.uid() != own);
    let is_of_login = |path: &Path| own == 0 && path == Path::new(LOGINS_OF_ROOT);
    match runtime.filter(|path| path.is_absolute() && !is_of_login(path) && !others(path)) {
        Some(runtime) => runtime.join("vellum"),
        None if own == 0 => "/run/vellum".into(),
        None => PathBuf::from(format!("/tmp/vellum-{own}")),
    }
}

/// The directory for what outlives a boot: in XDG_DATA_HOME, or root's in /var/lib. It may not exist.
pub fn state_directory() -> PathBuf {
    match named_data() {
        None if effective().0 == 0 => "/var/lib/vellum".into(),
        named => named.unwrap_or_else(home_data).join("vellum"),
    }
}

/// The user's data directory, if the environment names one.
fn named_data() -> Option<PathBuf> {
    std::env::var_os("XDG_DATA_HOME").map(PathBuf::from).filter(|path| path.is_absolute())
}

/// The user's data directory, if the environment names none.
fn home_data() -> PathBuf {
    std::env::var_os("HOME").map_or_else(place, |home| PathBuf::from(home).join(".local/share"))
}

/// The same, which is created if it does not exist.
///
/// # Errors
/// As [`make_directory`].
pub fn make_state_directory() -> Result<PathBuf, Error> {
    let path = state_directory();
    private_directory(&path)?;
    Ok(path)
}

/// Whether only this user can create sockets in the directory. False if it does not exist.
fn is_private(path: &Path) -> Result<bool, Error> {
    // Any user can create a directory in /tmp in advance.
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(source) => return Err(Error::Directory { path: path.into(), source }),
    };
    if metadata.uid() != effective().0 {
        return Err(Error::Foreign(path.into()));
    }
    if !metadata.is_dir() {
        return Err(Error::Directory { path: path.into(), source: io::ErrorKind::NotADirectory.into() });
    }
    match metadata.mode() & 0o7777 {
        mode if mode & 0o022 != 0 => Err(Error::Open { path: path.into(), mode }),
        _ => Ok(true),
    }
}

/// Returns the directory for a new socket. Creates it with mode 0700 if it does not exist.
///
/// # Errors
/// Fails if it cannot be created, or if other users could create sockets in it.
pub fn make_directory() -> Result<PathBuf, Error> {
    let path = place();
    private_directory(&path)?;
    Ok(path)
}

fn check(name: &str) -> Result<(), Error> {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > 64 || name.starts_with(['.', '-']) || !name.bytes().all(sound) {
        return Err(Error::Name(name.into()));
    }
    Ok(())
}

/// The socket of the new machine `name`. Creates its directory.
///
/// # Errors
/// As [`make_directory`], or if the name is not valid.
pub fn own_socket(name: &str) -> Result<PathBuf, Error> {
    check(name)?;
    Ok(make_directory()?.join(format!("{name}.sock")))
}

/// The socket of the machine `name`, which may not exist.
///
/// # Errors
/// Fails if another user could have created it, or if the name is not valid.
pub fn socket(name: &str) -> Result<PathBuf, Error> {
    check(name)?;
    let path = place();
    is_private(&path)?;
    Ok(path.join(format!("{name}.sock")))
}

/// The file for the messages of the machine `name`, beside its socket. It may not exist.
///
/// # Errors
/// As [`own_socket`].
pub fn own_log(name: &str) -> Result<PathBuf, Error> {
    Ok(own_socket(name)?.with_file_name(format!("{name}.log")))
}

/// The directory of what belongs to the SSH access of machine `name`, beside its socket. It may not
/// exist.
///
/// # Errors
/// As [`socket`].
pub fn ssh_directory(name: &str) -> Result<PathBuf, Error> {
    Ok(socket(name)?.with_file_name(format!("{name}.ssh")))
}

/// The same, which is created if it does not exist.
///
/// # Errors
/// As [`own_socket`].
pub fn make_ssh_directory(name: &str) -> Result<PathBuf, Error> {
    make_directory()?;
    let path = ssh_directory(name)?;
    private_directory(&path)?;
    Ok(path)
}

/// The directory of what is kept of machine `name` from one run to the next, in the user's data
/// directory (XDG_DATA_HOME). It may not exist.
///
/// # Errors
/// The name is not valid, or no directory outlives a boot.
pub fn kept_directory(name: &str) -> Result<PathBuf, Error> {
    check(name)?;
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".local/share"));
    Ok(named_data().or_else(home).ok_or(Error::NoHome)?.join("vellum").join(name))
}

/// Creates [`kept_directory`], which only this user can read.
///
/// # Errors
/// As [`own_socket`].
pub fn make_kept_directory(name: &str) -> Result<(), Error> {
    private_directory(&kept_directory(name)?)
}

fn private_directory(path: &Path) -> Result<(), Error> {
    if !is_private(path)? {
        let error = |source| Error::Directory { path: path.into(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(error)?;
        is_private(path)?;
    }
    Ok(())
}

/// The socket for what the user typed: a path if it has a slash, otherwise a name.
pub fn find(target: &str) -> Result<PathBuf, Error> {
    if target.contains('/') { Ok(target.into()) } else { socket(target) }
}

/// All names with a socket, sorted.
///
/// # Errors
/// The directory cannot be used.
pub fn all() -> Result<Vec<(String, PathBuf)>, Error> {
    all_with("sock")
}

/// All names of files with this extension in the directory of sockets, sorted.
///
/// # Errors
/// The directory cannot be used.
pub fn all_with(extension: &str) -> Result<Vec<(String, PathBuf)>, Error> {
    let path = place();
    if !is_private(&path)? {
        return Ok(Vec::new());
    }
    let entries = std::fs::read_dir(&path).map_err(|source| Error::Directory { path, source })?;
    let named = |path: PathBuf| Some((Path::new(path.file_name()?).file_stem()?.to_str()?.to_owned(), path));
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut names: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|end| end == extension)).filter_map(named).collect();
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A service of root and a login of root find the same machines.
    #[test]
    fn all_of_root_s_processes_use_one_directory() {
        let of = |own: u32, runtime: &str| {
            place_of(own, Some(runtime).filter(|text| !text.is_empty()).map(PathBuf::from))
        };
        assert_eq!(of(0, ""), Path::new("/run/vellum"));
        assert_eq!([of(0, "/run/user/0"), of(0, "/run/user/0/")], [of(0, ""), of(0, "")]);
        assert_eq!(of(0, "relative"), of(0, ""));
        // Root may name one, and others have theirs.
        assert_eq!(of(0, "/nothing/here"), Path::new("/nothing/here/vellum"));
        assert_eq!(of(7, "/nothing/here"), Path::new("/nothing/here/vellum"));
        assert_eq!(of(7, ""), Path::new("/tmp/vellum-7"));
    }
}
